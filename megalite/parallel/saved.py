"""What the parts that are cut over ranks keep from forward to backward: the declarations of this package.

Sizes are those of a rank. `tokens` counts the tokens inside a tensor-parallel region, where the sequence is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megalite.kernels.attention import attention_saved
from megalite.kernels.dropout import dropout_saved
from megalite.kernels.saved import Saved, beside, size_of, wide
from megalite.parallel.context_attention import ContextAttention
from megalite.parallel.cross_entropy import VocabCut
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.expert import Dispatcher
from megalite.parallel.head_exchange import kv_repeats
from megalite.parallel.lora import ColumnAdapter, RowAdapter
from megalite.parallel.tensor import ColumnParallelLinear, FusedColumnParallelLinear, RowParallelLinear

_INDEX = torch.int64.itemsize


def column_saved(linear: FusedColumnParallelLinear | ColumnParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """The input, as it was cut along the sequence; work that is put off keeps the gradient of the output, too."""
    weights = linear.weights
    parts = linear.axis.size if linear.enter == "gather" else 1
    x = size_of((tokens, weights[0].shape[-1]), dtype) // parts
    y = size_of((tokens, sum(weight.shape[0] for weight in weights)), dtype)
    saved = _product_saved(weights, x, y)
    if isinstance(adapter := linear.lora, ColumnAdapter):
        low = size_of((tokens, adapter.rank * len(adapter.names)), dtype)
        saved = beside(saved, _adapter_saved(adapter, x, low // parts, low, y))
    return saved


def row_saved(linear: RowParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """The same; the sum over the ranks comes after everything that is kept."""
    x, y = (size_of((tokens, features), dtype) for features in (linear.weight.shape[1], linear.out_features))
    result = y // linear.axis.size if linear.sequence_parallel else y
    saved = _product_saved([linear.weight], x, y)
    if isinstance(adapter := linear.lora, RowAdapter):
        low = size_of((tokens, adapter.rank), dtype)
        saved = beside(saved, _adapter_saved(adapter, x, low, low, y))
    return replace(saved, last_results=result if linear.axis.size > 1 else 0)


def _product_saved(weights: Sequence[nn.Parameter], x: int, y: int) -> Saved:
    """A product with weights that learn keeps what enters it; put off, the gradient of its output, too."""
    return Saved(input=x, work=x + y) if any(weight.requires_grad for weight in weights) else Saved()


def _adapter_saved(adapter: ColumnAdapter | RowAdapter, x: int, low_made: int, low: int, y: int) -> Saved:
    """What enters both of its products: x, or with dropout a copy, and what is between them, `low` bytes of it."""
    work = x + low_made + low + y
    if not adapter.p:
        return Saved(input=x, own=low, work=work)
    return Saved(own=x + low + dropout_saved(adapter.p).own, work=work)


def embedding_saved(embedding: VocabParallelEmbedding, tokens: int) -> Saved:
    """Token numbers of this rank's rows, and which tokens are not among them; on one rank those of the batch."""
    return Saved(own=tokens * (_INDEX + torch.bool.itemsize) if embedding.axis.size > 1 else 0)


def loss_saved(head: ColumnParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """Both gradients, which `linear_cross_entropy` makes in its forward pass; a frozen head has none."""
    dw = size_of(head.weight.shape, wide(dtype)) if head.weight.requires_grad else 0
    return Saved(held=size_of((tokens, head.in_features), dtype) + dw, work=dw)


def logits_bytes(
    head: ColumnParallelLinear, tokens: int, dtype: torch.dtype, device: torch.device, *, is_capped: bool = False
) -> int:
    """The logits that `linear_cross_entropy` has at a time; off the CPU their probabilities beside them if wider.

    Of capped ones the slopes of the cap, too.
    """
    rows = min(tokens, VocabCut(head.out_features, head.axis).chunk_rows())
    beside = wide(dtype).itemsize if device.type != "cpu" and wide(dtype) != dtype else 0
    slopes = dtype.itemsize if is_capped else 0
    return rows * head.weight.shape[0] * (dtype.itemsize + beside + slopes)


def context_attention_saved(
    across: ContextAttention,
    tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    remade: bool,
    dropout: bool,
    value_dim: int | None = None,
) -> Saved:
    """Attention over a cut sequence: as on one rank; where heads are exchanged, the exchanged tensors instead."""
    ranks = across.inner.size
    if ranks == 1:
        return attention_saved(
            tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, remade=remade,
            dropout=dropout, value_dim=value_dim,
        )  # fmt: skip
    repeats = kv_repeats(num_heads, num_kv_heads, ranks)
    exchanged = attention_saved(
        tokens, num_heads=num_heads, num_kv_heads=num_kv_heads * repeats, head_dim=head_dim, dtype=dtype, remade=False,
        dropout=dropout, value_dim=value_dim,
    )  # fmt: skip
    return Saved(
        own=exchanged.input + exchanged.own + exchanged.output,
        output=exchanged.output,
        held=exchanged.held,
        results=exchanged.input,
        last_results=exchanged.output,
    )


def dispatch_saved(
    dispatcher: Dispatcher,
    tokens: int,
    pairs: int,
    arriving: int,
    row_bytes: int,
    prob_bytes: int,
    *,
    padded: bool = False,
) -> Saved:
    """The way of `pairs` (token, expert) to the experts and home: who they are, and in which order rows come and go.

    arriving: rows at this rank's experts. padded: whether unused places were filled, in a list of tokens alone.
    """
    exchanged, gathered = dispatcher.ep.size > 1, dispatcher.cut and dispatcher.etp.size > 1
    order = (2 if padded else 3) * pairs + tokens + 1 + (arriving if exchanged or gathered else 0)
    sent = arriving // dispatcher.etp.size if gathered else arriving  # before ranks that share experts gather them
    return Saved(
        held=order * _INDEX,
        results=sent * (row_bytes + prob_bytes) if exchanged else 0,
        last_results=(pairs if exchanged else 0) * row_bytes + (sent if gathered else 0) * row_bytes,
    )
