"""R-Drop has the loss and the gradient of Liang et al. (2021), also in the trainer."""

import pytest
import torch
from conftest import SIZES
from test_batching import collator, make_trainer, weights
from torch.nn.functional import cross_entropy, kl_div
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments
from vaswani.modeling import loss_vaswani
from vaswani.modeling.loss_vaswani import chunked_cross_entropy, divergence
from vaswani.training.r_drop import repeated_batch

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

MARIAN = MarianConfig(
    vocab_size=8, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0, eos_token_id=1,
    decoder_start_token_id=0, encoder_attention_heads=1, decoder_attention_heads=1,
)  # fmt: skip
LABELS = torch.tensor([[4, 2, 5, -100], [1, -100, -100, -100], [0, 6, 3, 2]])
VOCAB_SIZE, WIDTH = 7, 5


def states_of_two_passes(dtype=torch.float64):
    """Return hidden states, and the weight and the bias that make their logits."""
    shapes = (2 * len(LABELS), LABELS.shape[1], WIDTH), (VOCAB_SIZE, WIDTH), (VOCAB_SIZE,)
    tensors = (1.5 * torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def r_drop(states, weight, bias, labels, alpha, epsilon):
    """Return half of equation 4, as the model computes it."""
    both = torch.cat((labels, labels))
    return chunked_cross_entropy(states, weight, both, epsilon, bias, alpha) / 2


def as_written(logits, labels, alpha, epsilon):
    """Return half of equation 4, with torch's label-smoothed loss (5.4)."""
    first, second = logits.chunk(2)
    real = labels != -100
    losses = sum(
        cross_entropy(side[real], labels[real], label_smoothing=epsilon, reduction="sum")
        for side in (first, second)
    )
    p, q = (side[real].log_softmax(dim=-1) for side in (first, second))
    divergences = sum(
        kl_div(of, to, log_target=True, reduction="sum") for to, of in ((p, q), (q, p))
    )
    return (losses + alpha * divergences / 2) / 2


@pytest.mark.parametrize("chunk", [1, 3 * VOCAB_SIZE * 8, 2**27])
@pytest.mark.parametrize("in_cache", [1, 3 * VOCAB_SIZE, 2**18])
@pytest.mark.parametrize(("alpha", "epsilon"), [(0, 0), (0, 0.1), (5, 0), (2, 0.1)])
def test_loss_and_gradients_are_those_of_the_formula(monkeypatch, alpha, epsilon, in_cache, chunk):
    monkeypatch.setattr(loss_vaswani, "_IN_CACHE", in_cache)
    monkeypatch.setattr(loss_vaswani, "_CHUNK_ON_CPU", chunk)
    inputs = states, weight, bias = states_of_two_passes()
    ours = r_drop(*inputs, LABELS, alpha, epsilon)
    theirs = as_written(states @ weight.t() + bias, LABELS, alpha, epsilon)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, inputs) for loss in (ours, theirs)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    assert gradients[0][0][:, 3][:2].abs().sum() == 0  # at padding


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(
        lambda *inputs: r_drop(*inputs, LABELS, 2.0, 0.1), states_of_two_passes()
    )


def test_logits_of_16_bits_are_computed_in_32():
    logits = 3 * torch.randn(2 * len(LABELS), LABELS.shape[1], VOCAB_SIZE)
    logits = logits.bfloat16().requires_grad_()
    identity = torch.eye(VOCAB_SIZE, dtype=torch.bfloat16)  # its products are exact
    loss = r_drop(logits, identity, None, LABELS, 2.0, 0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = as_written(exact, LABELS, 2.0, 0.1)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), expected, atol=0, rtol=1e-6)
    (expected,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-6, rtol=2**-8)


def test_products_of_16_bits_are_summed_in_32():
    inputs = states_of_two_passes(torch.bfloat16)
    loss = r_drop(*inputs, LABELS, 2.0, 0.1)
    assert loss.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = as_written(exact[0] @ exact[1].t() + exact[2], LABELS, 2.0, 0.1)
    torch.testing.assert_close(loss.double(), expected, atol=0, rtol=1e-2)
    gradients = torch.autograd.grad(loss, inputs)
    for gradient, value in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), value, atol=0.1, rtol=0.02)


def test_a_batch_without_tokens_has_no_loss():
    inputs = states_of_two_passes()
    loss = r_drop(*inputs, torch.full_like(LABELS, -100), 2.0, 0.1)
    assert loss == 0
    assert all(gradient.abs().sum() == 0 for gradient in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("way", ["logits", pytest.param("compiled", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_the_same_with_logits_and_compiled(tiny_model, padded_batch, way):
    model = tiny_model(dropout=0.0).train()
    source, mask = padded_batch([5, 3, 7, 2, 7, 4])  # the passes differ, as with dropout
    batch = {"input_ids": source, "attention_mask": mask, "labels": torch.cat((LABELS, LABELS))}
    expected = model(**batch, r_drop=2.0)
    assert expected.loss > model(**batch, r_drop=0.0).loss + 1e-3
    other = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    found = other(**batch, r_drop=2.0, skip_logits=way == "compiled")
    assert (found.logits is None, expected.logits) == (way == "compiled", None)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-12, rtol=0)
    for output in (found, expected):
        output.gradients = torch.autograd.grad(output.loss, tuple(model.parameters()))
    for gradient, value in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(gradient, value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_dropout_two_passes_agree_and_train_as_one(tmp_path, accumulate):
    trained = []
    for alpha in (0.0, 5.0):
        torch.manual_seed(0)
        config = VaswaniConfig(**SIZES, dropout=0.0)
        trainer = make_trainer(
            tmp_path,
            model=VaswaniForConditionalGeneration(config).double(),
            r_drop=alpha,
            gradient_accumulation_steps=accumulate,
        )
        trainer.train()
        trained.append(weights(trainer))
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, atol=1e-10, rtol=0)


def divergence_of(model, batch):
    """Return the divergence of two passes with dropout, per token."""
    labels = batch["labels"]
    inputs = repeated_batch({name: value for name, value in batch.items() if name != "labels"})
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(
        torch.cat((labels, labels))
    )
    with torch.no_grad():
        logits = model.train()(**inputs).logits
    return divergence(logits, torch.cat((labels, labels))) / (labels != -100).sum()


@pytest.mark.slow
def test_passes_of_a_model_trained_with_it_agree_more(tmp_path):
    found = []
    for alpha in (0.0, 5.0):
        trainer = make_trainer(
            tmp_path, r_drop=alpha, dropout=0.3, max_steps=150, learning_rate=1e-2
        )
        trainer.train()
        batch = collator(trainer.train_dataset.to_list())
        torch.manual_seed(1)
        found.append(sum(divergence_of(trainer.model, batch) for _ in range(20)))
    assert found[1] < 0.5 * found[0]


def test_the_evaluation_loss_is_that_of_one_pass_without_smoothing(tmp_path):
    figures = []
    for alpha in (0.0, 5.0):
        trainer = make_trainer(tmp_path, r_drop=alpha)
        figures.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert figures[0] == figures[1]


def test_the_trainers_loss_is_the_formula_over_all_batches_of_an_update(tmp_path):
    """The passes have dropout, so their predictions differ."""
    trainer = make_trainer(tmp_path, r_drop=3.0, dropout=0.3)
    model = trainer.model.train()
    parts = [collator(trainer.train_dataset.select(rows)) for rows in (range(5), range(5, 8))]
    tokens = sum((part["labels"] != -100).sum() for part in parts)
    ours, expected, smoothing = 0.0, 0.0, model.config.label_smoothing
    for part in parts:
        kept = dict(part)
        torch.manual_seed(0)
        loss = trainer.compute_loss(model, part, num_items_in_batch=tokens)
        assert part.keys() == kept.keys()
        ours += loss
        torch.manual_seed(0)
        logits = model(**repeated_batch(part), skip_logits=False).logits
        expected += as_written(logits, part["labels"], 3.0, smoothing) / tokens
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    one = as_written(logits, part["labels"], 0.0, smoothing) / tokens
    assert loss > one + 1e-3
    alone = trainer.compute_loss(model, parts[0])
    assert alone > 1.2 * trainer.compute_loss(model, parts[0], num_items_in_batch=tokens)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"compute_loss_func": print}, "leave out compute_loss_func"),
        ({"label_smoothing_factor": 0.2}, "smoothed by the configuration's label_smoothing"),
        ({"model": MarianMTModel(MARIAN)}, "not with MarianMTModel"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_trainer(tmp_path, r_drop=1.0, **changes)


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Seq2SeqTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="a process for each of the 2 GPUs"):
        make_trainer(tmp_path, r_drop=1.0)


@pytest.mark.parametrize("alpha", [-1.0, float("nan"), float("inf")])
def test_alpha_is_a_number_that_is_not_negative(tmp_path, alpha):
    with pytest.raises(ValueError, match=rf"r_drop must be 0 or more, got {alpha}"):
        make_trainer(tmp_path, r_drop=alpha)
