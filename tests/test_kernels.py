"""Compiled kernels of decoding, against formulas in float64 and against torch's operators."""

import contextlib
import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from vaswani.generation import library_vaswani, products_vaswani
from vaswani.generation.compiled_vaswani import CompiledEncoder, CompiledLayers
from vaswani.generation.int8_vaswani import round_weight
from vaswani.generation.library_vaswani import compute, library
from vaswani.generation.products_vaswani import Panels, multiply, same_bytes

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniInt8Config,
)

compiled = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


KINDS = ("float32", "bfloat16", "int8")


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
class TestProducts:
    """A product by packed weights."""

    @pytest.mark.parametrize("rows", range(1, 18))
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (37, 5), (64, 32), (100, 33)])
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

    @pytest.mark.parametrize("rows", [8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100])
    @pytest.mark.parametrize(("outputs", "inputs"), [(100, 64), (32, 192), (70, 100)])
    @pytest.mark.parametrize("kind", ["bfloat16", "int8"])
    def test_tiles_of_rows_have_the_bits_of_single_rows(self, kind, rows, outputs, inputs):
        panels, states = panels_of(kind, outputs, inputs), torch.randn(rows, inputs)
        bias = torch.randn(outputs)
        for product in (panels.product(None, 63), panels.product(bias, 63, relu=True)):
            alone = torch.cat([multiply(row[None], product) for row in states])
            output = torch.full((rows + 1, outputs), 7.0)
            assert torch.equal(multiply(states, product, output[:rows]), alone)
            assert (output[rows] == 7).all()

    def test_the_largest_sums_do_not_overflow(self):
        values = torch.full((40, 512), 127, dtype=torch.int8)
        values[20:] = -127
        panels = Panels.pack([values], torch.ones(40))
        states = torch.tensor([[1.0], [-1.0]]).expand(2, 512)
        expected = 63 * 127 * 512 * torch.tensor([[1.0] * 20 + [-1.0] * 20])
        output = multiply(states, panels.product(None, 63))
        assert torch.equal(output, torch.cat((expected, -expected)))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_state_that_is_not_finite_is_not_hidden(self, kind, value):
        panels = panels_of(kind, 40, 8)
        states = torch.ones(2, 8)
        states[1, 3] = value
        output = multiply(states, panels.product(None, 63))
        assert output[0].isfinite().all()
        assert not output[1].isfinite().any()

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
        fingerprint = products_vaswani._fingerprint

        def change_after(rows):
            taken = fingerprint(rows)
            weight.neg_()
            return taken

        monkeypatch.setattr(products_vaswani, "_fingerprint", change_after)
        panels = Panels.pack([weight])
        assert not panels.holds([weight])
        weight.copy_(before)
        assert panels.holds([weight])
        assert torch.equal(panels.panels, expected.panels)

    def test_processes_have_fingerprints_of_their_own(self, monkeypatch):
        weight = torch.randn(40, 16)
        panels = Panels.pack([weight])
        assert panels.holds([weight])
        monkeypatch.setattr(products_vaswani, "_KEY", bytes(128))
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
    assert not compute(tensor)
    assert compute(torch.zeros(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert not compute(torch.zeros(4, 4))


def model_with(**changes):
    settings = {
        **{"vocab_size": 9000, "d_model": 32, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 3},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 48, **changes},
    }
    model = VaswaniForConditionalGeneration(VaswaniConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 3)
            elif "embed" not in name:
                parameter.mul_(2)
    return model


SOURCE = torch.randint(4, 700, (5, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 4, 7, 1, 9])
STEPS = 8  # later, hypotheses with the same tokens in another order have almost equal scores
MASK = (torch.arange(9) < LENGTHS[:, None]).long()


def translate(model, **call):
    """Return the sequences of all hypotheses, and their scores if there is a beam."""
    beams = call.get("num_beams", 1)
    inputs = {"input_ids": SOURCE * MASK, "attention_mask": MASK, "max_new_tokens": STEPS}
    output = model.generate(
        **{**inputs, "return_dict_in_generate": True, "num_return_sequences": beams, **call}
    )
    return output.sequences, getattr(output, "sequences_scores", torch.zeros(1))


@pytest.fixture
def runs(monkeypatch):
    """The layers of each call of `run_layers`: the encoder's first, then those of the steps."""
    kernels, counts = library(), []
    run_layers = kernels.run_layers

    def counted(layers, count, *others):
        counts.append(count)
        return run_layers(layers, count, *others)

    monkeypatch.setattr(kernels, "run_layers", counted)
    return counts


def without_kernels(monkeypatch):
    for name in ("beam", "compiled", "continuations", "incremental", "search"):
        monkeypatch.setattr(f"vaswani.generation.{name}_vaswani.compute", lambda *tensors: False)
    for name in ("compiled", "int8", "linear"):
        monkeypatch.setattr(f"vaswani.generation.{name}_vaswani.library", lambda: None)


@compiled
class TestDecoder:
    """The layers of a decoder, and the search with them."""

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"norm_position": "pre"},
            {"attention_bias": True},
            {"encoder_attention_heads": 1, "decoder_attention_heads": 1},
            {"d_model": 24, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
            {"d_k": 5, "d_v": 11},
            {"activation_function": "gelu"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("beams", [1, 4])
    def test_answers_are_those_of_torch(self, changes, beams, monkeypatch, runs):
        model = model_with(**changes)
        sequences, scores = translate(model, num_beams=beams)
        relu = "activation_function" not in changes
        assert runs == ([1] + [3] * STEPS if relu else [])
        without_kernels(monkeypatch)
        expected, expected_scores = translate(model, num_beams=beams)
        assert len(runs) == (1 + STEPS) * relu, "torch computed these"
        assert torch.equal(sequences, expected)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("call", [{}, {"early_stopping": True}, {"length_penalty": -1.0}])
    def test_hypotheses_that_end_are_those_of_torch(self, call, monkeypatch, runs):
        model = model_with()
        usual = translate(model, num_beams=4)[0]
        ends = {"num_beams": 4, "eos_token_id": usual[:, 3:].unique()[:6].tolist()}
        runs.clear()
        sequences, scores = translate(model, **ends, **call)
        assert 2 < len(runs) < 2 + STEPS
        without_kernels(monkeypatch)
        expected, expected_scores = translate(model, **ends, **call)
        assert torch.equal(sequences, expected)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "call",
        [
            {"num_beams": 1},
            {"num_beams": 1, "do_sample": True, "top_k": 3},
            {"num_beams": 1, "forced_eos_token_id": 7},
            {"num_beams": 4},
            {"num_beams": 4, "forced_eos_token_id": 7},
            {"num_beams": 3, "early_stopping": True, "length_penalty_type": "hf"},
            {"num_beams": 3, "early_stopping": False},
        ],
        ids=str,
    )
    def test_sentences_that_end_wait_for_others_as_in_torch(self, call, monkeypatch, runs):
        """A sentence leaves the batch when an eighth of all have ended."""
        model = model_with()
        inputs = {"input_ids": torch.randint(4, 700, (25, 6)), "attention_mask": torch.ones(25, 6)}
        usual = translate(model, **inputs, num_beams=1)[0]
        ends = usual[:, 2:].flatten().unique()[::4].tolist()
        call = {**call, **inputs, "eos_token_id": ends}

        def answer():
            torch.manual_seed(3)
            return translate(model, **call)

        sequences, scores = answer()
        assert len(runs) > 4
        lengths = (sequences != 0).sum(dim=1).unique()
        assert len(lengths) > 2, "sentences have to end in different steps"
        without_kernels(monkeypatch)
        expected, expected_scores = answer()
        assert torch.equal(sequences, expected)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)

    def test_inputs_may_lie_in_memory_in_any_order(self):
        model = model_with()
        expected, _ = translate(model)
        ids, mask = ((tensor.t().contiguous().t()) for tensor in (SOURCE * MASK, MASK))
        assert not mask.is_contiguous()
        assert torch.equal(translate(model, input_ids=ids, attention_mask=mask)[0], expected)

    @pytest.mark.parametrize("changes", [{}, {"norm_position": "pre"}], ids=str)
    def test_bfloat16_is_nearer_to_float32_than_torch(self, changes, monkeypatch, runs):
        model = model_with(**changes).bfloat16()
        call = {"num_beams": 4, "max_new_tokens": 2}
        _, scores = translate(model, **call)
        assert runs == [1] + [3] * 2
        without_kernels(monkeypatch)
        _, of_torch = translate(model, **call)
        _, exact = translate(model.float(), **call)
        torch.testing.assert_close(scores, exact, rtol=1e-2, atol=1e-2)
        assert (scores - exact).abs().mean() < (of_torch - exact).abs().mean()

    @pytest.mark.parametrize("kind", KINDS)
    def test_answers_depend_neither_on_threads_nor_on_the_batch(self, kind, tmp_path, with_threads):
        model = model_with(encoder_layers=2)
        if kind == "bfloat16":
            model = model.bfloat16()
        if kind == "int8":
            model.save_pretrained(tmp_path)
            model = VaswaniForConditionalGeneration.from_pretrained(
                tmp_path, quantization_config=VaswaniInt8Config()
            )
        call = {"num_beams": 4}
        first, *others = (
            with_threads(number, lambda: translate(model, **call)) for number in (1, 2, 3)
        )
        for sequences, scores in others:
            assert torch.equal(sequences, first[0])
            assert torch.equal(scores, first[1])
        for row, length in enumerate(LENGTHS):
            alone = {"input_ids": SOURCE[row : row + 1, :length], "attention_mask": None}
            sequences, scores = translate(model, **call, **alone)
            assert torch.equal(sequences, first[0][4 * row : 4 * row + 4])
            torch.testing.assert_close(
                scores, first[1][4 * row : 4 * row + 4], rtol=1e-6, atol=1e-6
            )

    def test_a_language_model_runs_in_them(self, monkeypatch, runs):
        config = VaswaniDecoderConfig(
            vocab_size=2100, d_model=32, decoder_attention_heads=4, decoder_layers=3
        )
        model = VaswaniForCausalLM(config).eval()
        prompt = {"input_ids": SOURCE.flip(1), "attention_mask": MASK.flip(1)}
        call = {**prompt, "num_beams": 4}
        sequences, scores = translate(model, **call)
        assert runs == [3] * (STEPS - 1)  # the prompt is read by torch's operators
        without_kernels(monkeypatch)
        expected, expected_scores = translate(model, **call)
        assert torch.equal(sequences, expected)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)

    def test_pruned_heads_are_left_to_torch(self):
        model = model_with()
        attention = model.model.decoder.layers[1].self_attn
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = getattr(attention, name)
                linear.weight = torch.nn.Parameter(linear.weight[:16].clone())
                linear.out_features = 16
            attention.out_proj.weight = torch.nn.Parameter(
                attention.out_proj.weight[:, :16].clone()
            )
            attention.out_proj.in_features = 16
        assert CompiledLayers.prepare(model.model.decoder.layers, 4) is None

    def test_norms_may_be_replaced_between_calls(self):
        model = model_with()
        before = translate(model)[0]
        norm = model.model.decoder.layers[0].final_layer_norm
        earlier, norm.weight = norm.weight, torch.nn.Parameter(norm.weight * 3)
        assert not torch.equal(translate(model)[0], before)
        norm.weight = earlier
        assert torch.equal(translate(model)[0], before)

    @pytest.mark.parametrize("default", ["dtype", "device"])
    def test_defaults_of_torch_do_not_matter(self, default):
        model = model_with()
        before = translate(model)[0]
        dtype = torch.get_default_dtype()
        try:
            if default == "dtype":
                torch.set_default_dtype(torch.bfloat16)
            else:
                torch.set_default_device("meta")
            layers = CompiledLayers.prepare(model.model.encoder.layers, 4)
            layers._make_room(3, 9, 8)
            product = Panels.pack([torch.zeros(4, 4, dtype=torch.float32, device="cpu")])
            output = multiply(
                torch.ones(2, 4, dtype=torch.float32, device="cpu"), product.product(None)
            )
        finally:
            torch.set_default_dtype(dtype)
            torch.set_default_device(None)
        assert {buffer.device.type for buffer in layers.buffers} == {"cpu"}
        assert {buffer.dtype for buffer in layers.buffers[1:]} == {torch.float32}
        assert torch.equal(output, torch.zeros(2, 4))
        assert torch.equal(translate(model)[0], before)


@compiled
class TestEncoder:
    """The layers of an encoder, which compute nothing at padding."""

    def encode(self, model, source, mask, **options):
        with torch.no_grad():
            own = CompiledEncoder(model.model.encoder)
            found = own(source, attention_mask=mask, return_dict=True, **options)
            return found, model.model.encoder(source, attention_mask=mask, **options)

    def exact(self, model, source, mask):
        with torch.no_grad():
            encoder = copy.deepcopy(model.model.encoder).double()
            return encoder(source, attention_mask=mask).last_hidden_state

    @pytest.mark.parametrize("shape", [(1, 1), (3, 7), (70, 9), (2, 700)])
    @pytest.mark.parametrize("norm", ["post", "pre"])
    def test_states_are_those_of_torch(self, shape, norm):
        model = model_with(norm_position=norm, encoder_layers=2)
        source = torch.randint(4, 700, shape)
        lengths = torch.randint(1, shape[1] + 1, (shape[0], 1))
        for mask in (None, (torch.arange(shape[1]) < lengths).long()):
            found, expected = self.encode(model, source, mask)
            seen = torch.ones(shape).bool() if mask is None else mask.bool()
            exact = self.exact(model, source, mask)[seen]
            error, of_torch = (
                (states.last_hidden_state[seen] - exact).abs().max() for states in (found, expected)
            )
            assert error <= 3 * of_torch
            without = self.encode(model, source[:1], None if mask is None else mask[:1])[0]
            first = found.last_hidden_state[:1]
            assert torch.equal(without.last_hidden_state, first)

    @pytest.mark.parametrize("length", [1, 7, 16, 33])
    def test_states_of_a_sentence_do_not_depend_on_its_padding(self, length):
        model = model_with()
        source, mask = torch.randint(4, 700, (3, 41)), torch.ones(3, 41).long()
        mask[1, length:] = 0
        found, _ = self.encode(model, source, mask)
        alone, _ = self.encode(model, source[1:2, :length], None)
        assert torch.equal(found.last_hidden_state[1:2, :length], alone.last_hidden_state)

    def test_a_sentence_of_padding_alone_has_states_of_zeros(self):
        model = model_with()
        mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
        found, _ = self.encode(model, torch.randint(4, 700, (2, 3)), mask)
        assert torch.equal(found.last_hidden_state[1], torch.zeros(3, 32))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_padding_alone_is_translated(self, dtype):
        model = model_with().to(dtype)
        source = torch.randint(4, 700, (2, 3))
        call = {"attention_mask": torch.zeros_like(source), "num_beams": 2, "max_new_tokens": 4}
        assert len(model.generate(source, **call)) == 2

    def test_more_outputs_come_from_the_encoder_itself(self):
        model = model_with()
        model.set_attn_implementation("eager")
        source = torch.randint(4, 700, (2, 3))
        found, expected = self.encode(model, source, None, output_attentions=True)
        assert torch.equal(found.attentions[0], expected.attentions[0])
        found, expected = self.encode(model, source, None, output_hidden_states=True)
        assert len(found.hidden_states) == len(expected.hidden_states) == 2

    def test_a_mask_of_another_width_is_left_to_the_encoder(self, runs):
        model = model_with()
        source = torch.randint(4, 700, (2, 4))
        mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            self.encode(model, source, mask)  # transformers may accept it or not
        assert runs == []

    def test_labels_of_the_trainer_do_not_matter(self, runs):
        model = model_with()
        source = torch.randint(4, 700, (2, 3))
        model.generate(source, labels=source, max_new_tokens=2)
        assert runs[0] == 1

    @pytest.mark.parametrize("part", ["attention", "layer"])
    def test_dropout_that_is_on_stays_on(self, part, runs):
        model = model_with(attention_dropout=0.5)
        layer = model.model.encoder.layers[0]
        (layer if part == "layer" else layer.self_attn).train()
        self.encode(model, torch.randint(4, 700, (2, 3)), None)
        assert runs == []

    def test_an_attention_of_somebody_else_is_run(self, runs):
        model, calls = model_with(), []

        def attention(module, *others, **options):
            calls.append(type(module))
            return sdpa_attention_forward(module, *others, **options)

        AttentionInterface.register("theirs", attention)
        model.set_attn_implementation("theirs")
        model.generate(torch.randint(4, 700, (2, 3)), max_new_tokens=2)
        assert calls
        assert runs == []

    def test_generate_uses_it_unless_a_layer_is_hooked(self, monkeypatch):
        model, calls = model_with(), []
        run = CompiledEncoder._run
        monkeypatch.setattr(CompiledEncoder, "_run", lambda *given: calls.append(1) or run(*given))
        source = torch.randint(4, 700, (2, 3))
        usual = model.generate(source, max_new_tokens=4)
        assert calls == [1]
        hooked = []
        layer = model.model.encoder.layers[0]
        layer.register_forward_hook(lambda module, *_: hooked.append(module))
        assert torch.equal(model.generate(source, max_new_tokens=4), usual)
        assert hooked == [layer]
        assert calls == [1]


class TestLimits:
    """Limits of oneDNN and torch, which the compiler gets as flags."""

    @pytest.fixture(autouse=True)
    def cpu(self, monkeypatch):
        for name in ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):
            monkeypatch.delenv(name, raising=False)
        flags = "flags : avx2 aes avx512f avx512_vnni avx512_bf16 avx_vnni amx_int8"
        monkeypatch.setattr(library_vaswani, "_cpu", lambda: flags)

    @pytest.mark.parametrize(
        ("limits", "flags"),
        [
            (("", "all", "default", "avx512_core_amx", "avx10_1_512_amx"), []),
            (
                ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"),
                ["-mno-avx512f", "-mno-avxvnni"],
            ),
            (
                ("avx512_core",),
                ["-DNO_TILES", "-mno-avx512bf16", "-mno-avx512vnni", "-mno-avxvnni"],
            ),
            (("avx512_core_vnni",), ["-DNO_TILES", "-mno-avx512bf16"]),
            (("avx512_core_bf16", "avx512_core_fp16", "avx10_1_512"), ["-DNO_TILES"]),
        ],
    )
    def test_each_limit_of_onednn_forbids_newer_instructions(self, limits, flags, monkeypatch):
        for limit in limits:
            for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
                with monkeypatch.context() as context:
                    context.setenv(name, limit.upper())
                    assert library_vaswani._forbidden_instructions() == flags

    def test_a_limit_of_torch_counts_as_the_one_of_onednn(self, monkeypatch):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        assert library_vaswani._forbidden_instructions() == ["-mno-avx512f", "-mno-avxvnni"]

    def test_older_compilers_get_no_flags_for_newer_cpus(self, monkeypatch):
        monkeypatch.setattr(library_vaswani, "_cpu", lambda: "flags : avx2 aes")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
        assert library_vaswani._forbidden_instructions() == ["-DNO_TILES"]

    def test_an_older_compiler_gets_no_flags_that_it_does_not_know(self, tmp_path, monkeypatch):
        gcc = tmp_path / "gcc"
        gcc.write_text("#!/bin/sh\necho '  -mavx512f  Support AVX512F.'\n")
        gcc.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        flags = ["-O3", "-mno-avx512f", "-mno-avxvnni", "-DNO_TILES"]
        known = library_vaswani._known_to_gcc(flags)
        assert known == ["-O3", "-mno-avx512f", "-DNO_TILES"]


class TestCompilation:
    """Where kernels come from, and what happens without them."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        home = tmp_path / "home"
        monkeypatch.setattr(constants, "HF_HOME", str(home))
        return home

    @pytest.fixture
    def warned(self, monkeypatch):
        texts = []
        monkeypatch.setattr(library_vaswani.logger, "warning_once", texts.append)
        return texts

    @pytest.fixture
    def quick(self, monkeypatch):
        """Compile without optimisation, which takes seconds less."""
        flags = [flag for flag in library_vaswani._FLAGS if flag != "-O3"]
        monkeypatch.setattr(library_vaswani, "_FLAGS", flags)

    def load(self):
        return library.__wrapped__()

    def disassembled(self, home):
        """Return the code of the only file in the cache, and remove the file."""
        (file,) = (home / "vaswani").iterdir()
        command = ["objdump", "--disassemble", str(file)]
        code = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        file.unlink()
        return code

    @compiled
    @pytest.mark.usefixtures("quick")
    def test_the_cache_keeps_them(self, home, monkeypatch):
        assert self.load() is not None
        (file,) = (home / "vaswani").iterdir()
        monkeypatch.setenv("PATH", "")  # no compiler
        file.parent.chmod(0o555)  # as in an image that was warmed up
        assert self.load() is not None
        file.parent.chmod(0o755)
        assert list((home / "vaswani").iterdir()) == [file]

    @compiled
    @pytest.mark.usefixtures("quick")
    @pytest.mark.parametrize("fault", ["no library", "written by others"])
    def test_a_file_that_cannot_be_trusted_is_compiled_again(
        self, fault, home, tmp_path, monkeypatch
    ):
        assert self.load() is not None
        (file,) = (home / "vaswani").iterdir()
        whole = file.read_bytes()
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "other"))
        bad = tmp_path / "other" / "vaswani" / file.name  # a loaded file would not be read again
        bad.parent.mkdir(parents=True)
        bad.write_bytes(b"no library" if fault == "no library" else whole)
        if fault == "written by others":
            bad.chmod(0o777)
        assert self.load() is not None
        assert bad.read_bytes() == whole
        assert bad.stat().st_mode & 0o777 == 0o755

    @compiled
    @pytest.mark.usefixtures("quick")
    def test_processes_that_start_together_compile_once(self, monkeypatch):
        compilations, compile_ = [], library_vaswani._compile

        def counted(*arguments):
            compilations.append(arguments)
            compile_(*arguments)

        monkeypatch.setattr(library_vaswani, "_compile", counted)
        with ThreadPoolExecutor(4) as pool:  # the lock is one for threads, too
            loaded = list(pool.map(lambda _: self.load(), range(4)))
        assert None not in loaded
        assert len(compilations) == 1

    @compiled
    def test_a_cache_without_programs_is_passed_over(self, home, monkeypatch):
        monkeypatch.setattr(
            library_vaswani, "_compile", lambda sources, flags, target: target.write_bytes(b"code")
        )

        def load(file):
            if file.parent == home / "vaswani":
                raise OSError("failed to map segment from shared object")
            return file.parent.name

        monkeypatch.setattr(library_vaswani, "_load", load)
        assert self.load().startswith("vaswani-")

    @compiled
    @pytest.mark.parametrize("replaceable", [True, False])
    def test_a_damaged_file_is_never_loaded(self, replaceable, home, monkeypatch):
        """Loading a file that is cut off kills the process."""
        folders, whole = [], b"a library"
        monkeypatch.setattr(
            library_vaswani, "_compile", lambda sources, flags, target: target.write_bytes(whole)
        )
        monkeypatch.setattr(library_vaswani, "_load", lambda file: folders.append(file.parent) or 1)
        self.load()
        (file,) = (home / "vaswani").iterdir()
        kept = file.read_bytes()
        if not replaceable:
            monkeypatch.setattr(library_vaswani, "_keep", lambda *_: None)
        for damaged in (b"", kept[:-1], kept[:20], b"A" + kept[1:], kept[:-1] + b"A"):
            file.write_bytes(damaged)
            self.load()
            assert file.read_bytes() == (kept if replaceable else damaged)
        assert [folder == home / "vaswani" for folder in folders] == [True] + [replaceable] * 5

    @pytest.mark.parametrize("obstacle", ["turned off", "no compiler", "failing compiler"])
    def test_obstacles_leave_torchs_operators(self, obstacle, warned, tmp_path, monkeypatch):
        if obstacle == "turned off":
            monkeypatch.setenv("VASWANI_KERNELS", "0")
        else:
            monkeypatch.setenv("PATH", str(tmp_path))
        if obstacle == "failing compiler":
            gcc = tmp_path / "gcc"
            gcc.write_text("#!/bin/sh\necho no >&2\nexit 1\n")
            gcc.chmod(0o755)
        assert self.load() is None
        expected = {"turned off": "", "no compiler": "install it", "failing compiler": ": no\n"}
        if library() is not None:  # this machine would compile them
            assert len(warned) == (obstacle != "turned off")
            assert expected[obstacle] in "".join(warned)

    def test_a_cpu_that_is_not_described_has_none(self, warned, monkeypatch):
        def fail(*_, **__):
            raise FileNotFoundError("/proc/cpuinfo")

        monkeypatch.setattr(library_vaswani.Path, "read_text", fail)
        assert self.load() is None
        assert not warned

    @compiled
    @pytest.mark.usefixtures("quick")
    def test_without_a_cache_they_are_compiled_for_this_process(self, home):
        home.write_text("")  # neither a folder, nor can it become one
        assert self.load() is not None
        assert home.read_text() == ""

    @compiled
    def test_limits_of_the_instructions_hold(self, home, monkeypatch):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
        assert self.load() is not None
        code = self.disassembled(home)
        assert "%ymm" in code
        assert "%zmm" not in code

    @compiled
    @pytest.mark.skipif("amx_int8" not in library_vaswani._cpu(), reason="this CPU has no AMX")
    def test_tiles_can_be_turned_off(self, home, monkeypatch):
        for name in ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA"):
            monkeypatch.delenv(name, raising=False)
        code = []
        for limit in ("AVX512_CORE_AMX", "AVX512_CORE_VNNI"):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            assert self.load() is not None
            code.append(self.disassembled(home))
        for instruction in ("tdpbusd", "tdpbf16ps", "vdpbf16ps"):
            assert instruction in code[0]
            assert instruction not in code[1]
        assert "%zmm" in code[1]
