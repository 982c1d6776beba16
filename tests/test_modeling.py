"""The network compared with independent implementations, and its caches, masks and graphs.

Comparisons run in float64, so that agreement to 1e-10 is significant.
"""

import itertools

import pytest
import torch
from networks import EXACT, SINUSOIDS, enliven, gradients, outputs_of
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, MarianConfig, MarianMTModel, StaticCache

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


# Token ids outside the vocabulary


@pytest.mark.parametrize("wrong", [19, 300, -1])
def test_token_ids_outside_the_vocabulary_are_named(tiny_model, wrong):
    model = tiny_model()
    good, bad = torch.tensor([[3, 4, 5]]), torch.tensor([[3, wrong, 5]])
    for batch in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match=rf"Token id {wrong} .*19"):
            model(batch[0], decoder_input_ids=batch[1])
    with pytest.raises(ValueError, match=rf"Token id {wrong} .*19"):
        model.generate(bad)


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
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 20}
    model = tiny_model(position_encoding=position_encoding, **sizes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ([6, 2, 4], [9, 9], [3]):
        source, mask = padded_batch(lengths, seed=1)
        target, target_mask = padded_batch(lengths[::-1], seed=2)
        with torch.no_grad():
            expected = model(source, mask, target, target_mask).logits
            found = compiled(source, mask, target, target_mask).logits
        torch.testing.assert_close(found, expected, **EXACT)


def test_the_plain_loss_and_its_gradient_compile_to_one_graph(tiny_model, padded_batch):
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


def test_logits_to_keep_gives_the_last_logits(tiny_model):
    model = tiny_model()
    source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[2, 6, 7, 8]])
    full = model(source, decoder_input_ids=target).logits
    for kept in (1, 3):
        last = model(source, decoder_input_ids=target, logits_to_keep=kept).logits
        torch.testing.assert_close(last, full[:, -kept:], **EXACT)
    chosen = model(source, decoder_input_ids=target, logits_to_keep=torch.tensor([0, 2])).logits
    torch.testing.assert_close(chosen, full[:, [0, 2]], **EXACT)


# Search


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


def test_generate_without_a_source_says_what_to_pass(tiny_model):
    with pytest.raises(ValueError, match="input_ids"):
        tiny_model().generate()


def test_a_forward_without_target_says_what_to_pass(tiny_model):
    with pytest.raises(ValueError, match="labels"):
        tiny_model()(torch.tensor([[3, 4, 2]]))


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
