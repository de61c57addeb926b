"""The state of a small training, for tests that save and load all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import store
from megalite.checkpoint.manifest import Manifest
from megalite.mpu import ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.lr import lr_at
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import Cut, Shard, set_shard, shard_of
from megalite.parallel.wgrad import WeightGradQueue
from tests.parallel.parameters import cut_experts, cut_rows, whole


class Run:
    """A small training state: a tied table, a matrix cut in two runs of rows, a norm, experts, a buffer.

    Gradients are made by step number.
    """

    def __init__(self, mpu: ParallelState, dtype: torch.dtype = torch.bfloat16, width: int = 3, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        table, matrix = (torch.randn(n, width, generator=g).to(dtype) for n in (7, 8))
        self.mpu = mpu
        words = cut_rows("words", table, mpu) if mpu.pp.is_first else cut_rows("head", table, mpu, tied_to="words")
        # gate and up, each cut over tp: a rank holds two runs of rows
        rows = 4 // mpu.tp.size
        runs = tuple((half + mpu.tp.rank * rows, rows) for half in (0, 4))
        local = torch.cat([matrix[start : start + n] for start, n in runs])
        shard = Shard(f"layers.{mpu.pp.rank}.fused", (8, width), (Cut(mpu.tp, 0, runs),))
        fused = set_shard(torch.nn.Parameter(local), shard)
        norm = whole(f"layers.{mpu.pp.rank}.norm", torch.ones(width, dtype=dtype), partial=(mpu.tp,))
        experts = torch.randn(4, 6, width, generator=g).to(dtype)
        fc1 = cut_experts(f"layers.{mpu.pp.rank}.experts", experts, mpu, dim=1)
        self.fractions = set_shard(torch.zeros(4), Shard(f"layers.{mpu.pp.rank}.fractions", (4,)))
        modules = [torch.nn.Identity()]  # so that ZeRO-3 may divide the parameters
        units = [Unit("tied", [words], tied=True, modules=modules), Unit("layer", [fused, norm, fc1], modules=modules)]
        self.data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
        self.config = OptimConfig(lr=0.1, warmup_steps=4, clip_grad=1.0)
        self.optimizer = Optimizer(self.config, [self.data_parallel], mpu)

    def train(self, first: int, last: int) -> list[float]:
        """Steps first .. last; the learning rates used."""
        rates = []
        for step in range(first, last + 1):
            self.data_parallel.zero_grad()
            for bucket in self.data_parallel.buckets:
                bucket.open_grad()
            for i, parameter in enumerate(self.data_parallel.parameters):
                g = torch.Generator().manual_seed(100 * step + 10 * self.mpu.rank + i)
                main_grad(parameter).add_(torch.randn(parameter.shape, generator=g))
            self.data_parallel.finish()
            rates.append(lr_at(self.config, step, 12))
            self.optimizer.step(rates[-1])
            self.fractions += step / 3
        return rates

    def tensors(self) -> dict[str, list[tuple[Shard, Tensor]]]:
        """Everything that a checkpoint keeps."""
        buffers = {"buffer": [(shard_of(self.fractions), self.fractions)]}
        return self.data_parallel.state_tensors() | self.optimizer.state_tensors() | buffers

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        """Saves, with the number of updates in the state."""
        state = {"updates": self.optimizer.steps, "samples": 32 * step}
        return Path(store.save(folder, step, self.tensors(), state, self.mpu, **options))

    def load(self, folder: Path) -> Manifest | None:
        """Loads the latest checkpoint."""
        manifest = store.load_latest(folder, self.tensors(), self.mpu)
        if manifest is not None:
            self.optimizer.steps = manifest.state["updates"]
        return manifest

    def values(self) -> list[Tensor]:
        """Copies of all state."""
        return [t.clone() for of_kind in self.tensors().values() for _, t in of_kind]


def equal_states(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two copies of all state are equal, bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))
