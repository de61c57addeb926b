"""The architectures: a name in `model.name` is a key of `MODELS`.

`FAMILIES` has those of Hugging Face, by `model_type`; several may be one architecture here.
"""

from megalite.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DeepSeek
from megalite.models.gpt2 import GPT2, GPT2_FAMILY
from megalite.models.gpt_oss import GPT_OSS, GptOss
from megalite.models.hf.family import Family
from megalite.models.lfm2 import LFM2, LFM2_FAMILY, LFM2_MOE
from megalite.models.llama import LLAMA, MISTRAL, MIXTRAL, Llama
from megalite.models.qwen2_moe import QWEN2_MOE, Qwen2Moe
from megalite.models.qwen3 import QWEN3, QWEN3_MOE, Qwen3
from megalite.models.transformer import Transformer

MODELS: dict[str, type[Transformer]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "qwen3": Qwen3,
    "lfm2": LFM2,
    "gpt_oss": GptOss,
    "qwen2_moe": Qwen2Moe,
    "deepseek": DeepSeek,
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
        GPT_OSS,
        QWEN2_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
