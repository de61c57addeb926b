"""Blocks of a transformer, built on parallel layers and kernels."""
