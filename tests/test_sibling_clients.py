"""Encoders and language models in other libraries: pipelines, sentence-transformers, TRL, ..."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DataCollatorForLanguageModeling,
    EncoderDecoderModel,
    Trainer,
    TrainingArguments,
    pipeline,
)
from vaswani.hub_cards.card import add_to_push, write_model_card

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

TEXTS = ["a man rides a horse", "two dogs run", "a woman reads a book", "the child sleeps"] * 4
ENCODER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
DECODER = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


@pytest.fixture(scope="module")
def tokenizer():
    plain = VaswaniTokenizer.train_from_iterator(TEXTS, vocab_size=340, show_progress=False)
    return plain.for_masked_words()


@pytest.fixture
def saved(tokenizer, tmp_path):
    """Save a fresh model of a class with the tokenizer, and return its folder."""

    def save(model_class, **settings):
        sizes = ENCODER if model_class.config_class is VaswaniEncoderConfig else DECODER
        torch.manual_seed(0)
        config = model_class.config_class(vocab_size=len(tokenizer), **sizes, **settings)
        folder = tmp_path / model_class.__name__
        model_class(config).save_pretrained(folder)
        writes = model_class is VaswaniForCausalLM
        (tokenizer.for_language_model() if writes else tokenizer).save_pretrained(folder)
        return folder

    return save


# Pipelines of transformers


def test_fill_mask_finds_the_best_tokens_of_the_masked_position(saved, tokenizer):
    folder = saved(VaswaniForMaskedLM)
    answers = pipeline("fill-mask", str(folder), top_k=3)("a man <mask> a horse")
    batch = tokenizer("a man <mask> a horse", return_tensors="pt")
    place = batch["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    model = VaswaniForMaskedLM.from_pretrained(folder)
    best = model(**batch).logits[0, place].softmax(dim=-1).topk(3)
    assert [answer["token"] for answer in answers] == best.indices.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(best.values.tolist())


def test_text_classification_scores_the_named_classes(saved, tokenizer):
    folder = saved(VaswaniForSequenceClassification, id2label={0: "deu", 1: "eng", 2: "fra"})
    (answers,) = pipeline("text-classification", str(folder), top_k=None)(["two dogs run"])
    model = VaswaniForSequenceClassification.from_pretrained(folder)
    scores = model(**tokenizer("two dogs run", return_tensors="pt")).logits[0].softmax(dim=-1)
    wanted = dict(zip(("deu", "eng", "fra"), scores.tolist(), strict=True))
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(wanted)


def test_token_classification_names_a_class_for_every_token(saved, tokenizer):
    folder = saved(VaswaniForTokenClassification, id2label={0: "noun", 1: "verb"})
    answers = pipeline("token-classification", str(folder))("two dogs run")
    tokens = tokenizer.tokenize("two dogs run")
    assert [answer["word"] for answer in answers][: len(tokens)] == tokens
    assert {answer["entity"] for answer in answers} <= {"noun", "verb"}


def test_feature_extraction_returns_the_states_of_the_encoder(saved, tokenizer):
    folder = saved(VaswaniEncoderModel)
    features = pipeline("feature-extraction", str(folder))("two dogs run", return_tensors=True)
    states = AutoModel.from_pretrained(folder)(**tokenizer("two dogs run", return_tensors="pt"))
    assert_close(features, states.last_hidden_state)


def test_text_generation_goes_on_behind_the_prompt(saved):
    folder = saved(VaswaniForCausalLM)
    writer = pipeline("text-generation", str(folder))
    settings = {"max_new_tokens": 5, "do_sample": False}
    answers = writer(["a man", "two dogs run"], batch_size=2, **settings)
    alone = [writer(text, **settings) for text in ("a man", "two dogs run")]
    assert answers == alone
    assert [answer[0]["generated_text"][:5] for answer in answers] == ["a man", "two d"]


# sentence-transformers


@pytest.fixture
def modules():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers, importlib.import_module("sentence_transformers.models")


@pytest.mark.slow
def test_sentence_transformers_trains_an_encoder_and_reloads_the_same_vectors(
    modules, saved, tmp_path
):
    sentence_transformers, models = modules
    word = models.Transformer(str(saved(VaswaniEncoderModel)))
    pooling = models.Pooling(word.get_word_embedding_dimension())
    model = sentence_transformers.SentenceTransformer(modules=[word, pooling], device="cpu")
    before = model.encode(TEXTS[:2])
    pairs = Dataset.from_dict({"anchor": TEXTS[:4], "positive": TEXTS[1:5]})
    losses = importlib.import_module("sentence_transformers.losses")
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), max_steps=1, learning_rate=0.01, report_to=[], use_cpu=True
        ),
        train_dataset=pairs,
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    after = model.encode(TEXTS[:2])
    assert abs(before - after).max() > 1e-4
    model.save_pretrained(str(tmp_path / "sentences"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "sentences"), device="cpu")
    assert (again.encode(TEXTS[:2]) == after).all()


@pytest.mark.slow
def test_sentence_transformers_loads_an_encoder_without_the_package(modules, saved, tmp_path):
    folder = saved(VaswaniEncoderModel)
    script = (
        "import sys, numpy\n"
        "from sentence_transformers import models, SentenceTransformer\n"
        "trusted = {'trust_remote_code': True}\n"
        "word = models.Transformer(sys.argv[1], model_args=trusted, config_args=trusted,"
        " tokenizer_args=trusted)\n"
        "model = SentenceTransformer(modules=[word, models.Pooling(16)], device='cpu')\n"
        "assert 'vaswani' not in sys.modules\n"
        "numpy.save(sys.argv[2], model.encode(['two dogs run']))\n"
    )
    output = tmp_path / "vector.npy"
    command = [sys.executable, "-c", script, str(folder), str(output)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
    sentence_transformers, models = modules
    word = models.Transformer(str(folder))
    model = sentence_transformers.SentenceTransformer(
        modules=[word, models.Pooling(16)], device="cpu"
    )
    assert (numpy.load(output) == model.encode(["two dogs run"])).all()


# Trainers


def test_the_trainer_with_the_collator_of_language_models_lowers_the_loss(
    saved, tokenizer, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(saved(VaswaniForCausalLM))
    rows = Dataset.from_dict({"input_ids": tokenizer(TEXTS)["input_ids"]})
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path / "run"), max_steps=20, learning_rate=0.01, report_to=[], use_cpu=True
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.5


def test_the_collator_of_masked_words_trains_a_masked_language_model(saved, tokenizer, tmp_path):
    model = VaswaniForMaskedLM.from_pretrained(saved(VaswaniForMaskedLM))
    rows = Dataset.from_dict({"input_ids": tokenizer(TEXTS)["input_ids"]})
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path / "run"), max_steps=30, learning_rate=0.01, report_to=[], use_cpu=True
        ),
        train_dataset=rows,
        data_collator=collator,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == 30
    assert (losses or [trainer.state.log_history[-1]["train_loss"]])[-1] < 5.5


@pytest.mark.slow
def test_trl_fine_tunes_a_language_model_as_its_documentation_shows(saved, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    folder = saved(VaswaniForCausalLM)
    rows = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(
        model=str(folder),
        train_dataset=rows,
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "sft"),
            **{"max_steps": 10, "learning_rate": 0.01, "logging_steps": 1, "report_to": []},
            **{"use_cpu": True, "bf16": False, "max_length": 32, "gradient_checkpointing": False},
        ),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    trainer.save_model(str(tmp_path / "tuned"))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight.cpu(), tuned.state_dict()[name])


# EncoderDecoderModel


@pytest.mark.parametrize("encoder", ["vaswani", "bert"])
def test_an_encoder_decoder_model_trains_saves_and_generates_the_same(
    saved, tokenizer, tmp_path, encoder
):
    decoder_folder = saved(VaswaniForCausalLM)
    if encoder == "vaswani":
        encoder_folder = saved(VaswaniEncoderModel)
    else:
        encoder_folder = tmp_path / "bert"
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        BertModel(
            BertConfig(vocab_size=len(tokenizer), intermediate_size=32, **sizes)
        ).save_pretrained(encoder_folder)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(encoder_folder, decoder_folder)
    assert model.decoder.config.add_cross_attention
    old = AutoModelForCausalLM.from_pretrained(decoder_folder)
    for name, weight in old.state_dict().items():
        assert torch.equal(weight, model.decoder.state_dict()[name]), name
    model.config.decoder_start_token_id, model.config.pad_token_id = 2, 0
    batch = tokenizer(TEXTS[:3], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    model(**batch, labels=labels).loss.backward()
    gradient = model.decoder.model.decoder.layers[0].encoder_attn.k_proj.weight.grad
    assert gradient.abs().sum() > 0
    model.eval()
    settings = {"max_new_tokens": 6, "num_beams": 2, "decoder_start_token_id": 2}
    output = model.generate(**batch, **settings)
    model.save_pretrained(tmp_path / "whole")
    again = EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(again.generate(**batch, **settings), output)


# Remote code


@pytest.mark.slow
def test_flat_folders_compute_the_same_three_generations_deep(saved, tmp_path):
    script = (
        "import sys, torch, transformers\n"
        "auto, source, target, output = sys.argv[1:]\n"
        "auto = getattr(transformers, auto)\n"
        "model = auto.from_pretrained(source, trust_remote_code=True).eval()\n"
        "assert 'vaswani' not in sys.modules\n"
        "model.save_pretrained(target)\n"
        "torch.save(model(torch.tensor([[5, 9, 2]]))[0], output)\n"
    )
    for model_class, auto_class in (
        (VaswaniForCausalLM, "AutoModelForCausalLM"),
        (VaswaniForMaskedLM, "AutoModelForMaskedLM"),
    ):
        folder = saved(model_class)
        wanted = model_class.from_pretrained(folder)(torch.tensor([[5, 9, 2]]))[0]
        for generation in range(3):
            target = tmp_path / f"{auto_class}-{generation}"
            output = tmp_path / "states.pt"
            command = [
                sys.executable,
                "-c",
                script,
                auto_class,
                *map(str, (folder, target, output)),
            ]
            subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
            assert torch.equal(torch.load(output), wanted)
            folder = target
        assert AutoConfig.from_pretrained(folder).architectures == [model_class.__name__]
        assert not list(Path(folder).glob("modeling_utils*"))


def test_the_configs_of_the_halves_are_told_apart_by_their_type(saved):
    for model_class, config_class in (
        (VaswaniForMaskedLM, VaswaniEncoderConfig),
        (VaswaniForCausalLM, VaswaniDecoderConfig),
    ):
        assert type(AutoConfig.from_pretrained(saved(model_class))) is config_class


# Model cards


@pytest.mark.parametrize(
    ("model_class", "task"),
    [
        (VaswaniEncoderModel, "feature-extraction"),
        (VaswaniForMaskedLM, "fill-mask"),
        (VaswaniForSequenceClassification, "text-classification"),
        (VaswaniForTokenClassification, "token-classification"),
        (VaswaniForCausalLM, "text-generation"),
    ],
)
def test_a_card_names_the_task_and_its_lines_run(saved, monkeypatch, capsys, model_class, task):
    folder = saved(model_class)
    card = ModelCard.load(write_model_card(folder, license="mit", language="en"))
    assert card.data.pipeline_tag == task
    assert card.data.license == "mit"
    assert "sequence-to-sequence" not in card.data.tags
    count = sum(weight.numel() for weight in model_class.from_pretrained(folder).parameters())
    assert f"{count:,} parameters" in card.text
    code = re.search(r"```python\nimport vaswani\n(.*?)```", card.text, flags=re.DOTALL)[1]
    monkeypatch.chdir(folder.parent)
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.strip().startswith("[")
    with pytest.raises(ValueError, match="whose cards have no results"):
        write_model_card(folder, results="results.json")


def test_a_class_without_a_card_is_pushed_with_transformers_draft(tmp_path):
    class Regressor(VaswaniEncoderModel):
        pass

    Regressor(
        VaswaniEncoderConfig(vocab_size=9, d_model=8, encoder_attention_heads=2, encoder_layers=1)
    ).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"names the class 'Regressor' in its config\.json"):
        write_model_card(tmp_path / "own", output=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    add_to_push(tmp_path / "own", "", "user/own", {})
    assert not (tmp_path / "own" / "README.md").exists()
