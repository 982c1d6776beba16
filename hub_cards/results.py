"""Results files: the source of every number in a model card."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import EvalResult

from ..corpora.names import (
    COMPRESSED,
    DataSetName,
    data_set_name,
    form_of,
    without_compression,
    without_weight,
)

# Fields that `vaswani.training.circumstances` writes. They are needed to repeat a result.
PROVENANCE = ("command", "commit", "hardware", "versions", "date")
# Scores of a results file: their name in a card, and their metric on the Hub, if any.
_METRICS = {
    "bleu": ("BLEU", "bleu"),
    "greedy_bleu": ("BLEU, greedy search", None),
    "float_bleu": ("BLEU before the weights were rounded", None),
    "chrf": ("chrF", "chrf"),
    "compound_split_bleu": ("compound-split BLEU", None),
    "exact_match": ("exactly right, %", "exact_match"),
    "perplexity": ("perplexity", "perplexity"),
}
MIN_EXACT_MATCH_PERCENT = 10  # percent; below, exact matches are shown only if a run asks for them
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")
_TWO_LETTERS = re.compile(r"[a-z]{2}")


class MistypedFieldError(ValueError):
    """A field of a results file has a wrong type; the message names the file and the field."""


@dataclass(frozen=True)
class Score:
    """A score in a card. `evaluation` is its entry in the metadata; None means no entry."""

    data: str
    metric: str
    value: str
    beams: int | None
    signature: str | None
    file: str
    evaluation: EvalResult | None = None


@dataclass(frozen=True)
class Results:
    """A results file, with its content and the name by which a card links to it."""

    path: Path
    name: str
    content: dict[str, Any]

    def renamed(self, name: str) -> Self:
        """Return the same file with another name."""
        return dataclasses.replace(self, name=name)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the run; empty if the file has none."""
        return self._object("settings")

    @property
    def minutes(self) -> float | None:
        """Minutes of training."""
        return self.content.get("training_minutes", self.content.get("minutes"))

    @property
    def pairs(self) -> int | None:
        """Sentence pairs that were trained on."""
        return self._object("pairs").get("train")

    @property
    def samples(self) -> list[dict[str, str]]:
        """Samples of the test set: source, translation, reference."""
        return self._object("test").get("samples") or []

    def data_of(self, split: str) -> str | None:
        """Return the name of the data of a split: "train", "valid" or "test"."""
        return self._object("data").get(split) or _data_names(self.settings.get(split))

    def languages(self) -> list[str]:
        """Return source and target language: as recorded, or from columns or file endings."""
        stated = self.settings.get("languages")
        if stated:
            return list(stated)
        train = self.settings.get("train") or ()
        files = [Path(_bare_path(path)).suffix[1:] for path in train]
        # Text and TSV files have no columns.
        forms = {form_of(without_weight(path)) for path in train}
        have_columns = (
            forms & {"jsonl", "parquet"}
            or (len(train) == 1 and forms == {None})
            or self._hub_data("train")
        )
        columns = list(self.settings.get("columns") or ()) if have_columns else []
        for pair in (columns, files):
            if len(pair) == 2 and pair[0] != pair[1] and all(map(_TWO_LETTERS.fullmatch, pair)):
                return pair
        return []

    def hub_data_sets(self) -> list[str]:
        """Return the ids of the Hub's data sets that the model was trained on."""
        return list(dict.fromkeys(name.place for name in self._hub_data("train")))

    def base_model(self) -> str | None:
        """Return the Hub's id of the model that was fine-tuned."""
        name = self.settings.get("model")
        is_id = isinstance(name, str) and _HUB_ID.fullmatch(name) and not os.path.isdir(name)
        return name if is_id and name not in self._local else None

    @property
    def _local(self) -> list[str]:
        """Names that were files or folders when the model was trained."""
        return self.content.get("local") or []

    def _hub_data(self, split: str) -> list[DataSetName]:
        data = self.settings.get(split) or []
        return _on_the_hub([name for name in data if name not in self._local])

    def contradiction(self, parameters: int, weights_sha256: str | None) -> str | None:
        """Say why these results belong to another model; None if they may belong to this one."""
        content = self.content
        for run in (content, *content.get("runs", ())):
            counted = run.get("parameters", parameters)
            if counted != parameters:
                return f"is of a model of {counted:,} parameters, not {parameters:,}"
        weights = content.get("weights_sha256")
        if weights and weights_sha256 and weights != weights_sha256:
            return f"is of other weights (SHA-256 {weights[:12]}..., not {weights_sha256[:12]}...)"
        seeds = [run.get("weights_sha256") for run in content.get("runs", ())]
        if seeds and all(seeds) and weights_sha256 and weights_sha256 not in seeds:
            return f"has no run with these weights (SHA-256 {weights_sha256[:12]}...)"
        return None

    def scores(self) -> list[Score]:
        """Return the scores of the test sets, then those of the validation set."""
        return [
            score
            for split in ("test", "valid")
            for data, figures in self._sets_of(split)
            for score in self._scores_of(split, data, figures)
        ]

    def _sets_of(self, split: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the figures of each set of a split."""
        figures = self._object(split)
        if corpora := [found for found in figures.get("corpora") or () if isinstance(found, dict)]:
            return [(_name_of_corpus(corpus), corpus) for corpus in corpora]
        recipe = self.content.get("recipe")
        unnamed = {"test": "test set", "valid": "validation set"}[split]
        return [(self.data_of(split) or (f"{unnamed} of {recipe}" if recipe else unnamed), figures)]

    def _object(self, key: str) -> dict[str, Any]:
        """Return an object inside the file; empty if there is none."""
        value = self.content.get(key)
        return value if isinstance(value, dict) else {}

    def _scores_of(self, split: str, data: str, figures: dict[str, Any]) -> Iterator[Score]:
        if "mean" in figures:
            yield self._mean_score(data, split, figures)
            return
        for name, (label, metric) in _METRICS.items():
            value = figures.get(name)
            if value is None or (name == "exact_match" and not self._counts_exact_matches(value)):
                continue
            signature = _signature(name, figures)
            yield Score(
                data=data,
                metric=label,
                value=_rounded(value),
                beams={"greedy_bleu": 1, "perplexity": None}.get(name, figures.get("beams")),
                signature=signature,
                file=self.name,
                evaluation=(
                    self._evaluation(split, data, metric, label, value, signature)
                    if metric
                    else None
                ),
            )
        if accuracy := figures.get("nbest_accuracy"):
            label = f"right among the best {len(accuracy)}, %"
            value = _rounded(accuracy[-1])
            yield Score(data, label, value, figures.get("beams"), None, self.name)

    def _counts_exact_matches(self, percentage: float) -> bool:
        """Tell whether exact matches mean something: few sentences have one translation only."""
        return percentage >= MIN_EXACT_MATCH_PERCENT or self.settings.get("score") == "exact_match"

    def _mean_score(self, data: str, split: str, figures: Mapping[str, Any]) -> Score:
        """Return the mean score of a recipe over several seeds, without a metadata entry."""
        name = self.content.get("score", "bleu")
        first = self.content["runs"][0].get(split, {})
        deviation = figures.get("standard_deviation")
        spread = "" if deviation is None else f" ± {_rounded(deviation)}"
        return Score(
            data=data,
            metric=f"{_METRICS[name][0]}, mean of {len(figures['seeds'])} seeds",
            value=_rounded(figures["mean"]) + spread,
            beams=first.get("beams"),
            signature=_signature(name, first),
            file=self.name,
        )

    def _evaluation(
        self, split: str, data: str, metric: str, label: str, value: float, signature: str | None
    ) -> EvalResult:
        hub = next(iter(self._hub_data(split)), DataSetName("", "", ""))
        arguments = {"signature": signature} if signature else None
        return EvalResult(
            task_type="translation",
            task_name="Translation",
            dataset_type=hub.place or re.sub(r"\W+", "-", data).strip("-").lower(),
            dataset_name=data,
            dataset_config=hub.configuration or None,
            dataset_split=hub.split or {"valid": "validation"}.get(split, split),
            metric_type=metric,
            metric_name=label,
            metric_value=value,
            metric_args=arguments,
        )


def read_results(path: str | os.PathLike) -> Results:
    """Read a results file.

    Raises:
        TypeError: `path` is not a path, but a number or a dict, for example.
        FileNotFoundError: the file is missing.
        ValueError: the file is not a JSON object, or does not say how its numbers were made.
        MistypedFieldError: a field has another type than `vaswani train` writes.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"results are paths of results files, got {path!r}. Write the number to a JSON file "
            "beside circumstances() of vaswani.training.circumstances, and pass the path."
        )
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no results file {path}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a results file: it is not JSON ({error}).") from error
    content = content if isinstance(content, dict) else {}
    objects = [key for key in ("hardware", "versions") if not isinstance(content.get(key), dict)]
    missing = [key for key in PROVENANCE if not content.get(key) or key in objects]
    if missing:
        raise ValueError(
            f"{path} is not a results file: it has no {', '.join(missing)}. A number enters a card "
            "only beside circumstances() of vaswani.training.circumstances."
        )
    for field, expected in _mistyped(content):
        raise MistypedFieldError(f"{path}: the field {field} must be {expected}.")
    return Results(path, path.name, content)


def _mistyped(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield fields of wrong types, each with a description of the right type."""
    for name in ("training_minutes", "minutes", "steps"):
        if not _is_number_or_none(content.get(name)):
            yield name, "a number"
    for name in ("runs", "log"):
        if name in content and not _is_list_of(content[name], dict):
            yield name, "a list of objects"
    for number, entry in enumerate(content.get("log", ())):
        if not _is_number(entry.get("step")):
            yield f"log[{number}].step", "a number"
        for name in ("loss", "eval_loss", *(f"eval_{metric}" for metric in _METRICS)):
            if name in entry and not _is_number(entry[name]):
                yield f"log[{number}].{name}", "a number"
    if not _is_list_of(content.get("local", []), str):
        yield "local", "a list of strings"
    settings = content.get("settings")
    for name in ("train", "valid", "test", "columns", "languages"):
        value = settings.get(name) if isinstance(settings, dict) else None
        if value is not None and not _is_list_of(value, str):
            yield f"settings.{name}", "a list of strings"
    for place, run in _runs(content):
        if not _is_number(run.get("parameters", 0)):
            yield f"{place}parameters", "a number"
        if not isinstance(run.get("weights_sha256") or "", str):
            yield f"{place}weights_sha256", "a string"
        for split in ("test", "valid"):
            if isinstance(run.get(split), dict):
                for field, expected in _mistyped_figures(run[split]):
                    yield f"{place}{split}.{field}", expected
    splits = [content[split] for split in ("test", "valid") if isinstance(content.get(split), dict)]
    if any("mean" in figures for figures in splits):
        if not content.get("runs"):
            yield "runs", "a list of the runs behind the mean"
        if content.get("score", "bleu") not in tuple(_METRICS):
            yield "score", f"one of {', '.join(_METRICS)}"


def _runs(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the file itself and its runs over several seeds, with the prefix of their fields."""
    yield "", content
    for number, run in enumerate(content.get("runs", ())):
        yield f"runs[{number}].", run


def _mistyped_figures(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of wrong types among the figures of a test or validation set."""
    for name in (*_METRICS, "beams", "standard_deviation"):
        if not _is_number_or_none(figures.get(name)):
            yield name, "a number"
    if "mean" in figures:
        if not _is_number(figures["mean"]):
            yield "mean", "a number"
        if not isinstance(figures.get("seeds"), list):
            yield "seeds", "a list"
    if not _is_list_of(figures.get("nbest_accuracy") or [], int | float):
        yield "nbest_accuracy", "a list of numbers"
    samples = figures.get("samples") or []
    if not _is_list_of(samples, dict):
        yield "samples", "a list of objects"
    for number, sample in enumerate(samples):
        for name in ("source", "translation", "reference"):
            if not isinstance(sample.get(name), str):
                yield f"samples[{number}].{name}", "a string"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _signature(name: str, figures: Mapping[str, Any]) -> str | None:
    plain = name in ("bleu", "greedy_bleu", "float_bleu")
    return figures.get("signature" if plain else f"{name}_signature")


def _rounded(value: float) -> str:
    return f"{value:.2f}"


def _data_names(data: Sequence[str] | None) -> str | None:
    """Name data files by their folder and name, without the language."""
    if not data:
        return None
    if len(data) == 1 and _on_the_hub(data):
        return without_weight(data[0])
    paths = [Path(_bare_path(path)) for path in data]
    names = [Path(path.parent.name, path.stem).as_posix() for path in paths]
    return ", ".join(dict.fromkeys(names))


def _name_of_corpus(corpus: dict[str, Any]) -> str:
    """Name one of several test sets, with the tag of its language if there is one."""
    files, *more = str(corpus.get("data") or "test set").partition(" and ")
    name = (_data_names(files.split()) or "") + "".join(more)
    return f"{name} ({corpus['tag']})" if corpus.get("tag") else name


def _on_the_hub(data: Sequence[str]) -> list[DataSetName]:
    """Return the data sets of the Hub among the data, without files and folders."""
    found = []
    for name in map(without_weight, data):
        parts = data_set_name(name)
        is_file = Path(parts.place).exists() or name.endswith(COMPRESSED) or form_of(name)
        # A pair of names without @ and : may be text files that no longer exist.
        is_named = len(data) == 1 or {"@", ":"} & set(name)
        if is_named and not is_file and _HUB_DATA_SET.fullmatch(parts.place):
            found.append(parts)
    return found


def _bare_path(name: str) -> str:
    """Remove the weight and the ending of a compressed file."""
    return without_compression(without_weight(name))
