"""Checkpoints from any layout to any other: random pairs, compared with one rank that was never interrupted."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import store
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.manifest import Held, Manifest, held
from megalite.checkpoint.reading import find, read_tensors
from megalite.config import Config, check
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")
SAVED, LAST = 2, 4
"""The step at which a run moves, and its end."""

DENSE, MOE = ("llama", "tied-llama", "gpt2"), ("moe", "moe-bias")
_PARTS = {
    "tp": ("", "", "tp2", "tp2+sp", "tp4", "tp4+sp"),
    "pp": ("", "", "pp2", "pp2:gpipe", "pp2v2:interleaved", "pp2:zb_h1", "pp2:zb_v", "pp2:dualpipe", "pp3", "pp4"),
    "cp": ("", "", "", "cp2:ring", "cp2:all_gather", "cp2:ulysses"),
    "dp": ("", "dp2", "dp4", "dp3"),
    "zero": ("", "zero1", "zero2", "zero3"),
}
_EXPERTS = ("ep2", "ep4", "etp2", "ep2+etp2", "")


def _layouts(model: str, generator: random.Random) -> Iterator[str]:
    """Random layouts of at most 8 ranks in which a model runs, without end."""
    config = config_for(model, "nowhere", Path("nowhere"), num_steps=LAST, micro_batch_size=1, global_batch_size=24)
    while True:
        parts = [generator.choice(values) for values in _PARTS.values()]
        parts += [generator.choice(_EXPERTS)] if model in MOE else []
        text = "+".join(part for part in parts if part)
        try:
            layout = parse_layout(text)
            if 1 < layout.num_ranks <= 8:
                check(layout.apply(config), layout.num_ranks)
                yield text
        except ValueError:
            continue


def _pairs(models: tuple[str, ...], count: int, seed: int) -> list[tuple[str, str, str]]:
    """(model, layout that saves, layout that loads)."""
    generator = random.Random(seed)
    layouts = {model: _layouts(model, generator) for model in models}
    names = [models[i % len(models)] for i in range(count)]
    return [(model, next(layouts[model]), next(layouts[model])) for model in names]


COVER = [
    ("moe-bias", "pp2:zb_v+ep2+zero2", "ep4+etp2+dp4+tp2+zero3"),
]
FULL = [
    ("llama", "tp2+pp2+dp2+zero1", "tp2+dp2+zero3"),
    *_pairs(DENSE, 24, seed=1),
    *_pairs(MOE, 24, seed=2),
]
CODES = [
    ("gpt2", "pp2v2:interleaved+dp3+zero3", "tp4+sp+dp2+zero1"),
    ("moe", "ep2+etp2+dp4+zero3", "tp2+cp2:ring+pp2"),
    *FULL[::8],
]


def _rows(cover: list[tuple[str, str, str]]) -> list[object]:
    rest = [pytest.param(*row, marks=pytest.mark.full, id="-".join(row)) for row in FULL if row not in cover]
    return [*(pytest.param(*row, id="-".join(row)) for row in cover), *rest]


def _config(model: str, tokens: str, folder: Path) -> Config:
    config = config_for(
        model, tokens, folder / "cache", num_steps=LAST, precision="fp64", micro_batch_size=1, global_batch_size=24
    )
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=1))


def _steps(mpu: ParallelState, config: Config, folder: str, first: int, last: int) -> list[tuple[float, float, int]]:
    """(loss, gradient norm, samples) of steps first .. last - 1, from the checkpoint at `first`, with one at `last`."""
    training = build_training(config, mpu, CPU)
    checkpoints = RunCheckpoints(config, training, Path(folder))
    if first:
        assert checkpoints.load(Path(folder)) == first
    results = [train_step(training, step) for step in range(first, last)]
    checkpoints.save(last)
    return [(result.loss, result.grad_norm, result.sample_fingerprint) for result in results]


def _whole(folder: Path) -> dict[str, Tensor]:
    """The global tensors of a checkpoint, float64."""
    place = folder_at(folder)
    manifest = Manifest.read(place)
    tensors: dict[str, Tensor] = {}
    pieces: list[Held] = []
    for key, entry in manifest.tensors.items():
        tensors[key] = torch.full(entry.shape, torch.nan, dtype=getattr(torch, entry.dtype))
        pieces.append(Held(key, Shard(key, entry.shape), (0,) * len(entry.shape), entry.shape, tensors[key]))
    read_tensors(place, manifest, [(piece, overlap) for piece in pieces for overlap in find(manifest, piece)])
    return {key: tensor.double() for key, tensor in tensors.items()}


@pytest.mark.parametrize(("model", "there", "here"), _rows(COVER))
def test_a_run_that_moves_is_the_run_of_one_rank(
    model: str, there: str, here: str, tokens: str, references: Path, tmp_path: Path, world: World
) -> None:
    """Losses, gradient norms and the whole state: parameters, moments (which are sums of gradients), buffers."""
    config = _config(model, tokens, references)
    alone = references / f"round trip {model}"
    if not (alone / "checkpoints" / "latest").exists():
        (results,) = world.run(_steps, config, str(alone), 0, LAST, ranks=1)
        (alone / "results.json").write_text(json.dumps(results))
    expected = json.loads((alone / "results.json").read_text())
    found = []
    for text, first, last in ((there, 0, SAVED), (here, SAVED, LAST)):
        layout = parse_layout(text)
        applied = layout.apply(config)
        results = world.run(
            _steps, applied, str(tmp_path / "run"), first, last,
            layout=applied.parallel, ranks=layout.num_ranks, timeout=180.0,
        )  # fmt: skip
        assert all(of_rank == results[0] for of_rank in results)
        found += results[0]
    for (loss, norm, samples), (a, b, c) in zip(expected, found, strict=True):
        assert (loss, norm) == (pytest.approx(a, rel=1e-9), pytest.approx(b, rel=1e-9)) and samples == c
    one, other = (_whole(folder / "checkpoints" / store.step_name(LAST)) for folder in (alone, tmp_path / "run"))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        scale = max(float(tensor.abs().max()), 1e-9)
        assert float((other[key] - tensor).abs().max()) < 1e-9 * max(scale, 1e-3), key


@pytest.mark.parametrize(
    ("optimizer", "there", "here"),
    [
        ("muon", "dp2+zero1", "tp2+dp2+zero3"),
        pytest.param("sgd", "dp2+zero3", "pp2+dp2+zero1", marks=pytest.mark.full),
        pytest.param("muon", "tp2+pp2:zb_v", "dp3+zero2", marks=pytest.mark.full),
    ],
)
def test_every_optimizer_moves(
    optimizer: str, there: str, here: str, tokens: str, tmp_path: Path, world: World
) -> None:
    """What ZeRO has cut is whole again in the weights that the first loss after the load sees."""
    config = _config("llama", tokens, tmp_path)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=optimizer, momentum=0.9))
    expected = world.run(_steps, config, str(tmp_path / "alone"), 0, LAST, ranks=1)[0]
    found = []
    for text, first, last in ((there, 0, SAVED), (here, SAVED, LAST)):
        layout = parse_layout(text)
        applied = layout.apply(config)
        found += world.run(
            _steps, applied, str(tmp_path / "run"), first, last,
            layout=applied.parallel, ranks=layout.num_ranks, timeout=180.0,
        )[0]  # fmt: skip
    for (loss, norm, samples), (a, b, c) in zip(expected, found, strict=True):
        assert (loss, norm, samples) == (pytest.approx(a, rel=1e-9), pytest.approx(b, rel=1e-9), c)


def _codes(piece: Held) -> Tensor:
    """Numbers that no other element of the model has: of the name, and the place in the global tensor."""
    code = torch.zeros(piece.sizes, dtype=torch.float64)
    stride = 1
    for dim in reversed(range(len(piece.sizes))):
        places = torch.arange(piece.offset[dim], piece.offset[dim] + piece.sizes[dim], dtype=torch.float64) * stride
        code += places.view([-1 if d == dim else 1 for d in range(len(piece.sizes))])
        stride *= piece.shard.shape[dim]
    return code + float(zlib.crc32(piece.key.encode()) << 20)


def _save_codes(mpu: ParallelState, config: Config, folder: str) -> None:
    tensors = state_tensors(build_training(config, mpu, CPU))
    with torch.no_grad():
        for piece in held(tensors):
            piece.view.copy_(_codes(piece))
    store.save(folder, 1, tensors, {}, mpu)


def _misplaced(mpu: ParallelState, config: Config, folder: str) -> list[str]:
    """What does not hold its own code after a load."""
    tensors = state_tensors(build_training(config, mpu, CPU))
    store.load(folder, tensors, mpu)
    return [piece.key for piece in held(tensors) if not torch.equal(piece.view.double(), _codes(piece))]


@pytest.mark.parametrize(("model", "there", "here"), _rows(CODES))
def test_every_element_comes_back_to_its_place(
    model: str, there: str, here: str, tokens: str, references: Path, tmp_path: Path, world: World
) -> None:
    config = _config(model, tokens, references)
    for fn, text in ((_save_codes, there), (_misplaced, here)):
        layout = parse_layout(text)
        applied = layout.apply(config)
        results = world.run(
            fn, applied, str(tmp_path), layout=applied.parallel, ranks=layout.num_ranks, timeout=180.0
        )  # fmt: skip
        assert not any(results)
