"""Messages between pipeline ranks, posted in plan order and waited for at use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.axis import Axis, Pending
from megalite.pipeline.plan import Action

WINDOW = 2
"""Messages to a peer that are under way at most."""


class Mailbox:
    """Sends and receives under way along the pipeline axis.

    Messages carry no tag that every backend honours: the two ranks of a pair must post theirs in the same order,
    which lowering has arranged. A received message is found by its RECV action. A sent tensor lives until its send
    is done; at most `window` sends to a peer are under way, which bounds that memory.
    """

    def __init__(self, axis: Axis, window: int = WINDOW):
        self._axis, self._window = axis, window
        self._sending: dict[int, deque[Pending]] = {}
        self._receiving: dict[Action, Pending] = {}

    def warm_up(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Sends one element over each of `pairs` (of indices on the axis; the same on every rank).

        NCCL makes a communicator at the first message of a pair, which both ends must reach together. Gloo has
        connected all pairs already.
        """
        if self._axis.device.type != "cuda":
            return
        for lower, higher in sorted({(min(pair), max(pair)) for pair in pairs}):
            if self._axis.rank == lower:
                self._axis.send(torch.zeros(1, device=self._axis.device), higher).wait()
            elif self._axis.rank == higher:
                self._axis.receive(torch.zeros(1, device=self._axis.device), lower).wait()

    def send(self, tensor: Tensor, peer: int) -> None:
        """Begins sending `tensor`, which nobody may change any more."""
        sending = self._sending.setdefault(peer, deque())
        # Waiting late is safe: the plan finishes even if every send is waited for at once.
        while len(sending) >= self._window:
            sending.popleft().wait()
        sending.append(self._axis.send(tensor, peer))

    def receive(self, receive: Action, buffer: Tensor, peer: int) -> None:
        """Begins receiving into `buffer`."""
        assert receive not in self._receiving, f"{receive} is posted twice"
        self._receiving[receive] = self._axis.receive(buffer, peer)

    def take(self, receive: Action) -> Tensor:
        """The message of a RECV action that was posted before, once it is there."""
        return self._receiving.pop(receive).wait()

    def drain(self) -> None:
        """Waits for all sends; the end of a plan, when every received message has been taken."""
        for sending in self._sending.values():
            while sending:
                sending.popleft().wait()
        assert not self._receiving, f"received and never used: {', '.join(map(str, self._receiving))}"
