"""Update rules: how a flat run of weights moves, given its gradient.

A rule knows nothing of parameters, units or ranks, and treats every element alike, so it may be given any slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megalite.kernels.adamw import fused_adamw_
from megalite.optim.config import OptimConfig


class UpdateRule(Protocol):
    """Updates `weight` and `moments` in place and leaves `grad` as it is; all are flat, of one dtype and size.

    moments: names of the running averages it keeps, each a tensor like the weights that begins at zero.
    """

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the running averages."""
        ...

    def update(
        self, weight: Tensor, grad: Tensor, moments: Sequence[Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """One step; `step` counts the updates made, this one included."""
        ...


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101), one fused pass."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, beta1: float, beta2: float, eps: float, kernel: Callable[..., None] = fused_adamw_):
        self.beta1, self.beta2, self.eps, self.kernel = beta1, beta2, eps, kernel

    def update(
        self, weight: Tensor, grad: Tensor, moments: Sequence[Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """w <- w (1 - lr decay) - lr m / (sqrt(v) + eps), with bias-corrected moments m, v."""
        exp_avg, exp_avg_sq = moments
        self.kernel(
            weight, grad, exp_avg, exp_avg_sq, lr=lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            weight_decay=weight_decay, step=step,
        )  # fmt: skip


class Sgd:
    """Stochastic gradient descent; with momentum b: m <- b m + g, w <- w - lr m, where g includes decay w."""

    def __init__(self, momentum: float):
        self.momentum = momentum
        self.moments: tuple[str, ...] = ("momentum",) if momentum else ()

    def update(
        self, weight: Tensor, grad: Tensor, moments: Sequence[Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """One step; the gradient itself is not touched."""
        if moments:
            (momentum,) = moments
            momentum.mul_(self.momentum).add_(grad).add_(weight, alpha=weight_decay)
            weight.add_(momentum, alpha=-lr)
        else:
            weight.mul_(1 - lr * weight_decay).add_(grad, alpha=-lr)


def update_rule(config: OptimConfig, adamw: Callable[..., None] = fused_adamw_) -> UpdateRule:
    """The rule that `optim.name` asks for; `adamw` computes a step of AdamW."""
    if config.name == "sgd":
        return Sgd(config.momentum)
    return AdamW(config.beta1, config.beta2, config.eps, adamw)
