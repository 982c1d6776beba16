"""Masked words first, translation second: a warm start against a start from scratch.

A masked language model reads both sides of Multi30k. Then translation models are trained on fewer
pairs, from its encoder and from scratch, with five seeds each. A paired t-test compares the two.
The test needs `pip install scipy`.
"""

import random
import statistics
import tempfile
from typing import Any

import sacrebleu
import torch
from one_stream import Pairs, batch_of_two, translate
from training_loop import Batch, arguments, multi30k, pad, parameters, train, write_results

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderConfig,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniTokenizer,
)

SIZES = {
    "d_model": 64,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "dropout": 0.1,
}
WARM, COLD = "masked words first", "from scratch"
SPECIAL = 3  # "<pad>", "<unk>", "</s>"


def masked_batch(sentences: list[list[int]], mask_token: int, draw: random.Random) -> Batch:
    """Mask 15% of the tokens as BERT does: 80% a mask, 10% another token, 10% as they are."""
    inputs, labels = [], []
    for sentence in sentences:
        chosen = [token >= SPECIAL and draw.random() < 0.15 for token in sentence]
        changed = list(sentence)
        for place, masked in enumerate(chosen):
            if masked and (chance := draw.random()) < 0.9:
                replacement = draw.randrange(SPECIAL, mask_token)
                changed[place] = mask_token if chance < 0.8 else replacement
        inputs.append(changed)
        labels.append(
            [token if masked else -100 for token, masked in zip(sentence, chosen, strict=True)]
        )
    ids = pad(inputs)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad(labels, -100)}


def pretrain(sentences: list[list[int]], vocabulary: int, updates: int) -> tuple[Any, float]:
    """Train a masked language model; the last token of the vocabulary is the mask."""
    torch.manual_seed(1)
    model = VaswaniForMaskedLM(VaswaniEncoderConfig(vocab_size=vocabulary, **SIZES))
    draw = random.Random(1)
    minutes = train(
        model,
        lambda rows: masked_batch([sentences[row] for row in rows], vocabulary - 1, draw),
        [len(sentence) for sentence in sentences],
        updates=updates,
        tokens=2000,
        peak=3e-3,
    )
    return model, minutes


@torch.no_grad()
def loss_per_token(model: Any, pairs: Pairs) -> float:
    """Average the negative log-probability of the target tokens."""
    total, tokens = 0.0, 0
    for start in range(0, len(pairs), 50):
        batch = batch_of_two(pairs[start : start + 50])
        real = int((batch["labels"] != -100).sum())
        total, tokens = total + model(**batch).loss.item() * real, tokens + real
    return total / tokens


def build(name: str, vocabulary: int, folder: str) -> VaswaniForConditionalGeneration:
    """Build a translation model, from the encoder in a folder or from scratch."""
    if name == WARM:
        return VaswaniForConditionalGeneration.from_encoder_decoder_pretrained(folder)
    sizes = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 256}
    return VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=vocabulary, **SIZES, **sizes))


def fine_tune(model: Any, pairs: Pairs, updates: int, seed: int) -> None:
    """Train a translation model."""
    train(
        model,
        lambda rows: batch_of_two([pairs[row] for row in rows]),
        [max(map(len, pair)) for pair in pairs],
        updates=updates,
        tokens=500,
        batches_per_update=4,
        peak=3e-3,
        seed=seed,
    )


def score(model: Any, pairs: Pairs, references: list[str], tokenizer: Any) -> dict[str, float]:
    """Measure the loss per token of the test pairs, and BLEU of greedy search."""
    found = translate(model, [source for source, _ in pairs], longest=60)
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    bleu = sacrebleu.corpus_bleu(texts, [references], tokenize="none", force=True)
    loss = loss_per_token(model, pairs)
    return {"loss_per_token": round(loss, 4), "bleu": round(bleu.score, 2)}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Average each measure, and test the differences between runs of the same seed."""
    from scipy import stats  # only this test needs scipy

    found: dict[str, Any] = {}
    for measure in ("loss_per_token", "bleu"):
        values = {name: [run[measure] for run in results] for name, results in runs.items()}
        pairs = list(zip(*values.values(), strict=True))
        found[measure] = {name: round(statistics.mean(each), 4) for name, each in values.items()}
        found[measure]["difference"] = round(statistics.mean(a - b for a, b in pairs), 4)
        if len(pairs) > 1:
            found[measure]["p_value"] = float(f"{stats.ttest_rel(*values.values()).pvalue:.2g}")
    return found


def main() -> None:
    """Pretrain once, and train translation with and without it."""
    parser = arguments(__doc__, "siblings-masked-words.json", updates=400)
    parser.add_argument("--pretraining-updates", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "results"}
    sides = {language: multi30k("train", language, args.lines) for language in ("en", "de")}
    tests = {language: multi30k("test_2016_flickr", language) for language in ("en", "de")}
    tokenizer = VaswaniTokenizer.train_from_iterator(
        sides["en"] + sides["de"], vocab_size=4000, show_progress=False
    )
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ids = {language: tokenizer(lines)["input_ids"] for language, lines in sides.items()}
    masked, minutes = pretrain(ids["en"] + ids["de"], len(tokenizer), args.pretraining_updates)
    pretraining = {"parameters": parameters(masked), "minutes": minutes}
    train_pairs = list(zip(ids["en"], ids["de"], strict=True))[: args.pairs]
    test_ids = [tokenizer(tests[language])["input_ids"] for language in ("en", "de")]
    test_pairs = list(zip(*test_ids, strict=True))
    runs: dict[str, list[dict[str, float]]] = {WARM: [], COLD: []}
    with tempfile.TemporaryDirectory() as folder:
        masked.save_pretrained(folder)
        for seed in range(1, args.seeds + 1):
            for name, results in runs.items():
                torch.manual_seed(seed)
                model = build(name, len(tokenizer), folder)
                fine_tune(model, train_pairs, args.updates, seed)
                scores = score(model, test_pairs, tests["de"], tokenizer)
                results.append({"seed": seed, **scores})
                print(name, results[-1], flush=True)
            found = {"pretraining": pretraining, "summary": summary(runs), "runs": runs}
            write_results(args.results, settings=settings, **found)


if __name__ == "__main__":
    main()
