"""Model cards of the encoder alone and the decoder alone, by the task of their class."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig

from ..training.circumstances import weights_sha256
from .saved_model import count_parameters, describe_rounding, weight_files

_TEMPLATE = Path(__file__).with_name("sibling_template.md.j2")
_TEXT = '"Two dogs run."'
# Class: the Hub's task, what the model does, and a text for its pipeline.
_TASKS = {
    "VaswaniEncoderModel": ("feature-extraction", "Represents text by vectors.", _TEXT),
    "VaswaniForMaskedLM": (
        "fill-mask",
        "Says which words fit a masked place.",
        '"Two <mask> run."',
    ),
    "VaswaniForSequenceClassification": ("text-classification", "Classifies texts.", _TEXT),
    "VaswaniForTokenClassification": (
        "token-classification",
        "Classifies the tokens of texts.",
        _TEXT,
    ),
    "VaswaniDecoderModel": (
        "feature-extraction",
        "Represents each token by the text before it.",
        _TEXT,
    ),
    "VaswaniForCausalLM": ("text-generation", "Goes on writing a text.", '"Two dogs"'),
}


def is_sibling(folder: Path) -> bool:
    """Tell whether a folder holds an encoder alone or a decoder alone."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and fields.get("model_type") in (
        "vaswani_encoder",
        "vaswani_decoder",
    )


def has_sibling_card(folder: Path) -> bool:
    """Tell whether cards describe the class in a folder's config.json."""
    return _class_of(folder) in _TASKS


def require_sibling_card(folder: Path) -> None:
    """Require that cards describe the class in a folder's config.json.

    Raises:
        ValueError: cards do not describe this class.
    """
    if not has_sibling_card(folder):
        raise ValueError(
            f"{folder} names the class {_class_of(folder)!r} in its config.json; cards are for "
            f"{', '.join(_TASKS)}."
        )


def _class_of(folder: Path) -> str | None:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return next(iter(fields.get("architectures") or ()), None)


def render_sibling(
    folder: Path, metadata: Mapping[str, Any], repo_id: str | None, licence_file: bool
) -> str:
    """Fill the template from the files of a folder.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: its config.json names no class of a sibling.
    """
    require_sibling_card(folder)
    config: Any = AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    task, description, example = _TASKS[name]
    stack = config.stacks[0]
    title = repo_id.split("/")[-1] if repo_id else folder.resolve().name
    classified = task.endswith("classification")
    data = ModelCardData(
        language=metadata["language"],
        license=metadata["license"],
        library_name="transformers",
        pipeline_tag=task,
        tags=metadata["tags"],
        base_model=metadata["base_model"],
        datasets=metadata["datasets"],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=title,
        place=repo_id or (title if folder.is_absolute() else folder.as_posix()),
        config=config,
        description=description,
        task=task,
        example=example,
        labels=list(config.id2label.values()) if classified else [],
        layers=getattr(config, f"{stack}_layers"),
        heads=getattr(config, f"{stack}_attention_heads"),
        parameters=_parameters(folder),
        rounding=describe_rounding(config),
        weights_sha256=weights_sha256(folder),
        licence_file=licence_file,
    )
    return str(card)


def _parameters(folder: Path) -> int:
    """Count the stored parameters, tied ones once."""
    files = weight_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder} holds no model.safetensors: save the model there first.")
    return count_parameters(files)


__all__ = ["is_sibling", "render_sibling"]
