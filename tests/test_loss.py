"""The chunked loss equals the plain label-smoothed cross-entropy (5.4), with less memory."""

import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from vaswani.generation import library_vaswani
from vaswani.generation.library_vaswani import library
from vaswani.modeling import loss_vaswani
from vaswani.modeling.loss_vaswani import ChunkedCrossEntropy


def plain_loss(hidden_states, weight, targets, epsilon):
    """Return the loss of 5.4, token by token: (1 - eps) * nll(target) + eps * mean nll."""
    log_probabilities = (hidden_states @ weight.t()).log_softmax(dim=-1)
    nll = -log_probabilities.gather(1, targets[:, None]).squeeze(1)
    return ((1 - epsilon) * nll - epsilon * log_probabilities.mean(dim=-1)).sum()


def inputs(tokens, width, vocab_size, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    tensors = (tensor.to(dtype).requires_grad_() for tensor in (hidden_states, weight))
    return (*tensors, targets)


@pytest.fixture(
    params=[(1, 1), (120, 10**9), (10**9, 20), (10**9, 10**9)],
    ids=["a token a chunk", "some tokens a chunk", "two tokens in the cache", "all at once"],
)
def _chunks(request, monkeypatch):
    chunk, in_cache = request.param
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ON_CPU", chunk)
    monkeypatch.setattr(loss_vaswani, "_IN_CACHE", in_cache)


@pytest.fixture(params=["kernel", "torch"])
def _kernel_or_torch(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(library_vaswani, "library", lambda: None)
    elif library() is None:
        pytest.skip("this machine compiles no kernels")


@pytest.mark.usefixtures("_chunks", "_kernel_or_torch")
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradients_equal_the_plain_ones(epsilon, dtype, tolerance):
    hidden_states, weight, targets = inputs(11, 5, 7, dtype)
    values = []
    for loss in (plain_loss, ChunkedCrossEntropy.apply):
        total = loss(hidden_states, weight, targets, epsilon) / 11
        values.append((total, *torch.autograd.grad(total, (hidden_states, weight))))
    for expected, value in zip(*values, strict=True):
        torch.testing.assert_close(value, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("_chunks")
def test_gradients_are_those_of_finite_differences():
    hidden_states, weight, targets = inputs(4, 3, 5, torch.float64)
    assert torch.autograd.gradcheck(
        lambda states, matrix: ChunkedCrossEntropy.apply(states, matrix, targets, 0.1),
        (hidden_states, weight),
    )


@pytest.mark.usefixtures("_chunks")
def test_a_bias_of_the_head_is_part_of_loss_and_gradients():
    hidden_states, weight, targets = inputs(11, 5, 7, torch.float64)
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    total = ChunkedCrossEntropy.apply(hidden_states, weight, targets, 0.1, bias)
    # A bias equals one more column with an input that is always 1.
    widened = torch.cat([hidden_states, hidden_states.new_ones(11, 1)], dim=1)
    expected = plain_loss(widened, torch.cat([weight, bias[:, None]], dim=1), targets, 0.1)
    parameters = (hidden_states, weight, bias)
    gradients = [torch.autograd.grad(loss, parameters) for loss in (total, expected)]
    for value, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(value, plain, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.usefixtures("_kernel_or_torch")
def test_bfloat16_is_summed_in_float32():
    hidden_states, weight, targets = inputs(300, 8, 50, torch.bfloat16)
    total = ChunkedCrossEntropy.apply(hidden_states, weight, targets, 0.1)
    assert total.dtype == torch.float32
    exact = plain_loss(hidden_states.double(), weight.double(), targets, 0.1)
    torch.testing.assert_close(total.double(), exact, rtol=5e-3, atol=0)
    gradients = torch.autograd.grad(total, (hidden_states, weight))
    exact_gradients = torch.autograd.grad(exact, (hidden_states, weight))
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, expected, rtol=0.05, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Record the largest floating-point tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return output


def test_training_never_holds_the_logits_of_a_batch(tiny_model, monkeypatch):
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ON_CPU", 2**16)
    model = tiny_model(vocab_size=1000, dropout=0.0).train()
    labels = torch.randint(3, 1000, (8, 30))
    with LargestTensor() as largest:
        output = model(input_ids=labels, labels=labels)
        output.loss.backward()
    assert output.logits is None
    # The largest tensor is the vocabulary's matrix (1000, 16). The logits would have 240,000.
    assert largest.elements == 16_000


def gradients_of(model, forward, **batch):
    model.zero_grad()
    output = forward(**batch)
    output.loss.backward()
    return output, {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_training_holds_no_logits_and_has_the_same_gradients(tiny_model, bias):
    model = tiny_model(vocab_size=1000, dropout=0.0, lm_head_bias=bias).train()
    labels = torch.randint(3, 1000, (8, 30))
    labels[2, 10:] = -100
    batch = {"input_ids": labels.clamp(min=0)[:, :20], "labels": labels}
    sizes = []

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        sizes.extend(math.prod(value.shape) for value in values if isinstance(value, torch.Tensor))
        return graph.forward

    plain, expected = gradients_of(model, model, **batch)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    output, gradients = gradients_of(model, compiled, **batch)
    assert output.logits is None
    assert max(sizes) == 16_000  # the vocabulary's matrix; the logits would have 240,000
    torch.testing.assert_close(output.loss, plain.loss, atol=1e-12, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=0)


def test_compiled_training_under_autocast_computes_products_in_its_type(tiny_model, monkeypatch):
    types, loss_and_gradients = [], loss_vaswani._loss_and_gradients
    monkeypatch.setattr(
        loss_vaswani,
        "_loss_and_gradients",
        lambda *args: types.append(args[-1]) or loss_and_gradients(*args),
    )
    model = tiny_model(dtype=torch.float32, dropout=0.0).train()
    labels = torch.randint(3, 19, (4, 12))
    losses = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(forward(input_ids=labels, labels=labels).loss)
        losses[-1].backward()
    assert types == [torch.bfloat16] * 2
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


def test_a_second_derivative_is_refused_with_the_way_out(tiny_model):
    model = tiny_model(dropout=0.0, attn_implementation="eager").train()
    labels = torch.tensor([[5, 6, 7, 2]])
    weight = model.model.decoder.layers[0].fc1.weight
    loss = model(input_ids=labels, labels=labels).loss
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        torch.autograd.grad(loss, weight, create_graph=True)
    loss = model(input_ids=labels, labels=labels, skip_logits=False).loss
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), weight)
    assert second.abs().sum() > 0


@pytest.mark.parametrize(
    ("rows", "chunks"), [(200, [192, 48]), (60, [60] * 4), (64, [64] * 3 + [48])]
)
def test_chunks_in_bfloat16_are_filled_up_and_stay_large(monkeypatch, rows, chunks):
    hidden_states, weight, targets = inputs(240, 8, 50, torch.bfloat16)
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ON_CPU", rows * 100)
    monkeypatch.setattr(loss_vaswani, "_CHUNK_IN_CACHE", rows * 100)
    sizes, compute = [], loss_vaswani._loss_and_gradient
    monkeypatch.setattr(
        loss_vaswani,
        "_loss_and_gradient",
        lambda logits, *more: sizes.append(len(logits)) or compute(logits, *more),
    )
    found = ChunkedCrossEntropy.apply(hidden_states, weight, targets, 0.1)
    found.backward()
    assert sizes == chunks
    exact = [each.detach().double().requires_grad_() for each in (hidden_states, weight)]
    expected = plain_loss(*exact, targets, 0.1)
    expected.backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)
    for own, right in zip((hidden_states, weight), exact, strict=True):
        torch.testing.assert_close(own.grad.double(), right.grad, rtol=0.05, atol=0.05)


def test_training_and_evaluation_differ_in_logits_not_in_the_loss(tiny_model):
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    source = labels.clamp(min=0)
    model = tiny_model(dropout=0.0, label_smoothing=0.0)
    evaluated = model(input_ids=source, labels=labels)
    trained = model.train()(input_ids=source, labels=labels)
    assert evaluated.logits.shape == (2, 4, 19)
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, evaluated.loss, atol=1e-12, rtol=0)
    asked = model(input_ids=source, labels=labels, skip_logits=False)
    torch.testing.assert_close(asked.logits, evaluated.logits, atol=1e-12, rtol=0)
    skipped = model.eval()(input_ids=source, labels=labels, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, evaluated.loss, atol=1e-12, rtol=0)


def test_a_pruned_head_learns_in_every_update(tiny_model):
    model = tiny_model(tie_word_embeddings=False, share_encoder_decoder_embeddings=False).train()
    prune.l1_unstructured(model.lm_head, "weight", amount=0.3)
    for _ in range(2):
        model(input_ids=torch.tensor([[3, 4, 2]]), labels=torch.tensor([[5, 6, 2]])).loss.backward()
    gradient = model.lm_head.weight_orig.grad
    assert (gradient[model.lm_head.weight_mask == 0] == 0).all()
    assert (gradient[model.lm_head.weight_mask == 1] != 0).any()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_all_parameters_equal_those_of_the_plain_loss(tiny_model, bias):
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    gradients = []
    for skip_logits in (True, False):
        model = tiny_model(dropout=0.0, lm_head_bias=bias).train()
        model(input_ids=labels.clamp(min=0), labels=labels, skip_logits=skip_logits).loss.backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-12, rtol=0)


def test_under_autocast_it_is_as_close_to_exact_as_the_plain_loss(tiny_model):
    labels = torch.randint(3, 19, (4, 12), generator=torch.Generator().manual_seed(1))
    model = tiny_model(dtype=torch.float32, dropout=0.0).train()
    exact = model(input_ids=labels, labels=labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        losses = [
            model(input_ids=labels, labels=labels, skip_logits=skip).loss for skip in (True, False)
        ]
    for loss in losses:
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    losses[0].backward()
    assert model.lm_head.weight.grad.isfinite().all()


class Wrapped(nn.Module):
    """A head with an adapter beside it, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.out_features = base, base.out_features
        self.adapter = nn.Parameter(torch.zeros(base.in_features, dtype=base.weight.dtype))

    def forward(self, hidden_states):
        return self.base(hidden_states + self.adapter)


def test_an_adapter_around_the_head_is_not_bypassed(tiny_model):
    labels = torch.tensor([[5, 6, 7, 2]])
    model = tiny_model(dropout=0.0).train()
    model.lm_head = Wrapped(model.lm_head)
    output = model(input_ids=labels, labels=labels)
    assert output.logits is not None
    output.loss.backward()
    assert model.lm_head.adapter.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_that_its_bias_bans_has_no_part_in_a_loss_without_smoothing(tiny_model, dtype):
    model = tiny_model(lm_head_bias=True, label_smoothing=0.0, dropout=0.0, dtype=dtype).train()
    model.lm_head.bias.data[1] = -torch.inf
    batch = {"input_ids": torch.tensor([[4, 5, 2]]), "labels": torch.tensor([[6, 7, 2]])}
    losses = [model(**batch, skip_logits=skip).loss for skip in (True, False)]
    torch.testing.assert_close(*losses)
    assert losses[0].isfinite()


def test_a_batch_without_real_targets_costs_nothing_and_has_zero_gradients(tiny_model):
    labels = torch.full((2, 3), -100)
    model = tiny_model().train()
    loss = model(input_ids=torch.tensor([[5, 2], [6, 2]]), labels=labels).loss
    loss.backward()
    assert loss == 0
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
    )


@pytest.mark.usefixtures("_kernel_or_torch")
def test_loss_of_many_tokens_equals_torchs_cross_entropy():
    hidden_states, weight, targets = inputs(3000, 16, 4000, torch.float32)
    with torch.no_grad():
        total = ChunkedCrossEntropy.apply(hidden_states, weight, targets, 0.1)
        logits = hidden_states @ weight.t()
        expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


@pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")
class TestKernel:
    """The compiled loss of rows of logits."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocab_size", [1, 15, 33, 1024, 5003])
    def test_losses_and_gradients_are_those_of_autograd(self, vocab_size, dtype, with_threads):
        torch.manual_seed(0)
        logits = (10 * torch.randn(9, vocab_size)).to(dtype)
        targets = torch.randint(0, vocab_size, (9, 1))
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, targets[:, 0], reduction="none", label_smoothing=0.1)
        expected.sum().backward()
        for threads in (1, 2):
            found = logits.clone()
            losses = with_threads(
                threads, lambda rows=found: loss_vaswani._compiled_losses(rows, targets, 0.1)
            )
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-5)
            rounding = 1e-6 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(found.double(), exact.grad, rtol=rounding, atol=1e-6)

    def test_a_row_with_nan_has_a_loss_of_nan_and_others_have_not(self):
        logits = torch.randn(3, 41)
        logits[1, 40] = torch.nan
        losses = loss_vaswani._compiled_losses(logits, torch.zeros(3, 1, dtype=torch.long), 0.1)
        assert losses.isnan().tolist() == [False, True, False]
        assert logits.isnan().any(dim=1).tolist() == [False, True, False]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_logits_far_below_the_highest_have_gradients_of_zero(self, dtype):
        logits = torch.full((2, 5003), -200.0, dtype=dtype)
        logits[:, [7, 9]] = 0
        logits[1, 40] = -torch.inf
        losses = loss_vaswani._compiled_losses(logits, torch.tensor([[7], [9]]), 0.0)
        assert losses.tolist() == pytest.approx([math.log(2)] * 2)
        others = torch.ones(5003, dtype=torch.bool).index_fill_(0, torch.tensor([7, 9]), False)
        assert (logits[:, others] == 0).all()
        assert logits[0, [7, 9]].tolist() == [-0.5, 0.5]

    def test_a_row_of_minus_infinity_has_a_loss_and_gradients_of_nan(self):
        logits = torch.full((2, 41), -torch.inf)
        logits[1] = 0
        losses = loss_vaswani._compiled_losses(logits, torch.zeros(2, 1, dtype=torch.long), 0.1)
        assert losses.isnan().tolist() == [True, False]
        assert logits.isnan().all(dim=1).tolist() == [True, False]

    def test_a_recorded_graph_holds_the_loss(self):
        states, weight, targets = (each.detach() for each in inputs(6, 4, 9, torch.float32))

        def loss(states):
            return loss_vaswani._loss_and_gradient(
                states @ weight.t(), targets[:, None], 0.1, torch.float32
            )

        graph = make_fx(loss)(states)
        torch.testing.assert_close(graph(states + 1), loss(states + 1))

    def test_targets_may_lie_apart_in_memory(self):
        states, weight, targets = inputs(6, 4, 9, torch.float32)
        apart = torch.stack([targets, targets + 1], dim=1)[:, 0]
        assert not apart.is_contiguous()
        totals = [ChunkedCrossEntropy.apply(states, weight, ids, 0.1) for ids in (targets, apart)]
        assert torch.equal(*totals)

    @pytest.mark.parametrize("target", [-1, 41])
    def test_a_target_outside_the_vocabulary_changes_nothing(self, target):
        logits = torch.randn(2, 41)
        before, targets = logits.clone(), torch.tensor([[3], [target]])
        assert loss_vaswani._compiled_losses(logits, targets, 0.1) is None
        assert torch.equal(logits, before)
