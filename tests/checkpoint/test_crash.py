"""Whatever kills a save or a load, cuts it short or plants something in its files: the previous checkpoint is there."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from megalite.checkpoint import store
from megalite.checkpoint.background import BackgroundSaver
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, Draft, LocalFolder
from megalite.checkpoint.store import Retention
from megalite.mpu import ParallelState
from tests.checkpoint.state import make_state, values_of

SINGLE = ParallelState.single()
OLD, NEW = {1.0, 1.5}, {2.0, 2.5}


def loaded(folder: Path) -> set[float]:
    state = make_state(-1.0)
    store.load(folder, state, SINGLE)
    return values_of(state)


def killed_at(point: int, work: Callable[[], object]) -> bool:
    """Runs `work` in a child that is killed before its `point`-th step on the disk; whether it came so far."""
    child = os.fork()
    if child == 0:
        _count_down(point)
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "the work itself failed"
    return status != 0


def _count_down(point: int) -> None:
    left = [point]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            step()
            return real(*args, **options)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open", "preadv"):
        setattr(os, name, counted(getattr(os, name)))
    real_writer = LocalFolder.writer

    @contextlib.contextmanager
    def writer(self: LocalFolder, path: str) -> Iterator[IO[bytes]]:
        with real_writer(self, path) as file:
            yield _Counted(file, step)  # pyright: ignore[reportReturnType]

    LocalFolder.writer = writer  # pyright: ignore[reportAttributeAccessIssue]


class _Counted:
    """Writes half of what it is given before and half after the moment that may be the last."""

    def __init__(self, file: IO[bytes], step: Callable[[], None]):
        self._file, self._step = file, step

    def write(self, data: Any) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._step()
        self._file.write(data[len(data) // 2 :])


def _save(folder: Path, step: int) -> None:
    store.save(folder, step, make_state(2.0), {}, SINGLE, keep_last=1)


def _save_behind(folder: Path, step: int) -> None:
    saver = BackgroundSaver(folder, SINGLE, Retention(keep_last=1))
    saver.start(step, make_state(2.0), {})
    saver.finished(wait=True)


@pytest.mark.parametrize("save", [_save, _save_behind], ids=["at once", "behind"])
@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "next step"])
def test_a_save_that_is_killed_at_any_point(tmp_path: Path, save: Callable[[Path, int], None], step: int) -> None:
    store.save(tmp_path / "origin", 1, make_state(1.0), {}, SINGLE)
    outcomes: list[set[float]] = []
    for point in range(1, 200):
        folder = tmp_path / str(point)
        shutil.copytree(tmp_path / "origin", folder)
        killed = killed_at(point, lambda folder=folder: save(folder, step))
        outcomes.append(loaded(folder))
        store.save(folder, 3, make_state(3.0), {}, SINGLE, keep_last=1)  # leftovers are not in the way of the next
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["latest", "step_00000003"]
        shutil.rmtree(folder)
        if not killed:
            break
    old = outcomes.count(OLD)
    assert outcomes == [OLD] * old + [NEW] * (len(outcomes) - old), "old up to some point, new from there on"
    assert 20 < len(outcomes) < 199 and 10 < old < len(outcomes)


def test_a_load_that_is_killed_at_any_point_changes_nothing(tmp_path: Path) -> None:
    store.save(tmp_path, 1, make_state(1.0), {}, SINGLE)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    points = 0
    while killed_at(points + 1, lambda: loaded(tmp_path)):
        points += 1
    assert points >= 5  # the header and each tensor is a read of its own
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert loaded(tmp_path) == OLD


def _with_small_files(limit: int, folder: Path) -> int:
    """A save in a child whose files may have `limit` bytes: how it ends."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                _save(folder, 2)
                code = 0
            except CheckpointError as error:
                code = 42 if "File too large" in str(error) else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    place = Path(store.save(tmp_path, 1, make_state(1.0), {}, SINGLE))
    sizes = {path.name: path.stat().st_size for path in place.iterdir()}
    assert sizes["rank_00000.safetensors"] < sizes[MANIFEST] // 2
    for limit in (0, 100, sizes["rank_00000.safetensors"] - 1, sizes["rank_00000.safetensors"], sizes[MANIFEST] // 2):
        assert _with_small_files(limit, tmp_path) == 42
        assert loaded(tmp_path) == OLD
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]
    assert _with_small_files(1 << 20, tmp_path) == 0 and loaded(tmp_path) == NEW


@pytest.mark.parametrize("save", [_save, _save_behind], ids=["at once", "behind"])
def test_a_disk_that_is_full(
    tmp_path: Path, save: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own error: what is written goes to a device that never has room."""
    store.save(tmp_path, 1, make_state(1.0), {}, SINGLE)
    real = LocalFolder.draft

    def draft(self: LocalFolder, name: str, size: int) -> Draft:
        made = real(self, name, size)
        (self._path / f"{made.path}rank_00000.safetensors").symlink_to("/dev/full")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "draft", draft)
        with pytest.raises(CheckpointError, match=r"step_00000002: .*No space left on device"):
            save(tmp_path, 2)
    assert loaded(tmp_path) == OLD
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]
    save(tmp_path, 2)
    assert loaded(tmp_path) == NEW


@pytest.mark.parametrize("byte", [0, 8, 20, -60, -1])
def test_one_byte_that_was_changed_is_found(tmp_path: Path, byte: int) -> None:
    for step in (1, 2):
        place = Path(store.save(tmp_path, step, make_state(float(step)), {}, SINGLE))
    file = place / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x10
    file.write_bytes(content)
    for check in (lambda: loaded(tmp_path), lambda: store.verify(place, SINGLE)):
        with pytest.raises(CheckpointError, match=r"step_00000002/rank_00000\.safetensors is damaged"):
            check()
    assert store.newest_intact(tmp_path, SINGLE) == tmp_path / "checkpoints" / "step_00000001"


def test_passing_over_what_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert store.newest_intact(tmp_path, SINGLE) is None
    for step in (1, 2, 3):
        place = Path(store.save(tmp_path, step, make_state(float(step)), {}, SINGLE))
    assert store.newest_intact(tmp_path, SINGLE) == place
    (place / "rank_00000.safetensors").unlink()
    os.truncate(place.with_name("step_00000002") / MANIFEST, 100)
    assert store.newest_intact(tmp_path, SINGLE) == place.with_name("step_00000001")
    assert "rank_00000.safetensors is missing" in caplog.text and "manifest.json is damaged" in caplog.text
    (place.parent / "latest").write_text("step_00000009\n")
    assert store.newest_intact(tmp_path, SINGLE) == place.with_name("step_00000001")
    (place.with_name("step_00000001") / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="has 3 checkpoints, and none is intact"):
        store.newest_intact(tmp_path, SINGLE)


def test_a_second_saver_is_refused_while_the_first_one_saves(tmp_path: Path) -> None:
    reading, writing = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            pending = store.PendingSave(tmp_path, 1, make_state(1.0), {}, SINGLE, Retention())
            os.write(reading[1], b".")
            os.read(writing[0], 1)
            pending.complete(pending.write(pending.views))
            os._exit(0)
        os._exit(1)
    os.read(reading[0], 1)
    try:
        for step in (1, 2):
            with pytest.raises(CheckpointError, match=r"another process is saving into .*checkpoints; wait for it"):
                store.save(tmp_path, step, make_state(2.0), {}, SINGLE)
    finally:
        os.write(writing[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert loaded(tmp_path) == OLD
    _save(tmp_path, 2)
    assert loaded(tmp_path) == NEW


def test_a_reader_during_saves_sees_one_of_them_whole(tmp_path: Path) -> None:
    store.save(tmp_path, 0, make_state(0.0), {}, SINGLE)
    failures: list[BaseException] = []

    def save() -> None:
        try:
            for step in range(1, 25):
                # Every third one replaces the one before, and only one is ever kept.
                name = step - step % 3 // 2
                store.save(tmp_path, name, make_state(float(step)), {"value": step}, SINGLE, keep_last=1)
        except BaseException as error:
            failures.append(error)

    saver = threading.Thread(target=save)
    saver.start()
    seen = set()
    while saver.is_alive():
        state = make_state(-1.0)
        manifest = store.load_latest(tmp_path, state, SINGLE)
        assert manifest is not None
        value = manifest.state.get("value", 0)
        assert values_of(state) == {value, value + 0.5}
        seen.add(value)
    saver.join()
    assert not failures and len(seen) > 3


class _Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_a_planted_pickle_is_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    payload = pickle.dumps(_Payload(mark))
    pickle.loads(payload)
    assert mark.exists(), "the payload works"
    mark.rmdir()
    for number, name in enumerate(("rank_00000.safetensors", MANIFEST, ".metadata", "common.pt", "../latest")):
        place = Path(store.save(tmp_path / str(number), 1, make_state(1.0), {}, SINGLE))
        (place / name).write_bytes(payload)
        harmless = name in (".metadata", "common.pt")
        with contextlib.nullcontext() if harmless else pytest.raises(CheckpointError):
            assert loaded(tmp_path / str(number)) == OLD
        with contextlib.suppress(CheckpointError):
            store.verify(place, SINGLE)
        assert not mark.exists()
