"""Every number of docs/results.md comes from a results file."""

import importlib.util
import json
import re
import statistics

import pytest
from documents import DOCS, RESULTS, ROOT, Page, results_of, results_of_hosts
from scipy import stats


def test_scores_come_from_results_files():
    page = DOCS["results"]
    for *cells, link in page.rows("data | model"):
        results = results_of(re.search(r"results/([\w-]+)\.json", link)[1])
        assert {"commit", "hardware", "versions", "date", "log"} <= results.keys()
        command = re.sub(r" --ingredients( --short \d+)?(?= --json)", "", results["command"])
        assert command in page.commands()
        row, test, runs = " | ".join(cells), results["test"], results["runs"]
        errors = results["score"] == "exact_match"
        mean = f"**{100 - test['mean'] if errors else test['mean']:.2f}**"
        several = f"{mean} ± {test['standard_deviation'] or 0:.2f}, mean of {len(runs)} seeds"
        assert (several if len(runs) > 1 else f"{mean}, one seed") in row
        assert f"{runs[0]['parameters'] / 1e6:.2f}M parameters" in row
        assert re.search(rf"\b{runs[0]['steps']:,} (further )?updates", row)
        gpu = runs[0]["hardware"]["gpu"]
        # A resumed run counts only the minutes since it was resumed.
        whole = [run for run in runs if not run["resumed"]]
        if gpu is None:
            assert "updates without a GPU" in row
        elif whole:
            assert {run["hardware"]["threads"] for run in whole} == {1}
            longest = max(run["training_minutes"] for run in whole)
            assert f"{longest:.0f} min on an {gpu}" in row
        assert f"`{runs[0]['test']['signature']}`" in page.words
        if errors:
            assert f"majority vote of the seeds **{100 - results['ensemble']['test']:.2f}**" in row
        *_, published, p_value, _ = cells
        assert float(p_value) == against(results, float(published), errors)


def test_the_scores_of_a_cpu_come_from_their_results_file():
    results, on_gpu = results_of("multi30k-muon-cpu"), results_of("multi30k-muon")
    assert results["published"]["score"] == on_gpu["published"]["score"]
    assert results["command"] in DOCS["results"].commands()
    assert {run["hardware"]["gpu"] for run in results["runs"]} == {None}
    seeds, others = ([run["seed"] for run in file["runs"]] for file in (results, on_gpu))
    assert seeds == others
    score = f"{results['test']['mean']:.2f} ± {results['test']['standard_deviation']:.2f} BLEU"
    p_value = f"p = {results['published']['p_value']}"
    assert DOCS["results"].says(f"same {len(seeds)} seeds", "without a GPU", score, p_value)


def test_the_earlier_errors_of_a_gpu_come_from_their_results_file():
    results = results_of("g2p-eng_us")
    assert results["command"] in DOCS["results"].commands()
    mean = f"{100 - results['test']['mean']:.2f} ± {results['test']['standard_deviation']:.2f}"
    vote = f"{100 - results['ensemble']['test']:.2f}"
    (commit,) = {run["commit"] for run in results["runs"]}
    assert commit.endswith("-dirty")
    p_value = f"p = {results['published']['p_value']}"
    assert DOCS["results"].says("g2p-eng_us", "not committed", mean, p_value, vote)


def test_the_aim_for_letters_to_phones_is_missed_as_the_page_says():
    results = results_of("g2p-eng_us-cpu")
    assert 100 - results["ensemble"]["test"] > 40
    assert results["published"]["p_value"] > 0.05
    aim, missed = "The aim of g2p-eng_us was a word error rate of 40.0", "Neither the majority vote"
    assert DOCS["results"].says(aim, missed, "does not differ significantly")


def test_the_minutes_of_a_training_come_from_their_results_file():
    results = results_of("multi30k-muon-alone")
    assert results["command"] in DOCS["results"].commands()
    (run,) = results["runs"]
    assert run["hardware"]["threads"] == run["hardware"]["cores"] == 2
    assert not run["resumed"]
    assert run["training_minutes"] <= 40
    assert DOCS["results"].says("Seed 1", "took", f"{run['training_minutes']:.0f} minutes")


def against(results, published, errors):
    """The p-value of a t-test of the seeds against a published score."""
    if "published" in results:
        return results["published"]["p_value"]
    seeds = [100 - score if errors else score for score in results["test"]["seeds"]]
    return float(f"{stats.ttest_1samp(seeds, published).pvalue:.2g}")


def test_the_worth_of_ingredients_comes_from_its_results_file():
    found = [
        (row | {"ingredient": row["ingredient"].replace("second stage", name)}, file)
        for file, name in (
            ("multi30k-muon", ""),
            ("multi30k-muon-cpu", ""),
            ("multi30k-muon-r-drop", "R-Drop"),
            ("multi30k-muon-risk", "minimum risk training"),
        )
        for row in results_of(file)["ingredients"]
    ]
    assert all(len(row["seeds"]) == 5 for row, _ in found)
    assert DOCS["results"].rows("ingredient |") == [
        [
            row["ingredient"],
            *(
                cell
                for split in ("valid", "test")
                for cell in (f"{row[split]['difference']:+.2f}", str(row[split]["p_value"]))
            ),
            str(row["bootstrap_p_value"]),
            f"[{trained_on(file)}](../benchmarks/results/{file}.json)",
        ]
        for row, file in found
    ]


def trained_on(file):
    """The processor of the runs in a results file."""
    (gpu,) = {run["hardware"]["gpu"] for run in results_of(file)["runs"]}
    return "CPU" if gpu is None else gpu.removeprefix("NVIDIA ")


def test_minutes_of_packed_and_sorted_trainings_come_from_their_results_file():
    results = results_of("multi30k-muon")
    (of_sorted,) = (
        row["runs"] for row in results["ingredients"] if row["ingredient"] == "packed batches"
    )
    medians = (
        f"{statistics.median(run['training_minutes'] for run in runs):.1f}"
        for runs in (results["runs"], of_sorted)
    )
    assert trained_on("multi30k-muon") == "H200"
    assert DOCS["results"].says("packed batches took", *medians)


def test_bpe_dropout_costs_score():
    (row,) = (
        row
        for row in results_of("multi30k-muon-cpu")["ingredients"]
        if row["ingredient"] == "BPE-dropout"
    )
    for split in ("valid", "test"):
        assert row[split]["difference"] < 0
        assert row[split]["p_value"] < 0.05
    for page in ("results", "train"):
        assert DOCS[page].says("BPE-dropout", "costs BLEU")


@pytest.mark.parametrize(
    ("file", "name"),
    [("multi30k-muon-r-drop", "R-Drop"), ("multi30k-muon-risk", "Minimum risk training")],
)
def test_a_second_stage_gains_nothing_significant_over_its_control(file, name):
    results = results_of(file)
    (row,) = results["ingredients"]
    assert min(row[split]["p_value"] for split in ("valid", "test")) > 0.05
    assert results["command"] in DOCS["results"].commands()
    test = results["test"]
    assert DOCS["results"].says(f"{test['mean']:.2f}", f"± {test['standard_deviation']:.2f}")
    control = statistics.mean(row["test"]["without"])
    assert DOCS["results"].says(name, "without it", f"a mean of {control:.2f} BLEU")
    for page in ("results", "train"):
        assert DOCS[page].says(name, "nothing significant")


def batching_rows(results, size, host):
    """The rows of the page for a file about batches."""
    rows = []
    for precision in ("float32", "bfloat16"):
        speeds = {
            row["name"]: f"{row['tokens_per_second']:,.0f}"
            for row in results["batching"]
            if row["precision"] == precision
        }
        ratios = {
            ratio["peer"]: ratio
            for ratio in results["ratios"]["batching"]
            if ratio["precision"] == precision
        }
        if speeds:
            faster = [f"{ratios[peer]['speed']:.2f}" for peer in ("random", "sorted")]
            memory = f"{ratios['random']['memory']:.2f}"
            measured = [speeds[name] for name in ("packed", "random", "sorted")]
            rows.append([size, host, precision, *measured, *faster, memory])
    return rows


def test_speed_of_batches_comes_from_its_results_files():
    page, expected = DOCS["results"], []
    for host, end in (("EPYC, AVX-512", ""), ("Xeon", "-xeon")):
        for size in ("tiny", "base"):
            results = results_of(f"batching-{size}{end}")
            assert results["command"] in page.commands()
            expected += batching_rows(results, size, host)
    assert page.rows("size | host | precision | packed | random") == expected
    spread = max(max(row["rounds"]) / min(row["rounds"]) for row in results["batching"]) - 1
    assert page.says("base size", f"{spread:.0%} between rounds")


def test_the_minutes_of_a_training_follow_from_its_rate():
    steps = results_of("multi30k-muon")["runs"][0]["steps"]
    minutes = []
    for host in ("xeon", "avx2"):
        results = results_of(f"training-tiny-{host}")
        packed = next(row for row in results["trainer"] if row["name"] == "packed")
        assert packed["precision"] == "float32"
        tokens = [found["tokens"] / results["updates"] for found in packed["tokens_of_rounds"]]
        seconds = steps * statistics.mean(tokens) / packed["tokens_per_second"]
        minutes.append(f"{seconds / 60:.0f} minutes")
    assert DOCS["results"].says(f"{steps:,} updates take", *minutes)


def ranged(ratio):
    rounds = ratio["speed_of_rounds"]
    return f"{ratio['speed']:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def test_training_compared_with_version_0_1_comes_from_its_results_files():
    page, all_speeds, all_ratios, operators = DOCS["results"], [], [], []
    hosts = {"avx2": "EPYC, AVX2", "xeon": "Xeon"}
    for size, host in (("tiny", "avx2"), ("tiny", "xeon"), ("base", "xeon"), ("base", "avx2")):
        results = results_of(f"training-{size}-{host}")
        assert results["command"] in page.commands()
        for precision in dict.fromkeys(row["precision"] for row in results["trainer"]):
            place = [size, hosts[host], precision]
            speeds = {
                row["name"]: f"{row['tokens_per_second']:,.0f}"
                for row in results["trainer"]
                if row["precision"] == precision
            }
            names = ("packed", "sorted", "55ba48e", "MarianMT")
            all_speeds.append([*place, *(speeds[name] for name in names)])
            trained = {
                ratio["peer"]: ratio
                for ratio in results["ratios"]["trainer"]
                if ratio["precision"] == precision
            }
            assert {ratio["own"] for ratio in trained.values()} == {"packed"}
            (passes,) = (
                ratio for ratio in results["ratios"]["network"] if ratio["precision"] == precision
            )
            earlier, marian = trained["55ba48e"], trained["MarianMT"]
            memory = [f"{ratio['memory']:.2f}" for ratio in (earlier, marian)]
            all_ratios.append([*place, ranged(earlier), ranged(marian), ranged(passes), *memory])
    for size in ("tiny", "base"):
        spent = results_of(f"training-profile-{size}-avx2")
        assert spent["command"] in page.commands()
        profiles = {row["name"]: row for row in spent["profiles"]}
        profile, after = profiles["55ba48e"], profiles["packed"]
        times = f"{after['ms'] / profile['ms']:.2f}"
        spent_in = (
            sum(row["ms"] for row in profile["operators"] if chosen(row))
            for chosen in (is_product, is_attention)
        )
        shares = (f"{time / profile['ms']:.0%}" for time in spent_in)
        calls = (f"{found['calls']:,}" for found in (profile, after))
        operators.append([size, *calls, times, *shares])
    assert page.rows("size | host | precision | packed | sorted | 0.1") == all_speeds
    assert page.rows("size | host | precision | packed / 0.1") == all_ratios
    assert page.rows("size | operators, 0.1 | operators, packed | packed / 0.1") == operators
    slower = [speed < 1 for speed in earlier["speed_of_rounds"]]
    assert (sum(slower), len(slower)) == (2, 3)
    rows = results["trainer"] + results["network"]
    spread = max(max(row["rounds"]) / min(row["rounds"]) for row in rows) - 1
    assert page.says("base size on the EPYC", f"{spread:.0%} between rounds")
    (share,) = (row["share_of_matrix_rate"] for row in results["network"] if row["name"] == "ours")
    assert page.says("base size", f"{share:.0%} of the rate of large matrix products")


# Operators of an update with the compiled kernels, by the columns of the page.
KERNELS = {
    "loss": ("ChunkedCrossEntropy",),
    "layers": ("aten::mm", "aten::addmm", "_Linear", "_LinearBackward"),
    "attention": ("_Attention", "_AttentionBackward"),
    "sums": ("_SumAndNorm", "_SumAndNormBackward"),
}


def test_profiles_with_kernels_come_from_their_results_files():
    page, shares, counts = DOCS["results"], [], []
    for file in ("tiny-xeon", "tiny-xeon-bfloat16", "base-xeon"):
        spent = results_of(f"training-profile-{file}")
        assert spent["command"] in page.commands()
        profiles = {row["name"]: row for row in spent["profiles"]}
        before, after = profiles["55ba48e"], profiles["packed"]
        size, precision = file.split("-")[0], after["precision"]
        ms = {operator["name"]: operator["ms"] for operator in after["operators"]}
        parts = (sum(ms.get(name, 0) for name in names) for names in KERNELS.values())
        if precision == "float32":
            shares.append([size, *(f"{part / after['ms']:.0%}" for part in parts)])
        calls = [found["calls"] for found in (before, after)]
        calls += [
            operator["calls"]
            for found in (before, after)
            for operator in found["operators"]
            if operator["name"] == "aten::copy_"
        ]
        counts.append([size, precision, *(f"{number:,}" for number in calls)])
    assert page.rows("size | loss | layers") == shares
    assert page.rows("size | precision | operators, 0.1") == counts


def is_product(operator):
    return operator["name"] in {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm")}


def is_attention(operator):
    return "scaled_dot_product" in operator["name"]


def test_aims_of_training_are_judged_as_the_page_says():
    page = DOCS["results"]
    aims = [
        aim
        for size in ("tiny", "base")
        for aim in results_of(f"training-{size}-avx2")["aims"]
        if "55ba48e" in aim["aim"] or "network" in aim["aim"]
    ]
    tiny, passes, base, again = aims
    assert passes["least"] == again["least"]
    assert page.says("aims", *(aim["least"] for aim in (tiny, base, passes)), "MarianMT")
    assert [aim["met"] for aim in aims] == [False, True, False, False]
    on_the_xeon = {
        tuple(aim["aim"].split(", ")[1:4]): aim["met"]
        for size in ("tiny", "base")
        for aim in results_of(f"training-{size}-xeon")["aims"]
        if "55ba48e" in aim["aim"] or "network" in aim["aim"]
    }
    assert len(on_the_xeon) == 8
    missed = [aim for aim, met in on_the_xeon.items() if not met]
    assert missed == [("trainer", "tiny", "float32")]
    missed_and_met = ("we missed one aim", "1.5 times version 0.1 in float32", "we met only")
    assert page.says("On the Xeon", *missed_and_met, "the last", "tiny size")
    (share,) = (
        row["share_of_matrix_rate"]
        for row in results_of("training-base-xeon")["network"]
        if (row["name"], row["precision"]) == ("ours", "float32")
    )
    assert page.says("Xeon", f"{share:.0%} in float32")


def test_costs_of_data_come_from_their_results_file():
    page, results = DOCS["results"], results_of("data")
    assert {"commit", "hardware", "versions", "date"} <= results.keys()
    assert results["command"] in page.commands()
    names = {"vaswani": "ours", "map": "`load_dataset` and `map`", "lists": "lists, as in 0.1"}
    expected = [
        [
            f"{row['pairs']:,}",
            names[row["way"]],
            f"{row['cpu_seconds']:.1f}",
            f"{row['wall_seconds']:.1f}",
            f"{row['second_start_seconds']:.1f}",
            f"{row['memory_mib'] - row['base_memory_mib']:.0f}",
            f"{row['memory_of_each_of_two_mib'] - row['base_memory_mib']:.0f}",
            f"{row['disk_mib']:.0f}",
        ]
        for row in results["rows"]
    ]
    assert page.rows("pairs | way") == expected
    assert page.says("36 million pairs", f"{results['plan']['seconds']:.1f} seconds")
    fewest, *_, most = (row for row in expected if row[1] == "ours")
    memory = (f"{row[5]} MiB for {row[0]}" for row in (fewest, most))
    assert DOCS["data"].says("Memory grows slowly", *memory)


def test_scores_of_split_punctuation_come_from_their_results_file():
    page, results = DOCS["results"], results_of("punctuation")
    expected = [
        [name, label, *(f"{found[way]:.2f}" for way in ways), f"{found['p_value']:g}"]
        for split, name in (("valid", "validation"), ("test", "test_2016_flickr"))
        for score, label in (("bleu", "BLEU"), ("chrf", "chrF"))
        for found in [results[split][score]]
        for ways in [("split-punctuation", "no-split-punctuation", "difference")]
    ]
    assert page.rows("data | score | split") == expected
    assert results["command"] in page.commands()
    assert results["valid"]["bleu"]["p_value"] < 0.05 < results["test"]["bleu"]["p_value"]


def test_the_report_of_all_hosts_is_made_from_their_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("decoding_report")
    page = Page(RESULTS / "generation" / "README.md")
    assert page.text == report.report(RESULTS / "generation")
    for results in results_of_hosts():
        assert {"commit", "hardware", "versions", "date", "host"} <= results.keys()
        assert page.commands(containing=f"{results['command']} ")
    ranges = page.rows("ours | peer | search | threads | batch 1")
    rows = DOCS["results"].rows("ours | peer | search | threads | batch 1")
    assert len(rows) > 5
    assert all(row in ranges for row in rows)


def test_the_memory_of_decoding_comes_from_its_results_files():
    expected = []
    for host, name in (("Xeon", "memory"), ("EPYC, AVX2", "memory-avx2")):
        results = results_of(name)
        assert results["command"] in DOCS["results"].commands()
        peaks = {}
        for row in results["memory"]:
            if "peak_mb" in row:
                peaks.setdefault((row["engine"], row["precision"]), {})[row["batch"]] = row
        for engine, of_batch in peaks.items():
            figures = (of_batch[32]["weights_mb"], *(of_batch[size]["peak_mb"] for size in (1, 32)))
            expected.append([host, *engine, *(f"{figure:.0f}" for figure in figures)])
    assert DOCS["results"].rows("host | engine | precision | weights") == expected


def test_the_lowest_ratios_in_other_settings_come_from_the_report_of_all_hosts():
    rows = Page(RESULTS / "generation" / "README.md").rows("ours | peer | search | threads | set")
    lowest = {
        (row[0], row[4]): min(float(cell.split(" to ")[0]) for cell in row[5:] if cell)
        for row in rows
        if row[1:4] == ["CTranslate2 int8", "beam 4", "1"] and row[4] != "long"
    }
    same_rule, papers = (lowest[rule, "tcmalloc"] for rule in ("ours, the peer's rule", "ours"))
    page = DOCS["results"]
    assert page.says("tcmalloc", "first row", same_rule, "second row", papers)
    fewer, papers = (
        min(
            ratio
            for (found, setting), ratio in lowest.items()
            if found == rule and setting.startswith("avx")
        )
        for rule in ("ours, the peer's rule", "ours")
    )
    assert page.says("fewer CPU instructions", f"{fewer:.2f}", f"{papers:.2f}")
    marian = {
        row[1]: sorted(float(ratio) for cell in row[6:] for ratio in cell.split(" to "))
        for row in rows
        if row[1].startswith("MarianMT") and row[2:5] == ["beam 4", "2", "tcmalloc"]
    }
    ranges = {
        name: f"{found[0]:.2f} to {found[-1]:.2f}"
        for name, found in ((name, marian[f"MarianMT {name}"]) for name in ("float32", "bfloat16"))
    }
    assert page.says("MarianMT", "tcmalloc", ranges["float32"], "bfloat16", ranges["bfloat16"])
    above, number, most, mean = re.search(
        r"in (\d+) of (\d+) ratios\. The largest ratio is ([\d.]+)\. "
        r"The geometric mean is ([\d.]+)\.",
        Page(RESULTS / "generation" / "README.md").words,
    ).groups()
    assert page.says(mean, "glibc", "tcmalloc", f"{number} ratios", most, above, "1.05")
    lowest_of_rounds = re.findall(
        r"from ([\d.]+) to [\d.]+ with", Page(RESULTS / "generation" / "README.md").words
    )
    first, second = lowest_of_rounds[:2]
    assert page.says("single rounds", "first row", first, "second row", second)


def test_the_gain_of_a_second_thread_for_ctranslate2_comes_from_the_files_of_the_xeon():
    seconds = {
        (results["threads"], row["precision"], row["batch"]): statistics.median(row["seconds"])
        for name in ("one-thread", "two-threads")
        for path in (RESULTS / "generation").glob(f"intel-*-{name}.json")
        for results in [json.loads(path.read_text())]
        for row in results["speed"]
        if row["engine"] == "CTranslate2" and row["allocator"] == "glibc"
    }
    gains = {
        (precision, batch): seconds[1, precision, batch] / seconds[2, precision, batch]
        for precision in ("int8", "float32")
        for batch in (1, 8, 32)
    }
    assert max(gains["int8", batch] for batch in (1, 8)) < 1
    assert round(gains["int8", 32], 1) == 1
    in_float32 = max(gains["float32", batch] for batch in (1, 8))
    assert DOCS["results"].says("float32 gains at most", f"{in_float32:.1f} times")


def test_the_aims_of_decoding_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    aims = importlib.import_module("ratios").AIMS
    same_rule, papers, float32, marian, in_bfloat16 = (aim for *_, aim in aims)
    assert marian == in_bfloat16
    assert DOCS["results"].says("aims", same_rule, papers, float32, marian, aims[3][3])


def test_ratios_without_the_kernels_come_from_their_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("decoding_report")
    rows = [row.split(" | ") for row in report.ranges(RESULTS / "generation" / "torch-operators")]
    same_rule, papers = (
        sorted(
            float(value)
            for row in rows
            if row[:3] == [f"| {rule}", "CTranslate2 int8", "beam 4"]
            for cell in row[4:]
            for value in cell.strip(" |").split(" to ")
        )
        for rule in ("ours, the peer's rule", "ours")
    )
    found = (f"{ends[0]:.2f} to {ends[-1]:.2f}" for ends in (same_rule, papers))
    assert DOCS["results"].says("Without the", "kernels", *found)
    assert papers[-1] < 1
    both = sorted(float(value) for value in (*same_rule, *papers))
    found = f"{both[0]:.2f} to {both[-1]:.2f} times"
    assert Page(ROOT / "README.md").says("Without the kernels", "beam search", found)


def test_the_largest_difference_between_rounds_comes_from_the_files_of_all_hosts():
    ratios = [
        row["most"] / row["least"] for results in results_of_hosts() for row in results["ratios"]
    ]
    assert DOCS["results"].says("Between rounds", "factor of up to", f"{max(ratios):.2f}")


def test_the_ratio_to_ctranslate2_with_mkl_comes_from_its_file():
    results = results_of("ctranslate2-mkl")
    assert results["environment"] == {"CT2_USE_MKL": "1"}
    assert f"CT2_USE_MKL=1 {results['command']}" in DOCS["results"].commands()
    (ratio,) = results["ratios"]
    assert (ratio["beams"], ratio["batch"], results["threads"]) == (4, 32, 1)
    assert DOCS["results"].says("CT2_USE_MKL=1", f"{ratio['median']:.1f} times", "batches of 32")


def test_hypotheses_of_the_papers_search_and_a_compiled_step_come_from_their_files():
    page = DOCS["results"]
    peers, ours = (
        row["mean"]
        for row in results_of("decoding-profile-avx2")["hypotheses"]
        if row["beams"] == 4
    )
    assert page.says(f"{ours / peers:.2f} times as many hypotheses")
    results = results_of("compiled-step")
    assert results["command"] in page.commands()
    one, many = results["rows"]
    assert (one["batch"], many["batch"]) == (1, 32)
    assert page.says("Inductor", one["compiled_by_ours"], many["compiled_by_ours"])


def test_bleu_of_int8_comes_from_its_results_files():
    page, losses = DOCS["results"], []
    for split, end in (("test", ""), ("validation", "-valid")):
        eight, seven = results_of(f"int8{end}"), results_of(f"int8-avx2{end}")
        rows = {}
        for results, bits in ((eight, 8), (seven, 7)):
            limit = "ONEDNN_MAX_CPU_ISA=AVX2 " if bits == 7 else ""
            assert limit + results["command"] in page.commands()
            assert {model["state_bits"] for model in results["models"]} == {bits}
            losses.append(f"{results['largest_loss']:.3f}")
        for model, fewer in zip(eight["models"], seven["models"], strict=True):
            assert model["model"] == fewer["model"]
            scores = [model["test"][form] for form in ("float_bleu", "bfloat16_bleu", "bleu")]
            rows[model["model"]] = [*scores, fewer["test"]["bleu"]]
        rows["mean"] = [statistics.mean(scores) for scores in zip(*rows.values(), strict=True)]
        assert page.rows(f"model, {split} set | float32") == [
            [
                name,
                *(f"{score:.2f}" for score in scores),
                *(f"{score - scores[0]:+.2f}" for score in scores[2:]),
            ]
            for name, scores in rows.items()
        ]
    eight_bits, seven_bits = losses[::2], losses[1::2]
    assert page.says("largest loss", *eight_bits, *seven_bits)
    assert [float(loss) > 0.2 for loss in losses] == [False, True, False, False]
