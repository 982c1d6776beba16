r"""Decoding speed against MarianMTModel and CTranslate2, on the same weights in one run.

    python benchmarks/generation.py                     all tables: most of an hour on two cores
    python benchmarks/generation.py --quick             batch 1 and 32 only, under two minutes
    python benchmarks/generation.py --json results.json --device cuda
    python benchmarks/generation.py --train             only make the model that is measured

The model has the paper's base size with 37,000 tokens. It is trained on Multi30k, so that its
translations end. All engines translate the same sentences of the test set in the same batches,
sorted by length as in every toolkit. Inputs and outputs are token ids, so tokenizers are not timed.

Search rules. "ours": the model's own rules: length penalty ((5 + |Y|) / 6)^0.6, a search until no
open hypothesis can win, and at most source length + 50 tokens for each sentence. "ours, stop
early": rules like those of the peers: score / length, and a stop when the number of finished
hypotheses equals the number of beams. MarianMT: the defaults of transformers (score / length,
early_stopping=False). CTranslate2: its defaults (score / length, and the stop of "ours, stop
early"). Translations of the peers have at most 50 tokens more than the longest source of the batch.

Engines take turns in every round, so that a slow minute of the machine affects all of them. Times
are medians over rounds. A ratio is the median over rounds of the peer's time divided by ours.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from base_model import VOCAB_SIZE, read_lines, train
from engines import (
    EngineProcess,
    Workshop,
    build_alone,
    distance_to_ctranslate2,
    distance_to_marian,
    marian_twin,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging
from vaswani.training.circumstances import circumstances
from worker import PeakMemory, Worker, synchronize

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "runs" / "benchmark-base"
EARLY = "ours, stop early"
BLEU_BATCH = 128
# Seconds between engines. Threads stay awake for a moment after their last job, on cores that the
# next engine needs.
PAUSE = 0.3
# Values on the axes of the curves.
BEAMS = (1, 2, 4, 8)
SOURCE_LENGTHS = (16, 32, 64, 128, 256, 512)
OUTPUT_LENGTHS = (16, 32, 64, 128, 256)

Tokens = list[list[int]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add(
        "--quick", action="store_true", help="fewer sentences, batch 1 and 32, no curves, no memory"
    )
    add(
        "--train",
        action="store_true",
        help="train the model, or continue its training, and measure nothing",
    )
    add(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        metavar="FOLDER",
        help="folder of the model, which is trained if it is missing "
        "(default: runs/benchmark-base)",
    )
    add("--beams", type=int, nargs="+", default=[4, 1], metavar="N", help="default: 4 1")
    add("--batches", type=int, nargs="+", metavar="N", help="default: 1 8 32 128")
    add("--rounds", type=int, help="turns of every engine (default: 3, 2 with --quick)")
    add("--sentences", type=int, metavar="N", help="largest number of sentences per measurement")
    add(
        "--parts",
        nargs="+",
        choices=("speed", "memory", "curves"),
        help="what to measure (default: all)",
    )
    add("--profile", action="store_true", help="only print where our search spends its time")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    args.batches = args.batches or ([1, 32] if args.quick else [1, 8, 32, 128])
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.parts = args.parts or (["speed"] if args.quick else ["speed", "memory", "curves"])
    for name in ("beams", "batches"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {min(getattr(args, name))}")
    return args


class Text:
    """The sentences to translate, as token ids with the end token.

    Args:
        tokenizer: tokenizer of the model. None means an untrained model: its sentences are random,
            and its outputs are cut after `forced` tokens.
    """

    def __init__(self, tokenizer: VaswaniTokenizer | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.forced = 16 if tokenizer is None else None
        self.references: list[str] = []
        if tokenizer is None:
            rng = random.Random(0)
            lengths = [rng.randint(6, 24) for _ in range(1000)]
            self.sources = [[*rng.choices(range(3, vocab_size), k=n - 1), 2] for n in lengths]
            self.targets = [source[:-1] for source in self.sources]
        else:
            self.sources = tokenizer(read_lines("test_2016_flickr", "en"))["input_ids"]
            self.references = read_lines("test_2016_flickr", "de")
            self.targets = [ids[:-1] for ids in tokenizer(self.references)["input_ids"]]

    def chosen(self, number: int) -> list[int]:
        """Return the indices of `number` sentences across the file, shortest source first."""
        number = min(number, len(self.sources))
        picked = [index * len(self.sources) // number for index in range(number)]
        return sorted(picked, key=lambda index: len(self.sources[index]))

    def bleu(self, indices: Sequence[int], outputs: Tokens) -> float | None:
        """Return the BLEU of translations on the corpus' own tokens, or None without references."""
        if self.tokenizer is None:
            return None
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        metric = sacrebleu.BLEU(tokenize="none", force=True)
        references = [self.references[index] for index in indices]
        return metric.corpus_score(texts, [references]).score

    def of_length(self, length: int, number: int) -> Tokens:
        """Return `number` sources of exactly `length` tokens, made of concatenated sentences."""
        words = [token for source in self.sources for token in source[:-1]]
        eos = self.sources[0][-1]
        return [
            [*(words[(start + i) % len(words)] for i in range(length - 1)), eos]
            for start in range(0, number * 97, 97)
        ]


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield batches of `size` items. The last batch may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def engine_names(device: str) -> list[tuple[str, str]]:
    """Return (name, precision) of all engines, ours first."""
    ours = [(name, kind) for kind in ("float32", "bfloat16") for name in ("ours", EARLY)]
    marian = [("MarianMT", kind) for kind in ("float32", "bfloat16")]
    kinds = ("float32", "int8") if device == "cpu" else ("float32", "bfloat16", "int8_float16")
    return [*ours, *marian, *(("CTranslate2", kind) for kind in kinds)]


def start_all(
    model: Path, device: str, folder: Path
) -> tuple[list[EngineProcess], list[dict[str, str]]]:
    """Start every engine that this machine can run, and list why the others are missing."""
    threads = torch.get_num_threads()
    started = [
        EngineProcess(model, name, precision, device, folder, threads)
        for name, precision in engine_names(device)
    ]
    engines, missing = [], []
    for engine in started:
        try:
            engine.wait()
        except RuntimeError as error:
            reason = {"engine": engine.label, "precision": engine.precision, "reason": str(error)}
            missing.append(reason)
        else:
            engines.append(engine)
    return engines, missing


def check_twins(model: PreTrainedModel, folder: Path, text: Text) -> dict[str, float]:
    """Compare the peers' outputs with ours on real targets, and exit if they differ."""
    indices = text.chosen(12)
    sources, targets = ([side[i] for i in indices] for side in (text.sources, text.targets))
    ended = [[*target, model.config.eos_token_id] for target in targets]
    distances = {"MarianMT": distance_to_marian(model, marian_twin(model), sources, ended)}
    with contextlib.suppress(RuntimeError):
        engine = Workshop(model, "cpu", folder, 1).build("CTranslate2", "float32")
        distances["CTranslate2"] = distance_to_ctranslate2(model, engine, sources, targets)
    limits = {"MarianMT": 1e-4, "CTranslate2": 1e-3}
    for name, distance in distances.items():
        if not distance <= limits[name]:
            sys.exit(f"{name} computes something else: off by {distance:.2g} at a target token.")
    return distances


def take_turns(
    engines: list[EngineProcess],
    sentences: Tokens,
    size: int,
    beams: int,
    rounds: int,
    forced: int | None = None,
) -> list[dict[str, Any]]:
    """Time all engines in turn on the same batches, after one batch that is not timed."""
    batches = list(batched(sentences, size))
    seconds: list[list[float]] = [[] for _ in engines]
    outputs: list[Tokens] = [[] for _ in engines]
    for engine in engines:
        engine.translate(batches[:1], beams, forced)
    for turn in range(rounds):
        for place in range(len(engines)):
            # Every round starts with another engine.
            number = (place + turn) % len(engines)
            time.sleep(PAUSE)
            taken, outputs[number] = engines[number].translate(batches, beams, forced)
            seconds[number].append(taken)
    rows = []
    for engine, taken, tokens in zip(engines, seconds, outputs, strict=True):
        median = statistics.median(taken)
        rows.append(
            {
                "engine": engine.label,
                "precision": engine.precision,
                "beams": beams,
                "batch": size,
                "sentences": len(sentences),
                "tokens": sum(map(len, tokens)),
                "seconds": taken,
                "sentences_per_second": len(sentences) / median,
                "tokens_per_second": sum(map(len, tokens)) / median,
                "outputs": tokens,
            }
        )
    return rows


def measure_speed(
    args: argparse.Namespace, engines: list[EngineProcess], text: Text
) -> list[dict[str, Any]]:
    """Return rows of speed and BLEU for every engine, number of beams and batch size."""
    rows = []
    for beams in args.beams:
        # Only beam search has stopping rules and length penalties.
        taking_part = [engine for engine in engines if beams > 1 or engine.label != EARLY]
        scores: dict[tuple[str, str], float | None] = {}
        if not args.quick and text.tokenizer is not None:
            indices = text.chosen(args.sentences or len(text.sources))
            for engine in taking_part:
                batches = list(batched([text.sources[i] for i in indices], BLEU_BATCH))
                _, outputs = engine.translate(batches, beams)
                scores[engine.label, engine.precision] = text.bleu(indices, outputs)
        for size in args.batches:
            alone, together = (4, 32) if args.quick else (64, 256)
            number = alone if size == 1 else max(together, size)
            indices = text.chosen(min(number, args.sentences or number))
            sentences = [text.sources[i] for i in indices]
            block = take_turns(taking_part, sentences, size, beams, args.rounds, text.forced)
            for row in block:
                outputs = row.pop("outputs")
                key = (row["engine"], row["precision"])
                row["bleu"] = scores[key] if key in scores else text.bleu(indices, outputs)
            print_speed(block)
            rows += block
    return rows


def print_speed(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one number of beams and one batch size."""
    search = "greedy" if rows[0]["beams"] == 1 else f"beam {rows[0]['beams']}"
    print(f"\n{search}, batch {rows[0]['batch']}, {rows[0]['sentences']} sentences")
    print(f"{'engine':18}{'precision':14}{'sentences/s':>12}{'tokens/s':>10}{'BLEU':>8}")
    for row in rows:
        bleu = "-" if row["bleu"] is None else f"{row['bleu']:.2f}"
        print(
            f"{row['engine']:18}{row['precision']:14}{row['sentences_per_second']:12.2f}"
            f"{row['tokens_per_second']:10.0f}{bleu:>8}",
            flush=True,
        )


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times faster ours is than each peer, paired by round, and the BLEU gap."""
    found = {(r["engine"], r["precision"], r["beams"], r["batch"]): r for r in rows}
    pairs = [
        (("MarianMT", "float32"), "float32"),
        (("MarianMT", "bfloat16"), "bfloat16"),
        (("CTranslate2", "float32"), "float32"),
        (("CTranslate2", "bfloat16"), "bfloat16"),
        (("CTranslate2", "int8"), "bfloat16"),
        (("CTranslate2", "int8_float16"), "bfloat16"),
    ]
    ratios = []
    for beams, size in dict.fromkeys((row["beams"], row["batch"]) for row in rows):
        for peer, precision in pairs:
            for name in ("ours", EARLY):
                ours = found.get((name, precision, beams, size))
                theirs = found.get((*peer, beams, size))
                if ours is None or theirs is None:
                    continue
                times = zip(theirs["seconds"], ours["seconds"], strict=True)
                ratios.append(
                    {
                        "ours": f"{name} {precision}",
                        "peer": " ".join(peer),
                        "beams": beams,
                        "batch": size,
                        "ratio": statistics.median(a / b for a, b in times),
                        "bleu_difference": None
                        if ours["bleu"] is None
                        else ours["bleu"] - theirs["bleu"],
                    }
                )
    return ratios


def judge(ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the ratios of our default search with 4 beams with our aims."""
    wanted = []
    for ratio in ratios:
        if ratio["beams"] != 4 or ratio["ours"].startswith(EARLY):
            continue
        minimum = None
        if ratio["peer"].startswith("MarianMT"):
            minimum = {1: 2.0, 32: 2.5}.get(ratio["batch"])
        elif ratio["peer"] == "CTranslate2 float32":
            minimum = 1.0
        elif ratio["peer"].startswith("CTranslate2 int8"):
            minimum = 1.2
        if minimum is not None:
            name = f"{ratio['ours']} over {ratio['peer']}, beam 4, batch {ratio['batch']}"
            value = ratio["ratio"]
            wanted.append({"aim": name, "least": minimum, "value": value, "met": value >= minimum})
    for ratio in ratios:
        # Also compare with the peer's rules, so that a better search does not hide what bfloat16
        # costs.
        of_int8 = ratio["peer"].startswith("CTranslate2 int8") and "bfloat16" in ratio["ours"]
        if ratio["beams"] == 4 and of_int8 and ratio["bleu_difference"] is not None:
            name = f"BLEU of {ratio['ours']} less that of {ratio['peer']}, batch {ratio['batch']}"
            value = ratio["bleu_difference"]
            wanted.append({"aim": name, "least": -0.1, "value": value, "met": value >= -0.1})
    return wanted


def print_judgement(ratios: list[dict[str, Any]], aims: list[dict[str, Any]]) -> None:
    """Print how many times faster we are, then the aims."""
    print(f"\n{'times faster':26}{'than':24}{'beams':>6}{'batch':>6}{'ratio':>8}")
    for ratio in ratios:
        print(
            f"{ratio['ours']:26}{ratio['peer']:24}{ratio['beams']:6}{ratio['batch']:6}"
            f"{ratio['ratio']:8.2f}"
        )
    for aim in aims:
        verdict = "met   " if aim["met"] else "MISSED"
        print(f"{verdict} {aim['value']:6.2f} (at least {aim['least']:.2f})  {aim['aim']}")


def measure_curves(
    args: argparse.Namespace, engines: list[EngineProcess], text: Text
) -> list[dict[str, Any]]:
    """Measure how the time of a sentence grows with beams, source length and output length."""
    engines = [engine for engine in engines if engine.label != EARLY]
    rounds, size = (1, 4) if args.quick else (2, 8)
    indices = text.chosen(min(64, args.sentences or 64))
    real = [text.sources[i] for i in indices]
    points = [("beams", beams, real, 32, beams, text.forced) for beams in BEAMS]
    for length in SOURCE_LENGTHS:
        points.append(("source tokens", length, text.of_length(length, size), size, 4, 32))
    for length in OUTPUT_LENGTHS:
        points.append(("output tokens", length, text.of_length(16, size), size, 4, length))
    rows, printed = [], None
    for what, value, sentences, batch, beams, forced in points:
        if what != printed:
            fixed = {"beams": f"batch {batch}"}.get(what, f"beam {beams}, batch {batch}")
            print(f"\nmilliseconds per sentence by {what}, {fixed}\n{'':14}", end="")
            print("".join(f"{e.label + ' ' + e.precision:>22}" for e in engines))
            printed = what
        block = take_turns(engines, sentences, batch, beams, rounds, forced)
        print(f"{value:14}", end="")
        for row in block:
            milliseconds = 1000 * statistics.median(row["seconds"]) / len(sentences)
            print(f"{milliseconds:22.1f}", end="")
            rows.append(
                {
                    "by": what,
                    "value": value,
                    "engine": row["engine"],
                    "precision": row["precision"],
                    "beams": beams,
                    "batch": batch,
                    "tokens": row["tokens"],
                    "milliseconds_per_sentence": milliseconds,
                }
            )
        print(flush=True)
    return rows


def memory_of(model: Path, name: str, precision: str, device: str, *arguments: Any) -> Callable:
    """Build one engine and return a function that measures its memory.

    The arguments are those of EngineProcess.
    """
    memory, before = PeakMemory(device), 0.0
    outside_torch = device == "cuda" and name == "CTranslate2"
    if outside_torch:
        free = torch.cuda.mem_get_info()[0]
    elif device == "cpu":
        before = memory.now()
    engine = build_alone(model, name, precision, device, *arguments)

    def translate(sentences: Tokens, beams: int, forced: int | None) -> dict[str, float]:
        """Translate one batch, and return the memory of the weights and the peak memory."""
        weights = memory.now() - before
        memory.forget()
        if outside_torch:
            weights = (free - torch.cuda.mem_get_info()[0]) / 2**20
        engine.run(engine.prepare(sentences), beams, forced)
        peak = memory.peak() - before
        if outside_torch:
            peak = (free - torch.cuda.mem_get_info()[0]) / 2**20
        return {"weights_mb": weights, "peak_mb": peak}

    return translate


def measure_memory(args: argparse.Namespace, folder: Path, text: Text) -> list[dict[str, Any]]:
    """Return the peak memory of each engine on the longest sentences, without the libraries'."""
    rows = []
    kind = "GPU" if args.device == "cuda" else "resident"
    print(f"\npeak {kind} memory, beam 4, longest sentences (MB, without the libraries' own)")
    print(f"{'engine':18}{'precision':14}{'batch':>6}{'weights':>10}{'peak':>10}")
    for name, precision in engine_names(args.device):
        if name == EARLY:
            continue
        for size in sorted({min(args.batches), 32, max(args.batches)}):
            sentences = sorted(text.sources, key=len)[-size:]
            arguments = (args.model, name, precision, args.device, folder)
            worker = Worker(memory_of, *arguments, torch.get_num_threads())
            try:
                worker.wait()
                measured = worker(sentences, 4, text.forced)
            except RuntimeError as error:
                print(f"{name:18}{precision:14}  not measured: {error}")
                continue
            worker.close()
            row = {"engine": name, "precision": precision, "beams": 4, "batch": size, **measured}
            rows.append(row)
            print(
                f"{name:18}{precision:14}{size:6}{row['weights_mb']:10.0f}{row['peak_mb']:10.0f}",
                flush=True,
            )
    return rows


def measure_profile(workshop: Workshop, text: Text, beams: int) -> list[dict[str, Any]]:
    """Return the share of each operator in the time of our search, for batches of 1 and 32."""
    rows = []
    on_gpu = workshop.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for precision in ("float32", "bfloat16"):
        engine = workshop.build("ours", precision)
        for size in (1, 32):
            indices = text.chosen(200)
            middle = (len(indices) - size) // 2
            batch = engine.prepare([text.sources[i] for i in indices[middle : middle + size]])
            engine.run(batch, beams, text.forced)
            with profile(activities=activities) as recorded:
                engine.run(batch, beams, text.forced)
                synchronize()
            taken = {
                event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
                for event in recorded.key_averages()
            }
            slowest = sorted(taken, key=lambda name: -taken[name])[:10]
            shares = {name: round(taken[name] / sum(taken.values()), 3) for name in slowest}
            rows.append({"precision": precision, "beams": beams, "batch": size, "shares": shares})
            print(f"\nours {precision}, beam {beams}, batch {size}: share of the time")
            print("\n".join(f"{share:7.1%}  {name}" for name, share in shares.items()), flush=True)
    return rows


def quieten() -> None:
    """Turn off progress bars and repeated advice of transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, Text]:
    """Load the model. If it is missing, train it, or with --quick make an untrained one."""
    if (args.model / "model.safetensors").exists():
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model).eval()
        tokenizer = VaswaniTokenizer.from_pretrained(args.model)
        return model, Text(tokenizer, model.config.vocab_size)
    if args.quick or args.profile:
        print(
            f"No trained model in {args.model.name}: random weights and sentences, outputs cut at "
            "16 tokens, no BLEU. `--train` makes the real one."
        )
        torch.manual_seed(0)
        config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE)
        return VaswaniForConditionalGeneration(config).eval(), Text(None, VOCAB_SIZE)
    print(f"No trained model in {args.model.name}: training it first.", flush=True)
    train(args.model)
    return load(args)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    quieten()
    if args.train:
        train(args.model)
        return
    model, text = load(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder, trained = Path(scratch), args.model
        workshop = Workshop(model, args.device, folder, torch.get_num_threads())
        if args.profile:
            measure_profile(workshop, text, args.beams[0])
            return
        if text.tokenizer is None:
            trained = folder / "random"
            model.save_pretrained(trained)
        engines, missing = start_all(trained, args.device, folder)
        results: dict[str, Any] = {
            **circumstances(),
            "device": args.device,
            "model": args.model.name if text.tokenizer is not None else "random weights",
            "parameters": model.num_parameters(),
            "rounds": args.rounds,
            "missing": missing,
            "distance_of_twins": check_twins(model, folder, text),
        }
        for engine in missing:
            print(f"{engine['engine']} {engine['precision']} is missing: {engine['reason']}")
        if "memory" in args.parts and text.tokenizer is not None:
            results["memory"] = measure_memory(args, Path(scratch), text)
        if "speed" in args.parts:
            results["speed"] = measure_speed(args, engines, text)
            if not args.quick:
                results["profile"] = measure_profile(workshop, text, args.beams[0])
            results["ratios"] = compare(results["speed"])
            results["aims"] = judge(results["ratios"])
            print_judgement(results["ratios"], results["aims"])
            write(args.json, results)  # the curves take long, so write the other results before
        if "curves" in args.parts:
            results["curves"] = measure_curves(args, engines, text)
        for engine in engines:
            engine.close()
    write(args.json, results)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results as JSON if a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
