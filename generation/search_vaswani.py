"""Greedy and beam search over a decoder, as the paper decodes (section 6.1).

The searches return what transformers' searches return with the same settings. They are faster for
three reasons. Finished sentences leave the batch. Each step reads the logits once, and never writes
them as probabilities. On a CPU, one kernel takes several steps (`steps_vaswani.py`).

Shapes: B sentences still searched, K hypotheses of each (the beam), R hypotheses with logits,
T tokens, C candidates of a step, n sentences returned for each, V entries of the target vocabulary.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from .beam_vaswani import FILL, NO_SCORES, RULED_OUT, Beam, Candidates, trace_back
from .choice_vaswani import best_tokens, end_sentences
from .continuations_vaswani import best_continuations
from .library_vaswani import can_compute
from .rules_vaswani import SearchSettings, TokenRules, length_penalty
from .steps_vaswani import several_beam_steps, several_greedy_steps

_AT_ONCE = 3 * 2**21  # logits that a CPU computes at once: 25 MB in float32


class Decoder(Protocol):
    """A decoder that keeps its sources, and a cache of the target tokens that it has read.

    `read` and `step` return W numbers for each row. Only `logits` reads them.
    """

    vocabulary: int  # V, known after `read`

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T); return states (B, W) that predict the next token."""

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend the hypotheses `parents` (B, K) by `tokens` (B, K).

        Returns:
            The states (R, W) of the open rows.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Predict the next tokens from states of some rows (r, W): logits (r, V).

        The next call may overwrite the logits.
        """

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',).

        A sentence stays at its place, or takes the place of one that is dropped.
        """


@torch.inference_mode()
def greedy_search(
    decoder: Decoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    settings: SearchSettings,
    rules: TokenRules,
    sample: bool = False,
) -> torch.Tensor:
    """Take the most probable token at every step, or sample one.

    Args:
        decoder: holds the B sources.
        prompt: (B, T) the first target tokens.
        limits: (B,) how many tokens may follow the prompt.
        settings: settings of the search.
        rules: rules about tokens.
        sample: draw tokens by their probabilities, with one random number each.

    Returns:
        Tokens after the prompt (B, T), padded with -1.
    """
    rows = torch.arange(len(prompt), device=prompt.device)  # sentences that are still searched
    limits = limits.contiguous()
    done = torch.zeros_like(rows, dtype=torch.bool)
    steps = []
    states = decoder.read(prompt)
    length = 0  # tokens of each sentence
    while True:
        length += 1
        chosen = []
        for part in _portions(len(states), decoder.vocabulary, states.device):
            logits = decoder.logits(states[part])
            if (banned := rules.banned(length, logits)) is not None:
                logits[:, banned] = -torch.inf
            compiled = can_compute(logits)
            if sample:
                chosen.append(_sampled(logits, rules.warpers))
            else:
                chosen.append(best_tokens(logits) if compiled else logits.argmax(dim=-1))
        tokens = torch.cat(chosen) if chosen[1:] else chosen[0]  # (B,)
        if rules.forced_last is not None:
            tokens = tokens.masked_fill(limits == length, rules.forced_last)
        steps.append((rows, tokens, done))
        if compiled:
            done, leaving = end_sentences(tokens, limits, done, settings.end_array, length)
        else:
            done = done | settings.ends(tokens, limits, length)
            leaving = int(done.sum())
        if not sample and _continue(leaving, len(done), decoder.vocabulary):
            further, are_done = several_greedy_steps(
                decoder, tokens, limits, done, length, settings, rules
            )
            steps += [(rows, *step) for step in zip(further[1:], are_done[:-1], strict=True)]
            if len(further) > 1:
                length += len(further) - 1
                tokens, done = further[-1], are_done[-1]
                leaving = int(done.sum())
        if (kept := _sentences_to_keep(done, leaving)) is not None:
            if not len(kept):
                break
            decoder.keep(kept)
            rows, done, limits, tokens = rows[kept], done[kept], limits[kept], tokens[kept]
        # Sentences that are done, and still in the batch, read tokens that are not returned.
        states = decoder.step(tokens[:, None])
    result = prompt.new_full((len(steps), len(prompt)), FILL, dtype=torch.long)
    for column, (rows, tokens, done) in zip(result, steps, strict=True):
        column[rows] = tokens.masked_fill(done, FILL)
    return result.t().contiguous()


def _portions(sentences: int, logits_each: int, device: torch.device) -> list[slice]:
    """Divide sentences into portions, whose logits are computed and used in turn.

    Without the compiled kernels, the C library returns large blocks of memory to the system. The
    system would clear such blocks again in each step. Portions are smaller, and fit the last cache
    of most CPUs.
    """
    if device.type != "cpu" or _fit_at_once(sentences, logits_each):
        return [slice(0, sentences)]
    portions = math.ceil(sentences / max(1, _AT_ONCE // logits_each))
    size = math.ceil(sentences / portions)
    return [slice(first, first + size) for first in range(0, sentences, size)]


def _fit_at_once(sentences: int, logits_each: int) -> bool:
    """Tell whether a CPU computes the logits of all sentences at once."""
    return sentences <= max(1, _AT_ONCE // logits_each)


def _sampled(logits: torch.Tensor, warpers: list[Callable]) -> torch.Tensor:
    """Draw a token for each row of logits (B, V) by its cumulative probabilities: (B,).

    Raises:
        ValueError: a score is NaN, or all scores are -inf.
    """
    # Cast as transformers does, because warpers such as top_p choose other tokens in 16 bits.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for warper in warpers:
        logits = warper(None, logits)
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
    cumulative = logits.to(exact).softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    if bool(total.isnan().any()):
        raise ValueError(NO_SCORES)
    drawn = torch.rand(len(logits), 1, dtype=exact, device=logits.device) * total
    # A token without probability adds nothing to the sum before it, so it is never chosen.
    chosen = torch.searchsorted(cumulative, drawn, right=True)
    # If a random number rounds up to the total, no sum is above it. Take the last possible token.
    return chosen.minimum(torch.searchsorted(cumulative, total))[:, 0]


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    settings: SearchSettings,
    rules: TokenRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Search for the n best sentences with K hypotheses (6.1; Wu et al., 2016).

    Args:
        decoder: holds the B sources.
        prompt: (B, T) the first target tokens.
        limits: (B,) how many tokens may follow the prompt.
        settings: settings of the search.
        rules: rules about tokens.

    Returns:
        Tokens after the prompt (B * n, T), padded with -1. The hypothesis that each token
        continued (B * n, T), numbered through the batch, padded with -1. Scores (B * n,), best
        first.
    """
    states = decoder.read(prompt)  # (B, W)
    beam = Beam.start(limits, settings, states)
    result_scores, result_endings = beam.finished.clone(), beam.endings.clone()
    steps = []
    open_rows = None  # (R,) hypotheses that have states; None means all
    length = 0  # tokens of the hypotheses
    while True:
        candidates = _candidates(decoder, states, beam, length + 1, settings, rules, open_rows)
        chosen = beam.advance(candidates, length + 1, settings)
        choices = [chosen[:2]]
        open_rows = chosen[2]
        if _continue(beam.leaving, len(beam.done), settings.num_beams * decoder.vocabulary):
            further, open_rows = several_beam_steps(
                decoder, beam, chosen, length + 1, settings, rules
            )
            choices += further
        steps += [(beam.rows, *choice) for choice in choices]
        length += len(choices)
        parents, tokens = choices[-1]
        if (kept := _sentences_to_keep(beam.done, beam.leaving)) is not None:
            result_scores[beam.rows], result_endings[beam.rows] = beam.finished, beam.endings
            if not len(kept):
                break
            decoder.keep(kept)
            beam.keep(kept)
            if open_rows is not None:
                open_rows = _rows_after_leaving(open_rows, kept, tokens.shape)
            parents, tokens = parents[kept], tokens[kept]
        if open_rows is not None and 8 * len(open_rows) > 7 * tokens.numel():
            open_rows = None  # computing all of them takes as long
        states = decoder.step(tokens, parents, open_rows)
    returned = settings.num_return_sequences
    sequences, indices = trace_back(steps, result_endings[:, :returned])
    scores = result_scores[:, :returned].flatten()
    return sequences, indices.int(), scores.masked_fill(scores == -torch.inf, RULED_OUT)


def _candidates(
    decoder: Decoder,
    states: torch.Tensor,
    beam: Beam,
    length: int,
    settings: SearchSettings,
    rules: TokenRules,
    open_rows: torch.Tensor | None,
) -> Candidates:
    """Find the candidates of a step: enough for K open hypotheses, even if many candidates end."""
    count = settings.candidates
    forced = None  # (B,) sentences that must end now
    if rules.forced_last is not None and bool((at_limit := beam.limits == length).any()):
        forced = at_limit
    if beam.running.shape[1] == 1 < settings.num_beams:
        choices = decoder.vocabulary - len(rules.never | rules.ends)
        # The prompt alone has too few continuations. Add copies of it that are ruled out.
        if forced is not None or choices < count:
            states = states.repeat_interleave(settings.num_beams, dim=0)
            missing = (0, settings.num_beams - 1)
            beam.running = torch.nn.functional.pad(beam.running, missing, value=RULED_OUT)
    found = []
    sentences, beams = beam.running.shape
    for part in _portions(sentences, beams * decoder.vocabulary, states.device):
        rows, own_rows = _rows_of(part, beams, open_rows)
        logits = decoder.logits(states[rows])
        banned = rules.banned(length, logits)
        if banned is not None and rules.renormalize:
            logits[:, banned] = -torch.inf
            banned = None
        found.append(best_continuations(logits, beam.running[part], count, own_rows, banned))
    best = Candidates(*(map(torch.cat, zip(*found, strict=True)) if found[1:] else found[0]))
    if forced is not None and rules.forced_last is not None:
        _force(best, beam.running, forced, rules.forced_last)
    return best


def _rows_of(
    sentences: slice, beams: int, open_rows: torch.Tensor | None
) -> tuple[slice, torch.Tensor | None]:
    """Find the rows of some sentences, and number their open rows among their own hypotheses."""
    first, end = sentences.start * beams, sentences.stop * beams
    if open_rows is None:
        return slice(first, end), None
    bounds = torch.tensor([first, end], device=open_rows.device)
    rows = slice(*torch.searchsorted(open_rows, bounds).tolist())
    return rows, open_rows[rows] - first


def _force(
    candidates: Candidates, running: torch.Tensor, sentences: torch.Tensor, token: int
) -> None:
    """Make `token` the only continuation in the marked sentences (B,), with probability 1."""
    scores, order = running.sort(dim=1, descending=True)
    absent = candidates.scores.shape[1] - running.shape[1]
    scores = torch.nn.functional.pad(scores, (0, absent), value=-torch.inf)
    order = torch.nn.functional.pad(order, (0, absent))
    marked = sentences[:, None]
    candidates.scores = torch.where(marked, scores, candidates.scores)
    candidates.parents = torch.where(marked, order, candidates.parents)
    candidates.tokens = candidates.tokens.masked_fill(marked, token)


def _sentences_to_keep(done: torch.Tensor, leaving: int) -> torch.Tensor | None:
    """List the sentences that are not done, in their new order; None to keep all for now.

    Dropping sentences moves others in the cache, so wait until an eighth of them is done. The last
    sentences take the places of those that are dropped, so that few are moved.
    """
    if not _leave(leaving, len(done)):
        return None
    places = torch.arange(len(done) - leaving, device=done.device)
    moved = (~done[len(places) :]).nonzero()[:, 0] + len(places)
    return places.masked_scatter(done[: len(places)], moved)


def _continue(done: int, sentences: int, logits_each: int) -> bool:
    """Tell whether all sentences stay, and their logits are computed at once."""
    return not _leave(done, sentences) and _fit_at_once(sentences, logits_each)


def _leave(done: int, sentences: int) -> bool:
    """Tell whether enough sentences are done to drop them."""
    return done > 0 and 8 * done >= sentences


def _rows_after_leaving(rows: torch.Tensor, kept: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Number rows (R,) of hypotheses (B, K) among those of the kept sentences (B',)."""
    chosen = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    chosen.view(-1)[rows] = True
    return chosen[kept].flatten().nonzero()[:, 0]


__all__ = ["FILL", "SearchSettings", "TokenRules", "beam_search", "greedy_search", "length_penalty"]
