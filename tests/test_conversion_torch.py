"""Conversion from and to torch.nn.Transformer, compared with its own forward pass."""

import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM
from vaswani.commands.main import main
from vaswani.conversion import to_marian, to_torch, torch_transformer
from vaswani.conversion.errors import ConversionError

from vaswani import VaswaniForConditionalGeneration

# nn.Transformer warns when it cannot use nested tensors, a prototype feature.
pytestmark = pytest.mark.filterwarnings("ignore:.*nested.tensor")

WIDTH, SOURCE, TARGET = 16, 19, 23


class Table(nn.Module):
    """Positions as in PyTorch's tutorial: alternating sines and cosines in a buffer (T, 1, D)."""

    def __init__(self, length=40):
        super().__init__()
        frequencies = torch.exp(-torch.arange(0, WIDTH, 2) * math.log(10000) / WIDTH)
        angles = torch.arange(length)[:, None] * frequencies
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        self.register_buffer("pos_embedding", table[:, None])

    def forward(self, length):
        return self.pos_embedding[:length, 0]


class Learned(nn.Embedding):
    def __init__(self):
        super().__init__(40, WIDTH)

    def forward(self, length):
        return self.weight[:length]


class Translator(nn.Module):
    """A typical translation module around nn.Transformer."""

    def __init__(self, positions=Table, tied=False, shared=False, generator_bias=True, **arguments):
        super().__init__()
        settings = {
            "d_model": WIDTH,
            "nhead": 4,
            "num_encoder_layers": 2,
            "num_decoder_layers": 3,
            "dim_feedforward": 24,
            "batch_first": True,
        }
        self.transformer = nn.Transformer(**{**settings, **arguments})
        self.source = nn.Embedding(TARGET if shared else SOURCE, WIDTH)
        self.target = self.source if shared else nn.Embedding(TARGET, WIDTH)
        self.generator = nn.Linear(WIDTH, TARGET, bias=generator_bias)
        if tied:
            self.generator.weight = self.target.weight
        self.positions = positions()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                centre = float("norm" in name and name.endswith("weight"))
                parameter.normal_(centre, 0.3)
        self.eval()

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        length, padding = decoder_input_ids.shape[1], attention_mask == 0
        scale = math.sqrt(WIDTH)
        hidden_states = self.transformer(
            self.source(input_ids) * scale + self.positions(input_ids.shape[1]),
            self.target(decoder_input_ids) * scale + self.positions(length),
            tgt_mask=torch.ones(length, length).triu(1).bool(),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(hidden_states)


NAMES = {
    "nhead": 4,
    "prefix": "transformer.",
    "source_embedding": "source.weight",
    "target_embedding": "target.weight",
    "generator": "generator.weight",
    "generator_bias": "generator.bias",
    "source_positions": "positions.pos_embedding",
    "target_positions": "positions.pos_embedding",
}
LAYER = "transformer.encoder.layers.0"
LEARNED = {
    "position_encoding": "learned",
    "source_positions": "positions.weight",
    "target_positions": "positions.weight",
}


@pytest.fixture
def batch(padded_batch):
    source, mask = padded_batch([9, 5, 2], seed=1, vocab_size=SOURCE)
    target, _ = padded_batch([6, 3, 4], seed=2, vocab_size=SOURCE)
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({}, {}),
        ({"norm_first": True}, {"norm_first": True}),
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"bias": False}, {}),
        ({"bias": False, "norm_first": True}, {"norm_first": True}),
        ({"generator_bias": False}, {"generator_bias": None}),
        ({"tied": True}, {}),
        ({"tied": True, "shared": True}, {}),
        ({"shared": True}, {}),
        (
            {"shared": True, "tied": True},
            {"target_embedding": "source.weight", "ignore": ["target.weight"]},
        ),
        ({"positions": Learned}, LEARNED),
        ({"layer_norm_eps": 1e-3}, {"layer_norm_eps": "1e-3"}),
    ],
    ids=lambda value: ",".join(map(str, value)) or "default",
)
def test_logits_equal_those_of_nn_transformer_under_padding(batch, tmp_path, arguments, changes):
    theirs = Translator(**arguments)
    torch_transformer.convert(theirs.state_dict(), tmp_path / "out", {**NAMES, **changes})
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert isinstance(ours, VaswaniForConditionalGeneration)
    with torch.no_grad():
        expected, found = theirs(**batch), ours(**batch).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_stacks_without_a_last_norm_are_read(batch):
    theirs = Translator()
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    ours = torch_transformer.load(theirs.state_dict(), NAMES).model
    assert ours.config.final_layer_norm is False
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, theirs(**batch), atol=1e-5, rtol=1e-5)


def test_ties_and_dropout_are_settings():
    config = torch_transformer.load(Translator(tied=True).state_dict(), NAMES).model.config
    assert config.tie_word_embeddings
    assert not config.share_encoder_decoder_embeddings
    assert (config.vocab_size, config.decoder_vocab_size) == (SOURCE, TARGET)
    assert config.dropout == config.attention_dropout == config.activation_dropout == 0.1
    assert config.norm_position == "post"
    assert config.final_layer_norm
    both = Translator(tied=True, shared=True)
    config = torch_transformer.load(both.state_dict(), NAMES).model.config
    assert config.tie_word_embeddings
    assert config.share_encoder_decoder_embeddings


def test_the_command_line_reads_yaml_and_json(tmp_path):
    theirs = Translator()
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    (tmp_path / "about.json").write_text(json.dumps(NAMES))
    lines = [f"{name}: {value}" for name, value in NAMES.items()]
    (tmp_path / "about.yaml").write_text("\n".join(lines))
    for name in ("json", "yaml"):
        command = ["torch", str(tmp_path / "model.pt"), str(tmp_path / name)]
        main(["convert", *command, "--description", str(tmp_path / f"about.{name}")])
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "json" / name).read_bytes() == (tmp_path / "yaml" / name).read_bytes()


def assert_same(one, other):
    for name, tensor in one.state_dict().items():
        assert tensor.dtype == other.state_dict()[name].dtype
        assert torch.equal(tensor, other.state_dict()[name]), name
    first, second = one.config.to_dict(), other.config.to_dict()
    for name in ("_name_or_path", "auto_map", "architectures", "dtype"):
        first.pop(name, None), second.pop(name, None)
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({}, {"dropout": 0.2, "decoder_start_token_id": 7, "label_smoothing": 0.1}),
        ({"norm_first": True, "tied": True}, {"norm_first": True}),
        ({"bias": False}, {}),
        ({"positions": Learned, "generator_bias": False}, {**LEARNED, "generator_bias": None}),
        ({"tied": True, "shared": True, "dtype": torch.float64}, {}),
    ],
    ids=lambda value: ",".join(map(str, value)) or "default",
)
def test_there_and_back_is_bit_identical(tmp_path, arguments, changes):
    theirs = Translator(**arguments)
    if "dtype" in arguments:
        theirs = theirs.double()
    one = torch_transformer.load(theirs.state_dict(), {**NAMES, **changes})
    one.save(tmp_path / "ours")
    main(["convert", "to-torch", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    again = torch_transformer.load(
        tmp_path / "theirs" / "model.pt", tmp_path / "theirs" / "description.yaml"
    )
    assert_same(one.model, again.model)
    written = torch.load(tmp_path / "theirs" / "model.pt")
    before = theirs.transformer.state_dict()
    inside = {name for name in written if name.startswith("transformer.")}
    assert {name.removeprefix("transformer.") for name in inside} == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, written[f"transformer.{name}"]), name


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("settings", [{}, {"norm_position": "pre"}, {"final_layer_norm": True}])
def test_models_of_ours_leave_for_nn_transformer(
    tiny_model, padded_batch, attention_bias, settings
):
    ours = tiny_model(dtype=torch.float32, attention_bias=attention_bias, **settings)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    tensors, about = to_torch.to_torch(ours)
    theirs = to_torch.new_transformer(tensors, about)
    source, mask = padded_batch([9, 5, 2], seed=1)
    target = source[:, :6]

    def embedded(name, ids):
        positions = Table()(ids.shape[1])
        return nn.functional.embedding(ids, tensors[name]) * math.sqrt(WIDTH) + positions

    with torch.no_grad():
        expected = ours(source, mask, target).logits
        hidden_states = theirs(
            embedded(about.source_embedding, source),
            embedded(about.target_embedding, target),
            tgt_mask=torch.ones(6, 6).triu(1).bool(),
            src_key_padding_mask=mask == 0,
            memory_key_padding_mask=mask == 0,
        )
        found = hidden_states @ tensors[about.generator].T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_what_nn_transformer_lacks_is_refused_at_once(tiny_model, tmp_path):
    model = tiny_model(
        encoder_attention_heads=2, encoder_ffn_dim=32, activation_function="silu", d_k=5, d_v=4
    )
    with pytest.raises(ConversionError) as caught:
        to_torch.save(model, tmp_path / "out")
    for reason in ("encoder_attention_heads 2", "encoder_ffn_dim 32", "'silu'", "d_k 5"):
        assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model_state_dict", "state_dict"])
def test_the_state_dict_of_a_training_checkpoint_is_found(tmp_path, name):
    theirs = Translator()
    weights = theirs.state_dict()
    path = tmp_path / "model.pt"
    torch.save({"epoch": 3, name: weights, "optimizer": {"state": {}, "param_groups": []}}, path)
    assert_same(
        torch_transformer.load(path, NAMES).model, torch_transformer.load(weights, NAMES).model
    )
    with pytest.raises(ConversionError, match=r"several dicts of tensors, under 'a', 'b'"):
        torch_transformer.load({"a": weights, "b": weights}, NAMES)
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    with pytest.raises(ConversionError, match=r"did you mean 'module\.source\.weight'\?"):
        torch_transformer.load(wrapped, NAMES)


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "decoder_start_token_id"])
def test_special_tokens_without_an_embedding_are_refused(name):
    weights = Translator().state_dict()
    source, target = len(weights["source.weight"]), len(weights["target.weight"])
    entries = min(source, target) if name == "pad_token_id" else target
    for value in (entries, -1):
        with pytest.raises(ConversionError, match=f"{name} {value} .an embedding has {entries} "):
            torch_transformer.load(weights, {**NAMES, name: value})
    config = torch_transformer.load(weights, {**NAMES, name: entries - 1}).model.config
    assert getattr(config, name) == entries - 1


@pytest.mark.parametrize("save", [to_torch.save, to_marian.save])
def test_adapters_and_wrapped_models_are_refused_with_the_way_out(tiny_model, tmp_path, save):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    for model, message in (
        (peft.get_peft_model(tiny_model(), config), "pass model.merge_and_unload"),
        (torch.nn.DataParallel(tiny_model()), "A DataParallel cannot be converted: pass the model"),
    ):
        with pytest.raises(ConversionError, match=message):
            save(model, tmp_path / "out")
    model = tiny_model()
    model.add_adapter(config)
    with pytest.raises(ConversionError, match="The model holds an adapter: merge it first"):
        save(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConversionError, match="holds an adapter alone: load it with its model"):
        save(tmp_path / "adapter", tmp_path / "out")
    model = tiny_model()
    model.model.decoder.layers[0].fc1.weight.data[0, 0] = torch.nan
    with pytest.raises(ConversionError, match=r"layers\.0\.fc1\.weight of the model holds NaN"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_descriptions_that_do_not_fit_are_refused_at_once(tmp_path):
    tensors = Translator().state_dict()
    with pytest.raises(ConversionError, match=r"no field heads.*nhead is missing"):
        torch_transformer.load(tensors, {"heads": 4})
    changes = {"nhead": 0, "activation": "silu", "position_encoding": "rope", "ignore": ["there"]}
    changes["generator"] = "output.weight"
    with pytest.raises(ConversionError) as caught:
        torch_transformer.convert(tensors, tmp_path / "out", {**NAMES, **changes})
    for reason in ("nhead 0", "'silu'", "'rope'", "'there'", "generator 'output.weight'"):
        assert reason in str(caught.value)
    with pytest.raises(
        ConversionError, match=r"generator \['a'\] is not a string.*ignore 'b' is not a list"
    ):
        torch_transformer.load(tensors, {**NAMES, "generator": ["a"], "ignore": "b"})
    with pytest.raises(ConversionError, match="norm_first 'false' is neither true nor false"):
        torch_transformer.load(tensors, {**NAMES, "norm_first": "false"})
    with pytest.raises(ConversionError, match="nhead 5"):
        torch_transformer.load(tensors, {**NAMES, "nhead": 5})
    with pytest.raises(ConversionError, match="learned positions need their table"):
        torch_transformer.load(tensors, {**NAMES, **LEARNED, "source_positions": None})
    with pytest.raises(ConversionError, match="not the table of sinusoidal_concat positions"):
        torch_transformer.load(tensors, {**NAMES, "position_encoding": "sinusoidal_concat"})
    with pytest.raises(ConversionError, match="dropout"):
        torch_transformer.load(tensors, {**NAMES, "dropout": 2.0})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.encoder.layers.1.linear1.bias"), "1.fc1.bias are missing"),
        (lambda t: t.pop("transformer.decoder.layers.0.norm3.weight"), "final_layer_norm.weight"),
        (lambda t: t.pop("transformer.encoder.norm.weight"), "only decoder.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "extra"),
        (lambda t: t.update({f"{LAYER}.self_attn.bias_k": torch.ones(1)}), "bias_k"),
        (
            lambda t: t.update({"transformer.decoder.layers.0.linear2.weight": torch.ones(2, 2)}),
            "fc2.weight has the shape",
        ),
        (
            lambda t: t.update(
                {"transformer.decoder.layers.0.self_attn.in_proj_bias": torch.ones(7)}
            ),
            "in_proj_bias holds 3 tensors",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    tensors = Translator().state_dict()
    change(tensors)
    with pytest.raises(ConversionError, match=message):
        torch_transformer.convert(tensors, tmp_path / "out", NAMES)
    assert not list(tmp_path.iterdir())


def test_tensors_may_be_left_out_by_name():
    tensors = {**Translator().state_dict(), "step": torch.tensor(7)}
    whole = torch_transformer.load(Translator().state_dict(), NAMES).model
    assert whole.config.to_dict() == (
        torch_transformer.load(tensors, {**NAMES, "ignore": ["step"]}).model.config.to_dict()
    )


def test_files_that_are_no_state_dict_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    for content in ([1, 2], {"model": {"a": 1}}):
        torch.save(content, path)
        with pytest.raises(ConversionError, match="not a dict of tensors"):
            torch_transformer.convert(path, tmp_path / "out", NAMES)
    torch.save(Translator(), path)
    with pytest.raises(ConversionError, match="Translator"):
        torch_transformer.convert(path, tmp_path / "out", NAMES)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConversionError, match="not a complete checkpoint"):
        torch_transformer.convert(path, tmp_path / "out", NAMES)
    (tmp_path / "about.yaml").write_text("[1, 2]")
    with pytest.raises(ConversionError, match="does not hold fields"):
        torch_transformer.convert(path, tmp_path / "out", tmp_path / "about.yaml")
    assert not (tmp_path / "out").exists()
