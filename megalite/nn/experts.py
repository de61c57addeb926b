"""The experts of one MoE layer on this rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig


class Experts(nn.Module):
    """SwiGLU experts: fc1 [E, 2 f, h] (gate rows first), fc2 [E, h, f], cut by ep on dim 0, by etp on f."""

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()

    def forward(self, tokens: Tensor, probs: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens [n, h] sorted by local expert, probs [n] -> [n, h], each row times its prob."""
        raise NotImplementedError
