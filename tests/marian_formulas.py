"""Marian's Transformer by its formulas, one sentence at a time, and weights of its layout."""

import math

import numpy as np
import torch

SIZE = 161  # of the vocabularies, including the padding token
OPTIONS = {
    "type": "transformer",
    "dim-vocabs": [SIZE - 1, SIZE - 1],
    "dim-emb": 16,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-depth": 2,
    "dec-depth": 2,
    "dec-cell-base-depth": 2,
    "skip": False,
    "layer-normalization": False,
    "right-left": False,
    "special-vocab": [],
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": True,
    "transformer-heads": 4,
    "transformer-no-projection": False,
    "transformer-dim-ffn": 24,
    "transformer-ffn-depth": 2,
    "transformer-ffn-activation": "swish",
    "transformer-dim-aan": 2048,
    "transformer-aan-depth": 2,
    "transformer-aan-activation": "swish",
    "transformer-aan-nogate": False,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-tied-layers": [],
    "transformer-guided-alignment-layer": "last",
    "transformer-train-position-embeddings": False,
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "ulr": False,
    "ulr-dim-emb": 0,
    "version": "v1.9.0 02f4af4 2020-06-21 23:01:27 +0100",
}


def marian_weights(options):
    """Return random weights with the names and the layout of Marian's transformer."""
    width, inner = options["dim-emb"], options["transformer-dim-ffn"]
    generator = np.random.default_rng(3)
    weights = {}

    def add(name, *shape, mean=0.0):
        weights[name] = generator.normal(mean, 0.25, shape).astype(np.float32)

    def norm(name):
        add(f"{name}_ln_scale{suffix}", 1, width, mean=1.0)
        add(f"{name}_ln_bias{suffix}", 1, width)

    for stack in ("encoder", "decoder"):
        for number in range(1, options["enc-depth" if stack == "encoder" else "dec-depth"] + 1):
            suffix = "_pre" if "n" in options["transformer-preprocess"] else ""
            layer = f"{stack}_l{number}"
            for attention in ("self", "context")[: 1 if stack == "encoder" else 2]:
                for x in "qkvo":
                    add(f"{layer}_{attention}_W{x}", width, width)
                    add(f"{layer}_{attention}_b{x}", 1, width)
                norm(f"{layer}_{attention}_Wo")
            add(f"{layer}_ffn_W1", width, inner)
            add(f"{layer}_ffn_b1", 1, inner)
            add(f"{layer}_ffn_W2", inner, width)
            add(f"{layer}_ffn_b2", 1, width)
            norm(f"{layer}_ffn_ffn")
        if "n" in options.get("transformer-postprocess-top", ""):
            suffix = ""
            norm(f"{stack}_top")
    source, target = options["dim-vocabs"]
    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    if shared:
        add("Wemb", source, width)
    else:
        add("encoder_Wemb", source, width)
        add("decoder_Wemb", target, width)
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        add("decoder_ff_logit_out_W", width, target)
    add("decoder_ff_logit_out_b", 1, target)
    return weights


def marian_logits(weights, options, source, target):
    """Return the logits (T, V) of Marian's formulas for one sentence, in float64."""
    weights = {name: torch.from_numpy(array).double() for name, array in weights.items()}
    width, heads = options["dim-emb"], options["transformer-heads"]
    pre = "n" in options["transformer-preprocess"]

    def norm(x, name):
        scale, bias = weights[f"{name}_ln_scale"], weights[f"{name}_ln_bias"]
        deviation = x - x.mean(-1, keepdim=True)
        return scale * deviation / (deviation.square().mean(-1, keepdim=True) + 1e-6).sqrt() + bias

    def sublayer(x, name, compute):
        if pre:
            normed = {
                f"{name}_ln_{kind}": weights[f"{name}_ln_{kind}_pre"] for kind in ("scale", "bias")
            }
            weights.update(normed)
            return x + compute(norm(x, name))
        return norm(x + compute(x), name)

    def attend(name, queries, keys, mask=None):
        def project(x, kind):
            projected = x @ weights[f"{name}_W{kind}"] + weights[f"{name}_b{kind}"]
            return projected.view(len(x), heads, -1).transpose(0, 1)

        q, k, v = project(queries, "q"), project(keys, "k"), project(keys, "v")
        scores = q @ k.transpose(1, 2) / math.sqrt(width // heads)
        if mask is not None:
            scores = scores + (1 - mask) * -99999999.0
        joined = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return joined @ weights[f"{name}_Wo"] + weights[f"{name}_bo"]

    def activation(x):
        kind = options["transformer-ffn-activation"]
        return x.relu() if kind == "relu" else x * (x * {"swish": 1, "gelu": 1.702}[kind]).sigmoid()

    def feed_forward(name, x):
        inner = activation(x @ weights[f"{name}_W1"] + weights[f"{name}_b1"])
        return inner @ weights[f"{name}_W2"] + weights[f"{name}_b2"]

    def positions(length):
        scales = width // 2
        increment = math.log(10000.0) / (scales - 1)
        angles = torch.arange(length).double()[:, None] * torch.exp(
            -increment * torch.arange(scales).double()
        )
        return torch.cat((angles.sin(), angles.cos()), dim=1)

    def top(x, stack):
        return norm(x, f"{stack}_top") if options.get("transformer-postprocess-top") else x

    def table(stack):
        return weights["Wemb"] if "Wemb" in weights else weights[f"{stack}_Wemb"]

    states = table("encoder")[source] * math.sqrt(width) + positions(len(source))
    for number in range(1, options["enc-depth"] + 1):
        name = f"encoder_l{number}"
        states = sublayer(
            states, f"{name}_self_Wo", lambda x, name=name: attend(f"{name}_self", x, x)
        )
        states = sublayer(
            states, f"{name}_ffn_ffn", lambda x, name=name: feed_forward(f"{name}_ffn", x)
        )
    context = top(states, "encoder")
    # The decoder's first input is a vector of zeros.
    inputs = torch.cat((torch.zeros(1, width).double(), table("decoder")[target]))
    states = inputs * math.sqrt(width) + positions(len(inputs))
    mask = torch.ones(len(inputs), len(inputs)).double().tril()
    for number in range(1, options["dec-depth"] + 1):
        name = f"decoder_l{number}"
        states = sublayer(
            states, f"{name}_self_Wo", lambda x, name=name: attend(f"{name}_self", x, x, mask)
        )
        states = sublayer(
            states, f"{name}_context_Wo", lambda x, name=name: attend(f"{name}_context", x, context)
        )
        states = sublayer(
            states, f"{name}_ffn_ffn", lambda x, name=name: feed_forward(f"{name}_ffn", x)
        )
    output = weights.get("decoder_ff_logit_out_W")
    output = table("decoder").T if output is None else output
    return top(states, "decoder") @ output + weights["decoder_ff_logit_out_b"]
