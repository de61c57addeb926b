"""Primer-like: squared ReLU, norms after the branches, rotary positions."""

from torch import Tensor

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.context import Context
from megalite.nn.mlp import ParallelMLP


class SquaredReluMLP(ParallelMLP):
    """fc2(relu(fc1 x)^2)."""

    parts = ("up",)

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, ffn / tp] -> [s, b, ffn / tp]."""
        return x.relu().square()


class PrimerLayer(TransformerLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    mlp_cls = SquaredReluMLP

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        y, _ = self.attention(x, context)
        x = x + self.attention_norm(y)
        y, _ = self.mlp(x, context)
        return x + self.mlp_norm(y)


class Primer(Transformer):
    """A decoder of such layers."""

    layer_cls = PrimerLayer
