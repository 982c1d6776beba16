"""Dropout with cheap random numbers: rate, scale, independence, gradient (5.4)."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from vaswani.modeling import dropout_vaswani
from vaswani.modeling.dropout_vaswani import drop_out


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(500, 401), (3, 5, 7001)])
def test_rate_and_scale_are_those_asked_for(p, shape):
    states = torch.rand(shape, dtype=torch.float64) + 1
    output = drop_out(states, p, training=True)
    kept = output != 0
    deviation = math.sqrt(p * (1 - p) / states.numel())
    assert (~kept).double().mean().item() == pytest.approx(p, abs=4 * deviation + 2**-17)
    torch.testing.assert_close(output[kept], states[kept] / (1 - p), rtol=1e-4, atol=0)
    # The scale matches the drawn rate exactly, so the mean is kept.
    scale = (output[kept] / states[kept])[0].item()
    assert (1 / scale * 2**16) == pytest.approx(round(1 / scale * 2**16), abs=1e-6)


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8])
def test_elements_that_share_a_random_number_are_independent(distance):
    kept = (drop_out(torch.ones(400_000), 0.3, training=True) != 0).double()
    both = (kept[:-distance] * kept[distance:]).mean().item()
    assert both == pytest.approx(0.7**2, abs=4e-3)


def test_gradients_pass_where_states_did():
    states = torch.randn(40, 33, dtype=torch.float64, requires_grad=True)
    output = drop_out(states, 0.25, training=True)
    (gradient,) = torch.autograd.grad(output.sum(), states)
    torch.testing.assert_close(gradient, (output / states).detach(), rtol=1e-12, atol=0)


def test_a_seed_gives_the_same_mask_and_the_next_call_another():
    states = torch.ones(1000)
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs.append([drop_out(states, 0.5, training=True) for _ in range(2)])
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1])


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (1e-9, 1.0), (1.0, 0.0), (1 - 1e-12, 0.0)])
def test_rates_at_the_ends_keep_all_or_nothing(p, expected):
    assert torch.equal(drop_out(torch.ones(9, 3), p, training=True), torch.full((9, 3), expected))


def test_outside_training_nothing_is_dropped():
    states = torch.randn(50)
    assert drop_out(states, 0.5, training=False) is states


def test_compiled_training_draws_as_torch_does(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(dropout_vaswani, "_CheapDropout", None)
    assert (drop_out(torch.ones(1000), 0.5, training=True) == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_are_kept(dtype):
    assert drop_out(torch.ones(8, dtype=dtype), 0.5, training=True).dtype == dtype


def test_a_derivative_is_computed_forwards():
    states, direction = torch.rand(2, 40, 9).unbind()
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(drop_out(forward_ad.make_dual(states, direction), 0.5, True))
        torch.testing.assert_close(dual.tangent, dual.primal / states * direction)
    assert 0 < (dual.primal == 0).sum() < states.numel()


def test_torch_func_differentiates_dropout():
    gradient = torch.func.grad(lambda states: drop_out(states, 0.25, training=True).sum())
    found = gradient(torch.ones(1000))
    assert set(found.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
