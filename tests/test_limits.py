"""Limits of lengths, and other settings of `generate`: defaults, saved and given in a call."""

import json
import math

import pytest
import torch
from networks import outputs_of
from transformers import GenerationConfig
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from vaswani.generation.limits_vaswani import length_limits

from vaswani import VaswaniForConditionalGeneration, VaswaniGenerationConfig


def test_a_fresh_model_decodes_as_the_paper_with_beams_left_to_the_caller(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    for defaults in (
        model.generation_config,
        reloaded.generation_config,
        VaswaniGenerationConfig.from_pretrained(tmp_path),
    ):
        assert defaults.length_penalty == 0.6
        assert defaults.length_penalty_type == "gnmt"
        assert defaults.early_stopping == "never"
        assert defaults.max_length_offset == 50
        assert defaults.num_beams in (None, 1)
        assert defaults.max_length is None
        assert defaults.max_new_tokens is None


def test_changed_generation_settings_survive_saving(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    changed = {
        "num_beams": 4,
        "length_penalty": 1.2,
        "length_penalty_type": "hf",
        "max_length_offset": 7,
        "early_stopping": True,
    }
    model.generation_config.update(**changed)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path).generation_config
    assert {name: getattr(reloaded, name) for name in changed} == changed


SEARCHES = [
    pytest.param({"num_beams": 1}, id="greedy"),
    pytest.param({"do_sample": True}, id="sampling"),
    pytest.param({"num_beams": 3}, id="beam"),
    pytest.param({"num_beams": 3, "do_sample": True}, id="beam-sampling"),
]


@pytest.mark.parametrize("search", SEARCHES)
def test_each_sentence_may_grow_to_its_own_source_length_plus_50(
    endless_model, padded_batch, search
):
    model = endless_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = -10.0  # nor does it say padding: either marks the end of a row
    source, mask = padded_batch([7, 2, 4], seed=1)
    sequences = model.generate(source, attention_mask=mask, **search)
    assert (sequences[:, 0] == 2).all()
    said = [sum(word not in (0, 2) for word in row) for row in sequences.tolist()]
    assert said == [7 + 50, 2 + 50, 4 + 50]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("as_config", [False, True])
@pytest.mark.parametrize(
    ("limit", "expected"), [({"max_new_tokens": 6}, 6), ({"max_length": 6}, 5)]
)
def test_a_limit_given_in_the_call_replaces_the_rule(
    endless_model, search, as_config, limit, expected
):
    """`max_length` counts the start token, as everywhere in transformers."""
    model = endless_model()
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 2]])
    if as_config:
        sequences = model.generate(source, generation_config=GenerationConfig(**limit, **search))
    else:
        sequences = model.generate(source, **limit, **search)
    assert sequences.shape == (2, 1 + expected)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_limit_left_in_the_models_config_does_not_cut(endless_model, search):
    """Seq2SeqTrainer writes max_length=20 into the config when it evaluates with generate."""
    model = endless_model()
    model.generation_config.max_length = 20
    assert model.generate(torch.tensor([[3, 4, 2]]), **search).shape[1] == 1 + 3 + 50


@pytest.mark.parametrize("search", SEARCHES)
def test_new_tokens_saved_in_the_models_config_replace_the_rule(endless_model, search):
    model, source = endless_model(), torch.tensor([[3, 4, 2]])
    model.generation_config.max_new_tokens = 6
    assert model.generate(source, **search).shape[1] == 1 + 6
    config = GenerationConfig(**search)
    assert model.generate(source, generation_config=config).shape[1] == 1 + 6
    assert model.generate(source, max_new_tokens=4, **search).shape[1] == 1 + 4
    assert model.generate(source, max_new_tokens=None, **search).shape[1] == 1 + 3 + 50
    assert model.generate(source, max_length_offset=8, **search).shape[1] == 1 + 3 + 8
    model.generation_config.max_length_offset = 9
    assert model.generate(source, max_length_factor=0, **search).shape[1] == 1 + 9


def test_max_length_offset_can_be_changed_and_switched_off(endless_model):
    model = endless_model()
    source = torch.tensor([[3, 4, 2]])
    assert model.generate(source, max_length_offset=4).shape[1] == 1 + 3 + 4
    model.generation_config.max_length_offset = 9
    assert model.generate(source).shape[1] == 1 + 3 + 9
    model.generation_config.max_length = 7
    assert model.generate(source, max_length_offset=0).shape[1] == 7


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("factor", "offset", "expected"),
    [
        (1.5, 0, [10, 3, 6]),  # 10.5, 3.0, 6.0
        (0.29, 2, [4, 2, 3]),  # 4.03, 2.58, 3.16
        (2, 5, [19, 9, 13]),
        (0, 6, [6, 6, 6]),
        (1, 0, [7, 2, 4]),
        (0.1, 0, [1, 1, 1]),  # an output has at least one token
    ],
)
def test_a_limit_is_factor_times_source_length_plus_offset_rounded_down(
    endless_model, padded_batch, search, factor, offset, expected
):
    model = endless_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = -10.0  # nor does it say padding: either marks the end of a row
    source, mask = padded_batch([7, 2, 4], seed=1)
    rule = {"max_length_factor": factor, "max_length_offset": offset}
    for call in (rule, {"generation_config": VaswaniGenerationConfig(**rule, **search)}):
        sequences = model.generate(source, attention_mask=mask, **{**search, **call})
        said = [sum(word not in (0, 2) for word in row) for row in sequences.tolist()]
        assert said == expected


@pytest.mark.parametrize("mask", [torch.ones(1, 301).bfloat16(), 3 * torch.ones(1, 301).long()])
def test_a_limit_counts_tokens_whatever_the_values_of_the_mask(endless_model, mask):
    model = endless_model()
    source = torch.full((1, 301), 3)
    limited = {"max_length_factor": 0.1, "max_length_offset": 1, "num_beams": 1}
    assert model.generate(source, attention_mask=mask, **limited).shape == (1, 1 + 30 + 1)


def test_a_limit_is_computed_in_float64_whatever_the_length():
    lengths = torch.tensor([1, 100, 2**24 + 1])
    # 0.29 * 100 is 28.999999999999996 in float64, and 29.0 in float32.
    assert length_limits(lengths, 0.29, 0).tolist() == [1, 28, int(0.29 * (2**24 + 1))]
    assert length_limits(lengths, 1.0, 50).tolist() == [51, 150, 2**24 + 51]


def test_max_length_factor_is_saved_and_a_folder_without_it_has_the_papers_limit(
    endless_model, tmp_path
):
    model = endless_model()
    source = torch.tensor([[3, 4, 5, 2]])
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    saved = json.loads(file.read_text())
    saved.pop("max_length_factor")
    file.write_text(json.dumps(saved))
    older = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=model.dtype)
    assert older.generate(source).shape[1] == 1 + 4 + 50
    model.generation_config.update(max_length_factor=1.2, max_length_offset=3)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=model.dtype)
    assert reloaded.generate(source).shape[1] == 1 + 7  # 1.2 * 4 + 3 is 7.8
    assert reloaded.generate(source, max_length_factor=2).shape[1] == 1 + 2 * 4 + 3
    assert reloaded.generate(source, max_new_tokens=5).shape[1] == 1 + 5
    # Both at 0 leave the limit to max_length.
    off = {"max_length_factor": 0, "max_length_offset": 0}
    reloaded.generation_config.max_length = 6
    assert reloaded.generate(source, **off).shape[1] == 6


def test_a_plain_generation_config_in_the_call_inherits_the_papers_settings(lively_model):
    found = []
    for seed in range(4):
        model = lively_model(seed=seed)
        source = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 2]])
        config = GenerationConfig(num_beams=4, length_penalty=2.0, max_new_tokens=8)
        keywords = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 8}
        expected = model.generate(source, **keywords)
        assert torch.equal(model.generate(source, generation_config=config), expected)
        hf = model.generate(source, **keywords, length_penalty_type="hf")
        found.append(outputs_of(hf) == outputs_of(expected))
    assert not all(found), (
        "the two penalties must differ somewhere for the comparison to mean anything"
    )


def test_a_plain_generation_config_without_beams_is_no_reason_to_warn(lively_model):
    logging.get_logger("transformers").warning_once.cache_clear()
    with CaptureLogger(logging.get_logger("transformers")) as log:
        lively_model().generate(
            torch.tensor([[3, 4, 2]]), generation_config=GenerationConfig(max_new_tokens=2)
        )
    assert log.out == ""


def test_eos_token_id_none_never_ends_a_sentence(tiny_model):
    """None switches the end of sentence off for one call, as everywhere in transformers."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():  # the model writes only end tokens
        model.model.decoder.layers[-1].final_layer_norm.bias[0] = 100.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[2, 0] = 10.0
    source = torch.tensor([[3, 4, 2]])
    assert model.generate(source).tolist() == [[2, 2]]
    assert model.generate(source, eos_token_id=None, max_new_tokens=5).tolist() == [[2] * 6]
    assert model.generate(source).tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"length_penalty_type": "google"}, r"length_penalty_type.*gnmt.*hf.*'google'"),
        ({"max_length_offset": -1}, r"max_length_offset.*-1"),
        ({"max_length_offset": 2.5}, r"max_length_offset.*2\.5"),
        ({"max_length_offset": True}, r"max_length_offset.*True"),
        ({"max_length_factor": -0.5}, r"max_length_factor.*-0\.5"),
        ({"max_length_factor": math.nan}, r"max_length_factor.*nan"),
        ({"max_length_factor": math.inf}, r"max_length_factor.*inf"),
        ({"max_length_factor": "2"}, r"max_length_factor.*'2'"),
        ({"max_length_factor": True}, r"max_length_factor.*True"),
    ],
)
def test_generation_settings_without_meaning_are_refused(tiny_model, setting, message):
    with pytest.raises(ValueError, match=message):
        VaswaniGenerationConfig(**setting)
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(torch.tensor([[3, 4, 2]]), num_beams=2, **setting)
