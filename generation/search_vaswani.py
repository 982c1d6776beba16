"""Greedy and beam search over a decoder, as the paper decodes (section 6.1).

The searches return what transformers' searches return with the same settings. They are faster for
two reasons. Finished sentences leave the batch. Each step reads the logits once, and never writes
them as probabilities.

Shapes: B sentences still searched, K hypotheses of each (the beam), R hypotheses with logits,
T tokens, C candidates of a step, n sentences returned for each, V entries of the target vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import torch

from .continuations_vaswani import best_continuations
from .kernels_vaswani import advance_beam, best_tokens, compute, end_sentences

FILL = -1  # fills results after the last token; no token and no hypothesis has this number
_RULED_OUT = -1e9  # transformers' score for hypotheses that must not be chosen
_AT_ONCE = 3 * 2**21  # logits that a CPU computes at once: 25 MB in float32


def length_penalty(length: Any, alpha: float, kind: str | None) -> Any:
    """lp(Y) = ((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14), or transformers' |Y|^alpha.

    The length |Y| is a number or a tensor; so is the result.
    """
    return ((5.0 + length) / 6.0) ** alpha if kind == "gnmt" else length**alpha


class Decoder(Protocol):
    """A decoder that keeps its sources, and a cache of the target tokens that it has read.

    `read` and `step` return W numbers for each row. Only `logits` reads them.
    """

    vocabulary: int  # V, known after `read`

    def read(self, prefix: torch.Tensor) -> torch.Tensor:
        """Read the first target tokens (B, T): states that predict the next (B, W)."""

    def step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Extend hypotheses `parents` (B, K) by `tokens` (B, K): states of the open rows (R, W)."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Predict the next tokens from states of some rows (r, W): logits (r, V).

        The next call may overwrite them.
        """

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',).

        A sentence stays at its place, or takes the place of one that is dropped.
        """


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, under the names of transformers' GenerationConfig.

    Args:
        num_beams: K.
        num_return_sequences: n.
        length_penalty: the exponent alpha.
        length_penalty_type: "gnmt" for lp(Y), anything else for transformers' penalty.
        early_stopping: "never" searches until no open hypothesis can win; True stops at K finished
            hypotheses; False stops by transformers' heuristic.
        eos_token_ids: tokens that end a sentence.
    """

    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    length_penalty_type: str | None = None
    early_stopping: bool | Literal["never"] = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the search ends only when no open hypothesis can win."""
        return self.early_stopping == "never"

    @property
    def to_beat(self) -> int:
        """The place of the finished hypothesis that an open one must beat, among the best K."""
        return (self.num_return_sequences if self.exact else self.num_beams) - 1

    def penalty(self, length: Any) -> Any:
        """Return the divisor of a hypothesis' log-probability; `length` may be a tensor."""
        return length_penalty(length, self.length_penalty, self.length_penalty_type)

    def ends(self, tokens: torch.Tensor, limits: torch.Tensor, length: int) -> torch.Tensor:
        """Mark tokens that end their sentence: end tokens, and all tokens at the sentence's limit.

        The tokens are number `length` of their sentences, counted from 1.
        """
        ends = (length >= limits).expand_as(tokens)
        for token in self.eos_token_ids:
            ends = ends | (tokens == token)
        return ends


@dataclasses.dataclass
class TokenRules:
    """Rules about the next token, which depend only on its position in the sentence.

    Args:
        never: tokens that must not be predicted.
        ends: tokens that end a sentence.
        min_length: tokens that a sentence has before an end token is allowed.
        forced_last: the token at the length limit; None leaves it free.
        renormalize: redistribute the probability of banned tokens (renormalize_logits).
        warpers: processors of the logits that tokens are sampled from, such as temperature.
    """

    never: set[int] = dataclasses.field(default_factory=set)
    ends: set[int] = dataclasses.field(default_factory=set)
    min_length: int = 0
    forced_last: int | None = None
    renormalize: bool = False
    warpers: list[Callable] = dataclasses.field(default_factory=list)

    def banned(self, length: int, logits: torch.Tensor) -> torch.Tensor | None:
        """List the tokens that must not be number `length`, from 1; None if all are allowed."""
        tokens = self.never | self.ends if length <= self.min_length else self.never
        columns = [token for token in sorted(tokens) if 0 <= token < logits.shape[1]]
        return torch.tensor(columns, device=logits.device) if columns else None


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
        Tokens after the prompt (B, T), filled up with -1.
    """
    rows = torch.arange(len(prompt), device=prompt.device)  # sentences that are still searched
    limits = limits.contiguous()
    done = torch.zeros_like(rows, dtype=torch.bool)
    steps = []
    states = decoder.read(prompt)
    for length in itertools.count(1):
        chosen = []
        for part in _portions(len(states), decoder.vocabulary, states.device):
            logits = decoder.logits(states[part])
            if (banned := rules.banned(length, logits)) is not None:
                logits[:, banned] = -torch.inf
            compiled = compute(logits)
            if sample:
                chosen.append(_sampled(logits, rules.warpers))
            else:
                chosen.append(best_tokens(logits) if compiled else logits.argmax(dim=-1))
        tokens = torch.cat(chosen) if chosen[1:] else chosen[0]  # (B,)
        if rules.forced_last is not None:
            tokens = tokens.masked_fill(limits == length, rules.forced_last)
        steps.append((rows, tokens, done))
        if compiled:
            done, leaving = end_sentences(tokens, limits, done, settings.eos_token_ids, length)
        else:
            done = done | settings.ends(tokens, limits, length)
            leaving = int(done.sum())
        if (kept := _sentences_to_keep(done, leaving)) is not None:
            if not len(kept):
                break
            decoder.keep(kept)
            rows, done, limits, tokens = rows[kept], done[kept], limits[kept], tokens[kept]
        # Sentences that are done, and still in the batch, read tokens that are not returned.
        states = decoder.step(tokens[:, None])
    result = prompt.new_full((len(steps), len(prompt)), FILL)
    for column, (rows, tokens, done) in zip(result, steps, strict=True):
        column[rows] = tokens.masked_fill(done, FILL)
    return result.t().contiguous()


def _portions(sentences: int, logits_each: int, device: torch.device) -> list[slice]:
    """Divide sentences into portions, whose logits are computed and used in turn.

    Without the compiled kernels, the allocator of the C library returns large blocks of memory to
    the system, which then has to clear them again in each step. Portions are smaller, and fit the
    last cache of most CPUs.
    """
    if device.type != "cpu":
        return [slice(0, sentences)]
    portions = math.ceil(sentences / max(1, _AT_ONCE // logits_each))
    size = math.ceil(sentences / portions)
    return [slice(first, first + size) for first in range(0, sentences, size)]


def _sampled(logits: torch.Tensor, warpers: list[Callable]) -> torch.Tensor:
    """Draw a token for each row of logits (B, V) by its cumulative probabilities: (B,)."""
    for warper in warpers:
        logits = warper(None, logits)
    # In float64, a random number practically never rounds up to the sum of all probabilities.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device)
    drawn *= cumulative[:, -1:]
    # A token without probability has the sum of the token before it, and is never the first above.
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0]


@dataclasses.dataclass
class _Candidates:
    """The C best continuations of each sentence, over all its hypotheses, best first.

    Args:
        scores: (B, C) log-probabilities.
        parents: (B, C) the hypothesis that each candidate continues.
        tokens: (B, C) the token that each candidate adds.
    """

    scores: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor


@dataclasses.dataclass
class _Beam:
    """The state of a beam search.

    Args:
        rows: (B,) numbers of the sentences in the batch that the search began with.
        limits: (B,) how many tokens each sentence may have.
        penalties: (B,) divisors of the best scores that open hypotheses can still reach. None means
            the penalty of their present length.
        running: (B, K) log-probabilities of the open hypotheses, best first.
        finished: (B, K) penalised scores of the best finished hypotheses. A missing one has -inf,
            because with a negative penalty any finite score might win.
        endings: (B, K, 3) length, parent and last token of each finished hypothesis.
        done: (B,) whether the search of a sentence is over.
        leaving: how many sentences are done.
    """

    rows: torch.Tensor
    limits: torch.Tensor
    penalties: torch.Tensor | None
    running: torch.Tensor
    finished: torch.Tensor
    endings: torch.Tensor
    done: torch.Tensor
    leaving: int = 0

    @classmethod
    def start(cls, limits: torch.Tensor, settings: SearchSettings, states: torch.Tensor) -> "_Beam":
        """Begin with one hypothesis for each sentence: the prompt."""
        rows, beams = torch.arange(len(limits), device=limits.device), settings.num_beams
        exact = torch.promote_types(states.dtype, torch.float32)
        longest_wins = settings.exact and settings.length_penalty > 0
        return cls(
            rows,
            limits.contiguous(),
            penalties=settings.penalty(limits.to(exact)) if longest_wins else None,
            running=states.new_zeros(len(rows), 1, dtype=exact),
            finished=states.new_full((len(rows), beams), -torch.inf, dtype=exact),
            endings=rows.new_zeros(len(rows), beams, 3),
            done=torch.zeros_like(rows, dtype=torch.bool),
        )

    def advance(
        self, candidates: _Candidates, length: int, settings: SearchSettings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Choose the open hypotheses, keep the best finished ones, and mark sentences as done.

        Args:
            candidates: continuations of the open hypotheses.
            length: tokens of the hypotheses after this step.
            settings: settings of the search.

        Returns:
            The parents and last tokens (B, K) of the open hypotheses. In an exact search, also the
            numbers (R,) among B * K of those that can still win; else None.
        """
        if compute(candidates.scores, self.finished):
            self.running, parents, tokens, open_rows, self.leaving = advance_beam(
                *(candidates.scores, candidates.parents, candidates.tokens),
                limits=self.limits,
                penalties=self.penalties,
                finished=self.finished,
                endings=self.endings,
                done=self.done,
                ends=settings.eos_token_ids,
                length=length,
                penalty=settings.penalty(length),
                to_beat=settings.to_beat,
                stops_when_full=settings.early_stopping is True,
                ruled_out=_RULED_OUT,
            )
            return parents, tokens, open_rows if settings.exact else None
        ends = settings.ends(candidates.tokens, self.limits[:, None], length)
        self.running, chosen = (candidates.scores + ends * _RULED_OUT).topk(settings.num_beams)
        parents, tokens = (
            part.gather(1, chosen) for part in (candidates.parents, candidates.tokens)
        )
        self._add_endings(candidates, ends, length, settings)
        penalty = settings.penalty(length) if self.penalties is None else self.penalties[:, None]
        can_win = self.running / penalty > self.finished[:, settings.to_beat, None]
        self.done = self.done | ~can_win[:, 0] | (length >= self.limits)
        if settings.early_stopping is True:
            self.done = self.done | (self.endings[:, :, 0] > 0).all(dim=1)
        self.leaving = int(self.done.sum())
        if not settings.exact:
            return parents, tokens, None
        return parents, tokens, (can_win & ~self.done[:, None]).flatten().nonzero()[:, 0]

    def _add_endings(
        self, candidates: _Candidates, ends: torch.Tensor, length: int, settings: SearchSettings
    ) -> None:
        """Add the candidates that end, and keep the best K finished hypotheses of each sentence.

        A candidate must be among the best K of its step, as in transformers.
        """
        best = slice(0, settings.num_beams)
        eligible = ends[:, best] & ~self.done[:, None]
        scores = candidates.scores[:, best] / settings.penalty(length)
        scores = scores.masked_fill(~eligible, -torch.inf)
        self.finished, chosen = torch.cat((self.finished, scores), dim=1).topk(settings.num_beams)
        new = (eligible * length, candidates.parents[:, best], candidates.tokens[:, best])
        endings = torch.cat((self.endings, torch.stack(new, dim=2)), dim=1)
        self.endings = endings.gather(1, chosen[:, :, None].expand(-1, -1, 3))

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences but these, given by their numbers (B',)."""
        for name, state in vars(self).items():
            if isinstance(state, torch.Tensor):
                setattr(self, name, state[sentences])
        self.leaving = 0


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
        Tokens after the prompt (B * n, T), filled up with -1. The hypothesis that each token
        continued (B * n, T), numbered through the batch, filled up with -1. Scores (B * n,), best
        first.
    """
    states = decoder.read(prompt)  # (B, W)
    beam = _Beam.start(limits, settings, states)
    result_scores, result_endings = beam.finished.clone(), beam.endings.clone()
    steps = []
    open_rows = None  # (R,) hypotheses that have states; None means all
    for length in itertools.count(1):
        candidates = _candidates(decoder, states, beam, length, settings, rules, open_rows)
        parents, tokens, open_rows = beam.advance(candidates, length, settings)
        steps.append((beam.rows, parents, tokens))
        if (kept := _sentences_to_keep(beam.done, beam.leaving)) is not None:
            result_scores[beam.rows], result_endings[beam.rows] = beam.finished, beam.endings
            if not len(kept):
                break
            decoder.keep(kept)
            beam.keep(kept)
            if open_rows is not None:
                open_rows = _rows_of_kept(open_rows, kept, tokens.shape)
            parents, tokens = parents[kept], tokens[kept]
        if open_rows is not None and 8 * len(open_rows) > 7 * tokens.numel():
            open_rows = None  # computing all of them takes as long
        states = decoder.step(tokens, parents, open_rows)
    returned = settings.num_return_sequences
    sequences, indices = _trace_back(steps, result_endings[:, :returned])
    scores = result_scores[:, :returned].flatten()
    return sequences, indices.int(), scores.masked_fill(scores == -torch.inf, _RULED_OUT)


def _candidates(
    decoder: Decoder,
    states: torch.Tensor,
    beam: _Beam,
    length: int,
    settings: SearchSettings,
    rules: TokenRules,
    open_rows: torch.Tensor | None,
) -> _Candidates:
    """Find the candidates of a step: enough for K open hypotheses, even if many candidates end."""
    count = max(2, 1 + len(settings.eos_token_ids)) * settings.num_beams
    forced = None  # (B,) sentences that must end now
    if rules.forced_last is not None and bool((at_limit := beam.limits == length).any()):
        forced = at_limit
    if beam.running.shape[1] == 1 < settings.num_beams:
        choices = decoder.vocabulary - len(rules.never | rules.ends)
        # The prompt alone has too few continuations. Add copies of it that are ruled out.
        if forced is not None or choices < count:
            states = states.repeat_interleave(settings.num_beams, dim=0)
            missing = (0, settings.num_beams - 1)
            beam.running = torch.nn.functional.pad(beam.running, missing, value=_RULED_OUT)
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
    best = _Candidates(*(map(torch.cat, zip(*found, strict=True)) if found[1:] else found[0]))
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
    candidates: _Candidates, running: torch.Tensor, sentences: torch.Tensor, token: int
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
    if leaving == 0 or 8 * leaving < len(done):
        return None
    places = torch.arange(len(done) - leaving, device=done.device)
    last = (~done[len(places) :]).nonzero()[:, 0] + len(places)
    return places.masked_scatter(done[: len(places)], last)


def _rows_of_kept(rows: torch.Tensor, kept: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Number rows (R,) of hypotheses (B, K) anew, when only some sentences are kept (B',)."""
    chosen = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    chosen.view(-1)[rows] = True
    return chosen[kept].flatten().nonzero()[:, 0]


def _trace_back(
    steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], endings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow the parents from `endings` (B, n, 3) to the first token.

    Args:
        steps: for each step its sentences (B,), and the parents and tokens of their hypotheses,
            (B, K) each.
        endings: (B, n, 3) length, parent and last token.

    Returns:
        The tokens and the hypotheses that they continued, (B * n, T) each.

    Raises:
        ValueError: there are no hypotheses.
    """
    sentences, returned, _ = endings.shape
    lengths, parents, tokens = endings.cpu().numpy().transpose(2, 0, 1)  # (B, n) each
    longest = lengths.max()
    if longest == 0:
        raise ValueError(
            "The beam search found no hypotheses, because all scores are NaN or -inf: look for NaN "
            "in the model's weights, and for tokens that are all banned."
        )
    sequences = np.full((longest, sentences, returned), FILL)
    hypotheses = sequences.copy()
    hypothesis = parents  # (B, n) the hypothesis of the current step
    for step in range(longest - 1, -1, -1):
        rows, open_parents, open_tokens = (part.cpu().numpy() for part in steps[step])
        all_parents = np.zeros((sentences, open_parents.shape[1]), dtype=int)
        all_tokens = np.zeros_like(all_parents)
        all_parents[rows], all_tokens[rows] = open_parents, open_tokens
        ends_here, reached = lengths == step + 1, lengths >= step + 1
        token = np.where(ends_here, tokens, np.take_along_axis(all_tokens, hypothesis, 1))
        parent = np.where(ends_here, parents, np.take_along_axis(all_parents, hypothesis, 1))
        sequences[step] = np.where(reached, token, FILL)
        hypotheses[step] = np.where(reached, parent, FILL)
        hypothesis = np.where(reached, parent, hypothesis)
    first_of_sentence = np.arange(sentences)[:, None] * steps[0][1].shape[1]
    hypotheses = np.where(hypotheses == FILL, FILL, hypotheses + first_of_sentence)

    def of_hypotheses(table: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(table.reshape(longest, -1).T.copy()).to(endings.device)

    return of_hypotheses(sequences), of_hypotheses(hypotheses)


__all__ = ["FILL", "SearchSettings", "TokenRules", "beam_search", "greedy_search", "length_penalty"]
