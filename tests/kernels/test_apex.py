"""Calls to apex, answered by a stand-in with its documented signatures, in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import apex_kernels
from megalite.kernels.adamw import fused_adamw_
from megalite.kernels.grad_norm import sum_of_squares
from megalite.kernels.linear import accumulate_weight_grad
from megalite.kernels.norm import layer_norm, rms_norm


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return F.rms_norm(input, list(normalized_shape), weight, eps)


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """C++ that checks nothing: a swap of the first two would be found by sizes alone."""
    assert input.is_contiguous() and d_output.is_contiguous() and d_weight.is_contiguous()
    assert d_weight.dtype == torch.float32 and input.dtype == d_output.dtype and input.dim() == d_output.dim() == 2
    assert d_weight.shape == (d_output.shape[1], input.shape[1]) and input.shape[0] == d_output.shape[0]
    d_weight += d_output.float().t() @ input.float()


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    assert d_weight.dtype == input.dtype == d_output.dtype
    d_weight += (d_output.float().t() @ input.float()).to(d_weight.dtype)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Lists are gradients, parameters, first and second moments; mode 1 is decoupled decay."""
    assert noop_flag.dtype == torch.int32 and mode == 1 and bias_correction == 1
    first, second = 1 - beta1**step, 1 - beta2**step
    for grad, param, exp_avg, exp_avg_sq in zip(*tensor_lists, strict=True):
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (exp_avg / first) / ((exp_avg_sq / second).sqrt() + epsilon) + weight_decay * param
        param.sub_(update, alpha=lr)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    assert noop_flag.dtype == torch.int32 and len(tensor_lists) == 1 and not per_tensor
    return torch.cat(tensor_lists[0]).norm()[None], torch.empty(0)


class MultiTensorApply:
    def __call__(self, op: object, noop_flag_buffer: Tensor, tensor_lists: object, *args: object) -> object:
        assert callable(op)
        return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


@pytest.fixture(autouse=True)
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {"fused_layer_norm_affine": fused_layer_norm_affine, "fused_rms_norm_affine": fused_rms_norm_affine}
    modules = {
        "apex": {}, "apex.normalization": {}, "apex.normalization.fused_layer_norm": norms,
        "apex.multi_tensor_apply": {"multi_tensor_applier": MultiTensorApply()},
        "amp_C": {"multi_tensor_adam": multi_tensor_adam, "multi_tensor_l2norm": multi_tensor_l2norm},
        "fused_weight_gradient_mlp_cuda": {
            "wgrad_gemm_accum_fp32": wgrad_gemm_accum_fp32, "wgrad_gemm_accum_fp16": wgrad_gemm_accum_fp16,
        },
    }  # fmt: skip
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norms() -> None:
    x, weight, bias = values(5, 2, 7), values(7, seed=1), values(7, seed=2)
    torch.testing.assert_close(apex_kernels.rms_norm(x, weight, 0.1), rms_norm(x, weight, 0.1))
    torch.testing.assert_close(apex_kernels.layer_norm(x, weight, bias, 0.1), layer_norm(x, weight, bias, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients(dtype: torch.dtype) -> None:
    dy, x = values(3, 5, 7).to(dtype), values(3, 5, 11, seed=1).to(dtype)
    for target in {torch.float32, dtype}:
        ours, wanted = torch.ones(7, 11, dtype=target), torch.ones(7, 11, dtype=target)
        for part in (slice(None), slice(0, 0)):
            apex_kernels.accumulate_weight_grad(ours, dy[part], x[part])
        accumulate_weight_grad(wanted, dy, x)
        torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)
    strided = values(7, 15, seed=2).t().to(dtype)
    apex_kernels.accumulate_weight_grad(torch.zeros(7, 11), strided, x.flatten(0, 1))


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor(0.25)], ids=str)
def test_adamw(scale: float | Tensor) -> None:
    runs = []
    for update in (fused_adamw_, apex_kernels.fused_adamw_):
        tensors = [values(33), values(33, seed=1), values(33, seed=2), values(33, seed=3).abs()]
        copy = torch.empty(33, dtype=torch.bfloat16)
        for step in (4, 5):
            update(
                *tensors, lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, step=step, grad_scale=scale,
                lowp_copy=copy,
            )  # fmt: skip
        assert copy.eq(tensors[0].bfloat16()).all()
        runs.append(tensors)
    for ours, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_sum_of_squares() -> None:
    for size in (0, 1, 77):
        found = apex_kernels.sum_of_squares(values(size))
        assert found.dtype == torch.float64 and found.shape == ()
        torch.testing.assert_close(found, sum_of_squares(values(size)), rtol=1e-5, atol=0.0)
