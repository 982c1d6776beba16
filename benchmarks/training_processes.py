"""Trainings in processes of their own, also with earlier versions of the package."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from training_run import Job
from vaswani.corpora.token_batches import TokenBatchSampler

import vaswani


class TrainingProcess:
    """Trains for each measurement in a new process, with this package or an earlier version of it.

    Args:
        job: the training, without batches and updates.
        lengths: source and target tokens of each pair.
        package: folder of the earlier version, or None.
    """

    def __init__(
        self, job: Job, lengths: list[tuple[int, int]], package: Path | None = None
    ) -> None:
        self.job, self.lengths, self.package = job, lengths, package

    def __call__(
        self, tokens: int, updates: int, seed: int, profiled: bool = False
    ) -> dict[str, Any]:
        """Measure updates of batches of `tokens` tokens. `seed` sets the order of the pairs."""
        sentences = round(len(self.lengths) / len(TokenBatchSampler(self.lengths, tokens)))
        changes = {"tokens": tokens, "sentences": sentences, "updates": updates, "seed": seed}
        return run_alone(dataclasses.replace(self.job, **changes, profiled=profiled), self.package)

    def close(self) -> None:
        """Return at once: a process ends with its measurement."""


def run_alone(job: Job, package: Path | None) -> dict[str, Any]:
    """Run training_run.py, with the package in a folder, or with the one of this process.

    Raises:
        RuntimeError: the process died, or it imported another package too.
    """
    program = Path(__file__).with_name("training_run.py")
    package = package or Path(vaswani.__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        given, report = Path(folder) / "job.json", Path(folder) / "report.json"
        given.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, str(program), str(given), str(report)],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            last = "".join(run.stderr.strip().splitlines()[-1:])
            raise RuntimeError(f"the training ended with exit code {run.returncode}: {last}")
        measured = json.loads(report.read_text(encoding="utf-8"))
    for file in measured.pop("files"):
        if not Path(file).is_relative_to(package):
            raise RuntimeError(f"the training imported {file}, which is not in {package}")
    return measured


def write_commit(commit: str, folder: Path) -> str:
    """Write the files of a commit of this repository to a new folder, and return its hash.

    Raises:
        SystemExit: git knows no such commit.
    """
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root)]
    run = subprocess.run(
        [*git, "archive", "--format=tar", commit], capture_output=True, check=False
    )
    if run.returncode != 0:
        raise SystemExit(f"--earlier {commit}: {run.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        archive.extractall(folder, filter="data")
    found = subprocess.run([*git, "rev-parse", commit], capture_output=True, check=True, text=True)
    return found.stdout.strip()
