"""The hypotheses of a beam search: which go on, which have ended, and which tokens they have.

Shapes: B sentences still searched, K hypotheses of each (the beam), T tokens, C candidates of a
step, n sentences returned for each.
"""

import ctypes
import dataclasses

import numpy as np
import torch

from .choice_vaswani import BeamState, CandidateList, Chosen, StepRules
from .library_vaswani import address, can_compute, library
from .rules_vaswani import SearchSettings

FILL = -1  # fills results after the last token; no token and no hypothesis has this number
RULED_OUT = -1e9  # transformers' score for hypotheses that must not be chosen
NO_SCORES = (
    "The search found no hypotheses, because scores are NaN or -inf: look for NaN in the "
    "model's weights, and for tokens that are all banned."
)


@dataclasses.dataclass
class Candidates:
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
class Beam:
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
    def start(cls, limits: torch.Tensor, settings: SearchSettings, states: torch.Tensor) -> "Beam":
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
        self, candidates: Candidates, length: int, settings: SearchSettings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Choose the open hypotheses, keep the best finished ones, and mark sentences as done.

        Args:
            candidates: continuations of the open hypotheses.
            length: tokens of the hypotheses after this step.
            settings: settings of the search.

        Returns:
            The parents and last tokens (B, K) of the open hypotheses. In an exact search, also the
            flat indices (R,) of the hypotheses that can still win. Otherwise None.

        Raises:
            ValueError: a score is NaN.
        """
        if can_compute(candidates.scores, self.finished):
            return self._advance_compiled(candidates, length, settings)
        if bool(candidates.scores[:, 0].isnan().any()):  # NaN is best
            raise ValueError(NO_SCORES)
        ends = settings.ends(candidates.tokens, self.limits[:, None], length)
        self.running, chosen = (candidates.scores + ends * RULED_OUT).topk(settings.num_beams)
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

    def _advance_compiled(
        self, candidates: Candidates, length: int, settings: SearchSettings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Do as `advance` does, in one kernel, which writes to `finished`, `endings` and `done`."""
        sentences, beams = self.finished.shape
        self.running = torch.empty_like(self.finished)
        parents, tokens = (self.rows.new_empty(sentences, beams) for _ in range(2))
        open_rows = self.rows.new_empty(sentences * beams)
        rules, state = self.described(length, settings)
        best = map(address, (candidates.scores, candidates.parents, candidates.tokens))
        found = Chosen(*map(address, (self.running, parents, tokens, open_rows)))
        are_numbers = library().advance_beam(
            ctypes.byref(CandidateList(*best, candidates.scores.shape[1])),
            *map(ctypes.byref, (rules, state, found)),
        )
        if not are_numbers:
            raise ValueError(NO_SCORES)
        self.leaving = found.done
        return parents, tokens, open_rows[: found.rows] if settings.exact else None

    def described(self, length: int, settings: SearchSettings) -> tuple[StepRules, BeamState]:
        """Describe the step after which hypotheses have `length` tokens, and the search so far."""
        ends, penalties = settings.end_array, self.penalties
        rules = StepRules(
            *(ctypes.addressof(ends), len(ends), length, settings.penalty(length)),
            *(settings.to_beat, settings.early_stopping is True, RULED_OUT),
        )
        state = BeamState(
            *(*self.finished.shape, address(self.limits)),
            None if penalties is None else address(penalties),
            *map(address, (self.finished, self.endings, self.done)),
        )
        return rules, state

    def _add_endings(
        self, candidates: Candidates, ends: torch.Tensor, length: int, settings: SearchSettings
    ) -> None:
        """Add the candidates that end, and keep the best K finished hypotheses of each sentence.

        A candidate must be among the best K of its step, as in transformers. Candidates that are
        ruled out do not count.
        """
        best = slice(0, settings.num_beams)
        possible = candidates.scores[:, best] > RULED_OUT / 2
        eligible = ends[:, best] & possible & ~self.done[:, None]
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


def trace_back(
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
    lengths, last_parents, last_tokens = endings.cpu().numpy().transpose(2, 0, 1)  # (B, n) each
    longest = lengths.max()
    if longest == 0:
        raise ValueError(NO_SCORES)
    steps = steps[:longest]
    number = np.repeat(np.arange(longest), [len(rows) for rows, _, _ in steps])
    rows, open_parents, open_tokens = (
        torch.cat(part).cpu().numpy() for part in zip(*steps, strict=True)
    )
    beams = open_parents.shape[1]
    # Finished hypotheses follow the open ones, and are their own parents after their ends.
    parents = np.zeros((longest, sentences, beams + returned), dtype=np.int32)
    parents[number, rows, :beams] = open_parents
    parents[:, :, beams:] = finished = beams + np.arange(returned)
    tokens = np.full_like(parents, FILL)
    tokens[number, rows, :beams] = open_tokens
    found = lengths.nonzero()  # some hypotheses may be missing
    ends = lengths[found] - 1, found[0], beams + found[1]
    parents[ends], tokens[ends] = last_parents[found], last_tokens[found]
    sequences = np.empty((longest, sentences, returned), dtype=np.int64)
    hypotheses = np.empty_like(sequences)
    sentence = np.arange(sentences)[:, None]
    hypothesis = np.broadcast_to(finished, lengths.shape)  # (B, n) hypotheses of the current step
    for step in range(longest - 1, -1, -1):
        sequences[step] = tokens[step, sentence, hypothesis]
        hypotheses[step] = hypothesis = parents[step, sentence, hypothesis]
    hypotheses = np.where(hypotheses < beams, hypotheses + sentence * beams, FILL)

    def of_hypotheses(table: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(table.reshape(longest, -1).T.copy()).to(endings.device)

    return of_hypotheses(sequences), of_hypotheses(hypotheses)


__all__ = ["FILL", "NO_SCORES", "RULED_OUT", "Beam", "Candidates", "trace_back"]
