"""CTranslate2's runtime compared with `score` and `generate`, on random models of every option."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from vaswani.conversion import ctranslate2 as converter
from vaswani.conversion.ctranslate2 import save
from vaswani.conversion.errors import ConversionError

from vaswani import VaswaniTokenizer

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")

EOS = 2
OPTIONS = {
    "paper": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm that ends without": {"norm_position": "pre", "final_layer_norm": False},
    "post-norm that ends with another": {"final_layer_norm": True},
    "biases": {"attention_bias": True, "lm_head_bias": True},
    "concatenated sinusoids": {"position_encoding": "sinusoidal_concat"},
    "tensor2tensor's sinusoids": {"position_encoding": "sinusoidal_t2t", "position_offset": 2},
    "shifted positions": {"position_offset": 3},
    "learned positions": {
        "position_encoding": "learned",
        "max_position_embeddings": 40,
        "position_offset": 2,
    },
    "untied": {"tie_word_embeddings": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 23},
    "unlike stacks": {
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 40,
    },
    "narrow keys": {"d_k": 2, "attention_bias": True},
    "narrow values": {"d_v": 3, "attention_bias": True},
    "wide heads": {"d_k": 8, "d_v": 8},
    "epsilon": {"layer_norm_eps": 0.3},
    "unscaled embeddings": {"scale_embedding": False},
    "other start": {"decoder_start_token_id": 0},
    "two vocabularies, untied": {
        "tie_word_embeddings": False,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 15,
    },
    "gelu": {"activation_function": "gelu"},
    "gelu_new": {"activation_function": "gelu_new"},
    "quick_gelu": {"activation_function": "quick_gelu"},
    "silu": {"activation_function": "silu"},
    "tanh": {"activation_function": "tanh"},
    "sigmoid": {"activation_function": "sigmoid"},
}


def sentences(lengths, size, seed=3):
    """Random sentences that end in </s>."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, size, (n,), generator=generator).tolist() for n in lengths]
    return [[*row, EOS] for row in rows]


def as_tokens(rows):
    return [[str(token) for token in row] for row in rows]


def translator(folder, compute_type="float32"):
    return ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=1)


def ended(row):
    return row[: row.index(EOS) + 1] if EOS in row else row


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_log_probabilities_and_translations_are_ours(tiny_model, tmp_path, padded_batch, options):
    model = tiny_model(**options)
    save(model, tmp_path / "out")
    engine = translator(tmp_path / "out")

    sources = sentences([1, 4, 7], model.config.vocab_size)
    targets = sentences([5, 2, 9], model.config.decoder_vocab_size, seed=4)
    # CTranslate2 adds the end token to targets.
    results = engine.score_batch(as_tokens(sources), as_tokens(row[:-1] for row in targets))
    for result, ours in zip(results, model.score(sources, targets).log_probs, strict=True):
        theirs = torch.tensor(result.log_probs, dtype=torch.float64)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)

    lengths, longest = [1, 3, 6, 8], 12
    ids, mask = padded_batch(lengths, vocab_size=model.config.vocab_size)
    sources = [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)]
    for beams in (1, 4):
        ours = model.generate(
            ids,
            attention_mask=mask,
            num_beams=beams,
            max_new_tokens=longest,
            length_penalty=1.0,
            length_penalty_type="hf",
            early_stopping=True,
        )[:, 1:].tolist()
        results = engine.translate_batch(
            as_tokens(sources),
            beam_size=beams,
            max_decoding_length=longest,
            min_decoding_length=0,
            return_end_token=True,
        )
        theirs = [[int(token) for token in result.hypotheses[0]] for result in results]
        assert theirs == [ended(row) for row in ours]


def test_activations_of_one_name_there_are_one_function_here():
    inputs = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    of_name = {}
    for name, theirs in converter._ACTIVATIONS.items():
        outputs = ACT2FN[name](inputs)
        torch.testing.assert_close(
            outputs, of_name.setdefault(theirs, outputs), atol=1e-9, rtol=0, msg=name
        )


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [("int8", 0.1), ("int8_float32", 0.1), ("int16", 0.02), ("float16", 0.01), ("bfloat16", 0.1)],
)
def test_quantized_weights_score_nearly_as_the_model_does_and_leave_it_alone(
    tiny_model, tmp_path, quantization, tolerance
):
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=False, attention_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sources, targets = sentences([4, 7], 19), sentences([5, 9], 19, seed=4)
    expected = model.score(sources, targets).log_probs
    save(model, tmp_path / "out", quantization, max_positions=16)
    save(model, tmp_path / "whole", max_positions=16)
    size, whole = ((tmp_path / name / "model.bin").stat().st_size for name in ("out", "whole"))
    assert size < 0.8 * whole
    engine = translator(tmp_path / "out", "int8_float32" if "int8" in quantization else "float32")
    results = engine.score_batch(as_tokens(sources), as_tokens(row[:-1] for row in targets))
    for result, ours in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.tensor(result.log_probs), ours, atol=tolerance, rtol=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_weights_are_stored_in_their_own_precision_and_tied_ones_once(tiny_model, tmp_path):
    sizes = {}
    for name, options in {
        "bfloat16": {"dtype": torch.bfloat16},
        "float32": {"dtype": torch.float32},
        "untied": {"dtype": torch.float32, "tie_word_embeddings": False},
    }.items():
        save(tiny_model(**options), tmp_path / name, max_positions=1)
        sizes[name] = (tmp_path / name / "model.bin").stat().st_size
    table = 19 * 16 * 4
    assert table * 1.5 < sizes["untied"] - sizes["float32"] < table * 2.5
    assert sizes["bfloat16"] < 0.8 * sizes["float32"]


def test_the_table_of_positions_is_as_long_as_asked_for(tiny_model, tmp_path):
    model = tiny_model()
    source, target = [["5", "2"]], [["5"] * 29]  # with the start token, thirty positions
    for positions in (29, 30):
        save(model, tmp_path / str(positions), max_positions=positions)
    with pytest.raises(RuntimeError, match="osition"):
        translator(tmp_path / "29").score_batch(source, target)
    assert translator(tmp_path / "30").score_batch(source, target)


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A saved model whose tokenizer has fewer tokens than the model."""
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["a b c d", "e f g h"], kind="word", vocab_size=17, show_progress=False
    )
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    return tmp_path / "ours", model, tokenizer


def test_ctranslate2s_own_converter_reads_our_folders(folder, tmp_path):
    ours, *_ = folder
    theirs = ctranslate2.converters.TransformersConverter(str(ours))
    theirs.convert(str(tmp_path / "theirs"), quantization="int8")
    save(ours, tmp_path / "out", quantization="int8")
    for name in ("model.bin", "config.json", "shared_vocabulary.json"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_text_goes_in_and_out_by_the_tokenizer_of_the_folder(folder, tmp_path):
    ours, model, tokenizer = folder
    save(str(ours), tmp_path / "out")
    text = "b a h"
    source = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    result = translator(tmp_path / "out").translate_batch(
        [source], beam_size=1, max_decoding_length=9, min_decoding_length=0
    )[0]
    expected = model.generate(**tokenizer([text], return_tensors="pt"), max_new_tokens=9)[0, 1:]
    known = [tokenizer.convert_ids_to_tokens(i) or f"<unused{i}>" for i in expected.tolist()]
    assert source == ["b", "a", "h", "</s>"]
    assert result.hypotheses[0] == [token for token in known if token != "</s>"]


def test_symbols_that_are_always_unknown_need_no_place_in_the_model(tiny_model, tmp_path):
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["a b c d e f g"], kind="word", show_progress=False
    )
    model = tiny_model(vocab_size=len(tokenizer) - 2)
    with pytest.raises(ConversionError, match="the model has only"):
        save(model, tmp_path / "out", tokenizer=tokenizer)
    tokenizer.init_kwargs["unknown_from"] = model.config.vocab_size
    save(model, tmp_path / "out", tokenizer=tokenizer)
    tokenizer.add_tokens([">>de<<"])
    with pytest.raises(ConversionError, match=f"has a token {len(tokenizer) - 1}"):
        save(model, tmp_path / "tagged", tokenizer=tokenizer)


def test_a_tokenizer_in_memory_has_no_target_tokenizer_beside_it(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, foreign = (
        VaswaniTokenizer.train_from_iterator([letters], kind="char", show_progress=False)
        for letters in ("abcdefghijklmnop", "ABCDEFGHIJKLMNOP")
    )
    foreign.save_pretrained("target_tokenizer")
    save(tiny_model(vocab_size=len(own)), tmp_path / "out", tokenizer=own)
    assert not list((tmp_path / "out").glob("target_vocabulary*"))


def test_two_vocabularies_have_a_tokenizer_each(tiny_model, tmp_path):
    tokenizers = [
        VaswaniTokenizer.train_from_iterator(
            [letters], kind="char", vocab_size=len(letters) + 3, show_progress=False
        )
        for letters in ("abcdefghijklmnop", "ABCDEFGH")
    ]
    model = tiny_model(share_encoder_decoder_embeddings=False, decoder_vocab_size=11)
    ours, out, theirs = (tmp_path / name for name in ("ours", "out", "theirs"))
    model.save_pretrained(ours)
    tokenizers[0].save_pretrained(ours)
    with pytest.raises(ConversionError, match=r"19 and 11 entries\): give target_tokenizer"):
        save(ours, out)
    tokenizers[1].save_pretrained(ours / "target_tokenizer")
    save(ours, out)
    ctranslate2.converters.TransformersConverter(str(ours)).convert(str(theirs))
    for side in ("source", "target"):
        name = f"{side}_vocabulary.json"
        assert (theirs / name).read_bytes() == (out / name).read_bytes()
    result = translator(out).translate_batch(
        [["a", "b", "</s>"]], beam_size=1, max_decoding_length=9, min_decoding_length=0
    )[0]
    ids = model.generate(torch.tensor([tokenizers[0]("ab").input_ids]), max_new_tokens=9)[0, 1:]
    expected = tokenizers[1].convert_ids_to_tokens(ended(ids.tolist()))
    assert result.hypotheses[0] == [token for token in expected if token != "</s>"]


def test_everything_that_does_not_fit_is_refused_at_once(tiny_model, tmp_path):
    model = tiny_model(
        activation_function="relu6", position_encoding="learned", max_position_embeddings=9
    )
    model.generation_config.eos_token_id = [2, 3]
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["abcdefghijklmnopqrstuvwxyz"], kind="char", vocab_size=40, show_progress=False
    )
    with pytest.raises(ConversionError) as caught:
        save(model, tmp_path / "out", max_positions=10, tokenizer=tokenizer)
    for problem in (
        "activation_function 'relu6'",
        "max_positions 10 (the learned table has 9)",
        "eos_token_id [2, 3]",
        "source tokenizer has a token 28, but the model has only 19 tokens",
    ):
        assert problem in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_have_no_place_there_are_refused(tiny_model, tmp_path):
    model = tiny_model()
    model.model.encoder.layernorm_embedding = nn.LayerNorm(16)
    with pytest.raises(ConversionError, match=r"encoder\.layernorm_embedding\.weight"):
        save(model, tmp_path / "out")


def test_other_folders_and_other_quantizations_are_refused(folder, tmp_path):
    ours, model, _ = folder
    weights = ours / "model.safetensors"
    whole = weights.read_bytes()
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match="no quantization 'int4'"):
        save(model, out, quantization="int4")
    with pytest.raises(ConversionError, match="VaswaniModel cannot be converted: pass"):
        save(model.model, out)
    with pytest.raises(ConversionError, match=r"no file or folder .*nowhere"):
        save(tmp_path / "nowhere", out)
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match="ours cannot be loaded"):
        save(ours, out)
    model.model.encoder.layers[0].self_attn.q_proj.weight = None
    model.save_pretrained(ours)
    with pytest.raises(ConversionError, match=r"not a complete model: missing .*q_proj\.weight"):
        save(ours, out)
    assert not out.exists()
    out.mkdir()
    (out / "file").touch()
    weights.write_bytes(whole)
    with pytest.raises(FileExistsError):
        save(ours, out)


def test_without_ctranslate2_the_error_says_how_to_get_it(monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr(converter, "_missing", ImportError("No module named 'ctranslate2'"))
    with pytest.raises(ConversionError, match=r"pip install 'vaswani\[convert\]'"):
        save(tiny_model(), tmp_path / "out")


@pytest.mark.slow
def test_the_command_line_writes_the_same_folder(folder, tmp_path):
    ours, *_ = folder
    save(ours, tmp_path / "out", quantization="int8", max_positions=64)
    command = [sys.executable, "-m", "vaswani", "convert", "to-ctranslate2", str(ours)]
    command += ["--quantization", "int8", "--max-positions", "64", str(tmp_path / "theirs")]
    subprocess.run(command, check=True)
    written = tmp_path / "theirs" / "model.bin"
    assert written.read_bytes() == (tmp_path / "out" / "model.bin").read_bytes()
