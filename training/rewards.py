"""Rewards of translations: the quality of each hypothesis, measured with its reference."""

import math
from collections.abc import Callable
from typing import Any

from ..configuration.extras import needs
from .objective import ObjectiveError

# A function that takes hypotheses and references and returns a number per pair. Higher is better.
Reward = Callable[[list[str], list[str]], list[float]]


def sentence_bleu(hypotheses: list[str], references: list[str]) -> list[float]:
    """Return the BLEU of each sentence, from 0 to 1.

    n-grams that are longer than a hypothesis are ignored. Zero counts are smoothed (sacreBLEU's
    "exp").
    """
    with needs("vaswani[train]"):
        from sacrebleu.metrics.bleu import BLEU
    return _scores(BLEU(effective_order=True), hypotheses, references)


def sentence_chrf(hypotheses: list[str], references: list[str]) -> list[float]:
    """Return the chrF2 of each sentence, from 0 to 1."""
    with needs("vaswani[train]"):
        from sacrebleu.metrics.chrf import CHRF
    return _scores(CHRF(), hypotheses, references)


def _scores(metric: Any, hypotheses: list[str], references: list[str]) -> list[float]:
    return [
        metric.sentence_score(hypothesis, [reference]).score / 100
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]


REWARDS: dict[str, Reward] = {"bleu": sentence_bleu, "chrf": sentence_chrf}


def reward_of(reward: str | Reward) -> Reward:
    """Return the reward of a name. A function is returned unchanged.

    Raises:
        ObjectiveError: the name is unknown.
    """
    if callable(reward):
        return reward
    if reward not in REWARDS:
        raise ObjectiveError(
            f"There is no reward {reward!r}: choose one of {', '.join(REWARDS)}, or pass a "
            "function (hypotheses, references) -> list of floats."
        )
    return REWARDS[reward]


def rewarded(reward: Reward, hypotheses: list[str], references: list[str]) -> list[float]:
    """Call a reward and check the result.

    Raises:
        ObjectiveError: the reward raised an error, or did not return one finite number per
            hypothesis.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        values = [float(value) for value in reward(hypotheses, references)]
    except Exception as error:
        raise ObjectiveError(
            f"The reward {name} failed with {type(error).__name__}: {error}. A reward gets two "
            "lists of strings, hypotheses and references, and returns a list of floats."
        ) from error
    if len(values) != len(hypotheses):
        raise ObjectiveError(
            f"The reward {name} returned {len(values)} numbers for {len(hypotheses)} hypotheses."
        )
    for value, hypothesis, reference in zip(values, hypotheses, references, strict=True):
        if not math.isfinite(value):
            raise ObjectiveError(
                f"The reward {name} is {value} for the hypothesis {hypothesis!r} and the reference "
                f"{reference!r}: it must be finite."
            )
    return values


__all__ = ["REWARDS", "Reward", "reward_of", "rewarded", "sentence_bleu", "sentence_chrf"]
