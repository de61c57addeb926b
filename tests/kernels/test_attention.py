"""Attention backends against softmax written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import attention as module
from megalite.kernels import attention_rows, backends
from megalite.kernels.attention import (
    AttentionDropout,
    attention,
    block_forward,
    packed_attention,
)
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import AttentionChoice, KernelConfig
from megalite.kernels.dropout import dropout_key
from megalite.kernels.rope import apply_rope, rope_tables

# s, b, heads, kv_heads, d: GQA ratios, odd lengths and sizes, blocks that divide and that do not.
SHAPES = [(1, 2, 4, 2, 8), (17, 3, 6, 2, 5), (16, 1, 4, 4, 8), (50, 2, 8, 1, 3), (33, 1, 3, 3, 1), (7, 0, 2, 1, 4)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """q, k, v that require gradients, and a gradient of the output."""
    torch.manual_seed(seed)
    s, b, heads, kv, d = shape
    leaves = [torch.randn(s, b, n, d, dtype=torch.float64).to(dtype).requires_grad_() for n in (heads, kv, kv)]
    return [*leaves, torch.randn(s, b, heads, d, dtype=torch.float64).to(dtype)]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp), every score written out; `weights` [b, heads, s, s] multiplies the probabilities."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1), -math.inf)
    probs = scores.softmax(-1) if weights is None else scores.softmax(-1) * weights
    return torch.einsum("bhqk,kbhd->qbhd", probs, v), scores.logsumexp(-1).permute(2, 0, 1)


def outputs(out: Tensor, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k, v."""
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)


@pytest.mark.parametrize("backend", ["sdpa", "block"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape: tuple[int, ...], backend: module.CausalBackend) -> None:
    q, k, v, dout = inputs(shape)
    ours = outputs(attention(q, k, v, backend=backend, scale=0.7), [q, k, v], dout)
    for got, want in zip(ours, outputs(reference(q, k, v, 0.7)[0], [q, k, v], dout), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_default_scale_and_log_sum_exp() -> None:
    q, k, v = (t.detach() for t in inputs((21, 2, 4, 2, 9))[:3])
    want, want_lse = reference(q, k, v, 1 / 3)
    out, lse = block_forward(q, k, v, 1 / 3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(q, k, v, backend="block"), want, rtol=1e-12, atol=1e-12)


def test_values_may_be_narrower_than_keys() -> None:
    q, k, v, dout = inputs((20, 2, 4, 2, 6))
    v, dout = v.detach()[..., :4].requires_grad_(), dout[..., :4]
    ours = outputs(attention(q, k, v, backend="block", scale=0.5), [q, k, v], dout)
    for got, want in zip(ours, outputs(reference(q, k, v, 0.5)[0], [q, k, v], dout), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_slices_of_one_projection() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(19, 2, 8 * 5, dtype=torch.float64, requires_grad=True)
    q, k, v = (t.view(19, 2, -1, 5) for t in qkv.split([20, 10, 10], -1))
    dout = torch.randn(19, 2, 4, 5, dtype=torch.float64).transpose(0, 1).contiguous().transpose(0, 1)
    got = outputs(attention(q, k, v, backend="block", scale=0.4), [qkv], dout)
    want = outputs(reference(q, k, v, 0.4)[0], [qkv], dout)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["sdpa", "block"])
@pytest.mark.parametrize("rotary_dim", [4, 6], ids=lambda r: f"rotary{r}of6")
def test_packed_and_turned_in_one_piece(
    backend: module.CausalBackend, rotary_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions differ between batch rows, and chunks hold a part of the heads."""
    monkeypatch.setattr(attention_rows, "_CACHED", 1)
    torch.manual_seed(0)
    qkv = torch.randn(37, 3, (8 + 2 * 4) * 6, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(37, 3, 8 * 6, dtype=torch.float64)
    rope = rope_tables(torch.randint(0, 50, (37, 3)), rotary_dim, 100.0, torch.float64)
    q, k, v = (t.view(37, 3, -1, 6) for t in qkv.split([48, 24, 24], -1))
    want = outputs(reference(apply_rope(q, *rope), apply_rope(k, *rope), v, 0.4)[0].flatten(2), [qkv], dout)
    turned = apply_rope(qkv.unflatten(-1, (-1, 6)), *rope, 12).flatten(2)
    ours = packed_attention(turned, head_dim=6, num_kv_heads=4, backend=backend, scale=0.4)
    for got, expected in zip(outputs(ours, [qkv], dout), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cached", [1, 1 << 10, 1 << 12])
def test_chunks_do_not_show(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of part of a row's heads, of several rows and of everything drop the same probabilities."""
    q, k, v, dout = inputs((33, 5, 6, 3, 4))
    token_index = torch.arange(33 * 5).view(33, 5) * 7
    dropout = AttentionDropout(p=0.3, key=dropout_key(1, 2, 3), token_index=token_index, head_offset=6)
    whole = outputs(attention(q, k, v, backend="block", dropout=dropout), [q, k, v], dout)
    monkeypatch.setattr(attention_rows, "_CACHED", cached)
    parts = outputs(attention(q, k, v, backend="block", dropout=dropout), [q, k, v], dout)
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)
    q, k, v, _ = inputs((6, 1, 2, 1, 2))
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, backend="block"), (q, k, v))


def errors(leaves: list[Tensor], dout: Tensor, scale: float) -> dict[str, list[float]]:
    """Relative error of the output and of each gradient: both backends, and plain products in the inputs' dtype."""
    q, k, v = leaves
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = outputs(reference(wide[0], wide[1], wide[2], scale)[0], wide, dout.double())
    found = {
        "sdpa": outputs(attention(q, k, v, backend="sdpa", scale=scale), leaves, dout),
        "block": outputs(attention(q, k, v, backend="block", scale=scale), leaves, dout),
        "eager": outputs(reference(q, k, v, scale)[0], leaves, dout),
    }
    return {
        n: [((a.double() - b).norm() / b.norm()).item() for a, b in zip(g, exact, strict=True)]
        for n, g in found.items()
    }


@pytest.mark.parametrize("shift", [300.0, -300.0])
def test_large_keys(shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of several hundred, and a gradient of q that cancels: as exact as SDPA."""
    monkeypatch.setattr(module, "_BLOCK", 64)
    q, k, v, dout = inputs((200, 1, 4, 2, 64), torch.float32)
    found = errors([q, (k.detach() + shift).requires_grad_(), v], dout, 1.0)
    assert all(a <= 5 * b for a, b in zip(found["block"], found["sdpa"], strict=True)), found


def test_bfloat16_accuracy() -> None:
    """Scores and statistics in float32: better than plain bfloat16 products, and like SDPA."""
    *leaves, dout = inputs((128, 2, 4, 2, 32), torch.bfloat16)
    found = errors(leaves, dout, 0.5)
    assert all(a < b for a, b in zip(found["block"], found["eager"], strict=True)), found
    assert all(a <= 1.4 * b for a, b in zip(found["block"], found["sdpa"], strict=True)), found


def dropout_case(**changes: object) -> AttentionDropout:
    fields = {
        "p": 0.3,
        "key": dropout_key(1, 2, 3),
        "token_index": torch.arange(3)[None] * 1000 + torch.arange(40)[:, None],
    }
    return AttentionDropout(**(fields | changes))  # type: ignore[arg-type]


def dropout_weights(heads: int, kv: int, **changes: object) -> Tensor:
    """[b, heads, s, s]: the factor on each probability, read off values that are unit vectors."""
    s, b = 40, 3
    q, k = torch.zeros(s, b, heads, 2, dtype=torch.float64), torch.zeros(s, b, kv, 2, dtype=torch.float64)
    v = torch.eye(s, dtype=torch.float64)[:, None, None].expand(s, b, kv, s)
    out = attention(q, k, v, backend="block", dropout=dropout_case(**changes))
    return out.permute(1, 2, 0, 3) * torch.arange(1.0, s + 1).view(1, 1, s, 1)


def test_dropout_forward_and_backward() -> None:
    q, k, v, dout = inputs((40, 3, 4, 2, 5))
    weights = dropout_weights(4, 2)
    factors = weights.round(decimals=12).unique().tolist()
    assert factors == pytest.approx([0.0, 1 / 0.7])
    got = outputs(attention(q, k, v, backend="block", scale=0.6, dropout=dropout_case()), [q, k, v], dout)
    want = outputs(reference(q, k, v, 0.6, weights)[0], [q, k, v], dout)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dropout_mask_ignores_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dropout_weights(4, 2)
    assert torch.equal(dropout_weights(4, 4), whole)
    assert torch.equal(dropout_weights(2, 1, head_offset=2), whole[:, 2:])
    moved = dropout_case().token_index.flip(1)
    assert torch.equal(dropout_weights(4, 2, token_index=moved), whole.flip(0))
    monkeypatch.setattr(module, "_BLOCK", 13)
    torch.testing.assert_close(dropout_weights(4, 2), whole)


def test_dropout_statistics() -> None:
    lower = torch.ones(40, 40, dtype=torch.bool).tril()
    masks = torch.stack([(dropout_weights(8, 2, key=dropout_key(0, step, 0)) > 0)[..., lower] for step in range(8)])
    z = (masks.double() - 0.7) / math.sqrt(0.21)
    assert abs(z.mean()) * math.sqrt(z.numel()) < 4
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[:, :, 1:], z[:, :, :-1]), (z[..., 1:], z[..., :-1])):
        assert abs((a * b).mean()) * math.sqrt(a.numel()) < 4.5


@pytest.mark.parametrize("native", [True, False])
def test_resolve(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "has_instructions", lambda dtype: native)

    def resolve(
        choice: AttentionChoice, device: str, dropout: float, seq_len: int = 512, dtype: torch.dtype = torch.bfloat16
    ) -> str | None:
        traits = Traits(device=torch.device(device), dtype=dtype, dropout=dropout, seq_len=seq_len)
        return Kernels(config=KernelConfig(attention=choice)).causal_attention(traits)

    assert resolve("auto", "cpu", 0.0) == "block"
    assert resolve("auto", "cpu", 0.0, 4096) == ("sdpa" if native else "block")
    assert resolve("auto", "cpu", 0.1, 4096) == "block"
    assert resolve("auto", "cuda", 0.1) == "block"
    assert resolve("auto", "cpu", 0.0, 4096, torch.float32) == "sdpa"
    assert resolve("auto", "cuda", 0.0) == resolve("auto", "cuda", 0.0, dtype=torch.float32) == "sdpa"
    assert resolve("sdpa", "cpu", 0.0) == "sdpa"
    assert resolve("block", "cuda", 0.0) == "block"
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        resolve("sdpa", "cpu", 0.1)
    assert resolve("cudnn", "cuda", 0.0) is None


def test_memory_is_linear_in_the_sequence() -> None:
    """No tensor as large as the score matrix ever exists, forward or backward."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    q, k, v, dout = inputs((256, 1, 2, 1, 4))
    with Watch():
        outputs(attention(q, k, v, backend="block"), [q, k, v], dout)
    assert largest <= 16 * 256 * 2
