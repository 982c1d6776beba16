"""docs/siblings.md: the blocks run as printed, and the figures of docs/results.md have files."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from documents import Page, printed_by
from test_conversion_onnx import exporting
from vaswani.commands.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = Page(ROOT / "docs" / "siblings.md")
RESULTS = Page(ROOT / "docs" / "results.md")


def results(name):
    path = ROOT / "benchmarks" / "results" / f"siblings-{name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["command"] in RESULTS.commands()
    return found["results"]


def test_the_blocks_run_as_printed(number_words, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.de").write_bytes(number_words[1].read_bytes())
    tiny_model().save_pretrained("runs/quickstart")
    _, (making, _), (moving, _), _ = PAGE.python()
    names = {}
    with pytest.raises(ValueError, match="vocab_size"):  # number words have fewer pieces
        exec(making.replace("4000", "20"), names)
    exec(making.replace("4000", "400"), names)
    prompt = names["tokenizer"](["ein", "zweihundert"], padding=True, return_tensors="pt")
    assert names["model"].eval().generate(**prompt, max_new_tokens=3).shape[0] == 2
    exec(moving, names)
    assert names["new"] == []
    expected = names["translator"].state_dict()
    assert names["warm"].state_dict().keys() == expected.keys()
    assert all(
        torch.equal(expected[name], tensor) for name, tensor in names["warm"].state_dict().items()
    )


def test_a_classifier_is_trained_as_printed(number_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in number_words:
        Path(path.name).write_bytes(path.read_bytes())
    (training, expected), *_ = PAGE.python()
    printed = printed_by(training, "siblings.md")  # with the trainer's figures
    assert printed.endswith(f"\n{expected}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_language_model_is_served_as_printed(number_words, tmp_path, monkeypatch, capsys):
    exporting()
    pytest.importorskip("ctranslate2", reason="pip install 'vaswani[convert]'")
    monkeypatch.chdir(tmp_path)
    Path("train.de").write_bytes(number_words[1].read_bytes())
    _, (making, _), _, (serving, _) = PAGE.python()
    names = {}
    exec(making.replace("4000", "400"), names)
    for command in PAGE.commands(containing="convert"):
        main(shlex.split(command)[1:])
    assert Path("causal-ct2/model.bin").is_file()
    capsys.readouterr()
    exec(serving, {})
    prompts = names["tokenizer"](["ein", "zweihundert"], padding=True, return_tensors="pt")
    ids = names["model"].eval().generate(**prompts, num_beams=4, max_new_tokens=20)
    expected = names["tokenizer"].batch_decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_figures_are_those_of_the_results_files():
    found = results("classify")
    (classifier, tagger) = found["classifier"], found["tagger"]
    for figure in (
        *(classifier["accuracy"], classifier["naive_bayes"]),
        *(tagger["accuracy"], tagger["most_frequent_kind"]),
    ):
        assert (
            f"{100 * figure - 1e-9:.1f}%" in RESULTS.text or f"{100 * figure:.1f}%" in RESULTS.text
        )
    for name, models in results("one-stream").items():
        if name.startswith("number words"):
            pairs = int(name.split()[2])
            two, one = (100 * models[key]["exact"] for key in ("two streams", "one stream"))
            assert f"| {pairs:,} | {two:.1f}% | {one:.1f}% |" in RESULTS.text
    for name, models in results("one-stream-multi30k").items():
        two, one = (models[key]["bleu"] for key in ("two streams", "one stream"))
        assert f"| {int(name.split()[1]):,} | {two:.2f} | {one:.2f} |" in RESULTS.text
    models = results("language-model") | results("n-grams")  # the newer n-grams
    for name, found in models.items():
        if name.endswith(("Model", "LM", "3", "4")):
            assert f"| {found['perplexity_per_word']:.1f} |" in RESULTS.text


def test_the_gain_of_masked_words_is_that_of_its_results_file():
    path = ROOT / "benchmarks" / "results" / "siblings-masked-words.json"
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
    loss, bleu = summary["loss_per_token"], summary["bleu"]
    for start in ("masked words first", "from scratch"):
        assert f"| {start} | {loss[start]:.2f} | {bleu[start]:.2f} |" in RESULTS.text
    cells = [f"{score['difference']:.2f} (p = {score['p_value']:.2g})" for score in (loss, bleu)]
    assert f"| difference | {' | '.join(cells)} |" in RESULTS.text


def test_the_speed_of_a_language_model_is_that_of_its_results_file():
    path = ROOT / "benchmarks" / "results" / "language-model.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    assert RESULTS.rows("search | batch") == [
        [
            "greedy" if row["num_beams"] == 1 else f"beam {row['num_beams']}",
            str(row["batch_size"]),
            *(f"{row['seconds'][name]:.2f}" for name in ("VaswaniForCausalLM", "GPT2LMHeadModel")),
            f"{row['times_faster']:.2f}",
        ]
        for row in results["rows"]
    ]
    assert f"median of {results['settings']['repetitions']} calls" in RESULTS.words
