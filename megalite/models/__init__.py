"""The architectures: a name in `model.name` is a key of `MODELS`."""

from megalite.models.gpt2 import GPT2
from megalite.models.llama import Llama
from megalite.models.transformer import Transformer

MODELS: dict[str, type[Transformer]] = {"gpt2": GPT2, "llama": Llama}
