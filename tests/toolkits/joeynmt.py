"""Let JoeyNMT save small models with its results. Run it in an environment with JoeyNMT.

    python -P joeynmt.py OUT

Each folder of OUT has the files of a JoeyNMT training (config.yaml, vocabularies, a checkpoint).
JoeyNMT has trained the first model. The file expected.pt has texts, JoeyNMT's ids of them, logits
with padding, and the outputs of its greedy and beam search.
"""

import random
import sys
from pathlib import Path

import sentencepiece
import torch
import yaml
from joeynmt.config import load_config, parse_global_args
from joeynmt.model import build_model
from joeynmt.prediction import predict, prepare
from joeynmt.search import search
from joeynmt.training import train
from joeynmt.vocabulary import build_vocab

WORDS = ["Öl", "and", "two", "(three)", "four", "five", "six", "seven", "eight", "nine"]
SIZES = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "ff_size": 48, "dropout": 0.0}
SOURCE = ["two four six", "nine", "Öl and (three) five six seven eight", "two two nine unheard"]
SOURCE += [" ".join(random.Random(i).choices(WORDS, k=1 + i % 7)) for i in range(36)]
TARGET = [" ".join(reversed(line.split())) for line in SOURCE]


def stack(**options):
    embeddings = {"embedding_dim": 32, "scale": True, "dropout": 0.0}
    return {"type": "transformer", **SIZES, "embeddings": embeddings, **options}


def configuration(folder, data, model, **testing):
    return {
        "name": folder.name,
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder),
        "use_cuda": False,
        "data": {
            "test": "unused",
            "src": {"lang": "a", **data["src"]},
            "trg": {"lang": "b", **data["trg"]},
        },
        "testing": {"beam_size": 4, "beam_alpha": 1.0, "batch_size": 8, **testing},
        "training": {"batch_size": 32, "label_smoothing": 0.1},
        "model": model,
    }


def write(path, config):
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def train_reversal(out):
    """Let JoeyNMT train a model to reverse words."""
    folder, data = out / "trained", out / "data"
    data.mkdir()
    folder.mkdir()
    rng = random.Random(1)
    for split, size in (("train", 2000), ("dev", 20)):
        lines = [rng.choices(WORDS, k=rng.randint(1, 6)) for _ in range(size)]
        write_lines(data / f"{split}.a", [" ".join(line) for line in lines])
        write_lines(data / f"{split}.b", [" ".join(reversed(line)) for line in lines])
    side = {"level": "word", "max_length": 50}
    pre = stack(layer_norm="pre")
    model = {"encoder": pre, "decoder": pre, "tied_embeddings": False, "tied_softmax": True}
    config = configuration(folder, {"src": side, "trg": side}, model, max_output_length=12)
    del config["data"]["test"]
    config["data"] |= {"train": str(data / "train"), "dev": str(data / "dev")}
    config["training"] |= {
        "learning_rate": 0.003,
        "epochs": 10,
        "scheduling": "warmupinversesquareroot",
        "learning_rate_warmup": 100,
        "validation_freq": 200,
        "logging_freq": 100,
        "optimizer": "adamw",
        "early_stopping_metric": "bleu",
        "print_valid_sents": [0],
    }
    config["testing"]["eval_metrics"] = ["bleu"]
    write(folder / "config.yaml", config)
    train(rank=0, world_size=None, cfg=load_config(folder / "config.yaml"))
    return folder


def save_random(folder, config):
    """Save a model that JoeyNMT builds, in the format of its trainer."""
    write(folder / "config.yaml", config)
    args = parse_global_args(load_config(folder / "config.yaml"), mode="translate")
    source, target = build_vocab(args.data, model_dir=folder)
    model = build_model(args.model, source, target)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model_state": model.state_dict(), "optimizer_state": optimizer.state_dict()}
    state |= {"scaler_state": None, "scheduler_state": None, "train_iter_state": None}
    torch.save(state | {"stats_state": {"steps": 10}}, folder / "10.ckpt")
    return folder


def post_norm(out):
    """Post-norm, no tying, characters to words."""
    folder = out / "post"
    folder.mkdir()
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    write_lines(folder / "src_vocab.txt", [*specials, "▁", *sorted(set("".join(WORDS)))])
    write_lines(folder / "trg_vocab.txt", [*specials, *WORDS])
    data = {"src": {"level": "char", "lowercase": False}, "trg": {"level": "word"}}
    encoder = stack(layer_norm="post", activation="gelu", num_layers=1)
    decoder = stack(layer_norm="post", activation="gelu", num_heads=2, ff_size=40)
    model = {"encoder": encoder, "decoder": decoder, "embed_initializer": "normal"}
    model |= {"embed_init_weight": 0.5, "init_gain": 1.5}
    return save_random(folder, configuration(folder, data, model, max_output_length=9))


def pieces(out, model_type):
    """Pre-norm, everything tied, SentencePiece, the texts normalised and lowercased."""
    folder = out / model_type
    folder.mkdir()
    rng = random.Random(2)
    lines = [" ".join(rng.choices(WORDS, k=8)).lower() for _ in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "sp"),
        vocab_size=34,
        model_type=model_type,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    tokens = [processor.id_to_piece(index) for index in range(len(processor))]
    for side in ("src", "trg"):
        write_lines(folder / f"{side}_vocab.txt", tokens)
    side = {"level": "bpe", "tokenizer_type": "sentencepiece", "lowercase": True}
    side |= {"normalize": True, "tokenizer_cfg": {"model_file": str(folder / "sp.model")}}
    pre = stack(layer_norm="pre", activation="swish")
    model = {"encoder": pre, "decoder": pre, "tied_embeddings": True, "tied_softmax": True}
    model |= {"embed_initializer": "normal", "embed_init_weight": 0.2}
    config = configuration(
        folder, {"src": side, "trg": side}, model, beam_alpha=-1, max_output_length=11
    )
    return save_random(folder, config)


def expect(folder):
    """Let JoeyNMT load a folder, and save its results."""
    config = load_config(folder / "config.yaml")
    config["model_dir"] = str(folder)
    args = parse_global_args(config, mode="translate")
    model, _, _, data = prepare(args, rank=0, mode="translate")
    model.eval()
    data.has_trg = True
    for pair in zip(SOURCE, TARGET, strict=True):
        data.set_item(*pair)
    batch = data.collate_fn(
        [data[index] for index in range(len(SOURCE))],
        pad_index=model.pad_index,
        eos_index=model.eos_index,
    )
    with torch.no_grad():
        logits = model._encode_decode(**vars(batch))[0]
    expected = {
        "source": SOURCE,
        "target": TARGET,
        "input_ids": batch.src,
        "labels": batch.trg,
        "decoder_input_ids": batch.trg_input,
        "logits": logits,
    }
    batch.has_trg = data.has_trg = False
    for name, beams in (("greedy", 1), ("beam", 4)):
        test = args.test._replace(beam_size=beams, return_prob="hyp")
        options = test._asdict()
        kept = ("beam_size", "beam_alpha", "max_output_length", "return_prob", "generate_unk")
        ids, scores, _ = search(model, batch, **{key: options[key] for key in kept})
        predicted = predict(model, data, args.device, 0, args=test, autocast=args.autocast)
        expected[name] = {
            "ids": torch.as_tensor(ids),
            "scores": torch.as_tensor(scores),
            "texts": predicted[2],
        }
    torch.save(expected, folder / "expected.pt")


def main(out):
    torch.manual_seed(3)
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    folders = [train_reversal(out), post_norm(out), pieces(out, "unigram"), pieces(out, "bpe")]
    for folder in folders:
        expect(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
