"""Adapters whose B is not zero, so that every gradient shows; a function that ranks import."""

from __future__ import annotations

from torch import nn

from megalite.parallel import lora
from megalite.parallel.random import normal_


def begin_as_noise() -> None:
    """A and B both begin as noise."""

    def init_parameters(self: lora.LowRankPair, seed: int) -> None:
        for matrix in (self.A, self.B):
            assert isinstance(matrix, nn.Parameter)
            normal_(matrix, seed, 0.2)

    lora.LowRankPair.init_parameters = init_parameters
