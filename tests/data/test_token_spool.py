from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.token_spool import Committed, TokenSpool, publish


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_the_index_is_that_of_the_writer(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.token_spool._CHUNK", chunk)
    documents = [[1, 2, 3], [], [4], [], [], [5, 6], [70000], []]
    with IndexedWriter(tmp_path / "a", dtype="i4") as writer:
        for document in documents:
            writer.add_document(document)
    spool = TokenSpool(str(tmp_path / "b"), np.dtype("<i4"), Committed())
    for document in documents:
        spool.add(np.array(document, dtype="<i4"), np.array([len(document)], dtype=np.int32))
    spool.complete({})
    assert not (tmp_path / "b.idx").exists()
    publish(str(tmp_path / "b"))
    for end in (".bin", ".idx", ".json"):
        assert (tmp_path / f"b{end}").read_bytes() == (tmp_path / f"a{end}").read_bytes()
    assert IndexedDataset(tmp_path / "b", check_offsets=True).num_documents == 8


def test_offsets_have_64_bits(tmp_path: Path) -> None:
    spool = TokenSpool(str(tmp_path / "x"), np.dtype("<i4"), Committed())
    spool.close()
    np.array([2**29, 2**29, 5], dtype="<i4").tofile(tmp_path / "x.lengths.tmp")
    (sums,) = spool.running_sums(lambda lengths: lengths)
    assert (sums * 4).tolist() == [0, 2**31, 2**32, 2**32 + 20]


def test_less_than_was_vouched_for_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.bin.tmp").write_bytes(bytes(10))
    with pytest.raises(OSError, match=r"x\.bin\.tmp has 10 bytes, an earlier run had written 12"):
        TokenSpool(str(tmp_path / "x"), np.dtype("<i4"), Committed(1, 3, 0))
