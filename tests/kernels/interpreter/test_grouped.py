"""Grouped products and the accumulation of weight gradients, against float64 and next to torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels import grouped as reference
from megalite.kernels import linear as linear_reference
from megalite.kernels.triton import grouped
from megalite.kernels.triton.launch import Launch
from megalite.kernels.triton.linear import accumulate_weight_grad
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import assert_no_worse, canaries, guarded

CASES = [([0, 1, 16, 0, 70], (40, 24)), ([0, 0, 0], (16, 16)), ([5], (33, 70)), ([3, 0, 17], (1, 19))]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(kernel: str, dtype: torch.dtype, size: int = 0) -> Launch:
        constants = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 2}
        return Launch(kernel=kernel, arch="", dtype="", up_to=0, constants=constants, num_warps=4, num_stages=1)

    monkeypatch.setattr(grouped, "launch_row", row)


def values(*shape: int, dtype: torch.dtype, seed: int = 0, gap: int = 0) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return guarded(x, gap=gap)


def check(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert ours.dtype == eager.dtype and ours.shape == exact.shape
    if not exact.numel():
        return
    assert_no_worse(ours, eager, exact)
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours.double(), exact, rtol=0.0, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "on_device"), [(torch.float32, False), (torch.bfloat16, True), (torch.float64, False)], ids=str
)
@pytest.mark.parametrize(("counts", "sizes"), CASES, ids=str)
def test_grouped(counts: list[int], sizes: tuple[int, int], dtype: torch.dtype, on_device: bool) -> None:
    """Empty runs, tails in every direction, rows that are not neighbours."""
    (inputs, outputs), n, experts = sizes, sum(counts), len(counts)
    x, weight = values(n, inputs, dtype=dtype, gap=3), values(experts, outputs, inputs, dtype=dtype, seed=1)
    dy, bias = values(n, outputs, dtype=dtype, seed=2, gap=1), values(experts, outputs, dtype=dtype, seed=3, gap=2)
    given = torch.tensor(counts) if on_device else counts
    x_wide, weight_wide, dy_wide, bias_wide = (t.double() for t in (x, weight, dy, bias))
    with canaries():
        y, plain = grouped.grouped_linear(x, weight, given, bias), grouped.grouped_linear(x, weight, given)
        dx = grouped.grouped_input_grad(dy, weight, given)
    exact = reference.grouped_linear(x_wide, weight_wide, counts)
    check(plain, reference.grouped_linear(x, weight, counts), exact)
    exact = reference.grouped_linear(x_wide, weight_wide, counts, bias_wide)
    check(y, reference.grouped_linear(x, weight, counts, bias), exact)
    exact = reference.grouped_input_grad(dy_wide, weight_wide, counts)
    check(dx, reference.grouped_input_grad(dy, weight, counts), exact)


@pytest.mark.parametrize(
    ("dtype", "main"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize(("counts", "sizes"), CASES, ids=str)
def test_weight_grads(
    counts: list[int], sizes: tuple[int, int], dtype: torch.dtype, main: torch.dtype
) -> None:  # fmt: skip
    """Added to what is there, in a buffer that is a part of a larger one; nothing where there are no rows."""
    (inputs, outputs), n, experts = sizes, sum(counts), len(counts)
    dy, x = values(n, outputs, dtype=dtype, gap=1), values(n, inputs, dtype=dtype, seed=1, gap=3)
    before = values(experts, outputs, inputs, dtype=main, seed=2, gap=5)
    ours, eager, exact = guarded(before, gap=5), before.clone(), before.double()
    grouped.accumulate_grouped_weight_grad(ours, dy, x, counts)
    reference.accumulate_grouped_weight_grad(eager, dy, x, counts)
    reference.accumulate_grouped_weight_grad(exact, dy.double(), x.double(), counts)
    check(ours, eager, exact)
    empty = [expert for expert, count in enumerate(counts) if not count]
    assert torch.equal(ours[empty], before[empty])
    room = ours.as_strided((experts, outputs, 5), ours.stride(), ours.storage_offset() + inputs)
    assert bool(room.isnan().all()), "written beside the gradient"


def test_an_empty_expert_costs_nothing() -> None:
    main_grad = torch.full((2, 16, 16), torch.nan)
    main_grad[1] = 0.0
    x = values(4, 16, dtype=torch.float32)
    with count_traffic() as traffic:
        grouped.accumulate_grouped_weight_grad(main_grad, x, x, [0, 4])
    assert bool(main_grad[0].isnan().all()) and bool(main_grad[1].isfinite().all())
    assert traffic.of(main_grad) == 2 * main_grad[1].nbytes


def test_micro_batches_add_up() -> None:
    """Accumulated in float32, four micro-batches of bfloat16 are one large batch; in bfloat16 they are not."""
    dy, x = values(8, 5, 20, dtype=torch.bfloat16), values(8, 5, 24, dtype=torch.bfloat16, seed=1)
    exact = dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    ours, narrow = torch.zeros(20, 24), torch.zeros(20, 24, dtype=torch.bfloat16)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)):
        accumulate_weight_grad(ours, dy[part], x[part])
        linear_reference.accumulate_weight_grad(narrow, dy[part], x[part])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    assert (narrow.double() - exact).abs().max() > 100 * (ours.double() - exact).abs().max()


def test_rows_far_apart() -> None:
    """Offsets beyond 2^31 elements: memory that is reserved, of which a few pages are touched."""
    x = values(140, 16, dtype=torch.bfloat16)
    far = torch.empty(139 * (1 << 24) + 16, dtype=torch.bfloat16).as_strided((140, 16), (1 << 24, 1)).copy_(x)
    weight = values(2, 20, 16, dtype=torch.bfloat16, seed=1)
    near, distant = (grouped.grouped_linear(rows, weight, [9, 131]) for rows in (x, far))
    assert torch.equal(near, distant)
    grads = [torch.zeros(2, 20, 16) for _ in range(2)]
    for grad, rows in zip(grads, (x, far), strict=True):
        grouped.accumulate_grouped_weight_grad(grad, near, rows, [9, 131])
    assert torch.equal(*grads)
