"""The metadata of a model card, as earlier programs or authors wrote them."""

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from transformers.utils import logging

logger = logging.get_logger(__name__)

_LISTS = ("language", "datasets", "tags")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-\w+)*")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def metadata_of_card(card: Path) -> dict[str, Any]:
    """Return the metadata of a card; empty if the card is missing or its YAML is broken.

    Languages, data sets and tags are lists.
    """
    if not card.exists():
        return {}
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        logger.warning(f"The metadata of {card} cannot be read and are ignored: {error}")
        return {}
    lists = {key: listed(data.get(key)) for key in _LISTS}
    # YAML reads the code of Norwegian, "no", as False.
    lists["language"] = ["no" if code is False else str(code) for code in lists["language"]]
    return {**data, **lists}


def listed(values: Any) -> list[Any]:
    """Return a value, a list or None as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def is_language(code: str) -> bool:
    """Tell whether a code has the Hub's form of a language: "de", "deu", "pt-BR"."""
    return bool(_LANGUAGE.fullmatch(code))


def is_licence(name: str) -> bool:
    """Tell whether a name has the Hub's form of a licence: "cc-by-4.0", "mit", "other"."""
    return bool(_LICENCE.fullmatch(name))


__all__ = ["is_language", "is_licence", "listed", "metadata_of_card"]
