"""Calls that the fast search covers, and calls that run transformers' search."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MaxTimeCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vaswani.generation.coverage_vaswani import NotCovered, token_rules
from vaswani.generation.int8_vaswani import Int8Embedding, Int8Linear
from vaswani.modeling.attention_vaswani import VaswaniAttention
from vaswani.modeling.modeling_vaswani import VaswaniDecoderLayer
from vaswani.modeling.quantization_vaswani import VaswaniInt8Quantizer

from vaswani import VaswaniForConditionalGeneration, VaswaniInt8Config


def allow_all(batch, tokens):
    return list(range(19))


def empty_cache(model):
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


FALLBACKS = {
    "scores": {"output_scores": True},
    "logits": {"output_logits": True},
    "attentions": {"output_attentions": True},
    "hidden states": {"output_hidden_states": True},
    "a cache": {"past_key_values": empty_cache},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "n-grams": {"no_repeat_ngram_size": 200},
    "bad words": {"bad_words_ids": [[18, 18, 18, 18, 18]]},
    "allowed tokens": {"prefix_allowed_tokens_fn": allow_all},
    "two last tokens": {"forced_eos_token_id": [2, 5], "max_length": 60},
    "processor": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(1.0)])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e9)])},
    "target mask": {"decoder_attention_mask": torch.ones(4, 1, dtype=torch.long)},
}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("why", FALLBACKS)
def test_what_our_search_does_not_cover_runs_transformers_search(
    tiny_model, source, searches, num_beams, why
):
    model = tiny_model(seed=1)
    expected = model.generate(**source, num_beams=num_beams)
    own = "beam_search" if num_beams > 1 else "greedy_search"
    fallback = "_beam_search" if num_beams > 1 else "_sample"
    assert (searches[own], searches[fallback]) == (1, 0)
    kwargs = {
        name: value(model) if value is empty_cache else value
        for name, value in FALLBACKS[why].items()
    }
    output = model.generate(**source, num_beams=num_beams, return_dict_in_generate=True, **kwargs)
    assert (searches[own], searches[fallback]) == (1, 1)
    if "last token" not in why:
        assert torch.equal(output.sequences, expected)


def test_a_last_token_that_is_banned_is_left_to_transformers():
    processors = [SuppressTokensLogitsProcessor([18]), ForcedEOSTokenLogitsProcessor(60, 18)]
    config = GenerationConfig(max_length=60)
    assert token_rules(processors[1:], 1, config).forced_last == 18
    with pytest.raises(NotCovered, match="a last token that is forced and banned"):
        token_rules(processors, 1, config)
    with pytest.raises(NotCovered, match=r"forced_eos_token_id with .* a limit of its own"):
        token_rules([ForcedEOSTokenLogitsProcessor(61, 18)], 1, config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"output_scores": True, "use_cache": False}, "use_cache=False, output_scores"),
        ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor"),
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids of several tokens"),
        ({"max_time": 1e9}, "MaxTimeCriteria"),
        ({"do_sample": True, "num_beams": 2}, "do_sample with beams"),
    ],
)
def test_the_log_says_why_transformers_search_runs(tiny_model, source, caplog, settings, reason):
    caplog.set_level("INFO")
    model = tiny_model()
    model.generate(**source, max_new_tokens=2)
    assert "The fast search does not cover" not in caplog.text
    model.generate(**source, max_new_tokens=2, **settings)
    assert f"The fast search does not cover: {reason}." in caplog.text


@pytest.mark.parametrize("num_beams", [1, 3])
def test_processes_in_step_run_transformers_search(tiny_model, source, searches, num_beams):
    with pytest.raises(ValueError, match="process group"):  # there are no other processes
        tiny_model().generate(**source, num_beams=num_beams, synced_gpus=True)
    assert (searches["beam_search"], searches["greedy_search"]) == (0, 0)


class Collector:
    """A streamer that keeps its tokens."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def test_a_streamer_gets_every_token_from_transformers_search(tiny_model, source, searches):
    model, one = tiny_model(), source["input_ids"][:1]
    expected = model.generate(one)[0].tolist()
    streamer = Collector()
    model.generate(one, streamer=streamer)
    assert streamer.tokens == [*expected, "end"]
    assert (searches["greedy_search"], searches["_sample"]) == (1, 1)


class Plain(VaswaniForConditionalGeneration):
    """The network with transformers' own `generate`."""

    generate = GenerationMixin.generate
    _beam_search = GenerationMixin._beam_search
    _sample = GenerationMixin._sample
    _prepare_generation_config = GenerationMixin._prepare_generation_config


@pytest.mark.parametrize(
    "constraint",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[8], [9], [10], [12], [15], [11, 13]]},
        {"min_new_tokens": 9},
        {"prefix_allowed_tokens_fn": lambda batch, tokens: [2, 3 + len(tokens) % 5, 9, 12]},
        {"decoder_input_ids": torch.full((4, 3), 5), "min_new_tokens": 4},
        {},
    ],
)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_constraints_that_bind_give_what_transformers_generate_gives(
    tiny_model, source, num_beams, constraint
):
    # transformers' beam search treats a pad id of 0 as None.
    settings = {"max_new_tokens": 14, "num_beams": num_beams, "early_stopping": False}
    settings |= {"eos_token_id": [2, 5, 6, 7], "pad_token_id": 1}
    if num_beams > 1:
        settings["length_penalty"] = 1.0
    bound = False
    for seed in range(4):
        model, plain = tiny_model(seed=seed), tiny_model(Plain, seed=seed)
        plain.generation_config = GenerationConfig(
            pad_token_id=0, eos_token_id=2, decoder_start_token_id=2
        )
        ours = model.generate(**source, **settings, **constraint, length_penalty_type="hf")
        theirs = plain.generate(**source, **settings, **constraint)
        assert torch.equal(ours, theirs)
        free = model.generate(**source, **settings, length_penalty_type="hf")
        bound |= ours.shape != free.shape or not torch.equal(ours, free)
    assert bound == bool(constraint)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_criteria_of_the_call_replace_those_of_the_settings(tiny_model, source, num_beams):
    model = tiny_model()
    for criterion in (MaxLengthCriteria(6), EosTokenCriteria([2, 5, 6, 7, 8, 11])):
        call = {"num_beams": num_beams, "stopping_criteria": StoppingCriteriaList([criterion])}
        ours = model.generate(**source, **call)
        theirs = model.generate(
            **source, **call, output_scores=True, return_dict_in_generate=True
        ).sequences
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, model.generate(**source, num_beams=num_beams))


@pytest.mark.parametrize("search", [{}, {"do_sample": True}, {"num_beams": 3}])
def test_transformers_searches_too_keep_each_sentence_to_its_own_limit(tiny_model, source, search):
    output = tiny_model().generate(
        **source, **search, eos_token_id=None, output_scores=True, return_dict_in_generate=True,
        bad_words_ids=[[0]],
    )  # fmt: skip
    lengths = (output.sequences[:, 1:] != 0).sum(dim=1)
    assert lengths.tolist() == [57, 54, 52, 55]


def doubled(module, args, output):
    return output * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.decoder.layers[0].register_forward_hook(doubled),
        lambda model: model.lm_head.register_forward_pre_hook(lambda module, args: None),
        lambda model: setattr(model, "forward", model.forward),
        lambda model: model.model.decoder.train(),
        lambda model: setattr(model.config, "_attn_implementation_internal", "of_ones_own"),
        lambda model: setattr(
            model, "prepare_inputs_for_generation", lambda *a, **k: model.__class__
            .prepare_inputs_for_generation(model, *a, **k)
        ),
    ],
)  # fmt: skip
def test_what_is_put_over_or_beside_a_layer_is_run(tiny_model, source, searches, change):
    model = tiny_model()
    ALL_ATTENTION_FUNCTIONS.register("of_ones_own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    change(model)
    for num_beams in (1, 3):
        model.generate(**source, num_beams=num_beams, max_new_tokens=3)
    assert (searches["beam_search"], searches["greedy_search"]) == (0, 0)
    assert (searches["_beam_search"], searches["_sample"]) == (1, 1)


def doubling(function):
    """Multiply what a method or a function returns by 2."""

    def patched(*args, **kwargs):
        output = function(*args, **kwargs)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    return patched


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (VaswaniAttention, "forward"),
        (VaswaniDecoderLayer, "feed_forward"),
        (torch.nn.Linear, "forward"),
        (torch.nn.LayerNorm, "forward"),
    ],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_method_replaced_on_a_class_is_run(tiny_model, source, monkeypatch, kind, method, beams):
    model = tiny_model(seed=1, dtype=torch.float32, norm_position="pre")
    call = {**source, "num_beams": beams}
    before = model.generate(**call)
    monkeypatch.setattr(kind, method, doubling(getattr(kind, method)))
    expected = model.generate(**call, use_cache=False)
    assert expected.tolist() != before.tolist()
    assert model.generate(**call).tolist() == expected.tolist()
    monkeypatch.undo()
    assert model.generate(**call).tolist() == before.tolist()


@pytest.mark.parametrize("kind", [Int8Linear, Int8Embedding])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_method_replaced_on_a_class_of_int8_weights_is_run(
    tiny_model, source, monkeypatch, kind, beams
):
    quantizer = VaswaniInt8Quantizer(VaswaniInt8Config(), pre_quantized=False)
    model = tiny_model(seed=1, dtype=torch.float32, norm_position="pre")
    quantizer.preprocess_model(model)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    call = {**source, "num_beams": beams}
    before = model.generate(**call)
    monkeypatch.setattr(kind, "forward", doubling(kind.forward))
    expected = model.generate(**call, use_cache=False)
    assert expected.tolist() != before.tolist()
    assert model.generate(**call).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("place", "method"),
    [
        ("model.encoder", "embed"),
        ("model.encoder.layers.0", "feed_forward"),
        ("model.encoder.layers.0.self_attn", "_split_heads"),
        ("model.decoder", "embed"),
        ("model.decoder", "look_up"),
        ("model.decoder.layers.0", "feed_forward"),
        ("model.decoder.layers.0.encoder_attn", "_split_heads"),
    ],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_method_replaced_on_a_module_is_run(tiny_model, source, place, method, beams):
    model = tiny_model(seed=1, dtype=torch.float32, norm_position="pre")
    call = {**source, "num_beams": beams}
    before = model.generate(**call)
    module = model.get_submodule(place)
    setattr(module, method, doubling(getattr(module, method)))
    encoded = model.model.encoder(**source)
    expected = model.generate(**call, encoder_outputs=encoded, use_cache=False)
    assert expected.tolist() != before.tolist()
    assert model.generate(**call).tolist() == expected.tolist()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("beams", [1, 3])
def test_sparse_weights_are_left_to_transformers(tiny_model, source, stack, beams):
    model = tiny_model(seed=1, dtype=torch.float32)
    expected = model.generate(**source, num_beams=beams)
    linear = getattr(model.model, stack).layers[0].fc1
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse())
    assert model.generate(**source, num_beams=beams).tolist() == expected.tolist()


def test_attention_registered_under_a_known_name_is_run(tiny_model, source, monkeypatch):
    model = tiny_model(seed=1, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    before = model.generate(**source)
    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(mapping, "sdpa", doubling(mapping["sdpa"]))
    expected = model.generate(**source, use_cache=False)
    assert expected.tolist() != before.tolist()
    assert model.generate(**source).tolist() == expected.tolist()


def test_a_subclass_with_a_forward_of_its_own_is_run(tiny_model, source, searches):
    class Biased(VaswaniForConditionalGeneration):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., 7] += 100
            return output

    assert (tiny_model(Biased).generate(**source, num_beams=2, max_new_tokens=3)[:, 1:] == 7).all()
    assert searches["beam_search"] == 0


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "part",
    [
        *("model", "lm_head", "model.encoder", "model.decoder", "model.decoder.embed_tokens"),
        *("model.encoder.layers.0", "model.decoder.layers.0", "model.decoder.layers.0.fc1"),
        *("model.encoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"),
    ],
)
def test_a_part_that_torch_compile_wrapped_is_run(tiny_model, source, part, num_beams):
    # A wrapped layer stands before one that is not.
    layers = 2 if "layers" in part else 1
    model = tiny_model(dtype=torch.float32, encoder_layers=layers, decoder_layers=layers)
    call = {**source, "num_beams": num_beams, "max_new_tokens": 3}
    expected = model.generate(**call)
    parent, _, name = part.rpartition(".")
    parent = model.get_submodule(parent)
    compiled = torch.compile(getattr(parent, name), backend="eager")
    if isinstance(parent, torch.nn.ModuleList):
        parent[int(name)] = compiled
    else:
        setattr(parent, name, compiled)
    assert torch.equal(model.generate(**call), expected)


def test_recorded_attentions_leave_the_fast_search_usable(tiny_model, source, searches):
    model = tiny_model()
    model.generate(**source, output_attentions=True, return_dict_in_generate=True)
    model.generate(**source)
    assert searches["greedy_search"] == 1


@pytest.mark.parametrize("sizes", [{"encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}, {}])
def test_each_call_records_each_attention_once(tiny_model, source, sizes):
    # In float32, only large matrices of feed-forward layers are prepared.
    model = tiny_model(**sizes, attn_implementation="eager", dtype=torch.float32)
    for _ in range(3):
        found = model.generate(
            **source, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
        )
        for recorded in (
            found.encoder_attentions, found.decoder_attentions[0], found.cross_attentions[0],
        ):  # fmt: skip
            assert len(recorded) == model.config.decoder_layers
    recorded = model(
        **source,
        decoder_input_ids=torch.tensor([[2]] * len(source["input_ids"])),
        output_attentions=True,
    )
    assert len(recorded.encoder_attentions) == model.config.encoder_layers


def test_training_mode_and_sampled_beams_run_transformers_search(tiny_model, source, searches):
    model = tiny_model()
    model.generate(**source, num_beams=2, do_sample=True)
    model.train().generate(**source, num_beams=2)
    model.generate(**source)
    assert (searches["beam_search"], searches["greedy_search"]) == (0, 0)
    assert searches["_beam_search"] == 2


def test_a_rule_after_a_warper_is_left_to_transformers():
    processors = [TemperatureLogitsWarper(2.0), SuppressTokensLogitsProcessor([18])]
    config = GenerationConfig(max_length=60)
    with pytest.raises(NotCovered, match="after sampling settings"):
        token_rules(processors, 1, config)
    rules = token_rules(processors[::-1], 1, config)
    assert rules.warpers == processors[:1]
    assert rules.never == {18}


def test_a_rule_after_the_normalisation_is_left_to_transformers():
    processors = [LogitNormalization(), SuppressTokensLogitsProcessor([18])]
    config = GenerationConfig(max_length=60)
    with pytest.raises(NotCovered, match="after LogitNormalization"):
        token_rules(processors, 1, config)
    rules = token_rules(processors[::-1], 1, config)
    assert (rules.never, rules.renormalize) == ({18}, True)


def test_a_subclass_that_prepares_its_own_inputs_is_asked_for_them(source, searches, tiny_model):
    class Own(VaswaniForConditionalGeneration):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = tiny_model(Own)
    model.generate(**source, num_beams=2)
    assert (searches["beam_search"], searches["_beam_search"]) == (0, 1)


def test_what_the_trainer_leaves_on_a_model_leaves_the_fast_search_usable(
    tiny_model, source, searches
):
    model = tiny_model(dtype=torch.float32)
    expected = model.generate(**source, num_beams=3)
    model.enable_input_require_grads()
    assert torch.equal(model.generate(**source, num_beams=3, labels=expected), expected)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        model = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert "forward" in vars(model)
    assert torch.equal(model.generate(**source, num_beams=3), expected)
    assert searches["beam_search"] == 3
    assert searches["_beam_search"] == 0


def test_a_subclass_of_a_layers_part_is_run(tiny_model, source, searches):
    model = tiny_model()
    expected = model.generate(**source, num_beams=3)

    class Reversed(type(model.model.decoder.layers[0].self_attn)):
        def _in_heads(self, keys_values):
            return super()._in_heads([-each for each in keys_values])

    model.model.decoder.layers[0].self_attn.__class__ = Reversed
    assert not torch.equal(model.generate(**source, num_beams=3), expected)
    assert searches["_beam_search"] == 1


def test_a_subclass_with_a_predict_of_its_own_is_run(tiny_model, source, searches):
    class Biased(VaswaniForConditionalGeneration):
        def predict(self, *args, **kwargs):
            logits, loss = super().predict(*args, **kwargs)
            logits[..., 7] += 100
            return logits, loss

    model = Biased(tiny_model().config).double().eval()
    assert (model.generate(**source, max_new_tokens=3)[:, 1:] == 7).all()
    assert searches["greedy_search"] == 0
