"""Compiled kernels of decoding, against formulas in float64 and against torch's operators."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from compiled_models import KINDS, compiled, model_with, translate
from transformers.modeling_outputs import BaseModelOutput
from vaswani.generation import fingerprints_vaswani, library_vaswani, products_vaswani
from vaswani.generation.compiled_vaswani import CompiledLinear
from vaswani.generation.int8_vaswani import round_weight
from vaswani.generation.library_vaswani import can_compute
from vaswani.generation.products_vaswani import Panels, multiply, same_bytes


def int8_panels(outputs, inputs):
    values, scale = round_weight(torch.randn(outputs, inputs))
    return Panels.pack([values], scale, 63), values, scale / 63


def panels_of(kind, outputs, inputs):
    if kind == "int8":
        return int8_panels(outputs, inputs)[0]
    return Panels.pack([torch.randn(outputs, inputs, dtype=getattr(torch, kind))])


def rounded(states, largest):
    """Round states as an int8 product does: integers, and what a step of them is worth."""
    size = states.abs().amax(dim=1, keepdim=True)
    return (states * (largest / size)).round(), size


@compiled
class TestDigits:
    """Products of float32 by digits of 8 bits."""

    @pytest.fixture(autouse=True)
    def _tiles(self):
        if not library_vaswani.library().multiplies_digits():
            pytest.skip("this CPU has no AMX, or it is turned off")

    @pytest.mark.parametrize("rows", [1, 33])
    @pytest.mark.parametrize("inputs", [128, 512, 2048])
    def test_errors_are_smaller_than_those_of_floats(self, rows, inputs, monkeypatch):
        states, weight = torch.randn(rows, inputs), torch.randn(300, inputs)
        digits = Panels.pack([weight])
        monkeypatch.setattr(products_vaswani, "_has_digits", lambda inputs: False)
        floats = Panels.pack([weight])
        assert digits.scale is not None
        assert floats.scale is None
        of_digits, of_floats = (
            multiply(states, panels.product(None)) - states.double() @ weight.double().t()
            for panels in (digits, floats)
        )
        assert of_digits.square().mean() < of_floats.square().mean()

    def test_small_weights_keep_their_digits(self):
        states, weight = torch.randn(5, 128), torch.randn(40, 128)
        small, usual = Panels.pack([weight * 2.0**-95]), Panels.pack([weight])
        expected = multiply(states, usual.product(None)) * 2.0**-95
        output = multiply(states, small.product(None))
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("digit", [127, -128])
    def test_the_largest_sums_do_not_overflow(self, digit, sign):
        whole = torch.full((1, 2**14), 126.0 * 65536 + digit * 256 + digit)
        whole[0, 0] = 127 * 65536 + 127 * 256 + 127  # has the largest digits
        panels = Panels.pack([whole.repeat(3, 1)])
        output = multiply(whole * sign, panels.product(None))
        expected = sign * whole.double().square().sum()
        assert ((output - expected).abs() <= 2**-20 * abs(expected)).all()

    def test_more_inputs_than_sums_can_have_are_multiplied_as_floats(self):
        panels = Panels.pack([torch.ones(1, 2**14 + 64)])
        assert panels.scale is None
        assert multiply(torch.ones(1, 2**14 + 64), panels.product(None)).item() == 2**14 + 64

    def test_no_inputs_give_the_bias(self):
        panels = Panels.pack([torch.ones(5, 0)])
        bias = torch.randn(5)
        assert torch.equal(multiply(torch.ones(3, 0), panels.product(bias)), bias.expand(3, 5))


@compiled
class TestProducts:
    """A product by packed weights."""

    @pytest.mark.parametrize("rows", range(1, 18))
    @pytest.mark.parametrize(
        ("outputs", "inputs"), [(1, 1), (37, 5), (64, 32), (100, 33), (37, 128)]
    )
    def test_floats_are_multiplied(self, rows, outputs, inputs):
        states, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        bias = torch.randn(outputs)
        expected = states.double() @ weight.double().t()
        panels = Panels.pack([weight])
        torch.testing.assert_close(
            multiply(states, panels.product(None)).double(), expected, rtol=1e-5, atol=1e-5
        )
        output = multiply(states, panels.product(bias, relu=True)).double()
        torch.testing.assert_close(output, (expected + bias).relu(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("rows", [1, 3, 6, 9, 17, 40])
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (37, 6), (64, 32), (100, 96)])
    def test_halves_are_multiplied(self, rows, outputs, inputs):
        states, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs).bfloat16()
        bias = torch.randn(outputs)
        expected = states.bfloat16().double() @ weight.double().t() + bias
        panels = Panels.pack([weight])
        output = multiply(states, panels.product(bias)).double()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)

    def test_states_are_rounded_to_halves_as_in_torch(self):
        bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x00800001, -1])
        states = bits.int().view(torch.float32)[:, None].expand(-1, 2) * torch.tensor([1.0, 0.0])
        panels = Panels.pack([torch.eye(2).bfloat16()])
        output = multiply(states.contiguous(), panels.product(None))
        expected = states[:, 0].bfloat16().float()
        finite = expected.isfinite()
        assert torch.equal(output[finite, 0], expected[finite])
        assert not output[~finite].isfinite().any()

    @pytest.mark.parametrize("rows", [1, 3, 4, 9, 17])
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (37, 8), (100, 64)])
    def test_integers_are_multiplied(self, rows, outputs, inputs):
        panels, values, step = int8_panels(outputs, inputs)
        states, bias = torch.randn(rows, inputs), torch.randn(outputs)
        integers, size = rounded(states, 63)
        expected = (integers.double() @ values.double().t()) * step * size + bias
        output = multiply(states, panels.product(bias, 63)).double()
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        output = multiply(states, panels.product(bias, 63, relu=True)).double()
        torch.testing.assert_close(output, expected.relu(), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("rows", [8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 150])
    @pytest.mark.parametrize(("outputs", "inputs"), [(100, 64), (32, 192), (70, 100), (5, 4096)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_tiles_of_rows_have_the_bits_of_single_rows(self, kind, rows, outputs, inputs):
        panels, states = panels_of(kind, outputs, inputs), torch.randn(rows, inputs)
        bias = torch.randn(outputs)
        for product in (panels.product(None, 63), panels.product(bias, 63, relu=True)):
            alone = torch.cat([multiply(row[None], product) for row in states])
            output = torch.full((rows + 1, outputs), 7.0)
            assert torch.equal(multiply(states, product, output[:rows]), alone)
            assert (output[rows] == 7).all()

    @pytest.mark.parametrize("outlier", [1.0, 1e4, 1e20])
    @pytest.mark.parametrize("inputs", [64, 512, 2048])
    def test_rounding_errors_are_relative_to_the_largest_values(self, inputs, outlier):
        states, weight = torch.randn(33, inputs), torch.randn(70, inputs)
        states[::3, 5] *= outlier
        weight[::3, -1] *= outlier
        expected = states.double() @ weight.double().t()
        panels = Panels.pack([weight])
        error = (multiply(states, panels.product(None)) - expected).abs()
        largest = states.abs().amax(1)[:, None].double() * weight.abs().amax(1)
        assert (error <= 2**-22 * (inputs * largest + expected.abs())).all()

    @pytest.mark.parametrize("inputs", [8, 128])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_least_and_the_largest_values_are_multiplied(self, kind, inputs):
        weight, scale = torch.eye(inputs), None
        if kind == "int8":
            weight, scale = round_weight(weight)
        panels = Panels.pack([weight.to(getattr(torch, kind))], scale, 63)
        sizes = torch.tensor([0.0, 1e-30, 1e-10, 1.0, 1e10, 1e30])[:, None]
        output = multiply(sizes * torch.ones(inputs), panels.product(None, 63))
        torch.testing.assert_close(output, sizes.expand(-1, inputs), rtol=4e-3, atol=0)

    def test_the_largest_sums_do_not_overflow(self):
        values = torch.full((40, 512), 127, dtype=torch.int8)
        values[20:] = -127
        panels = Panels.pack([values], torch.ones(40))
        states = torch.tensor([[1.0], [-1.0]]).expand(2, 512)
        expected = 63 * 127 * 512 * torch.tensor([[1.0] * 20 + [-1.0] * 20])
        output = multiply(states, panels.product(None, 63))
        assert torch.equal(output, torch.cat((expected, -expected)))

    @pytest.mark.parametrize("inputs", [8, 128])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_state_that_is_not_finite_is_not_hidden(self, kind, value, inputs):
        panels = panels_of(kind, 40, inputs)
        states = torch.ones(2, inputs)
        states[1, 3] = value
        output = multiply(states, panels.product(None, 63))
        assert output[0].isfinite().all()
        assert not output[1].isfinite().any()

    @pytest.mark.parametrize("inputs", [8, 128])
    @pytest.mark.parametrize("kind", ["float32", "bfloat16"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_weight_that_is_not_finite_is_not_hidden(self, kind, value, inputs):
        weight = torch.ones(40, inputs, dtype=getattr(torch, kind))
        weight[1, 3] = value
        panels = Panels.pack([weight])
        finite = multiply(torch.ones(2, inputs), panels.product(None)).isfinite()
        assert not finite[:, 1].any()
        assert finite.sum() == 2 * 39

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_rows_have_no_products(self, kind):
        panels = panels_of(kind, 40, 64)
        assert multiply(torch.randn(0, 64), panels.product(None, 63)).shape == (0, 40)

    def test_a_row_of_zeros_gives_the_bias(self):
        panels, _, _ = int8_panels(40, 8)
        bias = torch.randn(40)
        assert torch.equal(multiply(torch.zeros(2, 8), panels.product(bias, 63))[1], bias)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_row_depends_neither_on_others_nor_on_threads(self, kind, with_threads):
        states, panels = torch.randn(19, 64), panels_of(kind, 100, 64)
        bias = torch.randn(100)
        product = panels.product(bias, 63)
        outputs = [with_threads(number, lambda: multiply(states, product)) for number in (1, 2, 3)]
        alone = torch.cat([multiply(row[None], product) for row in states])
        assert all(torch.equal(output, alone) for output in outputs)


@compiled
class TestPanels:
    """Panels hold the weights of layers, and tell whether a bit of them has changed."""

    SIZES = (1, 40, 150)  # outputs of layers, which share panels

    @pytest.fixture(
        params=[
            *(("float32", 5), ("float32", 50), ("bfloat16", 6), ("bfloat16", 66)),
            *(("int8", 4), ("int8", 84)),
        ],
        ids=str,
    )
    def weights(self, request):
        kind, inputs = request.param
        weights = [torch.randn(outputs, inputs) for outputs in self.SIZES]
        if kind != "int8":
            return [weight.to(getattr(torch, kind)) for weight in weights], None
        values, scales = zip(*map(round_weight, weights), strict=True)
        return list(values), torch.cat(scales)

    def test_layers_that_share_panels_are_multiplied(self, weights):
        weights, scale = weights
        scales = [None] * len(weights) if scale is None else scale.split(self.SIZES)
        states, largest = torch.randn(5, weights[0].shape[1]), 63
        shared = Panels.pack(weights, scale)
        alone = [Panels.pack([one], part) for one, part in zip(weights, scales, strict=True)]
        outputs = [multiply(states, panels.product(None, largest)) for panels in alone]
        assert torch.equal(
            multiply(states, shared.product(None, largest)), torch.cat(outputs, dim=1)
        )

    def test_each_changed_bit_is_seen(self, weights):
        weights, scale = weights
        panels = Panels.pack(weights, scale)
        assert panels.holds([weight.clone() for weight in weights], scale)
        for number, weight in enumerate(weights):
            for place in {0, weight.numel() // 2, weight.numel() - 1}:
                changed = [each.clone() for each in weights]
                changed[number].view(torch.uint8).view(-1)[place * weight.itemsize] ^= 1
                assert not panels.holds(changed, scale)
        assert not panels.holds(weights[:2], scale)
        assert not panels.holds(weights[::-1], scale)
        assert not panels.holds([weight.double() for weight in weights], scale)
        assert not panels.holds([weight[:, :-1] for weight in weights], scale)
        if scale is not None:
            assert not panels.holds(weights, torch.cat((scale, scale)))
            scale[-1] *= 2
            assert not panels.holds(weights, scale)

    def test_bits_are_compared_not_numbers(self):
        weight = torch.tensor([[0.0, torch.nan, 1.0, 2.0]])
        panels = Panels.pack([weight])
        assert panels.holds([weight.clone()])
        weight[0, 0] = -0.0
        assert not panels.holds([weight])

    def test_weights_may_lie_anywhere(self, weights):
        """A file of weights may place int8 at any byte, and a weight may be a transposed one."""
        weights, scale = weights
        panels = Panels.pack(weights, scale)
        transposed = [weight.t().contiguous().t() for weight in weights]
        room = torch.zeros(weights[1].nbytes + 1, dtype=torch.uint8)
        shifted = weights[1]
        if scale is not None:
            shifted = room[1:].view(torch.int8).view(shifted.shape).copy_(shifted)
        assert panels.holds([transposed[0], shifted, transposed[2]], scale)
        again = Panels.pack([transposed[0], shifted, transposed[2]], scale)
        assert torch.equal(again.panels, panels.panels)

    def test_a_large_weight_is_compared_in_parallel(self, with_threads):
        weight = torch.randn(5000, 96)
        panels = with_threads(3, lambda: Panels.pack([weight]))
        assert torch.equal(panels.panels, with_threads(1, lambda: Panels.pack([weight])).panels)
        assert with_threads(3, lambda: panels.holds([weight]))
        weight[4999, 95] += 1
        assert not with_threads(3, lambda: panels.holds([weight]))

    @pytest.mark.parametrize("bytes_apart", [16, 128, 2**16], ids=["lane", "block", "part"])
    def test_exchanged_blocks_are_seen(self, bytes_apart):
        weight = torch.randn(1200, 32)
        panels = Panels.pack([weight])
        assert panels.holds([weight])
        blocks = weight.view(-1, 4)  # of 16 bytes
        places = [8, 8 + bytes_apart // 16]
        blocks[places] = blocks[places[::-1]]
        assert not panels.holds([weight])

    def test_a_second_change_cannot_cancel_the_first(self):
        """After one round of AES, one of 255 second changes would."""
        weight = torch.randint(0, 256, (64, 16), dtype=torch.uint8).view(torch.int8)
        panels = Panels.pack([weight], torch.ones(64))
        lane = weight.view(torch.uint8).view(-1, 128)[:, 16:32].numpy()
        before = lane.copy()
        lane[0, 0] ^= 1
        for change in range(1, 256):
            double = change << 1 if change < 128 else change << 1 ^ 0x11B  # in AES's field
            for place, byte in enumerate((double, change, change, double ^ change)):
                lane[1, place] = before[1, place] ^ byte
            assert not panels.holds([weight], torch.ones(64))
        lane[:] = before
        assert panels.holds([weight], torch.ones(64))

    def test_panels_have_the_values_of_their_fingerprint(self, monkeypatch):
        """A write between fingerprint and packing, undone later, leaves no stale panels."""
        weight = torch.randn(40, 16)
        expected, before = Panels.pack([weight]), weight.clone()
        fingerprint = products_vaswani.fingerprint

        def change_after(rows):
            taken = fingerprint(rows)
            weight.neg_()
            return taken

        monkeypatch.setattr(products_vaswani, "fingerprint", change_after)
        panels = Panels.pack([weight])
        assert not panels.holds([weight])
        weight.copy_(before)
        assert panels.holds([weight])
        assert torch.equal(panels.panels, expected.panels)

    def test_processes_have_fingerprints_of_their_own(self, monkeypatch):
        weight = torch.randn(40, 16)
        panels = Panels.pack([weight])
        assert panels.holds([weight])
        monkeypatch.setattr(fingerprints_vaswani, "_KEY", bytes(128))
        assert not panels.holds([weight])

    def test_rows_of_zeros_belong_to_a_layer(self):
        left, right, zeros = torch.randn(2000, 16), torch.randn(40, 16), torch.zeros(1, 16)
        panels = Panels.pack([left, torch.cat((right, zeros))])
        assert not panels.holds([torch.cat((left, zeros)), right])


class TestCrowdedCores:
    """Waiting threads sleep when other programs want the cores."""

    @pytest.fixture
    def pass_time(self, monkeypatch):
        """Return a function that lets time pass, in which threads wait for a core."""
        calls, seen = [], SimpleNamespace(time=100.0, waited=50.0)
        library = SimpleNamespace(let_threads_sleep=calls.append)
        monkeypatch.setattr(library_vaswani, "library", lambda: library)
        monkeypatch.setattr(library_vaswani, "time", SimpleNamespace(monotonic=lambda: seen.time))
        monkeypatch.setattr(library_vaswani, "_seconds_of_waiting", lambda: seen.waited)
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        watch = library_vaswani._Cores()

        def pass_time(seconds, waited, threads=2):
            seen.time += seconds
            seen.waited += waited
            watch.look(threads)
            return calls

        watch.look(2)
        return pass_time

    def test_crowded_windows_in_a_row_let_threads_sleep_once(self, pass_time):
        assert pass_time(0.25, 0.2) == pass_time(0.25, 0.2) == []
        assert pass_time(0.25, 0.01) == []  # this window was free
        assert pass_time(0.25, 0.2) == pass_time(0.25, 0.2) == []
        assert pass_time(0.25, 0.2) == [2]
        for _ in range(5):
            assert pass_time(0.25, 0.2) == [2]

    def test_short_steps_and_long_pauses_tell_nothing(self, pass_time):
        for _ in range(5):
            assert pass_time(0.1, 0.02) == []
            assert pass_time(60, 50) == []

    def test_one_thread_waits_for_no_other(self, pass_time):
        for _ in range(4):
            assert pass_time(0.25, 0.2, threads=1) == []
        assert pass_time(60, 0) == pass_time(0.25, 0.2) == pass_time(0.25, 0.2) == []
        assert pass_time(0.25, 0.2) == [2]

    @pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
    def test_a_setting_of_the_user_is_kept(self, name, pass_time, monkeypatch):
        monkeypatch.setenv(name, "1")
        for _ in range(4):
            assert pass_time(0.25, 0.2) == []

    @compiled
    def test_each_step_looks(self, monkeypatch):
        looks = []
        monkeypatch.setattr(library_vaswani.CORES, "look", looks.append)
        translate(model_with())
        assert len(looks) > 2
        assert set(looks) == {torch.get_num_threads()}

    @compiled
    def test_each_update_looks(self, monkeypatch):
        looks = []
        monkeypatch.setattr(library_vaswani.CORES, "look", looks.append)
        model = model_with().train()
        model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[7, 2]])).loss.backward()
        assert len(looks) > 2
        assert set(looks) == {torch.get_num_threads()}

    @pytest.mark.slow
    @compiled
    def test_waiting_threads_sleep_and_compute_the_same(self):
        """In a process of its own, because its threads sleep until it ends."""
        program = """
import statistics, time, torch
from vaswani.generation.products_vaswani import Panels, multiply
from vaswani.generation.library_vaswani import library
torch.set_num_threads(2)
panels, states = Panels.pack([torch.randn(70, 64)]), torch.randn(9, 64)
product = panels.product(None)
def cpu_seconds():
    multiply(states, product)
    start = time.process_time()
    time.sleep(0.02)
    return time.process_time() - start
before, output = statistics.median(cpu_seconds() for _ in range(20)), multiply(states, product)
library().let_threads_sleep(2)
time.sleep(0.1)
after = statistics.median(cpu_seconds() for _ in range(20))
assert torch.equal(multiply(states, product), output)
print(before, after)
"""
        settings = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"}
        environment = {name: value for name, value in os.environ.items() if name not in settings}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        before, after = map(float, run.stdout.split())
        if before < 1e-3:
            pytest.skip("OpenMP's threads do not spin here")
        assert after < before / 3


@compiled
@pytest.mark.parametrize("size", [1, 7, 70_000, 400_003])
def test_every_byte_is_compared(size):
    values = torch.randint(0, 255, (size,), dtype=torch.uint8)
    assert same_bytes(values, values.clone())
    for place in {0, size // 2, size - 1}:
        other = values.clone()
        other[place] ^= 1
        assert not same_bytes(values, other)


@compiled
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.bfloat16),
        torch.zeros(4, 8)[:, ::2],
        torch.zeros(4, 4, device="meta"),
    ],
)
def test_other_tensors_are_left_to_torch(tensor):
    assert not can_compute(tensor)
    assert can_compute(torch.zeros(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_compute(torch.zeros(4, 4))


@compiled
class TestStates:
    """States that a layer cannot take are refused, as torch refuses them."""

    def test_states_on_another_device_are_refused(self):
        layer = CompiledLinear.prepare(torch.nn.Linear(64, 64))
        with torch.no_grad(), pytest.raises(RuntimeError, match="states are on meta, but the mod"):
            layer(torch.empty(3, 64, device="meta"))

    def test_states_of_another_width_are_refused_with_both_shapes(self):
        layer = CompiledLinear.prepare(torch.nn.Linear(64, 32))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"\(3, 60\) and \(32, 64\)"):
            layer(torch.empty(3, 60))

    def test_encoder_outputs_of_another_width_are_refused(self):
        model, outputs = model_with(), (torch.zeros(2, 5, 40),)
        with pytest.raises(RuntimeError, match="shapes"):
            model.generate(encoder_outputs=BaseModelOutput(*outputs), max_new_tokens=3)
