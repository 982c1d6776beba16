"""Token counts of all pairs, for the planning of token batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..configuration.extras import needs

with needs("vaswani[train]"):
    import datasets
    import pyarrow.compute


def token_counts(dataset: Any) -> np.ndarray:
    """Count the tokens of `input_ids` and `labels` in every row: (N, 2).

    Raises:
        ValueError: a column or a value is missing, or the data are several splits.
    """
    columns = ("input_ids", "labels")
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"The training data are splits ({', '.join(map(str, dataset))}): pass one of them."
        )
    if not len(dataset):
        raise ValueError("The training data are empty.")
    if _is_table(dataset):
        missing = [column for column in columns if column not in dataset.column_names]
        if missing:
            raise ValueError(
                f"The training data have no column {missing[0]!r}, only "
                f"{', '.join(map(repr, dataset.column_names))}: tokenize the data, or pass lengths."
            )
        for name in columns:
            feature = dataset.features[name]
            if not hasattr(feature, "feature") and not isinstance(feature, list):
                raise ValueError(
                    f"The column {name!r} of the training data holds {feature}, not lists of "
                    "tokens: tokenize the data."
                )
        tables = dataset.select_columns(list(columns)).with_format("arrow").iter(100_000)
        lengths = [
            np.stack([pyarrow.compute.list_value_length(table[name]) for name in columns], axis=1)
            for table in tables
        ]
        return _without_nulls(np.concatenate(lengths), columns)
    try:
        # Rows are read by number, because a data set of PyTorch need not end an iteration.
        rows = (dataset[number] for number in range(len(dataset)))
        pairs = ([row[name] for name in columns] for row in rows)
        counts = [[np.nan if side is None else len(side) for side in pair] for pair in pairs]
        return _without_nulls(np.array(counts), columns)
    except KeyError as error:
        raise ValueError(
            f"A row of the training data has no {error.args[0]!r}: tokenize them, or pass lengths."
        ) from error
    except TypeError as error:  # a number has no length
        raise ValueError(
            f"A row of the training data has no list of tokens: tokenize the data ({error})."
        ) from error


def _without_nulls(counts: np.ndarray, columns: tuple[str, ...]) -> np.ndarray:
    """Return counts as integers, and refuse NaN, which stands for a missing value."""
    rows, sides = np.nonzero(np.isnan(counts))
    if len(rows):
        raise ValueError(
            f"Row {rows[0]} of the training data, counted from 0, has None in "
            f"{columns[sides[0]]!r}: leave the row out."
        )
    return counts.astype(np.int64)


def counts_fast(dataset: Any) -> bool:
    """Tell whether `token_counts` reads a table with the tokens, instead of making every row."""
    return _is_table(dataset) and {"input_ids", "labels"} <= set(dataset.column_names)


def _is_table(dataset: Any) -> bool:
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def first_empty(lengths: Any, side: int) -> int | None:
    """Return the first row without tokens on a side, 0 for the source and 1 for the target."""
    rows = np.flatnonzero(np.asarray(lengths)[:, side] == 0)
    return int(rows[0]) if len(rows) else None


__all__ = ["counts_fast", "first_empty", "token_counts"]
