"""Keys and values of the source, which the decoder computes once for each sentence."""

import pytest
import torch
from compiled_models import KINDS, compiled, model_with
from vaswani.generation import compiled_vaswani
from vaswani.generation.incremental_vaswani import IncrementalDecoder

from vaswani import VaswaniForConditionalGeneration, VaswaniInt8Config

# Masks of three sentences. Padding may be anywhere, and a sentence may be nothing else.
MASKS = {
    "no padding": [[1, 1, 1, 1, 1]] * 3,
    "padding": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 1]],
    "nothing first": [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "nothing last": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 1e-5}


def model_of(kind, folder, **changes):
    torch.manual_seed(0)
    model = model_with(d_model=64, d_k=8, d_v=12, **changes)
    if kind == "int8":
        model.save_pretrained(folder)
        load = VaswaniForConditionalGeneration.from_pretrained
        return load(folder, quantization_config=VaswaniInt8Config()).eval()
    return model.to(getattr(torch, kind))


def decoder_of(model, source, mask=None):
    return IncrementalDecoder(model, source, None if mask is None else torch.tensor(mask))


def projections(model, source):
    """Project a source (B, S, D): keys (L, B, H, S, d_k) and values (L, B, H, S, d_v)."""
    attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
    keys = [part.k_proj(source).unflatten(2, (-1, 8)).transpose(1, 2) for part in attentions]
    values = [part.v_proj(source).unflatten(2, (-1, 12)).transpose(1, 2) for part in attentions]
    return torch.stack(keys).float(), torch.stack(values).float()


@compiled
@pytest.mark.parametrize("rows_at_once", [512, 5, 1])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_kernel_projects_real_tokens_and_gives_zeros_to_padding(
    kind, mask, rows_at_once, monkeypatch, tmp_path
):
    monkeypatch.setattr(compiled_vaswani, "_ROWS_AT_ONCE", rows_at_once)
    model = model_of(kind, tmp_path)
    source = torch.randn(3, 5, 64).to(model.dtype)
    cache = decoder_of(model, source, mask).source
    real = torch.tensor(mask, dtype=torch.bool)[None, :, None, :, None]
    for found, expected in zip((cache.keys, cache.values), projections(model, source), strict=True):
        tolerance = TOLERANCES[kind]
        torch.testing.assert_close(found, expected * real, rtol=tolerance, atol=tolerance)
    visible = torch.tensor(mask).bool() | (torch.tensor(mask).sum(dim=1, keepdim=True) == 0)
    assert torch.equal(cache.seen == 0, visible)


@pytest.mark.parametrize("mask", [MASKS["padding"], MASKS["nothing last"]], ids=["padding", "none"])
@torch.inference_mode()
def test_layers_without_a_kernel_project_real_tokens_too(mask, tmp_path):
    model = model_of("float32", tmp_path, activation_function="gelu")
    source = torch.randn(3, 5, 64)
    decoder = decoder_of(model, source, mask)
    assert decoder.compiled is None
    real = torch.tensor(mask, dtype=torch.bool)[None, :, None, :, None]
    cache = decoder.source
    for found, expected in zip((cache.keys, cache.values), projections(model, source), strict=True):
        torch.testing.assert_close(found * real, expected * real, rtol=1e-5, atol=1e-5)
    nothing = ~torch.tensor(mask, dtype=torch.bool).any(dim=1)
    assert not cache.values[:, nothing].any()


@compiled
@torch.inference_mode()
def test_sentences_that_stay_keep_their_keys_and_values(tmp_path):
    decoder = decoder_of(model_of("float32", tmp_path), torch.randn(4, 5, 64))
    decoder.read(torch.full((4, 1), 2))
    cache = decoder.source
    expected = [part[:, [3, 1]].clone() for part in (cache.keys, cache.values)]
    place = cache.keys.data_ptr()
    decoder.keep(torch.tensor([3, 1]))
    assert all(map(torch.equal, (cache.keys, cache.values), expected))
    assert cache.keys.data_ptr() == place
    for keys, values in cache.layers:
        assert keys.shape == (2 * 4, 8, 5)
        assert values.shape == (2 * 4, 5, 12)


@pytest.mark.parametrize("change", ["wrapped", "pruned"])
def test_heads_are_counted_by_the_outputs_of_a_projection(change, tmp_path):
    model = model_of("float32", tmp_path)
    for layer in model.model.decoder.layers:
        attentions = layer.self_attn, layer.encoder_attn
        if change == "wrapped":
            layer.self_attn.k_proj = torch.nn.Sequential(layer.self_attn.k_proj)
            continue
        for attention in attentions:  # 3 of 4 heads stay
            for name, outputs in (("q_proj", 24), ("k_proj", 24), ("v_proj", 36)):
                linear = getattr(attention, name)
                linear.weight = torch.nn.Parameter(linear.weight[:outputs])
            attention.out_proj.weight = torch.nn.Parameter(attention.out_proj.weight[:, :36])
    source = torch.randint(4, 700, (3, 5), generator=torch.Generator().manual_seed(0))
    call = {"num_beams": 2, "max_new_tokens": 6, "return_dict_in_generate": True}
    found = model.generate(source, **call)
    expected = model.generate(source, **call, output_scores=True)  # by transformers' search
    assert torch.equal(found.sequences, expected.sequences)


@compiled
@torch.inference_mode()
def test_encoder_outputs_of_another_width_are_refused(tmp_path):
    model = model_of("float32", tmp_path)
    with pytest.raises(RuntimeError, match="The states have 63 values, but the layer takes 64"):
        decoder_of(model, torch.randn(3, 5, 63))
