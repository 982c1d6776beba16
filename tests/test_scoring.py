"""Forced decoding gives the numbers of the network and of its beam search, pair by pair."""

import copy
import operator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.generation import scoring_vaswani
from vaswani.generation.batches_vaswani import batches_by_length

from vaswani import VaswaniTokenizer

FROZEN = Path(__file__).resolve().parent / "frozen" / "0.1"
SOURCES = [[5, 7, 2], [3, 4, 5, 6, 7, 8, 9, 2], [11, 2], [2], [3, 18, 17, 2], [12, 13, 14, 15, 2]]
TARGETS = [[9, 8, 7, 6, 2], [10, 2], [4, 5, 6, 7, 8, 9, 10, 11, 2], [3, 2], [2], [6, 6, 6]]


@pytest.fixture(scope="module")
def frozen():
    """A trained model of number words and its tokenizer."""
    return (
        AutoModelForSeq2SeqLM.from_pretrained(FROZEN).eval(),
        AutoTokenizer.from_pretrained(FROZEN),
    )


def by_definition(model, source, target):
    """Return log P(y_t | y_<t, x) of a single pair, from the logits of the plain network."""
    start = model.config.decoder_start_token_id
    inputs = {"input_ids": [source], "decoder_input_ids": [[start, *target[:-1]]]}
    with torch.no_grad():
        logits = model(**{name: torch.tensor(ids) for name, ids in inputs.items()}).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.stack([logits[t].log_softmax(-1)[token] for t, token in enumerate(target)])


def attention_by_definition(model, source, target):
    """Return the eager network's attention of a single pair: (layers, heads, T, S)."""
    inputs = {"input_ids": [source], "decoder_input_ids": [[2, *target[:-1]]]}
    tensors = {name: torch.tensor(ids) for name, ids in inputs.items()}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**tensors, output_attentions=True).cross_attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(attentions)[:, 0]


# score


@pytest.mark.parametrize("max_tokens", [1, 12, 4096])
def test_log_probs_are_those_of_the_network_for_each_pair_alone(tiny_model, max_tokens):
    model = tiny_model()
    scores = model.score(SOURCES, TARGETS, max_tokens=max_tokens)
    for found, source, target in zip(scores.log_probs, SOURCES, TARGETS, strict=True):
        expected = by_definition(model, source, target)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    sums = [values.sum() for values in scores.log_probs]
    torch.testing.assert_close(scores.sums, torch.stack(sums), rtol=0, atol=0)


@pytest.mark.parametrize("output_scores", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("kind", "alpha"), [("gnmt", 0.6), ("gnmt", 1.7), ("hf", 1.3), ("hf", 0.0)]
)
def test_scores_are_what_beam_search_reports_for_its_own_output(
    frozen, kind, alpha, dtype, output_scores
):
    model, tokenizer = copy.deepcopy(frozen[0]).to(dtype), frozen[1]
    model.generation_config.update(length_penalty_type=kind, length_penalty=alpha)
    english = ["three hundred and forty-two", "seven", "nine", "a thousand"]
    inputs = tokenizer(english, padding=True, return_tensors="pt")
    output = model.generate(
        **inputs,
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=output_scores,
    )
    ended = (output.sequences[:, 1:] == tokenizer.eos_token_id).any(1)
    assert ended.any()
    assert not ended.all()  # some are cut off by the limit
    reported = output.sequences_scores
    sources = inputs["input_ids"].repeat_interleave(3, dim=0)
    found = model.score(sources, output.sequences[:, 1:]).sequences_scores.to(reported.dtype)
    # transformers' search sums in float32 for all dtypes of the model.
    tolerance = 1e-10 if reported.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, reported, rtol=tolerance, atol=tolerance)


def test_scores_are_sums_over_the_length_penalty_to_the_last_digits(tiny_model):
    model = tiny_model()
    expected = [by_definition(model, *pair).sum() for pair in zip(SOURCES, TARGETS, strict=True)]
    lengths = [len(target) for target in TARGETS]
    for settings, penalties in (
        ({}, [((5 + length) / 6) ** 0.6 for length in lengths]),
        ({"length_penalty": 1.5}, [((5 + length) / 6) ** 1.5 for length in lengths]),
        (
            {"length_penalty_type": "hf", "length_penalty": 2},
            [float(length**2) for length in lengths],
        ),
    ):
        found = model.score(SOURCES, TARGETS, **settings).sequences_scores
        by_hand = torch.stack(expected) / torch.tensor(penalties, dtype=torch.float64)
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-10)


def test_strings_are_scored_with_the_end_that_the_tokenizer_gives_them(frozen):
    model, tokenizer = frozen
    english, german = ["three hundred and forty-two", "seven"], ["dreihundert", "sieben"]
    from_strings = model.score(english, german, tokenizer)
    ids = (tokenizer(english)["input_ids"], tokenizer(text_target=german)["input_ids"])
    assert all(sentence[-1] == tokenizer.eos_token_id for side in ids for sentence in side)
    from_ids = model.score(*ids)
    assert torch.equal(from_strings.sums, from_ids.sums)
    wrong = model.score(english, ["acht", "acht"], tokenizer)
    assert (from_strings.sums > wrong.sums).all()


def test_scores_follow_the_special_tokens_of_the_generation_config(tiny_model, padded_batch):
    model = tiny_model()
    sources, mask = padded_batch([5, 3, 4])
    settings = model.generation_config
    settings.decoder_start_token_id, settings.pad_token_id = 5, 2
    settings.eos_token_id = [2, 7, 11]
    call = {"num_beams": 3, "max_new_tokens": 9, "return_dict_in_generate": True}
    output = model.generate(sources, attention_mask=mask, **call)
    rows = [row[:length] for row, length in zip(sources, mask.sum(1), strict=True)]
    found = model.score(rows, output.sequences[:, 1:]).sequences_scores
    torch.testing.assert_close(found, output.sequences_scores, rtol=1e-9, atol=0)


def test_padding_at_the_end_counts_for_nothing(tiny_model):
    model = tiny_model()
    source = torch.tensor([[5, 7, 2, 0, 0], [3, 4, 5, 6, 2]])
    labels = torch.tensor([[9, 8, 2, -100], [3, 4, 5, 2]])
    padded = model.score(source, labels.masked_fill(labels == -100, 0))
    ignored = model.score(list(source), list(labels))
    plain = model.score([[5, 7, 2], [3, 4, 5, 6, 2]], [[9, 8, 2], [3, 4, 5, 2]])
    assert [len(values) for values in padded.log_probs] == [3, 4]
    assert torch.equal(padded.sums, plain.sums)
    assert torch.equal(ignored.sums, plain.sums)


def test_padding_on_the_left_counts_for_nothing(tiny_model):
    model = tiny_model()
    padded = [[0, 0, 5, 7, 2]], torch.tensor([[-100, 0, 9, 8, 2, 0]])
    plain = [[5, 7, 2]], [[9, 8, 2]]
    assert torch.equal(model.score(*padded).sums, model.score(*plain).sums)
    assert model.align(*padded) == model.align(*plain)
    model.generation_config.pad_token_id = 2
    assert torch.equal(model.score([[-100, 2, 5]], [[2]]).sums, model.score([[2, 5]], [[2]]).sums)


def test_where_the_end_is_the_padding_one_end_is_scored(tiny_model):
    model = tiny_model(pad_token_id=2)
    padded = model.score([[5, 7, 2]], torch.tensor([[9, 8, 2, 2, 2]]))
    assert [len(values) for values in padded.log_probs] == [3]
    assert torch.equal(padded.sums, model.score([[5, 7, 2]], [[9, 8, 2]]).sums)


def test_logits_are_held_for_a_bounded_number_of_tokens(tiny_model, monkeypatch):
    model = tiny_model()
    whole = model.score(SOURCES, TARGETS)
    shapes = []
    model.lm_head.register_forward_hook(lambda _, __, logits: shapes.append(logits.shape))
    monkeypatch.setattr(scoring_vaswani, "_LOGITS_AT_ONCE", 4 * 19)
    chunked = model.score(SOURCES, TARGETS)
    assert max(rows for rows, _ in shapes) == 4
    assert sum(rows for rows, _ in shapes) == sum(map(len, TARGETS))
    torch.testing.assert_close(chunked.sums, whole.sums, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_tokens", [5, 16, 40])
def test_batches_are_bounded_on_both_sides_and_hold_every_pair_once(max_tokens):
    generator = torch.Generator().manual_seed(0)
    lengths = [tuple(pair) for pair in torch.randint(1, 12, (60, 2), generator=generator).tolist()]
    batches = list(batches_by_length(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        for side in (0, 1):
            padded = len(batch) * max(lengths[index][side] for index in batch)
            assert padded <= max_tokens or len(batch) == 1
    assert len(batches) < 60


def test_the_network_sees_only_batches_within_the_budget(tiny_model):
    model = tiny_model()
    seen = []
    model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(
            (given["input_ids"].shape, given["decoder_input_ids"].shape)
        ),
        with_kwargs=True,
    )
    model.score(SOURCES, TARGETS, max_tokens=18)
    assert len(seen) > 1
    assert all(source.numel() <= 18 and target.numel() <= 18 for source, target in seen)
    assert sum(source[0] for source, _ in seen) == len(SOURCES)


def test_dropout_is_off_and_every_module_trains_again_that_trained_before(tiny_model):
    model = tiny_model(dropout=0.5)
    expected = model.score(SOURCES, TARGETS).sums
    model.train()
    model.model.encoder.eval()  # a part that is frozen
    modes = [module.training for module in model.modules()]
    assert torch.equal(model.score(SOURCES, TARGETS).sums, expected)
    assert [module.training for module in model.modules()] == modes
    model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.score(SOURCES, TARGETS)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_evaluations_that_overlap_leave_the_modes_to_the_last(tiny_model):
    model = tiny_model().train()
    model.model.encoder.eval()  # a part that is frozen
    modes = [module.training for module in model.modules()]
    evaluated = (model, model.model, model)
    contexts = [scoring_vaswani.evaluation_mode(module) for module in evaluated]
    for context in contexts:
        context.__enter__()
    for context in contexts:
        assert not any(module.training for module in model.modules())
        context.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == modes
    assert not scoring_vaswani._evaluated


def test_threads_score_a_model_in_training_without_dropout(tiny_model):
    model = tiny_model(dropout=0.5)
    expected = model.score(SOURCES, TARGETS).sums
    model.train()
    with ThreadPoolExecutor(4) as threads:
        scores = threads.map(lambda _: model.score(SOURCES, TARGETS).sums, range(12))
        assert all(torch.equal(sums, expected) for sums in scores)
    assert all(module.training for module in model.modules())


def test_nothing_is_recorded_for_gradients(tiny_model):
    scores = tiny_model().score(SOURCES, TARGETS)
    assert not any(values.requires_grad for values in (*scores.log_probs, scores.sums))


def test_half_precision_models_give_float32_of_their_own_logits(tiny_model):
    model = tiny_model(dtype=torch.bfloat16)
    scores = model.score(SOURCES[:1], TARGETS[:1])
    assert scores.log_probs[0].dtype == scores.sums.dtype == torch.float32
    expected = by_definition(model, SOURCES[0], TARGETS[0])
    torch.testing.assert_close(scores.log_probs[0], expected, rtol=0, atol=1e-5)


def test_a_head_that_was_wrapped_is_not_bypassed(tiny_model):
    model = tiny_model()
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(19, 19).double())
    scores = model.score(SOURCES, TARGETS)
    expected = [by_definition(model, *pair).sum() for pair in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(scores.sums, torch.stack(expected), rtol=0, atol=1e-10)


def test_separate_vocabularies_have_their_own_sizes(tiny_model):
    model = tiny_model(decoder_vocab_size=30, share_encoder_decoder_embeddings=False)
    assert torch.isfinite(model.score([[18, 2]], [[29, 2]]).sums).all()
    with pytest.raises(ValueError, match=r"sources\[0\] has the token id 29, outside the 19"):
        model.score([[29, 2]], [[29, 2]])


def test_no_pairs_give_no_scores(tiny_model):
    model = tiny_model()
    scores = model.score([], [])
    assert (scores.log_probs, scores.sums.tolist(), scores.sequences_scores.tolist()) == (
        [],
        [],
        [],
    )
    assert (model.align([], []), model.soft_align([], [])) == ([], [])


@pytest.mark.parametrize("method", ["score", "align", "soft_align"])
@pytest.mark.parametrize(
    ("sources", "targets", "error", "complaint"),
    [
        ([[5, 2]], [[5, 2], [6, 2]], ValueError, "1 sources and 2 targets"),
        ([[5, 2], []], [[5, 2], [6, 2]], ValueError, r"sources\[1\] has no tokens"),
        ([[5, 2]], [[0, 0]], ValueError, r"targets\[0\] has no tokens"),
        ([[5, 2]], [[5, 19, 2]], ValueError, r"targets\[0\] has the token id 19, outside the 19"),
        ([[-7, 2]], [[5, 2]], ValueError, r"sources\[0\] has the token id -7"),
        ([[5.0, 2]], [[5, 2]], TypeError, r"sources\[0\] must be a string or a sequence"),
        ([5, 2], [5, 2], TypeError, r"sources\[0\] must be a string or a sequence"),
        ("a dog", ["a cat"], TypeError, "sources is one string"),
        (["a dog"], [[5, 2]], ValueError, "sources are strings: pass the tokenizer"),
        (["a dog", [5, 2]], [[5, 2], [5, 2]], TypeError, r"sources\[1\] is \[5, 2\], not a string"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_index_and_value(
    tiny_model, method, sources, targets, error, complaint
):
    with pytest.raises(error, match=complaint):
        getattr(tiny_model(), method)(sources, targets)


@pytest.mark.parametrize(
    ("penalty", "complaint"),
    [
        ({"length_penalty_type": "GNMT"}, "must be one of .*'gnmt', 'hf'.* got 'GNMT'"),
        ({"length_penalty": "1"}, "length_penalty must be a number, got '1'"),
        ({"length_penalty": float("nan")}, "length_penalty must lie between -64 and 64"),
    ],
)
def test_a_length_penalty_that_generate_refuses_is_refused(tiny_model, penalty, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny_model().score([[5, 2]], [[5, 2]], **penalty)


def test_pairs_longer_than_learned_positions_and_empty_budgets_are_refused(tiny_model):
    model = tiny_model(position_encoding="learned", max_position_embeddings=4)
    with pytest.raises(ValueError, match=r"targets\[1\] has 5 tokens, more than the 4 learned"):
        model.score([[5, 2], [5, 2]], [[5, 2], [5, 6, 7, 8, 2]])
    assert torch.isfinite(model.score([[5, 6, 7, 2]], [[5, 6, 7, 2]]).sums).all()
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        model.score([[5, 2]], [[5, 2]], max_tokens=0)


def test_pairs_may_come_from_generators_and_one_string_is_no_list(frozen):
    model, tokenizer = frozen
    english, german = ["seven", "eleven"], ["sieben", "elf"]
    for method in (model.score, model.align):
        given = [(text for text in side) for side in (english, german)]
        assert str(method(*given, tokenizer)) == str(method(english, german, tokenizer))
        with pytest.raises(TypeError, match="targets is one string: pass a list"):
            method(english, "sieben", tokenizer)


# align


@pytest.mark.parametrize("overrides", [{}, {"norm_position": "pre"}, {"d_k": 3, "d_v": 5}])
@pytest.mark.parametrize(
    ("layer", "heads", "layers_averaged", "heads_averaged"),
    [
        (None, None, [0, 1, 2], [0, 1, 2, 3]),
        (0, None, [0], [0, 1, 2, 3]),
        (-1, [2], [2], [2]),
        ([0, -1], [0, -1], [0, 2], [0, 3]),
        (range(1, 3), None, [1, 2], [0, 1, 2, 3]),
    ],
)
def test_soft_alignments_are_the_attention_of_the_eager_network(
    tiny_model, overrides, layer, heads, layers_averaged, heads_averaged
):
    model = tiny_model(decoder_layers=3, **overrides)
    found = model.soft_align(SOURCES, TARGETS, layer=layer, heads=heads, max_tokens=20)
    for weights, source, target in zip(found, SOURCES, TARGETS, strict=True):
        attention = attention_by_definition(model, source, target)
        expected = attention[layers_averaged][:, heads_averaged].mean(dim=(0, 1))
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(target)).double())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_alignment_leaves_the_attention_implementation_and_the_layers_alone(
    tiny_model, implementation
):
    model = tiny_model(attn_implementation=implementation).train()
    during = []
    attention = model.model.decoder.layers[0].encoder_attn
    handle = attention.register_forward_hook(
        lambda module, _, output: during.append((module.config._attn_implementation, output[1]))
    )
    model.align(SOURCES, TARGETS, layer=0)
    handle.remove()
    assert {name for name, _ in during} == {implementation}
    assert all((weights is None) == (implementation == "sdpa") for _, weights in during)

    def fail(*_):
        raise KeyboardInterrupt

    handle = attention.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.align(SOURCES, TARGETS, layer=0)
    handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("training", [False, True])
def test_calls_during_an_alignment_do_not_disturb_it(tiny_model, training):
    model = tiny_model()
    batch = {"input_ids": torch.tensor(SOURCES[1:2]), "num_beams": 2, "max_new_tokens": 5}
    expected = model.soft_align(SOURCES, TARGETS)
    translation = model.generate(**batch)
    model.train(training)
    inner = []

    def call_once(*_):  # as another thread would
        if not inner:
            inner.append(None)
            inner.append(model.soft_align(SOURCES[:1], TARGETS[:1]))
            with model.evaluating():
                inner.append(model.generate(**batch))

    handle = model.model.encoder.register_forward_hook(call_once)
    found = model.soft_align(SOURCES, TARGETS)
    handle.remove()
    for weights, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(weights, reference)
    torch.testing.assert_close(inner[1][0], expected[0])
    assert torch.equal(inner[2], translation)
    assert all(module.training == training for module in model.modules())


def test_a_sharing_copy_holds_no_tensors_of_its_own(tiny_model):
    model = tiny_model()
    model.lm_head._hf_hook = hook = object()  # as Accelerate's hooks
    shared = scoring_vaswani.sharing_copy(model)
    assert not {*map(id, model.modules())} & {*map(id, shared.modules())}
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        assert all(map(operator.is_, tensors(model), tensors(shared)))
    assert shared.lm_head._hf_hook is hook
    next(model.parameters()).device_mesh = None  # as the weights of FSDP2 have
    assert scoring_vaswani.sharing_copy(model) is model


@pytest.mark.parametrize("part", ["model.encoder", "model.decoder", "model.decoder.layers.0"])
def test_attention_is_read_from_parts_that_torch_compile_wrapped(tiny_model, part):
    model = tiny_model()
    expected = model.soft_align(SOURCES, TARGETS)
    parent, _, name = part.rpartition(".")
    parent = model.get_submodule(parent)
    parent._modules[name] = torch.compile(parent._modules[name], backend="eager")
    for _ in range(2):  # the first call compiles
        for weights, reference in zip(model.soft_align(SOURCES, TARGETS), expected, strict=True):
            torch.testing.assert_close(weights, reference)
    assert hasattr(parent._modules[name], "_orig_mod")  # the model keeps its wrapper


def test_links_do_not_depend_on_what_shares_a_batch(tiny_model):
    model = tiny_model()
    assert model.align(SOURCES, TARGETS, max_tokens=1) == model.align(SOURCES, TARGETS)


def test_token_links_are_the_strongest_attention_without_the_ends(tiny_model):
    model = tiny_model()
    links = model.align(SOURCES, TARGETS)
    with_ends = model.align(SOURCES, TARGETS, with_eos=True)
    for i, weights in enumerate(model.soft_align(SOURCES, TARGETS)):
        inner = weights[: len(TARGETS[i]) - (TARGETS[i][-1] == 2), : len(SOURCES[i]) - 1]
        best = inner.argmax(1).tolist() if inner.numel() else []
        assert links[i] == " ".join(f"{s}-{t}" for t, s in enumerate(best))
        best = weights.argmax(1).tolist()
        assert with_ends[i] == " ".join(f"{s}-{t}" for t, s in enumerate(best))
    assert links[3:5] == ["", ""]  # a source, and a target, with only "</s>"
    assert len(links[5].split()) == 3  # a target cut off before its end


def test_words_are_linked_where_their_tokens_are(tiny_model, monkeypatch):
    """The attention is given by hand, with characters as tokens."""
    model = tiny_model(vocab_size=40)
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["ab cd", "xy z"], kind="char", vocab_size=40, show_progress=False
    )
    #                         a    b   " "   c    d   </s>
    weights = torch.tensor([[0.4, 0.1, 0.1, 0.1, 0.1, 0.2],   # x -> a
                            [0.1, 0.1, 0.1, 0.2, 0.4, 0.1],   # y -> d
                            [0.9, 0.0, 0.0, 0.0, 0.0, 0.1],   # " " -> a, but is not a word
                            [0.0, 0.0, 0.5, 0.1, 0.0, 0.4],   # z -> c: space and end are no words
                            [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])  # fmt: skip
    monkeypatch.setattr(model, "_attention", lambda *_: iter([(0, weights)]))
    assert model.align(["ab cd"], ["xy z"], tokenizer) == ["0-0 1-0 1-1"]
    assert model.align(["ab cd"], ["xy z"], tokenizer, level="token") == ["0-0 4-1 0-2 2-3"]


def test_string_links_count_words_and_id_links_count_tokens(frozen):
    model, tokenizer = frozen
    english, german = ["  three hundred and  seven", "", "six"], ["dreihundert sieben ", "acht", ""]
    (links, *others) = model.align(english, german, tokenizer)
    pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
    assert {target for _, target in pairs} == {0, 1}
    assert {source for source, _ in pairs} <= {0, 1, 2, 3}
    assert others == ["", ""]
    ids = (tokenizer(english)["input_ids"], tokenizer(text_target=german)["input_ids"])
    by_token = model.align(english, german, tokenizer, level="token")
    assert by_token == model.align(*ids)
    assert len(by_token[0].split()) == len(ids[1][0]) - 1
    assert len(by_token[0].split()) > len(pairs)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"layer": 2}, r"layer must name some of the 2 layers .* got \[2\]"),
        ({"layer": -3}, r"layer must name some of the 2 layers .* got \[-3\]"),
        ({"heads": [0, 4]}, r"heads must name some of the 4 heads .* got \[4\]"),
        ({"heads": []}, r"heads must name some of the 4 heads .* got \[\]"),
        ({"level": "sentence"}, "level must be 'word' or 'token', got 'sentence'"),
        ({"level": "word"}, "level='word' needs strings"),
    ],
)
def test_layers_heads_and_levels_that_do_not_exist_are_refused(tiny_model, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny_model().align(SOURCES, TARGETS, **settings)


def test_strings_of_separate_vocabularies_are_read_by_their_own_tokenizers(tiny_model, tmp_path):
    english, german = ["one two three", "three one"], ["drei eins", "eins zwei"]
    source, target = (
        VaswaniTokenizer.train_from_iterator(lines, "word", vocab_size=30, show_progress=False)
        for lines in (english, [*german, "sechs sieben"])
    )
    model = tiny_model(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
    )
    source.save_pretrained(tmp_path)
    source = VaswaniTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no subfolder target_tokenizer: pass target_tokenizer"):
        model.score(english, german, source)
    ids = source(english)["input_ids"], target(text_target=german)["input_ids"]
    expected = model.score(*ids).sums
    assert torch.equal(model.score(english, german, source, target_tokenizer=target).sums, expected)
    target.save_pretrained(tmp_path / "target_tokenizer")
    assert torch.equal(model.score(english, german, source).sums, expected)
    assert model.align(english, german, source) == model.align(*ids)


def test_one_vocabulary_may_have_a_tokenizer_for_each_side(tiny_model, tmp_path):
    lines = ["One two", "three one"]
    source, target = (
        VaswaniTokenizer.train_from_iterator(lines, "word", vocab_size=30, show_progress=False)
        for _ in range(2)
    )
    target.backend_tokenizer.normalizer = normalizers.Lowercase()
    model = tiny_model(vocab_size=len(source))
    source.save_pretrained(tmp_path)
    source = VaswaniTokenizer.from_pretrained(tmp_path)
    assert model.target_tokenizer(source) is source
    target.save_pretrained(tmp_path / "target_tokenizer")
    assert model.target_tokenizer(source)("One").input_ids == target("One").input_ids
    assert target("One").input_ids != source("One").input_ids
    expected = model.score(source(["two"]).input_ids, target(["One"]).input_ids).sums
    assert torch.equal(model.score(["two"], ["One"], source).sums, expected)


def test_scores_print_as_a_table_with_a_line_for_each_pair(tiny_model):
    scores = tiny_model().score([[3, 4, 2], [5, 2]], [[6, 7, 8, 2], [9, 2]])
    head, *rows = str(scores).splitlines()
    assert head.split() == ["pair", "tokens", "sum", "score", "per", "token"]
    for number, row in enumerate(rows):
        total, ranked = scores.sums[number].item(), scores.sequences_scores[number].item()
        tokens = len(scores.log_probs[number])
        figures = [f"{figure:.3f}" for figure in (total, ranked, total / tokens)]
        assert row.split() == [str(number), str(tokens), *figures]
    assert len(rows) == 2


def test_scores_do_not_depend_on_the_default_device(tiny_model):
    model, pairs = tiny_model(), ([[4, 5, 2], [6, 2]], [[7, 2], [8, 9, 2]])
    expected = model.score(*pairs)
    torch.set_default_device("meta")
    try:
        found = model.score(*pairs)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found.sequences_scores, expected.sequences_scores)
