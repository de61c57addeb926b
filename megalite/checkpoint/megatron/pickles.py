"""Pickles of Megatron-LM and torch, with nothing in them that runs.

A pickle calls what it names. Here a name is one of a few that are known to do no harm, or stands for an `Inert` that
records what it was called with, or is refused.
"""

from __future__ import annotations

import argparse
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, Self

import torch

from megalite.checkpoint.errors import CheckpointError


class Inert:
    """Stands for an object of a class that is not imported."""

    origin = ""
    """The name of the class."""

    args: tuple[Any, ...]
    """What it was made with."""
    state: Any
    """What it was set to."""
    items: list[Any]
    """What was put into it, if it was a list or a dict."""

    def __new__(cls, *args: Any) -> Self:  # pickles may or may not call __init__
        """Made with any arguments."""
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Of what is a list."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """The same."""
        self.items.extend(items)

    def field(self, name: str) -> Any:
        """A field of what was a dataclass; CheckpointError when it has none of that name."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise CheckpointError(f"{self.origin} has no {name}: it is of a version that is not known here")
        return self.state[name]


@dataclass(frozen=True)
class StorageRef:
    """Bytes elsewhere in a file of torch.save: their key, and what they are elements of."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor that has not been read: a view of a storage, in elements."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: StorageRef, offset: int, size: Any, stride: Any, *rest: Any) -> TensorRef:
    """What torch._utils._rebuild_tensor, _v2 and _v3 are called with; the latter ends in dtype and metadata."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), storage.dtype)
    return TensorRef(storage, dtype, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: TensorRef, *rest: Any) -> TensorRef:
    return data


def _member(owner: Any, name: str) -> Inert:
    """How some versions of Python pickle a member of an enum: getattr(class, name). Of nothing else, or it would reach
    what it should not."""
    if isinstance(owner, type) and issubclass(owner, Inert):
        return owner(name)
    raise CheckpointError(f"a pickle asks for {name!r} of {owner!r}, which is no enum: it is refused, and was not run")


_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
        "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
    )
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{(module, name): made for module in ("builtins", "__builtin__") for name, made in
       (("getattr", _member), ("set", set), ("frozenset", frozenset), ("bytearray", bytearray), ("complex", complex),
        ("slice", slice))},
}  # fmt: skip
_INERT_MODULES = ("megatron.", "torch.distributed.checkpoint.", "numpy.", "transformer_engine.")
_INERT = {
    ("torch.serialization", "_get_layout"), ("torch", "device"), ("torch", "Generator"), ("_codecs", "encode"),
    ("_io", "BytesIO"), ("numpy", "ndarray"), ("numpy", "dtype"), ("pathlib", "PosixPath"), ("datetime", "timedelta"),
    ("collections", "defaultdict"), ("collections", "deque"), ("collections", "Counter"),
}  # fmt: skip


def load_pickle(file: IO[bytes], name: str) -> Any:
    """What `file` holds; tensors as `TensorRef`.

    Raises CheckpointError for a pickle that names anything else than tensors, plain values and Megatron's own classes,
    before it is called; `name` is that of the file.
    """
    try:
        return _Unpickler(file, name).load()
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises whatever its opcodes run into
        raise CheckpointError(f"{name} is damaged, or no pickle: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], name: str):
        super().__init__(file)
        self._name = name
        self._stand_ins: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str, /) -> Callable[..., Any]:
        """Never imports anything."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if not module.startswith(_INERT_MODULES) and (module, name) not in _INERT:
            raise CheckpointError(
                f"{self._name} asks for {module}.{name}, which is no part of a Megatron-LM checkpoint: it is refused,"
                " and nothing of it was run"
            )
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = type(name, (Inert,), {"origin": f"{module}.{name}"})
        return self._stand_ins[module, name]

    def persistent_load(self, pid: Any, /) -> StorageRef:
        """('storage', kind, key, device, elements): torch's way to speak of bytes beside the pickle."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(count) is not int:
            raise CheckpointError(f"{self._name} holds {pid!r}, which is not a storage of torch")
        return StorageRef(str(key), dtype, count)
