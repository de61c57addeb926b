"""The choice among backends: what auto takes, what a named one demands, and that nothing is loaded in vain."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels, fallback_note
from megalite.kernels.config import KernelConfig
from megalite.kernels.registry import OPERATIONS, choose, config_problems, option_of, problems, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LARGE = Traits(device=CPU, dtype=torch.bfloat16, width=4096)
ON_GPU = Traits(device=GPU, dtype=torch.bfloat16, width=4096)
OWN = ("torch", "loop", "block", "compiled")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can compile, whatever this one can do."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))


def chosen(op: str, traits: Traits, choice: str = "auto") -> str:
    return choose(op, choice, traits)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_has_a_form_that_runs_anywhere(op: str) -> None:
    """The last one without conditions, so that auto always finds one; its function can be imported."""
    everything = Traits(device=CPU, dtype=torch.float64, width=7, dropout=0.1, softcap=3.0, window=5, compile=False)
    resolved = resolve(op, "auto", everything)
    assert resolved.backend in OWN and callable(resolved.fn)
    assert OPERATIONS[op][resolved.backend].problems(everything) == []


@pytest.mark.parametrize("op", sorted(set(OPERATIONS) - {"attention", "causal_attention"}))
def test_the_default_is_plain_torch(op: str) -> None:
    default = {field.name: field.default for field in dataclasses.fields(Kernels)}[op]
    plain = "loop" if option_of(op) == "grouped" else "torch"
    fn: Any = OPERATIONS[op][plain].fn
    assert default is getattr(fn, "func", fn)


@pytest.mark.usefixtures("compiler")
def test_auto_compiles_for_cpus_where_it_pays() -> None:
    assert chosen("rms_norm", LARGE) == "compiled"
    assert chosen("rms_norm", dataclasses.replace(LARGE, dtype=torch.float32)) == "compiled"
    for changed in ({"dtype": torch.float64}, {"width": 64}, {"compile": False}, {"dtype": torch.float16}):
        assert chosen("rms_norm", dataclasses.replace(LARGE, **changed)) == "torch"
    assert chosen("rms_norm", dataclasses.replace(LARGE, width=8), "compiled") == "compiled"


def test_without_a_compiler_auto_says_so_and_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert chosen("rms_norm", LARGE) == "torch"
    note = fallback_note(KernelConfig(), device=CPU, dtype=torch.bfloat16, width=4096)
    assert note is not None and "needs a C++ compiler, and there is no g++" in note
    others = ((KernelConfig(compile=False), 4096), (KernelConfig(backend="torch"), 4096), (KernelConfig(), 8))
    for config, width in others:
        assert fallback_note(config, device=CPU, dtype=torch.bfloat16, width=width) is None
    with pytest.raises(ValueError, match=r"kernels\.backend=compiled needs a C\+\+ compiler.*backend=torch or auto"):
        chosen("rms_norm", LARGE, "compiled")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"needs Python\.h"):
        chosen("rms_norm", LARGE, "compiled")
    with pytest.raises(ValueError, match=r"ruled out by kernels\.compile=false"):
        chosen("rms_norm", dataclasses.replace(LARGE, compile=False), "compiled")


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (problem,) = config_problems(KernelConfig(backend="triton"), LARGE)
    assert "kernels.backend=triton needs a GPU, and this run is on the cpu" in problem
    assert "TRITON_INTERPRET=1" in problem and "kernels.backend=torch or auto" in problem
    assert chosen("rms_norm", LARGE) != "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("rms_norm", "triton", LARGE) == []
    assert chosen("rms_norm", LARGE) != "triton", "auto never interprets"


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "amp_C", None)
    (problem,) = problems("attention", "flash_attn", ON_GPU)
    assert "flash_attn" in problem and "pip install flash-attn" in problem
    (problem,) = problems("adamw", "apex", ON_GPU)
    assert "github.com/NVIDIA/apex" in problem and "PyPI" in problem


def test_all_that_is_wrong_is_said_at_once() -> None:
    config = KernelConfig(backend="apex", attention="cudnn", grouped="grouped_mm")
    wrong = dataclasses.replace(LARGE, dtype=torch.float64, softcap=2.0, window=7)
    found = config_problems(config, wrong, experts=True)
    assert len(found) == len(set(found))
    for part in ("backend=apex needs a GPU", "cudnn needs a GPU", "softcap=2.0", "window=7", "takes no float64"):
        assert sum(part in problem for problem in found) == 1, part
    assert not any("grouped" in problem for problem in config_problems(config, wrong))


def test_a_backend_with_some_operations_leaves_the_others_to_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"):
        monkeypatch.setitem(sys.modules, module, object())  # pyright: ignore[reportArgumentType]
    assert "apex" not in OPERATIONS["permute"]
    assert chosen("permute", dataclasses.replace(ON_GPU, dtype=torch.float64), "apex") == "torch"
    assert chosen("adamw", ON_GPU, "apex") == "apex"
    assert chosen("sum_of_squares", dataclasses.replace(ON_GPU, compile=False), "auto") != "apex", "it may overflow"


def test_attention_is_chosen_by_what_is_asked() -> None:
    assert chosen("causal_attention", Traits(device=CPU, dtype=torch.float32, seq_len=512)) == "block"
    assert chosen("causal_attention", Traits(device=CPU, dtype=torch.float32, seq_len=4096)) == "sdpa"
    assert chosen("causal_attention", Traits(device=CPU, dtype=torch.float32, seq_len=4096, dropout=0.1)) == "block"


def test_nothing_optional_is_imported_on_a_cpu() -> None:
    code = """
import sys, torch
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
import megalite.models
Kernels.resolve(KernelConfig(compile=False), device=torch.device("cpu"), dtype=torch.bfloat16, width=4096)
loaded = [name for name in ("triton", "flash_attn", "apex", "torch._inductor.codecache") if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
