"""Links between source and target words from attention, without a model."""

import re

import torch


def linked_units(weights: torch.Tensor, source_units: list[list[int]]) -> list[list[int]]:
    """Return for each target token the units of the source token with the largest weight (T, S).

    Units are numbers of words or tokens. Source tokens without units are left out.
    """
    linkable = [index for index, units in enumerate(source_units) if units]
    if not linkable:
        return [[] for _ in weights]
    return [source_units[linkable[best]] for best in weights[:, linkable].argmax(dim=1).tolist()]


def links_of(sources: list[list[int]], targets: list[list[int]]) -> str:
    """Write the links between the units of target tokens and those of their source tokens."""
    links = {
        (target, source)
        for units, linked in zip(targets, sources, strict=False)
        for target in units
        for source in linked
    }
    return " ".join(f"{source}-{target}" for target, source in sorted(links))


def words_of_tokens(text: str, offsets: list[tuple[int, int]]) -> list[list[int]]:
    """Return for each token of `text` the numbers of the words whose characters it covers."""
    word_at: list[int | None] = [None] * len(text)
    for number, match in enumerate(re.finditer(r"\S+", text)):
        word_at[match.start() : match.end()] = [number] * len(match.group())
    return [
        sorted({word for word in word_at[start:end] if word is not None}) for start, end in offsets
    ]


__all__ = ["linked_units", "links_of", "words_of_tokens"]
