"""Model cards: the README.md of a saved model, written only from files.

    write_model_card("runs/en-de")
    write_model_card("runs/en-de", results="benchmarks/results/en-de.json", license="cc-by-4.0")

A card holds a checksum of itself. A card that was changed by hand is left alone.
"""

import contextlib
import hashlib
import html
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import logging

from ..configuration import __version__
from ..corpora.atomic_folder import replaced_file
from .metadata import is_language, is_licence, listed, metadata_of_card
from .results import Results, read_results
from .saved_model import RESULTS, SavedModel, same_weights
from .sibling_card import has_sibling_card, is_sibling, render_sibling, require_sibling_card

logger = logging.get_logger(__name__)

CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card_template.md.j2")
_CURVE = "learning_curve.png"
_RECIPE = "recipe.yaml"
_LICENCE = "LICENSE-CODE"  # LICENSE is for the weights, and their owner chooses it
_TRANSLATIONS = "test.txt"
_SAMPLE = ("source", "translation", "reference")
_TAGS = ("vaswani", "transformer", "attention-is-all-you-need", "sequence-to-sequence")
_LINK = re.compile(r"\]\(([\w.%~-]+(?:/[\w.%~-]+)*)\)")  # links to files beside the card
_MARK = "<!-- Written by vaswani.hub_cards, which leaves a changed card alone: {} -->\n"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", r"(\w{64})"))


def write_model_card(
    folder: str | os.PathLike,
    results: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    *,
    repo_id: str | None = None,
    output: str | os.PathLike | None = None,
    overwrite: bool = False,
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    tags: str | Sequence[str] | None = None,
    base_model: str | None = None,
) -> Path:
    """Write README.md for a saved model from its files, and return its path.

    Numbers come from results files only, in `folder` or given: JSON with command, commit, hardware,
    versions and date. A card that was changed by hand stays as it is, with a warning.

    Args:
        folder: a folder of `save_pretrained` or of a Trainer.
        results: further results files. They are copied to the folder "results" beside the card.
        repo_id: the model's repository in the examples of the card; None uses the folder.
        output: folder of the card and of the files that it links to; None means `folder`.
        overwrite: also replace a card that was changed by hand.
        language: ISO 639 codes, the source's first. None takes this and the following metadata from
            the results files, or from the card in `folder`.
        license: the Hub's name for the licence of the weights.
        datasets, tags, base_model: the Hub's ids of training data and base model, and further tags.

    Raises:
        TypeError: `results` is not a path.
        FileNotFoundError: the folder has no saved model, or a results file is missing.
        ValueError: the folder holds another kind of model; a results file belongs to another model
            or has no circumstances; two of them have the same name; `language` is not a code;
            `license` is not a name of the Hub.
    """
    if license is not None and not is_licence(license):
        raise ValueError(f"license {license!r} is no name of the Hub, such as 'cc-by-4.0'.")
    folder, target = Path(folder), Path(folder if output is None else output)
    model = _translation_model(folder, results)
    stated = {"license": license, "base_model": base_model, "datasets": listed(datasets)}
    card, stated["language"] = target / CARD, _language_codes(language)
    if not overwrite and not may_be_written(card):
        logger.warning(
            f"{card} was changed by hand and stays as it is; overwrite=True writes it again."
        )
        return card
    earlier = [metadata_of_card(folder / CARD)] + (
        [] if target == folder else [metadata_of_card(card)]
    )
    metadata = _metadata_of(model, stated, earlier, listed(tags))

    if model is None:
        require_sibling_card(folder)
    target.mkdir(parents=True, exist_ok=True)
    _add_licence(target)
    if model is None:
        text = _marked(render_sibling(folder, metadata, repo_id, (target / _LICENCE).exists()))
    else:
        _copy_results(model, target)
        _draw_curve(model, target)
        text = _render(model, metadata, target, repo_id)
        if target != folder:
            _copy_linked(text, folder, target)
    with replaced_file(card) as partial:
        partial.write_text(text, encoding="utf-8")
    return card


def _translation_model(folder: Path, results: Any) -> SavedModel | None:
    """Read a translation model and its results files; None for an encoder or decoder alone."""
    if not is_sibling(folder):
        return SavedModel(folder, [_given(path, folder) for path in listed(results)])
    if results is not None:
        raise ValueError(
            f"{folder} holds an encoder or a decoder alone, whose cards have no results: leave "
            "results out."
        )
    return None


def _language_codes(language: str | Sequence[str] | None) -> list[str]:
    codes = listed(language)
    for code in codes:
        if not is_language(code):
            raise ValueError(f"language {code!r} is no ISO 639 code, such as 'de'.")
    return codes


def _copy_results(model: SavedModel, target: Path) -> None:
    """Copy the given results files to the names by which the card links to them."""
    for file in model.given:
        if file not in model.results:
            continue  # another file has the same content
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        if file.path.resolve() != (target / file.name).resolve():
            _copy(file.path, target / file.name)


def may_be_written(card: Path) -> bool:
    """Tell whether a card is missing, unchanged by hand, or transformers' empty draft."""
    if not card.exists():
        return True
    try:
        text = card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    mark = _MARKED.search(text)
    if mark and mark.end() == len(text):
        return _sha256(text[: mark.start()]) == mark[1]
    # The draft is huggingface_hub's template, with only the description filled in.
    draft = ModelCard.from_template(ModelCardData(), model_description="DESCRIPTION").text
    body = re.escape(draft.strip()).replace("DESCRIPTION", ".*")
    return bool(re.fullmatch(rf"---\n(?s:.*?)\n---\s*{body}", text.strip()))


def add_to_push(
    folder: str | os.PathLike, origin: str, repo_id: str, files_timestamps: dict[str, float]
) -> None:
    """Write the card of a folder that is about to be pushed, and the files that it links to.

    The files come from `origin` if the weights there are the same. A card that was changed by hand
    in `origin` is copied. A card that was changed by hand on the Hub stays.

    Args:
        folder: the folder to push, with the Hub's card or a draft from transformers.
        origin: the place that the model was loaded from.
        repo_id: the repository that it is pushed to.
        files_timestamps: transformers' record of files that need no upload. New files are removed
            from it, in place.
    """
    pushed = Path(folder)
    # The default card already covers adapters, which have no model*.safetensors.
    is_model = any(pushed.glob("model*.safetensors"))
    if not is_model or not may_be_written(pushed / CARD):
        return
    if is_sibling(pushed) and not has_sibling_card(pushed):
        return  # transformers' draft serves a class of the user's own
    source = pushed
    if os.path.isdir(origin) and same_weights(Path(origin), pushed):
        source = Path(origin)
    if may_be_written(source / CARD):
        write_model_card(source, repo_id=repo_id, output=pushed)
    else:
        _copy(source / CARD, pushed / CARD)
        _copy_linked((source / CARD).read_text(encoding="utf-8", errors="replace"), source, pushed)
    linked = _linked_files((pushed / CARD).read_text(encoding="utf-8", errors="replace"))
    for name in (CARD, *linked):
        files_timestamps.pop(name.partition("/")[0], None)


def _metadata_of(
    model: SavedModel | None, stated: dict[str, Any], earlier: list[dict[str, Any]], tags: list[str]
) -> dict[str, Any]:
    """Choose the metadata: what the call states, the results files record, or a card had before."""
    run = model.run if model else None
    recorded = {
        "language": run.languages() if run else [],
        "license": run.settings.get("license") if run else None,
        "datasets": run.hub_data_sets() if run else [],
        "base_model": run.base_model() if run else None,
    }
    # A fine-tuned model has the languages of its base model.
    tuned = run.settings.get("model") if run else None
    origin = {"language": metadata_of_card(Path(tuned) / CARD).get("language")} if tuned else {}
    sources = (stated, recorded, *earlier, origin)
    chosen = {
        key: next((source[key] for source in sources if source.get(key)), None) for key in stated
    }
    kept = [
        tag
        for card in earlier
        for tag in card.get("tags", [])
        if tag not in _language_pair_tag(card.get("language"))  # the languages may have been wrong
    ]
    own = _TAGS if model else _TAGS[:-1]  # a sibling is not a sequence-to-sequence model
    return {**chosen, "tags": [*own, *_language_pair_tag(chosen["language"]), *tags, *kept]}


def _language_pair_tag(language: Sequence[str] | None) -> list[str]:
    """Return the tag of a language pair, ["en-de"], or no tag for one or three languages."""
    return ["-".join(language)] if language and len(language) == 2 else []


def _render(model: SavedModel, metadata: dict[str, Any], target: Path, repo_id: str | None) -> str:
    """Fill the template."""
    folder, run = model.folder, model.run
    name = repo_id.split("/")[-1] if repo_id else folder.resolve().name
    scores = [score for results in model.results for score in results.scores()]
    evaluations = [score.evaluation for score in scores if score.evaluation]
    data = ModelCardData(
        language=metadata["language"],
        license=metadata["license"],
        library_name="transformers",
        pipeline_tag="translation",
        tags=metadata["tags"],
        base_model=metadata["base_model"],
        datasets=metadata["datasets"],
        metrics=sorted({entry.metric_type for entry in evaluations}) or None,
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    samples = run.samples if run else []
    log, log_file = model.log
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        model=model,
        run=run,
        metadata=metadata,
        name=name,
        place=repo_id or (name if folder.is_absolute() else folder.as_posix()),
        scores=scores,
        samples=[[_cell(sample[key]) for key in _SAMPLE] for sample in samples],
        sentence=json.dumps(samples[0]["source"] if samples else "Hello", ensure_ascii=False),
        translations=(folder / _TRANSLATIONS).exists(),
        separate=(folder / "target_tokenizer").is_dir(),
        training_data=run.data_of("train") if run else None,
        hardware=_hardware(run.content["hardware"]) if run else None,
        recipe=_text(folder / _RECIPE),
        settings=_indented(run.settings) if run else None,
        arguments=_indented(run.content.get("arguments")) if run else None,
        curve=any((place / _CURVE).exists() for place in (folder, target)),
        last_evaluation=next((entry for entry in reversed(log) if "eval_loss" in entry), None),
        log_file=log_file,
        licence_file=(target / _LICENCE).exists(),
        version=__version__,
    )
    return _marked(str(card))


def _marked(card: str) -> str:
    """Append the card's checksum, which shows later edits."""
    # Use the layout that transformers writes when it adds a tag, so that the checksum still holds.
    # Names of files may have bytes that are not UTF-8.
    text = card.encode("utf-8", "backslashreplace").decode().rstrip() + "\n\n"
    return text + _MARK.format(_sha256(text))


def _given(path: Any, folder: Path) -> Results:
    """Read a results file, and name it by the path that the card will link to."""
    results = read_results(path)
    if results.path.resolve().is_relative_to(folder.resolve()):
        return results.renamed(results.path.resolve().relative_to(folder.resolve()).as_posix())
    return results.renamed(f"{RESULTS}/{results.path.name}")


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _indented(content: Any) -> str | None:
    return json.dumps(content, indent=1, ensure_ascii=False) if content else None


def _cell(text: str) -> str:
    """Escape text for the cell of a table."""
    return html.escape(re.sub(r"[\r\n]+", " ", text), quote=False).replace("|", "\\|")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hardware(hardware: Mapping[str, Any]) -> str:
    cpu = f"{hardware.get('cpu', 'unknown CPU')}, {hardware.get('cores', '?')} cores"
    return f"{hardware['gpu']}; {cpu}" if hardware.get("gpu") else cpu


def _draw_curve(model: SavedModel, target: Path) -> None:
    """Draw the learning curve, unless it exists or there is no log."""
    log, _ = model.log
    if not log or (model.folder / _CURVE).exists():
        return
    try:
        from ..training.curves import draw_learning_curve
    except ImportError:  # matplotlib is optional
        return
    score = model.run.settings.get("score", "bleu") if model.run else "bleu"
    draw_learning_curve(log, target / _CURVE, score)


def _add_licence(target: Path) -> None:
    """Copy the licence of the code to the card, from the checkout or the installed package."""
    if (target / _LICENCE).exists():
        return
    checkout = Path(__file__).resolve().parent.parent / "LICENSE"
    if checkout.exists():
        _copy(checkout, target / _LICENCE)
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.distribution("vaswani").read_text("licenses/LICENSE")
        (target / _LICENCE).write_text(text or "", encoding="utf-8")


def _linked_files(text: str) -> list[str]:
    """List the files beside a card that the card links to."""
    return [unquote(link) for link in _LINK.findall(text)]


def _copy(source: Path, target: Path) -> None:
    with replaced_file(target) as partial:
        shutil.copyfile(source, partial)


def _copy_linked(text: str, source: Path, target: Path) -> None:
    """Copy the files that a card links to from the card's old folder to its new folder."""
    for name in _linked_files(text):
        file = source / name
        if file.is_file() and file.resolve().is_relative_to(source.resolve()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if file.resolve() != (target / name).resolve():
                _copy(file, target / name)


__all__ = ["write_model_card"]
