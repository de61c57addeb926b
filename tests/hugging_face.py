"""Hugging Face's own models in float64, with what they compute in float32, whatever the dtype of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def float64() -> Iterator[None]:
    """Inside, tensors are float64 by default and float32 does not exist: build and run models in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def fill(module: torch.nn.Module, seed: int = 0, std: float = 0.3) -> None:
    """Random weights, of norms and biases too: none of them may hide."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * std + (1.0 if parameter.dim() == 1 else 0.0))


def assert_equal(ours: Tensor | None, theirs: Tensor | None, name: str = "") -> None:
    """Equal to 1e-10 of the largest element; a gradient that is missing is equal to none."""
    assert ours is not None and theirs is not None, f"{name}: nothing to compare"
    assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    assert ours.dtype == theirs.dtype == torch.float64, f"{name}: {ours.dtype} and {theirs.dtype}"
    ours, theirs = ours.detach(), theirs.detach()
    scale = float(theirs.abs().max())
    assert scale > 0.0, f"{name}: nothing to compare"
    worst = float((ours - theirs).abs().max()) / scale
    assert worst < 1e-10, f"{name}: off by {worst:.1e}"
