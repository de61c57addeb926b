"""OLMo 2 (OLMo team, 2024, arXiv:2501.00656) and OLMoE (Muennighoff et al., 2024, arXiv:2409.02060).

Queries and keys of a token are normed whole; OLMo 2 norms what its blocks return and not what they take.
"""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import ATTENTION_BIAS, SILU, Only, Same, decoder, experts
from megalite.models.hf.rope import Rope
from megalite.models.layers import PostNormLayer
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.qk_norm import WholeQKNormAttention


class Olmo2Layer(PostNormLayer):
    """Norms after the blocks."""

    attention_cls = WholeQKNormAttention


class Olmo2(Transformer):
    """OLMo 2 at any size."""

    layer_cls = Olmo2Layer


class OlmoeLayer(TransformerLayer):
    """Norms before the blocks."""

    attention_cls = WholeQKNormAttention


class Olmoe(Transformer):
    """OLMoE at any size."""

    layer_cls = OlmoeLayer


OLMO2 = Family(
    model_type="olmo2", architecture="Olmo2ForCausalLM", name="olmo2", model_cls=Olmo2, outside=OUTSIDE,
    layer=LAYER | {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    fields=(*decoder(eps=1e-5), Rope(), SILU, ATTENTION_BIAS),
)  # fmt: skip
OLMOE = Family(
    model_type="olmoe", architecture="OlmoeForCausalLM", name="olmoe", model_cls=Olmoe, outside=OUTSIDE, layer=LAYER,
    fields=(
        *decoder(eps=1e-5), Rope(), SILU, ATTENTION_BIAS,
        Only("clip_qkv", None, "queries, keys and values are not clipped"),
        *experts(count=("num_experts", "num_local_experts"), width=None, coeff=0.01, per_token=8),
        Same("norm_topk_prob", "router_normalize", default=False),
    ),
)  # fmt: skip
