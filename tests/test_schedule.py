"""The learning rate is equation 3 (5.3) from the first update on, and survives a resume."""

import pytest
import torch
from test_batching import STEPS, assert_bit_for_bit, make_trainer, weights
from transformers import TrainerCallback
from vaswani.training.schedule import noam_rate, noam_schedule


def equation_3(step, d_model, warmup):
    """Return lrate = d_model^-0.5 * min(step_num^-0.5, step_num * warmup_steps^-1.5)."""
    rising = step / (warmup * warmup**0.5)
    falling = 1 / step**0.5
    return min(rising, falling) / d_model**0.5


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 4000), (128, 3), (7, 1)])
def test_rate_is_equation_3_with_its_peak_at_the_end_of_the_warmup(d_model, warmup):
    for step in (1, 2, 3, 100, 3999, 4000, 4001, 100_000):
        expected = equation_3(step, d_model, warmup)
        assert noam_rate(step, d_model, warmup) == pytest.approx(expected, rel=1e-14)
    peak = noam_rate(warmup, d_model, warmup)
    assert peak == pytest.approx((d_model * warmup) ** -0.5, rel=1e-14)
    assert peak >= max(noam_rate(step, d_model, warmup) for step in range(1, 3 * warmup, 7))


@pytest.mark.parametrize("arguments", [(0, 512, 4000), (1, 0, 4000), (1, 512, 0)])
def test_numbers_below_one_are_refused(arguments):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        noam_rate(*arguments)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_schedule_sets_every_update_whatever_the_optimizer_was_made_with(factor):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([{"params": [weight], "lr": 7.0}], lr=3.0)
    schedule = noam_schedule(optimizer, d_model=16, warmup_steps=4, factor=factor)
    for step in range(1, 20):
        expected = factor * equation_3(step, 16, 4)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-14)
        optimizer.step()
        schedule.step()


class Rates(TrainerCallback):
    """Record the learning rate of each update."""

    def __init__(self):
        self.seen = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        self.seen[state.global_step + 1] = rate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_makes_update_n_with_the_rate_of_step_n(tmp_path, accumulate):
    rates = Rates()
    make_trainer(
        tmp_path,
        noam_warmup_steps=5,
        noam_factor=0.5,
        gradient_accumulation_steps=accumulate,
        learning_rate=9.0,
        callbacks=[rates],
    ).train()
    assert list(rates.seen) == list(range(1, STEPS + 1))
    for step, rate in rates.seen.items():
        assert rate == pytest.approx(0.5 * equation_3(step, 16, 5), rel=1e-14)


def test_a_resumed_run_goes_on_with_the_next_step(tmp_path):
    saving = {"noam_warmup_steps": 5, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path, **saving)
    whole.train()
    rates = Rates()
    resumed = make_trainer(tmp_path / "resumed", callbacks=[rates], **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert list(rates.seen) == list(range(10, STEPS + 1))
    for step, rate in rates.seen.items():
        assert rate == pytest.approx(equation_3(step, 16, 5), rel=1e-14)
    assert_bit_for_bit(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"noam_warmup_steps": 5, "noam_factor": 0.5},
        {"noam_warmup_steps": 6},
        {"learning_rate": 0.25},
    ],
)
def test_resuming_with_another_learning_rate_is_refused(tmp_path, other):
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    base = {"learning_rate": 0.5} if "learning_rate" in other else {"noam_warmup_steps": 5}
    make_trainer(tmp_path, **base, **saving).train()
    resumed = make_trainer(tmp_path, **saving | other | {"max_steps": 6})
    with pytest.raises(ValueError, match=r"checkpoint-3 was trained .* Resume with the settings"):
        resumed.train(resume_from_checkpoint=True)


def test_a_second_training_starts_at_step_one_again(tmp_path):
    rates = Rates()
    trainer = make_trainer(tmp_path, noam_warmup_steps=5, callbacks=[rates], max_steps=3)
    trainer.train()
    trainer.train()
    assert rates.seen[1] == pytest.approx(equation_3(1, 16, 5), rel=1e-14)


def test_without_it_the_schedule_is_that_of_the_settings(tmp_path):
    rates = Rates()
    make_trainer(
        tmp_path, learning_rate=0.5, lr_scheduler_type="constant", callbacks=[rates], max_steps=3
    ).train()
    assert set(rates.seen.values()) == {0.5}


def test_a_given_scheduler_beside_the_papers_is_refused(tmp_path):
    trainer = make_trainer(tmp_path / "other")
    adam = torch.optim.Adam(trainer.model.parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(adam)
    with pytest.raises(ValueError, match="noam_warmup_steps is a schedule too"):
        make_trainer(tmp_path, noam_warmup_steps=9, optimizers=(adam, constant))
