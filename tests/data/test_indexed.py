import gc
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.indexed import (
    HEADER,
    FormatError,
    IndexedDataset,
    IndexedWriter,
    running_offsets,
    token_dtype,
)
from tests.data.reference import GOLDEN, prefix

FIXTURES = sorted(GOLDEN["fixtures"])
WRITABLE = [name for name in FIXTURES if GOLDEN["fixtures"][name].get("docs") is not None]


@pytest.mark.parametrize("name", FIXTURES)
def test_reads_what_megatron_wrote(name: str) -> None:
    data, expected = IndexedDataset(prefix(name)), GOLDEN["fixtures"][name]
    assert data.dtype.name == expected["dtype"]
    if name == "zero_u16":
        assert (len(data), data.num_documents, data.num_tokens, data.largest_id()) == (0, 0, 0, -1)
        return
    assert data.lengths.tolist() == expected["sequence_lengths"]
    assert data.document_index.tolist() == expected["document_indices"]
    assert data.offsets.tolist() == expected.get("sequence_pointers", data.offsets.tolist())
    if expected.get("docs"):
        assert [s.tolist() for s in data] == [s for document in expected["docs"] for s in document]
    modes = expected.get("modes")
    assert (None if data.modes is None else data.modes.tolist()) == modes


def test_reads_parts_of_sequences() -> None:
    for read in GOLDEN["reads"]:
        data = IndexedDataset(prefix(read["file"]))
        if "slice" in read:
            assert [data[i].tolist() for i in range(*read["slice"])] == read["sequences"]
        elif read["idx"] == 2:  # Megatron reads on into the next document; we do not
            with pytest.raises(IndexError, match=r"0\.\.11 of sequence 2, which has 9"):
                data.get(read["idx"], read["offset"], read["length"])
        else:
            assert data.get(read["idx"], read["offset"], read["length"]).tolist() == read["tokens"]
    with pytest.raises(IndexError, match="sequence 57 of 57"):
        IndexedDataset(prefix("a_u16"))[57]


@pytest.mark.parametrize("name", WRITABLE)
def test_writes_the_bytes_megatron_writes(name: str, tmp_path: Path) -> None:
    expected = GOLDEN["fixtures"][name]
    with IndexedWriter(tmp_path / "x", dtype=expected["dtype"]) as writer:
        for document in expected["docs"]:
            flat = np.array([t for s in document for t in s], dtype=expected["dtype"])
            modes = (expected.get("modes") or [])[writer.num_sequences :][: len(document)] or None
            writer.add_document(flat, [len(s) for s in document], modes=modes)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"x{end}").read_bytes() == Path(prefix(name) + end).read_bytes()


def test_merges_like_megatron(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", dtype="int32") as writer:
        for name in GOLDEN["fixtures"]["merged_i32"]["merged_from"]:
            writer.add_file(prefix(name))
    for end in (".bin", ".idx"):
        assert (tmp_path / f"x{end}").read_bytes() == Path(prefix("merged_i32") + end).read_bytes()


@pytest.mark.parametrize("part", [1, 3, 1000])
def test_merging_keeps_sequences_and_documents(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of several sequences and empty ones; one file's index goes on where the other's ends."""
    monkeypatch.setattr("megalite.data.indexed_writer._PART_TOKENS", part)
    monkeypatch.setattr("megalite.data.indexed_writer._PART_DOCUMENTS", part)
    for name, documents in (("a", [[3], [4]]), ("b", [[2], [], [5, 0, 2], [1], []])):
        with IndexedWriter(tmp_path / name, dtype="int32") as writer:
            for lengths in documents:
                writer.add_document(np.arange(sum(lengths)) + 100, lengths)
    with IndexedWriter(tmp_path / "ab", dtype="int32") as writer:
        writer.add_file(tmp_path / "a")
        writer.add_file(tmp_path / "b")
    merged = IndexedDataset(tmp_path / "ab")
    assert merged.lengths.tolist() == [3, 4, 2, 5, 0, 2, 1]
    assert merged.document_index.tolist() == [0, 1, 2, 3, 3, 6, 7, 7]
    parts = [s.tolist() for name in "ab" for s in IndexedDataset(tmp_path / name)]
    assert [s.tolist() for s in merged] == parts
    with IndexedWriter(tmp_path / "mm", dtype="int32") as writer:
        writer.add_file(prefix("mm_i32"))
        writer.add_file(prefix("mm_i32"))
    modes = IndexedDataset(tmp_path / "mm").modes
    assert modes is not None and modes.tolist() == [0, 1, 2] * 2


def test_all_sequences_have_a_mode_or_none_has(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", dtype="int32")
    writer.add_document([1, 2])
    with pytest.raises(ValueError, match="1 modes for 1 sequences: all sequences of a file have a mode, or none has"):
        writer.add_document([3], modes=[1])
    writer.abort()


def test_offsets_do_not_overflow() -> None:
    lengths = np.array([2**29, 2**29, 5], dtype=np.int32)
    assert running_offsets(lengths, 4).tolist() == [0, 2147483648, 4294967296]


def test_dtype_boundary() -> None:
    assert [token_dtype(n).name for n in (257, 65499, 65500, 65536)] == ["uint16", "uint16", "int32", "int32"]


def test_views_outlive_the_dataset() -> None:
    view = IndexedDataset(prefix("a_u16"))[5]
    before = view.copy()
    gc.collect()
    assert np.array_equal(view, before)
    assert not view.flags.writeable


def _copy(tmp_path: Path, name: str = "a_u16") -> Path:
    for end in (".bin", ".idx"):
        shutil.copy(prefix(name) + end, tmp_path / f"x{end}")
    return tmp_path / "x"


def _patch(path: Path, offset: int, code: str, value: Any) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(code, content, offset, value)
    path.write_bytes(content)


COUNT = 57  # sequences of a_u16
DAMAGE = {
    "magic": (0, "<9s", b"JUNKJUNK\0", "begins with"),
    "version": (9, "<Q", 2, "version 2, expected 1"),
    "unknown dtype": (17, "<B", 99, "dtype code 99; codes are 1 uint8"),
    "other dtype": (17, "<B", 4, r"starts at byte 2, expected 4"),
    "count": (18, "<Q", COUNT + 1, "bytes, expected"),
    "huge count": (18, "<Q", 2**63, "bytes, expected"),
    "negative length": (HEADER.size + 4, "<i", -5, "sequence 1 has length -5"),
    "offset": (HEADER.size + 4 * COUNT + 8, "<q", 4, "sequence 1 starts at byte 4, expected 2"),
    "document index end": (HEADER.size + 12 * COUNT + 8 * COUNT, "<q", 50, r"is 0 \.\. 50, expected 0 \.\. 57"),
    "document index order": (HEADER.size + 12 * COUNT + 8, "<q", 5, "decreases"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_refuses_a_damaged_index(kind: str, tmp_path: Path) -> None:
    offset, code, value, message = DAMAGE[kind]
    path = _copy(tmp_path)
    IndexedDataset(path)
    _patch(Path(f"{path}.idx"), offset, code, value)
    with pytest.raises(FormatError, match=message):
        IndexedDataset(path)


@pytest.mark.parametrize("size", [0, 20, 33, 34, 300, 1181])
def test_refuses_a_short_index(size: int, tmp_path: Path) -> None:
    path = _copy(tmp_path)
    index = Path(f"{path}.idx")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(FormatError, match=f"has {size} bytes"):
        IndexedDataset(path)


def test_refuses_data_of_another_size(tmp_path: Path) -> None:
    path = _copy(tmp_path)
    data = Path(f"{path}.bin")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=r"has 2941 bytes but x\.idx describes 2942"):
        IndexedDataset(path)
    with pytest.raises(FormatError, match="has 2941 bytes"):
        IndexedDataset(path, allow_longer=True)
    data.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match="has 2943 bytes"):
        IndexedDataset(path)
    assert IndexedDataset(path, allow_longer=True).num_tokens == 1471
    data.unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.bin does not exist"):
        IndexedDataset(path)


def test_accepts_a_prefix_with_its_suffix() -> None:
    assert len(IndexedDataset(prefix("a_u16") + ".idx")) == len(IndexedDataset(prefix("a_u16") + ".bin")) == COUNT


@pytest.mark.parametrize(("bad", "named"), [(70000, "70000"), (-1, "-1"), (300, "300")])
def test_refuses_ids_out_of_range(bad: int, named: str, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", dtype="uint16", vocab_size=300)
    writer.add_document([1, 2])
    with pytest.raises(ValueError, match=f"document 2 has id {named}, allowed are 0 .. 299"):
        writer.add_documents([5, 6, bad, 7], [2, 2], [1, 1])
    writer.abort()
    plain = IndexedWriter(tmp_path / "x", dtype="uint16")
    with pytest.raises(ValueError, match="document 0 has id 65536"):
        plain.add_document(np.array([65536]))
    plain.abort()


def test_refuses_lengths_that_do_not_add_up(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", dtype="uint16")
    with pytest.raises(ValueError, match="3 tokens do not fill sequences of 4"):
        writer.add_document([1, 2, 3], [2, 2])
    with pytest.raises(ValueError, match="integers"):
        writer.add_document([1.5])
    writer.abort()


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"), IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([1, 2, 3])
        assert [p.name for p in tmp_path.iterdir()] == ["x.bin.tmp"]
        raise RuntimeError("half-way")
    assert not list(tmp_path.iterdir())


def test_overwrites_only_when_told(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(FileExistsError, match=r"x\.bin already exists"):
        IndexedWriter(tmp_path / "x", dtype="uint16")
    with IndexedWriter(tmp_path / "x", dtype="uint16", overwrite=True) as writer:
        writer.add_document([4])
        with pytest.raises(FileExistsError, match="being written by another process"):
            IndexedWriter(tmp_path / "x", dtype="uint16", overwrite=True)
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [4]


def test_writes_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3://bucket/x: files are written to local disks only"):
        IndexedWriter("s3://bucket/x.bin", dtype="u2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_a_full_disk_names_the_file_and_leaves_nothing(size: int, tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/x\.bin\.tmp'"),
        IndexedWriter(tmp_path / "x", dtype="u2") as writer,
    ):
        assert writer._file is not None
        with open("/dev/full", "ab") as full:  # a few tokens are not written before the end, nor can they be then
            os.dup2(full.fileno(), writer._file.fileno())
        writer.add_document(np.ones(size, dtype=np.int64))
    assert not list(tmp_path.iterdir())


def test_takes_over_from_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / "x.bin.tmp").write_bytes(b"left by a killed process")
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([7])
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [7]


def test_side_file(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", dtype="uint16", vocab_size=10) as writer:
        writer.add_document([1, 9, 3])
        writer.add_document([])
    side = IndexedDataset(tmp_path / "x").side_file()
    assert side is not None
    assert (side["documents"], side["sequences"], side["tokens"], side["largest_id"]) == (2, 1, 3, 9)
    (tmp_path / "x.json").write_text('{"tokens": 4}')
    with pytest.raises(FormatError, match="describes 4 tokens but"):
        IndexedDataset(tmp_path / "x").side_file()
    assert IndexedDataset(prefix("a_u16")).side_file() is None
