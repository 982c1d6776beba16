"""Prepared weights serve later calls until an attribute or a weight changes."""

import copy
import gc
import weakref

import pytest
import torch
from compiled_models import compiled, model_with, translate
from vaswani.generation import compiled_vaswani, linear_vaswani
from vaswani.generation.compiled_vaswani import CompiledLayers
from vaswani.generation.snapshots_vaswani import Snapshot, prepared_once


def layer_of(model):
    return model.model.decoder.layers[1]


# Changes that no comparison of weights would show.
CHANGES = {
    "a scaling": lambda m: setattr(layer_of(m).self_attn, "scaling", 0.9),
    "the scaling of the source": lambda m: setattr(layer_of(m).encoder_attn, "scaling", 2.5),
    "an epsilon": lambda m: setattr(layer_of(m).final_layer_norm, "eps", 0.3),
    "the place of LayerNorm": lambda m: setattr(layer_of(m), "norm_first", True),
    "an activation": lambda m: setattr(layer_of(m), "activation_fn", torch.nn.GELU()),
    "other layers": lambda m: setattr(
        m.model.decoder, "layers", torch.nn.ModuleList(list(m.model.decoder.layers)[::-1])
    ),
    "the order of layers": lambda m: m.model.decoder.layers.__setitem__(0, layer_of(m)),
    "an exchanged norm": lambda m: setattr(
        layer_of(m), "final_layer_norm", layer_of(m).self_attn_layer_norm
    ),
    "a shared layer": lambda m: setattr(layer_of(m), "fc1", m.model.decoder.layers[0].fc1),
    "the encoder": lambda m: setattr(m.model.encoder.layers[0].self_attn, "scaling", 1.5),
}


def answer(model):
    return translate(model, num_beams=2)


@compiled
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_attribute_is_seen(change):
    model = model_with(decoder_ffn_dim=64)
    usual = answer(model)
    fresh = copy.deepcopy(model)
    change(fresh)
    change(model)
    expected = answer(fresh)
    found = answer(model)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], usual[1])


@compiled
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_weight_that_is_not_stored_in_order_is_prepared_for_each_call(part):
    model = model_with()
    layer = layer_of(model).fc1
    values = getattr(layer, part).data
    setattr(layer, part, torch.nn.Parameter(values.repeat_interleave(2, dim=0)[::2]))
    before = answer(model)
    assert torch.equal(answer(model)[1], before[1])
    getattr(layer, part).data.mul_(-1)
    after = answer(model)
    assert not torch.equal(after[1], before[1])
    assert torch.equal(after[1], answer(copy.deepcopy(model))[1])


@compiled
def test_later_calls_prepare_nothing_again(monkeypatch):
    model = model_with()
    before = answer(model)
    calls = []
    monkeypatch.setattr(linear_vaswani.Panels, "pack", lambda *_: calls.append("pack"))
    monkeypatch.setattr(compiled_vaswani, "_describe", lambda *_: calls.append("describe"))
    monkeypatch.setattr(compiled_vaswani, "compiled_product", lambda *_, **__: calls.append("one"))
    assert torch.equal(answer(model)[1], before[1])
    assert not calls


@compiled
@pytest.mark.parametrize("value", [torch.ones(8), [1]], ids=str)
def test_an_attribute_may_become_one_that_cannot_be_compared(value):
    model = model_with()
    layer_of(model).probe = 0.0
    before = answer(model)
    layer_of(model).probe = value
    assert torch.equal(answer(model)[1], before[1])


@compiled
def test_a_child_may_lead_back_to_the_decoder():
    model = model_with()
    before = answer(model)
    layer_of(model).owner = model.model.decoder
    assert torch.equal(answer(model)[1], before[1])


@compiled
def test_a_scripted_activation_is_left_to_torch():
    model = model_with()
    before = answer(model)
    layer_of(model).activation_fn = torch.jit.script(torch.nn.ReLU())
    assert torch.allclose(answer(model)[1], before[1], atol=1e-5)


@compiled
def test_modules_that_the_layers_do_not_read_do_not_prepare_them_again(monkeypatch):
    model = model_with()
    layer_of(model).unread = torch.nn.Linear(2, 2)
    layer_of(model).unread.history = []
    before = answer(model)
    calls = []
    monkeypatch.setattr(compiled_vaswani, "_describe", lambda *_: calls.append("describe"))
    assert torch.equal(answer(model)[1], before[1])
    assert not calls


@compiled
class TestPreparedOnce:
    """`prepared_once` prepares again after each change, and only then."""

    @pytest.fixture
    def layer(self):
        return torch.nn.Linear(8, 4)

    @pytest.fixture
    def prepare(self, layer):
        """Return a function that prepares the layer's weight, and counts how often."""

        def doubled(snapshot):
            doubled.count += 1
            return snapshot.copy(layer.weight) * 2

        doubled.count = 0
        return lambda: (prepared_once(layer, "doubled", [layer], doubled), doubled.count)

    def test_a_weight_is_prepared_once(self, layer, prepare):
        first, _ = prepare()
        again, count = prepare()
        assert again is first
        assert count == 1

    def test_a_change_while_it_is_prepared_is_seen(self, layer):
        def prepare(snapshot):
            copied = snapshot.copy(layer.weight)
            layer.weight.data.add_(1)
            return copied

        first = prepared_once(layer, "copied", [layer], prepare)
        assert torch.equal(first + 1, layer.weight)
        assert torch.equal(prepared_once(layer, "copied", [layer], prepare) + 1, layer.weight)

    def test_an_equal_weight_elsewhere_is_another(self, layer, prepare):
        prepare()
        layer.weight.data = layer.weight.data.clone()
        assert prepare()[1] == 2

    def test_weights_beyond_the_cpu_never_count_as_unchanged(self, layer):
        snapshot = Snapshot([layer], [layer.to("meta")])
        assert snapshot.complete()
        assert not snapshot.holds([layer])

    def test_nothing_is_kept_for_what_cannot_be_prepared(self, layer):
        calls = []
        for _ in range(2):
            assert prepared_once(layer, "nothing", [layer], calls.append) is None
        assert len(calls) == 2

    def test_weights_that_are_away_during_the_preparation_are_seen_when_they_return(self, layer):
        """A thread that evaluates averaged weights swaps the model's own weights out and back."""
        own, other = layer.weight.data, layer.weight.data + 1

        def prepare(snapshot):
            layer.weight.data = other
            copied = snapshot.copy(layer.weight)
            layer.weight.data = own
            return copied

        assert torch.equal(prepared_once(layer, "copied", [layer], prepare), other)
        copy_now = lambda snapshot: snapshot.copy(layer.weight)  # noqa: E731
        assert torch.equal(prepared_once(layer, "copied", [layer], copy_now), own)

    @pytest.mark.parametrize(
        "attribute", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), [1], {}, (1, [2])], ids=str
    )
    def test_attributes_that_could_change_unseen_are_read_in_each_call(
        self, layer, prepare, attribute
    ):
        vars(layer)["attribute"] = attribute
        prepare()
        assert prepare()[1] == 2

    def test_a_list_that_leads_back_to_the_module_does_not_keep_it(self):
        def prepare(layer):
            vars(layer)["owners"] = [layer]
            prepared_once(layer, "copied", [layer], lambda snapshot: snapshot.copy(layer.weight))
            return weakref.ref(layer)

        gone = prepare(torch.nn.Linear(8, 4))
        gc.collect()
        assert gone() is None

    def test_a_class_that_leads_back_to_the_module_does_not_keep_it(self):
        def prepare(layer):
            class Probe(torch.nn.Module):
                owner = layer

            modules = [layer, Probe()]
            prepared_once(layer, "copied", modules, lambda snapshot: snapshot.copy(layer.weight))
            return weakref.ref(layer)

        gone = prepare(torch.nn.Linear(8, 4))
        gc.collect()
        assert gone() is None

    def test_an_object_that_is_gone_is_not_none(self, layer, prepare):
        layer.probe = lambda: None
        prepare()
        assert prepare()[1] == 1
        layer.probe = None
        assert prepare()[1] == 2

    def test_another_kind_replaces_the_first(self, layer, prepare):
        prepare()
        prepared_once(layer, "other", [layer], lambda snapshot: snapshot.copy(layer.bias))
        assert prepare()[1] == 2


@compiled
def test_an_activation_that_is_no_module_is_left_to_torch():
    model = model_with()
    layer = layer_of(model)
    del layer.activation_fn
    layer.activation_fn = torch.relu
    assert CompiledLayers.prepare(model.model.decoder.layers, 4) is None


@compiled
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_values_of_another_type_are_left_to_torch(name):
    class Wrapped(torch.Tensor):
        pass

    model = model_with()
    for module in (layer_of(model).final_layer_norm, layer_of(model).fc1):
        values = getattr(module, name).detach().as_subclass(Wrapped)
        setattr(module, name, torch.nn.Parameter(values))
        assert CompiledLayers.prepare(model.model.decoder.layers, 4) is None
