r"""Compare the BLEU of a model in float32, in bfloat16 and with int8 weights.

    python benchmarks/int8.py runs/en-de --test test.en test.de --output int8/ --json FILE

OUTPUT is a new folder: the model with int8 weights, its tokenizer, the scores as results/int8.json,
and a card that shows BLEU before and after rounding.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging
from vaswani.corpora.atomic_folder import new_folder
from vaswani.corpora.reading import read_pairs
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
    add("model", type=Path, metavar="MODEL", help="folder of a model with float32 weights")
    add("--test", nargs=2, required=True, metavar="FILE", help="source and reference translation")
    add("--bleu-tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer; default 13a")
    add("--output", type=Path, required=True, metavar="FOLDER", help="new folder with int8 weights")
    add("--json", type=Path, metavar="FILE", help="write all numbers here too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = read_pairs(args.test, ("source", "target"), "test")
    sources, references = map(list, zip(*pairs, strict=True))
    scores: dict[str, Any] = {}
    for name, options in FORMS.items():
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model, **options)
        translator = VaswaniTranslationPipeline(model, tokenizer, device="cpu")
        outputs = [output["translation_text"] for output in translator(sources)]
        found = TranslationMetric(args.bleu_tokenize).compute(
            predictions=outputs, references=references
        )
        scores |= {name: found["bleu"], "signature": found["bleu_signature"]}
        print(f"{name}: {found['bleu']:.2f}", flush=True)
    with new_folder(args.output) as folder:
        model.save_pretrained(folder)  # the last one has int8 weights
        tokenizer.save_pretrained(folder)
        results = {
            **circumstances(),
            "model": args.model.name,
            "parameters": AutoModelForSeq2SeqLM.from_pretrained(args.model).num_parameters(),
            "weights_sha256": weights_sha256(folder),
            "weight_error": model.config.quantization_config.weight_error,
            "bytes": (folder / "model.safetensors").stat().st_size,
            "float_bytes": (args.model / "model.safetensors").stat().st_size,
            "settings": {"test": args.test},
            "test": {**scores, "beams": model.generation_config.num_beams, "pairs": len(pairs)},
        }
        text = json.dumps(results, indent=1) + "\n"
        (folder / "results").mkdir()
        (folder / "results" / "int8.json").write_text(text, encoding="utf-8")
    write_model_card(args.output)
    if args.json:
        args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
