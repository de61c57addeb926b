"""Lowering: what a plan's compute actions imply for communication, made explicit as actions of their own.

Sends and receives are placed by the producer: all ranks walk one global order of completions, and when a result is
produced, the SEND is appended to the producer's list and the RECV to the consumer's at the same moment. So every two
ranks see their messages in one common order. Receives posted in the order of use would not do: under backends that
ignore tags (NCCL) a schedule that consumes in another order than it produces would silently swap equal-shaped tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from megalite.pipeline.plan import Action, Kind, Plan, PlanError
from megalite.pipeline.simulate import completion_order

_SENDS = (Kind.SEND_ACT, Kind.SEND_GRAD)
_RECEIVES = (Kind.RECV_ACT, Kind.RECV_GRAD)


def lower(plan: Plan, *, reduce_each_pass: bool = False) -> Plan:
    """`plan` with SEND, RECV and REDUCE actions, checked; raises PlanError when it cannot be executed.

    REDUCE comes before a stage's last B or W, or before each of them.

    Neighbouring stages on one rank exchange nothing. Lowering a lowered plan gives the same plan.
    """
    rows: list[list[Action]] = [[] for _ in range(plan.num_ranks)]
    for rank, action in completion_order(plan):
        rows[rank].append(action)
        if (message := _message(plan, action)) is not None:
            send, receive = message
            rows[rank].append(send)
            rows[plan.placement[receive.stage]].append(receive)
    lowered = replace(plan, actions=tuple(tuple(_with_reductions(row, reduce_each_pass)) for row in rows))
    check_deadlock_free(lowered)
    return lowered


def _message(plan: Plan, action: Action) -> tuple[Action, Action] | None:
    """The SEND and the RECV that carry the result of `action` to another rank, if it goes there."""
    if action.kind is Kind.FORWARD:
        consumer, kinds = plan.next_stage(action.stage), (Kind.SEND_ACT, Kind.RECV_ACT)
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        consumer, kinds = plan.previous_stage(action.stage), (Kind.SEND_GRAD, Kind.RECV_GRAD)
    else:
        return None
    if consumer is None or plan.placement[consumer] == plan.placement[action.stage]:
        return None
    return Action(kinds[0], action.stage, action.microbatch), Action(kinds[1], consumer, action.microbatch)


def _with_reductions(row: list[Action], each: bool) -> list[Action]:
    """`row` with REDUCE before the last B or W of each stage, or before each one."""
    passes = [(i, action.stage) for i, action in enumerate(row) if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
    reduced = {i for i, _ in passes} if each else {i for i, _ in {stage: (i, stage) for i, stage in passes}.values()}
    out: list[Action] = []
    for i, action in enumerate(row):
        if i in reduced:
            out.append(action._replace(kind=Kind.REDUCE))
        out.append(action)
    return out


def peer_of(plan: Plan, action: Action) -> int:
    """The rank at the other end of a SEND or RECV."""
    towards_next = action.kind in (Kind.SEND_ACT, Kind.RECV_GRAD)
    other = plan.next_stage(action.stage) if towards_next else plan.previous_stage(action.stage)
    assert other is not None, f"{action} has no other end"
    return plan.placement[other]


def check_deadlock_free(plan: Plan) -> None:
    """Raises PlanError unless the lowered plan finishes under the two strictest models of message passing.

    Blocking rendezvous: a SEND or RECV returns when both ends have reached it. FIFO: both are posted and go on, but
    the messages of a pair of ranks pass one at a time in the order posted, as on one NCCL stream; use waits for them.
    """
    programs = [_program(plan, rank) for rank in range(plan.num_ranks)]
    for blocking in (True, False):
        _Messages(plan, programs, blocking).run()


class _Role(IntEnum):
    """What an action has to do with a message."""

    USE = 0
    SEND = 1
    RECEIVE = 2


class _Step(NamedTuple):
    """An action that sends, receives or uses a message."""

    role: _Role
    message: int
    """Its number, the same at both ends."""
    peer: int
    """The rank at the other end; -1 for a use."""


def _program(plan: Plan, rank: int) -> list[_Step]:
    """The rank's actions as steps; a message's number is that of the (stage, microbatch) and kind of its sender."""
    num_microbatches, total = plan.num_microbatches, len(plan.placement) * plan.num_microbatches
    roles = {kind: _Role.SEND for kind in _SENDS} | {kind: _Role.RECEIVE for kind in _RECEIVES}
    steps = []
    for kind, stage, microbatch in plan.actions[rank]:
        role = roles.get(kind, _Role.USE)
        if kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
            sender = stage
            other = plan.next_stage(stage) if kind is Kind.SEND_ACT else plan.previous_stage(stage)
        elif kind in (Kind.FORWARD, Kind.RECV_ACT):
            sender = other = plan.previous_stage(stage)
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.RECV_GRAD):
            sender = other = plan.next_stage(stage)
        else:
            continue
        if sender is None or other is None or (role is _Role.USE and plan.placement[other] == rank):
            assert role is _Role.USE, f"{kind}{stage}.{microbatch} has no other end"
            continue
        is_grad = kind not in (Kind.FORWARD, Kind.SEND_ACT, Kind.RECV_ACT)
        number = is_grad * total + sender * num_microbatches + microbatch
        steps.append(_Step(role, number, -1 if role is _Role.USE else plan.placement[other]))
    return steps


class _Messages:
    """Ranks that execute a lowered plan without time; only what waits for what counts."""

    def __init__(self, plan: Plan, programs: list[list[_Step]], blocking: bool):
        self.plan, self.programs, self.blocking = plan, programs, blocking
        self.position = [0] * plan.num_ranks
        self.posted = [0] * plan.num_ranks
        """Steps of each rank that have been looked at, so that a blocked one is posted once."""
        self.queues: dict[tuple[int, int], deque[_Step]] = {}
        self.passed = bytearray(2 * len(plan.placement) * plan.num_microbatches)

    def run(self) -> None:
        """Advances all ranks to their ends or raises PlanError."""
        ready = deque(range(self.plan.num_ranks))
        while ready:
            rank = ready.popleft()
            program, position = self.programs[rank], self.position[rank]
            while position < len(program):
                step = program[position]
                if step.role is not _Role.USE and self.posted[rank] <= position:
                    self.posted[rank] = position + 1
                    if self.post(rank, step):
                        ready.append(step.peer)
                if (self.blocking or step.role is _Role.USE) and not self.passed[step.message]:
                    break
                position += 1
            self.position[rank] = position
        self.raise_if_stuck()

    def post(self, rank: int, step: _Step) -> bool:
        """Posts a SEND or RECV; whether messages passed, which the peer may have been waiting for."""
        mine = self.queues.setdefault((rank, step.peer), deque())
        theirs = self.queues.setdefault((step.peer, rank), deque())
        mine.append(step)
        passed = False
        while mine and theirs and mine[0].role is not theirs[0].role:
            if mine[0].message != theirs[0].message:
                send, receive = sorted((mine[0], theirs[0]))
                raise PlanError(
                    f"{self.plan.name}: {self.text_of(send)} would arrive as {self.text_of(receive)} between ranks "
                    f"{rank} and {step.peer}"
                )
            self.passed[mine.popleft().message] = passed = True
            theirs.popleft()
        return passed

    def text_of(self, step: _Step) -> str:
        """The action of a SEND or RECV step."""
        number, microbatch = divmod(step.message, self.plan.num_microbatches)
        is_grad, sender = divmod(number, len(self.plan.placement))
        if step.role is _Role.SEND:
            return str(Action(Kind.SEND_GRAD if is_grad else Kind.SEND_ACT, sender, microbatch))
        receiver = self.plan.previous_stage(sender) if is_grad else self.plan.next_stage(sender)
        assert receiver is not None
        return str(Action(Kind.RECV_GRAD if is_grad else Kind.RECV_ACT, receiver, microbatch))

    def raise_if_stuck(self) -> None:
        """Raises PlanError when a rank has not reached its end, or a message was posted at one end only."""
        model = "blocking rendezvous" if self.blocking else "FIFO streams"
        stuck = [
            f"rank {rank} waits {self.where(program[self.position[rank]])}"
            for rank, program in enumerate(self.programs)
            if self.position[rank] < len(program)
        ]
        lost = [f"{self.text_of(step)} of rank {rank}" for (rank, _), queue in self.queues.items() for step in queue]
        if stuck:
            raise PlanError(f"{self.plan.name} deadlocks with {model}: " + "; ".join(stuck))
        if lost:
            raise PlanError(f"{self.plan.name} ends with messages not passed: " + "; ".join(lost))

    def where(self, step: _Step) -> str:
        """What a rank that cannot go on stands at."""
        if step.role is _Role.USE:
            return f"for {self.text_of(step._replace(role=_Role.RECEIVE))}"
        return f"at {self.text_of(step)}"
