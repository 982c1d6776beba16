"""The languages and the data of a model, read from its files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from transformers.utils import cached_file

from ..hub_cards.metadata import listed, metadata_of_card
from ..hub_cards.results import Results
from ..hub_cards.saved_model import SavedModel

_FILES = ("README.md", "results.json", "recipe.yaml")


@dataclass(frozen=True)
class Description:
    """Facts about a model. An empty value means unknown.

    Args:
        languages: codes of the source and the target language.
        training_data: the name of the data that the model was trained on.
        pairs: the number of sentence pairs that the model was trained on.
        samples: source sentences of its test set.
    """

    languages: list[str] = field(default_factory=list)
    training_data: str | None = None
    pairs: int | None = None
    samples: list[str] = field(default_factory=list)

    @property
    def direction(self) -> str | None:
        """The languages by name, such as "English → German"."""
        return " → ".join(map(language_name, self.languages)) or None


def describe(place: str) -> Description:
    """Read the model card, the results file and the recipe of a model.

    The card comes first, because its author may have corrected the languages. Results of other
    weights do not count.

    Args:
        place: a folder or Hub id.
    """
    paths = {name: _found(place, name) for name in _FILES}
    card = metadata_of_card(paths["README.md"]) if paths["README.md"] else {}
    run = _run(place)
    recipe = _recipe(paths["recipe.yaml"])
    runs = [source for source in (run, recipe) if source is not None]
    languages = _card_languages(card) or next(filter(None, (r.languages() for r in runs)), [])
    data = next(filter(None, (r.data_of("train") for r in runs)), None)
    return Description(
        languages=languages,
        training_data=data or ", ".join(map(str, card.get("datasets", []))) or None,
        pairs=run.pairs if run else None,
        samples=list(dict.fromkeys(sample["source"] for sample in run.samples)) if run else [],
    )


def language_name(code: str) -> str:
    """Return the English name of a language, or its code if the name is unknown."""
    # No other required package has a table of language names.
    name = LANGUAGES.get(code.partition("-")[0].lower())
    return name.title() if name else code


def _found(place: str, name: str) -> Path | None:
    """Return the local path of a model's file; None if the file does not exist."""
    try:
        path = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return Path(path) if path else None


def _card_languages(card: dict[str, Any]) -> list[str]:
    """Return source and target language of a card, if a tag has their order."""
    languages, tags = card.get("language", []), card.get("tags", [])
    orders = [languages, languages[::-1]] if len(languages) == 2 else []
    return next((pair for pair in orders if "-".join(pair) in tags), [])


def _run(place: str) -> Results | None:
    """Return the results of the training run, if the folder has them."""
    config = _found(place, "config.json")
    try:
        return SavedModel(config.parent).run if config else None
    except (OSError, ValueError):
        return None


def _recipe(path: Path | None) -> Results | None:
    """Read a recipe as the settings of a run without results."""
    if path is None:
        return None
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(settings, dict):
        return None
    known = {name: value for name, value in settings.items() if _is_text(value)}
    return Results(path, path.name, {"settings": known})


def _is_text(value: Any) -> bool:
    """Tell whether a setting is a string, or a list of strings."""
    return all(isinstance(part, str) for part in listed(value))


__all__ = ["Description", "describe", "language_name"]
