"""Scores of translations and models, compared with their formulas and other programs."""

import copy
import json
import math
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import evaluate
import pytest
import sacrebleu
import torch
from num2words import num2words
from test_batching import make_trainer, training_data
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from vaswani.training import metrics
from vaswani.training.metrics import (
    TranslationMetric,
    evaluate_generation,
    evaluate_perplexity,
    generate_texts,
    nbest_accuracy,
    split_compounds,
)
from vaswani.training.perplexity import perplexity_of
from vaswani.training.scores import translate_and_score

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM

FROZEN = Path(__file__).parent / "frozen" / "0.1"
WORDS = ["the", "a", "rich-text", "format", "1990-2000", "Haus-Tür-Schlüssel", "x-y-z", "is"]
WORDS += ["here", ",", ".", "!", "(well-known)"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep evaluate's files out of the home directory."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))


@pytest.fixture
def sentences():
    """Make pairs of a prediction and a reference that agree in most words."""

    def build(count, seed=0):
        generator = random.Random(seed)
        references = [generator.choices(WORDS, k=generator.randint(1, 12)) for _ in range(count)]
        predictions = [
            " ".join(generator.choice(WORDS) if generator.random() < 0.2 else word for word in line)
            for line in references
        ]
        return predictions, [" ".join(line) for line in references]

    return build


def ngrams(tokens, n):
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def bleu_by_hand(predictions, references):
    """BLEU = BP exp(mean of log p_n, n = 1..4) on tokens (Papineni et al., 2002), in per cent."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for prediction, reference in zip(predictions, references, strict=True):
        for i, tokens in enumerate((prediction.split(), reference.split())):
            lengths[i] += len(tokens)
        for n in range(1, 5):
            ours, theirs = ngrams(prediction.split(), n), ngrams(reference.split(), n)
            matches[n - 1] += sum((ours & theirs).values())
            totals[n - 1] += sum(ours.values())
    penalty = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    log_precisions = [math.log(match / total) for match, total in zip(matches, totals, strict=True)]
    return 100 * penalty * math.exp(sum(log_precisions) / 4)


def chrf_by_hand(predictions, references):
    """F_2 of the mean precision and mean recall of character 1- to 6-grams (Popovic, 2015)."""
    precisions, recalls = [], []
    for n in range(1, 7):
        match = ours_total = theirs_total = 0
        for prediction, reference in zip(predictions, references, strict=True):
            ours = ngrams("".join(prediction.split()), n)
            theirs = ngrams("".join(reference.split()), n)
            match += sum((ours & theirs).values())
            # sacreBLEU ignores a sentence if its reference has no n-gram of this order.
            ours_total += sum(ours.values()) if theirs else 0
            theirs_total += sum(theirs.values())
        precisions.append(match / ours_total)
        recalls.append(match / theirs_total)
    precision, recall = sum(precisions) / 6, sum(recalls) / 6
    return 100 * 5 * precision * recall / (4 * precision + recall)


# --- TranslationMetric ---


def test_bleu_of_a_sentence_is_what_paper_and_pencil_give():
    scores = TranslationMetric().compute(
        predictions=["the cat sat on the mat"], references=["the cat sat on a mat"]
    )
    # 1-grams 5 of 6, 2-grams 3 of 5, 3-grams 2 of 4, 4-grams 1 of 3; equal lengths.
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert scores["precisions"] == pytest.approx([500 / 6, 60, 50, 100 / 3])
    assert scores["brevity_penalty"] == 1.0
    assert scores["exact_match"] == 0.0
    assert scores["sentences"] == 1


def test_translations_with_line_breaks_are_scored_as_they_are():
    texts = ["p\nq", "a b c d e"]

    def translator(*_, **__):
        return [[{"translation_text": text}] for text in texts]

    pairs = [("aaa", texts[0]), ("bbb", texts[1])]
    scores, candidates = translate_and_score(
        translator, metrics.TranslationMetric("none"), pairs, 4
    )
    assert (scores["exact_match"], scores["bleu"]) == (100.0, 100.0)
    assert candidates == [[text] for text in texts]


def test_compound_split_bleu_counts_the_parts_of_a_compound():
    scores = TranslationMetric(tokenize="none").compute(
        predictions=["the rich-text file works"], references=["the rich-text format works well"]
    )
    # Split: the rich ##AT##-##AT## text file works / the rich ##AT##-##AT## text format works well:
    # 1-grams 5 of 6, 2-grams 3 of 5, 3-grams 2 of 4, 4-grams 1 of 3; lengths 6 and 7.
    expected = 100 * math.exp(1 - 7 / 6) * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert scores["compound_split_bleu"] == pytest.approx(expected)
    assert scores["compound_split_bleu"] > scores["bleu"]


def test_compound_split_bleu_has_no_smoothing_as_multi_bleu_has_none():
    scores = TranslationMetric().compute(predictions=["a b c d"], references=["a b d c"])
    assert scores["compound_split_bleu"] == 0.0
    assert scores["bleu"] > 0.0


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ("a rich-text format", "a rich ##AT##-##AT## text format"),
        ("a - b -c d- --", "a - b -c d- --"),
        # Matches do not overlap, so a single character between hyphens is split once.
        ("x-y-z ab-cd-ef", "x ##AT##-##AT## y-z ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        # The expression reads bytes, and "ö" has two bytes.
        ("ä-ö-ü", "ä ##AT##-##AT## ö ##AT##-##AT## ü"),
        ("", ""),
    ],
)
def test_compounds_are_split_as_in_the_scripts_of_tensor2tensor_and_fairseq(tokens, split):
    assert split_compounds(tokens) == split


@pytest.mark.skipif(shutil.which("perl") is None, reason="there is no perl to compare with")
def test_compounds_are_split_byte_for_byte_as_by_perl(sentences):
    lines = [*sentences(200)[0], "ä-ö-ü", "a---b--c", "\u00a0-\u00a0", "\u3000-x", "-", "日-本-語"]
    perl = subprocess.run(
        ["perl", "-ple", r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"],
        input="\n".join(lines).encode(),
        capture_output=True,
        check=True,
    )
    assert perl.stdout.decode().split("\n")[:-1] == [split_compounds(line) for line in lines]


def test_all_scores_follow_their_formulas(sentences):
    predictions, references = sentences(80)
    scores = TranslationMetric(tokenize="none").compute(
        predictions=predictions, references=references
    )
    assert scores["bleu"] == pytest.approx(bleu_by_hand(predictions, references))
    assert scores["chrf"] == pytest.approx(chrf_by_hand(predictions, references))
    split = [[split_compounds(line) for line in side] for side in (predictions, references)]
    assert scores["compound_split_bleu"] == pytest.approx(bleu_by_hand(*split))
    equal = sum(map(str.__eq__, predictions, references))
    assert 0 < equal < 80
    assert scores["exact_match"] == 100 * equal / 80


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_and_signatures_are_those_of_the_sacrebleu_command(sentences, tmp_path, lowercase):
    predictions, references = sentences(50)
    predictions = [line.title() for line in predictions]
    for name, lines in (("predictions", predictions), ("references", references)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = "import sys; from sacrebleu.sacrebleu import main; sys.exit(main())"
    arguments = [tmp_path / "references", "-i", tmp_path / "predictions", "-m", "bleu", "chrf"]
    options = ["--width", "6", "--force"] + (["--lowercase", "--chrf-lowercase"] * lowercase)
    result = subprocess.run(
        [sys.executable, "-c", command, *map(str, arguments), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    bleu, chrf = json.loads(result.stdout)
    scores = TranslationMetric(lowercase=lowercase).compute(
        predictions=predictions, references=references
    )
    assert round(scores["bleu"], 6) == bleu["score"]
    assert scores["bleu_signature"] == bleu["signature"]
    assert round(scores["chrf"], 6) == chrf["score"]
    assert scores["chrf_signature"] == chrf["signature"]


def test_the_signature_of_compound_split_bleu_says_how_the_text_was_prepared():
    pair = {"predictions": ["A-b c d e"], "references": ["a-b c d e"]}
    scores = TranslationMetric(lowercase=True).compute(**pair)
    version = sacrebleu.__version__
    assert scores["compound_split_bleu_signature"] == (
        f"nrefs:1|case:lc|eff:no|tok:13a+compound-split|smooth:none|version:{version}"
    )
    assert scores["compound_split_bleu"] == pytest.approx(100.0)
    assert scores["exact_match"] == 0.0  # lowercase is for BLEU and chrF


def test_several_references_count_as_in_sacrebleu(sentences):
    predictions, references = sentences(30, seed=1)
    others = [line.replace("the", "a") for line in references]
    pairs = [list(pair) for pair in zip(references, others, strict=True)]
    pairs[3] = pairs[3][:1]
    others[3] = None
    scores = TranslationMetric().compute(predictions=predictions, references=pairs)
    bleu = sacrebleu.BLEU(force=True)
    assert scores["bleu"] == bleu.corpus_score(predictions, [references, others]).score
    assert scores["bleu_signature"] == str(bleu.get_signature())
    assert "nrefs:var" in scores["bleu_signature"]
    matches = [line in pair for line, pair in zip(predictions, pairs, strict=True)]
    assert scores["exact_match"] == pytest.approx(100 * sum(matches) / 30)


@pytest.mark.parametrize("batches", [[60], [1, 59], [7, 0, 20, 33]])
@pytest.mark.parametrize("at_a_time", [1, 8, 1000])
def test_scores_do_not_depend_on_how_the_sentences_arrive(
    sentences, monkeypatch, batches, at_a_time
):
    predictions, references = sentences(60)
    monkeypatch.setattr(metrics, "_SENTENCES_AT_A_TIME", at_a_time)
    metric = TranslationMetric()
    start = 0
    for size in batches:
        some = slice(start, start + size)
        metric.add_batch(predictions=predictions[some], references=references[some])
        start += size
    scores = metric.compute()
    for name, reference in (("bleu", sacrebleu.BLEU(force=True)), ("chrf", sacrebleu.CHRF())):
        assert scores[name] == reference.corpus_score(predictions, [references]).score
        assert scores[f"{name}_signature"] == str(reference.get_signature())


def test_a_metric_starts_anew_after_compute(sentences):
    predictions, references = sentences(10)
    metric = TranslationMetric()
    first = metric.compute(predictions=references, references=references)
    assert (first["exact_match"], first["sentences"]) == (100.0, 10)
    second = metric.compute(predictions=predictions[:3], references=["none such"] * 3)
    assert (second["exact_match"], second["sentences"]) == (0.0, 3)


def test_memory_of_scoring_does_not_grow_with_the_number_of_sentences(sentences, monkeypatch):
    monkeypatch.setattr(metrics, "_SENTENCES_AT_A_TIME", 50)
    # sacreBLEU's tokenizers remember the last 65,536 lines; "none" has no such cache.
    metric = TranslationMetric(tokenize="none")

    def peak(score, count):
        predictions, references = sentences(count)
        tracemalloc.start()
        score(predictions, references)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    def ours(predictions, references):
        metric._compute(predictions, references)

    def at_once(predictions, references):
        sacrebleu.CHRF().corpus_score(predictions, [references])

    peak(ours, 50)
    assert peak(ours, 600) < 1.5 * peak(ours, 150)
    assert peak(at_once, 600) > 3 * peak(at_once, 150)


def test_wrong_input_is_refused_with_what_is_wrong():
    with pytest.raises(ValueError, match=r"predictions \(1\) and references \(2\)"):
        TranslationMetric().compute(predictions=["a"], references=["a", "b"])
    with pytest.raises(ValueError, match="Sentence 2 has no reference"):
        TranslationMetric().compute(predictions=["a", "b"], references=[["a"], []])
    with pytest.raises(ValueError, match=r"no tokenizer '13b'; choose one of .*13a"):
        TranslationMetric(tokenize="13b")
    with pytest.raises(ValueError, match="no tokenizer 'moses'"):
        TranslationMetric(compound_tokenize="moses")


def test_moses_is_for_compounds_only():
    with pytest.raises(ValueError, match="no tokenizer 'moses:de': pass compound_tokenize"):
        TranslationMetric(tokenize="moses:de")


def test_moses_without_sacremoses_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ImportError, match="pip install sacremoses"):
        TranslationMetric(compound_tokenize="moses:de")


@pytest.mark.slow
def test_compound_split_bleu_can_tokenise_by_moses_as_tensor2tensor_did():
    pytest.importorskip("sacremoses")
    text = "Haus: 3,5-Liter-Motor (z. B.)."
    tokens = "Haus : 3,5-Liter-Motor ( z. B. ) ."
    scores = TranslationMetric(compound_tokenize="moses:de").compute(
        predictions=[text], references=[text + " Ja"]
    )
    assert "|tok:moses:de+compound-split|" in scores["compound_split_bleu_signature"]
    split = split_compounds(tokens)
    assert scores["compound_split_bleu"] == pytest.approx(bleu_by_hand([split], [split + " Ja"]))


# --- evaluate_generation ---


@pytest.fixture(scope="module")
def translator():
    """The frozen model of number words, its tokenizer, and pairs, some with wrong references."""
    model = AutoModelForSeq2SeqLM.from_pretrained(FROZEN).eval()
    tokenizer = AutoTokenizer.from_pretrained(FROZEN)
    numbers = random.Random(0).sample(range(1000), 40)
    sources = [num2words(number) for number in numbers]
    references = [num2words(number + (i % 7 == 3), lang="de") for i, number in enumerate(numbers)]
    return model, tokenizer, sources, references


def one_by_one(model, tokenizer, sources, **generate_kwargs):
    return [
        tokenizer.decode(
            model.generate(**tokenizer(line, return_tensors="pt"), **generate_kwargs)[0],
            skip_special_tokens=True,
        )
        for line in sources
    ]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("window", "batch_tokens"), [(1, 1), (7, 40), (100, 4096)])
def test_streaming_figures_equal_those_of_scoring_everything_at_once(
    translator, window, batch_tokens, beams
):
    model, tokenizer, sources, references = translator
    streamed = evaluate_generation(
        model,
        tokenizer,
        iter(sources),
        iter(references),
        TranslationMetric(tokenize="char"),
        window=window,
        batch_tokens=batch_tokens,
        num_beams=beams,
    )
    predictions = one_by_one(model, tokenizer, sources, num_beams=beams)
    at_once = sacrebleu.BLEU(tokenize="char", force=True).corpus_score(predictions, [references])
    assert streamed["bleu"] == at_once.score
    assert streamed["chrf"] == sacrebleu.CHRF().corpus_score(predictions, [references]).score
    equal = sum(map(str.__eq__, predictions, references))
    assert 0 < equal < len(sources)
    assert streamed["exact_match"] == 100 * equal / len(sources)
    assert streamed["sentences"] == len(sources)


def test_texts_come_in_the_order_of_the_lines_and_blank_lines_stay_blank(translator):
    model, tokenizer, sources, _ = translator
    lines = [*sources[:5], "", *sources[5:8], "  \t"]
    texts = list(generate_texts(model, tokenizer, lines, window=4))
    expected = one_by_one(model, tokenizer, sources[:8])
    assert texts == [*expected[:5], "", *expected[5:], ""]
    assert list(generate_texts(model, tokenizer, ["", ""])) == ["", ""]
    assert list(generate_texts(model, tokenizer, [])) == []


def test_batches_keep_to_their_budget_and_hold_sentences_of_similar_length(translator, monkeypatch):
    model, tokenizer, sources, _ = translator
    shapes, generate = [], model.generate

    def recording(**inputs):
        shapes.append((*inputs["input_ids"].shape, int(inputs["attention_mask"].sum())))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", recording)
    list(generate_texts(model, tokenizer, sources, batch_tokens=32))
    assert all(rows * width <= 32 or rows == 1 for rows, width, _ in shapes)
    padded = sum(rows * width for rows, width, _ in shapes)
    real = sum(tokens for *_, tokens in shapes)
    assert real == sum(len(tokenizer(line)["input_ids"]) for line in sources)
    assert padded < 1.1 * real


def test_no_more_than_one_window_of_lines_is_read_ahead(translator):
    model, tokenizer, sources, references = translator
    read, scored = 0, []

    def lines():
        nonlocal read
        for line in sources:
            read += 1
            yield line

    class Recorder(TranslationMetric):
        def add_batch(self, *, predictions=None, references=None, **kwargs):
            """Record how many lines of the source were read."""
            scored.append((read, len(predictions)))
            super().add_batch(predictions=predictions, references=references, **kwargs)

    evaluate_generation(model, tokenizer, lines(), references, Recorder(), window=16)
    assert scored == [(16, 16), (32, 16), (40, 8)]


def test_any_metric_of_predictions_and_references_is_streamed_to(translator):
    model, tokenizer, sources, references = translator

    class Lengths(TranslationMetric):
        def _compute(self, predictions, references):
            return {"longest": max(map(len, predictions)), "pairs": len(references)}

    scores = evaluate_generation(model, tokenizer, sources, references, Lengths(), window=9)
    expected = max(map(len, one_by_one(model, tokenizer, sources)))
    assert scores == {"longest": expected, "pairs": 40}


def test_a_model_in_training_is_evaluated_without_dropout_and_goes_on_training(translator):
    model, tokenizer, sources, references = translator
    expected = evaluate_generation(model, tokenizer, sources, references)
    settings = model.generation_config.to_dict()
    model.train()
    try:
        assert evaluate_generation(model, tokenizer, sources, references) == expected
        assert model.training
        with pytest.raises(ValueError, match="end after line"):
            evaluate_generation(model, tokenizer, sources, references[:-1])
        assert model.training
        assert model.generation_config.to_dict() == settings
    finally:
        model.eval()


def test_unequal_numbers_of_lines_are_refused_with_the_line(translator):
    model, tokenizer, sources, references = translator
    for window in (4, 10, 100):
        with pytest.raises(ValueError, match="references end after line 10"):
            evaluate_generation(model, tokenizer, sources, references[:10], window=window)
        with pytest.raises(ValueError, match="sources end after line 10"):
            evaluate_generation(model, tokenizer, sources[:10], references, window=window)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_generation(model, tokenizer, [], [])


def test_sentences_before_an_error_do_not_count_in_the_next_call(translator):
    model, tokenizer, sources, references = translator
    metric = TranslationMetric()
    for _ in range(2):
        with pytest.raises(ValueError, match="references end after line 10"):
            evaluate_generation(model, tokenizer, sources, references[:10], metric, window=4)
    found = evaluate_generation(model, tokenizer, sources[:7], references[:7], metric)
    assert found == evaluate_generation(model, tokenizer, sources[:7], references[:7])


def test_settings_without_meaning_are_refused(translator):
    model, tokenizer, sources, _ = translator
    for settings in ({"window": 0}, {"batch_tokens": 0}, {"num_return_sequences": 2}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            list(generate_texts(model, tokenizer, sources, **settings))


# --- nbest_accuracy ---


def test_nbest_accuracy_counts_references_among_the_first_candidates():
    candidates = [["a", "b", "c"], ["x", "a", "x"], ["b", "c", "d"], ["c", "c", "a"]]
    assert nbest_accuracy(iter(candidates), iter(["a", "a", "a", "a"])) == [25, 50, 75]
    assert nbest_accuracy([["a"], ["b"]], ["a", "a"]) == [50]
    # With lists of unequal length, the shortest list decides.
    assert nbest_accuracy([["b", "a"], ["b", "c", "a"]], ["a", "c"]) == [0, 100]
    assert nbest_accuracy([["b", "c", "a"], ["b", "a"]], ["a", "a"]) == [0, 50]


def test_nbest_accuracy_refuses_what_does_not_match():
    for candidates, references in (([["a"]], ["a", "b"]), ([["a"], ["b"]], ["a"])):
        with pytest.raises(ValueError, match="ends after line 1"):
            nbest_accuracy(candidates, references)
    with pytest.raises(ValueError, match="nothing to count"):
        nbest_accuracy([], [])


# --- evaluate_perplexity ---


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert perplexity_of(math.log(5)) == pytest.approx(5)
    assert perplexity_of(3000.0) == math.inf


PAIRS = [([5, 6, 2], [7, 2]), ([8, 2], [9, 10, 11, 12, 13, 2]), ([4, 4, 4, 2], [3, 5, 2])]


def collate(pairs):
    """Pad by hand: 0 in the source, -100 in the labels."""
    width = max(len(source) for source, _ in pairs)
    length = max(len(target) for _, target in pairs)
    return {
        "input_ids": torch.tensor([s + [0] * (width - len(s)) for s, _ in pairs]),
        "attention_mask": torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s, _ in pairs]),
        "labels": torch.tensor([t + [-100] * (length - len(t)) for _, t in pairs]),
    }


def nll_by_hand(model, source, target):
    """-sum of log p(y_t | y_<t, x), one sentence at a time."""
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[2, *target[:-1]]])
        ).logits[0]
    return -logits.log_softmax(-1)[range(len(target)), target].sum().item()


@pytest.mark.parametrize("batches", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_perplexity_is_exp_of_the_mean_nll_of_tokens_however_they_are_batched(tiny_model, batches):
    model = tiny_model(label_smoothing=0.1, dropout=0.3)
    expected = sum(nll_by_hand(model, *pair) for pair in PAIRS) / 11  # 2 + 6 + 3 target tokens
    rows = iter(PAIRS)
    model.train()
    model.model.encoder.eval()
    result = evaluate_perplexity(
        model, (collate([next(rows) for _ in range(size)]) for size in batches)
    )
    assert (model.training, model.model.encoder.training) == (True, False)
    assert result["loss"] == pytest.approx(expected, rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-12)
    assert result["target_tokens"] == 11


def test_the_trainers_eval_loss_is_the_mean_of_batches_and_so_differs(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        per_device_eval_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(FROZEN)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        eval_dataset=[{"input_ids": source, "labels": target} for source, target in PAIRS],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    nll = [nll_by_hand(model, *pair) for pair in PAIRS]
    of_batches = [(nll[0] + nll[1]) / (2 + 6), nll[2] / 3]
    eval_loss = trainer.evaluate()["eval_loss"]
    assert eval_loss == pytest.approx(sum(of_batches) / 2, rel=1e-5)
    exact = evaluate_perplexity(model, trainer.get_eval_dataloader())
    assert exact["loss"] == pytest.approx(sum(nll) / 11, rel=1e-5)
    assert exact["loss"] != pytest.approx(eval_loss, rel=1e-4)


def test_evaluation_by_generation_leaves_the_generation_config_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path, predict_with_generate=True)
    before = copy.deepcopy(vars(trainer.model.generation_config))
    assert len(trainer.predict(training_data(4)).predictions) == 4
    assert vars(trainer.model.generation_config) == before
    assert before["max_length"] is None


def test_batches_without_target_tokens_weigh_nothing_and_alone_are_refused(tiny_model):
    model = tiny_model()
    empty = collate(PAIRS) | {"labels": torch.full((3, 4), -100)}
    expected = evaluate_perplexity(model, [collate(PAIRS)])
    assert evaluate_perplexity(model, [collate(PAIRS), empty]) == expected
    for batches in ([], [empty]):
        with pytest.raises(ValueError, match="no target token"):
            evaluate_perplexity(model, batches)
    with pytest.raises(ValueError, match="no labels, only attention_mask, input_ids"):
        evaluate_perplexity(model, [{k: v for k, v in empty.items() if k != "labels"}])


def test_a_language_model_counts_the_tokens_that_it_predicts():
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = VaswaniDecoderConfig(vocab_size=19, decoder_ffn_dim=16, **sizes)
    torch.manual_seed(0)
    model = VaswaniForCausalLM(config).eval()
    ids = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
    labels = ids.masked_fill(ids == 0, -100)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    for network in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="add shift_labels to the batches"):
            evaluate_perplexity(network, [batch])
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    result = evaluate_perplexity(model, [batch | {"shift_labels": shifted}])
    assert result["target_tokens"] == 5
    assert result["loss"] == pytest.approx(model(**batch).loss.item())


def test_a_loss_beyond_floating_point_gives_infinite_perplexity():
    class Hopeless(torch.nn.Linear):
        def forward(self, labels):
            return type("Output", (), {"loss": torch.tensor(1e4)})

    result = evaluate_perplexity(Hopeless(1, 1), [{"labels": torch.tensor([[3, 2]])}])
    assert result == {"loss": 1e4, "perplexity": math.inf, "target_tokens": 2}
