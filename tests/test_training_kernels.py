"""The compiled kernels of training equal the formulas of the paper, with the same dropout twice."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from vaswani.corpora.packed_collator import packed
from vaswani.generation import library_vaswani
from vaswani.generation.library_vaswani import library
from vaswani.modeling.packing_vaswani import PackedMask, Packing
from vaswani.modeling.training_kernels_vaswani import add_and_normalize, attend_in_sentences
from vaswani.modeling.windows_vaswani import LONG

pytestmark = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture(params=["native", "AVX2"])
def _instructions(request, monkeypatch):
    """Compile the kernels for this CPU, and for vectors of half the size."""
    if request.param != "native":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", request.param)
        library.cache_clear()
    yield
    if request.param != "native":
        library.cache_clear()


def packing(lengths):
    return Packing(torch.tensor([0, *lengths]).cumsum(0))


def states(queries, keys, heads, d_k, d_v, dtype):
    torch.manual_seed(0)
    sizes = (sum(queries), d_k), (sum(keys), d_k), (sum(keys), d_v)
    return [torch.randn(n, heads, width).to(dtype).requires_grad_() for n, width in sizes]


def formula(sides, queries, keys, causal, scaling, kept=None):
    """Attend in float64 inside each sentence, with dropout by factors `kept` (N, H, K)."""
    query, key, value = sides
    outputs, first_query, first_key = [], 0, 0
    for q, k in zip(queries, keys, strict=True):
        rows, columns = slice(first_query, first_query + q), slice(first_key, first_key + k)
        scores = torch.einsum("qhd,khd->qhk", query[rows], key[columns]) * scaling
        if causal:
            hidden = torch.ones(q, k, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        weights = scores.softmax(dim=-1)
        if kept is not None:
            weights = weights * kept[rows, :, :k]
        outputs.append(torch.einsum("qhk,khd->qhd", weights, value[columns]))
        first_query, first_key = first_query + q, first_key + k
    return torch.cat(outputs)


def assert_learns_as(expected, output, exact, sides, rounding):
    slope = torch.randn_like(output)
    gradients = torch.autograd.grad(output, sides, slope)
    exact_gradients = torch.autograd.grad(expected, exact, slope.double())
    for found, wanted in zip((output, *gradients), (expected, *exact_gradients), strict=True):
        atol = rounding * wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=atol)


class TestAttention:
    """Attention inside the sentences of a packed batch."""

    @DTYPES
    @pytest.mark.usefixtures("_instructions")
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("d_k", "d_v"), [(32, 32), (5, 18), (64, 1)])
    def test_output_and_gradients_are_those_of_the_formula(self, causal, d_k, d_v, dtype):
        queries = [1, 16, 17, 33, 5, 128]
        keys = queries if causal else [7, 1, 16, 40, 31, 128]
        sides = states(queries, keys, 3, d_k, d_v, dtype)
        exact = [side.detach().double().requires_grad_() for side in sides]
        mask = PackedMask(packing(queries), packing(keys))
        output = attend_in_sentences(sides, mask, causal, 0.3, 0.0)
        expected = formula(exact, queries, keys, causal, 0.3)
        assert_learns_as(expected, output, exact, sides, ROUNDING[dtype])

    @DTYPES
    @pytest.mark.parametrize("causal", [False, True])
    def test_both_passes_drop_the_same_weights(self, causal, dtype):
        lengths = [20, 3, 16]
        sides = states(lengths, lengths, 2, 8, 24, dtype)
        mask = PackedMask(packing(lengths), packing(lengths))

        def output_of(query, key, value):
            torch.manual_seed(5)
            return attend_in_sentences([query, key, value], mask, causal, 0.3, 0.4)

        # With equal scores and values that name their keys, the output shows what is kept.
        names = torch.cat([torch.eye(24)[:length] for length in lengths])[:, None].expand(-1, 2, -1)
        zeros = torch.zeros(39, 2, 8)
        kept = output_of(zeros, zeros, names) != 0
        exact = [side.detach().double().requires_grad_() for side in sides]
        expected = formula(exact, lengths, lengths, causal, 0.3, kept / 0.6)
        assert_learns_as(expected, output_of(*sides), exact, sides, ROUNDING[dtype])

    def test_dropout_keeps_the_chance_in_every_row_and_column(self):
        lengths = [100] * 50
        mask = PackedMask(packing(lengths), packing(lengths))
        zeros = torch.zeros(5000, 4, 8)
        names = torch.eye(100).repeat(50, 1)[:, None].expand(-1, 4, -1)
        torch.manual_seed(0)
        kept = (attend_in_sentences([zeros, zeros, names], mask, False, 1.0, 0.3) != 0).double()
        assert kept.mean().item() == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 2e6))
        for dims, number in (((0, 2), 500_000), ((0, 1), 20_000), ((1, 2), 400)):
            assert (kept.mean(dim=dims) - 0.7).abs().max() < 5 * math.sqrt(0.21 / number)
        neighbours = (kept[..., 1:] * kept[..., :-1]).mean(), (kept[1:] * kept[:-1]).mean()
        assert all(abs(each - 0.49) < 1e-3 for each in neighbours)

    def test_the_seed_of_torch_decides_and_the_number_of_threads_does_not(self, with_threads):
        lengths = [12, 30, 7]
        sides = states(lengths, lengths, 2, 8, 8, torch.float32)
        mask = PackedMask(packing(lengths), packing(lengths))

        def output_of(seed, threads):
            torch.manual_seed(seed)
            return with_threads(
                threads, lambda: attend_in_sentences(sides, mask, False, 0.3, 0.5).detach()
            )

        assert torch.equal(output_of(1, 1), output_of(1, 2))
        assert not torch.equal(output_of(1, 1), output_of(2, 1))

    def test_boundaries_may_be_overwritten_between_the_passes(self):
        boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
        sides = states([3, 4], [3, 4], 2, 8, 8, torch.float32)

        def gradients(change):
            given = boundaries.clone()
            mask = PackedMask(Packing(given), Packing(given))
            output = attend_in_sentences(sides, mask, False, 0.3, 0.0)
            given.add_(change)
            return torch.autograd.grad(output.square().sum(), sides)

        torch.testing.assert_close(gradients(100), gradients(0), rtol=0, atol=0)

    def test_a_loose_bound_of_the_lengths_is_taken(self):
        sides = states([3], [3], 1, 4, 4, torch.float32)
        loose = Packing(torch.tensor([0, 3]), 1000)
        expected = attend_in_sentences(
            sides, PackedMask(packing([3]), packing([3])), False, 1.0, 0.0
        )
        assert torch.equal(
            attend_in_sentences(sides, PackedMask(loose, loose), False, 1.0, 0.0), expected
        )

    def test_a_sentence_with_nan_leaves_the_others_as_they_are(self):
        lengths = [4, 6]
        sides = [side.detach() for side in states(lengths, lengths, 2, 8, 8, torch.float32)]
        mask = PackedMask(packing(lengths), packing(lengths))
        expected = attend_in_sentences(sides, mask, False, 0.3, 0.0)
        sides[1][5, 0, 3] = torch.nan
        found = attend_in_sentences(sides, mask, False, 0.3, 0.0)
        assert found[4:, 0].isnan().all()
        assert torch.equal(found[:4], expected[:4])
        assert torch.equal(found[4:, 1], expected[4:, 1])

    def test_scores_of_minus_infinity_have_no_weight_and_all_of_them_no_softmax(self):
        mask = PackedMask(packing([1, 1]), packing([2, 2]))
        query = torch.ones(2, 1, 1)
        key = torch.tensor([0, -torch.inf, -torch.inf, -torch.inf])[:, None, None]
        value = torch.tensor([3.0, 5, 3, 5])[:, None, None]
        output = attend_in_sentences([query, key, value], mask, False, 1.0, 0.0)
        assert output[0].item() == 3
        assert output[1].isnan().all()

    def test_what_it_cannot_compute_is_left_to_torch(self):
        sides = states([3], [3], 1, 4, 4, torch.float32)
        mask = PackedMask(packing([3]), packing([3]))
        assert attend_in_sentences(sides, mask, False, 1.0, 0.0) is not None
        double = [side.double() for side in sides]
        assert attend_in_sentences(double, mask, False, 1.0, 0.0) is None
        assert attend_in_sentences(sides, mask, False, 1.0, 1.0) is None
        others = PackedMask(packing([2]), packing([2]))
        assert attend_in_sentences(sides, others, False, 1.0, 0.0) is None
        more_keys = PackedMask(packing([3]), packing([2]))
        keys = [sides[0], *(side[:2] for side in sides[1:])]
        assert attend_in_sentences(keys, more_keys, False, 1.0, 0.0) is not None
        assert attend_in_sentences(keys, more_keys, True, 1.0, 0.0) is None
        assert attend_in_sentences([sides[0][..., :2], *sides[1:]], mask, False, 1.0, 0.0) is None
        long = PackedMask(packing([LONG + 1]), packing([LONG + 1]))
        many = states([LONG + 1], [LONG + 1], 1, 4, 4, torch.float32)
        assert attend_in_sentences(many, long, False, 1.0, 0.0) is None
        with torch.device("meta"):
            meta = [torch.empty(3, 1, 4) for _ in range(3)]
        assert attend_in_sentences(meta, mask, False, 1.0, 0.0) is None


class TestSumAndNorm:
    """LayerNorm(x + Dropout(Sublayer(x)))."""

    @DTYPES
    @pytest.mark.usefixtures("_instructions")
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    @pytest.mark.parametrize("width", [1, 7, 128, 512])
    def test_sums_and_gradients_are_those_of_the_formula(self, width, dropout, dtype, with_threads):
        torch.manual_seed(0)
        norm = nn.LayerNorm(width, eps=1e-3)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = torch.randn(3, 11, width, requires_grad=True)
        output = torch.randn(3, 11, width).to(dtype).requires_grad_()
        inputs = (x, output, *norm.parameters())
        found = with_threads(2, lambda: add_and_normalize(x, output, dropout, norm))
        slope = torch.randn_like(found)
        gradients = torch.autograd.grad(found, inputs, slope)
        exact = [each.detach().double().requires_grad_() for each in inputs]
        kept = (gradients[1] != 0) / (1 - dropout) if dropout else 1.0
        expected = F.layer_norm(exact[0] + exact[1] * kept, (width,), *exact[2:], eps=1e-3)
        wanted = torch.autograd.grad(expected, exact, slope.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        for gradient, right in zip(gradients, wanted, strict=True):
            rounding = 1e-5 if gradient.dtype == torch.float32 else 2**-8
            torch.testing.assert_close(gradient.double(), right, rtol=rounding, atol=1e-4)

    @pytest.mark.parametrize("rows", [2, 100_000])
    def test_a_gradient_that_needs_a_copy_is_read_from_the_copy(self, rows):
        torch.manual_seed(0)
        norm, states = nn.LayerNorm(64), torch.randn(rows, 64, requires_grad=True)
        nn.init.normal_(norm.weight)
        slope = torch.randn(64, rows).t()
        found = add_and_normalize(states, states.detach(), 0.0, norm)
        (gradient,) = torch.autograd.grad(found, states, slope)
        expected = norm(2 * states)
        (right,) = torch.autograd.grad(expected, states, slope)
        torch.testing.assert_close(2 * gradient, right, rtol=1e-4, atol=1e-4)

    def test_dropout_keeps_the_chance(self):
        torch.manual_seed(0)
        output = torch.ones(4000, 128, requires_grad=True)
        norm = nn.LayerNorm(128)
        sums = add_and_normalize(torch.randn(4000, 128), output, 0.3, norm)
        kept = (torch.autograd.grad(sums.square().sum(), output)[0] != 0).double()
        assert kept.mean().item() == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 512_000))
        assert (kept.mean(dim=0) - 0.7).abs().max() < 5 * math.sqrt(0.21 / 4000)
        assert (kept.mean(dim=1) - 0.7).abs().max() < 5 * math.sqrt(0.21 / 128)

    @pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
    def test_the_number_of_threads_may_change_between_the_passes(self, threads, with_threads):
        torch.manual_seed(0)
        norm, output = nn.LayerNorm(16), torch.randn(40, 16, requires_grad=True)
        norm.weight.requires_grad_(False)

        def gradients(forward, backward):
            torch.manual_seed(1)
            sums = with_threads(
                forward, lambda: add_and_normalize(torch.ones(40, 16), output, 0.5, norm)
            )
            return with_threads(
                backward, lambda: torch.autograd.grad(sums.square().sum(), (output, norm.bias))
            )

        torch.testing.assert_close(gradients(*threads), gradients(1, 1))

    @pytest.mark.parametrize(
        "change",
        [
            lambda norm: norm.double(),
            lambda norm: setattr(norm, "weight", nn.Parameter(torch.ones(3))),
            lambda norm: norm.register_forward_hook(print),
            lambda norm: norm.register_forward_pre_hook(print),
            lambda norm: norm.register_full_backward_hook(print),
            lambda norm: norm.register_full_backward_pre_hook(print),
            lambda norm: setattr(norm, "forward", print),
            lambda norm: norm.register_parameter("bias", None),
        ],
    )
    def test_a_norm_that_somebody_changed_is_called(self, change):
        norm, states = nn.LayerNorm(4), torch.randn(2, 4)
        assert add_and_normalize(states, states, 0.1, norm) is not None
        change(norm)
        assert add_and_normalize(states, states, 0.1, norm) is None

    def test_what_it_cannot_compute_is_left_to_torch(self):
        norm, states = nn.LayerNorm(4), torch.randn(2, 4)
        assert add_and_normalize(states.bfloat16(), states, 0.1, norm) is None
        assert add_and_normalize(states, states[:1], 0.1, norm) is None
        assert add_and_normalize(states, states, 1.0, norm) is None
        assert add_and_normalize(states, states, 0.1, nn.LayerNorm((2, 4))) is None
        assert add_and_normalize(states, states, 0.1, nn.RMSNorm(4)) is None


@pytest.fixture
def model_and_batch(tiny_model, padded_batch):
    """Build a float32 model in training, and a packed batch for it."""

    def build(**fields):
        (sources, mask), (targets, real) = padded_batch([7, 1, 30]), padded_batch([5, 9, 21], 1)
        labels = targets.masked_fill(real == 0, -100)
        batch = packed({"input_ids": sources, "attention_mask": mask, "labels": labels})
        return tiny_model(**fields).float().train(), batch

    return build


def loss_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), *(weight.grad for weight in model.parameters())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_model_learns_with_the_kernels_what_it_learns_without(
    model_and_batch, monkeypatch, precision
):
    model, batch = model_and_batch(dropout=0.0)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision is None else {"rtol": 0.1, "atol": 0.02}
    calls = []
    for name in ("attend_packed", "add_and_normalize_backward"):
        calls.append(count_calls(monkeypatch, name))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        found = loss_and_gradients(model, batch)
        monkeypatch.setattr(library_vaswani, "library", lambda: None)
        expected = loss_and_gradients(model, batch)
    assert [len(each) for each in calls] == [6, 10]  # of two encoder and two decoder layers
    torch.testing.assert_close(found, expected, **tolerance)


def count_calls(monkeypatch, name):
    """Return a list that grows by each call of a kernel."""
    calls, kernel = [], getattr(library(), name)
    monkeypatch.setattr(library(), name, lambda *args: (calls.append(name), kernel(*args)))
    return calls


def test_gradient_checkpointing_repeats_the_dropout(model_and_batch):
    model, batch = model_and_batch(dropout=0.3, attention_dropout=0.2)
    expected = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(loss_and_gradients(model, batch), expected, rtol=0, atol=0)


def test_evaluation_adds_and_normalises_by_torch(model_and_batch, monkeypatch):
    model, batch = model_and_batch()
    calls = count_calls(monkeypatch, "add_and_normalize")
    model.eval()(**batch)
    assert not calls
    model.train()(**batch)
    assert calls


def test_gradients_of_single_sentences_are_computed_at_once(tiny_model):
    model = tiny_model(dropout=0.0, tie_word_embeddings=False).train()
    parameters = dict(model.named_parameters())
    ids = torch.randint(3, model.config.vocab_size, (4, 5))

    def loss(parameters, row):
        call = {"input_ids": row[None], "labels": row[None], "skip_logits": False}
        return functional_call(model, parameters, (), call).loss

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    for number, row in enumerate(ids):
        for name, expected in grad(loss)(parameters, row).items():
            torch.testing.assert_close(found[name][number], expected)


def test_transforms_of_torch_func_compute_without_the_kernels(model_and_batch):
    model, batch = model_and_batch(dropout=0.0)
    batch["decoder_input_ids"] = batch.pop("labels").clamp(min=3)

    def loss_of(weights):
        return functional_call(model, weights, (), batch).logits.square().mean()

    model(**batch).logits.square().mean().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.testing.assert_close(grad(loss_of)(weights), expected, rtol=1e-4, atol=1e-6)


def test_derivatives_are_computed_forwards_without_the_kernels(tiny_model):
    model = tiny_model(dtype=torch.float32, dropout=0.0, attn_implementation="eager").train()
    states, direction = torch.randn(2, 3, 5, model.config.d_model).unbind()

    def loss(embeddings):
        return model(inputs_embeds=embeddings, labels=torch.full((3, 4), 5)).loss

    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(states, direction))
        tangent = forward_ad.unpack_dual(dual).tangent
    (gradient,) = torch.autograd.grad(loss(states.requires_grad_()), states)
    torch.testing.assert_close(tangent, (gradient * direction).sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_second_derivative_is_refused_with_the_way_out(model_and_batch, is_packed):
    model, batch = model_and_batch(dropout=0.0)
    batch["decoder_input_ids"] = batch.pop("labels").clamp(min=3)
    if not is_packed:
        batch = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    weight = model.model.decoder.layers[0].fc1.weight
    loss = model(**batch).logits.square().mean()
    with pytest.raises(RuntimeError, match="attn_implementation='eager'"):
        torch.autograd.grad(loss, weight, create_graph=True)
    loss = model(**batch).logits.square().mean()
    with pytest.raises(RuntimeError, match="attn_implementation='eager'"):
        torch.autograd.grad(loss, weight, torch.ones(2), is_grads_batched=True)
    model.set_attn_implementation("eager")
    loss = model(**batch).logits.square().mean()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), weight)
    assert second.abs().sum() > 0


def test_batched_gradients_are_computed_by_eager_layers(model_and_batch):
    model, batch = model_and_batch(dropout=0.3)
    model.set_attn_implementation("eager")
    batch["decoder_input_ids"] = batch.pop("labels").clamp(min=3)
    weight = model.model.decoder.layers[0].fc1.weight
    loss = model(**batch).logits.square().mean()
    (wanted,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (found,) = torch.autograd.grad(loss, weight, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack([wanted, 2 * wanted]))


def test_tensors_that_wait_elsewhere_for_the_backward_pass_give_the_same(model_and_batch):
    model, batch = model_and_batch(dropout=0.3)
    expected = loss_and_gradients(model, batch)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda tensor: tensor
    ):
        found = loss_and_gradients(model, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
