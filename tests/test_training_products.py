"""Products of float32 in training equal those of float64, up to roundings smaller than torch's."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from vaswani.generation.library_vaswani import library
from vaswani.modeling import training_products_vaswani
from vaswani.modeling.training_products_vaswani import multiply_matrices, project, project_each

from vaswani import VaswaniForConditionalGeneration


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    if library() is None or not library().multiplies_matrices():
        pytest.skip("this CPU has no AMX, or it is turned off")
    for name in ("_LEAST_MULTIPLICATIONS", "_LEAST_SIZE"):
        monkeypatch.setattr(training_products_vaswani, name, 1)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the kernel."""
    counted = []
    multiply = training_products_vaswani._multiply

    def count(*args, **kwargs):
        counted.append(args)
        multiply(*args, **kwargs)

    monkeypatch.setattr(training_products_vaswani, "_multiply", count)
    return counted


def error(found, exact):
    return ((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


def layers_of(inputs, *outs, bias=True):
    return [nn.Linear(inputs, out, bias=bias) for out in outs]


def exact(layers):
    return [copy.deepcopy(layer).double() for layer in layers]


class TestProducts:
    """Products of two matrices."""

    @pytest.mark.parametrize("left_by_columns", [False, True])
    @pytest.mark.parametrize("right_by_columns", [False, True])
    @pytest.mark.parametrize(
        ("rows", "inputs", "outs"),
        [(300, 700, 130), (1, 1, 1), (17, 65, 15), (64, 512, 48), (33, 1100, 257), (5, 4999, 3)],
    )
    def test_products_of_any_layout_and_size(
        self, left_by_columns, right_by_columns, rows, inputs, outs, calls
    ):
        left, right = torch.randn(rows, inputs), torch.randn(inputs, outs)
        if left_by_columns:
            left = left.t().contiguous().t()
        if right_by_columns:
            right = right.t().contiguous().t()
        assert error(multiply_matrices(left, right), left.double() @ right.double()) < 3e-7
        assert calls

    @pytest.mark.parametrize("inputs", [128, 512, 4096])
    def test_errors_are_smaller_than_those_of_torch(self, inputs):
        left, right = torch.randn(300, inputs), torch.randn(inputs, 200)
        exact_product = left.double() @ right.double()
        of_kernel = error(multiply_matrices(left, right), exact_product)
        assert of_kernel < error(left @ right, exact_product)

    def test_adds_to_an_output(self):
        left, right, output = torch.randn(70, 600), torch.randn(600, 50), torch.randn(70, 50)
        wanted = output.double() + left.double() @ right.double()
        result = multiply_matrices(left, right, output, adds=True)
        assert result is output
        assert error(output, wanted) < 2e-7

    def test_writes_to_an_output(self):
        left, right, output = torch.randn(70, 600), torch.randn(600, 50), torch.full((70, 50), 3.0)
        assert multiply_matrices(left, right, output) is output
        assert error(output, left.double() @ right.double()) < 2e-7

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_a_value_that_is_not_finite_makes_its_row_nan(self, value):
        left, right = torch.randn(40, 600), torch.randn(600, 50)
        whole = multiply_matrices(left, right)
        left[7, 555] = value
        found = multiply_matrices(left, right)
        assert found[7].isnan().all()
        others = torch.arange(40) != 7
        assert torch.equal(found[others], whole[others])

    @pytest.mark.parametrize("size", [1e-20, 1e-10, 1e15])
    def test_rows_may_have_any_size(self, size):
        left, right = torch.randn(40, 600), torch.randn(600, 50)
        left[3] *= size
        left[4] = 0
        wanted, found = left.double() @ right.double(), multiply_matrices(left, right)
        assert found[4].eq(0).all()
        assert error(found[3], wanted[3]) < 3e-7

    def test_a_large_value_makes_roundings_larger_in_its_group_of_inputs_alone(self):
        left, right = torch.randn(40, 1024), torch.randn(1024, 50)
        right[512:] = 0
        before = multiply_matrices(left, right)
        left[:, 700] = 1e6
        assert torch.equal(multiply_matrices(left, right), before)

    def test_a_row_depends_neither_on_other_rows_nor_on_threads(self, with_threads, calls):
        left, right = torch.randn(203, 1300), torch.randn(1300, 77)
        whole = with_threads(1, lambda: multiply_matrices(left, right))
        assert calls
        for threads in (2, 3, 5):
            product = with_threads(threads, lambda: multiply_matrices(left, right))
            some_rows = with_threads(threads, lambda: multiply_matrices(left[50:61], right))
            some_columns = with_threads(threads, lambda: multiply_matrices(left, right[:, :20]))
            assert torch.equal(product, whole)
            assert torch.equal(some_rows, whole[50:61])
            assert torch.equal(some_columns, whole[:, :20])

    @pytest.mark.parametrize("groups", [0, 2.5])  # of inputs, for which the memory is
    def test_little_memory_gives_the_same_product(self, groups, monkeypatch):
        left, right = torch.randn(203, 2300), torch.randn(2300, 77)
        whole = multiply_matrices(left, right)
        memory = int(groups * 80 * library().bytes_of_row())
        monkeypatch.setattr(training_products_vaswani, "_MEMORY", memory)
        assert torch.equal(multiply_matrices(left, right), whole)

    def test_the_largest_values_of_two_rows_may_have_a_product_too_large_for_a_float(self):
        left, right = torch.tensor([[1e20, 0.0]]), torch.tensor([[0.0], [1e20]])
        assert multiply_matrices(left, right).item() == 0

    def test_other_shapes_are_refused_as_by_torch(self, calls):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            multiply_matrices(torch.randn(50, 70), torch.randn(60, 70))
        assert not calls

    def test_views_are_read_as_they_are(self):
        left, right = torch.randn(60, 900)[::2, ::3], torch.randn(300, 90)[:, 5:45]
        wanted = left.double() @ right.double()
        assert error(multiply_matrices(left, right), wanted) < 2e-7

    def test_products_from_2_27_multiplications_on_use_the_kernel(self, monkeypatch, calls):
        monkeypatch.undo()
        monkeypatch.setattr(
            training_products_vaswani, "_multiply", lambda *args, **_: calls.append(1)
        )
        right = torch.randn(512, 512)
        multiply_matrices(torch.randn(511, 512), right)
        assert not calls
        multiply_matrices(torch.randn(512, 512), right)
        assert len(calls) == 1

    def test_small_products_and_other_dtypes_are_left_to_torch(self, monkeypatch, calls):
        left, right = torch.randn(100, 100), torch.randn(100, 100)
        for dtype in (torch.float64, torch.bfloat16):
            product = multiply_matrices(left.to(dtype), right.to(dtype))
            assert torch.equal(product, left.to(dtype) @ right.to(dtype))
        monkeypatch.setattr(training_products_vaswani, "_LEAST_MULTIPLICATIONS", 100**3 + 1)
        assert torch.equal(multiply_matrices(left, right), left @ right)
        assert not calls


class TestLayers:
    """Linear layers in training."""

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(
        ("inputs", "outs"), [(70, [40]), (70, [40, 100]), (64, [64, 64, 64]), (33, [700, 600, 80])]
    )
    def test_outputs_and_gradients_are_those_of_float64(self, inputs, outs, bias, calls):
        layers = layers_of(inputs, *outs, bias=bias)
        states = torch.randn(3, 250, inputs, requires_grad=True)
        wanted_states = states.detach().double().requires_grad_()
        found = project_each(layers, states)
        copies = exact(layers)
        wanted = [layer(wanted_states) for layer in copies]
        above = [torch.randn_like(output) for output in found]
        torch.autograd.backward(found, above)
        torch.autograd.backward(wanted, [each.double() for each in above])
        assert calls
        for output, exact_output in zip(found, wanted, strict=True):
            assert error(output, exact_output.detach()) < 2e-7
        assert error(states.grad, wanted_states.grad) < 2e-7
        for layer, exact_layer in zip(layers, copies, strict=True):
            for weight, exact_weight in zip(
                layer.parameters(), exact_layer.parameters(), strict=True
            ):
                assert error(weight.grad, exact_weight.grad) < 3e-7

    def test_only_what_needs_a_gradient_gets_one(self, calls):
        first, second = layers_of(70, 40, 40)
        first.weight.requires_grad_(False)
        states = torch.randn(50, 70)
        sum(output.sum() for output in project_each([first, second], states)).backward()
        assert first.weight.grad is None
        wanted = torch.autograd.grad(second(states).sum(), [second.weight, second.bias])
        torch.testing.assert_close([second.weight.grad, second.bias.grad], list(wanted))
        assert len(calls) == 2  # outputs, and gradients of one weight

    def test_an_output_without_a_gradient_counts_as_zeros(self):
        layers = layers_of(70, 40, 40)
        states = torch.randn(50, 70, requires_grad=True)
        project_each(layers, states)[0].sum().backward()
        wanted = layers[0].weight.sum(0).expand(50, 70)
        torch.testing.assert_close(states.grad, wanted)
        assert layers[1].weight.grad.eq(0).all()

    def test_second_derivatives_are_those_of_torch(self, calls):
        (layer,) = layers_of(70, 40)
        states = torch.randn(50, 70, requires_grad=True)

        def second(call):
            (slope,) = torch.autograd.grad(call(states).pow(3).sum(), states, create_graph=True)
            return torch.autograd.grad(slope.pow(2).sum(), [states, layer.weight])

        found, wanted = second(lambda states: project(layer, states)), second(layer)
        assert calls
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("used", [0, 1])  # number of the output with a gradient
    def test_batched_gradients_are_those_of_torch(self, used, calls):
        layers = layers_of(70, 40, 40)
        states, above = torch.randn(50, 70, requires_grad=True), torch.randn(3, 50, 40)
        inputs = [states, layers[used].weight]
        found, wanted = (
            torch.autograd.grad(output, inputs, above, is_grads_batched=True)
            for output in (project_each(layers, states)[used], layers[used](states))
        )
        assert calls
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    def test_a_mode_of_the_backward_pass_sees_torchs_operators(self):
        (layer,) = layers_of(70, 40)
        states = torch.randn(50, 70, requires_grad=True)
        counts = []
        for output in (project(layer, states), layer(states)):
            with FlopCounterMode(display=False) as counter:
                output.sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0

    def test_a_transposed_weight_gets_its_gradient(self, calls):
        (layer,) = layers_of(70, 70)
        layer.weight = nn.Parameter(torch.randn(70, 70).t())
        states = torch.randn(50, 70)
        (found,) = torch.autograd.grad(project(layer, states).sum(), layer.weight)
        assert calls
        torch.testing.assert_close(found, states.sum(0).expand(70, 70), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("frozen", ["weight", "states"])
    def test_only_what_a_gradient_needs_is_kept(self, frozen):
        (layer,) = layers_of(70, 40)
        layer.weight.requires_grad_(frozen != "weight")
        states = torch.randn(50, 70, requires_grad=frozen != "states")
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda number: number):
            project(layer, states)
        expected = layer.weight if frozen == "weight" else states
        assert [tensor.data_ptr() for tensor in kept] == [expected.data_ptr()]

    @pytest.mark.parametrize(
        "reason",
        ["evaluation", "hook", "backward hook", "global hook", "subclass", "autocast", "dual"],
    )
    def test_other_layers_are_called_as_modules(self, reason, calls, monkeypatch):
        (layer,) = layers_of(70, 40)
        states = torch.randn(50, 70)
        if reason == "evaluation":
            layer.eval()
        elif reason == "hook":
            layer.register_forward_hook(lambda layer, inputs, output: output * 2)
        elif reason == "backward hook":
            layer.register_full_backward_hook(lambda layer, inputs, outputs: None)
        elif reason == "subclass":
            layer.__class__ = type("Adapted", (nn.Linear,), {})
        with contextlib.ExitStack() as stack:
            if reason == "global hook":
                hook = nn.modules.module.register_module_forward_hook(lambda *args: args[-1] * 2)
                stack.callback(hook.remove)
            elif reason == "autocast":
                stack.enter_context(torch.autocast("cpu"))
            elif reason == "dual":
                stack.enter_context(forward_ad.dual_level())
                states = forward_ad.make_dual(states, torch.ones_like(states))
            assert torch.equal(project(layer, states), layer(states))
        assert not calls

    def test_a_bias_of_one_value_is_added_by_torch(self, calls):
        (layer,) = layers_of(70, 40)
        layer.bias = nn.Parameter(torch.ones(1))
        states = torch.randn(50, 70)
        assert torch.equal(project(layer, states), layer(states))
        assert not calls

    def test_other_widths_are_refused_as_by_torch(self, calls):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            project(*layers_of(70, 40), torch.randn(50, 80))
        assert not calls


class TestModels:
    """Whole models that train with the kernel."""

    def test_gradients_are_as_exact_as_torch_makes_them(self, tiny_config, monkeypatch, calls):
        model = VaswaniForConditionalGeneration(tiny_config(dropout=0.0)).train()
        tokens = torch.randint(4, model.config.vocab_size, (8, 9))
        batch = {"input_ids": tokens, "labels": tokens.flip(1)}

        def gradients(of):
            of.zero_grad()
            of(**batch).loss.backward()
            return [weight.grad.clone() for weight in of.parameters()]

        found = gradients(model)
        assert calls
        wanted = gradients(copy.deepcopy(model).double())
        monkeypatch.setattr(training_products_vaswani, "_can_multiply", lambda *tensors: False)
        by_torch = gradients(model)
        for gradient, of_torch, exact_gradient in zip(found, by_torch, wanted, strict=True):
            assert error(gradient, exact_gradient) < 3 * error(of_torch, exact_gradient) + 1e-7

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointing_computes_the_same(self, use_reentrant, tiny_config, calls):
        model = VaswaniForConditionalGeneration(tiny_config()).train()
        tokens = torch.randint(4, model.config.vocab_size, (8, 9))

        def gradients():
            model.zero_grad()
            torch.manual_seed(1)
            model(input_ids=tokens, labels=tokens).loss.backward()
            return [weight.grad.clone() for weight in model.parameters()]

        wanted = gradients()
        before = len(calls)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        found = gradients()
        assert len(calls) > 2 * before  # the forward pass is repeated
        assert all(map(torch.equal, found, wanted))
