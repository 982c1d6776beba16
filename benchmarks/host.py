"""The machine of a measurement, the environment of a measured process, and results files."""

import contextlib
import ctypes.util
import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_MEGABYTES = 256
_ROWS = (32, 512)  # of the measured products: a step of beam search, and an encoder
_PAGE = mmap.PAGESIZE

# Variables that limit the instructions of oneDNN, FBGEMM, torch, CTranslate2 and MKL. MKL calls
# AVX-512 VNNI "AVX512_E1".
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "native": {},
    "avx512_vnni": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "CT2_FORCE_CPU_ISA": "AVX512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
    },
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "CT2_FORCE_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
ALLOCATORS = ("glibc", "tcmalloc")


def preloaded(allocator: str) -> dict[str, str]:
    """Return the environment of a process with an allocator.

    Raises:
        RuntimeError: the library is not installed.
    """
    if allocator == "glibc":
        return {"LD_PRELOAD": ""}
    for name in (f"{allocator}_minimal", allocator):
        if library := ctypes.util.find_library(name):
            return {"LD_PRELOAD": library}
    raise RuntimeError(f"{allocator} is not installed: apt-get install libtcmalloc-minimal4")


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def host_facts() -> dict[str, Any]:
    """Measure what decides the speed of decoding: caches, memory, page faults and products."""
    return {
        "caches": _caches(),
        "memory_gigabytes_per_second": round(_memory_rate(), 1),
        "page_fault_nanoseconds": round(_page_fault_nanoseconds()),
        "gigaflops": {
            f"{kind}, {rows} rows": round(_product_rate(kind, rows))
            for kind in ("float32", "bfloat16", "int8")
            for rows in _ROWS
        },
    }


def host_name(hardware: dict[str, Any]) -> str:
    """Return a name for files, such as "amd-epyc-avx512-vnni-2-cores".

    The instructions tell hosts apart whose CPUs have the same name.
    """
    cpu = re.sub(r"\(\w+\)|processor", "", hardware["cpu"], flags=re.IGNORECASE)
    flags = hardware["flags"][2:] or hardware["flags"]  # the first two are avx2 and avx512f
    instructions = dict.fromkeys("_".join(flags).split("_"))
    words = f"{cpu} {' '.join(instructions)} {hardware['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (index / name).read_text().strip() for name in ("level", "type", "size")
        )
        found[f"L{level} {kind.lower()}"] = size
    return found


def _shortest_seconds(function: Any, repeats: int = 5) -> float:
    """Return the shortest time of a call in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _memory_rate() -> float:
    """Return the gigabytes a second of a copy, which reads and writes."""
    source = torch.zeros(_MEGABYTES * 2**18)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _shortest_seconds(lambda: target.copy_(source)) / 1e9


def _page_fault_nanoseconds() -> float:
    """Return the nanoseconds of the first write to a page, in one thread."""
    size = 64 * 2**20  # torch divides longer loops among its threads

    def touch() -> None:
        with mmap.mmap(-1, size) as memory:
            torch.frombuffer(memory, dtype=torch.uint8)[::_PAGE].fill_(1)

    return _shortest_seconds(touch, 2) / (size / _PAGE) * 1e9


def _product_rate(kind: str, rows: int, width: int = 512, outputs: int = 2048) -> float:
    """Return the gigaflops of states (rows, width) times a weight (width, outputs)."""
    if kind == "int8":
        states = torch.randint(0, 127, (rows, width), dtype=torch.uint8)
        weight = torch.randint(-127, 127, (outputs, width), dtype=torch.int8).t()
        product = lambda: torch._int_mm(states.to(torch.int8), weight)  # noqa: E731
    else:
        dtype = getattr(torch, kind)
        states, weight = torch.randn(rows, width).to(dtype), torch.randn(outputs, width).to(dtype)
        product = lambda: torch.nn.functional.linear(states, weight)  # noqa: E731
    return 2 * rows * width * outputs / _shortest_seconds(product, 50) / 1e9


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results as JSON if a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


__all__ = [
    "ALLOCATORS",
    "INSTRUCTIONS",
    "environment",
    "host_facts",
    "host_name",
    "preloaded",
    "write",
]
