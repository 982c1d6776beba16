"""Shared embeddings: both stacks use one module, and a file has its matrix once."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from vaswani.training.adapters import untie_embeddings

from vaswani import VaswaniForConditionalGeneration, VaswaniModel

NAMES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
MATRICES = [f"{name}.weight" for name in NAMES]


def modules(model):
    return [model.get_submodule(name) for name in NAMES]


def matrices(model):
    return [module.weight for module in modules(model)]


def test_one_embedding_serves_both_stacks_after_construction_loading_and_resizing(
    tiny_model, tmp_path
):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    resized = tiny_model()
    resized.resize_token_embeddings(23)
    for one in (model, loaded, resized):
        encoder, decoder, head = modules(one)
        assert encoder is decoder
        assert head.weight is encoder.weight
    base = VaswaniModel.from_pretrained(tmp_path)
    assert base.encoder.embed_tokens is base.decoder.embed_tokens


def test_new_entries_are_drawn_alike_in_both_stacks(tiny_model, monkeypatch):
    model, asked = tiny_model(tie_word_embeddings=False), []
    resize = VaswaniForConditionalGeneration._get_resized_embeddings

    def recorded(self, embeddings, size, multiple=None, mean_resizing=True):
        asked.append(mean_resizing)
        return resize(self, embeddings, size, multiple, mean_resizing)

    monkeypatch.setattr(VaswaniForConditionalGeneration, "_get_resized_embeddings", recorded)
    model.resize_token_embeddings(23, mean_resizing=False)
    assert len(asked) >= 2
    assert not any(asked)


@pytest.mark.parametrize(
    "ties", [{"tie_word_embeddings": False}, {"share_encoder_decoder_embeddings": False}]
)
def test_embeddings_with_matrices_of_their_own_stay_apart(tiny_model, ties):
    encoder, decoder, head = modules(tiny_model(**ties))
    assert encoder is not decoder
    assert encoder.weight is not decoder.weight
    assert (head.weight is decoder.weight) == ("tie_word_embeddings" not in ties)


def test_weights_keep_all_their_names_in_a_state_dict(tiny_model):
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    weights = model.state_dict()
    assert set(MATRICES) <= set(weights)
    other.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())


def test_a_file_with_three_different_matrices_loads_all_three(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for number, name in enumerate(MATRICES):
        weights[name] = weights[MATRICES[0]] + number
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with CaptureLogger(logging.get_logger("transformers.modeling_utils")) as log:
        loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert "we will NOT tie them" in log.out
    for value, name in zip(matrices(loaded), MATRICES, strict=True):
        assert torch.equal(value, weights[name])


def test_gathered_copies_of_the_matrix_are_saved_once(tiny_model, tmp_path):
    model = tiny_model()
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=copies)
    saved = load_file(tmp_path / "model.safetensors")
    assert [name for name in MATRICES if name in saved] == MATRICES[:1]
    assert sum(value.numel() for value in saved.values()) == model.num_parameters()
    assert all(torch.equal(value, copies[name]) for name, value in saved.items())


def test_matrices_that_differ_are_all_saved(tiny_model, tmp_path):
    model = tiny_model()
    changed = {name: value.clone() for name, value in model.state_dict().items()}
    changed["lm_head.weight"] += 1
    model.save_pretrained(tmp_path, state_dict=changed)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], changed["lm_head.weight"])


def test_weights_saved_in_place_of_the_models_load_in_their_own_type(tiny_model, tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    exact = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "exact", state_dict=exact)
    model.save_pretrained(tmp_path / "own")
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "exact")
    name = "model.encoder.layers.0.fc1.weight"
    assert torch.equal(loaded.state_dict()[name], exact[name])
    own = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "own")
    assert own.dtype == model.dtype == torch.bfloat16


@pytest.mark.parametrize("resized", [False, True])
def test_untying_gives_every_use_a_matrix_of_its_own(tiny_model, resized):
    model = tiny_model()
    if resized:
        model.resize_token_embeddings(23)
    untie_embeddings(model)
    assert len({value.data_ptr() for value in matrices(model)}) == 3
    assert all(isinstance(value, nn.Parameter) for value in matrices(model))
    model.tie_weights()
    assert len({value.data_ptr() for value in matrices(model)}) == 3


def test_functional_calls_on_copies_have_the_gradients_of_the_tied_model(tiny_model):
    model = tiny_model()
    ids = torch.tensor([[4, 5, 2]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    model(**inputs).logits.square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss_of(weights):
        call = torch.func.functional_call(copy.deepcopy(model), weights, (), inputs)
        return call.logits.square().sum()

    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss_of)(weights), expected)
    assert len(set(map(id, matrices(model)))) == 1
