"""Reading pairs: equal results for all forms of data, and errors that name file and line."""

import gzip
import json
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from num2words import num2words
from vaswani.corpora import reading
from vaswani.corpora.corpus import Corpus, parse_corpora
from vaswani.corpora.reading import DataError, read_lines, read_pairs

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
TINY = ["--vocab-size", "340", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
TINY += ["encoder_attention_heads=4", "decoder_attention_heads=4"]
TINY += ["encoder_ffn_dim=64", "decoder_ffn_dim=64"]


@pytest.fixture
def pairs():
    return [(num2words(n), num2words(n, lang="de")) for n in range(100, 180)]


@pytest.fixture
def parallel_files(pairs, tmp_path):
    """Two parallel files, the target compressed."""
    source, target = tmp_path / "train.en", tmp_path / "train.de.gz"
    source.write_text("".join(f"{english}\n" for english, _ in pairs), encoding="utf-8")
    with gzip.open(target, "wt", encoding="utf-8") as file:
        file.writelines(f"{german}\n" for _, german in pairs)
    return [str(source), str(target)]


def test_pairs_are_the_same_from_every_form_of_data(pairs, parallel_files, tmp_path):
    tsv, jsonl = tmp_path / "pairs.tsv", tmp_path / "pairs.jsonl.gz"
    tsv.write_text("".join(f"{english}\t{german}\n" for english, german in pairs), encoding="utf-8")
    rows = [json.dumps({"en": english, "de": german}) + "\n" for english, german in pairs]
    with gzip.open(jsonl, "wt", encoding="utf-8") as file:
        file.writelines(rows)
    data_set = tmp_path / "numbers"
    data_set.mkdir()
    nested = [json.dumps({"translation": json.loads(row)}) + "\n" for row in rows]
    (data_set / "train.jsonl").write_text("".join(nested), encoding="utf-8")
    forms = (parallel_files, [str(tsv)], [str(jsonl)], [f"{data_set}:train"], [str(data_set)])
    for data in forms:
        assert read_pairs(data, ("en", "de"), "train") == pairs


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"one\nzwei\xff\n", "line 2: not utf-8"),
        (b"", "is empty"),
        (b"no tab here\n", "line 1: no tab"),
    ],
)
def test_unreadable_tsv_is_refused_by_file_and_line(tmp_path, content, complaint):
    path = tmp_path / "bad.tsv"
    path.write_bytes(content if b"tab" in content else content.replace(b"\n", b"\t\n"))
    with pytest.raises(DataError) as error:
        read_pairs([str(path)], ("source", "target"), "train")
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


def test_blank_pairs_of_a_tsv_file_keep_their_lines(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\n\t\n \t \n\nc\td\n")
    pairs = [("a", "b"), ("", ""), (" ", " "), ("c", "d")]
    assert read_pairs([str(path)], ("source", "target"), "test") == pairs


@pytest.mark.parametrize("ending", ["bz2", "xz"])
def test_other_compressions_are_refused_by_the_name(tmp_path, ending):
    names = [str(tmp_path / f"a.{language}.{ending}") for language in ("en", "de")]
    with pytest.raises(DataError, match=rf"a\.en\.{ending}: this compression is not read"):
        read_pairs(names, ("source", "target"), "train")


@pytest.mark.parametrize("names", [["a.csv"], ["a.csv.gz"], ["a.csv", "b.csv"]])
def test_csv_files_are_refused_with_the_way_out(names):
    for read in (lambda: read_pairs(names, ("en", "de"), "train"), lambda: parse_corpora(names)):
        with pytest.raises(DataError, match=r"a\.csv.* are read from a folder"):
            read()


def test_a_long_record_is_cut_in_its_error(tmp_path):
    path = tmp_path / "pairs.jsonl"
    for line in (json.dumps([{"en": "one"}] * 10_000), json.dumps({"en": ["one"] * 10_000})):
        path.write_text(f"{line}\n")
        with pytest.raises(DataError, match=r"not an array|not text") as error:
            read_pairs([str(path)], ("en", "en"), "train")
        assert len(str(error.value)) < 400


def test_parallel_files_of_unequal_length_are_refused_with_both_lengths(tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_text("a\n")
    long.write_text("a\nb\nc\n")
    with pytest.raises(DataError, match=r"1 lines.*3.*line 2 has no partner"):
        read_pairs([str(short), str(long)], ("source", "target"), "train")


def test_columns_of_the_record_itself_come_before_those_of_its_translation(tmp_path):
    path = tmp_path / "pairs.jsonl"
    record = {"translation": {"en": "one", "de": "eins"}, "source": "two", "target": "zwei"}
    path.write_text(json.dumps(record) + "\n")
    assert read_pairs([str(path)], ("source", "target"), "train") == [("two", "zwei")]
    assert read_pairs([str(path)], ("en", "de"), "train") == [("one", "eins")]


def test_missing_columns_and_files_are_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "one", "de": "eins"}\n{"en": "two"}\n')
    with pytest.raises(DataError, match="line 2 has no 'de' but 'en'"):
        read_pairs([str(path)], ("en", "de"), "train")
    with pytest.raises(DataError, match=r"No such file: absent\.tsv"):
        read_pairs(["absent.tsv"], ("en", "de"), "train")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ('{"en": "two", "de": "zw\\ud800i"}', r"line 2: 'de' holds '\\ud800' as character 3, half"),
        ('{"en": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON .* each line must be an object"),
    ],
    ids=["half a character", "endless number", "endless nesting"],
)
def test_records_that_are_no_text_are_refused_by_file_and_line(record, complaint, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "one", "de": "eins"}\n' + record + "\n")
    with pytest.raises(DataError, match=rf"pairs\.jsonl, {complaint}"):
        read_pairs([str(path)], ("en", "de"), "train")


def test_a_data_set_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"en": "one", "de": "eins"}\n{"en": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"no data set that can be loaded: .*surrogate.*row 1"):
        read_pairs([str(tmp_path)], ("en", "de"), "train")


def test_a_data_set_with_a_script_is_refused_with_a_sentence(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found set.py")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"can be loaded: Dataset scripts are no longer supported"):
        read_pairs([str(tmp_path)], ("en", "de"), "train")


def test_lines_are_read_without_marks_and_ends(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfseven\r\nthree\rhundred\n")
    assert list(read_lines(str(path))) == ["seven", "three\rhundred"]
    path.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(DataError, match=r"in\.txt, line 2: not utf-8"):
        list(read_lines(str(path)))
    damaged = tmp_path / "in.txt.gz"
    damaged.write_bytes(gzip.compress(b"one\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"in\.txt\.gz is damaged"):
        list(read_lines(str(damaged)))


def test_small_data_sets_stay_in_files_so_that_their_content_tells_them_apart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 10**9)
    for name, word in (("one", "eins"), ("two", "zwei")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(f'{{"en": "x", "de": "{word}"}}\n')
    contents = {Corpus(((str(tmp_path / name),),)).content() for name in ("one", "two")}
    assert len(contents) == 2


@pytest.mark.parametrize(
    ("name", "folder"), [("opus100", "opus100"), ("user/MySet", "user___my_set")]
)
def test_a_data_set_in_the_cache_is_read_without_the_hub(monkeypatch, tmp_path, name, folder):
    cached = datasets.Dataset.from_list([{"en": "one", "de": "eins"}])
    monkeypatch.setattr(reading, "check_path", Mock(side_effect=FileNotFoundError("no such set")))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: cached)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match="no such set"):
        read_pairs([name], ("en", "de"), "train")
    (tmp_path / folder).mkdir()
    assert read_pairs([name], ("en", "de"), "train") == [("one", "eins")]
