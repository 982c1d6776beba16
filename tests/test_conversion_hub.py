"""Converters accept Hub ids as well as folders.

A process of `hub_clients` runs all commands with the Hub of `loopback_hub`.
"""

from pathlib import Path

import pytest
import torch
import yaml
from hub_clients import ask, converter
from huggingface_hub.errors import LocalEntryNotFoundError
from loopback_hub import LoopbackHub
from safetensors.torch import load_file
from test_conversion_joeynmt import SOURCE_WORDS, SPECIALS, TARGET_WORDS, a_checkpoint, a_config
from transformers import AutoTokenizer, MarianConfig, MarianMTModel
from vaswani.conversion import ConversionError, find, reading

import vaswani
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

PACKAGE = Path(vaswani.__file__).parent.parent
SIZES = {"vocab_size": 9, "d_model": 8}
for _stack in ("encoder", "decoder"):
    SIZES |= {f"{_stack}_layers": 1, f"{_stack}_attention_heads": 2, f"{_stack}_ffn_dim": 8}
TOKENS = {"pad_token_id": 8, "eos_token_id": 0, "decoder_start_token_id": 8}
COMMANDS = {
    "a training of JoeyNMT": ["joeynmt", "user/joey", "out/joey"],
    "safetensors of Marian": ["marian", "user/marian", "out/marian", "--no-tokenizer"],
    "a pickle of Marian": ["marian", "user/pickled", "out/pickled", "--no-tokenizer"],
    "two vocabularies of ours": ["to-marian", "user/ours", "out/theirs"],
    "another model": ["to-marian", "user/marian", "out/refused"],
    "no model": ["marian", "user/nothing", "out/refused"],
}


def write_joeynmt(folder):
    config = a_config()
    folder.mkdir()
    words = {"src": [*SPECIALS, *SOURCE_WORDS], "trg": [*SPECIALS, *TARGET_WORDS]}
    for side, tokens in words.items():
        (folder / f"{side}_vocab.txt").write_text("\n".join(tokens), encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    state = {"model_state": a_checkpoint(config, *map(len, words.values()))}
    torch.save(state, folder / "best.ckpt")
    torch.save(state, folder / "10.ckpt")


def write_marian(folder):
    config = MarianConfig(**SIZES, **TOKENS, max_position_embeddings=16)
    model = MarianMTModel(config)
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "tf_model.h5").write_bytes(b"\0")


def write_ours(folder):
    config = VaswaniConfig(**SIZES, share_encoder_decoder_embeddings=False)
    VaswaniForConditionalGeneration(config).save_pretrained(folder)
    for letters, place in (("abcd", folder), ("ABCD", folder / "target_tokenizer")):
        VaswaniTokenizer.train_from_iterator(
            [letters], kind="char", vocab_size=9, show_progress=False
        ).save_pretrained(place)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder with all models, and the outputs of all commands in out/."""
    work = tmp_path_factory.mktemp("work")
    write_joeynmt(work / "joey")
    write_marian(work / "marian")
    write_ours(work / "ours")
    return work


@pytest.fixture(scope="module")
def facts(work):
    repositories = {
        name: {
            path.relative_to(work / name).as_posix(): path.read_bytes()
            for path in (work / name).rglob("*")
            if path.is_file()
        }
        for name in ("joey", "marian", "ours")
    }
    repositories["pickled"] = {
        name: content
        for name, content in repositories["marian"].items()
        if name != "model.safetensors"
    }
    with LoopbackHub() as hub:
        for name, files in repositories.items():
            hub.publish(f"user/{name}", files)
        return ask(converter, hub, work, PACKAGE, commands=COMMANDS)


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("a training of JoeyNMT", "joey"),
        ("safetensors of Marian", "marian"),
        ("a pickle of Marian", "marian"),
    ],
)
def test_an_id_on_the_hub_converts_as_its_folder_does(work, facts, command, folder):
    name, _, output, *options = COMMANDS[command]
    assert facts["refusals"][command] is None
    found = load_file(work / output / "model.safetensors")
    options = {"no_tokenizer": True} if options else {}
    expected = find(name).load(work / folder, **options).model.state_dict()
    assert found.keys() <= expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_only_the_files_of_one_format_are_downloaded(facts):
    vocabularies = {"config.yaml", "src_vocab.txt", "trg_vocab.txt"}
    assert set(facts["downloads"]["user/joey"]) == {*vocabularies, "best.ckpt"}
    settings = {"config.json", "generation_config.json"}
    assert set(facts["downloads"]["user/marian"]) == {*settings, "model.safetensors"}
    assert set(facts["downloads"]["user/pickled"]) == {*settings, "pytorch_model.bin"}


def test_both_tokenizers_of_a_model_on_the_hub_go_along(work, facts):
    assert facts["refusals"]["two vocabularies of ours"] is None
    for place, letters in ((".", "abcd"), ("target_tokenizer", "ABCD")):
        tokenizer = AutoTokenizer.from_pretrained(work / "out/theirs" / place)
        assert set(letters) <= set(tokenizer.get_vocab())


def test_models_that_cannot_be_converted_are_refused_in_one_sentence(work, facts):
    refused = {name: text for name, text in facts["refusals"].items() if text}
    assert refused.keys() == {"another model", "no model"}
    assert refused["another model"].endswith(
        "user/marian holds a model of type 'marian', but this conversion needs 'vaswani'."
    )
    assert refused["no model"].endswith(
        "user/nothing is neither a path here nor a model on the Hub that you can read."
    )
    assert not (work / "out/refused").exists()


def test_without_the_hub_the_error_says_so(monkeypatch):
    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("many lines\nof advice")

    monkeypatch.setattr(reading, "snapshot_download", unreachable)
    with pytest.raises(ConversionError, match=r"^user/one is not .*the Hub cannot be reached\.$"):
        find("marian").convert("user/one", "out")
