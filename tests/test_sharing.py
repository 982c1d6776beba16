"""Saved and pushed models work elsewhere, with and without this package.

Three processes of `hub_clients` do the work: publisher, stranger, heir, in this order. The tests
check the facts that they report.
"""

import inspect
from pathlib import Path

import pytest
import torch
from hub_clients import SENTENCES, ask, behaviour, heir, load, parts_of, publisher, stranger
from loopback_hub import USER
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    MarianConfig,
    MarianMTModel,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

import vaswani
from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniGenerationConfig,
    VaswaniModel,
    VaswaniTokenizer,
)

PACKAGE = Path(vaswani.__file__).parent.parent
TRAVELLING_SUBPACKAGES = ("configuration", "tokenization", "generation", "modeling")
SUBPACKAGES = Path(inspect.getfile(VaswaniConfig)).parent.parent
CODE = {
    path.name: path
    for name in TRAVELLING_SUBPACKAGES
    for path in (SUBPACKAGES / name).glob("*_vaswani.py")
}
CONFIG_FILES = {"config.json", *CODE}
MODEL_FILES = {"model.safetensors", "generation_config.json", *CONFIG_FILES}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", *CODE}
CARD = {"README.md", "LICENSE-CODE"}

SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32,
}


@pytest.fixture(scope="module")
def original():
    """A model and its tokenizer in memory, with settings other than all defaults."""
    torch.manual_seed(0)
    tokenizer = VaswaniTokenizer.train_from_iterator(SENTENCES, vocab_size=300, show_progress=False)
    config = VaswaniConfig(vocab_size=len(tokenizer), norm_position="pre", **SIZES)
    translator = VaswaniForConditionalGeneration(config).eval()
    translator.generation_config.max_length_offset = 3
    return parts_of(translator, tokenizer)


@pytest.fixture(scope="module")
def expected(original):
    return behaviour(original)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    """The folder with model and tokenizer, next to a folder for each of the other saves."""
    folder = tmp_path_factory.mktemp("saved") / "both"
    original["translator"].save_pretrained(folder)
    original["tokenizer"].save_pretrained(folder)
    config = VaswaniConfig(vocab_size=len(original["tokenizer"]), norm_position="pre", **SIZES)
    config.save_pretrained(f"{folder}-config")
    original["tokenizer"].save_pretrained(f"{folder}-tokenizer")
    original["base"].save_pretrained(f"{folder}-base")
    encoder = VaswaniEncoderModel(config)
    encoder.encoder.load_state_dict(original["encoder"].state_dict())
    encoder.save_pretrained(f"{folder}-encoder")
    return folder


@pytest.fixture(scope="module")
def published(hub, saved, work):
    return ask(publisher, hub, work, PACKAGE, saved=str(saved))


@pytest.fixture(scope="module")
def found_by_stranger(hub, saved, work, published):
    return ask(stranger, hub, work, saved=str(saved))


@pytest.fixture(scope="module")
def found_by_heir(hub, saved, work, found_by_stranger):
    return ask(heir, hub, work, saved=str(saved))


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


# Registration


def test_the_auto_classes_know_the_model_type():
    config = AutoConfig.for_model("vaswani", vocab_size=11, **SIZES)
    assert type(config) is VaswaniConfig
    assert config.vocab_size == 11
    assert type(AutoModel.from_config(config)) is VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniForConditionalGeneration
    assert type(AutoModelForTextEncoding.from_config(config)) is VaswaniEncoderModel


def test_with_the_package_the_auto_classes_give_its_classes_without_trust(saved):
    loaded = load(saved)
    assert [type(part) for part in loaded.values()] == [
        VaswaniConfig,
        VaswaniModel,
        VaswaniForConditionalGeneration,
        VaswaniEncoderModel,
        VaswaniTokenizer,
    ]
    assert type(loaded["translator"].generation_config) is VaswaniGenerationConfig


def test_with_the_package_nothing_changes_by_saving_and_loading(saved, expected):
    assert behaviour(load(saved)) == expected


# Saved files


@pytest.mark.parametrize(
    ("suffix", "files"),
    [
        ("", MODEL_FILES | TOKENIZER_FILES),
        ("-config", CONFIG_FILES),
        ("-tokenizer", TOKENIZER_FILES),
        ("-base", MODEL_FILES - {"generation_config.json"}),
        ("-encoder", MODEL_FILES - {"generation_config.json"}),
    ],
)
def test_every_save_leaves_a_flat_folder_with_the_code(saved, suffix, files):
    assert names_in(f"{saved}{suffix}") == files


def test_the_code_that_travels_is_known():
    assert set(CODE) >= {
        "configuration_vaswani.py",
        "modeling_vaswani.py",
        "generation_vaswani.py",
        "scoring_vaswani.py",
        "tokenization_vaswani.py",
        "pipeline_vaswani.py",
    }


@pytest.mark.parametrize("name", CODE)
def test_code_is_saved_with_its_licence_and_unchanged_but_for_imports_across_subpackages(
    saved, name
):
    about, licence, blank, *flat = (saved / name).read_text(encoding="utf-8").splitlines()
    assert licence == "# SPDX-License-Identifier: Apache-2.0"
    assert about.startswith("# Part of vaswani")
    assert blank == ""
    source = CODE[name].read_text(encoding="utf-8").splitlines()
    for folder in TRAVELLING_SUBPACKAGES:
        source = [line.replace(f"from ..{folder}.", "from .") for line in source]
    assert flat == source
    assert not any(line.lstrip().startswith("from ..") for line in flat)


def outcome_of_save(part, path):
    try:
        return part.save_pretrained(path)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ["config", "translator", "tokenizer"])
def test_saving_over_a_file_fails_as_in_transformers_and_writes_nothing(original, tmp_path, kind):
    path = tmp_path / "file"
    path.write_text("kept")
    stock_config = MarianConfig(vocab_size=9, pad_token_id=0, **SIZES)
    stock = {
        "config": lambda: stock_config,
        "translator": lambda: MarianMTModel(stock_config),
        "tokenizer": lambda: TokenizersBackend(
            tokenizer_object=original["tokenizer"].backend_tokenizer
        ),
    }[kind]()
    assert outcome_of_save(original[kind], path) == outcome_of_save(stock, path)
    assert names_in(tmp_path) == {"file"}
    assert path.read_text() == "kept"


def test_a_config_that_transformers_refuses_to_save_leaves_no_folder(tmp_path):
    config = VaswaniConfig(**SIZES)
    config.num_beams = 4
    with pytest.raises(ValueError, match="generation parameters"):
        config.save_pretrained(tmp_path / "folder")
    assert names_in(tmp_path) == set()


# Folders in a process without the package


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_folder_alone_behaves_as_the_original_in_every_generation(
    found_by_stranger, expected, number
):
    facts = found_by_stranger[f"generation {number}"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.slow
def test_the_last_generation_behaves_as_the_original_in_a_process_that_saw_no_other(
    found_by_heir, expected
):
    facts = found_by_heir["generation 4"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 4])
def test_every_generation_has_the_same_files_and_the_same_code(
    saved, work, found_by_stranger, number
):
    generation = work / f"generation-{number}"
    assert names_in(generation) == names_in(saved)
    for name in CODE:
        assert (generation / name).read_bytes() == (saved / name).read_bytes()


@pytest.mark.slow
def test_a_config_alone_builds_every_model(found_by_heir):
    models = ["VaswaniModel", "VaswaniForConditionalGeneration", "VaswaniEncoderModel"]
    assert list(found_by_heir["config alone"].values()) == [models] * 3


@pytest.mark.slow
def test_a_tokenizer_alone_gives_the_same_ids(found_by_heir, expected):
    assert found_by_heir["tokenizer alone"] == expected["token ids"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["base", "encoder"])
def test_a_model_without_a_head_saved_alone_gives_the_same_states(found_by_heir, expected, part):
    assert found_by_heir[f"{part} alone"] == expected[part]


# The Hub


@pytest.mark.parametrize("way", ["pushed", "saved"])
@pytest.mark.parametrize(
    ("kind", "files"),
    [("config", CONFIG_FILES), ("model", MODEL_FILES), ("tokenizer", TOKENIZER_FILES)],
)
def test_every_push_is_complete(hub, published, way, kind, files):
    assert set(hub.files(f"{way}/{kind}")) - CARD == files


def test_a_config_pushed_without_repo_id_takes_the_name_of_its_folder(hub, published):
    assert set(hub.files(f"{USER}/named-by-folder")) - CARD == CONFIG_FILES


def test_what_is_pushed_is_what_is_saved(hub, saved, published):
    files = hub.files("pushed/model")
    for name in MODEL_FILES - {"config.json"}:
        assert files[name] == (saved / name).read_bytes()


@pytest.mark.parametrize("way", ["folder", "pushed", "saved"])
def test_loading_and_pulling_with_the_package_needs_no_trust(published, expected, way):
    facts = published[way]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["vaswani"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pushed", "saved"])
def test_a_pull_without_the_package_behaves_as_the_original(found_by_stranger, expected, way):
    facts = found_by_stranger[way]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.slow
def test_a_push_from_pulled_classes_is_complete_and_points_to_itself(hub, saved, found_by_heir):
    files = hub.files("pushed-again/both")
    assert set(files) - CARD == MODEL_FILES | TOKENIZER_FILES
    for name in CODE:
        assert files[name] == (saved / name).read_bytes()
    # "repository--module.Class" would load the code from the repository of the pull.
    for name in ("config.json", "tokenizer_config.json"):
        assert b"--" not in files[name]


@pytest.mark.slow
def test_a_push_from_pulled_classes_behaves_as_the_original(found_by_heir, expected):
    facts = found_by_heir["pushed again"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.slow
def test_the_loopback_hub_knew_every_request(hub, found_by_heir):
    assert hub.unknown_requests == []
