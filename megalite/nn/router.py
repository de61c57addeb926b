"""The router of a mixture of experts: scores, choices, balancing losses, and what it counts.

Everything is at least in float32. What couples tokens (capacity, expert choice, sinkhorn) couples those of one row of
the batch, gathered over the ranks that cut it, so that no layout and no micro-batch size changes a choice; losses are
means over the global batch, whose sizes are known before the first forward. Top-k and its losses follow Switch
(Fedus et al., 2021, arXiv:2101.03961) and ST-MoE (arXiv:2202.08906), sigmoid scores with groups and a bias DeepSeek-V3
(arXiv:2412.19437), expert choice Zhou et al. (2022, arXiv:2202.09368), sinkhorn Clark et al. (2022, arXiv:2202.01169).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_key, uniform
from megalite.kernels.saved import Saved, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context, Site, layer_site
from megalite.nn.saved import BatchShape
from megalite.parallel.collectives import gather_from, sequence_part
from megalite.parallel.expert import Assignment
from megalite.parallel.random import normal_
from megalite.parallel.shard import Shard, ShardedModule, set_shard
from megalite.parallel.tensor import init_unless_meta

SINKHORN_ROUNDS = 16
"""Fixed, so that a tolerance cannot end the loop earlier on one layout than on another."""


class _AttachLoss(torch.autograd.Function):
    """x, unchanged; in backward `loss` is told the gradient `scale` besides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.shape, ctx.scale, ctx.dtype, ctx.device = loss.shape, scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full(ctx.shape, ctx.scale, dtype=ctx.dtype, device=ctx.device), None


def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """x, whose backward pass also runs that of the scalar `loss`, from the gradient `scale`.

    A loss that is made in the middle of a pipeline needs no way to its end.
    """
    return _AttachLoss.apply(x, loss, scale)


@dataclass
class RouterTally:
    """What a router counted in one micro-batch on this rank; sums over ranks and micro-batches are the step's.

    tokens: float64 [num_experts], choices before drops. extra: float64 [len(EXTRA)], see there.
    """

    tokens: Tensor
    extra: Tensor


EXTRA = ("dropped", "entropy", "aux_loss", "z_loss", "tokens")
"""Choices dropped, summed entropy (nats) of the scores over the tokens, the losses with their weights, and how many
tokens there were (padding apart)."""


@dataclass(frozen=True)
class RouterLoss:
    """The balancing loss of one router and micro-batch, on its way: counts of other ranks may still travel."""

    finish: Callable[[], Tensor]
    """This rank's share of the loss, a scalar."""
    scale: float

    def attach(self, y: Tensor) -> Tensor:
        """y; its backward pass also runs that of the loss."""
        loss = self.finish()
        return attach_loss(y, loss, self.scale) if torch.is_grad_enabled() and loss.requires_grad else y


FRACTIONS = "*.router.fractions"
"""The pattern of the names of what routers keep of the step before; a checkpoint of weights alone has none."""


class Router(ShardedModule):
    """Chooses experts for x [s_local, b, h]: this rank's rows of the sequence, cut over `cut`, or all rows (None).

    Its parameters are the same on every rank; their gradients are partial sums over `cut`. `expert_bias` and
    `fractions` (each expert's share of the last step's choices) are buffers that `finish_step` moves.
    """

    expert_bias: Tensor
    fractions: Tensor

    def __init__(
        self, config: ModelConfig, mpu: ParallelState, layer: int, cut: Axis | None, kernels: Kernels | None = None
    ):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.config, self.layer, self.cut = config, layer, cut if cut is not None and cut.size > 1 else None
        self.row_axis = mpu.tp_cp if self.cut is not None else mpu.cp  # ranks with parts of the same rows
        partial = (self.cut,) if self.cut is not None else ()
        experts, hidden = config.num_experts, config.hidden_size
        self.weight = set_shard(
            nn.Parameter(torch.empty(experts, hidden)), Shard("weight", (experts, hidden), partial=partial)
        )
        self.bias = None
        if config.router_bias:
            self.bias = set_shard(
                nn.Parameter(torch.zeros(experts)), Shard("bias", (experts,), partial=partial, decay=False)
            )
        for name, value in (("expert_bias", 0.0), ("fractions", 1.0 / experts)):
            self.register_buffer(name, set_shard(torch.full((experts,), value), Shard(name, (experts,))))
        self.tallies: dict[int, RouterTally] = {}
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """Weight N(0, init_std^2), bias zero; no expert is preferred."""
        normal_(self.weight, seed, self.config.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.expert_bias.zero_()
        self.fractions.fill_(1.0 / self.config.num_experts)

    def forward(self, x: Tensor, context: Context) -> tuple[Assignment, RouterLoss | None]:
        """The choices for x.flatten(0, 1), and in training the loss to attach to the output of the layer."""
        return self.route(self.logits(x, context), context)

    def route(self, logits: Tensor, context: Context) -> tuple[Assignment, RouterLoss | None]:
        """`forward`, from logits [s_local, b, num_experts] that are there already."""
        scores = logits.softmax(-1) if self.config.router_score == "softmax" else logits.sigmoid()
        mask = self._rows_here(context.batch.token_mask)
        chosen = self._choose(scores.detach(), logits.detach(), context)
        gates = self._gates(logits, scores, chosen)
        if mask is not None:
            chosen = chosen & mask[..., None]
        kept = self._keep(gates.detach(), chosen, context) if self.config.capacity_factor else chosen
        assignment = self._assign(kept, gates, context)
        if not context.training:
            return assignment, None
        return assignment, self._loss(logits, scores, chosen, kept, mask, context)

    def logits(self, x: Tensor, context: Context) -> Tensor:
        """[s_local, b, num_experts], at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, jitter = x.to(wide), self.config.router_jitter
        if jitter and context.training:
            key = dropout_key(context.seed, context.batch.step, layer_site(self.layer, Site.ROUTER_JITTER), x.device)
            index = self._rows_here(context.batch.token_index)
            assert index is not None
            x = x * (1.0 - jitter + 2.0 * jitter * uniform(key, index, x.shape[-1], wide))
        bias = self.bias.to(wide) if self.bias is not None else None
        return F.linear(x, self.weight.to(wide), bias)

    def _rows_here(self, whole: Tensor | None) -> Tensor | None:
        """This rank's rows (dim 0) of what every rank holds whole."""
        return whole if whole is None or self.cut is None else sequence_part(whole, self.cut, True)

    def _whole(self, local: Tensor, context: Context) -> Tensor:
        """Whole rows of what is cut over tp and cp (without gradient)."""
        part = local if self.cut is None else gather_from(local, self.cut, 0, context.batch.seq_len)
        return context.cut.whole(part)

    def _part(self, whole: Tensor, context: Context) -> Tensor:
        """The inverse of `_whole`."""
        part = self._rows_here(whole if context.cut.axis.size == 1 else context.cut.here(whole))
        assert part is not None
        return part

    def _choose(self, scores: Tensor, logits: Tensor, context: Context) -> Tensor:
        """bool [s_local, b, num_experts]: the experts of each token, before padding and full experts are taken out."""
        config = self.config
        if config.routing == "top_k" or (config.routing == "sinkhorn" and not context.training):
            bias = self.expert_bias if config.expert_bias else None
            groups = {
                "num_groups": config.num_expert_groups,
                "top_groups": config.top_k_groups,
                "group_top_k": config.group_top_k,
            }
            return self.kernels.choose_experts(scores, config.top_k, bias, **groups)
        mask = context.rows.token_mask
        if config.routing == "sinkhorn":
            chosen = self.kernels.choose_experts(sinkhorn(self._whole(logits, context), mask), config.top_k)
        else:
            whole = self._whole(scores, context)
            if mask is not None:
                whole = whole.masked_fill(~mask[..., None], -math.inf)
            chosen = _first_places(whole, self._capacity(context, config.capacity_factor or 1.0))
        return self._part(chosen, context)

    def _gates(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """[s_local, b, num_experts]: the weight of each chosen expert, without the expert bias; 0 for the others."""
        config = self.config
        if config.router_normalize and config.router_score == "softmax":
            gates = logits.masked_fill(~chosen, -math.inf).softmax(-1)
        else:
            gates = scores * chosen
            if config.router_normalize:
                gates = gates / (gates.sum(-1, keepdim=True) + config.router_norm_eps)
        return gates * config.router_scale

    def _capacity(self, context: Context, factor: float) -> int:
        """Places of an expert in one row, as it was before it was padded and cut."""
        return math.ceil(context.batch.row_length * self.config.top_k / self.config.num_experts * factor)

    def _keep(self, gates: Tensor, chosen: Tensor, context: Context) -> Tensor:
        """`chosen` without the tokens that find their expert full; all tokens of a row compete, wherever they are."""
        capacity = self._capacity(context, self.config.capacity_factor)
        priority = self._whole(gates.masked_fill(~chosen, -math.inf), context)
        if self.config.drop_policy == "position":
            wanted = priority > -math.inf
            kept = wanted & (wanted.cumsum(0) <= capacity)
        else:
            kept = _first_places(priority, capacity)
        return self._part(kept, context)

    def _assign(self, kept: Tensor, gates: Tensor, context: Context) -> Assignment:
        """Pairs (token, expert), by expert and then by token."""
        config, by_expert = self.config, kept.flatten(0, 1).t()
        expert, token = by_expert.nonzero(as_tuple=True)
        probs = gates.flatten(0, 1)[token, expert]
        counts = by_expert.sum(1)
        if config.pad_to_capacity:
            places = kept.shape[1] * min(kept.shape[0], self._capacity(context, config.capacity_factor))
            return _padded(token, expert, probs, counts, places, by_expert.shape[1])
        return Assignment(token, expert, probs, counts)

    def _loss(
        self, logits: Tensor, scores: Tensor, chosen: Tensor, kept: Tensor, mask: Tensor | None, context: Context
    ) -> RouterLoss:
        """Counts this micro-batch and starts the sums that its losses need."""
        config, totals = self.config, context.batch.totals
        share = scores if config.router_score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        weight = mask.to(share.dtype) if mask is not None else None
        counts = chosen.sum(0, dtype=share.dtype)  # [b, num_experts]
        arriving = None
        if config.aux_loss in ("sequence", "micro_batch") and config.aux_loss_coeff and self.row_axis.size > 1:
            arriving = self.row_axis.start_all_reduce(counts.clone())
        self.tallies[context.batch.index] = tally = self._tally(share.detach(), chosen, kept, weight)

        def finish() -> Tensor:
            aux = self._aux(share, arriving.wait() if arriving is not None else counts, weight, context)
            tally.extra[2] = aux.detach()
            if not config.router_z_loss:
                return aux
            z = _masked(logits.logsumexp(-1).square(), weight).sum() * (
                config.router_z_loss / max(totals.num_tokens, 1)
            )
            tally.extra[3] = z.detach()
            return aux + z

        return RouterLoss(finish, totals.loss_scale)

    def _tally(self, share: Tensor, chosen: Tensor, kept: Tensor, weight: Tensor | None) -> RouterTally:
        tokens = chosen.sum((0, 1)).to(torch.float64)
        extra = torch.zeros(len(EXTRA), dtype=torch.float64, device=share.device)
        extra[0] = tokens.sum() - kept.sum()
        extra[1] = _masked(torch.special.entr(share).sum(-1), weight).sum()
        extra[4] = weight.sum() if weight is not None else share[..., 0].numel()
        return RouterTally(tokens, extra)

    def _aux(self, share: Tensor, counts: Tensor, weight: Tensor | None, context: Context) -> Tensor:
        """This rank's share of coeff * num_experts * sum_i f_i P_i: fractions f of all tokens, its own part of P.

        counts [b, num_experts]: choices in each row, over all ranks that hold parts of it.
        """
        config, batch = self.config, context.batch
        factor = config.aux_loss_coeff * config.num_experts
        probs = _masked(share, weight).sum(0)  # [b, num_experts]
        if config.aux_loss == "none" or not config.aux_loss_coeff:
            return probs.new_zeros(())
        if config.aux_loss in ("global", "global_exact"):
            return factor / max(batch.totals.num_tokens, 1) * (self.fractions.to(probs.dtype) * probs.sum(0)).sum()
        mask = context.rows.token_mask
        lengths = mask.sum(0) if mask is not None else torch.full_like(batch.samples, batch.row_length)
        if config.aux_loss == "micro_batch":
            counts, probs = counts.sum(0, keepdim=True), probs.sum(0, keepdim=True)
            lengths, factor = lengths.sum(0, keepdim=True), factor * batch.size
        # With n tokens in a row: f = counts / (k n), P = probs / n; the loss is the mean over the rows of the batch.
        scale = factor / (batch.totals.num_rows * config.top_k) / lengths.clamp(min=1).to(probs.dtype).square()
        return (scale[:, None] * counts * probs).sum()

    def pairs(self, shape: BatchShape) -> int:
        """(token, expert) pairs that this rank makes of its tokens: all choices, or all places."""
        config, tokens = self.config, self._tokens_here(shape)
        factor = config.capacity_factor or (1.0 if config.routing == "expert_choice" else 0.0)
        if not factor:
            return tokens * config.top_k
        places = math.ceil(shape.row_length * config.top_k / config.num_experts * factor)
        places_here = places * tokens // shape.row_length
        return min(places_here * config.num_experts, tokens * config.num_experts)

    def _tokens_here(self, shape: BatchShape) -> int:
        return shape.tokens // (self.cut.size if self.cut is not None else 1)

    def saved(self, shape: BatchShape) -> Saved:
        """Scores and gates of all experts for each token, and what losses need; exact where no choice is dropped."""
        config, dtype, tokens = self.config, wide(shape.dtype), self._tokens_here(shape)
        x, of_all, one = (size_of((tokens, n), dtype) for n in (shape.width, config.num_experts, 1))
        mask = size_of((tokens, config.num_experts), torch.bool)
        # The input in float32: of a float32 model the input itself, unless jitter makes another.
        own, entering = (2 * x, 0) if config.router_jitter else (0, x) if dtype == shape.dtype else (x, 0)
        if dtype != shape.dtype:
            own += size_of(self.weight.shape, dtype)
        by_softmax = config.router_score == "softmax"
        gates_are_scores = not (config.router_normalize and by_softmax)
        has_aux = config.aux_loss != "none" and config.aux_loss_coeff > 0.0
        if gates_are_scores or has_aux:
            own += of_all  # scores
        own += mask
        if config.router_normalize:
            own += of_all + (0 if by_softmax else one)  # gates, and the sums they were divided by
        if has_aux:
            own += self._aux_saved(shape, dtype) + (0 if by_softmax else one)
        if config.router_z_loss:
            own += of_all + one
        if config.pad_to_capacity:  # from pairs to places
            own += self.pairs(shape) * (3 * torch.int64.itemsize + dtype.itemsize)
        summed = has_aux and config.aux_loss in ("sequence", "micro_batch") and self.row_axis.size > 1
        counts = size_of((shape.size, config.num_experts), dtype) if summed else 0
        return Saved(input=entering, own=own, results=counts)

    def _aux_saved(self, shape: BatchShape, dtype: torch.dtype) -> int:
        """What the sums of probabilities are multiplied by."""
        if self.config.aux_loss in ("global", "global_exact"):
            return 0 if dtype == self.fractions.dtype else size_of(self.fractions.shape, dtype)
        rows = shape.size if self.config.aux_loss == "sequence" else 1
        return size_of((rows, self.config.num_experts), dtype)

    def see(self, tokens: Tensor) -> None:
        """Takes the fractions of these choices, float64 [num_experts], of all ranks and micro-batches."""
        total = tokens.sum()
        self.fractions.copy_(torch.where(total > 0, tokens / total.clamp(min=1), self.fractions))

    def rebalance(self, tokens: Tensor) -> None:
        """Makes experts with less than the mean of these choices more likely, and the others less."""
        if self.config.expert_bias:
            self.expert_bias += self.config.expert_bias_rate * torch.sign(tokens.mean() - tokens).to(self.expert_bias)


def _masked(x: Tensor, weight: Tensor | None) -> Tensor:
    """x [s, b, ...] without the rows of padding."""
    if weight is None:
        return x
    return x * weight.view(*weight.shape, *[1] * (x.dim() - weight.dim()))


def _first_places(priority: Tensor, places: int) -> Tensor:
    """bool [s, b, num_experts]: for each row and expert the `places` tokens of highest priority, -inf never."""
    order = priority.sort(dim=0, descending=True, stable=True).indices[:places]
    chosen = torch.zeros_like(priority, dtype=torch.bool).scatter_(0, order, True)
    return chosen & (priority > -math.inf)


def sinkhorn(logits: Tensor, mask: Tensor | None = None, rounds: int = SINKHORN_ROUNDS) -> Tensor:
    """exp(logits) [s, b, E], scaled so that in each row of the batch tokens weigh the same and experts weigh the same.

    mask: bool [s, b], tokens that count.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    cost = (logits.to(wide) - logits.amax(-1, keepdim=True)).exp()
    if mask is not None:
        cost = cost * mask[..., None]
    num_tokens = (cost.sum(-1) > 0).sum(0).clamp(min=1)  # [b]
    of_expert = cost.new_ones(*cost.shape[1:])
    of_token = cost.new_ones(cost.shape[:2])
    for _ in range(rounds):
        of_token = 1.0 / (num_tokens * (cost * of_expert).sum(-1) + 1e-8)
        of_expert = 1.0 / (cost.shape[-1] * (cost * of_token[..., None]).sum(0) + 1e-8)
    return cost * of_expert * of_token[..., None]


def _padded(token: Tensor, expert: Tensor, probs: Tensor, counts: Tensor, places: int, zero_row: int) -> Assignment:
    """The same pairs with `places` for every expert; unused ones hold the row of zeros and weigh nothing."""
    num_experts = counts.shape[0]
    first = counts.cumsum(0) - counts
    place = torch.arange(len(token), device=token.device) - first[expert] + expert * places
    tokens = token.new_full((num_experts * places,), zero_row).index_copy(0, place, token)
    weights = probs.new_zeros(num_experts * places).index_copy(0, place, probs)
    experts = torch.arange(num_experts, device=token.device).repeat_interleave(places)
    return Assignment(tokens, experts, weights, torch.full_like(counts, places), has_unused=True)


@dataclass(frozen=True)
class RouterLoads:
    """A step's choices, over all ranks and micro-batches, for the MoE layers of the whole model.

    layers: global numbers. tokens: float64 [layers, num_experts]. extra: float64 [layers, len(EXTRA)].
    """

    layers: tuple[int, ...]
    tokens: Tensor
    extra: Tensor


@torch.no_grad()
def finish_step(
    routers: Sequence[Router], config: ModelConfig, mpu: ParallelState, *, updated: bool, survey: bool = False
) -> RouterLoads:
    """Sums what all routers counted in the step, and moves their buffers if the weights moved; on every rank.

    routers: those of this rank's stages. The counts of a pipeline's two copies of a stage (dualpipe) add up, too. After
    a `survey`, a forward pass for its counts alone, only the fractions move.
    """
    layers = tuple(layer for layer in config.all_layers if config.is_moe_layer(layer))
    width = config.num_experts + len(EXTRA)
    device = routers[0].weight.device if routers else mpu.world.device
    board = torch.zeros(len(layers), width, dtype=torch.float64, device=device)
    for router in routers:
        for tally in router.tallies.values():
            board[layers.index(router.layer)] += torch.cat((tally.tokens, tally.extra))
        router.tallies.clear()
    tokens_over = mpu.tp_dp_cp if tokens_are_cut(mpu) else mpu.dp_cp
    board = mpu.pp.all_reduce(tokens_over.all_reduce(board))
    loads = RouterLoads(layers, board[:, : config.num_experts], board[:, config.num_experts :])
    for router in routers:
        tokens = loads.tokens[layers.index(router.layer)]
        if updated or survey:
            router.see(tokens)
        if updated:
            router.rebalance(tokens)
    return loads


def tokens_are_cut(mpu: ParallelState) -> bool:
    """Whether the tensor-parallel ranks of an MoE layer hold different tokens."""
    return mpu.config.sequence_parallel or mpu.config.cut_expert_tokens
