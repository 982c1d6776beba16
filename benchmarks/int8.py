r"""Compare the BLEU of models in float32, in bfloat16 and with int8 weights.

    python benchmarks/int8.py runs/en-de --test test.en test.de --output int8/ --json FILE
    python benchmarks/int8.py runs/seed1 runs/seed2 --test test.en test.de --output int8/

OUTPUT is a new folder: the model with int8 weights, its tokenizer, the scores as results/int8.json,
and a card that shows BLEU before and after rounding. Several models, such as the seeds of a recipe,
have one such folder each in OUTPUT.

CPUs with AVX2 alone round activations to 7 bits instead of 8. With ONEDNN_MAX_CPU_ISA=AVX2, every
CPU does.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging
from vaswani.conversion.loading import save_tokenizers
from vaswani.corpora.atomic_folder import new_folder, refuse_existing
from vaswani.corpora.reading import read_pairs
from vaswani.generation import int8_vaswani
from vaswani.hub_cards.card import write_model_card
from vaswani.training.circumstances import circumstances, weights_sha256
from vaswani.training.metrics import TranslationMetric

from vaswani import VaswaniInt8Config, VaswaniTranslationPipeline

FORMS: dict[str, dict[str, Any]] = {
    "float_bleu": {"dtype": torch.float32},
    "bfloat16_bleu": {"dtype": torch.bfloat16},
    "bleu": {"quantization_config": VaswaniInt8Config()},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="MODEL", help="folder with float32 weights")
    add("--test", nargs=2, required=True, metavar="FILE", help="source and reference translation")
    add("--bleu-tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer; default 13a")
    add("--output", type=Path, required=True, metavar="FOLDER", help="new folder with int8 weights")
    add("--json", type=Path, metavar="FILE", help="write all numbers here too")
    args = parser.parse_args(argv)
    names = [model.name for model in args.models]
    if len(set(names)) < len(names):
        parser.error(f"the models need different folder names, got {' '.join(names)}")
    return args


def rounded(model: Path, output: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Score a model in each form, and write the folder with int8 weights.

    Returns:
        BLEU before and after rounding, and sizes in bytes.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = read_pairs(args.test, ("source", "target"), "test")
    sources, references = map(list, zip(*pairs, strict=True))
    scores: dict[str, Any] = {}
    for name, options in FORMS.items():
        form = AutoModelForSeq2SeqLM.from_pretrained(model, **options)
        translator = VaswaniTranslationPipeline(form, tokenizer, device="cpu")
        outputs = [output["translation_text"] for output in translator(sources)]
        metric = TranslationMetric(args.bleu_tokenize)
        found = metric.compute(predictions=outputs, references=references)
        scores |= {name: found["bleu"], "signature": found["bleu_signature"]}
        print(f"{model.name}: {name} {found['bleu']:.2f}", flush=True)
    with new_folder(output) as folder:
        form.save_pretrained(folder)  # the last one has int8 weights
        target_tokenizer = translator.target_tokenizer
        save_tokenizers(
            folder, tokenizer, None if target_tokenizer is tokenizer else target_tokenizer
        )
        results = {
            **circumstances(),
            "model": model.name,
            "parameters": AutoModelForSeq2SeqLM.from_pretrained(model).num_parameters(),
            "weights_sha256": weights_sha256(folder),
            "state_bits": 8 if int8_vaswani._rounds_to_8_bits() else 7,
            "weight_error": form.config.quantization_config.weight_error,
            "bytes": (folder / "model.safetensors").stat().st_size,
            "float_bytes": (model / "model.safetensors").stat().st_size,
            "settings": {"test": args.test},
            "test": {**scores, "beams": form.generation_config.num_beams, "pairs": len(pairs)},
        }
        text = json.dumps(results, indent=1) + "\n"
        (folder / "results").mkdir()
        (folder / "results" / "int8.json").write_text(text, encoding="utf-8")
    write_model_card(output)
    return results


def differences(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far rounding moves BLEU: the mean, and the largest loss."""
    moved = [found["test"]["bleu"] - found["test"]["float_bleu"] for found in results]
    return {"mean": round(statistics.mean(moved), 3), "largest_loss": round(-min(moved), 3)}


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    logging.set_verbosity_error()
    outputs = [args.output]
    if len(args.models) > 1:
        outputs = [args.output / model.name for model in args.models]
    for output in outputs:
        refuse_existing(output)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    results = [
        rounded(model, output, args) for model, output in zip(args.models, outputs, strict=True)
    ]
    report = {**circumstances(), "test": args.test, **differences(results), "models": results}
    print(f"int8 - float32: mean {report['mean']:+.2f} BLEU")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
