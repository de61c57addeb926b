"""Files of torch.save, read in ranges: what torch.load gives, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.megatron.pickles import TensorRef
from megalite.checkpoint.megatron.torch_file import TorchFile


def test_views_of_a_common_buffer(tmp_path: Path) -> None:
    """Megatron's parameters are views of one buffer, which torch saves once; others may be turned or repeated."""
    buffer = torch.arange(60, dtype=torch.bfloat16)
    matrix = torch.arange(24, dtype=torch.float64).view(4, 6)
    saved = {
        "first": buffer[:6].view(2, 3), "later": buffer[7:31].view(4, 6), "last": buffer[59:], "parameter":
        torch.nn.Parameter(matrix[1:]), "turned": matrix.t(), "columns": matrix[:, 2:4],
        "repeated": matrix[:1].expand(3, 6),
        "scalar": matrix[3, 5], "none": matrix[:0], "flags": torch.tensor([True, False]), "half": buffer.half()[1::2],
    }  # fmt: skip
    torch.save(saved, tmp_path / "views.pt")
    with TorchFile(folder_at(tmp_path), "views.pt") as file:
        found = file.content()
        assert found.keys() == saved.keys() and all(isinstance(ref, TensorRef) for ref in found.values())
        for name, tensor in saved.items():
            read = file.read(found[name])
            assert read.dtype == tensor.dtype and read.is_contiguous() and torch.equal(read, tensor.detach()), name


def test_a_file_inside_of_another(tmp_path: Path) -> None:
    torch.save(torch.arange(5), tmp_path / "alone")
    content = (tmp_path / "alone").read_bytes()
    (tmp_path / "inside").write_bytes(b"x" * 13 + content + b"y" * 7)
    with TorchFile(folder_at(tmp_path), "inside", 13, len(content)) as file:
        assert file.read(file.content()).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match=r"bytes 13 to .* cut short"):
        TorchFile(folder_at(tmp_path), "inside", 13, len(content) + 100)


def test_the_old_format_and_what_is_no_such_file_are_named(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("no")
    for name in ("old.pt", "text.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} is no zip file as torch.save writes it since torch 1.6"):
            TorchFile(folder_at(tmp_path), name)
    with pytest.raises(CheckpointError, match=r"nowhere.pt cannot be read: No such file"):
        TorchFile(folder_at(tmp_path), "nowhere.pt")


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(5), tmp_path / "a.pt")
    with TorchFile(folder_at(tmp_path), "a.pt") as file:
        ref = file.content()
        for shape, stride, offset in (
            ((6,), (1,), 0),
            ((5,), (1,), 1),
            ((2,), (5,), 0),
            ((2,), (1,), -1),
            ((2,), (-1,), 3),
        ):
            with pytest.raises(CheckpointError, match="larger than its storage"):
                file.read(TensorRef(ref.storage, ref.dtype, offset, shape, stride))
