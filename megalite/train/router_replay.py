"""Router logits replayed under other rules: how evenly experts are used, what is dropped, what has to travel.

Choices, drops and bias updates are those of `megalite.nn.router` itself, on all rows of a recorded step at once;
nothing of what couples tokens reaches beyond a row, so no layout would choose otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
import yaml
from torch import Tensor

from megalite.batch import BatchTotals, MicroBatch
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig, MoEConfig
from megalite.nn.context import Context
from megalite.nn.router import Router, finish_step
from megalite.parallel.expert import Assignment
from megalite.train.metrics import RouterStats
from megalite.train.router_record import Recording


class ReplayError(ValueError):
    """What was asked for cannot be done; the message says why."""


# ---- rules


@dataclass(frozen=True)
class Rule:
    """Fields of the recorded model that are changed; with none, routing is as it was recorded."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)

    def model(self, moe: MoEConfig) -> ModelConfig:
        """A model of one MoE layer that routes by `moe` with the changes; its other sizes mean nothing."""
        options: dict[str, Any] = {item.name: getattr(moe, item.name) for item in fields(MoEConfig)}
        return ModelConfig(**(options | self.changes | {"num_layers": 1, "moe_layers": "all"}))


def parse_rule(text: str) -> Rule:
    """`[name:] field=value ...`."""
    name, colon, rest = text.partition(":")
    words = (rest if colon else text).split()
    kinds, changes = get_type_hints(MoEConfig), {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in kinds or key in ("num_experts", "moe_layers"):
            known = ", ".join(name for name in kinds if name not in ("num_experts", "moe_layers"))
            raise ReplayError(f"rule {text!r}: {word!r} is not field=value; fields are {known}")
        changes[key] = _value(text, key, yaml.safe_load(value), kinds[key])
    return Rule(name.strip() if colon else " ".join(words), changes)


def _value(rule: str, key: str, value: Any, kind: Any) -> Any:
    """`value` as the field's type."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ReplayError(f"rule {rule!r}: {key}={value} can be {', '.join(get_args(kind))}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in (kind, *get_args(kind)):
        raise ReplayError(f"rule {rule!r}: {key}={value} must be of type {getattr(kind, '__name__', kind)}")
    return value


# ---- logits


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Logits of a router with favourites: skew x what is common to all tokens + topic of the row + noise of the token.

    Each is normal with standard deviation 1; a token's own part and its row's share one.
    """

    experts: int
    top_k: int
    hidden_size: int
    layers: int
    steps: int
    rows: int
    seq_len: int
    skew: float
    topics: float
    """Part of a token's variance that it shares with its row."""
    seed: int

    def recordings(self) -> Iterator[list[Recording]]:
        """Layer by layer."""
        moe = MoEConfig(num_experts=self.experts, top_k=self.top_k)
        for layer in range(self.layers):
            generator = torch.Generator().manual_seed(self.seed + layer)
            favour = self.skew * torch.randn(self.experts, generator=generator)
            yield [self._step(step, layer, favour, moe, generator) for step in range(1, self.steps + 1)]

    def _step(self, step: int, layer: int, favour: Tensor, moe: MoEConfig, generator: torch.Generator) -> Recording:
        row = torch.randn(self.rows, 1, self.experts, generator=generator)
        token = torch.randn(self.rows, self.seq_len, self.experts, generator=generator)
        return Recording(
            step=step,
            layer=layer,
            hidden_size=self.hidden_size,
            moe=moe,
            logits=favour + math.sqrt(self.topics) * row + math.sqrt(1.0 - self.topics) * token,
            mask=torch.ones(self.rows, self.seq_len, dtype=torch.bool),
            samples=torch.arange(self.rows) + (step - 1) * self.rows,
            expert_bias=torch.zeros(self.experts),
        )


# ---- simulation


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one layer sends in one step between the expert-parallel ranks, one way."""

    pairs_leaving: int
    """(token, expert) pairs whose expert is on another rank than the token."""
    tokens_leaving: int
    """The same, counting a token once for each rank that it goes to: what a deduplicating exchange would send."""
    rank_load: float
    """Pairs that arrive at the fullest rank / mean."""
    unserved: int
    """Tokens that no expert takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutcome:
    """One rule, layer and step."""

    stats: RouterStats
    traffic: Traffic
    num_tokens: int


def traffic_of(assignment: Assignment, mask: Tensor, num_experts: int, ep: int) -> Traffic:
    """Counts for tokens in the order of mask.flatten(), mask [s, b], where row b is on rank b mod ep."""
    num_rows, per_rank = mask.shape[1], num_experts // ep
    real = assignment.token < mask.numel()
    token, place = assignment.token[real], assignment.expert[real] // per_rank
    source = token % num_rows % ep
    pairs = torch.bincount(source * ep + place, minlength=ep * ep).view(ep, ep)
    if not bool(real.all()):  # every expert gets as many rows from each rank, empty or not
        pairs = (assignment.counts.view(ep, per_rank).sum(1) // ep).expand(ep, ep)
    once = torch.unique(token * ep + place)
    arriving = pairs.sum(0).double()
    return Traffic(
        pairs_leaving=int(pairs.sum() - pairs.diagonal().sum()),
        tokens_leaving=int((once // ep % num_rows % ep != once % ep).sum()),
        rank_load=float(arriving.max() / arriving.mean()) if arriving.any() else 0.0,
        unserved=int(mask.sum()) - len(torch.unique(token)),
    )


@torch.no_grad()
def simulate(rule: Rule, recordings: Sequence[Recording], *, ep: int, repeat: int) -> list[list[StepOutcome]]:
    """Routes the steps of one layer under `rule`, `repeat` times over; the outcome of each step of each time."""
    config = rule.model(recordings[0].moe)
    mpu = ParallelState.single()
    router = Router(replace(config, hidden_size=1), mpu, 0, None).to(recordings[0].logits.dtype)
    if config.expert_bias:
        router.expert_bias.copy_(recordings[0].expert_bias)
    outcomes = []
    for _ in range(repeat):
        outcomes.append([])
        for recording in recordings:
            if not rule.changes:  # as it was recorded, and there may be other steps in between
                router.expert_bias.copy_(recording.expert_bias)
            outcomes[-1].append(_step(router, config, mpu, recording, ep))
    return outcomes


def _step(router: Router, config: ModelConfig, mpu: ParallelState, recording: Recording, ep: int) -> StepOutcome:
    mask = recording.mask.t()
    context = _context(recording)
    assignment, loss = router.route(recording.logits.transpose(0, 1), context)
    assert loss is not None
    loss.finish()
    stats = RouterStats.of(finish_step([router], config, mpu, updated=True))
    return StepOutcome(
        stats=replace(stats, layers=(recording.layer,)),
        traffic=traffic_of(assignment, mask, config.num_experts, ep),
        num_tokens=int(mask.sum()),
    )


def _context(recording: Recording) -> Context:
    """All rows of the step in one micro-batch, on one rank."""
    mask = recording.mask.t()
    nothing = torch.zeros_like(mask, dtype=torch.int64)
    batch = MicroBatch(
        tokens=nothing,
        labels=nothing,
        loss_mask=mask.float(),
        positions=nothing,
        samples=recording.samples,
        step=recording.step - 1,
        token_mask=None if bool(mask.all()) else mask,
        totals=BatchTotals(num_rows=mask.shape[1], num_tokens=int(mask.sum())),
    )
    return Context.uncut(batch)


# ---- figures


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A rule over the last time through the steps: means over steps, and over layers where not said otherwise."""

    rule: str
    max_violation_first: float
    """Of the very first step."""
    max_violation: float
    max_violation_last: float
    """Of the very last step."""
    dead_experts: int
    """Experts of all layers that no token chose in any step."""
    load_entropy: float
    """Entropy of the experts' shares of the choices / ln(num_experts): 1 is even."""
    router_entropy: float
    """Of a token's scores, in nats."""
    aux_loss: float
    """Sum over layers."""
    drop_rate: float
    """Choices that found their expert full."""
    unserved_rate: float
    """Tokens without any expert."""
    rank_load: float
    """Pairs that arrive at the fullest of the ep ranks / mean."""
    dispatch_bytes: float
    """Hidden states that leave their rank on the way to the experts, all layers and ranks, in a step."""
    dispatch_bytes_once: float
    """The same if a token went only once to each rank."""


def figures_of(rule: str, layers: Sequence[list[list[StepOutcome]]], *, bytes_per_token: int) -> Figures:
    """`layers` holds what `simulate` returned for each layer."""
    last = [layer[-1] for layer in layers]
    outcomes = [step for layer in last for step in layer]
    num_steps, num_tokens = len(last[0]), sum(step.num_tokens for step in outcomes)
    shares = [torch.from_numpy(np.sum([step.stats.tokens[0] for step in layer], axis=0)).double() for layer in last]
    even = [
        float(torch.special.entr(share / share.sum().clamp(min=1)).sum()) / math.log(len(share)) for share in shares
    ]
    choices = sum(int(step.stats.tokens.sum()) for step in outcomes)

    def violation(steps: Sequence[StepOutcome]) -> float:
        return _mean([step.stats.max_violation[0] for step in steps])

    return Figures(
        rule=rule,
        max_violation_first=violation([layer[0][0] for layer in layers]),
        max_violation=violation(outcomes),
        max_violation_last=violation([layer[-1] for layer in last]),
        dead_experts=sum(int((share == 0).sum()) for share in shares),
        load_entropy=_mean(even),
        router_entropy=_mean([step.stats.entropy[0] for step in outcomes]),
        aux_loss=sum(step.stats.aux_loss for step in outcomes) / num_steps,
        drop_rate=sum(sum(step.stats.dropped) for step in outcomes) / max(choices, 1),
        unserved_rate=sum(step.traffic.unserved for step in outcomes) / max(num_tokens, 1),
        rank_load=_mean([step.traffic.rank_load for step in outcomes]),
        dispatch_bytes=sum(step.traffic.pairs_leaving for step in outcomes) * bytes_per_token / num_steps,
        dispatch_bytes_once=sum(step.traffic.tokens_leaving for step in outcomes) * bytes_per_token / num_steps,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
