"""The command that a results file names is one that was run."""

import sys

import pytest
from vaswani.training.circumstances import circumstances


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/environment/bin/vaswani", "vaswani --seed 1"),
        ("/environment/lib/vaswani/__main__.py", "vaswani --seed 1"),
        ("/home/me/vaswani/my_script.py", "python /home/me/vaswani/my_script.py --seed 1"),
    ],
)
def test_only_the_package_itself_is_called_by_its_name(program, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "--seed", "1"])
    found = circumstances()
    assert found["command"] == command
    assert found["commit"] == "unknown" or command.startswith("vaswani")
