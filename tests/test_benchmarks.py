"""The benchmarks of decoding: peers compute the same as our model, and reports are complete."""

import datetime
import functools
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import base_model
import decoding_profile
import decoding_report
import engines
import host
import int8
import memory
import pytest
import quantization
import ratios
import torch
import worker
from forks import FORKS
from small_corpus import ENGLISH, GERMAN, random_pairs
from vaswani.generation.library_vaswani import library

import generation
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer


def needs_ctranslate2():
    if engines.ctranslate2 is None:
        pytest.skip("ctranslate2 is not installed: pip install 'vaswani[convert]'")


def build_all(workshop):
    """Build every engine of this machine in this process."""
    return [
        workshop.build(name, precision)
        for name, precision in generation.engine_names("cpu")
        if (name != "CTranslate2" or engines.ctranslate2 is not None)
        and (precision != "bfloat16" or base_model.has_bfloat16())
    ]


def test_marian_twin_has_our_logits_under_padding(uneven_model):
    twin = engines.marian_twin(uneven_model)
    sources, targets = random_pairs([1, 5, 17, 60])
    assert engines.distance_to_marian(uneven_model, twin, sources, targets) < 1e-4
    with torch.no_grad():
        twin.model.decoder.embed_positions.weight[1:].zero_()
    assert engines.distance_to_marian(uneven_model, twin, sources, targets) > 1e-2


def test_ctranslate2_twin_scores_as_we_do(uneven_model, tmp_path):
    needs_ctranslate2()
    folder = engines.save_for_ctranslate2(uneven_model, tmp_path / "twin", "float32")
    engine = engines.CTranslate2Engine(folder, "float32", "cpu", threads=1, eos=2)
    sources, targets = random_pairs([1, 5, 17, 60])
    assert engines.distance_to_ctranslate2(uneven_model, engine, sources, targets) < 1e-4
    with torch.no_grad():
        uneven_model.model.encoder.layers[1].self_attn.v_proj.weight[0] += 1
    assert engines.distance_to_ctranslate2(uneven_model, engine, sources, targets) > 1e-3


@pytest.mark.parametrize("beams", [1, 4])
def test_every_engine_can_be_made_to_write_a_given_number_of_tokens(uneven_model, tmp_path, beams):
    with torch.no_grad():
        # This model would write the end token at once.
        uneven_model.lm_head.weight[2] = (
            3 * uneven_model.model.decoder.layers[-1].final_layer_norm.bias
        )
    workshop = engines.Workshop(uneven_model, "cpu", tmp_path, threads=1)
    built = build_all(workshop)
    sources, _ = random_pairs([4, 9])
    for engine in built:
        batch = engine.prepare(sources)
        output = engine.run(batch, beams, forced=7)
        assert [len(row) for row in engine.ids(output, forced=7)] == [7, 7], engine.label
        assert uneven_model.generation_config.eos_token_id == 2
        assert all(row[-1] == 2 for row in engine.ids(engine.run(batch, beams))), engine.label


def test_building_engines_leaves_our_weights_alone(uneven_model, tmp_path):
    before = {name: tensor.clone() for name, tensor in uneven_model.state_dict().items()}
    build_all(engines.Workshop(uneven_model, "cpu", tmp_path, threads=1))
    for name, tensor in uneven_model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_greedy_outputs_of_all_float32_engines_are_equal(uneven_model, tmp_path):
    built = build_all(engines.Workshop(uneven_model, "cpu", tmp_path, threads=1))
    sources, _ = random_pairs([3, 8, 8, 12])
    outputs = {
        engine.label: engine.ids(engine.run(engine.prepare(sources), 1, forced=12), forced=12)
        for engine in built
        if engine.precision == "float32"
    }
    assert len({str(output) for output in outputs.values()}) == 1


@pytest.mark.slow
def test_a_report_of_speed_is_whole(uneven_model, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generation, "host_facts", functools.cache(generation.host_facts))
    monkeypatch.setattr(worker.multiprocessing, "get_context", lambda _: FORKS)
    monkeypatch.setattr(base_model, "_SAMPLE", 8)  # the corpus has 12 long sources
    monkeypatch.setattr(generation, "SENTENCES", 3)
    lines = ENGLISH + GERMAN
    tokenizer = VaswaniTokenizer.train_from_iterator(lines, vocab_size=330, show_progress=False)
    uneven_model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    command = ["--model", str(tmp_path / "tiny"), "--rounds", "1", "--sentences", "3"]
    command += ["--batches", "1", "2", "--beams", "2", "--texts", "short", "long"]
    threads = torch.get_num_threads()  # CTranslate2 may change it
    generation.main([*command, "--results", str(tmp_path / "out")])
    (report,) = (tmp_path / "out").iterdir()
    results = json.loads(report.read_text())
    promised = {"command", "commit", "hardware", "versions", "date", "host", "speed", "ratios"}
    promised |= {"kernels", "environment", "weights_sha256"}
    assert promised < results.keys()
    assert results["threads"] == threads
    assert report.name == f"{host.host_name(results['hardware'])}-{results['date']}.json"
    assert {"caches", "page_fault_nanoseconds", "gigaflops"} < results["host"].keys()
    engines_of_rows = {(row["engine"], row["precision"]) for row in results["speed"]}
    missing = {row["engine"] for row in results["missing"]}
    for engine in generation.engine_names("cpu"):
        assert (engine in engines_of_rows) != (" ".join(engine) in missing)
    assert ("ours", "float32") in engines_of_rows
    for row in results["speed"]:
        assert len(row["seconds"]) == 1
        assert min(row["seconds"]) > 0
        assert row["tokens"] > 0
        assert (row["bleu"] is None) == (row["text"] == "long")
    printed = capsys.readouterr().out
    assert "beam 2, batch 2, long sentences, glibc, native" in printed
    decoding_report.main(["--results", str(tmp_path / "out")])
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert page.count("| batch 1 | batch 2 |") == 5  # all but the table of allocators
    generation.main([*command, "--profile", str(tmp_path / "profile.json")])
    results = json.loads((tmp_path / "profile.json").read_text())
    assert {"command", "commit", "hardware", "versions", "date", "host"} < results.keys()
    measured = [(row["precision"], row["text"], row["batch"]) for row in results["profile"]]
    kinds = ["float32", *(["bfloat16"] if base_model.has_bfloat16() else []), "int8"]
    assert measured == list(itertools.product(kinds, ("short", "long"), (1, 2)))
    assert [row["engine"] for row in results["hypotheses"]] == [engines.PEERS_RULE, engines.OURS]
    for row in results["profile"]:
        *slowest, others = row["shares"].values()
        assert slowest == sorted(slowest, reverse=True)
        assert len(slowest) == 10
        assert 0 <= others < 1
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert 0 < row["calls_a_step"] <= (600 if row["batch"] == 1 else 900)
        assert (0 < row["outside_kernels"] < 1) if library() else "outside_kernels" not in row


def speed_row(engine, precision, seconds, **changes):
    setting = {"allocator": "glibc", "instructions": "native", "text": "short", "beams": 4}
    row = {"engine": engine, "precision": precision, "seconds": seconds, "sentences": 128}
    return {**setting, "batch": 32, "bleu": None, **row, **changes}


def test_ratios_are_paired_by_round_and_have_their_aims():
    ours = engines.PEERS_RULE
    rows = [
        speed_row(ours, "float32", [1.0, 2.0, 1.0]),
        speed_row(ours, "int8", [0.5, 0.4, 0.6]),
        speed_row("MarianMT", "float32", [3.0, 5.0, 9.0]),
        speed_row("CTranslate2", "float32", [0.5, 2.0, 0.9]),
        speed_row("CTranslate2", "int8", [1.0, 1.0, 1.2]),
    ]
    found = {
        (row["ours"], row["peer"]): (row["least"], row["median"], row["most"], row["aim"])
        for row in ratios.compare(rows)
    }
    assert found == {
        (f"{ours}, int8", "CTranslate2 int8"): (2.0, 2.0, 2.5, 1.5),
        (f"{ours}, float32", "CTranslate2 float32"): (0.5, 0.9, 1.0, 1.3),
        (f"{ours}, float32", "MarianMT float32"): (2.5, 3.0, 9.0, 2.5),
    }
    fewer = [row | {"instructions": "avx2", "batch": 1} for row in rows]
    assert {row["aim"] for row in ratios.compare(fewer)} == {None, 1.1}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--batches", "8", "-1"], "--batches must be at least 1, got -1"),
        (["--sentences", "127"], "--sentences must be at least 128, got 127"),
        (["--engines", "ours int4"], "--engines has no 'ours int4': choose from"),
        (
            ["--profile", "x.json", "--instructions", "native", "avx2"],
            "--profile takes one name of --instructions",
        ),
        ([], "CT2_FORCE_CPU_ISA is set, so engines may lack instructions: unset it"),
    ],
)
def test_the_decoding_benchmark_refuses_what_it_cannot_measure(
    words, complaint, monkeypatch, capsys
):
    if not words:
        monkeypatch.setenv("CT2_FORCE_CPU_ISA", "AVX2")
    with pytest.raises(SystemExit):
        generation.parse_args(words)
    assert complaint in capsys.readouterr().err


def test_our_best_precision_is_one_for_all_batches():
    rows = [
        speed_row(engines.PEERS_RULE, kind, [seconds], batch=batch)
        for kind, of_batches in (("bfloat16", (1.0, 1.0)), ("int8", (0.9, 4.0)))
        for batch, seconds in zip((1, 32), of_batches, strict=True)
    ]
    assert ratios.best_precision(rows) == {("glibc", "native", "short"): "bfloat16"}


def test_ranges_cover_all_files_of_all_hosts(tmp_path):
    for cpu, day, median in (("Xeon", 1, 9.0), ("Xeon", 2, 1.0), ("EPYC", 1, 1.5)):
        row = speed_row("ours", "int8", []) | {"rule": "ours", "peer": "Peer", "median": median}
        hardware = {"cpu": cpu, "cores": 2, "flags": []}
        results = {"hardware": hardware, "host": {"caches": {}}, "speed": [], "ratios": [row]}
        (tmp_path / f"{cpu}-2000-01-0{day}.json").write_text(json.dumps(results))
    assert decoding_report.ranges(tmp_path)[2:] == ["| ours | Peer | beam 4 | 1 | 1.00 to 9.00 |"]
    assert decoding_report.extremes(tmp_path) == []  # no such peer
    assert len(decoding_report.ranges(tmp_path, usual=False)) == 2  # no rows


def test_other_settings_and_allocators_have_tables_of_their_own(tmp_path):
    for cpu, seconds in (("EPYC", 1.5), ("Xeon", 3.0)):
        speed = [
            speed_row("ours", "int8", [seconds, seconds, 9.0]),
            speed_row("ours", "int8", [1.0, 1.5, 2.0], allocator="tcmalloc"),
            speed_row("ours", "int8", [7.0], batch=1),
            speed_row("ours", "int8", [8.0], instructions="avx2"),
        ]
        ratios = [{**row, "rule": "ours", "peer": "Peer", "median": seconds} for row in speed]
        hardware = {"cpu": cpu, "cores": 2, "flags": []}
        results = {"hardware": hardware, "host": {"caches": {}}, "speed": speed, "ratios": ratios}
        (tmp_path / f"{cpu}-2000-01-01.json").write_text(json.dumps(results))
    assert decoding_report.allocators(tmp_path)[2:] == [
        "| ours | int8 | beam 4 | 1 | 1.00 to 2.00 |"
    ]
    (_, above) = decoding_report.slow_with_glibc(tmp_path)
    assert above.endswith(
        "exceed it in 1 of 2 ratios. The largest ratio is 2.00. The geometric mean is 1.41."
    )
    assert decoding_report.ranges(tmp_path, usual=False)[2:] == [
        "| ours | Peer | beam 4 | 1 | tcmalloc | 1.50 to 3.00 |",
        "| ours | Peer | beam 4 | 1 | avx2 | 1.50 to 3.00 |",
    ]


def test_page_faults_have_their_share_of_the_time(tmp_path):
    for cpu, cost in (("EPYC", 2000), ("Xeon", 500)):
        row = speed_row("ours", "int8", [3.0, 2.0, 1.0], page_faults=100_000)
        hardware = {"cpu": cpu, "cores": 2, "flags": []}
        host = {"caches": {}, "page_fault_nanoseconds": cost}
        speed = [row, row | {"allocator": "tcmalloc", "page_faults": 900_000}]
        results = {"hardware": hardware, "host": host, "speed": speed}
        (tmp_path / f"{cpu}.json").write_text(json.dumps(results))
    assert decoding_report.page_faults(tmp_path)[2:] == [
        "| ours | int8 | beam 4 | 1 | 2.5 to 10.0 |"
    ]


def test_one_token_of_one_sentence_reads_each_matrix_of_the_model_once(tmp_path):
    config = VaswaniConfig.preset("base", vocab_size=base_model.VOCAB_SIZE)
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(config)
    model.tie_weights()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    speed = [
        speed_row("ours", precision, [seconds], beams=1, batch=1, tokens=1, sentences=1)
        for precision, seconds in (("float32", 0.004), ("int8", 0.002))
    ]
    host = {"caches": {}, "memory_gigabytes_per_second": 20.0}
    results = {"hardware": {"cpu": "EPYC", "cores": 2, "flags": []}, "host": host, "speed": speed}
    (tmp_path / "epyc.json").write_text(json.dumps(results))
    assert decoding_report.weights_read(tmp_path)[2:] == [
        f"| epyc-2-cores | 1 | ours | float32 | {matrices * 4 / 0.004 / 1e9:.1f} | 20.0 |",
        f"| epyc-2-cores | 1 | ours | int8 | {matrices / 0.002 / 1e9:.1f} | 20.0 |",
    ]


def test_hosts_have_the_lengths_of_their_translations(tmp_path):
    texts = {"short": 120, "long": 400}
    speed = [
        speed_row("ours", "int8", [1.0], text=text, tokens=tokens, sentences=10)
        for text, tokens in texts.items()
    ]
    speed.append(speed_row("Peer", "int8", [1.0], text="long", tokens=430, sentences=10))
    host = {
        "caches": {},
        "gigaflops": {"float32, 512 rows": 1, "bfloat16, 512 rows": 2},
        "memory_gigabytes_per_second": 3,
        "page_fault_nanoseconds": 4,
    }
    results = {"hardware": {"cpu": "EPYC", "cores": 2, "flags": []}, "host": host, "speed": speed}
    (tmp_path / "epyc.json").write_text(json.dumps(results | {"date": "2000-01-01"}))
    (row,) = decoding_report.hosts(tmp_path)[2:]
    assert row.endswith("| 12 | 40 to 43 | 2000-01-01 |")


@pytest.mark.parametrize("beams", [1, 3])
def test_hypotheses_of_a_sentence_are_counted(uneven_model, tmp_path, beams):
    workshop = engines.Workshop(uneven_model, "cpu", tmp_path, threads=1)
    text = base_model.Text(None, 330)
    rows = decoding_profile.hypotheses_a_sentence(workshop, text, [beams], 40)
    # The step that reads the start token extends nothing.
    assert [row["mean"] for row in rows] == [beams * (text.forced - 1)] * 2


def test_profiles_have_the_shares_of_kernels_or_of_operators(tmp_path):
    shares = {"vaswani::run_layers": 0.5, "vaswani::best_tokens": 0.02, "aten::mm": 0.1}
    shares["others"] = 0.38
    row = {"precision": "int8", "beams": 1, "batch": 8, "calls_a_step": 106, "shares": shares}
    rows = [row | {"outside_kernels": 0.25}, row]
    results = {"hardware": {"cpu": "Xeon", "cores": 2, "flags": []}, "threads": 2, "profile": rows}
    results |= {"command": "python it.py", "commit": "1a2b3c", "instructions": "avx2"}
    means = [
        {"engine": engine, "beams": 4, "mean": mean}
        for engine, mean in ((engines.PEERS_RULE, 20.0), (engines.OURS, 25.0))
    ]
    for name, more in {"": {"hypotheses": means}, "-operators": {"kernels": False}}.items():
        path = tmp_path / f"decoding-profile{name}.json"
        path.write_text(json.dumps(results | more))
    lines = list(decoding_report.profiles(tmp_path))
    start = "| xeon-2-cores | greedy | 2 | short | avx2 | int8 | 8 |"
    assert lines[2] == f"{start} 50% | 0% | 2% | 0% | 48% | 25% | 106 |"
    assert lines[3] == f"{start} 50% | 0% | 2% | 0% | 48% |  | 106 |"
    slowest = "`vaswani::run_layers` 50%, `vaswani::best_tokens` 2%, `aten::mm` 10%"
    assert f"{start} {slowest} | 106 |" in lines
    assert lines[-1] == "| xeon-2-cores | beam 4 | 20.0 | 25.0 | 1.25 |"
    earlier = {name: results[name] for name in ("command", "commit")}
    for folder in ("generation", "generation/torch-operators"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "earlier.json").write_text(json.dumps(earlier))
    assert decoding_report.commands(tmp_path / "generation") == [
        "python it.py --threads 1  # 1a2b3c",
        "VASWANI_KERNELS=0 python it.py --threads 1  # 1a2b3c",
        "VASWANI_KERNELS=0 python it.py  # 1a2b3c",
        "python it.py  # 1a2b3c",
    ]


def test_ratios_of_single_rounds_are_rounded_down(tmp_path):
    for number, (rule, least, most) in enumerate(
        [(engines.PEERS_RULE, 1.128, 2.0), (engines.PEERS_RULE, 1.5, 2.119), ("ours", 0.969, 1.2)]
    ):
        row = speed_row(rule, "int8", []) | {"rule": rule, "peer": "CTranslate2 int8"}
        row |= {"least": least, "median": 1.6, "most": most}
        hardware = {"cpu": "Xeon", "cores": 2, "flags": []}
        results = {"hardware": hardware, "host": {"caches": {}}, "speed": [], "ratios": [row]}
        (tmp_path / f"xeon-{number}.json").write_text(json.dumps(results))
    (_, line) = decoding_report.extremes(tmp_path)
    assert line.endswith("from 1.12 to 2.11 with the peer's rule, and from 0.96 to 1.20 with ours.")


def test_numbers_of_threads_are_not_mixed(tmp_path):
    for threads, median in ((2, 3.0), (1, 1.5)):
        row = speed_row("ours", "int8", []) | {"rule": "ours", "peer": "Peer", "median": median}
        hardware = {"cpu": "Xeon", "cores": 2, "flags": []}
        results = {"hardware": hardware, "host": {"caches": {}}, "speed": [], "ratios": [row]}
        results["threads"] = threads
        (tmp_path / f"Xeon-{threads}.json").write_text(json.dumps(results))
    assert decoding_report.ranges(tmp_path)[2:] == [
        "| ours | Peer | beam 4 | 1 | 1.50 |",
        "| ours | Peer | beam 4 | 2 | 3.00 |",
    ]


def test_long_sources_have_40_to_60_tokens(corpus):
    tokenizer = VaswaniTokenizer.train_from_iterator(ENGLISH, vocab_size=330, show_progress=False)
    sources = base_model.Text(tokenizer, 330).long(3)
    assert len(sources) == 3
    for source in sources:
        assert 40 <= len(source) <= 60
        assert source.count(2) == 1
        assert source[-1] == 2


def test_variables_are_restored_after_an_engine(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "before")
    monkeypatch.delenv("CT2_FORCE_CPU_ISA", raising=False)
    variables = {**host.preloaded("glibc"), **host.INSTRUCTIONS["avx2"]}
    with host.environment(variables):
        assert {name: os.environ[name] for name in variables} == variables
    assert os.environ["LD_PRELOAD"] == "before"
    assert "CT2_FORCE_CPU_ISA" not in os.environ


def test_a_twin_that_computes_something_else_ends_the_run(uneven_model, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "distance_to_marian", lambda *_: float("nan"))
    text = base_model.Text(None, 330)
    with pytest.raises(SystemExit, match="MarianMT computes something else"):
        generation.check_twins(uneven_model, tmp_path, text)


def test_more_sentences_than_the_test_set_has_are_refused():
    text = base_model.Text(None, 330)
    assert len(text.chosen(1000)) == 1000
    with pytest.raises(ValueError, match="The test set has 1000 sentences, not 1001"):
        text.chosen(1001)


def test_training_goes_on_after_a_kill_as_if_nothing_had_happened(corpus, tmp_path, monkeypatch):
    small = VaswaniConfig.preset

    def preset(name, **settings):
        sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        return small(name, **settings, **sizes, encoder_layers=1, decoder_layers=1)

    monkeypatch.setattr(base_model.VaswaniConfig, "preset", preset)
    for name, value in {"VOCAB_SIZE": 330, "_EVERY": 2, "_TOKENS": 64}.items():
        monkeypatch.setattr(base_model, name, value)
    base_model.train(tmp_path / "whole", steps=6)

    copied = base_model._copy
    calls = []

    def killed(*args):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        copied(*args)

    def failing(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(base_model, "_copy", killed)
    with pytest.raises(KeyboardInterrupt):
        base_model.train(tmp_path / "cut", steps=6)
    assert (tmp_path / "cut" / "unfinished.pt").exists()
    monkeypatch.setattr(base_model, "_copy", copied)
    base_model.train(tmp_path / "cut", steps=6)
    assert not (tmp_path / "cut" / "unfinished.pt").exists()

    with monkeypatch.context() as patch:
        patch.setattr(VaswaniForConditionalGeneration, "save_pretrained", failing)
        with pytest.raises(OSError, match="full"):
            base_model.train(tmp_path / "full", steps=6)
    base_model.train(tmp_path / "full", steps=6)
    assert json.loads((tmp_path / "full" / "training.json").read_text())["steps"] == 6
    whole, *others = (
        VaswaniForConditionalGeneration.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "cut", "full")
    )
    for other in others:
        for name, tensor in whole.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)


def test_help_is_the_manual(capsys):
    with pytest.raises(SystemExit, match="0"):
        generation.main(["--help"])
    printed = capsys.readouterr().out
    assert "CTranslate2" in printed
    assert "--profile FILE" in printed


def test_memory_grows_with_the_batch_and_not_from_loading(uneven_model, tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from /proc, which only Linux has")
    uneven_model.save_pretrained(tmp_path / "tiny")
    peaks = []
    for size in (1, 64):
        sources, _ = random_pairs([200] * size)
        measure = memory.memory_of(tmp_path / "tiny", "ours", "float32", "cpu", tmp_path, 1)
        peaks.append(measure(sources, 4, 8))
    small, large = (peak["peak_mb"] - peak["weights_mb"] for peak in peaks)
    assert large > small + 5


@pytest.mark.slow
def test_report_of_quantized_forms_is_whole(uneven_model, corpus, tmp_path, capsys):
    lines = ENGLISH + GERMAN
    tokenizer = VaswaniTokenizer.train_from_iterator(lines, vocab_size=330, show_progress=False)
    for part in (uneven_model, tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    report = tmp_path / "report.json"
    forms = ["bfloat16", "quantize_dynamic, int8"]
    command = ["--model", str(tmp_path / "tiny"), "--json", str(report), "--sentences", "3"]
    quantization.main([*command, "--rounds", "1", "--forms", *forms])
    results = json.loads(report.read_text())
    assert {"command", "commit", "hardware", "versions", "date"} < results.keys()
    assert [row["form"] for row in results["forms"]] == ["float32", *forms]
    assert results["forms"][0]["error"] == 0
    for row in results["forms"][1:]:
        assert 0 < row["error"] < 0.2
        assert min(row["sentences_per_second_1"], row["sentences_per_second_4"]) > 0
    assert capsys.readouterr().out.endswith("\n".join(quantization.table(results["forms"])) + "\n")


def test_int8_scores_enter_the_card_of_the_rounded_model(uneven_model, corpus, tmp_path):
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ENGLISH + GERMAN, vocab_size=330, show_progress=False
    )
    for part in (uneven_model, tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    data = tmp_path / "data" / "multi30k" / "test_2016_flickr.lc.norm.tok"
    files = [f"{data}.{language}.gz" for language in ("en", "de")]
    out, report = tmp_path / "int8", tmp_path / "report.json"
    int8.main(
        [str(tmp_path / "tiny"), "--test", *files, "--output", str(out), "--json", str(report)]
    )
    whole = json.loads(report.read_text())
    assert {"command", "commit", "hardware", "versions", "date"} < whole.keys()
    (results,) = whole["models"]
    assert results["state_bits"] in (7, 8)
    assert results == json.loads((out / "results" / "int8.json").read_text())
    assert 0.25 < results["bytes"] / results["float_bytes"] < 0.6  # many scales in so small a model
    card = (out / "README.md").read_text()
    assert f"| BLEU | {results['test']['bleu']:.2f} |" in card
    assert "\n# int8\n" in card
    before = results["test"]["float_bleu"]
    assert f"| BLEU before the weights were rounded | {before:.2f} |" in card
    assert f"Rounding moved them by {results['weight_error']:.2%}" in card


def test_differences_of_int8_have_the_mean_and_the_largest_loss():
    scores = [(30.0, 29.9), (31.0, 31.2), (32.0, 31.7)]
    results = [{"test": {"float_bleu": before, "bleu": after}} for before, after in scores]
    assert int8.differences(results) == {"mean": -0.067, "largest_loss": 0.3}


def test_a_file_of_earlier_measurements_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "load", lambda *_, **__: pytest.fail("loaded"))
    name = host.host_name(generation.circumstances()["hardware"])
    today = datetime.datetime.now(datetime.UTC).date()
    (tmp_path / f"{name}-{today}-again.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"again\.json exists\. Choose another file with --name"):
        generation.main(["--results", str(tmp_path), "--name", "again"])


def test_an_interrupted_measurement_keeps_its_finished_rounds(uneven_model, tmp_path, monkeypatch):
    turns = iter([1.0, 2.0])

    def turn(*_):
        seconds = next(turns, None)
        if seconds is None:
            raise KeyboardInterrupt
        return [{"seconds": seconds, "page_faults": 0, "outputs": [[5, 2]]}]

    row = {"text": "short", "beams": 1, "batch": 1, "sentences": 1}
    monkeypatch.setattr(
        generation, "load", lambda *_, **__: (uneven_model, SimpleNamespace(forced=None))
    )
    for name, value in (("host_facts", {}), ("check_twins", {}), ("weights_sha256", None)):
        monkeypatch.setattr(generation, name, lambda *_, value=value: value)
    monkeypatch.setattr(generation, "jobs_of", lambda *_: [(row, None, [])])
    monkeypatch.setattr(generation, "turn", turn)
    with pytest.raises(KeyboardInterrupt):
        generation.main(["--results", str(tmp_path), "--engines", "ours float32"])
    (report,) = tmp_path.iterdir()
    results = json.loads(report.read_text())
    assert results["rounds"] == 2
    assert results["speed"][0]["seconds"] == [1.0, 2.0]


@pytest.mark.parametrize("allocator", host.ALLOCATORS)
def test_the_process_of_an_engine_has_the_allocator(allocator):
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not list the libraries of a process")
    try:
        variables = host.preloaded(allocator)
    except RuntimeError as error:
        pytest.skip(str(error))
    with host.environment(variables):
        job = worker.Worker(functools.partial, Path.read_text, Path("/proc/self/maps"))
    job.wait()
    assert ("tcmalloc" in job()) == (allocator == "tcmalloc")
    job.close()
