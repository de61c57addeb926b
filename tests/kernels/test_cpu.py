"""CPU settings: float32 accuracy is probed before oneDNN is used, and malloc takes its thresholds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megalite.kernels import cpu
from megalite.kernels.cpu import probe_onednn, set_fp32_gemm, tune_malloc

ONEDNN: Any = torch.backends.mkldnn


@pytest.fixture(autouse=True)
def restore_precision() -> Iterator[None]:
    before = ONEDNN.matmul.fp32_precision
    yield
    ONEDNN.matmul.fp32_precision = before


def test_ieee_is_ieee() -> None:
    assert set_fp32_gemm("ieee").startswith("ieee")
    assert ONEDNN.matmul.fp32_precision == "ieee"


def test_auto_uses_onednn_only_where_it_is_accurate() -> None:
    chosen = set_fp32_gemm("auto")
    switched = ONEDNN.matmul.fp32_precision == "bf16"
    assert chosen.startswith("onednn" if switched else "ieee")
    x, w = torch.rand(300, 400) + 1, torch.rand(500, 400) + 1
    exact = x.double() @ w.double().t()
    assert ((x @ w.t() - exact).abs() / exact).max() < 1e-5


@pytest.mark.parametrize("amx,error", [(True, 0.0), (False, 3.6e-4), (False, 1e-6)])
def test_choices(amx: bool, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(ONEDNN, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "probe_onednn", lambda: error)
    if not amx and error < 1e-5:
        assert set_fp32_gemm("auto").startswith("onednn") and set_fp32_gemm("onednn").startswith("onednn")
        return
    assert set_fp32_gemm("auto").startswith("ieee (")
    assert ONEDNN.matmul.fp32_precision == "ieee"
    with pytest.raises(RuntimeError, match=r"AMX" if amx else r"3\.6e-04"):
        set_fp32_gemm("onednn")


def test_probe_leaves_the_switch_alone() -> None:
    set_fp32_gemm("ieee")
    assert 0 <= probe_onednn(rows=64, features=64, outputs=96) < 1
    assert ONEDNN.matmul.fp32_precision == "ieee"


def test_probe_measures_relative_error(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.rand(5, 6) + 1, torch.rand(6, 7) + 1
    assert cpu._relative_error(a, b) < 1e-6
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda x, y: torch.matmul(x, y) * (1 + 1e-3 * (x.dtype == torch.float32))
    )
    assert cpu._relative_error(a, b) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_malloc_takes_the_thresholds() -> None:
    assert tune_malloc()
