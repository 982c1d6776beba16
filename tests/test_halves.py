"""Weights move between a translation model and its two halves, bit for bit."""

import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.testing_utils import CaptureLogger
from vaswani.modeling import halves_vaswani

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    join_halves,
    split_halves,
)

VARIANTS = [
    {},
    {"tie_word_embeddings": False},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 23, "lm_head_bias": True},
    {"norm_position": "pre", "decoder_layers": 1, "d_k": 3, "d_v": 5},
    {"position_encoding": "learned", "max_position_embeddings": 9},
]


def assert_same_weights(one, other):
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_split_and_joined_bit_for_bit(tiny_model, variant):
    model = tiny_model(**variant)
    encoder, decoder = split_halves(model)
    ids, target = torch.tensor([[3, 4, 5, 2]]), torch.tensor([[2, 6, 7]])
    source = encoder(ids).last_hidden_state
    wanted = model(ids, decoder_input_ids=target).logits
    assert torch.equal(decoder(target, encoder_hidden_states=source).logits, wanted)
    joined, new = join_halves(encoder, decoder)
    assert new == []
    assert_same_weights(joined, model)
    assert torch.equal(joined(ids, decoder_input_ids=target).logits, wanted)
    assert joined.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("variant", VARIANTS)
def test_folders_of_two_halves_become_the_model_again(tiny_model, tmp_path, variant):
    model = tiny_model(dtype=torch.float32, **variant)
    for half, name in zip(split_halves(model), ("encoder", "decoder"), strict=True):
        half.save_pretrained(tmp_path / name)
    joined = VaswaniForConditionalGeneration.from_encoder_decoder_pretrained(
        tmp_path / "encoder", tmp_path / "decoder"
    )
    assert_same_weights(joined, model)


def test_a_translation_folder_gives_its_encoder(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    encoder, info = VaswaniEncoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_weights(encoder.encoder, model.model.encoder)
    assert type(encoder.config) is VaswaniEncoderConfig


@pytest.fixture
def pretrained(tmp_path):
    """Save a masked and a causal language model, and return their folders."""
    sizes = {"vocab_size": 19, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    for model_class, ffn_dim, name in (
        (VaswaniForMaskedLM, "encoder_ffn_dim", "masked"),
        (VaswaniForCausalLM, "decoder_ffn_dim", "causal"),
    ):
        config = model_class.config_class(**sizes, **{ffn_dim: 24})
        model_class(config).save_pretrained(tmp_path / name)
    return tmp_path / "masked", tmp_path / "causal"


def test_a_warm_start_names_the_weights_that_neither_half_has(pretrained):
    masked, causal = pretrained
    with CaptureLogger(halves_vaswani.logger) as captured:
        model = VaswaniForConditionalGeneration.from_encoder_decoder_pretrained(masked, causal)
    assert "12 weights come from neither half" in captured.out
    assert "model.decoder.layers.*.encoder_attn.k_proj.weight" in captured.out
    assert "fc1" not in captured.out
    encoder, decoder = (
        AutoModel.from_pretrained(masked),
        AutoModelForCausalLM.from_pretrained(causal),
    )
    assert_same_weights(model.model.encoder, encoder.encoder)
    own = model.model.decoder.state_dict()
    for name, weight in decoder.model.decoder.state_dict().items():
        assert torch.equal(own[name], weight), name
    assert not model.config.share_encoder_decoder_embeddings  # they were trained separately


def test_halves_from_another_copy_of_the_code_are_joined(pretrained, monkeypatch):
    """Code from a repository has classes of its own, as for each folder that is loaded."""
    for name in ("VaswaniEncoderConfig", "VaswaniDecoderConfig"):
        own = getattr(halves_vaswani, name)
        monkeypatch.setattr(halves_vaswani, name, type(name, (own,), {}))
    masked, causal = (AutoModel.from_pretrained(folder) for folder in pretrained)
    model, _ = join_halves(masked, causal)
    assert_same_weights(model.model.encoder, masked.encoder)
    with pytest.raises(TypeError, match="The encoder must be a model with a VaswaniEncoderConfig"):
        join_halves(causal, masked)


def test_an_encoder_alone_gives_a_new_decoder_its_embedding(pretrained):
    masked, _ = pretrained
    encoder = AutoModel.from_pretrained(masked)
    model, new = join_halves(encoder, dropout=0.3)
    assert model.config.dropout == 0.3
    assert model.model.decoder.embed_tokens is model.model.encoder.embed_tokens
    assert torch.equal(model.lm_head.weight, encoder.encoder.embed_tokens.weight)
    names = {name for name, _ in model.named_parameters()}
    assert set(new) == {name for name in names if name.startswith("model.decoder.layers")}


def test_a_new_decoder_starts_with_the_end_token_of_its_encoder(tiny_config):
    tokens = {"pad_token_id": 2, "eos_token_id": 5, "decoder_start_token_id": 5}
    encoder, _ = split_halves(VaswaniForConditionalGeneration(tiny_config(**tokens)))
    model, _ = join_halves(encoder)
    found = [getattr(model.config, name) for name in tokens]
    assert found == list(tokens.values())
    assert model.generation_config.decoder_start_token_id == 5


def test_halves_that_do_not_fit_are_refused_by_the_field(pretrained):
    masked, _ = pretrained
    sizes = {"vocab_size": 19, "decoder_attention_heads": 4}
    wide = VaswaniForCausalLM(VaswaniDecoderConfig(d_model=32, **sizes))
    with pytest.raises(ValueError, match="differ in d_model: 16 in the encoder and 32"):
        join_halves(AutoModel.from_pretrained(masked), wide)
    other = VaswaniForCausalLM(VaswaniDecoderConfig(d_model=16, **sizes))
    with pytest.raises(ValueError, match="needs halves with the same embedding"):
        join_halves(AutoModel.from_pretrained(masked), other, share_encoder_decoder_embeddings=True)
    untied = VaswaniForCausalLM(
        VaswaniDecoderConfig(d_model=16, tie_word_embeddings=False, **sizes)
    )
    with pytest.raises(ValueError, match="needs a decoder whose lm_head has the weights"):
        join_halves(AutoModel.from_pretrained(masked), untied, tie_word_embeddings=True)


def test_overrides_of_sizes_that_a_half_has_are_refused(pretrained):
    masked, _ = pretrained
    encoder = AutoModel.from_pretrained(masked)
    for override in ({"d_model": 32}, {"vocab_size": 50}):
        with pytest.raises(
            ValueError, match=r"model\.encoder\.\S+ has the shape \(.*overrides make"
        ):
            join_halves(encoder, **override)


def test_arguments_of_loading_load_both_halves(pretrained, tmp_path):
    masked, causal = pretrained
    for folder in (masked, causal):
        shutil.copytree(folder, tmp_path / "both" / folder.name / "inner")
    model = VaswaniForConditionalGeneration.from_encoder_decoder_pretrained(
        *(tmp_path / "both" / folder.name for folder in (masked, causal)),
        **{"subfolder": "inner", "torch_dtype": torch.bfloat16, "device_map": "cpu"},
        **{"revision": "main", "force_download": False, "dropout": 0.3},
    )
    assert model.dtype == torch.bfloat16
    assert model.config.dropout == 0.3
    assert not {"subfolder", "revision", "device_map"} & model.config.to_dict().keys()


def test_overrides_that_are_no_field_are_refused(pretrained):
    masked, _ = pretrained
    load = VaswaniForConditionalGeneration.from_encoder_decoder_pretrained
    with pytest.raises(ValueError, match="'dropuot' is unknown: did you mean 'dropout'"):
        load(masked, dropuot=0.3)
    with pytest.raises(ValueError, match="'revisions' is unknown: did you mean 'revision'"):
        load(masked, revisions="main")
    with pytest.raises(ValueError, match="'quantization_config' is unknown"):
        load(masked, quantization_config=None)
    with pytest.raises(ValueError, match="'subfolder' is unknown"):
        join_halves(AutoModel.from_pretrained(masked), subfolder="inner")
