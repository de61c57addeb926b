"""The transformer, one pipeline stage at a time: the base of every architecture.

A new architecture is a small file that subclasses `TransformerLayer` and `Transformer` and sets class attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.batch import MicroBatch
from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_key, dropout_saved
from megalite.kernels.rope import Rope, rope_tables
from megalite.kernels.saved import Saved, chain, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.attention import ParallelAttention
from megalite.nn.cache import Cache, rows_of
from megalite.nn.config import ModelConfig, rope_problems
from megalite.nn.context import EMBEDDING_SITE, Context, Site, layer_site
from megalite.nn.mlp import ParallelMLP
from megalite.nn.moe import MoELayer
from megalite.nn.multi_token import MultiTokenLayer, depths_saved, look_ahead, shown_as
from megalite.nn.norm import RMSNorm
from megalite.nn.position import PositionEmbedding
from megalite.nn.recompute import Recompute
from megalite.nn.saved import BatchShape, saved_by
from megalite.parallel.collectives import enter_parallel, gather_from, sequence_part
from megalite.parallel.context import cut_rows, pad_rows, padded_length, row_multiple
from megalite.parallel.cross_entropy import linear_cross_entropy, soft_cap
from megalite.parallel.data import Unit
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.saved import embedding_saved, logits_bytes, loss_saved
from megalite.parallel.shard import Shard, set_shard, shard_of
from megalite.parallel.tensor import ColumnParallelLinear, share_queue
from megalite.parallel.wgrad import WeightGradQueue


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model a stage is: stage `index` of `num_stages` holds global `layers`."""

    index: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.index == self.num_stages - 1


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x)); x [s, b, h] ([s / tp, b, h] if cut)."""

    norm_cls: type[nn.Module] = RMSNorm
    attention_cls: type[nn.Module] = ParallelAttention
    mlp_cls: type[nn.Module] = ParallelMLP
    moe_cls: type[nn.Module] = MoELayer
    """What takes the place of mlp_cls in the layers that model.moe_layers names."""
    recompute = Recompute()
    """What backward computes again inside the layer; the stage says so."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, index: int, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels = kernels if kernels is not None else Kernels()
        self.index, self.hidden_dropout = index, config.hidden_dropout
        self.attention_norm = self.norm_cls(config, mpu, kernels)
        self.attention = self.operator_cls(config, index)(config, mpu, index, kernels)
        self.mlp_norm = self.norm_cls(config, mpu, kernels)
        self.mlp = (
            self.moe_cls(config, mpu, index, kernels)
            if config.is_moe_layer(index)
            else self.mlp_cls(config, mpu, kernels)
        )

    def operator_cls(self, config: ModelConfig, index: int) -> type[nn.Module]:
        """What mixes positions in global layer `index`: attention, unless an architecture has other layers."""
        return self.attention_cls

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        y, bias = self.recompute.branch("attention", self.attention_norm, self.attention, x, context)
        x = self._add(y, bias, x, context, Site.ATTENTION_OUTPUT)
        y, bias = self.recompute.branch("mlp", self.mlp_norm, self.mlp, x, context)
        return self._add(y, bias, x, context, Site.MLP_OUTPUT)

    def saved(self, shape: BatchShape) -> Saved:
        """The sum of what norms, blocks and dropout keep, as far as it is not computed again."""
        attention, mlp = (
            self.recompute.branch_saved(part, saved_by(norm, shape), saved_by(block, shape), shape.stream)
            for part, norm, block in (
                ("attention", self.attention_norm, self.attention),
                ("mlp", self.mlp_norm, self.mlp),
            )
        )
        return chain(attention, dropout_saved(self.hidden_dropout), mlp, dropout_saved(self.hidden_dropout))

    def _add(self, y: Tensor, bias: Tensor | None, residual: Tensor, context: Context, site: Site) -> Tensor:
        """residual + dropout(y + bias)."""
        p = self.hidden_dropout if context.training else 0.0
        key = dropout_key(context.seed, context.batch.step, layer_site(self.index, site), y.device) if p else None
        return self.kernels.bias_dropout_add(y, bias, residual, p, key, context.token_index)


class Transformer(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head and loss on the last.

    Satisfies the pipeline's stage protocol. Class attributes choose the architecture: `layer_cls`, `norm_cls`, and
    whether positions are learned or rotary.
    """

    layer_cls: type[TransformerLayer] = TransformerLayer
    norm_cls: type[nn.Module] = RMSNorm
    learned_positions = False
    rotary_positions = True
    scaled_embeddings = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""

    def __init__(
        self,
        config: ModelConfig,
        mpu: ParallelState,
        stage: StageSpec | None = None,
        *,
        kernels: Kernels | None = None,
        recompute: str = "none",
        sequence_chunk: int = 0,
        recompute_stash: bool = False,
        recompute_cut_input: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        stage = stage if stage is not None else StageSpec(0, 1, range(config.num_layers))
        self.kernels = kernels = kernels if kernels is not None else Kernels()
        if self.rotary_positions and (problems := rope_problems(config)):
            raise ValueError("\n".join(problems))
        self.config, self.mpu, self.stage, self.seed = config, mpu, stage, seed
        self.sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self.recompute = Recompute.parse(
            recompute,
            mpu.last_call if recompute_stash else None,
            mpu.tp if recompute_cut_input and not self.sequence_parallel else None,
        )
        self.queue = WeightGradQueue(accumulate=kernels.wgrad)
        self.embedding = self._embedding() if stage.is_first else None
        self.positions = None
        if stage.is_first and self.learned_positions:
            self.positions = PositionEmbedding(config, mpu)
        # Keys are global layer numbers, so that parameter names do not depend on the layout.
        self.layers = nn.ModuleDict({str(i): self._layer(i) for i in stage.layers})
        self.final_norm = self.norm_cls(config, mpu, kernels) if stage.is_last else None
        self.head = self._head() if stage.is_last else None
        self.mtp = nn.ModuleDict(self._depths() if stage.is_last else {})
        self.losses_ahead: dict[int, Sequence[Tensor]] = {}
        """By number of the micro-batch, the summed loss of each depth of multi-token prediction."""
        self._holds_both_ends = False
        share_queue(self, self.queue)
        for module in self.modules():
            if isinstance(module, ParallelMLP):
                module.sequence_chunk = sequence_chunk

    def _layer(self, index: int) -> TransformerLayer:
        layer = self.layer_cls(self.config, self.mpu, index, self.kernels)
        layer.recompute = self.recompute
        return layer

    def _depths(self) -> dict[str, MultiTokenLayer]:
        """The layers of multi-token prediction, all with one embedding: the model's, or a copy that is tied to it."""
        config, embedding = self.config, self.embedding
        if config.mtp_layers and embedding is None:
            assert self.head is not None
            embedding = self._embedding()
            shard = shard_of(embedding.weight)
            set_shard(embedding.weight, replace(shard, tied_to="embedding.weight"))
            if config.tie_embeddings:
                embedding.weight = self.head.weight
        found: dict[str, MultiTokenLayer] = {}
        for number in range(config.mtp_layers):
            assert embedding is not None
            layer = self._layer(config.num_layers + number)
            found[str(number)] = MultiTokenLayer(
                config, self.mpu, 1 + number, embedding=embedding, layer=layer, norm_cls=self.norm_cls,
                kernels=self.kernels, recompute=self.recompute,
            )  # fmt: skip
        return found

    def _embedding(self) -> VocabParallelEmbedding:
        config = self.config
        return VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, axis=self.mpu.tp,
            sequence_parallel=self.sequence_parallel, init_std=config.init_std,
        )  # fmt: skip

    def _head(self) -> ColumnParallelLinear:
        config = self.config
        head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, axis=self.mpu.tp, bias=False, init_std=config.init_std
        )
        if config.tie_embeddings and self.embedding is not None:
            head.weight = self.embedding.weight
        elif config.tie_embeddings:
            shard = shard_of(head.weight)
            set_shard(head.weight, Shard(shard.name, shard.shape, shard.cuts, tied_to="embedding.weight"))
        return head

    def tie_to(self, first: Transformer) -> None:
        """Makes what is tied to the embedding on this stage that of `first`, a stage on the same rank, for good.

        Its gradient, its norm and its place in checkpoints are the business of `first` alone.
        """
        assert self.head is not None and first.embedding is not None and self is not first
        if self.config.tie_embeddings:
            self.head.weight = first.embedding.weight
        for layer in self._ahead:
            layer.embedding.weight = first.embedding.weight
        self._holds_both_ends = first._holds_both_ends = True

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the activations between stages."""
        return next(self.parameters()).dtype

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """The shape of the activations between stages, [s (/ tp), b, h]."""
        length = padded_length(batch.seq_len, self._row_multiple) // self.mpu.cp.size
        return length // self.mpu.tp.size if self.sequence_parallel else length, batch.size, self.config.hidden_size

    @property
    def _row_multiple(self) -> int:
        return row_multiple(self.mpu.cp.size, self.mpu.tp.size, self.sequence_parallel)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states in (None on the first stage), hidden states out; the last stage returns the summed loss."""
        context = self._context(batch)
        x = self._embed(context) if x is None else x
        x = self.recompute.run(self.layers.values(), x, context)
        return self._loss(x, context) if self.stage.is_last else x

    def batch_shape(
        self,
        row_length: int,
        size: int,
        *,
        device: torch.device,
        has_documents: bool = False,
        is_padded: bool = False,
        expert_load: float = 1.0,
    ) -> BatchShape:
        """A micro-batch of `size` rows of `row_length` tokens, padded and cut as in forward."""
        length = padded_length(row_length, self._row_multiple)
        is_padded = is_padded or length > row_length
        return BatchShape(
            seq_len=length // self.mpu.cp.size,
            size=size,
            row_length=row_length,
            width=self.config.hidden_size,
            parts=self.mpu.tp.size if self.sequence_parallel else 1,
            dtype=self.hidden_dtype,
            device=device,
            rotary=self.rotary_positions,
            has_documents=has_documents or length > row_length,
            is_padded=is_padded,
            expert_load=expert_load,
        )

    def saved(self, shape: BatchShape) -> Saved:
        """What the stage keeps of a micro-batch, but for its loss, and for what all its layers share."""
        layers = [saved_by(layer, shape) for layer in self.layers.values()]
        parts = [self.recompute.run_saved(layers, shape.stream)] if layers else []
        if self.embedding is not None:
            parts = [embedding_saved(self.embedding, shape.tokens), dropout_saved(self.config.hidden_dropout), *parts]
        if self.final_norm is not None:
            parts.append(depths_saved(self._ahead, self.final_norm, shape))
        return chain(*parts)

    def loss_saved(self, shape: BatchShape) -> Saved:
        """What the loss keeps of a micro-batch: gradients that are made in its forward pass."""
        tokens = shape.tokens * (1 + len(self.mtp))
        return loss_saved(self.head, tokens, shape.dtype) if self.head is not None else Saved()

    def context_bytes(self, shape: BatchShape) -> int:
        """What the layers of a stage share, of a micro-batch: rotary tables, and token numbers for dropout."""
        tables = 2 * size_of((shape.tokens, self.config.rotary_dim // 2), wide(shape.dtype)) if shape.rotary else 0
        tables *= 2 if self.config.rope_local_theta else 1
        return tables + (size_of((shape.rows,), torch.int64) if self.config.hidden_dropout > 0.0 else 0)

    def logits_bytes(self, shape: BatchShape) -> int:
        """The most logits that exist at a time."""
        if self.head is None:
            return 0
        tokens, is_capped = shape.tokens * (1 + len(self.mtp)), self.config.logit_softcap > 0.0
        return logits_bytes(self.head, tokens, shape.dtype, shape.device, is_capped=is_capped)

    def logits(self, batch: MicroBatch) -> Tensor:
        """[s, b, vocab] of a model that is one stage, for evaluation."""
        assert self.stage.num_stages == 1, "logits need the whole model in one stage"
        return self.infer(None, batch)

    def infer(
        self,
        x: Tensor | None,
        batch: MicroBatch,
        cache: Cache | None = None,
        *,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states in and out as in forward; the last stage returns logits [s, b, vocab], whole on every tp rank.

        cache: of the tokens before these, to which it adds them (`batch` is one that it made). keep: picks the places
        whose logits are wanted from hidden states [s, b, h], for fewer logits (not under sequence parallelism).
        """
        context = self._context(batch, cache)
        hidden = self._embed(context) if x is None else x
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        if cache is not None:
            cache.advance(batch.seq_len)
        if not self.stage.is_last or self.head is None:
            return hidden
        if keep is not None:
            assert not self.sequence_parallel, "sequence parallelism has cut the places that are to be kept"
            hidden = keep(hidden)
        logits = soft_cap(self.head(self._enter_head(hidden)), self.config.logit_softcap)
        return gather_from(logits, self.mpu.tp, -1, self.config.vocab_size)

    def _context(self, batch: MicroBatch, cache: Cache | None = None) -> Context:
        rows = pad_rows(batch, self._row_multiple)
        batch, cut = cut_rows(rows, self.mpu.cp, self.config.common_window)
        index = sequence_part(batch.token_index, self.mpu.tp, self.sequence_parallel)
        rope, local = self._ropes(batch.positions, cache) if self.rotary_positions else (None, None)
        return Context(
            batch=batch, rows=rows, cut=cut, token_index=index, rope=rope, seed=self.seed, training=self.training,
            cache=cache, local_rope=local,
        )  # fmt: skip

    def _ropes(self, positions: Tensor, cache: Cache | None = None) -> tuple[Rope, Rope | None]:
        """Rotary tables of `positions`, and those of layers with a window where they have their own.

        With a cache, they are made once for all positions that it has room for.
        """
        if cache is not None:
            if cache.tables is None:
                cache.tables = self._ropes(torch.arange(cache.capacity, device=positions.device)[:, None])
            first, local = cache.tables
            return rows_of(first, positions), rows_of(local, positions) if local is not None else None
        config = self.config
        first = rope_tables(positions, config.rotary_dim, config.rope_theta, wide(self.hidden_dtype), config.rope)
        if not config.rope_local_theta:
            return first, None
        return first, rope_tables(positions, config.rotary_dim, config.rope_local_theta, wide(self.hidden_dtype))

    def _embed(self, context: Context) -> Tensor:
        assert self.embedding is not None, f"stage {self.stage.index} needs hidden states"
        x = self.embedding(context.batch.tokens)
        if self.scaled_embeddings:
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded to the dtype, as in training
        if self.positions is not None:
            x = x + self.positions(context.batch.positions)
        if self.config.hidden_dropout > 0.0 and self.training:
            key = dropout_key(self.seed, context.batch.step, EMBEDDING_SITE, x.device)
            x = self.kernels.dropout(x, self.config.hidden_dropout, key, context.token_index)
        return x

    def _normed(self, x: Tensor) -> Tensor:
        assert self.final_norm is not None, f"stage {self.stage.index} has no head"
        return self.final_norm(x)

    def _enter_head(self, x: Tensor) -> Tensor:
        return enter_parallel(self._normed(x), self.mpu.tp, self.sequence_parallel)

    @property
    def _ahead(self) -> list[MultiTokenLayer]:
        return [layer for layer in self.mtp.values() if isinstance(layer, MultiTokenLayer)]

    def _loss(self, x: Tensor, context: Context) -> Tensor:
        batch = context.batch
        if not (self.mtp and self.training):
            return self._cross_entropy(self._normed(x), batch.labels, batch.loss_mask)
        ahead = look_ahead(self._ahead, x, context)
        # One pass through the head, so that there is one gradient of it: next tokens, then those of each depth.
        weights = ahead.weights(self.config.mtp_loss_factor)
        losses = torch.zeros_like(weights)
        loss = self._cross_entropy(torch.cat([self._normed(x), *ahead.outputs], 1), ahead.labels, weights, losses)
        shown, *self.losses_ahead[batch.index] = ahead.sums(losses)
        return shown_as(loss, shown)

    def _cross_entropy(self, x: Tensor, labels: Tensor, mask: Tensor, rows: Tensor | None = None) -> Tensor:
        assert self.head is not None
        config = self.config
        return linear_cross_entropy(
            enter_parallel(x, self.mpu.tp, self.sequence_parallel), self.head.weight, labels, mask, axis=self.mpu.tp,
            vocab_size=config.vocab_size, queue=self.queue, label_smoothing=config.label_smoothing,
            z_loss=config.z_loss, softcap=config.logit_softcap, kernels=self.kernels, rows=rows,
        )  # fmt: skip

    def units(self) -> list[Unit]:
        """What is reduced and sharded together: embedding, each layer, head; a tied weight alone."""
        tied = self._tied_weights()
        first = [module for module in (self.embedding, self.positions) if module is not None]
        last = [module for module in (self.final_norm, self.head) if module is not None]
        groups: list[tuple[str, Sequence[nn.Module]]] = [("embedding", first)]
        groups += [(f"layers.{name}", [layer]) for name, layer in self.layers.items()]
        groups += [(f"mtp.{name}", [layer]) for name, layer in self.mtp.items()]
        groups += [("head", last)]
        units, taken = [], set(tied)
        for name, modules in groups:
            parameters = [p for module in modules for p in module.parameters() if p not in taken]
            taken.update(parameters)
            if parameters:
                units.append(Unit(name, parameters, modules=modules))
        if not tied or (self._holds_both_ends and self.embedding is None):
            return units
        shared = self._holds_both_ends
        users = [*first[:1], *(last if self.config.tie_embeddings else ()), *self.mtp.values()]
        return [Unit("tied", tied, tied=not shared, shared=shared, modules=users), *units]

    def _tied_weights(self) -> list[nn.Parameter]:
        """The embedding, or its copy, of a stage that is an end of the model, if both ends use it."""
        if not self.config.shares_embedding:
            return []
        head = self.head if self.config.tie_embeddings else None
        users = [self.embedding, head, *(layer.embedding for layer in self._ahead)]
        return [user.weight for user in users if user is not None][:1]
