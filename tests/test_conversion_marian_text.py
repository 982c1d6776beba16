"""Tokenizers from Marian's SentencePiece models, compared with transformers' tokenizer."""

import json
import math
import re
import unicodedata

import numpy as np
import pytest
from marian_folders import (
    FIXTURES,
    SOURCE_LINES,
    TARGET_LINES,
    model_proto,
    pieces,
    sentencepiece,
    their_model,
    trained,
)
from marian_formulas import SIZE
from tokenizers import normalizers
from transformers import AutoTokenizer
from transformers import MarianTokenizer as TheirTokenizer
from vaswani.conversion import marian
from vaswani.conversion import sentencepiece as converted_pieces
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.sentencepiece import SentencePiece

TEXTS = [
    "the cat sat on the mat",
    "  two   dogs\tran \n over the hill  ",
    "What is ﬁne? ＡＢＣ①, naïve … “quoted”",
    "",
    "   ",
    "a ▁ b",
    "It's vexing: < 1 > 2",
    "catcatcat matdog",
    "Überhügel 日本 x",
    ">>deu<< the cat",
    ">>deu<<the cat",
    ">>deu<<",
]


spms, vocabulary, write, warnings_of, batch = FIXTURES


@pytest.fixture(scope="module")
def both_tokenizers(spms, vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    theirs = TheirTokenizer.from_pretrained(folder)
    source, target = marian._their_tokenizers(folder)
    source.save_pretrained(folder / "out")
    return AutoTokenizer.from_pretrained(folder / "out"), target, theirs


@pytest.mark.parametrize("text", TEXTS)
def test_source_text_gets_the_ids_of_marian(both_tokenizers, text):
    ours, _, theirs = both_tokenizers
    assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("line", TARGET_LINES[:6])
def test_target_text_gets_the_ids_of_marian_and_comes_back(both_tokenizers, line):
    ours, target, theirs = both_tokenizers
    ids = theirs(text_target=line).input_ids
    assert target(line).input_ids == ids
    for tokenizer in (ours, target):
        assert tokenizer.decode(ids, skip_special_tokens=True) == line
    assert theirs.decode(ids, skip_special_tokens=True) == line


def test_random_text_gets_the_ids_of_marian(both_tokenizers, spms):
    """Random sequences of the characters of both languages: the model does not know all."""
    ours, _, theirs = both_tokenizers
    letters = sorted({letter for line in SOURCE_LINES + TARGET_LINES for letter in line})
    generator = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(generator.choice(letters, size=generator.integers(1, 40)))
        assert ours(text).input_ids == theirs(text).input_ids, text


def test_words_of_the_other_language_get_the_ids_of_marian(both_tokenizers):
    """vocab.json has pieces of both languages, each .spm file of one."""
    ours, target, theirs = both_tokenizers
    for line in TARGET_LINES[:6]:
        assert ours(f"the cat {line}").input_ids == theirs(f"the cat {line}").input_ids
    for line in SOURCE_LINES[:6]:
        assert target(line).input_ids == theirs(text_target=line).input_ids


def test_separate_accents_and_voicing_marks_are_composed(spms, tmp_path):
    """Text of any language can be decomposed. Files of macOS and some keyboards are."""
    lines = ["Tiếng Việt ữ ộ", "한국어 문장", "ガンダム パン", "ᾷ ṩ Ǖ", "naïve", "ｶﾞﾝﾀﾞﾑ ﾊﾟﾝ"]
    for number, spm in enumerate((trained(lines * 9), spms["source"])):
        path = tmp_path / f"{number}.spm"
        path.write_bytes(spm)
        normalize = normalizers.Sequence(SentencePiece.read(path).normalizers()).normalize_str
        theirs = sentencepiece.SentencePieceProcessor(model_proto=spm)
        for form in ("NFC", "NFD"):
            for line in lines if number == 0 else lines[:5]:
                text = unicodedata.normalize(form, line)
                assert normalize(text) == theirs.normalize(text), ascii(text)


def test_a_table_without_compositions_composes_nothing(tmp_path):
    (tmp_path / "own.tsv").write_text("78\t79\n", encoding="utf-8")  # x becomes y
    spm = trained(SOURCE_LINES, normalization_rule_tsv=str(tmp_path / "own.tsv"))
    (tmp_path / "own.spm").write_bytes(spm)
    steps = SentencePiece.read(tmp_path / "own.spm").normalizers()
    assert normalizers.Sequence(steps).normalize_str("xe\u0301") == "▁ye\u0301"


def test_special_tokens_in_a_text_are_text(both_tokenizers, spms, vocabulary):
    ours, _, _ = both_tokenizers
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    for text in ("a </s> b", "</s>", "x<pad>y", "<unk>"):
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == [vocabulary.get(piece, 1) for piece in processor.encode(text, out_type=str)]
        assert 0 not in ids
        assert SIZE - 1 not in ids


def test_byte_pairs_of_sentencepiece_are_cut_alike(tmp_path):
    spm = trained(SOURCE_LINES, model_type="bpe", vocab_size=80)
    names = ["</s>", "<unk>", *pieces(spm), "<pad>"]
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").write_bytes(spm)
    vocabulary = {name: number for number, name in enumerate(names)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    ours, _ = marian._their_tokenizers(tmp_path)
    theirs = TheirTokenizer.from_pretrained(tmp_path)
    for line in [*SOURCE_LINES[:6], "catcat matdog vexingly"]:
        assert ours(line).input_ids == theirs(line).input_ids


def test_what_the_tokenizers_library_cannot_do_is_named_at_once(tmp_path):
    model = model_proto().FromString(trained(SOURCE_LINES, model_type="bpe", vocab_size=80))
    model.trainer_spec.treat_whitespace_as_suffix = True
    model.normalizer_spec.escape_whitespaces = False
    model.denormalizer_spec.precompiled_charsmap = b"table"
    model.pieces[40].type, model.pieces[41].type = 4, 5
    path = tmp_path / "m.model"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError) as caught:
        converted_pieces.piece_backend(
            converted_pieces.SentencePiece.read(path), {"<unk>": 0}, ("<unk>",)
        )
    for name in (
        "treat_whitespace_as_suffix",
        "escape_whitespaces",
        "denormalization_rule_tsv",
        f"user_defined_symbols of type bpe, such as {model.pieces[40].piece!r}",
        "unused pieces of type bpe",
        "pieces without an id",
    ):
        assert name in str(caught.value)


def test_unknown_characters_become_bytes_where_the_model_has_them(tmp_path):
    spm = trained(SOURCE_LINES, byte_fallback=True, vocab_size=330)
    (tmp_path / "source.spm").write_bytes(spm)
    names = ["</s>", "<unk>", *pieces(spm), "<pad>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    ours = marian._tokenizer(tmp_path / "source.spm", vocabulary)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    for text in (SOURCE_LINES[0], "the 日 cat"):
        ids = [vocabulary[piece] for piece in processor.encode(text, out_type=str)]
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours.decode(ids) == text


def test_pieces_without_an_id_are_said(spms, vocabulary, tmp_path, warnings_of):
    (tmp_path / "source.spm").write_bytes(spms["source"])
    fewer = dict(vocabulary)
    lost = next(name for name in pieces(spms["source"]) if len(name) > 2)
    fewer["▁another"] = fewer.pop(lost)
    tokenizer = marian._tokenizer(tmp_path / "source.spm", fewer)
    assert re.search(rf"1 pieces .*{lost}", warnings_of[0])
    assert tokenizer.unk_token_id not in tokenizer(SOURCE_LINES[0]).input_ids


def test_other_tokenizers_are_refused(write, tmp_path):
    folder = write(their_model())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "<end>", "pad_token": "[PAD]"}))
    with pytest.raises(ConversionError, match=r"pad_token '\[PAD\]'.*eos_token '<end>'"):
        marian.load(folder)
    path.unlink()
    (folder / "source.spm").write_bytes(trained(SOURCE_LINES, model_type="char"))
    with pytest.raises(ConversionError, match=r"model_type char.*no_tokenizer"):
        marian.load(folder)
    whole = trained(SOURCE_LINES)
    model = model_proto().FromString(whole)
    model.ClearField("trainer_spec")
    broken = model_proto().FromString(whole)
    broken.pieces[5].score = math.nan
    table = model_proto().FromString(whole)
    table.normalizer_spec.precompiled_charsmap = b"\x10\0\0\0 no table"
    wrong = (b"\xff\xff nothing", b"", whole[:200])
    for content in (*wrong, *(one.SerializeToString() for one in (model, broken, table))):
        (folder / "source.spm").write_bytes(content)
        with pytest.raises(ConversionError, match="not a complete SentencePiece model"):
            marian.load(folder)
    (folder / "source.spm").unlink()
    with pytest.raises(ConversionError, match=r"source.spm.*no_tokenizer"):
        marian.load(folder)
