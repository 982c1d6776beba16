"""The best next tokens of the hypotheses of a beam search, from their logits (section 6.1).

On a CPU, compiled kernels find them in float32. Elsewhere, torch's operators do.

Shapes: B sentences, K hypotheses of each (the beam), R hypotheses with logits, C candidates of a
sentence, V entries of the target vocabulary.
"""

import torch

from .choice_vaswani import best_candidates
from .library_vaswani import can_compute

BLOCK = 512  # entries of the vocabulary that share one maximum
_IN_CACHE = 2**18  # logits that fit the cache of a CPU core
_ON_STACK = 2**14  # candidates of a sentence for which a kernel has room


def best_continuations(
    logits: torch.Tensor,
    running: torch.Tensor,
    count: int,
    open_rows: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the C best next tokens of each sentence, over all its hypotheses.

    The logits are read once, for the log-sum-exp of each row and the maximum of each block of
    tokens. The C best tokens lie in the C blocks with the best maxima.

    Args:
        logits: (B * K, V), or (R, V).
        running: (B, K) log-probabilities of the hypotheses.
        count: C.
        open_rows: (R,) the hypotheses that have logits, among B * K; None means all. The others get
            no continuations. If fewer than C remain, scores of -inf fill up the result.
        banned: tokens that get -inf. `logits` may be changed in place. The other tokens keep their
            probabilities.

    Returns:
        Log-probabilities, best first; the hypotheses that they continue; the tokens: (B, C) each.
    """
    sentences, beams = running.shape
    if not len(logits):
        nothing = torch.zeros(sentences, count, dtype=torch.long, device=logits.device)
        return running.new_full(nothing.shape, -torch.inf), nothing, nothing
    if has_kernel(logits.shape[1], beams, count) and can_compute(logits, running):
        return best_candidates(logits, BLOCK, running, count, open_rows, banned)
    blocks = logits.shape[1] // BLOCK
    if beams * blocks < 2 * count:
        return _best_of_all(logits, running, count, open_rows, banned)
    log_sums, maxima = _log_sums_and_maxima(logits, blocks, running.dtype)
    if banned is not None:
        logits[:, banned] = -torch.inf
        changed = (banned[banned < blocks * BLOCK] // BLOCK).unique()
        in_changed = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))[:, changed]
        maxima[:, changed] = in_changed.amax(dim=2).to(maxima.dtype)
    # log P(continuation) = logit + offset of its hypothesis
    if open_rows is None:
        open_rows = torch.arange(len(logits), device=logits.device)
    offset = running.new_full((sentences * beams,), -torch.inf)
    offset[open_rows] = running.flatten()[open_rows] - log_sums
    place = torch.zeros_like(offset, dtype=torch.long)  # rows of logits
    place[open_rows] = torch.arange(len(open_rows), device=place.device)
    best = maxima[place] + offset[:, None]  # (B * K, blocks)
    best = best.view(sentences, -1).topk(count, sorted=False).indices  # (B, C)
    return _best_in_blocks(logits, offset, place, best, beams)


def has_kernel(vocabulary: int, beams: int, count: int) -> bool:
    """Tell whether the compiled kernel can find C candidates among K hypotheses of V tokens."""
    return beams * (vocabulary // BLOCK) >= 2 * count and count <= _ON_STACK


def _best_of_all(
    logits: torch.Tensor,
    running: torch.Tensor,
    count: int,
    open_rows: torch.Tensor | None,
    banned: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the best continuations without blocks, for small vocabularies."""
    vocabulary = logits.shape[1]
    scores = logits.to(running.dtype).log_softmax(dim=-1)
    if open_rows is not None:
        all_scores = running.new_full((running.numel(), vocabulary), -torch.inf)
        scores = all_scores.index_copy_(0, open_rows, scores)
    if banned is not None:
        scores[:, banned] = -torch.inf
    scores = scores.view(*running.shape, -1) + running[:, :, None]
    scores, best = scores.flatten(1).topk(count)
    return scores, best // vocabulary, best % vocabulary


def _best_in_blocks(
    logits: torch.Tensor, offset: torch.Tensor, place: torch.Tensor, best: torch.Tensor, beams: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the best continuations in the blocks `best` (B, C), which count through hypotheses.

    The last block of the vocabulary may be shorter. It is always searched.
    """
    sentences, count = best.shape
    vocabulary = logits.shape[1]
    blocks = vocabulary // BLOCK
    hypothesis, block = best // blocks, best % blocks
    row = hypothesis + beams * torch.arange(sentences, device=best.device)[:, None]
    inside = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    inside = inside[place[row], block] + offset[row][:, :, None]  # (B, C, block)
    rest = logits[:, blocks * BLOCK :][place] + offset[:, None]
    scores = torch.cat((inside.flatten(1), rest.view(sentences, -1)), dim=1)
    scores, chosen = scores.topk(count)
    # A chosen score comes from one of the C blocks, or from the tokens after the last whole block.
    after = chosen - count * BLOCK
    in_rest, width = after >= 0, max(1, rest.shape[1])
    nth = (chosen // BLOCK).masked_fill_(in_rest, 0)
    hypotheses = torch.where(in_rest, after // width, hypothesis.gather(1, nth))
    first = torch.where(in_rest, blocks * BLOCK, block.gather(1, nth) * BLOCK)
    return scores, hypotheses, first + torch.where(in_rest, after % width, chosen % BLOCK)


def _log_sums_and_maxima(
    logits: torch.Tensor, blocks: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-sum-exp of each row (R,) and the maximum of each block (R, blocks)."""
    rows, vocabulary = logits.shape
    log_sums = logits.new_empty(rows, dtype=dtype)
    maxima = logits.new_empty(rows, blocks, dtype=dtype)
    rows_at_once = max(1, _IN_CACHE // vocabulary) if logits.device.type == "cpu" else rows
    scratch = logits.new_empty(min(rows_at_once, rows), vocabulary, dtype=dtype)
    for first in range(0, rows, rows_at_once):
        part = slice(first, first + rows_at_once)
        values = logits[part]
        probabilities = scratch[: len(values)]
        if values.dtype != dtype:
            values = probabilities.copy_(values)
        torch.amax(values[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)), 2, out=maxima[part])
        highest = values.amax(dim=1)
        # The largest probability is 1 / sum(exp(values - highest)), and PyTorch computes
        # probabilities in fewer passes than this sum.
        torch.softmax(values, dim=1, out=probabilities)
        torch.sub(highest, probabilities.amax(dim=1).log_(), out=log_sums[part])
    return log_sums, maxima


__all__ = ["BLOCK", "best_continuations", "has_kernel"]
