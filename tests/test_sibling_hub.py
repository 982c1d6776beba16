"""Encoders and decoders on the Hub: pushed and pulled, with this package and without it."""

import json
from pathlib import Path

import pytest
import torch
from hub_clients import SENTENCES, ask, sibling_behaviour, sibling_publisher, sibling_stranger
from huggingface_hub import ModelCard

import vaswani
from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniTokenizer,
)

pytestmark = pytest.mark.slow
PACKAGE = Path(vaswani.__file__).parent.parent
ENCODER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
DECODER = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
CLASSES = {0: "calm", 1: "lively", 2: "neither"}
SIBLINGS = {
    "encoder": {"auto_class": "AutoModel", "task": "feature-extraction"},
    "masked": {"auto_class": "AutoModelForMaskedLM", "task": "fill-mask"},
    "classifier": {
        "auto_class": "AutoModelForSequenceClassification",
        "task": "text-classification",
    },
    "tagger": {"auto_class": "AutoModelForTokenClassification", "task": "token-classification"},
    "causal": {"auto_class": "AutoModelForCausalLM", "task": "text-generation"},
}


def small(model_class, size, **settings):
    sizes = DECODER if model_class is VaswaniForCausalLM else ENCODER
    # A random model with sharp attention, so that different inputs have different answers.
    settings = {"vocab_size": size, "norm_position": "pre", "init_std": 1.0, **sizes, **settings}
    config_class = VaswaniDecoderConfig if sizes is DECODER else VaswaniEncoderConfig
    return model_class(config_class(**settings)).eval()


@pytest.fixture(scope="module")
def originals():
    """Every sibling and its tokenizer, in memory."""
    torch.manual_seed(0)
    plain = VaswaniTokenizer.train_from_iterator(SENTENCES, vocab_size=300, show_progress=False)
    tokenizer = plain.for_masked_words()
    size = len(tokenizer)
    return {
        "encoder": (small(VaswaniEncoderModel, size), tokenizer),
        "masked": (small(VaswaniForMaskedLM, size), tokenizer),
        "classifier": (
            small(VaswaniForSequenceClassification, size, id2label=CLASSES, pooling="first"),
            tokenizer,
        ),
        "tagger": (small(VaswaniForTokenClassification, size, id2label=CLASSES), tokenizer),
        "causal": (small(VaswaniForCausalLM, size), tokenizer.for_language_model()),
    }


@pytest.fixture(scope="module")
def expected(originals):
    return {
        name: sibling_behaviour(*parts, SIBLINGS[name]["task"]) for name, parts in originals.items()
    }


@pytest.fixture(scope="module")
def published(hub, work, originals):
    for name, parts in originals.items():
        for part in parts:
            part.save_pretrained(work / "saved" / name)
    return ask(sibling_publisher, hub, work, PACKAGE, saved=str(work / "saved"), siblings=SIBLINGS)


@pytest.fixture(scope="module")
def found_by_stranger(hub, work, published):
    return ask(sibling_stranger, hub, work, siblings=SIBLINGS)


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_pull_with_the_package_needs_no_trust_and_behaves_as_the_original(
    published, expected, name
):
    assert published[name] == {"behaviour": expected[name], "packages": ["vaswani"]}


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("way", ["pulled", "pushed again"])
def test_a_pull_without_the_package_behaves_as_the_original(found_by_stranger, expected, way, name):
    facts = found_by_stranger[way][name]
    assert facts == {"behaviour": expected[name], "packages": ["transformers_modules"]}


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_pull_without_the_package_and_without_trust_is_refused(found_by_stranger, name):
    kind, text = found_by_stranger["untrusted"][name]
    assert kind == "ValueError"
    assert "trust_remote_code=True" in text


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_push_of_a_sibling_is_its_folder_with_a_card(hub, work, published, name):
    saved = {path.name: path.read_bytes() for path in (work / "saved" / name).iterdir()}
    files = dict(hub.files(f"siblings/{name}"))
    card = ModelCard(files.pop("README.md").decode())
    assert card.data.pipeline_tag == SIBLINGS[name]["task"]
    assert files.pop("LICENSE-CODE")
    # A tokenizer that was loaded notes from where, in transformers too.
    settings = [json.loads(place.pop("tokenizer_config.json")) for place in (files, saved)]
    assert settings[0].keys() - settings[1].keys() <= {"is_local", "local_files_only"}
    assert files == saved


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_push_from_pulled_classes_is_complete_and_points_to_itself(
    hub, work, found_by_stranger, name
):
    files = hub.files(f"again/{name}")
    saved = {path.name: path.read_bytes() for path in (work / "saved" / name).iterdir()}
    assert set(files) >= saved.keys()
    for file in saved:
        if file.endswith((".py", ".safetensors")):
            assert files[file] == saved[file]
    for file in ("config.json", "tokenizer_config.json"):
        assert b"--" not in files[file]


def test_the_loopback_hub_knew_every_request(hub, found_by_stranger):
    assert hub.unknown_requests == []
