"""What the parts that are cut over ranks keep from forward to backward: the declarations of this package.

Sizes are those of a rank. `tokens` counts the tokens inside a tensor-parallel region, where the sequence is whole.
"""

from __future__ import annotations

import torch

from megalite.kernels.attention import attention_saved
from megalite.kernels.saved import Saved, size_of, wide
from megalite.parallel.context_attention import ContextAttention
from megalite.parallel.cross_entropy import VocabCut
from megalite.parallel.expert import Dispatcher
from megalite.parallel.head_exchange import kv_repeats
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

_INDEX = torch.int64.itemsize


def column_saved(linear: FusedColumnParallelLinear | ColumnParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """The input, as it was cut along the sequence; work that is put off keeps the gradient of the output, too."""
    in_features = next(linear.parameters()).shape[-1]
    x = size_of((tokens, in_features), dtype) // (linear.axis.size if linear.enter == "gather" else 1)
    out_features = linear.weight.shape[0] if isinstance(linear, ColumnParallelLinear) else sum(linear.sizes)
    return Saved(input=x, work=x + size_of((tokens, out_features), dtype))


def row_saved(linear: RowParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """The same; the sum over the ranks comes after everything that is kept."""
    x, y = (size_of((tokens, features), dtype) for features in (linear.weight.shape[1], linear.out_features))
    result = y // linear.axis.size if linear.sequence_parallel else y
    return Saved(input=x, work=x + y, last_results=result if linear.axis.size > 1 else 0)


def embedding_saved(embedding: VocabParallelEmbedding, tokens: int) -> Saved:
    """Token numbers of this rank's rows, and which tokens are not among them; on one rank those of the batch."""
    return Saved(own=tokens * (_INDEX + torch.bool.itemsize) if embedding.axis.size > 1 else 0)


def loss_saved(head: ColumnParallelLinear, tokens: int, dtype: torch.dtype) -> Saved:
    """Both gradients, which `linear_cross_entropy` makes in its forward pass."""
    dw = size_of(head.weight.shape, wide(dtype))
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
