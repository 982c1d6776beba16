"""int8 weights: `from_pretrained(folder, quantization_config=VaswaniInt8Config())`."""

import copy
import io
import json
import pickle
import platform
import shutil
import subprocess
import sys

import peft
import pytest
import torch
from launches import environment
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin
from vaswani.commands.main import main
from vaswani.conversion import ctranslate2, onnx, to_marian, to_torch
from vaswani.conversion.errors import ConversionError
from vaswani.generation import int8_vaswani, linear_vaswani
from vaswani.generation.int8_vaswani import (
    Int8Embedding,
    Int8Linear,
    PackedInt8,
    multiplies_exactly,
    multiply,
    round_weight,
)
from vaswani.generation.linear_vaswani import prepare
from vaswani.hub_cards.card import write_model_card
from vaswani.modeling.quantization_vaswani import VaswaniInt8Quantizer
from vaswani.training.averaging import average_checkpoints
from vaswani.training.trainer import VaswaniTrainer

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForSequenceClassification,
    VaswaniInt8Config,
    join_halves,
    split_halves,
)

SIZES = {
    "vocab_size": 2000,
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "attention_bias": True,
    "dropout": 0.0,
}
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2], [13, 14, 2, 0, 0]])
MASK = (SOURCE != 0).long()
exact = pytest.mark.skipif(not multiplies_exactly(), reason="this CPU has no exact int8 products")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with float weights."""
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("float")
    model.save_pretrained(folder)
    return folder


def load(folder, **options):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, **options)


@pytest.fixture
def rounded(saved):
    return load(saved, quantization_config=VaswaniInt8Config())


@pytest.fixture(scope="module")
def saved_int8(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    load(saved, quantization_config=VaswaniInt8Config()).save_pretrained(folder)
    return folder


def logits(model, source=SOURCE):
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=source).logits


def translations(model, source=SOURCE, mask=MASK, **call):
    call = {"num_beams": 4, "max_new_tokens": 8, "eos_token_id": None, **call}
    return model.generate(source, attention_mask=mask, **call)


class TestProducts:
    """Rounded weights and states, and exact sums of their products."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_weights_are_rounded_to_the_nearest_step_of_their_channel(self, dtype):
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

    def test_a_layer_with_one_input_is_multiplied_exactly(self):
        states, weight = torch.randn(9, 1), torch.randn(31, 1)
        product = multiply(states, *round_weight(weight), None)
        torch.testing.assert_close(product, states @ weight.t(), rtol=0.02, atol=1e-6)

    @pytest.fixture(params=[8, 7])
    def rounding(self, request, monkeypatch):
        """The rounding of states on CPUs with VNNI, and on others."""
        rounding = {8: int8_vaswani._8_BITS, 7: int8_vaswani._7_BITS}[request.param]
        if not int8_vaswani._exact_kernels(rounding):
            pytest.skip(f"this CPU has no exact products of {request.param} bits")
        monkeypatch.setattr(int8_vaswani, "_rounding", lambda: rounding)
        return rounding

    def test_a_product_is_that_of_rounded_states_and_rounded_weights(self, rounding):
        states, weight, bias = torch.randn(7, 96), torch.randn(50, 96), torch.randn(50)
        values, scale = round_weight(weight)
        step = states.abs().amax(dim=1, keepdim=True).double() / rounding.largest
        expected = (states.double() / step).round() @ values.double().t()
        expected = expected * step * scale.double() + bias.double()
        torch.testing.assert_close(
            multiply(states, values, scale, bias).double(), expected, rtol=1e-5, atol=1e-4
        )

    def test_states_scale_and_bias_may_be_views_of_negative_values(self, rounding):
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

    def test_a_scale_or_bias_of_one_value_counts_for_all_outputs(self, rounding):
        states, values = torch.randn(7, 96), round_weight(torch.randn(50, 96))[0]
        one, two = torch.tensor([1.0]), torch.tensor([2.0])
        assert torch.equal(
            multiply(states, values, two, one),
            multiply(states, values, two.expand(50), one.expand(50)),
        )

    @pytest.mark.parametrize("inputs", [33, 512, 2048])
    def test_a_row_does_not_depend_on_other_rows_nor_on_the_kernel(
        self, inputs, rounding, monkeypatch
    ):
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
                    assert torch.equal(
                        multiply(some, values, scale, bias), whole[start : start + rows]
                    )

    def test_each_number_of_rows_has_the_kernel_that_was_fastest_for_it(self, monkeypatch):
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

    def test_the_compiled_kernel_serves_multiples_of_4_inputs(self, monkeypatch):
        ranking = int8_vaswani._compiled_product, int8_vaswani._fbgemm_product
        monkeypatch.setattr(int8_vaswani, "_ranking", lambda *_: ranking)
        assert int8_vaswani._fastest(1, 512, 2) is ranking[0]
        assert int8_vaswani._fastest(1, 33, 2) is ranking[1]

    def test_states_are_rounded_as_the_compiled_kernel_needs_if_there_is_one(self, monkeypatch):
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
    def test_a_cpu_with_avx2_alone_rounds_states_to_7_bits(self):
        code = (
            "from vaswani.generation import int8_vaswani; print(int8_vaswani._rounding().largest)"
        )
        names = "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"
        limits = dict(zip(names, ("AVX2", "AVX2", "avx2"), strict=True))
        command, restricted = [sys.executable, "-c", code], environment(**limits)
        found = subprocess.run(command, env=restricted, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "63"

    def test_rows_of_zeros_and_no_rows_at_all(self, rounding):
        values, scale = round_weight(torch.randn(16, 24))
        assert (multiply(torch.zeros(2, 3, 24), values, scale, None) == 0).all()
        assert multiply(torch.zeros(0, 24), values, scale, None).shape == (0, 16)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_weight_with_a_row_of_zeros_keeps_it(self, dtype):
        weight = torch.randn(3, 24, dtype=dtype)
        weight[1] = 0
        values, scale = round_weight(weight)
        assert (values[1] == 0).all()
        assert (scale > 0).all()
        torch.testing.assert_close(values * scale[:, None], weight, rtol=0, atol=0.05)

    def test_a_cpu_whose_sums_overflow_multiplies_in_floating_point(self, monkeypatch):
        layer = Int8Linear(torch.nn.Linear(64, 48).eval(), {})
        expected = functional.linear(states := torch.randn(5, 64), layer.float_weight(), layer.bias)
        monkeypatch.setattr(int8_vaswani, "multiplies_exactly", lambda: False)
        with torch.no_grad():
            assert torch.equal(layer(states), expected)

    @pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
    @torch.no_grad()
    def test_a_tensor_on_another_device_gives_an_error_of_torch(self, name):
        layer = Int8Linear(torch.nn.Linear(64, 48).eval(), {})
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to("meta"), False))
        with pytest.raises((RuntimeError, NotImplementedError), match="device"):
            layer(torch.randn(5, 64))

    @pytest.mark.parametrize("number", [1, 3])
    @torch.no_grad()
    def test_without_exact_sums_prepared_layers_keep_a_float_copy(self, number, monkeypatch):
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
    def test_prepared_layers_answer_as_the_layers_do(self, number):
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
    def test_layers_of_both_kinds_are_joined_as_they_are(self):
        plain = torch.nn.Linear(160, 128).eval()
        layers = (plain, Int8Linear(plain, {}))
        states = torch.randn(4, 160)
        assert torch.equal(prepare(*layers)(states), torch.cat([f(states) for f in layers], dim=-1))


class TestLoading:
    """From float weights to a saved folder, and back."""

    def test_all_matrices_are_int8_and_answers_are_close(self, saved, rounded):
        kinds = {torch.nn.Linear: Int8Linear, torch.nn.Embedding: Int8Embedding}
        original = load(saved)
        for name, module in original.named_modules():
            expected = kinds.get(type(module), type(module))
            assert type(rounded.get_submodule(name)) is expected
        assert rounded.dtype == torch.float32
        assert rounded.is_quantized
        assert not any(parameter.requires_grad for parameter in rounded.parameters())
        wanted, found = logits(original), logits(rounded)
        assert 0 < (wanted - found).abs().mean() < 0.03 * wanted.std()

    def test_a_model_on_several_devices_is_not_rounded(self, saved):
        model = load(saved)
        model.hf_device_map = {"model": 0, "lm_head": "cpu"}
        quantizer = VaswaniInt8Quantizer(VaswaniInt8Config(), pre_quantized=False)
        with pytest.raises(ValueError, match="device_map divides them among 0, cpu: round the mod"):
            quantizer._process_model_after_weight_loading(model)

    def test_weights_rounded_in_memory_are_no_float_weights(self, saved):
        model = load(saved)
        model.round_to_int8()
        for take in (split_halves, to_marian.to_marian):
            with pytest.raises(ValueError, match="needs float weights, but this model has int8"):
                take(model)

    def test_the_weights_error_is_recorded(self, saved, rounded):
        original, change, total = load(saved), 0.0, 0.0
        for name, module in rounded.named_modules():  # a shared embedding is visited once
            if hasattr(module, "weight_scale") and name != "lm_head":
                weight = original.get_submodule(name).weight.detach()
                change += (module.float_weight() - weight).square().sum().item()
                total += weight.square().sum().item()
        error = rounded.config.quantization_config.weight_error
        assert error == pytest.approx((change / total) ** 0.5, rel=0.01)

    def test_models_loaded_with_one_configuration_record_their_own_errors(self, saved, tmp_path):
        other = load(saved)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter[..., 0] *= 9  # the steps of all other values of a row get larger
        other.save_pretrained(tmp_path)
        settings = VaswaniInt8Config()
        errors = [
            load(folder, quantization_config=settings).config.quantization_config.weight_error
            for folder in (saved, tmp_path, saved)
        ]
        assert errors[0] == errors[2] != errors[1]
        assert settings.weight_error is None

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_weights_that_are_not_finite_are_refused_by_name(self, saved, value):
        model = load(saved)
        model.model.decoder.layers[1].fc2.weight.data[3, 5] = value
        name = r"model\.decoder\.layers\.1\.fc2\.weight"
        with pytest.raises(ValueError, match=f"{name} has NaN or infinity"):
            model.round_to_int8()
        assert not any(isinstance(module, Int8Linear) for module in model.modules())

    @pytest.mark.parametrize(
        "ties",
        [
            {},
            {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 1500},
            {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
        ],
    )
    def test_tied_matrices_share_one_int8_table(self, ties, tmp_path):
        model = VaswaniForConditionalGeneration(VaswaniConfig(**{**SIZES, **ties}))
        model.save_pretrained(tmp_path / "float")
        rounded = load(tmp_path / "float", quantization_config=VaswaniInt8Config())
        rounded.save_pretrained(tmp_path / "int8")
        for loaded in (rounded, load(tmp_path / "int8"), copy.deepcopy(rounded)):
            tables = [model.lm_head, model.model.encoder.embed_tokens]
            found = [loaded.lm_head, loaded.model.encoder.embed_tokens]
            tables.append(model.model.decoder.embed_tokens)
            found.append(loaded.model.decoder.embed_tokens)
            for part in ("weight", "weight_scale"):
                assert len({id(getattr(table, part)) for table in found}) == len(
                    {id(table.weight) for table in tables}
                )

    def test_a_saved_folder_is_a_quarter_of_the_size_and_answers_alike(
        self, saved, saved_int8, rounded
    ):
        sizes = [(folder / "model.safetensors").stat().st_size for folder in (saved_int8, saved)]
        assert sizes[0] < 0.27 * sizes[1]
        loaded = load(saved_int8)
        assert torch.equal(logits(loaded), logits(rounded))
        assert torch.equal(translations(loaded), translations(rounded))
        again = load(saved_int8, quantization_config=VaswaniInt8Config())
        assert torch.equal(logits(again), logits(rounded))

    @pytest.mark.slow
    def test_a_folder_loads_without_the_package(self, saved_int8, rounded, tmp_path):
        script = (
            "import sys, torch\n"
            "sys.meta_path = [f for f in sys.meta_path if 'vaswani' not in repr(f).lower()]\n"
            "from transformers import AutoModelForSeq2SeqLM\n"
            f"folder, output = {str(saved_int8)!r}, {str(tmp_path / 'again')!r}\n"
            "for place in (folder, output):\n"
            "    model = AutoModelForSeq2SeqLM.from_pretrained(place, trust_remote_code=True)\n"
            "    assert type(model.lm_head).__name__ == 'Int8Linear', model.lm_head\n"
            "    assert type(model).__module__.startswith('transformers_modules')\n"
            "    model.save_pretrained(output)\n"
            f"source, mask = torch.tensor({SOURCE.tolist()}), torch.tensor({MASK.tolist()})\n"
            "call = {'num_beams': 4, 'max_new_tokens': 8, 'eos_token_id': None}\n"
            "print(model.generate(source, attention_mask=mask, **call).tolist())\n"
        )
        variables = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment(**variables) | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout) == translations(rounded).tolist()

    def test_bfloat16_beside_int8_weights(self, saved_int8, rounded):
        model = load(saved_int8, dtype=torch.bfloat16)
        assert model.dtype == torch.bfloat16
        assert model.lm_head.weight.dtype == torch.int8
        wanted = logits(rounded)
        assert (logits(model).float() - wanted).abs().mean() < 0.03 * wanted.std()
        assert translations(model).shape == translations(rounded).shape

    def test_dequantize_gives_float_weights_that_can_be_trained(self, saved, saved_int8, tmp_path):
        model = load(saved_int8)
        wanted = {
            name: module.float_weight()
            for name, module in model.named_modules()
            if hasattr(module, "weight_scale")
        }
        model.save_pretrained(tmp_path / "before")  # makes the configuration's dtype a string
        model = model.dequantize()
        for name, weight in wanted.items():
            assert torch.equal(model.get_submodule(name).weight, weight)
        assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
        assert model.model.decoder.embed_tokens is model.model.encoder.embed_tokens
        model.train()(input_ids=SOURCE, labels=SOURCE).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.save_pretrained(tmp_path)
        assert "quantization" not in (tmp_path / "config.json").read_text()
        assert torch.equal(logits(load(tmp_path)), logits(model.eval()))
        # Rounding what was rounded changes nothing.
        again = load(tmp_path, quantization_config=VaswaniInt8Config())
        assert torch.equal(again.lm_head.weight, load(saved_int8).lm_head.weight)

    def test_offloaded_weights_are_not_rounded_but_offloaded_int8_weights_answer(
        self, saved, saved_int8, rounded, tmp_path
    ):
        device_map = {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu"}
        places = {"device_map": device_map, "offload_folder": str(tmp_path)}
        with pytest.raises(ValueError, match=r"but device_map offloads model\.decoder\.layers\.0"):
            load(saved, quantization_config=VaswaniInt8Config(), **places)
        assert torch.equal(logits(load(saved_int8, **places)), logits(rounded))

    def changed(self, saved_int8, folder, name, change):
        """Copy a folder with a changed weight, or without it."""
        shutil.copytree(saved_int8, folder)
        weights = load_file(folder / "model.safetensors")
        value = change(weights.pop(name), weights)
        weights |= {} if value is None else {name: value}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def test_a_missing_int8_weight_is_named(self, saved_int8, rounded, tmp_path):
        name = "model.decoder.layers.0.fc1.weight"
        folder = self.changed(saved_int8, tmp_path / "lacking", name, lambda *_: None)
        with pytest.raises(OSError, match=rf"lacks {name}: its weights do not fit"):
            load(folder)
        model, report = load(folder, output_loading_info=True)
        assert report["missing_keys"] == {name}
        layer, loaded = model.get_submodule(name.removesuffix(".weight")), rounded.state_dict()
        assert not layer.weight.any()
        assert torch.equal(layer.weight_scale, loaded[f"{name}_scale"])

    def test_a_float_weight_among_int8_weights_is_named(self, saved_int8, tmp_path):
        name = "model.decoder.layers.0.fc1.weight"
        folder = self.changed(
            saved_int8,
            tmp_path / "mixed",
            name,
            lambda values, weights: values * weights[f"{name}_scale"][:, None],
        )
        with pytest.raises(OSError, match=rf"{name} is F32 in a file of int8 weights"):
            load(folder)

    @pytest.mark.parametrize("options", [{}, {"num_labels": 7, "ignore_mismatched_sizes": True}])
    def test_a_new_head_on_int8_weights_is_refused(self, options, tmp_path):
        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "d_model": 64, "encoder_layers": 1, "encoder_ffn_dim": 128}
        config = VaswaniEncoderConfig(**sizes, encoder_attention_heads=4)
        saved_class = VaswaniForSequenceClassification if options else VaswaniEncoderModel
        saved_class(config).save_pretrained(tmp_path / "float")
        kind, int8 = {"quantization_config": VaswaniInt8Config()}, tmp_path / "int8"
        saved_class.from_pretrained(tmp_path / "float", **kind).save_pretrained(int8)
        with pytest.raises(OSError, match=r"no classifier\.weight that .* start from the float"):
            VaswaniForSequenceClassification.from_pretrained(int8, **options)
        if not options:
            model, _ = VaswaniForSequenceClassification.from_pretrained(
                int8, output_loading_info=True
            )
            assert not model(SOURCE).logits.any()
        for way in ({}, kind):
            VaswaniForSequenceClassification.from_pretrained(tmp_path / "float", **options, **way)

    def test_a_language_model_and_the_parts_of_a_folder(self, saved_int8, tmp_path):
        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "d_model": 128, "decoder_layers": 1, "decoder_ffn_dim": 256}
        VaswaniForCausalLM(VaswaniDecoderConfig(**sizes)).save_pretrained(tmp_path)
        options = {"quantization_config": VaswaniInt8Config()}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert type(model.lm_head) is Int8Linear
        assert model.generate(SOURCE[:2], max_new_tokens=4).shape[1] > 5
        base = AutoModel.from_pretrained(saved_int8)
        assert type(base.encoder.embed_tokens) is Int8Embedding


class TestSearch:
    """`generate` with int8 weights."""

    @exact
    @pytest.mark.parametrize("num_beams", [1, 4])
    def test_a_sentence_is_translated_alike_alone_and_in_a_batch(self, rounded, num_beams):
        whole = translations(rounded.double(), num_beams=num_beams)
        for number, length in enumerate(MASK.sum(dim=1)):
            alone = translations(
                rounded,
                SOURCE[number : number + 1, :length],
                MASK[number : number + 1, :length],
                num_beams=num_beams,
            )
            assert torch.equal(alone[0], whole[number])

    def test_the_fast_search_finds_what_transformers_search_finds(self, rounded):
        call = {"return_dict_in_generate": True}
        ours = translations(rounded, **call)
        theirs = translations(rounded, **call, output_scores=True)  # kept by transformers' search
        assert torch.equal(ours.sequences, theirs.sequences)

    def test_a_changed_scale_is_seen(self, rounded):
        before = translations(rounded)
        assert torch.equal(translations(rounded), before)
        rounded.lm_head.weight_scale.data[100:900].mul_(-30)
        after = translations(rounded)
        assert not torch.equal(after, before)
        assert torch.equal(after, translations(copy.deepcopy(rounded)))


class TestClients:
    """PEFT, Trainer, exporters and pickle treat quantised models as they treat others."""

    def test_copies_and_pickles(self, rounded):
        expected = translations(rounded)
        stream = io.BytesIO()
        torch.save(rounded, stream)
        stream.seek(0)
        for copied in (
            copy.deepcopy(rounded),
            pickle.loads(pickle.dumps(rounded)),
            torch.load(stream, weights_only=False),
        ):
            assert torch.equal(translations(copied), expected)

    def test_a_float_model_of_an_int8_configuration_is_saved_as_it_is(self, rounded, tmp_path):
        model = AutoModelForSeq2SeqLM.from_config(rounded.config)
        assert type(model.lm_head) is torch.nn.Linear
        model.save_pretrained(tmp_path)
        assert model.config.quantization_config is not None
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        assert torch.equal(logits(load(tmp_path)), logits(model.eval()))

    def test_a_configuration_of_remote_code_is_recognised(self, rounded, tmp_path):
        class FormOfRemoteCode(QuantizationConfigMixin):
            """Has the attributes of `VaswaniInt8Config`, but is another class."""

        rounded.config.quantization_config = FormOfRemoteCode("vaswani_int8")
        AutoModelForSeq2SeqLM.from_config(rounded.config).save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())

    def test_exported_programs_multiply_in_floating_point(self, monkeypatch):
        # Measuring the kernels while torch traces would fail.
        monkeypatch.setattr(int8_vaswani, "multiplies_exactly", lambda: pytest.fail("measured"))
        layer = Int8Linear(torch.nn.Linear(64, 48).eval(), {}).requires_grad_(False)
        expected = functional.linear(states := torch.randn(5, 64), layer.float_weight(), layer.bias)
        with torch.no_grad():
            program = torch.export.export(layer, (states,))
        assert "_int_mm" not in program.graph_module.code
        assert torch.equal(program.module()(states), expected)

    @pytest.mark.slow
    def test_transformers_exporter_takes_an_int8_model(self, tmp_path):
        onnx_ir, onnxruntime = map(pytest.importorskip, ("onnx_ir", "onnxruntime"))
        exporters = pytest.importorskip("transformers.exporters")
        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "d_model": 64, "encoder_layers": 1, "encoder_ffn_dim": 128}
        model = VaswaniEncoderModel(VaswaniEncoderConfig(**sizes, encoder_attention_heads=4)).eval()
        model.round_to_int8()
        inputs = {"input_ids": SOURCE, "attention_mask": MASK}
        graph = exporters.OnnxExporter().export(
            copy.deepcopy(model).requires_grad_(False), inputs, exporters.OnnxConfig(dynamic=True)
        )
        graph = getattr(graph, "program", graph)  # of transformers after 5.17
        onnx_ir.save(getattr(graph, "model", graph), tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        arrays = {name: tensor[:2, :4].numpy() for name, tensor in inputs.items()}
        model.restore_from_int8(torch.float32)
        expected = model(SOURCE[:2, :4], attention_mask=MASK[:2, :4]).last_hidden_state
        (found,) = session.run(None, arrays)
        torch.testing.assert_close(torch.from_numpy(found), expected.detach())

    def test_int8_weights_without_their_configuration_are_not_saved(self, tmp_path):
        model = VaswaniEncoderModel(VaswaniEncoderConfig(vocab_size=30, d_model=64))
        model.round_to_int8()
        with pytest.raises(ValueError, match="the folder could not be loaded: make int8 weights"):
            model.save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_traced_program_multiplies_in_floating_point(self, rounded):
        trace = torch.jit.trace(
            lambda ids: rounded(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits,
            SOURCE,
            check_trace=False,
        )
        wanted = logits(copy.deepcopy(rounded).dequantize(), SOURCE + 1)
        torch.testing.assert_close(trace(SOURCE + 1), wanted)

    @exact
    def test_a_compiled_model_is_one_graph_and_answers_alike(self, rounded):
        compiled = torch.compile(rounded, backend="eager", fullgraph=True)
        with torch.no_grad():
            found = compiled(input_ids=SOURCE, decoder_input_ids=SOURCE, use_cache=False).logits
        assert torch.equal(found, logits(rounded))

    @pytest.mark.parametrize("inputs", [64, 66])
    def test_sums_are_exact_under_autocast(self, inputs):
        layer = Int8Linear(torch.nn.Linear(inputs, 48).eval(), {}).requires_grad_(False)
        states = torch.randn(40, inputs)
        expected = layer(states)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(states), expected)

    def test_a_state_dict_goes_from_model_to_model(self, saved_int8, rounded):
        other = load(saved_int8)
        other.model.decoder.layers[0].fc1.weight.data.neg_()
        assert not torch.equal(logits(other), logits(rounded))
        other.load_state_dict(rounded.state_dict())
        assert torch.equal(logits(other), logits(rounded))

    @pytest.mark.parametrize("assign", [False, True])
    def test_float_values_do_not_go_into_int8_weights(self, saved, rounded, assign):
        before = logits(rounded)
        message = r"lm_head\.weight is int8, but the state_dict has torch\.float32"
        with pytest.raises(RuntimeError, match=message):
            rounded.load_state_dict(load(saved).state_dict(), strict=False, assign=assign)
        assert torch.equal(logits(rounded), before)

    def test_training_is_refused_with_one_sentence(self, rounded, tmp_path):
        with pytest.raises(ValueError, match=r"cannot be trained: .*dequantize\(\) first\.$"):
            rounded.train()(input_ids=SOURCE, labels=SOURCE)
        arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        with pytest.raises(ValueError, match="Training needs float weights"):
            VaswaniTrainer(model=rounded, args=arguments)
        with pytest.raises(ValueError, match="purely quantized"):
            Seq2SeqTrainer(model=rounded, args=arguments)

    def test_the_command_refuses_to_train_int8_weights(self, saved_int8, tmp_path):
        for language in ("en", "de"):
            (tmp_path / f"text.{language}").write_text("one\ntwo\n")
        files = [str(tmp_path / f"text.{language}") for language in ("en", "de")]
        data = [word for split in ("train", "valid", "test") for word in (f"--{split}", *files)]
        output = ["--output", str(tmp_path / "run")]
        with pytest.raises(SystemExit, match="Training needs float weights"):
            main(["train", "--model", str(saved_int8), *data, *output, "--steps", "1"])

    def test_an_adapter_of_the_float_model_answers_alike_and_is_not_trained(
        self, saved, saved_int8, rounded, tmp_path
    ):
        config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, init_lora_weights=False)
        adapted = peft.get_peft_model(load(saved), config)
        adapted.save_pretrained(tmp_path / "adapter")
        on_int8 = peft.PeftModel.from_pretrained(rounded, str(tmp_path / "adapter"))
        wanted = logits(adapted)
        assert (logits(on_int8) - wanted).abs().mean() < 0.03 * wanted.std()
        loaded = load(saved_int8)
        loaded.load_adapter(str(tmp_path / "adapter"))
        assert torch.equal(logits(loaded), logits(on_int8))
        arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        with pytest.raises(ValueError, match="do not support training"):
            Seq2SeqTrainer(model=on_int8, args=arguments)

    @pytest.mark.parametrize("call", [{}, {"safe_merge": True}])
    @pytest.mark.parametrize(
        "config",
        [
            peft.LoraConfig(r=4, target_modules=["fc1"]),
            peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
            peft.LoraConfig(r=4, target_modules=["embed_tokens"]),
            peft.LoraConfig(r=4, target_modules=["lm_head"]),
            peft.IA3Config(target_modules=["fc1"], feedforward_modules=["fc1"]),
            peft.OFTConfig(r=0, oft_block_size=8, target_modules=["fc2"]),
        ],
    )
    def test_an_adapter_is_not_merged_into_int8_weights(self, config, call, rounded):
        before, weights = logits(rounded), copy.deepcopy(rounded.state_dict())
        adapted = peft.get_peft_model(rounded, copy.deepcopy(config))
        for merge in (adapted.merge_adapter, adapted.merge_and_unload):
            with pytest.raises(ValueError, match=r"merged into int8 .*dequantize\(\) first\.$"):
                merge(**call)
        unloaded = adapted.unload()
        assert torch.equal(logits(unloaded), before)
        for name, tensor in unloaded.state_dict().items():
            assert torch.equal(tensor, weights[name])

    def test_a_second_adapter_is_not_merged_either(self, rounded):
        adapted = peft.get_peft_model(rounded, peft.LoraConfig(target_modules=["fc1"]))
        adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ValueError, match="merged into int8 weights"):
            adapted.merge_and_unload(adapter_names=["other"], safe_merge=True)
        with pytest.raises(ValueError, match="merged into int8 weights"):
            pickle.loads(pickle.dumps(adapted)).merge_adapter()

    def test_an_adapter_is_merged_into_dequantized_weights(self, rounded):
        config = peft.LoraConfig(target_modules=["fc1", "q_proj"], init_lora_weights=False)
        rounded.add_adapter(config)
        rounded.delete_adapter("default")
        adapted = peft.get_peft_model(rounded, config)
        rounded.dequantize()
        expected = logits(adapted.eval())
        torch.testing.assert_close(logits(adapted.merge_and_unload()), expected)

    def test_a_vocabulary_is_not_resized(self, rounded):
        with pytest.raises(ValueError, match="cannot be resized"):
            rounded.resize_token_embeddings(2010)
        assert rounded.config.vocab_size == len(rounded.lm_head.weight) == 2000

    @pytest.mark.parametrize("converter", [ctranslate2, onnx, to_marian, to_torch])
    def test_conversion_is_refused_with_the_ways_out(
        self, converter, rounded, saved_int8, tmp_path
    ):
        for model in (rounded, saved_int8):
            with pytest.raises(ConversionError, match=r"int8 weights: .* model\.dequantize\(\)"):
                converter.save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "convert",
        [to_marian.to_marian, to_torch.to_torch, ctranslate2.VaswaniLoader().get_model_spec],
    )
    def test_functions_of_conversion_refuse_too(self, convert, rounded):
        with pytest.raises(ConversionError, match=r"int8 weights: .* model\.dequantize\(\)"):
            convert(rounded)

    def test_halves_and_averages_are_refused(self, rounded, saved_int8, tmp_path):
        with pytest.raises(ValueError, match="split_halves needs float weights"):
            split_halves(rounded)
        with pytest.raises(ValueError, match="join_halves needs float weights"):
            join_halves(rounded)
        with pytest.raises(ValueError, match="int8 weights, which cannot be averaged"):
            average_checkpoints([saved_int8], tmp_path / "mean")

    def test_other_models_and_other_methods_are_refused(self, tmp_path):
        BartForConditionalGeneration(
            BartConfig(vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1)
        ).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="for models of Vaswani, not for BartFor"):
            load(tmp_path, quantization_config=VaswaniInt8Config())
        with pytest.raises(ValueError, match="VaswaniInt8Config is for 'vaswani_int8', got 'gptq'"):
            VaswaniInt8Config(quant_method="gptq")
        for error in ("abc", -5, float("nan")):
            with pytest.raises(ValueError, match=f"weight_error must be .*, got {error!r}"):
                VaswaniInt8Config(error)

    def test_division_among_processes_is_refused(self, saved, saved_int8):
        for folder, options in (
            (saved, {"quantization_config": VaswaniInt8Config()}),
            (saved_int8, {}),
        ):
            config = VaswaniConfig.from_pretrained(folder)
            config.distributed_config = DistributedConfig(tp_plan="auto")
            with pytest.raises(ValueError, match="cannot be divided among processes"):
                load(folder, config=config, **options)

    def test_the_card_says_what_rounding_lost(self, saved, saved_int8, tmp_path):
        text = write_model_card(saved_int8, output=tmp_path).read_text()
        error = load(saved_int8).config.quantization_config.weight_error
        assert f"Rounding moved them by {error:.2%}" in text
        parameters = f"{load(saved).num_parameters():,} parameters"
        assert parameters in text
        plain = write_model_card(saved, output=tmp_path / "plain").read_text()
        assert "Rounding" not in plain
        assert parameters in plain
