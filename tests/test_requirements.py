"""The versions that pyproject.toml allows are those that constraints-min.txt has tested."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(file):
    """Return the versions that a constraints file pins, by package."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements(*extras):
    """Return the requirements of the package and given extras, without the package itself."""
    extra = PROJECT["optional-dependencies"]
    written = [*PROJECT["dependencies"], *(line for name in extras for line in extra[name])]
    return [Requirement(line) for line in written if not line.startswith(PROJECT["name"])]


DEV = requirements("train", "convert", "dev")
OLDEST = {
    canonicalize_name(requirement.name): Version(specifier.version)
    for requirement in DEV
    for specifier in requirement.specifier
    if specifier.operator == ">="
}


@pytest.mark.parametrize("name", sorted(OLDEST.keys() - {"torch"}))
def test_the_oldest_version_allowed_is_the_one_tested(name):
    assert pins("constraints-min.txt")[name] == OLDEST[name]


def test_torch_is_the_same_in_both_environments_and_new_enough():
    torch = pins("constraints-min.txt")["torch"]
    assert torch == pins("constraints.txt")["torch"]
    assert torch >= OLDEST["torch"]


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", ("train", "convert", "demo", "dev")),
        ("constraints-min.txt", ("train", "convert", "dev")),
    ],
)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(file, extras):
    pinned = pins(file)
    for requirement in requirements(*extras):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_the_command_of_the_oldest_versions_stands_at_the_head_of_their_file():
    head = (ROOT / "constraints-min.txt").read_text(encoding="utf-8").splitlines()[0]
    assert head.endswith(': pip install -c constraints-min.txt -e ".[dev]"')
