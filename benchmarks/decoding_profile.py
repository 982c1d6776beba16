"""Where our search spends its time, and how often it extends a hypothesis."""

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from base_model import Text, batched
from engines import OURS, PEERS_RULE, TorchEngine, Workshop
from torch.profiler import ProfilerActivity, profile, record_function
from vaswani.generation import steps_vaswani
from vaswani.generation.incremental_vaswani import IncrementalDecoder
from vaswani.generation.library_vaswani import kernel_signatures, library
from worker import synchronize

_STEPS = 20  # of a profile
_RUNS = 5  # runs in which the time outside the kernels is measured
_ONE_BY_ONE = mock.patch.object(steps_vaswani, "MOST_STEPS", 0)  # steps, each in its own kernels

Row = dict[str, Any]


def measure_profile(
    workshop: Workshop,
    text: Text,
    precisions: Sequence[str],
    kinds: Sequence[str],
    beams: Sequence[int],
    batches: Sequence[int],
) -> list[Row]:
    """Return what our search with the peer's rule calls in each setting.

    A row has the shares of the ten slowest operators in the time of all operators, and the calls of
    all operators in a step, of steps that are taken one by one. With compiled kernels, it also has
    the share of the whole time that the search spends outside them, in Python above all. Precisions
    that this machine lacks have no rows.

    Args:
        workshop, text: of the model.
        precisions: of its weights.
        kinds: of sources: "short" or "long".
        beams, batches: numbers of hypotheses and of sentences.
    """
    rows = []
    for precision in precisions:
        try:
            engine = workshop.build(PEERS_RULE, precision)
        except RuntimeError as error:
            print(f"{precision} is missing: {error}")
            continue
        for kind, width, size in itertools.product(kinds, beams, batches):
            setting = {"precision": precision, "text": kind, "beams": width, "batch": size}
            rows.append(setting | _profile(engine, text.middle(size, kind), width, text.forced))
            print("\n" + ", ".join(f"{name} {value}" for name, value in setting.items()))
            for name, share in rows[-1]["shares"].items():
                print(f"{share:7.1%}  {name}", flush=True)
    return rows


def _profile(engine: TorchEngine, sources: list[list[int]], beams: int, forced: int | None) -> Row:
    steps = forced or _STEPS
    on_gpu = engine.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    batch = engine.prepare(sources)

    def run() -> None:
        engine.run(batch, beams, steps)

    for _ in range(4):  # the first runs pack weights, choose kernels for them, and compare them
        run()
    gc.disable()  # a collection would count as time of the operator that it interrupts
    try:
        outside = None if on_gpu else _share_outside_kernels(run)
        with _ONE_BY_ONE, _wrapped_kernels(_recorded), profile(activities=activities) as recorded:
            run()
            synchronize()
    finally:
        gc.enable()
    events = recorded.key_averages()
    taken = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in events
    }
    slowest = sorted(taken, key=lambda name: -taken[name])[:10]
    shares = {name: round(taken[name] / sum(taken.values()), 3) for name in slowest}
    shares["others"] = round(1 - sum(shares.values()), 3)
    row: Row = {"calls_a_step": round(sum(event.count for event in events) / steps)}
    row |= {} if outside is None else {"outside_kernels": outside}
    return row | {"shares": shares}


def _share_outside_kernels(run: Callable[[], None]) -> float | None:
    """Return the share of time that a run spends outside our kernels; None without kernels."""
    inside = 0.0

    def timed(name: str, kernel: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            result = kernel(*arguments)
            inside += time.perf_counter() - start
            return result

        return call

    start = time.perf_counter()
    with _wrapped_kernels(timed):
        for _ in range(_RUNS):
            run()
    return None if inside == 0 else round(1 - inside / (time.perf_counter() - start), 3)


def _recorded(name: str, kernel: Callable) -> Callable:
    """Show a kernel to the profiler, which knows torch's operators only."""

    def call(*arguments: Any) -> Any:
        with record_function(f"vaswani::{name}"):
            return kernel(*arguments)

    return call


@contextlib.contextmanager
def _wrapped_kernels(wrap: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Call `wrap` with the name of each kernel and the kernel, and use what it returns instead."""
    kernels = library()
    before = (
        {} if kernels is None else {name: getattr(kernels, name) for name in kernel_signatures()}
    )
    for name, kernel in before.items():
        setattr(kernels, name, wrap(name, kernel))
    try:
        yield
    finally:
        for name, kernel in before.items():
            setattr(kernels, name, kernel)


def hypotheses_a_sentence(
    workshop: Workshop, text: Text, beams: Sequence[int], sentences: int
) -> list[Row]:
    """Return how often a search extends a hypothesis by a token: the mean of sentences.

    There are rows for both rules.

    Args:
        workshop, text, beams: as for `measure_profile`.
        sentences: the number of sentences to translate.
    """
    sources = [text.sources[index] for index in text.chosen(sentences)]
    rows = []
    for name in (PEERS_RULE, OURS):
        engine = workshop.build(name, "float32")
        for width in beams:
            with _counted_steps() as counts:
                for batch in batched(sources, 32):
                    engine.run(engine.prepare(batch), width, text.forced)
            mean = round(sum(counts) / len(sources), 1)
            rows.append({"engine": name, "beams": width, "sentences": len(sources), "mean": mean})
            print(f"{name}, beam {width}: {mean} extensions of a hypothesis a sentence", flush=True)
    return rows


@contextlib.contextmanager
def _counted_steps() -> Iterator[list[int]]:
    """List how many hypotheses every step extends."""
    counts: list[int] = []
    step = IncrementalDecoder.step

    def counted(
        decoder: IncrementalDecoder,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        counts.append(tokens.numel() if open_rows is None else len(open_rows))
        return step(decoder, tokens, parents, open_rows)

    with _ONE_BY_ONE, mock.patch.object(IncrementalDecoder, "step", counted):
        yield counts


__all__ = ["hypotheses_a_sentence", "measure_profile"]
