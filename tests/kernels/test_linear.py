"""Products of linear layers and main-gradient accumulation."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels.linear import accumulate_weight_grad, input_grad, linear


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (0, 4), (7, 2)], ids=str)
def test_products_equal_autograd(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(*shape, 9, dtype=torch.float64)
    dx, dw = torch.autograd.grad(x @ weight.t(), (x, weight), dy)
    main_grad = torch.ones_like(weight)
    with torch.no_grad():
        accumulate_weight_grad(main_grad, dy, x)
        torch.testing.assert_close(linear(x, weight), x @ weight.t())
        torch.testing.assert_close(input_grad(dy, weight), dx)
    torch.testing.assert_close(main_grad, dw + 1)


def test_accumulates_into_views_and_strided_inputs() -> None:
    torch.manual_seed(0)
    buffer = torch.full((100,), float("nan"), dtype=torch.float64)
    main_grad = buffer[10:64].view(9, 6)
    main_grad.zero_()
    x, dy = (
        torch.randn(4, 5, 12, dtype=torch.float64)[..., ::2],
        torch.randn(5, 4, 9, dtype=torch.float64).transpose(0, 1),
    )
    accumulate_weight_grad(main_grad, dy, x)
    torch.testing.assert_close(main_grad, torch.einsum("sbo,sbi->oi", dy, x))
    assert buffer[:10].isnan().all() and buffer[64:].isnan().all()


def test_wide_main_grad_keeps_small_contributions() -> None:
    """512 micro-batches of bfloat16 gradients: a bfloat16 accumulator stops growing at 256 of 512."""
    x, dy = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    wide, narrow = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bfloat16)
    for _ in range(512):
        accumulate_weight_grad(wide, dy, x)
        accumulate_weight_grad(narrow, dy, x)
    assert wide.item() == 512 and narrow.item() == 256
