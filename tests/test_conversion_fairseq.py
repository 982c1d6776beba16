"""Conversion of fairseq's checkpoints, compared with our own version of fairseq's code.

The network, search and dictionary of fairseq are written again here. The tests write checkpoints
with fairseq's names and classes, in its old and new layouts.
"""

import json
import os
import re
from argparse import Namespace

import pytest
import torch
from fairseq_models import (
    EOS,
    LEARNED,
    OPTIONS,
    PAD,
    SOURCE,
    TARGET,
    Fairseq,
    assert_same_logits,
    batch,
    checkpoint,
    dictionary,
)
from hostile import Hostile
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM
from vaswani.commands.main import main
from vaswani.conversion import fairseq, fairseq_options
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.rules import to_theirs

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}


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
    of_adafactor = {"optimizer": "adafactor", "scale_parameter": True, "relative_step": True}
    options = Namespace(**OPTIONS | unset | of_adafactor)
    fairseq.load(checkpoint(tmp_path / "a.pt", network, options))
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
