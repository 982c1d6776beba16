"""The common parts of all converters: rules, untrusted checkpoints, folders and errors."""

import argparse
import copy
import errno
import inspect
import io
import os
import pickle
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hostile import Hostile
from vaswani.commands.main import main
from vaswani.conversion import SUMMARIES, fairseq, find
from vaswani.conversion.errors import ConversionError, refuse
from vaswani.conversion.loading import Converted, build_model, open_model, open_tokenizers
from vaswani.conversion.reading import Inert, parse_yaml, read_checkpoint, read_json
from vaswani.conversion.rules import Drop, Rename, Stack, to_ours, to_theirs
from vaswani.corpora.atomic_folder import new_folder

from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer

# Rules


def numbered(*names, rows=2):
    return {name: torch.arange(rows * 3.0).view(rows, 3) + i for i, name in enumerate(names)}


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


RULES = [
    Rename("enc.{i}.attn.{part}.w", "encoder.{i}.{part}_proj.weight"),
    Rename("head.kernel", "head.weight", torch.t, torch.t),
    Stack("dec.{i}.qkv_{kind}", [f"decoder.{{i}}.{part}.{{kind}}" for part in "qkv"]),
]


def test_rules_rename_transpose_and_split_and_take_all_of_it_back():
    theirs = numbered("enc.0.attn.q.w", "enc.11.attn.key.w", "head.kernel")
    theirs |= numbered("dec.3.qkv_weight", "dec.3.qkv_bias", rows=6)
    ours = to_ours(RULES, theirs)
    assert ours.keys() == {
        "encoder.0.q_proj.weight",
        "encoder.11.key_proj.weight",
        "head.weight",
        *(f"decoder.3.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    }
    torch.testing.assert_close(ours["head.weight"], theirs["head.kernel"].T)
    torch.testing.assert_close(ours["decoder.3.k.bias"], theirs["dec.3.qkv_bias"][2:4])
    same(to_theirs(RULES, ours), theirs)


def test_placeholders_stand_for_one_part_of_a_name_only():
    with pytest.raises(ConversionError, match=r"enc\.0\.attn\.q\.x\.w, enc\.a\.attn\.q\.w"):
        to_ours(RULES, numbered("enc.0.attn.q.x.w", "enc.a.attn.q.w"))
    with pytest.raises(ConversionError, match="headXkernel"):
        to_ours(RULES, numbered("headXkernel"))


@pytest.mark.parametrize("convert", [to_ours, to_theirs])
def test_all_leftover_tensors_are_named_in_both_directions(convert):
    with pytest.raises(ConversionError, match=r"2 of 2 tensors: alien\.1, alien\.2"):
        convert(RULES, numbered("alien.2", "alien.1"))


def test_two_tensors_for_one_place_are_an_error():
    rules = [*RULES, Rename("old.head", "head.weight")]
    with pytest.raises(ConversionError, match=r"Several tensors would become head\.weight"):
        to_ours(rules, numbered("head.kernel", "old.head"))
    same(
        to_theirs(rules, to_ours(rules, numbered("old.head"))),
        {"head.kernel": numbered("x")["x"].T},
    )


def test_a_name_that_is_no_text_is_left_over():
    with pytest.raises(ConversionError, match=r"2 of 3 tensors: 7, alien"):
        to_ours(RULES, {7: torch.ones(1), **numbered("head.kernel", "alien")})


def test_conversion_leaves_the_given_dict_as_it_is():
    theirs = numbered("head.kernel")
    to_ours(RULES, theirs)
    assert list(theirs) == ["head.kernel"]


def test_a_stack_refuses_parts_that_are_missing_or_uneven():
    with pytest.raises(ConversionError, match=r"decoder\.0\.k\.bias, decoder\.0\.v\.bias"):
        to_theirs(RULES, numbered("decoder.0.q.bias"))
    for parts in (torch.ones(4, 3), torch.tensor(1.0)):
        with pytest.raises(ConversionError, match=r"dec\.0\.qkv_bias.*3 tensors.*shape \("):
            to_ours(RULES, {"dec.0.qkv_bias": parts})


def test_what_says_nothing_is_dropped_unless_its_check_objects():
    def check(name, tensor):
        if tensor.any():
            raise ConversionError(f"{name} says something.")

    rules = [Drop("{stack}.table", check)]
    assert to_ours(rules, {"enc.table": torch.zeros(2)}) == {}
    with pytest.raises(ConversionError, match=r"dec\.table says something"):
        to_ours(rules, {"enc.table": torch.zeros(2), "dec.table": torch.ones(2)})
    assert to_theirs(rules, {}) == {}


# Checkpoints


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, r"(posix|nt)\.system"), (eval, "eval"), (io.open, r"_?io\.open")],
)
def test_code_in_a_pickle_is_refused_by_name_and_not_run(tmp_path, function, name, zipped):
    evil, trace = tmp_path / "evil.pt", tmp_path / "trace"
    arguments = {
        os.system: (f"touch {trace}",),
        eval: (f"open({str(trace)!r}, 'w')",),
        io.open: (str(trace), "w"),
    }
    payload = {"model": {}, "extra": [Hostile(function, *arguments[function])]}
    torch.save(payload, evil, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConversionError, match=f"holds {name}, which .* could run code"):
        read_checkpoint(evil, ["argparse.Namespace"])
    assert not trace.exists()


def test_a_bare_hostile_pickle_is_refused(tmp_path):
    evil, trace = tmp_path / "evil.pt", tmp_path / "trace"
    evil.write_bytes(pickle.dumps(Hostile(os.system, f"touch {trace}"), protocol=2))
    with pytest.raises(ConversionError):
        read_checkpoint(evil)
    assert not trace.exists()


def test_named_classes_are_stood_for_by_something_that_does_nothing(tmp_path):
    torch.save({"args": Namespace(width=3, inner=Namespace(a="b"))}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"holds argparse\.Namespace"):
        read_checkpoint(tmp_path / "a.pt")
    args = read_checkpoint(tmp_path / "a.pt", ["argparse.Namespace"])["args"]
    assert isinstance(args, Inert)
    assert not isinstance(args, Namespace)
    assert args.width == 3
    assert args.inner.a == "b"
    with pytest.raises(ConversionError, match=r"holds argparse\.Namespace"):
        read_checkpoint(tmp_path / "a.pt")  # `harmless` applies to one call only


def test_a_function_stood_for_is_not_called(tmp_path):
    trace = tmp_path / "trace"
    torch.save([Hostile(os.mkdir, str(trace))], tmp_path / "a.pt")
    module = os.mkdir.__module__
    with pytest.raises(ConversionError, match="mkdir"):
        # torch blocks this module even if it is allowed.
        read_checkpoint(tmp_path / "a.pt", [f"{module}.mkdir"])
    torch.save([Hostile(io.open, str(trace), "w")], tmp_path / "a.pt")
    (stand_in,) = read_checkpoint(tmp_path / "a.pt", ["io.open", "_io.open"])
    assert isinstance(stand_in, Inert)
    assert not trace.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_off_anywhere_is_a_clear_error(tmp_path, zipped):
    whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    content = {"model": {"a": torch.rand(7), "b": torch.rand(3, 2)}, "args": {"n": 1.5, "s": "x"}}
    torch.save(content, whole, _use_new_zipfile_serialization=zipped)
    data = whole.read_bytes()
    for length in range(0, len(data), 7):
        part.write_bytes(data[:length])
        with pytest.raises(ConversionError, match=r"part\.pt"):
            read_checkpoint(part)


def test_a_changed_byte_of_a_weight_is_noticed(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": torch.rand(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    data[record.header_offset + len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConversionError, match=r"a\.pt is not a complete checkpoint.*damaged"):
        read_checkpoint(path)


def save_in_tar(content, path):
    """Save in the format of torch before 0.1.10."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (save_in_tar, "legacy .tar format"),
        (lambda content, path: torch.save(content, path, pickle_protocol=4), "Unsupported operand"),
        (lambda content, path: path.write_bytes(b"no pickle"), "invalid load key|Unsupported"),
    ],
    ids=["tar", "protocol 4", "text"],
)
def test_the_error_says_what_is_wrong_and_not_how_to_load_it_unprotected(tmp_path, save, reason):
    trace = tmp_path / "trace"
    save([Hostile(os.mkdir, str(trace))], tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=reason) as error:
        read_checkpoint(tmp_path / "a.pt")
    assert "False" not in str(error.value)
    assert "\n" not in str(error.value)
    assert not trace.exists()


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConversionError, match=r"There is no file .*nothing\.pt"):
        read_checkpoint(tmp_path / "nothing.pt")
    with pytest.raises(ConversionError, match=tmp_path.name):
        read_checkpoint(tmp_path)


# Models


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_model_is_built_of_its_own_weights_bit_by_bit(tiny_model):
    model = tiny_model(dtype=torch.float32)
    built = build_model(model.config, weights(model))
    same(weights(built), weights(model))
    assert not built.training


def test_a_tied_tensor_may_come_under_one_of_its_names_alone(tiny_model):
    model = tiny_model(dtype=torch.float32)
    given = weights(model)
    del given["lm_head.weight"], given["model.encoder.embed_tokens.weight"]
    same(weights(build_model(model.config, given)), weights(model))


def test_missing_leftover_misshapen_and_disagreeing_tensors_are_named_together(tiny_model):
    model = tiny_model(dtype=torch.float32)
    given = weights(model)
    del given["model.encoder.layers.0.fc1.bias"]
    given["alien"] = torch.zeros(1)
    given["model.decoder.layers.1.fc2.weight"] = torch.zeros(3, 4)
    given["lm_head.weight"] += 1
    with pytest.raises(ConversionError) as error:
        build_model(model.config, given)
    for part in (
        "model.encoder.layers.0.fc1.bias is missing",
        "alien has no place",
        "model.decoder.layers.1.fc2.weight has the shape (3, 4), not (16, 24)",
        "lm_head.weight",
        "differ, but are tied",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "strange",
    [
        torch.ones(24, dtype=torch.int64),
        torch.ones(24, dtype=torch.complex64),
        torch.ones(24).to_sparse(),
        torch.ones(24, device="meta"),
    ],
    ids=["integers", "complex", "sparse", "meta"],
)
def test_what_is_no_dense_tensor_of_real_numbers_is_named(tiny_model, strange):
    model = tiny_model(dtype=torch.float32)
    name = "model.encoder.layers.0.fc1.bias"
    with pytest.raises(ConversionError, match=f"{name} is not a dense tensor of floating-point"):
        build_model(model.config, weights(model) | {name: strange})


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"encoder_layers": 10**9}, r"too few for 1000000002 layers"),
        ({"encoder_ffn_dim": 10**10}, r"fc1\.weight has the shape \(24, 16\), not \(10000000000"),
        ({"encoder_ffn_dim": 10**18}, "no room"),
    ],
    ids=["layers", "widths", "numbers beyond all"],
)
def test_sizes_that_no_machine_has_are_refused_before_they_are_taken(tiny_model, sizes, reason):
    model = tiny_model(dtype=torch.float32)
    config = copy.deepcopy(model.config)
    for name, size in sizes.items():
        setattr(config, name, size)
    with pytest.raises(ConversionError, match=reason):
        build_model(config, weights(model))


def test_weights_that_are_not_finite_are_refused_by_name_in_both_directions(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.model.decoder.layers[0].fc1.bias.data[3] = float("nan")
    message = r"model\.decoder\.layers\.0\.fc1\.bias holds NaN or infinity"
    with pytest.raises(ConversionError, match=message):
        build_model(model.config, weights(model))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=message):
        open_model(tmp_path)


def test_half_precision_is_carried_over_without_rounding(tiny_model):
    model = tiny_model(dtype=torch.float32)
    half = {name: tensor.half() for name, tensor in weights(model).items()}
    built = weights(build_model(model.config, half))
    for name, tensor in half.items():
        assert torch.equal(built[name], tensor.float())


def test_all_problems_are_refused_at_once():
    refuse([], "a.pt")
    with pytest.raises(ConversionError, match=r"a\.pt cannot .*: --one; --two 3\."):
        refuse(["--one", "--two 3"], "a.pt")


# Arguments


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_converter_has_the_same_interface(name):
    """The command line takes the arguments of the function, and prints the module's manual."""
    converter, parser = find(name), argparse.ArgumentParser()
    converter.add_arguments(parser)
    given = {action.dest for action in parser._actions} - {"help"}
    function = converter.convert if name.startswith("to-") else converter.load
    assert given == set(inspect.signature(function).parameters) - {"output"}
    assert {"output"} <= set(inspect.signature(converter.convert).parameters)
    assert f"    vaswani convert {name} " in converter.__doc__


def test_an_unknown_converter_is_named_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no converter 'nematus': choose one of fairseq, opennmt"):
        find("nematus")


# Text


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: 2020-13-45",
        "a: !!timestamp 99",
        "a: !!int ''",
        "[" * 10**4,
        "a: \x00",
        "a: !!python/name:os.system",
    ],
    ids=["cut off", "date", "no date", "number", "deep", "control", "code"],
)
def test_what_is_no_yaml_of_plain_values_is_named(text):
    with pytest.raises(ConversionError, match=r"options\.yml is not YAML"):
        parse_yaml(text, "options.yml")


@pytest.mark.parametrize("text", ["{", "[" * 10**6, "[1]", "\udcff"])
def test_what_is_no_json_object_is_named(tmp_path, text):
    path = tmp_path / "options.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConversionError, match=r"options\.json (is not|cannot)"):
        read_json(path)


# The command line


def test_an_output_that_is_there_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    monkeypatch.setattr(fairseq, "convert", lambda **_: pytest.fail("worked"))
    with pytest.raises(SystemExit, match=r"fairseq: .*out exists .*choose another"):
        main(["convert", "fairseq", "a.pt", str(tmp_path / "out")])


@pytest.mark.parametrize("toolkit", ["to-marian", "to-torch", "to-ctranslate2"])
def test_a_full_disk_ends_the_command_in_one_line(tmp_path, tiny_model, toolkit):
    resource = pytest.importorskip("resource", reason="limits the size of files")
    if toolkit == "to-ctranslate2":
        pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    tiny_model(vocab_size=20_000, dtype=torch.float32).save_pretrained(tmp_path / "ours")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(SystemExit, match=rf"{toolkit}: .*(File too large|disk full)"):
            main(["convert", toolkit, str(tmp_path / "ours"), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_output_that_cannot_be_made_ends_the_command_in_one_line(
    tmp_path, monkeypatch, tiny_model
):
    model = tiny_model(dtype=torch.float32)
    monkeypatch.setattr(fairseq, "load", lambda *_, **__: Converted(model))
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit, match=r"fairseq: .*file"):
        main(["convert", "fairseq", "a.pt", str(tmp_path / "file" / "sub" / "out")])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SystemExit, match=r"fairseq: \. is the current folder"):
        main(["convert", "fairseq", "a.pt", "."])


def test_a_folder_of_ours_with_a_hostile_pickle_is_refused(tmp_path, tiny_model):
    ours, trace = tmp_path / "ours", tmp_path / "trace"
    tiny_model(dtype=torch.float32).save_pretrained(ours)
    (ours / "model.safetensors").unlink()
    torch.save({"a": Hostile(os.system, f"touch {trace}")}, ours / "pytorch_model.bin")
    with pytest.raises(SystemExit, match=r"holds (posix|nt)\.system, which .* could run code"):
        main(["convert", "to-torch", str(ours), str(tmp_path / "out")])
    assert not trace.exists()
    assert not (tmp_path / "out").exists()


# Folders


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_half_written_vanishes(tmp_path, error):
    def write():
        with new_folder(tmp_path / "sub" / "out") as folder:
            (folder / "half").write_text("x")
            raise error

    with pytest.raises(error):
        write()
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_folder_appears_when_it_is_complete(tmp_path):
    output = tmp_path / "out"
    with new_folder(output) as folder:
        (folder / "file").write_text("x")
        assert not output.exists()
    assert [path.name for path in output.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "file").read_text() == "x"


def test_a_mount_point_is_filled(tmp_path, monkeypatch):
    output = tmp_path / "out"
    output.mkdir()
    for name in ("lost+found", "_saving-1a2b"):  # of a new disk, and of a call that was killed
        (output / name).mkdir()
    number = output.stat().st_ino
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(output))
    with new_folder(output) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert output.stat().st_ino == number
    names = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    assert names == {"lost+found", "sub", "sub/file"}


def test_a_folder_mounted_from_the_same_disk_is_filled(tmp_path, monkeypatch):
    output, rmdir = tmp_path / "out", Path.rmdir
    output.mkdir()

    def busy(folder):
        if folder == output:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", busy)
    with new_folder(output) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert (output / "sub" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_there_already_is_not_touched(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    with new_folder(output):
        pass  # an empty folder may be there
    (output / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="choose another"), new_folder(output):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError), new_folder(tmp_path / "file"):
        pass
    assert (output / "mine").read_text() == "x"
    assert (tmp_path / "file").read_text() == "x"


def test_a_converted_model_is_read_back_bit_by_bit(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    Converted(model).save(tmp_path / "out")
    same(weights(VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out")), weights(model))


def test_the_targets_tokenizer_of_a_folder_stays_beside_another_tokenizer_of_the_source(
    tiny_model, tmp_path
):
    places = [tmp_path / "model", tmp_path / "model" / "target_tokenizer", tmp_path / "other"]
    tiny_model().save_pretrained(places[0])
    for number, place in enumerate(places):
        VaswaniTokenizer.train_from_iterator(
            ["abc"[number] * 3], kind="char", vocab_size=10, show_progress=False
        ).save_pretrained(place)
    source, target = open_tokenizers(places[0], places[2])
    assert "c" in source.get_vocab()
    assert "b" in target.get_vocab()
