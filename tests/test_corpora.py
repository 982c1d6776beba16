"""Corpora of many files, filters with counts, and mixtures that see all pairs equally often."""

import gzip
import json
import os
import pickle
import signal
import sys
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from forks import in_child
from hypothesis import given
from hypothesis import strategies as st
from num2words import num2words
from transformers import AutoTokenizer
from vaswani.commands.main import main
from vaswani.commands.train import make_parser, recipe_of
from vaswani.configuration.named_functions import function_of
from vaswani.corpora import in_processes, token_batches
from vaswani.corpora.corpus import parse_corpora
from vaswani.corpora.encoding import TextEncoder
from vaswani.corpora.filtering import Rules, TextFilter
from vaswani.corpora.mapped import MappedPairs
from vaswani.corpora.mixing import Mixture, shares_of
from vaswani.corpora.preparing import Tokenise, prepare
from vaswani.corpora.reading import DataError, strictly
from vaswani.corpora.token_batches import PackedBatchSampler, TokenBatchSampler
from vaswani.training.run_data import RunData

from vaswani import VaswaniTokenizer

PAIRS = [(num2words(n), num2words(n, lang="de")) for n in range(60)]


@pytest.fixture
def write(tmp_path):
    """Write pairs in the form of a name's suffix, and return the path."""

    def write_pairs(name, pairs=PAIRS):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if ".parquet" in name:
            columns = dict(
                zip(("source", "target"), map(list, zip(*pairs, strict=True)), strict=True)
            )
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
            return str(path)
        if ".jsonl" in name:
            lines = [json.dumps({"source": one, "target": two}) for one, two in pairs]
        else:
            lines = [f"{one}\t{two}" for one, two in pairs]
        content = "".join(f"{line}\n" for line in lines).encode()
        if name.endswith(".gz"):
            content = gzip.compress(content)
        if name.endswith(".zst"):
            content = pyarrow.Codec("zstd").compress(content, asbytes=True)
        path.write_bytes(content)
        return str(path)

    return write_pairs


@pytest.fixture(scope="module")
def tokenizer():
    lines = [text for pair in PAIRS for text in pair]
    return VaswaniTokenizer.train_from_iterator(lines, "char", 200, show_progress=False)


def pairs_of(corpus):
    return list(strictly(corpus.pairs()))


@pytest.mark.parametrize(
    "name", ["a.tsv", "a.tsv.gz", "a.tsv.zst", "a.jsonl", "a.jsonl.zst", "a.parquet"]
)
def test_pairs_are_the_same_from_every_form_of_file(name, write):
    (corpus,) = parse_corpora([write(name)])
    assert pairs_of(corpus) == PAIRS


def test_globs_and_many_files_are_read_in_the_order_of_their_names(write, tmp_path):
    for part in range(3):
        rows = PAIRS[20 * part :][:20]
        write(f"part-{part}.tsv", rows)
        for side, language in enumerate(("en", "de")):
            path = tmp_path / f"part-{part}.{language}"
            path.write_text("".join(f"{row[side]}\n" for row in rows))
    (tables,) = parse_corpora([f"{tmp_path}/part-*.tsv"])
    (texts,) = parse_corpora([f"{tmp_path}/part-*.en", f"{tmp_path}/part-*.de"])
    assert pairs_of(tables) == pairs_of(texts) == PAIRS
    (tmp_path / "part-3.en").write_text("one\n")
    with pytest.raises(DataError, match=r"matches 4 files, .*\.de 3: parallel files must match"):
        parse_corpora([f"{tmp_path}/part-*.en", f"{tmp_path}/part-*.de"])
    with pytest.raises(DataError, match=r"No file matches .*absent-\*"):
        parse_corpora([f"{tmp_path}/absent-*.tsv"])
    (part,) = parse_corpora(["wmt/wmt14@de-en:train[:10%]"])
    assert part.shards == (("wmt/wmt14@de-en:train[:10%]",),)


def test_shards_with_other_numbers_are_not_paired(tmp_path):
    for name in ("p-1.en", "p-3.en", "p-1.de", "p-2.de", "a.x", "b.x", "c.y", "d.y"):
        (tmp_path / name).write_text("one\n")
    with pytest.raises(DataError, match=r"would pair \S*p-3\.en with \S*p-2\.de: look for"):
        parse_corpora([f"{tmp_path}/p-*.en", f"{tmp_path}/p-*.de"])
    for name in ("x1.en", "x2.en", "x10.en", "x1_de.txt", "x2_de.txt", "x10_de.txt"):
        (tmp_path / name).write_text("one\n")
    (corpus,) = parse_corpora([f"{tmp_path}/x*.en", f"{tmp_path}/x*_de.txt"])
    for source, target in corpus.shards:
        assert target == source.removesuffix(".en") + "_de.txt"
    # Nothing says that files with other names are not parallel.
    (corpus,) = parse_corpora([f"{tmp_path}/[ab].x", f"{tmp_path}/[cd].y"])
    assert len(corpus.shards) == 2


def test_names_that_are_no_files_say_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spark.parquet").mkdir()
    (tmp_path / "pairs.tsv.xz").write_bytes(b"")
    with pytest.raises(DataError, match=r"spark\.parquet is a folder, .*: name the files in it"):
        parse_corpora(["spark.parquet"])[0].content()
    with pytest.raises(DataError, match=r"pairs\.tsv\.xz: this compression is not read"):
        parse_corpora(["pairs.tsv.xz"])
    with pytest.raises(DataError, match=r"No such file: user/a \(two data .*, as in user/a:train"):
        parse_corpora(["user/a", "user/b"])[0].content()


def test_a_folder_may_have_the_marks_of_data_set_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d@s").mkdir()
    (tmp_path / "d@s" / "train.jsonl").write_text('{"source": "one", "target": "eins"}\n')
    assert pairs_of(parse_corpora(["d@s"])[0]) == [("one", "eins")]


def test_several_corpora_have_their_weights_and_tags(write, tmp_path):
    a, b = write("a.tsv"), write("b.jsonl")
    for name in ("c.en", "c.de"):
        (tmp_path / name).write_text("one\n")
    words = [f"{a}=2", f"{tmp_path}/c.en", f"{tmp_path}/c.de=0.5", b]
    found = parse_corpora(words, tags=["de", "en", "fr"])
    assert [len(corpus.shards[0]) for corpus in found] == [1, 2, 1]
    assert [corpus.weight for corpus in found] == [2, 0.5, None]
    assert [corpus.tag for corpus in found] == ["de", "en", "fr"]
    assert [corpus.tag for corpus in parse_corpora(words, tags=["de"])] == ["de"] * 3


def test_the_two_files_of_a_corpus_have_one_weight_and_both_are_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.en", "a.de", "b.tsv"):
        (tmp_path / name).write_text("one\n")
    assert parse_corpora(["a.en=2", "a.de=2"])[0].weight == 2
    with pytest.raises(DataError, match=r"a\.de are one corpus, but have the weights 2 and 3"):
        parse_corpora(["a.en=2", "a.de=3"])
    with pytest.raises(DataError, match=r"a\.en needs a parallel text file after it, got b\.tsv"):
        parse_corpora(["a.en", "b.tsv"])


def test_shares_that_make_no_sense_are_refused_before_the_data_are_read(write):
    words = ["--train", f"{write('a.tsv')}=2", write("b.tsv"), "--output", "run"]
    for more, complaint in (
        (["--temperature", "5"], "--temperature and weights .* drop one"),
        (["--bpe-dropout", "0.1", "--segmentations", "2"], "work with --segmentations 1 only"),
    ):
        with pytest.raises(DataError, match=complaint):
            RunData(make_parser().parse_args([*words, *more]), print)


def test_a_corpus_with_a_small_share_is_seen():
    assert Mixture([2999, 1], [10_000, 1]).taken == [3000, 1]
    assert Mixture([2999, 1], [1, 0]).taken == [3000, 0]


@pytest.mark.parametrize(
    ("words", "tags", "complaint"),
    [
        (["a.tsv=-1"], [], "a weight must be 0 or more, got -1"),
        (["a.tsv=nan"], [], "a weight must be 0 or more, got nan"),
        (["a.tsv=much"], [], "'much' is not a weight"),
        (["a.tsv=0", "b.tsv=0"], [], "All weights are 0"),
        (["a.tsv", "b.tsv"], ["de", "en", "fr"], r"3 tags \(de en fr\) for 2 corpora"),
    ],
)
def test_weights_and_tags_that_make_no_sense_are_refused(words, tags, complaint):
    with pytest.raises(DataError, match=complaint):
        parse_corpora(words, tags=tags)


@pytest.mark.parametrize(
    ("ending", "content"), [(".tsv.zst", b"not zstd"), (".parquet", b"PAR1 nothing PAR1")]
)
def test_a_damaged_file_is_named(ending, content, tmp_path):
    (tmp_path / f"a{ending}").write_bytes(content)
    (corpus,) = parse_corpora([str(tmp_path / f"a{ending}")])
    with pytest.raises(DataError, match=rf"a{ending} is damaged"):
        pairs_of(corpus)


DIRTY = [
    ("one", "eins"),
    ("", "leer"),
    ("leer", " "),
    ("same", "same"),
    ("one", "eins"),
    ("one", "eine"),
    ("two", "eins"),
    ("привет", "hallo"),
    ("naïve 12 !?", "élan - 3"),
    ("a", "b" * 40),
    ("x" * 90, "y" * 90),
]


RULES = [
    ({}, set(range(11)), {}),
    ({"drop_empty": True}, set(range(11)) - {1, 2}, {"empty": 2}),
    ({"drop_identical": True}, set(range(11)) - {3}, {"identical": 1}),
    ({"drop_duplicates": "pairs"}, set(range(11)) - {4}, {"duplicate": 1}),
    ({"drop_duplicates": "source"}, set(range(11)) - {4, 5}, {"duplicate": 2}),
    ({"drop_duplicates": "target"}, set(range(11)) - {4, 6}, {"duplicate": 2}),
    ({"scripts": ("Latin", "Latin")}, set(range(11)) - {7}, {"script": 1}),
    ({"max_length": 50}, set(range(11)) - {10}, {"too long": 1}),
    ({"max_ratio": 5.0}, set(range(11)) - {9}, {"ratio": 1}),
    ({"function": "my_filters:is_short"}, {0, 1, 2, 3, 4, 5, 6, 9}, {"filter": 3}),
    (
        {"drop_empty": True, "drop_duplicates": "pairs", "max_length": 50},
        set(range(11)) - {1, 2, 4, 10},
        {"empty": 2, "duplicate": 1, "too long": 1},
    ),
]


@pytest.mark.parametrize(("rules", "kept", "dropped"), RULES)
def test_filters_drop_what_they_say_and_count_it(
    rules, kept, dropped, write, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    module = "def is_short(source, target):\n    return len(source) < 5\n"
    (tmp_path / "my_filters.py").write_text(module)
    texts = [text for pair in DIRTY for text in pair]
    tokenizer = VaswaniTokenizer.train_from_iterator(texts, "char", 200, show_progress=False)
    (corpus,) = parse_corpora([write("a.jsonl", DIRTY)])
    found = prepare(corpus, tokenizer, tokenizer, Rules(**rules), tmp_path, processes=1)
    rows = MappedPairs.from_files(found.files, "name")[:]
    decoded = [
        tokenizer.batch_decode(rows[name], skip_special_tokens=True)
        for name in rows
        if name != "length"
    ]
    assert list(zip(*decoded, strict=True)) == [DIRTY[n] for n in sorted(kept)]
    assert found.dropped == dropped
    assert (found.read, found.kept) == (len(DIRTY), len(kept))


def test_unreadable_pairs_are_counted_on_request(tokenizer, tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"one\teins\r\nno tab\ntwo\xff\tzwei\n\nthree\tdrei\tmore\n")
    (corpus,) = parse_corpora([str(path)])
    with pytest.raises(DataError, match=r"a\.tsv, line 2: no tab"):
        prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    found = prepare(
        corpus, tokenizer, tokenizer, Rules(skip_unreadable=True), tmp_path, processes=1
    )
    assert (found.read, found.kept, found.dropped) == (4, 2, {"unreadable": 2})


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"scripts": ("Latin", "Klingon")}, "'Klingon' is not a Unicode script"),
        ({"scripts": ("", "Latin")}, "'' is not a Unicode script"),
        ({"function": "absent_module:keep"}, "No module named 'absent_module'"),
        ({"function": "json:keep"}, "has no attribute 'keep'"),
        ({"function": "json"}, "Give MODULE:FUNCTION"),
    ],
)
def test_filters_that_do_not_exist_are_refused(rules, complaint):
    with pytest.raises(DataError, match=complaint):
        TextFilter(Rules(**rules))


def test_an_error_of_a_filter_names_the_filter_and_the_pair(write, tokenizer, tmp_path):
    (corpus,) = parse_corpora([write("a.tsv", [("one", "eins")])])
    rules = Rules(function="operator:matmul")  # texts have no matrix product
    with pytest.raises(
        DataError, match=r"operator:matmul failed for the pair 'one', 'eins': TypeE"
    ):
        prepare(corpus, tokenizer, tokenizer, rules, tmp_path, processes=1)


def test_a_filter_may_be_a_compiled_function(write, tokenizer, tmp_path):
    (corpus,) = parse_corpora([write("a.tsv", [("same", "same"), ("one", "eins")])])
    rules = Rules(function="operator:ne")
    found = prepare(corpus, tokenizer, tokenizer, rules, tmp_path, processes=1)
    assert (found.kept, found.dropped) == (1, {"filter": 1})
    assert rules.key() != Rules(function="operator:eq").key()


def test_nothing_left_is_an_error_with_the_counts(write, tokenizer, tmp_path):
    (corpus,) = parse_corpora([write("a.tsv", [("one", "one"), ("two", "two")])])
    with pytest.raises(DataError, match=r"No pair of .*a\.tsv is left: 2 identical"):
        prepare(corpus, tokenizer, tokenizer, Rules(drop_identical=True), tmp_path, processes=1)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_a_mixture_takes_its_shares_and_sees_all_pairs_of_a_corpus_equally_often(sizes, seed, data):
    shares = data.draw(
        st.lists(st.floats(0, 5), min_size=len(sizes), max_size=len(sizes)).filter(sum)
    )
    mixture = Mixture(sizes, shares, seed)
    every = np.arange(sum(sizes))
    oversize = np.random.default_rng(seed).random(len(every)) < data.draw(st.floats(0, 1))
    seen = Counter()
    starts = np.cumsum([0, *sizes])
    for epoch in range(5):
        rows = np.concatenate(mixture.draw(every[~oversize], every[oversize], epoch))
        seen.update(rows.tolist())
        for corpus, start in enumerate(starts[:-1]):
            count = ((rows >= start) & (rows < starts[corpus + 1])).sum()
            exact = sum(sizes) * shares[corpus] / sum(shares)
            assert count == max(round(exact), shares[corpus] > 0)
            looks = [seen[row] for row in range(start, starts[corpus + 1])]
            assert max(looks) - min(looks) <= 1


def test_temperature_makes_shares_more_equal_and_weights_are_shares():
    assert shares_of([100, 900], [None, None], None) is None
    assert shares_of([100, 900], [2.0, None], None) == [2, 1]
    assert shares_of([100, 900], [None, None], 1) == pytest.approx([1 / 9, 1])
    assert shares_of([10, 10**6], [None, None], 0.001) == [0, 1]
    small, large = shares_of([100, 900], [None, None], 5)
    assert large / small == pytest.approx(9 ** (1 / 5))
    with pytest.raises(ValueError, match="--temperature and weights"):
        shares_of([1, 2], [1.0, 2.0], 5)


@pytest.mark.parametrize("kind", [TokenBatchSampler, PackedBatchSampler])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_batches_of_a_mixture_depend_on_seed_and_epoch_and_keep_budget_and_number(kind, processes):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, (700, 2))
    lengths[500:] //= 4

    def sampler():
        mixture = Mixture([500, 200], [1, 2], seed=3)
        return kind(lengths, 400, seed=3, batches_per_update=4, mixture=mixture)

    def size(batch):
        own = lengths[batch]
        return own.sum(axis=0) if kind is PackedBatchSampler else own.max(axis=0) * len(batch)

    one, other = sampler(), sampler()
    epochs = []
    for epoch in range(4):
        for each in (one, other):
            each.set_epoch(epoch)
        batches = list(one)
        assert batches == list(other)
        assert len(batches) == len(one)
        assert all((size(batch) <= 400).all() for batch in batches)
        rows = [row for batch in batches for row in batch]
        assert abs(sum(row >= 500 for row in rows) / len(rows) - 2 / 3) < 0.01
        epochs.append(rows)
        # An update has the same sentences for every distribution of its batches.
        dealt = [batches[rank::processes] for rank in range(processes)]
        per_process = 4 // processes
        for update in range(len(batches) // 4):
            mine = [b for own in dealt for b in own[update * per_process :][:per_process]]
            assert sorted(mine) == sorted(batches[4 * update :][:4])
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", [TokenBatchSampler, PackedBatchSampler])
def test_a_mixture_draws_oversize_pairs_as_it_draws_the_others(kind):
    without = kind([[5, 5]] * 4 + [[50, 5]], 10, mixture=Mixture([2, 3], [1, 0]))
    assert {row for batch in without for row in batch} == {0, 1}

    lengths = np.full((100, 2), 5)
    lengths[[3, 40, 60, 61, 62]] = 50  # 2 of the first 50 rows, and 3 of the others
    with pytest.raises(ValueError, match="mixture have 4 pairs, but lengths has 5"):
        kind([[5, 5]] * 5, 10, mixture=Mixture([2, 2], [1, 1]))
    mixture = Mixture([50, 50], [1, 4], seed=1)
    sampler, dropping = (
        kind(lengths, 10, drop_oversize=drop, mixture=mixture) for drop in (False, True)
    )
    seen = Counter()
    for epoch in range(25):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(len(batch) == 1 for batch in batches if lengths[batch].max() > 10)
        seen.update(row for batch in batches for row in batch)
        dropping.set_epoch(epoch)
        assert max(lengths[batch].max() for batch in dropping) == 5
    # 25 epochs of 20 and 80 pairs are 10 and 40 passes.
    assert seen == {row: 10 if row < 50 else 40 for row in range(100)}


@pytest.mark.parametrize(("counted", "incomplete"), [(1, [33]), (8, [])])
def test_small_mixtures_count_several_epochs_and_warn_of_pairs_they_leave_out(
    monkeypatch, counted, incomplete
):
    monkeypatch.setattr(token_batches, "_EPOCHS_COUNTED", counted)
    warnings = []
    monkeypatch.setattr(token_batches.logger, "warning", warnings.append)
    lengths = np.random.default_rng(1).integers(1, 100, (1000, 2))
    sampler = TokenBatchSampler(lengths, 300, mixture=Mixture([500, 500], [9, 1]))
    found = []
    for epoch in range(50):
        sampler.set_epoch(epoch)
        if missing := sampler.num_sentences - sum(map(len, sampler)):
            found.append(epoch)
            assert f"{missing} of its 1000 pairs are left out" in warnings.pop()
    assert found == incomplete
    assert not warnings


def test_text_filters_can_be_sent_to_other_processes():
    rules = Rules(drop_empty=True, drop_identical=True, scripts=("Latin", "Cyrillic"))
    filters = pickle.loads(pickle.dumps(TextFilter(rules)))
    pairs = [("one", "один"), ("two", " "), ("same", "same"), ("три", "три")]
    assert filters(pairs) == ([("one", "один")], {"empty": 1, "identical": 2})
    assert filters([("two", "zwei")])[1] == {"script": 1}


def test_texts_of_a_batch_without_pairs_have_the_columns_of_others(tokenizer):
    tokenise = Tokenise(
        (TextEncoder(tokenizer), TextEncoder(tokenizer, target=True)),
        Rules(drop_empty=True),
        None,
        keep_texts=True,
    )
    schemas = [tokenise.encode(pairs)[0].schema for pairs in ([("one", "eins")], [])]
    assert schemas[0] == schemas[1]


def test_workers_end_with_a_process_that_was_killed():
    assert in_child(lambda: in_processes._exit_after(-1)) == in_processes._ORPHANED


def test_recipes_repeat_the_options_about_data(tmp_path):
    words = ["--train", "a.tsv=2", "b.tsv", "--tag", "de", "en", "--drop-empty", "--output", "x"]
    words += ["--scripts", "Latin", "Latin", "--drop-duplicates", "pairs", "--temperature", "5"]
    args = make_parser().parse_args(words)
    (tmp_path / "recipe.yaml").write_text(recipe_of(args))
    again = make_parser().parse_args(["--recipe", str(tmp_path / "recipe.yaml")])
    assert vars(again) == {**vars(args), "recipe": again.recipe, "columns": ["source", "target"]}


TINY = ["--vocab-size", "340", "--max-source-tokens", "300", "--steps", "4", "--set", "d_model=16"]
TINY += ["encoder_layers=1", "decoder_layers=1", "encoder_attention_heads=2"]
TINY += ["decoder_attention_heads=2", "encoder_ffn_dim=16", "decoder_ffn_dim=16"]


def test_prepared_data_are_what_training_with_the_same_options_uses(write, tmp_path, capsys):
    data = [
        "--train",
        write("a.tsv"),
        write("b.tsv", PAIRS[::-1]),
        "--data-cache",
        str(tmp_path / "cache"),
    ]
    data += ["--max-length", "30"]
    main(["prepare", *data, "--vocab-size", "340"])
    assert "120 pairs are prepared in" in capsys.readouterr().out
    made = sorted((tmp_path / "cache").iterdir())
    assert len([path for path in made if path.is_dir()]) == 3
    times = [path.stat().st_mtime_ns for path in made]
    main(["train", *data, *TINY, "--output", str(tmp_path / "run")])
    assert sorted((tmp_path / "cache").iterdir()) == made
    assert [path.stat().st_mtime_ns for path in made if path.is_dir()] == [
        time for time, path in zip(times, made, strict=True) if path.is_dir()
    ]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["data"] == {"read": 120, "kept": 120, "dropped": {}}


def test_a_tagged_model_translates_into_the_language_of_the_tag(write, tmp_path, capsys):
    there, back = write("en-de.tsv"), write("de-en.tsv", [pair[::-1] for pair in PAIRS])
    main(
        ["train", "--train", f"{there}=1", f"{back}=2", "--tag", "de", "en", "--test", there, back,
         "--data-cache", str(tmp_path / "cache"), *TINY, "--output", str(tmp_path / "run")]
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    for tag in ("de", "en"):
        (first, *rest) = tokenizer(f">>{tag}<< one")["input_ids"]
        assert tokenizer.convert_ids_to_tokens(first) == f">>{tag}<<"
        assert rest == tokenizer("one")["input_ids"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [part["tag"] for part in results["test"]["corpora"]] == ["de", "en"]
    said = capsys.readouterr().out
    assert all(f"Test {place}: BLEU" in said for place in (there, back))
    assert [part["samples"][0]["source"] for part in results["test"]["corpora"]] == [
        ">>de<< zero", ">>en<< null",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"--tag fr: the vocabulary has no token >>fr<<"):
        main(
            ["train", "--model", str(tmp_path / "run"), "--train", there, "--tag", "fr",
             "--steps", "1", "--output", str(tmp_path / "more")]
        )  # fmt: skip


def test_a_named_function_may_be_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text("def keep(source, target): return source != target\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert function_of("own_rules:keep")("a", "b")


def test_workers_leave_an_interrupt_to_the_process_that_they_work_for():
    def interrupted():
        in_processes._begin(len, os.getppid())
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)

    assert in_child(interrupted) == 7
