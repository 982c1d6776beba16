"""Several steps of a search in one kernel, between two changes of the batch (section 6.1).

Python between the kernels takes time in each step, which shows in small batches. The kernels of
this file compute what `search_vaswani.py` computes step by step, bit for bit.

Shapes: B sentences, K hypotheses of each (the beam), R of them with states, C candidates of a
sentence, D = d_model, N positions of the cache, T steps, V entries of the target vocabulary.
"""

import ctypes
from typing import Any

import torch
from torch import nn

from .beam_vaswani import NO_SCORES, Beam
from .choice_vaswani import BeamState, Chosen, StepRules
from .compiled_vaswani import CompiledLinear
from .continuations_vaswani import BLOCK, has_kernel
from .incremental_vaswani import IncrementalDecoder
from .library_vaswani import (
    CORES,
    COUNT,
    FLOAT,
    FLOATS,
    NUMBER,
    POINTER,
    address,
    can_compute,
    library,
)
from .products_vaswani import Rounded
from .rules_vaswani import SearchSettings, TokenRules
from .structures_vaswani import Batch

# Steps of a call. A user who interrupts the search waits for its end. 0 turns these kernels off.
MOST_STEPS = 16
_LONG: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}
_INT: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}


class _ReaderState(ctypes.Structure):
    """A decoder that reads tokens, and its memory."""

    _fields_ = (
        *((name, POINTER) for name in ("embedding", "encodings", "layers")),
        ("layers_count", COUNT),
        ("vocabulary", POINTER),
        ("batch", Batch),
        ("memory", POINTER),
        ("rounded", Rounded),
        *((name, POINTER) for name in ("states", "logits", "past", "next_past")),
        ("room", COUNT),
        *((name, POINTER) for name in ("places", "counts")),
    )


class _Choice(ctypes.Structure):
    """The choice of hypotheses, and memory for the candidates."""

    _fields_ = (
        ("rules", StepRules),
        ("penalties", POINTER),
        ("beam", BeamState),
        ("chosen", Chosen),
        ("forgets", NUMBER),
        *((name, COUNT) for name in ("candidates", "block")),
        *((name, POINTER) for name in ("rows_of", "log_sums", "maxima")),
        *((name, POINTER) for name in ("scores", "parents", "tokens")),
    )


class _Reader:
    """A decoder for the next steps of K hypotheses of each of B sentences.

    Args:
        decoder: has read all tokens but the latest.
        shape: (B, K).
    """

    def __init__(self, decoder: IncrementalDecoder, shape: torch.Size) -> None:
        assert decoder.compiled
        assert decoder.embedding
        assert isinstance(decoder.logits, CompiledLinear)
        self.decoder, self.target, rows = decoder, decoder.target, shape.numel()
        layers, linear = decoder.compiled, decoder.logits
        self.threads = layers.threads
        self.pasts = self.target.pasts(shape)
        decoder.encode_position()
        encodings = decoder.positions[decoder.position :]
        room = self.target.room
        self.most = min(MOST_STEPS, len(encodings), (room - self.target.used) // shape[1])
        batch = layers.batch_of_steps(shape, self.target.keys, self.target.values, self.target.used)
        linear.make_room(rows)
        states = torch.empty(rows, batch.width, **FLOATS)
        places, counts = torch.empty(rows, room, **_INT), torch.empty(rows, **_INT)
        pasts = (None, None) if self.pasts is None else map(address, self.pasts)
        self.state = _ReaderState(
            *(ctypes.addressof(decoder.embedding.structure), address(encodings)),
            *(ctypes.addressof(layers.layers), len(layers.layers)),
            *(ctypes.addressof(linear.product), batch),
            *(ctypes.addressof(layers.memory), linear.memory),
            *(address(states), address(linear.outputs), *pasts),
            *(room, address(places), address(counts)),
        )
        self.in_use = encodings, states, places, counts  # keeps their memory

    def take(self, run: Any, *arguments: Any) -> int:
        """Run a kernel of several steps, and tell the decoder how many steps it took."""
        CORES.look(self.threads)
        steps: int = run(ctypes.byref(self.state), *arguments, self.threads)
        if steps > 0:
            self.target.advance(steps, self.state.batch.beams, self.pasts)
            self.decoder.position += steps
        return steps


def several_beam_steps(
    decoder: Any,
    beam: Beam,
    chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    length: int,
    settings: SearchSettings,
    rules: TokenRules,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
    """Take further steps of a beam search, if the kernel covers the decoder and the rules.

    Args:
        decoder: holds the sources. It has read all tokens but those of `chosen`.
        beam: the hypotheses, which the kernel changes in place.
        chosen: the latest choice of `Beam.advance`.
        length: tokens that the hypotheses have.
        settings: settings of the search.
        rules: rules about tokens.

    Returns:
        The parents and tokens (B, K) of each step, and the open rows (R,) after the last one.

    Raises:
        ValueError: a score is NaN.
    """
    shape, candidates = beam.running.shape, settings.candidates
    if (
        not _covers(decoder)
        or not has_kernel(decoder.logits.product.outputs, shape[1], candidates)
        or not can_compute(beam.running, beam.finished)
        or (most := _steps_without_rules(beam.limits, length, rules)) < 1
    ):
        return [], chosen[2]
    reader = _Reader(decoder, shape)
    most, rows = min(most, reader.most), shape.numel()
    floats = (1, decoder.logits.product.outputs // BLOCK)  # of each row
    log_sums, maxima = (torch.empty(rows, count, **FLOATS) for count in floats)
    scores = torch.empty(shape[0], candidates, **FLOATS)
    best = torch.empty(2, *scores.shape, **_LONG)
    rows_of, open_rows = torch.empty(2, rows, **_LONG)
    is_open = 0 if chosen[2] is None else len(chosen[2])
    if chosen[2] is not None:
        open_rows[:is_open] = chosen[2]
    parents, tokens = torch.empty(2, most, *shape, **_LONG)
    penalties = (FLOAT * most)(*(settings.penalty(length + step + 1) for step in range(most)))
    step_rules, state = beam.described(length, settings)
    latest = map(address, (beam.running, *chosen[:2], open_rows))
    choice = _Choice(
        *(step_rules, ctypes.addressof(penalties), state, Chosen(*latest, is_open)),
        *(settings.exact, candidates, BLOCK),
        *map(address, (rows_of, log_sums, maxima, scores, *best)),
    )
    run = library().run_beam_steps
    taken = reader.take(run, ctypes.byref(choice), most, address(parents), address(tokens))
    if taken < 0:
        raise ValueError(NO_SCORES)
    if not taken:
        return [], chosen[2]
    beam.leaving = choice.chosen.done
    choices = list(zip(parents[:taken].unbind(), tokens[:taken].unbind(), strict=True))
    return choices, open_rows[: choice.chosen.rows] if settings.exact else None


def several_greedy_steps(
    decoder: Any,
    latest: torch.Tensor,
    limits: torch.Tensor,
    done: torch.Tensor,
    length: int,
    settings: SearchSettings,
    rules: TokenRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take further steps of a greedy search, if the kernel covers the decoder and the rules.

    Args:
        decoder: holds the sources. It has read all tokens but the latest.
        latest: (B,) the latest tokens.
        limits: (B,) how many tokens each sentence may have.
        done: (B,) sentences that are done.
        length: tokens that each sentence has.
        settings: settings of the search.
        rules: rules about tokens.

    Returns:
        The tokens (T + 1, B), beginning with the latest, and which sentences were done after each
        of these steps (T + 1, B).
    """
    if not _covers(decoder) or (most := _steps_without_rules(limits, length, rules)) < 1:
        return latest[None], done[None]
    reader = _Reader(decoder, torch.Size((len(latest), 1)))
    most, ends = min(most, reader.most), settings.end_array
    tokens = torch.empty(1 + most, len(latest), **_LONG)
    are_done = torch.empty(1 + most, len(latest), dtype=torch.bool, device="cpu")
    tokens[0], are_done[0] = latest, done
    taken = reader.take(
        library().run_greedy_steps,
        *(address(limits), len(latest), length, ctypes.addressof(ends), len(ends), most),
        *(address(tokens), address(are_done)),
    )
    return tokens[: 1 + taken], are_done[: 1 + taken]


def _steps_without_rules(limits: torch.Tensor, length: int, rules: TokenRules) -> int:
    """Count the next steps in which all tokens are allowed, up to `MOST_STEPS`."""
    if rules.never or (rules.ends and length < rules.min_length):
        return 0
    if rules.forced_last is None:
        return MOST_STEPS
    return min(MOST_STEPS, int(limits.min()) - length - 1)


def _covers(decoder: Any) -> bool:
    """Tell whether the kernels compute the steps of a decoder."""
    if (
        not isinstance(decoder, IncrementalDecoder)
        or not isinstance(decoder.logits, CompiledLinear)
        or decoder.compiled is None
        or decoder.embedding is None
    ):
        return False
    widths = {
        *(decoder.embedding.structure.width, decoder.compiled.layers[0].past_qkv.inputs),
        *(decoder.logits.product.inputs, decoder.positions.shape[1]),
    }
    # The kernels know no LayerNorm after the last layer, which models with pre-norm have.
    is_last = type(decoder.norm) is nn.Identity
    return is_last and len(widths) == 1 and can_compute(decoder.positions)


__all__ = ["MOST_STEPS", "several_beam_steps", "several_greedy_steps"]
