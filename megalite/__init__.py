"""megalite: model-parallel transformer training where the layout never changes the run."""

__version__ = "0.1.0"
