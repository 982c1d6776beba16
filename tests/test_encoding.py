"""Fast encoding returns the ids of the tokenizer, in the smallest integer type."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from num2words import num2words
from tokenizers import AddedToken
from vaswani.corpora.encoding import TextEncoder, id_type
from vaswani.tokenization.tokenization_vaswani import separates_words

from vaswani import VaswaniTokenizer

LINES = [num2words(number, lang=lang) for number in range(400) for lang in ("en", "de")]
LINES += ["a, b. c... (d) - e's <unk> </s> ▁ ▂"]
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(list("  one,.<>▁▂\t\r")))


@cache
def tokenizer_of(kind, **options):
    return VaswaniTokenizer.train_from_iterator(LINES, kind, 600, show_progress=False, **options)


def ids_of(encoder, text):
    return np.frombuffer(encoder([text])[0], encoder.dtype).tolist()


@pytest.mark.parametrize("split_punctuation", [False, True])
@pytest.mark.parametrize("space_after", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
@given(text=texts)
def test_ids_are_the_tokenizers_for_every_text(kind, space_after, split_punctuation, text):
    tokenizer = tokenizer_of(kind, space_after=space_after, split_punctuation=split_punctuation)
    assert separates_words(tokenizer)
    for target in (False, True):
        assert ids_of(TextEncoder(tokenizer, target), text) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("kind", ["word", "char", "regex"])
@given(text=texts)
def test_kinds_that_may_join_words_are_encoded_as_whole_texts(kind, text):
    tokenizer = tokenizer_of(kind)
    assert not separates_words(tokenizer)
    assert ids_of(TextEncoder(tokenizer), text) == tokenizer(text)["input_ids"]


def test_special_tokens_unknown_symbols_and_added_tokens_are_the_tokenizers():
    tokenizer = VaswaniTokenizer.from_backend(tokenizer_of("bpe").backend_tokenizer)
    tokenizer.init_kwargs.update(source_eos=False, unknown_from=300)
    for target, side in ((False, "text"), (True, "text_target")):
        expected = [tokenizer(**{side: line})["input_ids"] for line in LINES]
        assert [ids_of(TextEncoder(tokenizer, target), line) for line in LINES] == expected
    tokenizer.add_tokens([AddedToken(">>de<<", normalized=False)])
    text = f"{LINES[0]} >>de<< {LINES[0]}"
    assert ids_of(TextEncoder(tokenizer), text) == tokenizer(text)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(">>de<<") in tokenizer(text)["input_ids"]
    tagged = tokenizer_of("bpe", min_frequency=2)
    tagged.add_tokens([AddedToken(">>de<<", rstrip=True, normalized=False)])
    for text in (">>de<< one two", "one >>de<<two", ">>de<<"):
        assert ids_of(TextEncoder(tagged), text) == tagged(text)["input_ids"]


def test_ids_take_the_smallest_integer_type_that_holds_them():
    assert [id_type(size) for size in (256, 257, 65_536, 65_537)] == [
        np.uint8, np.uint16, np.uint16, np.uint32,
    ]  # fmt: skip
