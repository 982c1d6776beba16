"""Windows of a packed batch, in which attention is computed without flash attention.

Batched products of very small matrices are slow, because each product has a fixed cost. Attention
therefore joins short sentences to windows of about 32 tokens, and a mask separates the sentences of
a window. Windows of similar sizes form a group, which is computed by one batched product.

Shapes: B sentences, N tokens of one side, G windows of a group, Q queries and K keys of a window,
P padded rows of all windows, H heads.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..generation.library_vaswani import is_transformed

# Tokens of a window on either side. In wider windows, the scores between sentences, which the mask
# hides, take more time than the joined products save.
_WINDOW = 32
# A sentence with more tokens has its own window. SDPA computes it, without scores in memory and
# without a mask of queries by keys.
LONG = 128
_SIMILAR = 0.8  # least size of a window in a group of wider windows, as a share of the widest


class _SelectRows(torch.autograd.Function):
    """Select rows by `index`. The gradient is selected by `inverse`, which is faster than a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        index: torch.Tensor,
        inverse: torch.Tensor,
        ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.inverse, ctx.ignored = inverse, ignored
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        selected = gradient.index_select(0, ctx.inverse)
        if ctx.ignored is not None:
            selected = selected.masked_fill(ctx.ignored, 0.0)
        return selected, None, None, None


def _select(
    states: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, ignored: torch.Tensor | None
) -> torch.Tensor:
    """Select rows, by an operator of torch in torch.func. Rows of padding have no gradient."""
    if is_transformed():
        return states.index_select(0, index)
    selected: torch.Tensor = _SelectRows.apply(states, index, inverse, ignored)
    return selected


@dataclasses.dataclass(frozen=True)
class Side:
    """Queries or keys of a packed batch, in windows.

    Args:
        rows: (N,) the padded row of each token.
        starts: (N,) the first padded row of each token's window.
        widths: (N,) the number of padded rows of each token's window.
        tokens: (P,) the token of each padded row. Padding repeats the first token of its window.
        sentences: (P,) the sentence of each padded row.
        padding: (P,) True at padding.
        sizes: (G, Q) or (G, K) of each group.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    widths: torch.Tensor
    tokens: torch.Tensor
    sentences: torch.Tensor
    padding: torch.Tensor
    sizes: list[tuple[int, int]]
    _indices: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=dict, init=False
    )

    def indices(self, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices between rows of (N * H, d) and of all groups' (G, H, Q, d).

        Returns:
            Rows to select for the groups, rows to select for (N * H, d), and a mask of padding.
        """
        if heads not in self._indices:
            head = torch.arange(heads, device=self.tokens.device)
            to_windows = self._of_heads(self.tokens * heads, heads, head)
            padding = self._of_heads(self.padding, heads)
            inside = self.rows - self.starts
            to_tokens = (self.starts * heads + inside)[:, None] + self.widths[:, None] * head
            self._indices[heads] = to_windows, to_tokens.flatten(), padding[:, None]
        return self._indices[heads]

    def _of_heads(
        self, values: torch.Tensor, heads: int, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Repeat values of padded rows (P,) for each head, in the order of (G, H, Q)."""
        parts = []
        for part in self.of_groups(values):
            repeated = part[:, None].expand(-1, heads, -1)
            parts.append((repeated if more is None else repeated + more[:, None]).flatten())
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_groups(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Divide values of padded rows (P,) into those of groups (G, Q)."""
        return _divided(values, self.sizes)

    def divide(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Divide (N, H, d) into windows: (G * H, Q, d) for each group."""
        heads = states.shape[1]
        to_windows, to_tokens, _ = self.indices(heads)
        rows = _select(states.reshape(-1, states.shape[2]), to_windows, to_tokens, None)
        parts = rows.split([number * heads * size for number, size in self.sizes])
        return [
            part.view(number * heads, size, -1)
            for part, (number, size) in zip(parts, self.sizes, strict=True)
        ]

    def join(self, parts: Iterable[torch.Tensor], heads: int) -> torch.Tensor:
        """Join (G * H, Q, d) of all groups to (N, H, d), without padding."""
        to_windows, to_tokens, padding = self.indices(heads)
        rows = [part.flatten(0, 1) for part in parts]
        states = torch.cat(rows) if len(rows) > 1 else rows[0]
        return _select(states, to_tokens, to_windows, padding).unflatten(0, (-1, heads))


class Windows:
    """The sentences of a packed batch, in groups of windows.

    Args:
        lengths: (B, 2) number of queries and keys of each sentence, on the CPU.
        device: device of the indices.
        join: put short sentences together; else each sentence has its own window.
    """

    def __init__(self, lengths: torch.Tensor, device: torch.device, join: bool = True) -> None:
        pairs = lengths.tolist()
        windows = (
            _windows(pairs) if join else [_Window([i], (q, k)) for i, (q, k) in enumerate(pairs)]
        )
        groups = _groups(windows)
        self.sentences = [[window.sentences[0] for window in group] for group in groups]
        self.queries = _side(groups, 0, lengths, device)
        same = bool((lengths[:, 0] == lengths[:, 1]).all())
        self.keys = self.queries if same else _side(groups, 1, lengths, device)
        self._masks: dict[Any, torch.Tensor] = {}

    def hidden(self, group: int, causal: bool) -> torch.Tensor:
        """Return a mask of the keys that the queries of a group do not see: (G, Q, K)."""
        queries = self.queries.of_groups(self.queries.sentences)[group]
        keys = self.keys.of_groups(self.keys.sentences)[group]
        hidden = (queries[:, :, None] != keys[:, None]) | self.padded_keys(group)[:, None]
        if causal:
            hidden |= hidden.new_ones(hidden.shape[1:]).triu(1)
        return hidden

    def padded_keys(self, group: int) -> torch.Tensor:
        """Return a mask of the padding among the keys of a group: (G, K)."""
        return self.keys.of_groups(self.keys.padding)[group]

    def additive(self, group: int, causal: bool, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a mask to add to the scores of a group, (G * H, Q, K): 0 or -inf."""
        key = group, causal, heads, dtype
        if key not in self._masks:
            hidden = self.hidden(group, causal)
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask[:, None].expand(-1, heads, -1, -1).flatten(0, 1)
        return self._masks[key]


class _Window(NamedTuple):
    """The sentences of a window, and the numbers of their queries and keys."""

    sentences: list[int]
    sizes: tuple[int, int]


def _windows(lengths: list[list[int]]) -> list[_Window]:
    """Fill each window with a long sentence and as many of the shortest as it has room for."""
    order = sorted(range(len(lengths)), key=lambda sentence: -max(lengths[sentence]))
    windows, first, end = [], 0, len(order)
    while first < end:
        window, (queries, keys) = [order[first]], lengths[order[first]]
        room, first = max(_WINDOW, queries, keys), first + 1
        while first < end and room <= LONG:
            more_queries, more_keys = lengths[order[end - 1]]
            if max(queries + more_queries, keys + more_keys) > room:
                break
            queries, keys, end = queries + more_queries, keys + more_keys, end - 1
            window.append(order[end])
        windows.append(_Window(window, (queries, keys)))
    return windows


def _groups(windows: list[_Window]) -> list[list[_Window]]:
    """Divide windows into groups of similar sizes, the longest first."""
    groups: list[list[_Window]] = []
    shortest = 0.0
    for window in sorted(windows, key=lambda window: -max(window.sizes)):
        longest = max(window.sizes)
        if not groups or longest < shortest:
            groups.append([])
            shortest = 0.0 if longest <= _WINDOW else _SIMILAR * longest
            shortest = max(shortest, LONG + 1) if longest > LONG else shortest
        groups[-1].append(window)
    return groups


def _side(
    groups: list[list[_Window]], which: int, lengths: torch.Tensor, device: torch.device
) -> Side:
    """Describe the queries (0) or the keys (1) of groups of windows."""
    of_sentence: list[Any] = [None] * len(lengths)  # first row, first row of the window, its width
    numbers, sizes, start = lengths[:, which].tolist(), [], 0
    for group in groups:
        width = max(window.sizes[which] for window in group)
        sizes.append((len(group), width))
        for window in group:
            row = start
            for sentence in window.sentences:
                of_sentence[sentence] = row, start, width
                row += numbers[sentence]
            start += width
    host = lengths.device  # and not torch's default device
    sentences = torch.arange(len(lengths), device=host)
    sentences = sentences.repeat_interleave(lengths[:, which])  # (N,)
    first, starts, widths = torch.tensor(of_sentence, device=host)[sentences].unbind(dim=1)
    number = torch.arange(len(sentences), device=host)
    ends = lengths[:, which].cumsum(0)
    rows = first + number - (ends - lengths[:, which])[sentences]
    tokens = torch.full((start,), -1, device=host)
    tokens[rows] = number
    padding = tokens < 0
    # The first token of each window is real.
    tokens = torch.cat(
        [torch.where(part < 0, part[:, :1], part).flatten() for part in _divided(tokens, sizes)]
    )
    found = (rows, starts, widths, tokens, sentences[tokens], padding)
    rows, starts, widths, tokens, sentences, padding = (values.to(device) for values in found)
    return Side(rows, starts, widths, tokens, sentences, padding, sizes)


def _divided(values: torch.Tensor, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Divide values of padded rows (P,) into those of groups (G, Q)."""
    parts = values.split([number * size for number, size in sizes])
    return [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]


__all__ = ["LONG", "Side", "Windows"]
