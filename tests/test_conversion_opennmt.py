"""Conversion of OpenNMT-py's checkpoints, compared with the formulas and code of versions 2 and 3.

The fast tests write checkpoints in OpenNMT-py's layouts and compute their logits by `their_logits`,
which follows OpenNMT-py 2.3 and 3.5 with operations of torch alone. The slow ones let OpenNMT-py
train, save, and translate.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hostile import Hostile
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.commands.main import main
from vaswani.conversion import to_marian
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.opennmt import convert, load, rules
from vaswani.conversion.rules import to_theirs

SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
SOURCE = [*SPECIALS, "a", "b", "c", "dé", "averyunlikelytoken0"]
TARGET = [*SPECIALS, "x", "y", "￭z"]
WIDTH, HEADS, INNER = 16, 4, 24
MODEL = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "model_task": "seq2seq",
    "model_type": "text",
    "layers": -1,
    "enc_layers": 2,
    "dec_layers": 3,
    "heads": HEADS,
    "transformer_ff": INNER,
    "position_encoding": True,
    "pos_ffn_activation_fn": "relu",
    "self_attn_type": "scaled-dot",
    "max_relative_positions": 0,
    "dropout": [0.2, 0.1],
    "attention_dropout": [0.3],
    "label_smoothing": 0.15,
    "share_embeddings": False,
    "share_decoder_embeddings": False,
    "generator_function": "softmax",
    "copy_attn": False,
    "lambda_align": 0.05,
    "alignment_heads": 2,
    "_all_transform": {"filtertoolong"},
    "data": {"corpus": {"path_src": "train.src", "weight": 1}},
    "transforms": ["filtertoolong"],
    "train_steps": 100000,
}
VERSIONS = {
    2: {"rnn_size": WIDTH, "enc_rnn_size": WIDTH, "dec_rnn_size": WIDTH, "src_feats_vocab": None},
    3: {
        "hidden_size": WIDTH,
        "self_attn_type": "scaled-dot-flash",
        "position_encoding_type": "SinusoidalInterleaved",
        "layer_norm": "standard",
        "norm_eps": 1e-6,
        "add_qkvbias": False,
        "add_ffnbias": False,
        "num_kv": 0,
        "lora_layers": [],
        "quant_layers": [],
        "quant_type": "",
        "rotary_theta": 10000,
        "n_src_feats": 0,
    },
}


def some_options(version=3, **changes):
    return {**MODEL, **VERSIONS[version], **changes}


def their_positions(kind, length):
    pairs = torch.arange(WIDTH // 2)
    if kind == "SinusoidalConcat":
        angles = torch.arange(length)[:, None] * 10000.0 ** (-pairs / (WIDTH // 2 - 1))
        return torch.cat([angles.sin(), angles.cos()], dim=1)
    angles = torch.arange(length)[:, None] * 10000.0 ** (-2 * pairs / WIDTH)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def some_weights(options, source=SOURCE, target=TARGET, attention_bias=None, ffn_bias=None):
    """Return random tensors with the names of version 3, and those of the generator."""
    generator = torch.Generator().manual_seed(0)
    attention_bias = options.get("add_qkvbias", True) if attention_bias is None else attention_bias
    ffn_bias = options.get("add_ffnbias", True) if ffn_bias is None else ffn_bias
    tensors = {}

    def linear(name, outputs, inputs, bias):
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) / 3
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) / 3

    def norm(name):
        tensors[f"{name}.weight"] = 0.5 + torch.rand(WIDTH, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(WIDTH, generator=generator) / 3

    sides = (
        ("encoder", source, "transformer", ["self_attn"], ["layer_norm"]),
        (
            "decoder",
            target,
            "transformer_layers",
            ["self_attn", "context_attn"],
            ["layer_norm_1", "layer_norm_2"],
        ),
    )
    for side, words, layers, attentions, norms in sides:
        embedding = f"{side}.embeddings.make_embedding"
        linear(f"{embedding}.emb_luts.0", len(words), WIDTH, bias=False)
        kind = options.get("position_encoding_type", "SinusoidalInterleaved")
        tensors[f"{embedding}.pe.pe"] = their_positions(kind, 5000)[:, None]
        norm(f"{side}.layer_norm")
        number = options["layers"] if options["layers"] > 0 else options[f"{side[:3]}_layers"]
        for prefix in (f"{side}.{layers}.{i}" for i in range(number)):
            for attention in attentions:
                for part in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                    linear(f"{prefix}.{attention}.{part}", WIDTH, WIDTH, attention_bias)
            linear(f"{prefix}.feed_forward.w_1", INNER, WIDTH, ffn_bias)
            linear(f"{prefix}.feed_forward.w_2", WIDTH, INNER, ffn_bias)
            for name in (*norms, "feed_forward.layer_norm"):
                norm(f"{prefix}.{name}")
    tables = [f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side, *_ in sides]
    if options["share_embeddings"]:
        tensors[tables[1]] = tensors[tables[0]]
    head = {
        "weight": torch.randn(len(target), WIDTH, generator=generator) / 3,
        "bias": torch.randn(len(target), generator=generator),
    }
    if options["share_decoder_embeddings"]:
        head["weight"] = tensors[tables[1]]
    return tensors, head


def their_logits(options, tensors, head, source, lengths, target):
    """Return the logits (B, T, V) of OpenNMT-py's formulas in float64."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(name, states):
        return F.linear(states, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name, states):
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(states, (WIDTH,), weight, bias, options.get("norm_eps", 1e-6))

    def attend(name, queries, keys, mask):
        parts = (("query", queries), ("keys", keys), ("values", keys))
        query, key, value = (
            linear(f"{name}.linear_{part}", states).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part, states in parts
        )
        scores = query / math.sqrt(WIDTH // HEADS) @ key.transpose(2, 3)
        context = scores.masked_fill(mask, -1e18).softmax(dim=-1) @ value
        return linear(f"{name}.final_linear", context.transpose(1, 2).flatten(2))

    def feed(name, states):
        inner = linear(f"{name}.w_1", norm(f"{name}.layer_norm", states))
        activation = {"relu": F.relu, "gelu": F.gelu}[options["pos_ffn_activation_fn"]]
        return linear(f"{name}.w_2", activation(inner)) + states

    def embed(side, tokens):
        prefix = f"{side}.embeddings.make_embedding"
        vectors = tensors[f"{prefix}.emb_luts.0.weight"][tokens] * math.sqrt(WIDTH)
        return vectors + tensors[f"{prefix}.pe.pe"][: tokens.shape[1], 0]

    def layers(side, name):
        number = len({key.split(".")[2] for key in tensors if key.startswith(f"{side}.{name}.")})
        return [f"{side}.{name}.{index}" for index in range(number)]

    padding = (torch.arange(source.shape[1]) >= lengths[:, None])[:, None, None]
    states = embed("encoder", source)
    for layer in layers("encoder", "transformer"):
        normed = norm(f"{layer}.layer_norm", states)
        states = attend(f"{layer}.self_attn", normed, normed, padding) + states
        states = feed(f"{layer}.feed_forward", states)
    encoded = norm("encoder.layer_norm", states)
    states = embed("decoder", target)
    later = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
    for layer in layers("decoder", "transformer_layers"):
        normed = norm(f"{layer}.layer_norm_1", states)
        states = attend(f"{layer}.self_attn", normed, normed, later) + states
        normed = norm(f"{layer}.layer_norm_2", states)
        states = attend(f"{layer}.context_attn", normed, encoded, padding) + states
        states = feed(f"{layer}.feed_forward", states)
    states = norm("decoder.layer_norm", states)
    return F.linear(states, head["weight"].double(), head["bias"].double())


class Pickled:
    """Classes that are pickled with the names of version 2 and of torchtext."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def make(self, name, **state):
        module, _, last = name.rpartition(".")
        parents = module.split(".")
        for package in (".".join(parents[:end]) for end in range(1, len(parents) + 1)):
            if package not in sys.modules:
                self.monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        if not hasattr(sys.modules[module], last):
            kind = type(last, (), {"__module__": module})
            self.monkeypatch.setattr(sys.modules[module], last, kind, raising=False)
        made = getattr(sys.modules[module], last)()
        vars(made).update(state)
        return made

    def field(self, tokens, **changes):
        vocabulary = self.make("torchtext.vocab.Vocab", itos=tokens, stoi={"a": 4})
        state = {"pad_token": "<blank>", "unk_token": "<unk>", "vocab": vocabulary} | changes
        return self.make("torchtext.data.field.Field", dtype=torch.int64, **state)

    def fields(self, source, target):
        sides = {
            "src": (source, {"init_token": None, "eos_token": None}),
            "tgt": (target, {"init_token": "<s>", "eos_token": "</s>"}),
        }
        return {
            side: self.make(
                "onmt.inputters.text_dataset.TextMultiField",
                fields=[(side, self.field(tokens, **marks))],
            )
            for side, (tokens, marks) in sides.items()
        }


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write a checkpoint. `change` is a function that modifies its content in place."""
    pickled = Pickled(monkeypatch)

    def write(version, options, weights, source=SOURCE, target=TARGET, change=None):
        tensors, head = weights
        content = {"model": dict(tensors), "generator": dict(head), "optim": {"training_step": 7}}
        content["opt"] = argparse.Namespace(**options)
        if version == 3:
            content["vocab"] = {"src": source, "tgt": target, "data_task": "seq2seq"}
            content["vocab"]["decoder_start_token"] = "<s>"
        else:
            content["generator"] = {f"0.{name}": tensor for name, tensor in head.items()}
            content["vocab"] = pickled.fields(source, target)
        if change is not None:
            change(content)
        path = tmp_path / "model_step_7.pt"
        torch.save(content, path)
        return path

    write.pickled = pickled
    return write


def a_batch(source=SOURCE, target=TARGET):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 2, 4, 1])
    padded = torch.randint(4, len(source), (4, 6), generator=generator)
    padded[torch.arange(6) >= lengths[:, None]] = 1
    tokens = torch.randint(4, len(target), (4, 5), generator=generator)
    tokens[:, 0] = 2
    return padded, lengths, tokens


@torch.no_grad()
def our_logits(model, padded, lengths, tokens):
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    return model(input_ids=padded, attention_mask=mask, decoder_input_ids=tokens).logits


CASES = {
    "plain": {},
    "gelu": {"pos_ffn_activation_fn": "gelu"},
    "as many layers": {"layers": 1},
    "target embedding and generator shared": {"share_decoder_embeddings": True},
    "source and target embedding shared": {"share_embeddings": True},
    "one table": {"share_embeddings": True, "share_decoder_embeddings": True},
}
CASES_OF_3 = {
    "attention biases": {"add_qkvbias": True},
    "feed-forward biases": {"add_ffnbias": True},
    "all biases": {"add_qkvbias": True, "add_ffnbias": True},
    "concatenated": {"position_encoding_type": "SinusoidalConcat"},
    "epsilon": {"norm_eps": 0.01},
    "as many key heads": {"num_kv": HEADS},
}


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        *(pytest.param(version, CASES[name], id=f"{version} {name}") for version in (2, 3)
          for name in CASES),
        *(pytest.param(3, CASES_OF_3[name], id=f"3 {name}") for name in CASES_OF_3),
    ],
)  # fmt: skip
def test_logits_are_those_of_opennmts_formulas_under_padding(save, version, changes):
    options = some_options(version, **changes)
    target = SOURCE if options["share_embeddings"] else TARGET
    weights = some_weights(options, target=target)
    batch = a_batch(target=target)
    model = load(save(version, options, weights, target=target)).model.double()
    expected = their_logits(options, *weights, *batch)
    torch.testing.assert_close(our_logits(model, *batch), expected, atol=1e-5, rtol=0)
    tied = model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert tied == options["share_decoder_embeddings"]


def test_the_folder_loads_alone_and_computes_the_same(save, tmp_path):
    options = some_options()
    weights = some_weights(options)
    convert(save(3, options, weights), tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").double()
    batch = a_batch()
    expected = their_logits(options, *weights, *batch)
    torch.testing.assert_close(our_logits(model, *batch), expected, atol=1e-5, rtol=0)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
        == load(tmp_path / "model_step_7.pt").tokenizer.get_vocab()
    )


def test_rates_of_training_are_carried_over(save):
    options = some_options()
    config = load(save(3, options, some_weights(options))).model.config
    rates = config.dropout, config.activation_dropout, config.attention_dropout
    assert rates == (0.1, 0.1, 0.3)  # the last of a schedule
    assert config.label_smoothing == 0.15


@pytest.mark.parametrize("version", [2, 3])
def test_generation_has_the_defaults_of_opennmts_translate(save, tmp_path, version):
    options = some_options(version)
    main(
        [
            "convert",
            "opennmt",
            str(save(version, options, some_weights(options))),
            str(tmp_path / "out"),
        ]
    )
    settings = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").generation_config
    assert (settings.num_beams, settings.length_penalty_type) == (5, "hf")
    assert settings.max_length_offset == 0
    # A length penalty of 0 does not change log-probabilities. The start token counts here.
    expected = {2: (0.0, "never", 100), 3: (1.0, False, 250)}[version]
    assert expected == (
        settings.length_penalty, settings.early_stopping, settings.max_length - 1
    )  # fmt: skip
    assert settings.decoder_start_token_id == settings.bos_token_id == 2
    assert (settings.pad_token_id, settings.eos_token_id) == (1, 3)


def test_generate_stops_at_opennmts_limit(save):
    options = some_options(2)
    tensors, head = some_weights(options)
    head["bias"][3] = -1e9  # "</s>" never comes
    model = load(save(2, options, (tensors, head))).model
    assert model.generate(torch.tensor([[4, 5]]), num_beams=1).shape[1] - 1 == 100


@pytest.mark.parametrize("version", [2, 3])
def test_target_alone_is_ended_and_each_side_has_its_tokenizer(save, tmp_path, version):
    options = some_options(version)
    convert(save(version, options, some_weights(options)), tmp_path / "out")
    source = AutoTokenizer.from_pretrained(tmp_path / "out")
    target = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert source("  a  dé zzz\n")["input_ids"] == [4, 7, 0]
    assert target("x ￭z")["input_ids"] == target(text_target="x ￭z")["input_ids"] == [4, 6, 3]
    padded = source(["a b", "c"], padding=True)
    assert padded["input_ids"] == [[4, 5], [6, 1]]
    assert padded["attention_mask"] == [[1, 1], [1, 0]]
    assert target.decode([2, 4, 6, 5, 3, 1], skip_special_tokens=True) == "x ￭z y"


@pytest.mark.parametrize("version", [2, 3])
def test_one_vocabulary_makes_one_tokenizer_that_ends_the_target_alone(save, tmp_path, version):
    options = some_options(version)
    path = save(version, options, some_weights(options, target=SOURCE), target=SOURCE)
    convert(path, tmp_path / "out")
    assert not (tmp_path / "out" / "target_tokenizer").exists()
    for remote in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=remote)
        assert tokenizer("a b")["input_ids"] == [4, 5]
        assert tokenizer(text_target="a b")["input_ids"] == [4, 5, 3]
        assert tokenizer("a b", text_target="c")["labels"] == [6, 3]
        assert tokenizer.encode("a b") == [4, 5]


def test_a_sum_of_scores_counts_the_end_of_the_target(save):
    options = some_options()
    weights = some_weights(options, target=SOURCE)
    converted = load(save(3, options, weights, target=SOURCE))
    scores = converted.model.score(["a b"], ["c"], converted.tokenizer)
    batch = (torch.tensor([[4, 5]]), torch.tensor([2]), torch.tensor([[2, 6]]))
    first, second = their_logits(options, *weights, *batch).log_softmax(-1)[0]
    assert scores.sums[0].item() == pytest.approx((first[6] + second[3]).item(), abs=1e-5)


def test_white_space_parts_tokens_as_in_each_version(save):
    source = [*SPECIALS, "a\u00a0b", "a", "b", "c"]
    for version, expected in ((2, [5, 6, 7]), (3, [4, 7])):
        options = some_options(version)
        path = save(version, options, some_weights(options, source=source), source=source)
        assert load(path).tokenizer("\u2003a\u00a0b  c\x1f ")["input_ids"] == expected


def test_special_tokens_in_a_text_are_those_of_opennmt(save):
    options = some_options()
    tokenizer = load(save(3, options, some_weights(options))).tokenizer
    assert tokenizer("a </s> <blank>b")["input_ids"] == [4, 3, 0]


def test_the_start_token_is_that_of_the_checkpoint(save):
    options = some_options()

    def start(content):
        content["vocab"]["decoder_start_token"] = "</s>"

    model = load(save(3, options, some_weights(options), change=start)).model
    assert model.config.decoder_start_token_id == 3
    assert model.generation_config.decoder_start_token_id == 3


def test_rules_give_back_every_tensor_bit_by_bit(save):
    options = some_options(3, add_qkvbias=True, add_ffnbias=True)
    tensors, head = some_weights(options)
    model = load(save(3, options, (tensors, head))).model
    theirs = to_theirs(rules(model.config), model.state_dict())
    expected = {name: tensor for name, tensor in tensors.items() if not name.endswith(".pe.pe")}
    expected |= {f"generator.{name}": tensor for name, tensor in head.items()}
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], expected[name]) for name in expected)


def test_weights_in_half_precision_are_carried_over_exactly(save):
    options = some_options()
    tensors, head = (
        {name: tensor.half() for name, tensor in part.items()} for part in some_weights(options)
    )
    model = load(save(3, options, (tensors, head))).model
    assert torch.equal(model.lm_head.weight, head["weight"].float())


def test_layer_norms_of_old_checkpoints_have_other_names(save):
    options = some_options(2)
    tensors, head = some_weights(options)
    old = {}
    for name, tensor in tensors.items():
        if "layer_norm" in name:
            name = name.replace(".weight", ".a_2").replace(".bias", ".b_2")
        old[name] = tensor
    batch = a_batch()
    model = load(save(2, options, (old, head))).model.double()
    expected = their_logits(options, tensors, head, *batch)
    torch.testing.assert_close(our_logits(model, *batch), expected, atol=1e-5, rtol=0)


def test_weights_in_a_file_of_safetensors_are_found_beside(save, tmp_path):
    options = some_options()
    tensors, head = some_weights(options)

    def outside(content):
        del content["model"], content["generator"]

    path = save(3, options, (tensors, head), change=outside)
    with pytest.raises(ConversionError, match="no model_step_7"):
        load(path)
    everything = tensors | {f"generator.{name}": tensor for name, tensor in head.items()}
    save_file({"encoder.nothing": torch.ones(1)}, tmp_path / "model_step_77.safetensors")
    save_file(everything, tmp_path / "model_step_7.safetensors")
    assert torch.equal(load(path).model.lm_head.bias, head["bias"])


REFUSED = [
    (3, {"encoder_type": "brnn"}, "encoder_type brnn"),
    (3, {"decoder_type": "transformer_lm"}, "decoder_type transformer_lm"),
    (3, {"model_task": "lm"}, "model_task lm"),
    (2, {"model_type": "img"}, "model_type img"),
    (2, {"self_attn_type": "average"}, r"self_attn_type average \(average attention\)"),
    (2, {"max_relative_positions": 20}, "max_relative_positions 20"),
    (3, {"max_relative_positions": -1}, r"max_relative_positions -1 \(rotary positions\)"),
    (3, {"max_relative_positions": -2}, r"max_relative_positions -2 \(ALiBi\)"),
    (3, {"relative_positions_buckets": 32}, "relative_positions_buckets 32"),
    (2, {"position_encoding": False}, "position_encoding False"),
    (3, {"position_encoding_type": "Learned"}, "position_encoding_type Learned"),
    (3, {"parallel_residual": True}, "parallel_residual True"),
    (3, {"layer_norm": "rms"}, "layer_norm rms"),
    (3, {"multiquery": True}, "multiquery True"),
    (3, {"num_kv": 2}, "num_kv 2"),
    (3, {"sliding_window": 64}, "sliding_window 64"),
    (3, {"num_experts": 4}, "num_experts 4"),
    (3, {"pos_ffn_activation_fn": "silu"}, "pos_ffn_activation_fn silu"),
    (3, {"pos_ffn_activation_fn": "gated-gelu"}, "pos_ffn_activation_fn gated-gelu"),
    (2, {"copy_attn": True}, "copy_attn True"),
    (2, {"coverage_attn": True}, "coverage_attn True"),
    (2, {"generator_function": "sparsemax"}, "generator_function sparsemax"),
    (2, {"src_feats_vocab": {"pos": "pos.txt"}}, "src_feats_vocab"),
    (3, {"n_src_feats": 1}, "n_src_feats 1"),
    (3, {"lora_layers": ["linear_values"]}, "lora_layers"),
    (3, {"lora_embedding": True}, "lora_embedding True"),
    (3, {"quant_layers": ["w_1"]}, "quant_layers"),
    (3, {"deep_norm": 0.81}, r"deep_norm 0.81 \(unknown option\)"),
]


@pytest.mark.parametrize(
    ("version", "changes", "named"), REFUSED, ids=[" ".join(case[1]) for case in REFUSED]
)
def test_an_option_without_counterpart_is_refused_by_its_name(
    save, tmp_path, version, changes, named
):
    options = some_options(version)
    path = save(version, options | changes, some_weights(options))
    with pytest.raises(ConversionError, match=named):
        convert(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_options_and_masks_of_older_versions_change_nothing(save):
    """Options of version 1 for images and audio, and the mask that version 0 stores."""
    options = some_options(2)
    older = {"audio_enc_pooling": "1", "data_ids": [None], "data_weights": [1]}
    older |= {"image_channel_size": 3, "sample_rate": 16000, "window_size": 0.02}
    weights, head = some_weights(options)
    expected = load(save(2, options, (weights, head))).model
    mask = {"decoder.transformer_layers.0.mask": torch.ones(1, 9, 9, dtype=torch.uint8)}
    found = load(save(2, options | older, (weights | mask, head))).model
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_all_that_is_refused_is_named_at_once(save):
    options = some_options()
    changes = {"layer_norm": "rms", "sliding_window": 8, "copy_attn": True}

    def features(content):
        content["vocab"]["src_feats"] = [["N", "V"]]

    path = save(3, options | changes, some_weights(options), change=features)
    with pytest.raises(ConversionError) as error:
        load(path)
    assert all(name in str(error.value) for name in (*changes, "src_feats"))


def test_an_unknown_option_that_is_off_does_not_matter(save):
    options = some_options(deep_norm=False, other=None, more=[])
    load(save(3, options, some_weights(options)))


def test_features_of_version_2_are_refused(save):
    options = some_options(2)

    def features(content):
        content["vocab"]["src"].fields.append(("pos", save.pickled.field(["N"])))

    with pytest.raises(ConversionError, match="features"):
        load(save(2, options, some_weights(options), change=features))


def without(*names):
    def change(content):
        for name in names:
            del content[name]

    return change


def put(part, name, value):
    def change(content):
        content[part][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("opt"), "not a checkpoint of OpenNMT-py"),
        (without("vocab"), "not a checkpoint of OpenNMT-py"),
        (put("vocab", "src", None), "neither that of OpenNMT-py 2"),
        (put("vocab", "src", [1, 2]), "no list of tokens for src"),
        (put("vocab", "src", [*SOURCE[:-1], "\ud800"]), "no list of tokens for src"),
        (put("vocab", "tgt", [*TARGET[:-1], "x"]), "tgt vocabulary, which has x more than once"),
        (put("vocab", "tgt", ["<unk>", "<pad>", "<s>", "</s>", *TARGET[4:]]), "'<blank>'"),
        (put("vocab", "tgt", ["<blank>", "<unk>", *TARGET[2:]]), "different ids"),
        (put("vocab", "tgt", [*TARGET, "more"]), "lm_head.weight has the shape"),
        (put("vocab", "decoder_start_token", "<none>"), "<none>"),
        (put("vocab", "data_task", "lm"), "data_task lm"),
        (put("model", "decoder.gate.weight", torch.ones(1)), "No rule knows 1 .*gate"),
        (put("model", "encoder.layer_norm.bias", "text"), "encoder.layer_norm.bias"),
        (put("model", "encoder.layer_norm.bias", torch.ones(WIDTH).long()), "floating-point"),
        (put("model", "encoder.layer_norm.bias", torch.ones(WIDTH).to_sparse()), "a dense tensor"),
        (put("model", 7, torch.ones(WIDTH)), "is not a dict of weights"),
        (
            put("model", "encoder.transformer.1.feed_forward.w_2.weight", torch.ones(())),
            "fc2.weight has the shape",
        ),
        (put("model", "encoder.embeddings.make_embedding.pe.pe", torch.ones(())), "not the table"),
        (
            put("model", "encoder.embeddings.make_embedding.pe.pe", torch.zeros(5000, 1, WIDTH)),
            "not the table of position_encoding='sinusoidal'",
        ),
        (
            put("model", "encoder.transformer.7.layer_norm.weight", torch.ones(WIDTH)),
            "encoder.layers.7.* has no place",
        ),
        (put("model", "encoder.transformer.0.feed_forward.w_1.bias", torch.ones(INNER)), "missing"),
        (lambda content: content["model"].pop("decoder.layer_norm.weight"), "layer_norm.weight is"),
        (
            put("model", "decoder.transformer_layers.2.feed_forward.w_2.bias", torch.ones(WIDTH)),
            "encoder.layers.0.fc1.bias is missing",
        ),
        (lambda content: setattr(content["opt"], "add_ffnbias", True), "fc1.bias is missing"),
        (lambda content: setattr(content["opt"], "add_qkvbias", True), "q_proj.bias is missing"),
        (
            put("model", "encoder.transformer.1.self_attn.linear_keys.bias", torch.ones(WIDTH)),
            "k_proj.bias has no place",
        ),
        (lambda content: content["generator"].pop("bias"), "lm_head.bias is missing"),
        (lambda content: content["generator"].pop("weight"), "lm_head.weight is missing"),
        (lambda content: setattr(content["opt"], "heads", 3), "make no model"),
        (lambda content: setattr(content["opt"], "enc_layers", "2"), "make no model"),
        (lambda content: setattr(content["opt"], "hidden_size", -1), "make no model"),
    ],
)  # fmt: skip
def test_what_is_no_whole_checkpoint_is_refused_and_leaves_no_folder(save, tmp_path, change, named):
    options = some_options()
    path = save(3, options, some_weights(options), change=change)
    with pytest.raises(ConversionError, match=named):
        convert(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_tables_said_to_be_one_must_be_equal(save):
    options = some_options(share_decoder_embeddings=True)
    tensors, head = some_weights(options)
    head["weight"] = head["weight"] + 1
    with pytest.raises(ConversionError, match="differ, but are tied"):
        load(save(3, options, (tensors, head)))


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_file_cut_off_is_refused(save, tmp_path, kept):
    options = some_options()
    path = save(3, options, some_weights(options))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(ConversionError, match="is not a complete checkpoint"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_would_run_code_is_refused_with_its_name(save, tmp_path):
    options = some_options(src_prefix=Hostile(os.mkdir, str(tmp_path / "evidence")))
    with pytest.raises(ConversionError, match=r"(posix|nt)\.mkdir"):
        load(save(3, options, some_weights(options)))
    assert not (tmp_path / "evidence").exists()


# OpenNMT-py's own code.

PACKAGES = {
    "2.3.0": ["OpenNMT-py==2.3.0", "torchtext==0.5.0", "configargparse", "pyonmttok", "six"],
    "3.5.1": ["OpenNMT-py==3.5.1", "configargparse", "pyonmttok", "six"],
}
ONE_TABLE = ["--share_vocab", "--share_embeddings", "--share_decoder_embeddings"]
RUNS = [
    ("2.3.0", []),
    ("2.3.0", [*ONE_TABLE, "--pos_ffn_activation_fn", "gelu"]),
    ("3.5.1", ["--norm_eps", "0.01"]),
    (
        "3.5.1",
        [
            *ONE_TABLE,
            *("--add_qkvbias", "--add_ffnbias", "--decoder_start_token", "</s>"),
            *("--position_encoding_type", "SinusoidalConcat"),
        ],
    ),
]


@pytest.fixture(scope="module")
def toolkits(tmp_path_factory):
    """Install a version into a folder of its own, and run tests/toolkits/opennmt.py there."""
    installed = {}

    def install(version):
        folder = tmp_path_factory.mktemp(f"opennmt-{version}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done = subprocess.run(
            [*command, str(folder), *PACKAGES[version]], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"OpenNMT-py {version} cannot be installed: {done.stderr[-300:]}")
        return folder

    def run(version, options):
        if version not in installed:
            installed[version] = install(version)
        output = tmp_path_factory.mktemp("run") / "model"
        script = Path(__file__).parent / "toolkits" / "opennmt.py"
        done = subprocess.run(
            [sys.executable, str(script), str(output), *options],
            env={**os.environ, "PYTHONPATH": str(installed[version]), "OMP_NUM_THREADS": "1"},
            cwd=output.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            if last.startswith(("ImportError", "ModuleNotFoundError")):
                pytest.skip(f"OpenNMT-py {version} cannot be imported here: {last}")
            pytest.fail(done.stderr[-2000:])
        return output

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("version", "options"), RUNS)
def test_opennmts_own_model_gives_the_same_logits_and_translations(toolkits, version, options):
    folder = toolkits(version, options)
    computed = torch.load(folder / "computed.pt", weights_only=True)
    assert computed["version"] == version
    converted = load(folder / computed["checkpoint"])
    model, tokenizer = converted.model, converted.tokenizer
    target_tokenizer = converted.target_tokenizer or tokenizer
    torch.testing.assert_close(
        our_logits(model, *computed["batch"]), computed["logits"], atol=1e-5, rtol=0
    )

    lines = computed["lines"]
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    for (beams, penalty, alpha), (their_scores, theirs) in computed["searches"].items():
        # OpenNMT-py's length penalty counts the start token.
        pairs = [(line, text) for line, texts in zip(lines, theirs, strict=True) for text in texts]
        sources, targets = zip(*pairs, strict=True)
        labels = target_tokenizer(text_target=list(targets))["input_ids"]
        sums = model.score(tokenizer(list(sources))["input_ids"], labels).sums
        lengths = torch.tensor([len(label) + 1.0 for label in labels])
        penalties = {"none": 1.0, "avg": lengths**alpha, "wu": ((5 + lengths) / 6) ** alpha}
        ended = lengths - 1 <= 30
        scores = torch.tensor(their_scores).flatten()
        torch.testing.assert_close(
            (sums / penalties[penalty])[ended], scores[ended], atol=1e-4, rtol=0
        )
        assert ended.float().mean() > 0.9

        # With a penalty, lengths that differ by one may make another hypothesis the best.
        if beams == 1 or penalty == "none":
            ours = model.generate(
                **batch, num_beams=beams, length_penalty=0.0, early_stopping="never", max_length=31
            )
            # Our decoding leaves out <unk>.
            best = [re.sub(r" ?<unk>", "", texts[0]).strip() for texts in theirs]
            assert target_tokenizer.batch_decode(ours, skip_special_tokens=True) == best


def test_a_line_without_tokens_has_no_links_and_no_score(save, tmp_path, capsys):
    options = some_options()
    convert(save(3, options, some_weights(options)), tmp_path / "out")
    (tmp_path / "source").write_text("a b\n\nc\n")
    (tmp_path / "target").write_text("x y\ny\nx\n")
    given = [str(tmp_path / name) for name in ("out", "source", "target")]
    main(["align", *given])
    links = capsys.readouterr().out.splitlines()
    assert [bool(line) for line in links] == [True, False, True]
    with pytest.raises(SystemExit, match=r"Line 2 of .*source has no tokens"):
        main(["score", *given])


def test_a_tokenizer_that_marian_cannot_have_is_refused_by_its_setting(save, tmp_path):
    options = some_options()
    convert(save(3, options, some_weights(options)), tmp_path / "out")
    with pytest.raises(
        ConversionError, match=r"The tokenizer cannot be converted.*source_eos False"
    ):
        to_marian._without_package(AutoTokenizer.from_pretrained(tmp_path / "out"))
