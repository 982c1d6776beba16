"""Every number of docs/results.md comes from a results file."""

import importlib.util
import json
import re
import statistics

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
        # A resumed run counts only the minutes since it was resumed.
        if whole := [run for run in runs if not run["resumed"]]:
            assert {run["hardware"]["threads"] for run in whole} == {1}
            longest = max(run["training_minutes"] for run in whole)
            assert f"{longest:.0f} min on an {runs[0]['hardware']['gpu']}" in row
        assert f"`{runs[0]['test']['signature']}`" in page.words
        if errors:
            assert f"majority vote of the seeds **{100 - results['ensemble']['test']:.2f}**" in row
        *_, published, p_value, _ = cells
        assert float(p_value) == against(results, float(published), errors)


def test_the_score_of_a_cpu_comes_from_its_results_file():
    results, on_gpu = results_of("multi30k-muon-cpu"), results_of("multi30k-muon")
    assert results["command"] in DOCS["results"].commands()
    (run,) = results["runs"]
    assert run["hardware"]["gpu"] is None
    assert run["resumed"]
    words = f"without a GPU, has {run['test']['bleu']:.2f} BLEU on the test set, and "
    words += f"{on_gpu['runs'][0]['test']['bleu']:.2f} on the GPU"
    assert words in DOCS["results"].words
    assert run["seed"] == on_gpu["runs"][0]["seed"] == 1


def against(results, published, errors):
    """The p-value of a t-test of the seeds against a published score."""
    if "published" in results:
        return results["published"]["p_value"]
    seeds = [100 - score if errors else score for score in results["test"]["seeds"]]
    return float(f"{stats.ttest_1samp(seeds, published).pvalue:.2g}")


def test_the_worth_of_ingredients_comes_from_its_results_file():
    results, second_stage = results_of("multi30k-muon"), results_of("multi30k-muon-r-drop")
    assert DOCS["results"].rows("ingredient |") == [
        [
            row["ingredient"].replace("second stage", "R-Drop"),
            *(
                cell
                for split in ("valid", "test")
                for cell in (f"{row[split]['difference']:+.2f}", str(row[split]["p_value"]))
            ),
            str(row["bootstrap_p_value"]),
        ]
        for row in results["ingredients"] + second_stage["ingredients"]
    ]


def test_r_drop_gains_nothing_significant_over_its_control():
    (row,) = results_of("multi30k-muon-r-drop")["ingredients"]
    assert min(row[split]["p_value"] for split in ("valid", "test")) > 0.05
    for page in ("results", "train"):
        assert "gains nothing significant" in DOCS[page].words.replace("[", "")


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
    assert f"at base size differ by up to {spread:.0%} between rounds" in page.words


def ranged(ratio):
    rounds = ratio["speed_of_rounds"]
    return f"{ratio['speed']:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def test_training_compared_with_version_0_1_comes_from_its_results_files():
    page, all_speeds, all_ratios, shares, operators = DOCS["results"], [], [], [], []
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
        calls = f"{after['calls']:,} instead of {profile['calls']:,} at {size} size"
        operators.append((times, calls))
        spent_in = (
            sum(row["ms"] for row in profile["operators"] if chosen(row))
            for chosen in (is_product, is_attention)
        )
        shares.append([f"{time / profile['ms']:.0%}" for time in spent_in])
    assert page.rows("size | host | precision | packed | sorted | 0.1") == all_speeds
    assert page.rows("size | host | precision | packed / 0.1") == all_ratios
    (tiny_time, tiny_calls), (base_time, base_calls) = operators
    words = (
        f"take {tiny_time} times as long as those of version 0.1 at tiny size. At base size, they"
    )
    assert f"{words} take {base_time} times as long" in page.words
    assert f"{tiny_calls}, and {base_calls}." in page.words
    (products, attention), base = shares
    assert f"outside attention took {products} of the operators' time at tiny" in page.words
    assert f"attention another {attention}" in page.words
    assert f"At base size, they took {base[0]} and {base[1]}" in page.words
    slower = [speed < 1 for speed in earlier["speed_of_rounds"]]
    assert (sum(slower), len(slower)) == (2, 3)
    rows = results["trainer"] + results["network"]
    spread = max(max(row["rounds"]) / min(row["rounds"]) for row in rows) - 1
    assert f"differ by up to {spread:.0%} between rounds there" in page.words
    (share,) = (row["share_of_matrix_rate"] for row in results["network"] if row["name"] == "ours")
    assert f"base size reach {share:.0%} of the rate of large matrix products" in page.words


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
    assert (
        f"The aims were {tiny['least']} times version 0.1 at tiny size, {base['least']} times at "
        f"base size, and {passes['least']} times MarianMT on identical batches." in page.words
    )
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
    words = "On the Xeon, we missed one aim: 1.5 times version 0.1 in float32."
    assert f"{words} On the EPYC, we met only the last, at tiny size." in page.words
    (share,) = (
        row["share_of_matrix_rate"]
        for row in results_of("training-base-xeon")["network"]
        if (row["name"], row["precision"]) == ("ours", "float32")
    )
    assert f"On the Xeon, they reach {share:.0%} in float32, because our kernel" in page.words


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
    assert f"planned in {results['plan']['seconds']:.1f} seconds" in page.text
    fewest, *_, most = (row for row in expected if row[1] == "ours")
    memory = f"{fewest[5]} MiB for {fewest[0]} pairs, and {most[5]} MiB for {most[0]}"
    assert f"Memory grows slowly with the corpus: {memory}" in DOCS["data"].words


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
    words = f"ratio of the first row is {same_rule}, and that of the second row is {papers}."
    assert words in DOCS["results"].words
    fewer, papers = (
        min(
            ratio
            for (found, setting), ratio in lowest.items()
            if found == rule and setting.startswith("avx")
        )
        for rule in ("ours, the peer's rule", "ours")
    )
    words = f"With fewer CPU instructions, these two ratios are {fewer:.2f} and {papers:.2f}."
    assert words in DOCS["results"].words
    marian = {
        row[1]: sorted(float(ratio) for cell in row[6:] for ratio in cell.split(" to "))
        for row in rows
        if row[1].startswith("MarianMT") and row[2:5] == ["beam 4", "2", "tcmalloc"]
    }
    words = (
        "Ratios to MarianMT with tcmalloc are {} to {} in float32, with 4 beams and batches of 8 "
    )
    words += "and more. In bfloat16 on the Xeon, they are {} to {}."
    ends = (marian[f"MarianMT {precision}"] for precision in ("float32", "bfloat16"))
    assert words.format(*(found[end] for found in ends for end in (0, -1))) in DOCS["results"].words
    number, above, most, mean = re.search(
        r"Of (\d+) ratios, (\d+) are higher, up to ([\d.]+)\. Their geometric mean is ([\d.]+)\.",
        Page(RESULTS / "generation" / "README.md").words,
    ).groups()
    words = f"take {mean} times as long with glibc as with tcmalloc. This is the geometric mean of "
    words += f"{number} ratios. The largest one is {most}, and {above} are above our aim of 1.05."
    assert words in DOCS["results"].words
    lowest_of_rounds = re.findall(
        r"from ([\d.]+) to [\d.]+ with", Page(RESULTS / "generation" / "README.md").words
    )
    words = "the lowest ratio of the first row is {}, and that of the second row is {}."
    assert words.format(*lowest_of_rounds[:2]) in DOCS["results"].words


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
        precision: [seconds[1, precision, batch] / seconds[2, precision, batch] for batch in (1, 8)]
        for precision in ("int8", "float32")
    }
    assert max(gains["int8"]) < 1
    words = f"float32 gains at most {max(gains['float32']):.1f} times from the second thread"
    assert words in DOCS["results"].words


def test_the_aims_of_decoding_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    aims = importlib.import_module("ratios").AIMS
    same_rule, papers, float32, marian, in_bfloat16 = (aim for *_, aim in aims)
    assert marian == in_bfloat16
    words = f"Our aims are {same_rule} for the first row, {papers} for the second, {float32} in "
    words += f"float32, and {marian} for MarianMT in batches of {aims[3][3]} and more."
    assert words in DOCS["results"].words


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
    words = f"int8 are {same_rule[0]:.2f} to {same_rule[-1]:.2f} with the peer's rule, and "
    words += f"{papers[0]:.2f} to {papers[-1]:.2f} with the paper's rule"
    assert words in DOCS["results"].words
    assert papers[-1] < 1
    words = "Without the kernels, the paper's search is slower than CTranslate2's int8."
    assert words in Page(ROOT / "README.md").words


def test_the_largest_difference_between_rounds_of_a_noisy_host_comes_from_its_files():
    ratios = [
        row["most"] / row["least"]
        for results in results_of_hosts()
        if results["hardware"]["flags"] == ["avx2"]
        for row in results["ratios"]
    ]
    words = f"ratios of the EPYC with AVX2 differ by a factor of up to {max(ratios):.2f}"
    assert words in DOCS["results"].words


def test_the_ratio_to_ctranslate2_with_mkl_comes_from_its_file():
    results = results_of("ctranslate2-mkl")
    assert results["environment"] == {"CT2_USE_MKL": "1"}
    assert f"CT2_USE_MKL=1 {results['command']}" in DOCS["results"].commands()
    (ratio,) = results["ratios"]
    assert (ratio["beams"], ratio["batch"], results["threads"]) == (4, 32, 1)
    words = f"our int8 is {ratio['median']:.1f} times as fast with 4 beams, one thread and batches "
    assert f"{words}of 32" in DOCS["results"].words


def test_hypotheses_of_the_papers_search_and_a_compiled_step_come_from_their_files():
    page = DOCS["results"]
    peers, ours = (
        row["mean"]
        for row in results_of("decoding-profile-avx2")["hypotheses"]
        if row["beams"] == 4
    )
    assert f"extends {ours / peers:.2f} times as many hypotheses" in page.words
    results = results_of("compiled-step")
    assert results["command"] in page.commands()
    one, many = results["rows"]
    assert (one["batch"], many["batch"]) == (1, 32)
    words = f"takes {one['compiled_by_ours']} times as long in batches of 1, and "
    assert f"{words}{many['compiled_by_ours']} times in batches of 32" in page.words


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
    words = (
        "The largest loss of a seed with 8 bits is {} on the test set and {} on the validation "
        "set. With 7 bits, the largest losses are {} and {}. The first of these misses the aim of "
        "0.2."
    )
    assert words.format(losses[0], losses[2], losses[1], losses[3]) in page.words
    assert [float(loss) > 0.2 for loss in losses] == [False, True, False, False]
