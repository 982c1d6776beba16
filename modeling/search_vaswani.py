"""Greedy and beam search over an IncrementalDecoder, as the paper decodes (section 6.1).

The results are those of transformers' searches with the same settings. The ways there differ:
finished sentences leave the batch, and the logits are read once, not rewritten as probabilities.

Shapes: B sentences still searched, K hypotheses of each (the beam), T tokens, C candidates of a
step, n sentences returned for each, V entries of the target vocabulary.
"""

import dataclasses
import itertools
from typing import Any

import torch

from .incremental_vaswani import IncrementalDecoder

_OUT = -1e9  # transformers' score of what must not be chosen
FILL = -1  # no token and no hypothesis has this number
_BLOCK = 512  # entries of the vocabulary looked at together
_IN_CACHE = 2**18  # logits that fit the cache of a CPU core


def length_penalty(length: Any, alpha: float, kind: str | None) -> Any:
    """lp(Y) = ((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14), or transformers' |Y|^alpha."""
    return ((5.0 + length) / 6.0) ** alpha if kind == "gnmt" else length**alpha


@dataclasses.dataclass
class TokenRules:
    """Rules about tokens that look at nothing but the length of a sentence.

    Args:
        never: tokens that are not to be predicted.
        ends: those that end a sentence.
        least: how many tokens come before an end.
        last: what the last token that a limit allows must be; None leaves it free.
        anew: the probability of what is banned goes to what is left (renormalize_logits).
    """

    never: set[int] = dataclasses.field(default_factory=set)
    ends: set[int] = dataclasses.field(default_factory=set)
    least: int = 0
    last: int | None = None
    anew: bool = False

    def banned(self, length: int, logits: torch.Tensor) -> torch.Tensor | None:
        """List which columns of the logits must not be the token number `length`, from 1."""
        tokens = self.never | self.ends if length <= self.least else self.never
        columns = [token for token in sorted(tokens) if 0 <= token < logits.shape[1]]
        return torch.tensor(columns, device=logits.device) if columns else None


@torch.inference_mode()
def greedy_search(
    decoder: IncrementalDecoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    config: Any,
    rules: TokenRules,
) -> torch.Tensor:
    """Take the most probable token at every step: (B, T), filled up with the pad token.

    Args:
        decoder: knows the B sources.
        prompt: (B, T) the first target tokens.
        limits: (B,) how many tokens may follow them.
        config: the generation config of the call.
        rules: what the tokens must not be, or must be.
    """
    pad = int(config._pad_token_tensor)
    rows = torch.arange(len(prompt), device=prompt.device)  # where the decoder's sentences belong
    done = torch.zeros_like(rows, dtype=torch.bool)
    columns = []
    logits = decoder.read(prompt)
    length = 0
    while True:
        length += 1
        if (banned := rules.banned(length, logits)) is not None:
            logits[:, banned] = -torch.inf
        tokens = logits.argmax(dim=-1)  # (B,)
        if rules.last is not None:
            tokens = tokens.masked_fill(limits == length, rules.last)
        tokens = tokens.masked_fill(done, pad)
        columns.append(prompt.new_full((len(prompt),), pad).index_copy(0, rows, tokens))
        done = done | _ends(tokens, limits, length, config)
        if (staying := _staying(done)) is not None:
            if not len(staying):
                return torch.stack(columns, dim=1)
            decoder.keep(staying)
            rows, done, limits, tokens = (x[staying] for x in (rows, done, limits, tokens))
        logits = decoder.step(tokens[:, None])


@torch.inference_mode()
def beam_search(
    decoder: IncrementalDecoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    config: Any,
    rules: TokenRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Search for the n best sentences with K = num_beams hypotheses (6.1; Wu et al., 2016).

    Args:
        decoder: knows the B sources.
        prompt: (B, T) the first target tokens.
        limits: (B,) how many tokens may follow them.
        config: the generation config of the call.
        rules: what the tokens must not be, or must be.

    Returns:
        Tokens (B * n, T) after the prompt; the hypotheses they were predicted from, counted through
        the batch (B * n, T); both filled up with -1. Scores (B * n,), best first.
    """
    beams, returned, stopping = config.num_beams, config.num_return_sequences, config.early_stopping
    alpha = float(config.length_penalty)
    kind = getattr(config, "length_penalty_type", None)
    ends = config._eos_token_tensor
    # As many candidates as leave K to go on with where each hypothesis could end.
    candidates = max(2, 1 + (0 if ends is None else len(ends))) * beams

    logits = decoder.read(prompt)  # (B, V)
    sentences = len(prompt)
    running = logits.new_zeros(sentences, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    choices = logits.shape[1] - len(rules.never | rules.ends)
    forced = rules.last is not None and bool((limits == 1).any())
    if forced or choices < candidates:  # one hypothesis does not make so many
        logits = logits.repeat_interleave(beams, dim=0)
        running = torch.nn.functional.pad(running, (0, beams - 1), value=_OUT)

    rows = torch.arange(sentences, device=prompt.device)  # where the decoder's sentences belong
    done = torch.zeros_like(rows, dtype=torch.bool)
    # The K best hypotheses that have ended: their scores, and length, parent and token of the end.
    # -inf where there is none yet: a negative penalty makes any other number too good for that.
    ended = running.new_full((sentences, beams), -torch.inf)
    ending = prompt.new_zeros(sentences, beams, 3)
    result_scores, result_endings = ended.clone(), ending.clone()
    steps = []
    open_rows = None  # the hypotheses of which there are logits; None is all
    for length in itertools.count(1):
        banned = rules.banned(length, logits)
        if banned is not None and rules.anew:
            logits[:, banned] = -torch.inf
            banned = None
        best = best_continuations(logits, running, candidates, open_rows, banned)
        if rules.last is not None and bool((limits == length).any()):
            best = _forced(best, running, limits == length, rules.last)
        scores, parents, tokens = best
        at_end = _ends(tokens, limits[:, None], length, config)

        # The best K that do not end go on ...
        running, chosen = (scores + at_end * _OUT).topk(beams)
        going_parents, going_tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        steps.append((rows, going_parents, going_tokens))

        # ... and of the best K, those that end compete with the ones that ended before.
        eligible = at_end[:, :beams] & ~done[:, None]
        penalised = scores[:, :beams] / length_penalty(length, alpha, kind)
        penalised = penalised.masked_fill(~eligible, -torch.inf)
        new = torch.stack((eligible * length, parents[:, :beams], tokens[:, :beams]), dim=2)
        ended, chosen = torch.cat((ended, penalised), dim=1).topk(beams)
        ending = torch.cat((ending, new), dim=1).gather(1, chosen[:, :, None].expand(-1, -1, 3))

        # Which open hypotheses can still beat those that would be returned?
        exact = stopping == "never"
        longest = limits if exact and alpha > 0 else torch.full_like(limits, length)
        penalty = length_penalty(longest.to(running.dtype), alpha, kind)
        can_win = running / penalty[:, None] > ended[:, returned - 1 if exact else -1, None]
        done = done | ~can_win[:, 0] | (length >= limits)
        if stopping is True:
            done = done | (ending[:, :, 0] > 0).all(dim=1)

        if (staying := _staying(done)) is not None:
            result_scores[rows], result_endings[rows] = ended, ending
            if not len(staying):
                break
            decoder.keep(staying)
            rows, done, limits, running, ended, ending, can_win = (
                x[staying] for x in (rows, done, limits, running, ended, ending, can_win)
            )
            going_parents, going_tokens = going_parents[staying], going_tokens[staying]
        # Those that cannot win stand behind those that can, and so do all that descends from them:
        # the search may forget them.
        open_rows = _open_rows(can_win & ~done[:, None]) if exact else None
        logits = decoder.step(going_tokens, going_parents, open_rows)
    sequences, indices = _traced_back(steps, result_endings[:, :returned])
    scores = result_scores[:, :returned].flatten()
    return sequences, indices.int(), scores.masked_fill(scores == -torch.inf, _OUT)


def best_continuations(
    logits: torch.Tensor,
    running: torch.Tensor,
    count: int,
    open_rows: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the best next tokens of each sentence's hypotheses together.

    Each row of logits is read once for its log-sum-exp and the maxima of its blocks; the best
    tokens then lie in the best blocks.

    Args:
        logits: (B * K, V), or (R, V).
        running: (B, K) the hypotheses' log-probabilities.
        count: C, how many continuations to find.
        open_rows: (R,) those of the B * K hypotheses that have logits; the others have no
            continuations. Where there are fewer than C, scores of -inf fill up.
        banned: tokens that get -inf, in `logits` too, for the probability that they have: what is
            left is not made more probable.

    Returns:
        Log-probabilities, best first, numbers of the hypotheses, tokens: (B, C) each.
    """
    sentences, beams = running.shape
    vocabulary = logits.shape[1]
    blocks = vocabulary // _BLOCK
    rows = torch.arange(len(logits), device=logits.device)
    place = rows  # of a hypothesis' logits
    if open_rows is not None:
        place = torch.zeros(sentences * beams, dtype=torch.long, device=logits.device)
        place[open_rows] = rows
        rows = open_rows
    missing = running.new_full((sentences * beams, 1), -torch.inf)
    if beams * blocks < 2 * count:
        scores = missing.repeat(1, vocabulary)
        scores[rows] = logits.to(running.dtype).log_softmax(dim=-1)
        if banned is not None:
            scores[:, banned] = -torch.inf
        scores, best = (
            (scores.view(sentences, beams, -1) + running[:, :, None]).flatten(1).topk(count)
        )
        return scores, best // vocabulary, best % vocabulary

    in_blocks = logits[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    normaliser, block_maxima = _normaliser_and_maxima(logits, blocks, running.dtype)
    if banned is not None:
        logits[:, banned] = -torch.inf
        changed = (banned[banned < blocks * _BLOCK] // _BLOCK).unique()
        block_maxima[:, changed] = in_blocks[:, changed].amax(dim=2).to(block_maxima.dtype)
    offset = missing[:, 0]  # (B * K,), to be added to logits
    offset[rows] = running.flatten()[rows] - normaliser
    maxima = missing.repeat(1, blocks)
    maxima[rows] = block_maxima + offset[rows, None]
    best = maxima.view(sentences, -1).topk(count, sorted=False).indices  # (B, C)
    row = best // blocks + beams * torch.arange(sentences, device=best.device)[:, None]
    block = best % blocks
    inside = in_blocks[place[row], block] + offset[row][:, :, None]  # (B, C, block)
    columns = torch.arange(vocabulary, device=best.device)
    places = ((best // blocks) * vocabulary + block * _BLOCK)[:, :, None] + columns[:_BLOCK]

    # What is left over at the end of the vocabulary is a shorter block, which always takes part.
    rest = logits[:, blocks * _BLOCK :][place] + offset[:, None]
    rest_places = columns[:beams, None] * vocabulary + columns[blocks * _BLOCK :]
    scores, best = torch.cat((inside.flatten(1), rest.view(sentences, -1)), dim=1).topk(count)
    places = torch.cat((places.flatten(1), rest_places.flatten().expand(sentences, -1)), dim=1)
    places = places.gather(1, best)
    return scores, places // vocabulary, places % vocabulary


def _normaliser_and_maxima(
    logits: torch.Tensor, blocks: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp of each row, (B * K,), and the maximum of each block, (B * K, blocks)."""
    rows, vocabulary = logits.shape
    normaliser = logits.new_empty(rows, dtype=dtype)
    maxima = logits.new_empty(rows, blocks, dtype=dtype)
    at_a_time = max(1, _IN_CACHE // vocabulary) if logits.device.type == "cpu" else rows
    scratch = logits.new_empty(min(at_a_time, rows), vocabulary, dtype=dtype)
    for some in range(0, rows, at_a_time):
        part = slice(some, some + at_a_time)
        x = scratch[: len(logits[part])].copy_(logits[part])
        torch.amax(x[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)), 2, out=maxima[part])
        highest = x.amax(dim=1, keepdim=True)
        normaliser[part] = x.sub_(highest).exp_().sum(dim=1).log_() + highest[:, 0]
    return normaliser, maxima


def _forced(
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    running: torch.Tensor,
    at_limit: torch.Tensor,
    token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let `token` follow, with probability 1, all hypotheses of the sentences `at_limit` (B,)."""
    scores, parents, tokens = best
    forced, order = running.sort(dim=1, descending=True)
    absent = scores.shape[1] - running.shape[1]
    forced = torch.nn.functional.pad(forced, (0, absent), value=-torch.inf)
    order = torch.nn.functional.pad(order, (0, absent))
    here = at_limit[:, None]
    return (
        torch.where(here, forced, scores),
        torch.where(here, order, parents),
        tokens.masked_fill(here, token),
    )


def _ends(tokens: torch.Tensor, limits: torch.Tensor, length: int, config: Any) -> torch.Tensor:
    """Mark the tokens that end their sentence: an end token, or the last that may be."""
    last = (length >= limits).expand_as(tokens)
    if config._eos_token_tensor is None:
        return last
    return torch.isin(tokens, config._eos_token_tensor) | last


def _staying(done: torch.Tensor) -> torch.Tensor | None:
    """The numbers of the sentences to go on with, or None while too few would leave.

    To leave costs a copy of the cache; to stay, a sentence's share of each step.
    """
    leaving = int(done.sum())
    if leaving == 0 or (leaving < len(done) and 8 * leaving < len(done)):
        return None
    return (~done).nonzero()[:, 0]


def _open_rows(can_win: torch.Tensor) -> torch.Tensor | None:
    """The numbers of the hypotheses to go on with, or None if they are nearly all of (B, K)."""
    rows = can_win.flatten().nonzero()[:, 0]
    return rows if 8 * len(rows) <= 7 * can_win.numel() else None


def _traced_back(
    steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], endings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect the tokens and hypotheses that lead to `endings` (B, n, 3): (B * n, T) each."""
    sentences, returned = endings.shape[:2]
    lengths, parents, tokens = endings.unbind(dim=2)  # (B, n) each
    longest = int(lengths.max())
    sequences = endings.new_full((longest, sentences, returned), FILL)
    beams = sequences.clone()
    hypothesis = parents  # those that the step at hand comes from
    for step in range(longest - 1, -1, -1):
        rows, going_parents, going_tokens = steps[step]
        all_parents = going_parents.new_zeros(sentences, going_parents.shape[1])
        all_tokens = torch.zeros_like(all_parents)
        all_parents[rows], all_tokens[rows] = going_parents, going_tokens
        last, inside = lengths == step + 1, lengths > step + 1
        token = torch.where(last, tokens, all_tokens.gather(1, hypothesis))
        parent = torch.where(last, parents, all_parents.gather(1, hypothesis))
        sequences[step] = torch.where(last | inside, token, FILL)
        beams[step] = torch.where(last | inside, parent, FILL)
        hypothesis = torch.where(inside | last, parent, hypothesis)
    first = torch.arange(sentences, device=beams.device)[:, None] * steps[0][1].shape[1]
    beams = torch.where(beams == FILL, FILL, beams + first)
    return sequences.flatten(1).T.contiguous(), beams.flatten(1).T.contiguous()
