"""Facts about a saved model, read from its files."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from filecmp import cmp
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..training.circumstances import weights_sha256
from .results import MistypedFieldError, Results, read_results

logger = logging.get_logger(__name__)

# Folder of results files from elsewhere, so that they cannot replace the model's own.
RESULTS = "results"
_TRAINER_STATE = "trainer_state.json"
_PIECES = {"BPE": "byte pairs", "WordPiece": "word pieces", "Unigram": "unigram pieces"}


@dataclass
class SavedModel:
    """A saved model with its results files, and with given results files from elsewhere.

    Raises:
        FileNotFoundError: the folder has no config.json, or no weights.
        ValueError: the folder holds another model than a VaswaniForConditionalGeneration; a results
            file belongs to another model; two different results files have the same name.
    """

    folder: Path
    given: Sequence[Results] = ()

    def __post_init__(self) -> None:
        try:
            fields = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.folder} holds no config.json: save a model there first."
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.folder / 'config.json'} is damaged: {error}.") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{self.folder / 'config.json'} holds no JSON object.")
        generates = (self.folder / "generation_config.json").exists()
        held = (fields.get("architectures") or [fields.get("model_type")])[0]
        translates = held == "VaswaniForConditionalGeneration"
        if fields.get("model_type") != "vaswani" or not (generates or translates):
            kind = "a model without a type" if held is None else f"a {held}"
            raise ValueError(
                f"{self.folder} holds {kind}: cards are for VaswaniForConditionalGeneration, which "
                "translates."
            )
        if not generates:
            raise FileNotFoundError(
                f"{self.folder} holds no generation_config.json: save the model there again."
            )
        self.config = VaswaniConfig.from_pretrained(self.folder)
        if not self.weights:
            raise FileNotFoundError(
                f"{self.folder} holds no model.safetensors: save the model there first."
            )
        named: dict[str, Results] = {}
        for results in self.given:
            other = named.setdefault(results.name, results)
            if other.content != results.content:
                raise ValueError(
                    f"{other.path} and {results.path} would both be {results.name} beside the "
                    "card: rename one."
                )
            if contradiction := results.contradiction(self.parameters, self.weights_sha256):
                raise ValueError(f"{results.path} {contradiction}: it is not about {self.folder}.")

    @property
    def weights(self) -> list[Path]:
        """Files of the weights."""
        return weight_files(self.folder)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        return count_parameters(self.weights)

    @cached_property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights, if they are a single file."""
        return weights_sha256(self.folder)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Content of generation_config.json."""
        return _json_object(self.folder / "generation_config.json")

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """Content of tokenizer.json; empty if the file is missing."""
        return _json_object(self.folder / "tokenizer.json")

    @cached_property
    def results(self) -> list[Results]:
        """Results files of this model, the run's own first, without copies."""
        found = list(self.given)
        given = {results.name for results in found}
        for path in [*self.folder.glob("*.json"), *self.folder.glob(f"{RESULTS}/*.json")]:
            name = path.relative_to(self.folder).as_posix()
            if name in given:
                continue
            try:
                results = read_results(path).renamed(name)
            except MistypedFieldError as error:
                logger.warning(f"{error} The card leaves this file out.")
                continue
            except ValueError:
                continue  # this JSON file is not a results file
            if contradiction := results.contradiction(self.parameters, self.weights_sha256):
                logger.warning(f"{path} {contradiction}: the card leaves it out.")
            else:
                found.append(results)
        kept: list[Results] = []
        for results in sorted(found, key=lambda file: (file.name != "results.json", file.name)):
            # vaswani train --results writes the same content to two files.
            if all(results.content != other.content for other in kept):
                kept.append(results)
        return kept

    @property
    def run(self) -> Results | None:
        """Results file of the training run."""
        trained = (results for results in self.results if "log" in results.content)
        return next(trained, next(iter(self.results), None))

    @property
    def log(self) -> tuple[list[dict[str, Any]], str]:
        """Log of the training run, and the name of its file."""
        if self.run and self.run.content.get("log"):
            return self.run.content["log"], self.run.name
        log: Any = None
        with contextlib.suppress(ValueError):  # another program may have written the file
            log = _json_object(self.folder / _TRAINER_STATE).get("log_history")
        is_log = isinstance(log, list) and all(
            isinstance(entry, dict) and "step" in entry for entry in log
        )
        return log if is_log else [], _TRAINER_STATE

    def vocabulary(self) -> str:
        """Describe the vocabulary in words."""
        config = self.config
        sizes = f"{config.vocab_size:,} {self._pieces()}"
        if config.share_encoder_decoder_embeddings:
            return f"one vocabulary of {sizes}"
        return f"vocabularies of {sizes} and, for the target, {config.decoder_vocab_size:,}"

    def _pieces(self) -> str:
        kind = self.tokenizer.get("model", {}).get("type")
        if kind != "WordLevel":
            return _PIECES.get(kind, "tokens")
        splits = self.tokenizer.get("pre_tokenizer") or {}
        parts = splits.get("pretokenizers")
        first: dict[str, Any] = next(iter(parts or ()), splits)
        pattern = first.get("pattern")
        if isinstance(pattern, dict) and pattern.get("Regex") == r"[\s\S]":
            return "characters"
        return "matches of a pattern" if parts and isinstance(pattern, dict) else "words"

    def knows_all_characters(self) -> bool:
        """Tell whether the tokenizer can read and write all characters, as far as is known."""
        bytes_known = self.tokenizer.get("model", {}).get("byte_fallback")
        return not self.tokenizer or bool(bytes_known) or "ByteLevel" in json.dumps(self.tokenizer)

    @property
    def beams(self) -> int:
        """Default number of beams."""
        return self.generation.get("num_beams") or 1

    def penalty(self) -> str:
        """Describe the length penalty of beam search."""
        alpha = self.generation.get("length_penalty", 1.0)
        if self.generation.get("length_penalty_type") == "gnmt":
            return f"((5 + length) / 6)^{alpha}"
        return f"length^{alpha}"

    def limit(self) -> str:
        """Describe the longest translation of a source; empty if nothing saved limits it."""
        if tokens := self.generation.get("max_new_tokens"):
            return f"{tokens} tokens"
        offset = self.generation.get("max_length_offset") or 0
        factor = self.generation.get("max_length_factor")
        if factor is None or factor == 1:
            return f"{offset} tokens more than the source has" if offset else ""
        parts = [f"{factor:g} times the tokens of the source"] if factor else []
        return " plus ".join(parts + ([f"{offset} tokens"] if offset else []))

    def rounding(self) -> str:
        """Describe int8 weights; empty for other weights."""
        return describe_rounding(self.config)

    def differences(self) -> list[tuple[str, Any, Any]]:
        """Return the settings that differ from the base model: name, value, value of base."""
        ours, base = self.config.to_dict(), VaswaniConfig().to_dict()
        told = {"vocab_size", "decoder_vocab_size", "use_cache"}
        names = [name for name in VaswaniConfig.__annotations__ if name in base]
        return [
            (name, ours[name], base[name])
            for name in names
            if name not in told and not name.endswith("_token_id") and ours[name] != base[name]
        ]


def count_parameters(files: Sequence[Path]) -> int:
    """Count the parameters in files of weights; tied parameters count once.

    The scales of int8 weights do not count, because the model that was rounded has none.
    """
    count = 0
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            names = (name for name in tensors.keys() if not name.endswith("weight_scale"))  # noqa: SIM118
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return count


def describe_rounding(config: Any) -> str:
    """Say what a model lost by int8 weights; empty for other weights."""
    form = getattr(config, "quantization_config", None) or {}
    if form.get("quant_method") != "vaswani_int8":
        return ""
    error = form.get("weight_error")
    moved = "" if error is None else f" Rounding moved them by {error:.2%} (root mean square)."
    return (
        "The matrices are int8 numbers, with a scale for each output channel."
        f"{moved} Products round their inputs to int8 too, with a scale for each token."
    )


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights that `from_pretrained` loads, without variants and old shards."""
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    shards = _json_object(folder / "model.safetensors.index.json").get("weight_map", {})
    if shards:
        return sorted({folder / name for name in shards.values()})
    return sorted(folder.glob("model*.safetensors"))


def same_weights(first: Path, second: Path) -> bool:
    """Tell whether two folders hold the same weights, bit for bit."""
    names = [
        sorted(path.name for path in folder.glob("model*.safetensors"))
        for folder in (first, second)
    ]
    return (
        bool(names[0])
        and names[0] == names[1]
        and all(cmp(first / name, second / name, shallow=False) for name in names[0])
    )


def _json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return content


__all__ = [
    "RESULTS",
    "SavedModel",
    "count_parameters",
    "describe_rounding",
    "same_weights",
    "weight_files",
]
