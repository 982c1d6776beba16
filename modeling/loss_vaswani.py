"""Label-smoothed cross-entropy (section 5.4) that never holds the logits of a whole batch.

R-Drop (Liang et al., 2021) adds the divergence of two passes with dropout over the same tokens.

Shapes: N target tokens, P passes over them (1, or 2 for R-Drop), D = d_model, V entries of the
target vocabulary, C tokens of a chunk.
"""

import re
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ..generation.library_vaswani import (
    FLOATS,
    address,
    can_train,
    is_transformed,
    library,
    threads_of_training,
)
from .training_products_vaswani import multiply_matrices

# Most bytes of a chunk's logits.
_CHUNK_ON_CPU, _CHUNK_ELSEWHERE = 2**27, 2**28
# Smaller chunks stay in a CPU's cache. Each chunk also adds to the gradient of the whole vocabulary
# matrix. A chunk therefore has at least 2 D tokens, if that many fit the limit above.
_CHUNK_IN_CACHE = 2**24
_MULTIPLE = 64  # rows of a chunk are a multiple of this, where a new number of rows costs time
_IN_CACHE = 2**18  # logits that fit the cache of a CPU core


def check_labels(labels: torch.Tensor, count: int, advice: str) -> None:
    """Check that labels on the CPU are numbers below `count`, or -100 (ignored).

    Args:
        labels: integers of any shape.
        count: entries of the vocabulary, or classes.
        advice: follows the count in the error.

    Raises:
        ValueError: a label is neither -100 nor such a number.
    """
    if not are_readable(labels):
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= count))]
    if wrong.numel():
        raise ValueError(f"Label {wrong[0].item()} is outside the {count} {advice}")


def are_readable(labels: torch.Tensor) -> bool:
    """Tell whether Python can branch on the values of labels, without waiting for a GPU.

    A compiler or torch.func cannot trace such a branch.
    """
    return labels.is_cpu and not torch.compiler.is_compiling() and not is_transformed()


def chunked_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    epsilon: float,
    bias: torch.Tensor | None = None,
    r_drop: float | None = None,
) -> torch.Tensor:
    """Sum the loss of `targets` (...) after `hidden_states` (..., D), without targets of -100.

    With `r_drop`, both halves have the same targets, and the sum gains `r_drop` / 2 times the
    divergence of the halves' predictions p and q, KL(p, q) + KL(q, p).
    """
    if torch.compiler.is_compiling():
        dtype = _product_dtype(hidden_states)
        return _loss_operator(hidden_states, weight, targets, epsilon, bias, r_drop, dtype)[0]
    real = targets != -100
    return ChunkedCrossEntropy.apply(
        hidden_states[real], weight, targets[real], epsilon, bias, r_drop
    )


def divergence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum KL(p, q) + KL(q, p) of the predictions of two passes, without targets of -100.

    Logits (..., V) and targets (...) have the first pass in their first half.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = logits[targets != -100].to(exact).log_softmax(dim=-1).chunk(2)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - eps) * nll(target) + eps * mean over the vocabulary of nll.

    R-Drop adds `r_drop` / 2 times the divergence of two passes.

    Logits exist for one chunk of tokens at a time. The forward pass therefore computes the
    gradients too, and the backward pass only scales them. Without R-Drop, the gradient of the
    logits is softmax(logits) minus the smoothed target. Products have the dtype of autocast or of
    the hidden states; sums have at least float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        epsilon: float,
        bias: torch.Tensor | None = None,
        r_drop: float | None = None,
    ) -> torch.Tensor:
        """Compute the loss of `targets` (P * N,) after `hidden_states` (P * N, D).

        Logits are `hidden_states` times `weight` (V, D), plus `bias` (V,) if there is one.
        """
        dtype = _product_dtype(hidden_states)
        total, *gradients = _loss_and_gradients(
            hidden_states, weight, targets, epsilon, bias, r_drop, dtype
        )
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that the forward pass computed."""
        states, weight, bias = _scaled(ctx.saved_tensors, scale)
        return states, weight, None, None, bias, None


def _scaled(gradients: tuple[Any, ...], scale: torch.Tensor) -> list[torch.Tensor | None]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The loss without logits has no second derivative (create_graph=True): pass "
            "skip_logits=False to the model."
        )
    return [
        None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in gradients
    ]


def _product_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    device, dtype = hidden_states.device.type, hidden_states.dtype
    autocast = torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else dtype


def _loss_and_gradients(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    epsilon: float,
    bias: torch.Tensor | None,
    r_drop: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the summed loss, and the gradients of hidden states, weight and bias."""
    passes = 1 if r_drop is None else 2
    hidden_states, targets = hidden_states.unflatten(0, (passes, -1)), targets.chunk(passes)[0]
    device, exact = hidden_states.device, torch.promote_types(hidden_states.dtype, torch.float32)
    total = torch.zeros((), dtype=exact, device=device)
    hidden_gradient = torch.empty_like(hidden_states)
    weight_gradient = torch.zeros(weight.shape, dtype=exact, device=device)
    bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=exact)
    with torch.autocast(device.type, enabled=False):
        states, matrix = hidden_states.to(dtype), weight.to(dtype)
        size = max(_rows_of_chunk(matrix) // passes, 1)
        # A bfloat16 product with a new number of rows starts slowly in oneDNN. Rows of zeros keep
        # the number a multiple.
        multiple = _MULTIPLE if matrix.is_cpu and dtype == torch.bfloat16 else 1
        if size > multiple:
            size -= size % multiple
        # Chunks share their buffers, because the first use of new memory takes time.
        rows = passes * min(size, len(targets))
        buffer = states.new_empty(rows + -rows % multiple, len(weight))
        product = None if dtype == exact else torch.empty_like(matrix)
        for chunk in _slices(len(targets), size):
            inputs = states[:, chunk].flatten(0, 1)
            if spare := -len(inputs) % multiple:
                inputs = F.pad(inputs, (0, 0, 0, spare))
            filled = multiply_matrices(inputs, matrix.t(), buffer[: len(inputs)])
            if bias is not None:
                filled += bias.to(dtype)
            logits = filled[: passes * len(targets[chunk])]  # (P * C, V)
            filled[len(logits) :] = 0
            if r_drop is None:
                total += _loss_and_gradient(logits, targets[chunk, None], epsilon, exact)
            else:
                first, second = logits.chunk(2)
                total += _loss_and_gradient_of_two(
                    first, second, targets[chunk, None], epsilon, r_drop, exact
                )
            of_states = multiply_matrices(filled, matrix)[: len(logits)]
            hidden_gradient[:, chunk] = of_states.unflatten(0, (passes, -1))
            if product is None:
                multiply_matrices(filled.t(), inputs, weight_gradient, adds=True)
            else:
                weight_gradient += multiply_matrices(filled.t(), inputs, product)
            if bias_gradient is not None:
                bias_gradient += filled.sum(dim=0, dtype=exact)
    if bias is not None and bias_gradient is not None:
        bias_gradient = bias_gradient.to(bias.dtype)
    return total, hidden_gradient.flatten(0, 1), weight_gradient.to(weight.dtype), bias_gradient


def _rows_of_chunk(matrix: torch.Tensor) -> int:
    """Return how many tokens a chunk has at most, for a vocabulary matrix (V, D)."""
    bytes_of_token = len(matrix) * matrix.itemsize
    if not matrix.is_cpu:
        return max(_CHUNK_ELSEWHERE // bytes_of_token, 1)
    rows = max(_CHUNK_IN_CACHE // bytes_of_token, 2 * matrix.shape[1])
    return max(min(rows, _CHUNK_ON_CPU // bytes_of_token), 1)


# A compiled graph holds the loss as one operator. The graph cannot hold the loop, because the
# number of chunks depends on the data. Each copy of this file names its own operator. Otherwise, a
# second operator of the same name would replace the first. CUDA graphs need fixed shapes.
@torch.library.custom_op(
    f"vaswani::loss_{re.sub(r'[^a-zA-Z0-9]', '_', __name__)}",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _loss_operator(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    epsilon: float,
    bias: torch.Tensor | None,
    r_drop: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and its gradients; without a bias, the last one has no elements."""
    real = targets != -100
    total, of_real_tokens, weight_gradient, bias_gradient = _loss_and_gradients(
        hidden_states[real], weight, targets[real], epsilon, bias, r_drop, dtype
    )
    hidden_gradient = torch.zeros_like(hidden_states)
    hidden_gradient[real] = of_real_tokens
    if bias_gradient is None:
        bias_gradient = weight.new_empty(0)
    return total, hidden_gradient, weight_gradient, bias_gradient


@_loss_operator.register_fake
def _outputs_of_loss_operator(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: Any,
    epsilon: Any,
    bias: Any,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    exact = torch.promote_types(hidden_states.dtype, torch.float32)
    return (
        hidden_states.new_empty((), dtype=exact),
        torch.empty_like(hidden_states),
        torch.empty_like(weight),
        weight.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.has_bias = inputs[4] is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, scale: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    states, weight, bias = _scaled(ctx.saved_tensors, scale)
    return states, weight, None, None, bias if ctx.has_bias else None, None, None


_loss_operator.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, epsilon: float, exact: torch.dtype
) -> torch.Tensor:
    """Sum the loss of `targets` (C, 1), and replace `logits` (C, V) by its gradient, in place."""
    losses = _compiled_losses(logits, targets, epsilon)
    if losses is not None:
        return losses.sum().to(exact)
    total = torch.zeros((), dtype=exact, device=logits.device)
    tokens, vocab_size = logits.shape
    # Parts have copies in `exact`: they fit a CPU's cache, or spare memory elsewhere.
    for part in _slices(tokens, _IN_CACHE // vocab_size if logits.is_cpu else -(-tokens // 4)):
        values, gold = logits[part].to(exact), targets[part]  # a view if the dtype is exact
        at_target, at_average = values.gather(1, gold), values.mean(dim=-1, keepdim=True)
        highest, probs = values.amax(dim=-1, keepdim=True), values.softmax(dim=-1)
        log_sum = highest - probs.amax(dim=-1, keepdim=True).log()  # of exp(values)
        total += (log_sum - (1 - epsilon) * at_target).sum()
        if epsilon:  # without smoothing, a logit may be minus infinity
            total -= epsilon * at_average.sum()
        probs.sub_(epsilon / vocab_size)
        probs.scatter_add_(1, gold, probs.new_full(gold.shape, epsilon - 1))
        logits[part] = probs
    return total


def _compiled_losses(
    logits: torch.Tensor, targets: torch.Tensor, epsilon: float
) -> torch.Tensor | None:
    """Compute the losses (C,) by a kernel, and replace `logits` (C, V) by their gradients.

    Return None if the kernel cannot compute them, such as on a GPU, or if a program records
    torch's operators, as `make_fx` does.
    """
    if not (can_train(logits) and targets.is_cpu and targets.dtype == torch.int64):
        return None
    tokens, vocab_size = logits.shape
    targets, threads = targets.contiguous(), min(threads_of_training(), tokens)
    losses = torch.empty(tokens, dtype=torch.float64, device="cpu")
    room = None if logits.dtype == torch.float32 else torch.empty(threads, vocab_size, **FLOATS)
    computed = library().smooth_loss(
        *(address(logits), tokens, vocab_size, address(targets), epsilon),
        *(None if room is None else address(room), address(losses), threads),
    )
    return losses if computed else None


def _loss_and_gradient_of_two(
    first: torch.Tensor,
    second: torch.Tensor,
    targets: torch.Tensor,
    epsilon: float,
    r_drop: float,
    exact: torch.dtype,
) -> torch.Tensor:
    """Sum the loss of R-Drop, and replace the logits (C, V) of both passes by their gradients."""
    total = torch.zeros((), dtype=exact, device=first.device)
    tokens, vocab_size = first.shape
    weight = r_drop / 2
    for part in _slices(tokens, _IN_CACHE // vocab_size if first.is_cpu else -(-tokens // 4)):
        gold = targets[part]
        log_p, log_q = (side[part].to(exact).log_softmax(dim=-1) for side in (first, second))
        for log_probs in (log_p, log_q):
            at_target, at_average = log_probs.gather(1, gold), log_probs.mean(dim=-1)
            total -= (1 - epsilon) * at_target.sum() + epsilon * at_average.sum()
        ratio = log_p - log_q
        p, q = log_p.exp_(), log_q.exp_()
        for side, probs, others, sign in ((first, p, q, 1), (second, q, p, -1)):
            kl = sign * (probs * ratio).sum(dim=-1, keepdim=True)  # of `probs` to `others`
            total += weight * kl.sum()
            # The gradient of KL(p, q) by the logits of p is p * (ratio - KL(p, q)), and that of
            # KL(q, p) is p - q.
            slope = torch.add(1 + weight * (1 - kl), ratio, alpha=sign * weight).mul_(probs)
            slope.sub_(others, alpha=weight).sub_(epsilon / vocab_size)
            slope.scatter_add_(1, gold, slope.new_full(gold.shape, epsilon - 1))
            side[part] = slope
    return total


def _slices(number: int, size: int) -> list[slice]:
    """Cut `number` rows into slices of `size`, or of 1 if `size` is less."""
    return [slice(start, start + max(size, 1)) for start in range(0, number, max(size, 1))]
