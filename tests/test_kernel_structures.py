"""Structures of ctypes have the fields of the structures in the C files."""

import ctypes
import re
from pathlib import Path

import pytest
from vaswani.generation import (
    choice_vaswani,
    fingerprints_vaswani,
    library_vaswani,
    products_vaswani,
    steps_vaswani,
    structures_vaswani,
)
from vaswani.modeling import training_kernels_vaswani, training_products_vaswani

KERNELS = Path(library_vaswani.__file__).with_name("kernels")
STRUCTURES = {
    "fingerprints.c fingerprint": fingerprints_vaswani.Fingerprint,
    "layers.h cache": structures_vaswani.Cache,
    "layers.h positions": structures_vaswani.Listed,
    "layers.h batch": structures_vaswani.Batch,
    "layers.h norm": structures_vaswani.Norm,
    "layers.h layer": structures_vaswani.Layer,
    "layers.h memory": structures_vaswani.Memory,
    "matrices.c side": training_products_vaswani._Side,
    "matrices.c products_of_matrices": training_products_vaswani._Products,
    "packed.c sides": training_kernels_vaswani._Sides,
    "products.h product": products_vaswani.Product,
    "products.h rounded": products_vaswani.Rounded,
    "random.h dropout": training_kernels_vaswani._Dropout,
    "residual.c residual_norm": training_kernels_vaswani._Norm,
    "search.h embedding": structures_vaswani.Embedding,
    "search.h candidates": choice_vaswani.CandidateList,
    "search.h rules": choice_vaswani.StepRules,
    "search.h beam": choice_vaswani.BeamState,
    "search.h chosen": choice_vaswani.Chosen,
    "steps.c reader": steps_vaswani._ReaderState,
    "steps.c choice": steps_vaswani._Choice,
}
SCALARS = {
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}
BY_NAME = {key.split()[1]: structure for key, structure in STRUCTURES.items()}


def fields_of(file, name):
    """Read the names and types of a structure's fields in a C file."""
    text = re.sub(r"//.*", "", (KERNELS / file).read_text())
    sizes = dict(re.findall(r"(\w+) = (\d+)", text))
    body = re.search(rf"^struct {name} \{{(.*?)^\}}", text, re.DOTALL | re.MULTILINE)[1]
    for declaration in filter(str.strip, body.split(";")):
        const, kind, declared = re.match(
            r"\s*(const )?((?:struct )?\w+)\s+(.*)", declaration, re.DOTALL
        ).groups()
        for field in declared.split(","):
            pointer, label, size = re.match(r"\s*(\*?)(\w+)(?:\[(\w+)\])?", field).groups()
            assert pointer or not const
            if pointer:
                found = ctypes.c_void_p
            else:
                found = SCALARS.get(kind) or BY_NAME[kind.removeprefix("struct ")]
            yield label, found if size is None else found * int(sizes[size])


@pytest.mark.parametrize("key", STRUCTURES)
def test_a_structure_has_the_fields_of_its_c_file(key):
    names = {"in": "inputs", "out": "outputs"}  # `in` is a keyword of Python
    expected = [(names.get(name, name), kind) for name, kind in fields_of(*key.split())]
    assert list(STRUCTURES[key]._fields_) == expected


def test_every_structure_is_compared():
    modules = {
        *(choice_vaswani, fingerprints_vaswani, products_vaswani, structures_vaswani),
        steps_vaswani,
        *(training_kernels_vaswani, training_products_vaswani),
    }
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    assert found == set(STRUCTURES.values())
