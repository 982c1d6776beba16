"""Batches of sentences of similar length, which hold little padding."""

from collections.abc import Iterator, Sequence


def batches_by_length(
    lengths: Sequence[tuple[int, ...]],
    max_tokens: int,
    batch_size: int | None = None,
    shortest: int = 1,
) -> Iterator[list[int]]:
    """Group the indices of sentences, or of sentence pairs, the longest first.

    The longest batches come first, so that a batch that is too large for memory fails at once.

    Args:
        lengths: tokens of each sentence, or of both sides of each pair. Empty ones are left out.
        max_tokens: padded tokens of a batch on either side. A longer sentence gets its own batch.
        batch_size: sentences of a batch; None sets no limit.
        shortest: a shorter sentence counts as this many tokens, because its output costs memory.
    """
    longest = [max(sides) for sides in lengths]
    filled = (index for index, length in enumerate(longest) if length)
    order = sorted(filled, key=lambda index: (-longest[index], *lengths[index], index))
    start = 0
    while start < len(order):
        size = max(max_tokens // max(longest[order[start]], shortest), 1)
        end = start + min(size, batch_size or size)
        yield order[start:end]
        start = end


__all__ = ["batches_by_length"]
