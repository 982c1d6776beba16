"""Muon updates the matrices of layers as its papers say, and AdamW everything else."""

import copy
import math

import pytest
import torch
from test_batching import assert_bit_for_bit, make_trainer, weights
from torch import nn
from torch.optim import AdamW
from transformers import MarianConfig, MarianMTModel
from vaswani.training.muon import Muon, matrices_of, orthogonal

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_are_a_polynomial_of_the_singular_values(shape):
    batch = torch.randn(3, *shape, dtype=torch.float64)
    for matrix, found in zip(batch, orthogonal(batch), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(found, left @ values.diag() @ right, atol=1e-6, rtol=1e-5)


def test_singular_values_come_near_one():
    batch = torch.randn(4, 32, 96)
    values = torch.linalg.svdvals(orthogonal(batch))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_updates_are_those_of_torch():
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    start = [weight.detach().clone() for weight in ours]
    settings = {"momentum": 0.9, "weight_decay": 0.1}
    other = nn.Parameter(torch.zeros(1))
    optimizers = (
        Muon(ours, [other], lr=0.1, factor=0.5, **settings),
        torch.optim.Muon(theirs, lr=0.05, adjust_lr_fn="match_rms_adamw", **settings),
    )
    for _ in range(3):
        for own, their in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            their.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, their, first in zip(ours, theirs, start, strict=True):
        # torch iterates in bfloat16, whose precision is 2^-8.
        difference = (own - their).norm() / (their - first).norm()
        assert difference < 0.02


def test_other_parameters_are_updated_by_adamw():
    ours, theirs = (nn.Parameter(torch.ones(7)) for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.2}
    muon, adam = Muon([nn.Parameter(torch.eye(2))], [ours], **settings), AdamW([theirs], **settings)
    for _ in range(4):
        ours.grad = torch.randn(7)
        theirs.grad = ours.grad.clone()
        muon.step()
        adam.step()
    assert torch.equal(ours, theirs)


def test_a_matrix_without_gradient_stays_and_a_closure_is_called():
    still, moved = (nn.Parameter(torch.eye(3)) for _ in range(2))
    muon = Muon([still, moved], [nn.Parameter(torch.zeros(1))], lr=0.1, weight_decay=0.5)

    def closure():
        loss = (moved**2).sum()
        loss.backward()
        return loss

    assert float(muon.step(closure).detach()) == 3
    assert torch.equal(still, torch.eye(3))
    assert not torch.equal(moved, torch.eye(3))


def test_a_loaded_state_continues_the_same_updates():
    def make():
        torch.manual_seed(1)
        weights = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
        return weights, Muon([weights[0]], [weights[1]], lr=0.1)

    def update(weights, optimizer, seed):
        torch.manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()

    whole, optimizer = make()
    update(whole, optimizer, 2)
    halves, second = make()
    with torch.no_grad():
        for half, weight in zip(halves, whole, strict=True):
            half.copy_(weight)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    update(whole, optimizer, 3)
    update(halves, second, 3)
    assert all(map(torch.equal, halves, whole))


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"Muon needs whole matrices, got a Parameter \(4,\)"):
        Muon([nn.Parameter(torch.zeros(4))], [nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_linear_layers_of_both_stacks(tiny_model, tied):
    model = tiny_model(tie_word_embeddings=tied)
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    assert set(matrices_of(model)) == linear
    assert len(linear) == 2 * 6 + 2 * 10
    model.model.encoder.requires_grad_(False)
    assert len(matrices_of(model)) == 2 * 10


def test_other_packages_models_have_matrices_too():
    config = MarianConfig(
        vocab_size=9, d_model=4, encoder_layers=1, decoder_layers=1, pad_token_id=0,
        encoder_attention_heads=1, decoder_attention_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    assert len(matrices_of(MarianMTModel(config))) == 6 + 10


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, batching):
    saving = {"save_strategy": "steps", "save_steps": 3, "muon": True, "weight_decay": 0.1}
    saving |= {"batching": batching, "noam_warmup_steps": 5, "max_grad_norm": 1.0}
    whole = make_trainer(tmp_path, **saving)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert_bit_for_bit(weights(resumed), weights(whole))
    assert whole.settings()["muon"] == 1.0
    plain = make_trainer(tmp_path / "plain", **saving | {"muon": False})
    plain.train()
    names = [name for name, weight in weights(whole).items() if weight.dim() == 2]
    assert not any(torch.equal(weights(plain)[name], weights(whole)[name]) for name in names)


@pytest.mark.parametrize("muon", [1.0, 0.0])
def test_resuming_with_another_optimizer_is_refused(tmp_path, muon):
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    make_trainer(tmp_path, muon=muon, **saving).train()
    resumed = make_trainer(tmp_path, muon=1.0 - muon, **saving | {"max_steps": 6})
    message = rf"checkpoint-3 was trained with another optimizer, .*\(muon={1.0 - muon} here\)"
    with pytest.raises(ValueError, match=message):
        resumed.train(resume_from_checkpoint=True)


def test_the_trainer_gives_muon_its_settings_and_leaves_biases_without_decay(tmp_path):
    trainer = make_trainer(
        tmp_path, muon=0.5, learning_rate=0.25, adam_beta2=0.98, adam_epsilon=1e-6,
        weight_decay=0.5,
    )  # fmt: skip
    matrices, decaying, others = trainer.create_optimizer().param_groups
    assert len(matrices["params"]) == len(matrices_of(trainer.model))
    assert {group["lr"] for group in (matrices, decaying, others)} == {0.25}
    assert matrices["factor"] == 0.5
    assert (decaying["betas"], decaying["eps"]) == ((0.9, 0.98), 1e-6)
    assert [group["weight_decay"] for group in (matrices, decaying, others)] == [0.5, 0.5, 0.0]
    assert {weight.dim() for weight in decaying["params"]} == {2}
    assert {weight.dim() for weight in others["params"]} == {1}
    counted = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    assert counted == len(list(trainer.model.parameters()))


@pytest.mark.parametrize(
    "other",
    [
        {"optim": "adafactor"},
        {"optimizers": (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), None)},
    ],
)
def test_a_second_optimizer_is_refused(tmp_path, other):
    with pytest.raises(ValueError, match="Muon is an optimizer too"):
        make_trainer(tmp_path, muon=True, **other)


@pytest.mark.parametrize("backend", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_divided_weights_are_refused(tmp_path, monkeypatch, backend):
    trainer = make_trainer(tmp_path, muon=True)
    monkeypatch.setattr(trainer, backend, True)
    with pytest.raises(ValueError, match="Muon needs the whole weights in each process"):
        trainer._require_whole_matrices()


@pytest.mark.parametrize("factor", [-1, float("nan")])
def test_a_factor_below_zero_is_refused(tmp_path, factor):
    with pytest.raises(ValueError, match="muon must be 0 or more, got"):
        make_trainer(tmp_path, muon=factor)


def test_an_update_is_about_as_large_as_one_of_adam():
    weight = nn.Parameter(torch.zeros(64, 256))
    muon = Muon([weight], [nn.Parameter(torch.zeros(1))], lr=1.0)
    weight.grad = torch.randn(64, 256)
    muon.step()
    size = math.sqrt(float((weight**2).mean()))
    assert size == pytest.approx(0.2, rel=0.2)


def test_another_factor_is_refused_when_a_run_is_resumed(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, muon=1.0, max_steps=1, **saving).train()
    with pytest.raises(ValueError, match=r"was trained with muon=1.0, but this run has muon=0.5"):
        make_trainer(tmp_path, muon=0.5, max_steps=2, **saving).train(resume_from_checkpoint=True)


def test_optimizers_of_8_bits_are_not_taken_for_adamw(tmp_path):
    with pytest.raises(ValueError, match="Muon is an optimizer too"):
        make_trainer(tmp_path, muon=1.0, optim="adamw_torch_8bit")
