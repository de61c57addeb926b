"""What goes wrong with checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used here; the message says why. Raised by all ranks alike."""
