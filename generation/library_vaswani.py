"""Compiled kernels of decoding and training: compilation, loading, and when they can compute.

A step of the search has few rows of states, so torch spends most of a step between its operators.
The kernels in the folder `kernels` make one pass where torch needs several operators. GCC compiles
the kernels for this CPU when a model first decodes or trains. This takes some seconds, and the
Hugging Face cache keeps the result. Where the kernels cannot run, `library()` is None, and torch's
operators compute the same. `VASWANI_KERNELS=0` in the environment turns the kernels off.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import constants
from torch.autograd.forward_ad import unpack_dual
from transformers.utils import logging

_FOLDER = Path(__file__).with_name("kernels")
_FLAGS = [
    "-pthread",
    *("-O3", "-march=native", "-std=c11", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # GCC may reorder sums to vectorise them.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
]
_TIMEOUT = 60  # seconds that one run of the compiler may take
_DIGEST = hashlib.sha256().digest_size  # bytes at the end of a file in the cache
_WINDOW = 0.2  # seconds between two looks at how crowded the cores are
_CROWDED_WINDOWS = 3  # in a row, after which the cores count as crowded
_CROWDED_SHARE = 0.25  # of a window, for which threads of this process wait for a core
_WAIT_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # users choose how OpenMP waits
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # torch's defaults may differ
COMPUTED = (torch.float32, torch.bfloat16)  # dtypes of models whose states the kernels compute
POINTER, COUNT, FLOAT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_TYPES: dict[str, Any] = {"int64_t": COUNT, "float": FLOAT, "int": NUMBER}  # and pointers
# A kernel in the C files: its name and its arguments.
_KERNEL = re.compile(r"^EXPORT \w+ (\w+)\(([^)]*)\)", re.MULTILINE)

logger = logging.get_logger(__name__)


@functools.cache
def library() -> Any:
    """Compile and load the kernels. Return None if they are turned off or cannot run here."""
    if os.environ.get("VASWANI_KERNELS") == "0" or not _FOLDER.is_dir():
        return None  # remote code has no C files
    # On Linux, the kernels and torch use the same OpenMP, so both share their threads.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" or " aes" not in cpu_description():
        return None  # the kernels need AVX2 and AES
    flags = [*_FLAGS, *_forbidden_instructions()]
    files = sorted(_FOLDER.glob("*.[ch]"))
    # A home folder may serve machines with different CPUs.
    text = (
        b"".join(file.read_bytes() for file in files)
        + " ".join([*flags, cpu_description()]).encode()
    )
    name = f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"
    cached = Path(constants.HF_HOME) / "vaswani" / name
    if (kernels := _load_kept(cached)) is not None:
        return kernels
    if not shutil.which("gcc"):
        logger.warning_once(
            "Decoding and training are slower without the compiled kernels, because gcc was not "
            "found: install it (on Debian, apt-get install gcc libc6-dev), or hide this warning "
            "with VASWANI_KERNELS=0."
        )
        return None
    try:
        with (
            _compile_lock(cached.parent),
            tempfile.TemporaryDirectory(prefix="vaswani-") as scratch,
        ):
            if (kernels := _load_kept(cached)) is not None:
                return kernels  # another process has just compiled them
            compiled = Path(scratch) / name
            _compile([file for file in files if file.suffix == ".c"], flags, compiled)
            _keep(compiled, cached)
            # The cache, or the folder for temporary files, may be mounted noexec.
            return _load_kept(cached) or _load(compiled)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # such as no thread
        reason = getattr(error, "stderr", None) or error
        logger.warning_once(
            f"Decoding and training are slower without the compiled kernels: {reason}"
        )
        return None


@contextlib.contextmanager
def _compile_lock(folder: Path) -> Iterator[None]:
    """Compile in one process at a time, if the lock file can be written."""
    lock = FileLock(folder.with_suffix(".lock"), timeout=2 * _TIMEOUT)
    with contextlib.suppress(OSError, NotImplementedError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _compile(sources: list[Path], flags: list[str], target: Path) -> None:
    """Compile C files to a library. One gcc per file uses all cores."""
    flags = _known_to_gcc(flags)
    objects = [target.with_name(f"{source.stem}.o") for source in sources]

    def run(*arguments: Any) -> None:
        options: dict[str, Any] = {"capture_output": True, "errors": "replace"}
        command = ["gcc", *flags, *map(str, arguments)]
        subprocess.run(command, check=True, timeout=_TIMEOUT, **options)

    with ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(lambda source, place: run("-c", "-o", place, source), sources, objects))
    run("-o", target, *objects, "-lm")


def _known_to_gcc(flags: list[str]) -> list[str]:
    """Leave out flags against instructions that an older compiler neither knows nor uses."""
    if not any(flag.startswith("-mno-") for flag in flags):
        return flags
    command = ["gcc", "--help=target"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    known = subprocess.run(command, check=True, timeout=_TIMEOUT, **options).stdout
    return [
        flag
        for flag in flags
        if not flag.startswith("-mno-") or flag.replace("-mno-", "-m", 1) in known
    ]


def _load_kept(cached: Path) -> Any:
    """Load the kernels from the cache. Return None if they are not there, or cannot be loaded."""
    if _is_safe(cached):
        with contextlib.suppress(OSError):  # such as a file for a newer C library
            return _load(cached)
    return None


def _load(file: Path) -> Any:
    kernels = ctypes.CDLL(str(file))
    for name, types in kernel_signatures().items():
        getattr(kernels, name).argtypes = types
    return kernels


def kernel_signatures() -> dict[str, list[Any]]:
    """Read the names of the kernels, and the types of their arguments, from the C files."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.c")))
    return {
        name: [_type(argument) for argument in arguments.split(",") if argument != "void"]
        for name, arguments in _KERNEL.findall(text)
    }


def _type(argument: str) -> Any:
    return POINTER if "*" in argument else _TYPES[argument.split()[0]]


def _is_safe(file: Path) -> bool:
    """Tell whether a file in the cache is whole, and only this user or root can have written it.

    Loading an incomplete file would kill the process.
    """
    try:
        for state in (file.stat(), file.parent.stat()):
            if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o022:
                return False
        content = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _keep(compiled: Path, cached: Path) -> None:
    """Copy the compiled kernels and their digest into the cache, unless it cannot be written."""
    content = compiled.read_bytes()
    with contextlib.suppress(OSError):
        cached.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            copied = Path(scratch) / cached.name
            with copied.open("wb") as file:
                file.write(content + hashlib.sha256(content).digest())
                file.flush()
                # A crash of the machine could otherwise leave the new name with an empty file.
                os.fsync(file.fileno())
            copied.chmod(0o755)
            copied.replace(cached)  # another process may do the same


def _forbidden_instructions() -> list[str]:
    """Return flags against instructions of this CPU that torch or oneDNN is told not to use."""
    names = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
    limits = {os.environ.get(name, "").lower() for name in names} - {"", "all", "default"}
    # The kernels need AVX2, so lower limits count as AVX2. Unknown limits are ignored.
    below_avx512 = any(limit.startswith(("sse", "avx2")) or limit == "avx" for limit in limits)
    flags: list[str] = []
    unwanted: set[str] = set()
    if below_avx512 or os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2":
        flags, unwanted = ["-mno-avx512f"], {"avx_vnni"}
    else:
        if any(limit.startswith("avx") and "amx" not in limit for limit in limits):
            flags = ["-DNO_TILES"]
        if "avx512_core" in limits:
            unwanted = {"avx512_bf16", "avx512_vnni", "avx_vnni"}
        elif "avx512_core_vnni" in limits:
            unwanted = {"avx512_bf16"}
    # Older compilers do not know these flags, and older CPUs do not need them.
    flags += [
        f"-mno-{name.replace('_', '')}"
        for name in sorted(unwanted)
        if f" {name}" in cpu_description()
    ]
    return flags


def cpu_description() -> str:
    """Describe the maker, the model and the instructions of this CPU.

    The text is empty in a sandbox that does not tell.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    wanted = ("vendor_id", "model name", "flags")
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in wanted)


class _Cores:
    """Watches whether other programs want the cores, and then lets waiting threads sleep.

    A thread of OpenMP spins for milliseconds while it waits. That is fast on free cores. On crowded
    cores, the spinning thread blocks the core that another thread needs. Threads that are told to
    sleep do so until the process ends. GOMP_SPINCOUNT and OMP_WAIT_POLICY turn the watch off.
    """

    def __init__(self) -> None:
        self.crowded_windows, self.time, self.waited = 0, -math.inf, 0.0
        self.lock = threading.Lock()

    def look(self, threads: int) -> None:
        """Look at the cores, at most every `_WINDOW` seconds, for kernels in `threads` threads.

        One thread waits for no other.
        """
        if threads == 1 or time.monotonic() - self.time < _WINDOW:
            return
        if not self.lock.acquire(blocking=False):
            return
        try:
            now, waited = time.monotonic(), _seconds_of_waiting()
            passed, new = now - self.time, waited - self.waited
            self.time, self.waited = now, waited
            # A pause tells nothing about the cores, because no kernel ran.
            known = passed < 10 * _WINDOW
            crowded = known and new > _CROWDED_SHARE * passed
            self.crowded_windows = self.crowded_windows + 1 if crowded else 0
            if self.crowded_windows == _CROWDED_WINDOWS:
                self.time = math.inf  # this was the last look
                if not _WAIT_SETTINGS & os.environ.keys():
                    library().let_threads_sleep(threads)
        finally:
            self.lock.release()


def _seconds_of_waiting() -> float:
    """Return how long the threads of this process were ready to run, but had no core."""
    waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end meanwhile, and some Linux kernels do not count.
        with contextlib.suppress(OSError, IndexError):
            waited += int(file.read_text(encoding="ascii").split()[1])
    return waited / 1e9


CORES = _Cores()


def threads_of_training() -> int:
    """Return how many threads a kernel of training has, and look at the cores."""
    threads = torch.get_num_threads()
    CORES.look(threads)
    return threads


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has the values in its memory, one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg()


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has the values one after the other; copy only if needed."""
    return tensor.contiguous().resolve_neg()


def can_compute(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernels can compute with these tensors: plain ones of float32 on a CPU."""
    plain = all(map(_is_plain_float32, tensors))
    return plain and not torch.is_autocast_enabled("cpu") and library() is not None


def _is_plain_float32(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.is_cpu
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and is_as_stored(tensor)
    )


def can_train(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernels can train with these tensors: plain ones of one dtype on a CPU.

    They cannot if a program records or transforms torch's operators, as `make_fx` and torch.func
    do, or uses forward-mode differentiation.
    """
    if torch.compiler.is_compiling():  # first, because the compiler cannot trace the others
        return False
    if torch._C._len_torch_dispatch_stack() or is_transformed(*tensors):
        return False
    plain = all(
        tensor.is_cpu
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype == tensors[0].dtype
        for tensor in tensors
    )
    return plain and tensors[0].dtype in COMPUTED and library() is not None


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Tell whether torch.func transforms this call, or a tensor has a forward-mode tangent.

    Our autograd functions support neither. With a `setup_context`, they would support torch.func,
    but each normal call would take longer.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():  # the compiler cannot trace the rest
        return False
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def address(values: torch.Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert values.is_contiguous()
    return values.data_ptr()


__all__ = [
    "COMPUTED",
    "CORES",
    "COUNT",
    "FLOAT",
    "FLOATS",
    "NUMBER",
    "POINTER",
    "address",
    "as_stored",
    "can_compute",
    "can_train",
    "cpu_description",
    "is_as_stored",
    "is_transformed",
    "kernel_signatures",
    "library",
    "threads_of_training",
]
