"""Token batches: budgets, padding, epochs, processes, and exact resuming."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from conftest import SIZES
from datasets import Dataset, DatasetDict
from forks import forked
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging import version
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, set_seed
from transformers.testing_utils import CaptureLogger
from vaswani.corpora import token_batches
from vaswani.corpora.mixing import Mixture
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.training import token_batch_trainer
from vaswani.training.r_drop import RDrop
from vaswani.training.sequence_objectives import MinimumRisk, Reinforce
from vaswani.training.trainer import VaswaniTrainer

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

ROOT = Path(__file__).resolve().parent.parent


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def padded_tokens(batch, lengths, side):
    return len(batch) * max(lengths[index][side] for index in batch)


def share_of_padding(batches, lengths):
    padded = sum(padded_tokens(batch, lengths, side) for batch in batches for side in (0, 1))
    return 1 - sum(map(sum, lengths)) / padded


def sentence_pairs(count, seed=0):
    """Return lengths like those of a corpus: skewed, with correlated source and target."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(2.6, 0.35, count), 3, 250)
    target = np.clip(source * rng.normal(1.03, 0.17, count), 3, 250)
    return np.stack([source, target], axis=1).astype(int)


LENGTHS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=80)
SAMPLERS = {
    "lengths": LENGTHS,
    "max_source_tokens": st.integers(1, 60),
    "max_target_tokens": st.integers(1, 60),
    "seed": st.integers(0, 2**32),
    "batches_per_update": st.integers(1, 6),
}


@settings(deadline=None)
@given(**SAMPLERS, epoch=st.integers(0, 1000))
def test_padded_batches_keep_both_budgets_but_for_oversize_pairs_alone(epoch, **arguments):
    sampler = TokenBatchSampler(**arguments)
    for batch in epoch_of(sampler, epoch):
        sizes = [padded_tokens(batch, arguments["lengths"], side) for side in (0, 1)]
        kept = (
            sizes[0] <= arguments["max_source_tokens"]
            and sizes[1] <= arguments["max_target_tokens"]
        )
        assert kept != (batch[0] in sampler.oversize)
        assert kept or len(batch) == 1


@settings(deadline=None)
@given(**SAMPLERS, epoch=st.integers(0, 1000))
def test_every_pair_comes_exactly_once_an_epoch(epoch, **arguments):
    batches = epoch_of(TokenBatchSampler(**arguments), epoch)
    assert all(batches)
    assert sorted(itertools.chain(*batches)) == list(range(len(arguments["lengths"])))


@settings(deadline=None)
@given(**SAMPLERS)
def test_every_epoch_has_as_many_batches_as_len_says(**arguments):
    sampler = TokenBatchSampler(**arguments)
    assert {len(epoch_of(sampler, epoch)) for epoch in range(6)} == {len(sampler)}


@settings(deadline=None)
@given(**SAMPLERS)
def test_an_epoch_is_a_whole_number_of_updates_if_there_are_pairs_enough(**arguments):
    batches, multiple = len(TokenBatchSampler(**arguments)), arguments["batches_per_update"]
    assert batches % multiple == 0 or batches == len(arguments["lengths"])


def test_the_number_of_batches_holds_even_if_every_random_order_needs_more(monkeypatch):
    lengths = sentence_pairs(500)
    sampler = TokenBatchSampler(lengths, 256)
    cut, calls = sampler._cut, []

    def wasteful_unless_reference(order, first=1.0):
        calls.append(order)
        ends = cut(order, first)
        return ends if len(calls) > token_batches._DRAWS else np.arange(1, len(order) + 1)

    monkeypatch.setattr(sampler, "_cut", wasteful_unless_reference)
    batches = list(sampler)
    assert len(calls) == token_batches._DRAWS + 1
    assert len(batches) == len(sampler)
    assert sorted(itertools.chain(*batches)) == list(range(500))
    assert max(padded_tokens(batch, lengths, side) for batch in batches for side in (0, 1)) <= 256


def test_same_arguments_and_epoch_give_the_same_plan():
    first, second = (TokenBatchSampler(sentence_pairs(2000), 512, seed=7) for _ in range(2))
    list(first)
    assert epoch_of(first, 3) == epoch_of(second, 3)
    assert epoch_of(first, 3) == epoch_of(first, 3)


def test_another_epoch_or_seed_puts_other_pairs_together():
    lengths = sentence_pairs(2000)
    sampler = TokenBatchSampler(lengths, 512)
    plans = [epoch_of(sampler, 0), epoch_of(sampler, 1)]
    plans.append(epoch_of(TokenBatchSampler(lengths, 512, seed=1), 0))
    for one, other in itertools.combinations(plans, 2):
        unchanged = {frozenset(batch) for batch in one} & {frozenset(batch) for batch in other}
        assert len(unchanged) < len(one) / 10


def test_pairs_of_equal_length_meet_others_every_epoch():
    sampler = TokenBatchSampler([(4, 4)] * 1000, 80)
    together = [
        {pair for batch in epoch_of(sampler, epoch) for pair in itertools.combinations(batch, 2)}
        for epoch in (0, 1)
    ]
    again = {tuple(sorted(pair)) for pair in together[0]}
    again &= {tuple(sorted(pair)) for pair in together[1]}
    assert len(again) < len(together[0]) / 10


def test_batches_come_in_random_order_of_length():
    lengths = sentence_pairs(20_000)
    longest = [max(lengths[batch, 0]) for batch in TokenBatchSampler(lengths, 512)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.15
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.15


def test_padding_of_synthetic_lengths_is_under_4_percent():
    lengths = sentence_pairs(30_000)
    sampler = TokenBatchSampler(lengths, 4096)
    for epoch in range(3):
        assert share_of_padding(epoch_of(sampler, epoch), lengths) < 0.04


@pytest.fixture(scope="module")
def multi30k():
    """The lowercased, tokenized training set of Multi30k: English and German lines."""
    if "VASWANI_DATA" not in os.environ:
        pytest.skip("VASWANI_DATA, a folder that holds multi30k/, is not set")
    folder = Path(os.environ["VASWANI_DATA"]) / "multi30k"
    sides = []
    for language in ("en", "de"):
        name = folder / f"train.lc.norm.tok.{language}.gz"
        with gzip.open(name, "rt", encoding="utf-8") as file:
            sides.append(file.read().splitlines())
    return sides


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["words", "byte pairs"])
def test_padding_of_multi30k_is_under_5_percent_up_to_8192_tokens_a_batch(multi30k, unit):
    if unit == "words":
        sides = [[len(line.split()) + 1 for line in lines] for lines in multi30k]
    else:
        tokenizer = VaswaniTokenizer.train_from_iterator(
            itertools.chain(*multi30k), kind="bpe", vocab_size=10_000, split_punctuation=False
        )
        sides = [[len(ids) for ids in tokenizer(lines)["input_ids"]] for lines in multi30k]
    lengths = list(zip(*sides, strict=True))
    for budget, epoch in itertools.product((1024, 4096, 8192), range(3)):
        batches = epoch_of(TokenBatchSampler(lengths, budget), epoch)
        assert share_of_padding(batches, lengths) < 0.05


def test_oversize_pairs_are_reported_and_alone_or_dropped():
    lengths = [(3, 3), (9, 3), (3, 3), (3, 9), (9, 9), (3, 3)]
    for drop, outcome in ((False, "alone in a batch"), (True, "dropped")):
        with CaptureLogger(token_batches.logger) as log:
            sampler = TokenBatchSampler(lengths, 8, drop_oversize=drop)
        assert "3 of 6 sentence pairs exceed max_source_tokens (8)" in log.out
        assert f"{outcome}. Their numbers, counted from 0: 1, 3, 4\n" in log.out
        assert sampler.oversize.tolist() == [1, 3, 4]
        batches = list(sampler)
        assert sorted(
            batch[0] for batch in batches if len(batch) == 1 and batch[0] in (1, 3, 4)
        ) == ([] if drop else [1, 3, 4])
        assert sampler.num_sentences == len(list(itertools.chain(*batches))) == (3 if drop else 6)


def test_of_many_oversize_pairs_the_first_five_are_named():
    with CaptureLogger(token_batches.logger) as log:
        TokenBatchSampler([(9, 9)] * 7 + [(1, 1)], 8)
    assert "7 of 8 sentence pairs" in log.out
    assert "from 0: 0, 1, 2, 3, 4, ..." in log.out


def test_nothing_is_reported_if_all_pairs_fit():
    with CaptureLogger(token_batches.logger) as log:
        TokenBatchSampler([(8, 8)], 8)
    assert log.out == ""


def test_target_budget_is_the_source_budget_unless_given():
    lengths = [(1, 4)] * 8
    assert [len(batch) for batch in TokenBatchSampler(lengths, 32)] == [8]
    assert max(len(batch) for batch in TokenBatchSampler(lengths, 32, 16)) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": np.zeros((0, 2), dtype=int)}, "lengths is empty"),
        ({"lengths": [3, 4]}, r"of shape \(N, 2\); got shape \(2,\)"),
        ({"lengths": [(1, 2, 3)]}, r"got shape \(1, 3\)"),
        ({"lengths": [(1, 2), (3,)]}, r"must be \(source, target\) pairs"),
        ({"lengths": [(1.5, 2.0)]}, "must be integers, got float64"),
        ({"lengths": [(1, 2), (3, -1)]}, r"0 or more; sentence pair 1 has \[ 3 -1\]"),
        ({"max_source_tokens": 0}, "max_source_tokens must be an integer of at least 1, got 0"),
        ({"max_target_tokens": -5}, "max_target_tokens must be an integer of at least 1, got -5"),
        ({"max_source_tokens": "40"}, "max_source_tokens must be an integer .*, got '40'"),
        ({"max_source_tokens": 40.5}, "max_source_tokens must be an integer .*, got 40.5"),
        ({"batches_per_update": 0}, "batches_per_update must be at least 1, got 0"),
        ({"max_source_tokens": 1, "drop_oversize": True}, "All 1 sentence pairs exceed"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(**{"lengths": [(2, 2)], "max_source_tokens": 8, **arguments})


PLAN_OF_4_500_000 = """
import resource, sys, time
import numpy as np
from vaswani.corpora.token_batches import TokenBatchSampler
rng = np.random.default_rng(0)
lengths = rng.integers(3, 120, (4_500_000, 2), dtype=np.int32)
lengths[:, 1] = lengths[:, 0] + rng.integers(-2, 30, len(lengths))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
first = next(iter(TokenBatchSampler(lengths, 25_000)))
seconds = time.perf_counter() - start
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seconds, (after - before) / 2**20, after / 2**20)
"""


@pytest.mark.slow
def test_plan_of_4_500_000_pairs_takes_under_10_seconds_and_1_gigabyte():
    run = subprocess.run(
        [sys.executable, "-c", PLAN_OF_4_500_000],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, gibibytes, _ = map(float, run.stdout.split())
    assert seconds < 10
    assert gibibytes < 1


def shares(sampler, processes, epoch, skip=0):
    """Return the batches of each process, distributed by Accelerate."""
    dealt = []
    for process in range(processes):
        loader = prepare_data_loader(
            DataLoader(range(len(sampler._source)), batch_sampler=sampler, collate_fn=list),
            num_processes=processes,
            process_index=process,
        )
        loader.set_epoch(epoch)
        dealt.append(list(skip_first_batches(loader, skip) if skip else loader))
    return dealt


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_accelerate_deals_out_every_batch_once_and_follows_the_epoch(processes):
    sampler = TokenBatchSampler(sentence_pairs(500), 256, batches_per_update=processes)
    for epoch in (0, 2):
        dealt = shares(sampler, processes, epoch)
        assert len({len(share) for share in dealt}) == 1
        assert list(itertools.chain(*zip(*dealt, strict=True))) == epoch_of(sampler, epoch)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_skipping_batches_in_a_later_epoch_leaves_the_rest_of_that_epoch(processes):
    sampler = TokenBatchSampler(sentence_pairs(500), 256, batches_per_update=processes)
    whole, rest = (shares(sampler, processes, epoch=2, skip=skip) for skip in (0, 3))
    assert rest == [share[3:] for share in whole]


def test_sampler_has_no_batch_size_because_accelerate_then_drops_batches():
    assert not hasattr(TokenBatchSampler([(1, 1)], 1), "batch_size")


# Training. The tests with two processes run the same code in each process.

BUDGET = 96
STEPS = 14


def training_data(count=60):
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(count):
        source = [*rng.integers(3, SIZES["vocab_size"], rng.integers(2, 12)).tolist(), 2]
        target = [*rng.integers(3, SIZES["vocab_size"], rng.integers(2, 12)).tolist(), 2]
        rows.append({"input_ids": source, "labels": target})
    return Dataset.from_list(rows)


def make_trainer(
    output, trainer_class=VaswaniTrainer, data=None, collate=None, callbacks=None, **changes
):
    """Make a trainer of a tiny model. `changes` override arguments and training arguments."""
    own = {"max_source_tokens": BUDGET} if trainer_class is VaswaniTrainer else {}
    names = ("max_source_tokens", "max_target_tokens", "lengths", "drop_oversize", "batching")
    names += ("noam_warmup_steps", "noam_factor", "r_drop", "objective", "compute_loss_func")
    names += ("processing_class", "stream_buffer", "mixture", "muon", "optimizers", "eval_dataset")
    own.update({name: changes.pop(name) for name in names if name in changes})
    dropout, model = changes.pop("dropout", 0.1), changes.pop("model", None)
    set_seed(3)
    if model is None:
        model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES, dropout=dropout))
    fields = {
        "output_dir": str(output),
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return trainer_class(
        model=model,
        args=Seq2SeqTrainingArguments(**{**fields, **changes}),
        train_dataset=training_data() if data is None else data,
        data_collator=collate or collator,
        callbacks=callbacks,
        **own,
    )


class Letters:
    """A tokenizer that decodes each token to a letter."""

    name_or_path = ""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(ord("a") + token) for token in row if token > 2) for row in rows]

    def save_pretrained(self, folder):
        """Do nothing, because the tokenizer has no files."""


def first_letters(hypotheses, references):
    """A reward: the number of right first letters."""
    pairs = zip(hypotheses, references, strict=True)
    return [float(sum(a == b for a, b in zip(*pair, strict=False))) for pair in pairs]


def collator(rows):
    width = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    padded = {
        name: torch.tensor([row[name] + [fill] * (width[name] - len(row[name])) for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    return {**padded, "attention_mask": (padded["input_ids"] != 0).long()}


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_bit_for_bit(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


class Recorder:
    """A collator that keeps its batches."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        self.batches.append([(len(row["input_ids"]), len(row["labels"])) for row in rows])
        return collator(rows)


def test_trainer_feeds_every_pair_once_an_epoch_within_the_budgets(tmp_path):
    record, data = Recorder(), training_data()
    trainer = make_trainer(
        tmp_path, collate=record, max_target_tokens=64, max_steps=-1, num_train_epochs=2
    )
    trainer.train()
    lengths = sorted((len(row["input_ids"]), len(row["labels"])) for row in data)
    assert sorted(itertools.chain(*record.batches)) == sorted(lengths * 2)
    for batch in record.batches:
        assert len(batch) * max(source for source, _ in batch) <= BUDGET
        assert len(batch) * max(target for _, target in batch) <= 64


def test_trainer_without_a_budget_is_seq2seq_trainer(tmp_path):
    ours = make_trainer(tmp_path, max_source_tokens=None)
    ours.train()
    theirs = make_trainer(tmp_path, trainer_class=Seq2SeqTrainer)
    theirs.train()
    assert_bit_for_bit(weights(ours), weights(theirs))
    assert ours.get_total_train_batch_size(ours.args) == 8


@pytest.mark.parametrize("accumulate", [1, 3])
def test_loss_is_divided_by_the_real_target_tokens_of_the_whole_update(tmp_path, accumulate):
    record, divisors = Recorder(), []
    trainer = make_trainer(
        tmp_path, collate=record, gradient_accumulation_steps=accumulate, max_steps=5
    )
    compute_loss = trainer.compute_loss

    def spy(*args, num_items_in_batch=None, **kwargs):
        divisors.append(int(num_items_in_batch))
        return compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    trainer.compute_loss = spy
    trainer.train()
    targets = [sum(target for _, target in batch) for batch in record.batches]
    assert len(divisors) == 5 * accumulate
    for update in range(5):
        mine = slice(update * accumulate, (update + 1) * accumulate)
        assert divisors[mine] == [sum(targets[mine])] * accumulate


def test_samples_per_second_counts_the_sentences_of_an_average_update(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    updates = len(trainer.get_train_dataloader()) / 2
    assert trainer.get_total_train_batch_size(trainer.args) == round(60 / updates)


def test_lengths_are_counted_in_the_rows_selected_in_their_order(tmp_path):
    data = training_data().add_column("other", list(range(60))).shuffle(seed=0).select(range(40))
    sampler = make_trainer(tmp_path, data=data).get_train_dataloader().batch_sampler
    expected = [(len(row["input_ids"]), len(row["labels"])) for row in data]
    assert list(zip(sampler._source, sampler._target, strict=True)) == expected


@pytest.mark.parametrize("form", ["list", "torch format", "transform"])
def test_lengths_are_counted_whatever_form_the_rows_have(tmp_path, form):
    data = training_data()
    expected = [(len(row["input_ids"]), len(row["labels"])) for row in data]
    if form == "list":
        data = data.to_list()
    elif form == "torch format":
        data = data.with_format("torch")
    else:
        halve = {name: data[:][name] for name in data.column_names}
        data = data.with_transform(lambda rows: {n: [v[1:] for v in rows[n]] for n in halve})
        expected = [(source - 1, target - 1) for source, target in expected]
    sampler = make_trainer(tmp_path, data=data).get_train_dataloader().batch_sampler
    assert list(zip(sampler._source, sampler._target, strict=True)) == expected


def test_given_lengths_are_used_instead(tmp_path):
    lengths = np.full((60, 2), BUDGET // 2)
    trainer = make_trainer(tmp_path, lengths=lengths)
    assert max(map(len, trainer.get_train_dataloader().batch_sampler)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.ones((59, 2), dtype=int)}, "lengths has 59 sentence pairs, but .* 60"),
        ({"data": training_data().remove_columns("labels")}, "no column 'labels', only"),
        ({"data": [{"labels": [1]}]}, "row of the training data has no 'input_ids'"),
        ({"data": [{"input_ids": [1], "labels": 1}]}, "row of .* has no list of tokens: tokenize"),
        (
            {"data": Dataset.from_dict({"input_ids": [[1]], "labels": [1]})},
            "column 'labels' of the training data holds .*, not lists of tokens",
        ),
        ({"data": training_data().select([])}, "training data are empty"),
        ({"data": []}, "training data are empty"),
        ({"data": DatasetDict(train=training_data())}, r"are splits \(train\): pass one of them"),
        ({"data": [{"input_ids": [1], "labels": None}]}, "Row 0 of .* has None in 'labels'"),
        (
            {"data": Dataset.from_dict({"input_ids": [[1], None], "labels": [[1], [2]]})},
            "Row 1 of .* has None in 'input_ids'",
        ),
    ],
)
def test_training_data_without_usable_lengths_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **changes).train()


def test_settings_about_data_are_recorded(tmp_path):
    mixture = Mixture(np.array([20, 40]), [np.float32(0.5), 2], seed=3)
    trainer = make_trainer(tmp_path, drop_oversize=True, mixture=mixture)
    settings = json.loads(json.dumps(trainer.settings()))
    assert settings["drop_oversize"] is True
    assert settings["mixture"] == {"sizes": [20, 40], "shares": [0.5, 2.0], "seed": 3}
    stream = training_data().to_iterable_dataset()
    assert make_trainer(tmp_path, data=stream, stream_buffer=7).settings()["stream_buffer"] == 7


def test_a_target_budget_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_target_tokens needs max_source_tokens"):
        make_trainer(tmp_path, max_source_tokens=None, max_target_tokens=8)


class SaveAfter(TrainerCallback):
    """Save a checkpoint after each of the given updates."""

    def __init__(self, *updates):
        self.updates = updates

    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step in self.updates


@pytest.mark.parametrize("batching", ["sorted", "packed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_resumed_in_the_middle_of_a_later_epoch_ends_with_the_same_weights(
    tmp_path, accumulate, batching
):
    changes = {
        "batching": batching,
        "gradient_accumulation_steps": accumulate,
        "max_steps": 30 // accumulate,
    }
    whole = make_trainer(tmp_path / "whole", **changes)
    updates = len(whole.get_train_dataloader()) // accumulate
    steps = (updates + 2, 2 * updates)
    whole.add_callback(SaveAfter(*steps))
    whole.train()
    for step in steps:
        assert step < whole.state.max_steps
        resumed = make_trainer(tmp_path / "resumed", **changes)
        with CaptureLogger(transformers.trainer.logger) as log:
            resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert "missing" not in log.out
        assert_bit_for_bit(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"max_source_tokens": 40}, "max_source_tokens=60, but this run has 40"),
        ({"batching": "packed"}, "batching=sorted, but this run has packed"),
        ({"gradient_accumulation_steps": 2}, "batches of an update=1, but this run has 2"),
        ({"max_source_tokens": None}, "max_source_tokens=60, but this run has None"),
    ],
)
def test_a_resume_with_other_batches_in_the_middle_of_an_epoch_warns(tmp_path, change, named):
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "max_source_tokens": 60}
    make_trainer(tmp_path, **changes).train()
    resumed = make_trainer(tmp_path, **{**changes, "max_steps": 3, **change})
    with CaptureLogger(token_batch_trainer.logger) as log:
        resumed.train(resume_from_checkpoint=True)
    assert ("some pairs come twice" in log.out) == (named is not None)
    assert named is None or named in log.out


def test_token_batches_after_other_batches_of_the_epoch_warn(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, max_source_tokens=None, max_steps=2, **changes).train()
    resumed = make_trainer(tmp_path, max_steps=3, **changes)
    with CaptureLogger(token_batch_trainer.logger) as log:
        resumed.train(resume_from_checkpoint=True)
    assert "was saved without token batches, or by an older version" in log.out


def main(job, output, checkpoint=None):
    """Train as one of the processes. The first process saves the final weights in `output`."""
    changes = {"save_strategy": "steps", "save_steps": 1}
    if "without dropout" in job:
        changes = {"dropout": 0.0}
    if "packed" in job:
        changes |= {"batching": "packed"}
    if job == "packed risk":
        changes |= {"objective": MinimumRisk(first_letters, 2), "processing_class": Letters()}
    changes |= copies_of_sources(job)
    trainer = make_trainer(output, **changes)
    assert trainer.accelerator.num_processes == 2
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()


needs_resume_on_cpus = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23"),
    reason="older transformers cannot resume several processes on a CPU: torch knows no 'cpu:0'",
)


@needs_resume_on_cpus
@pytest.mark.slow
@pytest.mark.parametrize("batching", ["sorted", "packed", "packed risk"])
def test_two_processes_resumed_in_the_middle_of_a_later_epoch_end_with_the_same_weights(
    tmp_path, batching
):
    forked(2, __file__, batching, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-10"
    epoch = json.loads((checkpoint / "trainer_state.json").read_text())["epoch"]
    assert epoch > 1
    assert epoch % 1 != 0
    forked(2, __file__, batching, tmp_path / "resumed", checkpoint)
    whole, resumed = (
        load_file(tmp_path / run / "model.safetensors") for run in ("whole", "resumed")
    )
    assert_bit_for_bit(resumed, whole)


def copies_of_sources(job):
    """Arguments of a trainer whose objective learns from copies of sources, not from samples."""
    for name, kind in (("copies by risk", MinimumRisk), ("copies by reinforce", Reinforce)):
        if name in job:
            objective = kind(first_letters, 2, likelihood=0.3)
            objective._samples = lambda model, sources: [[ids, ids[-3:]] for ids in sources]
            return {"objective": objective, "processing_class": Letters()}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["sorted", "packed", "packed copies by risk", "sorted copies by reinforce"]
)
def test_two_processes_train_like_one_that_accumulates_two_batches(tmp_path, job):
    forked(2, __file__, f"{job} without dropout", tmp_path / "two")
    two = load_file(tmp_path / "two" / "model.safetensors")
    changes = {"batching": job.split()[0], **copies_of_sources(job)}
    one = make_trainer(tmp_path / "one", dropout=0.0, gradient_accumulation_steps=2, **changes)
    one.train()
    one.save_model()
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=0)


if __name__ == "__main__":
    main(*sys.argv[1:])


class Numbered(torch.utils.data.Dataset):
    """Rows by number, for any number: as random or generated data."""

    def __init__(self):
        self.rows = training_data().to_list()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number % len(self.rows)]


def test_a_data_set_that_ends_no_iteration_is_counted_by_its_length(tmp_path):
    trainer = make_trainer(tmp_path, data=Numbered(), max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


class Measured(torch.utils.data.IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        yield from training_data(8)


def test_an_iterable_with_a_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Measured is an IterableDataset with a length"):
        make_trainer(tmp_path, data=Measured())


def test_numbers_of_numpy_are_recorded_as_numbers(tmp_path):
    trainer = make_trainer(
        tmp_path, max_source_tokens=np.int64(40), objective=RDrop(np.float32(2)), max_steps=1
    )
    settings = json.loads(json.dumps(trainer.settings()))
    assert (settings["max_source_tokens"], settings["objective_settings"]["alpha"]) == (40, 2.0)


def test_the_targets_special_tokens_stay_those_of_the_model(tmp_path, tiny_model):
    class OfSource(VaswaniTokenizer):
        pad_token_id, eos_token_id = 17, 16

    separate = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19}
    model = tiny_model(dtype=torch.float32, **separate)
    of_source = OfSource.train_from_iterator(["a"], vocab_size=270, show_progress=False)
    names = ("pad_token_id", "eos_token_id")
    before = [getattr(part, name) for part in (model.config, model.generation_config)
              for name in names]  # fmt: skip
    trainer = make_trainer(tmp_path, model=model, max_steps=1, processing_class=of_source)
    trainer.train()
    after = [getattr(part, name) for part in (model.config, model.generation_config)
             for name in names]  # fmt: skip
    assert after == before
    padded = trainer._pad_tensors_to_max_len(torch.ones(1, 2, dtype=torch.long), 4)
    assert padded.tolist() == [[1, 1, model.config.pad_token_id, model.config.pad_token_id]]


def test_a_budget_above_all_data_makes_one_batch():
    assert [sorted(batch) for batch in TokenBatchSampler([(3, 3)] * 10, 2**62)] == [[*range(10)]]
