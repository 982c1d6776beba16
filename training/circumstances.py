"""The facts needed to repeat a run: command, commit, machine, versions and date."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "sacrebleu",
    "ctranslate2",
    "torchao",
    "bitsandbytes",
)
# CPU flags that make products in bfloat16 and int8 fast.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def circumstances() -> dict[str, Any]:
    """Describe this run in JSON types. `commit` belongs to the script or to this package."""
    program = Path(sys.argv[0])
    module = ("vaswani", "__main__.py")  # the program of python -m vaswani
    own = program.stem == "vaswani" or program.parts[-2:] == module
    return {
        "command": shlex.join([*(["vaswani"] if own else ["python", sys.argv[0]]), *sys.argv[1:]]),
        "commit": _commit(Path(__file__).resolve() if own else program.resolve()),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def weights_sha256(folder: str | os.PathLike) -> str | None:
    """Return the SHA-256 of a saved model's weights, as the Hub shows it, or None for shards."""
    path = Path(folder) / "model.safetensors"
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hardware() -> dict[str, Any]:
    fields = {}
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        fields = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    # A preloaded library such as an allocator changes memory and time.
    preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split()]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()).strip(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **({"preloaded": preloaded} if preloaded else {}),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _commit(file: Path) -> str:
    """Return the commit of a file that git tracks, or "unknown".

    An installed file is not tracked, even if its environment lies inside another project's clone.
    """
    git = shutil.which("git")
    if git is None:
        return "unknown"

    def answer(*words: str) -> str:
        command = [git, "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    tracked = answer("ls-files", "--", file.name)
    return (tracked and answer("describe", "--always", "--dirty")) or "unknown"


__all__ = ["circumstances", "weights_sha256"]
