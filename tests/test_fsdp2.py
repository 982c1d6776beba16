"""FSDP2 through Accelerate trains, saves and resumes models with all kinds of tied matrices.

The tests run on CPUs, with a copy of Accelerate that allows FSDP2 there (`launches`) and the launch
flags of docs/cluster.md.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import SIZES
from forks import forked
from launches import TRAIN, accelerate_with_fsdp_on_cpus, launch, printed_flags
from safetensors.torch import load_file
from test_batching import collator, make_trainer, training_data
from test_processes import SMALL, assert_equal_weights
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Seq2SeqTrainer, set_seed
from vaswani.training.trainer import VaswaniTrainer

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

TIES = {
    "paper": {},
    "two vocabularies": {"share_encoder_decoder_embeddings": False},
    "untied": {"tie_word_embeddings": False},
    "all apart": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
}
MATRICES = {
    "paper": ["model.encoder.embed_tokens.weight"],
    "two vocabularies": ["model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"],
}
MATRICES["untied"] = MATRICES["all apart"] = ["lm_head.weight", *MATRICES["two vocabularies"]]
# Runs by name: ties, trainer, how Accelerate saves, whether in bfloat16.
RUNS = {
    **{ties: (ties, VaswaniTrainer, "FULL_STATE_DICT", False) for ties in TIES},
    **{
        f"{ties} in shards": (ties, VaswaniTrainer, "SHARDED_STATE_DICT", ties == "untied")
        for ties in TIES
    },
    "packed": ("paper", VaswaniTrainer, "FULL_STATE_DICT", False),
    "bfloat16": ("paper", VaswaniTrainer, "FULL_STATE_DICT", True),
    "Seq2SeqTrainer": ("paper", Seq2SeqTrainer, "FULL_STATE_DICT", False),
    "Seq2SeqTrainer, two vocabularies": (
        "two vocabularies",
        Seq2SeqTrainer,
        "FULL_STATE_DICT",
        True,
    ),
}
TRAINING = {
    "max_steps": 6,
    "learning_rate": 1e-4,  # small, because Adam amplifies differences in the last digit
    "save_strategy": "steps",
    "save_steps": 3,
    "per_device_train_batch_size": 4,
    "predict_with_generate": True,
    "generation_num_beams": 3,
    "generation_max_length": 9,
}
pytestmark = pytest.mark.slow


def trainer_of(name, output, processes=1):
    ties, trainer_class, _, bf16 = RUNS[name]
    set_seed(3)
    # Dropout differs between one and several processes, so runs in float32 have no dropout.
    dropout = 0.1 if bf16 else 0.0
    model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES, **TIES[ties], dropout=dropout))
    return make_trainer(
        output,
        trainer_class,
        model=model,
        bf16=bf16,
        gradient_accumulation_steps=2 // processes,
        # A larger epsilon, because Adam amplifies differences of gradients that are nearly 0.
        **({"batching": "packed", "adam_epsilon": 1e-5} if name == "packed" else {}),
        **TRAINING,
    )


def train(output):
    """Train, resume and predict every run of RUNS in each of two processes."""
    loop(Path(output) / "loop")
    for name, (_, _, how_saved, _) in RUNS.items():
        os.environ["FSDP_STATE_DICT_TYPE"] = how_saved
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        checkpoint = None
        for run in ("whole", "resumed"):
            folder = Path(output) / name / run
            trainer = trainer_of(name, folder, processes=2)
            trainer.train(resume_from_checkpoint=checkpoint)
            assert isinstance(trainer.model, FSDPModule)
            assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
            trainer.save_model()
            checkpoint = str(Path(output) / name / "whole" / "checkpoint-3")
        # Seq2SeqTrainer keeps the extra rows that fill up the batch of the last process.
        predictions = trainer.predict(training_data(8)).predictions[:8]
        if trainer.is_world_process_zero():
            np.save(folder / "predictions.npy", predictions)


def loop(output):
    """Train with Accelerate alone, save halfway and at the end, and resume from halfway."""
    for resume in (False, True):
        set_seed(3)
        accelerator = Accelerator(cpu=True)
        model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES))
        batches = [collator(training_data(8).to_list()[first : first + 4]) for first in (0, 4)]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resume:
            accelerator.load_state(str(output / "state"))
        for step in range(3 if resume else 0, 6):
            loss = model(**batches[accelerator.process_index]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                accelerator.save_state(str(output / "state"))
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            folder = output / ("resumed" if resume else "whole")
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
        accelerator.wait_for_everyone()
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def accelerate_folder(tmp_path_factory):
    return accelerate_with_fsdp_on_cpus(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, accelerate_folder):
    output = tmp_path_factory.mktemp("runs")
    flags = printed_flags("--use_fsdp")
    launch(2, __file__, output, flags=flags, paths=[accelerate_folder])
    return output


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if not run[3]])
def test_sharded_training_gives_the_weights_of_one_process(trained, tmp_path, name):
    trainer = trainer_of(name, tmp_path)
    trainer.train()
    expected = trainer.model.state_dict()
    saved = VaswaniForConditionalGeneration.from_pretrained(trained / name / "whole").state_dict()
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(saved[key], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [*RUNS, "loop"])
def test_resumed_sharded_training_ends_with_the_same_bits(trained, name):
    whole, resumed = (
        load_file(trained / name / run / "model.safetensors") for run in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_loop_with_accelerate_alone_saves_the_matrix_once(trained):
    weights = load_file(trained / "loop" / "whole" / "model.safetensors")
    assert [key for key in sorted(weights) if "embed" in key or "head" in key] == MATRICES["paper"]


@pytest.mark.parametrize("name", RUNS)
def test_a_matrix_is_saved_once_and_in_float32_however_it_was_trained(trained, name):
    for folder in ("whole", "whole/checkpoint-3"):
        weights = load_file(trained / name / folder / "model.safetensors")
        of_vocabulary = [key for key in sorted(weights) if "embed" in key or "lm_head" in key]
        assert of_vocabulary == MATRICES[RUNS[name][0]]
        assert {value.dtype for value in weights.values()} == {torch.float32}
        model = VaswaniForConditionalGeneration.from_pretrained(trained / name / folder)
        assert model.dtype == torch.float32


@pytest.mark.parametrize("name", RUNS)
def test_sharded_models_generate_what_the_saved_model_generates(trained, tmp_path, name):
    trainer = trainer_of(name, tmp_path)
    saved = VaswaniForConditionalGeneration.from_pretrained(trained / name / "resumed")
    trainer.model.load_state_dict(saved.state_dict())
    expected = trainer.predict(training_data(8)).predictions
    assert np.array_equal(np.load(trained / name / "resumed" / "predictions.npy"), expected)


@pytest.mark.parametrize("how_saved", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_readmes_command_trains_averages_and_scores_as_one_process(
    accelerate_folder, number_words, tmp_path, how_saved
):
    flags = printed_flags("--use_fsdp")
    flags[flags.index("--fsdp_state_dict_type") + 1] = how_saved
    words = [
        *TRAIN, "--train", *number_words,
        "--valid", *number_words, "--test", *number_words, "--vocab-size", 340,
        "--steps", 6, "--eval-steps", 3, "--warmup", 400, "--max-source-tokens", 300,
        "--average", 2, "--set", *SMALL, "dropout=0.0",
    ]  # fmt: skip
    forked(1, *words, "--accumulate", 2, "--output", tmp_path / "1")
    launch(2, *words, "--output", tmp_path / "2", flags=flags, paths=[accelerate_folder])
    assert_equal_weights(tmp_path / "1", tmp_path / "2", 1e-6)
    one, two = (json.loads((tmp_path / run / "results.json").read_text()) for run in ("1", "2"))
    assert one["test"]["bleu"] == two["test"]["bleu"]
    assert one["parameters"] == two["parameters"]
    assert "BLEU" in (tmp_path / "2" / "README.md").read_text()


if __name__ == "__main__":
    train(*sys.argv[1:])
    # A process that exits with open groups may abort in their threads.
    torch.distributed.destroy_process_group()
