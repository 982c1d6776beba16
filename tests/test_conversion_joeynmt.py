"""Conversion of JoeyNMT's checkpoints, compared with its formulas and its code.

The fast tests write checkpoints in JoeyNMT's layout and compute their logits by `their_logits`,
which follows joeynmt 2.3 with operations of torch alone.
"""

import copy
import math
import os
import random
import site
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.commands.main import main
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.joeynmt import RULES, convert, load
from vaswani.conversion.rules import to_theirs

SPECIALS = ["<unk>", "<pad>", "<s>", "</s>"]
SOURCE_WORDS = ["a", "b", "c", "dé", "Σ", "▁"]
TARGET_WORDS = ["x", "y", "z", "ä"]
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


def a_config(layer_norm="pre", **changes):
    """Return a config.yaml. `changes` are values for paths such as "model.encoder.alpha"."""
    stack = {
        "type": "transformer",
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 16,
        "ff_size": 24,
        "layer_norm": layer_norm,
        "embeddings": {"embedding_dim": 16, "scale": True, "dropout": 0.2},
    }
    config = {
        "name": "tiny",
        "joeynmt_version": "2.3.0",
        "model_dir": "models/tiny",
        "data": {
            "train": "data/train",
            "src": {"lang": "a", "level": "word", "max_length": 80},
            "trg": {"lang": "b", "level": "word", "voc_min_freq": 1},
        },
        "training": {"label_smoothing": 0.2, "batch_size": 80},
        "testing": {"beam_size": 5, "beam_alpha": 0.6, "max_output_length": 30},
        "model": {"initializer": "xavier_uniform", "encoder": stack},
    }
    config["model"]["decoder"] = copy.deepcopy(stack)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(last)
        else:
            section[last] = value
    return config


def their_positions(length, width):
    table = torch.zeros(length, width)
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


def a_checkpoint(config, source, target, seed=0):
    """Return random tensors with the names of JoeyNMT's model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}

    def random_(name, *shape, scale=0.5):
        tensors[name] = torch.randn(*shape, generator=generator) * scale

    def norm(name, width):
        tensors[f"{name}.weight"] = torch.rand(width, generator=generator) + 0.5
        random_(f"{name}.bias", width)

    def linear(name, inputs, outputs):
        random_(f"{name}.weight", outputs, inputs, scale=inputs**-0.5)
        random_(f"{name}.bias", outputs)

    model = config["model"]
    width = model["encoder"]["hidden_size"]
    random_("src_embed.lut.weight", source, width)
    random_("trg_embed.lut.weight", target, width)
    random_("decoder.output_layer.weight", target, width)
    if model.get("tied_embeddings"):
        tensors["trg_embed.lut.weight"] = tensors["src_embed.lut.weight"]
    if model.get("tied_softmax"):
        tensors["decoder.output_layer.weight"] = tensors["trg_embed.lut.weight"]
    for side, attentions, norms in (
        ("encoder", ["src_src_att"], ["layer_norm"]),
        ("decoder", ["trg_trg_att", "src_trg_att"], ["x_layer_norm", "dec_layer_norm"]),
    ):
        options = model[side]
        tensors[f"{side}.pe.pe"] = their_positions(5000, width)[None]
        if options.get("layer_norm") == "pre":
            norm(f"{side}.layer_norm", width)
        for index in range(options["num_layers"]):
            layer = f"{side}.layers.{index}"
            for attention in attentions:
                for part in ("k_layer", "v_layer", "q_layer", "output_layer"):
                    linear(f"{layer}.{attention}.{part}", width, width)
            for name in norms:
                norm(f"{layer}.{name}", width)
            norm(f"{layer}.feed_forward.layer_norm", width)
            linear(f"{layer}.feed_forward.pwff_layer.0", width, options["ff_size"])
            linear(f"{layer}.feed_forward.pwff_layer.3", options["ff_size"], width)
    return tensors


def their_logits(tensors, config, source, target):
    """Return JoeyNMT's logits after each target token, for ids padded with 1."""
    model = config["model"]

    def linear(name, x):
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(name, x):
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    def embed(side, ids):
        options = model["encoder" if side == "src" or model.get("tied_embeddings") else "decoder"]
        x = tensors[f"{side}_embed.lut.weight"][ids]
        if options["embeddings"].get("scale", False):
            x = x * math.sqrt(x.shape[-1])
        return x + their_positions(x.shape[1], x.shape[2])

    def attend(name, query, memory, mask, heads):
        q, k, v = (
            linear(f"{name}.{part}_layer", x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, x in (("q", query), ("k", memory), ("v", memory))
        )
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return linear(f"{name}.output_layer", context)

    def residual(name, x, position, sublayer):
        if position == "pre":
            return x + sublayer(norm(name, x))
        return norm(name, x + sublayer(x))

    def run(side, x, sublayers):
        options = model[side]
        position = options["layer_norm"]
        activation = ACTIVATIONS[options.get("activation", "relu")]
        for index in range(options["num_layers"]):
            layer = f"{side}.layers.{index}"
            for norm_name, sublayer in sublayers:
                x = residual(
                    f"{layer}.{norm_name}",
                    x,
                    position,
                    lambda h, s=sublayer, at=layer, n=options["num_heads"]: s(at, h, n),
                )
            x = residual(
                f"{layer}.feed_forward.layer_norm",
                x,
                position,
                lambda h, at=layer: linear(
                    f"{at}.feed_forward.pwff_layer.3",
                    activation(linear(f"{at}.feed_forward.pwff_layer.0", h)),
                ),
            )
        return norm(f"{side}.layer_norm", x) if position == "pre" else x

    source_mask = (source != 1)[:, None]
    memory = run(
        "encoder",
        embed("src", source),
        [("layer_norm", lambda at, h, n: attend(f"{at}.src_src_att", h, h, source_mask, n))],
    )
    length = target.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
    states = run(
        "decoder",
        embed("trg", target),
        [
            ("x_layer_norm", lambda at, h, n: attend(f"{at}.trg_trg_att", h, h, causal, n)),
            (
                "dec_layer_norm",
                lambda at, h, n: attend(f"{at}.src_trg_att", h, memory, source_mask, n),
            ),
        ],
    )
    return F.linear(states, tensors["decoder.output_layer.weight"])


@pytest.fixture
def save(tmp_path):
    """Write the files of a JoeyNMT training, and return the folder and the tensors."""

    def write(config, source=None, target=None, tensors=None, name="10.ckpt", folder=None):
        folder = folder or tmp_path / "joey"
        folder.mkdir(exist_ok=True)
        source = [*SPECIALS, *SOURCE_WORDS] if source is None else source
        target = [*SPECIALS, *TARGET_WORDS] if target is None else target
        if config["model"].get("tied_embeddings"):
            target = source
        for side, tokens in (("src", source), ("trg", target)):
            text = "".join(f"{token}\n" for token in tokens)
            (folder / f"{side}_vocab.txt").write_text(text, encoding="utf-8")
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        tensors = tensors or a_checkpoint(config, len(source), len(target))
        stats = {"steps": 10, "best_ckpt_score": numpy.float64(3.5)}
        state = {"model_state": tensors, "optimizer_state": {}, "stats_state": stats}
        torch.save(state, folder / name)
        return folder, tensors

    return write


def a_batch(source_size, target_size, lengths=(7, 3, 1)):
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, source_size, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(source, lengths, strict=True):
        row[length - 1] = 3
        row[length:] = 1
    target = torch.randint(4, target_size, (len(lengths), 5), generator=generator)
    target[:, 0] = 2
    return source, target


def assert_their_logits(model, tensors, config):
    source, target = a_batch(model.config.vocab_size, model.config.decoder_vocab_size)
    with torch.no_grad():
        logits = model(
            input_ids=source, attention_mask=(source != 1).long(), decoder_input_ids=target
        ).logits
    expected = their_logits(tensors, config, source, target)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


VARIANTS = {
    "pre-norm, two vocabularies": {},
    "post-norm, two vocabularies": {"layer_norm": "post"},
    "tied softmax": {"model.tied_softmax": True},
    "all tied, post-norm": {
        "layer_norm": "post",
        "model.tied_softmax": True,
        "model.tied_embeddings": True,
    },
    "tied embeddings, free softmax": {
        "model.tied_embeddings": True,
        "model.decoder.embeddings.scale": False,
    },
    "unscaled": {"model.encoder.embeddings.scale": None, "model.decoder.embeddings.scale": False},
    "unlike stacks": {
        "model.encoder.num_layers": 1,
        "model.decoder.num_layers": 3,
        "model.encoder.num_heads": 2,
        "model.decoder.num_heads": 8,
        "model.encoder.ff_size": 10,
        "model.decoder.ff_size": 40,
    },
    "gelu": {"model.encoder.activation": "gelu", "model.decoder.activation": "gelu"},
    "swish": {"model.encoder.activation": "swish", "model.decoder.activation": "swish"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_joeynmts_formulas_under_padding(changes, save):
    config = a_config(**changes)
    folder, tensors = save(config)
    assert_their_logits(load(folder).model, tensors, config)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_way_back_gives_the_same_bits(changes, save):
    folder, tensors = save(a_config(**changes))
    back = to_theirs(RULES, load(folder).model.state_dict())
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".pe.pe")}
    assert back.keys() == kept.keys()
    assert all(torch.equal(back[name], kept[name]) for name in kept)


def test_the_folder_loads_by_the_auto_classes_and_is_complete(save, tmp_path):
    config = a_config()
    folder, tensors = save(config)
    main(["convert", "joeynmt", str(folder), str(tmp_path / "out")])
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert_their_logits(model, tensors, config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("b dé new").input_ids == [5, 7, 0, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2, 3)
    target_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert target_tokenizer(text_target="ä x").input_ids == [7, 4, 3]
    assert target_tokenizer.decode([2, 7, 4, 3, 1], skip_special_tokens=True) == "ä x"
    assert (model.config.decoder_start_token_id, model.config.label_smoothing) == (2, 0.2)
    assert not list(tmp_path.glob(".out*"))


def test_one_vocabulary_has_one_tokenizer(save, tmp_path):
    folder, _ = save(a_config(**{"model.tied_embeddings": True, "model.tied_softmax": True}))
    convert(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "target_tokenizer").exists()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight


def test_the_generation_config_is_the_section_testing(save):
    config = load(save(a_config())[0]).model.generation_config
    assert (config.num_beams, config.length_penalty_type, config.length_penalty) == (5, "gnmt", 0.6)
    assert (config.max_new_tokens, config.max_length_offset) == (30, 0)
    assert (config.min_new_tokens, config.suppress_tokens) == (1, [1, 2])
    changes = {"testing": {"generate_unk": False, "min_output_length": 0}}
    changes["data.special_symbols"] = {"sep_id": 4, "sep_token": "<sep>", "lang_tags": ["<de>"]}
    source = [*SPECIALS, "<sep>", "<de>", "a"]
    folder, _ = save(a_config(**changes), source, source)
    converted = load(folder)
    config = converted.model.generation_config
    assert (config.num_beams, config.length_penalty, config.max_new_tokens) == (1, 0.0, None)
    assert (config.min_new_tokens, config.suppress_tokens) == (None, [0, 2, 4, 5])
    assert (config.max_length_factor, config.max_length_offset) == (1.5, 0)
    ids = converted.tokenizer("<de> a").input_ids
    assert ids == [5, 6, 3]
    assert converted.tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_beam_search_obeys_limits_and_never_chooses_what_joeynmt_never_does(save):
    folder, _ = save(a_config(**{"testing.max_output_length": 4, "testing.min_output_length": 3}))
    model = load(folder).model
    source, _ = a_batch(10, 8)
    output = model.generate(input_ids=source, attention_mask=(source != 1).long())
    assert output.shape[1] <= 5
    assert not torch.isin(output[:, 1:4], torch.tensor([1, 2, 3])).any()


REFUSALS = {
    "model.encoder.alpha": (1.3, "model.encoder.alpha: 1.3"),
    "model.decoder.alpha": (0.9, "model.decoder.alpha: 0.9"),
    "model.initializer": ("xavier_normal", "model.initializer: xavier_normal .* DeepNet"),
    "model.decoder.layer_norm": ("post", "layer_norm of .* differ: pre, post"),
    "model.encoder.layer_norm": (None, "model.encoder.layer_norm is missing"),
    "model.encoder.activation": ("tanh", "activation"),
    "model.decoder.activation": ("gelu", "activation of .* differ: relu, gelu"),
    "model.encoder.embeddings.embedding_dim": (8, "hidden_size and embedding_dim .* 16, 8"),
    "model.decoder.embeddings.scale": (False, "embeddings.scale of .* differ: True, False"),
    "model.encoder.num_heads": (5, "multiple of encoder_attention_heads"),
    "model.encoder.num_layers": ("two", "model.encoder.num_layers: 'two' is not of type int"),
    "model.decoder.num_layers": (math.inf, "model.decoder.num_layers: inf is not of type int"),
    "model.encoder.type": ("recurrent", "type of model.encoder and .* recurrent, transf"),
    "model.decoder.type": ("recurrent", "type of model.encoder and .* transformer, recu"),
    "model.encoder.relative_positions": (True, "model.encoder.relative_positions is unknown"),
    "model.encoder.embeddings.rank": (4, "model.encoder.embeddings.rank is unknown"),
    "model.moe": (4, "model.moe is unknown"),
    "model.tied_embeddings": (True, "tied_embeddings: True .the two vocabularies differ"),
    "data.src.has_prompt": (True, "data.src.has_prompt"),
    "data.trg.level": ("syllable", "data.trg.level: 'syllable'"),
    "data.src.tokenizer_cfg": ({"pretokenizer": "moses"}, "pretokenizer: moses"),
    "data.trg.stemming": (True, "data.trg.stemming is unknown"),
    "data.special_symbols.unk_id": (3, "data.special_symbols.unk_id: 3"),
    "data.special_symbols.lang_tags": ("<de>", "lang_tags: '<de>' is not a list"),
    "model.tied_softmax": ("yes", "model.tied_softmax: 'yes' is not of type bool"),
    "testing.beam_size": (2.5, "testing.beam_size: 2.5 is not of type int"),
    "testing.repetition_penalty": (2, "testing.repetition_penalty"),
    "testing.no_repeat_ngram_size": (3, "testing.no_repeat_ngram_size"),
    "testing.sampling": (True, "testing.sampling is unknown"),
}


@pytest.mark.parametrize("option", REFUSALS)
def test_what_has_no_counterpart_is_refused_by_its_name(option, save, tmp_path):
    value, message = REFUSALS[option]
    config = a_config()
    folder, _ = save(config)
    config = a_config(**{option: value})
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["joey"]


def test_everything_that_is_refused_is_named_at_once(save):
    folder, _ = save(a_config())
    config = a_config(
        **{path: value for path, (value, _) in REFUSALS.items() if ".type" not in path}
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(ConversionError) as error:
        load(folder)
    for name in ("alpha: 1.3", "alpha: 0.9", "xavier_normal", "layer_norm", "moe", "has_prompt"):
        assert name in str(error.value)
    for name in ("moses", "stemming", "syllable", "repetition_penalty", "sampling", "unk_id"):
        assert name in str(error.value)


def test_without_layer_norm_the_version_decides(save):
    for version, fits in (("2.0.0", True), ("2.1.0", True), ("2.2.1", False), ("2.3.0", False)):
        changes = {f"model.{side}.layer_norm": None for side in ("encoder", "decoder")}
        folder, _ = save(a_config(joeynmt_version=version, **changes))
        if fits:
            assert load(folder).model.config.norm_position == "post"
        else:
            with pytest.raises(ConversionError, match="layer_norm is missing"):
                load(folder)


def test_missing_leftover_and_misshapen_tensors_are_errors(save):
    config = a_config()
    folder, tensors = save(config)
    name = "decoder.layers.1.src_trg_att.q_layer.bias"
    for change, message in (
        ({name: None}, "model.decoder.layers.1.encoder_attn.q_proj.bias is missing"),
        ({"decoder.extra": torch.zeros(1)}, "decoder.extra"),
        ({name: torch.zeros(3)}, r"q_proj.bias has the shape \(3,\), not \(16,\)"),
        ({"encoder.pe.pe": torch.zeros(1, 5000, 16)}, "encoder.pe.pe is not the table"),
        ({"encoder.pe.pe": torch.zeros(5000, 16)}, "encoder.pe.pe is not the table"),
    ):
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save(config, tensors=changed)
        with pytest.raises(ConversionError, match=message):
            load(folder)


def test_tables_that_differ_are_not_taken_for_tied(save):
    config = a_config(**{"model.tied_softmax": True})
    tensors = a_checkpoint(config, 10, 8)
    tensors["decoder.output_layer.weight"] = torch.ones(8, 16)
    folder, _ = save(config, tensors=tensors)
    with pytest.raises(ConversionError, match=r"lm_head.weight.* differ, but are tied"):
        load(folder)


def test_vocabularies_are_found_named_and_checked(save, tmp_path):
    config = a_config(**{"data.src.voc_file": "elsewhere/words.txt"})
    folder, _ = save(config)
    (folder / "src_vocab.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(ConversionError, match=r"words.txt: name it by --source-vocab"):
        load(folder)
    assert load(folder, source_vocab=tmp_path / "moved.txt").tokenizer("b").input_ids == [5, 3]
    # In a user's own file, JoeyNMT puts the special tokens first and drops repeated tokens.
    (folder / "words.txt").write_text("\n".join(["a", "<s>", "b", "a", *SOURCE_WORDS[2:]]))
    assert load(folder).tokenizer("b").input_ids == [5, 3]
    (folder / "words.txt").write_text("a\nb\n")
    with pytest.raises(ConversionError, match=r"words.txt makes a vocabulary of 6 .* has 10"):
        load(folder)
    (folder / "words.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(ConversionError, match=r"words.txt cannot be read.*utf-8"):
        load(folder)


def test_checkpoints_are_found_as_joeynmt_finds_them(save, tmp_path):
    config = a_config()
    folder, _ = save(config)
    save(config, name="20.ckpt")
    with pytest.raises(ConversionError, match=r"10.ckpt, 20.ckpt: name the checkpoint"):
        load(folder)
    (folder / "best.ckpt").symlink_to("20.ckpt")
    load(folder)
    (folder / "20.ckpt").unlink()  # best.ckpt is now a broken link
    with pytest.raises(ConversionError, match="name the checkpoint"):
        load(folder)
    moved = (folder / "config.yaml").rename(tmp_path / "other.yaml")
    with pytest.raises(ConversionError, match=r"config.yaml: name it by --config"):
        load(folder / "10.ckpt")
    assert load(folder / "10.ckpt", config=moved).model.config.d_model == 16
    with pytest.raises(ConversionError, match="no file or folder"):
        load(tmp_path / "nowhere")


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-was-here",)


def test_damaged_hostile_and_foreign_files_leave_nothing_behind(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = save(a_config())
    whole = (folder / "10.ckpt").read_bytes()

    def refused(message):
        with pytest.raises(ConversionError, match=message):
            convert(folder, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["joey"]

    (folder / "10.ckpt").write_bytes(whole[: len(whole) // 2])
    refused("not a complete checkpoint")
    torch.save({"model_state": {}, "stats_state": Hostile()}, folder / "10.ckpt")
    refused("posix.mkdir")
    torch.save({"model": {}}, folder / "10.ckpt")
    refused("no model_state")
    torch.save([1, 2], folder / "10.ckpt")
    refused("no model_state")
    (folder / "10.ckpt").write_bytes(whole)
    (folder / "config.yaml").write_text("a: [")
    refused("config.yaml is not YAML")
    (folder / "config.yaml").write_text("architecture: transformer\n")
    refused("not a config of JoeyNMT")
    (folder / "config.yaml").write_text("model: 3\ndata: {src: 5}\n")
    refused("model is not a section")
    (folder / "config.yaml").write_text("model: {}\ndata: {src: de, trg: en, level: bpe}\n")
    refused("config of JoeyNMT 1 ")


TEXTS = [
    "a b c",
    " a  b ",
    "   ",
    "</s> a <pad> <unk> <s>",
    "a\u00a0b\tc",
    "▁ a▁b",
    "new Σ dé",
    "A B XΣ Σ X'Σ XΣ'X dÉ \u0130",
    "ﬁ “a” b\u2019s  ! , c \u3000 .",
    "a \u200b b ?!",
]


def their_preprocessing(text, lowercase, normalize):
    if normalize:
        text = unicodedata.normalize("NFKC", text)
        for a, b in (("\u2019", "'"), ("“", '"'), ("”", '"'), ("\u200b", "")):
            text = text.replace(a, b)
        text = text.replace("\u3000", " ")
        while "  " in text:
            text = text.replace("  ", " ")
        for mark in "?!,.:":
            text = text.replace(f" {mark}", mark)
        text = text.strip()
    return text.lower() if lowercase else text


@pytest.mark.parametrize("level", ["word", "char"])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_texts_become_the_ids_that_joeynmt_gives_them(level, lowercase, normalize, save):
    changes = {f"data.src.{n}": v for n, v in (("lowercase", lowercase), ("normalize", normalize))}
    tokens = [*SPECIALS, "", *SOURCE_WORDS, *"dé<>/s'x!ς", "\u03c3", "a▁b", "\u00a0"]
    tokens += ["xς", "x\u03c3", "x'ς", "x\u03c3'x"]
    tokens = list(dict.fromkeys(tokens))
    folder, _ = save(a_config(**{"data.src.level": level}, **changes), source=tokens)
    tokenizer = load(folder).tokenizer
    for text in TEXTS:
        plain = their_preprocessing(text, lowercase, normalize)
        pieces = plain.split(" ") if level == "word" else list(plain.replace(" ", "▁"))
        if plain:  # JoeyNMT refuses empty texts
            ids = [tokens.index(piece) if piece in tokens else 0 for piece in pieces]
            assert tokenizer(text).input_ids == [*ids, 3], repr(text)
            known = [piece for piece, i in zip(pieces, ids, strict=True) if i > 3]
            joined = " ".join(known) if level == "word" else "".join(known).replace("▁", " ")
            joined = their_preprocessing(joined, False, True) if normalize else joined
            assert tokenizer.decode([*ids, 3], skip_special_tokens=True) == joined, repr(text)


def a_sentencepiece_model(folder, **options):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    rng = random.Random(4)
    syllables = ["bo", "de", "ku", "lo", "mi", "na", "Ör", "st", "xy", "z"]
    lines = [
        " ".join("".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(8))
        for _ in range(300)
    ]
    options = {"vocab_size": 90, "unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "sp"), minloglevel=2, **options
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    return processor, [processor.id_to_piece(index) for index in range(len(processor))], lines


PIECES = {"data.src.level": "bpe", "data.src.tokenizer_cfg": {"model_file": "old/place/sp.model"}}


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("shortened", [False, True])
def test_texts_become_the_pieces_of_sentencepiece(model_type, shortened, save, tmp_path):
    processor, tokens, lines = a_sentencepiece_model(tmp_path, model_type=model_type)
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="no protobuf")
    if shortened:
        kept = [index < 4 or index % 3 or len(token) < 3 for index, token in enumerate(tokens)]
        tokens = [token for token, keep in zip(tokens, kept, strict=True) if keep]
    folder, _ = save(a_config(**PIECES), source=tokens)
    (tmp_path / "sp.model").rename(folder / "sp.model")
    if shortened and model_type == "bpe":
        with pytest.raises(ConversionError, match=r"its piece .* is not in src_vocab.txt"):
            load(folder)
        return
    if shortened:  # as by SetVocabulary, which sentencepiece 0.2.3 no longer has
        model = pb2.ModelProto()
        model.ParseFromString((folder / "sp.model").read_bytes())
        for piece in model.pieces:
            if piece.type == 1 and piece.piece not in tokens:
                piece.type = 5
        processor.LoadFromSerializedProto(model.SerializeToString())
    tokenizer = load(folder).tokenizer
    texts = [
        *TEXTS,
        *lines[:100],
        "new lobade Wörter",
        "Örst bo</s>",
        "<s>",
        "中国 bo 国",
        " bo  lo",
    ]
    for text in texts:
        pieces = processor.encode(text, out_type=str)
        ids = [tokens.index(piece) if piece in tokens else 0 for piece in pieces]
        assert tokenizer(text).input_ids == [*ids, 3], repr(text)
    for line in lines[:20]:
        assert tokenizer.decode(tokenizer(line).input_ids, skip_special_tokens=True) == line


def test_language_tags_of_sentencepiece_stand_without_a_space_before_them(save, tmp_path):
    processor, tokens, lines = a_sentencepiece_model(
        tmp_path, model_type="unigram", user_defined_symbols="<de>,<en>"
    )
    words = [token for token in tokens if token not in ("<de>", "<en>", *SPECIALS)]
    tokens = [*SPECIALS, "<de>", "<en>", *words]
    symbols = {"data.special_symbols": {"lang_tags": ["<de>", "<en>"]}}
    folder, _ = save(a_config(**PIECES, **symbols), source=tokens, target=tokens)
    (tmp_path / "sp.model").rename(folder / "sp.model")
    tokenizer = load(folder).tokenizer
    for text in (f"<en> {lines[0]}", f"{lines[1]} <de> {lines[2]}", lines[3]):
        pieces = processor.encode(text, out_type=str)
        if text.startswith("<en>"):
            assert pieces.pop(0) == "▁"
        assert tokenizer(text).input_ids == [*(tokens.index(piece) for piece in pieces), 3]


def test_sentencepiece_models_that_cannot_be_had_are_refused(save, tmp_path):
    for options, message in (
        ({"model_type": "unigram", "byte_fallback": True, "vocab_size": 330}, "byte_fallback"),
        ({"model_type": "char", "vocab_size": 24}, "model_type char"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ):
        _, tokens, _ = a_sentencepiece_model(tmp_path, **options)
        folder, _ = save(a_config(**PIECES), source=tokens)
        (tmp_path / "sp.model").replace(folder / "sp.model")
        with pytest.raises(ConversionError, match=f"tokenizer_cfg.model_file: .*{message}"):
            load(folder)
    model = (folder / "sp.model").read_bytes()
    for content in (model[:50], b"", b"not a model", b"\x0a\xff\xff\xff"):
        (folder / "sp.model").write_bytes(content)
        with pytest.raises(
            ConversionError, match=r"not a complete SentencePiece model.* --pretokenized"
        ):
            load(folder)
    (folder / "sp.model").unlink()
    with pytest.raises(ConversionError, match=r"There is no file .*sp.model \(tokenize"):
        load(folder)


def test_text_that_is_already_tokens_needs_no_tokenizer_of_joeynmts(save):
    changes = {"data.src.level": "bpe", "data.src.tokenizer_type": "subword-nmt"}
    changes["data.src.tokenizer_cfg"] = {"codes": "bpe.codes", "pretokenizer": "moses"}
    folder, _ = save(a_config(**changes))
    with pytest.raises(ConversionError, match=r"subword-nmt .*--pretokenized"):
        load(folder)
    assert load(folder, pretokenized=True).tokenizer("b Σ dé").input_ids == [5, 8, 7, 3]


def test_options_that_joeynmts_published_configs_have_beside_are_known(save):
    changes = {
        "data.dataset_type": "huggingface",
        "data.dataset_cfg": {"name": "de-en"},
        "data.sample_dev_subset": 200,
        "data.src.voc_limit": 32000,
        "data.src.tokenizer_cfg": {
            "num_merges": 32000,
            "model_type": "unigram",
            "character_coverage": 1.0,
            "nbest_size": 10,
            "alpha": 0.1,
            "pretokenizer": "none",
        },
        "testing.n_best": 1,
        "testing.repetition_penalty": -1,
        "testing.no_repeat_ngram_size": -1,
        "testing.sacrebleu_cfg": {"tokenize": "13a"},
        "training.fp16": True,
        "model.embed_init_gain": 1.0,
        "model.encoder.freeze": False,
        "model.encoder.embeddings.freeze": False,
    }
    folder, _ = save(a_config(**changes))
    assert load(folder).tokenizer("b dé").input_ids == [5, 7, 3]


SCRIPT = Path(__file__).parent / "toolkits" / "joeynmt.py"


@pytest.fixture(scope="module")
def joeynmts_folders(tmp_path_factory):
    """Folders saved by JoeyNMT, run in an environment with the packages of this one."""
    for package in ("matplotlib", "sacrebleu", "sentencepiece", "subword_nmt", "tensorboard"):
        pytest.importorskip(package, reason=f"JoeyNMT imports {package}, which is not installed")
    folder = tmp_path_factory.mktemp("joeynmt")
    python = str(folder / "env" / "bin" / "python")
    # Later ones lack SetVocabulary, or need more packages.
    packages = ["joeynmt==2.3.0", "importlib_metadata<9", "zipp", "sentencepiece<0.2.2"]
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=120
        )
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", *packages],
            check=True,
            timeout=300,
            capture_output=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"JoeyNMT cannot be installed: {error}")
    (home,) = (folder / "env").glob("lib/python*/site-packages")
    (home / "present.pth").write_text("\n".join(site.getsitepackages()))
    run = subprocess.run(
        [python, "-P", SCRIPT, folder / "out"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "post", "unigram", "bpe"])
def test_joeynmts_own_models_give_its_ids_logits_and_translations(name, joeynmts_folders, tmp_path):
    folder = joeynmts_folders / name
    theirs = torch.load(folder / "expected.pt")
    convert(folder, tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    of_target = tokenizer
    if (tmp_path / "out" / "target_tokenizer").exists():
        of_target = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    batch = tokenizer(theirs["source"], padding=True, return_tensors="pt")
    assert torch.equal(batch.input_ids, theirs["input_ids"])
    labels = of_target(text_target=theirs["target"], padding=True, return_tensors="pt").input_ids
    assert torch.equal(labels, theirs["labels"])

    with torch.no_grad():
        inputs = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(**batch, decoder_input_ids=inputs).logits
    real = labels != 1
    difference = (logits - theirs["logits"])[real].abs().max().item()
    print(f"{name}: {int(real.sum())} positions, largest difference {difference:.1e}")  # noqa: T201
    assert difference < 1e-5

    for search in ("greedy", "beam"):
        # JoeyNMT's greedy search may choose <pad>, its beam search may not. The section testing
        # sets a beam.
        settings = {"num_beams": 1, "suppress_tokens": [2]} if search == "greedy" else {}
        output = model.generate(
            **batch, **settings, return_dict_in_generate=True, output_scores=True
        )
        ours = output.sequences[:, 1:]
        expected = theirs[search]["ids"]
        equal = 0
        for mine, other in zip(ours.tolist(), expected.tolist(), strict=True):
            mine, other = (ids[: ids.index(3)] if 3 in ids else ids for ids in (mine, other))
            equal += mine == other
        print(f"{name}: {search}: {equal} of {len(ours)} translations are equal")  # noqa: T201
        assert equal == len(ours)
        texts = [text.replace("<unk>", "") for text in theirs[search]["texts"]]
        known = [mine for mine, text in zip(ours, texts, strict=True) if 0 not in mine]
        assert of_target.batch_decode(known, skip_special_tokens=True) == [
            text for mine, text in zip(ours, texts, strict=True) if 0 not in mine
        ]
        if search == "beam":
            scores = theirs["beam"]["scores"][:, 0]
            torch.testing.assert_close(output.sequences_scores, scores, atol=1e-4, rtol=0)
