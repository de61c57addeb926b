"""The architectures: a name in `model.name` is a key of `MODELS`."""

from megalite.models.gpt2 import GPT2
from megalite.models.gpt_oss import GptOss
from megalite.models.lfm2 import LFM2
from megalite.models.llama import Llama
from megalite.models.qwen2_moe import Qwen2Moe
from megalite.models.qwen3 import Qwen3
from megalite.models.transformer import Transformer

MODELS: dict[str, type[Transformer]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "qwen3": Qwen3,
    "lfm2": LFM2,
    "gpt_oss": GptOss,
    "qwen2_moe": Qwen2Moe,
}
