"""The tokenizer: decoding, special tokens, vocabularies, files and errors (section 5.1)."""

import gzip
import json
import pickle
import re
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer
from transformers.testing_utils import CaptureLogger
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils import logging
from vaswani.corpora.encoding import TextEncoder
from vaswani.tokenization.kinds_vaswani import KINDS, SMILES_PATTERN, SUBWORD_KINDS
from vaswani.tokenization.tokenization_vaswani import VaswaniTokenizer

import vaswani  # noqa: F401  (registers the tokenizer with AutoTokenizer)

PAD, UNK, EOS = 0, 1, 2
SPECIAL_WORDS = ["</s>", "<pad>", "<unk>", "\\</s>", "\\\\<pad>", "<0x41>", "▁", "▂", "▂1"]
LINES = [
    "Das ist ein Haus , und das ist keine Maus .",
    "this is a house , and this is not a mouse .",
    "two  spaces\tand a tab",
    # Byte pairs would learn these strings as tokens, because they occur often.
    *(["</s> <pad> <unk> </s> \\</s> \\\\<pad> \\</s> <0x41> <0x41>"] * 20),
    *(["▁ ▂ ▂1 ▁▁ x</s>y"] * 5),
]
REACTIONS = [
    "CC(=O)Cl.OCC>>CC(=O)OCC",
    "[Na+].[Cl-].c1ccccc1Br",
    "C[C@H](N)C(=O)O",
    "F/C=C\\I",
    "C%12CC%12",
]
# Texts that look alike but differ in form, or that may break a decoder, a regex or a file.
NASTY = [
    "",
    " ",
    "   ",
    " leading and trailing ",
    "a  b   c",
    "\t\n\r\n\x0b\x0c\x85\u2028",
    "\x00\x01\x1b\x7f",
    "\u00a0\u3000\u200b\ufeff",
    "▁",
    "▁a ▁ a▁",
    "▂",
    "▂1",
    "▂2▁▂",
    "e\u0301 é",
    "\u0301",
    "👩‍👩‍👧 🇩🇪",
    "</s>",
    "a</s>b </s>",
    "<pad><unk>",
    "<0x41>",
    "<0xE2><0x96><0x81>",
    "<0x+A>",
    "<<0x41>>",
    "\\</s>",
    "\ufffd\uffff\U0010ffff",
    "中文",
]


def train(kind="bpe", lines=LINES, vocab_size=600, **options):
    return VaswaniTokenizer.train_from_iterator(
        lines, kind=kind, vocab_size=vocab_size, show_progress=False, **options
    )


def state(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())


def tokenizer_of(kind, options):
    return (AFTER if options else TOKENIZERS)[kind]


def restored(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


TOKENIZERS = {kind: train(kind) for kind in KINDS if kind != "regex"}
TOKENIZERS["regex"] = train("regex", lines=[*LINES, *REACTIONS], pattern=r"<[^>]*>|\w+|\s|[^\w\s]")
BPE = TOKENIZERS["bpe"]
AFTER = {kind: train(kind, space_after=True) for kind in SUBWORD_KINDS}
SMILES = train("regex", lines=REACTIONS)
VARIANTS = [(kind, {}) for kind in KINDS] + [(k, {"space_after": True}) for k in SUBWORD_KINDS]

CHARACTERS = "".join(sorted(set("".join(LINES))))
WORDS = sorted(set(" ".join(LINES).split()))
SMILES_TOKENS = sorted(
    {
        token
        for line in REACTIONS
        for token, _ in Split(Regex(SMILES_PATTERN), "isolated").pre_tokenize_str(line)
    }
)

any_text = st.text(st.characters(exclude_categories=["Cs"]))
tricky_text = st.lists(st.sampled_from([*NASTY, *SPECIAL_WORDS, " ", "1", "a"])).map("".join)
known_text = st.text(CHARACTERS)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_variant = pytest.mark.parametrize(("kind", "options"), VARIANTS)


# Decoding


@settings(max_examples=300, deadline=None)
@given(any_text | tricky_text)
def test_bpe_restores_any_text_exactly(text):
    assert restored(BPE, text) == restored(AFTER["bpe"], text) == text


@pytest.mark.parametrize("text", NASTY)
def test_bpe_restores_nasty_text_exactly_and_never_says_unknown(text):
    for tokenizer in (BPE, AFTER["bpe"]):
        assert restored(tokenizer, text) == text
        assert UNK not in tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [variant for variant in VARIANTS if variant[0] in ("wordpiece", "unigram", "char")],
)
@settings(max_examples=100, deadline=None)
@given(known_text | st.lists(st.sampled_from([*SPECIAL_WORDS, " ", "a"])).map("".join))
@example("</s>")
@example("  ▁▂1 ▂ <pad>\t")
@example("s" * 300)
def test_kinds_of_known_characters_restore_text_of_them_exactly(kind, options, text):
    tokenizer = tokenizer_of(kind, options)
    assert restored(tokenizer, text) == text
    assert UNK not in tokenizer(text)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(WORDS)), st.sampled_from([" ", "  ", "\t", "\n", " \u3000"]))
@example(SPECIAL_WORDS, " ")
def test_word_restores_known_words_with_white_space_collapsed(words, gap):
    text = gap + gap.join(words) + gap
    assert restored(TOKENIZERS["word"], text) == " ".join(words)
    assert len(TOKENIZERS["word"](text)["input_ids"]) == len(words) + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(SMILES_TOKENS)).map("".join))
@example(REACTIONS[0])
def test_regex_restores_text_of_known_tokens_exactly(text):
    ids = SMILES(text)["input_ids"]
    # Two neighbouring tokens may match as one unseen token: "C" and "l", ">" and ">".
    if UNK not in ids:
        assert SMILES.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["</s>", "<pad>", "house", " ", "\\", "<0x41>"])).map("".join))
def test_regex_restores_special_strings_that_its_pattern_matches(text):
    if UNK not in TOKENIZERS["regex"](text)["input_ids"]:
        assert restored(TOKENIZERS["regex"], text) == text


def test_regex_tokens_are_the_matches_by_default_the_atoms_of_smiles():
    tokens = SMILES.tokenize("[Na+].CC(=O)Cl>>Brc1cc1")
    assert tokens == [
        *("[Na+]", ".", "C", "C", "(", "=", "O", ")", "Cl", ">>"),
        *("Br", "c", "1", "c", "c", "1"),
    ]


def test_regex_keeps_what_lies_between_the_matches():
    tokenizer = train("regex", lines=["a1bb22"], pattern=r"\d+")
    assert tokenizer.tokenize("a1bb22a") == ["a", "1", "bb", "22", "a"]


def test_char_and_word_serve_graphemes_and_phones():
    graphemes, phones = train("char", lines=["cat", "tack"]), train("word", lines=["k ae t"])
    assert graphemes.tokenize("act") == ["a", "c", "t"]
    assert phones.tokenize("t ae k") == ["t", "ae", "k"]
    assert len(phones) == 3 + 3


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "word", "char", "regex"])
def test_unseen_symbols_become_unk_in_kinds_without_bytes(kind):
    assert UNK in TOKENIZERS[kind]("中")["input_ids"]


def test_nothing_is_normalised_but_the_white_space_of_word():
    composed, decomposed = "é", "e\u0301"
    tokenizer = train("char", lines=[composed, decomposed])
    assert restored(tokenizer, composed) == composed
    assert restored(tokenizer, decomposed) == decomposed


# Special tokens


@every_kind
def test_special_tokens_have_the_first_ids(kind):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<unk>", "</s>"]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.bos_token is None


@every_kind
@settings(max_examples=50, deadline=None)
@given(any_text | tricky_text)
@example("</s>")
@example("house </s> <pad> </s>")
def test_eos_comes_exactly_once_and_last_on_both_sides(kind, text):
    tokenizer = TOKENIZERS[kind]
    both = tokenizer(text, text_target=text)
    for ids in (both["input_ids"], both["labels"], tokenizer.encode(text)):
        assert ids.index(EOS) == len(ids) - 1
        assert PAD not in ids
        assert all(0 <= token < len(tokenizer) for token in ids)


def test_a_pair_ends_twice():
    ids = BPE("house", "mouse")["input_ids"]
    assert ids == BPE("house")["input_ids"] + BPE("mouse")["input_ids"]


def test_special_strings_can_be_asked_for_as_control_tokens():
    assert BPE("</s>", split_special_tokens=False)["input_ids"].count(EOS) == 2
    assert BPE("</s>")["input_ids"].count(EOS) == 1


@every_variant
def test_no_learned_token_can_decode_as_a_byte_or_a_special_token(kind, options):
    specials = {"<pad>", "<unk>", "</s>"}
    for text in ["</s>", "<pad>", "<unk>", "x</s>y </s>", "<0x41>"]:
        tokens = tokenizer_of(kind, options).tokenize(text)
        assert not specials & set(tokens) - {"<unk>"}
        if kind == "bpe":
            assert "<0x41>" not in tokens


@pytest.mark.parametrize("space_after", [False, True])
def test_long_words_of_wordpiece_take_little_time_and_come_back(space_after):
    tokenizer = train("wordpiece", space_after=space_after)
    text = "a " + "ab" * 20_000 + " b"  # takes hours if the whole word is searched
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_padded_batch_is_padded_right_and_masked_and_restored():
    batch = BPE(NASTY, text_target=NASTY, padding=True, return_tensors="pt")
    lengths = [len(BPE(text)["input_ids"]) for text in NASTY]
    assert batch["input_ids"].shape == (len(NASTY), max(lengths))
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        assert (row[mask == 0] == PAD).all()
        assert (row == EOS).sum() == 1
    assert BPE.batch_decode(batch["labels"], skip_special_tokens=True) == NASTY


def test_length_is_unlimited_and_truncation_keeps_eos():
    assert BPE.model_max_length > 10**9
    assert BPE("this is a house", truncation=True, max_length=3)["input_ids"][-1] == EOS


# The vocabulary


@pytest.mark.parametrize("kind", SUBWORD_KINDS)
def test_words_carry_the_space_before_them_or_after_them(kind):
    for options, pieces in (({}, ["▁ab", "▁", "▁c"]), ({"space_after": True}, ["ab▁", "▁", "c▁"])):
        backend = train(kind, **options).backend_tokenizer
        text = backend.normalizer.normalize_str("ab  c")
        assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("space_after", [False, True])
@pytest.mark.parametrize("kind", SUBWORD_KINDS)
def test_no_token_joins_a_word_and_punctuation(kind, space_after):
    lines = [
        "ein Hut. kein Hut, (der Hut) mein-Hut ...",
        "the hat. no hat, (the hat) my-hat ...",
    ] * 30
    joined = re.compile(r"[^\W_](?=[.,()-])|[.,()-](?=[^\W_])")
    tokens = {
        split: train(kind, lines, 400, space_after=space_after, split_punctuation=split)
        for split in (True, False)
    }
    pieces = {
        split: [
            token for token in tokenizer.get_vocab() if joined.search(token) and "<" not in token
        ]
        for split, tokenizer in tokens.items()
    }
    assert not pieces[True]
    assert pieces[False] or kind == "unigram"  # its trainer prefers short pieces here
    for tokenizer in tokens.values():
        assert restored(tokenizer, lines[0]) == lines[0]


@pytest.mark.parametrize("space_after", [False, True])
@pytest.mark.parametrize("kind", SUBWORD_KINDS)
def test_the_place_of_a_token_excludes_the_space_that_it_carries(kind, space_after):
    text = "the hat. no hat, (the hat)  the"
    tokenizer = train(kind, [text] * 9, 330, space_after=space_after)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    words = [
        text[start:end]
        for token, (start, end) in zip(encoded.tokens(), encoded["offset_mapping"], strict=True)
        if token != "▁"
    ]
    assert "".join(words) == text.replace(" ", "")
    assert len(words) > 9
    pattern = train("regex", [text], pattern=r"▁\w+|\s|.")
    assert pattern("▁a", return_offsets_mapping=True)["offset_mapping"][0] == (0, 2)


def test_with_space_after_a_compound_ends_in_the_word_that_it_is():
    lines = ["tür tür haus haus"]
    before, after = train(lines=lines), train(lines=lines, space_after=True)
    assert before.tokenize("haus haustür") == ["▁haus", "▁haus", "tü", "r"]
    assert after.tokenize("tür haustür") == ["tür▁", "hau", "s", "tür▁"]


@every_kind
@pytest.mark.parametrize("vocab_size", [48, 330, 600])
def test_vocab_size_is_an_upper_bound(kind, vocab_size):
    if kind == "bpe":
        vocab_size += 256
    tokenizer = train(kind, vocab_size=vocab_size)
    assert len(tokenizer) == tokenizer.vocab_size <= vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_bpe_fills_the_vocabulary_and_holds_all_bytes():
    text = [" ".join(f"{number:x}" for number in range(3000))]
    assert len(train(lines=text, vocab_size=900)) == 900
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(BPE.get_vocab())


def test_bpe_merges_the_most_frequent_pair_first():
    merges = state(train(lines=["ab cab cab dab"]))["model"]["merges"]
    assert merges[0] == ["a", "b"]


def test_word_keeps_the_most_frequent_words():
    tokenizer = train("word", lines=["a b b c c c"], vocab_size=5)
    assert tokenizer.tokenize("a b c") == ["<unk>", "b", "c"]


@pytest.mark.parametrize("kind", ["word", "char", "regex"])
def test_min_frequency_drops_rarer_tokens(kind):
    pattern = {"pattern": r"\w"} if kind == "regex" else {}
    tokenizer = train(kind, lines=["x y x z x z"], min_frequency=2, **pattern)
    assert {"x", "z"} <= set(tokenizer.get_vocab())
    assert "y" not in tokenizer.get_vocab()


def test_min_frequency_stops_the_merges_of_bpe():
    merges = state(train(lines=["ab ab cd"], min_frequency=2))["model"]["merges"]
    assert "▁ab" in {"".join(pair) for pair in merges}
    assert not any("c" in piece for pair in merges for piece in pair)


@every_kind
def test_training_twice_gives_the_same_file(kind):
    lines = [f"{a}{b} {b}{a}{c}" for a in "abcdef" for b in "ghijk" for c in "lmnopqr"]
    one, two = (train(kind, lines=lines, vocab_size=310).backend_tokenizer for _ in range(2))
    assert one.to_str() == two.to_str()


# Files


@every_kind
def test_a_gz_file_a_plain_file_and_an_iterator_train_the_same(kind, tmp_path):
    text = "\n".join(LINES) + "\n"
    plain, packed = tmp_path / "lines.txt", tmp_path / "lines.txt.gz"
    plain.write_bytes(text.encode())
    packed.write_bytes(gzip.compress(text.encode()))
    expected = state(train(kind))
    for paths in (plain, str(packed), [plain]):
        tokenizer = VaswaniTokenizer.train_from_files(
            paths, kind=kind, vocab_size=600, show_progress=False
        )
        assert state(tokenizer) == expected


def test_several_files_are_learned_jointly(tmp_path):
    for name in ("ab", "cd"):
        (tmp_path / name).write_text(f"{name}\n")
    paths = [tmp_path / "ab", tmp_path / "cd"]
    tokenizer = VaswaniTokenizer.train_from_files(paths, kind="char", show_progress=False)
    assert UNK not in tokenizer("abcd")["input_ids"]


@every_variant
def test_saving_and_loading_gives_the_same_ids(kind, options, tmp_path):
    tokenizer = tokenizer_of(kind, options)
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer([*LINES, *NASTY])["input_ids"]
    # A machine without this package loads the plain backend.
    for loader in (VaswaniTokenizer, AutoTokenizer, TokenizersBackend):
        loaded = loader.from_pretrained(tmp_path)
        assert loaded([*LINES, *NASTY])["input_ids"] == expected
        assert loaded.split_special_tokens
        assert len(loaded) == len(tokenizer)
        if loader is not TokenizersBackend:
            assert type(loaded) is VaswaniTokenizer


def test_a_saved_tokenizer_brings_the_code_that_reads_it(tmp_path):
    saved = BPE.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    module, class_name = config["auto_map"]["AutoTokenizer"][0].split(".")
    assert class_name == "VaswaniTokenizer"
    for name in (f"{module}.py", "configuration_vaswani.py", "tokenizer.json"):
        assert (tmp_path / name).is_file()
        assert str(tmp_path / name) in saved
    assert "from .remote_code_vaswani import" in (tmp_path / f"{module}.py").read_text()


@every_variant
def test_train_new_from_iterator_equals_training_afresh(kind, options):
    lines = ["ein neues Haus </s>", "a new mouse </s> <0x41>"] * 3
    pattern = {"pattern": r"<[^>]*>|\w+|\s|[^\w\s]"} if kind == "regex" else {}
    old = tokenizer_of(kind, options)
    new = old.train_new_from_iterator([lines], 400, show_progress=False)
    fresh = train(kind, lines=lines, vocab_size=400, **pattern, **options)
    assert type(new) is VaswaniTokenizer
    assert new(lines + NASTY)["input_ids"] == fresh(lines + NASTY)["input_ids"]
    assert restored(new, lines[0]) == lines[0]


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_a_retrained_masked_tokenizer_recognises_its_mask(kind):
    masked = tokenizer_of(kind, {}).for_masked_words()
    new = masked.train_new_from_iterator(["a new mouse"], 400, show_progress=False)
    ids = new("a <mask> mouse")["input_ids"]
    assert ids.count(new.mask_token_id) == 1
    assert tokenizer_of(kind, {}).init_kwargs["split_special_tokens"]


@pytest.mark.parametrize("space_after", [False, True])
@pytest.mark.parametrize("kind", SUBWORD_KINDS)
def test_a_mask_beside_punctuation_is_read_as_a_word_there(kind, space_after):
    lines = ["it is the hat. no hat, (the hat) the"] * 9
    masked = train(kind, lines, 330, space_after=space_after).for_masked_words()
    for text in ("it is <mask>.", "no <mask>, the", "(<mask>) the", "<mask> the hat."):
        tokens, word = (
            masked.convert_ids_to_tokens(masked(line)["input_ids"])
            for line in (text, text.replace("<mask>", "hat"))
        )
        place = tokens.index("<mask>")
        length = len(word) - len(tokens) + 1
        assert tokens[:place] + tokens[place + 1 :] == word[:place] + word[place + length :]
        assert restored(masked, text.replace("<mask>", "hat")) == text.replace("<mask>", "hat")
    for text in [*NASTY[4:12], ". a .", "(a", "a (", lines[0]]:
        if kind == "bpe":
            assert restored(masked, text) == text


def test_a_retrained_tokenizer_of_a_language_model_recognises_the_end():
    language = tokenizer_of("bpe", {}).for_language_model()
    new = language.train_new_from_iterator(["a new mouse"], 400, show_progress=False)
    assert [token for token in new("a</s>")["input_ids"] if token == EOS] == [EOS, EOS]


def importing(backend, first_unknown):
    """Return a tokenizer like those imported from fairseq, whose last symbols are unknown."""
    tokenizer = VaswaniTokenizer.from_backend(backend)
    tokenizer.init_kwargs["unknown_from"] = first_unknown
    return tokenizer


def test_added_tokens_of_an_imported_tokenizer_are_known(tmp_path):
    backend = train("word", ["the house is here"]).backend_tokenizer
    tokenizer = importing(backend, backend.get_vocab_size() - 1)
    first, last = tokenizer.convert_ids_to_tokens([3, len(tokenizer) - 1])
    assert tokenizer(f"{first} {last}")["input_ids"] == [3, UNK, EOS]
    masked = tokenizer.for_masked_words()
    masked.add_tokens([">>de<<"])
    masked.save_pretrained(tmp_path)
    for known in (masked, AutoTokenizer.from_pretrained(tmp_path)):
        tag = known.convert_tokens_to_ids(">>de<<")
        assert known(f">>de<< {last} <mask>")["input_ids"] == [tag, UNK, known.mask_token_id, EOS]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_an_added_token_takes_the_space_after_it(kind):
    lines = ["costs ( 5 ) euros, (five) euro.", "a b c d e one two"] * 5
    tokenizer = VaswaniTokenizer.train_from_iterator(lines, kind, 350, show_progress=False)
    tokenizer.add_tokens([AddedToken("<num>", rstrip=True, normalized=False)])
    for text, decoded in {
        "costs <num> euros": "costs <num> euros",
        "one<num>two": "one<num> two",
        "one <num> <num> two": "one <num><num> two",
    }.items():
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_tokens_to_ids("<num>") in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded


@pytest.mark.parametrize("space_after", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_added_tokens_are_found_where_the_class_says(kind, space_after):
    lines = ["the dogs run (fast).", "two dogs, three cats!"]
    tokenizer = train(kind, lines, 400, space_after=space_after)
    tokenizer.add_tokens(["<one>", AddedToken("<two>", normalized=False)])
    number = tokenizer.convert_tokens_to_ids("<two>")
    for text in ("the (<two>)", "dogs,<two>", "dogs<two>dogs", "<two>", "two <two> dogs"):
        assert tokenizer(text)["input_ids"].count(number) == 1
    texts = ["the <one>.", "the.<one> dogs"]
    found = [any("<one>" in token for token in tokenizer(text).tokens()) for text in texts]
    assert found == [not space_after, space_after]


def test_special_tokens_that_texts_cannot_hold_are_warned_of():
    tokenizer = train("bpe", ["two dogs"])
    log = logging.get_logger("vaswani.tokenization.tokenization_vaswani")
    with CaptureLogger(log) as captured:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<sep>"]})
    assert "<sep> in a text will not become special tokens: use tokenizer.add" in captured.out
    with CaptureLogger(log) as captured:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.for_masked_words().add_special_tokens({"additional_special_tokens": ["<cls>"]})
    assert not captured.out


def test_a_start_token_leaves_the_end_token(tmp_path):
    tokenizer = train("bpe", ["two dogs"])
    assert tokenizer.add_eos_token
    assert not tokenizer.for_language_model().add_eos_token
    tokenizer.save_pretrained(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_bos_token = True
    assert tokenizer("two").tokens() == ["<s>", "▁two", "</s>"]
    tokenizer.add_eos_token = False
    assert tokenizer("two").tokens() == ["<s>", "▁two"]
    loaded = AutoTokenizer.from_pretrained(tmp_path, bos_token="<s>", add_bos_token=True)
    assert loaded("two").tokens() == ["<s>", "▁two", "</s>"]
    for saved in (tokenizer, tokenizer.for_language_model()):
        saved.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded("two").tokens() == saved("two").tokens()
        assert not loaded.add_eos_token


def test_an_error_in_a_target_leaves_the_next_source_without_an_end():
    tokenizer = VaswaniTokenizer.from_backend(train("word", ["the house"]).backend_tokenizer)
    tokenizer.init_kwargs["source_eos"] = False
    ids = tokenizer(text_target="the house")["input_ids"]
    for wrong in (5, ["the", 5], "ab\ud800"):
        with pytest.raises((TypeError, ValueError)):
            tokenizer(text_target=wrong)
        assert tokenizer.encode("the house") == ids[:-1]
        assert tokenizer.add_eos_token is False
    assert tokenizer(text_target="the house")["input_ids"] == ids


def test_a_source_in_another_thread_waits_for_a_target(monkeypatch):
    tokenizer = VaswaniTokenizer.from_backend(train("word", ["the house"]).backend_tokenizer)
    tokenizer.init_kwargs["source_eos"] = False
    target = tokenizer(text_target="the house")["input_ids"]
    encode, inside, found = TokenizersBackend._encode_plus, threading.Event(), []
    read = threading.Thread(target=lambda: found.append(tokenizer("the house")["input_ids"]))

    def slowly(self, *args, **kwargs):
        if not inside.is_set():
            inside.set()
            read.start()
            read.join(timeout=0.2)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(TokenizersBackend, "_encode_plus", slowly)
    assert tokenizer(text_target="the house")["input_ids"] == target
    read.join()
    assert found == [target[:-1]]


# Errors


def test_unknown_kind_lists_the_six():
    with pytest.raises(ValueError, match=r"'bpee'.*bpe, wordpiece, unigram, word, char, regex"):
        train("bpee")


@every_kind
@pytest.mark.parametrize("lines", [[], ["", "  ", "\t"]])
def test_no_text_is_refused(kind, lines):
    with pytest.raises(ValueError, match="no text"):
        train(kind, lines=lines)


@pytest.mark.parametrize(
    ("kind", "needed"),
    # "abc d" takes a, b, c, d and the space.
    [("bpe", 3 + 256 + 5), ("wordpiece", 3 + 5), ("unigram", 10), ("word", 4), ("char", 4)],
)
def test_a_vocab_size_too_small_is_refused_with_the_least_that_works(kind, needed):
    for vocab_size in (0, needed - 1):
        with pytest.raises(ValueError, match=rf"vocab_size \({vocab_size}\).*need {needed}\b"):
            train(kind, lines=["abc d"], vocab_size=vocab_size)
        with pytest.raises(ValueError, match=rf"vocab_size \({vocab_size}\).*need {needed}\b"):
            TOKENIZERS[kind].train_new_from_iterator(["abc d"], vocab_size)
    assert len(train(kind, lines=["abc d"], vocab_size=needed)) <= needed


def test_pattern_is_refused_for_other_kinds():
    with pytest.raises(ValueError, match=r"pattern \('a'\).*regex"):
        train("char", pattern="a")


@pytest.mark.parametrize("kind", ["word", "char", "regex"])
def test_space_after_is_refused_for_kinds_without_subwords(kind):
    with pytest.raises(ValueError, match=rf"space_after .*bpe, wordpiece, unigram.*'{kind}'"):
        train(kind, space_after=True)


def test_a_broken_pattern_is_refused():
    with pytest.raises(ValueError, match=r"pattern '\(a' is not a regular expression"):
        train("regex", pattern="(a")


def test_min_frequency_is_refused_where_it_would_do_nothing():
    with pytest.raises(ValueError, match=r"min_frequency \(2\)"):
        train("unigram", min_frequency=2)


def test_one_string_is_refused_as_lines():
    with pytest.raises(TypeError, match="one string"):
        train(lines="a house")


def test_missing_files_are_named_before_any_is_read(tmp_path):
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xff")
    missing = [tmp_path / "one.txt", tmp_path / "two.txt"]
    with pytest.raises(FileNotFoundError, match=r"one\.txt.*two\.txt"):
        VaswaniTokenizer.train_from_files([broken, *missing])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_line_that_is_not_utf8_is_named(pack, tmp_path):
    path = tmp_path / ("latin1.gz" if pack is gzip.compress else "latin1.txt")
    path.write_bytes(pack("gut\nschön\n".encode("latin-1")))
    with pytest.raises(ValueError, match=r"latin1\.\w+, line 2: byte 4 is not utf-8"):
        VaswaniTokenizer.train_from_files(path, show_progress=False)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffa house\n\ufeffa mouse\n".encode())
    files = [path, path]
    trained = VaswaniTokenizer.train_from_files(files, kind="word", show_progress=False)
    assert {"a", "\ufeffa"} <= set(trained.get_vocab())  # the second comes from line 2
    path.write_bytes("\ufeffa house\n".encode())
    trained = VaswaniTokenizer.train_from_files(files, kind="char", show_progress=False)
    assert "\ufeff" not in trained.get_vocab()


@pytest.mark.parametrize("row", [b"a house", None, 5, {"en": "a"}, ["a", b"b"]])
def test_a_row_that_is_no_text_is_named(row):
    number = 3 if isinstance(row, list) else 2
    with pytest.raises(TypeError, match=rf"Line {number} is (bytes|NoneType|int|dict), not"):
        train(lines=["a", row])
    with pytest.raises(TypeError, match=rf"Line {number} is"):
        train().train_new_from_iterator(["a", row], 400, show_progress=False)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"plain"])
def test_a_damaged_gz_file_is_named(damage, tmp_path):
    path = tmp_path / "lines.gz"
    path.write_bytes(damage(gzip.compress(b"a house\n" * 1000)))
    with pytest.raises(ValueError, match=r"lines\.gz is damaged"):
        VaswaniTokenizer.train_from_files(path, show_progress=False)


HALF = r"holds '\\ud800' as character 3, half of a surrogate pair: remove it"


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda tokenizer: tokenizer("ab\ud800"), "Text 1"),
        (lambda tokenizer: tokenizer(["a", "ab\ud800"]), "Text 2"),
        (lambda tokenizer: tokenizer("a", "ab\ud800"), "Text 1"),
        (lambda tokenizer: tokenizer(text_target=["ab\ud800"]), "Text 1"),
        (lambda tokenizer: tokenizer([["a", "ab\ud800"]], is_split_into_words=True), "Text 1"),
        (lambda tokenizer: tokenizer.tokenize("ab\ud800"), "Text 1"),
        (lambda tokenizer: tokenizer.encode("ab\ud800"), "Text 1"),
        (lambda tokenizer: train("char", ["a", "b", "ab\ud800"]), "Line 3"),
        (lambda tokenizer: tokenizer.train_new_from_iterator([["a"], ["ab\ud800"]], 40), "Line 2"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_place(call, place):
    with pytest.raises(ValueError, match=f"{place} {HALF}"):
        call(train("char", ["ab"]))


def test_what_is_no_text_at_all_raises_as_in_transformers():
    with pytest.raises((TypeError, ValueError), match="must be"):
        train("char", ["ab"])(["a", 5])


def test_predictions_that_the_trainer_padded_are_decoded():
    ids = BPE("a mouse")["input_ids"]
    for rows in ([[*ids, -100, -100], ids], np.array([[*ids, -100], [*ids, PAD]])):
        assert BPE.batch_decode(rows, skip_special_tokens=True) == ["a mouse", "a mouse"]


def test_a_pickled_tokenizer_reads_special_tokens_in_a_text_as_text():
    tokenizer = VaswaniTokenizer.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    encoder = pickle.loads(pickle.dumps(TextEncoder(tokenizer)))
    text = ["a </s> b"]
    assert encoder(text) == TextEncoder(tokenizer)(text)
    assert np.frombuffer(encoder(text)[0], np.uint16).tolist() == tokenizer(text[0])["input_ids"]
