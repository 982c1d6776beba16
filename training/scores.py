"""Scores of a finished model with its saved decoding settings (section 6.1)."""

import time
from collections.abc import Sequence
from typing import Any

from ..corpora.reading import Pair
from ..generation.pipeline_vaswani import VaswaniTranslationPipeline
from .metrics import TranslationMetric, nbest_accuracy

_ROUNDED = ("chrf", "compound_split_bleu", "exact_match")


def translate_and_score(
    translator: VaswaniTranslationPipeline,
    metric: TranslationMetric,
    pairs: Sequence[Pair],
    beams: int,
    nbest: int = 1,
) -> tuple[dict[str, Any], list[list[str]]]:
    """Translate the sources. Return scores, and the `nbest` translations of each, best first."""
    started = time.monotonic()
    sources, references = zip(*pairs, strict=True)
    outputs = translator(iter(sources), num_beams=beams, num_return_sequences=nbest, progress=None)
    candidates = [[output["translation_text"] for output in best] for best in outputs]
    figures = metric.compute(predictions=[best for best, *_ in candidates], references=references)
    scores = {
        "bleu": round(figures["bleu"], 2),
        "brevity_penalty": round(figures["brevity_penalty"], 4),
        "signature": figures["bleu_signature"],
        **{name: round(figures[name], 2) for name in _ROUNDED},
        "chrf_signature": figures["chrf_signature"],
        "compound_split_bleu_signature": figures["compound_split_bleu_signature"],
        "beams": beams,
        "seconds": round(time.monotonic() - started, 1),
    }
    if nbest > 1:
        accuracy = nbest_accuracy(candidates, references)
        scores["nbest_accuracy"] = [round(figure, 2) for figure in accuracy]
    return scores, candidates


__all__ = ["translate_and_score"]
