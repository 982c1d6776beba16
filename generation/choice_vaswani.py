"""The choice of tokens and hypotheses in a step of a search, in compiled kernels.

Shapes: R rows of logits, B sentences, K hypotheses of each (the beam), C candidates of a sentence,
V entries of the vocabulary.
"""

import ctypes
from typing import Any

import torch

from .library_vaswani import COUNT, FLOAT, NUMBER, POINTER, address, library


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
    running: torch.Tensor,
    count: int,
    open_rows: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the C best next tokens of each sentence, over all its hypotheses.

    Args:
        logits: (R, V). Those of banned tokens are changed in place.
        block: entries of the vocabulary that share a maximum.
        running: (B, K) log-probabilities of the hypotheses.
        count: C.
        open_rows: (R,) the hypotheses that have logits, among B * K; None means all.
        banned: tokens that get -inf; None means none.

    Returns:
        Log-probabilities, best first; the hypotheses that they continue; the tokens: (B, C) each.
    """
    (rows, vocabulary), (sentences, beams) = logits.shape, running.shape
    log_sums, maxima = logits.new_empty(rows), logits.new_empty(rows, vocabulary // block)
    places = logits.new_empty(running.shape, dtype=torch.long)
    scores = logits.new_empty(sentences, count)
    hypotheses = logits.new_empty(sentences, count, dtype=torch.long)
    tokens = torch.empty_like(hypotheses)
    library().best_candidates(
        *(address(logits), rows, vocabulary, block),
        *((None, 0) if banned is None else (address(banned), len(banned))),
        *(address(running), None if open_rows is None else address(open_rows)),
        *(sentences, beams, count, -torch.inf),
        *(places.data_ptr(), log_sums.data_ptr(), maxima.data_ptr()),
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
]
