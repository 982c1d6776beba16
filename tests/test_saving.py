"""Models resized, saved and loaded; fresh weights; the Auto classes."""

import importlib
import math

import pytest
import torch
from networks import SINUSOIDS
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
    registration,
)

# Vocabularies that grow


@pytest.mark.parametrize(
    ("new_size", "multiple", "resulting"), [(23, None, 23), (12, None, 12), (20, 8, 24)]
)
def test_resizing_a_shared_vocabulary_keeps_one_matrix_and_its_sizes(
    tiny_model, tmp_path, new_size, multiple, resulting
):
    model = tiny_model(dtype=torch.float32)
    old = model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(new_size, pad_to_multiple_of=multiple)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    for resized in (model, reloaded):
        matrix = resized.lm_head.weight
        assert matrix is resized.model.encoder.embed_tokens.weight
        assert matrix is resized.model.decoder.embed_tokens.weight
        assert matrix.shape == (resulting, 16)
        assert torch.equal(matrix[: min(19, resulting)], old[:resulting])
        assert resized.config.vocab_size == resized.config.decoder_vocab_size == resulting
        assert resized.lm_head.out_features == resulting
    batch = {"input_ids": torch.tensor([[3, 4, 2]]), "decoder_input_ids": torch.tensor([[2, 5]])}
    assert torch.equal(reloaded(**batch).logits, model(**batch).logits)
    assert reloaded(**batch).logits.shape[-1] == resulting


def test_resizing_separate_vocabularies_changes_one_side_at_a_time(tiny_model, tmp_path):
    model = tiny_model(
        dtype=torch.float32, decoder_vocab_size=31, share_encoder_decoder_embeddings=False
    )

    def sizes(resized):
        assert resized.lm_head.weight is resized.model.decoder.embed_tokens.weight
        assert resized.lm_head.out_features == len(resized.lm_head.weight)
        source = len(resized.model.encoder.embed_tokens.weight)
        assert (source, len(resized.lm_head.weight)) == (
            resized.config.vocab_size,
            resized.config.decoder_vocab_size,
        )
        return source, len(resized.lm_head.weight)

    source = model.model.encoder.embed_tokens.weight.detach().clone()
    target = model.lm_head.weight.detach().clone()
    assert sizes(model) == (19, 31)
    model.resize_token_embeddings(22)
    assert sizes(model) == (22, 31)
    assert torch.equal(model.lm_head.weight, target)
    model.resize_decoder_token_embeddings(35)
    assert sizes(model) == (22, 35)
    assert torch.equal(model.lm_head.weight[:31], target)
    assert torch.equal(model.model.encoder.embed_tokens.weight[:19], source)

    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert sizes(reloaded) == (22, 35)
    batch = {"input_ids": torch.tensor([[3, 21]]), "labels": torch.tensor([[34, 2]])}
    assert torch.equal(reloaded(**batch).logits, model(**batch).logits)


def test_the_target_of_a_shared_vocabulary_cannot_be_resized_alone(tiny_model):
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        tiny_model().resize_decoder_token_embeddings(25)


# Saving and loading


@pytest.mark.parametrize("position_encoding", [*SINUSOIDS, "learned"])
def test_loading_gives_the_saved_positions_and_logits_in_every_dtype(
    tiny_model, layer_inputs, tmp_path, position_encoding
):
    """`from_pretrained` builds the model on the meta device, which loses computed values."""
    sizes = {"position_encoding": position_encoding, "max_position_embeddings": 9}
    tiny_model(dtype=torch.float32, **sizes).save_pretrained(tmp_path)
    batch = {
        "input_ids": torch.tensor([[3, 4, 5, 2]]),
        "decoder_input_ids": torch.tensor([[2, 6, 7]]),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        expected = tiny_model(dtype=torch.float32, **sizes).to(dtype)
        loaded, info = VaswaniForConditionalGeneration.from_pretrained(
            tmp_path, dtype=dtype, output_loading_info=True
        )
        assert not any(info.values())
        assert loaded.dtype == dtype
        nothing = torch.zeros(1, 9, 16, dtype=dtype)
        for found, original in zip(
            layer_inputs(loaded, inputs_embeds=nothing, decoder_inputs_embeds=nothing),
            layer_inputs(expected, inputs_embeds=nothing, decoder_inputs_embeds=nothing),
            strict=True,
        ):
            assert torch.equal(found, original)
        assert torch.equal(loaded(**batch).logits, expected(**batch).logits)


@pytest.mark.parametrize(
    "ties",
    [
        {},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 31},
    ],
)
def test_saving_and_loading_keeps_every_kind_of_tying(tiny_model, tmp_path, ties):
    model = tiny_model(dtype=torch.float32, **ties)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is VaswaniForConditionalGeneration
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_loaded_model_does_not_change_with_its_file(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # the file keeps its place on the disk
        opened.write(bytes(size))
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["model.encoder.embed_tokens.weight", "model.decoder.layers.1.fc2.bias"]
)
def test_weights_that_are_not_finite_are_refused_by_name(tiny_model, name, dtype, number, tmp_path):
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=f"{name} of {tmp_path} holds NaN or infinity"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    loaded, _ = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded.get_parameter(name).isfinite().all()


def test_weights_too_large_for_a_dtype_are_refused_in_it(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.encoder.layers[0].fc1.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"fc1\.weight of .* too large for the dtype"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("saved_class", [VaswaniForConditionalGeneration, VaswaniModel])
def test_the_encoder_alone_loads_from_a_full_checkpoint(
    tiny_model, padded_batch, tmp_path, saved_class
):
    full = tiny_model(saved_class, dtype=torch.float32)
    full.save_pretrained(tmp_path)
    encoder, info = VaswaniEncoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    source, mask = padded_batch([5, 2])
    expected = full.get_encoder()(source, mask).last_hidden_state
    assert torch.equal(encoder(source, mask).last_hidden_state, expected)


# Fresh weights


def test_fresh_weights_follow_the_documented_initialisation():
    """Embeddings N(0, 1/d_model), matrices Xavier uniform, biases 0, LayerNorms 1 and 0."""
    torch.manual_seed(1)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=500, d_model=256, encoder_layers=1, decoder_layers=1)
    )
    embedding = model.lm_head.weight
    assert embedding.mean().item() == pytest.approx(0, abs=1e-3)
    assert embedding.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert embedding.abs().max() > 3.5 * 256**-0.5, "normal, not uniform"
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding:
            fan_out, fan_in = module.weight.shape
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
            assert module.bias is None or (module.bias == 0).all()
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_fresh_weights_may_start_as_in_fairseq():
    torch.manual_seed(1)
    sizes = {"vocab_size": 500, "d_model": 256, "encoder_layers": 1, "decoder_layers": 1}
    model = VaswaniForConditionalGeneration(VaswaniConfig(**sizes, initializer="fairseq"))
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        fan_out, fan_in = linear.weight.shape
        bound = math.sqrt(6 / (fan_in + fan_out))
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            bound /= math.sqrt(2)
        elif name.endswith(("fc1", "fc2")):
            bound = 1 / math.sqrt(fan_in)
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name


# Registration


@pytest.mark.parametrize("owner", ["transformers", "another package"])
def test_importing_beside_another_owner_of_our_key_fails_instead_of_replacing_it(
    monkeypatch, owner
):
    class OtherConfig(PreTrainedConfig):
        model_type = "vaswani"

    if owner == "transformers":
        monkeypatch.delitem(CONFIG_MAPPING._extra_content, "vaswani")
        monkeypatch.setitem(CONFIG_MAPPING._mapping, "vaswani", "OtherConfig")
    else:
        monkeypatch.setitem(CONFIG_MAPPING._extra_content, "vaswani", OtherConfig)
    with pytest.raises(ValueError, match="vaswani"):
        importlib.reload(registration)


def test_the_auto_classes_build_the_class_of_each_task(tiny_config):
    config = tiny_config()
    assert type(AutoConfig.for_model("vaswani")) is VaswaniConfig
    assert type(AutoModel.from_config(config)) is VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniForConditionalGeneration
    assert type(AutoModelForTextEncoding.from_config(config)) is VaswaniEncoderModel


def test_resizing_three_separate_tables_keeps_each_ones_weights(tiny_model):
    model = tiny_model(tie_word_embeddings=False)
    names = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    before = {name: model.get_submodule(name).weight.clone() for name in names}
    model.resize_token_embeddings(22)
    for name in names:
        assert model.get_submodule(name).weight.shape[0] == 22
        assert torch.equal(model.get_submodule(name).weight[:19], before[name])
    assert model.config.decoder_vocab_size == 22


def test_resizing_the_target_vocabulary_pads_it_to_a_multiple(tiny_model):
    model = tiny_model(decoder_vocab_size=13, share_encoder_decoder_embeddings=False)
    model.resize_decoder_token_embeddings(14, pad_to_multiple_of=8)
    assert model.config.decoder_vocab_size == model.lm_head.out_features == 16
    assert model.model.decoder.embed_tokens.weight is model.lm_head.weight
