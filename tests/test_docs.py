"""What docs/ says is so: blocks and commands are run or parsed, links and figures looked up."""

import ast
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from documents import (
    ROOT,
    Page,
    converter_call,
    environment,
    pages,
    printed_by,
    training_call,
    written_tests,
)
from loopback_hub import LoopbackHub
from num2words import num2words
from test_conversion_fairseq import (
    EOS,
    OPTIONS,
    PAD,
    SOURCE,
    TARGET,
    Fairseq,
    checkpoint,
    dictionary,
    fairseqs_beam_search,
)
from test_search import FALLBACKS
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.conversion import fairseq, opennmt_options
from vaswani.generation import generation_vaswani

from vaswani import VaswaniConfig

DOCS = {page.path.stem: page for page in pages()}
FROZEN = ROOT / "tests" / "frozen" / "0.1"
PAGES = pytest.mark.parametrize("page", DOCS.values(), ids=DOCS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, from which the examples are reached as from the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quickstart(folder):
    """A folder where runs/quickstart is a small model of number words."""
    for auto in (AutoModelForSeq2SeqLM, AutoTokenizer):
        auto.from_pretrained(FROZEN).save_pretrained(folder / "runs" / "quickstart")
    return folder


@pytest.fixture
def run(monkeypatch):
    """Run a command as printed, with more arguments behind it, in this process."""

    def run(command, more=""):
        python, *words = shlex.split(f"{command} {more}")
        assert python == "python", command
        if words[0] == "-c":
            monkeypatch.setattr(sys, "argv", ["-c", *words[2:]])
            exec(words[1], {})
            return
        if words[0] == "-m":
            words = words[1:]
            module = importlib.import_module(words[0])
            if hasattr(module, "__path__"):
                module = importlib.import_module(f"{words[0]}.__main__")
        else:
            monkeypatch.syspath_prepend(str(ROOT / "examples"))
            module = importlib.import_module(Path(words[0]).stem)
        monkeypatch.setattr(sys, "argv", words)
        module.main()

    return run


def run_blocks(page, without=None, smaller=None):
    """Run a page's Python blocks, one going on from the other, and compare what they print."""
    names = {}
    for code, expected in page.python():
        if without and without in code:
            continue
        for size, other in (smaller or {}).items():
            code = code.replace(size, other)
        found = printed_by(code, page.path.name, names)
        assert expected in (None, found)
    return names


def rows_below(page, header):
    """The cells of a table, row by row, whose header starts so."""
    table = page.text[page.text.index(f"\n| {header}") :].split("\n\n")[0]
    rows = table.strip().splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


# All pages


@PAGES
def test_links_lead_to_files_and_headings(page):
    headings = {other.path: other.anchors() for other in [*DOCS.values(), Page(ROOT / "README.md")]}
    targets = list(page.local_links())
    assert targets
    for path, anchor in targets:
        assert path.exists(), path
        if anchor and not anchor.startswith("L"):
            assert anchor in headings[path.resolve()], f"{path.name}#{anchor}"


@PAGES
def test_a_link_to_a_line_shows_a_part_of_that_line(page):
    assert page.text == page.with_right_lines(), "run `python tests/documents.py`"
    assert page.text.count("#L") == page.line_links()


def test_a_link_that_has_drifted_is_put_right_and_a_lost_line_is_named(tmp_path):
    (tmp_path / "code.py").write_text("import x\n\ndef f():\n    return x\n")
    (tmp_path / "page.md").write_text("See [`def f(`](code.py#L1).")
    page = Page(tmp_path / "page.md")
    assert page.with_right_lines() == "See [`def f(`](code.py#L3)."
    for code in ("x", "def g("):
        page.text = f"See [`{code}`](code.py#L1)."
        with pytest.raises(ValueError, match=re.escape(f"code.py holds `{code}` in ")):
            page.with_right_lines()


@PAGES
def test_tests_named_in_tables_exist(page):
    named = set(re.findall(r"`(test_\w+)`", page.text))
    assert named <= written_tests()
    assert len(named) > 30 or page.path.stem != "paper"


@PAGES
def test_every_block_is_of_a_kind_that_is_run(page):
    assert {language for language, _ in page.blocks} <= {"python", "sh", ""}
    printed = [body for language, body in page.blocks if not language]
    assert printed == [expected for _, expected in page.python() if expected is not None]


def test_the_index_has_every_page():
    listed = {path.name for path, _ in DOCS["README"].local_links()}
    assert {page.path.name for page in DOCS.values()} - {"README.md"} <= listed


# paper.md


def test_parameters_are_counted_as_printed():
    assert run_blocks(DOCS["paper"])["size"] == 41_100


def test_the_tests_of_a_section_are_found_by_its_number():
    (command,) = DOCS["paper"].commands("sh")
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
    small = "--steps 4 --eval-steps 4 --save-steps 2 --vocab-size 340 --set d_model=32"
    small += " encoder_layers=1 decoder_layers=1 encoder_ffn_dim=64 decoder_ffn_dim=64"
    training, averaging = page.commands("sh")
    run(training, small)
    for files, _ in rows_below(page, "file |"):
        for file in re.findall(r"`(.+?)`", files):
            assert (folder / "runs/en-de" / file.replace("-N", "-4")).exists(), file
    results = json.loads((folder / "runs/en-de/results.json").read_text())
    assert {"valid", "test", "command", "commit", "hardware", "versions", "log"} <= set(results)
    assert results["averaged"] == ["checkpoint-2", "checkpoint-4"]
    run(training, f"{small} --resume")
    run(averaging)
    assert (folder / "runs/en-de-averaged/model.safetensors").exists()

    smaller = {"max_steps=8000": "max_steps=4", "save_steps=200": "save_steps=2"}
    smaller["d_model=256, dropout"] = "d_model=32, encoder_layers=1, decoder_layers=1, dropout"
    assert all(size in page.text for size in smaller)
    names = run_blocks(page, smaller=smaller)
    assert (names["scores"]["sentences"], names["trainer"].state.global_step) == (8, 4)
    assert (folder / "runs/mine-averaged/model.safetensors").exists()
    saved = AutoTokenizer.from_pretrained("runs/tokenizer")
    assert saved.decode(names["ids"], skip_special_tokens=True) == "naïve 北京"


def test_knobs_have_the_papers_figures():
    presets = VaswaniConfig.presets()
    rows = rows_below(DOCS["train"], "preset |")
    assert len(rows) == 7
    for name, _, bleu in rows:
        assert float(bleu) == presets[name.strip("`")]["bleu"]
    assert f"base has {presets['base']['bleu']})" in DOCS["train"].text


def recipe_of(name):
    return yaml.safe_load((ROOT / f"examples/recipes/{name}.yaml").read_text())


def test_settings_of_recipes_are_those_of_their_files():
    rows = {name: cells for name, *cells in rows_below(DOCS["train"], "recipe |")}
    assert rows.keys() == {path.stem for path in (ROOT / "examples/recipes").glob("*.yaml")}
    for name, cells in rows.items():
        recipe = recipe_of(name)
        if "model" in recipe:  # has the sizes of another
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


# from-fairseq.md

# What the codes "a b" make of "aba b" is "ab@@ a b".
PIECES = ["ab@@", "a@@", "b@@", "a", "b"]
LINES = ["ab@@ a b", "b ab@@ b a", "a", "a <unk> b"]


def old_model(folder, **extra):
    """The files of a fairseq model whose translations end; return the network."""
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
    """What fairseq-generate prints for lines that are cut."""
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
    (command,) = page.commands("sh")
    run(command)
    (folder / "generate.log").write_text(generate_log(network, folder))
    (folder / "more.tsv").write_text("aba b\tab a\nb\ta\n")
    assert "max_steps=1000" in page.text
    names = run_blocks(page, smaller={"max_steps=1000": "max_steps=2"})
    assert len(names["found"]) == len(LINES)
    assert names["trainer"].state.global_step == 2
    assert AutoTokenizer.from_pretrained("runs/more/target_tokenizer")("aba b")["input_ids"]
    paper = page.text[page.text.index("For the paper's search, pass `") :].split("`")[1]
    batch = names["tokenizer"](["aba b"], return_tensors="pt")
    assert names["model"].generate(**batch, **settings_of(paper)).shape[1] <= 1 + 4 + 50


def cut_by_sentencepiece(folder):
    """Train SentencePiece's model, write dictionaries of its pieces, and return cut lines."""
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
    (command,) = page.commands("sh")
    run(command.replace("--bpe-codes code", cut_by))
    (folder / "generate.log").write_text(generate_log(network, folder, lines))
    (scores, printed), (check, true), *_ = page.python()
    if cut_by == "--remove-bpe":
        check, changed = re.subn(r"lines = .*  # converted with --remove-bpe: ", "", check)
        assert changed == 1
    names = {}
    assert printed_by(scores, page.path.name, names) == printed
    assert printed_by(check, page.path.name, names) == true
    assert len(names["known"]) == len(names["found"]) - 1


def test_options_of_fairseq_generate_become_the_settings_beside_them(folder):
    network = Fairseq(OPTIONS | {"max_target_positions": 1024})
    rows = rows_below(DOCS["from-fairseq"], "fairseq-generate |")
    assert len(rows) == 7
    for flags, cell in rows:
        words = flags.replace("`", "").removesuffix(" alone").split("--")[1:]
        pairs = (f"{word} True".split()[:2] for word in words)
        options = {name.replace("-", "_"): ast.literal_eval(value) for name, value in pairs}
        cfg = {"model": network.options, "generation": options}
        path = checkpoint(folder / "a.pt", network, cfg=cfg)
        found = fairseq.load(path).model.generation_config
        settings = settings_of(re.search("`(.+?)`", cell)[1])
        if "nbest" in options:  # a question of the call
            assert settings == {"num_return_sequences": options["nbest"]}
        elif "alone" in flags:  # saved as max_length, which counts the start token
            assert settings["max_length_factor"] == 0
            assert found.max_length == settings["max_length_offset"] + 1
        else:
            assert {name: getattr(found, name) for name in settings} == settings


def test_refusals_are_quoted_as_they_come(folder, run):
    page = DOCS["from-fairseq"]
    (command,) = page.commands("sh")
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
        words = [f"{language}{number}" for number in range(SOURCE - 4)]
        dictionary(folder / f"dict.{language}.txt", words)
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
        quote
        for cell, _ in rows_below(page, "the message has")
        for quote in re.findall(r"`(.+?)`", cell)
    ]
    assert len(quoted) == 9
    for quote in quoted:
        assert any(quote in message for message in said), quote


# decode.md


def settings_of(text):
    """Keyword arguments as they are written in a call."""
    call = ast.parse(f"dict({text})", mode="eval").body
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_decoding_goes_as_printed(quickstart, run):
    page = DOCS["decode"]
    run_blocks(page)
    assert (quickstart / "attention.png").stat().st_size > 10_000
    (command,) = page.commands("sh")
    (quickstart / "source.txt").write_text("seven\nnine hundred and ninety-nine\n")
    run(command)
    lines = (quickstart / "translation.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ||| ")[0] for line in lines] == ["0", "0", "1", "1"]
    assert lines[0].startswith("0 ||| sieben ||| -")


def test_settings_of_a_fresh_model_are_those_listed(tiny_model):
    fresh = tiny_model().generation_config
    for name, value, _ in rows_below(DOCS["decode"], "setting |"):
        found = getattr(fresh, name.strip("`"))
        assert (1 if found is None else found) == ast.literal_eval(value.strip("`"))


def test_slower_calls_are_those_that_leave_the_fast_search():
    known = {name for call in FALLBACKS.values() for name in call}
    listed = {
        name.partition("=")[0]
        for _, what, test in rows_below(DOCS["decode"], "slower because")
        for name in re.findall(r"`(\w+(?:=\w+)?)`", what)
        if test == "`test_what_our_search_does_not_cover_runs_transformers_search`"
    }
    assert len(listed) == 9
    assert listed <= known


def test_rules_of_other_toolkits_are_what_converters_write_and_run_our_search(
    tmp_path, tiny_model, monkeypatch
):
    rules = {
        toolkit: settings_of(settings.strip("`"))
        for toolkit, settings, _ in rows_below(DOCS["decode"], "toolkit |")
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
    ours, theirs = page.commands("sh", containing="ctranslate2")
    run(ours)
    run(theirs)
    names = run_blocks(page, without="OnnxTranslator")
    for name in ("model.bin", "shared_vocabulary.json"):
        own, written = (quickstart / folder / name for folder in ("ct2-own", "ct2"))
        assert own.read_bytes() == written.read_bytes()
    assert names["translator"].model.dtype == torch.bfloat16
    assert names["engine"].compute_type == "int8_float32"


def test_the_command_to_onnx_is_understood(monkeypatch):
    (command,) = DOCS["deploy"].commands("sh", containing="onnx")
    toolkit, arguments = converter_call(command, monkeypatch)
    assert (toolkit, arguments["model"], arguments["output"]) == (
        "to-onnx",
        "runs/quickstart",
        "onnx/",
    )
    assert len(DOCS["deploy"].commands("sh")) == 3


@pytest.mark.slow
def test_onnx_translates_as_printed(quickstart, run):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="pip install 'vaswani[convert]'")
    page = DOCS["deploy"]
    (command,) = page.commands("sh", containing="onnx")
    run(command)
    (block,) = [block for block in page.python() if "OnnxTranslator" in block[0]]
    assert printed_by(block[0], page.path.name) == block[1]


def test_figures_come_from_their_results_file():
    page = DOCS["deploy"]
    results = json.loads((ROOT / "benchmarks/results/generation.json").read_text(encoding="utf-8"))
    speed = {
        (row["engine"], row["precision"], row["beams"], row["batch"]): row["sentences_per_second"]
        for row in results["speed"]
    }
    memory = [row for row in results["memory"] if (row["beams"], row["batch"]) == (4, 32)]
    expected = [
        [
            row["engine"],
            row["precision"],
            f"{row['weights_mb']:.0f}",
            f"{row['peak_mb']:.0f}",
            *(f"{speed[row['engine'], row['precision'], beams, 32]:.1f}" for beams in (1, 4)),
        ]
        for row in memory
    ]
    assert rows_below(page, "engine |") == expected
    gain = speed["ours", "bfloat16", 4, 32] / speed["ours", "bfloat16", 4, 1]
    assert f"{gain:.1f} times as fast as single sentences" in page.text
    bleu = {row["beams"]: row["bleu"] for row in results["speed"] if row["engine"] == "ours"}
    assert bleu[1] < bleu[4], "greedy search finds less"


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


# share.md


def test_a_model_is_shared_as_printed(quickstart, run, monkeypatch):
    page = DOCS["share"]
    code = "".join(code for code, _ in page.python())
    with LoopbackHub() as hub:
        finished = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(**hub.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        assert finished.stdout == "".join(printed or "" for _, printed in page.python())
        files = hub.files("user/number-words", "v1")
        assert not hub.unknown_requests
    assert {"README.md", "LICENSE-CODE", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert b"user/number-words" in files["README.md"]
    assert {name for name in files if name.endswith("_vaswani.py")} == {
        path.name for path in (quickstart / "runs/quickstart").glob("*_vaswani.py")
    }

    card, *training = page.commands("sh")
    run(card)
    once, always = (training_call(command, monkeypatch)[0] for command in training)
    assert (once.push_to_hub, once.license) == ("user/multi30k-tiny", "cc-by-4.0")
    train = importlib.import_module("train_translation")
    arguments = train.training_arguments(always, d_model=128)
    assert arguments.push_to_hub
    assert arguments.hub_strategy == "checkpoint"
    assert arguments.hub_private_repo
    for strategy, _ in rows_below(page, "`hub_strategy`"):
        assert type(arguments.hub_strategy)(strategy.strip("`"))
