"""Make the frozen checkpoint of a minor version, once, when that version is released.

python tests/frozen/make.py tests/frozen/0.1

The checkpoint is a small English-German model of number words below 1000, with its logits and beam
output. Later versions must load it with the same results (tests/test_frozen.py). Never make an old
checkpoint again.
"""

import json
import random
import sys
from pathlib import Path

import torch
from num2words import num2words
from safetensors.torch import save_file
from transformers import get_scheduler, set_seed

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

SENTENCES = ["three hundred and forty-two", "seven", "nine hundred and ninety-nine", "a <unk> 42"]


def train() -> tuple[VaswaniForConditionalGeneration, VaswaniTokenizer]:
    """Train on the numbers below 1000, in a plain loop without trainers that may change."""
    set_seed(0)
    english = [num2words(n) for n in range(1000)]
    german = [num2words(n, lang="de") for n in range(1000)]
    tokenizer = VaswaniTokenizer.train_from_iterator(english + german, vocab_size=340)
    config = VaswaniConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    model = VaswaniForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
    scheduler = get_scheduler("linear", optimizer, 100, 2000)
    for _ in range(2000):
        rows = random.sample(range(1000), 64)
        batch = tokenizer(
            [english[row] for row in rows],
            text_target=[german[row] for row in rows],
            padding=True,
            return_tensors="pt",
        )
        batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def main() -> None:
    """Write the checkpoint and its results."""
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} exists; a frozen checkpoint is never remade.")
    model, tokenizer = train()
    model.generation_config.num_beams = 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for copy in folder.glob("*.py"):
        copy.unlink()  # the package of later versions must load the folder, without saved code
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        beams = model.generate(
            **batch, num_return_sequences=2, return_dict_in_generate=True, output_scores=True
        )
        labels = tokenizer(text_target=["siebenundzwanzig"] * 4, return_tensors="pt")["input_ids"]
        logits = model(**batch, labels=labels).logits
    tensors = {
        **batch,
        "labels": labels,
        "logits": logits,
        "sequences": beams.sequences,
        "sequences_scores": beams.sequences_scores,
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "expected.safetensors",
    )
    texts = tokenizer.batch_decode(beams.sequences, skip_special_tokens=True)
    (folder / "expected.json").write_text(
        json.dumps({"sentences": SENTENCES, "beams": texts}, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
