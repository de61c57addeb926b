"""Fused operations with several backends, each a plain function: imported as megalite.kernels."""
