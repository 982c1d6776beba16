"""The benchmarks of training: peers have the same loss, and reports are complete."""

import json
import subprocess
from pathlib import Path

import base_model
import engines
import passes
import pytest
import torch
import training_processes
import training_run
from small_corpus import random_pairs
from torch import nn

import training
from vaswani import VaswaniConfig

BENCHMARKS = Path(training.__file__).resolve().parent


class InThisProcess:
    """A worker in the process of the test."""

    def __init__(self, make, *arguments):
        self.make, self.arguments = make, arguments

    def wait(self):
        self.work = self.make(*self.arguments)

    def __call__(self, *job):
        return self.work(*job)

    def close(self):
        pass


@pytest.fixture
def small_training(corpus, tmp_path, monkeypatch, uneven_model):
    """The training benchmark with small models on the corpus of a dozen sentences."""
    monkeypatch.setattr(VaswaniConfig, "preset", lambda *_, **__: uneven_model.config)
    for module in (training, passes, base_model):
        monkeypatch.setattr(module, "VOCAB_SIZE", 330)
    monkeypatch.setattr(training, "DEFAULT_MODEL", tmp_path / "vocabulary")
    (tmp_path / "vocabulary").mkdir()
    monkeypatch.setattr(training, "Worker", InThisProcess)
    monkeypatch.setattr(training_processes, "run_alone", lambda job, _: training_run.measure(job))
    monkeypatch.setattr(training, "PAUSE", 0)


def test_marian_and_we_are_trained_with_the_same_loss(uneven_model):
    contenders = {}
    for name, network in (("ours", uneven_model), ("MarianMT", engines.marian_twin(uneven_model))):
        contenders[name] = passes.NetworkContender.__new__(passes.NetworkContender)
        contenders[name].name, contenders[name].model = name, network.train()
        for module in network.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    sources, targets = random_pairs([3, 9, 14])
    batch = base_model.padded(sources, targets)
    losses = [contenders[name].loss(batch) for name in ("ours", "MarianMT")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_training")
def test_training_report_is_whole(tmp_path, capsys):
    report = tmp_path / "out" / "training.json"
    parts = ["--parts", "trainer", "network", "loss"]
    training.main(["--quick", "--tokens", "64", *parts, "--json", str(report)])
    results = json.loads(report.read_text())
    assert {"command", "commit", "hardware", "versions", "date", "aims"} < results.keys()
    assert results["matrix_flops_per_second"]["float32"] > 0
    for part, names in (
        ("trainer", {"packed", "sorted", "MarianMT"}),
        ("network", {"ours", "MarianMT"}),
        ("loss", {"ours", "plain", "torch"}),
    ):
        missing = set() if hasattr(nn.functional, "linear_cross_entropy") else {"torch"}
        assert {row["name"] for row in results[part]} == names - missing
        for row in results[part]:
            assert row["tokens_per_second"] > 0
    ours, theirs = results["network"]
    assert ours["padding"] == theirs["padding"] < 0.5
    assert ours["flops"] == pytest.approx(theirs["flops"], rel=0.1)
    rate = results["matrix_flops_per_second"]["float32"]
    assert ours["share_of_matrix_rate"] == ours["flops_per_second"] / rate
    packed, _, marian = results["trainer"]
    assert packed["padding"] == 0 < marian["padding"]
    pairs = {(ratio["own"], ratio["peer"]) for ratio in results["ratios"]["trainer"]}
    assert pairs == {("packed", "sorted"), ("packed", "MarianMT")}
    assert {ratio["peer"] for ratio in results["ratios"]["loss"]} >= {"plain"}
    assert "ours over" in capsys.readouterr().out


def test_training_ratios_are_medians_and_aims_are_judged():
    row = {"precision": "float32", "tokens_per_batch": 4096}
    rows = [
        {"name": "ours", "rounds": [30.0, 20.0, 40.0], "peak_mb": 10.0, **row},
        {"name": "MarianMT", "rounds": [10.0, 10.0, 10.0], "peak_mb": 40.0, **row},
    ]
    ratios = training.compare(rows, "MarianMT")
    assert [(ratio["speed"], ratio["memory"]) for ratio in ratios] == [(3.0, 0.25)]
    args = training.parse_args(["--earlier", "0.1"])
    aims = training.judge({"trainer": ratios, "network": ratios}, args)
    assert [aim["met"] for aim in aims] == [True, True, True]
    slower = [{**ratios[0], "speed": 1.3, "memory": 0.6}]
    assert [aim["met"] for aim in training.judge({"trainer": slower}, args)] == [False, False]
    earlier = {"trainer": [{**slower[0], "peer": "0.1"}]}
    for size, met in (("base", True), ("tiny", False)):
        args.size = size
        assert [aim["met"] for aim in training.judge(earlier, args)] == [met]


@pytest.mark.slow
def test_an_earlier_version_trains_in_turns_with_this_one(corpus, tmp_path, monkeypatch):
    git = ["git", "-C", str(BENCHMARKS.parent), "rev-parse", "HEAD"]
    if subprocess.run(git, capture_output=True, check=False).returncode != 0:
        pytest.skip("this is not a clone of the repository")
    monkeypatch.setattr(base_model, "VOCAB_SIZE", 330)
    monkeypatch.setattr(training, "TINY_VOCAB_SIZE", 330)
    monkeypatch.setattr(training, "DEFAULT_MODEL", tmp_path)
    report, spent = tmp_path / "training.json", tmp_path / "profile.json"
    options = ["--quick", "--parts", "trainer", "--size", "tiny", "--earlier", "HEAD"]
    training.main([*options, "--tokens", "64", "--json", str(report)])
    rows = json.loads(report.read_text())["trainer"]
    assert [row["name"] for row in rows] == ["packed", "sorted", "MarianMT", "HEAD"]
    assert rows[0]["padding"] == 0
    assert rows[1]["padding"] == rows[3]["padding"]
    assert rows[1]["tokens_of_rounds"] == rows[3]["tokens_of_rounds"]
    training.main([*options, "--tokens", "64", "--profile", str(spent)])
    for row in json.loads(spent.read_text())["profiles"]:
        assert row["calls"] > 100
        assert row["ms"] >= sum(operator["ms"] for operator in row["operators"])
        assert "aten::mm" in {operator["name"] for operator in row["operators"]}
    with pytest.raises(SystemExit, match=r"--earlier nowhere: .*nowhere"):
        training.main([*options, "--earlier", "nowhere"])


def test_a_training_that_imports_another_package_is_refused(tmp_path, monkeypatch):
    files = [str(tmp_path / "vaswani" / "__init__.py"), str(BENCHMARKS / "elsewhere.py")]

    def run(command, **_):
        Path(command[3]).write_text(json.dumps({"seconds": 1.0, "files": files}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(training_processes.subprocess, "run", run)
    job = training_run.Job("packed", "float32", "cpu", 1, {}, "", "")
    with pytest.raises(RuntimeError, match=r"imported .*elsewhere\.py, which is not in"):
        training_processes.run_alone(job, tmp_path)
    files.pop()
    assert training_processes.run_alone(job, tmp_path) == {"seconds": 1.0}


def test_what_dies_of_a_batch_has_a_row_that_says_so_and_no_ratio():
    class Contender:
        def __init__(self, most):
            self.most = most

        def __call__(self, tokens, updates, seed):
            if tokens > self.most:
                raise RuntimeError("its process ended with exit code -9")
            return {"seconds": 1.0, "tokens": tokens, "peak_mb": 1.0}

    workers = {("ours", "float32"): Contender(9000), ("MarianMT", "float32"): Contender(5000)}
    rows = training.take_turns(workers, [(4096, 1), (8192, 1)], 2)
    assert [row.get("died") for row in rows] == [
        None,
        None,
        "its process ended with exit code -9",
        None,
    ]
    assert [ratio["tokens_per_batch"] for ratio in training.compare(rows, "MarianMT")] == [4096]
