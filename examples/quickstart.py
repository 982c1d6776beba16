"""Train a Transformer from nothing in a few minutes on a CPU, translate, save, reload.

The language pair is number words, English to German: "three hundred and forty-two" becomes
"dreihundertzweiundvierzig". Tens and units change places, and words are joined. The model therefore
has to learn real reordering. Every answer can be checked exactly.

    python examples/quickstart.py
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from vaswani.configuration.extras import needs
from vaswani.corpora.packed_collator import DataCollatorForPackedSeq2Seq
from vaswani.hub_cards.card import write_model_card
from vaswani.training.circumstances import circumstances, weights_sha256

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

with needs("vaswani[train]", SystemExit):
    from datasets import Dataset
    from num2words import num2words

LARGEST = 1_000_000
SHOWN = 8


def number_words(numbers: list[int]) -> tuple[list[str], list[str]]:
    """Write numbers as English and as German words."""
    numbers = tqdm(numbers, desc="Writing numbers")
    english, german = zip(*((num2words(n), num2words(n, lang="de")) for n in numbers), strict=True)
    return list(english), list(german)


def train(
    english: list[str], german: list[str], output: str, steps: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Train a shared vocabulary (5.1) and a small model with the paper's loss (5.4).

    Returns the model, the tokenizer, and a report of the training.
    """
    tokenizer = VaswaniTokenizer.train_from_iterator(english + german, kind="bpe", vocab_size=400)
    encoded = tokenizer(english, text_target=german)
    data = Dataset.from_dict({"input_ids": encoded["input_ids"], "labels": encoded["labels"]})
    config = VaswaniConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
    )
    model = VaswaniForConditionalGeneration(config)
    arguments = Seq2SeqTrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=128,
        learning_rate=3e-3,
        warmup_steps=steps // 5,
        lr_scheduler_type="linear",
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        logging_steps=max(steps // 5, 1),
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=DataCollatorForPackedSeq2Seq(tokenizer, model=model),  # without padding
        processing_class=tokenizer,
    )
    started = time.monotonic()
    trainer.train()
    report = {
        "training_minutes": round((time.monotonic() - started) / 60, 1),
        "steps": trainer.state.global_step,
        "arguments": arguments.to_dict(),
        "log": trainer.state.log_history,
    }
    return model.eval(), tokenizer, report


def translate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str]
) -> list[str]:
    """Translate with beam search (6.1)."""
    answers = []
    for start in tqdm(range(0, len(sentences), 100), desc="Translating"):
        batch = tokenizer(sentences[start : start + 100], return_tensors="pt", padding=True)
        generated = model.generate(**batch.to(model.device), num_beams=4)
        answers += tokenizer.batch_decode(generated, skip_special_tokens=True)
    return answers


def write_report(
    args: argparse.Namespace, results: dict[str, Any], parameters: int, shown: list[dict[str, str]]
) -> None:
    """Write results.json and the model card: how the model was made, and from which weights."""
    data = f"English and German number words below {LARGEST:,}, from num2words"
    results |= {
        **circumstances(),
        "parameters": parameters,
        "weights_sha256": weights_sha256(args.output),
        "settings": vars(args),
        "data": {"train": data, "test": f"{args.test_size} numbers that were not trained on"},
        "pairs": {"train": args.train_size, "test": args.test_size},
        "test": {"exact_match": 100 * results["exactly_right"], "beams": 4, "samples": shown},
    }
    Path(args.output, "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_model_card(args.output, language=["en", "de"], license="apache-2.0")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", default="runs/quickstart", help="folder of the model (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=600, help="updates (default: %(default)s)")
    parser.add_argument(
        "--train-size", type=int, default=20_000, help="numbers seen (default: %(default)s)"
    )
    parser.add_argument(
        "--test-size", type=int, default=1000, help="numbers never seen (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = parse_args()
    started = time.monotonic()
    set_seed(1)
    size = args.train_size + args.test_size
    # A sample of all numbers would have only about 20 below 1000.
    short = random.sample(range(1000), min(1000, size) // 2)
    numbers = short + random.sample(range(1000, LARGEST), size - len(short))
    random.shuffle(numbers)
    english, german = number_words(numbers)
    seen, unseen = slice(args.train_size), slice(args.train_size, None)

    model, tokenizer, report = train(english[seen], german[seen], args.output, args.steps)
    answers = translate(model, tokenizer, english[unseen])

    model.generation_config.num_beams = 4
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    reloaded = AutoModelForSeq2SeqLM.from_pretrained(args.output).eval()
    again = translate(reloaded, AutoTokenizer.from_pretrained(args.output), english[unseen])

    correct = sum(answer == truth for answer, truth in zip(answers, german[unseen], strict=True))
    results = {
        "numbers_tested": args.test_size,
        "exactly_right": correct / args.test_size,
        "same_after_reloading": again == answers,
        "minutes": round((time.monotonic() - started) / 60, 1),
        # Over five minutes. Windows has none.
        "load_average": os.getloadavg()[1] if hasattr(os, "getloadavg") else None,
    }
    shown = [
        {"source": source, "translation": answer, "reference": truth}
        for source, answer, truth in zip(english[unseen], answers, german[unseen], strict=True)
    ][:SHOWN]
    write_report(args, results | report, model.num_parameters(), shown)
    print(f"\n{'number never seen':64}  translation")
    for sample in shown:
        print(f"{sample['source']:64}  {sample['translation']}")
    print(f"\nexactly right          {results['exactly_right']:.1%} of {args.test_size}")
    print(f"same after reloading   {'yes' if results['same_after_reloading'] else 'no'}")
    print(f"parameters             {model.num_parameters():,}")
    print(f"model saved in         {args.output}")
    print(f"minutes                {results['minutes']}")


if __name__ == "__main__":
    main()
