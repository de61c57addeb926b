"""ZeRO-3 at work: a unit's parameters are gathered when one of its modules is called, and go when the next one is.

The same in backward, from the end: a module is entered when the gradient of its output is there. The unit that comes
next is on its way meanwhile. A module that runs again inside backward (recompute) finds its parameters there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.buckets import Bucket, Unit


class Gatherer:
    """Keeps whole parameters of a stage's units while these compute: of the unit under way, and of the next one.

    Gathers start in the order in which modules are entered, which no data may change, so that those of all ranks pair
    up. `before_backward` is told which units backward is about to enter, before any gather for them starts.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Sequence[Bucket]]],
        *,
        before_backward: Callable[[Sequence[Unit]], None],
    ):
        self._buckets = {unit.name: buckets for unit, buckets in units}
        self._before_backward = before_backward
        self.gathers = any(bucket.zero >= 3 for _, buckets in units for bucket in buckets)
        self._entered: tuple[int, bool] | None = None
        if not self.gathers:
            return
        uses: dict[nn.Module, list[Unit]] = {}
        for unit, _ in units:
            for module in unit.modules:
                uses.setdefault(module, []).append(unit)
        # A tied weight is used at both ends: a module's place is that of the last of its units.
        place = {unit.name: i for i, (unit, _) in enumerate(units)}
        self._steps = sorted(uses.items(), key=lambda item: max(place[unit.name] for unit in item[1]))
        for number, (module, _) in enumerate(self._steps):
            module.register_forward_pre_hook(self._entering(number))
            module.register_forward_hook(self._watching(number))

    def leave(self) -> None:
        """The pass is over: no whole parameter stays."""
        if self.gathers:
            self._keep(())
            self._entered = None

    def _entering(self, number: int) -> Callable[..., None]:
        def before_forward(module: nn.Module, args: Any) -> None:
            if self._entered is not None and self._entered[1]:
                self._enter_again(number, self._entered[0])
            else:
                self._enter(number, backward=False)

        return before_forward

    def _watching(self, number: int) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(lambda grad: self._enter(number, backward=True))

        return after_forward

    def _enter(self, number: int, *, backward: bool) -> None:
        if self._entered == (number, backward):
            return
        self._entered = (number, backward)
        units = self._steps[number][1]
        if backward:
            self._before_backward(units)
        ahead = self._ahead(number, backward)
        self._keep((*units, *ahead))
        for unit in (*units, *ahead):
            for bucket in self._buckets[unit.name]:
                bucket.start_gather()
        for unit in units:
            for bucket in self._buckets[unit.name]:
                bucket.finish_gather()

    def _ahead(self, number: int, backward: bool) -> Sequence[Unit]:
        """What comes after step `number`."""
        following = number - 1 if backward else number + 1
        return self._steps[following][1] if 0 <= following < len(self._steps) else ()

    def _enter_again(self, number: int, under_way: int) -> None:
        """Inside backward a forward is a recompute: of what backward is in, or of what led there."""
        units = self._steps[number][1]
        self._keep((*units, *self._steps[under_way][1], *self._ahead(under_way, backward=True)))
        for unit in units:
            for bucket in self._buckets[unit.name]:
                bucket.start_gather()
                bucket.finish_gather()

    def _keep(self, units: Sequence[Unit]) -> None:
        """Lets go of all others."""
        names = {unit.name for unit in units}
        for name, buckets in self._buckets.items():
            if name not in names:
                for bucket in buckets:
                    bucket.release()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
