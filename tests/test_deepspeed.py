"""DeepSpeed's ZeRO-2 and ZeRO-3 train, save whole float32 models and resume, on CPUs with gloo."""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SIZES
from launches import launch, printed_flags
from safetensors.torch import load_file
from test_batching import make_trainer, training_data
from test_processes import SMALL
from transformers import set_seed, training_args
from vaswani.commands.main import main
from vaswani.training.processes import forget_sharding

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

TIES = {"paper": {}, "all apart": {"tie_word_embeddings": False}}
# Runs by name: ZeRO stage, ties, whether in bfloat16, whether DeepSpeed gathers 16-bit weights.
RUNS = {
    "ZeRO-2": (2, "paper", False, False),
    "ZeRO-2, bfloat16": (2, "paper", True, False),
    "ZeRO-3": (3, "paper", False, False),
    "ZeRO-3, bfloat16": (3, "paper", True, True),
    "ZeRO-3, untied": (3, "all apart", False, False),
}
FLOAT32 = [name for name, run in RUNS.items() if not run[2]]
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
VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    # DeepSpeed builds its extensions with a tool in the interpreter's folder.
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="needs DeepSpeed: pip install deepspeed",
    ),
]


def trainer_of(name, output, processes=1):
    _, ties, bf16, _ = RUNS[name]
    set_seed(3)
    config = VaswaniConfig(**SIZES, **TIES[ties], dropout=0.1 if bf16 else 0.0)
    several = {"use_cpu": False, "ddp_backend": "gloo"} if processes > 1 else {}
    return make_trainer(
        output,
        model=VaswaniForConditionalGeneration(config),
        bf16=bf16,
        gradient_accumulation_steps=2 // processes,
        **several,
        **TRAINING,
    )


def train(output, name):
    """Train, resume and predict in each of two processes."""
    checkpoint = None
    for run in ("whole", "resumed"):
        folder = Path(output) / run
        trainer = trainer_of(name, folder, processes=2)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.is_deepspeed_enabled
        assert trainer.accelerator.num_processes == 2
        trainer.save_model()
        checkpoint = str(Path(output) / "whole" / "checkpoint-3")
        predictions = trainer.predict(training_data(8)).predictions[:8]
        if trainer.is_world_process_zero():
            np.save(folder / "predictions.npy", predictions)
        forget_sharding()
    trainer.accelerator.end_training()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run by its name. Each run is trained at its first use."""

    @functools.cache
    def run(name):
        output = tmp_path_factory.mktemp("run")
        stage, _, _, gathered = RUNS[name]
        flags = printed_flags("--use_deepspeed")
        flags[flags.index("--zero_stage") + 1] = str(stage)
        if stage == 3:
            flags += ["--zero3_save_16bit_model", str(gathered).lower()]
        launch(2, __file__, output, name, flags=flags, **VARIABLES)
        return output

    return run


@pytest.mark.parametrize("name", FLOAT32)
def test_zero_gives_the_weights_of_one_process(trained, tmp_path, name):
    trainer = trainer_of(name, tmp_path)
    trainer.train()
    expected = trainer.model.state_dict()
    saved = VaswaniForConditionalGeneration.from_pretrained(trained(name) / "whole").state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(saved[key], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", RUNS)
def test_resumed_zero_ends_with_the_same_bits(trained, name):
    output = trained(name)
    whole, resumed = (load_file(output / run / "model.safetensors") for run in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", RUNS)
def test_zero_saves_its_float32_master_weights_once(trained, name):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint = trained(name) / "whole" / "checkpoint-3"
    saved = load_file(checkpoint / "model.safetensors")
    masters = get_fp32_state_dict_from_zero_checkpoint(checkpoint)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert all(torch.equal(value, masters[key]) for key, value in saved.items())
    rounded = (torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert not all(rounded)
    model = VaswaniForConditionalGeneration.from_pretrained(checkpoint)
    assert model.dtype == torch.float32
    assert sum(value.numel() for value in saved.values()) == model.num_parameters()
    assert model.config.tie_word_embeddings == (RUNS[name][1] == "paper")


@pytest.mark.parametrize("name", FLOAT32)
def test_zero_generates_what_the_saved_model_generates(trained, tmp_path, name):
    output = trained(name) / "resumed"
    trainer = trainer_of(name, tmp_path)
    saved = VaswaniForConditionalGeneration.from_pretrained(output)
    trainer.model.load_state_dict(saved.state_dict())
    expected = trainer.predict(training_data(8)).predictions
    assert np.array_equal(np.load(output / "predictions.npy"), expected)


def test_the_readmes_command_writes_a_float32_model_and_a_card_with_its_scores(
    number_words, tmp_path
):
    launch(
        2, __file__, "script", "--train", *number_words, "--valid", *number_words,
        "--test", *number_words, "--vocab-size", 340, "--steps", 4, "--eval-steps", 2,
        "--max-source-tokens", 300, "--average", 2, "--bf16", "--set", *SMALL,
        "--output", tmp_path, flags=printed_flags("--use_deepspeed"), **VARIABLES,
    )  # fmt: skip
    card = (tmp_path / "README.md").read_text()
    bleu = json.loads((tmp_path / "results.json").read_text())["test"]["bleu"]
    assert f"| BLEU | {bleu:.2f}" in card or f"| BLEU | {bleu}" in card
    saved = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert sum(value.numel() for value in saved.values()) == model.num_parameters()


if __name__ == "__main__":
    # transformers allows bfloat16 with DeepSpeed only on GPUs.
    training_args.is_torch_bf16_gpu_available = lambda: True
    if sys.argv[1] == "script":
        main(["train", *sys.argv[2:]])
    else:
        train(*sys.argv[1:])
