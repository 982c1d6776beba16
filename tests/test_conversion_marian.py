"""Conversion of MarianMTModel, there and back, compared with transformers."""

import json

import pytest
import torch
from marian_folders import FIXTURES, assert_same, their_model
from marian_formulas import SIZE
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel
from vaswani.commands.main import main
from vaswani.conversion import marian, to_marian
from vaswani.conversion.errors import ConversionError

from vaswani import VaswaniForConditionalGeneration

spms, vocabulary, write, warnings_of, batch = FIXTURES


# transformers to us


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": SIZE + 8},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        {"activation_function": "gelu", "scale_embedding": False},
        {"encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 40},
        {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "activation_function": "relu"},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
@pytest.mark.parametrize("paper_positions", [False, True])
def test_logits_equal_marianmt_under_padding(write, batch, tmp_path, settings, paper_positions):
    theirs = their_model(**settings)
    folder = write(theirs, with_tokenizer=False)
    marian.convert(folder, tmp_path / "out", paper_positions, no_tokenizer=True)
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert isinstance(ours, VaswaniForConditionalGeneration)
    assert ours.config.position_encoding == (
        "sinusoidal" if paper_positions else "sinusoidal_concat"
    )
    with torch.no_grad():
        expected, found = theirs(**batch).logits, ours(**batch).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"length_penalty": 0.4}])
def test_search_gives_the_translations_of_marianmt(write, batch, settings):
    outputs = []
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = their_model(tie_word_embeddings=False)
        for name, value in settings.items():
            setattr(theirs.generation_config, name, value)
        ours = marian.load(write(theirs, f"theirs{seed}"), no_tokenizer=True).model
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found, expected = ours.generate(**source), theirs.generate(**source)
        assert found.tolist() == expected.tolist()
        outputs += found.tolist()
    assert len(set(map(tuple, outputs))) > 3


def test_settings_of_the_source_are_kept(write):
    theirs = their_model(dropout=0.2, attention_dropout=0.1, activation_dropout=0.05)
    ours = marian.load(write(theirs)).model
    for name in ("dropout", "attention_dropout", "activation_dropout", "d_model"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    assert ours.config.unk_token_id == 1
    assert ours.config.label_smoothing == 0
    kept = ("num_beams", "max_length", "bad_words_ids", "forced_eos_token_id", "eos_token_id")
    for name in kept:
        assert getattr(ours.generation_config, name) == getattr(theirs.generation_config, name)
    assert ours.generation_config.length_penalty_type == "hf"
    assert ours.generation_config.max_length_offset == 0


def test_old_folders_are_read(write, batch, tmp_path):
    """Old folders have a pickle, half precision, tables of positions, and search settings."""
    theirs = their_model().half()
    folder = write(theirs)
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    settings = json.loads((folder / "config.json").read_text())
    settings |= json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    settings |= {"static_position_embeddings": True, "normalize_before": False}
    (folder / "config.json").write_text(json.dumps(settings))
    ours = marian.load(folder).model
    assert ours.dtype == torch.float16
    assert ours.generation_config.num_beams == 4
    assert ours.generation_config.bad_words_ids == [[SIZE - 1]]
    with torch.no_grad():
        expected, found = theirs.float()(**batch).logits, ours.float()(**batch).logits
    # Its own table of positions went through float16 too.
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-3)


def test_weights_in_several_files_are_read(write):
    theirs = their_model()
    whole = marian.load(write(theirs), no_tokenizer=True).model
    folder = write(theirs, "parts")
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert_same(whole, marian.load(folder, no_tokenizer=True).model)


def test_sampling_settings_without_sampling_are_dropped(write, tmp_path, warnings_of):
    folder = write(their_model())
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) | {"temperature": 0.7, "num_beams": 1}
    path.write_text(json.dumps(settings))
    marian.convert(folder, tmp_path / "out")
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").generation_config
    assert (saved.temperature, saved.num_beams) == (None, 1)
    assert any("temperature 0.7" in warning for warning in warnings_of)


def test_the_start_token_is_that_of_transformers(write, tmp_path):
    folder = write(their_model())
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) | {"bos_token_id": 5}
    del settings["decoder_start_token_id"]
    path.write_text(json.dumps(settings))
    ids = torch.tensor([[4, 7, 0]])
    expected = MarianMTModel.from_pretrained(folder).generate(ids)
    assert expected[0, 0] == 5
    assert marian.load(folder).model.generate(ids).tolist() == expected.tolist()


# Us to transformers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": SIZE + 8},
        {"tie_word_embeddings": False},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_there_and_back_is_bit_identical(write, tmp_path, settings, dtype):
    one = marian.load(
        write(their_model(**settings).to(dtype), with_tokenizer=False), no_tokenizer=True
    )
    one.save(tmp_path / "ours")
    to_marian.save(tmp_path / "ours", tmp_path / "again")
    again = marian.load(tmp_path / "again", no_tokenizer=True)
    assert_same(one.model, again.model)
    theirs = MarianMTModel.from_pretrained(tmp_path / "again").state_dict()
    before = MarianMTModel.from_pretrained(tmp_path / "theirs").state_dict()
    if "tie_word_embeddings" in settings:
        del before["model.shared.weight"]  # not used without ties
    for name, tensor in before.items():
        assert torch.equal(tensor, theirs[name]), name


def test_tokenizers_come_back_bit_identical(write, tmp_path):
    main(["convert", "marian", str(write(their_model())), str(tmp_path / "ours")])
    main(["convert", "to-marian", str(tmp_path / "ours"), str(tmp_path / "again")])
    main(["convert", "marian", str(tmp_path / "again"), str(tmp_path / "back")])
    for name in ("tokenizer.json", "target_tokenizer/tokenizer.json", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
    ours = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert "vaswani" not in type(theirs).__module__
    assert theirs("a green cat").input_ids == ours("a green cat").input_ids


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "sinusoidal_concat"])
@pytest.mark.parametrize("tie", [False, True])
def test_models_of_ours_leave_for_marianmt(
    tiny_model, padded_batch, tmp_path, attention_bias, position_encoding, tie
):
    ours = tiny_model(
        dtype=torch.float32,
        attention_bias=attention_bias,
        lm_head_bias=attention_bias,
        position_encoding=position_encoding,
        tie_word_embeddings=tie,
    )
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    to_marian.save(ours, tmp_path / "out")
    theirs, report = MarianMTModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]
    source, mask = padded_batch([9, 5, 2], seed=1)
    batch = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": source[:, :6]}
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(**batch).logits, ours(**batch).logits, atol=1e-5, rtol=1e-5
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_what_marianmt_has_no_place_for_is_named(tiny_model, tmp_path, warnings_of):
    to_marian.save(tiny_model(), tmp_path / "out")
    assert len(warnings_of) == 1
    assert "gnmt" in warnings_of[0]
    assert "max_length_offset 50 (max_length 512 instead)" in warnings_of[0]
    assert MarianMTModel.from_pretrained(tmp_path / "out").generation_config.max_length == 512


def test_refusals_name_every_reason(tiny_model, tmp_path):
    model = tiny_model(norm_position="pre", position_offset=2, layer_norm_eps=1e-6, d_k=8)
    with pytest.raises(ConversionError) as caught:
        to_marian.save(model, tmp_path / "out")
    for reason in (
        "norm_position 'pre'",
        "final_layer_norm",
        "position_offset 2",
        "1e-06",
        "d_k 8",
    ):
        assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


# Errors


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_fields_of_other_models_are_refused_at_once(write, tmp_path):
    folder = write(their_model())
    edited(folder, normalize_before=True, static_position_embeddings=False)
    with pytest.raises(ConversionError, match=r"normalize_before True; static_position_embeddings"):
        marian.convert(folder, tmp_path / "out")
    edited(folder, normalize_before=False, static_position_embeddings=True)
    edited(folder, encoder_attention_heads=3)
    with pytest.raises(ConversionError, match="encoder_attention_heads"):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    edited(folder, d_model="wide")
    with pytest.raises(ConversionError, match=r"config.json cannot be read.*d_model"):
        marian.convert(folder, tmp_path / "out")
    edited(folder, model_type="bart")
    with pytest.raises(ConversionError, match=r"'bart', not 'marian'"):
        marian.convert(folder, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"neither config.json"):
        marian.convert(tmp_path, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"no file or folder .*opus-mt-en-de"):
        marian.convert(tmp_path / "opus-mt-en-de", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def resaved(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.encoder.layers.1.fc1.bias"), "1.fc1.bias is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "No rule knows 1 .*extra"),
        (
            lambda tensors: tensors.update({"model.encoder.layers.0.fc3.bias": torch.ones(1)}),
            "fc3.bias has no place",
        ),
        (
            lambda tensors: tensors.update(
                {"model.encoder.embed_positions.weight": torch.ones(512, 16)}
            ),
            "not MarianMTModel's table",
        ),
        (
            lambda tensors: tensors.update({"model.decoder.embed_positions.weight": torch.ones(3)}),
            "not MarianMTModel's table",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(SIZE, 16)}),
            "differ, but are tied",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(write, tmp_path, change, message):
    folder = write(their_model())
    resaved(folder, change)
    with pytest.raises(ConversionError, match=message):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("text", ["{", "[]", '{"num_beams": "many"}'])
def test_a_damaged_generation_config_is_named_and_not_passed_over(write, tmp_path, text):
    folder = write(their_model())
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConversionError, match=r"generation_config\.json cannot be read"):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named_and_nothing_is_left(write, tmp_path):
    folder = write(their_model())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"model.safetensors is not a complete"):
        marian.convert(folder, tmp_path / "out")
    weights.unlink()
    with pytest.raises(ConversionError, match=r"neither model.safetensors nor pytorch_model.bin"):
        marian.convert(folder, tmp_path / "out")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config.json is not JSON"):
        marian.convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_pickle_that_would_run_code_is_refused(write, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    folder = write(their_model())
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="exec"):
        marian.convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
