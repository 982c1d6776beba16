"""The README: code blocks and commands are run or parsed, and figures are checked."""

import json
import re
import shlex

import pytest
from documents import ROOT, Page, converter_call, printed_by
from num2words import num2words
from scipy import stats
from vaswani.commands.main import main

PAGE = Page(ROOT / "README.md")
COMMANDS = PAGE.commands()
SETUP = [
    'pip install -c constraints.txt -e ".[train]" && python examples/quickstart.py',
    'pip install -c constraints.txt -e ".[dev]" && python -m pytest',
]


def test_the_readme_has_at_most_150_lines():
    assert len(PAGE.text.splitlines()) <= 150


def test_the_first_two_commands_are_those_that_are_run_from_nothing():
    assert COMMANDS[:2] == SETUP  # .ci/run reads these commands in this order
    assert PAGE.text.index(SETUP[0]) < PAGE.text.index("```python")


def test_the_only_python_block_translates_as_printed(tmp_path, monkeypatch):
    if not (ROOT / "runs" / "quickstart" / "results.json").exists():
        pytest.skip("run `python examples/quickstart.py` first: the README uses its model")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(ROOT / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    ((code, expected),) = PAGE.python()
    assert printed_by(code, "README.md") == expected


def test_a_pair_is_trained_and_translated_as_printed(tmp_path, monkeypatch):
    """The commands run as printed, with small sizes and few updates appended."""
    monkeypatch.chdir(tmp_path)
    numbers = range(100, 140)
    for name in ("train", "valid", "test"):
        for language in ("en", "de"):
            lines = [num2words(number, lang=language) + "\n" for number in numbers]
            (tmp_path / f"{name}.{language}").write_text("".join(lines), encoding="utf-8")
    training, translating = (shlex.split(line)[1:] for line in COMMANDS[2:4])
    small = "--steps 4 --warmup 2 --vocab-size 340 --set d_model=32 encoder_layers=1"
    main([*training, *small.split(), "decoder_layers=1"])
    main(translating)
    assert len((tmp_path / "test.out").read_text(encoding="utf-8").splitlines()) == len(numbers)


def test_conversions_are_understood_by_their_converters(monkeypatch):
    called = [converter_call(line, monkeypatch)["converter"] for line in COMMANDS[4:]]
    assert called == ["fairseq", "marian", "to-ctranslate2"]


def test_results_come_from_results_files():
    rows = {}
    for *cells, link in PAGE.rows("task | result"):
        path, *others = re.findall(r"\((benchmarks/results/[\w-]+\.json)\)", link) or [None]
        if path is None:
            continue  # a page of several files
        found = [json.loads((ROOT / file).read_text(encoding="utf-8")) for file in (path, *others)]
        rows[path.split("/")[-1]] = cells, found if others else found[0]
    assert len(rows) == 3
    (_, bleu, published), results = rows["multi30k-muon.json"]
    scores = results["test"]["seeds"]
    assert bleu == f"{results['test']['mean']:.2f} tokenised BLEU, mean of {len(scores)} seeds"
    p_value = f"{stats.ttest_1samp(scores, 41.02).pvalue:.2g}"
    assert published == f"41.02, Wu et al. (2021); p = {p_value}"
    (_, errors, baseline), results = rows["g2p-eng_us-cpu.json"]
    mean, voted = (
        100 - results[key][name] for key, name in (("test", "mean"), ("ensemble", "test"))
    )
    seeds = len(results["runs"])
    single = f"{mean:.2f}% word error rate, mean of {seeds} seeds"
    assert errors == f"{single}; {voted:.2f}% by majority vote of the seeds"
    p_value = stats.ttest_1samp(results["test"]["seeds"], 58.06).pvalue
    assert baseline == f"41.94%, the task's baseline, an ensemble; p = {p_value:.2g} for the mean"
    (_, speed, _), hosts = rows["training-base-avx2.json"]
    speeds = [
        [
            f"{ratio['speed']:.2f} times in {ratio['precision']}"
            for ratio in results["ratios"]["network"]
            if ratio["tokens_per_batch"] == 4096
        ]
        for results in hosts
    ]
    (older,), newer = speeds
    assert speed == f"{older} with AVX2; {' and '.join(newer)} with AMX"


def test_decoding_speed_has_the_ranges_over_hosts():
    table = Page(ROOT / "docs" / "results.md").rows("ours | peer | search | threads | batch")
    ranges = []
    for search in ("ours, the peer's rule", "ours"):
        (cells,) = (
            row[4:] for row in table if row[:4] == [search, "CTranslate2 int8", "beam 4", "1"]
        )
        ratios = sorted(float(ratio) for cell in cells for ratio in cell.split(" to "))
        ranges.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f} times")
    (speed,) = (row[1] for row in PAGE.rows("task | result") if row[0].startswith("Decoding"))
    assert speed == f"{ranges[0]} with the same stopping rule; {ranges[1]} with the paper's search"


def test_transformers_is_tested_in_the_versions_printed():
    pinned = [
        re.search(r"^transformers==(.+)$", (ROOT / file).read_text(encoding="utf-8"), re.M)[1]
        for file in ("constraints-min.txt", "constraints.txt")
    ]
    assert re.findall(r"tested with ([\d.]+\d) and ([\d.]+\d)", PAGE.words) == [tuple(pinned)]


def test_the_picture_is_in_the_repository_and_small():
    (picture,) = re.findall(r'<img src="([^"]+)"', PAGE.text)
    assert 0 < (ROOT / picture).stat().st_size < 100_000
