"""Layers that put norms and residuals elsewhere than `TransformerLayer` does; x [s, b, h] ([s / tp, b, h] if cut)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_saved
from megalite.kernels.saved import Saved, beside, chain
from megalite.models.transformer import TransformerLayer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context, Site
from megalite.nn.recompute import Recompute
from megalite.nn.saved import BatchShape, saved_by


class SandwichLayer(TransformerLayer):
    """Norms before and after: x + post_norm(attention(norm(x))), then the same with mlp (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, index: int, kernels: Kernels | None = None):
        super().__init__(config, mpu, index, kernels)
        self.attention_post_norm = self.norm_cls(config, mpu, self.kernels)
        self.mlp_post_norm = self.norm_cls(config, mpu, self.kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        y, bias = self.recompute.branch("attention", self.attention_norm, self.attention, x, context)
        y = self.attention_post_norm(y if bias is None else y + bias)
        x = self._add(y, None, x, context, Site.ATTENTION_OUTPUT)
        y, bias = self.recompute.branch("mlp", self.mlp_norm, self.mlp, x, context)
        y = self.mlp_post_norm(y if bias is None else y + bias)
        return self._add(y, None, x, context, Site.MLP_OUTPUT)

    def saved(self, shape: BatchShape) -> Saved:
        """The norms after the blocks, too."""
        dropout = dropout_saved(self.hidden_dropout)
        branches = [
            self.recompute.branch_saved(part, saved_by(norm, shape), saved_by(block, shape), shape.stream)
            for part, norm, block in (
                ("attention", self.attention_norm, self.attention),
                ("mlp", self.mlp_norm, self.mlp),
            )
        ]
        after = [saved_by(norm, shape) for norm in (self.attention_post_norm, self.mlp_post_norm)]
        return chain(branches[0], after[0], dropout, branches[1], after[1], dropout)


class PostNormLayer(TransformerLayer):
    """Norms after the blocks alone: x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2, arXiv:2501.00656)."""

    @property
    def _without_norm(self) -> Recompute:
        """There is no norm before a block that could be computed again."""
        return replace(self.recompute, parts=self.recompute.parts - {"norm"})

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        y, bias = self._without_norm.branch("attention", _same, self.attention, x, context)
        y = self.attention_norm(y if bias is None else y + bias)
        x = self._add(y, None, x, context, Site.ATTENTION_OUTPUT)
        y, bias = self._without_norm.branch("mlp", _same, self.mlp, x, context)
        y = self.mlp_norm(y if bias is None else y + bias)
        return self._add(y, None, x, context, Site.MLP_OUTPUT)

    def saved(self, shape: BatchShape) -> Saved:
        """What blocks, norms and dropout keep."""
        parts: list[Saved] = []
        for part, block, norm in (
            ("attention", self.attention, self.attention_norm), ("mlp", self.mlp, self.mlp_norm),
        ):  # fmt: skip
            parts.append(self._without_norm.block_saved(part, saved_by(block, shape), shape.stream))
            parts += [saved_by(norm, shape), dropout_saved(self.hidden_dropout)]
        return chain(*parts)


class ParallelResidualLayer(TransformerLayer):
    """Both blocks read the same x: x + attention(norm(x)) + mlp(other_norm(x)) (GPT-J; PaLM, arXiv:2204.02311)."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        y, bias = self.recompute.branch("attention", self.attention_norm, self.attention, x, context)
        out = self._add(y, bias, x, context, Site.ATTENTION_OUTPUT)
        y, bias = self.recompute.branch("mlp", self.mlp_norm, self.mlp, x, context)
        return self._add(y, bias, out, context, Site.MLP_OUTPUT)

    def saved(self, shape: BatchShape) -> Saved:
        """That of both branches, which share their input."""
        dropout = dropout_saved(self.hidden_dropout)
        branches = [
            chain(
                self.recompute.branch_saved(part, saved_by(norm, shape), saved_by(block, shape), shape.stream), dropout
            )
            for part, norm, block in (
                ("attention", self.attention_norm, self.attention),
                ("mlp", self.mlp_norm, self.mlp),
            )
        ]
        return beside(*branches)


def _same(x: Tensor) -> Tensor:
    return x
