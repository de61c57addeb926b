"""Router logits of chosen steps, in the run folder: written by a run on any layout, read by tools/route_lab.py.

    router_logits/step_00000010/layer_003.safetensors

A file holds one layer of one global batch, in the order of the samples: `logits` [rows, seq_len, num_experts] as the
router computed them (jitter included, expert bias not), `mask` bool [rows, seq_len] (False on padding), `samples` int64
[rows] (absolute numbers) and `expert_bias` [num_experts] as it was in the step. Its metadata hold the step, the layer
and the model's MoE fields and hidden_size. Which ranks computed what leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megalite.data.batch_sizes import BatchSizes
from megalite.files import replace_bytes
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig, MoEConfig
from megalite.nn.context import Context
from megalite.nn.router import Router, tokens_are_cut
from megalite.parallel.collectives import sequence_part
from megalite.train.callbacks import Callback
from megalite.train.metrics import Speed, StepMetrics


@dataclass(frozen=True)
class _Piece:
    """The logits [tokens, num_experts] of a micro-batch on one rank, by token number within the global batch."""

    index: Tensor
    logits: Tensor
    valid: Tensor


class RouterRecorder(Callback):
    """Writes the router logits of `steps` (counted from 1) into `folder`; every rank has this callback.

    It computes them a second time, from the router's input, so that runs without it do nothing for it.
    """

    def __init__(
        self,
        folder: Path,
        steps: Iterable[int],
        routers: Sequence[Router],
        config: ModelConfig,
        mpu: ParallelState,
        *,
        sizes: BatchSizes,
        seq_len: int,
        dtype: torch.dtype,
    ):
        self._folder, self._steps, self._routers = folder, frozenset(steps), routers
        self._config, self._mpu = config, mpu
        self._sizes, self._seq_len = sizes, seq_len
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._hooks: list[RemovableHandle] = []
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._biases: dict[int, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Listens to the routers if it is the turn of `step`."""
        if step not in self._steps:
            return
        self._pieces = {}
        self._biases = {router.layer: router.expert_bias.detach().cpu().clone() for router in self._routers}
        self._hooks = [router.register_forward_hook(partial(self._hear, step - 1)) for router in self._routers]

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Puts the layers together, one by one, and writes them."""
        if metrics.step not in self._steps:
            return
        for hook in self._hooks:
            hook.remove()
        biases = {layer: bias for part in self._mpu.pp.gather_objects(self._biases) for layer, bias in part.items()}
        for layer in self._config.all_layers:
            if self._config.is_moe_layer(layer):
                self._write(metrics.step, layer, biases[layer])
        self._pieces = {}

    @torch.no_grad()
    def _hear(self, step: int, router: Router, inputs: tuple[Tensor, Context], _: object) -> None:
        """A router has run: in a recompute it says the same again."""
        x, context = inputs
        batch = context.batch
        if not context.training or batch.step != step:
            return
        valid = (
            batch.token_mask if batch.token_mask is not None else torch.ones_like(batch.token_index, dtype=torch.bool)
        )
        index = batch.token_index - self._sizes.before(step) * self._seq_len
        # Padding to a length that ranks divide lies beyond the row, and would take the place of the next one's tokens.
        inside = (batch.row_places < batch.row_length).expand_as(index)
        if router.cut is not None:
            index, valid, inside = (sequence_part(whole, router.cut, True) for whole in (index, valid, inside))
        inside = inside.flatten()
        logits = router.logits(x, context).flatten(0, 1)[inside]
        self._pieces[router.layer, batch.index] = _Piece(index.flatten()[inside], logits, valid.flatten()[inside])

    def _write(self, step: int, layer: int, bias: Tensor) -> None:
        pieces = [piece for (of, _), piece in self._pieces.items() if of == layer]
        device = self._routers[0].weight.device if self._routers else self._mpu.world.device
        rows = self._sizes.of(step - 1)
        # Each token was routed on one rank; sums with zeros are exact. The last column says which tokens count.
        board = torch.zeros(rows * self._seq_len, self._config.num_experts + 1, dtype=self._dtype, device=device)
        for piece in pieces:
            board[piece.index] = torch.cat((piece.logits, piece.valid[:, None].to(self._dtype)), 1)
        tokens_over = self._mpu.tp_dp_cp if tokens_are_cut(self._mpu) else self._mpu.dp_cp
        board = self._mpu.pp.all_reduce(tokens_over.all_reduce(board))
        if not self._mpu.world.is_first:
            return
        board = board.cpu().view(rows, self._seq_len, -1)
        tensors = {
            "logits": board[..., :-1].contiguous(),
            "mask": board[..., -1] > 0,
            "samples": torch.arange(rows) + self._sizes.before(step - 1),
            "expert_bias": bias,
        }
        moe = {field.name: getattr(self._config, field.name) for field in fields(MoEConfig)}
        metadata = {"step": str(step), "layer": str(layer), "hidden_size": str(self._config.hidden_size)}
        folder = self._folder / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        content = save(tensors, metadata | {"moe": json.dumps(moe)})
        replace_bytes(folder / f"layer_{layer:03d}.safetensors", content)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """The router logits of one layer in one step; see the module for shapes."""

    step: int
    layer: int
    hidden_size: int
    moe: MoEConfig
    logits: Tensor
    mask: Tensor
    samples: Tensor
    expert_bias: Tensor


def recorded_files(path: Path) -> dict[int, list[Path]]:
    """The files under `path` (router_logits, a run folder or one step's folder) by layer, in the order of steps."""
    found: dict[int, list[Path]] = {}
    for file in sorted(path.rglob("step_*/layer_*.safetensors") if _holds_steps(path) else path.glob("layer_*")):
        found.setdefault(int(file.stem.removeprefix("layer_")), []).append(file)
    return dict(sorted(found.items()))


def _holds_steps(path: Path) -> bool:
    return not any(path.glob("layer_*.safetensors"))


def read_recording(file: Path) -> Recording:
    """One file of `RouterRecorder`."""
    with safe_open(file, "pt") as opened:
        metadata: dict[str, Any] = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in ("logits", "mask", "samples", "expert_bias")}
    return Recording(
        step=int(metadata["step"]),
        layer=int(metadata["layer"]),
        hidden_size=int(metadata["hidden_size"]),
        moe=MoEConfig(**json.loads(metadata["moe"])),
        **tensors,
    )
