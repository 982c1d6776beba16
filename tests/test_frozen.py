"""Checkpoints of earlier versions load with the same logits and beam output (CHANGELOG.md)."""

import json
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani

FROZEN = sorted(path.parent for path in Path(__file__).parent.glob("frozen/*/config.json"))


@pytest.fixture(params=FROZEN, ids=lambda folder: folder.name)
def frozen(request):
    folder = request.param
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return model, tokenizer, load_file(folder / "expected.safetensors"), expected


def test_every_released_minor_version_has_a_frozen_checkpoint():
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    released = set(re.findall(r"^## (\d+\.\d+)\.\d+$", changelog, re.M))
    assert released == {folder.name for folder in FROZEN}
    version = Version(vaswani.__version__)
    assert (f"{version.major}.{version.minor}" in released) != version.is_devrelease


def test_frozen_tokenizer_gives_the_same_ids(frozen):
    _, tokenizer, tensors, expected = frozen
    batch = tokenizer(expected["sentences"], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], tensors["input_ids"])
    assert torch.equal(batch["attention_mask"], tensors["attention_mask"])


def test_frozen_model_gives_the_same_logits(frozen):
    model, _, tensors, _ = frozen
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        logits = model(**inputs).logits
    # Processors add float32 numbers in different orders, so bits may differ.
    torch.testing.assert_close(logits, tensors["logits"], atol=2e-5, rtol=1e-5)


def test_frozen_model_gives_the_same_beams(frozen):
    model, tokenizer, tensors, expected = frozen
    beams = model.generate(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert torch.equal(beams.sequences, tensors["sequences"])
    torch.testing.assert_close(
        beams.sequences_scores, tensors["sequences_scores"], atol=2e-5, rtol=1e-5
    )
    assert tokenizer.batch_decode(beams.sequences, skip_special_tokens=True) == expected["beams"]


def test_frozen_model_translates_what_it_was_trained_on(frozen):
    model, tokenizer, _, _ = frozen
    batch = tokenizer("three hundred and forty-two", return_tensors="pt")
    (translation,) = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    assert translation == "dreihundertzweiundvierzig"
