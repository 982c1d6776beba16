"""`vaswani translate`, `score` and `align`: line by line, without losing lines."""

import gzip
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launches import environment
from num2words import num2words
from vaswani.commands.main import main

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
    ],
)
def test_translate_refuses_what_it_cannot_do(command, arguments, complaint):
    with pytest.raises(SystemExit) as error:
        command("translate", FROZEN, *arguments)
    assert complaint in str(error.value)
