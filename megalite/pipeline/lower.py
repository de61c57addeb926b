"""Lowering: what a plan's compute actions imply for communication, made explicit as actions of their own.

Sends and receives are placed by the producer: all ranks walk one global order of completions, and when a result is
produced, the SEND is appended to the producer's list and the RECV to the consumer's at the same moment. So every two
ranks see their messages in one common order. Receives posted in the order of use would not do: under backends that
ignore tags (NCCL) a schedule that consumes in another order than it produces would silently swap equal-shaped tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from megalite.pipeline.plan import Action, Kind, Plan, PlanError
from megalite.pipeline.simulate import completion_order

_SENDS = (Kind.SEND_ACT, Kind.SEND_GRAD)
_RECEIVES = (Kind.RECV_ACT, Kind.RECV_GRAD)


def lower(plan: Plan) -> Plan:
    """`plan` with SEND, RECV and REDUCE actions, checked; raises PlanError when it cannot be executed.

    Neighbouring stages on one rank exchange nothing. Lowering a lowered plan gives the same plan.
    """
    rows: list[list[Action]] = [[] for _ in range(plan.num_ranks)]
    for rank, action in completion_order(plan):
        rows[rank].append(action)
        if (message := _message(plan, action)) is not None:
            send, receive = message
            rows[rank].append(send)
            rows[plan.placement[receive.stage]].append(receive)
    lowered = replace(plan, actions=tuple(tuple(_with_reductions(row)) for row in rows))
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


def _with_reductions(row: list[Action]) -> list[Action]:
    """`row` with REDUCE before the last B or W of each stage."""
    last = {action.stage: i for i, action in enumerate(row) if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)}
    out: list[Action] = []
    for i, action in enumerate(row):
        if last.get(action.stage) == i:
            out.append(action._replace(kind=Kind.REDUCE))
        out.append(action)
    return out


def peer_of(plan: Plan, action: Action) -> int:
    """The rank at the other end of a SEND or RECV."""
    towards_next = action.kind in (Kind.SEND_ACT, Kind.RECV_GRAD)
    other = plan.next_stage(action.stage) if towards_next else plan.previous_stage(action.stage)
    assert other is not None, f"{action} has no other end"
    return plan.placement[other]


def _matching_receive(plan: Plan, send: Action) -> Action:
    """The RECV that takes what `send` sends."""
    if send.kind is Kind.SEND_ACT:
        stage, kind = plan.next_stage(send.stage), Kind.RECV_ACT
    else:
        stage, kind = plan.previous_stage(send.stage), Kind.RECV_GRAD
    assert stage is not None
    return Action(kind, stage, send.microbatch)


def check_deadlock_free(plan: Plan) -> None:
    """Raises PlanError unless the lowered plan finishes under the two strictest models of message passing.

    Blocking rendezvous: a SEND or RECV returns when both ends have reached it. FIFO: both are posted and go on, but
    the messages of a pair of ranks pass one at a time in the order posted, as on one NCCL stream; use waits for them.
    """
    for blocking in (True, False):
        _Messages(plan, blocking).run()


class _Messages:
    """Ranks that execute a lowered plan without time; only what waits for what counts."""

    def __init__(self, plan: Plan, blocking: bool):
        self.plan, self.blocking = plan, blocking
        self.position = [0] * plan.num_ranks
        self.queues: dict[tuple[int, int], deque[Action]] = {}
        self.passed: set[Action] = set()
        self.posted: set[Action] = set()

    def run(self) -> None:
        """Advances all ranks to their ends or raises PlanError."""
        ready = deque(range(self.plan.num_ranks))
        while ready:
            rank = ready.popleft()
            while self.position[rank] < len(self.plan.actions[rank]):
                action = self.plan.actions[rank][self.position[rank]]
                woken = self.post(rank, action)
                if woken is not None and woken not in ready:
                    ready.append(woken)
                if not self.may_pass(action):
                    break
                self.position[rank] += 1
        self.raise_if_stuck()

    def post(self, rank: int, action: Action) -> int | None:
        """Posts a SEND or RECV once; the peer when messages passed, which it may have been waiting for."""
        if action.kind not in (*_SENDS, *_RECEIVES) or action in self.posted:
            return None
        self.posted.add(action)
        peer = peer_of(self.plan, action)
        mine = self.queues.setdefault((rank, peer), deque())
        theirs = self.queues.setdefault((peer, rank), deque())
        mine.append(action)
        before = len(self.passed)
        while mine and theirs and (mine[0].kind in _SENDS) != (theirs[0].kind in _SENDS):
            send, receive = (mine[0], theirs[0]) if mine[0].kind in _SENDS else (theirs[0], mine[0])
            if _matching_receive(self.plan, send) != receive:
                raise PlanError(f"{self.plan.name}: {send} would arrive as {receive} between ranks {rank} and {peer}")
            self.passed.update((mine.popleft(), theirs.popleft()))
        return peer if len(self.passed) > before else None

    def may_pass(self, action: Action) -> bool:
        """Whether a rank that is at `action` goes on."""
        if action.kind in (*_SENDS, *_RECEIVES):
            return not self.blocking or action in self.passed
        receive = self.receive_before(action)
        return receive is None or receive in self.passed

    def receive_before(self, action: Action) -> Action | None:
        """The RECV whose message a compute action uses."""
        if action.kind is Kind.FORWARD:
            kind, other = Kind.RECV_ACT, self.plan.previous_stage(action.stage)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            kind, other = Kind.RECV_GRAD, self.plan.next_stage(action.stage)
        else:
            return None
        if other is None or self.plan.placement[other] == self.plan.placement[action.stage]:
            return None
        return Action(kind, action.stage, action.microbatch)

    def raise_if_stuck(self) -> None:
        """Raises PlanError when a rank has not reached its end, or a message was posted at one end only."""
        model = "blocking rendezvous" if self.blocking else "FIFO streams"
        stuck = [
            f"rank {rank} waits at {row[self.position[rank]]}"
            for rank, row in enumerate(self.plan.actions)
            if self.position[rank] < len(row)
        ]
        lost = [f"{action} of rank {rank}" for (rank, _), queue in self.queues.items() for action in queue]
        if stuck:
            raise PlanError(f"{self.plan.name} deadlocks with {model}: " + "; ".join(stuck))
        if lost:
            raise PlanError(f"{self.plan.name} ends with messages not passed: " + "; ".join(lost))
