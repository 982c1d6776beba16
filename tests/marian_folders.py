"""Folders of MarianMTModel with SentencePiece models, for the tests of Marian's conversion."""

import io
import json

import pytest
import torch
from marian_formulas import SIZE
from torch.nn import functional as F  # noqa: N812
from transformers import MarianConfig, MarianMTModel
from vaswani.conversion import marian, marian_folder, to_marian
from vaswani.conversion import sentencepiece as converted_pieces

sentencepiece = pytest.importorskip("sentencepiece", reason="MarianTokenizer needs sentencepiece")

SOURCE_LINES = [
    "the cat sat on the mat",
    "a dog ran over the hill",
    "a green hill and a blue mat",
    "two dogs and three cats ran",
    "What is a mat? It's (almost) a hill!",
    "lazy foxes jump quickly over vexing dogs < 1 > 2",
] * 4
TARGET_LINES = [
    "die Katze saß auf der Matte",
    "der Hund lief über den Hügel",
    "grüner Hügel und eine blaue Matte",
    "zwei Hunde und drei Katzen liefen",
    "Was macht eine Matte? Fast (nichts)!",
    "faule Füchse springen schnell < 1 > 2",
] * 4
CODES = [">>deu<<", ">>nds<<"]


def trained(lines, **options):
    """Train a SentencePiece model and return its file's bytes."""
    written = io.BytesIO()
    options = {"vocab_size": 90, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, minloglevel=2, **options
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def spms():
    """The SentencePiece models of both sides."""
    return {"source": trained(SOURCE_LINES), "target": trained(TARGET_LINES)}


def model_proto():
    name = "sentencepiece.sentencepiece_model_pb2"
    return pytest.importorskip(name, reason="needs protobuf").ModelProto


def pieces(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = [processor.IdToPiece(number) for number in range(processor.GetPieceSize())]
    return [piece for piece in found if piece not in ("<s>", "</s>", "<unk>")]


@pytest.fixture(scope="module")
def vocabulary(spms):
    """The vocabulary in Marian's order: end token, unknown token, pieces of both sides."""
    names = ["</s>", "<unk>", *CODES]
    names += sorted({*pieces(spms["source"]), *pieces(spms["target"])} - set(names))
    names += [f"▁filler{number}" for number in range(SIZE - 1 - len(names))]
    assert len(names) == SIZE - 1
    return {name: number for number, name in enumerate([*names, "<pad>"])}


def randomise(model):
    """Replace weights with constant initial values by random values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias") or "embed_positions" not in name:
                parameter.normal_(0, 0.3)
        model.final_logits_bias.normal_(0, 0.3)
    return model.eval()


def their_model(**overrides):
    sizes = {"vocab_size": SIZE, "decoder_vocab_size": SIZE, "d_model": 16}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 24}
    settings = {
        "pad_token_id": SIZE - 1,
        "decoder_start_token_id": SIZE - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "activation_function": "swish",
        "scale_embedding": True,
        "max_position_embeddings": 512,
    }
    model = randomise(MarianMTModel(MarianConfig(**{**sizes, **settings, **overrides})))
    generation = {"num_beams": 4, "max_length": 12, "bad_words_ids": [[SIZE - 1]]}
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.fixture
def write(tmp_path, spms, vocabulary):
    """Write a folder of MarianMTModel with the files of its tokenizer."""

    def to(model, name="theirs", with_tokenizer=True):
        folder = tmp_path / name
        model.save_pretrained(folder)
        if with_tokenizer:
            for side, spm in spms.items():
                (folder / f"{side}.spm").write_bytes(spm)
            (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
            tokenizer = {"source_lang": "en", "target_lang": "de", "separate_vocabs": False}
            (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        return folder

    return to


@pytest.fixture
def warnings_of(monkeypatch):
    """The list that the converter's warnings are added to."""
    found = []
    for module in (marian, marian_folder, to_marian, converted_pieces):
        monkeypatch.setattr(module.logger, "warning", found.append)
    return found


@pytest.fixture
def batch(padded_batch):
    """Three sentence pairs of different lengths."""
    source, mask = padded_batch([9, 5, 2], seed=1, vocab_size=SIZE - 1)
    target, _ = padded_batch([4, 6, 3], seed=2, vocab_size=SIZE - 1)
    return {
        "input_ids": source.masked_fill(mask == 0, SIZE - 1),
        "attention_mask": mask,
        "decoder_input_ids": F.pad(target, (1, 0), value=SIZE - 1),
    }


# A test file gives these fixtures their names.
FIXTURES = spms, vocabulary, write, warnings_of, batch


def assert_same(one, other):
    """Compare two converted models bit for bit, settings included."""
    weights, others = one.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    left_out = ("_name_or_path", "auto_map", "architectures", "dtype", "transformers_version")
    for first, second in (
        (one.config, other.config),
        (one.generation_config, other.generation_config),
    ):
        first, second = first.to_dict(), second.to_dict()
        for name in left_out:
            first.pop(name, None), second.pop(name, None)
        assert first == second
