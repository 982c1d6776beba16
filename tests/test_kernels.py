"""Compiled kernels of decoding, against formulas in float64 and against torch's operators."""

import copy
import shutil
import subprocess

import pytest
import torch
from huggingface_hub import constants
from vaswani.generation.compiled_vaswani import CompiledEncoder
from vaswani.generation.int8_vaswani import round_weight
from vaswani.generation.kernels_vaswani import (
    Panels,
    Positions,
    best_candidates,
    best_tokens,
    compute,
    library,
    log_sums_and_maxima,
    multiply,
    same_bytes,
)

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

compiled = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")
BLOCK = 16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def with_threads():
    before = torch.get_num_threads()

    def compute_with(threads, function):
        torch.set_num_threads(threads)
        return function()

    yield compute_with
    torch.set_num_threads(before)


def int8_panels(outputs, inputs):
    values, scale = round_weight(torch.randn(outputs, inputs))
    return Panels.pack(values, scale / 63), values, scale / 63


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
        panels = Panels.pack(weight)
        torch.testing.assert_close(
            multiply(states, panels.product(None)).double(), expected, rtol=1e-5, atol=1e-5
        )
        output = multiply(states, panels.product(bias, relu=True)).double()
        torch.testing.assert_close(output, (expected + bias).relu(), rtol=1e-5, atol=1e-5)

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

    def test_the_largest_sums_do_not_overflow(self):
        values = torch.full((40, 512), 127, dtype=torch.int8)
        values[20:] = -127
        panels = Panels.pack(values, torch.ones(40))
        states = torch.tensor([[1.0], [-1.0]]).expand(2, 512)
        expected = 63 * 127 * 512 * torch.tensor([[1.0] * 20 + [-1.0] * 20])
        output = multiply(states, panels.product(None, 63))
        assert torch.equal(output, torch.cat((expected, -expected)))

    def test_a_row_of_zeros_gives_the_bias(self):
        panels, _, _ = int8_panels(40, 8)
        bias = torch.randn(40)
        assert torch.equal(multiply(torch.zeros(2, 8), panels.product(bias, 63))[1], bias)

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    def test_a_row_depends_neither_on_others_nor_on_threads(self, kind, with_threads):
        states = torch.randn(19, 64)
        panels = Panels.pack(torch.randn(100, 64)) if kind == "float32" else int8_panels(100, 64)[0]
        bias = torch.randn(100)
        product = panels.product(bias, 63)
        outputs = [with_threads(number, lambda: multiply(states, product)) for number in (1, 2, 3)]
        alone = torch.cat([multiply(row[None], product) for row in states])
        assert all(torch.equal(output, alone) for output in outputs)


@compiled
class TestChoice:
    """Log-probabilities, and the best continuations."""

    @pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 64, 1003])
    def test_sums_and_maxima(self, vocabulary, with_threads):
        logits = 20 * torch.randn(7, vocabulary)
        logits[:, vocabulary // 2 + 1 :: 3] = -torch.inf
        expected = logits.double().logsumexp(dim=1)
        found = [
            with_threads(number, lambda: log_sums_and_maxima(logits, BLOCK)) for number in (1, 2)
        ]
        for log_sums, maxima in found:
            torch.testing.assert_close(log_sums.double(), expected, rtol=1e-6, atol=1e-6)
            blocks = logits[:, : vocabulary // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
            finite = blocks.amax(dim=2).clamp(min=-3e38)
            assert torch.equal(maxima, finite)
        assert torch.equal(found[0][0], found[1][0])

    @pytest.mark.parametrize("count", [1, 2, 8, 40])
    @pytest.mark.parametrize("vocabulary", [64, 1003])
    def test_the_best_are_those_of_a_sort(self, count, vocabulary):
        logits, offsets = torch.randn(12, vocabulary), torch.randn(12)
        _, maxima = log_sums_and_maxima(logits, BLOCK)
        rows = torch.randperm(12)
        found = best_candidates(logits, BLOCK, maxima, offsets, rows, torch.Size((3, 4)), count)
        sums = (logits[rows] + offsets[:, None]).view(3, -1)
        scores, places = sums.topk(count)
        assert torch.equal(found[0], scores)
        assert torch.equal(found[1], places // vocabulary)
        assert torch.equal(found[2], places % vocabulary)

    def test_the_best_token_is_the_first_of_equal_ones(self):
        logits = torch.randint(0, 5, (9, 1003)).float()
        logits[3] = -torch.inf
        assert torch.equal(best_tokens(logits), logits.argmax(dim=1))

    def test_of_equal_scores_each_is_found_once(self):
        logits = torch.zeros(2, 64)
        _, maxima = log_sums_and_maxima(logits, BLOCK)
        rows = torch.arange(2)
        scores, hypotheses, tokens = best_candidates(
            logits, BLOCK, maxima, torch.zeros(2), rows, torch.Size((1, 2)), 8
        )
        assert torch.equal(scores, torch.zeros(1, 8))
        assert len(set(zip(hypotheses[0].tolist(), tokens[0].tolist(), strict=True))) == 8

    def test_hypotheses_without_continuations_have_none(self):
        logits, offsets = torch.randn(4, 64), torch.zeros(4)
        offsets[[0, 1, 2]] = -torch.inf
        _, maxima = log_sums_and_maxima(logits, BLOCK)
        rows, shape = torch.arange(4), torch.Size((2, 2))
        scores, hypotheses, _ = best_candidates(logits, BLOCK, maxima, offsets, rows, shape, 80)
        assert (scores[0] == -torch.inf).all()
        assert (hypotheses[1, :64] == 1).all()
        assert torch.equal(scores[1, :64], logits[3].sort(descending=True).values)
        assert (scores[1, 64:] == -torch.inf).all()

    def test_positions_are_those_where_a_mask_is_zero(self):
        mask = torch.full((3, 9), -torch.inf)
        mask[0, 2] = mask[0, 8] = mask[2, 0] = 0
        places, counts = Positions.seen(mask[:, ::1])
        assert counts.tolist() == [2, 0, 1]
        assert places[0, :2].tolist() == [2, 8]
        assert places[2, 0] == 0
        assert Positions.seen(mask[:, 1:])[0][0, :2].tolist() == [1, 7]


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
        **{"vocab_size": 700, "d_model": 32, "encoder_attention_heads": 4},
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


def translate(model, **call):
    source = torch.randint(4, 700, (5, 9))
    mask = (torch.arange(9) < torch.tensor([9, 4, 7, 1, 9])[:, None]).long()
    call = {"num_beams": 4, "max_new_tokens": 25, "num_return_sequences": call.get("num_beams", 4)}
    output = model.generate(
        source * mask, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **call
    )
    return output.sequences, getattr(output, "sequences_scores", torch.zeros(1))


def without_kernels(monkeypatch):
    for name in ("compiled", "search"):
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
    def test_answers_are_those_of_torch(self, changes, beams, monkeypatch):
        model = model_with(**changes)
        torch.manual_seed(1)
        sequences, scores = translate(model, num_beams=beams)
        without_kernels(monkeypatch)
        torch.manual_seed(1)
        expected, expected_scores = translate(model, num_beams=beams)
        assert torch.equal(sequences, expected)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)

    def test_layers_run_in_the_kernels(self, monkeypatch):
        calls = []
        run = library().run_layers
        monkeypatch.setattr(library(), "run_layers", lambda *given: calls.append(1) or run(*given))
        translate(model_with())
        assert calls
        calls.clear()
        translate(model_with(activation_function="gelu"))
        assert not calls


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

    def test_a_sentence_of_padding_alone_has_states_of_zeros(self):
        model = model_with()
        mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
        found, _ = self.encode(model, torch.randint(4, 700, (2, 3)), mask)
        assert torch.equal(found.last_hidden_state[1], torch.zeros(3, 32))

    def test_more_outputs_come_from_the_encoder_itself(self):
        model = model_with()
        model.set_attn_implementation("eager")
        source = torch.randint(4, 700, (2, 3))
        found, expected = self.encode(model, source, None, output_attentions=True)
        assert torch.equal(found.attentions[0], expected.attentions[0])
        found, expected = self.encode(model, source, None, output_hidden_states=True)
        assert len(found.hidden_states) == len(expected.hidden_states) == 2

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


class TestCompilation:
    """Where kernels come from, and what happens without them."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        home = tmp_path / "home"
        monkeypatch.setattr(constants, "HF_HOME", str(home))
        return home

    def load(self):
        return library.__wrapped__()

    @compiled
    def test_the_cache_keeps_them(self, home, monkeypatch):
        assert self.load() is not None
        (file,) = (home / "vaswani").iterdir()
        monkeypatch.setattr(subprocess, "run", None)  # nothing can be compiled
        assert self.load() is not None
        assert list((home / "vaswani").iterdir()) == [file]

    @pytest.mark.parametrize("obstacle", ["turned off", "no compiler", "failing compiler"])
    def test_obstacles_leave_torchs_operators(self, obstacle, tmp_path, monkeypatch):
        if obstacle == "turned off":
            monkeypatch.setenv("VASWANI_KERNELS", "0")
        else:
            monkeypatch.setenv("PATH", str(tmp_path))
        if obstacle == "failing compiler":
            gcc = tmp_path / "gcc"
            gcc.write_text(f"#!{shutil.which('sh')}\necho no >&2\nexit 1\n")
            gcc.chmod(0o755)
        assert self.load() is None

    @compiled
    def test_without_a_cache_they_are_compiled_for_this_process(self, home):
        home.write_text("")  # neither a folder, nor can it become one
        assert self.load() is not None
        assert home.read_text() == ""

    @compiled
    @pytest.mark.parametrize("limit", ["torch", "oneDNN"])
    def test_limits_of_the_instructions_hold(self, limit, home, monkeypatch):
        if limit == "torch":
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        else:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert self.load() is not None
        (file,) = (home / "vaswani").iterdir()
        command = ["objdump", "--disassemble", str(file)]
        code = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        assert "%ymm" in code
        assert "%zmm" not in code
