"""Conversion of fairseq's checkpoints, compared with our own version of fairseq's code.

The network, search and dictionary of fairseq are written again here. The tests write checkpoints
with fairseq's names and classes, in its old and new layouts.
"""

import io
import json
import math
import os
import re
from argparse import Namespace

import pytest
import torch
from hostile import Hostile
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.commands.main import main
from vaswani.conversion import fairseq, fairseq_options, fairseq_text, subword_nmt
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.rules import to_theirs

PAD, EOS, UNK = 1, 2, 3
SOURCE, TARGET = 24, 30  # entries of the dictionaries

OPTIONS = {
    "arch": "transformer_wmt_en_de",
    "task": "translation",
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 20,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "decoder_normalize_before": False,
    "decoder_learned_pos": False,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": False,
    "activation_fn": "relu",
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "relu_dropout": 0.2,
    "max_source_positions": 40,
    "max_target_positions": 40,
    "adaptive_softmax_cutoff": None,
    "encoder_layers_to_keep": None,
    "encoder_layerdrop": 0.1,
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
    # of the training
    "lr": [0.001],
    "no_progress_bar": True,
    "adam_betas": "(0.9, 0.98)",
    "max_tokens": 4096,
}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}

# The network


def positions(tokens):
    """Return positions: padding has position 1, and real tokens count from 2."""
    real = (tokens != PAD).long()
    return real.cumsum(1) * real + PAD


class Sinusoids(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("_float_tensor", torch.zeros(1))
        self.width = width

    def forward(self, tokens):
        half = self.width // 2
        rates = torch.tensor([10000 ** (-i / (half - 1)) for i in range(half)])
        angles = positions(tokens)[..., None] * rates
        return torch.cat((angles.sin(), angles.cos()), -1) * (tokens != PAD)[..., None]


class Learned(nn.Embedding):
    def forward(self, tokens):
        return super().forward(positions(tokens))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x, source, hidden):
        q, k, v = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, y in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, options, stack):
        super().__init__()
        width, heads = options["encoder_embed_dim"], options[f"{stack}_attention_heads"]
        inner = options[f"{stack}_ffn_embed_dim"]
        self.first = options[f"{stack}_normalize_before"]
        self.activation = ACTIVATIONS[options["activation_fn"]]
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        if stack == "decoder":
            self.encoder_attn = Attention(width, heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def around(self, x, norm, part):
        return x + part(norm(x)) if self.first else norm(x + part(x))

    def forward(self, x, hidden, source=None, source_hidden=None):
        x = self.around(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, hidden))
        if source is not None:
            x = self.around(
                x,
                self.encoder_attn_layer_norm,
                lambda y: self.encoder_attn(y, source, source_hidden),
            )
        return self.around(
            x, self.final_layer_norm, lambda y: self.fc2(self.activation(self.fc1(y)))
        )


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_accurate": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


class Stack(nn.Module):
    def __init__(self, options, stack, entries, final_norm=True):
        super().__init__()
        width = options["encoder_embed_dim"]
        self.scale = 1.0 if options.get("no_scale_embedding") else math.sqrt(width)
        self.register_buffer("version", torch.tensor([3.0]))
        self.embed_tokens = nn.Embedding(entries, width)
        longest = options[f"max_{'source' if stack == 'encoder' else 'target'}_positions"]
        learned = options[f"{stack}_learned_pos"]
        self.embed_positions = Learned(longest + PAD + 1, width) if learned else Sinusoids(width)
        self.layers = nn.ModuleList(
            Layer(options, stack) for _ in range(options[f"{stack}_layers"])
        )
        if options[f"{stack}_normalize_before"] and final_norm:
            self.layer_norm = nn.LayerNorm(width)

    def embed(self, tokens):
        return self.scale * self.embed_tokens(tokens) + self.embed_positions(tokens)

    def end(self, x):
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


class Fairseq(nn.Module):
    """The network with fairseq's names, and random biases and norms."""

    def __init__(self, options, source=SOURCE, target=TARGET, final_norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.encoder = Stack(options, "encoder", source, final_norm)
        self.decoder = Stack(options, "decoder", target, final_norm)
        width = options["encoder_embed_dim"]
        self.decoder.output_projection = nn.Linear(width, target, bias=False)
        with torch.no_grad():
            for name, tensor in self.named_parameters():
                if "norm.weight" in name:
                    tensor.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    tensor.normal_(0, 0.3)
                elif "embed" in name or "output" in name:
                    tensor.normal_(0, width**-0.5)
        if options["share_all_embeddings"]:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        if options["share_all_embeddings"] or options["share_decoder_input_output_embed"]:
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        self.eval()

    @torch.no_grad()
    def forward(self, source, target):
        hidden = (source == PAD)[:, None]
        x = self.encoder.embed(source)
        for layer in self.encoder.layers:
            x = layer(x, hidden)
        memory = self.encoder.end(x)
        length = target.shape[1]
        future = torch.ones(length, length).triu(1).bool()
        y = self.decoder.embed(target)
        for layer in self.decoder.layers:
            y = layer(y, future | (target == PAD)[:, None], memory, hidden)
        return self.decoder.output_projection(self.decoder.end(y))


def checkpoint(path, network, args=None, cfg=None, model=None, zipped=True, **others):
    """Save a checkpoint as fairseq's trainer does. `others` replace parts of it."""
    args = Namespace(**network.options) if args is None and cfg is None else args
    model = dict(network.state_dict()) if model is None else model
    state = {
        "args": args,
        "cfg": cfg,
        "model": model,
        "criterion": None,
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 7}],
        "task_state": {},
        "extra_state": {"metrics": [(0, "loss", "AverageMeter", {"sum": 1.5})], "best": 1.0},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.rand(3)}}, "param_groups": []},
    }
    torch.save(state | others, path, _use_new_zipfile_serialization=zipped)
    return path


def batch(seed=0, source=SOURCE, target=TARGET):
    """Return sources padded on the left, as in fairseq, and on the right, and decoder inputs."""
    generator = torch.Generator().manual_seed(seed)
    lengths, target_lengths = [7, 2, 5, 1], [4, 6, 1, 3]
    left = torch.full((4, 7), PAD)
    right, outputs = left.clone(), torch.full((4, 6), PAD)
    for row, (n, m) in enumerate(zip(lengths, target_lengths, strict=True)):
        words = torch.randint(UNK, source, (n,), generator=generator)
        words[-1] = EOS
        left[row, 7 - n :] = right[row, :n] = words
        outputs[row, :m] = torch.randint(UNK, target, (m,), generator=generator)
        outputs[row, 0] = EOS
    return left, right, outputs


def assert_same_logits(network, model, target=TARGET, source=SOURCE):
    left, right, outputs = batch(source=source, target=target)
    expected = network(left, outputs)
    with torch.no_grad():
        logits = model(right, (right != PAD).long(), decoder_input_ids=outputs).logits
    torch.testing.assert_close(logits[outputs != PAD], expected[outputs != PAD], rtol=0, atol=1e-5)


VARIANTS = {
    "post-norm, separate vocabularies": {},
    "pre-norm, one table": PRE_NORM | {"share_all_embeddings": True},
    "learned positions": LEARNED
    | {"share_decoder_input_output_embed": True, "activation_fn": "gelu_accurate"},
    "pre-norm, learned, unscaled": PRE_NORM
    | LEARNED
    | {"no_scale_embedding": True, "activation_fn": "gelu"},
    "other activations": {"activation_fn": "tanh", "encoder_layers": 1},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_folder_gives_the_logits_of_the_checkpoint_under_padding(tmp_path, changes):
    target = SOURCE if changes.get("share_all_embeddings") else TARGET
    network = Fairseq(OPTIONS | changes, target=target)
    fairseq.convert(checkpoint(tmp_path / "a.pt", network), tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert_same_logits(network, model, target)
    assert model.config.dropout == 0.3
    assert model.config.attention_dropout == 0.1
    assert model.config.activation_dropout == 0.2


def test_fairseqs_sinusoids_and_offset_are_not_the_papers(tmp_path):
    network = Fairseq(OPTIONS)
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network)).model
    assert model.config.position_encoding == "sinusoidal_t2t"
    for field, value in (("position_encoding", "sinusoidal"), ("position_offset", 0)):
        config = type(model.config)(**model.config.to_dict() | {field: value})
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        with pytest.raises(AssertionError):
            assert_same_logits(network, other)


def old_names(model, shared=False):
    """Return weights with names before fairseq 0.7: joined q, k, v, numbered norms, embed_out."""
    old = {}
    norms = {"encoder": ("self_attn", "final"), "decoder": ("self_attn", "encoder_attn", "final")}
    for name, tensor in model.items():
        stack = name.split(".")[0]
        if found := re.fullmatch(r"(.*_attn)\.q_proj\.(weight|bias)", name):
            parts = [model[f"{found[1]}.{part}_proj.{found[2]}"] for part in "qkv"]
            old[f"{found[1]}.in_proj_{found[2]}"] = torch.cat(parts)
        elif found := re.fullmatch(r"(.*)\.(\w+)_layer_norm\.(\w+)", name):
            number = norms[stack].index(found[2])
            old[f"{found[1]}.layer_norms.{number}.{found[3]}"] = tensor
        elif name == "decoder.output_projection.weight":
            old |= {} if shared else {"decoder.embed_out": tensor}
        elif not re.search(r"\.[kv]_proj\.|version", name):
            old[name] = tensor
    return old | {"encoder.embed_positions.weights": torch.rand(5, 16)}


@pytest.mark.parametrize("shared", [False, True])
def test_the_oldest_names_and_files_give_the_same_model(tmp_path, shared):
    options = OPTIONS | {"share_decoder_input_output_embed": shared}
    del options["task"]
    network = Fairseq(options)
    model = old_names(dict(network.state_dict()), shared)
    assert "encoder.layers.0.layer_norms.1.bias" in model
    path = checkpoint(tmp_path / "a.pt", network, model=model, zipped=False)
    assert_same_logits(network, fairseq.load(path).model)


def test_copies_that_fairseq_makes_for_its_fast_path_are_dropped(tmp_path):
    network = Fairseq(OPTIONS)
    model = dict(network.state_dict())
    for layer in range(2):
        for name in ("in_proj", "out_proj", "fc1", "fc2"):
            model[f"encoder.layers.{layer}.{name}_weight"] = torch.zeros(3, 3)
            model[f"encoder.layers.{layer}.{name}_bias"] = torch.zeros(3)
    converted = fairseq.load(checkpoint(tmp_path / "a.pt", network, model=model))
    assert_same_logits(network, converted.model)


def test_the_rules_give_the_current_names_back_bit_by_bit(tmp_path):
    network = Fairseq(OPTIONS)
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network)).model
    theirs = to_theirs(fairseq.RULES, dict(model.state_dict()))
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.endswith(("version", "_float_tensor"))
    }
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())


def grouped(options):
    """Return the options of a model in the groups of fairseq's dataclasses."""
    names = [name for name in options if re.match(r"encoder_|decoder_", name)]
    groups = {"encoder": {"_name": None}, "decoder": {"_name": None}}
    for name in names:
        stack, inner = name.split("_", 1)
        groups[stack][inner] = options[name]
    training = {"arch", "task", "criterion", "label_smoothing", "lr", "adam_betas", "max_tokens"}
    training |= {"no_progress_bar", *names}
    model = {name: value for name, value in options.items() if name not in training}
    groups["decoder"] |= dict.fromkeys(("input_dim", "output_dim"), "${model.decoder.embed_dim}")
    return {"_name": "transformer", **model, **groups, "quant_noise": {"pq": 0, "scalar": 0}}


def config(model):
    return {
        "_name": None,
        "common": {"seed": 1},
        "model": model,
        "task": {"_name": "translation", "source_lang": "de"},
        "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    }


@pytest.mark.parametrize("form", ["namespace", "groups", "nodes", "nodes around a namespace"])
def test_options_are_read_from_cfg_in_all_its_forms(tmp_path, form):
    network = Fairseq(OPTIONS | PRE_NORM)
    if form == "groups":
        cfg = config(grouped(network.options))
    elif form == "namespace":
        cfg = config(Namespace(**network.options, _name=OPTIONS["arch"]))
    else:
        omegaconf = pytest.importorskip("omegaconf", reason="writes such checkpoints")
        model = grouped(network.options)
        if form != "nodes":
            model = Namespace(**network.options)
        cfg = omegaconf.OmegaConf.create(config(model), flags={"allow_objects": True})
    path = checkpoint(tmp_path / "a.pt", network, cfg=cfg)
    model = fairseq.load(path).model
    assert_same_logits(network, model)
    assert model.config.label_smoothing == pytest.approx(0.1 * TARGET / (TARGET - 1))


def test_an_architecture_says_what_options_do_not():
    # embed_dim, ffn_embed_dim, heads, layers, pre-norm, dropouts
    expected = {
        "transformer": (512, 2048, 8, 6, False, 0.1, 0, 0),
        "transformer_tiny": (64, 64, 2, 2, False, 0.1, 0, 0),
        "transformer_iwslt_de_en": (512, 1024, 4, 6, False, 0.1, 0, 0),
        "transformer_wmt_en_de": (512, 2048, 8, 6, False, 0.1, 0, 0),
        "transformer_vaswani_wmt_en_de_big": (1024, 4096, 16, 6, False, 0.3, 0, 0),
        "transformer_vaswani_wmt_en_fr_big": (1024, 4096, 16, 6, False, 0.1, 0, 0),
        "transformer_wmt_en_de_big": (1024, 4096, 16, 6, False, 0.3, 0.1, 0),
        "transformer_wmt_en_de_big_t2t": (1024, 4096, 16, 6, True, 0.3, 0.1, 0.1),
    }
    for name, numbers in expected.items():
        options = fairseq_options._with_defaults({"arch": name})
        for stack in ("encoder", "decoder"):
            names = ("embed_dim", "ffn_embed_dim", "attention_heads", "layers", "normalize_before")
            assert tuple(options.get(f"{stack}_{n}", False) for n in names) == numbers[:5]
        names = ("dropout", "attention_dropout", "activation_dropout")
        assert tuple(options.get(n, 0) for n in names) == numbers[5:]
    assert (
        fairseq_options._with_defaults({"arch": "transformer", "encoder_embed_dim": 8})[
            "decoder_embed_dim"
        ]
        == 8
    )


def test_the_training_loss_is_fairseqs_label_smoothed_cross_entropy(tmp_path):
    options = OPTIONS | dict.fromkeys(("dropout", "attention_dropout", "relu_dropout"), 0.0)
    network = Fairseq(options)
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network)).model.train()
    left, right, outputs = batch()
    labels = torch.cat((outputs[:, 1:], torch.full((4, 1), PAD)), 1)
    log_probabilities = network(left, outputs).log_softmax(-1)[labels != PAD]
    right_ones = F.nll_loss(log_probabilities, labels[labels != PAD])
    spread = 0.1 / (TARGET - 1)
    expected = (1 - 0.1 - spread) * right_ones - spread * log_probabilities.sum(-1).mean()
    loss = model(
        right,
        (right != PAD).long(),
        decoder_input_ids=outputs,
        labels=labels.masked_fill(labels == PAD, -100),
    ).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    cross_entropy = OPTIONS | {"criterion": "cross_entropy"}
    model = fairseq.load(checkpoint(tmp_path / "b.pt", Fairseq(cross_entropy))).model
    assert model.config.label_smoothing == 0


# Errors

REFUSED = [
    ({"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff 10,20"),
    ({"adaptive_input": True}, "--adaptive-input"),
    ({"encoder_layers_to_keep": "0,2"}, "--encoder-layers-to-keep 0,2"),
    ({"decoder_layers_to_keep": "1"}, "--decoder-layers-to-keep 1"),
    ({"no_token_positional_embeddings": True}, "--no-token-positional-embeddings"),
    ({"layernorm_embedding": True}, "--layernorm-embedding"),
    ({"no_cross_attention": True}, "--no-cross-attention"),
    ({"cross_self_attention": True}, "--cross-self-attention"),
    ({"char_inputs": True}, "--char-inputs"),
    ({"quant_noise_pq": 0.1}, "--quant-noise-pq 0.1"),
    ({"base_layers": 1}, "--base-layers 1"),
    ({"encoder_xformers_att_config": "{}"}, "--encoder-xformers-att-config {}"),
    ({"decoder_output_dim": 8}, "--decoder-output-dim 8 with --decoder-embed-dim 16"),
    ({"decoder_input_dim": 8}, "--decoder-input-dim 8 with --decoder-embed-dim 16"),
    ({"decoder_embed_dim": 8}, "--decoder-embed-dim 8 with --encoder-embed-dim 16"),
    ({"activation_fn": "swish"}, "--activation-fn swish"),
    ({"arch": "bart_large"}, "--arch bart_large"),
    ({"task": "multilingual_translation"}, "--task multilingual_translation"),
    ({"encoder_learned_pos": True}, "--encoder-learned-pos without --decoder-learned-pos"),
    (
        {"decoder_normalize_before": True},
        "--decoder-normalize-before without --encoder-normalize-before",
    ),
    (PRE_NORM | {"no_decoder_final_norm": True}, "--no-decoder-final-norm"),
    (LEARNED | {"max_target_positions": 9}, "--max-target-positions 9"),
    # options that fairseq 0.12 does not have
    ({"moe_freq": 2}, "--moe-freq 2"),
    ({"scale_heads": True}, "--scale-heads"),
    ({"max_relative_position": 4}, "--max-relative-position 4"),
    ({"decoder_langtok": True}, "--decoder-langtok"),
    ({"use_alibi": True}, "--use-alibi"),
    ({"deepnorm": True}, "--deepnorm"),
    ({"rel_pos_buckets": 32}, "--rel-pos-buckets 32"),
]


@pytest.mark.parametrize(("changes", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_this_model_does_not_compute_is_refused_by_its_name(tmp_path, changes, name):
    network = Fairseq(OPTIONS)
    path = checkpoint(tmp_path / "a.pt", network, Namespace(**OPTIONS | changes))
    with pytest.raises(ConversionError, match=re.escape(name)):
        fairseq.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture_is_refused_by_its_name_whatever_its_weights_are(tmp_path):
    network = Fairseq(OPTIONS)
    model = {f"models.de-en.{name}": tensor for name, tensor in network.state_dict().items()}
    options = Namespace(**OPTIONS | {"arch": "multilingual_transformer_iwslt_de_en"})
    path = checkpoint(tmp_path / "a.pt", network, options, model=model)
    with pytest.raises(ConversionError, match="--arch multilingual_transformer_iwslt_de_en"):
        fairseq.load(path)


def test_all_reasons_are_given_at_once(tmp_path):
    changes = {"arch": "x", "layernorm_embedding": True, "moe_freq": 2, "decoder_input_dim": 3}
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS), Namespace(**OPTIONS | changes))
    with pytest.raises(ConversionError) as error:
        fairseq.load(path)
    for name in ("--arch x", "--layernorm-embedding", "--moe-freq 2", "--decoder-input-dim 3"):
        assert name in str(error.value)


def test_an_option_of_the_model_that_nobody_knows_is_refused_and_unset_ones_are_not(tmp_path):
    network = Fairseq(OPTIONS)
    unset = {"encoder_novelty": None, "decoder_novelty": False, "moe_novelty": 0}
    fairseq.load(checkpoint(tmp_path / "a.pt", network, Namespace(**OPTIONS | unset)))
    path = checkpoint(tmp_path / "b.pt", network, cfg=config(grouped(OPTIONS) | {"novelty": 3}))
    with pytest.raises(ConversionError, match="--novelty 3"):
        fairseq.load(path)


def test_the_oldest_pre_norm_models_end_without_a_norm(tmp_path):
    network = Fairseq(OPTIONS | PRE_NORM, final_norm=False)
    model = dict(network.state_dict())
    model |= {"encoder.version": torch.tensor([1.0]), "decoder.version": torch.tensor([2.0])}
    converted = fairseq.load(checkpoint(tmp_path / "a.pt", network, model=model)).model
    assert_same_logits(network, converted)
    model["encoder.version"] += 2
    with pytest.raises(ConversionError, match="after only one stack"):
        fairseq.load(checkpoint(tmp_path / "b.pt", network, model=model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder.alien.weight": torch.zeros(2)}, r"encoder\.alien\.weight"),
        ({"decoder.output_projection.bias": torch.zeros(2)}, r"output_projection\.bias"),
        ({"decoder.layers.0.fc1.weight": torch.zeros(2, 2)}, r"fc1\.weight has the shape \(2, 2\)"),
        ({"encoder.layers.1.fc2.bias": None}, r"encoder\.layers\.1\.fc2\.bias is missing"),
        ({"encoder.embed_tokens.weight": None}, r"no encoder\.embed_tokens\.weight"),
        ({"encoder.version": "three"}, "no weights"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(tmp_path, changes, message):
    network = Fairseq(OPTIONS)
    model = {k: v for k, v in {**network.state_dict(), **changes}.items() if v is not None}
    path = checkpoint(tmp_path / "a.pt", network, model=model)
    with pytest.raises(ConversionError, match=message):
        fairseq.convert(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    "state",
    [
        [1],
        {"model": {}},
        {"weights": {}},
        {"model": Namespace()},
        {"args": Namespace(**OPTIONS), "model": 3},
    ],
)
def test_other_files_are_refused(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"a\.pt"):
        fairseq.load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_layers": "many"},
        {"encoder_embed_dim": [16]},
        {"dropout": "x"},
        {"activation_fn": ["relu"]},
        {"encoder_attention_heads": 3},
        {"encoder_layers": -1},
        {"arch": ["transformer"]},
        {"label_smoothing": {}},
        {"max_target_positions": Namespace()},
        {"encoder_ffn_embed_dim": 10**15},
    ],
)
def test_damaged_options_are_a_clear_error(tmp_path, changes):
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS), Namespace(**OPTIONS | changes))
    with pytest.raises(ConversionError, match=r"a\.pt|\(1000000000000000, 16\)"):
        fairseq.load(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [(os.system, ["touch trace"]), (eval, ["open('trace', 'w')"]), (getattr, [os, "system"])],
)
def test_hostile_checkpoints_are_refused_wherever_it_hides_and_not_run(
    tmp_path, monkeypatch, function, arguments, zipped
):
    monkeypatch.chdir(tmp_path)
    network, options = Fairseq(OPTIONS), Namespace(**OPTIONS)
    arguments = [Hostile(__import__, "os") if one is os else one for one in arguments]
    evil = Hostile(function, *arguments)
    name = r"(posix|nt)\.system" if function is os.system else r"eval|getattr|__import__"
    for hidden in (
        {"args": Namespace(**OPTIONS, user_dir=evil)},
        {"cfg": config(options) | {"evil": evil}},
        {"model": {**network.state_dict(), "x": evil}},
        {"optimizer_history": [{"lr_scheduler_state": {"best": [None, (1.0, evil)]}}]},
        {"extra_state": {"train_iterator": {"epoch": 1}, "metrics": [(0, "loss", evil)]}},
        {"last_optimizer_state": {"state": {0: {evil: torch.rand(3)}}}},
    ):
        path = checkpoint(tmp_path / "a.pt", network, zipped=zipped, **hidden)
        with pytest.raises(ConversionError, match=rf"holds ({name}), .*could run code"):
            fairseq.convert(path, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


# Decoding


def fairseqs_beam_search(network, source, beams=5, lenpen=1.0, normalized=True, least=1, limit=200):
    """Return the best hypothesis of one sentence and its score, by fairseq's rules."""
    open_ones, finished = [(0.0, [EOS])], []
    for step in range(limit + 1):
        tokens = torch.tensor([tokens for _, tokens in open_ones])
        log_probabilities = network(source.expand(len(tokens), -1), tokens)[:, -1].log_softmax(-1)
        log_probabilities[:, PAD] = -torch.inf
        if step < least:
            log_probabilities[:, EOS] = -torch.inf
        sums = log_probabilities + torch.tensor([score for score, _ in open_ones])[:, None]
        scores, best = sums.flatten().topk(2 * beams)
        candidates = [
            (score, open_ones[index // sums.shape[1]][1] + [index % sums.shape[1]])
            for score, index in zip(scores.tolist(), best.tolist(), strict=True)
        ]
        for score, tokens in candidates[:beams]:
            if tokens[-1] == EOS and len(finished) < beams:
                finished.append((score / (step + 1) ** (lenpen * normalized), tokens[1:]))
        if len(finished) == beams:
            return max(finished)
        open_ones = [c for c in candidates if c[1][-1] != EOS][:beams]
    raise AssertionError("the sentence was cut off")


@pytest.mark.parametrize(("scale", "shift"), [(1, 2), (2, 1)], ids=["short", "long"])
def test_generate_finds_what_fairseq_generate_finds(tmp_path, scale, shift):
    network = Fairseq(OPTIONS)
    with torch.no_grad():  # make ends and padding likely
        bias = network.decoder.layers[-1].final_layer_norm.bias
        network.decoder.output_projection.weight *= scale
        network.decoder.output_projection.weight[[PAD, EOS]] += shift * bias
    fairseq.convert(checkpoint(tmp_path / "a.pt", network), tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    _, right, _ = batch()
    mask = (right != PAD).long()
    outputs = model.generate(
        right, attention_mask=mask, return_dict_in_generate=True, output_scores=True
    )
    for row, length in enumerate(mask.sum(1).tolist()):
        score, tokens = fairseqs_beam_search(network, right[row : row + 1, :length])
        assert outputs.sequences[row, 1 : len(tokens) + 1].tolist() == tokens
        assert (outputs.sequences[row, len(tokens) + 1 :] == PAD).all()
        assert outputs.sequences_scores[row].item() == pytest.approx(score, abs=1e-5)


def a_search(**changes):
    return {"generation": {"_name": None, "beam": 5, "lenpen": 1, "nbest": 1, **changes}}


SEARCHES = [
    ({"beam": 2, "lenpen": 0.3}, {"beams": 2, "lenpen": 0.3}),
    ({"unnormalized": True, "lenpen": 2.0}, {"normalized": False}),
    ({"min_len": 4, "beam": 3}, {"least": 4, "beams": 3}),
]


@pytest.mark.parametrize(("options", "rules"), SEARCHES, ids=str)
def test_options_of_the_search_that_a_checkpoint_holds_are_fairseqs(tmp_path, options, rules):
    network = Fairseq(OPTIONS)
    with torch.no_grad():
        bias = network.decoder.layers[-1].final_layer_norm.bias
        network.decoder.output_projection.weight[[PAD, EOS]] += 2 * bias
    cfg = config(grouped(OPTIONS)) | a_search(**options)
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network, cfg=cfg)).model
    _, right, _ = batch()
    mask = (right != PAD).long()
    outputs = model.generate(right, attention_mask=mask, return_dict_in_generate=True)
    for row, length in enumerate(mask.sum(1).tolist()):
        score, tokens = fairseqs_beam_search(network, right[row : row + 1, :length], **rules)
        assert outputs.sequences[row, 1 : len(tokens) + 1].tolist() == tokens
        assert outputs.sequences_scores[row].item() == pytest.approx(score, abs=1e-5)


def test_max_len_a_and_b_limit_each_sentence_where_fairseq_ends_it_alone(tmp_path):
    network = Fairseq(OPTIONS | {"decoder_layers": 1})
    with torch.no_grad():  # a norm that leaves a constant, and an end that it makes unlikely
        norm = network.decoder.layers[0].final_layer_norm
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        network.decoder.output_projection.weight[EOS] = -9.0
    for a, b in ((1.2, 3), (0.29, 5), (0, 6), (2, 0)):
        cfg = config(grouped(network.options)) | a_search(max_len_a=a, max_len_b=b)
        model = fairseq.load(checkpoint(tmp_path / "a.pt", network, cfg=cfg)).model
        sources = [[5, EOS], [5, 6, 7, 8, EOS], [5, 6, 7, EOS]]
        padded = torch.tensor([row + [PAD] * (5 - len(row)) for row in sources])
        outputs = model.generate(padded, attention_mask=(padded != PAD).long()).tolist()
        for source, output in zip(sources, outputs, strict=True):
            limit = int(a * len(source) + b)  # words before the end token
            assert EOS not in output[1 : 1 + limit]
            assert output[1 + limit :] == [EOS] + [PAD] * (len(output) - limit - 2)


def test_options_of_the_search_without_a_counterpart_are_named(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(fairseq_options.logger, "warning", warnings.append)
    network = Fairseq(OPTIONS)
    off = {"temperature": 1.0, "sampling": False, "diverse_beam_groups": -1, "constraints": None}
    cfg = config(grouped(OPTIONS)) | a_search(**off)
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network, cfg=cfg)).model
    assert not warnings
    usual = fairseq.load(checkpoint(tmp_path / "b.pt", network)).model
    assert model.generation_config.to_dict() == usual.generation_config.to_dict()
    cfg |= a_search(temperature=0.7, no_repeat_ngram_size=3)
    fairseq.load(checkpoint(tmp_path / "a.pt", network, cfg=cfg))
    assert "not carried over: no_repeat_ngram_size 3, temperature 0.7" in warnings[0]


@pytest.mark.parametrize("longest", [9, 1024])
def test_a_sentence_that_does_not_end_gets_an_end_where_fairseq_puts_it(tmp_path, longest):
    network = Fairseq(OPTIONS | {"max_target_positions": longest, "decoder_layers": 1})
    with torch.no_grad():  # a norm that leaves a constant, and an end that it makes unlikely
        norm = network.decoder.layers[0].final_layer_norm
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        network.decoder.output_projection.weight[EOS] = -9.0
    model = fairseq.load(checkpoint(tmp_path / "a.pt", network)).model
    (tokens,) = model.generate(torch.tensor([[5, EOS]])).tolist()
    assert len(tokens) == 1 + min(200, longest - 1) + 1
    assert tokens[-1] == EOS


# Text

WORDS = ["the", "hou@@", "se", "is", "@-@", ",", "w\u00e4", "@@", "<pad>x", "\u200b"]


def dictionary(path, words, extra=""):
    path.write_text("".join(f"{word} 1\n" for word in words) + extra, encoding="utf-8")
    return path


def looked_up(line, words):
    """Return the ids of fairseq's Dictionary.encode_line, except for control symbols."""
    ids = {word: number for number, word in enumerate(words, start=4)}
    return [ids.get(word, UNK) for word in re.sub(r"\s+", " ", line).strip().split()] + [EOS]


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    words = [*WORDS, *(f"w{n}" for n in range(SOURCE - 4 - len(WORDS)))]
    network = Fairseq(OPTIONS | {"share_all_embeddings": True}, target=SOURCE)
    fairseq.convert(
        checkpoint(folder / "a.pt", network),
        folder / "out",
        source_dict=dictionary(folder / "dict.de.txt", words),
        remove_bpe=True,
    )
    assert not (folder / "out" / "target_tokenizer").exists()
    return words, AutoTokenizer.from_pretrained(folder / "out")


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from([*WORDS, "unseen", "The", "</w>", "\\", "\u00e9"]) | st.text(max_size=3)
    ),
    st.sampled_from([" ", "  ", "\t", "\u00a0", "\u3000", "\x1c", "\n", "\u2028"]),
)
def test_words_are_looked_up_as_in_fairseqs_dictionary(word_tokenizer, parts, space):
    words, tokenizer = word_tokenizer
    line = space.join(parts)
    assert tokenizer(line)["input_ids"] == looked_up(line, words)
    assert tokenizer(text_target=line)["input_ids"] == looked_up(line, words)


def test_words_end_at_every_space_that_python_knows_and_at_nothing_else(word_tokenizer):
    words, tokenizer = word_tokenizer
    lines = [f"the{chr(code)}is" for code in range(0x3100)]
    assert tokenizer(lines)["input_ids"] == [looked_up(line, words) for line in lines]


def test_control_symbols_written_in_a_text_are_unknown_words(word_tokenizer):
    _, tokenizer = word_tokenizer
    ids = tokenizer("<s> the</s> <pad>\u00a0</s>\t<unk> <pad>x the")["input_ids"]
    assert ids == [UNK, UNK, UNK, UNK, UNK, 12, 4, EOS]


def test_decoding_joins_words_and_what_bpe_separated(word_tokenizer):
    words, tokenizer = word_tokenizer
    text = "hou@@ hou@@ se is the @-@ the ,"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode([0, *ids, PAD], skip_special_tokens=True) == "houhouse is the @-@ the ,"
    assert tokenizer.decode(ids[:1], skip_special_tokens=True) == "hou"
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        words[0],
    ]


def test_an_unknown_word_is_printed_as_by_fairseq_or_skipped_and_joins_nothing(word_tokenizer):
    _, tokenizer = word_tokenizer
    for words, printed, skipped in (
        ("hou@@ <unk> se", "hou<unk> se", "hou se"),
        ("hou@@ hou@@ <unk> <unk> se the", "houhou<unk> <unk> se the", "houhou se the"),
        ("<unk> hou@@ se", "<unk> house", "house"),
        ("hou@@ <unk>", "hou<unk>", "hou"),
        ("<unk>", "<unk>", ""),
        ("", "", ""),
    ):
        assert (words + " ").replace("@@ ", "").rstrip() == printed  # fairseq's rule
        ids = [*tokenizer.convert_tokens_to_ids(words.split()), PAD]
        assert tokenizer.decode(ids[:-1]) == printed
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
        assert tokenizer.batch_decode(torch.tensor([ids]), skip_special_tokens=True) == [skipped]
    assert tokenizer.decode(UNK, skip_special_tokens=True) == ""


def test_two_dictionaries_make_two_tokenizers(tmp_path):
    source = dictionary(tmp_path / "dict.de.txt", [f"d{n}" for n in range(SOURCE - 4)])
    target = dictionary(tmp_path / "dict.en.txt", [f"e{n}" for n in range(TARGET - 4)])
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS))
    fairseq.convert(path, tmp_path / "out", source_dict=source, target_dict=target)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert tokenizer("d3 e3")["input_ids"] == [7, UNK, EOS]
    assert own("d3 e3 e25")["input_ids"] == [UNK, 7, 29, EOS]
    assert (len(tokenizer), len(own)) == (SOURCE, TARGET)
    with pytest.raises(ConversionError, match=r"dict\.de\.txt makes 24 .* target embedding has 30"):
        fairseq.load(path, source_dict=source)
    with pytest.raises(ConversionError, match=r"24 .* target.*30 .* source|30 .* source.*24"):
        fairseq.load(path, source_dict=target, target_dict=source)


def test_shared_embeddings_need_one_dictionary(tmp_path):
    network = Fairseq(OPTIONS | {"share_all_embeddings": True}, target=SOURCE)
    path = checkpoint(tmp_path / "a.pt", network)
    names = [f"w{n}" for n in range(SOURCE - 4)]
    left, right = (
        dictionary(tmp_path / f"{n}.txt", words) for n, words in enumerate((names, names[::-1]))
    )
    with pytest.raises(ConversionError, match="differ, but share their embeddings"):
        fairseq.load(path, source_dict=left, target_dict=right)
    assert fairseq.load(path, source_dict=left, target_dict=left).target_tokenizer is None
    assert fairseq.load(path, target_dict=left).tokenizer is not None


def test_one_dictionary_is_not_taken_for_both_sides_of_separate_embeddings(tmp_path):
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS, target=SOURCE))
    file = dictionary(tmp_path / "dict.de.txt", [f"w{n}" for n in range(SOURCE - 4)])
    for files in ({"source_dict": file}, {"target_dict": file}):
        with pytest.raises(
            ConversionError, match=r"dict\.de\.txt alone .* a joint dictionary as both"
        ):
            fairseq.load(path, **files)
    assert fairseq.load(path, source_dict=file, target_dict=file).target_tokenizer is None


def test_an_odd_width_is_refused_in_a_sentence_unless_positions_are_learned(tmp_path):
    sizes = {"encoder_embed_dim": 15, "decoder_embed_dim": 15}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5}
    network = Fairseq(OPTIONS | LEARNED | sizes)
    assert_same_logits(network, fairseq.load(checkpoint(tmp_path / "a.pt", network)).model)
    network.options.update(encoder_learned_pos=False, decoder_learned_pos=False)
    with pytest.raises(ConversionError) as error:
        fairseq.load(checkpoint(tmp_path / "a.pt", network))
    assert "--encoder-embed-dim 15 (odd, without learned positions)" in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_contradict_each_other_are_one_sentence(tmp_path):
    path = checkpoint(
        tmp_path / "a.pt", Fairseq(OPTIONS), Namespace(**OPTIONS | {"encoder_attention_heads": 3})
    )
    with pytest.raises(ConversionError, match=r"make no model: d_model \(16\) must be a multiple"):
        fairseq.load(path)


def test_lines_of_a_dictionary_may_end_as_on_other_systems(tmp_path):
    (tmp_path / "a").write_bytes(b"one 1\r\ntwo 2\r\n")
    assert fairseq_text.read_dictionary(tmp_path / "a")[4:] == ["one", "two"]


def test_a_later_line_may_replace_an_earlier_entry(tmp_path):
    path = dictionary(tmp_path / "a", ["one", "two"], "one 7 #fairseq:overwrite\nthree 1\n")
    assert fairseq_text.read_dictionary(path)[4:] == ["one", "two", "one", "three"]
    tokenizer = fairseq_text.read_vocabulary(path, None, None, False).tokenizer()
    assert tokenizer("one two three")["input_ids"] == [6, 5, 7, EOS]
    assert len(tokenizer) == 8


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("one 5\n", r"line 3: there is an entry 'one'"),
        ("</s> 5 #fairseq:overwrite\n", "line 3: there is an entry '</s>'"),
        ("word\n", r"line 3 is not an entry with its count: 'word'"),
        ("word five\n", "line 3"),
        ("\n", "line 3"),
    ],
)
def test_a_dictionary_that_fairseq_would_not_read_is_refused(tmp_path, extra, message):
    path = dictionary(tmp_path / "dict.txt", ["one", "two"], extra)
    with pytest.raises(ConversionError, match=message):
        fairseq_text.read_dictionary(path)


def test_files_of_text_that_are_missing_or_damaged_are_named(tmp_path):
    path = checkpoint(tmp_path / "a.pt", Fairseq(OPTIONS))
    (tmp_path / "latin").write_bytes(b"\xe4 1\n")
    for name in ("nothing", "latin"):
        with pytest.raises(ConversionError, match=f"{name} cannot be read"):
            fairseq.load(path, source_dict=tmp_path / name)
    with pytest.raises(ConversionError, match="give source_dict"):
        fairseq.load(path, bpe_codes=tmp_path / "latin")


# Byte-pair encoding


def learned_codes(lines, merges):
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe", reason="learns the codes")
    codes = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO("\n".join(lines)), codes, merges)
    return codes.getvalue()


def old_codes(codes):
    """Return codes in subword-nmt's format until 2017, where the end of a word is a symbol."""
    pairs = []
    for line in codes.strip().split("\n")[1:]:
        left, right = line.split(" ")
        if right.endswith("</w>") and right != "</w>":
            pairs.append(f"{right[:-4]} </w>")
        pairs.append(f"{left} {right}")
    return "\n".join(dict.fromkeys(pairs))


def words_over(letters, count, seed, longest=9):
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (), generator=generator))

    return [
        "".join(letters[draw(len(letters))] for _ in range(1 + draw(longest))) for _ in range(count)
    ]


def pair_tokenizer(tmp_path, codes, keep=lambda entry: True, corpus=()):
    """Return the tokenizer of codes and a dictionary, subword-nmt's segmenter, the dictionary."""
    apply_bpe = pytest.importorskip("subword_nmt.apply_bpe", reason="is compared with")
    segmenter = apply_bpe.BPE(io.StringIO(codes))
    entries = sorted({e for e in segmenter.process_line(" ".join(corpus)).split() if keep(e)})
    (tmp_path / "codes").write_text(codes, encoding="utf-8")
    vocabulary = fairseq_text.read_vocabulary(
        dictionary(tmp_path / "dict", entries), tmp_path / "codes", None, False
    )
    vocabulary.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), segmenter, entries


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("letters", ["ab", "abcde", "a\u00e9\u6f22</w>"])
def test_words_are_cut_as_by_subword_nmt_and_only_known_ids_come_out(tmp_path, letters, old):
    corpus = words_over(letters, 400, seed=1)
    codes = learned_codes([" ".join(corpus)], 60)
    codes = old_codes(codes) if old else codes
    codes += "\n" * old + codes.split("\n")[not old]  # repeat a merge, which has no effect
    hidden = set(words_over(letters, 30, seed=3, longest=3))
    tokenizer, segmenter, entries = pair_tokenizer(
        tmp_path, codes, lambda entry: entry.removesuffix("@@") not in hidden, corpus
    )
    assert len(tokenizer) > len(entries) + 4  # merges have results that the dictionary lacks
    lines = [" ".join(words_over(letters + "x\U0001f469", 6, seed=n)) for n in range(5, 155)]
    lines += [*letters, "", " ", "  a  ab ", "a" * 50, "ab" * 40]
    unknown = 0
    for line, ids in zip(lines, tokenizer(lines)["input_ids"], strict=True):
        pieces = segmenter.process_line(line).split()
        assert ids == looked_up(" ".join(pieces), entries)
        unknown += ids.count(UNK)
        known = [piece if piece in entries else "<unk>" for piece in pieces]
        joined = (" ".join(known) + " ").replace("@@ ", "").rstrip()
        assert tokenizer.decode(ids[:-1]) == joined
        skipped = " ".join(joined.replace("<unk>", "").split())
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
    assert unknown > 100


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_learned_codes_cut_any_text_as_subword_nmt_does(tmp_path_factory, data):
    word = st.text(st.sampled_from("abc\u00e9-"), min_size=1, max_size=8)
    corpus = data.draw(st.lists(word, min_size=5, max_size=40))
    corpus += ["ab", "abc"]
    codes = learned_codes([" ".join(corpus * 2)], data.draw(st.integers(1, 30)))
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer, segmenter, entries = pair_tokenizer(folder, codes, corpus=corpus)
    line = " ".join(data.draw(st.lists(word)))
    expected = looked_up(segmenter.process_line(line), entries)
    assert tokenizer(line)["input_ids"] == expected


def test_a_vocabulary_learned_anew_knows_all_of_its_ids(tmp_path):
    corpus = words_over("abc", 100, seed=2)
    codes = learned_codes([" ".join(corpus)], 20)
    tokenizer, _, entries = pair_tokenizer(tmp_path, codes, lambda e: len(e) > 4, corpus)
    assert len(tokenizer) > len(entries) + 4
    new = tokenizer.train_new_from_iterator([" ".join(corpus)] * 9, 200)
    assert UNK not in new(" ".join(corpus))["input_ids"]


def test_codes_of_fastbpe_are_those_of_subword_nmt_with_counts(tmp_path):
    corpus = words_over("abcd", 200, seed=2)
    codes = learned_codes([" ".join(corpus)], 30)
    lines = codes.strip().split("\n")[1:]
    (tmp_path / "fast").write_text("\n".join(f"{line} {99 - n}" for n, line in enumerate(lines)))
    (tmp_path / "subword").write_text(codes)
    assert subword_nmt.read_codes(tmp_path / "fast") == subword_nmt.read_codes(tmp_path / "subword")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ("#version: 0.3\na b\n", "unknown version '0.3'"),
        ("#version: 0.2\na b c\n", "'a b c', which is not a pair"),
        ("#version: 0.2\na\n", "'a', which is not a pair"),
        ("", "'', which is not a pair"),
        # "abc" is merged before the second pair that produces it
        ("#version: 0.2\na b\nab c\nabc a\nb c\na bc\n", "the code a bc"),
    ],
)
def test_codes_that_cannot_be_followed_exactly_are_refused(tmp_path, codes, message):
    (tmp_path / "codes").write_text(codes)
    with pytest.raises(ConversionError, match=message):
        fairseq_text.read_vocabulary(
            dictionary(tmp_path / "dict", ["a", "b"]), tmp_path / "codes", None, False
        ).tokenizer()


def test_codes_and_dictionaries_of_both_sides_end_in_two_tokenizers(tmp_path):
    codes = "#version: 0.2\na b\nab a\nc d</w>\n"
    (tmp_path / "codes").write_text(codes)
    # The merge through "ab" is in neither dictionary.
    source = ["aba@@", "a@@", "a", "b@@", "b", "cd", "c@@", "d"]
    target = ["cd", *source[:-3]]
    sizes = [len(source) + 4 + 12, len(target) + 4 + 24]
    files = [
        dictionary(tmp_path / f"{n}", [*words, *(f"w{i}" for i in range(size - 4 - len(words)))])
        for n, (words, size) in enumerate(zip((source, target), sizes, strict=True))
    ]
    network = Fairseq(OPTIONS, *sizes)
    fairseq.convert(
        checkpoint(tmp_path / "a.pt", network),
        tmp_path / "out",
        source_dict=files[0],
        target_dict=files[1],
        bpe_codes=tmp_path / "codes",
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    text = "abab cd ababa abc"
    # aba@@ b / cd / ab@@ ab@@ a / ab@@ c
    assert tokenizer(text)["input_ids"] == [4, 8, 9, UNK, UNK, 6, UNK, UNK, EOS]
    assert own(text)["input_ids"] == [5, 9, 4, UNK, UNK, 7, UNK, UNK, EOS]
    assert tokenizer.decode([4, 8, 9, EOS], skip_special_tokens=True) == "abab cd"
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    model(
        **tokenizer([text, "a"], padding=True, return_tensors="pt"),
        labels=torch.tensor([own(text)["input_ids"]] * 2),
    )


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_text_is_cut_by_sentencepiece_and_looked_up(tmp_path, kind):
    reason = "cuts the text"
    sentencepiece = pytest.importorskip("sentencepiece", reason=reason)
    pytest.importorskip("google.protobuf", reason="reads SentencePiece's models")
    lines = [" ".join(words_over("abcdefg", 6, seed=n)) for n in range(200)]
    (tmp_path / "text").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        model_type=kind,
        minloglevel=2,
    )
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [cutter.id_to_piece(n) for n in range(3, 60)]
    words = [*pieces[::2], "madeupword0000"]
    vocabulary = fairseq_text.read_vocabulary(
        dictionary(tmp_path / "dict", words), None, tmp_path / "m.model", False
    )
    vocabulary.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for line in [*lines[:50], "", "  a  b ", "aXb XY a"]:
        expected = looked_up(" ".join(cutter.encode(line, out_type=str)), words)
        assert tokenizer(line)["input_ids"] == expected
    for ids in tokenizer(["<s>", "a<pad>", "</s> b"])["input_ids"]:
        assert not {0, PAD, EOS} & set(ids[:-1])


# The command line


def test_the_command_line_converts(tmp_path, capsys):
    network = Fairseq(OPTIONS)
    path = checkpoint(tmp_path / "a.pt", network)
    source = dictionary(tmp_path / "dict.de.txt", [f"d{n}" for n in range(SOURCE - 4)])
    target = dictionary(tmp_path / "dict.en.txt", [f"e{n}" for n in range(TARGET - 4)])
    arguments = ["--source-dict", str(source), "--target-dict", str(target)]
    main(["convert", "fairseq", str(path), str(tmp_path / "out"), *arguments])
    assert_same_logits(network, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"))
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["num_beams"] == 5
    with pytest.raises(SystemExit, match="choose another output folder"):
        main(["convert", "fairseq", str(path), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"no file .*nothing\.pt"):
        main(["convert", "fairseq", str(tmp_path / "nothing.pt"), str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        main(["convert", "fairseq", "--help"])
    assert "layerdrop" in capsys.readouterr().out
