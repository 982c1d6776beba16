"""int8 weights: `from_pretrained(folder, quantization_config=VaswaniInt8Config())`."""

import copy
import io
import json
import pickle
import shutil
import subprocess
import sys

import peft
import pytest
import torch
import ways_to_change_weights
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
from vaswani.generation import int8_vaswani
from vaswani.generation.int8_vaswani import Int8Embedding, Int8Linear, multiplies_exactly
from vaswani.hub_cards.card import write_model_card
from vaswani.modeling.quantization_vaswani import _ADAPTERS, VaswaniInt8Quantizer
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
    VaswaniModel,
    join_halves,
    split_halves,
)

SIZES = {**ways_to_change_weights.SIZES, "vocab_size": 2000}
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2], [13, 14, 2, 0, 0]])
MASK = (SOURCE != 0).long()
QUERIES = {"target_modules": ["q_proj"]}
# A configuration of each kind of PEFT's adapters that int8 weights take.
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(**QUERIES, r=2),
    "adalora": lambda: peft.AdaLoraConfig(**QUERIES, init_r=4, target_r=2, total_step=10),
    "randlora": lambda: peft.RandLoraConfig(**QUERIES, r=2),
    "gralora": lambda: peft.GraloraConfig(**QUERIES, r=2, gralora_k=2),
    "vera": lambda: peft.VeraConfig(**QUERIES, r=2),
    "ia3": lambda: peft.IA3Config(target_modules=["fc1"], feedforward_modules=["fc1"]),
    "loha": lambda: peft.LoHaConfig(**QUERIES, r=2),
    "lokr": lambda: peft.LoKrConfig(**QUERIES, r=2),
    "oft": lambda: peft.OFTConfig(**QUERIES, r=2, oft_block_size=0),
    "boft": lambda: peft.BOFTConfig(**QUERIES, boft_block_size=4),
    "fourierft": lambda: peft.FourierFTConfig(**QUERIES, n_frequency=10),
    "waveft": lambda: peft.WaveFTConfig(**QUERIES, n_frequency=10),
    "c3a": lambda: peft.C3AConfig(**QUERIES, block_size=8),
    "miss": lambda: peft.MissConfig(**QUERIES, r=2),
    "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["final_layer_norm"]),
}
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
        offloaded = load(saved_int8, **places)
        assert torch.equal(logits(offloaded), logits(rounded))
        with pytest.raises(ValueError, match="dequantize needs all weights in memory"):
            offloaded.dequantize()
        assert torch.equal(logits(offloaded), logits(rounded))

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

    def test_int8_weights_do_not_go_into_a_float_model(self, saved, saved_int8):
        config = VaswaniConfig.from_pretrained(saved)
        weights = load_file(saved_int8 / "model.safetensors")
        for source, options in (
            (saved_int8, {"config": config}),
            (None, {"config": config, "state_dict": weights}),
        ):
            for kind in (VaswaniForConditionalGeneration, VaswaniModel):
                with pytest.raises(OSError, match="is int8, but the configuration is that of a fl"):
                    kind.from_pretrained(source, **options)

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

    def test_an_adapter_that_reads_the_weight_reads_it_with_its_scale(self, rounded):
        """A new DoRA adapter divides by the norm of the weight and multiplies by it."""
        wanted = logits(rounded)
        config = peft.LoraConfig(target_modules=["fc1", "q_proj"], use_dora=True)
        adapted = peft.get_peft_model(rounded, config).eval()
        assert (logits(adapted) - wanted).abs().mean() < 0.01 * wanted.std()

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_an_adapter_answers_as_on_dequantized_weights(self, saved, rounded, kind, tmp_path):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(load(saved), ADAPTERS[kind]())
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        adapted.save_pretrained(tmp_path)
        plain = load(saved, quantization_config=VaswaniInt8Config()).dequantize()
        before = logits(plain)
        wanted = logits(peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval())
        found = logits(peft.PeftModel.from_pretrained(rounded, str(tmp_path)).eval())
        assert (found - wanted).abs().mean() < 0.03 * wanted.std()
        assert not torch.equal(wanted, before)

    def test_each_kind_of_adapter_is_compared(self):
        assert set(ADAPTERS) == set(_ADAPTERS)

    def test_an_adapter_of_another_kind_is_refused(self, rounded):
        before = logits(rounded)
        with pytest.raises(
            ValueError, match=r"HRALinear \(hra\) may read int8 weights as they are"
        ):
            peft.get_peft_model(rounded, peft.HRAConfig(target_modules=["fc1"]))
        assert torch.equal(logits(rounded), before)

    def test_an_adapter_of_the_weights_themselves_is_refused(self, saved, rounded, tmp_path):
        config = peft.LoraConfig(target_modules=[], target_parameters=["fc1.weight"])
        peft.get_peft_model(load(saved), config).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"ParamWrapper \(lora\) may read int8 weights"):
            peft.PeftModel.from_pretrained(rounded, str(tmp_path / "adapter"))

    def test_an_adapter_with_its_own_layer_is_refused(self, saved, rounded, tmp_path):
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        peft.get_peft_model(load(saved), config).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match="its own copy of lm_head, which replaces int8"):
            peft.PeftModel.from_pretrained(rounded, str(tmp_path / "adapter"))
        with pytest.raises(ValueError, match="int8 weights cannot be trained"):
            rounded.lm_head.requires_grad_(True)

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
