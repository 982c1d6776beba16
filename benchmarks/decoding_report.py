"""The page of decoding speed on all hosts, from the results files of generation.py.

    python benchmarks/decoding_report.py

It writes README.md into the folder of the results files. Profiles are read from the folder above:
its files decoding-profile*.json.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from base_model import VOCAB_SIZE
from engines import OURS, PEERS_RULE
from host import ALLOCATORS, host_name
from ratios import AIM_WITH_FEWER_INSTRUCTIONS, AIM_WITH_GLIBC, AIMS, SETTING, search_name

from vaswani import VaswaniConfig

FOLDER = Path(__file__).resolve().parent / "results" / "generation"
_USUAL = ("glibc", "native", "short")  # the first three of a setting
# Older files do not record their threads. Building CTranslate2's twin had set torch to one thread.
_EARLIER_THREADS = 1

_HEAD = """\
# Decoding speed on all hosts

`python benchmarks/decoding_report.py` writes this page from the files beside it.
[Decoding speed](../../../docs/results.md#decoding-speed) explains the measurement and its limits.

Engines:

- "ours" follows the paper's search.
- "ours, the peer's rule" follows CTranslate2's rule. It ranks by score / length and stops when
  the number of finished hypotheses equals the number of beams. MarianMT follows this rule too.
- A row has the number of threads of every engine.

Settings:

- `glibc` and `tcmalloc` are allocators of memory.
- `native` uses all instructions of the host. `avx2` and `avx512_vnni` disable newer instructions.
- `short` sentences are those of Multi30k. `long` sentences have 40 to 60 tokens. Their translations
  are short if the benchmark's model learned little: the next table has the lengths.

A ratio is the peer's time divided by ours in the same round. Tables have medians over rounds,
rounded down."""
_HOSTS = """\
The memory rate is that of a copy. Products multiply 512 rows by a matrix of 512 x 2048 with torch.
Until 2026-11-26, two threads measured the cost of a page fault. Since then, one thread measures it,
and the cost is higher. The last columns have the mean tokens of a translation of short and of long
sentences.
"""
_RATIOS = """\
Ranges over all files, with glibc, native instructions and short sentences.
"""
_OPERATORS = """\
Without kernels, our engine multiplies with torch's operators. The files of these ratios are in
[torch-operators](torch-operators). The files with one thread are of 2026-11-23, before there were
kernels, and from another EPYC with AVX-512. The file with two threads is from the EPYC with AVX2.
"""
_EARLIER = """\
The files of these ratios are in [earlier-kernels](earlier-kernels), and are older than several
kernels. The EPYC with AVX-512 was not available again, so it has no profile. MarianMT searched
longer there than the peer's rule. Ranges with glibc, native instructions and short sentences:
"""
_ALLOCATORS = """\
An engine's time with glibc, divided by its time with tcmalloc. The two were measured minutes apart,
so a ratio includes the noise of the host.
"""
_PAGE_FAULTS = """
The next table has the share of page faults in the time of beam search with glibc, in percent. It is
the number of faults, multiplied by the cost of a fault in the same file.
"""
_BELOW_AIMS = """
Ratios below their aims:
"""
_RATES = """\
With glibc, native instructions and short sentences. If a host has several files with a setting, the
rates are those of the file whose name comes last. A host has other rates at other hours, so rates
of two settings may not compare. The model trains for 15 minutes, so BLEU shows no more than that
the engines translate alike.
"""
_WEIGHTS_READ = """\
With batches of one sentence, each step of greedy search reads all weights of the decoder layers and
of the output layer. The encoder and the projections of its output are read once a sentence. The
table has the rate of this reading in GB/s, with glibc and native instructions, over all files.
Checks and other work are part of the time, so the memory was read faster than this. A weight of
float32 counts as 4 bytes, but since 2026-11-29 our kernels read 3 bytes of it on CPUs with AMX. The
memory rate of a copy counts reading and writing.
"""
_PROFILES = """\
Our search with the peer's rule. The columns from "layers" to "others" are shares of the time in
torch's operators and compiled kernels: the layers of encoder and decoder (`run_layers`), the output
layer (`multiply_states`), the choice of tokens (`best_candidates`, `best_tokens` and
`advance_beam`, and `log_sums_and_maxima` in earlier files), and checks that no weight has changed
since it was packed (`have_fingerprints`, and `has_fingerprint` and `same_bytes` in earlier files).
The next column is the share of the whole time that is spent outside the kernels, in Python above
all. Profiles before 2026-11-29 did not measure it. Our aims are 600 calls of operators a step in
batches of 1, and 900 in batches of 32. A call of a kernel counts as one. Shares and calls are those
of steps that are taken one by one. All profiles are older than the kernels of several steps.
The profiles of the EPYC with AVX2 are older than its ratios of beam search with one thread. The
profiles of the Xeons are older than their ratios. The profile with one thread, short sentences and
native instructions is from the host with 300 MiB of L3.
"""
_WITHOUT_KERNELS = """
Without the kernels (`VASWANI_KERNELS=0`), these operators of torch are the slowest. The numbers of
calls exceed our aims there.
"""
_HYPOTHESES = """
The paper's search goes on until no open hypothesis can win, which takes more steps than the peer's
rule. In a step, each open hypothesis is extended by a token. The table has the mean number of such
extensions for a sentence.
"""
_COMMANDS = """\
The files have the commit after `#`. A commit with `-dirty` had changes that are in no commit.
Commands with `results/new` wrote there first. Their files were moved here later.
"""
# The columns of a profile, and the kernels of each.
_PARTS = {
    "layers": ("run_layers",),
    "output layer": ("multiply_states",),
    "choice": ("log_sums_and_maxima", "best_candidates", "best_tokens", "advance_beam"),
    "checks": ("have_fingerprints", "has_fingerprint", "same_bytes"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--help` prints the manual."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    folder = parse_args(argv).results
    (folder / "README.md").write_text(report(folder), encoding="utf-8")


def report(folder: Path) -> str:
    """Return the page for the results files of a folder."""
    sections: dict[str, list[str]] = {
        "Hosts": [_HOSTS, *hosts(folder)],
        "Ratios": [_RATIOS, *ranges(folder), *extremes(folder)],
        "Ratios in other settings": ranges(folder, usual=False),
        "Ratios without compiled kernels": [
            *(_OPERATORS, *ranges(folder / "torch-operators")),
            *("", *ranges(folder / "torch-operators", usual=False)),
        ],
        "Ratios with earlier kernels": [
            *hosts(folder / "earlier-kernels"),
            *("", _EARLIER, *ranges(folder / "earlier-kernels")),
            *("", *ranges(folder / "earlier-kernels", usual=False)),
            *(_BELOW_AIMS, *missed(folder / "earlier-kernels")),
        ],
        "Allocators": [
            *(_ALLOCATORS, *allocators(folder), *slow_with_glibc(folder)),
            *(_PAGE_FAULTS, *page_faults(folder)),
        ],
        "Ratios below our aims": [*aims(), _BELOW_AIMS, *missed(folder)],
        "Sentences per second": [_RATES, *rates(folder)],
        "Weights read": [_WEIGHTS_READ, *weights_read(folder)],
        "Profiles": [_PROFILES, *profiles(folder.parent)],
        "Commands": [_COMMANDS, "```sh", *commands(folder), "```"],
    }
    parts = [_HEAD, *("\n".join([f"## {title}\n", *lines]) for title, lines in sections.items())]
    return "\n\n".join(parts) + "\n"


def hosts(folder: Path) -> list[str]:
    """Return the lines of a table: each host, with ranges and dates of its files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for host, _, results in _files(folder):
        found.setdefault(host, []).append(results)
    rows = []
    for host, files in found.items():
        facts = [results["host"] for results in files]
        cache = facts[0]["caches"].get("L2 unified", "")
        measured = [
            _range([fact["memory_gigabytes_per_second"] for fact in facts], 1),
            _range([fact["page_fault_nanoseconds"] for fact in facts], 0),
        ]
        for kind in ("float32", "bfloat16"):
            measured.append(_range([fact["gigaflops"][f"{kind}, 512 rows"] for fact in facts], 0))
        for text in ("short", "long"):
            speed = [row for results in files for row in results["speed"] if row["text"] == text]
            measured.append(_range([row["tokens"] / row["sentences"] for row in speed], 0))
        dates = ", ".join(dict.fromkeys(results["date"] for results in files))
        rows.append([host, files[0]["hardware"]["cpu"], cache, *measured, dates])
    names = ["host", "CPU", "L2", "memory, GB/s", "page fault, ns"]
    names += ["float32, GFLOP/s", "bfloat16, GFLOP/s", "short", "long", "date"]
    return _lines(names, rows)


def aims() -> list[str]:
    """Return a list of our aims."""
    lines = [
        f"- {rule}, {precision} precision, against {' '.join(peer)}: {aim:g}"
        + (f" in batches of {smallest} and more" if smallest > 1 else "")
        for rule, precision, peer, smallest, aim in AIMS
    ]
    rule, precision, peer, *_ = AIMS[0]
    engines = f"{rule}, {precision} precision, against {' '.join(peer)}"
    return [*lines, f"- {engines}, with fewer instructions: {AIM_WITH_FEWER_INSTRUCTIONS:g}"]


def rates(folder: Path) -> list[str]:
    """Return the lines of a table: sentences per second on each host, and BLEU.

    Files of a host replace the rows of those before them, in the order of their names.
    """
    latest: dict[tuple, dict[int, list[float]]] = {}
    bleu = {}
    for host, threads, results in _files(folder):
        for row in results["speed"]:
            if tuple(map(row.get, SETTING[:3])) == _USUAL:
                names = (host, threads, search_name(row), row["engine"], row["precision"])
                rate = statistics.median(row["sentences"] / value for value in row["seconds"])
                latest.setdefault(names, {})[row["batch"]] = [rate]
                bleu[names] = f"{row['bleu']:.2f}"
    names = ["host", "threads", "search", "engine", "precision", "BLEU"]
    cells = {(*key, bleu[key]): found for key, found in latest.items()}
    return _table(names, cells, digits=1)


def weights_read(folder: Path) -> list[str]:
    """Return the lines of a table: the rate at which each engine reads weights in batches of 1."""
    found: dict[tuple[str, ...], list[float]] = {}
    copies: dict[tuple[str, ...], list[float]] = {}
    for host, threads, results in _files(folder):
        for row in results["speed"]:
            usual = tuple(map(row.get, SETTING[:3])) == _USUAL
            if usual and row["beams"] == row["batch"] == 1:
                names = (host, threads, row["engine"], row["precision"])
                seconds = statistics.median(row["seconds"])
                found.setdefault(names, []).append(_bytes_read(row) / seconds / 1e9)
                rate = results["host"]["memory_gigabytes_per_second"]
                copies.setdefault(names, []).append(rate)
    rows = ([*key, _range(found[key], 1), _range(copies[key], 1)] for key in sorted(found))
    return _lines(["host", "threads", "engine", "precision", "weights", "copy"], rows)


def _bytes_read(row: dict[str, Any]) -> int:
    """Return the bytes of weights that greedy search reads for sentences, one at a time.

    The model has the paper's base size. Each token is a step, also an end token.
    """
    config = VaswaniConfig.preset("base", vocab_size=VOCAB_SIZE)
    square, feed_forward = config.d_model**2, 2 * config.d_model * config.decoder_ffn_dim
    # Attention has four matrices. The decoder projects keys and values of the source only once.
    step = config.decoder_layers * (6 * square + feed_forward) + VOCAB_SIZE * config.d_model
    once = config.encoder_layers * (4 * square + feed_forward) + config.decoder_layers * 2 * square
    weights = row["tokens"] * step + row["sentences"] * once
    return weights * {"float32": 4, "bfloat16": 2, "int8": 1}[row["precision"]]


def profiles(folder: Path) -> Iterator[str]:
    """Yield the lines of three tables from the profiles of a folder.

    They have the shares of the kernels, the slowest operators without kernels, and how often a
    search with either rule extends a hypothesis.
    """
    with_kernels, without = [], []
    hypotheses: dict[tuple[str, ...], None] = {}  # numbers of threads search alike
    for path in sorted(folder.glob("decoding-profile*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        host, threads = host_name(results["hardware"]), str(results["threads"])
        for row in results["profile"]:
            kind = row.get("text", "short")  # earlier profiles had short sentences only
            setting = [host, search_name(row), threads, kind]
            setting += [results.get("instructions", "native"), row["precision"], str(row["batch"])]
            calls = str(row["calls_a_step"])
            if results.get("kernels", True):
                outside = f"{row['outside_kernels']:.0%}" if "outside_kernels" in row else ""
                with_kernels.append([*setting, *_shares_of_parts(row["shares"]), outside, calls])
            else:
                slowest = (f"`{name}` {share:.0%}" for name, share in row["shares"].items())
                without.append([*setting, ", ".join(itertools.islice(slowest, 3)), calls])
        means: dict[str, dict[str, float]] = {}
        for row in results.get("hypotheses", []):
            means.setdefault(search_name(row), {})[row["engine"]] = row["mean"]
        for search, of_rules in means.items():
            peers, ours = of_rules[PEERS_RULE], of_rules[OURS]
            cells = f"{peers:.1f}", f"{ours:.1f}", f"{ours / peers:.2f}"
            hypotheses[host, search, *cells] = None
    names = ["host", "search", "threads", "sentences", "instructions", "precision", "batch"]
    yield from _lines([*names, *_PARTS, "others", "outside kernels", "calls a step"], with_kernels)
    if without:
        yield _WITHOUT_KERNELS
        yield from _lines([*names, "slowest operators", "calls a step"], without)
    if hypotheses:
        yield _HYPOTHESES
        yield from _lines(["host", "search", "the peer's rule", "ours", "ratio"], hypotheses)


def _shares_of_parts(shares: dict[str, float]) -> list[str]:
    # Exact sums, because the rounding of `sum` depends on the version of Python.
    parts = [
        math.fsum(shares.get(f"vaswani::{name}", 0) for name in names) for names in _PARTS.values()
    ]
    return [f"{share:.0%}" for share in (*parts, max(0, 1 - math.fsum(parts)))]


def commands(folder: Path) -> list[str]:
    """List the commands that repeat the files of a folder and its subfolders, and profiles."""
    without = folder / "torch-operators"
    paths = [
        *sorted(folder.glob("*.json")),
        *sorted((folder / "earlier-kernels").glob("*.json")),
        *sorted(without.glob("*.json")),
        *sorted(folder.parent.glob("decoding-profile*.json")),
    ]
    found = []
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        command = results["command"]
        if path.parent == without or not results.get("kernels", True):
            command = f"VASWANI_KERNELS=0 {command}"
        if "threads" not in results:
            command += f" --threads {_EARLIER_THREADS}"
        found.append(f"{command}  # {results['commit']}")
    return list(dict.fromkeys(found))


def ranges(folder: Path, usual: bool = True) -> list[str]:
    """Return the lines of a table: the range over all files of each median ratio.

    Args:
        folder: of the results files.
        usual: whether the table has short sentences, native instructions and glibc, or all other
            settings by name.
    """
    found: dict[tuple, dict[int, list[float]]] = {}
    for _, threads, results in _files(folder):
        for row in results["ratios"]:
            setting = tuple(map(row.get, SETTING[:3]))
            if (setting == _USUAL) == usual:
                names = (row["rule"], row["peer"], search_name(row), threads)
                names = names if usual else (*names, _words(setting))
                ratio = _rounded_down(row["median"])
                found.setdefault(names, {}).setdefault(row["batch"], []).append(ratio)
    columns = ["ours", "peer", "search", "threads", *([] if usual else ["setting"])]
    return _table(columns, dict(sorted(found.items(), key=lambda item: item[0][3])))


def extremes(folder: Path) -> list[str]:
    """Return a line with the least and the largest ratio of a round: int8, beam 4, one thread."""
    found: dict[str, list[float]] = {PEERS_RULE: [], OURS: []}
    for _, threads, results in _files(folder):
        for row in results["ratios"]:
            setting = (*map(row.get, SETTING[:3]), search_name(row), row["peer"], threads)
            if setting == (*_USUAL, "beam 4", "CTranslate2 int8", "1"):
                found[row["rule"]] += row["least"], row["most"]
    if not all(found.values()):
        return []
    peers, own = (
        f"from {_rounded_down(min(ratios)):.2f} to {_rounded_down(max(ratios)):.2f} with"
        for ratios in found.values()
    )
    setting = "In single rounds with beam 4 and one thread, ratios to CTranslate2 int8 go"
    return ["", f"{setting} {peers} the peer's rule, and {own} ours."]


def allocators(folder: Path) -> list[str]:
    """Return the lines of a table: an engine's time with glibc, divided by that with tcmalloc.

    The range covers all files that have both allocators.
    """
    return _table(["engine", "precision", "search", "threads"], _glibc_over_tcmalloc(folder))


def slow_with_glibc(folder: Path) -> list[str]:
    """Return a line with the mean of our engines' ratios, and how many are above their aim."""
    ratios = [
        ratio
        for (engine, *_), cells in _glibc_over_tcmalloc(folder).items()
        if engine in (PEERS_RULE, OURS)
        for of_size in cells.values()
        for ratio in of_size
    ]
    if not ratios:
        return []
    above = sum(ratio > AIM_WITH_GLIBC for ratio in ratios)
    aim = f"Our aim for our engines is at most {AIM_WITH_GLIBC:g}."
    higher = f"Our engines exceed it in {above} of {len(ratios)} ratios."
    mean = f"The geometric mean is {statistics.geometric_mean(ratios):.2f}."
    return ["", f"{aim} {higher} The largest ratio is {max(ratios):.2f}. {mean}"]


def _glibc_over_tcmalloc(folder: Path) -> dict[tuple, dict[int, list[float]]]:
    found: dict[tuple, dict[int, list[float]]] = {}
    for _, threads, results in _files(folder):
        seconds: dict[tuple, dict[str, float]] = {}
        for row in results["speed"]:
            if (row["instructions"], row["text"]) == _USUAL[1:]:
                names = (row["engine"], row["precision"], search_name(row), threads)
                of_engine = seconds.setdefault((names, row["batch"]), {})
                of_engine[row["allocator"]] = statistics.median(row["seconds"])
        for (names, batch), of_engine in seconds.items():
            if len(of_engine) == len(ALLOCATORS):
                ratio = of_engine["glibc"] / of_engine["tcmalloc"]
                found.setdefault(names, {}).setdefault(batch, []).append(ratio)
    return found


def page_faults(folder: Path) -> list[str]:
    """Return the lines of a table: the share of page faults in the time of beam search with glibc.

    The shares are in percent.
    """
    found: dict[tuple, dict[int, list[float]]] = {}
    for _, threads, results in _files(folder):
        cost = results["host"]["page_fault_nanoseconds"] / 1e9
        for row in results["speed"]:
            if tuple(map(row.get, SETTING[:3])) == _USUAL and row["beams"] > 1:
                names = (row["engine"], row["precision"], search_name(row), threads)
                share = 100 * row["page_faults"] * cost / statistics.median(row["seconds"])
                found.setdefault(names, {}).setdefault(row["batch"], []).append(share)
    return _table(["engine", "precision", "search", "threads"], found, digits=1)


def _files(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield host, threads and results of each file. A host's files come in order of their dates."""
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        # CPUs with one name may differ in their L3 caches.
        cache = results["host"]["caches"].get("L3 unified", "").removesuffix("K")
        host = host_name(results["hardware"]) + (f", L3 {int(cache) >> 10} MiB" if cache else "")
        yield host, str(results.get("threads", _EARLIER_THREADS)), results


def _words(setting: tuple[str, ...]) -> str:
    """Name what is not usual in a setting."""
    return ", ".join(part for part, usual in zip(setting, _USUAL, strict=True) if part != usual)


def missed(folder: Path) -> list[str]:
    """Return the lines of a table: the median ratios below their aims, in all files of a folder."""
    medians: dict[tuple, dict[int, list[float]]] = {}
    for host, threads, results in _files(folder):
        for row in results["ratios"]:
            if row["aim"] and row["median"] < row["aim"]:
                setting = f"{row['allocator']}, {row['instructions']}, {row['text']}"
                names = (row["ours"], row["peer"], search_name(row), threads, setting, host)
                cells = medians.setdefault((*names, f"{row['aim']:g}"), {})
                cells.setdefault(row["batch"], []).append(_rounded_down(row["median"]))
    return _table(["ours", "peer", "search", "threads", "setting", "host", "aim"], medians)


def _table(
    names: list[str], medians: dict[tuple, dict[int, list[float]]], digits: int = 2
) -> list[str]:
    """Return the lines of a table with a column for each size of batches."""
    sizes = sorted({size for cells in medians.values() for size in cells})
    rows = (
        [*kind, *(_range(cells.get(size, []), digits) for size in sizes)]
        for kind, cells in medians.items()
    )
    return _lines([*names, *(f"batch {size}" for size in sizes)], rows)


def _rounded_down(ratio: float) -> float:
    """Round a ratio to two digits. Rounded up, it could look like its aim."""
    return math.floor(round(100 * ratio, 6)) / 100  # 100 * 1.13 is less than 113


def _lines(names: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def _range(values: list[float], digits: int) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
