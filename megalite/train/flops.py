"""Model FLOPs of a training step and the peak rates they are held against.

A multiply-add is 2 FLOPs. The forward pass counts every matrix product with a weight (attention projections,
feed-forward, output head; the input embedding is a look-up; of the experts, the top_k of a token) and the products of
attention over the (query, key) pairs that causal order, documents and windows leave. Padding does not count. Backward
is twice the forward pass. Recomputation, norms, softmax, the taps of short convolutions and the optimizer do not count,
so that the number measures the model and not the implementation (PaLM, arXiv:2204.02311, counts all pairs of a row;
current Megatron-LM half of them, whatever the documents).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megalite.batch import MicroBatch
from megalite.data.batch_sizes import BatchSizes
from megalite.nn.config import ModelConfig
from megalite.train.config import TrainConfig

BACKWARD = 2
"""Cost of the backward pass in forward passes: the gradient of the input and that of the weight."""

PEAK_TFLOPS = {
    "A100": 312.0, "A800": 312.0, "A40": 149.7, "A10": 125.0, "L40S": 362.05, "L4": 121.0, "V100": 125.0,
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "H800": 989.4, "H200": 989.4, "GH200": 989.4, "H20": 148.0,
    "GB200": 2500.0, "GB300": 2500.0, "B200": 2250.0, "B300": 2250.0,
    "MI250X": 383.0, "MI300X": 1307.4, "MI325X": 1307.4, "MI355X": 2516.6,
}  # fmt: skip
"""Dense bf16 (V100: fp16) tensor-core TFLOP/s by device name, from the vendors' data sheets."""


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply the activations of a token: weight matrices, active experts, the head, tied or not."""
    layers = sum(layer_matmul_parameters(model, layer) for layer in range(model.num_layers))
    return layers + end_matmul_parameters(model)


def end_matmul_parameters(model: ModelConfig) -> int:
    """The same for what follows the last layer: the head; for each further token a projection, a layer and a head."""
    head = model.hidden_size * model.vocab_size
    further = sum(layer_matmul_parameters(model, layer) for layer in model.all_layers[model.num_layers :])
    return head + further + model.mtp_layers * (2 * model.hidden_size**2 + head)


def layer_matmul_parameters(model: ModelConfig, layer: int) -> int:
    """The same for global layer number `layer`: what its products cost, up to a factor for all layers."""
    operator = model.hidden_size * 2 * (model.num_heads + model.kv_heads) * model.head_size
    if model.is_latent:
        operator = _latent_parameters(model)
    elif not model.is_attention_layer(layer):
        operator = 4 * model.hidden_size**2  # three into a short convolution, one out of it
    matrices = 2 if model.name in ("gpt2", "gpt_neox") else 3  # a gated feed-forward has a third one
    if not model.is_moe_layer(layer):
        return operator + model.hidden_size * matrices * model.ffn_size
    width = model.top_k * model.expert_ffn_size + model.shared_ffn_hidden_size
    router = model.num_experts + (1 if model.shared_expert_gate else 0)
    return operator + model.hidden_size * (matrices * width + router)


def _latent_parameters(model: ModelConfig) -> int:
    """Weights of latent attention: to the latents and from there to heads, and the output projection."""
    hidden, heads, rank = model.hidden_size, model.num_heads, model.q_lora_rank
    queries = rank * (hidden + heads * model.head_size) if rank else hidden * heads * model.head_size
    keys = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    return (
        queries
        + keys
        + heads * (model.kv_lora_rank * (model.qk_nope_head_dim + model.value_size) + model.value_size * hidden)
    )


def windows(model: ModelConfig) -> tuple[int, ...]:
    """The sliding windows of its attention layers, each once; 0 for none."""
    layers = (layer for layer in model.all_layers if model.is_attention_layer(layer))
    return tuple(dict.fromkeys(model.window_of(layer) for layer in layers))


def row_pairs(seq_len: int, window: int = 0) -> int:
    """(query, key) pairs of causal attention in a row of one document."""
    seen = min(seq_len, window or seq_len)
    return seen * (seen + 1) // 2 + (seq_len - seen) * seen


def batch_pairs(batches: Sequence[MicroBatch], window: int = 0) -> int:
    """(query, key) pairs of causal attention inside the documents of whole rows, without those of padding."""
    return sum(_pairs(batch, window) for batch in batches)


def _pairs(batch: MicroBatch, window: int) -> int:
    if batch.documents is None and batch.token_mask is None:
        return batch.size * row_pairs(batch.seq_len, window)
    seen = (batch.row_places + 1).expand_as(batch.tokens)
    if batch.documents is not None:
        seen = seen - batch.documents
    if window:
        seen = seen.clamp(max=window)
    return int((seen if batch.token_mask is None else seen * batch.token_mask).sum())


def attention_flops(model: ModelConfig, pairs: Mapping[int, int]) -> int:
    """Forward FLOPs of scores and weighted values over all attention layers; pairs: (query, key) pairs by window."""
    layers = (layer for layer in model.all_layers if model.is_attention_layer(layer))
    features = model.num_heads * (model.head_size + model.value_size)
    return 2 * features * sum(pairs[model.window_of(layer)] for layer in layers)


def batch_flops(model: ModelConfig, num_tokens: int, pairs: Mapping[int, int]) -> int:
    """FLOPs of forward and backward over `num_tokens` tokens with so many (query, key) pairs by window."""
    return (1 + BACKWARD) * (2 * matmul_parameters(model) * num_tokens + attention_flops(model, pairs))


def step_flops(model: ModelConfig, seq_len: int, global_batch_size: int) -> int:
    """FLOPs of one training step over full rows of one document each, summed over all ranks."""
    pairs = {window: global_batch_size * row_pairs(seq_len, window) for window in windows(model)}
    return batch_flops(model, global_batch_size * seq_len, pairs)


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Peak dense TFLOP/s of `device` in a 16-bit `precision`; None for others and for devices that are not listed."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    return _peak_of(torch.cuda.get_device_name(device))


def _peak_of(device_name: str) -> float | None:
    """The peak of the longest listed name whose words all occur in `device_name` (H100 PCIe before H100)."""
    words = device_name.replace("-", " ").split()
    fitting = [name for name in PEAK_TFLOPS if all(word in words for word in name.split())]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


@dataclass(frozen=True)
class Workload:
    """Optimizer steps in numbers, whatever the layout; what rates are computed from."""

    sizes: BatchSizes
    """Samples of each step."""
    seq_len: int
    num_ranks: int
    peak_tflops: float | None
    """Of one rank's device, where it is known."""

    def tokens_of(self, step: int) -> int:
        """Tokens of the step after `step` others."""
        return self.sizes.of(step) * self.seq_len

    def tokens_before(self, step: int) -> int:
        """Tokens that `step` steps have consumed."""
        return self.sizes.before(step) * self.seq_len


def workload_of(train: TrainConfig, *, seq_len: int, num_ranks: int, device: torch.device) -> Workload:
    """The steps that these settings describe, on `num_ranks` devices like `device`."""
    return Workload(
        sizes=train.batch_sizes,
        seq_len=seq_len,
        num_ranks=num_ranks,
        peak_tflops=train.peak_tflops or peak_tflops(device, train.precision),
    )
