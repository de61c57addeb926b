"""What each operation says that it keeps for backward is what autograd is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.kernels.activation import activation_saved, gelu, swiglu_packed
from megalite.kernels.attention import attention_saved, packed_attention
from megalite.kernels.attention_kernel import BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.kernels.dropout import bias_dropout_add, dropout, dropout_key, dropout_saved
from megalite.kernels.norm import layer_norm, layer_norm_saved, rms_norm, rms_norm_saved
from megalite.kernels.rope import apply_rope, rope_tables
from megalite.kernels.saved import Saved, beside, chain, region_saved
from megalite.kernels.short_conv import gated_short_conv, gated_short_conv_saved

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def bytes_kept(function: Callable[[], Tensor], apart: Sequence[Tensor] = ()) -> int:
    """Bytes of the storages that autograd keeps for `function`, each once, without those of `apart`."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()  # alive until the bytes are summed, or storages could take each other's place
    for tensor in apart:
        found.pop(tensor.untyped_storage()._cdata, None)
    assert out.requires_grad
    return sum(found.values())


def _x(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    x, weight, bias = _x(5, 3, 12, dtype=dtype), _x(12, dtype=dtype), _x(12, dtype=dtype)
    parameters = (weight, bias)
    assert bytes_kept(lambda: rms_norm(x, weight, 1e-5), parameters) == rms_norm_saved(x.shape, dtype).total
    assert bytes_kept(lambda: layer_norm(x, weight, bias, 1e-5), parameters) == layer_norm_saved(x.shape, dtype).total
    for function in (swiglu_packed, gelu):
        assert bytes_kept(lambda function=function: function(x)) == activation_saved(x.shape, dtype).total


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_keeps_no_mask(p: float) -> None:
    x, residual = _x(5, 3, 12, dtype=torch.float32), _x(5, 3, 12, dtype=torch.float32)
    key, index = dropout_key(1, 2, 3), torch.arange(15).view(5, 3)
    assert (
        bytes_kept(lambda: dropout(x * 1, p, key, index), [index]) - bytes_kept(lambda: x * 1) == dropout_saved(p).own
    )
    kept = bytes_kept(lambda: bias_dropout_add(x, None, residual, p, key, index), [index])
    assert kept == dropout_saved(p).total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("backend", ["block", "sdpa"])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, turned: bool, backend: str) -> None:
    s, b, d = 7, 2, 8
    qkv = _x(s, b, (heads + 2 * kv_heads) * d, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    rope = rope_tables(torch.arange(s)[:, None].expand(s, b), d, 1e4, wide) if turned else None
    kept = bytes_kept(
        lambda: packed_attention(
            qkv if rope is None else apply_rope(qkv.unflatten(-1, (-1, d)), *rope, heads + kv_heads).flatten(2),
            head_dim=d,
            num_kv_heads=kv_heads,
            backend=backend,  # pyright: ignore
        ),
        rope or (),
    )
    declared = attention_saved(
        s * b, num_heads=heads, num_kv_heads=kv_heads, head_dim=d, dtype=dtype, remade=False, dropout=False,
    )  # fmt: skip
    assert kept == declared.total


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_within_documents_and_windows(dtype: torch.dtype) -> None:
    s, b, heads, kv_heads, d = 9, 2, 4, 2, 8
    qkv, sinks = _x(s, b, (heads + 2 * kv_heads) * d, dtype=dtype), _x(heads, dtype=dtype)
    places = torch.arange(s)[:, None].expand(s, b).contiguous()
    mask = AttentionMask(query=places, start=first_seen(places, places // 4 * 4, 3), key=places)

    def attention() -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split([heads * d, kv_heads * d, kv_heads * d], -1))
        return attend(q, k, v, mask, BlockKernel(scale=0.3), sinks=sinks)

    declared = attention_saved(
        s * b, num_heads=heads, num_kv_heads=kv_heads, head_dim=d, dtype=dtype, remade=False, dropout=False
    )
    assert bytes_kept(attention, [sinks]) == declared.total


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_convolution(dtype: torch.dtype) -> None:
    bcx, weight = _x(7, 2, 15, dtype=dtype), _x(5, 3, dtype=dtype)
    assert bytes_kept(lambda: gated_short_conv(bcx, weight), [weight]) == gated_short_conv_saved(bcx.shape, dtype).total


def test_a_tensor_between_two_operations_counts_once() -> None:
    norm, linear, gate = Saved(input=8, own=1), Saved(input=8, work=20), Saved(input=6, output=4)
    assert chain(norm, linear).total == 8 + 1 + 8
    assert chain(gate, Saved(input=4)).total == 6 + 4, "kept by both, there once"
    assert chain(norm, Saved(), linear).total == 8 + 1 + 8, "what keeps nothing does not hide it"
    assert beside(norm, linear) == Saved(input=8, own=1, work=20)


def test_a_region_keeps_its_input_and_the_results_that_its_second_run_asks_for() -> None:
    first = Saved(input=8, own=5, held=2, work=20, last_results=16)
    both = chain(first, Saved(input=8, own=1, last_results=3))
    assert (both.results, both.last_results) == (16, 3)
    plain, stashing = region_saved(both, 8), region_saved(both, 8, stashes=True)
    assert (plain.total, stashing.total) == (8 + 2, 8 + 2 + 16)
    assert plain.again == 5 + 8 + 1 and plain.work == 20
