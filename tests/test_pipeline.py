"""The translation pipeline: creation, inputs, outputs and memory."""

import copy
import itertools
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from num2words import num2words
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline
from transformers.pipelines.pt_utils import KeyDataset
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from vaswani.generation import pipeline_vaswani
from vaswani.generation.batches_vaswani import batches_by_length
from vaswani.training.metrics import generate_texts

from vaswani import VaswaniTokenizer, VaswaniTranslationPipeline

FROZEN = Path(__file__).resolve().parent / "frozen" / "0.1"
NUMBERS = [999, 3, 342, 80, 17, 1, 700, 25, 4, 111]
ENGLISH = [num2words(number) for number in NUMBERS]
GERMAN = [num2words(number, lang="de") for number in NUMBERS]


@pytest.fixture(scope="module")
def parts():
    """A model of number words and its tokenizer."""
    return AutoModelForSeq2SeqLM.from_pretrained(FROZEN), AutoTokenizer.from_pretrained(FROZEN)


@pytest.fixture
def translator(parts):
    return VaswaniTranslationPipeline(*parts, device="cpu")


@pytest.fixture
def batches(parts, monkeypatch):
    """The shapes of all batches that a test passes to `generate`, and their settings."""
    model, _ = parts
    seen, generate = [], model.generate

    def recording(input_ids, **settings):
        seen.append((tuple(input_ids.shape), settings))
        return generate(input_ids=input_ids, **settings)

    monkeypatch.setattr(model, "generate", recording)
    return seen


def texts(results):
    return [result["translation_text"] for result in results]


def test_a_generation_config_of_a_call_overrides_the_pipeline(parts):
    short = VaswaniTranslationPipeline(*parts, device="cpu", num_beams=4, max_new_tokens=2)
    (cut,) = texts(short("three hundred"))
    for call in (
        {"generation_config": GenerationConfig(num_beams=1, max_new_tokens=20)},
        {"max_length": 30},
        {"max_new_tokens": 20},
    ):
        with CaptureLogger(logging.get_logger("transformers")) as log:
            assert texts(short("three hundred", **call)) == ["dreihundert"]
        assert "deprecated" not in log.out
    assert cut != "dreihundert"


def test_a_limit_of_a_call_replaces_that_of_the_pipelines_config(parts):
    config = GenerationConfig(num_beams=2, max_new_tokens=2)
    short = VaswaniTranslationPipeline(*parts, device="cpu", generation_config=config)
    for call in ({"max_length": 30}, {"generation_config": GenerationConfig(max_new_tokens=20)}):
        assert texts(short("three hundred", return_dict_in_generate=True, **call)) == [
            "dreihundert"
        ]
    assert config.max_new_tokens == 2


def test_scores_come_with_a_generation_config_too(translator):
    settings = {"num_beams": 2, "no_repeat_ngram_size": 9}
    expected = translator(ENGLISH[:2], return_scores=True, **settings)
    config = GenerationConfig(**settings)
    with CaptureLogger(logging.get_logger("transformers")) as log:
        found = translator(ENGLISH[:2], return_scores=True, generation_config=config)
    assert found == expected
    assert "deprecated" not in log.out
    assert config.return_dict_in_generate is None


@pytest.mark.parametrize("switched_off", ["length_penalty", "length_penalty_type"])
def test_a_penalty_that_a_call_switches_off_counts_in_no_score(translator, switched_off):
    off = {"length_penalty": 1.0, "length_penalty_type": "hf"}[switched_off]
    settings = {"num_beams": 1, "return_scores": True}
    (expected,) = translator("seven", **settings, **{switched_off: off})
    (found,) = translator("seven", **settings, **{switched_off: None})
    assert found == expected


# Creation


def test_a_folder_is_enough_with_the_class(batches):
    for arguments in (("translation",), ()):
        translator = pipeline(
            *arguments, model=str(FROZEN), pipeline_class=VaswaniTranslationPipeline, device="cpu"
        )
        assert type(translator) is VaswaniTranslationPipeline
        assert texts(translator(ENGLISH[:2])) == GERMAN[:2]


def test_a_model_in_memory_needs_its_config_for_the_name_of_the_task(parts):
    model, tokenizer = parts
    for _ in range(2):  # transformers writes into the custom_pipelines that it finds
        translator = pipeline(
            model=model,
            config=model.config,
            tokenizer=tokenizer,
            pipeline_class=VaswaniTranslationPipeline,
            device="cpu",
        )
        assert (translator.task, translator.model) == ("translation", model)
        assert texts(translator(ENGLISH[:2])) == GERMAN[:2]
    json.dumps(model.config.to_dict()["custom_pipelines"])


def test_a_saved_folder_translates_without_the_package_in_every_generation(parts, tmp_path):
    for part in parts:
        part.save_pretrained(tmp_path / "1")
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    reference = config["custom_pipelines"]["translation"]["impl"]
    assert reference == "pipeline_vaswani.VaswaniTranslationPipeline"
    program = f"""
import sys
sys.modules["vaswani"] = None
from transformers import pipeline
for generation in (1, 2):
    translator = pipeline(
        "translation", model=str(generation), trust_remote_code=True, device="cpu"
    )
    print(type(translator).__module__.split(".")[0])
    print([result["translation_text"] for result in translator({ENGLISH[:3]!r}, num_beams=2)])
    translator.save_pretrained(str(generation + 1))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["transformers_modules", str(GERMAN[:3])] * 2
    names = [{path.name for path in (tmp_path / g).iterdir()} for g in ("1", "2", "3")]
    assert names[0] == names[1] == names[2]
    for generation in ("2", "3"):
        saved = json.loads((tmp_path / generation / "config.json").read_text())
        assert saved["custom_pipelines"] == config["custom_pipelines"]


def test_the_users_own_pipelines_are_kept_beside_ours(parts, tmp_path):
    config = type(parts[0].config).from_pretrained(FROZEN)
    config.custom_pipelines = {"mine": {"impl": "mine.Mine", "pt": ["AutoModelForSeq2SeqLM"]}}
    config.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path)
    assert set(again.custom_pipelines) == {"mine", "translation"}


def test_a_pipeline_without_a_tokenizer_is_refused(parts):
    with pytest.raises(ValueError, match="VaswaniTranslationPipeline needs the tokenizer"):
        VaswaniTranslationPipeline(parts[0], device="cpu")


# Inputs and outputs


class Numbered(torch.utils.data.Dataset):
    """A data set as in torch's documentation: neither an iterator nor an IndexError."""

    def __len__(self):
        return len(ENGLISH)

    def __getitem__(self, number):
        return ENGLISH[number % len(ENGLISH)]


def test_a_string_a_list_and_a_stream_have_the_shapes_of_transformers_4(translator):
    assert translator(ENGLISH[0]) == [{"translation_text": GERMAN[0]}]
    expected = [{"translation_text": german} for german in GERMAN]
    assert translator(ENGLISH) == translator(tuple(ENGLISH)) == expected
    records = [{"en": english} for english in ENGLISH]
    streams = (iter(ENGLISH), (line for line in ENGLISH), KeyDataset(records, "en"))
    for stream in streams:
        results = translator(stream)
        assert iter(results) is results
        assert list(results) == [[result] for result in expected]
    assert list(translator(Numbered())) == [[result] for result in expected]
    assert translator([]) == []
    assert list(translator(iter([]))) == []


def test_n_best_translations_and_scores_are_those_of_beam_search(parts, translator):
    model, tokenizer = parts
    settings = {"num_beams": 4, "num_return_sequences": 3}
    results = translator(ENGLISH[:3], return_scores=True, **settings)
    for english, translations in zip(ENGLISH, results, strict=False):
        output = model.generate(
            **tokenizer([english], return_tensors="pt"),
            **settings,
            return_dict_in_generate=True,
            output_scores=True,
        )
        expected = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        assert texts(translations) == expected
        scores = [translation["score"] for translation in translations]
        assert scores == pytest.approx(output.sequences_scores.tolist(), abs=1e-5)
        assert scores == sorted(scores, reverse=True)
    (single,) = translator(ENGLISH[0], **settings, generation_config=None)[:1]
    assert set(single) == {"translation_text"}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "length_penalty": 1.3},
        {"generation_config": GenerationConfig(length_penalty=1.3, length_penalty_type="gnmt")},
        {"do_sample": True, "num_return_sequences": 2, "length_penalty": 1.3},
    ],
)
def test_without_a_beam_scores_come_from_forced_decoding(parts, translator, settings):
    model, tokenizer = parts
    results = translator(ENGLISH[:2], return_scores=True, **settings)
    for english, translations in zip(ENGLISH, results, strict=False):
        for result in [translations] if isinstance(translations, dict) else translations:
            forced = model.score(
                [english], [result["translation_text"]], tokenizer, length_penalty=1.3
            )
            assert result["score"] == pytest.approx(forced.sequences_scores.item(), abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_start_token_id": 9},
        {"decoder_input_ids": [[2, 56]]},
        {"decoder_input_ids": [[56, 9]]},  # `generate` puts the start token before the prompt
        {"decoder_input_ids": [[0, 2, 56]], "decoder_attention_mask": [[0, 1, 1]]},
        {"suppress_tokens": [2], "max_length_offset": 3},  # ends at the limit of each source
    ],
    ids=str,
)
def test_scores_of_greedy_search_are_those_of_its_own_logits(parts, translator, settings):
    model, tokenizer = parts
    lines = [ENGLISH[1], ENGLISH[0]]
    results = translator(lines, num_beams=1, return_scores=True, **settings)
    tensors = {
        name: torch.tensor(value) if isinstance(value, list) and "decoder" in name else value
        for name, value in settings.items()
    }
    for line, result in zip(lines, results, strict=True):
        search = {"return_dict_in_generate": True, "output_logits": True, "num_beams": 1}
        output = model.generate(**tokenizer([line], return_tensors="pt"), **search, **tensors)
        log_probs = torch.cat(output.logits).log_softmax(-1)
        tokens = output.sequences[0, -len(log_probs) :, None]
        expected = log_probs.gather(1, tokens).sum() / ((5 + len(tokens)) / 6) ** 0.6
        assert result["score"] == pytest.approx(expected.item(), abs=1e-4)
        text = tokenizer.decode(output.sequences[0], skip_special_tokens=True)
        assert result["translation_text"] == text


def test_predicted_padding_is_scored(parts, translator):
    model, _ = parts
    bias = torch.zeros(model.config.decoder_vocab_size)
    bias[0] = 100.0
    handle = model.lm_head.register_forward_hook(lambda _, args, logits: logits + bias)
    results = translator(ENGLISH[:3], num_beams=1, return_scores=True)
    handle.remove()
    assert texts(results) == [""] * 3
    assert all(result["score"] == pytest.approx(0, abs=1e-6) for result in results)


def test_padding_after_a_stop_string_is_not_scored(parts, translator):
    _, tokenizer = parts
    lines = [ENGLISH[0], ENGLISH[1]]
    stop = {"stop_strings": [GERMAN[1]], "tokenizer": tokenizer, "num_beams": 1}
    together = translator(lines, return_scores=True, **stop)
    alone = [translator(line, return_scores=True, **stop)[0] for line in lines]
    for one, other in zip(together, alone, strict=True):
        assert one["translation_text"] == other["translation_text"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_scores_of_transformers_beam_search_are_its_own(parts, translator, batches):
    model, tokenizer = parts
    search = {"num_beams": 3, "repetition_penalty": 1.5}
    results = translator(ENGLISH[:3], return_scores=True, batch_size=1, **search)
    again = [settings.get("output_scores", False) for _, settings in batches]
    assert again == [False, True, True, True]  # the first batch alone is searched twice
    for english, result in zip(ENGLISH[:3], results, strict=True):
        output = model.generate(
            **tokenizer([english], return_tensors="pt"),
            **search,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert result["score"] == pytest.approx(output.sequences_scores.item(), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_start_token_id": [2, 9, 20]},
        {"decoder_start_token_id": torch.tensor([2, 9, 20]), "num_return_sequences": 2},
        {"decoder_input_ids": torch.tensor([[2, 56], [2, 9], [2, 20]])},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 4096])
def test_settings_with_an_entry_for_each_line_stay_with_their_lines(translator, settings, window):
    lines = ["seven", "one hundred and one", "three"]
    settings = {"num_beams": 2, "return_scores": True, **settings}
    sized = {name: value for name, value in settings.items() if "decoder" in name}
    others = {name: value for name, value in settings.items() if name not in sized}
    results = translator(lines, window=window, **settings)
    for number, line in enumerate(lines):
        own = {name: value[number : number + 1] for name, value in sized.items()}
        (expected,) = translator([line], **own, **others)
        found = results[number]
        if isinstance(found, dict):
            found, expected = [found], [expected]
        assert texts(found) == texts(expected)
        scores = [[result["score"] for result in part] for part in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_settings_for_another_number_of_lines_are_refused(translator):
    complaint = "decoder_start_token_id has 2 entries, but the number of lines is 3: give each line"
    with pytest.raises(ValueError, match=complaint):
        translator(ENGLISH[:3], decoder_start_token_id=[2, 9])
    with pytest.raises(ValueError, match="has 3 entries, but the number of lines is 1"):
        translator(ENGLISH[0], decoder_start_token_id=[2, 9, 9])
    stream = translator(iter(ENGLISH[:3]), decoder_start_token_id=[2, 9], window=2)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(ValueError, match="has 2 entries, but the number of lines is at least 3"):
        next(stream)
    with pytest.raises(ValueError, match=r"^decoder_input_ids must have a row .*: pass \[\[\.\.\."):
        translator(ENGLISH[:3], decoder_input_ids=[2, 56])
    prompt = {"decoder_input_ids": [[2, 56]]}
    (alone,) = translator([ENGLISH[2]], **prompt)
    assert translator(ENGLISH[:3], **prompt)[2] == alone


def test_a_tokenizer_that_pads_on_the_left_changes_no_translation(parts):
    model, tokenizer = parts
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    translator = VaswaniTranslationPipeline(model, left, device="cpu")
    settings = {"num_beams": 2, "return_scores": True}
    results = translator(ENGLISH, **settings)
    expected = VaswaniTranslationPipeline(model, tokenizer, device="cpu")(ENGLISH, **settings)
    assert texts(results) == texts(expected)
    scores = [[result["score"] for result in part] for part in (results, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert list(generate_texts(model, left, ENGLISH)) == texts(expected)


def test_generation_settings_are_the_checkpoints_then_the_pipelines_then_the_calls(parts, batches):
    model, tokenizer = parts
    english = ENGLISH[:2]
    VaswaniTranslationPipeline(model, tokenizer, device="cpu")(english)
    translator = VaswaniTranslationPipeline(model, tokenizer, device="cpu", num_beams=3)
    translator(english)
    translator(english, num_beams=2)
    given = [
        {name: value for name, value in settings.items() if name != "attention_mask"}
        for _, settings in batches
    ]
    returns = {"return_dict_in_generate": False}
    assert given == [returns, {"num_beams": 3, **returns}, {"num_beams": 2, **returns}]


def test_blank_lines_have_blank_translations_beside_others(translator):
    assert translator("") == [{"translation_text": ""}]
    lines = ["", ENGLISH[0], " \t", ENGLISH[1], "\n"]
    assert texts(translator(lines)) == ["", GERMAN[0], "", GERMAN[1], ""]
    settings = {"num_beams": 2, "num_return_sequences": 2, "return_scores": True}
    assert translator(["", " "], **settings) == [[{"translation_text": "", "score": 0.0}] * 2] * 2
    nbest = translator(
        lines, generation_config=GenerationConfig(**settings | {"return_scores": None})
    )
    assert [len(translations) for translations in nbest] == [2] * 5


def test_a_model_in_training_translates_without_dropout_and_trains_on(parts, translator):
    model, _ = parts
    model.train()
    try:
        results = [texts(translator(ENGLISH)) for _ in range(2)]
        assert model.training
    finally:
        model.eval()
    assert results == [GERMAN, GERMAN]


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ([*ENGLISH[:2], None], "Line 3 is None, not a string"),
        ([{"en": "seven"}], r"Line 1 is \{'en': 'seven'\}, not a string.*choose a column"),
        (7, "not int"),
        (b"seven", "not bytes"),
        ({"text": "seven"}, "not dict"),
    ],
)
def test_what_is_no_text_is_refused_by_line(translator, inputs, complaint):
    with pytest.raises(TypeError, match=complaint):
        translator(inputs)


def test_the_line_of_a_stream_that_is_no_text_is_counted_from_its_start(translator):
    stream = translator(iter(["", " ", "", "", 5]), window=2)
    assert len(list(itertools.islice(stream, 4))) == 4
    with pytest.raises(TypeError, match="Line 5 is 5"):
        next(stream)


def test_a_line_with_half_of_a_surrogate_pair_is_named(translator):
    lines = iter([*ENGLISH[:3], "tw\ud83d"])
    with pytest.raises(ValueError, match=r"Line 4 holds '\\ud83d' as character 3, half of a"):
        list(translator(lines, window=2))


def test_a_line_too_long_for_learned_positions_is_named(parts, tiny_model):
    _, tokenizer = parts
    model = tiny_model(
        position_encoding="learned", max_position_embeddings=8, vocab_size=len(tokenizer)
    )
    translator = VaswaniTranslationPipeline(model, tokenizer, device="cpu", window=2)
    with pytest.raises(ValueError, match=r"Line 4 has \d+ tokens, more than the 8 learned"):
        translator(["seven", "", "six", "three hundred and forty-two"])
    assert len(translator(["seven", "six"])) == 2


def test_a_target_vocabulary_of_its_own_has_its_own_tokenizer(tiny_model, tmp_path):
    source, target = (
        VaswaniTokenizer.train_from_iterator(lines, "word", vocab_size=size, show_progress=False)
        for lines, size in ((ENGLISH, 30), (GERMAN, 6))
    )
    assert len(source) != len(target)
    model = tiny_model(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
    )
    source.save_pretrained(tmp_path)
    source = VaswaniTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no subfolder target_tokenizer: pass target_tokenizer"):
        VaswaniTranslationPipeline(model, source, device="cpu")
    target.save_pretrained(tmp_path / "target_tokenizer")
    found = VaswaniTranslationPipeline(model, source, device="cpu")(ENGLISH)
    given = VaswaniTranslationPipeline(model, source, target_tokenizer=target, device="cpu")
    assert texts(found) == texts(given(ENGLISH))
    batch = source(ENGLISH, padding=True, return_tensors="pt")
    expected = target.batch_decode(model.generate(**batch), skip_special_tokens=True)
    assert texts(found) == expected
    assert list(generate_texts(model, source, ENGLISH)) == expected
    given.save_pretrained(tmp_path / "saved")
    saved = VaswaniTokenizer.from_pretrained(tmp_path / "saved" / "target_tokenizer")
    assert saved.get_vocab() == target.get_vocab()


def test_short_lines_do_not_make_batches_of_thousands():
    batches = batches_by_length([(2,)] * 3000, max_tokens=4096, shortest=16)
    assert max(map(len, batches)) == 4096 // 16


@pytest.mark.parametrize("name", ["max_tokens", "batch_size", "window"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "9"])
def test_settings_that_are_no_numbers_of_things_are_refused(translator, name, value):
    complaint = f"{name} must be an integer of at least 1, got {value!r}"
    with pytest.raises(ValueError, match=complaint):
        translator(ENGLISH, **{name: value})


def test_settings_that_nobody_knows_are_refused(translator):
    with pytest.raises((ValueError, TypeError), match="max_tokenz"):
        translator(ENGLISH, max_tokenz=3)


# Batches, order, memory


@pytest.mark.parametrize(("max_tokens", "batch_size"), [(1, None), (30, None), (200, 3)])
def test_batches_stay_within_their_bounds_and_the_order_is_kept(
    translator, batches, max_tokens, batch_size
):
    results = translator(ENGLISH, max_tokens=max_tokens, batch_size=batch_size)
    assert texts(results) == GERMAN
    assert sum(rows for (rows, _), _ in batches) == len(ENGLISH)
    for (rows, width), _ in batches:
        assert rows * width <= max_tokens or rows == 1
        assert rows <= (batch_size or len(ENGLISH))
    widths = [width for (_, width), _ in batches]
    assert widths == sorted(widths, reverse=True)


def test_sorting_by_length_leaves_little_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (2000,), generator=generator).tolist()
    groups = list(batches_by_length([(length,) for length in lengths], 1000))
    assert sorted(index for group in groups for index in group) == list(range(2000))
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert padded < 1.03 * sum(lengths)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_translations_do_not_depend_on_the_window(translator, window):
    stream = translator(iter(ENGLISH), window=window)
    assert [translation["translation_text"] for (translation,) in stream] == GERMAN


def test_an_endless_stream_is_read_one_window_ahead(translator):
    pulled = 0

    def endless():
        nonlocal pulled
        for english in itertools.cycle(["one", "", "two"]):
            pulled += 1
            yield english

    stream = translator(endless(), window=8)
    assert pulled == 0
    for taken in range(1, 28):
        next(stream)
        assert taken <= pulled < taken + 8


def test_memory_does_not_grow_with_a_stream(translator):
    """Blank lines are fast, so that there can be many. They would use memory like other lines."""

    def peak(lines):
        tracemalloc.start()
        for _ in translator((" " * (n % 50 + 1) for n in range(lines)), window=200):
            pass
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(400)
    short, long = peak(1_000), peak(8_000)
    assert long < 1.2 * short


# The progress bar


def test_a_progress_bar_is_drawn_for_long_work_or_on_request(translator, capfd, monkeypatch):
    def drawn(inputs, **settings):
        for _ in translator(inputs, **settings):
            pass
        return capfd.readouterr().err

    logging.enable_progress_bar()  # another test may have turned off all bars of transformers
    lines = ["", *ENGLISH[:2]]
    assert drawn(lines) == ""
    assert "3/3" in drawn(lines, progress=True)
    assert "3 lines" in drawn(iter(lines), progress=True)
    monkeypatch.setattr(pipeline_vaswani, "_PROGRESS_AFTER", 0)
    assert "3/3" in drawn(lines)
    assert drawn(lines, progress=False) == drawn("one") == ""


@pytest.mark.parametrize("size", [-1, 0, "8", 2.5])
def test_a_wrong_batch_size_of_the_pipeline_is_refused(parts, size):
    translator = VaswaniTranslationPipeline(*parts, batch_size=size)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got"):
        translator("a")
