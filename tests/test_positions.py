"""Positions: sinusoids in three layouts, and learned tables with an end."""

import math

import pytest
import torch
from networks import EXACT, SINUSOIDS

from vaswani import VaswaniForConditionalGeneration


@pytest.mark.parametrize("d_model", [8, 64])
def test_sinusoidal_t2t_is_fairseqs_formula(tiny_config, layer_inputs, d_model):
    """All sines, then all cosines, of frequencies 10000^(-i / (d/2 - 1)), from padding_idx + 1."""
    padding_idx = 1
    config = tiny_config(
        d_model=d_model, position_encoding="sinusoidal_t2t", position_offset=padding_idx + 1
    )
    model = VaswaniForConditionalGeneration(config).double().eval()
    nothing = torch.zeros(1, 20, d_model, dtype=torch.float64)
    half = d_model // 2
    for table in layer_inputs(model, inputs_embeds=nothing, decoder_inputs_embeds=nothing):
        for step in range(20):
            position = padding_idx + 1 + step
            angles = [position * math.exp(-i * math.log(10000) / (half - 1)) for i in range(half)]
            expected = [*map(math.sin, angles), *map(math.cos, angles)]
            assert table[0, step].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_add_one_trained_vector_each(tiny_model, layer_inputs, offset):
    model = tiny_model(
        position_encoding="learned", max_position_embeddings=9, position_offset=offset
    )
    nothing = torch.zeros(2, 9, 16, dtype=torch.float64)
    inputs = layer_inputs(model, inputs_embeds=nothing, decoder_inputs_embeds=nothing)
    for stack, states in zip((model.model.encoder, model.model.decoder), inputs, strict=True):
        table = stack.embed_positions.weight
        assert table.requires_grad
        assert torch.equal(states, table[offset:].expand(2, 9, 16))


@pytest.mark.parametrize("position_encoding", SINUSOIDS)
def test_sinusoids_have_no_longest_sequence(tiny_model, position_encoding):
    """A long sequence works after a short one, and starts with the same states."""
    model = tiny_model(position_encoding=position_encoding, encoder_layers=1, decoder_layers=1)
    source, target = torch.tensor([[3, 4, 5]]), torch.randint(3, 19, (1, 700))
    short = model(source, decoder_input_ids=target[:, :4]).logits
    long = model(source, decoder_input_ids=target).logits
    assert long.isfinite().all()
    torch.testing.assert_close(long[:, :4], short, **EXACT)


def test_learned_positions_refuse_longer_sequences_by_name_and_number(tiny_model):
    model = tiny_model(position_encoding="learned", max_position_embeddings=8)
    short, long = torch.randint(3, 19, (1, 8)), torch.randint(3, 19, (1, 11))
    model(short, decoder_input_ids=short)
    message = r"11 tokens.*max_position_embeddings \(8\)"
    with pytest.raises(ValueError, match=message):
        model(long, decoder_input_ids=short)
    with pytest.raises(ValueError, match=message):
        model(short, decoder_input_ids=long)
    with pytest.raises(ValueError, match=message):
        model.generate(long)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_with_learned_positions_stays_inside_the_table(endless_model, num_beams):
    model = endless_model(position_encoding="learned", max_position_embeddings=8)
    source = torch.tensor([[3, 4, 5, 2]])
    assert model.generate(source, num_beams=num_beams).shape[1] == 8


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_past_the_learned_positions_is_refused_by_number(
    endless_model, num_beams, cache
):
    model = endless_model(position_encoding="learned", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"max_position_embeddings \(8\)"):
        model.generate(
            torch.tensor([[3, 4, 5, 2]]),
            num_beams=num_beams,
            max_new_tokens=20,
            cache_implementation=cache,
        )
