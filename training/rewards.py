"""Rewards of translations: the quality of each hypothesis, measured with its reference."""

import functools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any

import torch

from ..configuration.extras import needs
from ..configuration.named_functions import function_of
from ..corpora.token_batches import is_whole
from .objective import ObjectiveError, name_of

# A function that takes hypotheses and references and returns a number per pair. Higher is better.
Reward = Callable[[list[str], list[str]], list[float]]

_LARGEST = torch.finfo(torch.float32).max  # losses are in float32, so rewards must be too


def sentence_bleu(
    hypotheses: list[str], references: list[str], tokenize: str = "13a"
) -> list[float]:
    """Return the BLEU of each sentence, from 0 to 1, with one of sacreBLEU's tokenisations.

    n-grams that are longer than a hypothesis are ignored. Zero counts are smoothed (sacreBLEU's
    "exp").
    """
    return _scores(_bleu(tokenize), hypotheses, references)


@functools.cache  # some tokenisations load a model
def _bleu(tokenize: str) -> Any:
    with needs("vaswani[train]"):
        from sacrebleu.metrics.bleu import BLEU
    return BLEU(effective_order=True, tokenize=tokenize)


def bleu_of(tokenize: str) -> Reward:
    """Return `sentence_bleu` with one of sacreBLEU's tokenisations."""
    chosen = functools.partial(sentence_bleu, tokenize=tokenize)
    return functools.update_wrapper(chosen, sentence_bleu)


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


class RewardInProcesses:
    """A reward that worker processes compute, each for an equal part of the translations.

    Workers start with the first call, and each receives the reward once. They end with the main
    process, even if that is killed.

    Args:
        reward: a function at the top level of a module.
        processes: number of workers.

    Raises:
        ObjectiveError: the reward cannot be sent to another process.
    """

    def __init__(self, reward: Reward, processes: int) -> None:
        self.reward, self.processes = reward, processes
        self.__name__ = name_of(reward)
        try:
            pickle.dumps(reward)
        except Exception as error:
            raise ObjectiveError(
                f"The reward {self.__name__} cannot run in other processes: {error}. Define it at "
                "the top level of a module, or leave out reward_processes."
            ) from error

    @functools.cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # A fork of a process with torch's threads could hang.
        return ProcessPoolExecutor(
            self.processes,
            multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self.reward,),
        )

    def __call__(self, hypotheses: list[str], references: list[str]) -> list[float]:
        """Return the reward of each hypothesis, in order."""
        size = -(-len(hypotheses) // self.processes) or 1
        parts = [slice(start, start + size) for start in range(0, len(hypotheses), size)]
        found = self._pool.map(
            _rewarded_by_worker,
            [hypotheses[part] for part in parts],
            [references[part] for part in parts],
        )
        return [value for values in found for value in values]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the workers. A copy starts its own."""
        return {name: value for name, value in vars(self).items() if name != "_pool"}


_reward_of_worker: Reward  # in a worker process


def _start_worker(reward: Reward) -> None:
    """Keep the reward of this process, and end the process as soon as its parent has ended."""
    global _reward_of_worker
    _reward_of_worker = reward
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _rewarded_by_worker(hypotheses: list[str], references: list[str]) -> list[float]:
    return checked_rewards(_reward_of_worker, hypotheses, references)


def reward_of(reward: str | Reward, processes: int = 0) -> Reward:
    """Return the reward of a name, or import `module:function`. A function is returned unchanged.

    If `processes` is not 0, that many worker processes compute the reward.

    Raises:
        ObjectiveError: the name is unknown, the function cannot be imported, or the number of
            processes is wrong.
    """
    if not is_whole(processes, 0):
        raise ObjectiveError(
            f"reward_processes must be an integer of at least 0, got {processes!r}."
        )
    if processes:
        return RewardInProcesses(reward_of(reward), int(processes))
    if callable(reward):
        return reward
    if reward in REWARDS:
        return REWARDS[reward]
    if isinstance(reward, str) and ":" in reward:
        try:
            return function_of(reward)
        except ValueError as error:
            raise ObjectiveError(f"The reward {error}") from error
    raise ObjectiveError(
        f"There is no reward {reward!r}: choose one of {', '.join(REWARDS)}, or pass a function "
        "(hypotheses, references) -> list of floats, or its name as MODULE:FUNCTION."
    )


def checked_rewards(reward: Reward, hypotheses: list[str], references: list[str]) -> list[float]:
    """Call a reward without gradients, and check the result.

    Raises:
        ObjectiveError: the reward raised an error, or did not return one finite number per
            hypothesis.
    """
    name = name_of(reward)
    try:
        with torch.no_grad():  # the reward may be a network, and may change the lists
            found = reward(list(hypotheses), list(references))
            if isinstance(found, str | bytes | Mapping | Set):
                raise TypeError(f"it returned a {type(found).__name__}")
            # `item` reads arrays and tensors of shape (N,) and (N, 1) alike. A generator runs here.
            values = [float(value.item() if hasattr(value, "item") else value) for value in found]
    except ObjectiveError:  # from a worker process, which names the reward
        raise
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
        if not abs(value) <= _LARGEST:  # comparisons with NaN are false
            raise ObjectiveError(
                f"The reward {name} is {value} for the hypothesis {hypothesis!r} and the reference "
                f"{reference!r}: it must be finite in float32."
            )
    return values


__all__ = [
    "REWARDS",
    "Reward",
    "RewardInProcesses",
    "bleu_of",
    "checked_rewards",
    "reward_of",
    "sentence_bleu",
    "sentence_chrf",
]
