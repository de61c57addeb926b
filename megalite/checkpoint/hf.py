"""Folders of Hugging Face: safetensors files with an index, and the small files beside them.

Nothing here knows what a tensor means: whoever does says of which parts each is made (`Part`). Memory holds the tensor
that is made and one that it is made of.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, LocalFolder, folder_at
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.tensors import StoredTensor, TensorFile, TensorWriter
from megalite.files import sync_folder

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_KEPT = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Files that are small and say something: configurations, tokenizers, chat templates."""
_LARGEST_KEPT = 128 << 20
_FOREIGN = {
    ".bin": "pickles of PyTorch, which can run anything when they are read", ".pth": "pickles of PyTorch",
    ".pt": "pickles of PyTorch", ".h5": "files of TensorFlow", ".msgpack": "files of Flax",
    ".gguf": "files of llama.cpp",
}  # fmt: skip
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """Of a tensor that is made, the view `here` is the view `there` of the tensor `source`."""

    source: str
    here: View
    there: View


class LastRead:
    """Reads tensors by name and keeps the last one: those that are made one after another often need the same."""

    def __init__(self, read: Callable[[str], Tensor]):
        self._read, self._name, self._tensor = read, "", None

    def __call__(self, name: str) -> Tensor:
        """The tensor `name`."""
        if self._tensor is None or self._name != name:
            self._tensor = None  # before the next one is read
            self._name, self._tensor = name, self._read(name)
        return self._tensor


def assemble(shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[Part], read: LastRead) -> Tensor:
    """The tensor that is made of `parts`, in `dtype`."""
    made = torch.empty(shape, dtype=dtype)
    for part in parts:
        part.here(made).copy_(part.there(read(part.source)))
    return made


class HFFolder:
    """A folder with config.json and safetensors files, opened for reading; a path or a URL. A context manager."""

    def __init__(self, address: str | Path):
        self.folder: Folder = folder_at(address)
        self._stack = ExitStack()
        if self.folder.size(CONFIG) is None:
            raise CheckpointError(f"{address} has no {CONFIG}: it is no model of Hugging Face")
        self.config = read_json(self.folder, CONFIG)
        self._names: dict[str, str] | None = None
        self._files: dict[str, TensorFile] = {}

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def names(self) -> Mapping[str, str]:
        """The file of each tensor; CheckpointError when they are not in safetensors files."""
        if self._names is None:
            self._names = self._find()
        return self._names

    def _find(self) -> dict[str, str]:
        if self.folder.size(INDEX) is not None:
            found = read_json(self.folder, INDEX).get("weight_map")
            if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
                raise CheckpointError(f"{self.folder}/{INDEX} has no weight_map")
            return found
        if self.folder.size(WEIGHTS) is not None:
            return dict.fromkeys(self._file(WEIGHTS).tensors, WEIGHTS)
        for name in sorted(self.folder.names()):
            if (kind := Path(name).suffix) in _FOREIGN:
                raise CheckpointError(
                    f"{self.folder} has {name}, one of the {_FOREIGN[kind]}, and no {WEIGHTS}: load the model in"
                    " transformers and save it with save_pretrained(..., safe_serialization=True)"
                )
        raise CheckpointError(f"{self.folder} has neither {WEIGHTS} nor {INDEX}")

    def find(self, name: str) -> StoredTensor:
        """Shape and dtype of a tensor."""
        return self._file(self.names[name]).find(name)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._file(self.names[name]).read(name, None)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if self.folder.size(name) is None:
                raise CheckpointError(f"{self.folder} has no {name}, which its index names")
            self._files[name] = self._stack.enter_context(TensorFile(self.folder, name, None))
        return self._files[name]

    def small_files(self) -> dict[str, bytes]:
        """Everything beside the weights that says something of the model or its tokenizer, by name."""
        found: dict[str, bytes] = {}
        for name in sorted(self.folder.names()):
            size = self.folder.size(name)
            is_index = name.endswith(".index.json")
            if size is None or size > _LARGEST_KEPT or not name.endswith(_KEPT) or is_index or name.startswith("."):
                continue
            found[name] = read_bytes(self.folder, name)
        return found


def read_bytes(folder: Folder, name: str) -> bytes:
    """A small file."""
    reader = folder.reader(name)
    try:
        content, done = bytearray(reader.size), 0
        while done < reader.size and (count := reader.read_into(memoryview(content)[done:], done)):
            done += count
        return bytes(content[:done])
    finally:
        reader.close()


def read_json(folder: Folder, name: str) -> dict:
    """A file that holds an object; CheckpointError when it does not."""
    try:
        found = json.loads(read_bytes(folder, name))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}/{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder}/{name} should hold an object")
    return found


def write_folder(
    out: str | Path,
    tensors: Sequence[NewTensor],
    files: Mapping[str, bytes],
    *,
    max_shard: int,
    weights: str = WEIGHTS,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Writes `tensors` (their keys are names) and small `files` to the new folder `out`, whole or not at all.

    max_shard: bytes of a safetensors file at most, but for a tensor that is larger. weights: its name where it is one.
    Each tensor is made once, when its turn comes. Raises CheckpointError when something is there already, or there is
    no room.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} is there already; choose another folder, or remove it first")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    size = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(out.absolute().parent).free
    if free < size:
        raise CheckpointError(f"the weights take {size / 2**20:.0f} MiB, but {free / 2**20:.0f} MiB are free at {out}")
    fresh = out.absolute().with_name(f".writing_{out.absolute().name}.{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        _write_shards(LocalFolder(fresh), shards(tensors, max_shard, weights), progress)
        for name, content in files.items():
            with LocalFolder(fresh).writer(name) as file:
                file.write(content)
        if out.exists():
            out.rmdir()
        os.rename(fresh, out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    sync_folder(out.absolute().parent)
    return out


def shards(tensors: Sequence[NewTensor], max_shard: int, weights: str = WEIGHTS) -> dict[str, list[NewTensor]]:
    """By file name, in order, each as full as it may be."""
    groups: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_shard:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {weights: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_shards(folder: Folder, files: Mapping[str, Sequence[NewTensor]], progress: Callable[[int], None]) -> None:
    for name, tensors in files.items():
        like = {tensor.key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors}
        # transformers asks the header of a file what made it.
        with folder.writer(name) as file, TensorWriter(file, like, {"format": "pt"}) as writer:
            for tensor in tensors:
                writer.add(tensor.make())
                progress(tensor.nbytes)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        places = {tensor.key: name for name, tensors in files.items() for tensor in tensors}
        with folder.writer(INDEX) as file:
            file.write(
                (json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n").encode()
            )
