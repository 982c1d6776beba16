"""Products of int8 weights: rounded weights and states, and exact sums of their products."""

import platform
import subprocess
import sys

import pytest
import torch
from launches import environment
from torch.nn import functional
from vaswani.generation import int8_vaswani, linear_vaswani
from vaswani.generation.int8_vaswani import (
    Int8Linear,
    PackedInt8,
    multiplies_exactly,
    multiply,
    round_weight,
)
from vaswani.generation.linear_vaswani import prepare

exact = pytest.mark.skipif(not multiplies_exactly(), reason="this CPU has no exact int8 products")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_rounded_to_the_nearest_step_of_their_channel(dtype):
    weight = torch.randn(40, 30, dtype=dtype) * torch.logspace(-8, 8, 40, dtype=dtype)[:, None]
    weight[3] = 0
    values, scale = round_weight(weight)
    assert values.dtype == torch.int8
    step = scale.double()[:, None]
    # bfloat16 rounds the scale itself by up to 2^-8, and the largest value is 127 steps.
    bound = {torch.bfloat16: 1.1}.get(dtype, 0.5001)
    assert ((values.double() * step - weight.double()).abs() <= bound * step).all()
    others = torch.arange(40) != 3
    assert (values.abs().amax(dim=1)[others] >= 126).all()
    assert (values[3] == 0).all()


def test_rows_that_share_memory_are_multiplied_exactly():
    values = torch.randint(-127, 128, (1, 64), dtype=torch.int8).expand(31, -1)
    states, scale = torch.randn(9, 64), torch.rand(31)
    expected = multiply(states, values.contiguous(), scale, None)
    assert torch.equal(multiply(states, values, scale, None), expected)


def test_a_layer_with_one_input_is_multiplied_exactly():
    states, weight = torch.randn(9, 1), torch.randn(31, 1)
    product = multiply(states, *round_weight(weight), None)
    torch.testing.assert_close(product, states @ weight.t(), rtol=0.02, atol=1e-6)


@pytest.fixture(params=[8, 7])
def rounding(request, monkeypatch):
    """The rounding of states on CPUs with VNNI, and on others."""
    rounding = {8: int8_vaswani._8_BITS, 7: int8_vaswani._7_BITS}[request.param]
    if not int8_vaswani._exact_kernels(rounding):
        pytest.skip(f"this CPU has no exact products of {request.param} bits")
    monkeypatch.setattr(int8_vaswani, "_rounding", lambda: rounding)
    return rounding


def test_a_product_is_that_of_rounded_states_and_rounded_weights(rounding):
    states, weight, bias = torch.randn(7, 96), torch.randn(50, 96), torch.randn(50)
    values, scale = round_weight(weight)
    step = states.abs().amax(dim=1, keepdim=True).double() / rounding.largest
    expected = (states.double() / step).round() @ values.double().t()
    expected = expected * step * scale.double() + bias.double()
    torch.testing.assert_close(
        multiply(states, values, scale, bias).double(), expected, rtol=1e-5, atol=1e-4
    )


def test_states_scale_and_bias_may_be_views_of_negative_values(rounding):
    states, (values, scale), bias = (
        torch.randn(7, 96),
        round_weight(torch.ones(50, 96)),
        torch.randn(50),
    )
    negative = map(torch._neg_view, (states, scale, bias))
    states_view, scale_view, bias_view = negative
    assert torch.equal(
        multiply(states_view, values, scale_view, bias_view),
        multiply(-states, values, -scale, -bias),
    )


def test_a_scale_or_bias_of_one_value_counts_for_all_outputs(rounding):
    states, values = torch.randn(7, 96), round_weight(torch.randn(50, 96))[0]
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert torch.equal(
        multiply(states, values, two, one), multiply(states, values, two.expand(50), one.expand(50))
    )


@pytest.mark.parametrize("inputs", [33, 512, 2048])
def test_a_row_does_not_depend_on_other_rows_nor_on_the_kernel(inputs, rounding, monkeypatch):
    states = torch.randn(64, inputs) * torch.logspace(-3, 3, 64)[:, None]
    values, scale = round_weight(torch.randn(200, inputs))
    values[:20] = 127  # the largest sums
    bias = torch.randn(200)
    whole = multiply(states, values, scale, bias)
    kernels = int8_vaswani._exact_kernels(rounding)
    if inputs % 4:
        kernels = [kernel for kernel in kernels if kernel is not int8_vaswani._compiled_product]
    for kernel in (*kernels, int8_vaswani._float_product):
        monkeypatch.setattr(int8_vaswani, "_fastest", lambda *_, kernel=kernel: kernel)
        weight = PackedInt8(values, scale)
        for rows in (0, 1, 2, 3, 5, 8, 17, 64):
            for start in (0, 64 - rows):
                some = states[start : start + rows]
                assert torch.equal(weight.multiply(some, bias), whole[start : start + rows])
                assert torch.equal(multiply(some, values, scale, bias), whole[start : start + rows])


def test_each_number_of_rows_has_the_kernel_that_was_fastest_for_it(monkeypatch):
    def seconds(products, states):
        onednn = "onednn" in products[0].__qualname__
        return 1.0 if onednn == (len(states) > 32) else 2.0

    kernels = int8_vaswani._fbgemm_product, int8_vaswani._onednn_product
    monkeypatch.setattr(int8_vaswani, "_product_of_rounded", lambda sums, rounding: sums)
    monkeypatch.setattr(int8_vaswani, "_exact_kernels", lambda _: kernels)
    monkeypatch.setattr(int8_vaswani, "_shortest_time", seconds)
    monkeypatch.setattr(int8_vaswani, "_ranking", int8_vaswani._ranking.__wrapped__)
    chosen = [int8_vaswani._fastest(rows, 512, 2) for rows in (1, 32, 33, 500)]
    assert chosen == [kernels[0], kernels[0], kernels[1], kernels[1]]


def test_the_compiled_kernel_serves_multiples_of_4_inputs(monkeypatch):
    ranking = int8_vaswani._compiled_product, int8_vaswani._fbgemm_product
    monkeypatch.setattr(int8_vaswani, "_ranking", lambda *_: ranking)
    assert int8_vaswani._fastest(1, 512, 2) is ranking[0]
    assert int8_vaswani._fastest(1, 33, 2) is ranking[1]


def test_states_are_rounded_as_the_compiled_kernel_needs_if_there_is_one(monkeypatch):
    of_package, of_torch = int8_vaswani._compiled_product, int8_vaswani._onednn_product
    to_8_bits, to_7_bits = int8_vaswani._8_BITS, int8_vaswani._7_BITS
    for exact, expected in (
        ({to_8_bits: (of_torch,), to_7_bits: (of_package, of_torch)}, to_7_bits),
        ({to_8_bits: (of_package,), to_7_bits: (of_package,)}, to_8_bits),
        ({to_8_bits: (of_torch,), to_7_bits: (of_torch,)}, to_8_bits),
        ({to_8_bits: (), to_7_bits: (of_torch,)}, to_7_bits),
    ):
        monkeypatch.setattr(int8_vaswani, "_exact_kernels", exact.get)
        assert int8_vaswani._rounding.__wrapped__() is expected


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86 CPUs")
def test_a_cpu_with_avx2_alone_rounds_states_to_7_bits():
    code = "from vaswani.generation import int8_vaswani; print(int8_vaswani._rounding().largest)"
    names = "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"
    limits = dict(zip(names, ("AVX2", "AVX2", "avx2"), strict=True))
    command, restricted = [sys.executable, "-c", code], environment(**limits)
    found = subprocess.run(command, env=restricted, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "63"


def test_rows_of_zeros_and_no_rows_at_all(rounding):
    values, scale = round_weight(torch.randn(16, 24))
    assert (multiply(torch.zeros(2, 3, 24), values, scale, None) == 0).all()
    assert multiply(torch.zeros(0, 24), values, scale, None).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_with_a_row_of_zeros_keeps_it(dtype):
    weight = torch.randn(3, 24, dtype=dtype)
    weight[1] = 0
    values, scale = round_weight(weight)
    assert (values[1] == 0).all()
    assert (scale > 0).all()
    torch.testing.assert_close(values * scale[:, None], weight, rtol=0, atol=0.05)


def test_a_cpu_whose_sums_overflow_multiplies_in_floating_point(monkeypatch):
    layer = Int8Linear(torch.nn.Linear(64, 48).eval(), {})
    expected = functional.linear(states := torch.randn(5, 64), layer.float_weight(), layer.bias)
    monkeypatch.setattr(int8_vaswani, "multiplies_exactly", lambda: False)
    with torch.no_grad():
        assert torch.equal(layer(states), expected)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@torch.no_grad()
def test_a_tensor_on_another_device_gives_an_error_of_torch(name):
    layer = Int8Linear(torch.nn.Linear(64, 48).eval(), {})
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to("meta"), False))
    with pytest.raises((RuntimeError, NotImplementedError), match="device"):
        layer(torch.randn(5, 64))


@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_without_exact_sums_prepared_layers_keep_a_float_copy(number, monkeypatch):
    for module in (int8_vaswani, linear_vaswani):
        monkeypatch.setattr(module, "multiplies_exactly", lambda: False)
    layers = [Int8Linear(torch.nn.Linear(160, 128).eval(), {}) for _ in range(number)]
    states = torch.randn(7, 160)
    for _ in range(2):  # the second call sees the changed scale
        product = prepare(*layers)
        for _ in range(2):
            expected = torch.cat([layer(states) for layer in layers], dim=-1)
            torch.testing.assert_close(product(states), expected)
        (copied,) = linear_vaswani._packed_of[layers[0]].values()
        assert copied.packed.dtype == torch.float32
        layers[0].weight_scale.data.mul_(-2)


@exact
@pytest.mark.parametrize("number", [1, 3])
@torch.no_grad()
def test_prepared_layers_answer_as_the_layers_do(number):
    layers = [
        Int8Linear(torch.nn.Linear(160, width, bias=width != 200).eval(), {})
        for width in (128, 200, 150)[:number]
    ]
    product = prepare(*layers)
    for rows in (3, 1, 40):
        states = torch.randn(rows, 160)
        expected = torch.cat([layer(states) for layer in layers], dim=-1)
        assert torch.equal(product(states), expected)


@torch.no_grad()
def test_layers_of_both_kinds_are_joined_as_they_are():
    plain = torch.nn.Linear(160, 128).eval()
    layers = (plain, Int8Linear(plain, {}))
    states = torch.randn(4, 160)
    assert torch.equal(prepare(*layers)(states), torch.cat([f(states) for f in layers], dim=-1))
