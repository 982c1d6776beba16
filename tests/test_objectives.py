"""Objectives: the formulas of their papers, resumed updates, and errors in one sentence."""

import copy
import json
import math
import pickle
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_batching import (
    Letters,
    assert_bit_for_bit,
    collator,
    first_letters,
    make_trainer,
    training_data,
    weights,
)
from transformers.testing_utils import CaptureLogger
from transformers.trainer_utils import HPSearchBackend, default_compute_objective
from transformers.utils import logging
from vaswani.corpora.packed_collator import packed
from vaswani.training.objective import ObjectiveError, Update
from vaswani.training.objectives import make_objective
from vaswani.training.r_drop import RDrop
from vaswani.training.rewards import (
    bleu_of,
    checked_rewards,
    reward_of,
    sentence_bleu,
    sentence_chrf,
)
from vaswani.training.scheduled_sampling import ScheduledSampling
from vaswani.training.sequence_objectives import Candidates, MinimumRisk, Reinforce

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM

ROWS = [
    {"input_ids": [3, 4, 5, 2], "labels": [6, 7, 8, 9, 2]},
    {"input_ids": [6, 2], "labels": [5, 2]},
    {"input_ids": [9, 8, 7, 6, 5, 2], "labels": [11, 12, 2]},
]
SIZES_OF_DECODER = {"vocab_size": 19, "d_model": 16, "decoder_layers": 1}
SIZES_OF_DECODER |= {"decoder_attention_heads": 2, "decoder_ffn_dim": 16}
UPDATE = Update(number=500, tokens=10, sentences=3, updates=1000)
KINDS = pytest.mark.parametrize("form", [lambda batch: batch, packed], ids=["padded", "packed"])


def prepared(objective):
    """Return an objective with the tokenizer of a trainer."""
    objective.tokenizer = Letters()
    return objective


@pytest.mark.parametrize(
    ("settings", "update", "expected"),
    [
        ({"schedule": "linear", "k": 0.9, "c": 1e-3, "floor": 0.2}, 100, 0.9 - 0.1),
        ({"schedule": "linear", "k": 0.9, "c": 1e-3, "floor": 0.2}, 5000, 0.2),
        ({"schedule": "exponential", "k": 0.99}, 100, 0.99**100),
        ({"schedule": "inverse_sigmoid", "k": 50.0}, 100, 50 / (50 + math.exp(100 / 50))),
        ({"schedule": "inverse_sigmoid", "k": 1.0}, 10**6, 0.0),
    ],
)
def test_schedules_are_those_of_bengio_et_al(settings, update, expected):
    schedule = ScheduledSampling(**settings)
    epsilon = schedule.probability_of_reference_tokens(update, updates=10**6)
    assert epsilon == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("updates", [1, 1000, 10**6])
@pytest.mark.parametrize("schedule", ["linear", "exponential", "inverse_sigmoid"])
def test_default_schedules_end_a_run_with_half_of_the_tokens_from_the_model(schedule, updates):
    epsilon = ScheduledSampling(schedule).probability_of_reference_tokens
    course = [epsilon(update, updates) for update in range(0, updates + 1, -(-updates // 10))]
    assert course == sorted(course, reverse=True)
    assert course[0] > 0.6
    assert course[-1] == pytest.approx(0.5, abs=1e-9)


@KINDS
def test_scheduled_sampling_reads_its_own_tokens_at_unlucky_positions(
    tiny_model, form, monkeypatch
):
    model = tiny_model(dropout=0.0).train()
    objective = prepared(ScheduledSampling("linear", k=0.5, c=0.0))
    luck = torch.tensor([0.9, 0.2, 0.9, 0.2, 0.9])  # by position; below 0.5 the token stays
    positions = form(collator(ROWS)).get("decoder_position_ids", torch.arange(5).expand(3, -1))
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: luck[positions])
    loss = objective(model, form(collator(ROWS)), UPDATE)
    monkeypatch.undo()
    total = 0.0
    for row in ROWS:
        source, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        right = [2, *row["labels"][:-1]]
        best = model(source, decoder_input_ids=torch.tensor([right])).logits.argmax(-1)[0].tolist()
        read = [right[t] if t == 0 or luck[t] < 0.5 else best[t - 1] for t in range(len(right))]
        one = model(source, decoder_input_ids=torch.tensor([read]), labels=labels)
        total += one.loss * len(right)
    torch.testing.assert_close(loss, total / 10)


def test_scheduled_sampling_with_right_tokens_alone_is_the_likelihood(tiny_model):
    model = tiny_model(dropout=0.0).train()
    objective = prepared(ScheduledSampling("linear", c=0.0))
    batch = collator(ROWS)
    torch.testing.assert_close(objective(model, batch, UPDATE), model(**batch).loss)


def table():
    log_probs = torch.tensor([[-3.0, -1.0, -2.0], [-4.0, -2.5, 0.0]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.25, 0.5], [1.0, 0.125, 7.0]], dtype=torch.float64)
    present = torch.tensor([[True, True, True], [True, True, False]])
    return Candidates(log_probs.requires_grad_(), rewards, present, torch.tensor(0.0))


def test_risk_has_the_defaults_of_shen_et_al_and_no_likelihood():
    objective = make_objective("risk")
    assert (objective.sharpness, objective.likelihood) == (0.005, 0.0)


@pytest.mark.parametrize("sharpness", [0.005, 1.0])
def test_risk_is_the_formula_of_shen_et_al_with_its_gradient(sharpness):
    candidates = table()
    losses = MinimumRisk(first_letters, 2, sharpness=sharpness).sentence_losses(candidates)
    losses.sum().backward()
    for row, number in ((0, 3), (1, 2)):
        powers = [math.exp(sharpness * p) for p in candidates.log_probs[row, :number].tolist()]
        shares = [power / sum(powers) for power in powers]
        risks = [-reward for reward in candidates.rewards[row, :number].tolist()]
        expected = sum(share * risk for share, risk in zip(shares, risks, strict=True))
        assert losses[row].item() == pytest.approx(expected, rel=1e-12)
        for column in range(number):
            slope = sharpness * shares[column] * (risks[column] - expected)
            assert candidates.log_probs.grad[row, column].item() == pytest.approx(slope, rel=1e-9)
    assert candidates.log_probs.grad[1, 2] == 0


def test_reinforce_has_the_mean_of_the_other_samples_as_its_baseline():
    candidates = table()
    losses = Reinforce(first_letters, 2).sentence_losses(candidates)
    rewards, log_probs = candidates.rewards[0, 1:].tolist(), candidates.log_probs[0, 1:].tolist()
    expected = -sum((rewards[j] - rewards[1 - j]) * log_probs[j] for j in (0, 1)) / 2
    assert losses[0].item() == pytest.approx(expected, rel=1e-12)


def log_prob(model, source, target):
    decoder_input_ids = torch.tensor([[2, *target[:-1]]])
    logits = model(torch.tensor([source]), decoder_input_ids=decoder_input_ids).logits[0]
    return logits.log_softmax(-1)[range(len(target)), target].sum()


@KINDS
@pytest.mark.parametrize("likelihood", [0.0, 0.3])
def test_loss_of_a_batch_is_the_mixture_written_out(tiny_model, form, likelihood, monkeypatch):
    model = tiny_model(dropout=0.0, label_smoothing=0.1).train()
    objective = prepared(MinimumRisk(first_letters, 2, likelihood=likelihood, sharpness=0.5))
    samples = [[[6, 7, 2], [6, 7, 2]], [[5, 2], [2]], [[11, 12, 9, 9, 2], [3, 3]]]
    monkeypatch.setattr(
        objective, "_samples", lambda *_: [[torch.tensor(one) for one in row] for row in samples]
    )
    loss = objective(model, form(collator(ROWS)), UPDATE)
    loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    risk, likelihood_sum = 0.0, 0.0
    for row, found in zip(ROWS, samples, strict=True):
        source, reference = row["input_ids"], row["labels"]
        unique = [list(one) for one in dict.fromkeys(map(tuple, [reference, *found]))]
        scores = torch.stack([0.5 * log_prob(model, source, one) for one in unique])
        texts = Letters().batch_decode([*unique, reference], skip_special_tokens=True)
        rewards = torch.tensor(first_letters(texts[:-1], [texts[-1]] * len(unique)))
        risk -= (scores.softmax(0) * rewards).sum()
        batch = {"input_ids": torch.tensor([source]), "labels": torch.tensor([reference])}
        likelihood_sum += model(**batch, skip_logits=False).loss * len(reference)
    expected = likelihood * likelihood_sum / 10 + (1 - likelihood) * risk / 3
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, model.lm_head.weight.grad)


def test_samples_end_as_labels_do_and_come_from_the_model_without_dropout(tiny_model):
    model = tiny_model(dropout=0.5).train()
    objective = prepared(Reinforce(first_letters, 30))
    samples = objective._samples(model, [torch.tensor(row["input_ids"]) for row in ROWS])
    assert [len(row) for row in samples] == [30] * 3
    for sample in (one for row in samples for one in row):
        assert 2 not in sample[:-1]
        assert sample[-1] == 2 or len(sample) > 50
    assert len({tuple(sample.tolist()) for sample in samples[0]}) > 20
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.5, "typical_p": 0.3, "epsilon_cutoff": 0.05, "suppress_tokens": [3, 4, 5]},
        {"no_repeat_ngram_size": 1, "repetition_penalty": 5.0, "forced_bos_token_id": 7},
        {"num_return_sequences": 3, "num_beams": 4, "min_new_tokens": 10, "eos_token_id": [2, 3]},
    ],
)
def test_samples_ignore_the_models_own_generation_settings(tiny_model, settings):
    model, objective = tiny_model(), prepared(Reinforce(first_letters, 4))

    def samples():
        torch.manual_seed(0)
        found = objective._samples(model, [torch.tensor(row["input_ids"]) for row in ROWS])
        return [[sample.tolist() for sample in row] for row in found]

    expected = samples()
    model.generation_config.update(**settings)
    given = model.generation_config
    assert samples() == expected
    assert model.generation_config is given
    assert given.to_dict().items() >= settings.items()


def test_samples_keep_the_models_limit_of_length(tiny_model):
    model = tiny_model()
    model.generation_config.update(max_length_factor=0.5, max_length_offset=1)
    samples = prepared(Reinforce(first_letters, 20))._samples(model, [torch.arange(3, 9)])
    assert max(map(len, samples[0])) == 4


def test_samples_keep_a_saved_limit_of_new_tokens(tiny_model):
    model = tiny_model(dropout=0.0)
    model.generation_config.update(max_new_tokens=3, max_length_offset=50)
    samples = prepared(Reinforce(first_letters, 20))._samples(model, [torch.arange(3, 9)])
    assert max(map(len, samples[0])) == 3
    model.generation_config.update(max_new_tokens=12, max_length_factor=0.0, max_length_offset=4)
    samples = prepared(Reinforce(first_letters, 20))._samples(model, [torch.arange(3, 9)])
    assert max(map(len, samples[0])) > 4


@pytest.mark.parametrize("pad_token_id", [0, 2])
def test_samples_have_no_padding_after_their_own_limit(tiny_model, pad_token_id):
    model = tiny_model(pad_token_id=pad_token_id)
    model.generation_config.update(max_length_factor=1.0, max_length_offset=2)
    objective = prepared(Reinforce(first_letters, 20))
    sources = [torch.tensor([3, 4, 2]), torch.arange(3, 15)]
    for source, samples in zip(sources, objective._samples(model, sources), strict=True):
        assert max(map(len, samples)) <= len(source) + 2
        assert any(sample[-1] != 2 and len(sample) == len(source) + 2 for sample in samples)


@pytest.mark.parametrize("labels", [[4, -100, 6, 2], [-100, 4, 2]])
def test_a_reference_with_hidden_labels_is_refused(tiny_model, labels):
    batch = collator([*ROWS[1:], {"input_ids": [3, 2], "labels": labels}])
    with pytest.raises(ObjectiveError, match="-100 before the end of its reference"):
        prepared(Reinforce(first_letters, 2))(tiny_model(), batch, UPDATE)


def test_fine_tuning_by_reinforce_raises_the_reward(tmp_path):
    rewards = []

    def early_end(hypotheses, references):
        values = [-float(len(hypothesis)) for hypothesis in hypotheses]
        rewards.append(sum(values) / len(values))
        return values

    trainer = make_trainer(
        tmp_path, objective=Reinforce(early_end, 4, likelihood=0.0), processing_class=Letters(),
        batching="packed", max_steps=25, learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    first, last = sum(rewards[1:4]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 3


OBJECTIVES = {
    "scheduled sampling": lambda: ScheduledSampling("exponential", k=0.9),
    "risk": lambda: MinimumRisk(first_letters, 2),
    "reinforce": lambda: Reinforce(first_letters, 2),
    "r_drop": lambda: RDrop(2.0),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, name):
    changes = {
        "batching": "packed", "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "max_steps": 4, "processing_class": Letters(),
    }  # fmt: skip
    whole = make_trainer(tmp_path / "whole", objective=OBJECTIVES[name](), **changes)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", objective=OBJECTIVES[name](), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_bit_for_bit(weights(resumed), weights(whole))
    assert whole.settings()["objective"] == type(OBJECTIVES[name]()).__name__


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_search_for_hyperparameters_keeps_the_objective(tmp_path, monkeypatch, name):
    """The trials of a search have the losses of single runs, with evaluations between updates."""
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace())
    rates = (1e-3, 5e-3)
    validation = training_data().select(range(4))

    def trainer_of(folder, **own):
        return make_trainer(
            tmp_path / folder,
            objective=OBJECTIVES[name](),
            processing_class=Letters(),
            max_steps=3,
            logging_strategy="steps",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            eval_dataset=validation,
            **own,
        )

    def losses(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    searched = trainer_of("search")
    first = searched.model
    searched.model_init = lambda: copy.deepcopy(first)
    searched.hp_search_backend, searched.hp_name = HPSearchBackend.OPTUNA, None
    searched.hp_space = lambda trial: trial.params
    searched.compute_objective = default_compute_objective
    for number, rate in enumerate(rates):
        single = trainer_of(f"single-{rate}", learning_rate=rate)
        single.train()
        searched.objective = None  # transformers' search sets both between trials
        searched.train(trial=SimpleNamespace(number=number, params={"learning_rate": rate}))
        assert losses(searched) == losses(single)
        assert searched.objective == searched.state.log_history[-2]["eval_loss"]
        searched.model_wrapped = searched.model = None


@pytest.mark.parametrize(
    ("objective", "recorded"),
    [
        (
            MinimumRisk(first_letters, 2),
            {
                **{"reward": "first_letters", "candidates": 2, "likelihood": 0.0},
                **{"sharpness": 0.005, "reward_processes": 0, "target_tokenizer": None},
            },
        ),
        (
            ScheduledSampling("exponential", k=0.9),
            {"schedule": "exponential", "k": 0.9, "c": None, "floor": 0.0},
        ),
        (RDrop(2.0), {"alpha": 2.0}),
        (lambda model, inputs, update: model(**inputs).loss, {}),
        (None, {}),
    ],
)
def test_the_settings_of_an_objective_are_recorded(tmp_path, objective, recorded):
    trainer = make_trainer(tmp_path, objective=objective)
    settings = json.loads(json.dumps(trainer.settings()))
    assert settings["objective_settings"] == recorded
    assert settings["r_drop"] == (2.0 if isinstance(objective, RDrop) else 0.0)


def test_a_function_is_an_objective_and_sees_its_update(tmp_path):
    seen = []

    def own_loss(model, inputs, update):
        seen.append(update)
        return model(**inputs, num_items_in_batch=update.tokens).loss

    changes = {"gradient_accumulation_steps": 2, "max_steps": 3, "dropout": 0.0}
    mine = make_trainer(tmp_path, objective=own_loss, **changes)
    mine.train()
    plain = make_trainer(tmp_path, **changes)
    plain.train()
    assert_bit_for_bit(weights(mine), weights(plain))
    assert [update.number for update in seen] == [0, 0, 1, 1, 2, 2]
    assert seen[0].sentences == seen[1].sentences > 2
    assert {update.updates for update in seen} == {3}
    assert mine.settings()["objective"] == "own_loss"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (5, r"a function \(model, inputs, update\) -> loss, got 5"),
        (MinimumRisk, r"the class MinimumRisk: pass an instance, such as MinimumRisk\(\)"),
    ],
)
def test_what_is_no_objective_is_refused_at_once(tmp_path, objective, message):
    with pytest.raises(ObjectiveError, match=message):
        make_trainer(tmp_path, objective=objective)


@pytest.mark.parametrize("loss", [1.5, None, torch.zeros(3)])
def test_an_objective_must_return_one_number_as_a_tensor(tmp_path, loss):
    trainer = make_trainer(tmp_path, objective=lambda model, inputs, update: loss)
    found = "a tensor \\(3,\\)" if torch.is_tensor(loss) else loss
    with pytest.raises(ObjectiveError, match=f"The objective <lambda> returned {found}"):
        trainer.train()


def test_evaluation_goes_on_with_the_models_own_loss(tmp_path):
    data = training_data(5)
    trainer = make_trainer(
        tmp_path, objective=MinimumRisk(first_letters, 2), processing_class=Letters()
    )
    plain = make_trainer(tmp_path)
    assert trainer.evaluate(data)["eval_loss"] == plain.evaluate(data)["eval_loss"]


def broken(hypotheses, references):
    raise KeyError("absent")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (broken, "The reward broken failed with KeyError: 'absent'"),
        (lambda hypotheses, references: [math.nan] * len(hypotheses), "it must be finite"),
        (lambda hypotheses, references: [-1e39] * len(hypotheses), "finite in float32"),
        (lambda hypotheses, references: {0: 1, 1: 2}, "TypeError: it returned a dict"),
        (lambda hypotheses, references: "12", "TypeError: it returned a str"),
        (lambda hypotheses, references: [1.0], "returned 1 numbers for 2 hypotheses"),
        (lambda hypotheses, references: None, "failed with TypeError"),
        (lambda hypotheses, references: [1 / len(one) for one in hypotheses], "ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_ends_the_run_before_the_first_update(tmp_path, reward, message):
    trainer = make_trainer(tmp_path, objective=MinimumRisk(reward), processing_class=Letters())
    with pytest.raises(ObjectiveError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_reward_that_fails_later_names_the_update(tmp_path):
    calls = []

    def later(hypotheses, references):
        calls.append(1)
        return [math.inf if len(calls) > 2 else 0.5] * len(hypotheses)

    trainer = make_trainer(tmp_path, objective=MinimumRisk(later, 2), processing_class=Letters())
    with pytest.raises(ObjectiveError, match="Update 2: The reward later is inf"):
        trainer.train()


def test_spare_sentences_of_a_collator_have_no_reference(tiny_model):
    objective = prepared(MinimumRisk(first_letters, 2))
    with pytest.raises(ObjectiveError, match="set its pad_to_multiple_of to None"):
        objective(tiny_model(), packed(collator(ROWS), pad_to_multiple_of=16), UPDATE)


def test_a_reward_runs_without_gradients_on_copies_of_the_lists():
    hypotheses, references = ["a", "b"], ["c", "d"]

    def popping(hypotheses, references):
        assert not torch.is_grad_enabled()
        return [float(len(hypotheses.pop()) + len(references.pop())) for _ in range(2)]

    assert checked_rewards(popping, hypotheses, references) == [2.0, 2.0]
    assert (hypotheses, references) == (["a", "b"], ["c", "d"])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("values", [[0.5, 0.25], [[0.5], [0.25]]])
def test_a_reward_may_return_a_column_or_a_row_of_numbers(kind, values):
    assert checked_rewards(lambda *_: kind(values), ["a", "b"], ["c", "d"]) == [0.5, 0.25]


def test_the_body_of_a_generator_runs_without_gradients_too():
    def enabled(hypotheses, references):
        for _ in hypotheses:
            yield float(torch.is_grad_enabled())

    assert checked_rewards(enabled, ["a", "b"], ["c", "d"]) == [0.0, 0.0]


@pytest.mark.parametrize(("tokenize", "high"), [("13a", False), ("zh", True)])
def test_bleu_has_the_tokenisation_of_its_score(tokenize, high):
    found = bleu_of(tokenize)(["我不知道"], ["我也不知道"])
    assert (found[0] > 0.1) == high
    assert reward_of(bleu_of(tokenize)).__name__ == "sentence_bleu"
    assert pickle.loads(pickle.dumps(bleu_of(tokenize)))(["a b"], ["a b"]) == pytest.approx([1.0])


def test_the_name_of_a_function_imports_a_reward(monkeypatch, tmp_path):
    (tmp_path / "my_rewards.py").write_text("def zero(hypotheses, references):\n    return [0.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_objective("risk", reward="my_rewards:zero").reward(["a"], ["b"]) == [0.0]


@pytest.mark.slow
def test_worker_processes_compute_the_same_rewards_and_report_their_errors(tmp_path):
    def trained(processes):
        run = make_trainer(
            tmp_path / str(processes),
            objective=MinimumRisk("chrf", likelihood=0.0, reward_processes=processes),
            processing_class=Letters(),
            max_steps=2,
        )
        run.train()
        return run

    alone, shared = trained(0), trained(2)
    assert_bit_for_bit(weights(shared), weights(alone))
    names = [f"{number} a b" for number in range(7)]
    assert shared.training_objective.reward(names, names) == [1.0] * 7
    assert copy.deepcopy(shared.training_objective).reward(names[:1], names[:1]) == [1.0]
    with pytest.raises(ObjectiveError, match="The reward broken failed with KeyError: 'absent'"):
        checked_rewards(reward_of(broken, 2), names, names)


class Counted:
    """A reward that counts how often it is pickled."""

    pickled = 0

    def __call__(self, hypotheses, references):
        return [float(len(hypothesis)) for hypothesis in hypotheses]

    def __getstate__(self):
        type(self).pickled += 1
        return {"needed": True}  # an empty state would not be pickled


@pytest.mark.slow
def test_worker_processes_receive_their_reward_once():
    reward = reward_of(Counted(), 2)
    assert reward(["a", "bb", "ccc"], ["x"] * 3) == [1.0, 2.0, 3.0]
    assert reward(["a", "bb", "ccc"], ["x"] * 3) == [1.0, 2.0, 3.0]
    started = Counted.pickled
    assert started <= 3  # for the check and for each worker
    reward(["a", "bb"] * 9, ["x"] * 18)
    assert Counted.pickled == started


KILLED = """
import time
from vaswani.training.rewards import RewardInProcesses, sentence_chrf
if __name__ == "__main__":
    reward = RewardInProcesses(sentence_chrf, 1)
    reward(["a"], ["a"])
    print(*reward._pool._processes, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_run_that_was_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as run:
        worker = int(run.stdout.readline())
        assert is_running(worker)
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(process):
    """Tell whether a process has not ended. One that nobody waits for has the state Z."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_reward_for_worker_processes_must_be_importable():
    with pytest.raises(ObjectiveError, match="<lambda> cannot run in other processes"):
        MinimumRisk(lambda hypotheses, references: [0.0], reward_processes=2)
    with pytest.raises(ObjectiveError, match="reward_processes must be an integer"):
        make_objective("risk", reward_processes=-1)


def test_data_without_references_and_a_trainer_without_a_tokenizer_are_refused(tmp_path):
    objective = MinimumRisk(first_letters)
    with pytest.raises(ObjectiveError, match="pass the tokenizer to the trainer"):
        make_trainer(tmp_path, objective=objective).train()
    for empty in ([], None):
        data = [{**row, "labels": empty} for row in training_data(3)]
        trainer = make_trainer(
            tmp_path, objective=objective, processing_class=Letters(), data=data,
            max_source_tokens=None,
        )  # fmt: skip
        with pytest.raises(ObjectiveError, match="the first row of the training data has no label"):
            trainer.train()


@pytest.mark.parametrize("objective", [ScheduledSampling(), RDrop()], ids=["sampling", "R-Drop"])
def test_batches_without_labels_are_refused_before_the_first_update(objective, tmp_path):
    trainer = make_trainer(
        tmp_path,
        objective=objective,
        collate=lambda rows: {"input_ids": torch.tensor([[5, 2]] * len(rows))},
        max_source_tokens=None,
    )
    with pytest.raises(ObjectiveError, match="needs labels, but a batch has only input_ids"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_sampling_without_an_end_token_is_refused_before_the_first_update(tmp_path):
    trainer = make_trainer(tmp_path, objective=MinimumRisk("chrf"), processing_class=Letters())
    trainer.model.config.eos_token_id = None
    with pytest.raises(ObjectiveError, match=r"need an end token: set model\.config\.eos_token_id"):
        trainer.train()


def test_sampling_from_divided_weights_is_refused_before_the_first_update(tmp_path):
    trainer = make_trainer(tmp_path, objective=MinimumRisk("chrf"), processing_class=Letters())
    trainer.is_fsdp_enabled = True
    with pytest.raises(ObjectiveError, match="FSDP and ZeRO-3 divide them: train with DDP"):
        trainer.train()


def test_sampling_in_a_tensor_parallel_group_is_refused(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, objective=MinimumRisk("chrf"), processing_class=Letters())
    monkeypatch.setattr(trainer, "get_tp_size", lambda: 2)
    with pytest.raises(ObjectiveError, match="the processes of one model would draw different"):
        trainer.train()


def test_the_targets_own_tokenizer_decodes_rewards(tmp_path):
    class Capitals(Letters):
        def batch_decode(self, *args, **kwargs):
            return [text.upper() for text in super().batch_decode(*args, **kwargs)]

    seen = []

    def reward(hypotheses, references):
        seen.extend(references)
        return [0.0] * len(hypotheses)

    objective = MinimumRisk(reward, 2, target_tokenizer=Capitals())
    make_trainer(tmp_path, objective=objective, processing_class=Letters(), max_steps=1).train()
    assert seen
    assert seen == [text.upper() for text in seen] != [text.lower() for text in seen]
    with pytest.raises(ObjectiveError, match="target_tokenizer must be a tokenizer, got 'folder'"):
        make_objective("risk", target_tokenizer="folder")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"likelihood": 0.3}, True),
        ({"likelihood": 0.3, "sharpness": 1.0}, False),
        ({"likelihood": 0.0}, False),
    ],
)
def test_a_likelihood_that_hides_the_risk_is_warned_of(tmp_path, settings, warned):
    objective = MinimumRisk(first_letters, 2, **settings)
    trainer = make_trainer(tmp_path, objective=objective, processing_class=Letters())
    with CaptureLogger(logging.get_logger("vaswani.training.sequence_objectives")) as captured:
        objective.prepare(trainer)
    assert ("the likelihood outweighs it: set sharpness=1" in captured.out) == warned


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"r_drop": 5.0}, "r_drop"),
        ({"objective": "risk"}, "objective"),
        ({"objective": "scheduled_sampling"}, "objective"),
        ({"batching": "packed"}, "batching='packed'"),
    ],
)
def test_what_only_translation_models_can_do_is_refused_for_others(tmp_path, settings, setting):
    model = VaswaniForCausalLM(VaswaniDecoderConfig(**SIZES_OF_DECODER))
    message = (
        f"{setting} works with translation models of vaswani only, not with VaswaniForCausalLM"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(tmp_path, model=model, **settings)


def test_a_function_is_an_objective_for_language_models_too(tmp_path):
    model = VaswaniForCausalLM(VaswaniDecoderConfig(**SIZES_OF_DECODER))
    trainer = make_trainer(tmp_path, model=model, objective=lambda model, inputs, update: None)
    assert trainer.training_objective(model, {}, UPDATE) is None


@pytest.mark.parametrize(
    ("column", "changes", "message"),
    [
        ("labels", {"batching": "packed"}, "Row 37 .* has no reference"),
        ("labels", {"max_source_tokens": None}, "Row 37 .* has no reference"),
        ("input_ids", {}, "Row 37 .* has no source"),
        ("input_ids", {"batching": "packed", "objective": None}, "Row 37 .* has no source tokens"),
        ("labels", {"batching": "packed", "objective": None}, "Row 37 .* has no labels"),
        ("labels", {"objective": None}, "Row 37 .* has no labels"),
    ],
)
def test_an_empty_row_ends_the_run_before_the_first_update(tmp_path, column, changes, message):
    data = training_data(60).map(
        lambda row, number: {column: [] if number == 37 else row[column]}, with_indices=True
    )
    changes = {"objective": MinimumRisk(first_letters, 2), "seed": 1} | changes
    trainer = make_trainer(tmp_path, processing_class=Letters(), data=data, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "bleu"}, "no objective 'bleu': choose one of r_drop, reinforce, risk"),
        ({"name": "risk", "alpha": 1}, "no setting 'alpha': it has reward, candidates"),
        ({"name": "risk", "reward": "meteor"}, "no reward 'meteor': choose one of bleu, chrf"),
        ({"name": "risk", "reward": "no_module:score"}, "no_module:score cannot be imported: No m"),
        ({"name": "risk", "reward": "math:tau_2"}, "math:tau_2 cannot be imported: module 'math'"),
        ({"name": "risk", "reward": "math:pi"}, "math:pi is 3.14.*, which is not callable"),
        ({"name": "risk", "candidates": 0}, "candidates must be an integer of at least 1, got 0"),
        ({"name": "risk", "candidates": "many"}, "candidates must be .* got 'many'"),
        ({"name": "risk", "candidates": math.nan}, "candidates must be .* got nan"),
        ({"name": "risk", "candidates": math.inf}, "candidates must be .* got inf"),
        ({"name": "risk", "reward_processes": "two"}, "reward_processes must be .* got 'two'"),
        ({"name": "reinforce", "candidates": 1}, "at least 2, got 1"),
        ({"name": "risk", "likelihood": 1.5}, "likelihood must be a number from 0 to 1, got 1.5"),
        ({"name": "risk", "likelihood": "1"}, "likelihood must be a number from 0 to 1, got '1'"),
        ({"name": "risk", "sharpness": 0}, "sharpness must be a positive number, got 0"),
        ({"name": "risk", "sharpness": "high"}, "sharpness must be a positive number, got 'high'"),
        ({"name": "scheduled_sampling", "schedule": "cosine"}, "got 'cosine'"),
        ({"name": "scheduled_sampling", "k": 0.5}, "k of the inverse_sigmoid schedule"),
        ({"name": "scheduled_sampling", "c": 0.1}, "c and floor belong to the linear schedule"),
        ({"name": "r_drop", "alpha": -1}, "alpha of R-Drop must be 0 or more"),
    ],
)
def test_wrong_settings_are_refused_by_name_and_value(settings, message):
    with pytest.raises(ObjectiveError, match=message):
        make_objective(**settings)


@pytest.mark.parametrize(
    "objective",
    [RDrop(1.0), ScheduledSampling(), MinimumRisk(first_letters, 2)],
    ids=["r_drop", "scheduled_sampling", "risk"],
)
def test_a_model_that_returns_tuples_has_the_same_loss(tiny_model, objective):
    losses = []
    for as_dict in (True, False):
        model = tiny_model(dropout=0.0).train()
        model.config.return_dict = as_dict
        torch.manual_seed(0)
        losses.append(prepared(objective)(model, collator(ROWS), UPDATE))
    assert torch.equal(*losses)


def test_a_generator_of_rows_keeps_its_first_row(tmp_path):
    seen = []

    def collate(rows):
        seen.extend(row["input_ids"] for row in rows)
        return collator(rows)

    rows = training_data(8).to_list()
    trainer = make_trainer(
        tmp_path,
        data=iter(rows),
        collate=collate,
        processing_class=Letters(),
        objective=MinimumRisk(first_letters, 2),
        max_source_tokens=1000,
        max_steps=1,
    )
    trainer.train()
    assert sorted(seen) == sorted(row["input_ids"] for row in rows)


def test_r_drop_and_another_objective_are_refused(tmp_path):
    with pytest.raises(ValueError, match="only one of r_drop and objective"):
        make_trainer(tmp_path, objective="risk", r_drop=1.0)


def test_rewards_are_sacrebleus_sentence_scores():
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = [("a b c d e", "a b c d f"), ("a", "a b"), ("", "a"), ("x y", "x y")]
    hypotheses, references = map(list, zip(*pairs, strict=True))
    for reward, score in (
        (sentence_bleu, lambda h, r: sacrebleu.sentence_bleu(h, [r]).score),
        (sentence_chrf, lambda h, r: sacrebleu.sentence_chrf(h, [r]).score),
    ):
        expected = [score(*pair) / 100 for pair in pairs]
        assert reward(hypotheses, references) == pytest.approx(expected)
