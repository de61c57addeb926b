"""Parameter groups: other learning rates and weight decays for parameters by their global names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from megalite.parallel.data import Segment
from megalite.parallel.shard import Shard, shard_of


@dataclass(frozen=True)
class Group:
    """What holds for the parameters whose global name matches `pattern` (as in a shell: `*`, `?`, `[ab]`)."""

    pattern: str
    lr: float = 1.0
    """Times the learning rate of the schedule."""
    weight_decay: float | None = None
    """Also of parameters that do not decay otherwise; None: as without the group."""

    @staticmethod
    def parse(text: str) -> Group:
        """From `pattern:lr=0.1,weight_decay=0`; raises ValueError."""
        pattern, _, settings = text.partition(":")
        found: dict[str, float] = {}
        for setting in settings.split(","):
            name, _, value = setting.partition("=")
            if name not in ("lr", "weight_decay") or name in found:
                raise ValueError(f"{setting!r} is not lr=NUMBER or weight_decay=NUMBER, each once")
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"{setting!r}: {value!r} is not a number") from None
            if not 0 <= found[name] < float("inf"):
                raise ValueError(f"{setting!r} must be finite and at least 0")
        if not pattern:
            raise ValueError("there is no pattern before the colon")
        return Group(pattern, **found)


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a segment, which are updated alike."""

    start: int
    stop: int
    lr: float
    weight_decay: float
    is_matrix: bool = False
    """Whether it belongs to parameters that are updated as matrices."""


def runs_of(
    segment: Segment, groups: Sequence[Group], weight_decay: float, is_matrix: Callable[[Shard], bool]
) -> list[Run]:
    """The segment in as few runs as possible; of several groups that match a parameter the first one counts."""
    default = weight_decay if segment.decay else 0.0
    if not segment.spans:  # a slice of padding alone
        return [Run(0, segment.param.numel(), 1.0, default)]
    shards = [shard_of(span.parameter) for span in segment.spans]
    settings = [(*_setting(shard, groups, default), is_matrix(shard)) for shard in shards]
    borders = [0]
    borders += [span.start for span, (a, b) in zip(segment.spans[1:], pairwise(settings), strict=True) if a != b]
    chosen = [settings[0], *(b for a, b in pairwise(settings) if a != b)]
    stops = [*borders[1:], segment.param.numel()]
    return [Run(start, stop, *setting) for start, stop, setting in zip(borders, stops, chosen, strict=True)]


def _setting(shard: Shard, groups: Sequence[Group], decay: float) -> tuple[float, float]:
    """(lr, weight decay) of a parameter."""
    name = shard.tied_to or shard.name
    for group in groups:
        if fnmatchcase(name, group.pattern):
            return group.lr, decay if group.weight_decay is None else group.weight_decay
    return 1.0, decay
