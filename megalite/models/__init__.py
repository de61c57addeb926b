"""The architectures: a name in `model.name` is a key of `MODELS`.

`FAMILIES` has those of Hugging Face, by `model_type`; several may be one architecture here.
"""

from megalite.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DeepSeek
from megalite.models.gemma import GEMMA2, GEMMA3, Gemma2, Gemma3
from megalite.models.gpt2 import GPT2, GPT2_FAMILY
from megalite.models.gpt_neox import GPT_NEOX, GPTNeoX
from megalite.models.gpt_oss import GPT_OSS, GptOss
from megalite.models.hf.family import Family
from megalite.models.lfm2 import LFM2, LFM2_FAMILY, LFM2_MOE
from megalite.models.llama import LLAMA, MISTRAL, MIXTRAL, Llama
from megalite.models.olmo import OLMO2, OLMOE, Olmo2, Olmoe
from megalite.models.phi3 import PHI3
from megalite.models.qwen2 import QWEN2, Qwen2
from megalite.models.qwen2_moe import QWEN2_MOE, Qwen2Moe
from megalite.models.qwen3 import QWEN3, QWEN3_MOE, Qwen3
from megalite.models.smollm3 import SMOLLM3
from megalite.models.transformer import Transformer

MODELS: dict[str, type[Transformer]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "qwen3": Qwen3,
    "lfm2": LFM2,
    "gpt_oss": GptOss,
    "qwen2_moe": Qwen2Moe,
    "deepseek": DeepSeek,
    "qwen2": Qwen2,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gpt_neox": GPTNeoX,
    "olmo2": Olmo2,
    "olmoe": Olmoe,
}
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2_FAMILY,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN3,
        QWEN3_MOE,
        LFM2_FAMILY,
        LFM2_MOE,
        QWEN2,
        PHI3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        GPT_NEOX,
        OLMO2,
        OLMOE,
        GPT_OSS,
        QWEN2_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
