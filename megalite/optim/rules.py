"""Update rules: how a flat run of weights moves, given its gradient, or a matrix.

A rule knows nothing of parameters, units or ranks. One that treats every element alike may be given any slice; one of
matrices is given them whole, wherever their slices lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from megalite.kernels.adamw import fused_adamw_
from megalite.optim.config import OptimConfig
from megalite.parallel.shard import Shard


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


class MatrixRule(Protocol):
    """Updates matrices: w <- w (1 - lr decay) - lr step(direction of the gradient).

    moments: as those of an `UpdateRule`, flat slices like the weights.
    """

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the running averages."""
        ...

    def direction(self, grad: Tensor, moments: Sequence[Tensor]) -> Tensor:
        """What the matrices are made of, from any slice of them; updates `moments`, leaves `grad` as it is."""
        ...

    def step(self, matrix: Tensor) -> Tensor:
        """[.., m, n] -> the same: what a whole matrix (or each of several) moves by, times -lr."""
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


class Muon:
    """Momentum, orthogonalised (Jordan, 2024, kellerjordan.github.io/posts/muon), to the size of an AdamW step (Liu et
    al., 2025, arXiv:2502.16982)."""

    moments = ("momentum",)

    def __init__(self, momentum: float):
        self.momentum = momentum

    def direction(self, grad: Tensor, moments: Sequence[Tensor]) -> Tensor:
        """Nesterov's momentum."""
        (momentum,) = moments
        momentum.mul_(self.momentum).add_(grad)
        return torch.add(grad, momentum, alpha=self.momentum)

    def step(self, matrix: Tensor) -> Tensor:
        """0.2 sqrt(max(m, n)) times the nearest matrix with orthogonal rows or columns, nearly."""
        return orthogonalize(matrix).mul_(0.2 * max(matrix.shape[-2:]) ** 0.5)


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """[.., m, n] with its singular values brought near 1, between about 0.7 and 1.2, by a Newton-Schulz iteration.

    The quintic a x + b x^3 + c x^5 is Jordan's (2024): steep at zero, so that few steps do.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT.contiguous() if tall else x


def matrix_rule(config: OptimConfig) -> MatrixRule | None:
    """The rule of matrices that `optim.name` asks for, if it has one."""
    return Muon(config.muon_momentum) if config.name == "muon" else None


def is_matrix(shard: Shard, config: OptimConfig) -> bool:
    """Whether the rule of matrices updates this parameter; the other rule updates the rest."""
    if config.name != "muon" or len(shard.shape) < 2 or min(shard.shape[-2:]) == 1:
        return False
    name = shard.tied_to or shard.name
    return not any(fnmatchcase(name, pattern) for pattern in config.muon_exclude)


def update_rule(config: OptimConfig, adamw: Callable[..., None] = fused_adamw_) -> UpdateRule:
    """The rule of single elements that `optim.name` asks for; beside muon it is AdamW, computed by `adamw`."""
    if config.name == "sgd":
        return Sgd(config.momentum)
    return AdamW(config.beta1, config.beta2, config.eps, adamw)
