"""LoRA on every linear layer: training, saving, loading and merging without side effects."""

import copy

import pytest
import torch
from test_batching import collator, make_trainer, training_data
from torch import nn
from vaswani.training.adapters import untie_embeddings

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM, VaswaniForConditionalGeneration

peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install peft")

BATCH = collator(training_data(6).to_list())


def linear_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def adapted(model, **settings):
    names = sorted({name.rsplit(".", 1)[-1] for name in linear_names(model)})
    assert "lm_head" in names
    settings = {"r": 4, "lora_alpha": 8, "target_modules": names} | settings
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **settings))


@pytest.fixture
def tied(tiny_model):
    model = tiny_model(dtype=torch.float32, dropout=0.0)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def trained(model, updates=30, **batch):
    """Return the losses before and after updates of the adapters, and their first gradients."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    losses, gradients = [], {}
    model.train()
    for _ in range(updates):
        loss = model(**(batch or BATCH)).loss
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def test_tokens_that_train_alone_learn_in_a_tied_model(tied):
    model = adapted(tied, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    losses, _ = trained(model)
    assert losses[-1] < losses[0]
    found = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), found)


def test_an_adapter_of_embeddings_serves_both_stacks_of_an_untied_model(tied):
    untie_embeddings(tied)
    model = adapted(tied, target_modules=["embed_tokens"])
    names = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_embed" in name}
    assert names == {"encoder", "decoder"}


def test_untying_changes_no_output_and_every_matrix_alone(tied, tmp_path):
    before = logits(tied)
    untie_embeddings(tied)
    tables = [tied.lm_head, tied.model.encoder.embed_tokens, tied.model.decoder.embed_tokens]
    assert len({table.weight.data_ptr() for table in tables}) == 3
    assert torch.equal(logits(tied), before)
    with torch.no_grad():
        tied.lm_head.weight += 1
        tied.model.decoder.embed_tokens.weight += 2
    changed = logits(tied)
    tied.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), changed)


def test_every_linear_layer_gets_an_adapter_with_a_gradient_and_the_loss_falls(tied):
    linear = linear_names(tied)
    untie_embeddings(tied)
    losses, gradients = trained(adapted(tied))
    # B starts at zero, so at first only B has a gradient.
    with_gradient = {
        name.split(".lora_B")[0].removeprefix("base_model.model.")
        for name, gradient in gradients.items()
        if "lora_B" in name and gradient.abs().sum() > 0
    }
    assert with_gradient == linear
    assert losses[-1] < 0.7 * losses[0]


def test_only_adapters_are_trained(tied):
    untie_embeddings(tied)
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    model = adapted(tied)
    trained(model, updates=3)
    after = model.get_base_model().state_dict()
    for name, value in before.items():
        layer, _, kind = name.rpartition(".")
        wrapped = f"{layer}.base_layer.{kind}"
        assert torch.equal(after[wrapped if wrapped in after else name], value)


def test_a_copy_of_an_adapted_model_is_adapted(tied):
    model = adapted(tied)
    trained(model, updates=2)
    again = copy.deepcopy(model)
    assert type(again) is type(model)
    expected = logits(model)
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=0)
    trained(model, updates=2)
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=0)


def test_a_saved_adapter_gives_the_same_logits_on_the_saved_model(tied, tmp_path):
    tied.save_pretrained(tmp_path / "base")
    untie_embeddings(tied)
    model = adapted(tied)
    trained(model)
    model.save_pretrained(tmp_path / "adapter")
    base = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "base")
    assert not torch.allclose(logits(base), logits(model), atol=0.1)
    untie_embeddings(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))


def test_merging_keeps_the_logits_and_leaves_the_embeddings_alone(tied, tmp_path):
    untie_embeddings(tied)
    embeddings = tied.model.encoder.embed_tokens.weight.clone()
    model = adapted(tied)
    trained(model)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert type(merged) is VaswaniForConditionalGeneration
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    assert torch.equal(merged.model.encoder.embed_tokens.weight, embeddings)
    assert torch.equal(merged.model.decoder.embed_tokens.weight, embeddings)
    merged.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(merged))
    generated = loaded.generate(BATCH["input_ids"], num_beams=2)
    assert torch.equal(generated, merged.generate(BATCH["input_ids"], num_beams=2))


@pytest.mark.parametrize("ensure", [False, True])
def test_without_untying_peft_warns_and_merging_changes_the_embeddings(tied, ensure):
    """This is the reason for untie_embeddings, which is not needed once PEFT handles ties."""
    embeddings = tied.model.encoder.embed_tokens.weight.clone()
    names = [*{name.rsplit(".", 1)[-1] for name in linear_names(tied)}]
    if ensure:
        model = adapted(tied, target_modules=[*names, "embed_tokens"], ensure_weight_tying=True)
    else:
        with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
            model = adapted(tied)
    trained(model)
    expected = logits(model)
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
        merged = model.merge_and_unload()
    assert not torch.allclose(merged.model.encoder.embed_tokens.weight, embeddings, atol=1e-2)
    assert not torch.allclose(logits(merged), expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("setting", [{"batching": "packed"}, {"objective": "risk"}])
def test_prompts_beside_packed_batches_are_refused(tied, kind, setting, tmp_path):
    config = getattr(peft, kind)(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(tied, config)
    with pytest.raises(ValueError, match=f"packs batches, but {kind} adds virtual tokens"):
        make_trainer(tmp_path, model=prompted, **setting)
    make_trainer(tmp_path, model=prompted, max_steps=1).train()


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_a_language_model_learns_prompts(kind):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    config = VaswaniDecoderConfig(vocab_size=30, d_model=16, dropout=0.0, **sizes)
    heads = config.num_attention_heads  # PEFT finds other sizes by itself
    prompts = getattr(peft, kind)(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=heads
    )
    model = peft.get_peft_model(VaswaniForCausalLM(config), prompts)
    ids = torch.tensor([[5, 6, 7, 8, 9, 2]])
    losses, _ = trained(model, input_ids=ids, labels=ids)
    assert losses[-1] < losses[0]


def test_the_trainer_trains_and_resumes_adapters(tied, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "learning_rate": 1e-2}
    tied.save_pretrained(tmp_path / "base")
    runs, checkpoint = [], None
    for name in ("whole", "resumed"):
        base = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "base")
        untie_embeddings(base)
        torch.manual_seed(5)
        run = make_trainer(tmp_path / name, model=adapted(base), noam_warmup_steps=4, **saving)
        first = {key: p.clone() for key, p in run.model.named_parameters() if p.requires_grad}
        run.train(resume_from_checkpoint=checkpoint)
        runs.append({key: p for key, p in run.model.named_parameters() if p.requires_grad})
        checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    whole, resumed = runs
    assert all(torch.equal(whole[key], resumed[key]) for key in whole | resumed)
    assert not any(torch.equal(whole[key], first[key]) for key in whole)
