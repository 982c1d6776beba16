"""The choice of tokens and hypotheses in a step of a search, in compiled kernels.

Shapes: R rows of logits, B sentences, K hypotheses of each (the beam), C candidates of a sentence,
V entries of the vocabulary.
"""

import ctypes
from typing import Any

import torch

from .library_vaswani import COUNT, FLOAT, NUMBER, POINTER, address, library


def log_sums_and_maxima(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-sum-exp of each row of logits (R, V), and the maximum of each block."""
    rows, vocabulary = logits.shape
    log_sums, maxima = logits.new_empty(rows), logits.new_empty(rows, vocabulary // block)
    library().log_sums_and_maxima(
        *(address(logits), rows, vocabulary, block),
        *(log_sums.data_ptr(), maxima.data_ptr(), torch.get_num_threads()),
    )
    return log_sums, maxima


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Find the best token of each row of logits (R, V), and the first of equal ones: (R,)."""
    tokens = logits.new_empty(len(logits), dtype=torch.long)
    library().best_tokens(
        *(address(logits), *logits.shape, tokens.data_ptr(), torch.get_num_threads())
    )
    return tokens


def best_candidates(
    logits: torch.Tensor,
    block: int,
    log_sums: torch.Tensor,
    maxima: torch.Tensor,
    running: torch.Tensor,
    places: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the C best next tokens of each sentence, over all its hypotheses.

    Args:
        logits: (R, V).
        block: entries of the vocabulary that share a maximum.
        log_sums: (R,) log-sum-exp of the logits.
        maxima: (R, V / block).
        running: (B, K) log-probabilities of the hypotheses.
        places: (B * K,) the row of logits of each hypothesis, or -1 if it has none; None means that
            each has its own row.
        count: C.

    Returns:
        Log-probabilities, best first; the hypotheses that they continue; the tokens: (B, C) each.
    """
    sentences, beams = running.shape
    scores = logits.new_empty(sentences, count)
    hypotheses = logits.new_empty(sentences, count, dtype=torch.long)
    tokens = torch.empty_like(hypotheses)
    library().best_candidates(
        *(
            address(logits),
            logits.shape[1],
            block,
            address(log_sums),
            address(maxima),
            address(running),
        ),
        *(None if places is None else address(places), sentences, beams, count, -torch.inf),
        *(scores.data_ptr(), hypotheses.data_ptr(), tokens.data_ptr(), torch.get_num_threads()),
    )
    return scores, hypotheses, tokens


def end_sentences(
    tokens: torch.Tensor, limits: torch.Tensor, done: torch.Tensor, ends: Any, length: int
) -> tuple[torch.Tensor, int]:
    """Mark sentences that are done (B,), or that end with these tokens, and count them.

    Args:
        tokens: (B,) the last token of each sentence.
        limits: (B,) how many tokens each sentence may have.
        done: (B,) sentences that were done before.
        ends: the array of tokens that end a sentence.
        length: tokens that each sentence has.
    """
    now = torch.empty_like(done)
    count = library().end_sentences(
        *(address(tokens), address(limits), len(tokens), length),
        *(ctypes.addressof(ends), len(ends), address(done), address(now)),
    )
    return now, count


class CandidateList(ctypes.Structure):
    """Continuations of hypotheses (B, C)."""

    _fields_ = (*((name, POINTER) for name in ("scores", "parents", "tokens")), ("count", COUNT))


class StepRules(ctypes.Structure):
    """Rules of a step of a beam search."""

    _fields_ = (
        ("ends", POINTER),
        *((name, COUNT) for name in ("ends_count", "length")),
        ("penalty", FLOAT),
        *((name, NUMBER) for name in ("to_beat", "stops_when_full")),
        ("ruled_out", FLOAT),
    )


class BeamState(ctypes.Structure):
    """The state of a beam search."""

    _fields_ = (
        *((name, COUNT) for name in ("sentences", "hypotheses")),
        *((name, POINTER) for name in ("limits", "penalties", "finished", "endings", "done")),
    )


class Chosen(ctypes.Structure):
    """The hypotheses (B, K) that a step chooses."""

    _fields_ = (
        *((name, POINTER) for name in ("running", "parents", "tokens", "open_rows")),
        *((name, COUNT) for name in ("rows", "done")),
    )


__all__ = [
    "BeamState",
    "CandidateList",
    "Chosen",
    "StepRules",
    "best_candidates",
    "best_tokens",
    "end_sentences",
    "log_sums_and_maxima",
]
