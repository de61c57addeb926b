"""Checkpoints: MB/s against raw files of the same bytes, torch.save and torch's distributed checkpoint; async stall.

Every way of saving and loading handles the same float32 tensors (a GPT's parameters, master weights and moments in
miniature) on one rank. A round does each once, in turn, so that all meet the same machine; rates are of the median
round, shares are medians of the rounds' own ratios. Each save ends with an fsync (torch.save gets one that it does not
do itself). Loads go into tensors that exist. "cold" is after the kernel was asked to drop the files' pages; "warm"
right after.

The stall of a save in the background is what the steps of a real training lose: the time inside of `start_save` and
`finished`, and what the steps take longer while a file is written, beyond the copy of the state alone. In units of a
step without any save.

    PYTHONPATH=. python benchmarks/checkpoint.py --mib 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megalite.checkpoint import store
from megalite.checkpoint.background import Snapshot
from megalite.checkpoint.manifest import Tensors, held
from megalite.config import load_config
from megalite.files import output_file, replace_json
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.step import train_step

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
SINGLE = ParallelState.single()
RAW = "raw file"


def make_tensors(mib: int, hidden: int = 1024) -> Tensors:
    """Tensors of about `mib` MiB in all: square matrices and vectors, of three kinds."""
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    layers = max(1, round(mib * 2**20 / (4 * len(kinds) * (4 * hidden * hidden + hidden))))
    shapes = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in _layer(hidden).items()}
    return {kind: [(Shard(name, shape), torch.randn(shape)) for name, shape in shapes.items()] for kind in kinds}


def _layer(hidden: int) -> dict[str, tuple[int, ...]]:
    return {"fc1": (2 * hidden, hidden), "fc2": (hidden, 2 * hidden), "norm": (hidden,)}


class Ways:
    """Each way to save and to load, by name; all write below `folder`."""

    def __init__(self, tensors: Tensors, folder: Path):
        self._tensors, self._folder = tensors, folder
        self._plain = {f"{kind}/{shard.name}": t for kind, of_kind in tensors.items() for shard, t in of_kind}
        self.nbytes = sum(t.nbytes for t in self._plain.values())
        self.saves: dict[str, Callable[[], None]] = {
            RAW: self._raw_save, "megalite": self._our_save, "torch.save": self._torch_save,
            "torch.distributed.checkpoint": self._dcp_save,
        }  # fmt: skip
        self.loads: dict[str, Callable[[], None]] = {
            RAW: self._raw_load, "megalite": self._our_load, "torch.save": self._torch_load,
            "torch.distributed.checkpoint": self._dcp_load,
        }  # fmt: skip

    def clear(self) -> None:
        """Zeroes the tensors, so that a load shows."""
        for tensor in self._plain.values():
            tensor.zero_()

    def sums(self) -> list[float]:
        """What tells the tensors from others."""
        return [float(tensor.double().sum()) for tensor in self._plain.values()]

    def drop_pages(self) -> None:
        """Asks the kernel to forget what it holds of the files."""
        for path in self._folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

    def forget(self) -> None:
        """Removes all files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()

    def _raw_save(self) -> None:
        with (self._folder / "raw").open("wb") as file:
            for tensor in self._plain.values():
                file.write(tensor.numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def _raw_load(self) -> None:
        with (self._folder / "raw").open("rb", buffering=0) as file:
            for tensor in self._plain.values():
                view = tensor.view(-1).view(torch.uint8).numpy().data
                while view:
                    view = view[file.readinto(view) :]

    def _our_save(self) -> None:
        store.save(self._folder / "ours", 1, self._tensors, {}, SINGLE)

    def _our_load(self) -> None:
        store.load(self._folder / "ours", self._tensors, SINGLE)

    def _torch_save(self) -> None:
        with (self._folder / "torch.pt").open("wb") as file:
            torch.save(self._plain, file)
            file.flush()
            os.fsync(file.fileno())

    def _torch_load(self) -> None:
        loaded = torch.load(self._folder / "torch.pt", weights_only=True)
        for name, tensor in self._plain.items():
            tensor.copy_(loaded[name])

    def _dcp_save(self) -> None:
        state: dict[str, Any] = dict(self._plain)
        dcp_save(state, storage_writer=FileSystemWriter(self._folder / "dcp"))

    def _dcp_load(self) -> None:
        dcp_load(dict(self._plain), storage_reader=FileSystemReader(self._folder / "dcp"))


def rates(ways: Ways, rounds: int) -> list[dict[str, Any]]:
    """A row for each way: MB/s of saving and of loading, and as a share of the raw file's in the same round."""
    seconds: dict[str, dict[str, list[float]]] = {what: {name: [] for name in ways.saves} for what in _COLUMNS}
    expected = ways.sums()
    for number in range(rounds + 1):
        found: dict[str, dict[str, float]] = {what: {} for what in _COLUMNS}
        ways.forget()
        names = list(ways.saves)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            found["save"][name] = _timed(ways.saves[name])
        for name in names:
            for what in ("load cold", "load warm"):
                ways.clear()
                if what == "load cold":
                    ways.drop_pages()
                found[what][name] = _timed(ways.loads[name])
                assert ways.sums() == expected, f"{name} has not loaded what it saved"
        if number:  # the first round warms up
            for what, of_names in found.items():
                for name, value in of_names.items():
                    seconds[what][name].append(value)
    return [_row(name, seconds, ways.nbytes) for name in ways.saves]


_COLUMNS = ("save", "load cold", "load warm")


def _row(name: str, seconds: dict[str, dict[str, list[float]]], nbytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"way": name}
    for what in _COLUMNS:
        mine, raw = seconds[what][name], seconds[what][RAW]
        row[f"{what} MB/s"] = nbytes / statistics.median(mine) / 1e6
        row[f"{what} of raw"] = statistics.median(b / a for a, b in zip(mine, raw, strict=True))
    return row


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def stall(folder: Path, *, steps: int, rounds: int, layers: int, hidden: int) -> dict[str, Any]:
    """What a save in the background costs a training on one rank, in steps."""
    config = load_config(["--config", str(CONFIG)])
    model = dataclasses.replace(
        config.model, num_layers=layers, hidden_size=hidden, ffn_hidden_size=None, num_heads=8, num_kv_heads=4
    )
    train = dataclasses.replace(config.train, num_steps=(rounds + 1) * 2 * steps, precision="fp32")
    config = dataclasses.replace(config, model=model, train=train)
    training = build_training(config, SINGLE, torch.device("cpu"))
    checkpoints = RunCheckpoints(config, training, folder)
    views = {f"{piece.key}@{piece.offset}": piece.view for piece in held(state_tensors(training))}
    found: list[dict[str, float]] = []
    step = 0
    for number in range(rounds + 1):
        plain = [_timed(lambda step=step + i: train_step(training, step)) for i in range(steps)]
        step += steps
        usual = statistics.median(plain)
        copy = _copy_seconds(views)
        begin = _timed(lambda step=step: checkpoints.start_save(step))
        during: list[float] = []
        complete, done = 0.0, False
        while not done:
            during.append(_timed(lambda step=step: train_step(training, step)))
            step += 1
            clock = time.perf_counter()
            done = checkpoints.finished(wait=len(during) == steps) is not None
            complete += time.perf_counter() - clock
        slower = sum(seconds - usual for seconds in during)
        if number:
            found.append(
                {
                    "step s": usual, "copy": copy / usual, "start": begin / usual, "complete": complete / usual,
                    "slower steps": slower / usual, "steps in flight": len(during),
                    "stall above the copy": (begin - copy + complete + slower) / usual,
                }
            )  # fmt: skip
    summary = {name: statistics.median(row[name] for row in found) for name in found[0]}
    at_once = statistics.median(_timed(lambda: checkpoints.save(step)) for _ in range(rounds)) / summary["step s"]
    return summary | {"MiB": sum(v.nbytes for v in views.values()) / 2**20, "at once": at_once}


def _copy_seconds(views: dict[str, Tensor]) -> float:
    """The copy alone, into memory that has been used before."""
    snapshot = Snapshot()
    snapshot.take(views)
    return _timed(lambda: snapshot.take(views))


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    parser.add_argument("--steps", type=int, default=6, help="training steps without, and at most with, a save")
    parser.add_argument("--layers", type=int, default=8, help="of the model that trains")
    parser.add_argument("--hidden", type=int, default=512, help="its hidden size")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the tables as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    logging.getLogger("megalite").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = rates(Ways(make_tensors(arguments.mib), Path(folder) / "rates"), arguments.rounds)
        cost = stall(
            Path(folder) / "stall", steps=arguments.steps, rounds=arguments.rounds, layers=arguments.layers,
            hidden=arguments.hidden,
        )  # fmt: skip
    console = Console() if sys.stdout.isatty() else Console(width=150)
    table = Table(title=f"{arguments.mib} MiB on one rank, MB/s (share of the raw file's)")
    for column in ("", *_COLUMNS):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["way"], *(f"{row[f'{what} MB/s']:,.0f} ({row[f'{what} of raw']:.2f})" for what in _COLUMNS))
    console.print(table)
    table = Table("saving while training goes on", "steps")
    for name in ("copy", "start", "complete", "slower steps", "stall above the copy", "at once", "steps in flight"):
        table.add_row(name, f"{cost[name]:.3f}")
    console.print(table, f"a step: {cost['step s']:.3f} s, the state: {cost['MiB']:.0f} MiB")
    if arguments.json is not None:
        replace_json(arguments.json, {"rates": rows, "stall": cost})


if __name__ == "__main__":
    main()
