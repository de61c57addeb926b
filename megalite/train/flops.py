"""Model FLOPs of a training step and the peak rates they are held against.

A multiply-add is 2 FLOPs. The forward pass counts every matrix product with a weight (attention projections,
feed-forward, output head; the input embedding is a look-up; of the experts, the top_k of a token) and the products of
causal attention, of which only the half below the diagonal is needed and counted. Backward is twice the forward pass.
Recomputation, norms, softmax, the taps of short convolutions and the optimizer do not count, so that the number
measures the model and not the implementation (PaLM, arXiv:2204.02311, counts attention in full; here it is halved, as
in current Megatron-LM).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    return layers + model.hidden_size * model.vocab_size


def layer_matmul_parameters(model: ModelConfig, layer: int) -> int:
    """The same for global layer number `layer`: what its products cost, up to a factor for all layers."""
    operator = 2 * (model.num_heads + model.kv_heads) * model.head_size
    if not model.is_attention_layer(layer):
        operator = 4 * model.hidden_size  # three into a short convolution, one out of it
    matrices = 2 if model.name == "gpt2" else 3  # a gated feed-forward has a third one
    if not model.is_moe_layer(layer):
        return model.hidden_size * (operator + matrices * model.ffn_size)
    width = model.top_k * model.expert_ffn_size + model.shared_ffn_hidden_size
    router = model.num_experts + (1 if model.shared_expert_gate else 0)
    return model.hidden_size * (operator + matrices * width + router)


def attention_flops(model: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs of the scores and of the weighted values for one row, over the layers that have them, causal half."""
    num_layers = sum(model.is_attention_layer(layer) for layer in range(model.num_layers))
    return 2 * seq_len * seq_len * model.num_heads * model.head_size * num_layers


def forward_flops(model: ModelConfig, seq_len: int) -> int:
    """FLOPs of the forward pass of one row of `seq_len` tokens."""
    return 2 * matmul_parameters(model) * seq_len + attention_flops(model, seq_len)


def step_flops(model: ModelConfig, seq_len: int, global_batch_size: int) -> int:
    """FLOPs of one training step over the global batch, summed over all ranks."""
    return (1 + BACKWARD) * forward_flops(model, seq_len) * global_batch_size


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
    """One optimizer step in numbers, whatever the layout; what rates are computed from."""

    samples: int
    tokens: int
    flops: int
    num_ranks: int
    peak_tflops: float | None
    """Of one rank's device, where it is known."""


def workload_of(
    model: ModelConfig, train: TrainConfig, *, seq_len: int, num_ranks: int, device: torch.device
) -> Workload:
    """The step that these sections describe, on `num_ranks` devices like `device`."""
    return Workload(
        samples=train.global_batch_size,
        tokens=train.global_batch_size * seq_len,
        flops=step_flops(model, seq_len, train.global_batch_size),
        num_ranks=num_ranks,
        peak_tflops=train.peak_tflops or peak_tflops(device, train.precision),
    )
