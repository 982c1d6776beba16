"""Compiled kernels of decoding on CPUs, as functions of states in float32.

A step of the search has few rows of states, so torch spends most of a step between its operators.
The kernels in the folder `kernels` make one pass where torch needs several operators. GCC compiles
them for this CPU the first time that a model decodes, in a second or two, and the Hugging Face
cache keeps the result. Where that is impossible, `library()` is None, and torch's operators compute
the same. `VASWANI_KERNELS=0` in the environment turns the kernels off.

Shapes: R rows of states, B sentences, K hypotheses of each, H heads, V entries of the vocabulary.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants
from torch.nn import functional as F  # noqa: N812
from transformers.utils import logging

_FOLDER = Path(__file__).with_name("kernels")
_FLAGS = [
    "-pthread",
    *("-O3", "-march=native", "-std=c11", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # GCC may reorder sums to vectorise them.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
]
_TIMEOUT = 60  # seconds of the compiler
_WINDOW = 0.2  # seconds between two looks at how crowded the cores are
_CROWDED_WINDOWS = 3  # in a row, after which the cores count as crowded
_CROWDED_SHARE = 0.25  # of a window, for which threads of this process wait for a core
_WAIT_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # users choose how OpenMP waits
_BYTES_OF_WORD = 4  # in a panel: a float, or bfloat16 of 2 inputs, or int8 of 4
_PART, _DIGEST = 2**16, 128  # bytes of a weight, and of their digest in its fingerprint
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # torch's defaults may differ
_INTEGERS: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
COMPUTED = (torch.float32, torch.bfloat16)  # dtypes of models whose states the kernels compute
# Types in the C files. The kernels name them by letters.
_POINTER, _COUNT, _FLOAT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_TYPES: dict[str, Any] = {"p": _POINTER, "n": _COUNT, "f": _FLOAT, "i": _NUMBER}
# The kernels and the types of their arguments.
KERNELS = {
    "let_threads_sleep": "i",
    "panel_width": "",
    "multiply_states": "ppnppi",
    "same_bytes": "ppni",
    "pack_rows": "pnnpni",
    "take_fingerprint": "pnpi",
    "has_fingerprint": "pnpi",
    "embed_tokens": "pppnpp",
    "descend": "ppnnnnp",
    "list_positions": "pnnnpp",
    "run_layers": "pipppi",
    "log_sums_and_maxima": "pnnnppi",
    "best_tokens": "pnnpi",
    "best_candidates": "pnnppppnnnfpppi",
    "end_sentences": "ppnnpnpp",
    "advance_beam": "pppp",
}

logger = logging.get_logger(__name__)


@functools.cache
def library() -> Any:
    """Compile and load the kernels. Return None if they are turned off or cannot run here."""
    if os.environ.get("VASWANI_KERNELS") == "0" or not _FOLDER.is_dir():
        return None  # remote code has no C files
    # On Linux, GCC's OpenMP is the one of torch, so that both share their threads.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" or " aes" not in _cpu():
        return None  # the kernels need AVX2 and AES
    flags = [*_FLAGS, *_forbidden_instructions()]
    files = sorted(_FOLDER.glob("*.[ch]"))
    text = b"".join(file.read_bytes() for file in files) + " ".join([*flags, _cpu()]).encode()
    name = f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"
    cached = Path(constants.HF_HOME) / "vaswani" / name
    if _is_safe(cached):
        with contextlib.suppress(OSError):  # such as a file for a newer C library
            return _load(cached)
    if not shutil.which("gcc"):
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="vaswani-") as scratch:
            compiled = Path(scratch) / name
            sources = [str(file) for file in files if file.suffix == ".c"]
            command = ["gcc", *flags, "-o", str(compiled), *sources, "-lm"]
            options: dict[str, Any] = {"capture_output": True, "errors": "replace"}
            subprocess.run(command, check=True, timeout=_TIMEOUT, **options)
            _keep(compiled, cached)
            # Programs in a folder for temporary files may be forbidden.
            return _load(cached if _is_safe(cached) else compiled)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning_once(f"Decoding is slower without the compiled kernels: {reason}")
        return None


def _load(file: Path) -> Any:
    kernels = ctypes.CDLL(str(file))
    for name, kinds in KERNELS.items():
        getattr(kernels, name).argtypes = [_TYPES[kind] for kind in kinds]
    return kernels


def _is_safe(file: Path) -> bool:
    """Tell whether a file exists that only this user or root can have written."""
    try:
        states = file.stat(), file.parent.stat()
    except OSError:
        return False
    return all(state.st_uid in (0, os.geteuid()) and not state.st_mode & 0o022 for state in states)


def _keep(compiled: Path, cached: Path) -> None:
    """Copy the compiled kernels into the cache, unless it cannot be written."""
    with contextlib.suppress(OSError):
        cached.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            copied = Path(scratch) / cached.name
            shutil.copyfile(compiled, copied)
            copied.chmod(0o755)
            copied.replace(cached)  # another process may do the same


def _forbidden_instructions() -> list[str]:
    """Return flags against instructions of this CPU that torch or oneDNN is told not to use."""
    limits = [
        os.environ.get(name, "").lower() for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    ]
    if "avx2" in (os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), *limits):
        # Older compilers do not know AVX-VNNI, and older CPUs do not have it.
        return ["-mno-avx512f", *(["-mno-avxvnni"] if " avx_vnni" in _cpu() else [])]
    below_amx = any("avx512" in limit and "amx" not in limit for limit in limits)
    below_bfloat16 = bool({"avx512_core", "avx512_core_vnni"} & set(limits))
    without_bfloat16 = below_bfloat16 and " avx512_bf16" in _cpu()  # older compilers do not know it
    return [
        *(["-DNO_TILES"] if below_amx else []),
        *(["-mno-avx512bf16"] if without_bfloat16 else []),
    ]


def _cpu() -> str:
    """Describe the instructions of this CPU, because a home folder may serve several machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    wanted = ("model name", "flags")
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in wanted)


class _Cores:
    """Watches whether other programs want the cores, and then lets waiting threads sleep.

    A thread of OpenMP spins for milliseconds while it waits. That is fast on free cores. On crowded
    cores, it takes the core that the thread it waits for needs. Threads that have been told to
    sleep do so until the process ends. GOMP_SPINCOUNT and OMP_WAIT_POLICY turn the watch off.
    """

    def __init__(self) -> None:
        self.crowded_windows, self.time, self.waited = 0, -math.inf, 0.0
        self.lock = threading.Lock()

    def look(self, threads: int) -> None:
        """Look at the cores, at most every `_WINDOW` seconds, for kernels in `threads` threads."""
        if time.monotonic() - self.time < _WINDOW or not self.lock.acquire(blocking=False):
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
                if threads > 1 and not _WAIT_SETTINGS & os.environ.keys():
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


def compute(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernels can compute with these tensors: plain ones of float32 on a CPU."""
    return (
        all(
            tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.is_contiguous()
            for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and library() is not None
    )


class Product(ctypes.Structure):
    """A linear layer, or several that read the same states."""

    _fields_ = (
        *((name, _COUNT) for name in ("inputs", "outputs")),
        *((name, _POINTER) for name in ("panels", "sums", "scale", "bias")),
        *((name, _NUMBER) for name in ("largest", "relu", "halves")),
    )


class Rounded(ctypes.Structure):
    """Memory for rounded rows of states (R, in), and for the scale of each row (R,)."""

    _fields_ = (("states", _POINTER), ("scales", _POINTER))


class Embedding(ctypes.Structure):
    """An embedding, and the factor of its entries (3.4)."""

    _fields_ = (
        *((name, _COUNT) for name in ("entries", "width")),
        *((name, _POINTER) for name in ("table", "scales")),
        ("factor", _FLOAT),
    )


class Norm(ctypes.Structure):
    """A LayerNorm."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("epsilon", _FLOAT))


class Cache(ctypes.Structure):
    """Keys and values (B, H, N, d), each sentence and head at strides."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _COUNT) for name in ("key_sentence", "key_head")),
        *((name, _COUNT) for name in ("value_sentence", "value_head")),
        ("scaling", _FLOAT),
    )

    def point_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Point to keys (B, H, N, d_k) and values (B, H, N, d_v)."""
        self.keys, self.values = keys.data_ptr(), values.data_ptr()
        self.key_sentence, self.key_head = keys.stride()[:2]
        self.value_sentence, self.value_head = values.stride()[:2]


class Listed(ctypes.Structure):
    """The positions that hypotheses see. `hypotheses_per_list` hypotheses share a list."""

    _fields_ = (
        *((name, _POINTER) for name in ("places", "counts")),
        *((name, _COUNT) for name in ("longest", "hypotheses_per_list")),
    )


class Batch(ctypes.Structure):
    """The hypotheses of a step."""

    _fields_ = (
        *((name, _COUNT) for name in ("rows", "beams", "width", "heads", "d_k", "d_v")),
        ("hypotheses", _POINTER),
        ("used", _COUNT),
        *((name, Listed) for name in ("past", "source")),
        ("encodes", _NUMBER),
    )


class Layer(ctypes.Structure):
    """A layer of the decoder."""

    PRODUCTS = ("past_qkv", "past_output", "source_query", "source_output", "fc1", "fc2")
    NORMS = ("past_norm", "source_norm", "final_norm")
    _fields_ = (
        *((name, Product) for name in PRODUCTS),
        *((name, Norm) for name in NORMS),
        *((name, Cache) for name in ("past", "source")),
        ("norm_first", _NUMBER),
    )


class Memory(ctypes.Structure):
    """Memory of a step."""

    _fields_ = (
        ("rounded", Rounded),
        *((name, _POINTER) for name in ("normed", "inner", "heads", "update", "scores")),
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether the kernels multiply by a weight (out, in) in floating point."""
    is_half = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return is_half or weight.dtype == torch.float32


class Panels(NamedTuple):
    """A weight (out, in) in the layout of the kernels, in int8, bfloat16 or float32."""

    inputs: int
    dtype: torch.dtype
    panels: torch.Tensor  # (out / width, in / k, width) words of 32 bits, with k values each
    # For int8 weights, with zeros up to a whole panel:
    sums: torch.Tensor | None  # of each output's weights
    scale: torch.Tensor | None  # of each output, relative to the scale of a row of states
    outputs: int
    weight_scale: torch.Tensor | None  # (out,) as it was given
    fingerprints: list[torch.Tensor]  # of each weight as it was given

    @classmethod
    def pack(
        cls, weights: Sequence[torch.Tensor], scale: torch.Tensor | None = None, largest: int = 1
    ) -> "Panels":
        """Pack the weights (out, in) of layers that read the same states.

        Args:
            weights: of float32, of bfloat16 with an even number of inputs, or of int8 with a
                multiple of 4 inputs.
            scale: (out,) of all int8 weights, in float32.
            largest: states will be rounded to -largest ... largest, for weights in int8.
        """
        width = library().panel_width()
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        size = inputs * weights[0].itemsize
        assert all(weight.shape[1] == inputs for weight in weights)
        assert size % _BYTES_OF_WORD == 0
        assert scale is None or scale.shape == (outputs,)
        missing = -outputs % width
        shape = (outputs + missing) // width, size // _BYTES_OF_WORD, width
        panels = torch.empty(shape, dtype=torch.int32, device="cpu")
        if missing:
            panels[-1] = 0
        weights = [_plain(weight) for weight in weights]
        # Another thread may change a weight meanwhile: a fingerprint taken later would hide that.
        fingerprints = [_fingerprint(weight) for weight in weights]
        first = 0
        for weight in weights:
            place = shape[1], panels.data_ptr(), first
            library().pack_rows(weight.data_ptr(), len(weight), *place, torch.get_num_threads())
            first += len(weight)
        sums = relative = None
        if scale is not None:
            # Sum the panels and not the weights, which another thread may have changed meanwhile.
            by_input = panels.view(torch.int8).view(*shape, _BYTES_OF_WORD)
            sums = by_input.sum(dim=(1, 3), dtype=torch.int32).view(-1)
            scale = scale.clone()
            relative = F.pad(scale * torch.tensor(1 / largest, **FLOATS), (0, missing))
        dtype = weights[0].dtype
        return cls(inputs, dtype, panels, sums, relative, outputs, scale, fingerprints)

    def holds(self, weights: Sequence[torch.Tensor], scale: torch.Tensor | None = None) -> bool:
        """Tell whether `pack` got weights of the same fingerprints, and the same scale."""
        if sum(map(len, weights)) != self.outputs or any(
            weight.dtype != self.dtype or weight.shape[1:] != (self.inputs,) for weight in weights
        ):
            return False
        if scale is not None and self.weight_scale is not None:
            same_shape = scale.shape == self.weight_scale.shape
            if not same_shape or not same_bytes(scale.contiguous(), self.weight_scale):
                return False
        elif scale is not self.weight_scale:  # both are None in a float weight
            return False
        return all(map(_has_fingerprint, map(_plain, weights), self.fingerprints))

    def product(self, bias: torch.Tensor | None, largest: int = 0, relu: bool = False) -> Product:
        """Return a product, which is valid as long as these panels and the bias are.

        Args:
            bias: (out,) in float32.
            largest: states are rounded to -largest ... largest, for weights in int8.
            relu: whether ReLU is applied.
        """
        parts = self.panels, self.sums, self.scale, bias
        addresses = (None if part is None else part.data_ptr() for part in parts)
        halves = self.dtype == torch.bfloat16
        return Product(self.inputs, self.outputs, *addresses, largest, relu, halves)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().resolve_neg()


def _fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """Return digests of a weight. Other bytes almost surely have other digests."""
    digests = torch.empty(_parts(weight), _DIGEST, dtype=torch.uint8, device="cpu")
    places = weight.data_ptr(), weight.nbytes, digests.data_ptr()
    library().take_fingerprint(*places, torch.get_num_threads())
    return digests


def _has_fingerprint(weight: torch.Tensor, digests: torch.Tensor) -> bool:
    places = weight.data_ptr(), weight.nbytes, digests.data_ptr()
    return _parts(weight) == len(digests) and bool(
        library().has_fingerprint(*places, torch.get_num_threads())
    )


def _parts(weight: torch.Tensor) -> int:
    return -(-weight.nbytes // _PART)


def multiply(
    states: torch.Tensor,
    product: Product,
    output: torch.Tensor | None = None,
    memory: Rounded | None = None,
) -> torch.Tensor:
    """Multiply states (R, in) by a weight, and add a bias: (R, out), in `output` if it is given.

    Memory for rounded states, `rows` or more of them, is made if it is not given.
    """
    states = states.contiguous()
    rows, inputs = states.shape
    assert states.dtype == torch.float32
    assert inputs == product.inputs
    if output is None:
        output = states.new_empty(rows, product.outputs)
    if memory is None:
        buffers = states.new_empty(rows, inputs, dtype=torch.int16), states.new_empty(rows)
        memory = Rounded(*map(_data, buffers))
    library().multiply_states(
        *(ctypes.byref(product), states.data_ptr(), rows, ctypes.byref(memory)),
        *(output.data_ptr(), torch.get_num_threads()),
    )
    return output


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two contiguous tensors of one size have the same bytes."""
    sizes = left.nbytes, torch.get_num_threads()
    return bool(library().same_bytes(_data(left), _data(right), *sizes))


def descend(mask: torch.Tensor, parents: torch.Tensor, used: int) -> torch.Tensor:
    """Let each hypothesis see what its parent (B, K) saw, and itself: a mask (B, K, N).

    Args:
        mask: (B, K, N), 0 at the positions that hypotheses see.
        parents: (B, K).
        used: the position of the first hypothesis of each sentence.
    """
    own = torch.empty_like(mask)
    library().descend(_data(mask), _data(parents), *mask.shape, used, _data(own))
    return own


class Positions:
    """Lists of positions in a cache. Their memory is used again for the next lists."""

    def __init__(self) -> None:
        self.lists = self.longest = 0
        # The lists, one after the other, and how many positions of each count.
        self.places, self.counts = torch.empty(0, **_INTEGERS), torch.empty(0, **_INTEGERS)

    def see(self, mask: torch.Tensor, end: int | None = None) -> None:
        """List the positions at which a mask (lists, N) is 0, before `end` if it is given.

        The lists may have more dimensions than one.
        """
        positions = mask.shape[-1]
        self.lists, self.longest = mask.numel() // positions, positions if end is None else end
        if self.lists * self.longest > len(self.places):
            self.places = torch.empty(2 * self.lists * self.longest, **_INTEGERS)
        if self.lists > len(self.counts):
            self.counts = torch.empty(self.lists, **_INTEGERS)
        library().list_positions(
            *(_data(mask), self.lists, self.longest, positions),
            *(self.places.data_ptr(), self.counts.data_ptr()),
        )

    def listed(self, hypotheses: int) -> Listed:
        """Return the structure, for B * K hypotheses. It is valid until the next lists."""
        addresses = self.places.data_ptr(), self.counts.data_ptr()
        return Listed(*addresses, self.longest, hypotheses // self.lists)


def _data(values: torch.Tensor) -> int:
    assert values.is_contiguous()
    return values.data_ptr()


def log_sums_and_maxima(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-sum-exp of each row of logits (R, V), and the maximum of each block."""
    rows, vocabulary = logits.shape
    log_sums, maxima = logits.new_empty(rows), logits.new_empty(rows, vocabulary // block)
    library().log_sums_and_maxima(
        *(_data(logits), rows, vocabulary, block),
        *(log_sums.data_ptr(), maxima.data_ptr(), torch.get_num_threads()),
    )
    return log_sums, maxima


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Find the best token of each row of logits (R, V), and the first of equal ones: (R,)."""
    tokens = logits.new_empty(len(logits), dtype=torch.long)
    library().best_tokens(
        *(_data(logits), *logits.shape, tokens.data_ptr(), torch.get_num_threads())
    )
    return tokens


def best_candidates(
    logits: torch.Tensor,
    block: int,
    log_sums: torch.Tensor,
    maxima: torch.Tensor,
    running: torch.Tensor,
    places: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the C best next tokens of each sentence, over all its hypotheses.

    Args:
        logits: (R, V).
        block: entries of the vocabulary that share a maximum.
        log_sums: (R,) log-sum-exp of the logits.
        maxima: (R, V / block).
        running: (B, K) log-probabilities of the hypotheses.
        places: (B * K,) the row of logits of each hypothesis, or -1 if it has none; None means that
            each has its own row.
        count: C.

    Returns:
        Log-probabilities, best first; the hypotheses that they continue; the tokens: (B, C) each.
    """
    sentences, beams = running.shape
    scores = logits.new_empty(sentences, count)
    hypotheses = logits.new_empty(sentences, count, dtype=torch.long)
    tokens = torch.empty_like(hypotheses)
    library().best_candidates(
        *(_data(logits), logits.shape[1], block, _data(log_sums), _data(maxima), _data(running)),
        *(None if places is None else _data(places), sentences, beams, count, -torch.inf),
        *(scores.data_ptr(), hypotheses.data_ptr(), tokens.data_ptr(), torch.get_num_threads()),
    )
    return scores, hypotheses, tokens


def end_sentences(
    tokens: torch.Tensor, limits: torch.Tensor, done: torch.Tensor, ends: Sequence[int], length: int
) -> tuple[torch.Tensor, int]:
    """Mark sentences that are done (B,), or that end with these tokens, and count them.

    Args:
        tokens: (B,) the last token of each sentence.
        limits: (B,) how many tokens each sentence may have.
        done: (B,) sentences that were done before.
        ends: tokens that end a sentence.
        length: tokens that each sentence has.
    """
    now = torch.empty_like(done)
    end_tokens = (_COUNT * len(ends))(*ends)
    count = library().end_sentences(
        *(_data(tokens), _data(limits), len(tokens), length),
        *(ctypes.addressof(end_tokens), len(ends), _data(done), _data(now)),
    )
    return now, count


class Candidates(ctypes.Structure):
    """Continuations of hypotheses (B, C)."""

    _fields_ = (*((name, _POINTER) for name in ("scores", "parents", "tokens")), ("count", _COUNT))


class Rules(ctypes.Structure):
    """Rules of a step of a beam search."""

    _fields_ = (
        ("ends", _POINTER),
        *((name, _COUNT) for name in ("ends_count", "length")),
        ("penalty", _FLOAT),
        *((name, _NUMBER) for name in ("to_beat", "stops_when_full")),
        ("ruled_out", _FLOAT),
    )


class Beam(ctypes.Structure):
    """The state of a beam search."""

    _fields_ = (
        *((name, _COUNT) for name in ("sentences", "hypotheses")),
        *((name, _POINTER) for name in ("limits", "penalties", "finished", "endings", "done")),
    )


class Chosen(ctypes.Structure):
    """The hypotheses (B, K) that a step chooses."""

    _fields_ = (
        *((name, _POINTER) for name in ("running", "parents", "tokens", "open_rows")),
        *((name, _COUNT) for name in ("rows", "done")),
    )


def advance_beam(
    scores: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    limits: torch.Tensor,
    penalties: torch.Tensor | None,
    finished: torch.Tensor,
    endings: torch.Tensor,
    done: torch.Tensor,
    ends: Sequence[int],
    length: int,
    penalty: float,
    to_beat: int,
    stops_when_full: bool,
    ruled_out: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Choose the open hypotheses of a beam search; update the finished ones, and what is done.

    Args:
        scores: (B, C) log-probabilities of the candidates, best first.
        parents: (B, C) the hypothesis that each candidate continues.
        tokens: (B, C) the token that each candidate adds.
        limits: (B,) how many tokens each sentence may have.
        penalties: (B,) divisors of the scores that open hypotheses can still reach; None means
            `penalty`.
        finished: (B, K) penalised scores of the finished hypotheses, best first.
        endings: (B, K, 3) length, parent and last token of each finished hypothesis.
        done: (B,) whether the search of a sentence is over.
        ends: tokens that end a sentence.
        length: tokens of the hypotheses after this step.
        penalty: the divisor of the scores of finished hypotheses of this length.
        to_beat: the place of the finished hypothesis that open ones must beat.
        stops_when_full: whether a sentence is done with K finished hypotheses.
        ruled_out: is added to the score of a candidate that ends.

    Returns:
        Log-probabilities of the open hypotheses, best first; their parents; their last tokens:
        (B, K) each. Those that can still win (R,), among B * K. How many sentences are done.
    """
    sentences, beams = finished.shape
    running = torch.empty_like(finished)
    own_parents, own_tokens = (parents.new_empty(sentences, beams) for _ in range(2))
    open_rows = parents.new_empty(sentences * beams)
    chosen = Chosen(*map(_data, (running, own_parents, own_tokens, open_rows)))
    end_tokens = (_COUNT * len(ends))(*ends)
    places = ctypes.addressof(end_tokens), len(ends), length
    states = None if penalties is None else _data(penalties), *map(_data, (finished, endings, done))
    library().advance_beam(
        ctypes.byref(Candidates(*map(_data, (scores, parents, tokens)), scores.shape[1])),
        ctypes.byref(Rules(*places, penalty, to_beat, stops_when_full, ruled_out)),
        ctypes.byref(Beam(sentences, beams, _data(limits), *states)),
        ctypes.byref(chosen),
    )
    return running, own_parents, own_tokens, open_rows[: chosen.rows], chosen.done


__all__ = [
    "COMPUTED",
    "CORES",
    "FLOATS",
    "KERNELS",
    "Batch",
    "Embedding",
    "Layer",
    "Listed",
    "Memory",
    "Norm",
    "Panels",
    "Positions",
    "Product",
    "Rounded",
    "advance_beam",
    "best_candidates",
    "best_tokens",
    "can_pack",
    "compute",
    "descend",
    "end_sentences",
    "library",
    "log_sums_and_maxima",
    "multiply",
    "same_bytes",
]
