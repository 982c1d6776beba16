"""Frozen encoders and decoders load with the same outputs (CHANGELOG.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from vaswani import VaswaniForConditionalGeneration

FROZEN = Path(__file__).parent / "frozen/siblings"
AUTO_CLASSES = {
    "encoder": AutoModel,
    "masked": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
    "tagger": AutoModelForTokenClassification,
    "causal": AutoModelForCausalLM,
}
# Other processors add float32 in another order, hence no test for equal bits.
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def frozen(name):
    model = AUTO_CLASSES[name].from_pretrained(FROZEN / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(FROZEN / name)
    texts = json.loads((FROZEN / name / "expected.json").read_text(encoding="utf-8"))
    return model, tokenizer, load_file(FROZEN / name / "expected.safetensors"), texts


def written_positions(batch):
    """The positions of the frozen outputs, which count padding on the left too."""
    width = batch["input_ids"].shape[1]
    return {"position_ids": torch.arange(width).expand(len(batch["input_ids"]), width)}


def test_every_sibling_has_a_frozen_checkpoint():
    assert {folder.name for folder in FROZEN.iterdir()} == AUTO_CLASSES.keys()


@pytest.mark.parametrize("name", AUTO_CLASSES)
@torch.no_grad()
def test_a_frozen_sibling_gives_the_same_ids_and_the_same_output(name):
    model, tokenizer, tensors, texts = frozen(name)
    batch = tokenizer(texts["sentences"], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], tensors["input_ids"])
    assert torch.equal(batch["attention_mask"], tensors["attention_mask"])
    if name == "causal":
        batch |= written_positions(batch)
    assert_close(model(**batch)[0], tensors["output"], **CLOSE)


@torch.no_grad()
def test_the_frozen_language_model_sees_a_prefix_in_both_directions_as_before():
    model, _, tensors, _ = frozen("causal")
    names = ("input_ids", "attention_mask", "prefix_mask")
    batch = {name: tensors[name] for name in names}
    logits = model(**batch, **written_positions(batch)).logits
    assert_close(logits, tensors["with_prefix"], **CLOSE)
    assert not torch.allclose(logits, tensors["output"], atol=0.1)


def test_the_frozen_language_model_writes_the_same_texts():
    model, tokenizer, tensors, texts = frozen("causal")
    prompts = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    greedy = model.generate(**prompts, max_new_tokens=30)
    search = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    beams = model.generate(**prompts, max_new_tokens=30, **search)
    assert torch.equal(greedy, tensors["greedy"])
    assert torch.equal(beams.sequences, tensors["beams"])
    assert_close(beams.sequences_scores, tensors["scores"], **CLOSE)
    for name, sequences in (("greedy", greedy), ("beams", beams.sequences)):
        assert tokenizer.batch_decode(sequences, skip_special_tokens=True) == texts[name]
    assert texts["greedy"][0] == "three hundred and forty-seven"


def test_the_frozen_siblings_know_what_they_were_trained_on():
    (best, *_) = pipeline("fill-mask", str(FROZEN / "masked"))("three h<mask>ndred")
    assert best["token_str"] == "u"
    answers = pipeline("text-classification", str(FROZEN / "classifier"))(["neunzehn", "nine"])
    assert [answer["label"] for answer in answers] == ["deu", "eng"]
    letters = pipeline("token-classification", str(FROZEN / "tagger"))("nine-four")
    assert "".join(letter["entity"][0] for letter in letters) == "cvcvocvvc"


def test_a_frozen_encoder_and_decoder_become_a_translation_model():
    model = VaswaniForConditionalGeneration.from_encoder_decoder_pretrained(
        FROZEN / "masked", FROZEN / "causal"
    )
    weights = load_file(FROZEN / "causal/model.safetensors")
    name = "decoder.layers.0.fc1.weight"
    assert torch.equal(model.state_dict()[f"model.{name}"], weights[f"model.{name}"])
