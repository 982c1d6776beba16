"""The pages of docs/: code blocks, commands and links are checked."""

import ast
import importlib.util
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from documents import (
    DOCS,
    ROOT,
    Page,
    converter_call,
    environment,
    parsed,
    printed_by,
    results_of,
    results_of_hosts,
    written_tests,
)
from fairseq_models import EOS, OPTIONS, PAD, SOURCE, TARGET, Fairseq, checkpoint, dictionary
from loopback_hub import LoopbackHub
from num2words import num2words
from test_conversion_fairseq import fairseqs_beam_search
from test_search_coverage import FALLBACKS
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.commands.main import main
from vaswani.commands.train import make_parser
from vaswani.conversion import SUMMARIES, fairseq, opennmt_options
from vaswani.generation import generation_vaswani
from vaswani.training.presets import PRESETS
from vaswani.training.run_arguments import training_arguments

from vaswani import VaswaniConfig

FROZEN = ROOT / "tests" / "frozen" / "0.1"


PAGES = pytest.mark.parametrize("page", DOCS.values(), ids=DOCS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quickstart(folder):
    """A folder with a small model of number words in runs/quickstart."""
    for auto in (AutoModelForSeq2SeqLM, AutoTokenizer):
        auto.from_pretrained(FROZEN).save_pretrained(folder / "runs" / "quickstart")
    return folder


@pytest.fixture
def run(monkeypatch):
    """Run a command as printed, with further arguments, in this process."""

    def run(command, more=""):
        program, *words = shlex.split(f"{command} {more}")
        if program == "vaswani":
            main(words)
            return
        assert (program, words[0]) == ("python", "-c"), command
        monkeypatch.setattr(sys, "argv", ["-c", *words[2:]])
        exec(words[1], {})

    return run


def run_blocks(page, without=None, smaller=None, names=None):
    """Run a page's Python blocks with the variables of earlier blocks, and compare the output."""
    names = {} if names is None else names
    for code, expected in page.python():
        if without and without in code:
            continue
        for size, other in (smaller or {}).items():
            code = code.replace(size, other)
        found = printed_by(code, page.path.name, names)
        assert expected in (None, found)
    return names


# All pages


@PAGES
def test_links_lead_to_files_and_headings(page):
    targets = list(page.local_links())
    assert targets
    for path, anchor in targets:
        assert path.exists(), path
        if anchor:
            assert anchor in Page(path).anchors(), f"{path.name}#{anchor}"


@PAGES
def test_a_link_to_code_shows_a_fragment_of_that_file(page):
    links = list(page.code_links())
    for path, fragment in links:
        assert fragment in path.read_text(encoding="utf-8"), f"{path} lost `{fragment}`"
    assert len(links) > 40 or page.path.stem != "paper"


@PAGES
def test_tests_named_in_tables_exist(page):
    named = set(re.findall(r"`(test_\w+)`", page.text))
    assert named <= written_tests()
    assert len(named) > 30 or page.path.stem != "paper"
    for path in re.findall(r"`(tests/\w+\.py)`", page.text):
        assert (ROOT / path).exists()


@PAGES
def test_every_block_is_of_a_kind_that_is_run(page):
    assert {language for language, _ in page.blocks} <= {"python", "sh", ""}
    printed = [body for language, body in page.blocks if not language]
    assert printed == [expected for _, expected in page.python() if expected is not None]


@PAGES
def test_every_command_is_understood_by_its_program(page, monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in page.commands():
        if command.startswith("pip install -c constraints.txt -e "):
            (extra,) = re.findall(r'"\.\[(\w+)\]"', command)
            assert extra in extras["optional-dependencies"]
        elif benchmark := re.match(r"(?:\w+=\S* )*python benchmarks/(\w+)\.py(.*)", command):
            monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
            assert importlib.import_module(benchmark[1]).parse_args(shlex.split(benchmark[2]))
        elif example := re.match(r"python (examples/\S+)", command):
            assert (ROOT / example[1]).is_file()  # examples have their own tests
        elif not command.startswith(("python -c ", "python -m pytest ", "python run_")):
            assert parsed(command, monkeypatch)  # other programs have their own tests


def test_the_index_has_every_page():
    listed = {path.name for path, _ in DOCS["index"].local_links()}
    assert {page.path.name for page in DOCS.values()} <= listed | {"README.md"}


def test_contributing_lists_the_subpackages_of_the_contract_in_its_order():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = project["tool"]["importlinter"]["contracts"]
    layers = [set(layer.split(" | ")) for layer in contract["layers"]]
    listed = [
        {"vaswani." + {"vaswani": "registration"}.get(name, name) for name in names}
        for cell, _ in Page(ROOT / "CONTRIBUTING.md").rows("subpackage |")
        if (names := re.findall(r"`(\w+)/`", cell))
    ]
    assert listed == layers


# paper.md


def test_parameters_are_counted_as_printed():
    assert run_blocks(DOCS["paper"])["size"] == 41_100


def test_the_tests_of_a_section_are_found_by_its_number():
    (command,) = DOCS["paper"].commands()
    before, _, section = command.rpartition(" -k ")
    assert before == "python -m pytest tests/test_paper.py"
    assert sum(name.startswith(section) for name in written_tests("test_paper.py")) >= 5


# train.md


def test_two_text_files_become_a_scored_model_as_printed(folder, run):
    page = DOCS["train"]
    for part, numbers in (("train", range(100, 140)), ("valid", range(8)), ("test", range(8))):
        for language in ("en", "de"):
            lines = [num2words(number, lang=language) + "\n" for number in numbers]
            (folder / f"{part}.{language}").write_text("".join(lines), encoding="utf-8")
    rows = [f"{num2words(number)}\t{num2words(number, lang='de')}\n" for number in range(40)]
    (folder / "more.tsv").write_text("".join(rows), encoding="utf-8")
    few = "--steps 4 --warmup 2 --eval-steps 4 --save-steps 2"
    small = f"{few} --vocab-size 340 --set d_model=32 encoder_layers=1 decoder_layers=1"
    small += " encoder_ffn_dim=64 decoder_ffn_dim=64"
    training, papers, tuning, averaging, objective = page.commands()
    run(training, small)
    for files, _ in page.rows("file |"):
        for file in re.findall(r"`([\w.]+(?:-N/)?)`", files):
            assert (folder / "runs/en-de" / file.replace("-N", "-4")).exists(), file
    results = json.loads((folder / "runs/en-de/results.json").read_text())
    assert {"valid", "test", "command", "commit", "hardware", "versions", "log"} <= set(results)
    assert results["averaged"] == ["checkpoint-2", "checkpoint-4"]
    run(training, f"{small} --resume auto")
    run(papers, small)
    run(tuning, few)
    run(averaging)
    run(objective, few)
    for name in ("base", "more", "averaged", "risk"):
        assert (folder / f"runs/en-de-{name}/model.safetensors").exists()

    smaller = {"max_steps=8000": "max_steps=4", "save_steps=200": "save_steps=2"}
    smaller["d_model=256, dropout"] = "d_model=32, encoder_layers=1, decoder_layers=1, dropout"
    assert all(size in page.text for size in smaller)
    names = run_blocks(page, without="peft", smaller=smaller)
    assert (names["scores"]["sentences"], names["trainer"].state.global_step) == (8, 4)
    assert (folder / "runs/mine-averaged/model.safetensors").exists()
    assert (folder / "runs/mine/learning_curve.png").exists()
    saved = AutoTokenizer.from_pretrained("runs/tokenizer")
    assert saved.decode(names["ids"], skip_special_tokens=True) == "naïve 北京"


def test_the_adapter_block_adapts_every_linear_layer(quickstart):
    pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")
    (quickstart / "runs/en-de").symlink_to(quickstart / "runs/quickstart")
    (code,) = (code for code, _ in DOCS["train"].python() if "peft" in code)
    names = {}
    assert "trainable params" in printed_by(code, "train.md", names)
    plain = {
        name
        for name, module in names["model"].named_modules()
        if type(module) is torch.nn.Linear and ".lora_" not in name and "base_layer" not in name
    }
    assert plain == set()


def test_presets_for_small_data_are_as_listed():
    """The minutes come from `vaswani train --results FILE`, once they have been measured."""
    rows = {name.strip("`"): cells for name, *cells in DOCS["train"].rows("preset | d_model")}
    assert rows.keys() == PRESETS.keys()
    for name, cells in rows.items():
        options = ["--train", "pairs.tsv", "--output", "out", "--preset", name]
        args = make_parser().parse_args(options)
        assert f"Both presets use the scheduler `{args.scheduler}`" in DOCS["train"].words
        assert f"and dropout {args.set['dropout']}." in DOCS["train"].words
        expected = [
            args.set["d_model"],
            f"{args.set['encoder_layers']} + {args.set['decoder_layers']}",
            args.set["encoder_ffn_dim"],
            args.set["encoder_attention_heads"],
            args.vocab_size,
            args.max_source_tokens,
            f"{args.epochs:g}",
            args.learning_rate,
            args.warmup,
            args.average,
        ]
        results = results_of(f"preset-{name}")
        assert {"command", "commit", "hardware", "versions"} <= results.keys()
        last = results["log"][-1]
        minutes_of_a_pass = last["train_runtime"] / 60 / last["epoch"]
        minutes = minutes_of_a_pass * args.epochs / results["pairs"]["train"] * 10_000
        assert cells == [*map(str, expected), f"{minutes:.0f}"]


def test_rows_of_table_3_have_the_papers_figures():
    presets = VaswaniConfig.presets()
    rows = {name.strip("`"): float(bleu) for name, _, bleu in DOCS["train"].rows("preset | change")}
    assert rows == {name: presets[name]["bleu"] for name in rows}
    base = presets["base"]["bleu"]
    changing = {name for name, row in presets.items() if round(abs(row["bleu"] - base), 1) >= 0.5}
    assert rows.keys() == changing | {"C-dff4096"}
    assert f"base has {base})" in DOCS["train"].words


def recipe_of(name):
    return yaml.safe_load((ROOT / f"examples/recipes/{name}.yaml").read_text())


def test_settings_of_recipes_are_those_of_their_files():
    rows = {name: cells for name, *cells in DOCS["train"].rows("recipe |")}
    assert rows.keys() == {path.stem for path in (ROOT / "examples/recipes").glob("*.yaml")}
    for name, cells in rows.items():
        recipe = recipe_of(name)
        if "model" in recipe:  # the recipe has the sizes of that model
            recipe = recipe_of(Path(recipe["model"]).name) | recipe
        peak = recipe.get("learning-rate")
        sizes = recipe["set"]
        expected = [
            recipe["vocab-size"],
            sizes["d_model"],
            sizes["encoder_layers"],
            sizes["encoder_ffn_dim"],
            sizes["dropout"],
            recipe["max-source-tokens"] * recipe["accumulate"],
            "equation 3" if peak is None else f"{float(peak):g}",
            recipe["warmup"],
            recipe["steps"],
            recipe["average"],
        ]
        assert cells == [str(value) for value in expected]


# cluster.md


def test_launched_runs_have_as_many_tokens_in_an_update_as_their_recipes(monkeypatch):
    for command in DOCS["cluster"].commands():
        args, launcher = parsed(command, monkeypatch)
        recipe = make_parser().parse_args(["--recipe", args.recipe])
        machines, processes = 1, getattr(launcher, "num_processes", None)
        if processes is None:
            machines, _, _ = launcher.nnodes.partition(":")
            processes = int(machines) * int(launcher.nproc_per_node)
        for side in ("max_source_tokens", "max_target_tokens"):
            assert abs(getattr(args, side) * processes - getattr(recipe, side)) < 10, command


def decoding(results, **setting):
    """The rows of a decoding benchmark in one setting, by engine and precision."""
    setting = {"allocator": "glibc", "instructions": "native", "text": "short", **setting}
    return {
        (row["engine"], row["precision"]): row
        for row in results["speed"]
        if setting.items() <= row.items()
    }


def sentences_per_second(row):
    return statistics.median(row["sentences"] / seconds for seconds in row["seconds"])


# from-fairseq.md


# The codes "a b" split "aba b" into "ab@@ a b".
PIECES = ["ab@@", "a@@", "b@@", "a", "b"]


LINES = ["ab@@ a b", "b ab@@ b a", "a", "a <unk> b"]


def old_model(folder, **extra):
    """Write the files of a fairseq model whose translations end, and return the network."""
    network = Fairseq(OPTIONS)
    with torch.no_grad():
        bias = network.decoder.layers[-1].final_layer_norm.bias
        network.decoder.output_projection.weight[EOS] += 2 * bias
        network.decoder.output_projection.weight[[0, PAD]] -= 2 * bias
    (folder / "code").write_text("#version: 0.2\na b\n")
    for language, size in (("de", SOURCE), ("en", TARGET)):
        others = [f"{language}{number}" for number in range(size - 4 - len(PIECES))]
        dictionary(folder / f"dict.{language}.txt", [*PIECES, *others])
    state = {"args": Namespace(**OPTIONS), "model": dict(network.state_dict()), **extra}
    torch.save(state, folder / "checkpoint_best.pt")
    return network


def generate_log(network, folder, lines=LINES):
    """Return the output of fairseq-generate for segmented lines."""
    entries, names = (
        ["<s>", "<pad>", "</s>", "<unk>"]
        + [entry.split()[0] for entry in (folder / f"dict.{side}.txt").read_text().splitlines()]
        for side in ("de", "en")
    )
    log = ["2019-01-01 | INFO | loading model(s) from checkpoint_best.pt"]
    for number, line in enumerate(lines):
        words = [word if word in entries else "<unk>" for word in line.split()]
        line, ids = " ".join(words), [*map(entries.index, words), EOS]
        score, tokens = fairseqs_beam_search(network, torch.tensor([ids]))
        text = " ".join(names[token] for token in tokens[:-1])
        log += [f"S-{number}\t{line}", f"H-{number}\t{score / math.log(2)}\t{text}"]
    return "\n".join(log) + "\n"


def test_an_old_fairseq_model_is_brought_checked_and_trained_on_as_printed(folder, run):
    page = DOCS["from-fairseq"]
    network = old_model(folder)
    (command,) = page.commands()
    run(command)
    (folder / "generate.log").write_text(generate_log(network, folder))
    (folder / "more.tsv").write_text("aba b\tab a\nb\ta\n")
    assert "max_steps=1000" in page.text
    names = run_blocks(page, smaller={"max_steps=1000": "max_steps=2"})
    assert len(names["hypotheses"]) == len(LINES)
    assert names["trainer"].state.global_step == 2
    assert AutoTokenizer.from_pretrained("runs/more/target_tokenizer")("aba b")["input_ids"]
    paper = page.text[page.text.index("For the paper's search, pass `") :].split("`")[1]
    batch = names["tokenizer"](["aba b"], return_tensors="pt").to(names["model"].device)
    assert names["model"].generate(**batch, **settings_of(paper)).shape[1] <= 1 + 4 + 50


def cut_by_sentencepiece(folder):
    """Train a SentencePiece model, write dictionaries of its pieces, and return segmented lines."""
    spm = pytest.importorskip("sentencepiece", reason="cuts the text")
    (folder / "text").write_text("\n".join(["aba b", "b abb a", "bab aab", "ab bab"] * 9))
    options = {"model_prefix": "spm", "vocab_size": 11, "minloglevel": 2}
    spm.SentencePieceTrainer.train(input="text", **options)
    cutter = spm.SentencePieceProcessor(model_file="spm.model")
    pieces = [cutter.id_to_piece(number) for number in range(3, 11)]
    for language, size in (("de", SOURCE), ("en", TARGET)):
        others = [f"{language}{number}" for number in range(size - 4 - len(pieces))]
        dictionary(folder / f"dict.{language}.txt", [*pieces, *others])
    return [" ".join(cutter.encode(line, out_type=str)) for line in ("aba b", "b abb a", "aXa")]


@pytest.mark.parametrize("cut_by", ["", "--remove-bpe", "--sentencepiece-model spm.model"])
def test_the_check_of_the_text_holds_whatever_cut_it(folder, run, cut_by):
    page = DOCS["from-fairseq"]
    network = old_model(folder)
    lines = cut_by_sentencepiece(folder) if "spm" in cut_by else LINES
    (command,) = page.commands()
    run(command.replace("--bpe-codes code", cut_by))
    (folder / "generate.log").write_text(generate_log(network, folder, lines))
    (scores, printed), (check, true), *_ = page.python()
    if cut_by == "--remove-bpe":
        check, changed = re.subn(r"lines = .*  # converted with --remove-bpe: ", "", check)
        assert changed == 1
    names = {}
    assert printed_by(scores, page.path.name, names) == printed
    assert printed_by(check, page.path.name, names) == true
    assert len(names["known"]) == len(names["hypotheses"]) - 1


def test_options_of_fairseq_generate_become_the_settings_beside_them(folder):
    network = Fairseq(OPTIONS | {"max_target_positions": 1024})
    rows = DOCS["from-fairseq"].rows("fairseq-generate |")
    assert len(rows) == 7
    for flags, cell in rows:
        words = flags.replace("`", "").removesuffix(" alone").split("--")[1:]
        pairs = (f"{word} True".split()[:2] for word in words)
        options = {name.replace("-", "_"): ast.literal_eval(value) for name, value in pairs}
        cfg = {"model": network.options, "generation": options}
        path = checkpoint(folder / "a.pt", network, cfg=cfg)
        found = fairseq.load(path).model.generation_config
        settings = settings_of(re.search("`(.+?)`", cell)[1])
        if "nbest" in options:  # an argument of the call
            assert settings == {"num_return_sequences": options["nbest"]}
        elif "alone" in flags:  # saved as max_length, which counts the start token
            assert settings["max_length_factor"] == 0
            assert found.max_length == settings["max_length_offset"] + 1
        else:
            assert {name: getattr(found, name) for name in settings} == settings


def test_refusals_are_quoted_as_they_come(folder, run):
    page = DOCS["from-fairseq"]
    (command,) = page.commands()
    said = []

    def refused(command=command):
        with pytest.raises(SystemExit) as error:
            run(command)
        said.append(str(error.value))

    kept = {"task": {"data": Path("data-bin"), "langs": [Path("de")]}, "criterion": Namespace(a=1)}
    old_model(folder, args=None, cfg={"model": {**OPTIONS, "_name": OPTIONS["arch"]}} | kept)
    refused()
    code, _ = page.python()[-1]
    printed_by(code, page.path.name, {"torch": torch})
    saved = torch.load("plain.pt", weights_only=True)
    assert saved["cfg"].pop("model").keys() >= OPTIONS.keys()
    assert saved["cfg"] == {"task": {"data": "data-bin", "langs": ["de"]}, "criterion": {"a": 1}}
    assert fairseq.load("plain.pt").model.config.d_model == OPTIONS["encoder_embed_dim"]

    old_model(folder, extra_state={"best": Path("data-bin")})
    refused()
    printed_by(code, page.path.name, {"torch": torch})
    assert fairseq.load("plain.pt").model.config.d_model == OPTIONS["encoder_embed_dim"]

    others = {"adaptive_softmax_cutoff": "9,99", "layernorm_embedding": True, "arch": "lstm"}
    old_model(folder, args=Namespace(**OPTIONS | others))
    refused()
    old_model(folder)
    dictionary(folder / "dict.de.txt", PIECES)
    refused()
    shared = Fairseq(OPTIONS | {"share_all_embeddings": True}, target=SOURCE)
    checkpoint(folder / "checkpoint_best.pt", shared)
    for language in ("de", "en"):
        others = [f"{language}{number}" for number in range(SOURCE - 4 - len(PIECES))]
        dictionary(folder / f"dict.{language}.txt", [*PIECES, *others])
    refused()
    run_alone = command.replace(" --target-dict dict.en.txt", "")
    assert run_alone != command
    checkpoint(folder / "checkpoint_best.pt", Fairseq(OPTIONS, target=SOURCE))
    refused(run_alone)
    os.truncate("checkpoint_best.pt", 999)
    refused()
    old_model(folder)
    assert not (folder / "out").exists()
    (folder / "out").mkdir()
    (folder / "out" / "notes").touch()
    refused()

    quoted = [
        quote for cell, _ in page.rows("the message has") for quote in re.findall(r"`(.+?)`", cell)
    ]
    assert len(quoted) == 9
    for quote in quoted:
        assert any(quote in message for message in said), quote


# decode.md


def settings_of(text):
    """Parse keyword arguments as written in a call."""
    call = ast.parse(f"dict({text})", mode="eval").body
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_decoding_goes_as_printed(quickstart, run):
    page = DOCS["decode"]
    run_blocks(page)
    assert (quickstart / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (quickstart / "heads.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    (quickstart / "source.txt").write_text("seven\nnine hundred and ninety-nine\n")
    for command in page.commands():
        run(command)
    read = {
        name: (quickstart / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        for name in ("translation", "nbest", "scores", "links")
    }
    assert read["translation"] == ["sieben", "neunhundertneunundneunzig"]
    assert [line.split(" ||| ")[0] for line in read["nbest"]] == ["0", "0", "1", "1"]
    assert read["nbest"][0].startswith("0 ||| sieben ||| -")
    assert [float(score) < 0 for score in read["scores"]] == [True, True]
    assert read["links"][0] == "0-0"


def test_settings_of_a_fresh_model_are_those_listed(tiny_model):
    fresh = tiny_model().generation_config
    for name, value, _ in DOCS["decode"].rows("setting |"):
        found, name = getattr(fresh, name.strip("`")), name.strip("`")
        expected = ast.literal_eval(value.strip("`"))
        assert found == expected or (name, found, expected) == ("num_beams", None, 1)


def test_slower_calls_are_those_that_leave_the_fast_search():
    known = {name for call in FALLBACKS.values() for name in call}
    listed = {
        name.partition("=")[0]
        for _, what, test in DOCS["decode"].rows("slower because")
        for name in re.findall(r"`(\w+(?:=\w+)?)`", what)
        if test == "`test_what_our_search_does_not_cover_runs_transformers_search`"
    }
    assert len(listed) == 11
    assert listed <= known


def test_rules_of_other_toolkits_are_what_converters_write_and_run_our_search(
    tmp_path, tiny_model, monkeypatch
):
    rules = {
        toolkit: settings_of(settings.strip("`"))
        for toolkit, settings, _ in DOCS["decode"].rows("toolkit |")
    }
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS | {"max_target_positions": 1024}))
    from_fairseq = fairseq.load(path).model.generation_config
    for name, value in rules["fairseq-generate"].items():
        assert getattr(from_fairseq, name) == value
    assert from_fairseq.suppress_tokens == [1]
    assert from_fairseq.forced_eos_token_id == 2
    for version, written in opennmt_options._SEARCH.items():
        listed = rules[f"OpenNMT-py {version}"]
        assert listed == {"num_beams": 5, "length_penalty_type": "hf", **written}

    searches, search = [], generation_vaswani.beam_search
    monkeypatch.setattr(
        generation_vaswani, "beam_search", lambda *args: searches.append(1) or search(*args)
    )
    model = tiny_model()
    for settings in rules.values():
        model.generate(torch.tensor([[5, 2]]), **{"num_beams": 4, **settings})
    assert len(searches) == len(rules) == 6


# deploy.md


def test_deployment_goes_as_printed_on_ctranslate2_and_in_bfloat16(quickstart, run):
    pytest.importorskip("ctranslate2", reason="pip install 'vaswani[convert]'")
    page = DOCS["deploy"]
    ours, theirs = page.commands(containing="ctranslate2")
    run(ours)
    run(theirs)
    names = run_blocks(page, without="OnnxTranslator")
    for name in ("model.bin", "shared_vocabulary.json"):
        own, written = (quickstart / folder / name for folder in ("ct2-own", "ct2"))
        assert own.read_bytes() == written.read_bytes()
    assert names["translator"].model.dtype == torch.bfloat16
    assert names["engine"].compute_type == "int8_float32"


@pytest.mark.slow
def test_onnx_translates_as_printed(quickstart, run):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="pip install 'vaswani[convert]'")
    page = DOCS["deploy"]
    (command,) = page.commands(containing="onnx")
    run(command)
    (block,) = [block for block in page.python() if "OnnxTranslator" in block[0]]
    assert printed_by(block[0], page.path.name) == block[1]


def test_the_gain_of_batches_comes_from_the_files_of_all_hosts():
    gains, losses = [], []
    for results in results_of_hosts():
        rows = [decoding(results, beams=4, batch=size).get(("ours", "int8")) for size in (1, 32)]
        if all(rows):
            single, many = map(sentences_per_second, rows)
            gains.append(many / single)
            if greedy := decoding(results, beams=1, batch=32).get(("ours", "int8")):
                losses.append(rows[1]["bleu"] - greedy["bleu"])
    assert len(gains) > 1
    assert len(losses) > 1
    assert min(losses) > 0, "greedy search scores less BLEU"
    found = f"batches of 32 are {min(gains):.1f} to {max(gains):.1f} times"
    assert found in DOCS["deploy"].words, found


def test_quantized_forms_come_from_their_results_file_once_there_is_one(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    quantization = importlib.import_module("quantization")
    path = ROOT / "benchmarks/results/quantization.json"
    found = DOCS["deploy"].text.count("\n| form |")
    if not path.exists():
        assert found == 0
        pytest.skip("nothing has been measured: benchmarks/quantization.py")
    measured = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "commit", "hardware", "versions", "date"} <= measured.keys()
    assert "\n".join(quantization.table(measured["forms"])) in DOCS["deploy"].text
    assert found == 1


# convert.md


def test_every_converter_is_printed_and_has_a_test(monkeypatch):
    page = DOCS["convert"]
    commands = page.commands(containing="vaswani convert")
    called = [converter_call(command, monkeypatch)["converter"] for command in commands]
    assert called == list(SUMMARIES)
    tests = {test.strip("`") for *_, test in page.rows("toolkit |")}
    assert len(tests) == len(SUMMARIES) + 1  # Marian has two layouts
    assert tests <= written_tests("test_conversion_*.py")


def test_converters_are_called_in_python_as_printed(folder):
    old_model(folder)
    run_blocks(DOCS["convert"])
    assert (folder / "out" / "model.safetensors").exists()


# share.md


@pytest.mark.slow
def test_a_model_is_shared_as_printed(quickstart, run, monkeypatch):
    page = DOCS["share"]
    card, *training = page.commands()
    run(card)
    without = "import sys; sys.modules['vaswani'] = None\n"
    blocks = page.python()
    alone = [block for block in blocks if "trust_remote_code" in block[0]]
    others = [block for block in blocks if block not in alone]
    with LoopbackHub() as hub:
        for part, start in ((others, ""), (alone, without)):
            finished = subprocess.run(
                [sys.executable, "-c", start + "".join(code for code, _ in part)],
                env=environment(**hub.environment),
                capture_output=True,
                text=True,
                check=False,
            )
            assert finished.returncode == 0, finished.stderr[-4000:]
            assert finished.stdout == "".join(printed or "" for _, printed in part)
        public, files = hub.files("user/number-words"), hub.files("user/private-words", "v1")
        assert not hub.unknown_requests
    assert {"README.md", "LICENSE-CODE", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert b"user/number-words" in public["README.md"]
    assert {name for name in files if name.endswith("_vaswani.py")} == {
        path.name for path in (quickstart / "runs/quickstart").glob("*_vaswani.py")
    }

    once, always = (parsed(command, monkeypatch)[0] for command in training)
    assert (once.push_to_hub, once.license) == ("user/multi30k-muon", "cc-by-4.0")
    arguments = training_arguments(always, d_model=128)
    assert arguments.push_to_hub
    assert arguments.hub_strategy == "checkpoint"
    assert arguments.hub_private_repo
    for strategy, _ in page.rows("`hub_strategy`"):
        assert type(arguments.hub_strategy)(strategy.strip("`"))
