"""The dynamic loss scale of fp16 (Micikevicius et al., 2017, arXiv:1710.03740)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megalite.optim.config import OptimConfig

_LARGEST = 2.0**64
"""A gradient of zeros never overflows; the scale must still fit into float32 with room for the loss."""


@dataclass
class LossScaler:
    """What the gradient is multiplied by, so that small values survive fp16: as large as does not overflow.

    After `loss_scale_growth_interval` good steps in a row the scale grows. An overflow uses up one of
    `loss_scale_hysteresis` lives; without any left it shrinks the scale, and only growth gives lives back. Every rank
    is told the same and so holds the same scale.
    """

    config: OptimConfig
    scale: float
    good_steps: int = 0
    lives: int = 0

    @staticmethod
    def fresh(config: OptimConfig) -> LossScaler:
        """At the beginning of a run."""
        return LossScaler(config, config.initial_loss_scale, lives=config.loss_scale_hysteresis)

    @property
    def at_floor(self) -> bool:
        """Whether the scale can shrink no more."""
        return self.scale <= self.config.min_loss_scale

    def update(self, *, overflow: bool) -> None:
        """Moves the scale after a step with it."""
        config = self.config
        if overflow:
            self.good_steps, self.lives = 0, max(self.lives - 1, 0)
            if not self.lives:
                self.scale = max(self.scale * config.loss_scale_backoff, config.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps >= config.loss_scale_growth_interval:
            self.scale = min(self.scale * config.loss_scale_growth, _LARGEST)
            self.good_steps, self.lives = 0, config.loss_scale_hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from `state`."""
        self.scale = float(state["scale"])
        self.good_steps, self.lives = int(state["good_steps"]), int(state["lives"])
