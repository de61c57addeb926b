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
    keep_every: int = 0
    """Checkpoints of steps divisible by it are kept for good; 0 for none."""
    folder: str | None = None
    """Keep checkpoints in <folder>/checkpoints, not in the run folder: a path that all ranks share, or a URL of fsspec
    (s3://bucket/run)."""
    load: str | None = None
    """Start from the weights and optimizer state of this checkpoint folder (or run folder: its latest one); a path or a
    URL."""
    async_save: bool = False
    """Write while training goes on, from a copy of the state in host memory: one more copy of what this rank stores. A
    save that fails ends the run at the next step, and the checkpoint before stays the latest."""
    fallback: bool = False
    """With train.resume auto: verify the latest checkpoint first and, where it is damaged, go on from the newest one
    before it that is not."""
    allow: tuple[str, ...] = ()
    """Settings in which a resumed run may differ from its checkpoint: names such as optim.lr, or patterns as in a shell
    (optim.*). Any other difference of model, data or optimizer is refused. With model.mtp_layers a checkpoint may have
    other layers of multi-token prediction than the model, also for checkpoint.load: new ones begin anew."""

    def problems(self) -> list[str]:
        """Everything wrong with this section."""
        found = [
            f"checkpoint.{name}={value} must be at least 0"
            for name, value in (("every", self.every), ("keep_last", self.keep_last), ("keep_every", self.keep_every))
            if value < 0
        ]
        if self.keep_every > 0 and self.keep_last == 0:
            found.append(
                f"checkpoint.keep_every={self.keep_every}: checkpoint.keep_last=0 keeps all of them already;"
                " set keep_last, or leave keep_every out"
            )
        return found
