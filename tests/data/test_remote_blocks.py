"""Token files behind fsspec: blocks, the cache on disk, storage that fails."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megalite.data import remote_blocks
from megalite.data.build import build_datasets
from megalite.data.config import DataConfig, problems
from megalite.data.indexed import FormatError, IndexedDataset, IndexedWriter
from megalite.data.loss_mask import MASK_SUFFIX
from megalite.data.remote_blocks import BlockCache, RemoteFile, is_there, text_if_there
from megalite.data.report import validate_file

BLOCK = 64
CONTENT = bytes(range(256)) * 2 + b"tail"


class Storage:
    """memory://, whose reads are counted and can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.files: Any = fsspec.filesystem("memory")
        self.reads: list[tuple[str, int | None]] = []
        self.failures: list[Exception] = []
        self._cat = self.files.cat_file
        monkeypatch.setattr(type(self.files), "cat_file", lambda _, *args, **kwargs: self._read(*args, **kwargs))

    def _read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.reads.append((path, start))
        if self.failures:
            raise self.failures.pop(0)
        return self._cat(path, start=start, end=end)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setattr(remote_blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(remote_blocks, "FIRST_PAUSE", 0.0)
    made = Storage(monkeypatch)
    made.files.pipe("/shelf/file", CONTENT)
    yield made
    made.files.store.clear()


def test_any_range_of_bytes(storage: Storage, tmp_path: Path) -> None:
    file = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    assert file.size == len(CONTENT)
    for begin in range(0, len(CONTENT), 7):
        for size in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5):
            assert file.read(begin, min(size, file.size - begin)).tobytes() == CONTENT[begin:][:size]
    assert len(storage.reads) == -(-len(CONTENT) // BLOCK), "each block comes once"
    assert file.whole().tobytes() == CONTENT


def test_another_process_finds_the_blocks(storage: Storage, tmp_path: Path) -> None:
    RemoteFile("memory://shelf/file", BlockCache(tmp_path)).read(70, 100)
    seen = len(storage.reads)
    again = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    assert again.read(70, 100).tobytes() == CONTENT[70:170] and len(storage.reads) == seen
    block = next(again.folder.glob("*1.block"))
    block.write_bytes(block.read_bytes()[:-1])  # as a crash of the machine could leave it
    cut = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    assert cut.read(70, 100).tobytes() == CONTENT[70:170] and len(storage.reads) == seen + 1


def test_a_file_of_the_same_name_that_was_replaced(storage: Storage, tmp_path: Path) -> None:
    old = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    old.read(0, 10)
    storage.files.pipe("/shelf/file", CONTENT[::-1])
    new = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    assert new.folder != old.folder and new.read(0, 10).tobytes() == CONTENT[::-1][:10]
    storage.files.pipe("/shelf/file", CONTENT)
    with pytest.raises(FormatError, match="memory://shelf/file has been replaced since it was opened: start again"):
        new.read(100, 10)
    assert new.read(0, 10).tobytes() == CONTENT[::-1][:10], "what is there is of one version"


def test_storage_that_fails_for_a_while(storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage.failures += [OSError("slow down"), RuntimeError("a client's own error"), ConnectionError("reset")]
    with caplog.at_level(logging.WARNING):
        assert RemoteFile("memory://shelf/file", BlockCache(tmp_path)).read(3, 4).tobytes() == CONTENT[3:7]
    assert [word in caplog.text for word in ("slow down", "a client's own error", "reset")] == [True] * 3
    storage.failures += [ConnectionError("gone")] * remote_blocks.ATTEMPTS
    with pytest.raises(OSError, match="could not be read at bytes 0 to 64, 5 times: gone"):
        RemoteFile("memory://shelf/file", BlockCache(tmp_path / "new")).read(3, 4)
    before = len(storage.reads)
    storage.failures += [PermissionError("no credentials")]
    with pytest.raises(PermissionError, match="memory://shelf/file cannot be read at bytes 0 to 64: no credentials"):
        RemoteFile("memory://shelf/file", BlockCache(tmp_path / "new")).read(3, 4)
    assert len(storage.reads) == before + 1, "asking again changes nothing"


def test_what_is_asked_about_is_never_absent_because_a_server_fails(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, failures = storage.files.info, [ConnectionError("503"), OSError("503")]

    def failing(_: Any, path: str, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return info(path, **kwargs)

    monkeypatch.setattr(type(storage.files), "info", failing)
    assert is_there("memory://shelf/file") and not failures
    failures += [ConnectionError("503")] * remote_blocks.ATTEMPTS
    with pytest.raises(OSError, match="memory://shelf/file could not be asked about, 5 times: 503"):
        is_there("memory://shelf/file")
    assert not is_there("memory://shelf/none") and text_if_there("memory://shelf/none") is None
    storage.files.pipe("/shelf/bytes", bytes([255]))
    with pytest.raises(FormatError, match="memory://shelf/bytes is not UTF-8"):
        text_if_there("memory://shelf/bytes")
    storage.failures += [ConnectionError("reset")] * 2
    storage.files.pipe("/shelf/text", b"said")
    assert text_if_there("memory://shelf/text") == "said"


def test_a_server_that_tells_versions_by_other_names(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over http the client's own key is that of the URL alone."""
    monkeypatch.setattr(type(storage.files), "ukey", lambda _, path: "fixed")
    info, tag = storage.files.info, ["one"]
    monkeypatch.setattr(type(storage.files), "info", lambda _, path, **kwargs: info(path) | {"ETag": tag[0]})
    old = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    old.read(0, 1)
    tag[0] = "two"
    assert RemoteFile("memory://shelf/file", BlockCache(tmp_path)).folder != old.folder
    with pytest.raises(FormatError, match="has been replaced"):
        old.read(500, 1)


def test_a_block_that_another_process_keeps_locked(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_blocks, "_LOCK_SECONDS", 0.1)
    file = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    file.folder.mkdir(parents=True)
    with open(file.folder / ".fetch0", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert file.read(0, 3).tobytes() == CONTENT[:3]


def test_what_killed_processes_leave_goes(storage: Storage, tmp_path: Path) -> None:
    file = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    file.read(0, 1)
    for name, age in ((".00000001.block.123", 9999), ("whole.123", 9999), (".00000002.block.124", 0)):
        (file.folder / name).write_bytes(b"half")
        os.utime(file.folder / name, (time.time() - age, time.time() - age))
    BlockCache(tmp_path).sweep()
    assert sorted(path.name for path in file.folder.iterdir()) == [".00000002.block.124", ".fetch0", "00000000.block"]


def test_the_cache_keeps_to_its_limit(storage: Storage, tmp_path: Path) -> None:
    file = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    for i in range(6):
        file.read(i * BLOCK, 1)
        os.utime(file.folder / f"{i:08d}.block", (i, i))
    RemoteFile("memory://shelf/file", BlockCache(tmp_path)).read(0, 1)  # used again
    BlockCache(tmp_path, limit=5 * BLOCK).sweep()
    left = sorted(path.name[:8] for path in file.folder.glob("*.block"))
    assert left == ["00000000", "00000003", "00000004", "00000005"]
    held = file.whole()
    BlockCache(tmp_path, limit=1).sweep()
    assert not file.copy.exists() and held.tobytes() == CONTENT, "what is mapped stays"
    assert file.whole().tobytes() == CONTENT and file.read(0, len(CONTENT)).tobytes() == CONTENT
    small = RemoteFile("memory://shelf/file", BlockCache(tmp_path, limit=3 * BLOCK))
    assert b"".join(small.read(i, 4).tobytes() for i in range(0, len(CONTENT), 4)) == CONTENT
    assert sum(path.stat().st_size for path in file.folder.glob("*.block")) <= 4 * BLOCK
    assert BlockCache.default().limit == remote_blocks.LIMIT_BYTES


def test_a_disk_that_takes_nothing(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_blocks, "replace_bytes", full)
    monkeypatch.setattr(RemoteFile, "_copy_to", full)
    file = RemoteFile("memory://shelf/file", BlockCache(tmp_path))
    assert file.read(60, 10).tobytes() == CONTENT[60:70]
    assert "a block of memory://shelf/file could not be kept in" in caplog.text
    assert file.whole().tobytes() == CONTENT
    assert "a copy of memory://shelf/file could not be kept in" in caplog.text


def _upload(storage: Storage, folder: Path) -> None:
    """Documents of lengths 1 to 40, with a mask."""
    for suffix in ("", MASK_SUFFIX):
        with IndexedWriter(folder / f"x{suffix}", dtype="uint8" if suffix else "uint16") as writer:
            for n in range(1, 41):
                writer.add_document([k % 2 if suffix else n for k in range(n)])
    for path in folder.glob("x*"):
        storage.files.pipe(f"/shelf/{path.name}", path.read_bytes())


def test_a_run_reads_the_same_from_far_away(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _upload(storage, tmp_path)
    rows = []
    for path in (str(tmp_path / "x"), "memory://shelf/x"):
        config = DataConfig(paths=(path,), seq_len=24, cache_dir=str(tmp_path / "cache"))
        datasets = build_datasets(config, seed=1, num_samples=50, num_validation_samples=4)
        assert datasets.validation is not None
        rows.append([datasets.train[i] for i in range(50)] + [datasets.validation[i] for i in range(4)])
    for here, there in zip(*rows, strict=True):
        np.testing.assert_array_equal(here.tokens, there.tokens)
        np.testing.assert_array_equal(here.loss_mask, there.loss_mask)
    assert any(0.0 < row.loss_mask.mean() < 1.0 for row in rows[0])
    fetched = [read for read in storage.reads if read[0].endswith(".bin")]
    assert len(fetched) == len(set(fetched)), "each block comes once"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert validate_file("memory://shelf/x")[-1].endswith("to 40")


def test_what_is_wrong_far_away(storage: Storage, tmp_path: Path) -> None:
    _upload(storage, tmp_path)
    cache = BlockCache(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match=r"memory://shelf/none.idx .*the data prefix is 'memory://shelf/none'"):
        IndexedDataset("memory://shelf/none", cache=cache)
    storage.files.pipe("/shelf/x.bin", b"short")
    with pytest.raises(FormatError, match=r"memory://shelf/x.bin has 5 bytes but x\.idx describes 1640"):
        IndexedDataset("memory://shelf/x", cache=cache)
    with pytest.raises(ValueError, match=r"nosuch://shelf/x.idx cannot be reached: Protocol not known: nosuch"):
        IndexedDataset("nosuch://shelf/x", cache=cache)
    config = DataConfig(paths=("memory://shelf/x.jsonl",), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"memory://shelf/x.jsonl is text far away"):
        build_datasets(config, seed=1, num_samples=1)
    assert problems(DataConfig(remote_cache_gb=-1)) == ["data.remote_cache_gb=-1 must be at least 0"]
