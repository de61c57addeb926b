"""Counting the memory of tensors: how much was alive at once, whatever an allocator keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that operations made inside of it and that are still referenced: now, and at most.

    A storage that is resized counts with what it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def now(self) -> int:
        """Bytes at this moment."""
        found = ((key, live()) for key, live in list(self._live.items()))
        return sum(storage.nbytes() for _, storage in found if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts the storages that it made."""
        out = func(*args, **(kwargs or {}))
        known: set[int] = set()
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor has just made
            known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
        for leaf in tree_leaves(out):
            if _has_memory(leaf) and leaf.untyped_storage()._cdata not in known | self._live.keys():
                storage = leaf.untyped_storage()
                key = storage._cdata
                self._live[key] = weakref.ref(storage, lambda _, key=key: self._live.pop(key, None))
        self.peak = max(self.peak, self.now)
        return out


def _has_memory(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta
