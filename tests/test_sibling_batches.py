"""Batches of the siblings: padding on the left, written masks, prefixes, smoothed labels."""

import math

import pytest
import torch
from num2words import num2words
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniForCausalLM,
    VaswaniForSequenceClassification,
    VaswaniTokenizer,
    join_halves,
    split_halves,
)

SIZES = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
LINES = [num2words(number) for number in range(20, 60)]


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train_from_iterator(LINES, vocab_size=330, show_progress=False)


@pytest.fixture
def language_model(tokenizer):
    config = VaswaniDecoderConfig(vocab_size=len(tokenizer), d_model=16, dropout=0.0, **SIZES)
    return VaswaniForCausalLM(config).eval()


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_padding_on_the_left_changes_neither_loss_nor_logits(tokenizer, position_encoding):
    settings = {"position_encoding": position_encoding, "max_position_embeddings": 30}
    torch.manual_seed(0)
    model = VaswaniForCausalLM(
        VaswaniDecoderConfig(vocab_size=len(tokenizer), d_model=16, **SIZES, **settings)
    ).double().eval()  # fmt: skip
    writer = tokenizer.for_language_model()
    rows = [{"input_ids": ids} for ids in writer(["forty-two", "thirty"])["input_ids"]]
    batch = DataCollatorForLanguageModeling(writer, mlm=False)(rows)
    assert batch["attention_mask"][1, 0] == 0, "padded on the left"
    total, tokens = 0.0, 0
    outputs = model(**batch)
    for row, logits in zip(rows, outputs.logits, strict=True):
        ids = torch.tensor([row["input_ids"]])
        alone = model(ids).logits
        assert_close(logits[-ids.shape[1] :], alone[0])
        total += F.cross_entropy(alone[0, :-1], ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    assert math.isclose(outputs.loss.item(), total / tokens, rel_tol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_trainers_losses_are_the_models_own_on_either_side_of_padding(
    tokenizer, language_model, side, tmp_path
):
    writer = tokenizer.for_language_model()
    writer.padding_side = side
    texts = ["forty-two", "thirty", "nine hundred and ninety-nine", "two"]
    rows = [{"input_ids": ids} for ids in writer(texts)["input_ids"]]
    collate = DataCollatorForLanguageModeling(writer, mlm=False)
    own = language_model(**collate(rows)).loss.item()
    trainer = Trainer(
        language_model,
        TrainingArguments(
            tmp_path, use_cpu=True, report_to="none", max_steps=1, learning_rate=0.0,
            per_device_train_batch_size=4, per_device_eval_batch_size=4,
        ),
        data_collator=collate, train_dataset=rows, eval_dataset=rows,
    )  # fmt: skip
    assert math.isclose(trainer.evaluate()["eval_loss"], own, rel_tol=1e-6)
    assert math.isclose(trainer.train().training_loss, own, rel_tol=1e-6)


def test_a_text_of_one_token_behind_padding_has_a_loss_of_zero(language_model):
    ids = torch.tensor([[0, 0, 5]])
    labels = ids.masked_fill(ids == 0, -100)
    mask = (ids > 0).long()
    loss = language_model(ids, attention_mask=mask, labels=labels, num_items_in_batch=7).loss
    assert loss == 0


def test_a_cache_continues_the_positions_of_padded_texts(language_model):
    ids, mask = torch.randint(3, 30, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    whole = language_model(ids, attention_mask=mask).logits
    first = language_model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
    rest = language_model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    assert_close(rest.logits, whole[:, 5:])


def test_a_subclass_that_passes_its_arguments_on_generates_with_a_mask(language_model):
    class Passing(VaswaniForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    passing = Passing(language_model.config)
    passing.load_state_dict(language_model.state_dict())
    prompts = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    expected = language_model.generate(**prompts, max_new_tokens=4)
    assert passing.eval().generate(**prompts, max_new_tokens=4).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "word"])
def test_a_written_mask_stands_for_a_word_with_its_space(kind):
    tokenizer = VaswaniTokenizer.train_from_iterator(
        LINES, kind, 330 if kind != "word" else 60, show_progress=False
    ).for_masked_words()
    whole = tokenizer("thirty twenty thirty")["input_ids"]
    (middle,) = tokenizer("twenty", add_special_tokens=False)["input_ids"]
    expected = [tokenizer.mask_token_id if token == middle else token for token in whole]
    assert tokenizer("thirty <mask> thirty")["input_ids"] == expected


def test_a_written_mask_keeps_the_spaces_of_characters():
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["a b"], "char", 10, show_progress=False
    ).for_masked_words()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a <mask> b")["input_ids"])
    assert tokens == ["a", " ", "<mask>", " ", "b", "</s>"]


def test_the_trainers_label_smoothing_predicts_the_next_token(language_model, tokenizer, tmp_path):
    rows = [{"input_ids": list(range(first, first + 9))} for first in range(5, 13)]
    arguments = TrainingArguments(
        tmp_path, max_steps=60, learning_rate=0.02, label_smoothing_factor=0.1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(language_model, arguments, train_dataset=rows, data_collator=collator).train()
    ids = torch.tensor([rows[0]["input_ids"]])
    found = language_model.eval()(ids).logits.argmax(dim=2)
    assert (found[:, :-1] == ids[:, 1:]).float().mean() > 0.5
    assert (found == ids).float().mean() < 0.5, "not a copy of the input"


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_embeddings_in_place_of_tokens(language_model, beams):
    ids = torch.randint(3, 30, (2, 5))
    embeddings = language_model.get_input_embeddings()(ids)
    settings = {"max_new_tokens": 6, "num_beams": beams, "eos_token_id": None}
    found = language_model.generate(inputs_embeds=embeddings, **settings)
    assert torch.equal(found, language_model.generate(ids, **settings)[:, 5:])


@pytest.mark.parametrize("call", ["forward", "generate"])
@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.ones(3, 5), [[1, 0, 0, 0, 0]] * 2])
def test_a_prefix_mask_of_another_shape_is_refused(language_model, call, mask):
    function = language_model if call == "forward" else language_model.generate
    settings = {} if call == "forward" else {"max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"prefix_mask must be a tensor of shape \(2, 5\)"):
        function(torch.randint(3, 30, (2, 5)), prefix_mask=mask, **settings)


def test_prefixes_of_packed_texts_are_refused(language_model):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    prefix = torch.tensor([[1, 1, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match="pad the texts instead of packing them"):
        language_model(torch.randint(3, 30, (1, 6)), position_ids=positions, prefix_mask=prefix)


def test_a_language_model_without_input_names_its_inputs(language_model):
    with pytest.raises(ValueError, match="Pass the text as input_ids or inputs_embeds"):
        language_model()


@pytest.mark.parametrize("settings", [{"classifier_dropout": 1.5}, {"num_labels": 0}])
def test_a_classifier_without_classes_or_with_a_wrong_rate_is_refused(settings):
    sizes = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8}
    config = VaswaniEncoderConfig(vocab_size=9, d_model=8, **sizes, **settings)
    with pytest.raises(ValueError, match="num_labels of at least 1 and a classifier_dropout"):
        VaswaniForSequenceClassification(config)


def test_what_is_no_half_is_refused_in_a_sentence(tiny_model):
    encoder, decoder = split_halves(tiny_model())
    for halves in ((decoder, encoder), (None, decoder), (encoder, encoder), (tiny_model(),)):
        with pytest.raises(TypeError, match=r"The (en|de)coder must be a model with a Vaswani"):
            join_halves(*halves)
    with pytest.raises(TypeError, match="takes a VaswaniForConditionalGeneration, got Vaswani"):
        split_halves(encoder)


def test_halves_are_loaded_in_the_dtype_of_the_call(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    for half, name in zip(split_halves(model), ("encoder", "decoder"), strict=True):
        half.save_pretrained(tmp_path / name)
    joined = type(model).from_encoder_decoder_pretrained(
        tmp_path / "encoder", tmp_path / "decoder", dtype=torch.bfloat16
    )
    assert joined.dtype == torch.bfloat16
