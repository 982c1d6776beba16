"""Ratios of decoding speed, and the aim of each."""

import statistics
from typing import Any

import torch
from engines import OURS, PEERS_RULE

SETTING = ("allocator", "instructions", "text", "beams", "batch")
# The least ratio that we want: (our rule, our precision, the peer) in batches of a size and more.
AIMS = (
    (PEERS_RULE, "best", ("CTranslate2", "int8"), 1, 1.5),
    (OURS, "best", ("CTranslate2", "int8"), 1, 1.2),
    (PEERS_RULE, "float32", ("CTranslate2", "float32"), 1, 1.3),
    (PEERS_RULE, "float32", ("MarianMT", "float32"), 8, 2.5),
    (PEERS_RULE, "bfloat16", ("MarianMT", "bfloat16"), 8, 2.5),
)
AIM_WITH_FEWER_INSTRUCTIONS = 1.1  # of our best precision with the peer's rule, against int8
AIM_WITH_GLIBC = 1.05  # of our times with glibc, divided by those with tcmalloc: at most

Row = dict[str, Any]


def search_name(row: Row) -> str:
    """Name the search of a row: "greedy" or "beam 4"."""
    return "greedy" if row["beams"] == 1 else f"beam {row['beams']}"


def best_precision(rows: list[Row]) -> dict[tuple[str, str, str], str]:
    """Return our fastest precision by allocator, instructions and text.

    One precision is the best for all beams and batches: the precision with the least mean
    logarithm of the seconds.
    """
    logs: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row["engine"] == PEERS_RULE:
            place = (row["allocator"], row["instructions"], row["text"])
            seconds = torch.tensor(statistics.median(row["seconds"])).log().item()
            logs.setdefault(place, {}).setdefault(row["precision"], []).append(seconds)
    return {
        place: min(found, key=lambda kind: statistics.mean(found[kind]))
        for place, found in logs.items()
    }


def compare(rows: list[Row]) -> list[Row]:
    """Return how many times faster ours is than each peer, with the aim of each ratio."""
    found = {
        (*(row[name] for name in SETTING), row["engine"], row["precision"]): row for row in rows
    }
    best = best_precision(rows)
    ratios = []
    for setting in dict.fromkeys(key[: len(SETTING)] for key in found):
        for rule, kind, peer, smallest, least in AIMS:
            precision = best.get(setting[:3], "") if kind == "best" else kind
            ours, theirs = found.get((*setting, rule, precision)), found.get((*setting, *peer))
            if ours is None or theirs is None:
                continue
            pairs = zip(theirs["seconds"], ours["seconds"], strict=False)  # an engine may fail late
            values = sorted(other / own for other, own in pairs)
            row = dict(zip(SETTING, setting, strict=True))
            row |= {"ours": f"{rule}, {precision}", "peer": " ".join(peer)}
            row |= {"rule": rule, "least": values[0], "median": statistics.median(values)}
            row |= {"most": values[-1], "aim": None}
            if row["instructions"] == "native":
                row["aim"] = least if row["batch"] >= smallest else None
            elif kind == "best" and rule == PEERS_RULE:
                row["aim"] = AIM_WITH_FEWER_INSTRUCTIONS
            ratios.append(row)
    return ratios


__all__ = ["SETTING", "best_precision", "compare", "search_name"]
