"""A classifier and a tagger: the language of a number in words, and the sound of a letter.

The classifier reads 8 characters of a number in words, and names its language, one of eight. The
tagger says for each letter of an English word what kind of sound the letter stands for. Naive
Bayes over letters, and each letter's most frequent kind, are the measures to beat.
"""

import gzip
import math
import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from num2words import num2words
from training_loop import Batch, arguments, pad, parameters, train, write_results

from vaswani import (
    VaswaniEncoderConfig,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniTokenizer,
)

LANGUAGES = {
    **{"dan": "da", "deu": "de", "eng": "en", "nld": "nl"},
    **{"nor": "no", "por": "pt", "spa": "es", "swe": "sv"},
}
KINDS = {
    "vowel": "iɪeɛæaɑɔoʊuʌəɚɝɜyø",  # noqa: RUF001
    "stop": "pbtdkɡgʔ",  # noqa: RUF001
    "fricative": "fvθðszʃʒhx",
    "nasal": "mnŋ",
    "approximant": "lɹrwj",
}
SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "dropout": 0.1,
}
Row = tuple[str, Any]


def written_numbers(count: int) -> list[Row]:
    """Write a part of each number in words, in one language: (text, language)."""
    draw = random.Random(1)
    codes = list(LANGUAGES)
    rows = []
    for number in draw.sample(range(1000, 100_000), count):
        language = draw.choice(codes)
        text = num2words(number, lang=LANGUAGES[language])
        start = draw.randrange(max(len(text) - 8, 1))
        rows.append((text[start : start + 8], codes.index(language)))  # eight letters of it
    return rows


def sounded_words(part: str) -> list[Row]:
    """Read words that have as many sounds as letters: (word, kinds of its sounds)."""
    folder = Path(os.environ.get("VASWANI_DATA", "data")) / "g2p-eng_us"
    kinds = {sound: number for number, sounds in enumerate(KINDS.values()) for sound in sounds}
    rows = []
    with gzip.open(folder / f"{part}.tsv.gz", "rt", encoding="utf-8") as file:
        for line in file:
            word, sounds = line.rstrip("\n").split("\t")
            tags = [kinds.get(sound[0]) for sound in sounds.split()]
            if len(tags) == len(word) and None not in tags:
                rows.append((word, tags))
    return rows


def fit(model: Any, rows: list[Row], tokenizer: Any, collate: Any, updates: int) -> float:
    """Train a model on rows of text."""
    ids = tokenizer([text for text, _ in rows])["input_ids"]

    def batch(numbers: list[int]) -> Batch:
        inputs = pad([ids[number] for number in numbers])
        mask = (inputs != 0).long()
        labels = collate([rows[number][1] for number in numbers])
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}

    lengths = [len(row) for row in ids]
    return train(model, batch, lengths, updates=updates, tokens=2000, peak=2e-3)


@torch.no_grad()
def predict(model: Any, rows: list[Row], tokenizer: Any) -> list[Any]:
    """Find the best class of each row, or of each of its positions."""
    found = []
    for start in range(0, len(rows), 100):
        texts = [text for text, _ in rows[start : start + 100]]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found += model(**inputs).logits.argmax(dim=-1).tolist()
    return found


def naive_bayes(train_rows: list[Row], test_rows: list[Row]) -> float:
    """Share of rows whose class naive Bayes over letters finds, with add-one smoothing."""
    letters: dict[int, Counter] = defaultdict(Counter)
    for text, label in train_rows:
        letters[label].update(text)
    alphabet = len(set().union(*letters.values()))

    def score(text: str, label: int) -> float:
        total = letters[label].total() + alphabet
        return sum(math.log((letters[label][letter] + 1) / total) for letter in text)

    right = sum(
        max(letters, key=lambda label: score(text, label)) == wanted for text, wanted in test_rows
    )
    return right / len(test_rows)


def classifier(updates: int) -> dict[str, Any]:
    """Train and test the classifier of languages."""
    rows = written_numbers(12_000)
    train_rows, test_rows = rows[:10_000], rows[10_000:]
    tokenizer = VaswaniTokenizer.train_from_iterator(
        [text for text, _ in train_rows], vocab_size=100, kind="char", show_progress=False
    )
    codes = list(LANGUAGES)
    torch.manual_seed(1)
    config = VaswaniEncoderConfig(
        vocab_size=len(tokenizer), **SIZES, id2label=dict(enumerate(codes))
    )
    model = VaswaniForSequenceClassification(config)
    minutes = fit(model, train_rows, tokenizer, torch.tensor, updates)
    right = sum(
        found == wanted
        for found, (_, wanted) in zip(predict(model, test_rows, tokenizer), test_rows, strict=True)
    )
    return {
        "accuracy": round(right / len(test_rows), 4),
        "naive_bayes": round(naive_bayes(train_rows, test_rows), 4),
        "parameters": parameters(model),
        "minutes": minutes,
    }


def tagger(updates: int) -> dict[str, Any]:
    """Train and test the tagger of sounds."""
    train_rows, test_rows = sounded_words("train"), sounded_words("test")
    tokenizer = VaswaniTokenizer.train_from_iterator(
        [text for text, _ in train_rows], vocab_size=100, kind="char", show_progress=False
    )
    torch.manual_seed(1)
    labels = dict(enumerate(KINDS))
    config = VaswaniEncoderConfig(vocab_size=len(tokenizer), **SIZES, id2label=labels)
    model = VaswaniForTokenClassification(config)

    def collate(tags: list[list[int]]) -> torch.Tensor:
        return pad([[*row, -100] for row in tags], -100)  # the end of a word stands for no sound

    minutes = fit(model, train_rows, tokenizer, collate, updates)
    frequent: dict[str, Counter] = defaultdict(Counter)
    for word, tags in train_rows:
        for letter, tag in zip(word, tags, strict=True):
            frequent[letter][tag] += 1
    right = baseline = letters = 0
    for found, (word, tags) in zip(predict(model, test_rows, tokenizer), test_rows, strict=True):
        for letter, guess, tag in zip(word, found, tags, strict=False):
            letters += 1
            right += guess == tag
            baseline += frequent[letter].most_common(1)[0][0] == tag if frequent[letter] else 0
    return {
        "accuracy": round(right / letters, 4),
        "most_frequent_kind": round(baseline / letters, 4),
        "test_letters": letters,
        "parameters": parameters(model),
        "minutes": minutes,
    }


def main() -> None:
    """Train both and write their accuracies."""
    args = arguments(__doc__, "siblings-classify.json", updates=600).parse_args()
    results = {"classifier": classifier(args.updates), "tagger": tagger(args.updates)}
    print(results)
    write_results(args.results, settings={"updates": args.updates, "tokens": 2000}, results=results)


if __name__ == "__main__":
    main()
