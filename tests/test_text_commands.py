"""`vaswani translate`, `score` and `align`: line by line, without losing lines."""

import gzip
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from launches import environment
from num2words import num2words
from vaswani.commands import demo, prepare, text, train, translate
from vaswani.commands.main import main
from vaswani.configuration import __version__
from vaswani.corpora.reading import DataError, read_lines
from vaswani.generation import translator
from vaswani.training import progress
from vaswani.training.progress import in_terminal

from vaswani import VaswaniTranslationPipeline

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen" / "0.1"
TINY = ["--vocab-size", "340", "--set", "d_model=32", "encoder_layers=1", "decoder_layers=1"]
TINY += ["encoder_attention_heads=4", "decoder_attention_heads=4"]
TINY += ["encoder_ffn_dim=64", "decoder_ffn_dim=64"]


@pytest.fixture
def command():
    """Run the command `vaswani` in this process."""

    def run(*words):
        main([str(word) for word in words])

    return run


def test_translate_keeps_the_order_of_lines_and_empty_ones(command, tmp_path, capsys):
    numbers = [999, 3, None, 342, 80]
    lines = ["" if n is None else num2words(n) for n in numbers]
    source, target = tmp_path / "in.txt.gz", tmp_path / "out.txt"
    with gzip.open(source, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    command("translate", FROZEN, source, "--output", target)
    expected = ["" if n is None else num2words(n, lang="de") for n in numbers]
    assert target.read_text(encoding="utf-8").split("\n") == [*expected, ""]


def test_a_folder_that_may_not_be_written_is_noticed_before_the_work(
    command, tmp_path, monkeypatch
):
    (tmp_path / "in.txt").write_text("seven\n")
    monkeypatch.setattr(text.os, "access", lambda path, mode: False)
    monkeypatch.setattr(
        translator, "load_translator", lambda *_, **__: pytest.fail("loaded"), raising=False
    )
    with pytest.raises(
        SystemExit, match=r"the folder of the output .*out\.txt is not writable: choose another"
    ):
        command("translate", FROZEN, tmp_path / "in.txt", "--output", tmp_path / "out.txt")


def in_words(numbers, lang="en"):
    return "".join(f"{num2words(number, lang=lang)}\n" for number in numbers)


def test_translate_may_write_over_its_input(command, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text(in_words([342, 7]))
    path.chmod(0o640)
    command("translate", FROZEN, path, "-o", path)
    assert path.read_text(encoding="utf-8") == in_words([342, 7], "de")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["a line that is not utf-8", "no such model", "a full disk"])
def test_translate_leaves_an_existing_output_as_it_is_until_all_is_translated(
    fault, command, tmp_path, monkeypatch
):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"one\ntw\xff\n" if "utf-8" in fault else b"one\n" * 3)
    target.write_text("of an earlier run")
    model = tmp_path / "absent" if "model" in fault else FROZEN
    if "disk" in fault:
        monkeypatch.setattr(os, "fsync", no_space_left)
    with pytest.raises((SystemExit, OSError)) as error:
        command("translate", model, source, "-o", target)
    assert target.read_text() == "of an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}
    if "disk" in fault:
        said = rf"{target} could not be saved: No space left on device \(\d+ MiB are free there\)"
        assert re.search(said, str(error.value))


def no_space_left(*args):
    raise OSError("No space left on device")


@pytest.mark.parametrize("window", [2, 4096])
def test_translate_keeps_what_was_translated_before_a_bad_line(
    window, command, tmp_path, monkeypatch, capsys
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
        command("translate", FROZEN, source, "-o", target)
    assert not target.exists()
    kept = tmp_path / "out.txt.partial"
    assert (f"The lines so far are in {kept}" in capsys.readouterr().err) == (window == 2)
    assert kept.exists() == (window == 2)
    if window == 2:
        assert kept.read_text(encoding="utf-8") == in_words([342, 7], "de")


def test_translate_writes_through_links_to_pipes_and_to_standard_output(command, tmp_path, capfd):
    source, real, link = (tmp_path / name for name in ("in.txt", "real.txt", "link.txt"))
    source.write_text(in_words([342, 7]))
    real.write_text("of an earlier run")
    link.symlink_to(real)
    command("translate", FROZEN, source, "-o", link)
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == in_words([342, 7], "de")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    command("translate", FROZEN, source, "-o", pipe)
    reader.join(timeout=60)
    assert received == [in_words([342, 7], "de")]
    assert stat.S_ISFIFO(pipe.stat().st_mode)

    command("translate", FROZEN, source, "-o", "/dev/stdout")
    assert capfd.readouterr().out == in_words([342, 7], "de")
    command("translate", FROZEN, source, "-o", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.slow
def test_translate_appends_to_a_log_that_is_standard_output(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with log.open("a") as file:
        subprocess.run(
            [sys.executable, "-m", "vaswani", "translate", FROZEN, "-o", "/dev/stdout"],
            input=in_words([21]),
            stdout=file,
            text=True,
            env=environment(),
            check=True,
        )
    assert log.read_text(encoding="utf-8") == "before\n" + in_words([21], "de")


def test_translate_prints_n_best_with_scores_in_descending_order(command, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text(f"{num2words(342)}\n{num2words(7)}\n")
    command("translate", FROZEN, source, "--nbest", 3, "--scores")
    rows = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    assert rows[0][1] == num2words(342, lang="de")
    for sentence in (rows[:3], rows[3:]):
        scores = [float(row[2]) for row in sentence]
        assert scores == sorted(scores, reverse=True)
        assert len({row[1] for row in sentence}) > 1


def test_translate_scores_greedy_translations_too(command, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text(f"{num2words(342)}\n")
    command("translate", FROZEN, source, "--beams", 1, "--scores")
    text, score = capsys.readouterr().out.strip().split(" ||| ")
    assert text == num2words(342, lang="de")
    assert -1 < float(score) < 0


def test_translate_reads_standard_input_and_writes_standard_output():
    done = subprocess.run(
        [sys.executable, "-m", "vaswani", "translate", FROZEN],
        input=f"{num2words(21)}\n\n{num2words(12)}\n",
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert done.stdout == f"{num2words(21, lang='de')}\n\n{num2words(12, lang='de')}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent.txt"], "no such input file: absent.txt"),
        (["--nbest", "5", "--beams", "2"], "--nbest 5 needs"),
        (["--output", "absent/x.txt"], "no folder for the output absent/x.txt"),
        (["--output", "."], "the output . is a folder"),
        (["."], "the input . is a folder"),
    ],
)
def test_translate_refuses_what_it_cannot_do(command, arguments, complaint):
    with pytest.raises(SystemExit) as error:
        command("translate", FROZEN, *arguments)
    assert complaint in str(error.value)


@pytest.fixture
def no_model(monkeypatch):
    """Fail if a command loads a model."""

    def load(*arguments):
        pytest.fail("the model is loaded before the paths are checked")

    monkeypatch.setattr(translator, "load_translator", load)


@pytest.fixture
def copied(tmp_path):
    """Copy the frozen model with one changed file."""

    def copy(name, change):
        folder = tmp_path / "model"
        shutil.copytree(FROZEN, folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    return copy


@pytest.fixture
def sentences(tmp_path):
    """A text file of two sentences, and its translation."""
    source, target = tmp_path / "in.txt", tmp_path / "target.txt"
    source.write_text(in_words([342, 7]), encoding="utf-8")
    target.write_text(in_words([342, 7], "de"), encoding="utf-8")
    return source, target


@pytest.mark.parametrize("name", ["score", "align"])
@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        (["-", "-"], "cannot be both source and target"),
        (["-", "/dev/stdin"], "cannot be both source and target"),
        (["/dev/null", "absent.txt"], "no such input file: absent.txt"),
        (["/dev/null", "."], "the input . is a folder"),
    ],
)
def test_both_texts_are_checked_before_the_model_is_loaded(
    name, paths, complaint, command, no_model
):
    with pytest.raises(SystemExit, match=complaint):
        command(name, FROZEN, *paths)


def test_closed_standard_streams_are_named(command, no_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit, match="standard input is closed"):
        command("translate", FROZEN)
    with pytest.raises(DataError, match="Standard input is closed"):
        list(read_lines("-"))
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match="standard output is closed"):
        command("translate", FROZEN, "/dev/null")


def test_translate_reads_pipes_and_takes_two_dashes(command, capsys):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write(in_words([7]))
    try:
        command("translate", "--", FROZEN, f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    assert capsys.readouterr().out == in_words([7], "de")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_outputs_are_compressed_as_their_endings_say(ending, tmp_path):
    path = tmp_path / f"out.txt{ending}"
    text.write_lines(["für", "zwölf"], str(path))
    assert path.read_bytes()[:2] == (b"\x1f\x8b" if ending == ".gz" else b"\x28\xb5")
    assert list(read_lines(str(path))) == ["für", "zwölf"]


def test_compressed_lines_before_an_error_are_kept(tmp_path):
    def lines(count):
        yield from ["zwölf"] * count
        raise ValueError("damaged")

    path = tmp_path / "out.gz"
    with pytest.raises(ValueError, match="damaged"):
        text.write_lines(lines(0), str(path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="damaged"):
        text.write_lines(lines(2), str(path))
    assert gzip.decompress((tmp_path / "out.gz.partial").read_bytes()).decode() == "zwölf\n" * 2


def test_writing_ends_quietly_if_the_reader_closes_the_pipe(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as error:
            text.write_lines(["x" * 100_000], "-")
    assert error.value.code == 141


def test_commands_run_with_pythons_own_handling_of_closed_pipes(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "argv", ["vaswani", "demo", "model"])
    monkeypatch.setattr(demo, "run", lambda args: found.append(signal.getsignal(signal.SIGPIPE)))
    before = signal.getsignal(signal.SIGPIPE)
    try:
        main()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert found == [signal.SIG_IGN]


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        (translate, ["translate", "model"], ""),
        (train, ["train", "--train", "a.tsv", "--output", "run"], "--resume auto continues"),
    ],
)
def test_an_interrupted_command_ends_with_status_130(
    module, words, said, command, monkeypatch, capsys
):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    with pytest.raises(SystemExit) as error:
        command(*words)
    assert error.value.code == 130
    printed = capsys.readouterr().err
    assert said in printed if said else not printed


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("model.safetensors", lambda content: content[:500], "weights of .* are damaged"),
        ("generation_config.json", lambda content: b"{", "not a valid JSON file"),
    ],
)
@pytest.mark.parametrize("command_name", ["translate", "score"])
def test_a_damaged_model_is_named_in_one_line(
    command_name, name, change, complaint, command, copied, sentences
):
    texts = sentences if command_name == "score" else sentences[:1]
    with pytest.raises(SystemExit, match=complaint) as error:
        command(command_name, copied(name, change), *texts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"dropout": 2.0}, {"d_model": "abc"}])
def test_a_wrong_config_is_an_error_of_one_line(wrong, command, copied, sentences):
    folder = copied("config.json", lambda content: json.dumps(json.loads(content) | wrong).encode())
    for words in (
        ["translate", folder, sentences[0]],
        ["score", folder, *sentences],
        ["card", folder],
    ):
        with pytest.raises(SystemExit, match=f"wrong model configuration: .*{next(iter(wrong))}"):
            command(*words)


def test_a_card_of_damaged_weights_is_an_error_of_one_line(command, copied):
    folder = copied("model.safetensors", lambda content: content[:500])
    with pytest.raises(SystemExit, match=r"vaswani card: the weights in .* are damaged"):
        command("card", folder)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (train, ["--epochs", "nan"]),
        (train, ["--epochs", "-1"]),
        (train, ["--minutes", "-1"]),
        (train, ["--temperature", "0"]),
        (train, ["--temperature", "inf"]),
        (train, ["--learning-rate", "nan"]),
        (train, ["--max-ratio", "nan"]),
        (prepare, ["--temperature", "nan"]),
    ],
)
def test_number_options_take_finite_numbers_above_0(module, words, capsys):
    with pytest.raises(SystemExit):
        module.make_parser().parse_args(["--train", "a.tsv", *words])
    assert f"{words[0]}: must be a finite number above 0" in capsys.readouterr().err


def test_ports_are_bounded(capsys):
    parse = demo.make_parser().parse_args
    assert parse(["model", "--port", "65535"]).port == 65535
    for port, complaint in (("65536", "must be at most 65535"), ("0", "must be at least 1")):
        with pytest.raises(SystemExit):
            parse(["model", "--port", port])
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--valid", "--test", "--stream", "--stream-buffer"])
def test_prepare_refuses_options_without_effect(option, capsys):
    with pytest.raises(SystemExit):
        prepare.make_parser().parse_args(["--train", "a.tsv", option, "9"])
    assert f"{option} is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["translate", "score", "align"])
def test_all_text_commands_use_one_loader(name, command, sentences, monkeypatch, capsys):
    loaded = []
    load = translator.load_translator
    monkeypatch.setattr(
        translator, "load_translator", lambda *words: loaded.append(words) or load(*words)
    )
    command(name, FROZEN, *(sentences[:1] if name == "translate" else sentences))
    assert len(loaded) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_closed_stream_is_no_terminal(stream):
    assert not in_terminal(stream)


def test_prepare_draws_no_progress_into_a_file(command, tmp_path, monkeypatch):
    (tmp_path / "a.tsv").write_text("a b\tc d\n" * 20)
    called = []
    monkeypatch.setattr(datasets, "disable_progress_bars", lambda: called.append(True))
    monkeypatch.setattr(progress, "in_terminal", lambda stream: False)
    command("prepare", "--train", tmp_path / "a.tsv", "--data-cache", tmp_path / "cache",
            "--vocab-size", 270)  # fmt: skip
    assert called


def test_the_version_needs_no_installed_package(command, monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "version", None)
    command("--version")
    assert capsys.readouterr().out.strip() == __version__


def test_the_next_commands_quote_a_folder_with_a_space(capsys):
    args = SimpleNamespace(output="my runs/en de", score="bleu")
    train._print_summary(args, {"valid": None, "test": None})
    assert "vaswani translate 'my runs/en de' FILE" in capsys.readouterr().out


def test_a_closed_standard_output_takes_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    progress._write("update 1 of 2")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_missing_memory_ends_in_the_way_out(error, command, sentences, monkeypatch):
    def run(args):
        raise error

    monkeypatch.setattr(translate, "run", run)
    with pytest.raises(SystemExit, match=r"out of memory.*: pass a smaller --batch-tokens"):
        command("translate", FROZEN, sentences[0])
    error.args = ("another error",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="another error"):
            command("translate", FROZEN, sentences[0])
