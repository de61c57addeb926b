"""The shape of a model: what every block reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer's architecture and sizes."""

    name: str = "llama"
    """Architecture: a key of megalite.models.MODELS (gpt2, llama)."""
    num_layers: int = 8
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); num_heads by default."""
    head_dim: int | None = None
    """Width of a head; hidden_size / num_heads by default."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; by default 4 x hidden (gpt2) or 8/3 x hidden rounded up to 64 (llama)."""
    vocab_size: int = 4093
    """Vocabulary entries, without padding; need not divide by anything."""
    max_positions: int = 1024
    """Longest sequence that learned position embeddings cover."""
    tie_embeddings: bool = False
    """Use the word embedding as output head."""
    norm_eps: float = 1e-5
    """Epsilon inside the square root of a norm."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    hidden_dropout: float = 0.0
    """Dropout probability on the embedding and on each residual branch."""
    attention_dropout: float = 0.0
    """Dropout probability on attention probabilities (block-wise attention backend only)."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 x num_layers)."""
    label_smoothing: float = 0.0
    """Probability mass spread over the other vocabulary entries in the loss."""
    z_loss: float = 0.0
    """Weight of the squared log-partition term in the loss (PaLM, arXiv:2204.02311)."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 4 * self.hidden_size if self.name == "gpt2" else (8 * self.hidden_size // 3 + 63) // 64 * 64
