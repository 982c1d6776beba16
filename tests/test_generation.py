"""`generate` with all forms of inputs and settings, and the paper's limits in each of them."""

import copy
import inspect
import json
import re

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from vaswani.generation import generation_vaswani
from vaswani.generation.library_vaswani import library

from vaswani import VaswaniForConditionalGeneration, VaswaniGenerationConfig


@pytest.fixture
def source(padded_batch):
    input_ids, attention_mask = padded_batch([7, 4, 2])
    return {"input_ids": input_ids, "attention_mask": attention_mask}


compiled = pytest.mark.skipif(library() is None, reason="this machine compiles no kernels")


def never_ending(model):
    """Make the end token impossible, so that only a limit stops the model."""
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}])
def test_every_way_of_passing_the_source_gives_the_same_sentences(tiny_model, source, search):
    model = tiny_model()
    encoded = model.get_encoder()(**source)
    embedded = model.get_input_embeddings()(source["input_ids"])
    mask = {"attention_mask": source["attention_mask"]}
    outputs = []
    for way in (
        {"inputs": source["input_ids"], **mask},
        {"inputs_embeds": embedded, **mask},
        {"encoder_outputs": copy.copy(encoded), **mask},
        {**source, "generation_config": GenerationConfig(**search)},
    ):
        torch.manual_seed(1)
        own = {} if "generation_config" in way else search
        outputs.append(model.generate(**way, **own))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}])
def test_embedded_sources_run_the_fast_search(tiny_model, source, search, caplog):
    caplog.set_level("INFO")
    model = tiny_model()
    embedded = model.get_input_embeddings()(source["input_ids"])
    for mask in ({}, {"attention_mask": source["attention_mask"]}):
        model.generate(inputs_embeds=embedded, **mask, **search)
    assert "The fast search does not cover" not in caplog.text


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}])
def test_without_a_cache_the_sentences_are_the_same(tiny_model, source, search):
    model = tiny_model()
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        outputs.append(model.generate(**source, **search, use_cache=use_cache))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_no_length_penalty_is_the_default_of_transformers(tiny_model, source, num_beams):
    model = tiny_model()
    found = model.generate(**source, num_beams=num_beams, length_penalty=None)
    assert torch.equal(found, model.generate(**source, num_beams=num_beams, length_penalty=1.0))


def test_settings_of_the_search_in_the_configuration_are_refused(tiny_model, source):
    model = tiny_model()
    model.config.num_beams = 4
    with pytest.raises(ValueError, match=r"\(num_beams\).* set them in model.generation_config"):
        model.generate(**source)


@pytest.mark.parametrize("prompt", [[[2, 5, 6]], [[5, 6]]])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_prefix_is_kept_and_does_not_count_against_the_limit(
    tiny_model, source, prompt, num_beams
):
    model = never_ending(tiny_model())
    output = model.generate(
        **source, decoder_input_ids=torch.tensor(prompt * 3), num_beams=num_beams
    )
    assert (output[:, :3] == torch.tensor([2, 5, 6])).all()
    lengths = (output[:, 3:] != 0).sum(dim=1) if num_beams == 1 else None
    assert output.shape[1] == 3 + 7 + 50
    if lengths is not None:
        assert lengths.max() <= 57


@pytest.mark.parametrize("start", [7, [7, 7, 7]])
def test_the_calls_own_start_token_counts_as_the_start_of_a_prefix(tiny_model, source, start):
    model = never_ending(tiny_model())
    prompt = torch.tensor([[7, 5]] * 3)
    output = model.generate(**source, decoder_input_ids=prompt, decoder_start_token_id=start)
    assert output.shape[1] == 2 + 7 + 50
    assert torch.equal(output[:, :2], prompt)


def test_bos_starts_where_no_start_token_is_set(tiny_model, source):
    model = never_ending(tiny_model())
    model.generation_config.decoder_start_token_id = None
    model.generation_config.bos_token_id = 9
    output = model.generate(**source, decoder_input_ids=torch.tensor([[5]] * 3))
    assert (output[:, :2] == torch.tensor([9, 5])).all()
    assert output.shape[1] == 2 + 7 + 50


def test_any_of_several_end_tokens_ends_a_sentence(tiny_model, source):
    model = tiny_model()
    ends = [2, 5, 6, 7, 8]
    for search in ({}, {"num_beams": 3}):
        for row in model.generate(**source, eos_token_id=ends, **search)[:, 1:].tolist():
            written = row[: max(i for i, token in enumerate(row) if token) + 1]
            assert not set(written[:-1]) & set(ends)


def test_assisted_decoding_equals_greedy_search(tiny_model, source):
    model, assistant = tiny_model(), tiny_model(seed=3)
    one = source["input_ids"][:1]
    assert torch.equal(model.generate(one, assistant_model=assistant), model.generate(one))


def test_n_best_sentences_differ_and_their_scores_descend(tiny_model, source):
    output = tiny_model().generate(
        **source,
        num_beams=4,
        num_return_sequences=4,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for sentences, scores in zip(
        output.sequences.split(4), output.sequences_scores.split(4), strict=True
    ):
        assert len({tuple(row) for row in sentences.tolist()}) == 4
        assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_a_given_cache_is_used_and_returned(tiny_model, source):
    model = tiny_model()
    cache = EncoderDecoderCache(
        DynamicCache(config=model.config), DynamicCache(config=model.config)
    )
    output = model.generate(
        **source, past_key_values=cache, max_new_tokens=4, return_dict_in_generate=True
    )
    assert output.past_key_values is cache
    assert cache.get_seq_length() == output.sequences.shape[1] - 1


@compiled
@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_cache_of_transformers_is_made_for_its_searches_alone(
    num_beams, tiny_model, source, monkeypatch
):
    made = []
    prepare = GenerationMixin._prepare_cache_for_generation

    def prepare_and_count(*arguments):
        made.append(arguments)
        prepare(*arguments)

    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", prepare_and_count)
    call = {**source, "num_beams": num_beams, "max_new_tokens": 4, "return_dict_in_generate": True}
    model = tiny_model()
    model.generate(**call)
    assert not made
    output = model.generate(**call, output_scores=True)
    assert len(made) == 1
    assert output.past_key_values.get_seq_length() > 0


@pytest.mark.parametrize("by_name", [True, False])
def test_a_custom_search_gets_a_cache(by_name, tiny_model, source):
    given = []

    def search(model, input_ids, *args, past_key_values, **kwargs):
        given.append((model, past_key_values))
        return input_ids

    model = tiny_model()
    names = list(inspect.signature(GenerationMixin.generate).parameters)
    between = [None] * (names.index("custom_generate") - names.index("generation_config"))
    if by_name:
        model.generate(**source, custom_generate=search)
    else:
        mask = source["attention_mask"]
        model.generate(source["input_ids"], *between, search, attention_mask=mask)
    ((found, cache),) = given
    assert found is model
    assert isinstance(cache, EncoderDecoderCache)


def test_more_beams_than_vocabulary_entries_work(tiny_model, source):
    output = tiny_model().generate(**source, num_beams=25, max_new_tokens=3)
    assert output.shape[0] == 3


def test_a_limit_of_learned_positions_does_not_bind_sinusoids(tiny_model, source):
    model = never_ending(tiny_model(max_position_embeddings=8))
    assert model.generate(**source).shape[1] == 1 + 7 + 50


@pytest.mark.parametrize("where", ["file", "argument"])
def test_a_generation_config_that_says_little_keeps_the_papers_rules(tiny_model, tmp_path, where):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    kwargs = {}
    if where == "file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 3}))
    else:
        kwargs["generation_config"] = GenerationConfig(num_beams=3)
    config = VaswaniForConditionalGeneration.from_pretrained(tmp_path, **kwargs).generation_config
    assert isinstance(config, VaswaniGenerationConfig)
    assert (config.num_beams, config.length_penalty_type, config.length_penalty) == (3, "gnmt", 0.6)
    assert (config.max_length_offset, config.decoder_start_token_id) == (50, 2)


def test_a_plain_generation_config_on_the_model_still_knows_our_settings(tiny_model, source):
    model = tiny_model()
    expected = model.generate(**source, num_beams=3)
    model.generation_config = GenerationConfig(
        eos_token_id=2, pad_token_id=0, decoder_start_token_id=2
    )
    output = model.generate(
        **source,
        num_beams=3,
        length_penalty_type="gnmt",
        length_penalty=0.6,
        early_stopping="never",
        max_length_offset=50,
    )
    assert torch.equal(output, expected)


SENSELESS = [
    ("max_length", 10**12),
    ("max_length", 10**40),
    ("max_length", float("inf")),
    ("max_length", "20"),
    ("max_new_tokens", 10**12),
    ("max_length_offset", 10**12),
    ("max_length_factor", 10.0**12),
    ("num_beams", 10**9),
    ("num_beams", "4"),
    ("num_beams", 2.0),
    ("num_return_sequences", 10**9),
    ("num_return_sequences", "2"),
    ("no_repeat_ngram_size", "3"),
    ("repetition_penalty", "high"),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [2, "3"]),
    ("pad_token_id", 0.0),
]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ({}, "at least one source sentence"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "at least one source sentence"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "sequences without tokens"),
        (
            {
                "input_ids": torch.zeros(0, 3, dtype=torch.long),
                "attention_mask": torch.zeros(0, 3, dtype=torch.long),
            },
            "at least one source sentence",
        ),
        (
            {"input_ids": torch.zeros(0, 3, dtype=torch.long), "max_new_tokens": 3},
            "at least one source sentence",
        ),
        ({"input_ids": torch.tensor([3, 4])}, r"batch of sentences \(B, S\).*\(2,\)"),
        (
            {"input_ids": torch.tensor([[3, 2]]), "attention_mask": torch.ones(1, 3)},
            r"^attention_mask has the shape \(1, 3\), but the sources have \(1, 2\): pass 1 or 0",
        ),
        (
            {"input_ids": torch.tensor([[3]]), "num_beams": 0},
            "num_beams must be an integer from 1 to 10000, got 0",
        ),
        ({"input_ids": torch.tensor([[3]]), "length_penalty": "x"}, "a number, got 'x'"),
        ({"input_ids": torch.tensor([[3]]), "max_length_offset": "5"}, "got '5'"),
        ({"input_ids": torch.tensor([[3]]), "max_length_offset": -1}, "got -1"),
        ({"input_ids": torch.tensor([[3]]), "length_penalty_type": "paper"}, "got 'paper'"),
        ({"input_ids": torch.tensor([[3]]), "length_penalty": float("nan")}, "got nan"),
        ({"input_ids": torch.tensor([[3]]), "length_penalty": 1000.0}, "between -64 and 64"),
        *[
            (
                {"input_ids": torch.tensor([[3]]), name: value},
                f"{name} must be .*got {re.escape(repr(value))}",
            )
            for name, value in SENSELESS
        ],
    ],
)
def test_calls_that_make_no_sense_are_refused_by_value(tiny_model, call, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny_model().generate(**call)


def test_a_mask_fits_the_encoded_source_whatever_the_ids_are(tiny_model):
    model = tiny_model()
    source = torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]])
    mask = (source > 0).long()
    encoded = model.model.encoder(source, mask)
    call = {"attention_mask": mask, "max_new_tokens": 4}
    beside = model.generate(torch.ones(2, 1, dtype=torch.long), encoder_outputs=encoded, **call)
    assert torch.equal(beside, model.generate(source, **call))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        *(
            ({name: [[3, 4]]}, f'{name} must be a Tensor, not a list: pass return_tensors="pt"')
            for name in ("inputs", "input_ids", "attention_mask", "decoder_input_ids")
        ),
        ({"generation_config": {"num_beams": 2}}, "must be a GenerationConfig, not a dict"),
    ],
)
def test_lists_and_dictionaries_are_refused_by_name(tiny_model, call, complaint):
    with pytest.raises(TypeError, match=complaint):
        tiny_model().generate(**{"inputs": torch.tensor([[3, 4]]), **call})


def test_prompts_of_one_source_are_continued_as_each_alone(tiny_model, searches):
    model, source = tiny_model(dtype=torch.float32), torch.tensor([[3, 4, 5]])
    prompts = torch.tensor([[2, 5], [2, 6], [2, 5]])
    call = {"num_beams": 1, "max_new_tokens": 6}
    found = model.generate(source, decoder_input_ids=prompts, **call)
    assert searches["_sample"] == 1
    for prompt, row in zip(prompts, found, strict=True):
        (alone,) = model.generate(source, decoder_input_ids=prompt[None], **call)
        assert row.tolist()[: len(alone)] == alone.tolist()


@pytest.mark.parametrize(
    ("sources", "prompts", "beams"), [(3, 1, 1), (3, 1, 4), (1, 3, 4), (2, 3, 1), (2, 4, 4)]
)
def test_another_number_of_prompts_than_sources_is_refused(tiny_model, sources, prompts, beams):
    ids, prompt = torch.full((sources, 4), 5), torch.full((prompts, 1), 2)
    with pytest.raises(ValueError, match=f"has {sources} sources?, but {prompts} prompts?"):
        tiny_model(dtype=torch.float32).generate(ids, decoder_input_ids=prompt, num_beams=beams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [40, 9000])
@pytest.mark.parametrize("values", [(3, 0), slice(None)])
@pytest.mark.parametrize("name", ["lm_head", "model.decoder.layers.0.encoder_attn.q_proj"])
def test_a_beam_search_without_hypotheses_says_why(tiny_model, name, values, vocab_size, dtype):
    model = tiny_model(dtype=dtype, vocab_size=vocab_size, tie_word_embeddings=False)
    model.get_submodule(name).weight.data[values] = torch.nan
    with pytest.raises(ValueError, match=r"no hypotheses, .* NaN or -inf: look for NaN"):
        model.generate(torch.tensor([[3, 4, 1]]), num_beams=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [40, 9000])
def test_a_token_whose_embedding_is_nan_ends_a_beam_search_with_an_error(
    tiny_model, source, vocab_size, dtype
):
    model = tiny_model(dtype=dtype, vocab_size=vocab_size, tie_word_embeddings=False)
    model = never_ending(model)
    best = model.generate(**source, num_beams=3, max_new_tokens=4)
    model.model.decoder.embed_tokens.weight.data[best[1, 2]] = torch.nan
    with pytest.raises(ValueError, match="look for NaN in the model's weights"):
        model.generate(**source, num_beams=3, max_new_tokens=4)


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("decoder", torch.float32),
        ("decoder", torch.float64),
        pytest.param("encoder", torch.float32, marks=compiled),  # zeros with torch's SDPA
    ],
)
def test_attention_scores_that_are_all_infinite_have_no_softmax(tiny_model, source, part, dtype):
    model = tiny_model(dtype=dtype, attention_bias=True)
    attention = getattr(model.model, part).layers[0].self_attn
    attention.q_proj.bias.data.fill_(1e25 if dtype == torch.float32 else 1e200)
    attention.k_proj.bias.data.copy_(-attention.q_proj.bias)
    with pytest.raises(ValueError, match=r"no hypotheses, .* NaN or -inf"):
        model.generate(**source, num_beams=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_limit_with_a_fraction_is_rounded_up_as_in_greedy_search_of_transformers(
    tiny_model, source, num_beams, dtype
):
    model = never_ending(tiny_model(dtype=dtype))
    for limit in ({"max_length": 6.0}, {"max_new_tokens": 4.5}):
        found = model.generate(**source, **limit, num_beams=num_beams)
        assert torch.equal(found, model.generate(**source, max_length=6, num_beams=num_beams))
        scored = {"output_scores": True, "return_dict_in_generate": True}
        theirs = model.generate(**source, **limit, **scored).sequences
        assert num_beams > 1 or torch.equal(found, theirs)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"num_beams": 0}, "num_beams must be an integer from 1 to 10000, got 0"),
        ({"num_beams": 2, "length_penalty": "x"}, "a number, got 'x'"),
        ({"num_beams": 2, "length_penalty_type": "gnnt"}, "got 'gnnt'"),
    ],
)
def test_settings_of_the_calls_own_config_are_refused_too(tiny_model, source, setting, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny_model().generate(**source, generation_config=GenerationConfig(**setting))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        *[
            ({name: value}, f"{name} must be .*got {re.escape(repr(value))}")
            for name, value in SENSELESS
        ],
        ([{"num_beams": 4}], r"a mapping of names to values, got \[\{'num_beams': 4\}\]"),
        ("beam search", "a mapping of names to values, got 'beam search'"),
        (None, "a mapping of names to values, got None"),
    ],
)
def test_a_generation_config_without_meaning_is_refused_by_file_and_value(
    tiny_model, content, complaint, tmp_path
):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    message = rf"generation_config\.json of {tmp_path}: .*{complaint}.*Correct the file"
    for load in (AutoModelForSeq2SeqLM, VaswaniGenerationConfig):
        with pytest.raises(OSError, match=message):
            load.from_pretrained(tmp_path)


def test_the_longest_limit_ends_where_the_sentences_do(tiny_model, source):
    model = tiny_model()
    tokens = model.generate(**source, num_beams=1, max_length=9)[:, -1].tolist()
    call = {**source, "num_beams": 1, "eos_token_id": tokens}
    expected = model.generate(**call, max_length=40)
    assert expected.shape[1] <= 9
    assert torch.equal(model.generate(**call, max_length=10**6), expected)


def test_numbers_of_numpy_are_numbers(tiny_model, source):
    model = tiny_model()
    plain = {"num_beams": 2, "length_penalty": 0.5, "max_length_offset": 5}
    same = {"num_beams": 2, "length_penalty": np.float32(0.5), "max_length_offset": np.int64(5)}
    assert torch.equal(model.generate(**source, **same), model.generate(**source, **plain))


def test_rules_that_are_switched_off_stay_off_in_a_saved_model(tiny_model, source, tmp_path):
    model = tiny_model()
    model.generation_config.max_length_offset = None
    model.generation_config.length_penalty_type = None
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    call = {**source, "num_beams": 3, "return_dict_in_generate": True}
    expected = model.generate(**call)
    # Use the same memory for the weights. Otherwise sums may be computed in another order.
    model.generation_config = loaded.generation_config
    found = model.generate(**call)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.sequences_scores, expected.sequences_scores)
    assert torch.equal(loaded.generate(**call).sequences, expected.sequences)


def test_the_trainers_predictions_come_out_whole(tiny_model, tmp_path, monkeypatch):
    model = never_ending(tiny_model(dtype=torch.float32))
    source = torch.randint(3, 19, (4, 6))
    rows = [
        {"input_ids": ids, "attention_mask": [1] * 6, "labels": [5, 6, 2]}
        for ids in source.tolist()
    ]
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            tmp_path,
            predict_with_generate=True,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to=[],
        ),
        eval_dataset=rows,
    )
    fast = []
    search = generation_vaswani.greedy_search
    monkeypatch.setattr(
        generation_vaswani, "greedy_search", lambda *args: fast.append(args) or search(*args)
    )
    for number in (1, 2):  # the first evaluation leaves max_length=20 in the generation config
        predictions = trainer.predict(rows).predictions
        assert len(fast) == 2 * number  # batches, by our own search
        assert predictions.shape == (4, 1 + 6 + 50)
        assert (predictions == model.generate(source).numpy()).all()
        fast.pop()


@pytest.fixture(params=[19, 31, 13])
def two_vocabularies(request, tiny_model):
    """A model with 19 source tokens, and with the same number of target tokens, more or fewer."""
    return tiny_model(decoder_vocab_size=request.param, share_encoder_decoder_embeddings=False)


def test_transition_scores_are_of_the_targets_vocabulary(two_vocabularies, source):
    call = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    beams = two_vocabularies.generate(**source, **call, num_beams=3, length_penalty=0.0)
    scores = two_vocabularies.compute_transition_scores(
        beams.sequences, beams.scores, beams.beam_indices
    )
    torch.testing.assert_close(
        scores.sum(dim=1), beams.sequences_scores, rtol=1e-5, atol=1e-5, check_dtype=False
    )
    greedy = two_vocabularies.generate(**source, **call, min_new_tokens=6)
    scores = two_vocabularies.compute_transition_scores(
        greedy.sequences, greedy.scores, normalize_logits=True
    )
    for step, logits in enumerate(greedy.scores):
        expected = logits.log_softmax(-1).gather(1, greedy.sequences[:, step + 1, None])[:, 0]
        torch.testing.assert_close(scores[:, step], expected)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers' prompt lookup ends at once where the start token is the end token",
)
@pytest.mark.parametrize("banned", [{}, {"bad_words_ids": [[5]]}])
def test_prompt_lookup_equals_greedy_search(two_vocabularies, source, banned):
    for row in range(len(source["input_ids"])):
        one = {name: tensor[row : row + 1] for name, tensor in source.items()}
        expected = two_vocabularies.generate(**one, max_new_tokens=12, **banned)
        found = two_vocabularies.generate(
            **one, max_new_tokens=12, prompt_lookup_num_tokens=3, **banned
        )
        assert torch.equal(found, expected)


def test_a_mask_of_four_dimensions_is_refused_as_by_transformers(tiny_model, source):
    model = tiny_model()
    mask = source["attention_mask"][:, None, None].expand(-1, 1, source["input_ids"].shape[1], -1)
    with pytest.raises(ValueError, match="must be 2D"):
        model.generate(source["input_ids"], attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("vocabulary", "beams"), [(4, 6), (4, 12), (5, 9)])
def test_more_beams_than_tokens_give_what_transformers_search_gives(
    tiny_model, dtype, vocabulary, beams
):
    """The first step then has fewer continuations than beams. Only real ones can be finished."""
    call = {"num_beams": beams, "num_return_sequences": beams, "early_stopping": True}
    call |= {"max_new_tokens": 12, "return_dict_in_generate": True}
    for seed in range(4):
        model = tiny_model(vocab_size=vocabulary, seed=seed, dtype=dtype)
        found = model.generate(torch.tensor([[3, 2]]), **call)
        expected = model.generate(torch.tensor([[3, 2]]), **call, output_scores=True)
        assert found.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(found.sequences_scores.float(), expected.sequences_scores)
