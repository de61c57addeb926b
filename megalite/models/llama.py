"""Llama (Touvron et al., 2023, arXiv:2302.13971): RMSNorm, rotary positions, grouped queries, SwiGLU, no biases."""

from __future__ import annotations

from megalite.models.transformer import Transformer


class Llama(Transformer):
    """What `Transformer` is by default."""
