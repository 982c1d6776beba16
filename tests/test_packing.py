"""Packed batches give the numbers of padded batches."""

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DataCollatorWithFlattening
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import output_capturing
from vaswani.corpora.packed_collator import DataCollatorForPackedSeq2Seq, packed
from vaswani.modeling import packed_attention_vaswani, windows_vaswani
from vaswani.modeling.packing_vaswani import PackedMask
from vaswani.modeling.windows_vaswani import Windows

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniModel,
    VaswaniTokenizer,
)

SOURCES, TARGETS = [7, 1, 3, 11, 2, 3, 40, 5], [5, 9, 1, 13, 1, 2, 31, 6]


@pytest.fixture
def batches(padded_batch):
    """Build a padded batch of different lengths, and the same batch packed."""

    def build(sources=SOURCES, targets=TARGETS):
        input_ids, attention_mask = padded_batch(sources)
        labels, real = padded_batch(targets, seed=1)
        labels = labels.masked_fill(real == 0, -100)
        padded = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        return padded, packed(padded)

    return build


def loss_and_gradients(model, batch, **options):
    model.zero_grad(set_to_none=True)
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def assert_same_learning(model, padded, flat, **options):
    loss, gradients = loss_and_gradients(model, padded, **options)
    own_loss, own_gradients = loss_and_gradients(model, flat, **options)
    torch.testing.assert_close(own_loss, loss, rtol=1e-12, atol=0)
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


VARIANTS = [
    {},
    {"norm_position": "pre"},
    {"position_encoding": "learned", "max_position_embeddings": 40},
    {"d_k": 3, "d_v": 5},
    {"attn_implementation": "eager"},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loss_and_all_gradients_equal_those_of_the_padded_batch(tiny_model, batches, variant):
    model = tiny_model(**variant).train()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    assert_same_learning(model, *batches())


@pytest.mark.parametrize("lengths", [([4], [3]), ([5, 5, 5], [2, 2, 2]), ([1, 1], [1, 30])])
def test_parity_holds_for_one_sentence_equal_lengths_and_extremes(tiny_model, batches, lengths):
    assert_same_learning(tiny_model(dropout=0.0), *batches(*lengths))


def test_gradient_checkpointing_changes_nothing(tiny_model, batches):
    model = tiny_model(dropout=0.0).train()
    padded, flat = batches()
    loss, gradients = loss_and_gradients(model, padded)
    model.gradient_checkpointing_enable()
    own_loss, own_gradients = loss_and_gradients(model, flat)
    torch.testing.assert_close(own_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, msg=name)


def test_one_update_gives_the_weights_of_the_padded_batch(tiny_model, batches):
    models = []
    for batch in batches():
        model = tiny_model(dropout=0.0).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
        model(**batch).loss.backward()
        optimizer.step()
        models.append(model.state_dict())
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, msg=name)


def real(states, lengths):
    return torch.cat([row[:length] for row, length in zip(states, lengths, strict=True)])


def test_logits_and_hidden_states_come_back_padded(tiny_model, batches):
    padded, flat = batches()
    model = tiny_model()
    expected = model(**padded, output_hidden_states=True)
    outputs = model(**flat, output_hidden_states=True)
    assert outputs.logits.shape == expected.logits.shape
    torch.testing.assert_close(real(outputs.logits, TARGETS), real(expected.logits, TARGETS))
    sides = (("decoder", TARGETS), ("encoder", SOURCES))
    for side, lengths in sides:
        mine, theirs = (getattr(one, f"{side}_hidden_states") for one in (outputs, expected))
        assert len(mine) == len(theirs) == 3
        for own, other in zip(mine, theirs, strict=True):
            assert own.shape == other.shape
            torch.testing.assert_close(real(own, lengths), real(other, lengths))
    last = outputs.encoder_last_hidden_state
    assert (last[1, 1:] == 0).all()


def test_attentions_come_back_padded_with_zeros(tiny_model, batches):
    padded, flat = batches()
    model = tiny_model(attn_implementation="eager")
    expected, outputs = (model(**batch, output_attentions=True) for batch in (padded, flat))
    for name, lengths in (
        ("encoder_attentions", SOURCES),
        ("decoder_attentions", TARGETS),
        ("cross_attentions", TARGETS),
    ):
        pairs = zip(getattr(outputs, name), getattr(expected, name), strict=True)
        for own, other in pairs:
            assert own.shape == other.shape
            mine, theirs = (real(weights.transpose(1, 2), lengths) for weights in (own, other))
            torch.testing.assert_close(mine, theirs)
            assert (own[1, :, lengths[1] :] == 0).all()


def test_outputs_stay_packed_where_a_loop_asks_for_it(tiny_model, batches):
    padded, flat = batches()
    model = tiny_model()
    logits = model(**flat, pad_outputs=False).logits
    assert logits.shape == (1, sum(TARGETS), 19)
    torch.testing.assert_close(logits[0], real(model(**padded).logits, TARGETS))


def test_model_without_a_head_and_encoder_alone_take_packed_batches(tiny_model, batches):
    padded, flat = batches()
    decoder_input_ids = padded.pop("labels").clamp(min=0)
    model = tiny_model(VaswaniModel)
    expected = model(**padded, decoder_input_ids=decoder_input_ids).last_hidden_state
    del flat["labels"]
    flat["decoder_input_ids"] = real(decoder_input_ids, TARGETS)[None]
    own = model(**flat).last_hidden_state
    torch.testing.assert_close(real(own, TARGETS), real(expected, TARGETS))

    encoder = tiny_model(VaswaniEncoderModel)
    source = {name: value for name, value in flat.items() if not name.startswith("decoder_")}
    own, expected = encoder(**source)[0], encoder(**padded)[0]
    torch.testing.assert_close(real(own, SOURCES), real(expected, SOURCES))


def test_position_wise_layers_see_real_tokens_alone(tiny_model, batches):
    model = tiny_model().train()
    shapes = set()
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.fc1.register_forward_hook(lambda _, args, __: shapes.add(tuple(args[0].shape)))
    model(**batches()[1])
    assert shapes == {(1, sum(SOURCES), 16), (1, sum(TARGETS), 16)}


def test_boundaries_are_enough_without_positions_and_longest_lengths(tiny_model, batches):
    _, flat = batches()
    few = {
        name: value
        for name, value in flat.items()
        if not name.endswith(("position_ids", "cu_seq_lens_k", "length_q", "length_k"))
    }
    assert few.keys() == {"input_ids", "labels", "cu_seq_lens_q", "decoder_cu_seq_lens_q"}
    model = tiny_model()
    assert model(**few).loss == model(**flat).loss


def test_given_positions_are_used(tiny_model, batches):
    _, flat = batches()
    model = tiny_model()
    moved = {**flat, "position_ids": torch.zeros_like(flat["position_ids"])}
    assert model(**moved).loss != model(**flat).loss


def test_dropout_of_attention_is_applied(tiny_model, batches):
    model = tiny_model(dropout=0.0, attention_dropout=0.5).train()
    _, flat = batches()
    assert model(**flat).loss != model(**flat).loss


def test_bfloat16_on_a_cpu_learns_as_padded(tiny_model, batches):
    model = tiny_model(dropout=0.0, dtype=torch.float32).train()
    losses = []
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_has_the_same_loss_and_gradients(tiny_model, batches, backend):
    model = tiny_model(dropout=0.0).train()
    compiled = copy.deepcopy(model)
    padded, flat = batches()
    expected, found = model(**padded).loss, torch.compile(compiled, backend=backend)(**flat).loss
    torch.testing.assert_close(found, expected)
    for loss in (expected, found):
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in compiled.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], msg=name)


def test_compiled_calls_may_have_labels_or_not(tiny_model, batches):
    model = tiny_model(dropout=0.0, encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(model, backend="eager")
    _, flat = batches()
    assert compiled(**flat).loss.isfinite()
    unlabelled = {name: value for name, value in flat.items() if name != "labels"}
    unlabelled["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(flat["labels"])
    torch.testing.assert_close(compiled(**unlabelled).logits, model(**unlabelled).logits)


def test_rows_without_labels_cannot_be_packed():
    rows = {"input_ids": torch.tensor([[5, 2]]), "attention_mask": torch.ones(1, 2)}
    for batch in (rows, rows | {"labels": None}):
        with pytest.raises(ValueError, match="The batch has no labels"):
            packed(batch)


def test_one_side_alone_cannot_be_packed(tiny_model, batches):
    padded, flat = batches()
    model = tiny_model()
    with pytest.raises(ValueError, match="cu_seq_lens_q and decoder_cu_seq_lens_q"):
        model(**padded, cu_seq_lens_q=flat["cu_seq_lens_q"])


def test_a_padded_batch_with_boundaries_is_refused(tiny_model, batches):
    padded, flat = batches()
    padded.pop("attention_mask")
    boundaries = {name: value for name, value in flat.items() if "cu_seq" in name}
    labels = flat["labels"]
    with pytest.raises(ValueError, match=r"shape \(1, N\), got \(8, 40\)"):
        tiny_model()(**{**padded, "labels": labels}, **boundaries)
    with pytest.raises(ValueError, match="end at 72, but the packed batch has 71 tokens"):
        tiny_model()(**{**flat, "input_ids": flat["input_ids"][:, 1:]})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("side", ["", "decoder_"])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("cu_seq_lens_q", int32(0, 7, 7, 11), r"rise strictly, but sentence 1 .* has 0 tokens"),
        ("cu_seq_lens_q", int32(0, 7, 11, 11), r"rise strictly, but sentence 2 .* has 0 tokens"),
        ("cu_seq_lens_q", int32(0, 7, 5, 11), r"rise strictly, but sentence 1 .* has -2 tokens"),
        ("cu_seq_lens_q", int32(1, 4, 7, 11), r"must start at 0.*got 1"),
        ("cu_seq_lens_q", [0, 4, 7, 11], r"int32 or int64 tensor of shape .*got a list"),
        ("cu_seq_lens_q", int32(0, 4, 7, 11)[None], r"got one of shape \(1, 4\)"),
        ("cu_seq_lens_q", torch.tensor([0.0, 4, 7, 11]), r"got one of .* torch.float32"),
        ("cu_seq_lens_q", int32(0), r"got one of shape \(1,\)"),
        ("max_length_q", 3, "max_length_q is 3, but the longest sentence has 5 tokens: pass 5"),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_wrong_boundaries_are_refused_by_name(
    tiny_model, batches, side, name, wrong, message, attention
):
    _, flat = batches([4, 2, 5], [4, 2, 5])
    with pytest.raises(ValueError, match=f"{side}{name}.*{message}|^{side}{message}"):
        tiny_model(attn_implementation=attention)(**{**flat, f"{side}{name}": wrong})


def test_another_number_of_targets_than_of_sources_is_refused(tiny_model, batches):
    _, flat = batches([4, 2, 5], [4, 2, 5])
    with pytest.raises(ValueError, match=r"has 3 source sentences, but .* has 2 target sentences"):
        tiny_model()(
            **{**flat, "decoder_cu_seq_lens_q": int32(0, 4, 11), "decoder_max_length_q": 7}
        )


def test_a_mask_of_none_and_arguments_by_position_are_taken(tiny_model, batches):
    _, flat = batches()
    model = tiny_model()
    expected = model(**flat).loss
    assert model(**flat, attention_mask=None, decoder_attention_mask=None).loss == expected
    rest = {name: value for name, value in flat.items() if name not in ("input_ids", "labels")}
    nothing = [None] * 7
    assert model(flat["input_ids"], *nothing, flat["labels"], True, **rest).loss == expected
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(flat["input_ids"], **flat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": torch.arange(6)[None]}, r"position_ids must have the shape \(1, 7\)"),
        ({"position_ids": torch.arange(7)[None] + 9}, "position_ids go from 9 to 15, .* 4 tokens"),
        ({"decoder_position_ids": torch.arange(3)[None] - 1}, "position_ids go from -1 to 1"),
        ({"logits_to_keep": 1}, "logits_to_keep counts positions of padded sentences"),
    ],
)
def test_what_contradicts_the_boundaries_is_refused_by_name(tiny_model, batches, changes, message):
    _, flat = batches([4, 3], [2, 1])
    with pytest.raises(ValueError, match=message):
        tiny_model()(**flat | changes)


def test_the_encoders_padded_output_of_an_earlier_call_is_taken(tiny_model, batches):
    model, (_, flat) = tiny_model(), batches()
    expected = model(**flat)
    encoded = expected.encoder_last_hidden_state
    for outputs in ((encoded,), [encoded], BaseModelOutput(encoded)):
        del flat["input_ids"]
        found = model(**flat, encoder_outputs=outputs)
        torch.testing.assert_close(found.logits, expected.logits)
        flat["input_ids"] = None
    with pytest.raises(ValueError, match=r"cu_seq_lens_q end at 72, but the packed batch has 71"):
        model(**flat, encoder_outputs=(encoded.flatten(0, 1)[None, :71],))


def test_the_encoder_alone_takes_packed_sources(tiny_model, batches):
    encoder, (padded, flat) = tiny_model().get_encoder(), batches()
    expected = encoder(padded["input_ids"], padded["attention_mask"]).last_hidden_state
    sources = {name: flat[name] for name in ("input_ids", "cu_seq_lens_q", "max_length_q")}
    found = encoder(**sources).last_hidden_state
    real = padded["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])


@pytest.mark.parametrize(
    "recorded", [{"output_hidden_states": True}, {"output_attentions": True}], ids=str
)
def test_recorded_states_of_an_earlier_call_are_returned_as_they_were(
    tiny_model, batches, recorded
):
    model, (padded, flat) = tiny_model(attn_implementation="eager"), batches()
    expected = model(**flat, **recorded)
    encoded = model.get_encoder()(padded["input_ids"], padded["attention_mask"], **recorded)
    del flat["input_ids"]
    found = model(**flat, encoder_outputs=encoded, **recorded)
    assert found.keys() == expected.keys()
    for name in ("loss", "logits", "encoder_last_hidden_state", "encoder_hidden_states"):
        torch.testing.assert_close(found.get(name), expected.get(name))
    assert found.encoder_attentions is encoded.attentions


@pytest.mark.parametrize("of_collator", [True, False], ids=["of transformers", "as the inputs"])
def test_no_sentence_of_a_language_model_predicts_the_next_one(of_collator):
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    model = VaswaniForCausalLM(VaswaniDecoderConfig(**sizes, decoder_ffn_dim=16)).double().eval()
    rows = [{"input_ids": [5, 6, 7, 2]}, {"input_ids": [8, 2]}, {"input_ids": [2]}]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    flat = collator(rows)
    if not of_collator:
        flat["labels"] = flat["input_ids"]
    losses = [
        len(ids[0, 1:]) * model(ids, labels=ids).loss
        for ids in (torch.tensor([row["input_ids"]]) for row in rows[:2])
    ]
    torch.testing.assert_close(model(**flat).loss, sum(losses) / 4)


@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_a_mask_beside_boundaries_is_refused(tiny_model, batches, name):
    _, flat = batches()
    mask = torch.ones_like(flat["input_ids" if name == "attention_mask" else "labels"])
    with pytest.raises(ValueError, match=f"no padding, but {name} is given with cu_seq_lens_q"):
        tiny_model()(**flat, **{name: mask})


def test_collator_names_boundaries_as_transformers_does(tiny_model):
    rows = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 4, 2]}]
    tokenizer = VaswaniTokenizer.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    flat = DataCollatorForPackedSeq2Seq(tokenizer, model=tiny_model())(copy.deepcopy(rows))
    assert flat["input_ids"].tolist() == [[5, 6, 2, 8, 2]]
    assert flat["labels"].tolist() == [[7, 2, 9, 4, 2]]
    assert flat["decoder_input_ids"].tolist() == [[2, 7, 2, 9, 4]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert flat["decoder_position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    for kind in "qk":
        assert flat[f"cu_seq_lens_{kind}"].tolist() == [0, 3, 5]
        assert flat[f"decoder_cu_seq_lens_{kind}"].tolist() == [0, 2, 5]
        assert flat[f"cu_seq_lens_{kind}"].dtype == torch.int32
        assert (flat[f"max_length_{kind}"], flat[f"decoder_max_length_{kind}"]) == (3, 3)


@pytest.mark.parametrize(
    "lengths", [(SOURCES, TARGETS), ([8], [16]), ([1, 1], [2, 30]), ([5], [7])]
)
@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_spare_sentences_fill_up_a_packed_batch_and_change_nothing(
    tiny_model, batches, lengths, multiple
):
    padded, flat = batches(*lengths)
    filled = packed(padded, multiple)
    sides = (lengths[0], "", "input_ids"), (lengths[1], "decoder_", "labels")
    for (own, prefix, name), longest in zip(sides, map(max, lengths), strict=True):
        assert filled[name].shape[1] % multiple == 0
        assert filled[name][:, : sum(own)].tolist() == flat[name].tolist()
        ends = filled[f"{prefix}cu_seq_lens_q"]
        assert ends.diff()[: len(own)].tolist() == own
        assert ends.diff().min() >= 1
        assert ends.diff().max() == filled[f"{prefix}max_length_q"] == longest
        assert filled[f"{prefix}position_ids"].max() < longest
    assert (filled["labels"][:, sum(lengths[1]) :] == -100).all()
    assert_same_learning(tiny_model(dropout=0.0), padded, filled)
    if multiple == 1:
        assert filled.keys() == flat.keys()
        assert all(torch.equal(torch.as_tensor(filled[k]), torch.as_tensor(flat[k])) for k in flat)


def test_the_packing_collator_fills_up_to_a_multiple():
    rows = [{"input_ids": [3, 4, 2], "labels": [5, 2]}, {"input_ids": [4, 2], "labels": [3, 4, 2]}]
    tokenizer = VaswaniTokenizer.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    collator = DataCollatorForPackedSeq2Seq(tokenizer, pad_to_multiple_of=8)
    batch = collator(rows)
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 8)
    assert batch["labels"][0, 5:].tolist() == [-100] * 3


def test_a_packing_collator_refuses_other_tensors_and_padding_on_the_left():
    rows = [{"input_ids": [5, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 4, 2]}]
    tokenizer = VaswaniTokenizer.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    collate = DataCollatorForPackedSeq2Seq(tokenizer)
    with pytest.raises(ValueError, match="return_tensors='np'"):
        collate(rows, return_tensors="np")
    tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match=r"pads on the left: set tokenizer\.padding_side"):
        collate(rows)


def test_ignored_labels_inside_a_target_stay(tiny_model, batches):
    padded, _ = batches()
    padded["labels"][3, 4] = padded["labels"][6, 0] = -100
    padded["labels"][1] = -100  # nothing to learn from this target
    flat = packed(padded)
    assert flat["labels"].shape == (1, sum(TARGETS) - TARGETS[1] + 1)
    assert_same_learning(tiny_model(dropout=0.0), padded, flat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "needs labels"),
        ({"attention_mask": [[0, 1, 1], [1, 1, 1]]}, "Sentence 0 of the batch begins with padding"),
        ({"attention_mask": [[1, 0, 1], [1, 1, 1]]}, "gaps"),
        ({"labels": [[], []]}, r"No target .* shape \(2, 0\): give each target at least its end"),
        ({"input_ids": [[], []]}, r"No source .* shape \(2, 0\): give each source at least"),
    ],
)
def test_what_cannot_be_packed_is_refused(changes, message):
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3)}
    for name, value in changes.items():
        if value is None:
            del batch[name]
        else:
            batch[name] = torch.tensor(value)
    with pytest.raises(ValueError, match=message):
        packed(batch)


def by_sentence(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """Compute torch's attention by cumulative lengths, one sentence at a time."""
    outputs = []
    for index in range(len(cu_q) - 1):
        places = slice(cu_q[index], cu_q[index + 1]), slice(cu_k[index], cu_k[index + 1])
        rows = (query[places[0]], key[places[1]], value[places[1]])
        heads = [side.transpose(0, 1) for side in rows]
        causal = window_size == (-1, 0)
        assert heads[0].shape[1] <= max_q
        assert heads[1].shape[1] <= max_k
        with sdpa_kernel(SDPBackend.MATH):
            output = F.scaled_dot_product_attention(*heads, scale=scale, is_causal=causal)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def test_attention_by_cumulative_lengths_gets_no_mask_and_gives_the_same(
    tiny_model, batches, monkeypatch
):
    monkeypatch.setattr(packed_attention_vaswani, "varlen_attn", by_sentence)
    monkeypatch.setattr(packed_attention_vaswani, "_varlen_supports", lambda *states: True)
    monkeypatch.setattr(PackedMask, "windows", None)  # masks are never built
    assert_same_learning(tiny_model(dropout=0.0), *batches())


@pytest.mark.skipif(
    not hasattr(output_capturing, "resolve_hidden_states_indices"),
    reason="this version of transformers selects no layers",
)
def test_selected_hidden_states_of_packed_batches_are_padded(tiny_model, batches):
    model = tiny_model(decoder_layers=1).eval()
    padded, flat = batches()
    expected = model(**padded, output_hidden_states=[-1])
    outputs = model(**flat, output_hidden_states=[-1])
    for name, real in (
        ("encoder", padded["attention_mask"]),
        ("decoder", padded["labels"] != -100),
    ):
        *skipped, last = outputs[f"{name}_hidden_states"]
        assert skipped == [None] * len(skipped)
        wanted = expected[f"{name}_hidden_states"][-1]
        torch.testing.assert_close(last[real == 1], wanted[real == 1])


def test_the_encoder_alone_returns_tuples_of_packed_batches(tiny_model, batches):
    encoder = tiny_model().get_encoder()
    _, flat = batches()
    given = {name: flat[name] for name in ("input_ids", "cu_seq_lens_q")}
    (states,) = encoder(**given, return_dict=False)
    assert torch.equal(states, encoder(**given).last_hidden_state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_on_a_gpu_learns_as_padded(tiny_model, batches):
    model = tiny_model(dropout=0.0, d_k=8, d_v=8, dtype=torch.bfloat16).cuda().train()
    losses = []
    for batch in batches():
        moved = {
            name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()
        }
        losses.append(model(**moved).loss.float())
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)


@pytest.mark.parametrize("longest", [30, 60, 200])
@pytest.mark.parametrize("join", [True, False], ids=["joined", "alone"])
def test_windows_hold_every_sentence_once_with_little_padding(longest, join):
    chance = torch.Generator().manual_seed(longest)
    lengths = torch.randint(1, longest, (300, 2), generator=chance)
    windows = Windows(lengths, torch.device("cpu"), join)
    total = lengths.sum(dim=0)
    for side, number in zip((windows.queries, windows.keys), total.tolist(), strict=True):
        assert torch.equal(side.tokens[side.rows], torch.arange(number))
        assert int((~side.padding).sum()) == number
    seen = torch.zeros(300, 300, dtype=torch.long)
    for group in range(len(windows.queries.sizes)):
        mask = windows.hidden(group, causal=False)
        rows, keys, real = (
            side.of_groups(values)[group]
            for side, values in (
                (windows.queries, windows.queries.sentences),
                (windows.keys, windows.keys.sentences),
                (windows.queries, ~windows.queries.padding),
            )
        )
        window, row, key = (~mask & real[:, :, None]).nonzero(as_tuple=True)
        seen.index_put_((rows[window, row], keys[window, key]), torch.tensor(1), accumulate=True)
    assert torch.equal(seen, torch.diag(lengths.prod(dim=1)))
    padded = len(windows.queries.padding) + len(windows.keys.padding)
    assert padded < (1.6 if join else 2.5) * total.sum()


def test_each_padded_row_belongs_to_a_sentence_of_its_window():
    windows = Windows(torch.tensor([[3, 3], [40, 40], [28, 28], [35, 35]]), torch.device("cpu"))
    assert windows.queries is windows.keys
    assert windows.queries.sizes == [(2, 40), (1, 31)]
    for sentences in windows.queries.of_groups(windows.queries.sentences):
        assert all(set(row) in ({1}, {3}, {2, 0}) for row in sentences.tolist())


def test_attention_over_many_keys_is_that_of_the_padded_batch(tiny_model, batches, monkeypatch):
    monkeypatch.setattr(packed_attention_vaswani, "LONG", 8)
    monkeypatch.setattr(windows_vaswani, "LONG", 8)
    assert_same_learning(tiny_model(dropout=0.0), *batches())
