"""Keys and values of source and target, while a decoder writes a token at a time (section 3.2.3).

Shapes: B sentences, K hypotheses of each (the beam), S source tokens, N positions of the target, L
layers, H heads.
"""

import torch
from torch.nn import functional as F  # noqa: N812

from .library_vaswani import can_compute
from .memory_vaswani import empty
from .structures_vaswani import descend

_FIRST_ROOM = 64  # positions of a new cache; a beam of 4 fills them in 16 steps
_SPARE_ROOM = 4  # times as much as is needed, on a CPU


class SourceCache:
    """Keys and values of the source, once per sentence, not once per hypothesis.

    `keys` are (L, B, H, S, d_k), and `values` (L, B, H, S, d_v). `mask` is (B, H, 1, S), 0 at real
    tokens and -inf at padding, or (B, H, 1, 1) without padding. A sentence of padding only has a
    mask of 0 and values of 0.

    Args:
        keys: (L, B, H, S, d_k).
        values: (L, B, H, S, d_v).
        real: (B, S), True at tokens that are not padding.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.mask = keys.new_zeros(*keys.shape[1:3], 1, 1)
        if not real.all():
            nothing = ~real.any(dim=1)  # (B,)
            if nothing.any():  # zeros, as from SDPA, if there is no token to attend to
                self.values.masked_fill_(nothing[:, None, None, None], 0)
            unseen = ~real & ~nothing[:, None]
            self.mask = self.mask.masked_fill(unseen[:, None, None], -torch.inf)

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys (B * H, d_k, S) and values (B * H, S, d_v) by layer."""
        keys, values = self.keys.flatten(1, 2).transpose(2, 3), self.values.flatten(1, 2)
        return list(zip(keys, values, strict=True))

    def keep(self, sentences: list[int]) -> None:
        """Drop all sentences but these, given by their numbers."""
        self.keys, self.values = (
            move_to_front(cache.transpose(0, 1), sentences).transpose(0, 1)
            for cache in (self.keys, self.values)
        )
        self.mask = move_to_front(self.mask, sentences)

    @property
    def seen(self) -> torch.Tensor:
        """The mask of the source tokens (B, S), 0 or -inf."""
        return self.mask[:, 0, 0].expand(-1, self.keys.shape[3])


class TargetCache:
    """Keys and values of the target so far.

    The hypotheses of a sentence share one list of positions, and a mask tells which positions are
    the past of a hypothesis. A choice of hypotheses changes only the mask; keys and values are not
    copied.

    `keys` are (L, B, H, N, d_k), and `values` (L, B, H, N, d_v). `past` is (B, K, N), 0 at a
    hypothesis' past and -inf elsewhere; None means that all see the same. `used` counts the
    positions in use, and `room` is their limit. At the limit, positions without a descendant (dead
    ends) are dropped.

    Args:
        shape: (L, B, H).
        widths: d_k and d_v.
        like: a tensor with the dtype and device of the cache.
        can_compile: whether the compiled kernels may change the mask.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        widths: tuple[int, int],
        like: torch.Tensor,
        can_compile: bool,
    ) -> None:
        self.keys, self.values = (like.new_empty((*shape, 0, width)) for width in widths)
        self.can_compile = can_compile
        self.used = self.room = 0
        self.past: torch.Tensor | None = None
        self.earlier_past: torch.Tensor | None = None  # memory for the next `past`

    def descend(
        self, shape: torch.Size, parents: torch.Tensor | None, padding: torch.Tensor | None
    ) -> None:
        """Let each hypothesis see its parent's past and itself.

        Args:
            shape: (B, K).
            parents: (B, K) the hypothesis of the previous step that each new one extends.
            padding: (B, T), True at padding of the prompt.
        """
        beams = shape[1]
        if self.past is None:
            self.past = self._past_of_prompt(shape)
            if padding is not None:
                self.past[:, :, : self.used].masked_fill_(padding[:, None], -torch.inf)
        elif parents is not None:
            if self.used + beams <= self.room and self.can_compile and can_compute(self.past):
                free = self._other_past(self.past)
                self.earlier_past = self.past
                self.past = descend(self.past, parents, self.used, free)
                return
            self.past = self.past.gather(1, parents[:, :, None].expand_as(self.past))
        self.make_room(beams)
        end = self.used + beams
        self.past[:, :, self.used : end].diagonal(dim1=1, dim2=2).zero_()

    def pasts(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Make room for a step, and return the past of hypotheses (B, K) and memory for the next.

        Both are (B, K, N). None means that all hypotheses see the same.
        """
        if self.past is None and shape[1] > 1:
            self.past = self._past_of_prompt(shape)
        self.make_room(shape[1])
        return None if self.past is None else (self.past, self._other_past(self.past))

    def advance(
        self, steps: int, beams: int, pasts: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """Note that a kernel took steps of K hypotheses, and swapped `pasts` in each step."""
        self.used += steps * beams
        if pasts is not None:
            self.past, self.earlier_past = reversed(pasts) if steps % 2 else pasts

    def _past_of_prompt(self, shape: torch.Size) -> torch.Tensor:
        """Return the mask of hypotheses (B, K) that see the prompt alone: (B, K, N)."""
        past = self.keys.new_full((*shape, self.room), -torch.inf)
        past[:, :, : self.used] = 0
        return past

    def _other_past(self, past: torch.Tensor) -> torch.Tensor:
        """Return memory for a mask of the shape of `past`."""
        free = self.earlier_past
        return torch.empty_like(past) if free is None or free.shape != past.shape else free

    def keep(self, sentences: list[int]) -> None:
        """Drop all sentences but these, given by their numbers."""
        for cache in (self.keys, self.values):
            move_to_front(cache[:, :, :, : self.used].transpose(0, 1), sentences)
        self.keys, self.values = self.keys[:, : len(sentences)], self.values[:, : len(sentences)]
        self.past = None if self.past is None else move_to_front(self.past, sentences)

    def make_room(self, positions: int) -> None:
        """Make room for more positions."""
        if self.used + positions <= self.room:
            return
        if self.past is not None:
            self._drop_dead_ends(self.past)
        if 2 * (self.used + positions) <= self.room:
            return
        self.room = max(2 * self.room, 2 * positions, _FIRST_ROOM)
        if self.past is not None:
            self.past = F.pad(self.past, (0, self.room - self.past.shape[2]), value=-torch.inf)
        if self.room > self.keys.shape[3]:
            # A CPU takes memory when it is written. Room for later is free there, and copies cost.
            spare = _SPARE_ROOM if self.keys.device.type == "cpu" else 1
            try:
                self._grow(self.room * spare)
            except RuntimeError:  # memory has no spare room
                if spare == 1:
                    raise
                self._grow(self.room)

    def _grow(self, capacity: int) -> None:
        """Make room for that many positions of keys and values."""
        self.keys, self.values = (
            self._grown(cache, capacity) for cache in (self.keys, self.values)
        )

    def _grown(self, cache: torch.Tensor, capacity: int) -> torch.Tensor:
        """Copy keys or values, with room for more positions."""
        *shape, _, width = cache.shape
        # Positions that are not taken stay without values, because nothing reads them.
        grown = empty((*shape, capacity, width), cache.dtype, cache.device)
        grown[:, :, :, : self.used] = cache[:, :, :, : self.used]
        return grown

    def _drop_dead_ends(self, past: torch.Tensor) -> None:
        """Move the positions that belong to the past of a hypothesis to the front."""
        alive = (past == 0).any(dim=1)  # (B, N)
        self.used = int(alive.sum(dim=1).max())
        # Sentences with fewer live positions keep dead ones at the end. The mask hides them.
        order = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        self.past = past.gather(2, order[:, None].expand_as(past))
        living = order[:, None, : self.used, None]
        # By layer, because the allocator returns the memory of larger copies to the system.
        for layer in (*self.keys, *self.values):
            sentences, heads, _, width = layer.shape
            layer[:, :, : self.used] = layer.gather(2, living.expand(sentences, heads, -1, width))


def move_to_front(rows: torch.Tensor, sentences: list[int]) -> torch.Tensor:
    """Move the rows of these sentences to the front, in place. Return a view of them.

    A sentence stays at its place, or takes the place of one that is dropped.
    """
    for place, sentence in enumerate(sentences):
        if place != sentence:
            rows[place].copy_(rows[sentence])
    return rows[: len(sentences)]


__all__ = ["SourceCache", "TargetCache", "move_to_front"]
