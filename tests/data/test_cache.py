"""Index caches: many processes at once, locks that are not given back, folders that cannot be written."""

import fcntl
import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import cache
from megalite.data.cache import Arrays, build_once, cached_arrays, locked

SHAPES = {"a": (1000,), "b": (None,)}
TOLD: dict[str, Any] = {"what": "an index", "seconds": 9.0}


def _arrays() -> Arrays:
    return {"a": np.arange(1000), "b": np.arange(7)}


def _racer(directory: Path, rounds: int, barrier: "multiprocessing.synchronize.Barrier") -> None:  # type: ignore[name-defined]
    def build() -> Arrays:
        with (directory.parent / "builds").open("ab", buffering=0) as file:
            file.write(b".")
        return _arrays()

    for number in range(rounds):
        barrier.wait()
        found = cached_arrays(directory, f"key{number}", SHAPES, build, **TOLD)
        assert all(np.array_equal(found[name], values) for name, values in _arrays().items())


def test_processes_that_race_build_each_index_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, rounds = context.Barrier(4), 50
    racers = [context.Process(target=_racer, args=(tmp_path / "index", rounds, barrier)) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    assert (tmp_path / "builds").stat().st_size == rounds
    assert len(list((tmp_path / "index").iterdir())) == 2 * rounds, "locks and scratch files are gone"


def test_nodes_with_caches_of_their_own(tmp_path: Path) -> None:
    found = [cached_arrays(tmp_path / node, "key", SHAPES, _arrays, **TOLD) for node in ("one", "two")]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in SHAPES)


def test_a_builder_that_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(cache, "NOTICE_SECONDS", 0.1)
    with open(tmp_path / "key.lock", "ab") as held, caplog.at_level(logging.INFO):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(cached_arrays(tmp_path, "key", SHAPES, _arrays, **TOLD)["a"]) == 1000
    for words in ("waiting for another process", "going on without it", "making an index; this takes about 9 s, once"):
        assert words in caplog.text


def test_the_lock_of_a_builder_that_was_killed(tmp_path: Path) -> None:
    def hold(ready: Path) -> None:
        with locked(tmp_path / "key.lock"):
            ready.touch()
            time.sleep(600)

    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "ready",))
    process.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    with locked(tmp_path / "key.lock", seconds=0.0) as mine:
        assert mine


@pytest.mark.parametrize("damage", ["cut", "other shape", "other type", "header", "one missing"])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    cached_arrays(tmp_path, "key", SHAPES, _arrays, **TOLD)
    path = tmp_path / "key-a.npy"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "other shape":
        np.save(path, np.arange(999))
    elif damage == "other type":
        np.save(path, np.arange(1000).astype("S8"))
    elif damage == "header":
        path.write_bytes(path.read_bytes().replace(b"'shape': (", b"'shape': {("))
    else:
        path.unlink()
    assert np.array_equal(cached_arrays(tmp_path, "key", SHAPES, _arrays, **TOLD)["a"], np.arange(1000))
    assert ("damaged" in caplog.text) == (damage != "one missing")
    caplog.clear()
    cached_arrays(tmp_path, "key", SHAPES, dict, **TOLD)
    assert not caplog.text


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert len(cached_arrays(tmp_path / "file" / "index", "key", SHAPES, _arrays, **TOLD)["b"]) == 7
    assert "could not be cached" in caplog.text


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    assert len(cached_arrays(tmp_path, "key", SHAPES, _arrays, **TOLD)["a"]) == 1000
    made = build_once(tmp_path / "made", lambda scratch: (scratch / "x").touch())
    assert (made / "x").is_file()
