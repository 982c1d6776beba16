"""Wrong paths and models of other toolkits are reported at once, with the command that helps."""

import json
import shlex
import shutil
import socket
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq_models import OPTIONS, SOURCE, TARGET, Fairseq, checkpoint, dictionary
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from test_conversion_joeynmt import SPECIALS
from test_conversion_opennmt import some_options, some_weights
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    MarianConfig,
    MarianMTModel,
    pipeline,
)
from vaswani.commands.main import main
from vaswani.commands.train import make_parser, recipe_of
from vaswani.configuration.places_vaswani import check_model_type, check_path, check_toolkit
from vaswani.demo.translator import Translator

from vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    VaswaniModel,
    VaswaniTokenizer,
    VaswaniTranslationPipeline,
)

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"


class Answer:
    """A reply of the Hub."""

    status_code, headers, request, url = 401, {}, None, ""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def looked_up(monkeypatch):
    """The hosts that were looked up. No host has an address."""
    hosts = []

    def getaddrinfo(host, *args, **kwargs):
        hosts.append(host)
        raise socket.gaierror(f"{host} is not to be asked")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return hosts


def ends_with(*words):
    """Return the error of a command of `vaswani`."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return str(end.value)


def fairseq_model(folder):
    folder.mkdir()
    for side, size in (("SOURCE", SOURCE), ("TARGET", TARGET)):
        words = [f"{side}{number}" for number in range(size - 4)]
        dictionary(folder / f"dict.{side}.txt", words)
    checkpoint(folder / "checkpoint_last.pt", Fairseq(OPTIONS))
    return checkpoint(folder / "checkpoint_best.pt", Fairseq(OPTIONS))


def opennmt_model(folder):
    folder.mkdir()
    options = some_options()
    tensors, head = some_weights(options)
    words = {"src": ["<blank>", "a"], "tgt": ["<blank>", "b"]}
    content = {"model": tensors, "generator": head, "vocab": words, "opt": Namespace(**options)}
    torch.save({**content, "optim": {}}, folder / "model_step_7.pt")
    return folder / "model_step_7.pt"


def joeynmt_model(folder):
    folder.mkdir()
    (folder / "config.yaml").write_text("name: tiny\n")
    (folder / "src_vocab.txt").write_text("".join(f"{token}\n" for token in SPECIALS))
    state = {"steps": 7, "best_ckpt_score": 3.5, "model_state": {}, "optimizer_state": {}}
    torch.save(state, folder / "best.ckpt")
    return folder / "best.ckpt"


def marian_model(folder):
    folder.mkdir()
    (folder / "decoder.yml").write_text("models: [opus.npz]\n")
    with zipfile.ZipFile(folder / "opus.npz", "w") as archive:
        archive.writestr("special:model.yml.npy", b"")
    return folder / "opus.npz"


MODELS = {
    "fairseq": (fairseq_model, "fairseq"),
    "OpenNMT-py": (opennmt_model, "opennmt"),
    "JoeyNMT": (joeynmt_model, "joeynmt"),
    "Marian": (marian_model, "marian"),
}


@pytest.mark.parametrize("toolkit", MODELS)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_and_folders_of_other_toolkits_name_their_converter(folder, toolkit, zipped):
    make, converter = MODELS[toolkit]
    file = make(Path("old models"))
    if not zipped:
        if file.suffix == ".npz":
            return
        state = torch.load(file, weights_only=False)
        torch.save(state, file, _use_new_zipfile_serialization=False)
    places = [file, file.parent]
    for place in places:
        with pytest.raises(OSError, match=f"old models.* holds a model of {toolkit}") as error:
            check_toolkit(place)
        said = str(error.value)
        assert f"vaswani convert {converter} '" in said
        if toolkit == "JoeyNMT" and place == file.parent:
            assert said.endswith("joeynmt 'old models' OUTPUT")
        elif toolkit == "Marian":
            assert said.endswith("marian 'old models' OUTPUT")
        else:
            assert f"'{file}'" in said
        assert "\n" not in said


def test_the_command_for_a_fairseq_model_converts_it(folder):
    file = fairseq_model(Path("old"))
    with pytest.raises(OSError, match="checkpoint_best") as error:
        VaswaniForConditionalGeneration.from_pretrained("old")
    command = str(error.value).partition("load OUTPUT instead: ")[2]
    vaswani, *words = shlex.split(command)
    assert (vaswani, words[0], words[2]) == ("vaswani", "convert", str(file))
    main(words)
    assert isinstance(
        AutoModelForSeq2SeqLM.from_pretrained("OUTPUT"), VaswaniForConditionalGeneration
    )
    assert AutoTokenizer.from_pretrained("OUTPUT")("SOURCE0")["input_ids"] == [4, 2]


def test_the_command_for_a_marian_model_converts_it(folder):
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    tokens = {"pad_token_id": 4, "eos_token_id": 0, "decoder_start_token_id": 4}
    config = MarianConfig(vocab_size=5, d_model=8, max_position_embeddings=16, **sizes, **tokens)
    MarianMTModel(config).save_pretrained("opus")
    for load in (VaswaniForConditionalGeneration, VaswaniModel, VaswaniConfig):
        with pytest.raises(OSError, match="opus holds a model of Marian") as error:
            load.from_pretrained("opus")
    command = str(error.value).partition("load OUTPUT instead: ")[2]
    assert command == "vaswani convert marian opus OUTPUT"
    main([*shlex.split(command)[1:], "--no-tokenizer"])
    assert AutoModelForSeq2SeqLM.from_pretrained("OUTPUT").config.model_type == "vaswani"
    with pytest.raises(OSError, match="vaswani convert marian opus OUTPUT"):
        VaswaniTranslationPipeline(MarianMTModel.from_pretrained("opus"), tokenizer=object())


def test_a_marian_model_of_the_hub_is_converted_by_its_id(folder):
    with pytest.raises(OSError, match="Marian") as error:
        check_model_type("Helsinki-NLP/opus-mt-en-de", "marian", "vaswani")
    assert str(error.value).endswith("vaswani convert marian Helsinki-NLP/opus-mt-en-de OUTPUT")


def test_another_architecture_is_named(folder):
    BartConfig().save_pretrained("bart")
    with pytest.raises(OSError, match=r"bart holds a model of type 'bart'.*AutoModelForSeq2SeqLM"):
        VaswaniForConditionalGeneration.from_pretrained("bart")


@pytest.mark.parametrize("kind", ["fairseq", "marian"])
@pytest.mark.parametrize("name", ["translate", "train", "demo"])
def test_commands_name_the_converter_in_one_sentence(folder, name, kind):
    if kind == "fairseq":
        fairseq_model(Path("old"))
    else:
        MarianConfig().save_pretrained("old")
    Path("text.tsv").write_text("a\tb\n")
    if name == "demo":
        with pytest.raises((OSError, SystemExit)) as end:
            Translator("old")
        said = str(end.value)
    elif name == "translate":
        said = ends_with(name, "old", "text.tsv")
    else:
        said = ends_with(name, "--model", "old", "--train", "text.tsv", "--output", "new")
    assert f"vaswani convert {kind} old" in said
    assert "\n" not in said
    assert not Path("new").exists()


def test_own_folders_and_other_files_are_not_taken_for_another_toolkits(folder):
    check_toolkit(FROZEN)
    check_toolkit(FROZEN / "config.json")
    Path("run").mkdir()
    torch.save({"state": {}, "param_groups": []}, "run/optimizer.pt")
    torch.save({"model_state_dict": {}, "epoch": 3}, "run/mine.pt")
    Path("run/notes.txt").write_text("encoder_embed_dim")
    Path("run/empty.pt").touch()
    for place in ("run", *Path("run").iterdir(), "someone/model"):
        check_toolkit(place)


# Paths


@pytest.mark.parametrize(
    "place",
    [
        *("runs/en-dee", "./model", "../model", "/models/en-de", "~/model", "runs/", "a/b/c"),
        *("model.pt", "runs/en-de/model.npz", "modle"),
    ],
)
def test_a_mistyped_path_is_an_error_before_the_hub_is_asked(folder, looked_up, place):
    Path("runs/en-de").mkdir(parents=True)
    Path("runs/de-en").mkdir()
    if place == "runs/":
        Path("runs/en-de").rename("en-de")
        Path("runs/de-en").rmdir()
        Path("runs").rmdir()
    for load in (VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer):
        with pytest.raises(FileNotFoundError, match=f"There is no file or folder {place}") as error:
            load.from_pretrained(place)
        # The name could be on the Hub. huggingface_hub looks up one more host.
        assert len(looked_up) <= (2 if place in ("runs/en-dee", "modle") else 0)
        looked_up.clear()
    if place == "runs/en-dee":
        assert str(error.value).endswith("did you mean runs/en-de?")


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate", "runs/en-dee", "text.tsv"],
        ["train", "--model", "runs/en-dee", "--train", "text.tsv", "--output", "new"],
        ["train", "--tokenizer", "runs/en-dee", "--train", "text.tsv", "--output", "n"],
        ["train", "--train", "runs/en-dee", "--output", "new"],
    ],
)
def test_commands_end_at_once_at_a_mistyped_path(folder, looked_up, arguments):
    Path("runs/en-de").mkdir(parents=True)
    Path("text.tsv").write_text("a\tb\n")
    said = ends_with(*arguments)
    assert "There is no file or folder runs/en-dee, and the Hub does not answer" in said
    assert said.endswith("; did you mean runs/en-de?")
    assert len(looked_up) <= 2


def test_a_file_of_a_model_is_not_its_folder(folder):
    VaswaniConfig().save_pretrained("runs/en-de")
    Path("text.tsv").write_text("a\tb\n")
    file = "runs/en-de/config.json"
    for arguments in (
        ["translate", file, "text.tsv"],
        ["score", file, "text.tsv", "text.tsv"],
        ["train", "--model", file, "--train", "text.tsv", "--output", "new"],
    ):
        said = ends_with(*arguments)
        assert said.endswith(f"{file} is a file: name the folder of the model, such as runs/en-de")


def test_a_folder_without_a_tokenizer_is_refused_before_data_are_read(folder):
    Path("empty").mkdir()
    Path("text.tsv").write_text("a\tb\n")
    said = ends_with("train", "--tokenizer", "empty", "--train", "text.tsv", "--output", "new")
    assert said.endswith("--tokenizer empty holds no tokenizer: it has no tokenizer_config.json")


def test_outputs_below_a_file_are_refused(folder):
    Path("text").write_text("a\n")
    for name in ("last", "second"):
        shutil.copytree(FROZEN, name)
    said = ends_with("average", "second", "last", "--output", "text/new/averaged")
    assert said.endswith(f"{folder / 'text'} is a file.")


def test_converters_end_at_once_at_a_mistyped_path(folder, looked_up):
    Path("runs").mkdir()
    for converter in ("to-torch", "to-onnx", "to-marian", "to-ctranslate2"):
        with pytest.raises(SystemExit, match="There is no file or folder runs/en-dee"):
            main(["convert", converter, "runs/en-dee", "out"])
        assert len(looked_up) <= 2
        looked_up.clear()


def test_converters_of_files_name_those_of_a_folder(folder):
    fairseq_model(Path("old"))
    with pytest.raises(SystemExit) as end:
        main(["convert", "fairseq", "old", "out"])
    files = r"(checkpoint_best.pt, checkpoint_last.pt)"
    assert str(end.value).endswith(f"old is a folder: name a checkpoint in it {files}.")


def test_names_that_may_be_on_the_hub_and_paths_that_exist_pass(folder):
    Path("runs/en-de").mkdir(parents=True)
    for place in ("someone/model", "runs/en-de", "./runs/en-de", FROZEN, "runs"):
        check_path(place)


def test_a_name_on_the_hub_passes_where_a_folder_has_the_name_of_its_user(folder, monkeypatch):
    Path("someone/model-a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="did you mean someone/model-a"):
        check_path("someone/model-b")  # there is no network
    snapshot = Path("cache/models--someone--model-b/snapshots/0")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    check_path("someone/model-b", cache_dir="cache")
    for answer in (None, RepositoryNotFoundError("401", response=Answer())):
        asked = []

        def model_info(self, name, timeout, answer=answer, asked=asked):
            asked.append(name)
            if answer:
                raise answer

        monkeypatch.setattr(HfApi, "model_info", model_info)
        check_path("someone/model-b")
        assert asked == ["someone/model-b"]


def test_a_file_that_is_there_is_not_said_to_be_missing(folder, looked_up):
    for name, fault in (
        ("pairs.txt", " is one file, but neither .tsv"),
        ("pairs.csv", ": CSV fil"),
    ):
        Path(name).write_text("a,b\n")
        said = ends_with("train", "--train", name, "--output", "new")
        assert said.startswith(f"vaswani train: {name}{fault}")
    Path("corpus").mkdir()
    said = ends_with("train", "--train", "corpus", "--output", "new")
    assert said.startswith(
        "vaswani train: corpus is a folder here, but no data set that can be loaded"
    )
    assert not looked_up


# Options without effect


@pytest.mark.parametrize("end", ["", ".gz", ".zst", "=2", ".gz=0.5", "=1e1", "=2."])
@pytest.mark.parametrize("option", ["valid", "test"])
def test_swapped_sides_are_warned_of_by_their_endings(folder, capsys, option, end):
    train = make_parser()
    given = ["--train", "a.en", f"a.de{end}", "--output", "new", f"--{option}"]
    train.parse_args([*given, f"v.en{end}", "v.de"])
    assert not capsys.readouterr().err
    train.parse_args([*given, "v.de", f"v.en{end}"])
    said = capsys.readouterr().err
    assert f"--{option} v.de v.en{end} has .de as its source, but --train has .en" in said
    assert said.count("\n") == 1
    for files in (["a.tsv"], ["a", "b"]):  # no endings to compare with
        train.parse_args(["--train", *files, "--output", "new", f"--{option}", "v.de", "v.en"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("given", ["--vocab-size=99", "--tokenizer-kind=bpe", "--space-after"])
def test_vocabulary_settings_beside_a_model_are_warned_of(folder, capsys, given):
    train = make_parser()
    others = ["--train", "a.en", "a.de", "--output", "new"]
    train.parse_args([*others, given])
    assert not capsys.readouterr().err
    for owner in ("model", "tokenizer"):
        train.parse_args([*others, given, f"--{owner}", "runs/old"])
        name = given.partition("=")[0]
        said = capsys.readouterr().err
        assert f"{name} has no effect, because --{owner} runs/old has its own vocabulary" in said
    train.parse_args([*others, "--model", "runs/old", "--preset=big"])
    assert "--model runs/old has its own sizes" in capsys.readouterr().err


@pytest.mark.parametrize("data", [["pairs.tsv"], ["a.en", "a.de"]])
def test_columns_without_effect_are_warned_of(folder, capsys, data):
    for name in data:
        Path(name).write_text("a\tb\n")
    given = ["--output", "new", "--columns", "fr", "cs"]
    make_parser().parse_args(["--train", *data, *given])
    assert "--columns has no effect, because text and TSV files" in capsys.readouterr().err
    make_parser().parse_args(["--train", *data, "--valid", "v.jsonl", *given])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("option", ["--train", "--valid", "--test"])
def test_data_that_would_replace_other_data_are_refused(folder, capsys, option):
    given = ["--train", "a.tsv", "--output", "new", "--valid", "b.tsv", "--test", "c.tsv"]
    with pytest.raises(SystemExit):
        make_parser().parse_args([*given, option, "d.tsv"])
    assert f"give {option} only once, with all data after it" in capsys.readouterr().err


def test_a_preset_beside_the_sizes_of_a_recipe_is_warned_of(folder, capsys):
    recipe = str(ROOT / "examples" / "recipes" / "multi30k-tiny.yaml")
    given = ["--recipe", recipe, "--train", "a.en", "a.de", "--output", "new"]
    make_parser().parse_args(given)
    assert not capsys.readouterr().err
    make_parser().parse_args([*given, "--preset", "big"])
    assert "--preset leaves d_model, encoder_layers, " in capsys.readouterr().err


def test_a_preset_beside_a_model_sets_nothing(folder):
    given = ["--train", "a.en", "a.de", "--output", "new", "--model", "runs/old"]
    plain, with_preset = (
        vars(make_parser().parse_args([*given, *more])) for more in ([], ["--preset", "tiny"])
    )
    assert {name for name in plain if plain[name] != with_preset[name]} == {"preset"}


def test_a_run_that_ends_inside_its_warm_up_is_warned_of_at_once(folder, capsys):
    given = ["--train", "a.en", "a.de", "--output", "new", "--warmup", "100"]
    make_parser().parse_args([*given, "--steps", "101"])
    assert not capsys.readouterr().err
    make_parser().parse_args([*given, "--steps", "50"])
    assert "--steps 50 ends inside the warm-up of 100 updates: set --warmup 5," in (
        capsys.readouterr().err
    )


def test_a_wrong_preset_or_choice_is_refused_with_the_nearest(folder, capsys):
    for name in ("a.en", "a.de"):
        Path(name).write_text("a\n")
    said = ends_with("train", "--train", "a.en", "a.de", "--output", "new", "--preset", "tinny")
    assert "--preset: 'tinny' is unknown: did you mean 'tiny'? The presets are tiny," in said
    with pytest.raises(SystemExit):
        main(["convert", "fairsec", "a", "b"])
    assert "did you mean fairseq?" in capsys.readouterr().err


def test_a_recipe_that_repeats_a_fine_tuning_run_warns_of_nothing(folder, capsys):
    train = make_parser()
    args = train.parse_args(["--train", "a.en", "a.de", "--output", "new", "--model", "runs/old"])
    Path("recipe.yaml").write_text(recipe_of(args))
    assert "vocab-size" in Path("recipe.yaml").read_text()
    train.parse_args(["--recipe", "recipe.yaml"])
    assert not capsys.readouterr().err


def test_a_model_without_model_type_is_left_to_transformers(folder):
    AutoModelForSeq2SeqLM.from_pretrained(FROZEN).save_pretrained("model")
    config = json.loads(Path("model/config.json").read_text())
    del config["model_type"]
    Path("model/config.json").write_text(json.dumps(config))
    assert VaswaniForConditionalGeneration.from_pretrained("model").config.d_model > 0


def test_the_pipeline_of_transformers_still_finds_this_packages_models(folder):
    found = pipeline("translation", model=str(FROZEN), pipeline_class=VaswaniTranslationPipeline)
    assert found("seven")[0]["translation_text"]
