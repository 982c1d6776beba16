"""Scores of recipes: means of seeds, tests of significance, and gains of ingredients."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import punctuation
import pytest
import score
import yaml
from vaswani.commands.main import main


def test_the_bootstrap_of_an_ingredient_is_renewed_with_its_seed(monkeypatch):
    monkeypatch.setattr(score, "pairs_of", lambda *_: [("a", "b")])
    p_values = iter([0.5, 0.25])
    monkeypatch.setattr(score, "bootstrap", lambda *_: next(p_values))
    found, rows = {"valid": [1.0], "test": [2.0], "translations": ["b"]}, []
    for seed, expected in ((1, 0.5), (2, 0.5), (1, 0.25)):
        ingredients = score.Ingredients({Path(f"run-{seed}"): {"seed": seed}}, 1, rows)
        ingredients.add("beams", found, found)
        rows = list(ingredients.rows.values())
        assert (rows[0]["bootstrap_p_value"], rows[0]["bootstrap_seed"]) == (expected, 1)
    assert rows[0]["seeds"] == [1, 2]


def test_scores_are_compared_by_t_tests_and_a_paired_bootstrap():
    # By hand: mean 41.2, standard deviation 0.1, so t = 0.2 / (0.1 / sqrt(3)).
    published = score.against_published([41.1, 41.2, 41.3], 41.0)
    assert published["t"] == pytest.approx(0.2 / (0.1 / 3**0.5), abs=0.01)
    assert 0.07 < published["p_value"] < 0.08
    pairs = score.paired([2.0, 3.0, 4.0], [1.0, 2.1, 2.9])
    assert pairs["difference"] == 1.0
    assert pairs["p_value"] < 0.01
    assert score.paired([2.0], [1.0]) == {"difference": 1.0, "p_value": None}
    assert score.paired([2.0, 3.1], [1.0, 2.1]) == {"difference": 1.0, "p_value": None}
    assert score.paired([2.0, 3.0], [2.0, 3.0]) == {"difference": 0.0, "p_value": 1.0}
    assert score.against_published([41.2, 41.2], 41.0) == {"t": None, "p_value": None}
    assert score.against_published([41.2, 41.2], 41.2) == {"t": None, "p_value": 1.0}
    references = [f"der satz mit der zahl {number} und noch mehr" for number in range(40)]
    worse = [reference.replace("satz", "wort") for reference in references]
    assert score.bootstrap(references, worse, references, "none") < 0.01
    assert score.bootstrap(references, references, references, "none") == 1
    first, second = ([*worse[:i], *references[i : i + 20], *worse[i + 20 :]] for i in (0, 20))
    assert score.bootstrap(first, second, references, "none") > 0.3


@pytest.mark.parametrize("program", [score, punctuation])
def test_a_missing_scipy_ends_a_benchmark_before_its_trainings(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setattr(sys, "argv", ["program", *(["multi30k-tiny"] if program is score else [])])
    monkeypatch.setattr(program.subprocess, "run", lambda *args, **kwargs: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="pip install scipy"):
        program.main()


@pytest.mark.parametrize("saved", ["steps: 6\nseed: 1\n", None])
def test_a_run_of_another_recipe_is_not_taken_for_this_one(tmp_path, saved):
    run = tmp_path / "small-seed1"
    run.mkdir()
    (run / "results.json").write_text("{}")
    if saved:
        run.with_suffix(".yaml").write_text(saved)
    with pytest.raises(SystemExit, match="missing or differs from the recipe asked for"):
        next(score.train_all({run: {"steps": 7, "seed": 1}}, 1))
    run.with_suffix(".yaml").write_text("steps: 7\nseed: 1\n")
    assert next(score.train_all({run: {"steps": 7, "seed": 1}}, 1)) == {}


def test_an_ensemble_has_what_most_seeds_say(tmp_path):
    outputs = {"1": "a\nb\nc\nx\n", "2": "a\nd\nc\ny\n", "3": "e\nd\nc\nz\n"}
    for seed, text in outputs.items():
        (tmp_path / seed).mkdir()
        (tmp_path / seed / "test.txt").write_text(text)
    (tmp_path / "test.tsv").write_text("1\ta\n2\tb\n3\tc\n4\tx\n")
    recipe = {"score": "exact_match", "test": [str(tmp_path / "test.tsv")]}
    found = score.ensemble(recipe, [tmp_path / seed for seed in outputs])
    assert found == {"members": 3, "test": 75.0}  # a, d, c, and x of the first seed


def first_alone(monkeypatch):
    """Run the first command in a process, and the others in this one, which is faster."""
    alone, lock = iter([True]), threading.Lock()

    def run_command(command, cwd, **options):
        if next(alone, False):
            return subprocess.run(command, cwd=cwd, **options)
        with lock, monkeypatch.context() as patch:
            patch.chdir(cwd)
            return main(command[3:])

    return run_command


def test_the_ingredient_muon_is_compared_with_the_same_recipe_without_it():
    assert "Muon" not in score.variants({"steps": 7})
    assert score.variants({"muon": True, "steps": 7})["Muon"] == ("without", {"steps": 7})


def test_the_ingredient_weight_decay_is_compared_with_the_same_recipe_without_it():
    recipe = {"steps": 7, "trainer": {"weight_decay": 0.1, "adam_beta1": 0.9}}
    undecayed = {"steps": 7, "trainer": {"weight_decay": 0.0, "adam_beta1": 0.9}}
    assert score.variants(recipe)["weight decay"] == ("without", undecayed)
    assert "weight decay" not in score.variants(undecayed)


def test_a_seed_counts_once(capsys):
    with pytest.raises(SystemExit):
        score.parse_args(["multi30k-muon", "--seeds", "1", "2", "1"])
    assert "give each seed once, got 1 2 1" in capsys.readouterr().err


def test_a_recipe_may_be_any_file(tmp_path, capsys):
    file = tmp_path / "own.yaml"
    file.write_text("steps: 7\n")
    args = score.parse_args([str(file), "--published", "30.5"])
    assert (args.recipe, args.published) == (str(file), 30.5)
    assert score.runs_of(args.recipe, [3], tmp_path) == {
        tmp_path / "own-seed3": {"steps": 7, "seed": 3}
    }
    assert score.recipe_of_model(str(file), {"model": "runs/base"}) is None
    file.with_name("base.yaml").touch()
    assert score.recipe_of_model(str(file), {"model": "runs/base"}) == tmp_path / "base.yaml"
    assert score.recipe_of_model(str(file), {}) is None
    second = "multi30k-muon-r-drop"
    assert score.recipe_of_model(second, score.recipe_of(second)).stem == "multi30k-muon"
    for wrong in ("absent.yaml", "multi30k"):
        with pytest.raises(SystemExit):
            score.parse_args([wrong])
        message = f"'{wrong}' is neither a file nor one of g2p-eng_us, iwslt14"
        assert message in capsys.readouterr().err


def test_scores_are_kept_from_a_file_only(capsys):
    with pytest.raises(SystemExit):
        score.parse_args(["multi30k-muon", "--keep-scores"])
    assert "name the FILE that holds the scores with --json" in capsys.readouterr().err


def test_pairs_of_a_recipe_are_read_with_its_columns(tmp_path, monkeypatch):
    (tmp_path / "test.jsonl").write_text('{"en": "a", "de": "b"}\n')
    recipe = {"columns": ["en", "de"], "test": [str(tmp_path / "test.jsonl")]}
    assert score.pairs_of(recipe, "test") == [("a", "b")]
    monkeypatch.setattr(score, "read_pairs", lambda *found: found)
    asked = (["user/pairs@de-en:test"], ["en", "de"], "test")
    assert score.pairs_of(recipe | {"test": asked[0]}, "test") == asked


@pytest.mark.slow
def test_a_recipes_score_is_the_mean_of_its_seeds_and_runs_are_not_repeated(
    corpus, tmp_path, monkeypatch, capsys
):
    data = tmp_path / "data" / "multi30k"
    files = {
        name: [str(data / f"{split}.lc.norm.tok.{language}.gz") for language in ("en", "de")]
        for name, split in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr"))
    }
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    recipe = files | {
        "vocab-size": 330,
        "set": sizes | {"encoder_attention_heads": 2, "decoder_attention_heads": 2},
        "max-source-tokens": 60,
        "max-target-tokens": 60,
        "steps": 6,
        "warmup": 4,
        "save-steps": 2,
        "eval-steps": 3,
        "average": 2,
        "beams": 2,
        "batching": "packed",
        "bleu-tokenize": "none",
    }
    (tmp_path / "small.yaml").write_text(json.dumps(recipe))
    monkeypatch.setattr(score, "RECIPES", tmp_path)
    monkeypatch.setattr(score, "subprocess", SimpleNamespace(run=first_alone(monkeypatch)))
    command = ["small", "--seeds", "1", "2", "--ingredients", "--at-once", "2"]
    command += ["--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "report.json")]
    score.main(command)
    report = json.loads((tmp_path / "report.json").read_text())
    runs = {path.parent.name: path for path in (tmp_path / "runs").glob("*/results.json")}
    assert set(runs) == {
        f"small-{run}seed{seed}"
        for run in ("", "without-label-smoothing-", "without-packed-batches-", "with-BPE-dropout-")
        for seed in (1, 2)
    }
    of_seeds = [json.loads(runs[f"small-seed{seed}"].read_text()) for seed in (1, 2)]
    bleu = [run["test"]["bleu"] for run in of_seeds]
    assert report["test"]["seeds"] == bleu
    assert report["test"]["mean"] == round(sum(bleu) / 2, 2)
    assert of_seeds[0]["valid"] != of_seeds[1]["valid"], "seeds differ"
    assert [point["step"] for point in report["runs"][0]["curve"]] == [3, 6]
    rows = {row["ingredient"]: row for row in report["ingredients"]}
    assert list(rows) == [
        "average of the last 2",
        "length penalty of GNMT, alpha 0.6",
        "score / length",
        "label smoothing",
        "packed batches",
        "BPE-dropout",
    ]
    assert rows["average of the last 2"]["test"]["with"] == bleu
    without = [
        json.loads(runs[f"small-without-packed-batches-seed{seed}"].read_text()) for seed in (1, 2)
    ]
    packed = rows["packed batches"]["test"]
    assert packed["without"] == [run["test"]["bleu"] for run in without]
    assert packed["difference"] == round((sum(bleu) - sum(packed["without"])) / 2, 2)
    assert [run["test"]["bleu"] for run in rows["packed batches"]["runs"]] == packed["without"]
    assert 0 <= rows["packed batches"]["bootstrap_p_value"] <= 1
    assert rows["packed batches"]["bootstrap_seed"] == 1

    times = {path: path.stat().st_mtime_ns for path in runs.values()}
    capsys.readouterr()
    score.main([*command[:3], "--runs", str(tmp_path / "runs")])
    assert f"seed 1: bleu {bleu[0]}" in capsys.readouterr().out

    more = {name: value for name, value in recipe.items() if name not in ("vocab-size", "set")}
    more |= {"model": "runs/small", "r-drop": 2, "steps": 2}
    (tmp_path / "more.yaml").write_text(json.dumps(more))
    score.main(
        ["more", "--seeds", "2", "--ingredients", *command[-4:-1], str(tmp_path / "more.json")]
    )
    assert f"small: bleu {bleu[1]}" in capsys.readouterr().out
    of_both = [
        yaml.safe_load((tmp_path / "runs" / f"more-{run}.yaml").read_text())
        for run in ("seed2", "without-second-stage-seed2")
    ]
    first = score.ROOT / of_both[0]["model"]
    assert first.samefile(tmp_path / "runs" / "small-seed2")
    assert of_both[0] == {**of_both[1], "r-drop": 2}
    more = json.loads((tmp_path / "more.json").read_text())["ingredients"]
    assert [row["ingredient"].split()[0] for row in more] == [
        "average",
        "length",
        "score",
        "second",
    ]
    assert {path: path.stat().st_mtime_ns for path in runs.values()} == times

    third = ["small", "--seeds", "3", *command[-4:], "--ingredients", "score / length"]
    score.main(third)
    extended = json.loads((tmp_path / "report.json").read_text())
    assert [run["seed"] for run in extended["runs"]] == [1, 2, 3]
    assert extended["test"]["seeds"][:2] == bleu
    assert extended["log"] == report["log"], "the log of the first seed"
    rows = {row["ingredient"]: row for row in extended["ingredients"]}
    assert rows["score / length"]["seeds"] == [1, 2, 3]
    assert rows["packed batches"] == report["ingredients"][4]
    with pytest.raises(SystemExit, match="'magic' is none of 'average of the last 2'"):
        score.main([*third[:-1], "magic"])

    for seed in (2, 3):
        shutil.rmtree(tmp_path / "runs" / f"small-seed{seed}")
    keep = ["small", "--seeds", "3", "2", *command[-4:], "--keep-scores", "--ingredients"]
    with pytest.raises(SystemExit, match="'score / length' needs the models of all seeds"):
        score.main([*keep, "score / length"])
    score.main([*keep, "label smoothing"])
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["runs"] == extended["runs"]
    rows = {row["ingredient"]: row for row in kept["ingredients"]}
    assert rows["label smoothing"]["seeds"] == [1, 2, 3]
    assert rows["label smoothing"]["test"]["with"] == extended["test"]["seeds"]
    assert rows["label smoothing"]["bootstrap_seed"] == 1
    assert not list((tmp_path / "runs").glob("small-seed[23]"))
    (tmp_path / "small.yaml").write_text(json.dumps({**recipe, "steps": 7}))
    with pytest.raises(SystemExit, match="seeds of another recipe, or of other settings"):
        score.main(third)
