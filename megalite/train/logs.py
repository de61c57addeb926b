"""Where messages of the `megalite` loggers go on rank 0: to the console at once, to log.txt once there is a run."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path

from rich.console import Console

_KEEP_EVERYTHING = 1_000_000  # records held back until the run begins
_NEVER = logging.CRITICAL + 1


class RunLog:
    """Handlers on the `megalite` logger, from construction to `close`."""

    def __init__(self, console: Console):
        self._logger = logging.getLogger("megalite")
        self._level = self._logger.level
        self._held = logging.handlers.MemoryHandler(_KEEP_EVERYTHING, flushLevel=_NEVER, flushOnClose=False)
        self._handlers: list[logging.Handler] = [_ConsoleHandler(console), self._held]
        for handler in self._handlers:
            self._logger.addHandler(handler)
        self._logger.setLevel(logging.INFO)

    def write_to(self, path: Path) -> None:
        """Appends to `path` everything said so far and all that follows."""
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._held.setTarget(file)
        self._held.flush()
        self._logger.removeHandler(self._held)
        self._logger.addHandler(file)
        self._handlers = [self._handlers[0], file]

    def close(self) -> None:
        """Takes the handlers off the logger."""
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        self._handlers = []
        self._logger.setLevel(self._level)


class _ConsoleHandler(logging.Handler):
    """Prints messages through rich, which keeps a live progress bar below them."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.print(prefix + record.getMessage(), markup=False, highlight=False, soft_wrap=True)
