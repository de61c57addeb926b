"""What a rank sends through torch.distributed, counted from the calls of any library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce", "broadcast": "broadcast", "reduce": "reduce",
    "allgather": "all_gather", "allgather_base": "all_gather", "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all", "barrier": "nothing", "monitored_barrier": "nothing", "wait_tensor": "nothing",
}  # fmt: skip
"""Operation of c10d or of functional collectives, without underscores at its ends -> what it does."""


class BytesSent(TorchDispatchMode):
    """Counts payload bytes while it is entered, by the bandwidth-optimal formulas of `megalite.axis.AxisStats`.

    For collectives over all `ranks`. Only calls of this thread are seen; on the CPU backward runs in it.
    """

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        self.total = 0
        self._formulas: Mapping[str, Callable[[int, int], int]] = {
            "nothing": lambda size, root: 0,
            "all_reduce": lambda size, root: 2 * (ranks - 1) * size // ranks,
            "all_gather": lambda size, root: (ranks - 1) * size,
            "reduce_scatter": lambda size, root: (ranks - 1) * size // ranks,
            "all_to_all": lambda size, root: (ranks - 1) * size // ranks,
            "broadcast": lambda size, root: size if rank == root else 0,
            "reduce": lambda size, root: size if rank != root else 0,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`; a collective is counted."""
        kwargs = dict(kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += self._sent(func, args, kwargs)
        return func(*args, **kwargs)

    def _sent(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        schema = func._schema
        name = schema.name.split("::")[1].strip("_")
        if name not in _KINDS:
            raise ValueError(f"{schema.name} is not counted; say in _KINDS what it does")
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
        keys = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
        payload = next(given[key] for key in keys if key in given)
        return self._formulas[_KINDS[name]](nbytes(payload), given.get("root_rank", given.get("src", 0)))


def nbytes(tensors: Any) -> int:
    """Bytes of all tensors in nested lists."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the memory behind `tensors`, each piece once."""
    storages = [tensor.untyped_storage() for tensor in map(_local, tensors)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else torch.Tensor.detach(tensor)
