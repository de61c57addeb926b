"""torch.compile of plain functions of rows, whose number is a variable of the code; widths and dtypes are constants.

The code is kept on disk by torch (TORCHINDUCTOR_CACHE_DIR), and the log tells what had to be made.
"""

from __future__ import annotations

import functools
import logging
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("megalite")


def run(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) by code made for the widths and dtypes of these tensors, with any number of rows (dim 0)."""
    kinds = tuple((x.dtype, x.shape[1:]) if isinstance(x, Tensor) else x for x in args)
    return _code(function, kinds, torch.get_num_threads())(*args)


@functools.cache
def _code(function: Callable[..., Any], kinds: tuple[object, ...], threads: int) -> Callable[..., Any]:
    """Code of its own for each kind: torch.compile keeps what it makes, and counts it, by code object."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    own.__kwdefaults__ = function.__kwdefaults__
    return _Announced(torch.compile(own, fullgraph=True), function.__name__)


class _Announced:
    """A compiled function whose first call is reported."""

    def __init__(self, run: Callable[..., Any], name: str):
        self._run, self._name, self._is_made = run, name.strip("_"), False

    def __call__(self, *args: Any) -> Any:
        if self._is_made:
            return self._run(*args)
        begin = time.perf_counter()
        for x in args:
            if isinstance(x, Tensor) and x.ndim and x.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        made, self._is_made = self._run(*args), True
        logger.info("compiled %s in %.1f s", self._name, time.perf_counter() - begin)
        return made
