"""What the optimizer is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megalite.optim.groups import Group


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning-rate schedule and what happens to gradients before the update."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Update rule: adamw, sgd (with momentum when momentum > 0), or muon (matrices; adamw the rest, at the same lr)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay, and the floor of inverse_sqrt."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after the warm-up; wsd stays at the peak and decays over the last wsd_decay_steps only."""
    schedule_unit: Literal["steps", "samples"] = "steps"
    """What warmup_steps, decay_steps and wsd_decay_steps count: optimizer steps, or samples."""
    warmup_steps: int = 0
    """Length of the linear rise from 0 to the peak."""
    decay_steps: int | None = None
    """Where the decay ends, counted from the first step (the warm-up included); the length of the run by default."""
    wsd_decay_steps: int | None = None
    """Length of the final decay of wsd; a tenth of decay_steps by default."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the final decay of wsd."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.999
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: float = 0.0
    """Momentum of sgd."""
    muon_momentum: float = 0.95
    """Momentum of muon."""
    muon_exclude: tuple[str, ...] = ("embedding.*", "positions.*", "head.*", "*.router.*", "*.conv")
    """Matrices that muon leaves to adamw, by patterns of global names."""
    weight_decay: float = 0.01
    """Weight decay, never on biases and norms: decoupled in adamw and muon, added to the gradient in sgd."""
    clip_grad: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 turns clipping off."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A gradient with a nan or an infinity ends the run, or its step is left out; every rank does the same."""
    post_validation: bool = False
    """Update the weights of a pipeline rank as soon as its own gradients are there, before the global norm is known;
    an update that clipping or a non-finite value forbids is undone and done again. The result is the same, bit for bit.
    Costs a copy of weights and optimizer state."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """Float32 weights that are updated beside those of a bf16 or fp16 model, which are rounded from them. none saves
    4 bytes a parameter: bf16 weights are updated as they are."""
    stochastic_rounding: bool = True
    """Without master weights, round an updated weight up or down by chance (a hash, the same on every layout). Rounding
    to nearest loses every update below half a bf16 step."""
    groups: tuple[str, ...] = ()
    """Parameters with settings of their own, PATTERN:lr=FACTOR,weight_decay=VALUE (either one): a pattern of global
    names as in a shell, what the learning rate is multiplied by, and their decay. The first that matches counts."""
    initial_loss_scale: float = 65536.0
    """What fp16 gradients are multiplied by in the first step; a power of two."""
    loss_scale_growth_interval: int = 1000
    """Steps without an overflow after which the loss scale grows."""
    loss_scale_growth: float = 2.0
    """Factor by which it grows."""
    loss_scale_backoff: float = 0.5
    """Factor by which an overflow shrinks it; the step is left out."""
    loss_scale_hysteresis: int = 2
    """Overflows since the last growth from which on each one shrinks the scale; 1 is from the first one on."""
    min_loss_scale: float = 1.0
    """An overflow at this scale ends the run."""
    offload: str = "none"
    """Where the optimizer state lives; only none (with the parameters) so far."""

    def problems(self) -> list[str]:
        """Everything wrong with this section."""
        found = [
            f"optim.{name}={value} must be at least {least}"
            for name, value, least in (
                ("lr", self.lr, 0), ("min_lr", self.min_lr, 0), ("warmup_steps", self.warmup_steps, 0),
                ("decay_steps", self.decay_steps, 1), ("wsd_decay_steps", self.wsd_decay_steps, 1),
                ("eps", self.eps, 0), ("weight_decay", self.weight_decay, 0), ("clip_grad", self.clip_grad, 0),
            )
            if value is not None and (value < least or not math.isfinite(value))
        ]  # fmt: skip
        found += [
            f"optim.{name}={value} must be in [0, 1)"
            for name in ("beta1", "beta2", "momentum", "muon_momentum")
            for value in [getattr(self, name)]
            if not 0 <= value < 1
        ]
        if self.min_lr > self.lr >= 0:
            found.append(f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}; the rate decays from lr to min_lr")
        return found + self._scale_problems() + self._group_problems() + self._length_problems()

    def _scale_problems(self) -> list[str]:
        found = []
        for name in ("initial_loss_scale", "loss_scale_growth", "loss_scale_backoff", "min_loss_scale"):
            value = getattr(self, name)
            if not (0 < value < math.inf and math.frexp(value)[0] == 0.5):
                found.append(f"optim.{name}={value} must be a power of two, so that scaling rounds nothing")
        for name in ("loss_scale_growth_interval", "loss_scale_hysteresis"):
            if getattr(self, name) < 1:
                found.append(f"optim.{name}={getattr(self, name)} must be at least 1")
        if self.loss_scale_growth < 1 or self.loss_scale_backoff >= 1:
            found.append(
                f"optim.loss_scale_growth={self.loss_scale_growth} must be at least 1, and"
                f" loss_scale_backoff={self.loss_scale_backoff} below 1"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            found.append(
                f"optim.min_loss_scale={self.min_loss_scale} is above initial_loss_scale={self.initial_loss_scale}"
            )
        return found

    def _group_problems(self) -> list[str]:
        found = []
        for text in self.groups:
            try:
                Group.parse(text)
            except ValueError as error:
                found.append(f"optim.groups: {text!r} is not PATTERN:lr=FACTOR,weight_decay=VALUE: {error}")
        return found

    def _length_problems(self) -> list[str]:
        end, warmup = self.decay_steps, self.warmup_steps
        if end is None or self.schedule in ("constant", "inverse_sqrt"):
            return []
        if warmup > end:
            return [f"optim.warmup_steps={warmup} is longer than optim.decay_steps={end}, which includes the warm-up"]
        final = self.wsd_decay_steps
        if self.schedule == "wsd" and final is not None and warmup + final > end:
            return [
                f"optim.warmup_steps={warmup} + wsd_decay_steps={final} is more than optim.decay_steps={end};"
                f" wsd_decay_steps can be up to {end - warmup}"
            ]
        return []
