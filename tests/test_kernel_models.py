"""The compiled kernels in whole models: decoders, encoders, limits, and their compilation."""

import contextlib
import copy
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compiled_models import KINDS, LENGTHS, MASK, SOURCE, STEPS, compiled, model_with, translate
from huggingface_hub import constants
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from vaswani.generation import compiled_vaswani, library_vaswani
from vaswani.generation.compiled_vaswani import CompiledEmbedding, CompiledEncoder, CompiledLayers
from vaswani.generation.library_vaswani import library
from vaswani.generation.products_vaswani import Panels, multiply

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniInt8Config,
)


@pytest.fixture
def runs(monkeypatch):
    """The number of layers in each run: that of the encoder first, then those of the steps."""
    kernels, counts = library(), []
    run_layers = kernels.run_layers

    def counted(layers, count, *others):
        counts.append(count)
        return run_layers(layers, count, *others)

    def several(run):
        def counted_steps(reader, *others):
            taken = run(reader, *others)
            counts.extend([reader._obj.layers_count] * taken)
            return taken

        return counted_steps

    monkeypatch.setattr(kernels, "run_layers", counted)
    for name in ("run_beam_steps", "run_greedy_steps"):
        monkeypatch.setattr(kernels, name, several(getattr(kernels, name)))
    return counts


def without_kernels(monkeypatch):
    for name in ("beam", "compiled", "continuations", "incremental", "search", "steps"):
        monkeypatch.setattr(
            f"vaswani.generation.{name}_vaswani.can_compute", lambda *tensors: False
        )
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

    def test_no_layer_is_packed_if_the_last_one_is_not_supported(self, monkeypatch, runs):
        model = model_with()
        last = model.model.decoder.layers[-1].fc2
        last.register_forward_hook(lambda module, args, output: output)
        packed = []
        monkeypatch.setattr(compiled_vaswani, "compiled_product", packed.append)
        assert CompiledLayers.prepare(model.model.decoder.layers, 4) is None
        assert not packed

    def test_an_embedding_that_bounds_its_norms_is_left_to_torch(self):
        bounded = torch.nn.Embedding(50, 8, max_norm=1.0)
        assert CompiledEmbedding.prepare(bounded, 1.0) is None
        assert CompiledEmbedding.prepare(torch.nn.Embedding(50, 8), 1.0) is not None

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
            own = CompiledEncoder(model.model.encoder, lambda: model.model.encoder)
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
        monkeypatch.setattr(library_vaswani, "cpu_description", lambda: flags)

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
        monkeypatch.setattr(library_vaswani, "cpu_description", lambda: "flags : avx2 aes")
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
    @pytest.mark.skipif(
        "amx_int8" not in library_vaswani.cpu_description(), reason="this CPU has no AMX"
    )
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
