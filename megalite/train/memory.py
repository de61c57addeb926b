"""Bytes of a training step on each pipeline rank, by kind, before anything runs: no process, no memory, no device.

The rank's stages are built on the meta device in a place that is only planned, so that parameters, buckets and what
blocks declare (`saved`) are those of the run itself. Activations follow the plan of the pipeline, action by action.

Not counted are temporaries inside one operation, what allocators and communication libraries keep, and tensors of
integers that grow with the tokens of a batch alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megalite.kernels.saved import Saved, size_of
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.saved import BatchShape
from megalite.optim.config import OptimConfig
from megalite.optim.groups import runs_of
from megalite.optim.rules import is_matrix, matrix_rule, update_rule
from megalite.parallel.buckets import Bucket, Fresh, Segment, Unit, make_buckets
from megalite.pipeline.lower import lower, peer_of
from megalite.pipeline.p2p import WINDOW
from megalite.pipeline.plan import Action, Kind, Plan
from megalite.train.build import build_stages, plan_of
from megalite.train.sections import Sections
from megalite.train.stages import stage_layers

STATE: tuple[str, ...] = ("parameters", "gradients", "master", "optimizer")
"""What is there between steps, too."""
STEP: tuple[str, ...] = ("batch", "activations", "loss", "deferred", "messages")
"""What there is between two actions of the plan: rows of the step and of those to come, and what micro-batches leave
behind for backward, for that of the loss, for weight gradients that were put off, and on their way to other stages."""
TRANSIENT: tuple[str, ...] = ("unit gradients", "unit parameters", "reduction", "recompute", "logits")
"""What comes and goes within an action: whole gradients and parameters of units that are divided between uses, buffers
of their reduction, what a region makes again, and a chunk of logits."""
KINDS: tuple[str, ...] = (*STATE, *STEP, *TRANSIENT)

_IN_FLIGHT = 2
"""Units that are being reduced at a time (ZeRO)."""
_OPEN = _IN_FLIGHT + 1
"""Units whose whole gradients exist at a time (ZeRO 2 and 3): of one under way besides."""
_REDUCED = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
"""The passes after which gradients of a micro-batch are complete."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage keeps of one micro-batch."""

    number: int
    """Of the stage in the plan."""
    layers: range
    """Its global layers."""
    saved: Saved
    """What its layers, embedding and final norm declare, what they share included."""
    loss: Saved
    """The same of the loss."""
    logits: int
    """Bytes of the logits that exist at a time."""
    message: int
    """Bytes of the activations between stages."""
    peak: int = 0
    """Most micro-batches whose activations are there at a time."""

    @property
    def activations(self) -> int:
        """Bytes from the forward of a micro-batch to its backward, loss included."""
        return self.saved.total + self.loss.total

    @property
    def deferred(self) -> int:
        """Bytes from an input gradient to the weight gradients that it put off."""
        return self.saved.work + self.loss.work


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of the ranks at one place of the pipeline, at the moment of a step when they are most."""

    pp_rank: int
    """The place."""
    stages: tuple[StageMemory, ...]
    """Its stages."""
    kinds: Mapping[str, int]
    """Bytes by kind, all of KINDS."""
    peak_action: str
    """The action of the plan in which this is reached."""
    settled: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind after the action that leaves most behind: STEP, and reductions that are under way."""

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self.kinds.values())


def predict(config: Sections, num_ranks: int, *, device: torch.device, expert_load: float = 1.0) -> list[RankMemory]:
    """The memory of every pipeline rank of `config` on `num_ranks` ranks like `device`; the config is a checked one.

    Of the ranks at one place of the pipeline the first is looked at. `expert_load`: tokens of its experts over those of
    an even share.
    """
    grid = config.parallel.grid(num_ranks)
    train = config.train
    plan = plan_of(config.parallel, train.global_batch_size // (train.micro_batch_size * grid.sizes["dp"]))
    layers = stage_layers(config.model, config.parallel, plan)
    lowered = lower(plan)
    return [
        _of_rank(config, ParallelState.planned(config.parallel, num_ranks, rank), lowered, layers, device, expert_load)
        for rank in grid.members(0, ("pp",))
    ]


def _of_rank(
    config: Sections, mpu: ParallelState, plan: Plan, layers: Sequence[range], device: torch.device, load: float
) -> RankMemory:
    meta = torch.device("meta")
    stages = build_stages(config, mpu, plan, layers, meta)
    fresh = Fresh(meta, config.train.dtype, lambda unit: None)
    units = [_adopted(stage.units(), mpu, fresh) for stage in stages.values()]
    memories = {number: _stage_memory(config, number, stage, device, load) for number, stage in stages.items()}
    buckets = [bucket for stage in units for unit in stage for bucket in unit.buckets]
    state = state_bytes(config, buckets)
    state["parameters"] += _frozen_bytes(units)
    actions = plan.actions[mpu.pp.rank]
    transient = _Transient(units, config, device, actions)
    batch = _batch_bytes(config, plan.num_microbatches, device)
    walk = _Walk(plan, memories, batch, dict(zip(stages, transient.left(), strict=True)))
    walk.run(mpu.pp.rank)
    settled, ending = walk.settled.kinds, walk.now | {"reduction": transient.at_the_end()}
    if sum(ending.values()) > sum(settled.values()):
        settled = ending
    return RankMemory(
        pp_rank=mpu.pp.rank,
        stages=tuple(replace(memory, peak=walk.most_alive[number]) for number, memory in memories.items()),
        kinds=dict.fromkeys(KINDS, 0) | state | walk.peak.kinds | transient.most(),
        peak_action=str(walk.peak.action),
        settled=settled,
    )


def _adopted(units: Sequence[Unit], mpu: ParallelState, fresh: Fresh) -> list[_Held]:
    """The units with their memory, divided as in the run."""
    held = [_Held(unit, make_buckets(unit, mpu, fresh)) for unit in units]
    for bucket in (bucket for unit in held for bucket in unit.buckets):
        bucket.divide()
    return held


def _stage_memory(config: Sections, number: int, stage: Transformer, device: torch.device, load: float) -> StageMemory:
    shape = batch_shape(config, stage, device, load)
    saved = stage.saved(shape)
    return StageMemory(
        number=number,
        layers=stage.stage.layers,
        saved=replace(saved, held=saved.held + stage.context_bytes(shape)),
        loss=stage.loss_saved(shape),
        logits=stage.logits_bytes(shape),
        message=shape.stream,
    )


def batch_shape(config: Sections, stage: Transformer, device: torch.device, expert_load: float = 1.0) -> BatchShape:
    """The micro-batches of `config` as the layers of `stage` see them."""
    padded = config.data.pack != "concat"
    return stage.batch_shape(
        config.data.seq_len,
        config.train.micro_batch_size,
        device=device,
        has_documents=padded or config.data.reset_attention,
        is_padded=padded,
        expert_load=expert_load,
    )


# ---- between steps


def state_bytes(config: Sections, buckets: Sequence[Bucket]) -> dict[str, int]:
    """Bytes by kind of STATE. How much of a bucket a rank keeps is the bucket's to say."""
    found = dict.fromkeys(STATE, 0)
    for bucket in buckets:
        kept = bucket.param_shard if bucket.zero >= 3 else bucket.param
        grad = bucket.grad_shard if bucket.zero >= 2 else bucket.grad
        wide = grad.dtype
        updated = sum(segment.param.numel() for segment in bucket.segments)
        has_master = wide != kept.dtype and config.optim.master_weights != "none"
        state = {
            "parameters": kept.nbytes,
            "gradients": grad.nbytes,
            "master": updated * wide.itemsize if has_master else 0,
            "optimizer": sum(_moments_of(segment, config.optim) for segment in bucket.segments) * wide.itemsize,
        }
        if config.optim.post_validation:  # copies of all that an update changes
            state["optimizer"] *= 2
            state["master"] *= 2
            state["optimizer"] += updated * kept.dtype.itemsize
        for kind, size in state.items():
            found[kind] += size
    return found


def _frozen_bytes(units: Sequence[Sequence[_Held]]) -> int:
    """Bytes of the parameters that do not learn: they are in no bucket."""
    held = {p for of_stage in units for unit in of_stage for p in unit.unit.parameters if not p.requires_grad}
    return sum(parameter.nbytes for parameter in held)


def _moments_of(segment: Segment, optim: OptimConfig) -> int:
    """Elements of the running averages of a segment."""
    rule, of_matrices = update_rule(optim), matrix_rule(optim)
    runs = runs_of(segment, (), optim.weight_decay, lambda shard: is_matrix(shard, optim))
    rules = ((run, of_matrices if run.is_matrix and of_matrices is not None else rule) for run in runs)
    return sum((run.stop - run.start) * len(chosen.moments) for run, chosen in rules)


# ---- from action to action


@dataclass
class _Most:
    """The largest of some moments."""

    total: int = -1
    action: Action | None = None
    kinds: dict[str, int] = field(default_factory=dict)

    def see(self, action: Action, kinds: Mapping[str, int], **more: int) -> None:
        """Takes a moment, with further kinds."""
        total = sum(kinds.values()) + sum(more.values())
        if total > self.total:
            self.total, self.action, self.kinds = total, action, {**kinds, **more}


class _Walk:
    """A rank's actions in order, and what they leave; `reductions`: what a pass of each stage leaves under way."""

    def __init__(self, plan: Plan, memories: Mapping[int, StageMemory], batch: int, reductions: Mapping[int, int]):
        self.plan, self.memories, self.reductions = plan, memories, reductions
        self.now = dict.fromkeys(STEP, 0) | {"batch": batch}
        self.sending: dict[int, deque[int]] = {}
        self.under_way = dict.fromkeys(memories, 0)
        self.alive = dict.fromkeys(memories, 0)
        self.most_alive = dict.fromkeys(memories, 0)
        self.peak, self.settled = _Most(), _Most()

    def run(self, rank: int) -> None:
        """Goes through the actions of `rank` in the lowered plan."""
        for action in self.plan.actions[rank]:
            if action.kind is not Kind.REDUCE:
                self._perform(action)
                self.peak.see(action, self.now)
                self.settled.see(action, self.now, reduction=sum(self.under_way.values()))

    def _perform(self, action: Action) -> None:
        kind, number, _ = action
        memory = self.memories[number]
        if kind is Kind.FORWARD:
            self.under_way[number] = 0
            self._forward(number, memory)
            self.peak.see(action, self.now, logits=memory.logits)
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            self.peak.see(action, self.now, recompute=memory.saved.again)
            self._backward(number, memory, defers=kind is Kind.INPUT_GRAD)
        elif kind is Kind.WEIGHT_GRAD:
            self.now["deferred"] -= memory.deferred
        elif kind in (Kind.RECV_ACT, Kind.RECV_GRAD):
            self.now["messages"] += memory.message
        elif kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
            window = self.sending.setdefault(peer_of(self.plan, action), deque())
            window.append(memory.message)
            if len(window) > WINDOW:
                self.now["messages"] -= window.popleft()
        if kind in _REDUCED:
            self.under_way[number] = self.reductions[number]

    def _forward(self, number: int, memory: StageMemory) -> None:
        if self.plan.previous_stage(number) is not None:  # what came is now the input that the stage keeps
            self.now["messages"] -= memory.message
        if self.plan.next_stage(number) is not None:
            self.now["messages"] += memory.message
        self.now["activations"] += memory.saved.total
        self.now["loss"] += memory.loss.total
        self.alive[number] += 1
        self.most_alive[number] = max(self.most_alive[number], self.alive[number])

    def _backward(self, number: int, memory: StageMemory, *, defers: bool) -> None:
        if self.plan.next_stage(number) is not None:
            self.now["messages"] -= memory.message
        if self.plan.previous_stage(number) is not None:
            self.now["messages"] += memory.message
        self.now["activations"] -= memory.saved.total
        self.now["loss"] -= memory.loss.total
        self.alive[number] -= 1
        if defers:
            self.now["deferred"] += memory.deferred


def _batch_bytes(config: Sections, num_microbatches: int, device: torch.device) -> int:
    """The rows of a step on this rank: tokens, labels, positions and loss masks, and what packing adds.

    Those of later steps that are loaded ahead wait in the memory of the host.
    """
    token = 3 * torch.int64.itemsize + torch.float32.itemsize
    if config.data.pack != "concat":
        token += torch.bool.itemsize
    if config.data.pack != "concat" or config.data.reset_attention:
        token += torch.int64.itemsize
    row = config.data.seq_len * token + torch.int64.itemsize
    steps = 1 + (config.data.prefetch if device.type == "cpu" else 0)
    return steps * num_microbatches * config.train.micro_batch_size * row


# ---- within actions


@dataclass(frozen=True)
class _Held:
    """A unit and its memory."""

    unit: Unit
    buckets: tuple[Bucket, ...]

    @property
    def gradients(self) -> int:
        """Bytes of whole gradients that exist during its backward only."""
        return sum(bucket.grad.nbytes for bucket in self.buckets if bucket.zero >= 2)

    @property
    def parameters(self) -> int:
        """Bytes of whole parameters that exist during its passes only."""
        return sum(bucket.param.nbytes for bucket in self.buckets if bucket.zero >= 3)

    def reduction(self, narrow: torch.dtype | None, device: torch.device) -> int:
        """Bytes of what its reduction makes: copies in a narrower dtype; on the CPU, where a reduce-scatter is an
        exchange, the parts of all ranks as well."""
        size = 0
        for bucket in self.buckets:
            if bucket.zero or bucket.replicas.size > 1:
                size += size_of(bucket.grad.shape, narrow) if narrow is not None else 0
                exchanges = bucket.zero and device.type == "cpu"
                size += size_of(bucket.grad.shape, narrow or bucket.grad.dtype) if exchanges else 0
        return size


class _Transient:
    """What is whole during use only, and what reductions take, on a rank with units `stages` by stage."""

    def __init__(
        self, stages: Sequence[Sequence[_Held]], config: Sections, device: torch.device, actions: Sequence[Action]
    ):
        self.stages, self.zero, self.recompute = stages, config.parallel.zero, config.train.recompute
        self.defers = any(action.kind is Kind.WEIGHT_GRAD for action in actions)
        self.follow = _passes_follow(actions)
        narrow = torch.bfloat16 if config.train.reduce_dtype == "bf16" else None
        self.reductions = [[unit.reduction(narrow, device) for unit in units] for units in stages]

    def most(self) -> dict[str, int]:
        """Bytes by kind of TRANSIENT, at most."""
        # A region of several layers is computed again while the unit that backward is in, and the next one, stay.
        at_once = 3 if self.recompute.startswith("every:") else 2
        return {
            "unit gradients": _most_of_all([self._open_gradients(units) for units in self.stages]),
            "unit parameters": max(_most_parameters(units, at_once) for units in self.stages),
            "reduction": self._most_reduction(),
        }

    def left(self) -> list[int]:
        """Bytes of the reductions that a pass of each stage leaves under way (ZeRO 2 and 3), until its next one."""
        return [sum(sizes[:_IN_FLIGHT]) if self.zero >= 2 else 0 for sizes in self.reductions]

    def at_the_end(self) -> int:
        """Bytes of the reductions that are under way when the last pass is over."""
        return sum(sum(sizes[:_IN_FLIGHT] if self.zero else sizes) for sizes in self.reductions)

    def _most_reduction(self) -> int:
        if not self.zero:  # all units are waited for at the end
            return self.at_the_end()
        most = [_most(self._in_turn(sizes, _IN_FLIGHT), _IN_FLIGHT) for sizes in self.reductions]
        return _most_of_all(list(zip(most, self.left(), strict=True)))

    def _open_gradients(self, units: Sequence[_Held]) -> tuple[int, int]:
        """Bytes of a stage's whole gradients: the most in one of its passes, and what is left of it in the next one.

        A tied gradient of the head waits for that of the embedding; that of an embedding is never put off, and waits
        for those that are.
        """
        waiting = 0
        while len(units) > 1 and units[0].unit.name in ("tied", "embedding"):
            if not self.defers and len(units[0].unit.modules) < 2 and not _is_used_later(units):
                break
            waiting, units = waiting + units[0].gradients, units[1:]
        sizes = [unit.gradients for unit in units]
        return waiting + _most(self._in_turn(sizes, _OPEN), _OPEN), waiting + sum(sizes[:_IN_FLIGHT])

    def _in_turn(self, sizes: Sequence[int], at_once: int) -> Sequence[int]:
        """Sizes of units, with the beginning of the next pass (the last ones) before those that end a pass."""
        return [*sizes[-1:], *sizes] if self.follow and len(sizes) > at_once else sizes


def _most_parameters(units: Sequence[_Held], at_once: int) -> int:
    """Bytes of the largest neighbours, and of the first unit where they use it, too."""
    windows = [units[begin : begin + at_once] for begin in range(len(units))]
    return max(
        sum(held.parameters for held in window)
        + (units[0].parameters if begin and _is_used_later([units[0], *window]) else 0)
        for begin, window in enumerate(windows)
    )


def _is_used_later(units: Sequence[_Held]) -> bool:
    """Whether a module of another unit uses the first one, as multi-token prediction does the embedding."""
    later = {module for held in units[1:] if held.unit.name != "embedding" for module in held.unit.modules}
    return not later.isdisjoint(units[0].unit.modules)


def _passes_follow(actions: Sequence[Action]) -> bool:
    """Whether a stage's gradients are reduced twice without a forward between: that ends the last reductions."""
    reduced: set[int] = set()
    for kind, number, _ in actions:
        if kind is Kind.FORWARD:
            reduced.discard(number)
        elif kind in _REDUCED:
            if number in reduced:
                return True
            reduced.add(number)
    return False


def _most(sizes: Sequence[int], at_once: int) -> int:
    """The largest sum of so many neighbours."""
    return max((sum(sizes[begin : begin + at_once]) for begin in range(len(sizes))), default=0)


def _most_of_all(stages: Sequence[tuple[int, int]]) -> int:
    """(most, left) of each stage: the most of one, with what is left of the others."""
    total = sum(left for _, left in stages)
    return max((most + total - left for most, left in stages), default=0)
