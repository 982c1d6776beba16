"""Encoders and language models take packed batches of transformers as padded ones."""

import pytest
import torch
from test_packing import assert_same_learning, real
from transformers import DataCollatorWithFlattening, DynamicCache

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)

LENGTHS, CLASSES = [7, 1, 3, 11], 5
SIZES = {"vocab_size": 19, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4}


@pytest.fixture(params=["sdpa", "eager"])
def head(request):
    """Build a small encoder with a head."""

    def build(model_class, **settings):
        config = VaswaniEncoderConfig(
            **SIZES, encoder_ffn_dim=24, dropout=0.0, num_labels=CLASSES, **settings
        )
        config._attn_implementation = request.param
        return model_class(config).double()

    return build


@pytest.fixture
def batches(padded_batch):
    """Build a padded batch, and the same batch from transformers' DataCollatorWithFlattening."""

    def build(highest):
        ids, mask = padded_batch(LENGTHS)
        labels = torch.randint(highest, ids.shape).masked_fill(mask == 0, -100)
        labels[:, 0] = -100  # the collator of transformers ignores each sentence's first label
        rows = [
            {"input_ids": row[:length].tolist(), "labels": own[:length].tolist()}
            for row, own, length in zip(ids, labels, LENGTHS, strict=True)
        ]
        flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows, return_tensors="pt")
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}, flat

    return build


@pytest.mark.parametrize(
    ("model_class", "highest"), [(VaswaniForMaskedLM, 19), (VaswaniForTokenClassification, CLASSES)]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_head_of_tokens_learns_as_from_padded_batches(head, batches, model_class, highest, mode):
    model = getattr(head(model_class), mode)()
    padded, flat = batches(highest)
    assert_same_learning(model, padded, flat)


@pytest.mark.parametrize("model_class", [VaswaniForMaskedLM, VaswaniForTokenClassification])
def test_logits_of_tokens_come_back_padded(head, batches, model_class):
    model = head(model_class).eval()
    padded, flat = batches(CLASSES)
    expected, outputs = (model(**batch, output_hidden_states=True) for batch in (padded, flat))
    assert outputs.logits.shape == expected.logits.shape
    torch.testing.assert_close(real(outputs.logits, LENGTHS), real(expected.logits, LENGTHS))
    pairs = zip(outputs.hidden_states, expected.hidden_states, strict=True)
    for own, other in pairs:
        torch.testing.assert_close(real(own, LENGTHS), real(other, LENGTHS))
    logits = model(**flat, pad_outputs=False).logits
    torch.testing.assert_close(logits[0], real(expected.logits, LENGTHS))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_classifier_of_sequences_takes_one_label_per_sentence(head, batches, pooling):
    model = head(VaswaniForSequenceClassification, pooling=pooling)
    padded, flat = batches(CLASSES)
    labels = {"labels": torch.tensor([0, 4, 2, 2])}
    assert_same_learning(model, padded | labels, {**flat, **labels})
    expected, outputs = (model(**{**batch, **labels}) for batch in (padded, flat))
    assert outputs.logits.shape == (len(LENGTHS), CLASSES)
    torch.testing.assert_close(outputs.logits, expected.logits)


def test_labels_of_tokens_are_refused_by_a_classifier_of_sequences(head, batches):
    model = head(VaswaniForSequenceClassification)
    _, flat = batches(CLASSES)
    with pytest.raises(ValueError, match=r"shape \(1, 22\) do not fit 4 sequences: pass one label"):
        model(**flat)


def test_a_packed_batch_without_boundaries_is_refused(head, batches, tiny_model):
    _, flat = batches(CLASSES)
    few = {name: flat[name] for name in ("input_ids", "labels", "position_ids")}
    tagger = head(VaswaniForTokenClassification)
    for model in (tagger, tiny_model()):
        with pytest.raises(ValueError, match="pass return_flash_attn_kwargs=True"):
            model(**few)
    rising = {**few, "position_ids": torch.arange(sum(LENGTHS))[None]}
    assert tagger(**rising).loss.isfinite()


@pytest.mark.parametrize("names", ["position_ids", "cu_seq_lens_q", "both"])
def test_texts_of_a_language_model_do_not_see_each_other(padded_batch, names):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=19, d_model=16, **sizes)
    model = VaswaniForCausalLM(config).double().eval()
    ids, mask = padded_batch(LENGTHS)
    rows = [
        {"input_ids": row[row_mask == 1].tolist()} for row, row_mask in zip(ids, mask, strict=True)
    ]
    flat = DataCollatorWithFlattening(
        return_position_ids=names != "cu_seq_lens_q",
        return_flash_attn_kwargs=names != "position_ids",
    )(rows, return_tensors="pt")
    alone = torch.cat([model(torch.tensor([row["input_ids"]])).logits[0] for row in rows])
    torch.testing.assert_close(model(**flat).logits[0], alone)
    unlabelled = {name: value for name, value in flat.items() if name != "labels"}
    torch.testing.assert_close(model(**unlabelled).logits[0], alone)
    states = model.model(**unlabelled).last_hidden_state
    torch.testing.assert_close(model.lm_head(states)[0], alone)


def packed_texts(padded_batch):
    """Texts of LENGTHS tokens, flattened by transformers' collator."""
    ids, mask = padded_batch(LENGTHS)
    rows = [{"input_ids": row[real == 1].tolist()} for row, real in zip(ids, mask, strict=True)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return rows, collator(rows, return_tensors="pt")


def test_packed_texts_have_the_gradients_of_texts_alone(padded_batch):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=19, d_model=16, dropout=0.0, **sizes)
    model = VaswaniForCausalLM(config).double()
    rows, flat = packed_texts(padded_batch)
    predicted = sum(LENGTHS) - len(LENGTHS)
    (predicted * model(**flat).loss).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        if len(row["input_ids"]) > 1:
            ((len(row["input_ids"]) - 1) * model(ids, labels=ids).loss).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_torch_func_takes_packed_texts(padded_batch):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=19, d_model=16, dropout=0.0, **sizes)
    model = VaswaniForCausalLM(config).double()
    _, flat = packed_texts(padded_batch)
    model(**flat).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), dict(flat)).loss

    for name, gradient in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_attention_of_packed_texts_never_holds_pairs_of_all_tokens(padded_batch):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=19, d_model=16, **sizes)
    model = VaswaniForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    _, flat = packed_texts(padded_batch)
    (weights,) = model(**flat, output_attentions=True).attentions
    assert weights.shape == (len(LENGTHS), 4, max(LENGTHS), max(LENGTHS))


def test_packed_texts_refuse_sources_without_boundaries():
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=19, d_model=16, add_cross_attention=True, **sizes)
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "cu_seq_lens_q": torch.tensor([0, 2, 3])}
    with pytest.raises(ValueError, match="encoder_hidden_states have no boundaries"):
        VaswaniForCausalLM(config)(**batch, encoder_hidden_states=torch.zeros(1, 4, 16))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, "end at 5, but the packed batch has 7 tokens"),
        ({"attention_mask": torch.ones(1, 7)}, "attention_mask is given with cu_seq_lens_q"),
        ({"prefix_mask": torch.ones(1, 7)}, "needs one text in each row, but cu_seq_lens_q packs"),
    ],
)
def test_wrong_boundaries_of_texts_are_refused(changes, complaint):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    model = VaswaniForCausalLM(VaswaniDecoderConfig(vocab_size=19, d_model=16, **sizes))
    batch = {"input_ids": torch.arange(4, 11)[None], "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    with pytest.raises(ValueError, match=complaint):
        model(**{**batch, **changes})


def test_a_packed_batch_with_a_cache_is_refused(tiny_model):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    language_model = VaswaniForCausalLM(VaswaniDecoderConfig(vocab_size=19, d_model=16, **sizes))
    batch = {"input_ids": torch.arange(4, 11)[None], "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    both = {**batch, "decoder_cu_seq_lens_q": batch["cu_seq_lens_q"]}
    both["decoder_input_ids"] = batch["input_ids"]
    for model, packed in ((language_model, batch), (tiny_model(), both)):
        cache = DynamicCache(config=model.config)
        with pytest.raises(ValueError, match="past_key_values is given with cu_seq_lens_q"):
            model(**packed, past_key_values=cache)
        assert model(**packed, use_cache=True).get("past_key_values") is None


def test_positions_of_padding_are_no_packed_batch(head):
    ids, mask = torch.tensor([[0, 0, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2]])
    for model_class in (
        VaswaniForMaskedLM,
        VaswaniForSequenceClassification,
        VaswaniForTokenClassification,
    ):
        model = head(model_class).eval()
        expected = model(ids[:, 2:]).logits
        for found in (
            model(ids, attention_mask=mask, position_ids=positions).logits,
            model(ids, mask, position_ids=positions).logits,
        ):
            logits = found if found.dim() == 2 else found[:, 2:]
            torch.testing.assert_close(logits, expected)
