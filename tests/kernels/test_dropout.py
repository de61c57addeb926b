"""Stateless dropout: the recipe bit for bit, its statistics, and its independence of layout and recompute."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from megalite.kernels import dropout as module
from megalite.kernels.dropout import bias_dropout_add, dropout, dropout_key, keep_mask

ROWS, FEATURES, P = 4096, 1024, 0.1
SIGMA = math.sqrt(P * (1 - P))


def mix(x: int) -> int:
    """The recipe's 32-bit scramble in plain integers."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def kept(key: tuple[int, int], p: float, token: int, feature: int) -> bool:
    """The recipe for one element in plain integers."""
    row = mix(mix((token & 0xFFFFFFFF) ^ key[0]) ^ (token >> 32) ^ key[1])
    hashed = mix((row + feature * 0x9E3779B1) & 0xFFFFFFFF)
    return hashed - (hashed >> 31 << 32) >= round(p * 2**32) - 2**31


def test_key_is_splitmix64() -> None:
    def splitmix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    word = splitmix(splitmix(splitmix(7) ^ 8) ^ 9)
    key = dropout_key(7, 8, 9)
    assert key.dtype == torch.int32
    assert [k % 2**32 for k in key.tolist()] == [word % 2**32, word >> 32]
    assert len({tuple(dropout_key(*k).tolist()) for k in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0))}) == 4


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999, 1.0 - 1e-12])
def test_mask_is_the_recipe(p: float) -> None:
    key = dropout_key(1234, 5, 6)
    words = tuple(k % 2**32 for k in key.tolist())
    tokens = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345]
    mask = keep_mask(key, p, torch.tensor(tokens), 50, feature_offset=7)
    limit = min(p, 1.0 - 2.0**-32)
    assert mask.tolist() == [[kept(words, limit, t, f + 7) for f in range(50)] for t in tokens]  # type: ignore[arg-type]


def test_mask_is_the_same_in_every_cut() -> None:
    key, token = dropout_key(3, 4, 5), torch.randperm(60).view(6, 10) + 2**33
    x = torch.randn(6, 10, 48)
    whole = dropout(x, 0.3, key, token)
    by_rows = torch.cat([dropout(x[i : i + 2], 0.3, key, token[i : i + 2]) for i in (0, 2, 4)])
    by_columns = torch.cat([dropout(x[..., i : i + 16], 0.3, key, token, i) for i in (0, 16, 32)], -1)
    assert torch.equal(whole, by_rows) and torch.equal(whole, by_columns)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    key, token, x = dropout_key(3, 4, 5), torch.arange(100), torch.randn(100, 48)
    whole = dropout(x, 0.3, key, token)
    monkeypatch.setattr(module, "_CHUNK", 130)
    assert torch.equal(whole, dropout(x, 0.3, key, token))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_backward_has_the_forward_mask_and_scale(dtype: torch.dtype) -> None:
    key, token = dropout_key(0, 1, 2), torch.arange(40).view(8, 5)
    x, residual = (torch.randn(8, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    bias = torch.randn(24, dtype=dtype, requires_grad=True)
    dy = torch.randn(8, 5, 24, dtype=dtype)
    factor = keep_mask(key, 0.25, token, 24).double() / 0.75
    exact = residual.double() + (x + bias).double() * factor
    out = bias_dropout_add(x, bias, residual, 0.25, key, token)
    dx, dbias, dresidual = torch.autograd.grad(out, (x, bias, residual), dy)
    (alone,) = torch.autograd.grad(dropout(x, 0.25, key, token), x, dy)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps, "check_dtype": False}
    torch.testing.assert_close(out.double(), exact, **close)
    torch.testing.assert_close(dx.double(), dy.double() * factor, **close)
    torch.testing.assert_close(dbias.double(), dx.double().sum((0, 1)), **close)
    assert torch.equal(dresidual, dy) and torch.equal(alone, dx)


def test_gradcheck() -> None:
    key, token = dropout_key(0, 1, 2), torch.arange(6).view(3, 2)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 5), (5,), (3, 2, 5))]
    assert torch.autograd.gradcheck(lambda x, b, r: bias_dropout_add(x, b, r, 0.4, key, token), inputs)
    assert torch.autograd.gradcheck(lambda x, r: bias_dropout_add(x, None, r, 0.4, key, token), inputs[::2])


def test_edges() -> None:
    key, token, x = dropout_key(0, 0, 0), torch.arange(3), torch.randn(3, 4)
    assert dropout(x, 0.0, key, token) is x
    assert torch.equal(bias_dropout_add(x, None, x, 0.0, None, None), x + x)
    assert torch.equal(dropout(x, 1.0, key, token), torch.zeros(3, 4))
    assert dropout(x[:0], 0.5, key, token[:0]).shape == (0, 4)
    infinite = dropout(torch.full((200, 8), math.inf), 0.5, key, torch.arange(200))
    assert not infinite.isnan().any()


def sample(seed: int = 1, step: int = 2, site: int = 3, first: int = 0) -> Tensor:
    """Kept elements, centred and scaled to unit variance."""
    mask = keep_mask(dropout_key(seed, step, site), P, torch.arange(first, first + ROWS), FEATURES)
    return (mask.float() - (1 - P)) / SIGMA


@pytest.mark.parametrize("first", [0, 2**31 - ROWS // 2, 2**32 - ROWS // 2, 2**45])
def test_keep_rate(first: int) -> None:
    z = sample(first=first)
    assert abs(z.mean()) * math.sqrt(z.numel()) < 4
    for dim in (0, 1):  # no row and no column stands out
        sums = z.mean(dim) * math.sqrt(z.shape[dim])
        assert sums.abs().max() < 5.5
        assert abs(sums.square().mean() - 1) < 5 * math.sqrt(2 / len(sums))


def test_no_correlation_between_neighbours_sites_steps_and_seeds() -> None:
    z = sample()
    pairs = [(z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[1:, 1:], z[:-1, :-1]), (z[2:], z[:-2])]
    others = [z, sample(step=3), sample(site=4), sample(seed=2), sample(seed=3, step=2, site=1), sample(first=2**32)]
    pairs += list(combinations(others, 2))
    for a, b in pairs:
        assert abs((a * b).mean()) * math.sqrt(a.numel()) < 4.5


def test_rectangles_are_independent() -> None:
    """Row and column effects that cancel in pairs would show in products over the corners of rectangles."""
    z = sample()
    for down, right in ((1, 1), (1, 64), (512, 1), (2048, 512)):
        corners = z[:-down, :-right] * z[down:, :-right] * z[:-down, right:] * z[down:, right:]
        assert abs(corners.mean()) * math.sqrt(corners.numel()) < 5.5
