"""Heads compute the same loss however they are asked, and take every usual form of labels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from ways_to_change_weights import build as build_translator

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniModel,
)

ENCODER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
DECODER = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
IDS = torch.tensor([[5, 6, 7, 2], [8, 9, 3, 2], [4, 4, 6, 2]])


def classifier(model_class=VaswaniForSequenceClassification, **settings):
    torch.manual_seed(0)
    return model_class(
        VaswaniEncoderConfig(vocab_size=19, **{"num_labels": 3, **ENCODER, **settings})
    )


# Heads of words


def add_numbers(layer, inputs, output):
    return output + torch.arange(output.shape[-1])


def hook(head):
    head.register_forward_hook(add_numbers)


def replace_forward(head):
    head.forward = lambda states: F.linear(states, head.weight) * 3


@pytest.mark.parametrize("change", [hook, replace_forward])
def test_a_changed_head_counts_in_every_form_of_the_loss(tiny_model, change):
    model = tiny_model(dropout=0.0, label_smoothing=0.0)
    plain = model(input_ids=IDS, labels=IDS).loss
    change(model.lm_head)
    expected = F.cross_entropy(model(input_ids=IDS, labels=IDS).logits.flatten(0, 1), IDS.flatten())
    assert not torch.isclose(expected, plain)
    for training in (True, False):
        model.train(training)
        for call in ({}, {"skip_logits": True}, {"skip_logits": False}, {"logits_to_keep": 2}):
            output = model(input_ids=IDS, labels=IDS, **call)
            assert_close(output.loss, expected)
            if "logits_to_keep" in call:
                assert output.logits.shape == (3, 2, 19)


def test_backward_hooks_of_the_head_run_in_training(tiny_model):
    model, seen = tiny_model().train(), []
    model.lm_head.register_full_backward_hook(lambda *_: seen.append(1))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen == [1]


def test_int8_weights_of_the_head_are_never_taken_for_floats():
    model = build_translator(torch.int8)
    asked = model(input_ids=IDS, labels=IDS)
    skipped = model(input_ids=IDS, labels=IDS, skip_logits=True)
    assert skipped.logits is None
    assert_close(skipped.loss, asked.loss)


def test_a_head_on_disk_has_the_loss_of_its_weights(tiny_model, tmp_path):
    untied = {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}
    whole = tiny_model(dtype=torch.float32, decoder_vocab_size=19, **untied)
    whole.save_pretrained(tmp_path / "model")
    places = {"model.encoder": "cpu", "model.decoder": "cpu", "lm_head": "disk"}
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert_close(
        model(input_ids=IDS, labels=IDS, skip_logits=True).loss,
        whole(input_ids=IDS, labels=IDS).loss,
    )


def test_a_batch_of_r_drop_without_two_halves_is_refused(tiny_model):
    with pytest.raises(ValueError, match=r"^r_drop compares two passes .* but 3 rows have no two"):
        tiny_model()(input_ids=IDS, labels=IDS, r_drop=1.0)


def test_labels_that_the_caller_has_shifted_are_counted_by_the_caller():
    torch.manual_seed(0)
    model = VaswaniForCausalLM(VaswaniDecoderConfig(vocab_size=19, **DECODER)).eval()
    ids = torch.randint(3, 19, (1, 9))
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    shifted[0, 2::3] = -100  # three packed texts of three tokens
    positions = torch.arange(3).repeat(3)[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids, "shift_labels": shifted}
    output = model(**batch, num_items_in_batch=(shifted != -100).sum())
    assert_close(output.loss, F.cross_entropy(output.logits[0], shifted[0]))


# Classifiers


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_size_name_classes(dtype):
    labels = torch.tensor([0, 2, 1])
    output = classifier()(IDS, labels=labels.to(dtype))
    assert_close(output.loss, F.cross_entropy(output.logits, labels))
    tags = IDS % 3
    output = classifier(VaswaniForTokenClassification)(IDS, labels=tags.to(dtype))
    assert_close(output.loss, F.cross_entropy(output.logits.flatten(0, 1), tags.flatten()))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bool, {}), (torch.int64, {"problem_type": "multi_label_classification"})],
)
def test_several_classes_may_be_marked_by_other_numbers_than_floats(dtype, settings):
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0]])
    output = classifier(**settings)(IDS, labels=labels.to(dtype))
    assert_close(
        output.loss, F.binary_cross_entropy_with_logits(output.logits, labels.to(output.logits))
    )


def test_a_single_class_is_a_regression_unless_declared_otherwise():
    labels = torch.tensor([0, 0, 0])
    output = classifier(num_labels=1)(IDS, labels=labels)
    assert_close(output.loss, output.logits.square().mean())
    declared = classifier(num_labels=1)
    declared.config.problem_type = "single_label_classification"
    assert declared(IDS, labels=labels).loss == 0


def test_floats_are_no_classes():
    labels = torch.tensor([0.7, 1.9, 2.2])
    with pytest.raises(RuntimeError, match="Long"):
        classifier(problem_type="single_label_classification")(IDS, labels=labels)


def test_integers_that_mark_several_classes_need_a_declared_problem():
    with pytest.raises(ValueError, match=r"^Labels of shape \(3, 3\) do not fit .* pass floats"):
        classifier()(IDS, labels=torch.ones(3, 3, dtype=torch.long))


def test_a_batch_without_real_classes_adds_nothing_to_an_update():
    model = classifier(problem_type="single_label_classification")
    loss = model(IDS, labels=torch.full((3,), -100), num_items_in_batch=5).loss
    loss.backward()
    assert loss == 0
    assert all((weight.grad == 0).all() for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_boolean_mask_of_each_query_hides_what_a_mask_of_tokens_hides(attention, dtype):
    model = classifier(pooling="first", attn_implementation=attention).to(dtype).eval()
    tokens = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    of_queries = tokens[:, None, None].expand(3, 1, 4, 4)
    expected = model(IDS, attention_mask=tokens).logits
    assert not torch.allclose(model(IDS).logits, expected)
    assert_close(model(IDS, attention_mask=of_queries.bool()).logits, expected)


def test_a_mean_refuses_a_mask_that_hides_which_tokens_are_real():
    mask = torch.ones(3, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r'^pooling="mean" averages .* \(3, 1, 4, 4\): pass \(B'):
        classifier()(IDS, attention_mask=mask)
    first = classifier(pooling="first").eval()
    assert_close(first(IDS, attention_mask=mask).logits, first(IDS).logits)


@pytest.mark.parametrize(
    ("model_class", "labels"),
    [
        (VaswaniForSequenceClassification, torch.tensor([0, 2, 1])),
        (VaswaniForSequenceClassification, torch.tensor([[1.0, 0.0, 1.0]] * 3)),
        (VaswaniForTokenClassification, IDS % 3),
    ],
    ids=["a class", "several classes", "a class each token"],
)
def test_a_classifier_is_one_graph(model_class, labels):
    model = classifier(model_class, dropout=0.0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(IDS, labels=labels).loss, model(IDS, labels=labels).loss)


# Configurations of other models


def test_an_encoder_with_a_head_is_built_from_a_translation_model(tmp_path):
    config = VaswaniConfig(vocab_size=19, **(ENCODER | DECODER))
    assert AutoModelForSequenceClassification.from_config(config).config.num_labels == 2
    model = AutoModelForMaskedLM.from_config(config)
    assert model.config.label_smoothing == 0, "smoothing hurts perplexity"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert_close(loaded(IDS).logits, model.eval()(IDS).logits)


def test_a_decoder_is_not_built_from_other_models():
    whole, encoder = VaswaniConfig(vocab_size=19), VaswaniEncoderConfig(vocab_size=19)
    decoder = VaswaniDecoderConfig(vocab_size=19)
    for build, config, needed in (
        (AutoModelForCausalLM.from_config, whole, "VaswaniDecoderConfig"),
        (VaswaniForCausalLM, encoder, "VaswaniDecoderConfig"),
        (VaswaniForConditionalGeneration, encoder, "VaswaniConfig"),
        (VaswaniModel, decoder, "VaswaniConfig"),
    ):
        found = type(config).__name__
        with pytest.raises(TypeError, match=f"needs a {needed}, got a {found}: make a {needed} "):
            build(config)


def test_a_subclass_may_have_its_own_configuration(tmp_path):
    class OwnConfig(VaswaniConfig):
        model_type = "own_translation"

    class OwnTranslator(VaswaniForConditionalGeneration):
        config_class = OwnConfig

    class OwnEncoderConfig(VaswaniEncoderConfig):
        model_type = "own_encoder"

    class OwnClassifier(VaswaniForSequenceClassification):
        config_class = OwnEncoderConfig

    whole = OwnTranslator(OwnConfig(vocab_size=19, **(ENCODER | DECODER)))
    assert whole.config.model_type == "own_translation"
    half = OwnClassifier(OwnEncoderConfig(vocab_size=19, **ENCODER))
    assert half.config.model_type == "own_encoder"


# Positions


def test_hooks_of_learned_positions_run_for_given_positions():
    config = VaswaniDecoderConfig(
        vocab_size=19, position_encoding="learned", max_position_embeddings=9, **DECODER
    )
    model = VaswaniForCausalLM(config).eval()
    assert isinstance(model.model.decoder.embed_positions, nn.Embedding)
    positions = torch.arange(4).expand(3, 4)
    expected = model(IDS, position_ids=positions).logits
    hooked = model.model.decoder.embed_positions.register_forward_hook(lambda *call: call[-1] * 2)
    assert not torch.allclose(model(IDS, position_ids=positions).logits, expected)
    hooked.remove()
    assert_close(model(IDS, position_ids=positions).logits, expected)
