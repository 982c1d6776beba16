"""What a reader needs to repeat a run: command, commit, machine, versions, date."""

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

_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu")


def circumstances() -> dict[str, Any]:
    """Describe this run in JSON's types; `commit` is that of the folder the command lies in."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(Path(sys.argv[0]).resolve().parent),
        "hardware": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _commit(folder: Path) -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    describe = [git, "-C", str(folder), "describe", "--always", "--dirty"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


__all__ = ["circumstances"]
