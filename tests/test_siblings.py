"""Encoders and decoders alone, compared with PyTorch's layers and transformers' search."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    DynamicCache,
    GenerationMixin,
)
from vaswani.generation.coverage_vaswani import NotCovered

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniDecoderModel,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniModel,
    split_halves,
)

ENCODER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24}
DECODER = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
PLACEMENTS = ["post", "pre"]
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])


def not_covered(*_, **settings):
    """A fast search that leaves every call to transformers."""
    raise NotCovered("a test")


def without_transformers_search(patch):
    """Let only the fast search run."""
    for name in ("_sample", "_beam_search"):
        patch.setattr(GenerationMixin, name, None)


@pytest.fixture
def build():
    """Build a small sibling in float64, with random biases and norms."""

    def make(model_class, seed=0, **settings):
        torch.manual_seed(seed)
        config_class = model_class.config_class
        sizes = ENCODER if config_class is VaswaniEncoderConfig else DECODER
        model = model_class(config_class(vocab_size=19, **{**sizes, **settings})).double()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.weight.uniform_(0.5, 1.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0, 0.3)
        return model.eval()

    return make


@pytest.fixture
def prompts():
    """Prompts of six, four and one token, padded on the left."""
    return torch.randint(3, 19, (3, 6), generator=torch.Generator().manual_seed(1)) * PADDED


def sinusoids(positions, width=16):
    """Section 3.5, from the paper's formula."""
    pairs = torch.arange(width // 2, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(pairs * (-math.log(10000.0) / (width // 2)))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).double()


# Parity with PyTorch


def torch_encoder(stack, norm_first):
    """Copy a stack without attention to a source into torch.nn.TransformerEncoder."""
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    final = nn.LayerNorm(16) if norm_first else None
    theirs = nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False).double()
    with torch.no_grad():
        for new, old in zip(theirs.layers, stack.layers, strict=True):
            attention, maps = new.self_attn, old.self_attn
            parts = [maps.q_proj.weight, maps.k_proj.weight, maps.v_proj.weight]
            attention.in_proj_weight.copy_(torch.cat(parts))
            attention.in_proj_bias.zero_()
            attention.out_proj.weight.copy_(maps.out_proj.weight)
            attention.out_proj.bias.zero_()
            for name, other in (
                *(("norm1", old.self_attn_layer_norm), ("norm2", old.final_layer_norm)),
                *(("linear1", old.fc1), ("linear2", old.fc2)),
            ):
                getattr(new, name).load_state_dict(other.state_dict())
        if norm_first:
            theirs.norm.load_state_dict(stack.layer_norm.state_dict())
    return theirs.train()


@pytest.mark.parametrize("norm_position", PLACEMENTS)
@pytest.mark.parametrize("model_class", [VaswaniEncoderModel, VaswaniDecoderModel])
def test_states_and_gradients_equal_torchs_layers(build, model_class, norm_position):
    model = build(model_class, norm_position=norm_position, dropout=0.0).train()
    causal = model_class is VaswaniDecoderModel
    stack = model.decoder if causal else model.encoder
    theirs = torch_encoder(stack, norm_position == "pre")
    ids, mask = torch.randint(3, 19, (3, 6)), torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    states = model(ids, attention_mask=mask).last_hidden_state
    inputs = stack.embed_tokens(ids) * 4 + sinusoids(torch.arange(6))
    later = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    wanted = theirs(inputs, mask=later, src_key_padding_mask=mask == 0)
    real = mask.bool()
    assert_close(states[real], wanted[real], atol=1e-10, rtol=1e-10)
    states[real].pow(2).sum().backward()
    gradient = stack.embed_tokens.weight.grad.clone()
    stack.embed_tokens.weight.grad = None
    wanted[real].pow(2).sum().backward()
    assert_close(gradient, stack.embed_tokens.weight.grad, atol=1e-9, rtol=1e-9)
    for new, old in zip(theirs.layers, stack.layers, strict=True):
        assert_close(old.fc1.weight.grad, new.linear1.weight.grad, atol=1e-9, rtol=1e-9)


def test_prefix_tokens_see_each_other_and_the_rest_sees_what_came_before(build, prompts):
    model = build(VaswaniDecoderModel, dropout=0.0)
    theirs = torch_encoder(model.decoder, norm_first=False).eval()
    ids = prompts[:1].expand(2, -1)
    prefix = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    states = model(ids, prefix_mask=prefix).last_hidden_state
    inputs = model.decoder.embed_tokens(ids) * 4 + sinusoids(torch.arange(6))
    for row, length in enumerate((3, 4)):
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        hidden[:length, :length] = False
        assert_close(states[row], theirs(inputs[row][None], mask=hidden)[0])


# Loss


def test_labels_are_aligned_with_the_inputs_and_every_token_predicts_the_next(build):
    model = build(VaswaniForCausalLM)
    ids = torch.randint(3, 19, (2, 6))
    labels = ids.clone()
    labels[0, :3] = -100
    output = model(ids, labels=labels)
    logits = output.logits[:, :-1].log_softmax(dim=-1)
    chosen = -logits.gather(2, ids[:, 1:, None])[..., 0]
    real = labels[:, 1:] != -100
    assert_close(output.loss, chosen[real].mean())
    by_items = model(ids, labels=labels, num_items_in_batch=20).loss
    assert_close(by_items, chosen[real].sum() / 20)


@pytest.mark.parametrize("model_class", [VaswaniForCausalLM, VaswaniForMaskedLM])
def test_the_loss_without_logits_has_the_same_gradients(build, model_class):
    ids = torch.randint(3, 19, (2, 6))
    gradients = []
    for skip in (True, False):
        model = build(model_class, label_smoothing=0.1, dropout=0.0).train()
        output = model(ids, labels=ids, skip_logits=skip)
        assert (output.logits is None) == skip
        output.loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name], atol=1e-10, rtol=1e-8)


def test_the_softmax_of_a_masked_language_model_shares_the_embedding(build):
    model = build(VaswaniForMaskedLM)
    ids = torch.randint(3, 19, (2, 6))
    states = model.model(ids).last_hidden_state
    assert_close(model(ids).logits, states @ model.model.encoder.embed_tokens.weight.T)


@pytest.mark.parametrize(
    ("settings", "labels", "loss"),
    [
        ({"num_labels": 3}, torch.tensor([0, 2]), F.cross_entropy),
        ({"num_labels": 1}, torch.tensor([0.5, 2.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
        (
            {"num_labels": 3},
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            F.binary_cross_entropy_with_logits,
        ),
    ],
)
def test_sequence_labels_decide_the_loss_as_in_transformers(build, settings, labels, loss):
    model = build(VaswaniForSequenceClassification, **settings)
    labels = labels.double() if labels.is_floating_point() else labels
    output = model(torch.randint(3, 19, (2, 6)), labels=labels)
    assert_close(output.loss, loss(output.logits, labels))


def test_gradients_of_split_batches_add_up_to_those_of_the_whole(build):
    ids, labels = torch.randint(3, 19, (4, 6)), torch.rand(4).double()
    gradients = []
    for parts in (1, 2):
        model = build(VaswaniForSequenceClassification, num_labels=1)
        for part in range(0, 4, 4 // parts):
            rows = slice(part, part + 4 // parts)
            model(ids[rows], labels=labels[rows], num_items_in_batch=4).loss.backward()
        gradients.append(model.classifier.weight.grad)
    assert_close(*gradients)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_sequence_is_its_mean_over_real_positions_or_its_first(build, pooling):
    model = build(VaswaniForSequenceClassification, pooling=pooling)
    ids, mask = torch.randint(3, 19, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    states = model.model(ids, attention_mask=mask).last_hidden_state
    rows = [states[0, 0], states[1, 0]]
    if pooling == "mean":
        rows = [states[0].mean(dim=0), states[1, :4].mean(dim=0)]
    wanted = torch.stack(rows) @ model.classifier.weight.T + model.classifier.bias
    assert_close(model(ids, attention_mask=mask).logits, wanted)


# Caches, padding and generation


def test_a_cache_gives_the_logits_of_the_whole_sequence(build):
    model = build(VaswaniForCausalLM)
    ids = torch.randint(3, 19, (2, 7))
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, start:end], past_key_values=cache, use_cache=True).logits
        for start, end in ((0, 4), (4, 5), (5, 7))
    ]
    assert_close(torch.cat(parts, dim=1), whole)
    assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])


SETTINGS = [
    {},
    {"num_beams": 4},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6},
    {"num_beams": 2, "early_stopping": True, "eos_token_id": [2, 5]},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_fast_search_finds_what_transformers_search_finds(
    build, prompts, monkeypatch, settings, prefix, positions
):
    longest = {"max_position_embeddings": 40} if positions == "learned" else {}
    model = build(VaswaniForCausalLM, position_encoding=positions, **longest)
    call = {"input_ids": prompts, "attention_mask": PADDED, "max_new_tokens": 15, **settings}
    if prefix:
        call["prefix_mask"] = PADDED
    monkeypatch.setattr(type(model), "_limits_and_rules", not_covered)
    wanted = model.generate(**call)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        without_transformers_search(patch)
        fast = model.generate(**call)
    assert torch.equal(fast, wanted)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}])
def test_a_prompt_of_padding_only_is_continued_as_by_the_model(build, settings):
    model = build(VaswaniForCausalLM)
    ids, mask = torch.tensor([[0, 0], [5, 7]]), torch.tensor([[0, 0], [1, 1]])
    call = {"attention_mask": mask, "max_new_tokens": 5, "eos_token_id": None, **settings}
    found = model.generate(ids, **call)
    assert torch.equal(found, model.generate(ids, use_cache=False, **call))
    if not settings:
        assert found[0, 2] == model(ids, attention_mask=mask).logits[0, -1].argmax()


def test_a_prefix_of_prompts_padded_on_the_right_is_read(build, prompts):
    model, call = build(VaswaniForCausalLM), {"max_new_tokens": 3}
    mask = PADDED.flip(1)
    ids = prompts.masked_fill(mask == 0, 0)
    prefix = mask * torch.tensor([1, 1, 0, 0, 0, 0])
    found = model.generate(ids, attention_mask=mask, prefix_mask=prefix, **call)
    logits = model(ids, attention_mask=mask, prefix_mask=prefix).logits
    assert torch.equal(found[:, 6], logits[:, -1].argmax(dim=1))


def test_prompts_of_int32_are_read(build, prompts):
    model = build(VaswaniForCausalLM)
    call = {"attention_mask": PADDED, "max_new_tokens": 5}
    assert torch.equal(model.generate(prompts.int(), **call), model.generate(prompts, **call))


def test_dynamically_quantized_language_models_run_the_fast_search(build, prompts, monkeypatch):
    model = build(VaswaniForCausalLM).float()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    call = {"input_ids": prompts[:1], "max_new_tokens": 5}
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_limits_and_rules", not_covered)
        wanted = quantized.generate(**call)
    without_transformers_search(monkeypatch)
    assert torch.equal(quantized.generate(**call), wanted)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4}, {"cache_implementation": "static"}])
def test_padding_on_the_left_changes_no_text(build, prompts, settings):
    model = build(VaswaniForCausalLM)
    together = model.generate(prompts, attention_mask=PADDED, max_new_tokens=12, **settings)
    for row, length in enumerate((6, 4, 1)):
        alone = model.generate(prompts[row : row + 1, -length:], max_new_tokens=12, **settings)
        new, found = alone[0, length:], together[row, 6:]
        assert torch.equal(found[: len(new)], new)
        assert (found[len(new) :] == 0).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_static_cache_writes_behind_a_prefix_what_a_dynamic_cache_writes(
    build, prompts, monkeypatch, beams, attention
):
    model = build(VaswaniForCausalLM)
    model.set_attn_implementation(attention)
    monkeypatch.setattr(type(model), "_limits_and_rules", not_covered)
    prefix = PADDED * torch.tensor([1, 1, 1, 1, 0, 0])
    call = {"attention_mask": PADDED, "max_new_tokens": 9, "num_beams": beams}
    settings = {"return_dict_in_generate": True, "output_logits": True}
    logits = []
    for cache in ("dynamic", "static"):
        output = model.generate(
            prompts, prefix_mask=prefix, cache_implementation=cache, **call, **settings
        )
        assert type(output.past_key_values).__name__ == f"{cache.title()}Cache"
        logits.append(torch.stack(output.logits))
    assert_close(*logits)
    causal = model.generate(prompts, cache_implementation="static", **call, **settings)
    assert not torch.allclose(torch.stack(causal.logits)[:1], logits[0][:1], atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_without_a_cache_a_prefix_is_read_in_every_step(build, prompts, beams):
    model = build(VaswaniForCausalLM)
    prefix = PADDED * torch.tensor([1, 1, 1, 1, 0, 0])
    call = {"attention_mask": PADDED, "prefix_mask": prefix, "max_new_tokens": 9}
    found = model.generate(prompts, **call, num_beams=beams, use_cache=False)
    assert torch.equal(found, model.generate(prompts, **call, num_beams=beams))


@pytest.mark.parametrize("length", [1, 5])
def test_generation_without_a_source_is_refused_where_the_model_attends_to_one(
    build, prompts, length
):
    model = build(VaswaniForCausalLM, add_cross_attention=True)
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        model.generate(prompts[:, :length], max_new_tokens=3)


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_on_the_left_takes_no_learned_positions(build, beams):
    model = build(VaswaniForCausalLM, position_encoding="learned", max_position_embeddings=14)
    texts = torch.randint(3, 19, (2, 5), generator=torch.Generator().manual_seed(0))
    ids, mask = (F.pad(part, (8, 0)) for part in (texts, torch.ones_like(texts)))
    call = {"max_new_tokens": 9, "min_new_tokens": 9, "num_beams": beams}
    found = model.generate(ids, attention_mask=mask, **call)
    assert torch.equal(found[:, 8:], model.generate(texts, **call))


def test_a_language_model_that_prepares_its_own_inputs_is_asked_for_them(build, prompts):
    class Own(VaswaniForCausalLM):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            prepared.append(args)
            return super().prepare_inputs_for_generation(*args, **kwargs)

    prepared = []
    build(Own).generate(prompts, attention_mask=PADDED, max_new_tokens=3)
    assert prepared


def test_sampling_draws_from_the_models_distribution(build, prompts):
    model = build(VaswaniForCausalLM)
    logits = model(prompts[:1]).logits[0, -1]
    drawn = model.generate(
        prompts[:1].expand(4000, -1), max_new_tokens=1, do_sample=True, top_k=0, temperature=0.7
    )[:, -1]
    shares = torch.bincount(drawn, minlength=19) / len(drawn)
    assert_close(shares, (logits / 0.7).softmax(dim=-1).float(), atol=0.03, rtol=0)


# Loading


def test_every_auto_class_builds_its_sibling():
    encoder, decoder = VaswaniEncoderConfig(vocab_size=9), VaswaniDecoderConfig(vocab_size=9)
    for auto_class, config, model_class in (
        (AutoModel, encoder, VaswaniEncoderModel),
        (AutoModelForTextEncoding, encoder, VaswaniEncoderModel),
        (AutoModelForMaskedLM, encoder, VaswaniForMaskedLM),
        (AutoModelForSequenceClassification, encoder, VaswaniForSequenceClassification),
        (AutoModelForTokenClassification, encoder, VaswaniForTokenClassification),
        (AutoModel, decoder, VaswaniDecoderModel),
        (AutoModelForCausalLM, decoder, VaswaniForCausalLM),
    ):
        with torch.device("meta"):
            assert type(auto_class.from_config(config)) is model_class
    for config in (encoder, decoder):
        assert type(AutoConfig.for_model(config.model_type)) is type(config)


def test_an_encoder_folder_of_version_0_1_loads_as_an_encoder(tiny_config, tmp_path):
    # Version 0.1 wrote a translation model's config beside the encoder's weights.
    model = VaswaniEncoderModel(tiny_config()).eval()
    model.save_pretrained(tmp_path)
    config = tiny_config(architectures=["VaswaniEncoderModel"])
    config.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 2]])
    for auto_class in (AutoModel, AutoModelForTextEncoding):
        loaded = auto_class.from_pretrained(tmp_path)
        assert type(loaded.config) is VaswaniEncoderConfig
        assert_close(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_no_model_is_loaded_with_a_random_stack(tiny_config, tmp_path):
    VaswaniEncoderModel(tiny_config()).save_pretrained(tmp_path)
    tiny_config(architectures=[]).save_pretrained(tmp_path)
    for model_class in (AutoModel, VaswaniModel, AutoModelForSeq2SeqLM):
        with pytest.raises(OSError, match="has no decoder for Vaswani"):
            model_class.from_pretrained(tmp_path)
    model, info = VaswaniModel.from_pretrained(tmp_path, output_loading_info=True)
    assert any(name.startswith("decoder.layers") for name in info["missing_keys"])
    assert type(model) is VaswaniModel


@pytest.mark.parametrize(
    ("model_class", "auto_classes"),
    [
        (VaswaniEncoderModel, [AutoModelForCausalLM, AutoModelForSeq2SeqLM]),
        (VaswaniForMaskedLM, [AutoModelForCausalLM, AutoModelForSeq2SeqLM]),
        (
            VaswaniForCausalLM,
            [AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForTextEncoding],
        ),
        (VaswaniForConditionalGeneration, [AutoModelForCausalLM, AutoModelForMaskedLM]),
    ],
)
def test_the_wrong_auto_class_says_in_one_sentence_which_is_right(
    build, tiny_model, tmp_path, model_class, auto_classes
):
    whole = model_class is VaswaniForConditionalGeneration
    (tiny_model if whole else build)(model_class).save_pretrained(tmp_path)
    for auto_class in auto_classes:
        with pytest.raises(OSError, match=r"^\S+ holds an? .*: load the folder with Auto") as error:
            auto_class.from_pretrained(tmp_path)
        assert len(str(error.value)) < 300


# Bad input


def test_a_language_model_refuses_a_source(build):
    model = build(VaswaniForCausalLM)
    source = torch.zeros(1, 3, 16).double()
    with pytest.raises(ValueError, match="a language model attends to no source"):
        model(torch.tensor([[3, 4]]), encoder_hidden_states=source)
    attends = build(VaswaniForCausalLM, add_cross_attention=True)
    with pytest.raises(ValueError, match="pass encoder_hidden_states"):
        attends(torch.tensor([[3, 4]]))
    ids = torch.tensor([[3, 4]])
    for name, value in (("decoder_input_ids", ids), ("encoder_outputs", (source,))):
        with pytest.raises(ValueError, match=f"^{name} is an input of a translation model, but"):
            model(ids, **{name: value})
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=2, **{name: value})
    with pytest.raises(ValueError, match=r"^max_length_offset=5 limits .*: pass max_new_tokens\.$"):
        model.generate(ids, max_length_offset=5)


def test_an_encoder_refuses_a_target(build):
    ids = torch.tensor([[3, 4]])
    for model_class in (VaswaniEncoderModel, VaswaniForMaskedLM):
        with pytest.raises(ValueError, match="decoder_input_ids is an input of a translation mod"):
            build(model_class)(ids, decoder_input_ids=ids)


def test_an_encoder_refuses_to_generate(build):
    for model_class in (VaswaniForMaskedLM, VaswaniEncoderModel):
        with pytest.raises(TypeError, match="cannot generate, because it has no decoder"):
            build(model_class).generate(torch.tensor([[3, 4]]))


def test_labels_outside_the_classes_are_refused(build):
    ids = torch.tensor([[3, 4]])
    for model, label in (
        (build(VaswaniForSequenceClassification, num_labels=3), torch.tensor([3])),
        (build(VaswaniForTokenClassification, num_labels=3), torch.tensor([[0, 3]])),
    ):
        with pytest.raises(ValueError, match="Label 3 is outside the 3 classes"):
            model(ids, labels=label)
    for model_class in (VaswaniForCausalLM, VaswaniForMaskedLM):
        with pytest.raises(ValueError, match="Label 19 is outside the 19 entries"):
            build(model_class)(ids, labels=torch.tensor([[3, 19]]))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([[1.0, 0.0]], r"^Labels of shape \(1, 2\) do not fit a sequence with any of 3"),
        ([1.0], r"^Labels of shape \(1,\) do not fit a sequence with any of 3"),
        ([[1.0, 0.0, 3.0]], r"^Label 3 is not between 0 and 1"),
        ([-1], r"^Label -1 is outside the 3 classes"),
    ],
)
def test_labels_of_sequences_with_several_classes_are_checked(build, labels, words):
    model = build(VaswaniForSequenceClassification, num_labels=3)
    with pytest.raises(ValueError, match=words):
        model(torch.tensor([[3, 4]]), labels=torch.tensor(labels))


@pytest.mark.parametrize(
    "model_class",
    [
        *(VaswaniEncoderModel, VaswaniForMaskedLM, VaswaniForSequenceClassification),
        *(VaswaniForTokenClassification, VaswaniDecoderModel, VaswaniForCausalLM),
    ],
)
def test_every_sibling_refuses_more_tokens_than_learned_positions(build, model_class):
    model = build(model_class, position_encoding="learned", max_position_embeddings=5)
    model(torch.full((1, 5), 3))
    with pytest.raises(
        ValueError, match=r"^A sequence of 6 tokens exceeds max_position_embeddings"
    ):
        model(torch.full((1, 6), 3))


def test_positions_beyond_a_learned_table_are_refused(build):
    learned = {"position_encoding": "learned", "max_position_embeddings": 5}
    model = build(VaswaniForCausalLM, **learned)
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="sequence of 6 tokens exceeds max_position_embeddings"):
        model.generate(ids, max_new_tokens=9, eos_token_id=None)
    with pytest.raises(ValueError, match="exceeds max_position_embeddings"):
        model(ids, position_ids=torch.tensor([[4, 5]]))
    with pytest.raises(ValueError, match=r"^Position -1 is negative: positions count from 0\.$"):
        model(ids, position_ids=torch.tensor([[-1, 0]]))
    for settings in ({"num_beams": 3}, {"cache_implementation": "static"}):
        with pytest.raises(ValueError, match="6 tokens exceeds max_position_embeddings"):
            model.generate(ids, max_new_tokens=9, eos_token_id=None, **settings)


def test_a_prefix_and_a_mask_of_four_dimensions_are_refused(build, prompts):
    model = build(VaswaniForCausalLM)
    mask = torch.ones(3, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(B, T\), got .*\(3, 1, 6, 6\)"):
        model(prompts, prefix_mask=PADDED, attention_mask=mask)


def test_a_prefix_mask_of_another_batch_is_refused(build, prompts):
    model = build(VaswaniForCausalLM)
    for mask in (PADDED[:2], PADDED[0]):
        with pytest.raises(ValueError, match=r"^prefix_mask must be a tensor of shape \(3, 6\)"):
            model(prompts, prefix_mask=mask)


@pytest.mark.parametrize(
    ("config_class", "name", "meant"),
    [
        (VaswaniEncoderConfig, "num_layers", "encoder_layers"),
        (VaswaniDecoderConfig, "n_head", "decoder_attention_heads"),
        (VaswaniDecoderConfig, "intermediate_size", "decoder_ffn_dim"),
    ],
)
def test_names_of_other_libraries_are_refused_with_the_field_of_this_half(
    config_class, name, meant
):
    with pytest.raises(ValueError, match=f"{name}' is unknown: did you mean '{meant}'"):
        config_class(**{name: 3})


def test_a_half_refuses_fields_of_the_other(tmp_path):
    with pytest.raises(StrictDataclassError, match="VaswaniEncoderConfig has no decoder_layers"):
        VaswaniEncoderConfig(decoder_layers=3)
    VaswaniDecoderConfig().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "encoder_layers" not in text
    assert "share_encoder_decoder_embeddings" not in text


def test_table_3_has_rows_for_each_half():
    assert VaswaniEncoderConfig.preset("big").encoder_ffn_dim == 4096
    assert VaswaniDecoderConfig.preset("C-N2").decoder_layers == 2
    assert VaswaniDecoderConfig.preset("base").encoder_layers is None
    assert VaswaniConfig.preset("base").decoder_layers == 6


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned"])
def test_an_encoder_reads_positions(build, encoding):
    model = build(VaswaniEncoderModel, position_encoding=encoding, max_position_embeddings=9)
    ids, mask = torch.tensor([[0, 0, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2]])
    expected = model(ids[:, 2:]).last_hidden_state
    for network in (model, model.encoder):
        found = network(ids, mask, position_ids=positions).last_hidden_state[:, 2:]
        assert_close(found, expected)


def test_only_positions_that_restart_switch_the_cache_off(build):
    model, ids = build(VaswaniForCausalLM), torch.tensor([[3, 4, 5, 6, 7]])
    first = model(ids[:, :3], position_ids=torch.arange(3)[None])
    call = {"past_key_values": first.past_key_values, "position_ids": torch.tensor([[3, 4]])}
    assert_close(model(ids[:, 3:], **call).logits, model(ids).logits[:, 3:])
    for restarting in ([0, 1, 0, 1, 2], [0, 0, 0, 0, 0]):  # packed texts
        positions = torch.tensor([restarting])
        assert model(ids, position_ids=positions).past_key_values is None


@pytest.mark.parametrize("cls", [VaswaniForCausalLM, VaswaniForConditionalGeneration])
def test_continuous_batching_is_refused_by_name(build, cls):
    with pytest.raises(NotImplementedError, match=r"continuous batching \(generate_batch\)"):
        build(cls).generate_batch([[3, 4]])


@pytest.mark.parametrize("adapted", ["adapter", "parametrization"])
def test_a_model_whose_weights_have_other_names_is_not_split(tiny_model, adapted):
    model = tiny_model()
    if adapted == "adapter":
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    else:
        nn.utils.parametrizations.weight_norm(model.model.decoder.layers[0].fc1)
    with pytest.raises(ValueError, match=r"split_halves finds no weight .*\.weight in the model"):
        split_halves(model)


def test_a_text_can_be_continued_from_a_returned_cache(build, prompts):
    model = build(VaswaniForCausalLM)
    ids = torch.randint(4, 19, (2, 5))
    found = model.generate(ids, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True)
    assert torch.equal(found.sequences, model.generate(ids, max_new_tokens=4, eos_token_id=None))
    continued = model(found.sequences[:, -1:], past_key_values=found.past_key_values).logits
    torch.testing.assert_close(continued, model(found.sequences).logits[:, -1:])
