"""The loss of a forward pass: its targets, its divisor, and updates in portions."""

import pytest
import torch
from networks import EXACT, gradients
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


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
