"""Operations for inference equal those that training uses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels.chosen import Kernels
from megalite.kernels.decode_attention import decode_attention
from megalite.kernels.inference import PackedMatrix, for_few_rows, for_inference, matrix_for
from megalite.kernels.rope import rope_tables

TRAINS = Kernels()
INFERS = for_inference(TRAINS, torch.device("cpu"))
G = torch.Generator().manual_seed(0)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=G)


X, W, B = some(3, 2, 12), some(12), some(12)
TABLES = [
    rope_tables(torch.arange(3)[:, None] + torch.tensor([[0, start]]), 6, 100.0, torch.float64) for start in (2, 5)
]
CALLS: dict[str, Callable[[Kernels], Tensor]] = {
    "rms_norm": lambda kernels: kernels.rms_norm(X, W, 1e-3),
    "layer_norm": lambda kernels: kernels.layer_norm(X, W, B, 1e-3),
    "swiglu": lambda kernels: kernels.swiglu(X),
    "gelu": lambda kernels: kernels.gelu(X, B),
    "rope": lambda kernels: kernels.rope(X.view(3, 2, 2, 6), *TABLES[0]),
    "rope of part of a head": lambda kernels: kernels.rope(X.view(3, 2, 1, 12), *TABLES[1]),
    "rope of some heads": lambda kernels: kernels.rope(X.view(3, 2, 2, 6), *TABLES[0], 1),
    "rope again": lambda kernels: kernels.rope(X.view(3, 2, 1, 12), *TABLES[1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_equals_the_operation_of_training(name: str) -> None:
    torch.testing.assert_close(CALLS[name](INFERS), CALLS[name](TRAINS), rtol=0, atol=1e-13)


def test_bfloat16_is_rounded_once() -> None:
    x, w, b = (t.bfloat16() for t in (X, W, B))
    for name in ("rms_norm", "layer_norm"):
        arguments = (x, w, 1e-3) if name == "rms_norm" else (x, w, b, 1e-3)
        found, wanted = getattr(INFERS, name)(*arguments), getattr(TRAINS, name)(*arguments)
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, False), (0.0, True), (1.5, True)])
def test_one_query_on_what_is_kept(softcap: float, with_sinks: bool) -> None:
    q, k, v = some(1, 3, 4, 5), some(3, 2, 7, 5), some(3, 2, 7, 6)
    sinks = some(4) if with_sinks else None
    hidden = torch.zeros(3, 1, 1, 7, dtype=torch.float64)
    hidden[1, ..., :3] = -torch.inf
    found = decode_attention(q, k, v, scale=0.3, softcap=softcap, sinks=sinks, hidden=hidden)
    assert found.shape == (1, 3, 4, 6)
    for row in range(3):
        for head in range(4):
            scores = 0.3 * k[row, head // 2] @ q[0, row, head]
            scores = (softcap * (scores / softcap).tanh() if softcap else scores) + hidden[row, 0, 0]
            whole = torch.cat((scores, sinks[head : head + 1])) if sinks is not None else scores
            wanted = whole.softmax(0)[:7] @ v[row, head // 2]
            torch.testing.assert_close(found[0, row, head], wanted, rtol=0, atol=1e-13)


def test_a_layout_for_few_rows_keeps_the_matrix() -> None:
    wide, narrow = some(9, 4).float(), some(4, 9).float()
    laid_out = for_few_rows(wide)
    assert torch.equal(laid_out, wide) and laid_out.t().is_contiguous()
    for as_it_is in (narrow, wide.double(), wide.bfloat16()):
        assert for_few_rows(as_it_is) is as_it_is


def test_a_matrix_packed_for_several_rows_gives_the_same() -> None:
    weight, bias = some(512, 520).float(), some(512).float()
    packed = matrix_for(weight, rows=8)
    assert isinstance(packed, PackedMatrix) and packed.weight is None
    for x in (some(1, 8, 520), some(1, 1, 520), some(40, 3, 520), some(8, 520, 2).mT):
        for given in (None, bias):
            wanted = torch.nn.functional.linear(x.float(), weight, given)
            torch.testing.assert_close(packed(x.float(), given), wanted, rtol=1e-4, atol=1e-4)
    for other in (matrix_for(weight), matrix_for(weight.double(), 8), matrix_for(weight[:64], 8)):
        assert not isinstance(other, PackedMatrix) and other.weight is not None
