"""Make the frozen checkpoints of the encoder's and the decoder's models, once.

python tests/frozen/make_siblings.py tests/frozen/siblings

Small models of number words below 1000 in English and German, letter by letter, with their outputs.
Later versions must load them and give the same (tests/test_frozen_siblings.py); never remake them.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from num2words import num2words
from safetensors.torch import save_file
from transformers import PreTrainedModel, get_scheduler, set_seed

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniTokenizer,
)

SENTENCES = ["three hundred and forty-two", "siebenundzwanzig", "nine", "a <unk> 42"]
PROMPTS = ["three hundred and f", "siebenund", "nine h", "a <unk> 4"]
NUMBERS = [num2words(n) for n in range(1000)] + [num2words(n, lang="de") for n in range(1000)]
LANGUAGES = {0: "eng", 1: "deu"}
LETTERS = {0: "vowel", 1: "consonant", 2: "other"}
ENCODER = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
DECODER = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
Batch = dict[str, torch.Tensor]


def models(size: int) -> dict[str, PreTrainedModel]:
    """Make one untrained model of each class, with different settings of the network."""
    learned = {"position_encoding": "learned", "max_position_embeddings": 64}
    encoder = {"vocab_size": size, **ENCODER}
    return {
        "masked": VaswaniForMaskedLM(VaswaniEncoderConfig(**encoder)),
        "classifier": VaswaniForSequenceClassification(
            VaswaniEncoderConfig(**encoder, norm_position="pre", id2label=LANGUAGES)
        ),
        "tagger": VaswaniForTokenClassification(
            VaswaniEncoderConfig(**encoder, **learned, id2label=LETTERS)
        ),
        "causal": VaswaniForCausalLM(VaswaniDecoderConfig(vocab_size=size, **DECODER)),
    }


def kind_of(letter: str) -> int:
    """Tell vowels, consonants and everything else apart."""
    if not letter.isalpha():
        return 2
    return int(letter not in "aeiouäöü")


def batch_of(name: str, rows: list[int], tokenizer: Any) -> Batch:
    """Make a batch with the labels of a model's task."""
    end = tokenizer.eos_token if name == "causal" else ""
    texts = [NUMBERS[row] + end for row in rows]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    real = batch["attention_mask"].bool()
    if name == "causal":
        batch["labels"] = batch["input_ids"].masked_fill(~real, -100)
    elif name == "masked":
        hidden = real & (torch.rand(real.shape) < 0.2)
        batch["labels"] = batch["input_ids"].masked_fill(~hidden, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(hidden, tokenizer.mask_token_id)
    elif name == "classifier":
        batch["labels"] = torch.tensor([row // 1000 for row in rows])
    else:
        kinds = torch.full(real.shape, -100)
        for line, text in zip(kinds, texts, strict=True):
            line[: len(text)] = torch.tensor([kind_of(letter) for letter in text])
        batch["labels"] = kinds
    return batch


def train(name: str, model: PreTrainedModel, tokenizer: Any, updates: int) -> None:
    """Train with a plain loop, so that nothing else can change the result."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
    scheduler = get_scheduler("linear", optimizer, 100, updates)
    for _ in range(updates):
        batch = batch_of(name, random.sample(range(2000), 64), tokenizer)
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def outputs_of(model: PreTrainedModel, tokenizer: Any, texts: list[str]) -> Batch:
    """Compute what later versions must compute."""
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    found = {**batch, "output": model(**batch)[0]}
    if isinstance(model, VaswaniForCausalLM):
        prefix = batch["attention_mask"].clone()
        prefix[:, -2:] = 0
        found |= {"prefix_mask": prefix, "with_prefix": model(**batch, prefix_mask=prefix)[0]}
        found["greedy"] = model.generate(**batch, max_new_tokens=30)
        search = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
        beams = model.generate(**batch, max_new_tokens=30, **search)
        found |= {"beams": beams.sequences, "scores": beams.sequences_scores}
    return found


def freeze(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write a checkpoint and what it gives."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for copy in folder.glob("*.py"):
        copy.unlink()  # it is the package of later versions that must load the folder
    texts = PROMPTS if isinstance(model, VaswaniForCausalLM) else SENTENCES
    found = outputs_of(model, tokenizer, texts)
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "expected.safetensors")
    expected = {"sentences": texts}
    for name in ("greedy", "beams"):
        if name in found:
            expected[name] = tokenizer.batch_decode(found[name], skip_special_tokens=True)
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(f"{text}\n")


def main() -> None:
    """Write a folder for each model."""
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} exists; a frozen checkpoint is never remade.")
    set_seed(0)
    plain = VaswaniTokenizer.train_from_iterator(
        NUMBERS, vocab_size=64, kind="char", show_progress=False
    )
    tokenizer = plain.for_masked_words()
    for name, model in models(len(tokenizer)).items():
        own = plain.for_language_model() if name == "causal" else tokenizer
        train(name, model, own, updates=600 if name in ("classifier", "tagger") else 2000)
        freeze(model, own, folder / name)
    encoder = VaswaniEncoderModel.from_pretrained(folder / "masked").eval()
    freeze(encoder, tokenizer, folder / "encoder")


if __name__ == "__main__":
    main()
