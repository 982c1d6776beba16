"""What a reader needs to repeat a measurement: command, commit, machine, versions, date."""

import datetime
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

_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "ctranslate2", "sacrebleu")
# Instructions that decide how fast matrices are multiplied.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def circumstances() -> dict[str, Any]:
    """Describe this run in JSON's types; a package that is not installed has no version."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    describe = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _hardware() -> dict[str, Any]:
    cpu, flags = platform.processor() or platform.machine(), []
    information = Path("/proc/cpuinfo")
    if information.exists():
        fields = dict(
            [part.strip() for part in line.split(":", 1)]
            for line in information.read_text().splitlines()
            if ":" in line
        )
        cpu = fields.get("model name", cpu)
        flags = [flag for flag in _FLAGS if flag in fields.get("flags", "").split()]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "flags": flags,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


__all__ = ["circumstances"]
