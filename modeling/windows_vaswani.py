"""Windows of a packed batch, in which attention on CPUs is computed.

Batched products of small matrices spend most of their time between the products. Attention
therefore joins short sentences to windows of about 32 tokens, and a mask separates the sentences of a
window. Windows of similar sizes form a group, and a group is computed by one batched product.

Shapes: B sentences, N tokens of one side, G windows of a group, Q queries and K keys of a window,
P padded rows of all windows, H heads.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

_WINDOW = 32  # tokens on either side; wider windows compute more scores than they save in time
_SIMILAR = 0.8  # a group of longer sentences has windows of at least this share of the longest


class _SelectRows(torch.autograd.Function):
    """Select rows by `there`; the gradient is selected by `back`, not summed as by index_select."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        there: torch.Tensor,
        back: torch.Tensor,
        ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.back, ctx.ignored = back, ignored
        return states.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        selected = gradient.index_select(0, ctx.back)
        if ctx.ignored is not None:
            selected = selected.masked_fill(ctx.ignored, 0.0)
        return selected, None, None, None


@dataclasses.dataclass(frozen=True)
class Side:
    """Queries or keys of a packed batch, in windows.

    Args:
        rows: (N,) the padded row of each token.
        tokens: (P,) the token of each padded row. Padding repeats the first token of its window.
        sentences: (P,) the sentence of each padded row.
        padding: (P,) True at padding.
        sizes: (G, Q) or (G, K) of each group.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    sentences: torch.Tensor
    padding: torch.Tensor
    sizes: list[tuple[int, int]]

    @functools.cached_property
    def _indices(self) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return {}

    def indices(self, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices between rows of (N * H, d) and of all groups' (G, H, Q, d).

        Returns:
            Rows to select for the groups, rows to select for (N * H, d), and a mask of padding.
        """
        if heads not in self._indices:
            head, by_group = torch.arange(heads, device=self.tokens.device)[:, None], []
            for tokens, padding in zip(
                self.of_groups(self.tokens), self.of_groups(self.padding), strict=True
            ):
                rows = tokens[:, None] * heads + head  # (G, H, Q)
                by_group.append((rows.flatten(), padding[:, None].expand_as(rows).flatten()))
            there, padding = (torch.cat(parts) for parts in zip(*by_group, strict=True))
            back = torch.empty(len(self.rows) * heads, dtype=torch.long, device=there.device)
            real = (~padding).nonzero()[:, 0]
            back[there[real]] = real
            self._indices[heads] = there, back, padding[:, None]
        return self._indices[heads]

    def of_groups(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Divide values of padded rows (P,) into those of groups (G, Q)."""
        parts = values.split([number * size for number, size in self.sizes])
        return [part.view(shape) for part, shape in zip(parts, self.sizes, strict=True)]

    def divide(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Divide (N, H, d) into windows: (G * H, Q, d) for each group."""
        heads = states.shape[1]
        there, back, _ = self.indices(heads)
        rows = _SelectRows.apply(states.reshape(-1, states.shape[2]), there, back, None)
        parts = rows.split([number * heads * size for number, size in self.sizes])
        return [
            part.view(number * heads, size, -1)
            for part, (number, size) in zip(parts, self.sizes, strict=True)
        ]

    def join(self, parts: Iterable[torch.Tensor], heads: int) -> torch.Tensor:
        """Join (G * H, Q, d) of all groups to (N, H, d), without padding."""
        there, back, padding = self.indices(heads)
        rows = [part.flatten(0, 1) for part in parts]
        states = torch.cat(rows) if len(rows) > 1 else rows[0]
        return _SelectRows.apply(states, back, there, padding).unflatten(0, (-1, heads))


class Windows:
    """The sentences of a packed batch, in groups of windows.

    Args:
        lengths: (B, 2) number of queries and keys of each sentence, on the CPU.
        device: of the indices.
        join: put short sentences together; else each sentence has its own window.
    """

    def __init__(self, lengths: torch.Tensor, device: torch.device, join: bool = True) -> None:
        pairs = lengths.tolist()
        windows = _windows(pairs) if join else [[sentence] for sentence in range(len(pairs))]
        starts, sizes, self.sentences = _places(windows, pairs)
        self.queries, self.keys = (
            _side(torch.tensor([start[side] for start in starts]), lengths[:, side], size, device)
            for side, size in enumerate(zip(*sizes, strict=True))
        )
        self._masks: dict[Any, list[torch.Tensor]] = {}

    def hidden(self, causal: bool) -> list[torch.Tensor]:
        """Return masks of keys that queries do not see, (G, Q, K) for each group."""
        if causal not in self._masks:
            self._masks[causal] = [
                _hidden(*of_group, causal)
                for of_group in zip(
                    self.queries.of_groups(self.queries.sentences),
                    self.keys.of_groups(self.keys.sentences),
                    self.keys.of_groups(self.keys.padding),
                    strict=True,
                )
            ]
        return self._masks[causal]

    def additive(self, causal: bool, heads: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return masks to add to scores, (G * H, Q, K) for each group: 0 or -inf."""
        key = causal, heads, like.dtype
        if key not in self._masks:
            self._masks[key] = [
                torch.zeros_like(hidden, dtype=like.dtype)
                .masked_fill_(hidden, -torch.inf)
                .repeat_interleave(heads, dim=0)
                for hidden in self.hidden(causal)
            ]
        return self._masks[key]


def _windows(lengths: list[list[int]]) -> list[list[int]]:
    """Fill each window with a long sentence and as many of the shortest as it has room for."""
    order = sorted(range(len(lengths)), key=lambda sentence: -max(lengths[sentence]))
    windows, last = [], len(order)
    for first, sentence in enumerate(order):
        if first >= last:
            break
        queries, keys = lengths[sentence]
        size, window = max(_WINDOW, queries, keys), [sentence]
        while last - 1 > first:
            more_queries, more_keys = lengths[order[last - 1]]
            if max(queries + more_queries, keys + more_keys) > size:
                break
            queries, keys, last = queries + more_queries, keys + more_keys, last - 1
            window.append(order[last])
        windows.append(window)
    return windows


def _places(
    windows: list[list[int]], lengths: list[list[int]]
) -> tuple[list[tuple[int, int]], list[Any], list[list[int]]]:
    """Return the first padded rows of each sentence, the groups' sizes, and their sentences.

    The sizes of a group are (G, Q) and (G, K).
    """
    filled = [[sum(lengths[sentence][side] for sentence in window) for side in (0, 1)] for window in windows]
    starts: list[Any] = [None] * len(lengths)
    groups: list[list[int]] = []
    for number in sorted(range(len(windows)), key=lambda number: -max(filled[number])):
        longest = max(filled[groups[-1][0]]) if groups else 0
        if groups and (longest <= _WINDOW or max(filled[number]) >= _SIMILAR * longest):
            groups[-1].append(number)
        else:
            groups.append([number])
    first, sizes = [0, 0], []
    for group in groups:
        widths = [max(filled[number][side] for number in group) for side in (0, 1)]
        for place, number in enumerate(group):
            row = [first[side] + place * widths[side] for side in (0, 1)]
            for sentence in windows[number]:
                starts[sentence] = tuple(row)
                row = [row[side] + lengths[sentence][side] for side in (0, 1)]
        sizes.append(tuple((len(group), width) for width in widths))
        first = [first[side] + len(group) * widths[side] for side in (0, 1)]
    return starts, sizes, [[windows[number][0] for number in group] for group in groups]


def _side(
    starts: torch.Tensor, lengths: torch.Tensor, sizes: tuple[Any, ...], device: torch.device
) -> Side:
    """Describe one side, from the first padded row and the length of each sentence (B,)."""
    total, number = int(lengths.sum()), sum(windows * size for windows, size in sizes)
    of_token = torch.arange(len(lengths)).repeat_interleave(lengths)  # (N,) sentences
    positions = torch.arange(total) - (lengths.cumsum(0) - lengths)[of_token]
    rows = starts[of_token] + positions
    tokens = torch.full((number,), -1)
    tokens[rows] = torch.arange(total)
    padding = tokens < 0
    side = Side(rows, tokens, of_token, padding, list(sizes))
    tokens = torch.cat(
        [torch.where(part < 0, part[:, :1], part).flatten() for part in side.of_groups(tokens)]
    )
    return Side(
        rows=rows.to(device),
        tokens=tokens.to(device),
        sentences=of_token[tokens].to(device),
        padding=padding.to(device),
        sizes=list(sizes),
    )


def _hidden(
    queries: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Compare sentences of queries (G, Q) and keys (G, K): a mask of hidden keys (G, Q, K)."""
    hidden = (queries[:, :, None] != keys[:, None]) | padding[:, None]
    if causal:
        later = torch.ones(hidden.shape[1:], dtype=torch.bool, device=hidden.device).triu(1)
        hidden |= later
    return hidden


__all__ = ["Side", "Windows"]
