"""The promise, checked: one reference rank against any layout, in float64, tensor by tensor.

The reference run leaves its numbers in a file. A layout's ranks run the same steps and compare the pieces of the
global model that they own with it, so that no rank ever gathers the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.config import Config
from megalite.data.rows import SampleSource
from megalite.data.sampler import RaggedMasks
from megalite.layout import Layout
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard, shard_of
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import Training, train_step

OPTIMIZERS = ("sgd", "adamw", "muon")
"""The first two in every proof, the last one where the config names it."""
SCALARS = ("loss", "grad_norm", "tokens")
TOLERANCE = 1e-9
WrapData = Callable[[SampleSource, int], SampleSource]
_NOISE = 1e-6
"""A tensor that is far smaller than the largest one (a key bias has no gradient at all) is measured against this."""


@dataclass(frozen=True)
class LayoutDifference:
    """Largest relative difference of a layout from one rank, by kind; `first_diff` names the first too large."""

    layout: str
    loss: float
    grads: float
    grad_norm: float
    weights: float
    first_diff: str | None
    seconds: float = field(compare=False, default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every kind is within the tolerance."""
        return self.first_diff is None

    def as_row(self) -> dict[str, object]:
        """The row of the JSON report."""
        row: dict[str, object] = dataclasses.asdict(self)
        return row | {"pass": self.passed}


def prove_layouts(
    config: Config,
    layouts: Sequence[Layout],
    world: World,
    folder: Path,
    *,
    num_steps: int = 2,
    timeout: float = 600.0,
    setup: Callable[[], None] | None = None,
    wrap_data: WrapData = RaggedMasks,
    on_start: Callable[[str], None] = lambda name: None,
) -> Iterator[LayoutDifference]:
    """Runs `num_steps` steps of AdamW, and one fewer of SGD, on one rank and each layout; yields the differences.

    If the config names another rule, that one, too. Everything is float64 with ragged loss masks; gradients are
    compared before clipping. `folder` keeps the references, one for a config: a second proof of the same one finds it
    there. The config's own model runs; only the layout and the micro-batch size change. Each rank calls `setup` (a
    function at the top of a module) first, for example to add an architecture to `MODELS`. `wrap_data`, another one,
    makes what is trained on from the dataset and the seed.
    """
    config = proof_config(config, num_steps)
    alone = Layout().apply(config)
    reference = folder / f"reference-{_digest(alone, num_steps, setup, wrap_data)}.safetensors"
    if not reference.exists():
        on_start("one rank")
        world.run(_record, setup, wrap_data, alone, num_steps, reference, ranks=1, timeout=timeout)
    for layout in layouts:
        on_start(str(layout))
        begin = time.monotonic()
        applied = layout.apply(config)
        reports = world.run(
            _compare,
            setup,
            wrap_data,
            applied,
            num_steps,
            reference,
            layout=applied.parallel,
            ranks=layout.num_ranks,
            timeout=timeout,
        )
        yield _merge(str(layout), reports, reference, time.monotonic() - begin)


def proof_config(config: Config, num_steps: int) -> Config:
    """`config` in float64, for a short run in which every step moves: constant learning rate, and momentum in SGD.

    Adam divides by the size of the gradient: where that is zero but for rounding (a key bias), it would raise the
    rounding by 1 / eps to the size of a step, so eps is at least 1e-3 here.
    """
    optim = config.optim
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train, precision="fp64", device="cpu", num_steps=num_steps, reduce_dtype="main"
        ),
        optim=dataclasses.replace(
            optim, schedule="constant", warmup_steps=0, momentum=max(optim.momentum, 0.5), eps=max(optim.eps, 1e-3)
        ),
    )


def _digest(config: Config, num_steps: int, *functions: Callable[..., Any] | None) -> str:
    """What the numbers of a run on one rank depend on, in a few letters."""
    names = [f"{function.__module__}.{function.__qualname__}" for function in functions if function is not None]
    return hashlib.sha256(repr((config, num_steps, names)).encode()).hexdigest()[:16]


def _steps(
    config: Config, mpu: ParallelState, num_steps: int, wrap_data: WrapData
) -> Iterator[tuple[str, Training, dict[str, float]]]:
    """(label, training after the step, its scalars) for every step of each optimizer."""
    for optimizer in dict.fromkeys((*OPTIMIZERS[:2], config.optim.name)):
        # The first gradients of all rules are the same ones: to compare the weights that SGD makes of them is enough.
        optim = dataclasses.replace(config.optim, name=optimizer)
        training = build_training(
            dataclasses.replace(config, optim=optim),
            mpu,
            torch.device("cpu"),
            wrap_data=lambda data: wrap_data(data, config.train.seed),
        )
        for step in range(max(1, num_steps - 1) if optimizer == OPTIMIZERS[0] else num_steps):
            result = train_step(training, step)
            loss = result.loss + sum(result.losses_ahead)  # each of them is the same on all layouts
            scalars = {"loss": loss, "grad_norm": result.grad_norm, "tokens": float(result.num_tokens)}
            yield f"{optimizer} step {step + 1}", training, scalars


def _tensors(training: Training) -> Iterator[tuple[str, Shard, Tensor]]:
    """(kind, place, value) of gradients before clipping, of weights and of buffers, as far as this rank keeps them."""
    for data_parallel in training.data_parallels.values():
        for shard, grad in data_parallel.gradients():
            yield "grads", shard, grad
        for shard, weight in data_parallel.weights():
            yield "weights", shard, weight
    for buffer in _buffers(training):
        yield "weights", shard_of(buffer), buffer


def _buffers(training: Training) -> Iterator[Tensor]:
    """What moves without a gradient on this rank: buffers that have a place in the model."""
    for stage in training.stages.values():
        for buffer in stage.buffers():
            if getattr(buffer, "shard", None) is not None:
                yield buffer


def _name(shard: Shard) -> str:
    """The name in the reference; a tied copy is compared with the original."""
    return shard.tied_to or shard.name


def _record(
    mpu: ParallelState,
    setup: Callable[[], None] | None,
    wrap_data: WrapData,
    config: Config,
    num_steps: int,
    path: Path,
) -> None:
    """Writes the reference: scalars, every gradient and every stepped weight."""
    if setup is not None:
        setup()
    found: dict[str, Tensor] = {}
    for label, training, scalars in _steps(config, mpu, num_steps, wrap_data):
        found |= {f"{label}/{name}": torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
        for kind, shard, value in _tensors(training):
            found[f"{label}/{kind}/{_name(shard)}"] = value.detach().clone()
    partial = path.with_suffix(".partial")
    save_file(found, partial)
    partial.rename(path)


@dataclass
class _RankReport:
    """Absolute differences by tensor, and how many of its elements this rank owns and has compared."""

    difference: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)

    def add(self, label: str, shard: Shard, local: Tensor, mpu: ParallelState, reference: Any) -> None:
        """Compares `local`, what this rank has of `shard`, with the reference."""
        key = f"{label}/{_name(shard)}"
        difference = _difference(shard, local, reference.get_slice(key))
        self.difference[key] = max(self.difference.get(key, 0.0), difference)
        self.elements[key] = self.elements.get(key, 0) + (local.numel() if shard.is_saver(mpu) else 0)


def _compare(
    mpu: ParallelState,
    setup: Callable[[], None] | None,
    wrap_data: WrapData,
    config: Config,
    num_steps: int,
    path: Path,
) -> _RankReport:
    if setup is not None:
        setup()
    report = _RankReport()
    with safe_open(path, framework="pt") as reference:
        for label, training, scalars in _steps(config, mpu, num_steps, wrap_data):
            for name, value in scalars.items():
                key = f"{label}/{name}"
                report.difference[key] = _finite(value - float(reference.get_tensor(key)))
                report.elements[key] = 1
            for kind, shard, value in _tensors(training):
                report.add(f"{label}/{kind}", shard, value.detach(), mpu, reference)
    return report


def _difference(shard: Shard, local: Tensor, whole: Any) -> float:
    """max|a - b| over the pieces of the global tensor that `local` holds."""
    worst = 0.0
    for offset, sizes, view in shard.pieces(local):
        expected = whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]
        worst = max(worst, _finite((view - expected).abs().max().item()) if view.numel() else 0.0)
    return worst


def _finite(difference: float) -> float:
    """|difference|; what is not a number differs by infinity (a nan would pass every comparison)."""
    return abs(difference) if math.isfinite(difference) else math.inf


def _merge(name: str, reports: Sequence[_RankReport], path: Path, seconds: float) -> LayoutDifference:
    """Relative differences by kind over all ranks; a tensor whose elements have not one owner each differs, too."""
    worst = dict.fromkeys(("loss", "grads", "grad_norm", "weights"), 0.0)
    first = None
    with safe_open(path, framework="pt") as reference:
        sizes = {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118 (not a dict)
    largest = _largest(sizes)
    for key in sorted(sizes, key=_order):
        whole, kind = sizes[key], key.split("/")[1]
        scale = max(float(whole.abs().max()) if whole.numel() else 0.0, _NOISE * largest[_family(key)])
        difference = max((r.difference.get(key, 0.0) for r in reports), default=0.0) / max(scale, 1e-300)
        compared = sum(r.elements.get(key, 0) for r in reports)
        if compared != whole.numel() * (len(reports) if kind in SCALARS else 1) or not bool(whole.isfinite().all()):
            difference = math.inf
        if kind in worst:
            worst[kind] = max(worst[kind], difference)
        if difference > TOLERANCE and first is None:
            first = f"{key} ({difference:.1e})"
    return LayoutDifference(name, worst["loss"], worst["grads"], worst["grad_norm"], worst["weights"], first, seconds)


def _order(key: str) -> tuple[int, str, int]:
    """As things happen: SGD before AdamW, step by step, loss and gradients before what follows from them."""
    label, kind = key.split("/")[:2]
    kinds = ("tokens", "loss", "grads", "grad_norm", "weights")
    return OPTIMIZERS.index(label.split()[0]), label, kinds.index(kind)


def _family(key: str) -> str:
    """Step and kind of a tensor: what its noise is measured within."""
    return "/".join(key.split("/")[:2])


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, tensor in tensors.items():
        value = float(tensor.abs().max()) if tensor.numel() else 0.0
        found[_family(key)] = max(found.get(_family(key), 0.0), value)
    return found
