"""Let OpenNMT-py train a small model and translate, and write its results into a folder.

    python opennmt.py FOLDER [OPTION ...]

It needs OpenNMT-py 2 or 3, but not this package. Every OPTION is passed to the training. FOLDER
then has the checkpoint of OpenNMT-py, and computed.pt with its version, its logits for a padded
batch, and its translations by beam size and length penalty.
"""

import functools
import importlib.metadata
import importlib.util
import random
import sys
import types
from pathlib import Path

# Modules that OpenNMT-py imports for downloads and transforms, which are not used here.
for _name in ("spacy", "fasttext", "rapidfuzz", "ahocorasick", "requests", "sentencepiece"):
    if importlib.util.find_spec(_name) is None:
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].fuzz = sys.modules[_name].process = None

import torch  # noqa: E402

# OpenNMT-py's checkpoints have options that are not plain data, so load them without restrictions.
torch.load = functools.partial(torch.load, weights_only=False)

from onmt import opts  # noqa: E402
from onmt.bin.train import train  # noqa: E402
from onmt.model_builder import load_test_model  # noqa: E402
from onmt.utils.parse import ArgumentParser  # noqa: E402

VERSION = importlib.metadata.version("OpenNMT-py")
OLD = VERSION.startswith("2.")

WORDS = [f"w{number}" for number in range(17)]
SIZES = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "word_vec_size": 32,
    "rnn_size" if OLD else "hidden_size": 32,
    "enc_layers": 2,
    "dec_layers": 3,
    "heads": 4,
    "transformer_ff": 48,
    "position_encoding": None,
    "param_init": 0.0,
    "param_init_glorot": None,
    "optim": "adam",
    "learning_rate": 0.003,
    "batch_size": 64,
    "dropout": 0.1,
    "attention_dropout": 0.05,
    "label_smoothing": 0.1,
    "train_steps": 200,
    "save_checkpoint_steps": 200,
    "report_every": 1000,
    "seed": 1,
}
if not OLD:
    SIZES |= {"num_workers": 0, "bucket_size": 512}


def sentences(number, seed):
    """Return pairs of a source and its words, doubled, changed and reversed."""
    chance = random.Random(seed)
    for _ in range(number):
        source = chance.choices(WORDS, k=chance.randint(2, 9))
        yield source, [f"{word}'" for word in reversed(source) if word != "w0"] or ["nothing'"]


def write_corpus(folder):
    pairs = list(sentences(2000, seed=0))
    for index, side in enumerate(("src", "tgt")):
        lines = [" ".join(pair[index]) for pair in pairs]
        (folder / f"{side}.txt").write_text("\n".join(lines) + "\n")
        words = sorted({word for line in lines for word in line.split()})
        listing = "".join(f"{word}\n" for word in words)
        (folder / f"{side}.vocab").write_text(listing)
        with (folder / "both.vocab").open("a") as both:
            both.write(listing)


def train_model(folder, options):
    """Train as OpenNMT-py's command line does, and return the checkpoint."""
    write_corpus(folder)
    shared = "--share_vocab" in options
    data = f"{{c: {{path_src: {folder}/src.txt, path_tgt: {folder}/tgt.txt, weight: 1}}}}"
    arguments = ["--data", data, "--save_model", str(folder / "model")]
    arguments += ["--src_vocab", str(folder / ("both.vocab" if shared else "src.vocab"))]
    if not shared:
        arguments += ["--tgt_vocab", str(folder / "tgt.vocab")]
    for name, value in SIZES.items():
        arguments += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    parser = ArgumentParser()
    opts.train_opts(parser)
    train(parser.parse_args(arguments + options))
    (checkpoint,) = folder.glob("model_step_*.pt")
    return checkpoint


def logits_of_batch(model, source, lengths, target):
    """Logits (B, T, V) for token ids (B, S) and (B, T)."""
    source, target = source[:, :, None], target[:, :, None]
    if not OLD:
        encoded, state, _ = model.encoder(source, lengths)
        model.decoder.init_state(source, encoded, state)
        return model.generator(model.decoder(target, encoded, src_len=lengths)[0])
    source, target = source.transpose(0, 1), target.transpose(0, 1)
    state, encoded, _ = model.encoder(source, lengths)
    model.decoder.init_state(source, encoded, state)
    states = model.decoder(target, encoded, memory_lengths=lengths)[0]
    return model.generator[0](states.transpose(0, 1))


def random_batch(source_size, target_size):
    """Padded source ids, their lengths, and target ids after "<s>" (2), without special tokens."""
    lengths = torch.tensor([7, 3, 5, 1])
    source = torch.randint(4, source_size, (4, 7))
    source[torch.arange(7) >= lengths[:, None]] = 1
    target = torch.randint(4, target_size, (4, 6))
    target[:, 0] = 2
    return source, lengths, target


def translation_parser():
    parser = ArgumentParser()
    if OLD:
        opts.config_opts(parser)
    opts.translate_opts(parser)
    return parser


def translated(checkpoint, lines, settings):
    """Return scores and texts of the best translations, as by OpenNMT-py's command line."""
    source = checkpoint.parent / "test.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    arguments = ["--model", str(checkpoint), "--src", str(source)]
    arguments += ["--output", str(checkpoint.parent / "test.out"), *settings]
    opt = translation_parser().parse_args(arguments)
    ArgumentParser.validate_translate_opts(opt)
    if OLD:
        from onmt.translate.translator import build_translator

        scores, texts = build_translator(opt, report_score=False).translate(lines, batch_size=8)
    else:
        from onmt.inference_engine import InferenceEnginePY

        ArgumentParser._get_all_transform_translate(opt)
        ArgumentParser._validate_transforms_opts(opt)
        ArgumentParser.validate_translate_opts_dynamic(opt)
        scores, texts = InferenceEnginePY(opt).infer_file()
    return [[float(score) for score in row] for row in scores], texts


def main(folder, *options):
    folder = Path(folder)
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    checkpoint = train_model(folder, list(options))
    defaults = translation_parser().parse_args(["--model", "none", "--src", "none"])
    vocabularies, model, _ = load_test_model(defaults, model_path=str(checkpoint))
    model.eval()
    if OLD:
        sizes = [len(vocabularies[side].base_field.vocab) for side in ("src", "tgt")]
    else:
        sizes = [len(vocabularies[side]) for side in ("src", "tgt")]
    torch.manual_seed(2)
    batch = random_batch(*sizes)
    with torch.no_grad():
        logits = logits_of_batch(model, *batch)
    lines = [" ".join(source) for source, _ in sentences(40, seed=3)] + ["w1 unheard-of w2"]
    searches = {}
    for beams in (1, 4):
        for penalty, alpha in (("none", 0.0), ("avg", 1.0), ("wu", 0.6)):
            if OLD and penalty == "avg":
                continue
            settings = ["--beam_size", str(beams), "--n_best", str(beams)]
            settings += ["--length_penalty", penalty, "--alpha", str(alpha), "--max_length", "30"]
            if not OLD:
                settings += ["--max_length_ratio", "0"]
            searches[beams, penalty, alpha] = translated(checkpoint, lines, settings)
    computed = {
        "version": VERSION,
        "checkpoint": checkpoint.name,
        "batch": batch,
        "logits": logits,
        "lines": lines,
        "searches": searches,
    }
    torch.save(computed, folder / "computed.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
