"""BPE-dropout splits words as in Provilkov et al. (2020), determined by a seed."""

from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from num2words import num2words
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from vaswani.corpora.bpe_dropout import BpeDropout

from vaswani import VaswaniTokenizer

LINES = [num2words(number, lang=lang) for number in range(400) for lang in ("en", "de")]
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@cache
def tokenizer_of(**options):
    return VaswaniTokenizer.train_from_iterator(
        LINES, vocab_size=500, show_progress=False, **options
    )


def merging(pieces, merges, **options):
    """Make a tokenizer with these pieces and merges, for words between spaces."""
    vocabulary = {piece: number for number, piece in enumerate(("<pad>", "<unk>", "</s>", *pieces))}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", **options))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return VaswaniTokenizer.from_backend(backend)


@pytest.mark.parametrize("space_after", [False, True])
@given(text=any_text)
def test_without_dropout_the_tokens_are_the_tokenizers(space_after, text):
    tokenizer = tokenizer_of(space_after=space_after)
    for target in (False, True):
        assert BpeDropout(tokenizer, 0, target=target)([text]) == tokenizer([text])["input_ids"]


def test_added_tokens_stay_whole():
    tokenizer = VaswaniTokenizer.train_from_iterator(LINES, vocab_size=500, show_progress=False)
    tokenizer.add_tokens([AddedToken(">>de<<", rstrip=True, normalized=False)])
    for text in (
        ">>de<< seven",
        "one >>de<<  two",
        ">>de<<",
        "",
        "none",
        ">>de<<\x1f a",
        ">>de<< \x1c",
    ):
        assert BpeDropout(tokenizer, 0)([text]) == tokenizer([text])["input_ids"]
        tag = tokenizer.convert_tokens_to_ids(">>de<<")
        assert BpeDropout(tokenizer, 1)([text])[0].count(tag) == text.count(">>de<<")
    tokenizer.add_tokens(["<2de>"])
    with pytest.raises(ValueError, match="would cut the added tokens <2de>"):
        BpeDropout(tokenizer, 0.1)


def test_a_position_tells_the_tokens_whatever_was_encoded_before():
    one, other = BpeDropout(tokenizer_of(), 0.3, 5), BpeDropout(tokenizer_of(), 0.3, 5)
    other(LINES)
    tokens = [one.at(line, 1, number) for number, line in enumerate(LINES)]
    backwards = [other.at(LINES[number], 1, number) for number in reversed(range(len(LINES)))]
    assert tokens == backwards[::-1]
    assert tokens != [one.at(line, 2, number) for number, line in enumerate(LINES)]


@pytest.mark.parametrize("space_after", [False, True])
@given(text=any_text, seed=st.integers(0, 9))
def test_every_cut_gives_back_the_text(space_after, text, seed):
    tokenizer = tokenizer_of(space_after=space_after)
    for dropout in (0.1, 0.6, 1):
        (ids,) = BpeDropout(tokenizer, dropout, seed)([text])
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_dropout_of_1_leaves_characters():
    tokenizer = tokenizer_of()
    (ids,) = BpeDropout(tokenizer, 1)(["one two"])
    assert tokenizer.convert_ids_to_tokens(ids) == [*"▁one▁two", "</s>"]


# The splits of "abc" with the merges a+b, ab+c, b+c, each skipped with probability p. The first
# merge is a+b, or else b+c. After a+b, ab+c may follow. After b+c there is no further merge.
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_segmentations_are_as_frequent_as_the_algorithm_has_them(p):
    merges = [("a", "b"), ("ab", "c"), ("b", "c")]
    tokenizer = merging([*"abc", "ab", "abc", "bc"], merges)
    draws = 4000
    found = Counter(
        tuple(tokenizer.convert_ids_to_tokens(BpeDropout(tokenizer, p, seed)(["abc"])[0])[:-1])
        for seed in range(draws)
    )
    expected = {
        ("abc",): (1 - p) ** 2,
        ("ab", "c"): (1 - p) * p,
        ("a", "bc"): p * (1 - p),
        ("a", "b", "c"): p**2,
    }
    assert found.keys() == expected.keys()
    for cut, probability in expected.items():
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert found[cut] / draws == pytest.approx(probability, abs=4 * deviation)


def test_a_seed_tells_the_cuts():
    texts = LINES * 3
    first, same, other = (BpeDropout(tokenizer_of(), 0.1, seed)(texts) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    # A repeated word is split differently each time.
    parts = [first[start : start + len(LINES)] for start in range(0, len(texts), len(LINES))]
    assert parts[0] != parts[1] != parts[2] != parts[0]
    cuts = BpeDropout(tokenizer_of(), 0.3)(["seventeen"] * 300)
    assert len(set(map(tuple, cuts[-100:]))) > 10


def test_special_tokens_are_those_of_the_side():
    tokenizer = VaswaniTokenizer.from_backend(tokenizer_of().backend_tokenizer)
    tokenizer.init_kwargs["source_eos"] = False
    for target, side in ((False, "text"), (True, "text_target")):
        dropout = BpeDropout(tokenizer, 0, target=target)
        assert dropout(["one"]) == [tokenizer(**{side: "one"})["input_ids"]]


def test_symbols_that_only_merges_know_are_unknown():
    tokenizer = merging([*"abc", "abc", "ab"], [("a", "b"), ("ab", "c")])
    tokenizer.init_kwargs["unknown_from"] = tokenizer.convert_tokens_to_ids("ab")
    assert BpeDropout(tokenizer, 0)(["ab abc"]) == tokenizer(["ab abc"])["input_ids"]
    tokenizer.add_tokens([AddedToken(">>de<<", normalized=False)])
    assert BpeDropout(tokenizer, 0)([">>de<<ab"]) == tokenizer([">>de<<ab"])["input_ids"]


def test_characters_are_unknown_where_there_are_no_bytes():
    tokenizer = merging([*"abc", "ab"], [("a", "b")])
    assert BpeDropout(tokenizer, 0)(["abäöc"]) == tokenizer(["abäöc"])["input_ids"]


@pytest.mark.parametrize("dropout", [-0.1, 1.1, float("nan")])
def test_dropout_is_a_probability(dropout):
    with pytest.raises(ValueError, match="dropout must be between 0 and 1"):
        BpeDropout(tokenizer_of(), dropout)


def test_other_tokenizers_are_refused():
    words = VaswaniTokenizer.train_from_iterator(LINES, kind="word", show_progress=False)
    with pytest.raises(ValueError, match=r"needs a BPE tokenizer.* WordLevel"):
        BpeDropout(words, 0.1)
    marked = merging(["a", "b</w>"], [], end_of_word_suffix="</w>")
    with pytest.raises(ValueError, match="end_of_word_suffix='</w>'"):
        BpeDropout(marked, 0.1)


def test_long_words_are_not_kept():
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["ab" * 50], vocab_size=300, show_progress=False
    )
    encoder = BpeDropout(tokenizer, 0.1)
    encoder._ids_of_split("a" * 64, 0)
    encoder._ids_of_split("a" * 65, 0)
    assert [len(word) for word, _ in encoder._splits] == [64]
