"""Checkpoints: saving and loading the state of a run."""
