"""The gated short convolution against torch's own convolution in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.short_conv import gated_short_conv

SIZES = [(9, 2, 5, 3), (1, 3, 4, 3), (2, 1, 7, 4), (6, 2, 3, 1), (0, 2, 4, 3)]


def reference(bcx: Tensor, weight: Tensor) -> Tensor:
    """The definition, in the inputs' dtype."""
    b, c, x = bcx.chunk(3, -1)
    (hidden, width), length = weight.shape, bcx.shape[0]
    u = F.pad((b * x).permute(1, 2, 0), (width - 1, 0))
    z = F.conv1d(u, weight[:, None], groups=hidden) if length else (b * x).permute(1, 2, 0)
    return c * z.permute(2, 0, 1)


def inputs(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    s, b, h, k = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (s, b, 3 * h), (h, k), (s, b, h)
    bcx, weight, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return bcx.requires_grad_(), weight.requires_grad_(), dy


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_definition_in_float64(sizes: tuple[int, ...]) -> None:
    bcx, weight, dy = inputs(sizes)
    y, exact = gated_short_conv(bcx, weight), reference(bcx, weight)
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    if y.numel():
        for ours, want in zip(*(torch.autograd.grad(out, (bcx, weight), dy) for out in (y, exact)), strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_rounded_once() -> None:
    bcx, weight, dy = (t.detach().bfloat16() for t in inputs((64, 2, 16, 3)))
    bcx.requires_grad_()
    weight.requires_grad_()
    y = gated_short_conv(bcx, weight)
    wide = [t.detach().double().requires_grad_() for t in (bcx, weight)]
    exact = reference(*wide)
    results = [y, *torch.autograd.grad(y, (bcx, weight), dy)]
    wanted = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    for ours, want in zip(results, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - want).abs().max() <= 2.0**-8 * want.abs().max()


def test_gradcheck() -> None:
    bcx, weight, _ = inputs((5, 2, 3, 3))
    assert torch.autograd.gradcheck(gated_short_conv, (bcx, weight))
