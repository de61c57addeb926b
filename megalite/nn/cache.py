"""What the layers of a stage keep of the tokens so far, so that the next ones cost no more than themselves.

Rows of unequal length are padded on the left: the newest token of all rows has the same place, and a step writes to one
place of every row. A token's position is its place less the padding before it, padding is seen by nobody, and so each
row gets what it would get alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.batch import MicroBatch
from megalite.kernels.attention import attention
from megalite.kernels.attention_kernel import AttentionKernel, attend
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.decode_attention import decode_attention


class Attends(Protocol):
    """What the cache asks of an attention layer."""

    scale: float
    softcap: float
    window: int

    @property
    def is_standard(self) -> bool:
        """Whether `kernel` computes nothing but softmax(scores) v, as `decode_attention` does."""
        ...

    def kernel(self, like: Tensor, dropout: float) -> AttentionKernel:
        """What attends to a block of keys."""
        ...


class Cache:
    """Keys, values and convolution inputs of one stage, for rows that each step lengthens by the same number of tokens.

    padding: int64 [b], the places before the first token of each row. capacity: the most places of a row. Layers add
    what they have of new tokens and get the past with it, `attend` and `with_past`; once all have, `advance`. A layer
    with a sliding window keeps no more than the window (its memory is a ring).
    """

    def __init__(self, padding: Tensor, capacity: int):
        self.padding, self.capacity, self.length = padding, capacity, 0
        self.longest_padding = int(padding.max()) if padding.numel() else 0
        self._keys: dict[Any, tuple[Tensor, Tensor]] = {}
        self._tails: dict[nn.Module, Tensor] = {}
        self._of_step: dict[Any, Any] = {}
        self.tables: Any = None
        """Rotary tables of all positions, as the stage makes them."""

    @staticmethod
    def padded(lengths: Tensor, capacity: int) -> Cache:
        """For rows whose first tokens are `lengths` [b] many, padded on the left to the longest."""
        return Cache(lengths.max() - lengths, capacity)

    def batch(self, tokens: Tensor) -> MicroBatch:
        """The next tokens [n, b] of all rows; what is in the place of padding does not matter."""
        n = tokens.shape[0]
        assert self.length + n <= self.capacity, f"{self.length} and {n} tokens in a cache of {self.capacity}"
        places = self._places(n)
        mask = places >= self.padding if self.length < self.longest_padding else None
        return MicroBatch(
            tokens=tokens,
            labels=tokens,
            loss_mask=tokens,
            positions=(places - self.padding).clamp_(min=0) if self.longest_padding else places.expand_as(tokens),
            samples=self.padding,
            step=0,
            token_mask=mask,
        )

    def attend(
        self, layer: Attends, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, key: Any = None
    ) -> Tensor:
        """Attention of new tokens on all of their rows so far, [n, b, heads, dv] of q [n, b, heads, d].

        k [n, b, kv_heads, d] and v [n, b, kv_heads, dv], turned by their positions as q, are kept for the tokens to
        come. sinks: [heads], see `add_sinks_`. key: what to keep them by, if not by the layer.
        """
        key, n = layer if key is None else key, q.shape[0]
        if n == 1 and self.length and layer.is_standard:
            keys, values = self._store(key, k, v, layer.window)
            hidden = self._hidden(keys.shape[2], q.dtype)
            return decode_attention(
                q, keys, values, scale=layer.scale, softcap=layer.softcap, sinks=sinks, hidden=hidden
            )
        if not self.length and self._is_causal(layer, n, sinks):
            self._store(key, k, v, layer.window)
            return attention(q, k, v, backend="sdpa", scale=layer.scale)
        keys, values, mask = k, v, self._mask(n, layer.window)
        if self.length:
            past = [self._in_order(kept) for kept in self._keys[key]]
            keys, values = (torch.cat((old, new)) for old, new in zip(past, (k, v), strict=True))
        self._store(key, k, v, layer.window)
        return attend(q, keys, values, mask, layer.kernel(q, 0.0), sinks=sinks)

    def with_past(self, layer: nn.Module, x: Tensor, depth: int) -> Tensor:
        """[depth + n, b, h]: x [n, b, h] of new tokens after that of the `depth` before them, zeros before a row."""
        past = self._tails.get(layer)
        whole = torch.cat((past if past is not None else x.new_zeros(depth, *x.shape[1:]), x))
        self._tails[layer] = whole[whole.shape[0] - depth :]
        return whole

    def advance(self, num_tokens: int) -> None:
        """All layers have had the new tokens."""
        self.length += num_tokens
        self._of_step.clear()

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, int64 [n], in their order."""
        self.padding = self.padding[rows]
        self.longest_padding = int(self.padding.max()) if self.padding.numel() else 0
        self._keys = {key: (k[rows], v[rows]) for key, (k, v) in self._keys.items()}
        self._tails = {layer: tail[:, rows] for layer, tail in self._tails.items()}
        self._of_step.clear()

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and convolution inputs."""
        return sum(k.nbytes + v.nbytes for k, v in self._keys.values()) + sum(x.nbytes for x in self._tails.values())

    def _places(self, n: int) -> Tensor:
        """int64 [n, 1] of new tokens."""
        if ("places", n) not in self._of_step:
            places = torch.arange(self.length, self.length + n, device=self.padding.device)[:, None]
            self._of_step["places", n] = places
        return self._of_step["places", n]

    def _store(self, key: Any, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Keeps k and v [n, b, kv_heads, d]; returns what is kept by now, [b, kv_heads, places, d], in any order."""
        if key not in self._keys:
            size = min(window, self.capacity) if window else self.capacity
            shapes = ((x.shape[1], x.shape[2], size, x.shape[3]) for x in (k, v))
            self._keys[key] = tuple(k.new_empty(shape) for shape in shapes)  # pyright: ignore[reportArgumentType]
        kept = self._keys[key]
        size = kept[0].shape[2]
        if k.shape[0] == 1:
            for memory, new in zip(kept, (k, v), strict=True):
                memory.select(2, self.length % size).copy_(new[0])
            if self.length >= size:
                return kept
            return kept[0][:, :, : self.length + 1], kept[1][:, :, : self.length + 1]
        n = min(k.shape[0], size)
        begin = (self.length + k.shape[0] - n) % size
        first = min(n, size - begin)
        for memory, new in zip(kept, (k, v), strict=True):
            new = new[k.shape[0] - n :].permute(1, 2, 0, 3)
            memory[:, :, begin : begin + first] = new[:, :, :first]
            if first < n:
                memory[:, :, : n - first] = new[:, :, first:]
        filled = min(self.length + k.shape[0], size)
        return kept[0][:, :, :filled], kept[1][:, :, :filled]

    def _in_order(self, kept: Tensor) -> Tensor:
        """[places, b, kv_heads, d]: what is kept of the tokens before this step, the oldest first."""
        size = kept.shape[2]
        begin = self.length % size
        parts = (kept[:, :, begin:], kept[:, :, :begin]) if self.length > size else (kept[:, :, : self.length],)
        return torch.cat(parts, 2).permute(2, 0, 1, 3)

    def _is_causal(self, layer: Attends, n: int, sinks: Tensor | None) -> bool:
        """Whether n tokens, the first ones, see those before them and nothing else is to be done."""
        plain = layer.is_standard and not layer.softcap and sinks is None
        return plain and not self.longest_padding and not 0 < layer.window < n

    def _hidden(self, filled: int, dtype: torch.dtype) -> Tensor | None:
        """[b, 1, 1, filled], -inf for what is padding of the kept places, 0 elsewhere; None where none is left."""
        if self.length + 1 - filled >= self.longest_padding:
            return None
        if (filled, dtype) not in self._of_step:
            index = torch.arange(filled, device=self.padding.device)
            # Of a ring that has gone round, index i has the newest place that is i more than a multiple of its size.
            places = self.length - (self.length - index) % filled
            hidden = torch.zeros(len(self.padding), filled, dtype=dtype, device=self.padding.device)
            hidden.masked_fill_(places < self.padding[:, None], float("-inf"))
            self._of_step[filled, dtype] = hidden[:, None, None]
        return self._of_step[filled, dtype]

    def _mask(self, n: int, window: int) -> AttentionMask:
        """What n new tokens see of themselves and of what is kept within `window`."""
        if ("mask", n, window) not in self._of_step:
            query = self._places(n).expand(n, len(self.padding))
            start = torch.maximum(self.padding, query - (window - 1)) if window else self.padding.expand_as(query)
            oldest = max(0, self.length - min(window, self.capacity)) if window else 0
            places = torch.arange(oldest, self.length + n, device=query.device)[:, None].expand(-1, len(self.padding))
            self._of_step["mask", n, window] = AttentionMask(query=query, start=start, key=places)
        return self._of_step["mask", n, window]


def rows_of(tables: Any, positions: Tensor) -> Any:
    """Rotary tables [s, b, ..] of `positions` [s, b], from those of all positions [length, 1, ..], however nested."""
    if isinstance(tables, Tensor):
        return F.embedding(positions, tables.squeeze(1))
    if isinstance(tables, dict):
        return {key: rows_of(table, positions) for key, table in tables.items()}
    return tuple(rows_of(table, positions) for table in tables)
