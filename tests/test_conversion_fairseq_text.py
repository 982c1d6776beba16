"""Conversion of fairseq's dictionaries and codes: words, byte pairs and sentencepiece."""

import io
import re
from argparse import Namespace

import pytest
import torch
from fairseq_models import (
    EOS,
    LEARNED,
    OPTIONS,
    PAD,
    SOURCE,
    TARGET,
    UNK,
    Fairseq,
    assert_same_logits,
    checkpoint,
    dictionary,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from vaswani.conversion import fairseq, fairseq_text, subword_nmt
from vaswani.conversion.errors import ConversionError
from vaswani.corpora.bpe_dropout import BpeDropout

WORDS = ["the", "hou@@", "se", "is", "@-@", ",", "w\u00e4", "@@", "<pad>x", "\u200b"]


def looked_up(line, words):
    """Return the ids of fairseq's Dictionary.encode_line, except for control symbols."""
    ids = {word: number for number, word in enumerate(words, start=4)}
    return [ids.get(word, UNK) for word in re.sub(r"\s+", " ", line).strip().split()] + [EOS]


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    words = [*WORDS, *(f"w{n}" for n in range(SOURCE - 4 - len(WORDS)))]
    network = Fairseq(OPTIONS | {"share_all_embeddings": True}, target=SOURCE)
    fairseq.convert(
        checkpoint(folder / "a.pt", network),
        folder / "out",
        source_dict=dictionary(folder / "dict.de.txt", words),
        remove_bpe=True,
    )
    assert not (folder / "out" / "target_tokenizer").exists()
    return words, AutoTokenizer.from_pretrained(folder / "out")


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from([*WORDS, "unseen", "The", "</w>", "\\", "\u00e9"]) | st.text(max_size=3)
    ),
    st.sampled_from([" ", "  ", "\t", "\u00a0", "\u3000", "\x1c", "\n", "\u2028"]),
)
def test_words_are_looked_up_as_in_fairseqs_dictionary(word_tokenizer, parts, space):
    words, tokenizer = word_tokenizer
    line = space.join(parts)
    assert tokenizer(line)["input_ids"] == looked_up(line, words)
    assert tokenizer(text_target=line)["input_ids"] == looked_up(line, words)


def test_words_end_at_every_space_that_python_knows_and_at_nothing_else(word_tokenizer):
    words, tokenizer = word_tokenizer
    lines = [f"the{chr(code)}is" for code in range(0x3100)]
    assert tokenizer(lines)["input_ids"] == [looked_up(line, words) for line in lines]


def test_control_symbols_written_in_a_text_are_unknown_words(word_tokenizer):
    _, tokenizer = word_tokenizer
    ids = tokenizer("<s> the</s> <pad>\u00a0</s>\t<unk> <pad>x the")["input_ids"]
    assert ids == [UNK, UNK, UNK, UNK, UNK, 12, 4, EOS]


def test_decoding_joins_words_and_what_bpe_separated(word_tokenizer):
    words, tokenizer = word_tokenizer
    text = "hou@@ hou@@ se is the @-@ the ,"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode([0, *ids, PAD], skip_special_tokens=True) == "houhouse is the @-@ the ,"
    assert tokenizer.decode(ids[:1], skip_special_tokens=True) == "hou"
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        words[0],
    ]


def test_an_unknown_word_is_printed_as_by_fairseq_or_skipped_and_joins_nothing(word_tokenizer):
    _, tokenizer = word_tokenizer
    for words, printed, skipped in (
        ("hou@@ <unk> se", "hou<unk> se", "hou se"),
        ("hou@@ hou@@ <unk> <unk> se the", "houhou<unk> <unk> se the", "houhou se the"),
        ("<unk> hou@@ se", "<unk> house", "house"),
        ("hou@@ <unk>", "hou<unk>", "hou"),
        ("<unk>", "<unk>", ""),
        ("", "", ""),
    ):
        assert (words + " ").replace("@@ ", "").rstrip() == printed  # fairseq's rule
        ids = [*tokenizer.convert_tokens_to_ids(words.split()), PAD]
        assert tokenizer.decode(ids[:-1]) == printed
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
        assert tokenizer.batch_decode(torch.tensor([ids]), skip_special_tokens=True) == [skipped]
    assert tokenizer.decode(UNK, skip_special_tokens=True) == ""


def test_two_dictionaries_make_two_tokenizers(tmp_path):
    source = dictionary(tmp_path / "dict.de.txt", [f"d{n}" for n in range(SOURCE - 4)])
    target = dictionary(tmp_path / "dict.en.txt", [f"e{n}" for n in range(TARGET - 4)])
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS))
    fairseq.convert(path, tmp_path / "out", source_dict=source, target_dict=target)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert tokenizer("d3 e3")["input_ids"] == [7, UNK, EOS]
    assert own("d3 e3 e25")["input_ids"] == [UNK, 7, 29, EOS]
    assert (len(tokenizer), len(own)) == (SOURCE, TARGET)
    with pytest.raises(ConversionError, match=r"dict\.de\.txt makes 24 .* target embedding has 30"):
        fairseq.load(path, source_dict=source)
    with pytest.raises(ConversionError, match=r"24 .* target.*30 .* source|30 .* source.*24"):
        fairseq.load(path, source_dict=target, target_dict=source)


def test_shared_embeddings_need_one_dictionary(tmp_path):
    network = Fairseq(OPTIONS | {"share_all_embeddings": True}, target=SOURCE)
    path = checkpoint(tmp_path / "a.pt", network)
    names = [f"w{n}" for n in range(SOURCE - 4)]
    left, right = (
        dictionary(tmp_path / f"{n}.txt", words) for n, words in enumerate((names, names[::-1]))
    )
    with pytest.raises(ConversionError, match="differ, but share their embeddings"):
        fairseq.load(path, source_dict=left, target_dict=right)
    assert fairseq.load(path, source_dict=left, target_dict=left).target_tokenizer is None
    assert fairseq.load(path, target_dict=left).tokenizer is not None


def test_one_dictionary_is_not_taken_for_both_sides_of_separate_embeddings(tmp_path):
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS, target=SOURCE))
    file = dictionary(tmp_path / "dict.de.txt", [f"w{n}" for n in range(SOURCE - 4)])
    for files in ({"source_dict": file}, {"target_dict": file}):
        with pytest.raises(
            ConversionError, match=r"dict\.de\.txt alone .* a joint dictionary as both"
        ):
            fairseq.load(path, **files)
    assert fairseq.load(path, source_dict=file, target_dict=file).target_tokenizer is None


def test_an_odd_width_is_refused_in_a_sentence_unless_positions_are_learned(tmp_path):
    sizes = {"encoder_embed_dim": 15, "decoder_embed_dim": 15}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5}
    network = Fairseq(OPTIONS | LEARNED | sizes)
    assert_same_logits(network, fairseq.load(checkpoint(tmp_path / "a.pt", network)).model)
    network.options.update(encoder_learned_pos=False, decoder_learned_pos=False)
    with pytest.raises(ConversionError) as error:
        fairseq.load(checkpoint(tmp_path / "a.pt", network))
    assert "--encoder-embed-dim 15 (odd, without learned positions)" in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_contradict_each_other_are_one_sentence(tmp_path):
    path = checkpoint(
        tmp_path / "a.pt", Fairseq(OPTIONS), Namespace(**OPTIONS | {"encoder_attention_heads": 3})
    )
    with pytest.raises(ConversionError, match=r"make no model: d_model \(16\) must be a multiple"):
        fairseq.load(path)


def test_lines_of_a_dictionary_may_end_as_on_other_systems(tmp_path):
    (tmp_path / "a").write_bytes(b"one 1\r\ntwo 2\r\n")
    assert fairseq_text.read_dictionary(tmp_path / "a")[4:] == ["one", "two"]


def test_a_later_line_may_replace_an_earlier_entry(tmp_path):
    path = dictionary(tmp_path / "a", ["one", "two"], "one 7 #fairseq:overwrite\nthree 1\n")
    assert fairseq_text.read_dictionary(path)[4:] == ["one", "two", "one", "three"]
    tokenizer = fairseq_text.read_vocabulary(path, None, None, False).tokenizer()
    assert tokenizer("one two three")["input_ids"] == [6, 5, 7, EOS]
    assert len(tokenizer) == 8


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("one 5\n", r"line 3: there is an entry 'one'"),
        ("</s> 5 #fairseq:overwrite\n", "line 3: there is an entry '</s>'"),
        ("word\n", r"line 3 is not an entry with its count: 'word'"),
        ("word five\n", "line 3"),
        ("\n", "line 3"),
    ],
)
def test_a_dictionary_that_fairseq_would_not_read_is_refused(tmp_path, extra, message):
    path = dictionary(tmp_path / "dict.txt", ["one", "two"], extra)
    with pytest.raises(ConversionError, match=message):
        fairseq_text.read_dictionary(path)


def test_files_of_text_that_are_missing_or_damaged_are_named(tmp_path):
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS))
    (tmp_path / "latin").write_bytes(b"\xe4 1\n")
    for name in ("nothing", "latin"):
        with pytest.raises(ConversionError, match=f"{name} cannot be read"):
            fairseq.load(path, source_dict=tmp_path / name)
    with pytest.raises(ConversionError, match="give source_dict"):
        fairseq.load(path, bpe_codes=tmp_path / "latin")


# Byte-pair encoding


def learned_codes(lines, merges):
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe", reason="learns the codes")
    codes = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO("\n".join(lines)), codes, merges)
    return codes.getvalue()


def old_codes(codes):
    """Return codes in subword-nmt's format until 2017, where the end of a word is a symbol."""
    pairs = []
    for line in codes.strip().split("\n")[1:]:
        left, right = line.split(" ")
        if right.endswith("</w>") and right != "</w>":
            pairs.append(f"{right[:-4]} </w>")
        pairs.append(f"{left} {right}")
    return "\n".join(dict.fromkeys(pairs))


def words_over(letters, count, seed, longest=9):
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (), generator=generator))

    return [
        "".join(letters[draw(len(letters))] for _ in range(1 + draw(longest))) for _ in range(count)
    ]


def pair_tokenizer(tmp_path, codes, keep=lambda entry: True, corpus=()):
    """Return the tokenizer of codes and a dictionary, subword-nmt's segmenter, the dictionary."""
    apply_bpe = pytest.importorskip("subword_nmt.apply_bpe", reason="is compared with")
    segmenter = apply_bpe.BPE(io.StringIO(codes))
    entries = sorted({e for e in segmenter.process_line(" ".join(corpus)).split() if keep(e)})
    (tmp_path / "codes").write_text(codes, encoding="utf-8")
    vocabulary = fairseq_text.read_vocabulary(
        dictionary(tmp_path / "dict", entries), tmp_path / "codes", None, False
    )
    vocabulary.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), segmenter, entries


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("letters", ["ab", "abcde", "a\u00e9\u6f22</w>"])
def test_words_are_cut_as_by_subword_nmt_and_only_known_ids_come_out(tmp_path, letters, old):
    corpus = words_over(letters, 400, seed=1)
    codes = learned_codes([" ".join(corpus)], 60)
    codes = old_codes(codes) if old else codes
    codes += "\n" * old + codes.split("\n")[not old]  # repeat a merge, which has no effect
    hidden = set(words_over(letters, 30, seed=3, longest=3))
    tokenizer, segmenter, entries = pair_tokenizer(
        tmp_path, codes, lambda entry: entry.removesuffix("@@") not in hidden, corpus
    )
    assert len(tokenizer) > len(entries) + 4  # merges have results that the dictionary lacks
    lines = [" ".join(words_over(letters + "x\U0001f469", 6, seed=n)) for n in range(5, 155)]
    lines += [*letters, "", " ", "  a  ab ", "a" * 50, "ab" * 40]
    unknown = 0
    for line, ids in zip(lines, tokenizer(lines)["input_ids"], strict=True):
        pieces = segmenter.process_line(line).split()
        assert ids == looked_up(" ".join(pieces), entries)
        unknown += ids.count(UNK)
        known = [piece if piece in entries else "<unk>" for piece in pieces]
        joined = (" ".join(known) + " ").replace("@@ ", "").rstrip()
        assert tokenizer.decode(ids[:-1]) == joined
        skipped = " ".join(joined.replace("<unk>", "").split())
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
    assert unknown > 100


@pytest.mark.parametrize("old", [False, True])
def test_tokens_that_are_added_later_are_words_of_their_own(tmp_path, old):
    corpus = words_over("abc", 100, seed=2)
    codes = learned_codes([" ".join(corpus)], 20)
    tokenizer, *_ = pair_tokenizer(tmp_path, old_codes(codes) if old else codes, corpus=corpus)
    tokenizer.add_tokens(["<num>"])
    text = f"{corpus[0]} <num> {corpus[1]}"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_oldest_codes_have_no_dropout(tmp_path):
    corpus = words_over("abc", 100, seed=2)
    codes = old_codes(learned_codes([" ".join(corpus)], 20))
    tokenizer, *_ = pair_tokenizer(tmp_path, codes, corpus=corpus)
    with pytest.raises(ValueError, match="does not support the oldest codes of subword-nmt"):
        BpeDropout(tokenizer, 0.1)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_learned_codes_cut_any_text_as_subword_nmt_does(tmp_path_factory, data):
    word = st.text(st.sampled_from("abc\u00e9-"), min_size=1, max_size=8)
    corpus = data.draw(st.lists(word, min_size=5, max_size=40))
    corpus += ["ab", "abc"]
    codes = learned_codes([" ".join(corpus * 2)], data.draw(st.integers(1, 30)))
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer, segmenter, entries = pair_tokenizer(folder, codes, corpus=corpus)
    line = " ".join(data.draw(st.lists(word)))
    expected = looked_up(segmenter.process_line(line), entries)
    assert tokenizer(line)["input_ids"] == expected


def test_a_vocabulary_learned_anew_knows_all_of_its_ids(tmp_path):
    corpus = words_over("abc", 100, seed=2)
    codes = learned_codes([" ".join(corpus)], 20)
    tokenizer, _, entries = pair_tokenizer(tmp_path, codes, lambda e: len(e) > 4, corpus)
    assert len(tokenizer) > len(entries) + 4
    new = tokenizer.train_new_from_iterator([" ".join(corpus)] * 9, 200)
    assert UNK not in new(" ".join(corpus))["input_ids"]


def test_codes_of_fastbpe_are_those_of_subword_nmt_with_counts(tmp_path):
    corpus = words_over("abcd", 200, seed=2)
    codes = learned_codes([" ".join(corpus)], 30)
    lines = codes.strip().split("\n")[1:]
    (tmp_path / "fast").write_text("\n".join(f"{line} {99 - n}" for n, line in enumerate(lines)))
    (tmp_path / "subword").write_text(codes)
    assert subword_nmt.read_codes(tmp_path / "fast") == subword_nmt.read_codes(tmp_path / "subword")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ("#version: 0.3\na b\n", "unknown version '0.3'"),
        ("#version: 0.2\na b c\n", "'a b c', which is not a pair"),
        ("#version: 0.2\na\n", "'a', which is not a pair"),
        ("", "'', which is not a pair"),
        # "abc" is merged before the second pair that produces it
        ("#version: 0.2\na b\nab c\nabc a\nb c\na bc\n", "the code a bc"),
    ],
)
def test_codes_that_cannot_be_followed_exactly_are_refused(tmp_path, codes, message):
    (tmp_path / "codes").write_text(codes)
    with pytest.raises(ConversionError, match=message):
        fairseq_text.read_vocabulary(
            dictionary(tmp_path / "dict", ["a", "b"]), tmp_path / "codes", None, False
        ).tokenizer()


def test_codes_and_dictionaries_of_both_sides_end_in_two_tokenizers(tmp_path):
    codes = "#version: 0.2\na b\nab a\nc d</w>\n"
    (tmp_path / "codes").write_text(codes)
    # The merge through "ab" is in neither dictionary.
    source = ["aba@@", "a@@", "a", "b@@", "b", "cd", "c@@", "d"]
    target = ["cd", *source[:-3]]
    sizes = [len(source) + 4 + 12, len(target) + 4 + 24]
    files = [
        dictionary(tmp_path / f"{n}", [*words, *(f"w{i}" for i in range(size - 4 - len(words)))])
        for n, (words, size) in enumerate(zip((source, target), sizes, strict=True))
    ]
    network = Fairseq(OPTIONS, *sizes)
    fairseq.convert(
        checkpoint(tmp_path / "a.pt", network),
        tmp_path / "out",
        source_dict=files[0],
        target_dict=files[1],
        bpe_codes=tmp_path / "codes",
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    text = "abab cd ababa abc"
    # aba@@ b / cd / ab@@ ab@@ a / ab@@ c
    assert tokenizer(text)["input_ids"] == [4, 8, 9, UNK, UNK, 6, UNK, UNK, EOS]
    assert own(text)["input_ids"] == [5, 9, 4, UNK, UNK, 7, UNK, UNK, EOS]
    assert tokenizer.decode([4, 8, 9, EOS], skip_special_tokens=True) == "abab cd"
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    model(
        **tokenizer([text, "a"], padding=True, return_tensors="pt"),
        labels=torch.tensor([own(text)["input_ids"]] * 2),
    )


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_text_is_cut_by_sentencepiece_and_looked_up(tmp_path, kind):
    reason = "cuts the text"
    sentencepiece = pytest.importorskip("sentencepiece", reason=reason)
    pytest.importorskip("google.protobuf", reason="reads SentencePiece's models")
    lines = [" ".join(words_over("abcdefg", 6, seed=n)) for n in range(200)]
    (tmp_path / "text").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        model_type=kind,
        minloglevel=2,
    )
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [cutter.id_to_piece(n) for n in range(3, 60)]
    words = [*pieces[::2], "madeupword0000"]
    vocabulary = fairseq_text.read_vocabulary(
        dictionary(tmp_path / "dict", words), None, tmp_path / "m.model", False
    )
    vocabulary.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for line in [*lines[:50], "", "  a  b ", "aXb XY a"]:
        expected = looked_up(" ".join(cutter.encode(line, out_type=str)), words)
        assert tokenizer(line)["input_ids"] == expected
    for ids in tokenizer(["<s>", "a<pad>", "</s> b"])["input_ids"]:
        assert not {0, PAD, EOS} & set(ids[:-1])


def test_codes_of_another_dictionary_are_refused_or_warned_of(tmp_path):
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nt h\nth e</w>\nh o\n")
    fits = dictionary(tmp_path / "fits", ["the", "ho@@", "th@@", "madeupword0000", "x"])
    numbers = dictionary(tmp_path / "numbers", ["13", "464", "x", "madeupword0000"])
    half = dictionary(tmp_path / "half", ["the", "a@@", "wort", "haus@@"])
    log = logging.get_logger("vaswani.conversion.fairseq_text")
    with CaptureLogger(log) as captured:
        fairseq_text.read_vocabulary(fits, codes, None, False)
    assert not captured.out
    with pytest.raises(ConversionError, match=r"2 of 2 entries, such as '13', of .*numbers cannot"):
        fairseq_text.read_vocabulary(numbers, codes, None, False)
    with CaptureLogger(log) as captured:
        fairseq_text.read_vocabulary(half, codes, None, False)
    assert "2 of 3 entries, such as 'wort', of" in captured.out


def test_entries_that_are_not_pieces_leave_the_text_as_sentencepiece_cuts_it(tmp_path):
    """A dictionary of two languages has entries of the other one."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="cuts the text")
    pytest.importorskip("google.protobuf", reason="reads SentencePiece's models")
    lines = [" ".join(words_over("abcdefg", 6, seed=n)) for n in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        model_type="unigram",
        control_symbols=["<ab>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [cutter.id_to_piece(n) for n in range(3, 60)]
    words = [*pieces, "XYZ", "aXb", "\u2581Y", "X", "ZX", "aZ"]
    vocabulary = fairseq_text.read_vocabulary(
        dictionary(tmp_path / "dict", words), None, tmp_path / "m.model", False
    )
    tokenizer = vocabulary.tokenizer()
    texts = ["aXb XYZ a", "XYZX", "aXYZb", "Y aZ", "ZX X", "a<ab>c", "ab\u00a0cd\tef", "  ab  c"]
    texts += ["a\t\tb", "ab\u00a0\u00a0c", "\u6f22\u3000\u5b57 a", "XY\tZ b"]
    for text in texts:
        expected = looked_up(" ".join(cutter.encode(text, out_type=str)), words)
        assert tokenizer(text)["input_ids"] == expected, text
    for text in ("  ab  c", "ab", "  "):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokens_beyond_the_dictionary_have_the_id_of_the_unknown_word(tmp_path):
    text = "lower lowest newer wider"
    codes = learned_codes([text] * 9, 12)
    tokenizer, *_ = pair_tokenizer(tmp_path, codes, lambda entry: len(entry) < 5, [text])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids
    assert tokenizer.unk_token_id in ids
