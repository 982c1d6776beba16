"""Speed of `generate`: VaswaniForCausalLM compared with GPT2LMHeadModel of the same size.

    python benchmarks/language_model.py --threads 2 --json benchmarks/results/language-model.json

Both models have random weights in float32 and the paper's base sizes. There is no end token, so
every text gets the same number of new tokens. The two models take turns, and the result is the
median of the repetitions.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from vaswani.training.circumstances import circumstances

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 37_000, 512, 6, 8, 2048
CASES = [(beams, batch) for beams in (1, 4) for batch in (1, 32)]


def models(longest: int) -> dict[str, Any]:
    """Make the two models."""
    torch.manual_seed(0)
    ours = VaswaniDecoderConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        decoder_layers=LAYERS,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=INNER,
    )
    theirs = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=longest,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INNER,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    return {
        "VaswaniForCausalLM": VaswaniForCausalLM(ours).eval(),
        "GPT2LMHeadModel": GPT2LMHeadModel(theirs).eval(),
    }


def seconds(model: Any, prompt: torch.Tensor, beams: int, new_tokens: int) -> float:
    """Time one call of `generate`."""
    settings = {"num_beams": beams, "max_new_tokens": new_tokens, "do_sample": False}
    start = time.perf_counter()
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **settings
    )
    elapsed = time.perf_counter() - start
    if output.shape != (len(prompt), prompt.shape[1] + new_tokens):
        raise RuntimeError(f"Expected {new_tokens} new tokens, got {tuple(output.shape)}.")
    return elapsed


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    """Measure all cases."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    both = models(args.prompt + args.new_tokens)
    rows = []
    for beams, batch in CASES:
        prompt = torch.randint(3, VOCABULARY, (batch, args.prompt))
        times: dict[str, list[float]] = {name: [] for name in both}
        for repetition in range(args.repetitions + 1):
            for name, model in both.items():
                elapsed = seconds(model, prompt, beams, args.new_tokens)
                if repetition:  # the first one warms up
                    times[name].append(elapsed)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            {
                "num_beams": beams,
                "batch_size": batch,
                "seconds": {name: round(value, 4) for name, value in medians.items()},
                "times_faster": round(
                    medians["GPT2LMHeadModel"] / medians["VaswaniForCausalLM"], 2
                ),
            }
        )
        print(rows[-1], flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        report = {**circumstances(), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
