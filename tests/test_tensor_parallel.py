"""Models that transformers divides among processes give the results of one process."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SIZES
from forks import forked
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.distributed import DistributedConfig

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
)

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
MODELS = {
    "paper": {},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 23},
    "untied, with biases": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "lm_head_bias": True,
        "d_k": 4,
        "d_v": 6,
    },
    "learned positions": {
        "position_encoding": "learned",
        "max_position_embeddings": 30,
        "norm_position": "pre",
    },
}
DIVISIONS = {
    "tensors": {"tp_plan": "auto"},
    "layers": {"distributed_config": DistributedConfig(fsdp_size=2)},
}


def answers(model):
    """Return logits, loss, gradients and translations of a few sentences."""
    generator = torch.Generator().manual_seed(1)
    source, target = (
        torch.randint(3, 19, shape, generator=generator) for shape in ((3, 7), (3, 5))
    )
    mask = torch.ones_like(source)
    model.eval()
    with torch.no_grad():
        found = {"logits": model(source, mask, labels=target).logits}
    for name, settings in {
        "greedy": {"num_beams": 1},
        "beams": {"num_beams": 3},
        # Divided models sample by transformers' search. The penalty makes other models do the same.
        "sampled": {"num_beams": 1, "do_sample": True, "repetition_penalty": 1.1},
    }.items():
        torch.manual_seed(2)
        found[name] = model.generate(source, attention_mask=mask, max_new_tokens=8, **settings)
    model.train()
    model(source, mask, labels=target).loss.backward()
    for name, weight in model.named_parameters():
        gradient = weight.grad
        found[f"gradient of {name}"] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
    return {name: value.detach().clone() for name, value in found.items()}


def divide(folder):
    """Load every model in two processes, divided, and save its results."""
    for name in MODELS:
        for division, settings in DIVISIONS.items():
            model = AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / name, **settings)
            for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
                assert layer.fc1.weight.to_local().numel() == layer.fc1.weight.numel() / 2
            found = answers(model)
            model.save_pretrained(Path(folder) / f"{name}, {division}")
            if distributed.get_rank() == 0:
                torch.save(found, Path(folder) / f"{name}, {division}" / "answers.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """Saved models, and the results of two processes with them."""
    folder = tmp_path_factory.mktemp("models")
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        config = VaswaniConfig(**{**SIZES, **HEADS, "dropout": 0.0, **fields})
        model = VaswaniForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.5, 0.3)
        model.save_pretrained(folder / name)
    forked(2, __file__, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_answer_as_one(divided, name, division):
    expected = answers(AutoModelForSeq2SeqLM.from_pretrained(divided / name))
    found = torch.load(divided / f"{name}, {division}" / "answers.pt")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_divided_model_is_saved_whole(divided, name, division):
    whole, saved = (
        load_file(divided / folder / "model.safetensors")
        for folder in (name, f"{name}, {division}")
    )
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[key], whole[key]) for key in whole)


def matrices(model):
    """Return the names of layers with a matrix to divide, with * for numbers."""
    return {
        ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }


@pytest.mark.parametrize(
    "model_class", [VaswaniForConditionalGeneration, VaswaniModel, VaswaniEncoderModel]
)
def test_the_plan_divides_every_matrix_of_a_model_and_names_nothing_else(tiny_model, model_class):
    model = tiny_model(model_class, share_encoder_decoder_embeddings=False)
    assert set(model.tp_plan) == matrices(model)
    assert model.supports_tp_plan


def test_heads_are_divided_as_a_whole_or_not_at_all(tiny_model):
    with pytest.raises(ValueError, match=r"encoder_attention_heads \(4\) .* tp_size=3"):
        VaswaniForConditionalGeneration.maybe_distribute_model(
            tiny_model(), SimpleNamespace(tp_size=3), None
        )


def test_an_encoder_alone_has_the_plan_of_its_layers(tiny_config):
    model = AutoModel.from_config(tiny_config()).get_encoder()
    assert set(model.fsdp_plan) == set()
    assert VaswaniEncoderModel(tiny_config()).fsdp_plan == {"encoder.layers.*": "free_full_weight"}


if __name__ == "__main__":
    divide(*sys.argv[1:])
