"""The network compared with independent implementations, and its caches, masks and losses.

Comparisons run in float64, so that agreement to 1e-10 is significant.
"""

import importlib
import itertools
import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    DataCollatorForSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StaticCache,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vaswani.generation.limits_vaswani import length_limits

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniGenerationConfig,
    VaswaniModel,
    registration,
)

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SINUSOIDS = ["sinusoidal", "sinusoidal_concat", "sinusoidal_t2t"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outputs_of(sequences, eos=2, pad=None):
    """Remove the start token, tokens after the end token, and padding."""
    rows = []
    for row in sequences.tolist():
        output = row[1 : row.index(eos, 1) + 1] if eos in row[1:] else row[1:]
        while output and output[-1] == pad:
            output.pop()
        rows.append(output)
    return rows


def enliven(model):
    """Give a model with an untied `lm_head` outputs that vary in words and length.

    Random maps repeat one word for ever. Here the vector of each word is a whitened state of the
    decoder, so that every word is likely at some positions and unlikely at others. Small embeddings
    give positions an effect. The end token has the mean state of the fifth position.
    """
    config, head = model.config, model.lm_head.weight
    source = torch.randint(0, config.vocab_size, (8, 5))
    target = torch.randint(0, config.vocab_size, (8, 12))
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(0.25)
        states = model.model(source, decoder_input_ids=target).last_hidden_state
        model.model.decoder.layers[-1].final_layer_norm.bias.sub_(states.mean(dim=(0, 1)))
        states = states - states.mean(dim=(0, 1))
        every_state = states.flatten(0, 1)
        covariance = every_state.T @ every_state / len(every_state) + 1e-3 * torch.eye(
            config.d_model
        )
        visited = every_state[torch.randperm(len(every_state))[: len(head)]]
        visited[config.eos_token_id] = 2 * states[:, 4].mean(dim=0)
        head.copy_(0.4 * visited @ torch.linalg.inv(covariance))
    return model


@pytest.fixture
def lively_model(tiny_model):
    """Build a model whose outputs vary in words and in length."""

    def build(**overrides):
        return enliven(tiny_model(tie_word_embeddings=False, **overrides))

    return build


@pytest.fixture
def endless_model(tiny_model):
    """Build a model that never ends a sentence: the logit of the end token is about -1000."""

    def build(**overrides):
        model = tiny_model(tie_word_embeddings=False, **overrides)
        with torch.no_grad():
            model.model.decoder.layers[-1].final_layer_norm.bias[0] = 100.0
            model.lm_head.weight[:, 0] = 0.0
            model.lm_head.weight[model.config.eos_token_id, 0] = -10.0
        return model

    return build


# Parity with torch.nn.Transformer


def attention_pairs(ours, theirs):
    yield [ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight], theirs.in_proj_weight
    yield [ours.out_proj.weight], theirs.out_proj.weight
    if ours.q_proj.bias is not None:
        yield [ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias], theirs.in_proj_bias
        yield [ours.out_proj.bias], theirs.out_proj.bias


def norm_pairs(ours, theirs):
    yield [ours.weight], theirs.weight
    yield [ours.bias], theirs.bias


def layer_pairs(ours, theirs):
    yield from attention_pairs(ours.self_attn, theirs.self_attn)
    yield from norm_pairs(ours.self_attn_layer_norm, theirs.norm1)
    norm = theirs.norm2
    if hasattr(ours, "encoder_attn"):
        yield from attention_pairs(ours.encoder_attn, theirs.multihead_attn)
        yield from norm_pairs(ours.encoder_attn_layer_norm, theirs.norm2)
        norm = theirs.norm3
    yield from norm_pairs(ours.final_layer_norm, norm)
    for our_map, their_map in ((ours.fc1, theirs.linear1), (ours.fc2, theirs.linear2)):
        yield [our_map.weight], their_map.weight
        yield [our_map.bias], their_map.bias


def torch_transformer(model):
    """Build torch.nn.Transformer with the same weights, and list the corresponding parameters."""
    config = model.config
    reference = nn.Transformer(
        config.d_model,
        config.encoder_attention_heads,
        config.encoder_layers,
        config.decoder_layers,
        config.encoder_ffn_dim,
        dropout=0.0,
        batch_first=True,
        norm_first=config.norm_position == "pre",
        dtype=torch.float64,
    )
    pairs = []
    for ours, theirs in ((model.encoder, reference.encoder), (model.decoder, reference.decoder)):
        for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
            pairs += layer_pairs(our_layer, their_layer)
        if config.norm_position == "pre":
            pairs += norm_pairs(ours.layer_norm, theirs.norm)
        else:
            theirs.norm = (
                None  # torch has one more LayerNorm after a post-norm stack than the paper
            )
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for ours, theirs in pairs:
            theirs.copy_(torch.cat(ours))
    return reference, pairs


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize(
    ("d_model", "heads", "layers", "source_lengths", "target_lengths"),
    [
        (16, 4, (2, 2), [5, 3], [4, 2]),
        (24, 3, (1, 3), [7, 1, 4], [2, 6, 1]),
        (8, 1, (3, 1), [3], [3]),
    ],
)
def test_states_and_all_gradients_equal_torch_nn_transformer(
    tiny_model,
    padded_batch,
    layer_inputs,
    norm_position,
    attention_bias,
    d_model,
    heads,
    layers,
    source_lengths,
    target_lengths,
):
    full = tiny_model(
        norm_position=norm_position,
        attention_bias=attention_bias,
        d_model=d_model,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        dropout=0.0,
    )
    model = full.model
    reference, pairs = torch_transformer(model)
    source, source_mask = padded_batch(source_lengths, seed=1)
    target, target_mask = padded_batch(target_lengths, seed=2)
    batch = {
        "input_ids": source,
        "attention_mask": source_mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }
    x, y = (states.detach() for states in layer_inputs(full, **batch))
    ours = model(**batch)
    future = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
    reference.train()  # torch's inference kernel would zero the padding; dropout is 0
    encoded = reference.encoder(x, src_key_padding_mask=source_mask == 0)
    decoded = reference.decoder(
        y,
        encoded,
        tgt_mask=future,
        tgt_key_padding_mask=target_mask == 0,
        memory_key_padding_mask=source_mask == 0,
    )
    torch.testing.assert_close(ours.encoder_last_hidden_state, encoded, **EXACT)
    torch.testing.assert_close(ours.last_hidden_state, decoded, **EXACT)

    direction = torch.randn_like(decoded)
    (ours.last_hidden_state * direction).sum().backward()
    (decoded * direction).sum().backward()
    compared = {id(parameter) for ours_of_pair, _ in pairs for parameter in ours_of_pair}
    layers_and_norms = {
        id(p) for name, p in model.named_parameters() if not name.endswith("embed_tokens.weight")
    }
    assert compared == layers_and_norms
    for ours_of_pair, theirs in pairs:
        torch.testing.assert_close(torch.cat([p.grad for p in ours_of_pair]), theirs.grad, **EXACT)


# Parity with MarianMTModel

MARIAN_IDS = {"pad_token_id": 18, "eos_token_id": 2, "decoder_start_token_id": 18}


def marian_twin(model):
    """Build MarianMTModel with the weights and the table of positions of `model`."""
    ours = model.config
    sizes = {
        name: getattr(ours, name)
        for name in (
            "vocab_size",
            "d_model",
            "encoder_layers",
            "decoder_layers",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
        )
    }
    config = MarianConfig(
        **sizes,
        **MARIAN_IDS,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        max_position_embeddings=64,
        forced_eos_token_id=None,
        tie_word_embeddings=ours.tie_word_embeddings,
    )
    twin = MarianMTModel(config).double().eval()
    weights = model.state_dict()
    weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"]
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "final_logits_bias",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    }
    assert (twin.final_logits_bias == 0).all()
    return twin


@pytest.fixture
def marian_like_model(tiny_model):
    def build(**overrides):
        return tiny_model(
            position_encoding="sinusoidal_concat", attention_bias=True, **MARIAN_IDS, **overrides
        )

    return build


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_under_padding_equal_marian(marian_like_model, padded_batch, seed):
    model = marian_like_model(seed=seed, dropout=0.0)
    twin = marian_twin(model)
    source, mask = padded_batch([6, 3, 1], seed=1, vocab_size=18)
    source = source.masked_fill(mask == 0, 18)
    labels, label_mask = padded_batch([2, 5, 4], seed=2, vocab_size=18)
    labels = labels.masked_fill(label_mask == 0, -100)
    batch = {"input_ids": source, "attention_mask": mask, "labels": labels}
    # Marian's table of positions was rounded to float32, and our angles were.
    torch.testing.assert_close(model(**batch).logits, twin(**batch).logits, atol=2e-5, rtol=0)
    for stack in (twin.model.encoder, twin.model.decoder):
        positions = model.model.encoder.embed_positions(0, 64, source.device)
        torch.testing.assert_close(
            stack.embed_positions.weight, positions.double(), atol=1e-5, rtol=0
        )
        stack.embed_positions.weight.data.copy_(positions)
    ours, theirs = model(**batch), twin(**batch)
    torch.testing.assert_close(ours.logits, theirs.logits, **EXACT)
    torch.testing.assert_close(ours.loss, theirs.loss, **EXACT)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.6, 1.0, 2.0, -0.5])
def test_beam_search_with_hf_penalty_equals_marian(
    marian_like_model, padded_batch, early_stopping, length_penalty
):
    found = []
    for seed in range(4):
        model = enliven(marian_like_model(seed=seed, tie_word_embeddings=False))
        twin = marian_twin(model)
        source, mask = padded_batch([7, 4, 2], seed=seed, vocab_size=18)
        batch = {"input_ids": source.masked_fill(mask == 0, 18), "attention_mask": mask}
        search = {
            "num_beams": 4,
            "num_return_sequences": 2,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "max_new_tokens": 9,
        }
        scores = {"return_dict_in_generate": True, "output_scores": True}
        ours = model.generate(**batch, **search, length_penalty_type="hf")
        scored = model.generate(**batch, **search, **scores, length_penalty_type="hf")
        theirs = twin.generate(**batch, **search, **scores)
        assert outputs_of(ours) == outputs_of(scored.sequences) == outputs_of(theirs.sequences)
        torch.testing.assert_close(
            scored.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4
        )
        found += map(tuple, outputs_of(ours))
    assert len(set(found)) > 12, "24 outputs that are all alike would prove nothing"


# Positions


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


# Token ids and labels outside the vocabulary


@pytest.mark.parametrize("wrong", [19, 300, -1])
def test_token_ids_outside_the_vocabulary_are_named(tiny_model, wrong):
    model = tiny_model()
    good, bad = torch.tensor([[3, 4, 5]]), torch.tensor([[3, wrong, 5]])
    for batch in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match=rf"Token id {wrong} .*19"):
            model(batch[0], decoder_input_ids=batch[1])
    with pytest.raises(ValueError, match=rf"Token id {wrong} .*19"):
        model.generate(bad)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("wrong", [19, 300, -1])
def test_labels_outside_the_vocabulary_are_named(tiny_model, wrong, training):
    model = tiny_model().train(training)
    with pytest.raises(ValueError, match=rf"{wrong} .*19"):
        model(
            torch.tensor([[3, 4]]), labels=torch.tensor([[5, 6, wrong]])
        )  # the last is never an input
    with pytest.raises(ValueError, match=rf"{wrong} .*19"):
        model(torch.tensor([[3, 4]]), labels=torch.tensor([[wrong, 6, -100]]))


# Caches


def empty_caches(config, source_length, target_length):
    def static(length):
        return StaticCache(config=config, max_cache_len=length)

    return {
        "dynamic": EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
        "static": EncoderDecoderCache(static(target_length), static(source_length)),
    }


@pytest.mark.parametrize("position_encoding", [*SINUSOIDS, "learned"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_cached_decoding_gives_the_uncached_logits_under_padding(
    tiny_model, padded_batch, position_encoding, cache, attn_implementation
):
    model = tiny_model(
        position_encoding=position_encoding,
        max_position_embeddings=16,
        attn_implementation=attn_implementation,
    )
    source, mask = padded_batch([6, 2, 4], seed=1)
    target, _ = padded_batch([7, 7, 7], seed=2)
    with torch.no_grad():
        expected = model(source, mask, decoder_input_ids=target).logits
        past = empty_caches(model.config, 6, 7)[cache]
        encoded = model.get_encoder()(source, mask)
        for start, end in [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7)]:
            logits = model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=target[:, start:end],
                past_key_values=past,
                use_cache=True,
            ).logits
            torch.testing.assert_close(logits, expected[:, start:end], **EXACT)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_generate_does_not_depend_on_the_cache(lively_model, padded_batch, num_beams, options):
    model = lively_model()
    source, mask = padded_batch([6, 2, 4], seed=1)
    search = {"attention_mask": mask, "num_beams": num_beams, "max_new_tokens": 8}
    expected = model.generate(source, **search)
    # A static cache is compiled on accelerators only, so this runs eagerly here.
    assert torch.equal(model.generate(source, **search, **options), expected)


# Batches


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_logits_of_a_padded_batch_are_those_of_its_sentences_alone(
    tiny_model, padded_batch, norm_position, attn_implementation
):
    model = tiny_model(norm_position=norm_position, attn_implementation=attn_implementation)
    source_lengths, target_lengths = [6, 2, 4], [3, 7, 1]
    source, source_mask = padded_batch(source_lengths, seed=1)
    target, target_mask = padded_batch(target_lengths, seed=2)
    logits = model(source, source_mask, target, target_mask).logits
    for row, (s, t) in enumerate(zip(source_lengths, target_lengths, strict=True)):
        alone = model(source[row : row + 1, :s], decoder_input_ids=target[row : row + 1, :t]).logits
        torch.testing.assert_close(logits[row, :t], alone[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sentence_is_translated_alike_alone_and_in_a_batch(
    lively_model, padded_batch, num_beams, seed
):
    model = lively_model(seed=seed)
    lengths = [6, 2, 9, 4]
    source, mask = padded_batch(lengths, seed=seed)
    together = model.generate(source, attention_mask=mask, num_beams=num_beams)
    for row, length in enumerate(lengths):
        alone = model.generate(source[row : row + 1, :length], num_beams=num_beams)
        assert outputs_of(together, pad=0)[row] == outputs_of(alone, pad=0)[0]


def test_one_beam_is_greedy_search(lively_model):
    """Greedy search appends the most probable word until the end token."""
    for seed in range(4):
        model = lively_model(seed=seed)
        source = torch.randint(3, 19, (1, 5))
        expected = [2]
        while len(expected) < 13 and (len(expected) == 1 or expected[-1] != 2):
            logits = model(source, decoder_input_ids=torch.tensor([expected])).logits[0, -1]
            expected.append(max(range(19), key=logits.tolist().__getitem__))
        found = model.generate(source, num_beams=1, do_sample=False, max_new_tokens=12)
        assert found.tolist() == [expected]


# Attention backends, compilation, checkpointing


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_eager_and_sdpa_agree_on_outputs_and_gradients_under_padding(
    tiny_model, padded_batch, norm_position
):
    source, source_mask = padded_batch([6, 2, 4], seed=1)
    labels, label_mask = padded_batch([3, 7, 1], seed=2)
    labels = labels.masked_fill(label_mask == 0, -100)
    found = {}
    for name in ("eager", "sdpa"):
        model = tiny_model(attn_implementation=name, norm_position=norm_position, d_k=3, d_v=5)
        outputs = model(source, source_mask, labels=labels, decoder_attention_mask=label_mask)
        outputs.loss.backward()
        found[name] = {"logits": outputs.logits, "loss": outputs.loss, **gradients(model)}
    assert len(found["eager"]) == 2 + len(dict(model.named_parameters()))
    for name, expected in found["eager"].items():
        torch.testing.assert_close(found["sdpa"][name], expected, atol=1e-12, rtol=1e-12)


def test_eager_attention_weights_are_distributions_over_real_tokens(tiny_model, padded_batch):
    model = tiny_model(attn_implementation="eager", decoder_attention_heads=2, d_k=3, d_v=5)
    source, source_mask = padded_batch([6, 2], seed=1)
    target, target_mask = padded_batch([3, 4], seed=2)
    outputs = model(source, source_mask, target, target_mask, output_attentions=True)
    seen_by_encoder = source_mask[:, None, None].bool()
    seen_by_decoder = torch.ones(4, 4).tril().bool() & target_mask[:, None, None].bool()
    for weights, heads, shape, seen in (
        (outputs.encoder_attentions, 4, (6, 6), seen_by_encoder),
        (outputs.decoder_attentions, 2, (4, 4), seen_by_decoder),
        (outputs.cross_attentions, 2, (4, 6), seen_by_encoder),
    ):
        assert len(weights) == 2
        for layer in weights:
            assert layer.shape == (2, heads, *shape)
            torch.testing.assert_close(layer.sum(dim=-1), torch.ones_like(layer[..., 0]), **EXACT)
            assert (layer.masked_fill(seen.expand_as(layer), 0) == 0).all()
            assert (layer[seen.expand_as(layer)] > 0).all()


def test_hidden_states_are_recorded_from_the_embeddings_to_the_last_layer(tiny_model, layer_inputs):
    model = tiny_model()
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[2, 6]])}
    outputs = model(**batch, output_hidden_states=True)
    last = model.model(**batch)
    for states, first, final in zip(
        (outputs.encoder_hidden_states, outputs.decoder_hidden_states),
        layer_inputs(model, **batch),
        (last.encoder_last_hidden_state, last.last_hidden_state),
        strict=True,
    ):
        assert len(states) == 3
        assert torch.equal(states[0], first)
        assert torch.equal(states[-1], final)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_a_source_that_is_all_padding_gives_finite_numbers(
    tiny_model, padded_batch, attn_implementation
):
    model = tiny_model(attn_implementation=attn_implementation, dropout=0.0).train()
    source, mask = padded_batch([4, 0, 2], seed=1)
    labels, _ = padded_batch([3, 3, 3], seed=2)
    outputs = model(source, mask, labels=labels)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    model.eval()
    logits = model(source, mask, labels=labels).logits
    assert logits.isfinite().all()
    alone = model(source[:1], mask[:1], labels=labels[:1]).logits
    torch.testing.assert_close(logits[:1], alone, **EXACT)


@pytest.mark.slow
def test_flex_attention_gives_the_eager_logits_under_padding(tiny_model, padded_batch):
    # Flex attention needs a head size of 16, and compiles a kernel for each kind of attention.
    sizes = {"d_model": 64, "dtype": torch.float32, "encoder_layers": 1, "decoder_layers": 1}
    source, mask = padded_batch([6, 2, 4], seed=1)
    target, target_mask = padded_batch([3, 7, 5], seed=2)
    logits = {}
    for name in ("eager", "flex_attention"):
        model = tiny_model(attn_implementation=name, **sizes)
        with torch.no_grad():
            logits[name] = model(source, mask, target, target_mask).logits
    real = target_mask.bool()
    torch.testing.assert_close(
        logits["flex_attention"][real], logits["eager"][real], atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_inference_compiles_to_one_graph(tiny_model, padded_batch, position_encoding):
    torch.compiler.reset()
    model = tiny_model(position_encoding=position_encoding, max_position_embeddings=20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ([6, 2, 4], [9, 9], [3]):
        source, mask = padded_batch(lengths, seed=1)
        target, target_mask = padded_batch(lengths[::-1], seed=2)
        with torch.no_grad():
            expected = model(source, mask, target, target_mask).logits
            found = compiled(source, mask, target, target_mask).logits
        torch.testing.assert_close(found, expected, **EXACT)


def test_the_plain_loss_and_its_gradient_compile_to_one_graph(tiny_model, padded_batch):
    torch.compiler.reset()
    model = tiny_model()
    source, mask = padded_batch([6, 2, 4], seed=1)
    labels, label_mask = padded_batch([3, 7, 5], seed=2)
    labels = labels.masked_fill(label_mask == 0, -100)
    found = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = forward(source, mask, labels=labels).loss
        loss.backward()
        found.append({"loss": loss, **gradients(model)})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, **EXACT)


def test_gradient_checkpointing_computes_twice_and_changes_nothing(tiny_model, padded_batch):
    source, mask = padded_batch([6, 2, 4], seed=1)
    labels, label_mask = padded_batch([3, 7, 5], seed=2)
    labels = labels.masked_fill(label_mask == 0, -100)
    found, calls = [], []
    for checkpointing in (False, True):
        model = tiny_model(dropout=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        count = []
        for stack in (model.model.encoder, model.model.decoder):
            for layer in stack.layers:
                layer.fc1.register_forward_hook(lambda *_, count=count: count.append(1))
        loss = model(source, mask, labels=labels).loss
        loss.backward()
        found.append({"loss": loss, **gradients(model)})
        calls.append(len(count))
    assert calls == [4, 8]
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, **EXACT)


# Loss


def negative_log_likelihoods(logits, labels):
    """Compute -log p(label) at every real position, one number at a time."""
    losses = []
    for row, golds in zip(logits, labels.tolist(), strict=True):
        for position, gold in zip(row, golds, strict=True):
            if gold != -100:
                losses.append(position.exp().sum().log() - position[gold])
    return losses


def smoothed_losses(logits, labels, epsilon):
    losses = []
    for row, golds in zip(logits, labels.tolist(), strict=True):
        for position, gold in zip(row, golds, strict=True):
            if gold != -100:
                log_p = position - position.exp().sum().log()
                losses.append(-(1 - epsilon) * log_p[gold] - epsilon * log_p.mean())
    return losses


def test_labels_are_shifted_right_behind_the_start_token_with_padding_for_ignored_ones(tiny_model):
    model = tiny_model(decoder_start_token_id=7, pad_token_id=1)
    labels = torch.tensor([[9, 10, 2, -100], [11, 2, -100, -100]])
    shifted = torch.tensor([[7, 9, 10, 2], [7, 11, 2, 1]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    source = torch.tensor([[3, 4, 5], [6, 7, 8]])
    expected = model(source, decoder_input_ids=shifted).logits
    assert torch.equal(model(source, labels=labels).logits, expected)
    assert labels.tolist() == [[9, 10, 2, -100], [11, 2, -100, -100]]


def test_smoothing_acts_in_training_only(tiny_model):
    model = tiny_model(label_smoothing=0.2, dropout=0.0)
    source, labels = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 10, 2, -100]])
    logits = model(source, labels=labels).logits
    plain = sum(negative_log_likelihoods(logits, labels)) / 3
    smoothed = sum(smoothed_losses(logits, labels, 0.2)) / 3
    torch.testing.assert_close(model(source, labels=labels).loss, plain, **EXACT)
    torch.testing.assert_close(model.train()(source, labels=labels).loss, smoothed, **EXACT)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [10, torch.tensor(10)])
def test_the_sum_is_divided_by_num_items_in_batch(tiny_model, count, training):
    model = tiny_model(label_smoothing=0.2, dropout=0.0)
    source, labels = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 10, 2, -100]])
    logits = model(source, labels=labels).logits
    expected = sum(smoothed_losses(logits, labels, 0.2 if training else 0.0)) / 10
    loss = model.train(training)(source, labels=labels, num_items_in_batch=count).loss
    torch.testing.assert_close(loss, expected, **EXACT)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_without_any_label_has_loss_0_and_gradient_0(tiny_model, training):
    model = tiny_model(dropout=0.0).train(training)
    loss = model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[-100, -100]])).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(model).values())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_a_half_precision_model_is_computed_in_float32(tiny_model, dtype, training):
    model = tiny_model(dtype=dtype, dropout=0.0, label_smoothing=0.1)
    source, labels = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 10, 11, 2]])
    logits = model(source, labels=labels).logits
    loss = model.train(training)(source, labels=labels).loss
    assert logits.dtype == dtype
    assert loss.dtype == torch.float32
    epsilon = 0.1 if training else 0.0
    expected = sum(smoothed_losses(logits.double(), labels, epsilon)) / 4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_logits_to_keep_gives_the_last_logits(tiny_model):
    model = tiny_model()
    source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[2, 6, 7, 8]])
    full = model(source, decoder_input_ids=target).logits
    for kept in (1, 3):
        last = model(source, decoder_input_ids=target, logits_to_keep=kept).logits
        torch.testing.assert_close(last, full[:, -kept:], **EXACT)
    chosen = model(source, decoder_input_ids=target, logits_to_keep=torch.tensor([0, 2])).logits
    torch.testing.assert_close(chosen, full[:, [0, 2]], **EXACT)


@pytest.fixture
def sentences():
    """Four pairs of unequal lengths."""
    generator = torch.Generator().manual_seed(5)
    lengths = [(3, 2), (6, 9), (2, 4), (5, 1)]
    return [
        {
            "input_ids": torch.randint(3, 19, (source,), generator=generator).tolist(),
            "labels": torch.randint(3, 19, (target,), generator=generator).tolist(),
        }
        for source, target in lengths
    ]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_an_update_does_not_depend_on_how_it_is_split(
    tiny_model, sentences, tmp_path, batch_size, accumulation
):
    """One step of SGD at rate 1 subtracts the gradient of the mean loss per target token."""
    expected_model = tiny_model(dropout=0.0, label_smoothing=0.1).train()
    total, count = 0.0, 0
    for pair in sentences:
        shifted = torch.tensor([[2, *pair["labels"][:-1]]])
        logits = expected_model(torch.tensor([pair["input_ids"]]), decoder_input_ids=shifted).logits
        losses = smoothed_losses(logits, torch.tensor([pair["labels"]]), 0.1)
        total, count = total + sum(losses), count + len(losses)
    (total / count).backward()

    model = tiny_model(dropout=0.0, label_smoothing=0.1)
    vocabulary = {f"w{i}": i for i in range(19)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w1")), pad_token="w0"
    )
    arguments = Seq2SeqTrainingArguments(
        output_dir=tmp_path,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=sentences,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    ).train()
    for name, before in expected_model.named_parameters():
        after = model.get_parameter(name)
        torch.testing.assert_close(after, before - before.grad, atol=1e-6, rtol=0)


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


# Generation


def test_a_fresh_model_decodes_as_the_paper_with_beams_left_to_the_caller(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    for defaults in (
        model.generation_config,
        reloaded.generation_config,
        VaswaniGenerationConfig.from_pretrained(tmp_path),
    ):
        assert defaults.length_penalty == 0.6
        assert defaults.length_penalty_type == "gnmt"
        assert defaults.early_stopping == "never"
        assert defaults.max_length_offset == 50
        assert defaults.num_beams in (None, 1)
        assert defaults.max_length is None
        assert defaults.max_new_tokens is None


def test_changed_generation_settings_survive_saving(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    changed = {
        "num_beams": 4,
        "length_penalty": 1.2,
        "length_penalty_type": "hf",
        "max_length_offset": 7,
        "early_stopping": True,
    }
    model.generation_config.update(**changed)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path).generation_config
    assert {name: getattr(reloaded, name) for name in changed} == changed


def every_output(model, source, length):
    """Return {words: log-probability} of all outputs of at most `length` words, ended or cut."""
    words = list(itertools.product(range(model.config.vocab_size), repeat=length))
    shifted = torch.tensor([[model.config.decoder_start_token_id, *row[:-1]] for row in words])
    with torch.no_grad():
        logits = model(source.expand(len(words), -1), decoder_input_ids=shifted).logits
    log_p = logits - logits.exp().sum(dim=-1, keepdim=True).log()
    scores = {}
    for row, log_probabilities in zip(words, log_p, strict=True):
        output = row[: row.index(2) + 1] if 2 in row else row
        scores[output] = sum(log_probabilities[i][word].item() for i, word in enumerate(output))
    return scores


PENALTIES = {
    "gnmt": lambda length, alpha: ((5 + length) / 6) ** alpha,
    "hf": lambda length, alpha: length**alpha,
}


@pytest.mark.parametrize("kind", ["gnmt", "hf"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_beam_as_wide_as_the_search_space_finds_the_best_outputs(lively_model, kind, alpha, seed):
    """All outputs of four words and up to five positions, ranked by penalised log-probability."""
    model = lively_model(seed=seed, vocab_size=4)
    source = torch.tensor([[3, 1, 3, 2]])
    scores = {
        words: score / PENALTIES[kind](len(words), alpha)
        for words, score in every_output(model, source, length=5).items()
    }
    best = sorted(scores, key=scores.get, reverse=True)[:3]
    search = {
        "num_beams": 128,
        "num_return_sequences": 3,
        "length_penalty": alpha,
        "length_penalty_type": kind,
        "max_new_tokens": 5,
    }
    found = model.generate(source, **search)
    scored = model.generate(source, **search, return_dict_in_generate=True, output_scores=True)
    assert [tuple(words) for words in outputs_of(found)] == best
    assert [tuple(words) for words in outputs_of(scored.sequences)] == best
    assert scored.sequences_scores.tolist() == pytest.approx(
        [scores[words] for words in best], rel=1e-5
    )


def test_the_length_penalty_type_changes_the_choice(lively_model):
    """The test above needs formulas that choose different outputs."""
    choices = set()
    for seed in range(4):
        model = lively_model(seed=seed, vocab_size=4)
        scores = every_output(model, torch.tensor([[3, 1, 3, 2]]), length=5)
        best = [
            max(scores, key=lambda words: scores[words] / penalty(len(words), 2.0))
            for penalty in PENALTIES.values()
        ]
        choices.add(best[0] == best[1])
    assert choices == {True, False}


SEARCHES = [
    pytest.param({"num_beams": 1}, id="greedy"),
    pytest.param({"do_sample": True}, id="sampling"),
    pytest.param({"num_beams": 3}, id="beam"),
    pytest.param({"num_beams": 3, "do_sample": True}, id="beam-sampling"),
]


@pytest.mark.parametrize("search", SEARCHES)
def test_each_sentence_may_grow_to_its_own_source_length_plus_50(
    endless_model, padded_batch, search
):
    model = endless_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = -10.0  # nor does it say padding: either marks the end of a row
    source, mask = padded_batch([7, 2, 4], seed=1)
    sequences = model.generate(source, attention_mask=mask, **search)
    assert (sequences[:, 0] == 2).all()
    said = [sum(word not in (0, 2) for word in row) for row in sequences.tolist()]
    assert said == [7 + 50, 2 + 50, 4 + 50]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("as_config", [False, True])
@pytest.mark.parametrize(
    ("limit", "expected"), [({"max_new_tokens": 6}, 6), ({"max_length": 6}, 5)]
)
def test_a_limit_given_in_the_call_replaces_the_rule(
    endless_model, search, as_config, limit, expected
):
    """`max_length` counts the start token, as everywhere in transformers."""
    model = endless_model()
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 2]])
    if as_config:
        sequences = model.generate(source, generation_config=GenerationConfig(**limit, **search))
    else:
        sequences = model.generate(source, **limit, **search)
    assert sequences.shape == (2, 1 + expected)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_limit_left_in_the_models_config_does_not_cut(endless_model, search):
    """Seq2SeqTrainer writes max_length=20 into the config when it evaluates with generate."""
    model = endless_model()
    model.generation_config.max_length = 20
    assert model.generate(torch.tensor([[3, 4, 2]]), **search).shape[1] == 1 + 3 + 50


def test_max_length_offset_can_be_changed_and_switched_off(endless_model):
    model = endless_model()
    source = torch.tensor([[3, 4, 2]])
    assert model.generate(source, max_length_offset=4).shape[1] == 1 + 3 + 4
    model.generation_config.max_length_offset = 9
    assert model.generate(source).shape[1] == 1 + 3 + 9
    model.generation_config.max_length = 7
    assert model.generate(source, max_length_offset=0).shape[1] == 7


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("factor", "offset", "expected"),
    [
        (1.5, 0, [10, 3, 6]),  # 10.5, 3.0, 6.0
        (0.29, 2, [4, 2, 3]),  # 4.03, 2.58, 3.16
        (2, 5, [19, 9, 13]),
        (0, 6, [6, 6, 6]),
        (1, 0, [7, 2, 4]),
        (0.1, 0, [1, 1, 1]),  # an output has at least one token
    ],
)
def test_a_limit_is_factor_times_source_length_plus_offset_rounded_down(
    endless_model, padded_batch, search, factor, offset, expected
):
    model = endless_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = -10.0  # nor does it say padding: either marks the end of a row
    source, mask = padded_batch([7, 2, 4], seed=1)
    rule = {"max_length_factor": factor, "max_length_offset": offset}
    for call in (rule, {"generation_config": VaswaniGenerationConfig(**rule, **search)}):
        sequences = model.generate(source, attention_mask=mask, **{**search, **call})
        said = [sum(word not in (0, 2) for word in row) for row in sequences.tolist()]
        assert said == expected


def test_a_limit_is_computed_in_float64_whatever_the_length():
    lengths = torch.tensor([1, 100, 2**24 + 1])
    # 0.29 * 100 is 28.999999999999996 in float64, and 29.0 in float32.
    assert length_limits(lengths, 0.29, 0).tolist() == [1, 28, int(0.29 * (2**24 + 1))]
    assert length_limits(lengths, 1.0, 50).tolist() == [51, 150, 2**24 + 51]


def test_max_length_factor_is_saved_and_a_folder_without_it_has_the_papers_limit(
    endless_model, tmp_path
):
    model = endless_model()
    source = torch.tensor([[3, 4, 5, 2]])
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    saved = json.loads(file.read_text())
    saved.pop("max_length_factor")
    file.write_text(json.dumps(saved))
    older = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=model.dtype)
    assert older.generate(source).shape[1] == 1 + 4 + 50
    model.generation_config.update(max_length_factor=1.2, max_length_offset=3)
    model.save_pretrained(tmp_path)
    reloaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=model.dtype)
    assert reloaded.generate(source).shape[1] == 1 + 7  # 1.2 * 4 + 3 is 7.8
    assert reloaded.generate(source, max_length_factor=2).shape[1] == 1 + 2 * 4 + 3
    assert reloaded.generate(source, max_new_tokens=5).shape[1] == 1 + 5
    # Both at 0 leave the limit to max_length.
    off = {"max_length_factor": 0, "max_length_offset": 0}
    reloaded.generation_config.max_length = 6
    assert reloaded.generate(source, **off).shape[1] == 6


def test_a_plain_generation_config_in_the_call_inherits_the_papers_settings(lively_model):
    found = []
    for seed in range(4):
        model = lively_model(seed=seed)
        source = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 2]])
        config = GenerationConfig(num_beams=4, length_penalty=2.0, max_new_tokens=8)
        keywords = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 8}
        expected = model.generate(source, **keywords)
        assert torch.equal(model.generate(source, generation_config=config), expected)
        hf = model.generate(source, **keywords, length_penalty_type="hf")
        found.append(outputs_of(hf) == outputs_of(expected))
    assert not all(found), (
        "the two penalties must differ somewhere for the comparison to mean anything"
    )


def test_eos_token_id_none_never_ends_a_sentence(tiny_model):
    """None switches the end of sentence off for one call, as everywhere in transformers."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():  # the model writes only end tokens
        model.model.decoder.layers[-1].final_layer_norm.bias[0] = 100.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[2, 0] = 10.0
    source = torch.tensor([[3, 4, 2]])
    assert model.generate(source).tolist() == [[2, 2]]
    assert model.generate(source, eos_token_id=None, max_new_tokens=5).tolist() == [[2] * 6]
    assert model.generate(source).tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"length_penalty_type": "google"}, r"length_penalty_type.*gnmt.*hf.*'google'"),
        ({"max_length_offset": -1}, r"max_length_offset.*-1"),
        ({"max_length_offset": 2.5}, r"max_length_offset.*2\.5"),
        ({"max_length_offset": True}, r"max_length_offset.*True"),
        ({"max_length_factor": -0.5}, r"max_length_factor.*-0\.5"),
        ({"max_length_factor": math.nan}, r"max_length_factor.*nan"),
        ({"max_length_factor": math.inf}, r"max_length_factor.*inf"),
        ({"max_length_factor": "2"}, r"max_length_factor.*'2'"),
        ({"max_length_factor": True}, r"max_length_factor.*True"),
    ],
)
def test_generation_settings_without_meaning_are_refused(tiny_model, setting, message):
    with pytest.raises(ValueError, match=message):
        VaswaniGenerationConfig(**setting)
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(torch.tensor([[3, 4, 2]]), num_beams=2, **setting)


def test_generate_without_a_source_says_what_to_pass(tiny_model):
    with pytest.raises(ValueError, match="input_ids"):
        tiny_model().generate()


def test_a_forward_without_target_says_what_to_pass(tiny_model):
    with pytest.raises(ValueError, match="labels"):
        tiny_model()(torch.tensor([[3, 4, 2]]))


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


def test_eager_equals_sdpa_for_a_source_of_padding_alone(tiny_model, padded_batch):
    input_ids, attention_mask = padded_batch([5, 3])
    attention_mask[1] = 0
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": input_ids}
    logits = [tiny_model(attn_implementation=kind)(**batch).logits for kind in ("eager", "sdpa")]
    torch.testing.assert_close(*logits, atol=1e-12, rtol=0)


def test_the_decoder_refuses_to_run_without_a_source(tiny_model):
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        tiny_model().get_decoder()(input_ids=torch.tensor([[2, 3]]))


def test_a_missing_source_is_named_as_such(tiny_model):
    with pytest.raises(ValueError, match=r"VaswaniEncoder needs exactly one .* encoder_outputs"):
        tiny_model()(decoder_input_ids=torch.tensor([[2, 3]]))


def test_loss_takes_labels_of_any_integer_type_and_no_items_at_all(tiny_model):
    labels = torch.tensor([[5, 6, 2]])
    model = tiny_model()
    losses = [
        model(input_ids=labels, labels=labels.to(kind)).loss for kind in (torch.long, torch.int32)
    ]
    assert torch.equal(*losses)
    ignored = torch.full_like(labels, -100)
    for count in (0, torch.tensor(0)):
        assert model(input_ids=labels, labels=ignored, num_items_in_batch=count).loss == 0


# Arguments that a call would otherwise ignore


@pytest.mark.parametrize("name", ["position_ids", "decoder_position_ids", "prefix_mask"])
def test_what_a_translation_model_does_not_read_is_refused(tiny_model, name):
    model, ids = tiny_model(), torch.tensor([[4, 5, 2]])
    for network in (model, model.model):
        with pytest.raises(ValueError, match=rf"leave {name} out"):
            network(ids, decoder_input_ids=ids, **{name: torch.arange(3)[None]})
        network(ids, decoder_input_ids=ids, **{name: None})


def test_encoder_outputs_may_be_a_list(tiny_model):
    model, ids = tiny_model(), torch.tensor([[4, 5, 2]])
    expected = model(ids, decoder_input_ids=ids)
    states = expected.encoder_last_hidden_state
    found = model(encoder_outputs=[states], decoder_input_ids=ids)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("keep", [1, torch.tensor([2, 1, 0])], ids=["last", "list"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_loss_counts_positions_whose_logits_are_not_kept(tiny_model, keep, wrapped):
    class OtherLinear(nn.Linear):
        pass

    model, ids = tiny_model(lm_head_bias=True), torch.tensor([[4, 5, 2]])
    if wrapped:
        model.lm_head.__class__ = OtherLinear
    expected = model(ids, labels=ids)
    found = model(ids, labels=ids, logits_to_keep=keep)
    torch.testing.assert_close(found.loss, expected.loss, **EXACT)
    kept = expected.logits[:, [2] if isinstance(keep, int) else keep]
    torch.testing.assert_close(found.logits, kept, **EXACT)


def test_torch_func_gives_the_gradients_of_training(tiny_model):
    model, ids = tiny_model(dropout=0.0).train(), torch.tensor([[4, 5, 2]])
    model(ids, labels=ids).loss.backward()

    def loss(weights, network):
        return torch.func.functional_call(network, weights, (ids,), {"labels": ids}).loss

    expected = gradients(model)
    for name, gradient in torch.func.grad(loss)(dict(model.named_parameters()), model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name, **EXACT)
    dropping = tiny_model(dropout=0.3).train()
    found = torch.func.grad(loss)(dict(dropping.named_parameters()), dropping)
    assert all(gradient.isfinite().all() for gradient in found.values())
