"""When checkpoints are written, which are kept and where a run starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run, in <run_dir>/checkpoints."""

    every: int = 0
    """Steps between checkpoints; 0 writes only the one at the end (and on SIGTERM or SIGINT)."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept; 0 keeps all."""
    load: str | None = None
    """Start from the weights and optimizer state of this checkpoint folder (or run folder: its latest one)."""
    async_save: bool = False
    """Write while training goes on; reserved, not built yet."""

    def problems(self) -> list[str]:
        """Everything wrong with this section."""
        found = [
            f"checkpoint.{name}={value} must be at least 0"
            for name, value in (("every", self.every), ("keep_last", self.keep_last))
            if value < 0
        ]
        if self.async_save:
            found.append("checkpoint.async_save=true: saving while training goes on is not built yet; use false")
        return found
