"""The examples do what their manuals say, on small data, and refuse bad input by file and line."""

import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sacrebleu
import torch
from loopback_hub import LoopbackHub
from num2words import num2words
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.training import atomic_folder

from vaswani import VaswaniTokenizer, VaswaniTranslationPipeline

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
TINY = ["--vocab-size", "340", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
TINY += ["encoder_attention_heads=4", "decoder_attention_heads=4"]
TINY += ["encoder_ffn_dim=64", "decoder_ffn_dim=64"]


@pytest.fixture
def pairs():
    return [(num2words(n), num2words(n, lang="de")) for n in range(100, 180)]


@pytest.fixture
def parallel_files(pairs, tmp_path):
    """Two parallel files, the target compressed."""
    source, target = tmp_path / "train.en", tmp_path / "train.de.gz"
    source.write_text("".join(f"{english}\n" for english, _ in pairs), encoding="utf-8")
    with gzip.open(target, "wt", encoding="utf-8") as file:
        file.writelines(f"{german}\n" for _, german in pairs)
    return [str(source), str(target)]


@pytest.fixture
def examples(monkeypatch):
    """The example scripts as modules, and a function that runs one as a command line would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_translation
    import translate

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        module.main()

    run.train, run.translate = train_translation, translate
    return run


def subprocess_environment(**extra):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def test_quickstart_trains_saves_and_reloads_the_same_model(tmp_path):
    command = [sys.executable, ROOT / "examples" / "quickstart.py", "--output", tmp_path / "model"]
    sizes = ["--steps", "5", "--train-size", "300", "--test-size", "20"]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, env=subprocess_environment(), check=True
    )
    assert "same after reloading   yes" in done.stdout
    assert json.loads((tmp_path / "model" / "results.json").read_text())["numbers_tested"] == 20


def test_quickstart_gets_99_percent_of_unseen_numbers_right_within_four_minutes():
    results = ROOT / "runs" / "quickstart" / "results.json"
    if not results.exists():
        pytest.skip("run `python examples/quickstart.py` first: its result is checked here")
    figures = json.loads(results.read_text())
    assert figures["numbers_tested"] >= 1000
    assert figures["exactly_right"] >= 0.99
    assert figures["same_after_reloading"]
    assert figures["minutes"] <= 4


def test_training_on_parallel_files_writes_a_model_that_auto_classes_load(
    examples, parallel_files, pairs, tmp_path
):
    output = tmp_path / "run"
    examples(
        examples.train, "--train", *parallel_files, "--valid", *parallel_files,
        "--test", *parallel_files, *TINY, "--steps", 20, "--eval-steps", 10, "--warmup", 5,
        "--batch-size", 32, "--output", output,
    )  # fmt: skip
    model, tokenizer = (
        auto.from_pretrained(output) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    assert model.config.d_model == 32
    assert (model.generation_config.num_beams, model.generation_config.max_length) == (4, None)
    assert tokenizer(pairs[0][0])["input_ids"][-1] == model.config.eos_token_id
    results = json.loads((output / "results.json").read_text())
    assert results["steps"] == 20
    assert [entry["eval_bleu"] for entry in results["log"] if "eval_bleu" in entry]
    # The score in the file is sacreBLEU's of the translations in the file beside it.
    translations = (output / "test.txt").read_text(encoding="utf-8").splitlines()
    score = sacrebleu.corpus_bleu(translations, [[german for _, german in pairs]])
    assert results["test"]["bleu"] == round(score.score, 2)
    assert "tok:13a" in results["test"]["signature"]
    assert (output / "tokenization_vaswani.py").exists()


def test_pairs_are_the_same_from_every_form_of_data(examples, pairs, parallel_files, tmp_path):
    tsv, jsonl = tmp_path / "pairs.tsv", tmp_path / "pairs.jsonl.gz"
    tsv.write_text("".join(f"{english}\t{german}\n" for english, german in pairs), encoding="utf-8")
    rows = [json.dumps({"en": english, "de": german}) + "\n" for english, german in pairs]
    with gzip.open(jsonl, "wt", encoding="utf-8") as file:
        file.writelines(rows)
    data_set = tmp_path / "numbers"
    data_set.mkdir()
    nested = [json.dumps({"translation": json.loads(row)}) + "\n" for row in rows]
    (data_set / "train.jsonl").write_text("".join(nested), encoding="utf-8")
    forms = (parallel_files, [str(tsv)], [str(jsonl)], [f"{data_set}:train"], [str(data_set)])
    for data in forms:
        assert examples.train.read_pairs(data, ("en", "de"), "train") == pairs


def test_fine_tuning_keeps_sizes_and_tokenizer_and_improves_on_the_new_pairs(examples, tmp_path):
    numbers = range(1000, 1100)  # the frozen model has seen none above 999
    pairs, output = tmp_path / "pairs.tsv", tmp_path / "run"
    rows = [f"{num2words(n)}\t{num2words(n, lang='de')}\n" for n in numbers]
    pairs.write_text("".join(rows), encoding="utf-8")
    examples(
        examples.train, "--model", FROZEN, "--train", pairs, "--valid", pairs,
        "--steps", 30, "--eval-steps", 30, "--warmup", 5, "--learning-rate", 1e-3,
        "--batch-size", 32, "--output", output,
    )  # fmt: skip
    before, after = (
        AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (FROZEN, output)
    )
    assert (output / "tokenizer.json").read_bytes() == (FROZEN / "tokenizer.json").read_bytes()
    assert after.config.vocab_size == before.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(output)
    english, german = num2words(1042), num2words(1042, lang="de")
    batch = tokenizer([english], text_target=[german], return_tensors="pt")
    with torch.no_grad():
        assert after(**batch).loss < before(**batch).loss
    # And again from there: a fine-tuned checkpoint is a checkpoint like any other.
    examples(
        examples.train, "--model", output, "--train", pairs, "--steps", 2,
        "--output", tmp_path / "again",
    )  # fmt: skip
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_validation_bleu_is_sacrebleus_of_the_models_own_greedy_translations(examples, tmp_path):
    # Sentences of several words and lengths: any shuffling of predictions would show.
    numbers = [n * 37 % 1000 for n in range(1, 41)]
    english = [f"{num2words(n)} {num2words(n + 1)}" for n in numbers]
    pairs = [(words, num2words(n, lang="de")) for words, n in zip(english, numbers, strict=True)]
    data, output = tmp_path / "pairs.tsv", tmp_path / "run"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    examples(
        examples.train, "--model", FROZEN, "--train", data, "--valid", data, "--steps", 1,
        "--learning-rate", 1e-12, "--batch-size", 7, "--output", output,
    )  # fmt: skip
    model, tokenizer = (
        auto.from_pretrained(output) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    outputs = VaswaniTranslationPipeline(model, tokenizer, num_beams=1)(english)
    translations = [output["translation_text"] for output in outputs]
    expected = sacrebleu.corpus_bleu(translations, [[target for _, target in pairs]])
    results = json.loads((output / "results.json").read_text())
    assert results["valid"]["greedy_bleu"] == round(expected.score, 2)


def test_fine_tuning_keeps_the_checkpoints_generation_settings(examples, parallel_files, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(FROZEN)
    model.generation_config.update(length_penalty=1.2, max_length_offset=7, no_repeat_ngram_size=3)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(FROZEN).save_pretrained(tmp_path / "model")
    examples(
        examples.train, "--model", tmp_path / "model", "--train", *parallel_files,
        "--valid", *parallel_files, "--steps", 1, "--beams", 5, "--output", tmp_path / "run",
    )  # fmt: skip
    kept = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").generation_config
    assert (kept.length_penalty, kept.max_length_offset, kept.no_repeat_ngram_size) == (1.2, 7, 3)
    assert (kept.num_beams, kept.max_length) == (5, None)


def test_fine_tuning_keeps_separate_vocabularies_apart(
    examples, parallel_files, pairs, tmp_path, tiny_model
):
    english, german = (
        VaswaniTokenizer.train_from_iterator(lines, "bpe", vocab_size=size, show_progress=False)
        for lines, size in zip(zip(*pairs, strict=True), (300, 350), strict=True)
    )
    model = tiny_model(
        dtype=torch.float32,
        vocab_size=len(english),
        decoder_vocab_size=len(german),
        share_encoder_decoder_embeddings=False,
    )
    model.save_pretrained(tmp_path / "model")
    english.save_pretrained(tmp_path / "model")
    german.save_pretrained(tmp_path / "model" / "target_tokenizer")
    examples(
        examples.train, "--model", tmp_path / "model", "--train", *parallel_files,
        "--valid", *parallel_files, "--steps", 60, "--eval-steps", 60, "--batch-size", 40,
        "--warmup", 10, "--learning-rate", 0.01, "--output", tmp_path / "run",
    )  # fmt: skip
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "target_tokenizer")
    assert saved.get_vocab() == german.get_vocab()
    assert AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab() == english.get_vocab()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").eval()
    sources, targets = zip(*pairs, strict=True)
    labels = german(text_target=list(targets))["input_ids"]
    found = model.score(english(list(sources))["input_ids"], labels).sums.sum()
    tokens = sum(map(len, labels))
    assert found / tokens > -3, "chance is -5.9 a token"


def test_a_resumed_run_goes_on_from_its_checkpoint_with_its_tokenizer(
    examples, parallel_files, tmp_path
):
    output = tmp_path / "run"
    common = ["--train", *parallel_files, *TINY, "--eval-steps", 2, "--output", output]
    examples(examples.train, *common, "--steps", 4)
    tokenizer = (output / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit, match=r"checkpoint-4 is from an earlier run"):
        examples(examples.train, *common, "--steps", 6)
    Path(parallel_files[0]).write_text("other words\n" * 80)
    examples(examples.train, *common, "--steps", 6, "--resume")
    results = json.loads((output / "results.json").read_text())
    assert (results["steps"], results["resumed"]) == (6, True)
    assert (output / "checkpoint-6").exists()
    assert (output / "tokenizer.json").read_bytes() == tokenizer
    with pytest.raises(SystemExit, match="no checkpoint in"):
        examples(examples.train, *common[:-1], tmp_path / "absent", "--resume")


def test_resume_auto_begins_a_run_and_goes_on_with_it(examples, parallel_files, tmp_path, capsys):
    output = tmp_path / "run"
    arguments = [
        examples.train, "--train", *parallel_files, *TINY, "--eval-steps", 2, "--output", output,
        "--resume", "auto",
    ]  # fmt: skip
    examples(*arguments, "--steps", 2)
    assert not json.loads((output / "results.json").read_text())["resumed"]
    tokenizer = (output / "tokenizer.json").read_bytes()
    (output / "checkpoint-3").mkdir()  # a kill has left it
    Path(parallel_files[0]).write_text("other words\n" * 80)
    examples(*arguments, "--steps", 4)
    results = json.loads((output / "results.json").read_text())
    assert (results["steps"], results["resumed"]) == (4, True)
    assert (output / "tokenizer.json").read_bytes() == tokenizer
    printed = capsys.readouterr().out
    assert printed.count("training from the start") == 1


def test_the_first_line_says_how_many_processes_train_and_on_what(
    examples, parallel_files, tmp_path, capsys
):
    output = tmp_path / "run"
    examples(
        examples.train, "--train", *parallel_files, *TINY, "--steps", 2, "--output", output
    )  # fmt: skip
    threads = torch.get_num_threads()
    expected = f"Training with 1 process on cpu ({threads} thread{'s' if threads > 1 else ''})"
    assert capsys.readouterr().out.splitlines()[0] == expected


def test_a_full_disk_at_the_end_of_a_run_leaves_every_file_whole(
    examples, parallel_files, tmp_path, monkeypatch
):
    output = tmp_path / "run"
    arguments = [
        examples.train, "--model", FROZEN, "--train", *parallel_files, "--test", *parallel_files,
        "--steps", 4, "--save-steps", 2, "--average", 2, "--output", output,
    ]  # fmt: skip
    examples(*arguments)
    flush = atomic_folder.flush
    for name in ("model.safetensors", "test.txt", "results.json", "README.md"):
        before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}

        def full(path, name=name):
            if name in path.name:
                raise OSError("No space left on device")
            flush(path)

        with monkeypatch.context() as patch:
            patch.setattr(atomic_folder, "flush", full)
            said = r"run\S* could not be saved: No space left on device \(\d+ MiB are free there"
            with pytest.raises(SystemExit, match=rf"train_translation\.py: .*{said}"):
                examples(*arguments, "--resume")
        assert {path for path in output.iterdir() if path.is_file()} == set(before)
        assert (output / name).read_bytes() == before[output / name]
        json.loads((output / "results.json").read_text())
    AutoModelForSeq2SeqLM.from_pretrained(output)


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_training_does_not_replace_a_model_that_it_did_not_save(
    resume, examples, parallel_files, tmp_path
):
    """Above all the one that is fine-tuned."""
    shutil.copytree(FROZEN, tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(SystemExit, match=r"model\.safetensors would be replaced: pass another"):
        examples(
            examples.train, "--model", tmp_path / "model", "--train", *parallel_files,
            "--steps", 1, "--output", tmp_path / "model", *resume,
        )  # fmt: skip
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_default_training_arguments_are_the_papers(examples):
    args = examples.train.parse_args(["--train", "x.tsv", "--output", "unused"])
    arguments = examples.train.training_arguments(args, d_model=512)
    assert arguments.learning_rate == pytest.approx(512**-0.5 * 4000**-0.5)
    assert (arguments.lr_scheduler_type, arguments.warmup_steps) == ("inverse_sqrt", 4000)
    adam = (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon)
    assert adam == (0.9, 0.98, 1e-9)
    assert (arguments.weight_decay, arguments.max_grad_norm, arguments.max_steps) == (0, 0, 100_000)


def test_training_stops_when_its_minutes_are_over(examples, parallel_files, tmp_path):
    examples(
        examples.train, "--train", *parallel_files, *TINY, "--steps", 100_000, "--minutes", 0.02,
        "--output", tmp_path / "run",
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] < 100_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--preset", "huge"], "Unknown preset 'huge'"),
        (["--set", "dropout=1.5"], r"dropout must lie in \[0, 1\)"),
        (["--set", "dropout"], "expected NAME=VALUE"),
        (["--set", "d_modle=32"], "'d_modle' is unknown: did you mean 'd_model'"),
        (["--set", "num_heads=4", "ffn_dim=128"], "'num_heads'.*'decoder_attention_heads'.*'ffn_"),
        (["--set", "my_note=32"], "'my_note' is unknown"),
        (
            ["--trainer", "leaning_rate=1"],
            "'leaning_rate' is unknown: did you mean 'learning_rate'",
        ),
        (["--generation", "lenght_penalty=1"], "'lenght_penalty'.* mean 'length_penalty'"),
        (["--generation", "length_penalty=high"], "length_penalty must be a number, got 'high'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_training(
    examples, parallel_files, tmp_path, arguments, complaint
):
    with pytest.raises(SystemExit, match=complaint):
        examples(
            examples.train, "--train", *parallel_files, "--vocab-size", 340, *arguments,
            "--output", tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_training_pushes_a_complete_repository(parallel_files, tmp_path):
    with LoopbackHub() as hub:
        arguments = [
            "--model", FROZEN, "--train", *parallel_files, "--steps", "2",
            "--output", tmp_path / "run", "--push-to-hub", "someone/numbers",
        ]  # fmt: skip
        subprocess.run(
            [sys.executable, ROOT / "examples" / "train_translation.py", *arguments],
            env=subprocess_environment(**hub.environment),
            capture_output=True,
            check=True,
        )
        names = set(hub.files("someone/numbers"))
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {f"{room}_vaswani.py" for room in ("configuration", "modeling", "tokenization")} <= names


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"one\nzwei\xff\n", "line 2: not utf-8"),
        (b"", "is empty"),
        (b"no tab here\n", "line 1: no tab"),
    ],
)
def test_unreadable_tsv_is_refused_by_file_and_line(examples, tmp_path, content, complaint):
    path = tmp_path / "bad.tsv"
    path.write_bytes(content if b"tab" in content else content.replace(b"\n", b"\t\n"))
    with pytest.raises(SystemExit) as error:
        examples.train.read_pairs([str(path)], ("source", "target"), "train")
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


def test_parallel_files_of_unequal_length_are_refused_with_both_lengths(examples, tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_text("a\n")
    long.write_text("a\nb\nc\n")
    with pytest.raises(SystemExit, match=r"1 lines.*3.*line 2 has no partner"):
        examples.train.read_pairs([str(short), str(long)], ("source", "target"), "train")


def test_missing_columns_and_files_are_named(examples, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "one", "de": "eins"}\n{"en": "two"}\n')
    with pytest.raises(SystemExit, match="record 2 has no 'de' but 'en'"):
        examples.train.read_pairs([str(path)], ("en", "de"), "train")
    with pytest.raises(SystemExit, match=r"No such file: absent\.tsv"):
        examples.train.read_pairs(["absent.tsv"], ("en", "de"), "train")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ('{"en": "two", "de": "zw\\ud800i"}', r"line 2: 'de' holds '\\ud800' as character 3, half"),
        ('{"en": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
    ],
    ids=["half a character", "endless number", "endless nesting"],
)
def test_records_that_are_no_text_are_refused_by_file_and_line(
    record, complaint, examples, tmp_path
):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "one", "de": "eins"}\n' + record + "\n")
    with pytest.raises(SystemExit, match=rf"pairs\.jsonl, {complaint}"):
        examples.train.read_pairs([str(path)], ("en", "de"), "train")


def test_a_data_set_that_cannot_be_read_is_named_with_the_reason(examples, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"en": "one", "de": "eins"}\n{"en": "\\ud800"}\n')
    with pytest.raises(SystemExit, match=r"no data set that can be loaded: .*surrogate.*row 1"):
        examples.train.read_pairs([str(tmp_path)], ("en", "de"), "train")


def test_translate_keeps_the_order_of_lines_and_empty_ones(examples, tmp_path, capsys):
    numbers = [999, 3, None, 342, 80]
    lines = ["" if n is None else num2words(n) for n in numbers]
    source, target = tmp_path / "in.txt.gz", tmp_path / "out.txt"
    with gzip.open(source, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    examples(examples.translate, FROZEN, source, "--output", target)
    expected = ["" if n is None else num2words(n, lang="de") for n in numbers]
    assert target.read_text(encoding="utf-8").split("\n") == [*expected, ""]


def in_words(numbers, lang="en"):
    return "".join(f"{num2words(number, lang=lang)}\n" for number in numbers)


def test_translate_may_write_over_its_input(examples, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text(in_words([342, 7]))
    path.chmod(0o640)
    examples(examples.translate, FROZEN, path, "-o", path)
    assert path.read_text(encoding="utf-8") == in_words([342, 7], "de")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["a line that is not utf-8", "no such model", "a full disk"])
def test_translate_leaves_an_existing_output_as_it_is_until_all_is_translated(
    fault, examples, tmp_path, monkeypatch
):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"one\ntw\xff\n" if "utf-8" in fault else b"one\n" * 3)
    target.write_text("of an earlier run")
    model = tmp_path / "absent" if "model" in fault else FROZEN
    if "disk" in fault:
        monkeypatch.setattr(os, "fsync", no_space_left)
    with pytest.raises((SystemExit, OSError)) as error:
        examples(examples.translate, model, source, "-o", target)
    assert target.read_text() == "of an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}
    if "disk" in fault:
        said = rf"{target} could not be saved: No space left on device \(\d+ MiB are free there\)"
        assert re.search(said, str(error.value))


def no_space_left(*args):
    raise OSError("No space left on device")


@pytest.mark.parametrize("window", [2, 4096])
def test_translate_keeps_what_was_translated_before_a_bad_line(
    window, examples, tmp_path, monkeypatch, capsys
):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(in_words([342, 7]).encode() + b"tw\xff\n")
    translate = VaswaniTranslationPipeline.__call__
    monkeypatch.setattr(
        VaswaniTranslationPipeline,
        "__call__",
        lambda self, *args, **kwargs: translate(self, *args, window=window, **kwargs),
    )
    with pytest.raises(SystemExit, match=r"in\.txt, line 3: not utf-8"):
        examples(examples.translate, FROZEN, source, "-o", target)
    assert not target.exists()
    kept = tmp_path / "out.txt.partial"
    assert (f"the translations so far are in {kept}" in capsys.readouterr().err) == (window == 2)
    assert kept.exists() == (window == 2)
    if window == 2:
        assert kept.read_text(encoding="utf-8") == in_words([342, 7], "de")


def test_translate_writes_through_links_to_pipes_and_to_standard_output(examples, tmp_path, capfd):
    source, real, link = (tmp_path / name for name in ("in.txt", "real.txt", "link.txt"))
    source.write_text(in_words([342, 7]))
    real.write_text("of an earlier run")
    link.symlink_to(real)
    examples(examples.translate, FROZEN, source, "-o", link)
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == in_words([342, 7], "de")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    examples(examples.translate, FROZEN, source, "-o", pipe)
    reader.join(timeout=60)
    assert received == [in_words([342, 7], "de")]
    assert stat.S_ISFIFO(pipe.stat().st_mode)

    examples(examples.translate, FROZEN, source, "-o", "/dev/stdout")
    assert capfd.readouterr().out == in_words([342, 7], "de")
    examples(examples.translate, FROZEN, source, "-o", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_translate_appends_to_a_log_that_is_standard_output(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with log.open("a") as file:
        subprocess.run(
            [sys.executable, ROOT / "examples" / "translate.py", FROZEN, "-o", "/dev/stdout"],
            input=in_words([21]),
            stdout=file,
            text=True,
            env=subprocess_environment(),
            check=True,
        )
    assert log.read_text(encoding="utf-8") == "before\n" + in_words([21], "de")


def test_translate_prints_n_best_with_scores_in_descending_order(examples, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text(f"{num2words(342)}\n{num2words(7)}\n")
    examples(examples.translate, FROZEN, source, "--nbest", 3, "--scores")
    rows = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    assert rows[0][1] == num2words(342, lang="de")
    for sentence in (rows[:3], rows[3:]):
        scores = [float(row[2]) for row in sentence]
        assert scores == sorted(scores, reverse=True)
        assert len({row[1] for row in sentence}) > 1


def test_translate_scores_greedy_translations_too(examples, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text(f"{num2words(342)}\n")
    examples(examples.translate, FROZEN, source, "--beams", 1, "--scores")
    text, score = capsys.readouterr().out.strip().split(" ||| ")
    assert text == num2words(342, lang="de")
    assert -1 < float(score) < 0


def test_translate_reads_standard_input_and_writes_standard_output():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "translate.py", FROZEN],
        input=f"{num2words(21)}\n\n{num2words(12)}\n",
        capture_output=True,
        text=True,
        env=subprocess_environment(),
        check=True,
    )
    assert done.stdout == f"{num2words(21, lang='de')}\n\n{num2words(12, lang='de')}\n"


def test_translate_reads_lines_as_training_does(examples, tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfseven\r\nthree\rhundred\n")
    assert list(examples.translate.read_lines(str(path))) == [(1, "seven"), (2, "three\rhundred")]
    path.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(SystemExit, match=r"in\.txt, line 2: not utf-8"):
        list(examples.translate.read_lines(str(path)))
    damaged = tmp_path / "in.txt.gz"
    damaged.write_bytes(gzip.compress(b"one\n" * 1000)[:-20])
    with pytest.raises(SystemExit, match=r"in\.txt\.gz is damaged"):
        list(examples.translate.read_lines(str(damaged)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent.txt"], "no such input file: absent.txt"),
        (["--nbest", "5", "--beams", "2"], "--nbest 5 needs"),
        (["--output", "absent/x.txt"], "no folder for the output absent/x.txt"),
        (["--output", "."], "the output . is a folder"),
    ],
)
def test_translate_refuses_what_it_cannot_do(examples, arguments, complaint):
    with pytest.raises(SystemExit) as error:
        examples(examples.translate, FROZEN, *arguments)
    assert complaint in str(error.value)


@pytest.mark.parametrize("name", ["quickstart", "train_translation", "translate"])
def test_help_shows_commands_to_copy(name):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", "--help"],
        capture_output=True,
        text=True,
        env=subprocess_environment(),
        check=True,
    )
    assert f"python examples/{name}.py" in done.stdout
    assert "default" in done.stdout
