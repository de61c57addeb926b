"""Which layers of a model a word names: `all`, `every:4`, `but_every:2`, `from:3`, `1,3,5`."""

from __future__ import annotations

import re

PATTERN = r"all|(?:but_)?every:[1-9]\d*|from:\d+|\d+(?:,\d+)*"


def is_pattern(text: str) -> bool:
    """Whether `text` names layers."""
    return re.fullmatch(PATTERN, text) is not None


def pattern_problem(pattern: str, field: str, num_layers: int) -> str | None:
    """Why `pattern`, which a message calls `field`, names no layers of a model of `num_layers`, or None."""
    if not is_pattern(pattern):
        return (
            f"{field}={pattern!r} should be all, every:N (N >= 1), but_every:N, from:N or layer numbers such as 1,3,5"
        )
    beyond = [number for number in pattern.split(",") if number.isdigit() and int(number) >= num_layers]
    if not beyond:
        return None
    return (
        f"{field}={pattern}: no layer {', '.join(beyond)} among num_layers={num_layers}; they are 0 to {num_layers - 1}"
    )


def in_pattern(layer: int, pattern: str) -> bool:
    """Whether `pattern` names global layer number `layer`."""
    kind, _, number = pattern.partition(":")
    if kind == "all":
        return True
    if kind == "every":
        return layer % int(number) == int(number) - 1
    if kind == "but_every":
        return layer % int(number) != int(number) - 1
    if kind == "from":
        return layer >= int(number)
    return layer in {int(n) for n in pattern.split(",")}
