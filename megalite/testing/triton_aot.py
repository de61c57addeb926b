"""Compiles Triton kernels for GPUs that are not there, and judges what came out: registers, spills, widths of loads.

    with capture("sm_90") as reports:
        rms_norm(x, weight, 1e-6)       # CPU tensors with the true widths; a few rows will do

runs the real launching code with a stub for a driver: each launch compiles exactly what that GPU would run, and runs
nothing. Outputs are never written. Works with triton 3.6 to 3.9 in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.compiler.compiler as compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a GPU's multiprocessor holds."""

    block_shared: int
    """Bytes of shared memory that one block may ask for."""
    shared: int
    """Bytes of shared memory in all."""
    registers: int = 65536
    """Registers of 32 bits."""
    threads: int = 2048
    """Resident threads."""
    blocks: int = 32
    """Resident blocks."""


LIMITS = {
    "sm_80": Limits(block_shared=163 << 10, shared=164 << 10),
    "sm_89": Limits(block_shared=99 << 10, shared=100 << 10, threads=1536, blocks=24),
    "sm_90": Limits(block_shared=227 << 10, shared=228 << 10),
    "sm_100": Limits(block_shared=227 << 10, shared=228 << 10),
    "sm_120": Limits(block_shared=99 << 10, shared=100 << 10, threads=1536, blocks=24),
    "gfx942": Limits(block_shared=64 << 10, shared=64 << 10),
    "gfx950": Limits(block_shared=160 << 10, shared=160 << 10),
}
TARGETS = ("sm_80", "sm_90", "gfx942")
"""What every kernel must compile for."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled kernel, as the final machine code has it."""

    name: str
    """The kernel's function name."""
    target: str
    """sm_90, gfx942, ..."""
    num_warps: int
    """Warps of a block."""
    num_stages: int
    """Depth of the software pipeline."""
    registers: int
    """Registers of a thread (AMD: VGPRs)."""
    stack_bytes: int
    """Stack frame of a thread."""
    spill_stores: int
    """Instructions that store a register to memory for lack of registers."""
    spill_loads: int
    """Instructions that load such a register again."""
    shared_bytes: int
    """Shared memory of a block."""
    blocks_per_sm: int | None
    """Blocks that fit on a multiprocessor by registers, threads and shared memory; None on AMD."""
    mma: str
    """Matrix instructions: "", mma, wgmma, tcgen05 or mfma."""
    load_bits: Mapping[int, int]
    """Global loads in the code, also those to shared memory, by bits of a thread's access."""
    store_bits: Mapping[int, int]
    """Global stores likewise."""
    async_copy: str
    """Copies to shared memory: "", cp.async or tma."""
    atomics: int
    """Atomic instructions on global memory."""
    instructions: int
    """Instructions in all."""

    @property
    def widest_load(self) -> int:
        """Bits of the widest global load."""
        return max(self.load_bits, default=0)

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a block may have on the target."""
        return LIMITS[self.target].block_shared

    def faults(self, *, mma: str | None = None, wide_loads: bool = False, spills: int = 0) -> list[str]:
        """What is wrong with this kernel, in words; an empty list if nothing.

        mma: the matrix instruction that it must use. wide_loads: 128-bit loads are a must. spills: how many spill
        instructions are allowed.
        """
        found = []
        if self.spill_stores + self.spill_loads > spills:
            found.append(f"spills: {self.spill_stores} stores, {self.spill_loads} loads")
        if not spills and self.stack_bytes:
            found.append(f"a stack frame of {self.stack_bytes} bytes")
        if self.shared_bytes > self.shared_limit:
            found.append(f"{self.shared_bytes} bytes of shared memory, {self.shared_limit} are possible")
        if mma is not None and self.mma != mma:
            found.append(f"{self.mma or 'no matrix instruction'} instead of {mma}")
        if wide_loads and self.widest_load < 128:
            found.append(f"no 128-bit loads: {dict(self.load_bits)}")
        return [f"{self.name} on {self.target}: {fault}" for fault in found]


@contextmanager
def capture(target: str = "sm_90") -> Iterator[list[Report]]:
    """Compiles for `target` what the block launches, without launching; yields the growing list of reports.

    Each compiled variant is reported once, in the order of first launch.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set: compile in a process without it")
    reports: list[Report] = []
    gpu, seen, launched = _gpu_target(target), set[str](), set[JITFunction[Any]]()
    run, load = JITFunction.run, compiler.CompiledKernel._init_handles
    before = driver._active

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in launched:
            launched.add(self)
            self.device_caches.clear()  # what was compiled for another target under the same device number
        return run(self, *args, **kwargs)

    def reported_load(self: Any) -> None:
        load(self)
        if self.hash not in seen:
            seen.add(self.hash)
            reports.append(_report(self, gpu))

    driver.set_active(_StubDriver(gpu))  # type: ignore[arg-type]
    JITFunction.run, compiler.CompiledKernel._init_handles = counted_run, reported_load
    compiler.max_shared_mem.cache_clear()
    try:
        yield reports
    finally:
        JITFunction.run, compiler.CompiledKernel._init_handles = run, load
        for function in launched:
            function.device_caches.clear()
        compiler.max_shared_mem.cache_clear()
        driver._active = before


def stub_driver(target: str) -> Any:
    """A triton driver for `target` that launches nothing."""
    return _StubDriver(_gpu_target(target))


def _gpu_target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def _report(kernel: Any, target: GPUTarget) -> Report:
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    metadata = kernel.metadata
    found = _read_cuda(kernel, LIMITS[name]) if target.backend == "cuda" else _read_hip(kernel)
    return Report(
        name=metadata.name,
        target=name,
        num_warps=metadata.num_warps,
        num_stages=getattr(metadata, "num_stages", 0),
        shared_bytes=metadata.shared,
        **found,
    )


def _read_cuda(kernel: Any, limits: Limits) -> dict[str, Any]:
    usage, sass = _disassemble(kernel.asm["cubin"])
    operations = Counter(
        re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    )
    ptx, registers = kernel.asm["ptx"], _number(r"REG:(\d+)", usage)
    return dict(
        registers=registers,
        stack_bytes=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        spill_stores=_count(operations, "STL"),
        spill_loads=_count(operations, "LDL"),
        blocks_per_sm=_occupancy(limits, registers, 32 * kernel.metadata.num_warps, kernel.metadata.shared),
        mma=_first_found(ptx, {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma"}),
        load_bits=_sass_bits(operations, "LDG", "LDGSTS"),
        store_bits=_sass_bits(operations, "STG"),
        async_copy=_first_found(ptx, {"cp.async.bulk.tensor": "tma", "cp.async": "cp.async"}),
        atomics=sum(_count(operations, name) for name in ("ATOMG", "ATOM", "RED", "REDG")),
        instructions=operations.total(),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _cuobjdump("-res-usage", file.name), _cuobjdump("-sass", file.name)


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([_BIN / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _count(operations: Mapping[str, int], name: str) -> int:
    return sum(n for operation, n in operations.items() if operation.split(".")[0] == name)


def _first_found(text: str, names: Mapping[str, str]) -> str:
    return next((name for instruction, name in names.items() if instruction in text), "")


def _sass_bits(operations: Mapping[str, int], *names: str) -> dict[int, int]:
    bits: Counter[int] = Counter()
    for operation, n in operations.items():
        if operation.split(".")[0] in names:
            width = re.search(r"\.[US]?(8|16|64|128|256)(?:\.|$)", operation)
            bits[int(width[1]) if width else 32] += n
    return dict(bits)


def _occupancy(limits: Limits, registers: int, threads: int, shared: int) -> int:
    by_registers = limits.registers // (-(-registers // 8) * 8 * threads)
    # The driver takes one KiB of each block's shared memory.
    return min(limits.blocks, limits.threads // threads, by_registers, limits.shared // (shared + 1024))


_HIP_BITS = {
    "ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16,
    "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128,
}  # fmt: skip


def _read_hip(kernel: Any) -> dict[str, Any]:
    code = kernel.asm["amdgcn"]
    operations = Counter(re.findall(r"^\s+((?:v|s|global|buffer|flat|ds|scratch)_[a-z0-9_]+)\s", code, re.MULTILINE))
    return dict(
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        stack_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        # The code's own counts of spills include scalars that lie in lanes of vector registers, which no memory sees.
        spill_stores=_starting(operations, "scratch_store"),
        spill_loads=_starting(operations, "scratch_load"),
        blocks_per_sm=None,
        mma="mfma" if _starting(operations, "v_mfma") else "",
        load_bits=_hip_bits(operations, "load"),
        store_bits=_hip_bits(operations, "store"),
        async_copy="",
        atomics=sum(_starting(operations, f"{kind}_atomic") for kind in ("global", "buffer", "flat")),
        instructions=operations.total(),
    )


def _starting(operations: Mapping[str, int], prefix: str) -> int:
    return sum(n for operation, n in operations.items() if operation.startswith(prefix))


def _hip_bits(operations: Mapping[str, int], kind: str) -> dict[int, int]:
    bits: Counter[int] = Counter()
    for operation, n in operations.items():
        match = re.match(rf"(?:global|buffer|flat)_{kind}_([a-z0-9]+)(?:_d16(?:_hi)?)?$", operation)
        if match:
            bits[_HIP_BITS.get(match[1], 32)] += n
    return dict(bits)


class _StubDriver:
    """The part of a triton driver that a launch touches; it launches nothing."""

    def __init__(self, target: GPUTarget):
        self.target = target
        self.utils = _StubUtils(target)
        self.launcher_cls = _StubLauncher

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For an autotuner (public kernels have one): compiles every configuration, all equally fast."""

        def run_once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
            call()
            return [1.0] * len(quantiles or (0.5,))

        return run_once

    def get_empty_cache_for_benchmark(self) -> None:
        pass

    def clear_cache(self, cache: Any) -> None:
        pass


class _StubUtils:
    def __init__(self, target: GPUTarget):
        self.target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        # Shared memory without a limit: what asks for too much is reported, not raised.
        return dict(
            max_shared_mem=1 << 30,
            max_num_regs=65536,
            multiprocessor_count=132,
            warpSize=self.target.warp_size,
            sm_clock_rate=1980000,
            mem_clock_rate=2619000,
            mem_bus_width=5120,
        )

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int, *_: Any
    ) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1 << 20  # no module, so that nothing is unloaded when the stub is gone

    def unload_module(self, module: Any) -> None:
        pass


class _StubLauncher:
    def __init__(self, src: Any, metadata: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass
