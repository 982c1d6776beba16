"""One stream against two: a prefix language model against the encoder-decoder, for translation.

Both models have nearly the same number of parameters, the same sentences and the same updates. In
the one stream, the source comes before the target, its tokens see each other in both directions,
and the loss counts the target alone.
"""

import random
from typing import Any

import sacrebleu
import torch
from num2words import num2words
from training_loop import Batch, arguments, multi30k, pad, parameters, train, write_results

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniTokenizer,
)

END = 2
Pairs = list[tuple[list[int], list[int]]]
# Three layers of an encoder and three of a decoder have the parameters of seven without attention
# to a source: 3 * 12 + 3 * 16 = 7 * 12 times d_model^2.
LAYERS, LAYERS_OF_ONE_STREAM = 3, 7


def two_streams(vocabulary: int, width: int, **settings: Any) -> VaswaniForConditionalGeneration:
    """Build the encoder-decoder."""
    sizes = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 4 * width))
    }
    config = VaswaniConfig(vocab_size=vocabulary, d_model=width, **sizes, **settings)
    return VaswaniForConditionalGeneration(config)


def one_stream(vocabulary: int, width: int, **settings: Any) -> VaswaniForCausalLM:
    """Build the language model, with the encoder-decoder's label smoothing."""
    return VaswaniForCausalLM(
        VaswaniDecoderConfig(
            vocab_size=vocabulary,
            d_model=width,
            decoder_layers=LAYERS_OF_ONE_STREAM,
            decoder_attention_heads=4,
            decoder_ffn_dim=4 * width,
            label_smoothing=VaswaniConfig.label_smoothing,
            **settings,
        )
    )


def batch_of_two(pairs: Pairs) -> Batch:
    """Pad sources and targets apart."""
    sources = pad([source for source, _ in pairs])
    return {
        "input_ids": sources,
        "attention_mask": (sources != 0).long(),
        "labels": pad([target for _, target in pairs], -100),
    }


def batch_of_one(pairs: Pairs) -> Batch:
    """Put each target behind its source, whose end is the target's start."""
    ids = pad([source + target for source, target in pairs])
    prefix = pad([[1] * len(source) + [0] * len(target) for source, target in pairs])
    labels = pad([[-100] * len(source) + target for source, target in pairs], -100)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "prefix_mask": prefix, "labels": labels}


def translate(model: Any, sources: list[list[int]], longest: int) -> list[list[int]]:
    """Translate greedily, 50 sentences at a time."""
    outputs = []
    for start in range(0, len(sources), 50):
        batch = sources[start : start + 50]
        if isinstance(model, VaswaniForConditionalGeneration):
            ids = pad(batch)
            found = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=longest)
        else:
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(source)) + source for source in batch])
            mask = (ids != 0).long()
            found = model.generate(
                ids, attention_mask=mask, prefix_mask=mask, max_new_tokens=longest
            )[:, width:]
        outputs += found.tolist()
    return outputs


def compare(
    train_pairs: Pairs,
    test_sources: list[list[int]],
    tokenizer: VaswaniTokenizer,
    score: Any,
    **settings: Any,
) -> dict[str, Any]:
    """Train both models and score their translations."""
    results = {}
    for name, build, collate in (
        ("two streams", two_streams, batch_of_two),
        ("one stream", one_stream, batch_of_one),
    ):
        torch.manual_seed(1)
        options = {name: settings[name] for name in ("dropout", "norm_position")}
        model = build(len(tokenizer), settings["width"], **options)
        minutes = train(
            model,
            lambda rows, collate=collate: collate([train_pairs[row] for row in rows]),
            [max(len(source), len(target)) for source, target in train_pairs],
            updates=settings["updates"],
            tokens=settings["tokens"],
            peak=settings["peak"],
            batches_per_update=settings["batches_per_update"],
        )
        outputs = translate(model, test_sources, settings["longest"])
        texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        results[name] = {**score(texts), "parameters": parameters(model), "minutes": minutes}
        print(name, results[name], flush=True)
    return results


def number_words(pairs: int, updates: int) -> dict[str, Any]:
    """Translate English number words into German ones: share of numbers that are right."""
    numbers = random.Random(1).sample(range(1_000_000), pairs + 500)
    texts = {language: [num2words(n, lang=language) for n in numbers] for language in ("en", "de")}
    tokenizer = VaswaniTokenizer.train_from_iterator(
        texts["en"] + texts["de"], vocab_size=400, show_progress=False
    )
    ids = [tokenizer(texts[language])["input_ids"] for language in ("en", "de")]
    sentence_pairs = list(zip(*ids, strict=True))

    def score(found: list[str]) -> dict[str, float]:
        right = sum(map(str.__eq__, found, texts["de"][pairs:]))
        return {"exact": round(right / len(found), 4)}

    return compare(
        sentence_pairs[:pairs],
        ids[0][pairs:],
        tokenizer,
        score,
        **{"width": 64, "dropout": 0.1, "norm_position": "post", "updates": updates},
        **{"tokens": 1500, "batches_per_update": 1, "peak": 3e-3, "longest": 60},
    )


def multi30k_bleu(pairs: int, updates: int) -> dict[str, Any]:
    """Translate Multi30k from English to German: BLEU of greedy search on its test set."""
    sides = {language: multi30k("train", language, pairs) for language in ("en", "de")}
    tests = {language: multi30k("test_2016_flickr", language) for language in ("en", "de")}
    tokenizer = VaswaniTokenizer.train_from_iterator(
        sides["en"] + sides["de"], vocab_size=4000, show_progress=False
    )
    sentence_pairs = list(
        zip(*(tokenizer(sides[language])["input_ids"] for language in ("en", "de")), strict=True)
    )

    def score(found: list[str]) -> dict[str, float]:
        bleu = sacrebleu.corpus_bleu(found, [tests["de"]], tokenize="none", force=True)
        return {"bleu": round(bleu.score, 2)}

    # Seven post-norm layers of the one stream learn nothing in so few updates: both have pre-norm.
    return compare(
        sentence_pairs,
        tokenizer(tests["en"])["input_ids"],
        tokenizer,
        score,
        **{"width": 128, "dropout": 0.1, "norm_position": "pre", "updates": updates},
        **{"tokens": 500, "batches_per_update": 4, "peak": 2e-3, "longest": 60},
    )


# The sizes of each training set, and the function that trains and scores on it.
DATA = {
    "number words": ((500, 2000, 8000), number_words),
    "Multi30k": ((29_000, 5000), multi30k_bleu),
}


def main() -> None:
    """Compare the two on each data set, with few and with many pairs."""
    parser = arguments(__doc__, "siblings-one-stream.json", updates=800)
    parser.add_argument("--data", nargs="+", choices=DATA, default=["number words"])
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for data in args.data:
        sizes, run = DATA[data]
        for pairs in sizes:
            results[f"{data}, {pairs} pairs"] = run(min(pairs, args.lines or pairs), args.updates)
            write_results(args.results, settings={"updates": args.updates}, results=results)


if __name__ == "__main__":
    main()
