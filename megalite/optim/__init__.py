"""The optimizer, gradient clipping and learning-rate schedules."""
