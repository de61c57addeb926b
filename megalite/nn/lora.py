"""Which linears of a model get low-rank adapters (LoRA), and where in a run their dropout is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from megalite.kernels.chosen import Kernels
from megalite.nn.context import Context
from megalite.nn.experts import Experts
from megalite.parallel.lora import ColumnAdapter, Noise, RowAdapter
from megalite.parallel.tensor import ColumnParallelLinear, FusedColumnParallelLinear, RowParallelLinear

FIELD_NAMES = {
    "q_proj": "*.attention.qkv.q", "k_proj": "*.attention.qkv.k", "v_proj": "*.attention.qkv.v",
    "o_proj": "*.attention.proj", "gate_proj": "*.fc1.gate", "up_proj": "*.fc1.up", "down_proj": "*.fc2", "all": "*",
}  # fmt: skip
"""What Hugging Face's Llama calls the linears of a layer, as patterns of ours; and all of them."""

NAMES = "*.lora.*"
"""The pattern of the names of adapters' parameters."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    rank: int = 0
    """Features between the two matrices of an adapter; 0 trains the model itself, without adapters."""
    alpha: float = 16.0
    """Adapters are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout probability on what enters an adapter."""
    targets: tuple[str, ...] = ("all",)
    """The linears that get one: all, some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or patterns
    of names as in a shell (layers.[0-3].attention.*). Experts have none."""
    separate: bool = False
    """Checkpoints hold the adapters alone; checkpoint.load says where the frozen weights are."""

    def wants(self, path: str) -> bool:
        """Whether the linear with this name in the model gets an adapter."""
        return self.rank > 0 and any(_means(target, path) for target in self.targets)

    def problems(self) -> list[str]:
        """Everything wrong with this section by itself."""
        found = [f"lora.rank={self.rank} must be at least 1, or 0 for no adapters"] if self.rank < 0 else []
        if not 0 < self.alpha < float("inf"):
            found.append(f"lora.alpha={self.alpha} must be finite and above 0")
        if not 0 <= self.dropout < 1:
            found.append(f"lora.dropout={self.dropout} must be in [0, 1)")
        if self.rank > 0 and not self.targets:
            found.append("lora.targets is empty: nothing would learn")
        if self.separate and self.rank == 0:
            found.append("lora.separate=true needs adapters: set lora.rank")
        return found


def _means(target: str, path: str) -> bool:
    return fnmatchcase(path, FIELD_NAMES.get(target, target))


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, layer, its part or "weight") of every linear that can have an adapter, parts of a fused one in order."""
    for path, module in model.named_modules():
        if isinstance(module, FusedColumnParallelLinear):
            yield from ((f"{path}.{part}", module, part) for part in module.names)
        elif isinstance(module, RowParallelLinear) or (isinstance(module, ColumnParallelLinear) and path != "head"):
            yield path, module, "weight"


def add_adapters(model: nn.Module, config: LoRAConfig, kernels: Kernels) -> None:
    """Gives the linears in `model` that `config` names their adapters; a model's parts must have their final places."""
    wanted: dict[nn.Module, list[str]] = {}
    for path, module, part in linears(model):
        if config.wants(path):
            wanted.setdefault(module, []).append(part)
    for module, parts in wanted.items():
        if isinstance(module, FusedColumnParallelLinear | ColumnParallelLinear):
            module.lora = ColumnAdapter(module, parts, config.rank, config.alpha, config.dropout, kernels)
        elif isinstance(module, RowParallelLinear):
            module.lora = RowAdapter(module, config.rank, config.alpha, config.dropout, kernels)
    if config.dropout > 0.0:
        _tell_noise(model)


def _tell_noise(model: nn.Module) -> None:
    """Whatever is called with a context tells the adapters inside it, also when backward computes it again."""
    for module in model.modules():
        adapters = [m for m in module.modules() if isinstance(m, ColumnAdapter | RowAdapter)]
        if adapters and module not in adapters:
            module.register_forward_pre_hook(partial(_hear, adapters))


def _hear(adapters: Sequence[ColumnAdapter | RowAdapter], module: nn.Module, args: tuple[Any, ...]) -> None:
    for context in args:
        if isinstance(context, Context):
            noise = None
            if context.training:
                rows = context.shared.setdefault("token_index", context.batch.token_index)  # one for all layers
                noise = Noise(seed=context.seed, step=context.batch.step, stream=context.token_index, rows=rows)
            for adapter in adapters:
                adapter.noise = noise


def target_problems(model: nn.Module, config: LoRAConfig) -> list[str]:
    """Targets that name no linear of `model`, or what cannot have an adapter."""
    paths = [path for path, _, _ in linears(model)]
    experts = [path for path, module in model.named_modules() if isinstance(module, Experts)]
    found = []
    for target in config.targets:
        if any(_means(target, path) for path in paths):
            continue
        if any(_means(target, f"{path}{name}") for path in experts for name in ("", ".fc1", ".fc2")):
            found.append(f"lora.targets={target} names experts, which cannot have adapters: leave it out")
        else:
            found.append(
                f"lora.targets={target} names no linear of the model; it can be {', '.join(FIELD_NAMES)}, or a pattern"
                f" of names such as {', '.join(paths[:5])}"
            )
    return found
