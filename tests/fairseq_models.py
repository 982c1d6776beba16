"""fairseq's Transformer by its formulas, and checkpoints of it, for tests of the converter."""

import math
from argparse import Namespace

import torch
from torch import nn

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
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}


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


def dictionary(path, words, extra=""):
    path.write_text("".join(f"{word} 1\n" for word in words) + extra, encoding="utf-8")
    return path
