"""R-Drop has the loss and the gradient of Liang et al. (2021), also in the trainer."""

import pytest
import torch
from conftest import SIZES
from test_batching import collator, make_trainer, weights
from torch.nn.functional import cross_entropy, kl_div
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments
from vaswani.training import r_drop
from vaswani.training.r_drop import RDropLoss, twice

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

MARIAN = MarianConfig(
    vocab_size=8, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0, eos_token_id=1,
    decoder_start_token_id=0, encoder_attention_heads=1, decoder_attention_heads=1,
)  # fmt: skip
LABELS = torch.tensor([[4, 2, 5, -100], [1, -100, -100, -100], [0, 6, 3, 2]])
VOCAB_SIZE = 7


def logits_of_two_passes(dtype=torch.float64):
    logits = 3 * torch.randn(2 * len(LABELS), LABELS.shape[1], VOCAB_SIZE, dtype=torch.float64)
    return logits.to(dtype).requires_grad_()


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


@pytest.mark.parametrize("in_cache", [1, 3 * VOCAB_SIZE, 2**18])
@pytest.mark.parametrize(("alpha", "epsilon"), [(0, 0), (0, 0.1), (5, 0), (2, 0.1)])
def test_loss_and_gradient_are_those_of_the_formula(monkeypatch, alpha, epsilon, in_cache):
    monkeypatch.setattr(r_drop, "_IN_CACHE", in_cache)
    logits = logits_of_two_passes()
    ours, theirs = (loss(logits, LABELS, alpha, epsilon) for loss in (RDropLoss.apply, as_written))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    assert gradients[0][:, 3][:2].abs().sum() == 0  # at padding


def test_gradient_is_that_of_finite_differences():
    def loss(logits):
        return RDropLoss.apply(logits, LABELS, 2.0, 0.1)

    assert torch.autograd.gradcheck(loss, logits_of_two_passes())


def test_logits_of_16_bits_are_computed_in_32():
    logits = logits_of_two_passes(torch.bfloat16)
    loss = RDropLoss.apply(logits, LABELS, 2.0, 0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = as_written(exact, LABELS, 2.0, 0.1)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), expected, atol=0, rtol=1e-6)
    (expected,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-6, rtol=2**-8)


def test_a_batch_without_tokens_has_no_loss():
    logits = logits_of_two_passes()
    loss = RDropLoss.apply(logits, torch.full_like(LABELS, -100), 2.0, 0.1)
    assert loss == 0
    assert torch.autograd.grad(loss, logits)[0].abs().sum() == 0


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


def divergence(model, batch):
    """Return the divergence of two passes with dropout, per token."""
    labels = batch["labels"]
    inputs = twice({name: value for name, value in batch.items() if name != "labels"})
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(
        torch.cat((labels, labels))
    )
    with torch.no_grad():
        logits = model.train()(**inputs).logits
        apart = [RDropLoss.apply(logits, labels, alpha, 0.0) for alpha in (2.0, 0.0)]
    return (apart[0] - apart[1]) / (labels != -100).sum()


def test_passes_of_a_model_trained_with_it_agree_more(tmp_path):
    found = []
    for alpha in (0.0, 5.0):
        trainer = make_trainer(
            tmp_path, r_drop=alpha, dropout=0.3, max_steps=150, learning_rate=1e-2
        )
        trainer.train()
        batch = collator(trainer.train_dataset.to_list())
        torch.manual_seed(1)
        found.append(sum(divergence(trainer.model, batch) for _ in range(20)))
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
    ours, expected, seen = 0.0, 0.0, []
    hook = model.register_forward_hook(lambda _, args, outputs: seen.append(outputs))
    for part in parts:
        kept = dict(part)
        loss = trainer.compute_loss(model, part, num_items_in_batch=tokens)
        outputs = seen[-1]
        assert part.keys() == kept.keys()
        ours += loss
        smoothing = model.config.label_smoothing
        expected += as_written(outputs.logits, part["labels"], 3.0, smoothing) / tokens
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    hook.remove()
    one = as_written(outputs.logits, part["labels"], 0.0, smoothing) / tokens
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
