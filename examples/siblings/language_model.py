"""A language model of German: VaswaniForCausalLM beside GPT-2's class and an n-gram model.

All three read the same byte pairs of Multi30k's German side. Perplexity is per word of the test
set, where the end of a sentence counts as a word.
"""

import math
from collections import Counter, defaultdict

import torch
from training_loop import Batch, arguments, multi30k, pad, parameters, train, write_results
from transformers import GPT2Config, GPT2LMHeadModel

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM, VaswaniTokenizer

VOCABULARY, WIDTH, LAYERS, HEADS, DROPOUT = 4000, 128, 4, 4, 0.2
END, LONGEST = 2, 128


MODELS = ("n-grams", "vaswani", "gpt2")


class KneserNey:
    """Interpolated Kneser-Ney smoothing with one discount for each order (Chen and Goodman, 1998).

    For orders below the highest, the count of an n-gram is the number of contexts it occurs in. The
    lowest order is interpolated with the uniform distribution.
    """

    def __init__(self, sentences: list[list[int]], order: int, vocabulary: int) -> None:
        self.order, self.vocabulary = order, vocabulary
        self.counts: list[Counter] = [Counter() for _ in range(order + 1)]
        # The first n-grams of a sentence are shorter than `order`, and belong to their own order.
        for sentence in sentences:
            for end in range(2, len(sentence) + 1):
                gram = tuple(sentence[max(end - order, 0) : end])
                self.counts[len(gram)][gram] += 1
        for size in range(order - 1, 0, -1):
            # The first n-grams of a sentence have no longer context, so their own counts stay.
            self.counts[size] |= Counter(gram[1:] for gram in self.counts[size + 1])
        self.totals = [defaultdict(int) for _ in range(order + 1)]
        self.followers = [defaultdict(int) for _ in range(order + 1)]
        self.discounts = [0.0] * (order + 1)
        for size in range(1, order + 1):
            for gram, number in self.counts[size].items():
                self.totals[size][gram[:-1]] += number
                self.followers[size][gram[:-1]] += 1
            seen = Counter(self.counts[size].values())
            self.discounts[size] = seen[1] / max(seen[1] + 2 * seen[2], 1)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        """Predict a token after a context of at most `order` - 1 tokens."""
        size = len(context) + 1
        lower = self.probability(context[1:], token) if context else 1 / self.vocabulary
        total = self.totals[size].get(context, 0)
        if not total:
            return lower
        discount = self.discounts[size]
        own = max(self.counts[size].get((*context, token), 0) - discount, 0) / total
        return own + discount * self.followers[size][context] / total * lower

    def log_probability(self, sentence: list[int]) -> float:
        """Sum the log-probabilities of all tokens after the first."""
        return sum(
            math.log(
                self.probability(tuple(sentence[max(end - self.order + 1, 0) : end]), sentence[end])
            )
            for end in range(1, len(sentence))
        )


def batch_of(sentences: list[list[int]]) -> Batch:
    """Pad sentences on the right, and let the loss ignore the padding."""
    ids = pad(sentences)
    mask = pad([[1] * len(sentence) for sentence in sentences])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@torch.no_grad()
def log_probability(model: torch.nn.Module, sentences: list[list[int]]) -> float:
    """Sum the log-probabilities of all tokens after the first."""
    total = 0.0
    for start in range(0, len(sentences), 50):
        batch = batch_of(sentences[start : start + 50])
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).double(), targets.flatten(), reduction="sum"
        )
        total -= losses.item()
    return total


def language_model(vocabulary: int) -> VaswaniForCausalLM:
    """Build the decoder alone."""
    config = VaswaniDecoderConfig(
        vocab_size=vocabulary,
        d_model=WIDTH,
        decoder_layers=LAYERS,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=4 * WIDTH,
        dropout=DROPOUT,
    )
    return VaswaniForCausalLM(config)


def gpt2(vocabulary: int) -> GPT2LMHeadModel:
    """Build GPT-2's class of the same size."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=LONGEST,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train the models and write their perplexities."""
    parser = arguments(__doc__, "siblings-language-model.json", updates=2000)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    torch.manual_seed(1)
    lines = {part: multi30k(part, "de", args.lines) for part in ("train", "test_2016_flickr")}
    tokenizer = VaswaniTokenizer.train_from_iterator(
        lines["train"], vocab_size=VOCABULARY, show_progress=False
    )
    train_set, test_set = (
        [[END, *ids] for ids in tokenizer(text)["input_ids"]] for text in lines.values()
    )
    words = sum(len(line.split()) + 1 for line in lines["test_2016_flickr"])

    results = {}
    for order in (2, 3, 4, 5) if "n-grams" in args.models else ():
        ngrams = KneserNey(train_set, order, len(tokenizer))
        total = sum(map(ngrams.log_probability, test_set))
        results[f"kneser-ney-{order}"] = {"perplexity_per_word": math.exp(-total / words)}
    builders = {"vaswani": language_model, "gpt2": gpt2}
    for model in (builders[name](len(tokenizer)) for name in args.models if name in builders):
        name = type(model).__name__
        minutes = train(
            model,
            lambda rows: batch_of([train_set[row] for row in rows]),
            [len(sentence) for sentence in train_set],
            updates=args.updates,
            tokens=2000,
            peak=3e-3,
        )
        total = log_probability(model, test_set)
        results[name] = {
            "perplexity_per_word": math.exp(-total / words),
            "parameters": parameters(model),
            "minutes": minutes,
        }
        print(name, results[name], flush=True)
    write_results(
        args.results,
        data={"train_sentences": len(train_set), "test_words": words, "vocabulary": len(tokenizer)},
        settings={"updates": args.updates, "tokens": 2000, "peak": 3e-3, "dropout": DROPOUT},
        results=results,
    )


if __name__ == "__main__":
    main()
