"""VaswaniTrainer with packed batches: random sentences, real tokens, updates of padded batches."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_batching import (
    BUDGET,
    SAMPLERS,
    Recorder,
    collator,
    epoch_of,
    make_trainer,
    sentence_pairs,
    training_data,
    weights,
)
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainer
from vaswani.corpora.packed_collator import packed
from vaswani.corpora.token_batches import PackedBatchSampler
from vaswani.training.trainer import VaswaniTrainer

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM


@settings(deadline=None)
@given(**SAMPLERS)
def test_batches_keep_both_budgets_of_real_tokens_and_every_pair_comes_once(lengths, **arguments):
    sampler = PackedBatchSampler(lengths, **arguments)
    for epoch in (0, 1):
        batches = epoch_of(sampler, epoch)
        assert len(batches) == len(sampler)
        assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
        for batch in batches:
            if len(batch) > 1:
                totals = np.array(lengths)[batch].sum(axis=0)
                assert totals[0] <= sampler.max_source_tokens
                assert totals[1] <= sampler.max_target_tokens


def test_batches_are_nearly_full_and_mix_all_lengths():
    lengths = sentence_pairs(20_000)
    batches = epoch_of(PackedBatchSampler(lengths, 2048, 2048), 0)
    totals = np.array([lengths[batch].sum(axis=0).max() for batch in batches])
    assert np.median(totals) > 0.95 * 2048
    means = np.array([lengths[batch, 0].mean() for batch in batches])
    assert means.std() < 0.2 * lengths[:, 0].std()


def test_another_epoch_or_seed_puts_other_pairs_together():
    lengths = sentence_pairs(500)
    plans = [
        {frozenset(batch) for batch in epoch_of(PackedBatchSampler(lengths, 512, seed=seed), epoch)}
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not plans[0] & plans[1]
    assert not plans[0] & plans[2]
    again = epoch_of(PackedBatchSampler(lengths, 512), 1)
    assert plans[1] == {frozenset(batch) for batch in again}


def test_the_trainer_packs_what_its_collator_pads_and_evaluates_on_padded_batches(tmp_path):
    seen, record = [], Recorder()
    trainer = make_trainer(
        tmp_path, collate=record, batching="packed", max_steps=-1, num_train_epochs=1
    )
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    trainer.train()
    data = training_data()
    lengths = sorted((len(row["input_ids"]), len(row["labels"])) for row in data)
    assert sorted(itertools.chain(*record.batches)) == lengths
    for batch in record.batches:
        assert (np.sum(batch, axis=0) <= BUDGET).all()
    assert all("attention_mask" not in batch for batch in seen)
    assert sum(batch["input_ids"].shape[1] for batch in seen) == sum(one for one, _ in lengths)
    seen.clear()
    trainer.evaluate(data.select(range(9)))
    assert all("attention_mask" in batch for batch in seen)


def padding(batch):
    """Return the padded form of a packed batch."""
    ends = batch["cu_seq_lens_q"], batch["decoder_cu_seq_lens_q"]
    sides = []
    for name, end in zip(("input_ids", "labels"), ends, strict=True):
        sides.append(batch[name][0].split(end.diff().tolist()))
    rows = [
        {"input_ids": source.tolist(), "labels": target.tolist()}
        for source, target in zip(*sides, strict=True)
    ]
    return collator(rows)


class PaddedAgain(VaswaniTrainer):
    """A trainer with the same batches, padded again."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(padding(inputs))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True},
        {"r_drop": 2.0},
        {"dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_updates_are_those_of_padded_batches(tmp_path, changes):
    changes = {"batching": "packed", "dropout": 0.0, "max_steps": 4, **changes}
    own = make_trainer(tmp_path / "packed", max_source_tokens=BUDGET, **changes)
    own.model.double()
    own.train()
    other = make_trainer(tmp_path / "padded", PaddedAgain, max_source_tokens=BUDGET, **changes)
    other.model.double()
    other.train()
    expected = weights(other)
    for name, weight in weights(own).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("task_type", [None, "SEQ_2_SEQ_LM"])
def test_an_adapter_trains_on_packed_batches_as_on_padded_ones(tmp_path, tiny_model, task_type):
    peft = pytest.importorskip("peft")
    trained = []
    for kind in (VaswaniTrainer, PaddedAgain):
        model = peft.get_peft_model(
            tiny_model(dropout=0.0),
            peft.LoraConfig(
                target_modules=["q_proj", "v_proj", "lm_head"],
                r=2,
                lora_dropout=0.0,
                task_type=task_type,
            ),
        )
        trainer = make_trainer(
            tmp_path,
            kind,
            model=model.double(),
            batching="packed",
            max_source_tokens=BUDGET,
            max_steps=3,
        )
        trainer.train()
        trained.append(weights(trainer))
    assert any("lora" in name and (weight != 0).all() for name, weight in trained[0].items())
    for name, weight in trained[0].items():
        torch.testing.assert_close(weight, trained[1][name], rtol=1e-9, atol=1e-9, msg=name)


def test_a_collator_that_packs_already_is_left_alone(tmp_path):
    trainer = make_trainer(
        tmp_path, collate=lambda rows: packed(collator(rows)), batching="packed", max_steps=2
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_generation_in_the_evaluation_of_a_plain_trainer_names_the_padded_collator(tmp_path):
    settings = {"predict_with_generate": True, "max_steps": 1}
    trainer = make_trainer(
        tmp_path, Seq2SeqTrainer, collate=lambda rows: packed(collator(rows)), **settings
    )
    trainer.train()
    with pytest.raises(ValueError, match=r"takes padded batches.*DataCollatorForSeq2Seq"):
        trainer.predict(training_data().select(range(9)))
    trainer = make_trainer(tmp_path, batching="packed", **settings)
    trainer.train()
    assert len(trainer.predict(training_data().select(range(9))).predictions) == 9


def test_a_language_model_generates_from_padded_batches_only():
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    model = VaswaniForCausalLM(VaswaniDecoderConfig(vocab_size=9, d_model=8, **sizes))
    with pytest.raises(ValueError, match="takes padded batches, got cu_seq_lens_q"):
        model.generate(torch.tensor([[3, 4, 5, 6]]), cu_seq_lens_q=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batching": "padded"}, "must be 'sorted' or 'packed', got 'padded'"),
        ({"max_source_tokens": None}, "batching='packed' needs max_source_tokens"),
        ({"label_smoothing_factor": 0.1}, "leave out compute_loss_func and label_smoothing_factor"),
        ({"compute_loss_func": lambda *args, **kwargs: None}, "leave out compute_loss_func"),
        ({"marian": True}, "batching='packed' works with .* not with MarianMTModel"),
    ],
)
def test_what_packed_batches_cannot_be_combined_with_is_refused(tmp_path, changes, message):
    if changes.pop("marian", False):
        sizes = {"vocab_size": 19, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
        heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "pad_token_id": 0}
        changes["model"] = MarianMTModel(MarianConfig(**sizes, **heads))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **{"batching": "packed", **changes})


@pytest.mark.parametrize(
    ("settings_of_run", "multiple"),
    [({"bf16": True}, 128), ({}, None), ({"bf16": True, "objective": "scheduled_sampling"}, None)],
)
def test_tokens_are_filled_up_where_new_numbers_of_them_cost_time(
    tmp_path, settings_of_run, multiple
):
    trainer = make_trainer(tmp_path, batching="packed", **settings_of_run)
    sizes = [
        (batch["input_ids"].shape[1], batch["labels"].shape[1])
        for batch in trainer.get_train_dataloader()
    ]
    spare = [[-tokens % (multiple or 1) for tokens in batch] for batch in sizes]
    assert not np.any(spare)
    assert len({size for batch in sizes for size in batch}) == 1 if multiple else len(sizes) > 2


@pytest.mark.parametrize(
    ("bf16", "dtype", "atol"), [(False, torch.float64, 1e-9), (True, torch.float32, 4e-3)]
)
def test_spare_sentences_change_no_update(tmp_path, monkeypatch, tiny_model, bf16, dtype, atol):
    trained = []
    for multiple in (128, None):
        monkeypatch.setattr(VaswaniTrainer, "_multiple_of_tokens", lambda _, n=multiple: n)
        model = tiny_model(dtype=dtype, dropout=0.0)
        trainer = make_trainer(tmp_path, batching="packed", bf16=bf16, model=model)
        trainer.train()
        trained.append(weights(trainer))
    for name, weight in trained[0].items():
        torch.testing.assert_close(weight, trained[1][name], rtol=0, atol=atol)
