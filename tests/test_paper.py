"""One test per claim of "Attention Is All You Need". Each test has the paper's formula.

The functions at the top implement sections 3.1-3.3 and 3.5 again, with loops over heads and
positions. They share no code with the package.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from vaswani.modeling import attention_vaswani, modeling_vaswani
from vaswani.training.schedule import noam_schedule

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def softmax(scores):
    exponentials = torch.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def layer_norm(vectors, norm):
    mean = vectors.mean(dim=-1, keepdim=True)
    variance = ((vectors - mean) ** 2).mean(dim=-1, keepdim=True)
    return norm.weight * (vectors - mean) / torch.sqrt(variance + norm.eps) + norm.bias


def attention_head(queries, keys, values, visible):
    """Equation 1 for one head, query by query. `visible(i)` lists the keys that query i may see."""
    d_k = queries.shape[-1]
    outputs = []
    for i, query in enumerate(queries):
        seen = visible(i)
        weights = softmax(torch.stack([query @ keys[j] / math.sqrt(d_k) for j in seen]))
        outputs.append(sum(weight * values[j] for weight, j in zip(weights, seen, strict=True)))
    return torch.stack(outputs)


def multi_head(attention, heads, queries_from, keys_from, visible):
    """Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2)."""
    w_q, w_k, w_v = (
        projection.weight.T.chunk(heads, dim=1)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    outputs = [
        attention_head(queries_from @ w_q[i], keys_from @ w_k[i], keys_from @ w_v[i], visible)
        for i in range(heads)
    ]
    return torch.cat(outputs, dim=1) @ attention.out_proj.weight.T


def feed_forward(x, layer):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (equation 2)."""
    inner = x @ layer.fc1.weight.T + layer.fc1.bias
    return torch.where(inner > 0, inner, 0.0) @ layer.fc2.weight.T + layer.fc2.bias


def encoder_layer(x, layer, heads):
    def everywhere(_):
        return range(len(x))

    x = layer_norm(
        x + multi_head(layer.self_attn, heads, x, x, everywhere), layer.self_attn_layer_norm
    )
    return layer_norm(x + feed_forward(x, layer), layer.final_layer_norm)


def decoder_layer(y, source, layer, heads):
    def up_to_itself(i):
        return range(i + 1)

    def everywhere(_):
        return range(len(source))

    y = layer_norm(
        y + multi_head(layer.self_attn, heads, y, y, up_to_itself), layer.self_attn_layer_norm
    )
    y = layer_norm(
        y + multi_head(layer.encoder_attn, heads, y, source, everywhere),
        layer.encoder_attn_layer_norm,
    )
    return layer_norm(y + feed_forward(y, layer), layer.final_layer_norm)


def sinusoids(length, d_model):
    """Compute PE of section 3.5, number by number in double precision."""
    table = torch.empty(length, d_model, dtype=torch.float64)
    for position in range(length):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            table[position, 2 * i] = math.sin(angle)
            table[position, 2 * i + 1] = math.cos(angle)
    return table


def silence(*linear_maps):
    """Make linear maps return zero."""
    with torch.no_grad():
        for linear_map in linear_maps:
            for parameter in linear_map.parameters():
                parameter.zero_()


def on_meta(name, **overrides):
    """Build a row of Table 3 on the meta device, because its parameters are only counted."""
    with torch.device("meta"):
        return VaswaniForConditionalGeneration(VaswaniConfig.preset(name, **overrides))


# Section 3.1: encoder and decoder stacks


def test_3_1_base_has_two_stacks_of_6_identical_layers():
    model = on_meta("base").model
    for stack in (model.encoder, model.decoder):
        shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in stack.layers]
        assert len(shapes) == 6
        assert all(layer == shapes[0] for layer in shapes)


def test_3_1_base_sizes():
    config = VaswaniConfig()
    assert config.d_model == 512
    for side in ("encoder", "decoder"):
        assert getattr(config, f"{side}_layers") == 6
        assert getattr(config, f"{side}_attention_heads") == 8
        assert getattr(config, f"{side}_ffn_dim") == 2048


def test_3_1_every_sublayer_and_embedding_has_width_d_model():
    model = on_meta("base")
    widths = {}

    def note_width(name):
        def hook(module, args, output):
            widths[name] = (output[0] if isinstance(output, tuple) else output).shape[-1]

        return hook

    for name, module in model.named_modules(remove_duplicate=False):  # one embedding serves both
        if name.endswith(("self_attn", "encoder_attn", "fc2", "embed_tokens")):
            module.register_forward_hook(note_width(name))
    tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
    model(tokens, decoder_input_ids=tokens)
    assert len(widths) == 6 * 2 + 6 * 3 + 2
    assert set(widths.values()) == {512}


def test_3_1_post_norm_is_layernorm_of_x_plus_sublayer(tiny_model):
    layer = tiny_model().model.encoder.layers[0]
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = encoder_layer(x, layer, heads=4)
    torch.testing.assert_close(layer(x[None], None)[0], expected, **EXACT)


def test_3_1_decoder_layer_is_self_attention_then_source_attention_then_ffn(tiny_model):
    layer = tiny_model(attn_implementation="eager").model.decoder.layers[0]
    y, source = torch.randn(4, 16, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64)
    future = torch.full((4, 4), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = decoder_layer(y, source, layer, heads=4)
    torch.testing.assert_close(layer(y[None], source[None], future)[0], expected, **EXACT)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_3_1_residual_connection_around_each_sublayer(tiny_model, norm_position):
    """If the sub-layers return zero, only the residual connections are left."""
    model = tiny_model(norm_position=norm_position).model
    x, source = (
        torch.randn(1, 4, 16, dtype=torch.float64),
        torch.randn(1, 6, 16, dtype=torch.float64),
    )
    for stack, inputs in ((model.encoder, (x, None)), (model.decoder, (x, source))):
        layer = stack.layers[0]
        norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
        silence(layer.self_attn.out_proj, layer.fc2)
        if stack is model.decoder:
            norms.insert(1, layer.encoder_attn_layer_norm)
            silence(layer.encoder_attn.out_proj)
        expected = x
        if norm_position == "post":
            for norm in norms:
                expected = layer_norm(expected, norm)
        torch.testing.assert_close(layer(*inputs), expected, **EXACT)


def test_3_1_encoder_is_its_layers_one_after_the_other(tiny_model, layer_inputs):
    model = tiny_model(encoder_layers=3)
    tokens = torch.randint(3, 19, (1, 5))
    x, _ = layer_inputs(model, input_ids=tokens, decoder_input_ids=tokens)
    expected = x[0]
    for layer in model.model.encoder.layers:
        expected = encoder_layer(expected, layer, heads=4)
    torch.testing.assert_close(model.model.encoder(tokens)[0][0], expected, **EXACT)


def test_3_1_decoder_layers_all_look_at_the_last_encoder_layer(tiny_model, layer_inputs):
    model = tiny_model(decoder_layers=3)
    source, target = torch.randint(3, 19, (1, 5)), torch.randint(3, 19, (1, 4))
    _, y = layer_inputs(model, input_ids=source, decoder_input_ids=target)
    states, expected = model.model.encoder(source)[0][0], y[0]
    for layer in model.model.decoder.layers:
        expected = decoder_layer(expected, states, layer, heads=4)
    found = model.model(source, decoder_input_ids=target).last_hidden_state[0]
    torch.testing.assert_close(found, expected, **EXACT)


def test_3_1_output_embeddings_are_offset_by_one_position(tiny_model):
    """Position i sees the start token and y_1 ... y_(i-1), and predicts y_i."""
    model = tiny_model(label_smoothing=0.0)
    source, labels = torch.randint(3, 19, (2, 5)), torch.randint(3, 19, (2, 4))
    start = model.config.decoder_start_token_id
    shifted = torch.tensor([[start, *row[:-1]] for row in labels.tolist()])
    outputs = model(source, labels=labels)
    given = model(source, decoder_input_ids=shifted).logits
    torch.testing.assert_close(outputs.logits, given, **EXACT)
    log_probs = [
        torch.log(softmax(given[b, i]))[labels[b, i]]
        for b in range(2)
        for i in range(labels.shape[1])
    ]
    torch.testing.assert_close(outputs.loss, -sum(log_probs) / len(log_probs), **EXACT)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_3_1_a_later_target_token_cannot_change_an_earlier_logit(tiny_model, attn_implementation):
    model = tiny_model(attn_implementation=attn_implementation)
    source, target = torch.randint(3, 19, (1, 5)), torch.randint(3, 19, (1, 6))
    before = model(source, decoder_input_ids=target).logits
    for changed in range(1, 6):
        other = target.clone()
        other[0, changed] = (other[0, changed] + 1) % 16 + 3
        after = model(source, decoder_input_ids=other).logits
        assert torch.equal(after[:, :changed], before[:, :changed])
        assert not torch.allclose(after[:, changed:], before[:, changed:])


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_3_1_gradient_from_an_earlier_logit_to_a_later_target_is_zero(
    tiny_model, attn_implementation
):
    model = tiny_model(attn_implementation=attn_implementation)
    source = torch.randint(3, 19, (1, 5))
    target = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    for position in range(6):
        logits = model(source, decoder_inputs_embeds=target).logits[0, position]
        (gradient,) = torch.autograd.grad(logits.square().sum(), target)
        assert (gradient[0, position + 1 :] == 0).all()
        assert (gradient[0, : position + 1] != 0).any(dim=-1).all()


# Section 3.2: attention


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("d_k", "d_v"), [(None, None), (3, 5), (7, None)])
def test_3_2_1_scores_are_divided_by_the_square_root_of_d_k(
    tiny_model, attn_implementation, d_k, d_v
):
    """With one head, the output is equation 1, even if d_k is not d_model / h."""
    model = tiny_model(
        d_k=d_k, d_v=d_v, encoder_attention_heads=1, attn_implementation=attn_implementation
    )
    attention = model.model.encoder.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(4)  # make weights far from uniform, so the divisor matters
    x = torch.randn(5, 16, dtype=torch.float64)
    query, key, value = (
        x @ p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    assert query.shape[1] == key.shape[1] == (d_k or 16)
    assert value.shape[1] == (d_v or 16)
    head = attention_head(query, key, value, visible=lambda _: range(5))
    torch.testing.assert_close(
        attention(x[None])[0][0], head @ attention.out_proj.weight.T, **EXACT
    )


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "d_k", "d_v"), [(1, None, None), (4, None, None), (8, 3, 5)])
def test_3_2_2_multi_head_is_the_concatenation_of_single_heads_times_w_o(
    tiny_model, attn_implementation, heads, d_k, d_v
):
    model = tiny_model(
        decoder_attention_heads=heads, d_k=d_k, d_v=d_v, attn_implementation=attn_implementation
    )
    attention = model.model.decoder.layers[1].encoder_attn
    y, source = torch.randn(4, 16, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64)
    expected = multi_head(attention, heads, y, source, visible=lambda _: range(6))
    torch.testing.assert_close(attention(y[None], source[None])[0][0], expected, **EXACT)


def test_3_2_2_base_projects_to_8_heads_of_64():
    attention = on_meta("base").model.decoder.layers[0].encoder_attn
    assert attention.num_heads == 8
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        assert projection.weight.shape == (8 * 64, 512)


def test_3_2_2_projections_are_matrices_without_biases():
    parameters = dict(on_meta("base").named_parameters())
    projections = [name for name in parameters if name.split(".")[-2].endswith("_proj")]
    assert len(projections) == 4 * (6 + 2 * 6)
    assert all(name.endswith(".weight") for name in projections)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_3_2_3_every_encoder_position_attends_to_every_position(tiny_model, attn_implementation):
    encoder = tiny_model(encoder_layers=1, attn_implementation=attn_implementation).model.encoder
    source = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    states = encoder(inputs_embeds=source).last_hidden_state
    for position in range(5):
        (gradient,) = torch.autograd.grad(states[0, position, 0], source, retain_graph=True)
        assert (gradient[0] != 0).any(dim=-1).all()


def test_3_2_3_every_decoder_position_attends_to_every_source_position(tiny_model):
    decoder = tiny_model(decoder_layers=1).model.decoder
    source = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    states = decoder(torch.randint(3, 19, (1, 4)), encoder_hidden_states=source).last_hidden_state
    for position in range(4):
        (gradient,) = torch.autograd.grad(states[0, position, 0], source, retain_graph=True)
        assert (gradient[0] != 0).any(dim=-1).all()


# Section 3.3: position-wise feed-forward networks


def test_3_3_feed_forward_is_equation_2_with_inner_width_2048():
    layer = VaswaniModel(
        VaswaniConfig(vocab_size=5, encoder_layers=1, decoder_layers=1)
    ).encoder.layers[0]
    layer.double()
    with torch.no_grad():
        layer.fc1.bias.normal_()
        layer.fc2.bias.normal_()
    x = torch.randn(1, 3, 512, dtype=torch.float64)
    assert layer.fc1.weight.shape == (2048, 512)
    assert layer.fc2.weight.shape == (512, 2048)
    torch.testing.assert_close(layer.feed_forward(x), feed_forward(x, layer), **EXACT)


def test_3_3_feed_forward_treats_each_position_alike_and_alone(tiny_model):
    layer = tiny_model().model.encoder.layers[0]
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    whole = layer.feed_forward(x)
    for position in range(6):
        alone = layer.feed_forward(x[:, position : position + 1])
        torch.testing.assert_close(alone[0, 0], whole[0, position], **EXACT)


def test_3_3_feed_forward_has_biases_and_its_own_parameters_in_each_layer():
    parameters = dict(on_meta("base").named_parameters())
    for side in ("encoder", "decoder"):
        for layer in range(6):
            for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
                assert f"model.{side}.layers.{layer}.{name}" in parameters


# Section 3.4: embeddings and softmax


def test_3_4_embeddings_are_multiplied_by_the_square_root_of_d_model(tiny_model, layer_inputs):
    """The inputs of the first layers are sqrt(d_model) E[token] + PE(position) (with 3.5)."""
    model = tiny_model()
    source, target = torch.randint(3, 19, (2, 5)), torch.randint(3, 19, (2, 4))
    matrix = model.lm_head.weight
    for tokens, x in zip(
        (source, target),
        layer_inputs(model, input_ids=source, decoder_input_ids=target),
        strict=True,
    ):
        expected = math.sqrt(16) * matrix[tokens] + sinusoids(tokens.shape[1], 16)
        torch.testing.assert_close(x, expected, atol=1e-6, rtol=0)


def test_3_4_one_matrix_embeds_source_and_target_and_maps_to_the_vocabulary(tiny_model):
    model = tiny_model()
    source, target, softmax_map = (
        model.model.encoder.embed_tokens.weight,
        model.model.decoder.embed_tokens.weight,
        model.lm_head.weight,
    )
    assert source is target is softmax_map
    assert sum(p.shape == (19, 16) for p in model.parameters()) == 1
    states = model.model(torch.tensor([[3, 4]]), decoder_input_ids=torch.tensor([[2, 5, 6]]))
    logits = model(torch.tensor([[3, 4]]), decoder_input_ids=torch.tensor([[2, 5, 6]])).logits
    torch.testing.assert_close(logits, states.last_hidden_state @ source.T, **EXACT)


def test_3_4_gradient_of_the_shared_matrix_is_the_sum_over_its_three_uses(tiny_model):
    tied = tiny_model()
    untied = tiny_model(tie_word_embeddings=False)
    matrix = "model.encoder.embed_tokens.weight"
    weights = tied.state_dict()
    untied.load_state_dict(weights)
    source, labels = torch.randint(3, 19, (2, 5)), torch.randint(3, 19, (2, 4))
    for model in (tied, untied):
        model(source, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in untied.named_parameters() if p.shape == (19, 16)}
    assert sorted(gradients) == [
        "lm_head.weight",
        "model.decoder.embed_tokens.weight",
        "model.encoder.embed_tokens.weight",
    ]
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    found = dict(tied.named_parameters())[matrix].grad
    torch.testing.assert_close(found, sum(gradients.values()), **EXACT)


# Section 3.5: positional encoding


@pytest.fixture
def encoding(layer_inputs):
    """Return the positional encodings of a model. With embeddings of zero, they are the input."""

    def read(length, d_model):
        sizes = {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 4,
            "decoder_ffn_dim": 4,
        }
        config = VaswaniConfig(vocab_size=5, d_model=d_model, **sizes)
        model = VaswaniForConditionalGeneration(config).double().eval()
        nothing = torch.zeros(1, length, d_model, dtype=torch.float64)
        source, target = layer_inputs(model, inputs_embeds=nothing, decoder_inputs_embeds=nothing)
        assert torch.equal(source, target), "3.5: the same encodings at the bottoms of both stacks"
        return source[0].detach()

    return read


@pytest.mark.parametrize("d_model", [8, 64, 512])
def test_3_5_sine_at_even_and_cosine_at_odd_dimensions(encoding, d_model):
    table = encoding(300, d_model)
    # Angles are computed in float32, so their error grows with the position.
    tolerance = 2.0**-22 * (1 + torch.arange(300, dtype=torch.float64))
    assert ((table - sinusoids(300, d_model)).abs() <= tolerance[:, None]).all()


@pytest.mark.parametrize("offset", [1, 7, 50])
def test_3_5_encoding_at_a_fixed_offset_is_a_linear_function(encoding, offset):
    """PE(pos + k) = M_k PE(pos), where M_k rotates each pair of sine and cosine by its angle."""
    d_model = 16
    rotation = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i in range(d_model // 2):
        angle = offset / 10000 ** (2 * i / d_model)
        cos, sin = math.cos(angle), math.sin(angle)
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[cos, sin], [-sin, cos]])
    table = encoding(150, d_model)
    torch.testing.assert_close(table[offset:], table[:-offset] @ rotation.T, atol=5e-5, rtol=0)


def test_3_5_wavelengths_are_a_geometric_progression_from_2_pi_to_10000_times_2_pi(encoding):
    d_model = 64
    sine, cosine = encoding(2, d_model)[1].unflatten(0, (-1, 2)).T
    wavelengths = 2 * math.pi / torch.atan2(sine, cosine)  # positions 0 and 1 are one angle apart
    ratio = 10000 ** (2 / d_model)
    torch.testing.assert_close(wavelengths[0].item(), 2 * math.pi, rtol=1e-6, atol=0)
    expected = torch.full((d_model // 2 - 1,), ratio, dtype=torch.float64)
    torch.testing.assert_close(wavelengths[1:] / wavelengths[:-1], expected, rtol=1e-4, atol=0)
    # The progression ends at 2i = d_model, one step after the last pair.
    torch.testing.assert_close(
        (wavelengths[-1] * ratio).item(), 10000 * 2 * math.pi, rtol=1e-4, atol=0
    )


def test_3_5_sinusoids_extend_to_sequences_longer_than_any_seen(encoding):
    short, long = encoding(20, 16), encoding(1500, 16)
    assert torch.equal(long[:20], short)
    torch.testing.assert_close(long[-1], sinusoids(1500, 16)[-1], atol=1500 * 2.0**-22, rtol=0)


# Section 5.3: optimizer


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 4000), (128, 50)])
def test_5_3_learning_rate_is_equation_3(d_model, warmup):
    """Update number `step`, counted from 1, has the rate of equation 3."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    scheduler = noam_schedule(optimizer, d_model, warmup)
    for step in range(1, 3 * warmup):
        expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert scheduler.get_last_lr() == pytest.approx([expected], rel=1e-12)
        optimizer.step()
        scheduler.step()


# Section 5.4: regularization


def test_5_4_rates_of_base_and_big():
    base, big = VaswaniConfig.preset("base"), VaswaniConfig.preset("big")
    assert (base.dropout, big.dropout) == (0.1, 0.3)
    assert base.label_smoothing == big.label_smoothing == 0.1
    assert base.attention_dropout == base.activation_dropout == 0


def test_5_4_dropout_is_on_sublayer_outputs_and_embedding_sums_and_nowhere_else(
    tiny_model, layer_inputs, monkeypatch
):
    model = tiny_model(dropout=0.25, attn_implementation="eager").train()
    source, target = torch.randint(3, 19, (1, 5)), torch.randint(3, 19, (1, 4))
    dropped, expected = [], []

    def spy(states, p, training):
        if training and p > 0:
            assert p == 0.25
            dropped.append(states)
        return states  # drop nothing, so that the sums below can be recomputed

    for module in (modeling_vaswani, attention_vaswani):
        monkeypatch.setattr(module, "drop_out", spy)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        sublayers = [layer.self_attn, getattr(layer, "encoder_attn", None), layer.fc2]
        for sublayer in filter(None, sublayers):
            sublayer.register_forward_hook(
                lambda _, __, output: expected.append(
                    output[0] if isinstance(output, tuple) else output
                )
            )
    sums = layer_inputs(model, input_ids=source, decoder_input_ids=target)
    expected.insert(0, sums[0])
    expected.insert(1 + 2 * 2, sums[1])
    assert len(dropped) == len(expected) == (1 + 2 * 2) + (1 + 3 * 2)
    for found, states in zip(dropped, expected, strict=True):
        torch.testing.assert_close(found, states, **EXACT)


def test_5_4_sdpa_gets_no_dropout_either(tiny_model, monkeypatch):
    model = tiny_model(dropout=0.25, attn_implementation="sdpa").train()
    rates, attention = [], F.scaled_dot_product_attention

    def spy(*args, dropout_p=0.0, **kwargs):
        rates.append(dropout_p)
        return attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(torch.tensor([[3, 4, 5]]), decoder_input_ids=torch.tensor([[2, 6]]))
    assert rates == [0.0] * (2 + 2 * 2)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_5_4_dropout_comes_before_the_sum_and_the_norm(tiny_model, attn_implementation):
    """If everything is dropped, each LayerNorm gets only the residual connection, at first 0."""
    model = tiny_model(dropout=1 - 1e-12, attn_implementation=attn_implementation).train()
    outputs = model.model(torch.tensor([[3, 4, 5]]), decoder_input_ids=torch.tensor([[2, 6]]))
    for stack, states in (
        (model.model.encoder, outputs.encoder_last_hidden_state),
        (model.model.decoder, outputs.last_hidden_state),
    ):
        expected = torch.zeros_like(states)
        for layer in stack.layers:
            for name in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"):
                if hasattr(layer, name):
                    expected = layer_norm(expected, getattr(layer, name))
        torch.testing.assert_close(states, expected, **EXACT)


def test_5_4_dropout_acts_in_training_only(tiny_model):
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[2, 6]])}
    model, without = tiny_model(dropout=0.5), tiny_model(dropout=0.0)
    assert torch.equal(model(**batch).logits, without(**batch).logits)
    assert not torch.allclose(model.train()(**batch).logits, without(**batch).logits)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.2])
def test_5_4_label_smoothing_spreads_epsilon_evenly_over_the_vocabulary(tiny_model, epsilon):
    """The loss is (1 - eps) nll + eps times the mean of -log p over all words, token by token.

    That is the cross-entropy of the smoothed target q, hence KL(q || p) plus the entropy of q.
    """
    model = tiny_model(label_smoothing=epsilon, dropout=0.0).train()
    source = torch.tensor([[3, 4, 5], [6, 7, 8]])
    labels = torch.tensor([[9, 10, 2], [11, 2, -100]])
    shifted = torch.tensor([[2, 9, 10], [2, 11, 2]])
    logits = model(source, decoder_input_ids=shifted).logits
    losses, divergences, entropies = [], [], []
    for b, i in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        p = softmax(logits[b, i])
        gold = labels[b, i].item()
        losses.append(-(1 - epsilon) * p[gold].log() - epsilon * p.log().mean())
        q = [epsilon / 19 + (1 - epsilon) * (word == gold) for word in range(19)]
        divergences.append(
            sum(q_w * (q_w / p_w).log() for q_w, p_w in zip(q, p, strict=True) if q_w > 0)
        )
        entropies.append(-sum(q_w * math.log(q_w) for q_w in q if q_w > 0))
    loss = model(source, labels=labels).loss
    torch.testing.assert_close(loss, sum(losses) / 5, **EXACT)
    torch.testing.assert_close(loss, (sum(divergences) + sum(entropies)) / 5, **EXACT)


def test_5_4_evaluation_loss_is_the_logarithm_of_the_perplexity(tiny_model):
    """exp(loss) is the inverse geometric mean of the gold probabilities, without smoothing."""
    model = tiny_model(label_smoothing=0.1)
    source, labels = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 10, 11, 2]])
    outputs = model(source, labels=labels)
    product = math.prod(
        softmax(outputs.logits[0, i])[gold].item() for i, gold in enumerate(labels[0])
    )
    assert math.exp(outputs.loss.item()) == pytest.approx(product ** (-1 / 4), rel=1e-12)


# Section 6.1: machine translation


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_6_1_beam_scores_are_log_probabilities_over_the_length_penalty(tiny_model, alpha):
    """score(Y) = log P(Y | X) / ((5 + |Y|) / 6)^alpha, |Y| counting the end of sentence."""
    model = tiny_model(seed=3)
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 8, 2]])
    search = {"num_beams": 4, "length_penalty": alpha, "max_new_tokens": 6}
    result = model.generate(source, **search, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(model.generate(source, **search), result.sequences)
    for sentence, found, tokens in zip(
        source, result.sequences_scores, result.sequences, strict=True
    ):
        output = tokens[1:].tolist()
        if 2 in output:
            output = output[: output.index(2) + 1]
        logits = model(sentence[None], decoder_input_ids=torch.tensor([[2, *output[:-1]]])).logits[
            0
        ]
        log_probability = sum(softmax(logits[i])[word].log() for i, word in enumerate(output))
        expected = log_probability / ((5 + len(output)) / 6) ** alpha
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_6_1_defaults_are_alpha_0_6_and_input_length_plus_50(tiny_model):
    defaults = tiny_model().generation_config
    assert defaults.length_penalty_type == "gnmt"
    assert defaults.length_penalty == 0.6
    assert defaults.max_length_offset == 50


@pytest.mark.parametrize("num_beams", [1, 4])
def test_6_1_output_is_at_most_input_length_plus_50(tiny_model, num_beams):
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():  # make the end token impossible: its logit is about -1000
        model.model.decoder.layers[-1].final_layer_norm.bias[0] = 100.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[2, 0] = -10.0
    output = model.generate(torch.tensor([[3, 4, 5, 6, 2]]), num_beams=num_beams)
    assert output[0, 0] == 2
    assert 2 not in output[0, 1:]
    assert output.shape[1] - 1 == 5 + 50


# Table 3


def parameter_count(config):
    """Sum the matrices of section 3, with tied embeddings and without projection biases."""
    d_model = config.d_model
    norm = 2 * d_model
    total = config.vocab_size * d_model
    if config.position_encoding == "learned":
        total += 2 * config.max_position_embeddings * d_model
    for side, attentions in (("encoder", 1), ("decoder", 2)):
        heads = getattr(config, f"{side}_attention_heads")
        d_ff = getattr(config, f"{side}_ffn_dim")
        d_k, d_v = config.d_k or d_model // heads, config.d_v or d_model // heads
        attention = 2 * d_model * heads * d_k + 2 * d_model * heads * d_v + norm
        feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model + norm
        total += getattr(config, f"{side}_layers") * (attentions * attention + feed_forward)
    return total


@pytest.mark.parametrize("name", sorted(VaswaniConfig.presets()))
def test_table_3_parameters_follow_the_formula(name):
    model = on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(model.config)


MILLIONS = {
    "base": 65,
    "B-dk16": 58,
    "B-dk32": 60,
    "C-N2": 36,
    "C-N4": 50,
    "C-N8": 80,
    "C-d256": 28,
    "C-d1024": 168,
    "C-dff1024": 53,
    "C-dff4096": 90,
}


@pytest.mark.parametrize(
    "name", [name for name in MILLIONS if "-d2" not in name and "-d10" not in name]
)
def test_table_3_rows_differ_from_base_as_printed(name):
    """At equal d_model the unknown vocabulary cancels; each of the two numbers is rounded."""
    difference = parameter_count(VaswaniConfig.preset(name)) - parameter_count(
        VaswaniConfig.preset("base")
    )
    assert abs(difference / 1e6 - (MILLIONS[name] - MILLIONS["base"])) <= 1


def test_table_3_one_vocabulary_explains_every_printed_count():
    """The counts of all base-size rows round to the printed millions for a single vocabulary."""
    smallest, largest = 0.0, math.inf
    for name, millions in MILLIONS.items():
        config = VaswaniConfig.preset(name)
        others = parameter_count(config) - config.vocab_size * config.d_model
        smallest = max(smallest, ((millions - 0.5) * 1e6 - others) / config.d_model)
        largest = min(largest, ((millions + 0.5) * 1e6 - others) / config.d_model)
    assert 30_000 < smallest < largest < 50_000


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_table_3_rows_a_keep_the_amount_of_computation(heads):
    """Rows (A): more heads, each narrower, the same number of parameters."""
    row, base = VaswaniConfig.preset(f"A-h{heads}"), VaswaniConfig.preset("base")
    assert row.encoder_attention_heads == row.decoder_attention_heads == heads
    assert parameter_count(row) == parameter_count(base)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("B-dk16", {"d_k": 16}),
        ("B-dk32", {"d_k": 32}),
        ("C-d256", {"d_model": 256, "d_k": 32, "d_v": 32}),
        ("C-d1024", {"d_model": 1024, "d_k": 128, "d_v": 128}),
        ("D-drop0.0", {"dropout": 0.0}),
        ("D-drop0.2", {"dropout": 0.2}),
        ("D-ls0.0", {"label_smoothing": 0.0}),
        ("D-ls0.2", {"label_smoothing": 0.2}),
        ("E-learned", {"position_encoding": "learned"}),
        (
            "big",
            {"d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "dropout": 0.3},
        ),
        ("big", {"encoder_attention_heads": 16, "decoder_attention_heads": 16}),
    ],
)
def test_table_3_row_changes_what_the_paper_says(name, fields):
    config = VaswaniConfig.preset(name)
    assert {field: getattr(config, field) for field in fields} == fields
