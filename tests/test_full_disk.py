"""A disk that fills during a save: earlier files stay, and the error is one sentence."""

import contextlib
import errno
import os
import resource
import signal

import pytest
import torch
from forks import in_child
from peft import LoraConfig, get_peft_model
from test_batching import assert_bit_for_bit, make_trainer, weights
from test_faults import SAVING, die_in
from transformers import AutoModelForSeq2SeqLM, modeling_utils
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from vaswani.corpora import atomic_folder
from vaswani.corpora.atomic_folder import replaced_file, replaced_files
from vaswani.training.averaging import average_checkpoints
from vaswani.training.checkpoints import run_checkpoints

from vaswani import VaswaniTokenizer

ROOM = r"\(\d+ MiB are free there\)"


@contextlib.contextmanager
def files_of_at_most(size):
    """Limit the size of files, so that writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def fill_disk_in(owner, name, monkeypatch, size=300):
    """Let a function find a full disk."""
    function = getattr(owner, name)

    def refused(*args, **kwargs):
        with files_of_at_most(size):
            return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, refused)


@pytest.fixture
def tokenizer():
    return VaswaniTokenizer.train_from_iterator(["one two"], kind="char", show_progress=False)


def test_a_tokenizer_that_cannot_be_saved_says_where(tokenizer, tmp_path, monkeypatch):
    fill_disk_in(TokenizersBackend, "_save_pretrained", monkeypatch)
    with pytest.raises(OSError, match=f"tokenizer could not be saved in {tmp_path}: File"):
        tokenizer.save_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [VaswaniTokenizer, TokenizersBackend])
def test_a_disk_that_fills_while_the_tokenizer_of_a_checkpoint_is_saved_leaves_no_part_of_it(
    kind, tokenizer, tmp_path, monkeypatch
):
    run = make_trainer(tmp_path, **SAVING)
    run.processing_class = kind(tokenizer_object=tokenizer.backend_tokenizer)
    save, saves = kind._save_pretrained, []

    def second_is_refused(*args, **kwargs):
        saves.append(args)
        with files_of_at_most(300) if len(saves) == 2 else contextlib.nullcontext():
            return save(*args, **kwargs)

    monkeypatch.setattr(kind, "_save_pretrained", second_is_refused)
    message = rf"checkpoint-6 could not be saved: .*{ROOM}.*last complete checkpoint is .*-3\."
    with pytest.raises(OSError, match=message):
        run.train()
    assert [path.name for path in run_checkpoints(tmp_path)] == ["checkpoint-3"]


def test_an_error_that_is_no_full_disk_stays_what_it_is_and_leaves_no_part_of_a_checkpoint(
    tmp_path, monkeypatch
):
    run = make_trainer(tmp_path, **SAVING)
    run.model.generation_config.num_beams = 0
    with pytest.raises(ValueError, match="num_beams must be"):
        run.train()
    assert run_checkpoints(tmp_path) == []


FAULTS = {
    "weights": (modeling_utils, "safe_save_file", 300),
    "tokenizer": (TokenizersBackend, "_save_pretrained", 300),
    "settings": (torch, "save", 300),
    "flush": (atomic_folder, "_move_files", None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_final_save_replaces_all_files_or_none(fault, earlier, tokenizer, tmp_path, monkeypatch):
    run = make_trainer(tmp_path, max_steps=2)
    run.processing_class = tokenizer
    if earlier:
        run.save_model()
    before = contents(tmp_path)
    run.train()
    owner, name, size = FAULTS[fault]
    with monkeypatch.context() as patch:
        if size is None:
            patch.setattr(owner, name, no_space_left)
        else:
            fill_disk_in(owner, name, patch, size)
        message = rf"{tmp_path} could not be saved: .*{ROOM}\. Earlier files .* unchanged"
        with pytest.raises(OSError, match=message):
            run.save_model()
    assert contents(tmp_path) == before
    run.save_model()
    assert_bit_for_bit(AutoModelForSeq2SeqLM.from_pretrained(tmp_path).state_dict(), weights(run))
    assert bool(before) == earlier


def no_space_left(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (modeling_utils, "safe_save_file", "half way"),
        (atomic_folder, "_move_files", "before"),
        (torch, "save", "half way"),
    ],
)
def test_a_kill_inside_a_final_save_leaves_the_model_that_was_there(owner, name, when, tmp_path):
    run = make_trainer(tmp_path, max_steps=2)
    run.save_model()
    before = contents(tmp_path)

    def save_until_killed():
        run.train()
        die_in(owner, name, 1, when)
        run.save_model()

    assert in_child(save_until_killed) == -signal.SIGKILL
    after = contents(tmp_path)
    left = {path for path in after if str(path).startswith("_saving-")}
    assert left
    assert {path: after[path] for path in after.keys() - left} == before
    run.save_model()
    assert contents(tmp_path).keys() == before.keys()


def test_weights_in_another_number_of_files_leave_none_of_an_earlier_save(tiny_model, tmp_path):
    for seed, size in enumerate(("50GB", "20KB", "50GB", "10KB", "20KB")):
        model = tiny_model(seed=seed, dtype=torch.float32)
        with replaced_files(tmp_path) as folder:
            model.save_pretrained(folder, max_shard_size=size)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert_bit_for_bit(loaded.state_dict(), model.state_dict())
        assert (tmp_path / "model.safetensors").exists() == (size == "50GB")
        assert (tmp_path / "model.safetensors.index.json").exists() == (size != "50GB")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "results.json"
    with replaced_file(path) as partial:
        partial.write_text("first")
    message = f"{path} could not be saved: .*large.*{ROOM}"
    with (
        files_of_at_most(300),
        pytest.raises(OSError, match=message),
        replaced_file(path) as partial,
    ):
        partial.write_text("second" * 100)
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_an_average_that_finds_no_room_names_its_folder(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path / "one")
    with files_of_at_most(3000), pytest.raises(OSError, match=f"mean could not be saved: .*{ROOM}"):
        average_checkpoints([tmp_path / "one"], tmp_path / "mean")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_final_save_of_an_adapter_keeps_what_was_written_in_its_card(tiny_model, tmp_path):
    """PEFT extends an existing card."""
    adapted = get_peft_model(tiny_model(dtype=torch.float32), LoraConfig(target_modules=["q_proj"]))
    run = make_trainer(tmp_path, model=adapted, max_steps=2)
    run.save_model()
    card = tmp_path / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    run.save_model()
    assert "My own words." in card.read_text()
    assert (tmp_path / "adapter_model.safetensors").exists()
