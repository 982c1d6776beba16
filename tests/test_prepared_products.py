"""Prepared products are those of the layers, and their packed weights are made once and shared."""

import pytest
import torch
from torch import nn
from transformers import CompileConfig
from vaswani.generation import linear_vaswani
from vaswani.generation.linear_vaswani import PreparedLinear, prepare, prepared_copy
from ways_to_change_weights import DTYPES, SOURCE, answer, build, layer_of, packs

pytestmark = packs


@pytest.fixture
def layers():
    return nn.Linear(160, 128), nn.Linear(160, 200, bias=False), nn.Linear(160, 150)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_products_are_those_of_the_layers(layers, number, dtype):
    if dtype not in linear_vaswani._packed_dtypes():
        pytest.skip(f"oneDNN packs no {dtype} on this CPU")
    layers = [layer.to(dtype) for layer in layers[:number]]
    product = prepare(*layers)
    for _ in range(3):
        states = torch.randn(3, 5, 160, dtype=dtype)
        expected = torch.cat([layer(states) for layer in layers], dim=-1)
        torch.testing.assert_close(product(states), expected)
    assert len(linear_vaswani._packed_of[layers[0]]) == 1


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_an_activation_in_the_product_changes_no_bit(layers, activation, dtype):
    layer, states = layers[0].to(dtype), torch.randn(8, 160, dtype=dtype)
    plain, activated = prepare(layer), prepare(layer, activation=activation)
    for _ in range(3):  # without packed weights at first
        assert torch.equal(activated(states), activation(plain(states)))


@torch.no_grad()
def test_activations_with_hooks_are_called(layers):
    activation, calls = nn.ReLU(), []
    activation.register_forward_hook(lambda *_: calls.append(1))
    prepare(layers[0], activation=activation)(torch.randn(8, 160))
    assert calls == [1]


@torch.no_grad()
def test_a_weight_is_packed_in_the_second_product_and_then_shared(layers, monkeypatch):
    packed = []

    class Watched(linear_vaswani._PackedForTorch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            packed.append(self)

    monkeypatch.setattr(linear_vaswani, "_PackedForTorch", Watched)
    states, counts = torch.randn(8, 160), []
    for _ in range(3):
        product = prepare(layers[0])
        for _ in range(3):
            product(states)
            counts.append(len(packed))
    assert counts == [0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_gradients_and_autocast_use_the_layers_themselves(layers):
    states = torch.randn(8, 160)
    prepare(layers[0])(states).sum().backward()
    assert layers[0].weight.grad.abs().sum() > 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert prepare(layers[0])(states).dtype == torch.bfloat16


@torch.no_grad()
def test_a_prepared_copy_shares_parameters_and_stands_for_its_original():
    model = build()
    copied = prepared_copy(model, lambda module: True)
    assert copied is not model
    assert isinstance(copied.lm_head, PreparedLinear)
    assert copied.lm_head.weight is model.lm_head.weight
    torch.testing.assert_close(
        copied(SOURCE, decoder_input_ids=SOURCE).logits,
        model(SOURCE, decoder_input_ids=SOURCE).logits,
    )
    states = torch.randn(8, 128)
    product = prepare(copied.lm_head)
    product(states), product(states)
    assert model.lm_head in linear_vaswani._packed_of
    assert copied.lm_head not in linear_vaswani._packed_of


def test_a_compiled_step_multiplies_by_the_weights_of_the_layers():
    model, graphs = build(), []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    compilation = CompileConfig(backend=keep, mode=None)
    compilation._compile_all_devices = True
    call = {"cache_implementation": "static", "max_new_tokens": 4}
    expected = model.generate(SOURCE, **call)
    assert torch.equal(model.generate(SOURCE, **call, compile_config=compilation), expected)
    assert graphs
    assert "linear" in graphs[0]
    assert "mkldnn" not in graphs[0]  # Inductor has no kernel for weights packed by torch


@torch.no_grad()
def test_a_copy_keeps_the_modules_that_may_not_be_copied():
    model = build()
    own = layer_of(model)
    copied = prepared_copy(model, lambda module: module is not own)
    assert layer_of(copied) is own
    assert type(own.fc1) is nn.Linear
    assert prepared_copy(model, lambda module: False) is model


def test_hooks_on_a_copy_stay_there():
    model = build()
    with torch.no_grad():
        copied = prepared_copy(model, lambda module: True)
    copied.model.decoder.register_forward_hook(lambda *_: None)
    assert not model.model.decoder._forward_hooks


def test_generating_under_autocast_answers_as_transformers_does():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        ours = answer(model)
        theirs = answer(model, output_scores=True)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0.01, atol=0)
