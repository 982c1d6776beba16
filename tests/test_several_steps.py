"""Several steps of a search in one kernel give the tokens and scores of single steps."""

import pytest
import torch
from compiled_models import SOURCE, compiled, model_with, translate
from vaswani.generation import search_vaswani, steps_vaswani

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM, VaswaniInt8Config

pytestmark = compiled
LONG = 40  # tokens; more than the kernel takes at once, and than the first room of the cache has


@pytest.fixture
def taken(monkeypatch):
    """The number of steps of each call of a kernel."""
    counts = []
    for name in ("several_beam_steps", "several_greedy_steps"):
        several = getattr(search_vaswani, name)

        def counted(*arguments, several=several):
            found = several(*arguments)
            counts.append(len(found[0]) - (several is steps_vaswani.several_greedy_steps))
            return found

        monkeypatch.setattr(search_vaswani, name, counted)
    return counts


def one_by_one(monkeypatch, run):
    """Run with single steps."""
    with monkeypatch.context() as patched:
        patched.setattr(steps_vaswani, "MOST_STEPS", 0)
        return run()


def ends_of(model, **call):
    """Tokens at which some sentences end early, and others later."""
    return translate(model, max_new_tokens=LONG, **call)[0][:, 4:].unique()[:3].tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("early_stopping", ["never", False, True])
@pytest.mark.parametrize("beams", [1, 2, 4])
def test_answers_are_those_of_single_steps(
    beams, early_stopping, threads, monkeypatch, taken, with_threads
):
    model = model_with()
    call = {"num_beams": beams, "early_stopping": early_stopping, "max_new_tokens": LONG}
    for ends in (None, ends_of(model, num_beams=beams)):

        def run(ends=ends):
            return with_threads(threads, lambda: translate(model, **call, eos_token_id=ends))

        taken.clear()
        found = run()
        assert sum(taken) > 3
        assert max(taken) <= steps_vaswani.MOST_STEPS
        assert all(map(torch.equal, found, one_by_one(monkeypatch, run)))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {"min_new_tokens": 6},
        {"forced_eos_token_id": 5},
        {"suppress_tokens": [7, 8]},
        {"max_new_tokens": 3},
    ],
    ids=str,
)
def test_rules_hold_as_in_single_steps(rules, beams, monkeypatch, taken):
    model = model_with()
    call = {"num_beams": beams, "max_new_tokens": 14, "eos_token_id": ends_of(model)[0], **rules}
    taken.clear()
    found = translate(model, **call)
    expected = one_by_one(monkeypatch, lambda: translate(model, **call))
    assert all(map(torch.equal, found, expected))
    if "min_new_tokens" in rules or "forced_eos_token_id" in rules:
        assert sum(taken) > 0, "the kernel takes the steps to which no rule applies"
    else:
        assert sum(taken) == 0 or rules == {"max_new_tokens": 3}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["int8", "learned positions", "language model"])
def test_other_models_answer_as_with_single_steps(kind, beams, monkeypatch, taken, tmp_path):
    if kind == "language model":
        config = VaswaniDecoderConfig(
            **{"vocab_size": 9000, "d_model": 32, "decoder_layers": 2},
            **{"decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        )
        model = VaswaniForCausalLM(config).eval()

        def run():
            return model.generate(SOURCE, num_beams=beams, max_new_tokens=LONG, do_sample=False)

    else:
        learned = {"position_encoding": "learned", "max_position_embeddings": 64}
        model = model_with(**(learned if kind == "learned positions" else {}))
        if kind == "int8":
            model.save_pretrained(tmp_path)
            model = type(model).from_pretrained(tmp_path, quantization_config=VaswaniInt8Config())

        def run():
            return translate(model, num_beams=beams, max_new_tokens=LONG)[0]

    found = run()
    assert sum(taken) > LONG // 2
    assert torch.equal(found, one_by_one(monkeypatch, run))


@pytest.mark.parametrize("beams", [1, 4])
def test_an_output_layer_may_be_larger_than_the_embedding(beams, monkeypatch, taken):
    model = model_with(tie_word_embeddings=False)
    larger = torch.nn.Linear(32, 9000 + 4096, bias=False)
    with torch.no_grad():
        larger.weight.fill_(0)
        larger.weight[:9000] = model.lm_head.weight
    model.lm_head = larger
    found = translate(model, num_beams=beams, max_new_tokens=LONG)
    assert sum(taken) > LONG // 2

    def run():
        return translate(model, num_beams=beams, max_new_tokens=LONG)

    assert all(map(torch.equal, found, one_by_one(monkeypatch, run)))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_token_without_an_entry_is_left_to_torch(beams, monkeypatch, taken):
    model = model_with()
    expected = translate(model, num_beams=beams, max_new_tokens=LONG)
    steps = sum(taken)
    taken.clear()
    prepare = steps_vaswani._Reader.__init__

    def with_few_entries(self, decoder, shape):
        prepare(self, decoder, shape)
        decoder.embedding.structure.entries = 4000

    monkeypatch.setattr(steps_vaswani._Reader, "__init__", with_few_entries)
    found = translate(model, num_beams=beams, max_new_tokens=LONG)
    assert all(map(torch.equal, found, expected))
    assert sum(taken) < steps


def test_nan_in_a_later_step_is_named(taken):
    model = model_with(position_encoding="learned", max_position_embeddings=64)
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[9:] = torch.nan
    with pytest.raises(ValueError, match="look for NaN"):
        translate(model, num_beams=4, max_new_tokens=LONG)
    assert not taken, "the kernel has met it"


def test_models_with_a_last_norm_take_single_steps(taken):
    translate(model_with(norm_position="pre"), num_beams=4)
    assert set(taken) == {0}
