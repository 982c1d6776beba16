"""Our searches: exact, equal to those of transformers, and independent of the batch."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteriaList
from transformers.generation import MaxLengthCriteria
from vaswani.generation import caches_vaswani, search_vaswani
from vaswani.generation.caches_vaswani import TargetCache
from vaswani.generation.continuations_vaswani import best_continuations
from vaswani.generation.incremental_vaswani import IncrementalDecoder


@torch.no_grad()
def log_probabilities_of(model, source, sentences):
    """Return the sums of log P(token | source, tokens before) of sentences of one length."""
    tokens = torch.tensor(sentences)
    decoder_input_ids = torch.cat([torch.full_like(tokens[:, :1], 2), tokens[:, :-1]], dim=1)
    sources = {name: tensor.expand(len(tokens), -1) for name, tensor in source.items()}
    logits = model(**sources, decoder_input_ids=decoder_input_ids).logits
    log_probabilities = logits.log_softmax(dim=-1).gather(2, tokens[..., None])
    return log_probabilities.sum(dim=(1, 2)).tolist()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("penalty_type", ["gnmt", "hf"])
@pytest.mark.parametrize("alpha", [0.6, 1.0, 0.0, -0.5])
def test_a_wide_beam_finds_the_best_of_all_sentences(tiny_model, seed, penalty_type, alpha, int8):
    model = tiny_model(seed=seed, vocab_size=4, pad_token_id=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    if int8:
        model.round_to_int8()
    source = {"input_ids": torch.tensor([[3, 1, 2]])}
    longest = 3
    ranking = []
    for length in range(1, longest + 1):
        last = (2,) if length < longest else (0, 1, 2, 3)
        sentences = list(itertools.product(*[(0, 1, 3)] * (length - 1), last))
        penalty = {"gnmt": ((5 + length) / 6) ** alpha, "hf": length**alpha}[penalty_type]
        sums = log_probabilities_of(model, source, sentences)
        scores = (log_probability / penalty for log_probability in sums)
        ranking += zip(scores, sentences, strict=True)
    ranking.sort(reverse=True)
    beams = 36  # more than there are sentences of 3 words
    output = model.generate(
        **source,
        num_beams=beams,
        num_return_sequences=5,
        max_new_tokens=longest,
        length_penalty=alpha,
        length_penalty_type=penalty_type,
        return_dict_in_generate=True,
    )
    for row, score, (best_score, best) in zip(
        output.sequences.tolist(), output.sequences_scores.tolist(), ranking, strict=False
    ):
        assert tuple(row[1 : 1 + len(best)]) == best
        assert score == pytest.approx(best_score, abs=1e-10)


# Rules of transformers that our searches support.
RULES = [
    {"suppress_tokens": [3, 0, 19]},
    {"bad_words_ids": [[4], [6], [11]]},
    {"min_new_tokens": 4},
    {"min_length": 6},
    {"forced_eos_token_id": 2},
    {"renormalize_logits": True, "bad_words_ids": [[0], [9]], "forced_eos_token_id": 2},
    {"suppress_tokens": [1, 7, 10_000], "min_new_tokens": 3, "forced_eos_token_id": 5},
]
CALLS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "vocab_size": st.sampled_from([20, 60, 2_100]),
        "lengths": st.lists(st.integers(1, 8), min_size=1, max_size=5),
        "num_beams": st.integers(2, 8),
        "returned": st.integers(1, 8),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "length_penalty": st.sampled_from([0.0, 0.6, 1.0, 2.0, -0.5]),
        "length_penalty_type": st.sampled_from(["hf", "gnmt"]),
        "limit": st.sampled_from(
            [
                {"max_new_tokens": 9},
                {"max_length_offset": 4},
                {"max_length_offset": 2, "max_length_factor": 1.3},
                {"max_length_offset": 0, "max_length_factor": 1.5},
            ]
        ),
        "ends": st.sampled_from([2, [2, 5], [2, 7, 9]]),
        "prefix": st.sampled_from([0, 3]),
        "rules": st.sampled_from([{}, *RULES]),
        "int8": st.booleans(),
    }
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(call=CALLS)
def test_tokens_and_scores_equal_transformers_search(tiny_model, padded_batch, searches, call):
    searches.update(dict.fromkeys(searches, 0))
    model = tiny_model(seed=call["seed"], vocab_size=call["vocab_size"], decoder_layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # make decisions clearer, and sentences shorter
    if call["int8"]:
        model.round_to_int8()
    input_ids, mask = padded_batch(call["lengths"], call["seed"], call["vocab_size"])
    kwargs = {
        name: call[name]
        for name in ("num_beams", "early_stopping", "length_penalty", "length_penalty_type")
    }
    kwargs |= call["limit"]
    if call["prefix"]:
        kwargs["decoder_input_ids"] = torch.full((len(mask), call["prefix"]), 3)
    kwargs |= call["rules"] | {
        "input_ids": input_ids,
        "attention_mask": mask,
        "num_return_sequences": min(call["returned"], call["num_beams"]),
        "eos_token_id": call["ends"],
        "return_dict_in_generate": True,
    }
    ours, theirs = model.generate(**kwargs), model.generate(**kwargs, output_scores=True)
    assert (searches["beam_search"], searches["_beam_search"]) == (1, 1)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    # transformers sums in float32
    torch.testing.assert_close(
        ours.sequences_scores.float(), theirs.sequences_scores, rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("rules", [{}, *RULES])
@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"max_new_tokens": 6},
        {"max_length_offset": 2},
        {"max_length_offset": 1, "max_length_factor": 1.4},
    ],
)
def test_greedy_search_equals_transformers(tiny_model, source, searches, rules, limit):
    models = 8 if limit else 2  # the default limit is 50 tokens more than the source
    for seed in range(models):
        model = tiny_model(seed=seed)
        if seed % 2:
            model.round_to_int8()
        call = {**source, **rules, **limit, "return_dict_in_generate": True}
        ours = model.generate(**call).sequences
        theirs = model.generate(**call, output_scores=True).sequences
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, model.generate(**source, **rules, **limit))
    assert (searches["greedy_search"], searches["_sample"]) == (2 * models, models)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("scored", [{}, {"output_scores": True, "return_dict_in_generate": True}])
def test_a_forced_end_comes_at_each_sentences_own_limit(tiny_model, source, num_beams, scored):
    output = tiny_model().generate(
        **source, **scored, num_beams=num_beams, max_length_offset=3, forced_eos_token_id=5,
        suppress_tokens=[2],
    )  # fmt: skip
    sequences = output.sequences if scored else output
    limits = [10, 7, 5, 8]  # for sources of 7, 4, 2 and 5 tokens, after the start token
    assert [row[limit].item() for row, limit in zip(sequences, limits, strict=True)] == [5] * 4


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("rules", RULES)
def test_rules_about_lengths_and_tokens_leave_the_fast_search_usable(
    tiny_model, source, searches, num_beams, rules
):
    tiny_model().generate(**source, **rules, num_beams=num_beams)
    assert searches["beam_search"] + searches["greedy_search"] == 1
    assert searches["_beam_search"] + searches["_sample"] == 0


@pytest.mark.parametrize("search", [{}, {"num_beams": 4, "num_return_sequences": 2}])
@pytest.mark.parametrize("penalty", [{}, {"early_stopping": False}, {"early_stopping": True}])
def test_a_sentence_alone_is_decoded_as_in_any_batch(tiny_model, padded_batch, search, penalty):
    lengths = [7, 1, 4, 9, 2, 5]
    input_ids, mask = padded_batch(lengths, seed=3)
    scored = {"return_dict_in_generate": True} if search else {}
    for seed in range(3):
        model = tiny_model(seed=seed)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        order = torch.randperm(len(lengths))
        wide = torch.nn.functional.pad(input_ids, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
        together = model.generate(
            wide[0][order], attention_mask=wide[1][order], **search, **penalty, **scored
        )
        returned = search.get("num_return_sequences", 1)
        for place, number in enumerate(order.tolist()):
            alone = model.generate(
                input_ids[number : number + 1, : lengths[number]], **search, **penalty, **scored
            )
            rows = slice(place * returned, (place + 1) * returned)
            if search:
                torch.testing.assert_close(
                    together.sequences_scores[rows], alone.sequences_scores, rtol=0, atol=1e-10
                )
            tokens = (together.sequences if search else together)[rows]
            expected = alone.sequences if search else alone
            width = max(tokens.shape[1], expected.shape[1])
            tokens, expected = (
                torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (tokens, expected)
            )
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize("penalty_type", ["gnmt", "hf"])
def test_no_length_penalty_means_the_same_to_both_searches(tiny_model, source, penalty_type):
    model = tiny_model()
    model.generation_config.length_penalty = None
    call = {"num_beams": 3, "return_dict_in_generate": True, "length_penalty_type": penalty_type}
    ours = model.generate(**source, **call)
    theirs = model.generate(**source, **call, output_scores=True)
    torch.testing.assert_close(
        ours.sequences_scores.float(), theirs.sequences_scores, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("beams", [1, 2])
def test_a_forced_end_token_and_a_limit_of_the_call_give_transformers_tokens(
    tiny_model, source, beams
):
    model = tiny_model()
    call = {
        **source, "max_length": 20, "forced_eos_token_id": 2, "num_beams": beams,
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(6)]),
    }  # fmt: skip
    found = model.generate(**call)
    theirs = model.generate(**call, output_scores=True, return_dict_in_generate=True).sequences
    assert torch.equal(found, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prompts_of_int32_are_read(tiny_model, source, dtype):
    model = tiny_model(decoder_start_token_id=0).to(dtype)
    start = torch.zeros((len(source["input_ids"]), 1), dtype=torch.int32)
    found = model.generate(**source, decoder_input_ids=start, max_new_tokens=4)
    assert torch.equal(found, model.generate(**source, max_new_tokens=4))


def test_tokens_are_sampled_by_their_probabilities(tiny_model, searches):
    model = tiny_model(vocab_size=5)
    source, number = {"input_ids": torch.tensor([[3, 4, 2]])}, 10_000
    torch.manual_seed(1)
    samples = model.generate(
        **source, do_sample=True, num_return_sequences=number, top_k=0, temperature=0.7,
        max_new_tokens=2,
    )  # fmt: skip
    assert (searches["greedy_search"], searches["_sample"]) == (1, 0)
    first = torch.tensor([[2]])
    with torch.no_grad():
        logits = model(**source, decoder_input_ids=first).logits[0, -1] / 0.7
        after = torch.tensor([[2, token] for token in range(5)])
        seconds = model(source["input_ids"].expand(5, -1), decoder_input_ids=after).logits[:, -1]
    expected = logits.softmax(-1)[:, None] * (seconds / 0.7).softmax(-1)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for one, two in samples[:, 1:].tolist():
        counts[one, two] += 1
    # Only padding follows the end token, 2.
    expected[2] = torch.eye(5, dtype=torch.float64)[0] * expected[2].sum()
    deviation = (expected * (1 - expected) / number).sqrt()
    assert ((counts / number - expected).abs() <= 4.5 * deviation + 1e-12).all()


def test_each_sample_of_each_sentence_keeps_to_the_limit_of_its_source(tiny_model, source):
    sampled = tiny_model().generate(
        **source, do_sample=True, num_return_sequences=3, eos_token_id=None, suppress_tokens=[0]
    )
    lengths = (sampled[:, 1:] != 0).sum(dim=1)
    assert lengths.tolist() == [length + 50 for length in (7, 4, 2, 5) for _ in range(3)]


WARPERS = [{"top_k": 1}, {"temperature": 1e-4, "top_k": 0}, {"top_p": 1e-6}, {"min_p": 1.0}]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("early_stopping", ["never", True, False])
@pytest.mark.parametrize("beams", [1, 3])
def test_logits_in_portions_change_no_answer(
    tiny_model, source, searches, monkeypatch, beams, early_stopping, rules
):
    model = tiny_model(seed=3)
    settings = {**rules, "num_beams": beams, "early_stopping": early_stopping}
    settings |= {"num_return_sequences": beams, "max_new_tokens": 8} if beams > 1 else {}
    settings |= {"return_dict_in_generate": True}
    whole = model.generate(**source, **settings)
    portions = []
    search = search_vaswani.best_continuations
    monkeypatch.setattr(
        search_vaswani,
        "best_continuations",
        lambda logits, *args: portions.append(len(logits)) or search(logits, *args),
    )
    for at_once in (1, 2 * beams * 20):  # one sentence, then two
        monkeypatch.setattr(search_vaswani, "_AT_ONCE", at_once)
        divided = model.generate(**source, **settings)
        assert torch.equal(divided.sequences, whole.sequences)
        if beams > 1:
            close = torch.testing.assert_close
            close(divided.sequences_scores, whole.sequences_scores, rtol=1e-12, atol=1e-12)
            assert torch.equal(divided.beam_indices, whole.beam_indices)
    assert beams == 1 or max(portions) <= 2 * beams
    assert searches["beam_search" if beams > 1 else "greedy_search"] == 3


@pytest.mark.parametrize(
    ("sentences", "at_once", "sizes"),
    [(1, 1, [1]), (7, 70, [7]), (7, 60, [4, 3]), (9, 25, [2, 2, 2, 2, 1]), (3, 1, [1, 1, 1])],
)
def test_portions_have_one_size(monkeypatch, sentences, at_once, sizes):
    monkeypatch.setattr(search_vaswani, "_AT_ONCE", at_once)
    portions = search_vaswani._portions(sentences, 10, torch.device("cpu"))
    assert [len(range(sentences)[part]) for part in portions] == sizes
    assert len(search_vaswani._portions(sentences, 10, torch.device("meta"))) == 1


@pytest.mark.parametrize("settings", WARPERS, ids=str)
def test_sampling_from_the_best_token_alone_is_greedy_search(
    tiny_model, source, searches, settings
):
    model = tiny_model(seed=1)
    sampled = model.generate(**source, do_sample=True, **settings)
    assert torch.equal(sampled, model.generate(**source))
    assert (searches["greedy_search"], searches["_sample"]) == (2, 0)


def test_banned_tokens_are_never_sampled(tiny_model, source):
    sampled = tiny_model().generate(
        **source, do_sample=True, top_k=0, temperature=50.0, suppress_tokens=[7, 18],
        min_new_tokens=9, max_new_tokens=12, num_return_sequences=40,
    )  # fmt: skip
    assert len(sampled[:, 1:].unique()) > 14
    assert not torch.isin(sampled[:, 1:], torch.tensor([7, 18])).any()
    assert (sampled[:, 1:10] != 2).all()


def test_a_token_of_no_probability_is_not_sampled_whatever_the_random_number(monkeypatch):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    numbers = torch.tensor([[0.0], [0.5], [1 - 2**-53]], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: numbers.clone())
    assert search_vaswani._sampled(logits, []).tolist() == [1, 3, 3]


def test_a_random_number_of_1_draws_the_last_possible_token(monkeypatch):
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.ones(1, 1, dtype=torch.double))
    assert search_vaswani._sampled(logits, []).tolist() == [1]


def test_warpers_read_at_least_float32():
    seen = []

    def warper(_, logits):
        seen.append(logits.dtype)
        return logits

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        search_vaswani._sampled(torch.zeros(2, 5, dtype=dtype), [warper])
    assert seen == [torch.float32, torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("scores", [torch.nan, -torch.inf])
def test_sampling_from_no_probabilities_is_refused(scores):
    logits = torch.zeros(2, 5)
    logits[1] = scores
    with pytest.raises(ValueError, match=r"found no hypotheses.*NaN in the model's weights"):
        search_vaswani._sampled(logits, [])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_finished_sentences_leave_the_batch(tiny_model, source, monkeypatch, num_beams):
    model = tiny_model()
    widths = []
    step = IncrementalDecoder.step
    monkeypatch.setattr(
        IncrementalDecoder,
        "step",
        lambda self, tokens, *args: widths.append(len(tokens)) or step(self, tokens, *args),
    )
    # Sentences without end token stop 3 tokens after the length of their sources (7, 4, 2 and 5).
    model.generate(**source, num_beams=num_beams, max_length_offset=3, eos_token_id=None)
    assert widths == [4] * 4 + [3] * 2 + [2] + [1] * 2


@pytest.mark.parametrize("seed", range(3))
def test_positions_no_hypothesis_descends_from_are_dropped(tiny_model, source, monkeypatch, seed):
    model = tiny_model(seed=seed)
    call = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 60, "eos_token_id": 5}
    call |= {"return_dict_in_generate": True}
    expected = model.generate(**source, **call)
    monkeypatch.setattr(caches_vaswani, "_FIRST_ROOM", 8)
    dropped = []
    drop = TargetCache._drop_dead_ends

    def watched(self, past):
        before = self.used
        drop(self, past)
        dropped.append(before - self.used)

    monkeypatch.setattr(TargetCache, "_drop_dead_ends", watched)
    output = model.generate(**source, **call)
    assert sum(dropped) > 0
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores)


@pytest.mark.parametrize(
    ("done", "kept"),
    [
        ("0000", None),
        ("00000000010000000", None),  # fewer than an eighth
        ("1000", [3, 1, 2]),
        ("0011", [0, 1]),
        ("10100101", [4, 1, 6, 3]),
        ("11", []),
    ],
)
def test_the_last_sentences_take_the_places_of_those_that_leave(done, kept):
    marks = torch.tensor([mark == "1" for mark in done])
    found = search_vaswani._sentences_to_keep(marks, int(marks.sum()))
    assert (found if found is None else found.tolist()) == kept


def test_rows_are_numbered_again_when_sentences_leave():
    rows = torch.tensor([0, 2, 3, 7, 10, 11])  # of 4 sentences with 3 hypotheses each
    kept = torch.tensor([0, 3])
    found = search_vaswani._rows_after_leaving(rows, kept, torch.Size((4, 3)))
    assert found.tolist() == [0, 2, 4, 5]
    kept = torch.tensor([2, 1])
    found = search_vaswani._rows_after_leaving(rows, kept, torch.Size((4, 3)))
    assert found.tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.inference_mode()
def test_the_cache_of_a_model_in_16_bits_is_in_float32_on_a_cpu(tiny_model, source, dtype):
    model = tiny_model().to(dtype)
    decoder = IncrementalDecoder(model, model.get_encoder()(**source)[0], source["attention_mask"])
    assert decoder.read(torch.full((4, 1), 2)).dtype == dtype
    expected = torch.promote_types(dtype, torch.float32)
    target, source = decoder.target, decoder.source.layers[0]
    assert {part.dtype for part in (target.keys, target.values, *source)} == {expected}


@torch.inference_mode()
def test_keys_and_values_of_the_source_are_kept_once_per_sentence(tiny_model, source):
    model = tiny_model()
    decoder = IncrementalDecoder(model, model.get_encoder()(**source)[0], source["attention_mask"])
    decoder.read(torch.full((4, 1), 2))
    kept = [keys.data_ptr() for keys, _ in decoder.source.layers]
    heads = model.config.decoder_attention_heads
    decoder.step(torch.randint(3, 19, (4, 5)), torch.zeros(4, 5, dtype=torch.long))
    decoder.step(torch.randint(3, 19, (4, 5)), torch.randint(0, 5, (4, 5)))
    assert [keys.data_ptr() for keys, _ in decoder.source.layers] == kept
    assert all(len(keys) == 4 * heads for keys, _ in decoder.source.layers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "sentences", "beams", "count"),
    [(5, 2, 3, 6), (600, 3, 4, 8), (1024, 2, 8, 16), (5000, 3, 1, 8), (4097, 40, 4, 12)],
)
@pytest.mark.parametrize("banned", [[], [0, 3], [1, 4, 513, 1030, 4096]])
def test_best_continuations_are_the_best(vocabulary, sentences, beams, count, dtype, banned):
    logits = torch.randn(sentences * beams, vocabulary).mul(3).to(dtype)
    logits[0, -1] = 20.0  # in the shorter last block
    wide = torch.promote_types(dtype, torch.float32)
    running = -torch.rand(sentences, beams, dtype=wide)
    running[0, 0] = 0
    everything = logits.to(wide).log_softmax(-1).view(sentences, beams, -1) + running[:, :, None]
    banned = torch.tensor([token for token in banned if token < vocabulary], dtype=torch.long)
    everything[:, :, banned] = -torch.inf
    expected = everything.flatten(1).topk(count).values
    scores, hypotheses, tokens = best_continuations(logits, running, count, None, banned)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(scores, expected, rtol=0, atol=tolerance)
    places = hypotheses * vocabulary + tokens
    torch.testing.assert_close(
        everything.flatten(1).gather(1, places), scores, rtol=0, atol=tolerance
    )
    assert all(len(set(row)) == count for row in places.tolist())
    if (
        dtype != torch.bfloat16 and vocabulary - 1 not in banned
    ):  # the first row's last entry is the best of all
        assert (hypotheses[0, 0], tokens[0, 0]) == (0, vocabulary - 1)


@pytest.mark.parametrize("vocabulary", [30, 2100])
def test_hypotheses_without_logits_have_no_continuations(vocabulary):
    running = -torch.rand(3, 4, dtype=torch.float64)
    open_rows = torch.tensor([0, 1, 5, 8, 9, 11])
    logits = torch.randn(12, vocabulary, dtype=torch.float64)
    closed = running.clone().flatten()
    closed[[row for row in range(12) if row not in open_rows.tolist()]] = -torch.inf
    expected = best_continuations(logits, closed.view(3, 4), 8)
    given = best_continuations(logits[open_rows], running, 8, open_rows)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_hypotheses_that_cannot_win_are_forgotten(tiny_model, source, monkeypatch):
    widths = []
    step = IncrementalDecoder.step

    def watched(self, tokens, parents, open_rows=None):
        widths.append((tokens.numel(), None if open_rows is None else len(open_rows)))
        return step(self, tokens, parents, open_rows)

    monkeypatch.setattr(IncrementalDecoder, "step", watched)
    for seed in range(4):
        model = tiny_model(seed=seed)
        call = {"num_beams": 4, "return_dict_in_generate": True, "eos_token_id": [2, 5, 6]}
        ours = model.generate(**source, **call)
        theirs = model.generate(**source, **call, output_scores=True)
        assert torch.equal(ours.sequences, theirs.sequences)
    narrowed = [(rows, kept) for rows, kept in widths if kept is not None]
    assert narrowed
    assert all(0 < kept < rows for rows, kept in narrowed)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_source_of_nothing_but_padding_gives_a_defined_sentence(tiny_model, source, num_beams):
    model = tiny_model()
    source["attention_mask"][1] = 0
    ours = model.generate(**source, num_beams=num_beams)
    theirs = model.generate(
        **source, num_beams=num_beams, output_scores=True, return_dict_in_generate=True
    )
    assert torch.equal(ours, theirs.sequences)


def test_d_k_and_d_v_may_differ_and_norms_come_first(tiny_model, source):
    for overrides in ({"d_k": 3, "d_v": 5}, {"norm_position": "pre"}, {"attention_bias": True}):
        model = tiny_model(**overrides)
        call = {"num_beams": 3, "return_dict_in_generate": True}
        ours = model.generate(**source, **call)
        theirs = model.generate(**source, **call, output_scores=True)
        assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("kind", ["gnmt", "hf"])
@pytest.mark.parametrize("alpha", [-1.0, -8.0, -30.0])
def test_a_negative_penalty_however_strong_ranks_whole_sentences(tiny_model, source, kind, alpha):
    model = tiny_model()
    call = {"num_beams": 3, "length_penalty_type": kind, "max_new_tokens": 8}
    output = model.generate(**source, **call, length_penalty=alpha, return_dict_in_generate=True)
    for row, (tokens, score) in enumerate(
        zip(output.sequences, output.sequences_scores, strict=True)
    ):
        tokens = tokens[1:].tolist()
        length = tokens.index(2) + 1 if 2 in tokens else len(tokens)
        single = {name: tensor[row : row + 1] for name, tensor in source.items()}
        (total,) = log_probabilities_of(model, single, [tokens[:length]])
        divisor = ((5 + length) / 6 if kind == "gnmt" else length) ** alpha
        assert score.item() == pytest.approx(total / divisor, rel=1e-9)


def test_two_evaluations_of_the_trainer_come_out_whole(tiny_model, source):
    model = tiny_model()
    whole = model.generate(**source, eos_token_id=None)
    model.generation_config.max_length = 20  # Seq2SeqTrainer sets this value
    assert torch.equal(model.generate(**source, eos_token_id=None), whole)
    assert whole.shape[1] == 1 + 7 + 50


def test_a_cache_without_memory_for_spare_room_makes_the_room_that_it_needs(
    tiny_model, source, monkeypatch
):
    model, asked = tiny_model(), []
    expected = model.generate(**source, num_beams=2)

    def scarce(shape, *args):
        asked.append(shape[3])
        if shape[3] > room:
            raise RuntimeError("not enough memory")
        return torch.empty(shape, dtype=args[0])

    room = caches_vaswani._FIRST_ROOM * 8
    monkeypatch.setattr(caches_vaswani, "empty", scarce)
    assert torch.equal(model.generate(**source, num_beams=2), expected)
    monkeypatch.setattr(caches_vaswani, "_SPARE_ROOM", 1000)
    assert torch.equal(model.generate(**source, num_beams=2), expected)
    assert max(asked) > room
    room = 0
    with pytest.raises(RuntimeError, match="not enough memory"):
        model.generate(**source, num_beams=2)
