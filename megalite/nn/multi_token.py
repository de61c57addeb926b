"""Multi-token prediction: further layers that learn to predict the tokens after the next one (DeepSeek-V3).

Depth k = 1, 2, .. of a model sees at place i what depth k - 1 made of it and token i + k, and predicts token i + k + 1
(DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2). Each has a layer of its own, numbered after those of the model;
embedding and head are those of the model. The loss of a depth is a mean over its labels in the whole global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.batch import MicroBatch
from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_key, dropout_saved
from megalite.kernels.saved import Saved, beside, chain, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context, embedding_site
from megalite.nn.recompute import Recompute
from megalite.nn.saved import BatchShape, saved_by
from megalite.parallel.collectives import scatter_to
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.saved import embedding_saved
from megalite.parallel.tensor import ColumnParallelLinear

_SHIFTED = ("tokens", "labels", "loss_mask", "token_mask")


def rows_ahead(rows: MicroBatch, depth: int) -> MicroBatch:
    """Whole rows as `depth` sees them: at each place the token, and the label, of `depth` places later.

    A label counts where it does for the next token, as long as it lies in the same row and, where attention stops at
    documents, in the same document; the token of other places is padding to routers.
    """
    here = torch.ones_like(rows.tokens, dtype=torch.bool) if rows.token_mask is None else rows.token_mask
    there = _later(here, depth)
    if rows.documents is not None:
        there = there & (_later(rows.documents, depth) == rows.documents)
    return replace(
        rows,
        tokens=_later(rows.tokens, depth),
        labels=_later(rows.labels, depth),
        loss_mask=_later(rows.loss_mask, depth) * there,
        token_mask=here & there,
    )


def _later(x: Tensor, depth: int) -> Tensor:
    """x [s, ...] of `depth` rows later, zeros after the end."""
    return F.pad(x[depth:], (0, 0) * (x.dim() - 1) + (0, min(depth, x.shape[0])))


def count_ahead(batches: Sequence[MicroBatch], num_depths: int) -> Tensor:
    """int64 [num_depths, 2]: labels that count and tokens of each depth in whole rows."""
    counts = torch.zeros(num_depths, 2, dtype=torch.int64)
    for batch in batches:
        for depth in range(1, num_depths + 1):
            there = rows_ahead(batch, depth)
            assert there.token_mask is not None
            counts[depth - 1, 0] += there.loss_mask.count_nonzero()
            counts[depth - 1, 1] += there.token_mask.count_nonzero()
    return counts


def context_ahead(context: Context, depth: int) -> Context:
    """What the layer of a depth needs beside activations; shifted before the rows are cut over cp."""
    totals = context.batch.totals
    assert len(totals.ahead) >= depth, "multi-token prediction needs the counts of the global batch (count_ahead)"
    rows = replace(rows_ahead(context.rows, depth), totals=replace(totals, num_tokens=totals.ahead[depth - 1][1]))
    if context.cut.axis.size == 1:
        return replace(context, batch=rows, rows=rows)
    here = {name: context.cut.here(getattr(rows, name)) for name in _SHIFTED}
    return replace(context, batch=replace(context.batch, **here, totals=rows.totals), rows=rows)


class MultiTokenLayer(nn.Module):
    """Depth k of the prediction: layer(projection([norm(embedding of token i + k), norm(h)])), h that of depth k - 1.

    x [s, b, h] (cut like any layer's input) -> (the hidden states of this depth, the same normed for the head). The
    projection is cut over tp along its outputs. `embedding` is the model's own, or on another pipeline stage its copy.
    """

    def __init__(
        self,
        config: ModelConfig,
        mpu: ParallelState,
        depth: int,
        *,
        embedding: VocabParallelEmbedding,
        layer: nn.Module,
        norm_cls: type[nn.Module],
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        self.depth, self.hidden_dropout = depth, config.hidden_dropout
        self.kernels, self.recompute = kernels, recompute
        self.sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self.embedding = embedding
        self.embedding_norm = norm_cls(config, mpu, kernels)
        self.hidden_norm = norm_cls(config, mpu, kernels)
        self.projection = ColumnParallelLinear(
            2 * config.hidden_size, config.hidden_size, axis=mpu.tp, bias=False,
            sequence_parallel=self.sequence_parallel, gather_output=True, init_std=config.init_std,
        )  # fmt: skip
        self.layer = layer
        self.final_norm = norm_cls(config, mpu, kernels)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """`context`: that of this depth (`context_ahead`)."""
        both = torch.cat((self.embedding_norm(self._embed(context)), self.hidden_norm(x)), -1)
        y = self.projection(both)
        if self.sequence_parallel:
            y = scatter_to(y, self.projection.axis, 0).clone()  # a view of whole rows would keep them
        y = self.recompute.run((self.layer,), y, context)
        return y, self.final_norm(y)

    def _embed(self, context: Context) -> Tensor:
        # Not a call of the module: under ZeRO-3 that would say that the model begins anew.
        x = self.embedding.forward(context.batch.tokens)
        if self.hidden_dropout > 0.0 and context.training:
            key = dropout_key(context.seed, context.batch.step, embedding_site(self.depth), x.device)
            x = self.kernels.dropout(x, self.hidden_dropout, key, context.token_index)
        return x

    def saved(self, shape: BatchShape) -> Saved:
        """What enters the norms and the projection, and what the layer keeps; without the final norm."""
        embedded = chain(
            embedding_saved(self.embedding, shape.tokens),
            dropout_saved(self.hidden_dropout),
            saved_by(self.embedding_norm, shape),
        )
        both, linear = 2 * shape.stream, self.projection
        work = both + size_of((shape.tokens, linear.weight.shape[0]), shape.dtype)
        return chain(
            beside(saved_by(self.hidden_norm, shape), replace(embedded, input=0, own=embedded.own + embedded.input)),
            Saved(input=both, work=work),
            self.recompute.run_saved([saved_by(self.layer, shape)], shape.stream),
        )


def depths_saved(layers: Iterable[MultiTokenLayer], final_norm: nn.Module, shape: BatchShape) -> Saved:
    """What all depths and the model's final norm keep, where each of them takes what the one before it gave."""
    norms, bodies = [final_norm], list[Saved]()
    for layer in layers:
        bodies.append(layer.saved(replace(shape, is_padded=True)))
        norms.append(layer.final_norm)
    kept = saved_by(norms.pop(), shape)
    while bodies:
        kept = beside(saved_by(norms.pop(), shape), chain(bodies.pop(), kept))
    return kept


@dataclass(frozen=True)
class Ahead:
    """What the depths made of a micro-batch. batches: it, and as each depth sees it; outputs: normed, for the head."""

    batches: Sequence[MicroBatch]
    outputs: Sequence[Tensor]

    @property
    def labels(self) -> Tensor:
        """int64 [s, (1 + depths) b]: those of the next token, then those of each depth."""
        return torch.cat([batch.labels for batch in self.batches], 1)

    def weights(self, factor: float) -> Tensor:
        """What each of them weighs in a sum that is divided by the number of next tokens, at least float32."""
        (main, *further), dtype = self.batches, wide(self.outputs[0].dtype)
        totals, weights = main.totals, [main.loss_mask.to(dtype)]
        for batch, (num_labels, _) in zip(further, totals.ahead, strict=True):
            share = factor / len(further) * totals.num_labels / max(num_labels, 1)
            weights.append(batch.loss_mask.to(dtype) * share)
        return torch.cat(weights, 1)

    def sums(self, losses: Tensor) -> list[Tensor]:
        """The losses of the labels that count, summed by depth, without the factor."""
        parts = losses.split(self.batches[0].size, 1)
        return [(part * batch.loss_mask).sum() for part, batch in zip(parts, self.batches, strict=True)]


def look_ahead(layers: Sequence[MultiTokenLayer], x: Tensor, context: Context) -> Ahead:
    """All depths, from the last hidden states x of the model."""
    batches, outputs = [context.batch], list[Tensor]()
    for layer in layers:
        there = context_ahead(context, layer.depth)
        x, output = layer(x, there)
        batches.append(there.batch)
        outputs.append(output)
    return Ahead(batches, outputs)


class _ShownAs(torch.autograd.Function):
    """The value of `shown`, and the gradient of `loss`."""

    @staticmethod
    def forward(ctx: object, loss: Tensor, shown: Tensor) -> Tensor:
        return shown.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def shown_as(loss: Tensor, shown: Tensor) -> Tensor:
    """`shown`, whose backward pass is that of `loss`: what is logged is the loss of the next token alone."""
    return _ShownAs.apply(loss, shown)
