"""Corpora are tokenised once, completely or not at all, and all processes map the same files."""

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from forks import in_child
from num2words import num2words
from test_full_disk import files_of_at_most
from vaswani.corpora import preparing
from vaswani.corpora.corpus import Corpus, parse_corpora
from vaswani.corpora.filtering import Rules
from vaswani.corpora.mapped import MappedPairs
from vaswani.corpora.preparing import prepare
from vaswani.corpora.reading import DataError
from vaswani.corpora.vocabulary import train_vocabulary

from vaswani import VaswaniTokenizer

PAIRS = [(num2words(n), num2words(n, lang="de")) for n in range(1000)]


@pytest.fixture(scope="module")
def tokenizer():
    lines = [text for pair in PAIRS for text in pair]
    return VaswaniTokenizer.train_from_iterator(lines, vocab_size=500, show_progress=False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{one}\t{two}\n" for one, two in PAIRS), encoding="utf-8")
    return parse_corpora([str(path)])[0]


@pytest.fixture
def small_parts(monkeypatch):
    """Make preparations have several parts and batches."""
    monkeypatch.setattr(preparing, "_BATCH", 50)
    monkeypatch.setattr(preparing, "_PART", 250)


class Said(list):
    __call__ = list.append


def rows_of(prepared):
    return MappedPairs.from_files(prepared.files, "name")[:]


def expected(tokenizer, pairs=PAIRS):
    sources, targets = map(list, zip(*pairs, strict=True))
    ids, labels = tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]
    return {
        "input_ids": ids,
        "labels": labels,
        "length": [max(map(len, pair)) for pair in zip(ids, labels, strict=True)],
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_prepared_ids_are_the_tokenizers_in_the_order_of_the_file(
    processes, corpus, tokenizer, tmp_path, small_parts
):
    prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=processes)
    assert (prepared.read, prepared.kept, prepared.dropped) == (1000, 1000, {})
    assert len(prepared.files) == 4
    assert rows_of(prepared) == expected(tokenizer)
    types = MappedPairs.from_files(prepared.files, "name").data.schema
    assert [str(types.field(name).type.value_type) for name in ("input_ids", "labels")] == [
        "uint16", "uint16",
    ]  # fmt: skip


def test_a_second_start_reads_and_tokenises_nothing(corpus, tokenizer, tmp_path, monkeypatch):
    first = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    monkeypatch.setattr(Corpus, "pairs", None)
    assert prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1) == first


def test_other_content_tokenizers_and_rules_have_folders_of_their_own(corpus, tokenizer, tmp_path):
    other = VaswaniTokenizer.train_from_iterator(["one"], vocab_size=300, show_progress=False)
    folders = {
        prepare(corpus, first, second, rules, tmp_path, processes=1).folder
        for first, second, rules in (
            (tokenizer, tokenizer, Rules()),
            (tokenizer, other, Rules()),
            (tokenizer, tokenizer, Rules(max_length=9)),
        )
    }
    path = Path(corpus.shards[0][0])
    path.write_text(path.read_text().replace("seven", "eleven"))
    folders.add(prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1).folder)
    assert len(folders) == 4
    # The name of a file does not change the key.
    path = path.rename(tmp_path / "renamed.tsv")
    renamed = parse_corpora([str(path)])[0]
    assert prepare(renamed, tokenizer, tokenizer, Rules(), tmp_path, processes=1).folder in folders


@pytest.mark.parametrize("writes", [1, 7, 14])
def test_a_killed_preparation_leaves_no_folder_and_continues_from_its_whole_parts(
    writes, corpus, tokenizer, tmp_path, small_parts
):
    def prepare_until_killed():
        call, count = preparing.Tokenise.__call__, Counter()

        def deadly(self, batch):
            count["batches"] += 1
            if count["batches"] > writes:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, batch)

        preparing.Tokenise.__call__ = deadly
        prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path / "cache", processes=1)

    assert in_child(prepare_until_killed) == -signal.SIGKILL
    assert not list((tmp_path / "cache").glob("*/preparation.json"))
    tokenised = []
    call = preparing.Tokenise.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            preparing.Tokenise,
            "__call__",
            lambda self, batch: tokenised.append(len(batch)) or call(self, batch),
        )
        prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path / "cache", processes=1)
    assert rows_of(prepared) == expected(tokenizer)
    assert sum(tokenised) == 1000 - 250 * (writes // 5)


def test_a_preparation_that_is_killed_while_it_drops_duplicates_drops_no_other_pair(
    tokenizer, tmp_path, small_parts
):
    path = tmp_path / "pairs.tsv"
    pairs = [pair for pair in PAIRS[:500] for _ in range(2)]
    path.write_text("".join(f"{one}\t{two}\n" for one, two in pairs), encoding="utf-8")
    corpus, rules = parse_corpora([str(path)])[0], Rules(drop_duplicates="pairs")

    def prepare_until_killed():
        keep_rows, parts = preparing.keep_rows, []

        def deadly(part, kept):
            parts.append(part)
            if len(parts) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            keep_rows(part, kept)

        preparing.keep_rows = deadly
        prepare(corpus, tokenizer, tokenizer, rules, tmp_path / "cache", processes=1)

    assert in_child(prepare_until_killed) == -signal.SIGKILL
    prepared = prepare(corpus, tokenizer, tokenizer, rules, tmp_path / "cache", processes=1)
    assert rows_of(prepared) == expected(tokenizer, PAIRS[:500])
    assert prepared.dropped["duplicate"] == 500
    assert {path.suffix for path in prepared.folder.iterdir()} == {".arrow", ".json"}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "absent", "report", "version"])
def test_a_damaged_cache_is_named_and_prepared_again(damage, corpus, tokenizer, tmp_path):
    said = Said()
    prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1, say=said)
    assert not said
    data, report = prepared.files[0], prepared.folder / "preparation.json"
    content = data.read_bytes()
    match damage:
        case "truncated":
            data.write_bytes(content[:-100])
        case "flipped":
            data.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
        case "absent":
            data.unlink()
        case "report":
            report.write_text("[1, 2")
        case "version":
            report.write_text(json.dumps({**json.loads(report.read_text()), "version": 0}))
    prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1, say=said)
    assert len(said) == 1
    assert str(prepared.folder) in said[0]
    assert "preparing" in said[0]
    assert rows_of(prepared) == expected(tokenizer)


def test_two_runs_at_the_same_moment_prepare_once(corpus, tokenizer, tmp_path, monkeypatch):
    said, found, tokenised = Said(), [], []
    call = preparing.Tokenise.__call__
    started = threading.Event()

    def slow(self, batch):
        tokenised.append(len(batch))
        started.set()
        threading.Event().wait(1)
        return call(self, batch)

    monkeypatch.setattr(preparing.Tokenise, "__call__", slow)

    def run():
        found.append(
            prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1, say=said)
        )

    first, second = (threading.Thread(target=run) for _ in range(2))
    first.start()
    started.wait()
    second.start()
    first.join()
    second.join()
    assert found[0] == found[1]
    assert tokenised == [1000]
    assert said == ["Another process prepares these data: waiting for it."]


def test_a_file_that_changes_while_it_is_read_is_refused(corpus, tokenizer, tmp_path, monkeypatch):
    call = preparing.Tokenise.__call__

    def changing(self, batch):
        with open(corpus.shards[0][0], "a") as file:
            file.write("one\teins\n")
        return call(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(preparing.Tokenise, "__call__", changing)
        with pytest.raises(DataError, match=r"pairs\.tsv changed while it was read"):
            prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    assert prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1).read == 1001


def test_a_full_disk_names_the_room_and_leaves_no_folder(corpus, tokenizer, tmp_path):
    with (
        files_of_at_most(10_000),
        pytest.raises(OSError, match=r"could not be saved: .*\(\d+ MiB are free"),
    ):
        prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path / "cache", processes=1)
    assert not list((tmp_path / "cache").glob("*/preparation.json"))
    prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path / "cache", processes=1)
    assert rows_of(prepared) == expected(tokenizer)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_names_file_and_line_and_leaves_no_folder(
    processes, tokenizer, tmp_path, small_parts
):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{one}\t{two}\n" for one, two in PAIRS) + "no tab\n")
    corpus = parse_corpora([str(path)])[0]
    with pytest.raises(DataError, match=r"pairs\.tsv, line 1001: no tab"):
        prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=processes)
    assert not list(tmp_path.glob("*/preparation.json"))


def test_memory_of_a_mapped_corpus_is_given_back(corpus, tokenizer, tmp_path):
    prepared = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    data = MappedPairs.from_files(prepared.files, "name")
    released = []
    data._files.release = lambda: released.append(1)
    counts = [[len(row) for row in expected(tokenizer)[name]] for name in ("input_ids", "labels")]
    assert data.token_counts().T.tolist() == counts
    released.clear()
    without = data.remove_columns("length")  # as a trainer does
    rng = np.random.default_rng(0)
    want = expected(tokenizer)
    for _ in range(100):
        keys = rng.integers(0, 1000, 500).tolist()
        rows = without.__getitems__(keys)
        assert [row["labels"] for row in rows] == [want["labels"][key] for key in keys]
    assert len(released) == 100


def test_a_vocabulary_is_learned_once_and_from_a_sample_of_at_most_so_many_lines(
    corpus, tmp_path, monkeypatch
):
    settings = {"kind": "word", "vocab_size": 5000}
    whole, part, same = (
        train_vocabulary([corpus], settings, tmp_path / name, lines, seed=1)
        for name, lines in (("a", 10**7), ("a", 400), ("b", 400))
    )
    assert len(part) < len(whole)
    assert part.get_vocab() == same.get_vocab()
    lines = [text for pair in PAIRS for text in pair]
    direct = VaswaniTokenizer.train_from_iterator(lines, **settings, show_progress=False)
    assert whole.get_vocab() == direct.get_vocab()
    monkeypatch.setattr(Corpus, "pairs", None)
    again = train_vocabulary([corpus], settings, tmp_path / "a", 10**7, seed=1)
    assert again.get_vocab() == whole.get_vocab()


def test_a_complete_cache_serves_those_who_may_not_write_to_it(
    corpus, tokenizer, tmp_path, monkeypatch
):
    def refused(self, *args, **kwargs):
        raise PermissionError("Permission denied")

    settings = {"vocab_size": 400}
    learned = train_vocabulary([corpus], settings, tmp_path, 10**7, seed=1)
    prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    monkeypatch.setattr(FileLock, "acquire", refused)
    found = prepare(corpus, tokenizer, tokenizer, Rules(), tmp_path, processes=1)
    assert rows_of(found) == expected(tokenizer)
    again = train_vocabulary([corpus], settings, tmp_path, 10**7, seed=1)
    assert again.get_vocab() == learned.get_vocab()
    with pytest.raises(PermissionError):
        prepare(corpus, tokenizer, tokenizer, Rules(max_length=9), tmp_path, processes=1)
