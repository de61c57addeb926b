"""Tests of parallel code, shipped for users' own layers: a world of ranks and layout-equivalence checks."""

from megalite.testing.parity import ParityError, check_parallel_module
from megalite.testing.world import RankFailure, World

__all__ = ["ParityError", "RankFailure", "World", "check_parallel_module"]
