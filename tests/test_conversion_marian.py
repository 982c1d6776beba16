"""Conversion from and to Marian, compared with transformers and CTranslate2."""

import io
import json
import math
import re
import unicodedata
import zipfile

import numpy as np
import pytest
import torch
import yaml
from marian_formulas import OPTIONS, SIZE, marian_logits, marian_weights
from tokenizers import normalizers
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel
from transformers import MarianTokenizer as TheirTokenizer
from vaswani.commands.main import main
from vaswani.conversion import marian, marian_folder, marian_vocabulary, to_marian
from vaswani.conversion import sentencepiece as converted_pieces
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.sentencepiece import SentencePiece

from vaswani import VaswaniForConditionalGeneration

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
def batch(padded_batch):
    source, mask = padded_batch([9, 5, 2], seed=1, vocab_size=SIZE - 1)
    target, _ = padded_batch([4, 6, 3], seed=2, vocab_size=SIZE - 1)
    return {
        "input_ids": source.masked_fill(mask == 0, SIZE - 1),
        "attention_mask": mask,
        "decoder_input_ids": F.pad(target, (1, 0), value=SIZE - 1),
    }


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


# transformers to us


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": SIZE + 8},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        {"activation_function": "gelu", "scale_embedding": False},
        {"encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 40},
        {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "activation_function": "relu"},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
@pytest.mark.parametrize("paper_positions", [False, True])
def test_logits_equal_marianmt_under_padding(write, batch, tmp_path, settings, paper_positions):
    theirs = their_model(**settings)
    folder = write(theirs, with_tokenizer=False)
    marian.convert(folder, tmp_path / "out", paper_positions, no_tokenizer=True)
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert isinstance(ours, VaswaniForConditionalGeneration)
    assert ours.config.position_encoding == (
        "sinusoidal" if paper_positions else "sinusoidal_concat"
    )
    with torch.no_grad():
        expected, found = theirs(**batch).logits, ours(**batch).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"length_penalty": 0.4}])
def test_search_gives_the_translations_of_marianmt(write, batch, settings):
    outputs = []
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = their_model(tie_word_embeddings=False)
        for name, value in settings.items():
            setattr(theirs.generation_config, name, value)
        ours = marian.load(write(theirs, f"theirs{seed}"), no_tokenizer=True).model
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found, expected = ours.generate(**source), theirs.generate(**source)
        assert found.tolist() == expected.tolist()
        outputs += found.tolist()
    assert len(set(map(tuple, outputs))) > 3


def test_settings_of_the_source_are_kept(write):
    theirs = their_model(dropout=0.2, attention_dropout=0.1, activation_dropout=0.05)
    ours = marian.load(write(theirs)).model
    for name in ("dropout", "attention_dropout", "activation_dropout", "d_model"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    assert ours.config.unk_token_id == 1
    assert ours.config.label_smoothing == 0
    kept = ("num_beams", "max_length", "bad_words_ids", "forced_eos_token_id", "eos_token_id")
    for name in kept:
        assert getattr(ours.generation_config, name) == getattr(theirs.generation_config, name)
    assert ours.generation_config.length_penalty_type == "hf"
    assert ours.generation_config.max_length_offset == 0


def test_old_folders_are_read(write, batch, tmp_path):
    """Old folders have a pickle, half precision, tables of positions, and search settings."""
    theirs = their_model().half()
    folder = write(theirs)
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    settings = json.loads((folder / "config.json").read_text())
    settings |= json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    settings |= {"static_position_embeddings": True, "normalize_before": False}
    (folder / "config.json").write_text(json.dumps(settings))
    ours = marian.load(folder).model
    assert ours.dtype == torch.float16
    assert ours.generation_config.num_beams == 4
    assert ours.generation_config.bad_words_ids == [[SIZE - 1]]
    with torch.no_grad():
        expected, found = theirs.float()(**batch).logits, ours.float()(**batch).logits
    # Its own table of positions went through float16 too.
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-3)


def test_weights_in_several_files_are_read(write):
    theirs = their_model()
    whole = marian.load(write(theirs), no_tokenizer=True).model
    folder = write(theirs, "parts")
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert_same(whole, marian.load(folder, no_tokenizer=True).model)


# Us to transformers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": SIZE + 8},
        {"tie_word_embeddings": False},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_there_and_back_is_bit_identical(write, tmp_path, settings, dtype):
    one = marian.load(
        write(their_model(**settings).to(dtype), with_tokenizer=False), no_tokenizer=True
    )
    one.save(tmp_path / "ours")
    to_marian.save(tmp_path / "ours", tmp_path / "again")
    again = marian.load(tmp_path / "again", no_tokenizer=True)
    assert_same(one.model, again.model)
    theirs = MarianMTModel.from_pretrained(tmp_path / "again").state_dict()
    before = MarianMTModel.from_pretrained(tmp_path / "theirs").state_dict()
    if "tie_word_embeddings" in settings:
        del before["model.shared.weight"]  # not used without ties
    for name, tensor in before.items():
        assert torch.equal(tensor, theirs[name]), name


def test_tokenizers_come_back_bit_identical(write, tmp_path):
    main(["convert", "marian", str(write(their_model())), str(tmp_path / "ours")])
    main(["convert", "to-marian", str(tmp_path / "ours"), str(tmp_path / "again")])
    main(["convert", "marian", str(tmp_path / "again"), str(tmp_path / "back")])
    for name in ("tokenizer.json", "target_tokenizer/tokenizer.json", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
    ours = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert "vaswani" not in type(theirs).__module__
    assert theirs("a green cat").input_ids == ours("a green cat").input_ids


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "sinusoidal_concat"])
@pytest.mark.parametrize("tie", [False, True])
def test_models_of_ours_leave_for_marianmt(
    tiny_model, padded_batch, tmp_path, attention_bias, position_encoding, tie
):
    ours = tiny_model(
        dtype=torch.float32,
        attention_bias=attention_bias,
        lm_head_bias=attention_bias,
        position_encoding=position_encoding,
        tie_word_embeddings=tie,
    )
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    to_marian.save(ours, tmp_path / "out")
    theirs, report = MarianMTModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]
    source, mask = padded_batch([9, 5, 2], seed=1)
    batch = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": source[:, :6]}
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(**batch).logits, ours(**batch).logits, atol=1e-5, rtol=1e-5
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


@pytest.fixture
def warnings_of(monkeypatch):
    found = []
    for module in (marian, marian_folder, to_marian, converted_pieces):
        monkeypatch.setattr(module.logger, "warning", found.append)
    return found


def test_what_marianmt_has_no_place_for_is_named(tiny_model, tmp_path, warnings_of):
    to_marian.save(tiny_model(), tmp_path / "out")
    assert len(warnings_of) == 1
    assert "gnmt" in warnings_of[0]
    assert "max_length_offset 50 (max_length 512 instead)" in warnings_of[0]
    assert MarianMTModel.from_pretrained(tmp_path / "out").generation_config.max_length == 512


def test_refusals_name_every_reason(tiny_model, tmp_path):
    model = tiny_model(norm_position="pre", position_offset=2, layer_norm_eps=1e-6, d_k=8)
    with pytest.raises(ConversionError) as caught:
        to_marian.save(model, tmp_path / "out")
    for reason in (
        "norm_position 'pre'",
        "final_layer_norm",
        "position_offset 2",
        "1e-06",
        "d_k 8",
    ):
        assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


# Errors


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_fields_of_other_models_are_refused_at_once(write, tmp_path):
    folder = write(their_model())
    edited(folder, normalize_before=True, static_position_embeddings=False)
    with pytest.raises(ConversionError, match=r"normalize_before True; static_position_embeddings"):
        marian.convert(folder, tmp_path / "out")
    edited(folder, normalize_before=False, static_position_embeddings=True)
    edited(folder, encoder_attention_heads=3)
    with pytest.raises(ConversionError, match="encoder_attention_heads"):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    edited(folder, d_model="wide")
    with pytest.raises(ConversionError, match=r"config.json cannot be read.*d_model"):
        marian.convert(folder, tmp_path / "out")
    edited(folder, model_type="bart")
    with pytest.raises(ConversionError, match=r"'bart', not 'marian'"):
        marian.convert(folder, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"neither config.json"):
        marian.convert(tmp_path, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"no file or folder .*opus-mt-en-de"):
        marian.convert(tmp_path / "opus-mt-en-de", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def resaved(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.encoder.layers.1.fc1.bias"), "1.fc1.bias is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "No rule knows 1 .*extra"),
        (
            lambda tensors: tensors.update({"model.encoder.layers.0.fc3.bias": torch.ones(1)}),
            "fc3.bias has no place",
        ),
        (
            lambda tensors: tensors.update(
                {"model.encoder.embed_positions.weight": torch.ones(512, 16)}
            ),
            "not MarianMTModel's table",
        ),
        (
            lambda tensors: tensors.update({"model.decoder.embed_positions.weight": torch.ones(3)}),
            "not MarianMTModel's table",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(SIZE, 16)}),
            "differ, but are tied",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(write, tmp_path, change, message):
    folder = write(their_model())
    resaved(folder, change)
    with pytest.raises(ConversionError, match=message):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("text", ["{", "[]", '{"num_beams": "many"}'])
def test_a_damaged_generation_config_is_named_and_not_passed_over(write, tmp_path, text):
    folder = write(their_model())
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConversionError, match=r"generation_config\.json cannot be read"):
        marian.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named_and_nothing_is_left(write, tmp_path):
    folder = write(their_model())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"model.safetensors is not a complete"):
        marian.convert(folder, tmp_path / "out")
    weights.unlink()
    with pytest.raises(ConversionError, match=r"neither model.safetensors nor pytorch_model.bin"):
        marian.convert(folder, tmp_path / "out")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config.json is not JSON"):
        marian.convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_pickle_that_would_run_code_is_refused(write, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    folder = write(their_model())
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="exec"):
        marian.convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


# Text

TEXTS = [
    "the cat sat on the mat",
    "  two   dogs\tran \n over the hill  ",
    "What is ﬁne? ＡＢＣ①, naïve … “quoted”",
    "",
    "   ",
    "a ▁ b",
    "It's vexing: < 1 > 2",
    "catcatcat matdog",
    "Überhügel 日本 x",
    ">>deu<< the cat",
    ">>deu<<the cat",
    ">>deu<<",
]


@pytest.fixture(scope="module")
def both_tokenizers(spms, vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    theirs = TheirTokenizer.from_pretrained(folder)
    source, target = marian._their_tokenizers(folder)
    source.save_pretrained(folder / "out")
    return AutoTokenizer.from_pretrained(folder / "out"), target, theirs


@pytest.mark.parametrize("text", TEXTS)
def test_source_text_gets_the_ids_of_marian(both_tokenizers, text):
    ours, _, theirs = both_tokenizers
    assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("line", TARGET_LINES[:6])
def test_target_text_gets_the_ids_of_marian_and_comes_back(both_tokenizers, line):
    ours, target, theirs = both_tokenizers
    ids = theirs(text_target=line).input_ids
    assert target(line).input_ids == ids
    for tokenizer in (ours, target):
        assert tokenizer.decode(ids, skip_special_tokens=True) == line
    assert theirs.decode(ids, skip_special_tokens=True) == line


def test_random_text_gets_the_ids_of_marian(both_tokenizers, spms):
    """Random sequences of the characters of both languages: the model does not know all."""
    ours, _, theirs = both_tokenizers
    letters = sorted({letter for line in SOURCE_LINES + TARGET_LINES for letter in line})
    generator = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(generator.choice(letters, size=generator.integers(1, 40)))
        assert ours(text).input_ids == theirs(text).input_ids, text


def test_words_of_the_other_language_get_the_ids_of_marian(both_tokenizers):
    """vocab.json has pieces of both languages, each .spm file of one."""
    ours, target, theirs = both_tokenizers
    for line in TARGET_LINES[:6]:
        assert ours(f"the cat {line}").input_ids == theirs(f"the cat {line}").input_ids
    for line in SOURCE_LINES[:6]:
        assert target(line).input_ids == theirs(text_target=line).input_ids


def test_separate_accents_and_voicing_marks_are_composed(spms, tmp_path):
    """Text of any language can be decomposed. Files of macOS and some keyboards are."""
    lines = ["Tiếng Việt ữ ộ", "한국어 문장", "ガンダム パン", "ᾷ ṩ Ǖ", "naïve", "ｶﾞﾝﾀﾞﾑ ﾊﾟﾝ"]
    for number, spm in enumerate((trained(lines * 9), spms["source"])):
        path = tmp_path / f"{number}.spm"
        path.write_bytes(spm)
        normalize = normalizers.Sequence(SentencePiece.read(path).normalizers()).normalize_str
        theirs = sentencepiece.SentencePieceProcessor(model_proto=spm)
        for form in ("NFC", "NFD"):
            for line in lines if number == 0 else lines[:5]:
                text = unicodedata.normalize(form, line)
                assert normalize(text) == theirs.normalize(text), ascii(text)


def test_a_table_without_compositions_composes_nothing(tmp_path):
    (tmp_path / "own.tsv").write_text("78\t79\n", encoding="utf-8")  # x becomes y
    spm = trained(SOURCE_LINES, normalization_rule_tsv=str(tmp_path / "own.tsv"))
    (tmp_path / "own.spm").write_bytes(spm)
    steps = SentencePiece.read(tmp_path / "own.spm").normalizers()
    assert normalizers.Sequence(steps).normalize_str("xe\u0301") == "▁ye\u0301"


def test_special_tokens_in_a_text_are_text(both_tokenizers, spms, vocabulary):
    ours, _, _ = both_tokenizers
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    for text in ("a </s> b", "</s>", "x<pad>y", "<unk>"):
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == [vocabulary.get(piece, 1) for piece in processor.encode(text, out_type=str)]
        assert 0 not in ids
        assert SIZE - 1 not in ids


def test_byte_pairs_of_sentencepiece_are_cut_alike(tmp_path):
    spm = trained(SOURCE_LINES, model_type="bpe", vocab_size=80)
    names = ["</s>", "<unk>", *pieces(spm), "<pad>"]
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").write_bytes(spm)
    vocabulary = {name: number for number, name in enumerate(names)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    ours, _ = marian._their_tokenizers(tmp_path)
    theirs = TheirTokenizer.from_pretrained(tmp_path)
    for line in [*SOURCE_LINES[:6], "catcat matdog vexingly"]:
        assert ours(line).input_ids == theirs(line).input_ids


def test_what_the_tokenizers_library_cannot_do_is_named_at_once(tmp_path):
    model = model_proto().FromString(trained(SOURCE_LINES, model_type="bpe", vocab_size=80))
    model.trainer_spec.treat_whitespace_as_suffix = True
    model.normalizer_spec.escape_whitespaces = False
    model.denormalizer_spec.precompiled_charsmap = b"table"
    model.pieces[40].type, model.pieces[41].type = 4, 5
    path = tmp_path / "m.model"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError) as caught:
        converted_pieces.piece_backend(
            converted_pieces.SentencePiece.read(path), {"<unk>": 0}, ("<unk>",)
        )
    for name in (
        "treat_whitespace_as_suffix",
        "escape_whitespaces",
        "denormalization_rule_tsv",
        f"user_defined_symbols of type bpe, such as {model.pieces[40].piece!r}",
        "unused pieces of type bpe",
        "pieces without an id",
    ):
        assert name in str(caught.value)


def test_unknown_characters_become_bytes_where_the_model_has_them(tmp_path):
    spm = trained(SOURCE_LINES, byte_fallback=True, vocab_size=330)
    (tmp_path / "source.spm").write_bytes(spm)
    names = ["</s>", "<unk>", *pieces(spm), "<pad>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    ours = marian._tokenizer(tmp_path / "source.spm", vocabulary)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    for text in (SOURCE_LINES[0], "the 日 cat"):
        ids = [vocabulary[piece] for piece in processor.encode(text, out_type=str)]
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours.decode(ids) == text


def test_pieces_without_an_id_are_said(spms, vocabulary, tmp_path, warnings_of):
    (tmp_path / "source.spm").write_bytes(spms["source"])
    fewer = dict(vocabulary)
    lost = next(name for name in pieces(spms["source"]) if len(name) > 2)
    fewer["▁another"] = fewer.pop(lost)
    tokenizer = marian._tokenizer(tmp_path / "source.spm", fewer)
    assert re.search(rf"1 pieces .*{lost}", warnings_of[0])
    assert tokenizer.unk_token_id not in tokenizer(SOURCE_LINES[0]).input_ids


def test_other_tokenizers_are_refused(write, tmp_path):
    folder = write(their_model())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "<end>", "pad_token": "[PAD]"}))
    with pytest.raises(ConversionError, match=r"pad_token '\[PAD\]'.*eos_token '<end>'"):
        marian.load(folder)
    path.unlink()
    (folder / "source.spm").write_bytes(trained(SOURCE_LINES, model_type="char"))
    with pytest.raises(ConversionError, match=r"model_type char.*no_tokenizer"):
        marian.load(folder)
    whole = trained(SOURCE_LINES)
    model = model_proto().FromString(whole)
    model.ClearField("trainer_spec")
    broken = model_proto().FromString(whole)
    broken.pieces[5].score = math.nan
    table = model_proto().FromString(whole)
    table.normalizer_spec.precompiled_charsmap = b"\x10\0\0\0 no table"
    wrong = (b"\xff\xff nothing", b"", whole[:200])
    for content in (*wrong, *(one.SerializeToString() for one in (model, broken, table))):
        (folder / "source.spm").write_bytes(content)
        with pytest.raises(ConversionError, match="not a complete SentencePiece model"):
            marian.load(folder)
    (folder / "source.spm").unlink()
    with pytest.raises(ConversionError, match=r"source.spm.*no_tokenizer"):
        marian.load(folder)


# Marian's own files


@pytest.fixture
def write_marian(tmp_path, spms, vocabulary):
    """Write a folder in the format of OPUS-MT."""

    def to(name="opus", vocabularies=None, decoder=None, weights=None, **changes):
        options = {**OPTIONS, **{key.replace("_", "-"): value for key, value in changes.items()}}
        folder = tmp_path / name
        folder.mkdir()
        weights = marian_weights(options) if weights is None else weights
        text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", dtype=np.int8)
        np.savez(folder / "opus.npz", **weights, **{"special:model.yml": text})
        given = vocabularies or [{n: i for n, i in vocabulary.items() if n != "<pad>"}] * 2
        for side, entries in zip(("src", "trg"), given, strict=True):
            lines = [f"{json.dumps(n, ensure_ascii=False)}: {i}\n" for n, i in entries.items()]
            (folder / f"opus.{side}.vocab.yml").write_text("".join(lines), encoding="utf-8")
        for side, spm in spms.items():
            (folder / f"{side}.spm").write_bytes(spm)
        settings = {
            "models": ["opus.npz"],
            "vocabs": ["opus.src.vocab.yml", "opus.trg.vocab.yml"],
            "beam-size": 6,
            "normalize": 1,
            "word-penalty": 0,
            "mini-batch": 64,
            **(decoder or {}),
        }
        (folder / "decoder.yml").write_text(yaml.safe_dump(settings))
        return folder, weights, options

    return to


PRE_NORM = {"transformer_preprocess": "n", "transformer_postprocess": "da"}
VARIANTS = {
    "default": {},
    "relu": {"transformer_ffn_activation": "relu"},
    "gelu": {"transformer_ffn_activation": "gelu"},
    "depths": {"enc_depth": 3, "dec_depth": 1, "transformer_dim_ffn": 40},
    "pre-norm": {**PRE_NORM, "transformer_postprocess_top": "n"},
    "pre-norm without top": PRE_NORM,
    "top": {"transformer_postprocess_top": "n"},
    "untied": {"tied_embeddings_all": False},
    "target tied": {"tied_embeddings_all": False, "tied_embeddings": True},
    "tables tied": {"tied_embeddings_all": False, "tied_embeddings_src": True},
    "all tied by two options": {
        "tied_embeddings_all": False,
        "tied_embeddings_src": True,
        "tied_embeddings": True,
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_those_of_marians_formulas(write_marian, batch, changes):
    folder, weights, options = write_marian(**changes)
    ours = marian.load(folder, no_tokenizer=True).model
    with torch.no_grad():
        found = ours.double()(**batch).logits
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        source = batch["input_ids"][row, :length]
        expected = marian_logits(weights, options, source, batch["decoder_input_ids"][row, 1:])
        assert expected.std() > 0.5
        torch.testing.assert_close(found[row, :, :-1], expected, atol=1e-5, rtol=1e-5)
        # Marian has no padding token, so the softmax leaves it out.
        torch.testing.assert_close(
            found[row].log_softmax(-1)[:, :-1], expected.log_softmax(-1), atol=1e-5, rtol=1e-5
        )


def transformers_twin(weights, options, bias_of_pad=0.0):
    """Fill MarianMTModel by hand from Marian's weights, as transformers' own script does."""
    twin = their_model(activation_function=options["transformer-ffn-activation"])
    places = twin.state_dict()
    parts = {"self": "self_attn", "context": "encoder_attn"}
    for name, array in weights.items():
        tensor = torch.from_numpy(array)
        found = re.fullmatch(r"(encoder|decoder)_l(\d+)_(self|context|ffn)_(.+)", name)
        if not found:
            continue
        stack, number, part, rest = found.groups()
        layer = f"model.{stack}.layers.{int(number) - 1}"
        kind = {"scale": "weight", "bias": "bias"}.get(rest.rpartition("_")[2])
        if "_ln_" in rest:
            module = "final" if part == "ffn" else parts[part]
            place = f"{layer}.{module}_layer_norm.{kind}"
        else:
            kind = "weight" if rest[0] == "W" else "bias"
            module = (f"fc{rest[1]}" if part == "ffn" else f"{parts[part]}.{rest[1]}_proj").replace(
                "o_proj", "out_proj"
            )
            place = f"{layer}.{module}.{kind}"
        places[place].copy_(tensor.T.squeeze() if kind == "weight" else tensor.squeeze())
    table = F.pad(torch.from_numpy(weights["Wemb"]), (0, 0, 0, 1))
    places["model.shared.weight"].copy_(table)
    bias = torch.from_numpy(weights["decoder_ff_logit_out_b"])
    twin.final_logits_bias.copy_(F.pad(bias, (0, 1), value=bias_of_pad))
    return twin


@pytest.mark.parametrize("activation", ["swish", "relu", "gelu"])
@pytest.mark.parametrize("paper_positions", [False, True])
def test_as_transformers_gives_the_logits_of_marianmt(
    write_marian, batch, activation, paper_positions
):
    folder, weights, options = write_marian(transformer_ffn_activation=activation)
    ours = marian.load(folder, paper_positions, as_transformers=True).model
    twin = transformers_twin(weights, options)
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, twin(**batch).logits, atol=1e-5, rtol=1e-5)


def test_as_transformers_leaves_for_marianmt_and_comes_back(write_marian, batch, tmp_path):
    folder, weights, options = write_marian()
    one = marian.load(folder, as_transformers=True)
    one.save(tmp_path / "ours")
    to_marian.save(tmp_path / "ours", tmp_path / "theirs")
    theirs = MarianMTModel.from_pretrained(tmp_path / "theirs")
    twin = transformers_twin(weights, options)
    for name, tensor in twin.state_dict().items():
        if "embed_positions" not in name:
            assert torch.equal(tensor, theirs.state_dict()[name]), name
    again = marian.load(tmp_path / "theirs").model
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    exact = marian.load(folder).model
    with pytest.raises(ConversionError, match=r"sinusoidal_t2t'; layer_norm_eps 1e-06"):
        to_marian.save(exact, tmp_path / "exact")


def test_as_transformers_scores_as_ctranslate2_does(write_marian, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2", reason="compares with CTranslate2")
    from ctranslate2.converters import OpusMTConverter

    folder, _, _ = write_marian(transformer_ffn_activation="relu")
    OpusMTConverter(str(folder)).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), intra_threads=1)
    converted = marian.load(folder, as_transformers=True)
    model, source, target = converted.model, converted.tokenizer, converted.target_tokenizer
    pairs = list(zip(SOURCE_LINES[:4], TARGET_LINES[:4], strict=True))
    found = translator.score_batch(
        [source.tokenize(line) for line, _ in pairs], [target.tokenize(line) for _, line in pairs]
    )
    for (line, translation), scores in zip(pairs, found, strict=True):
        labels = torch.tensor([target(translation).input_ids])
        with torch.no_grad():
            logits = model(**source(line, return_tensors="pt"), labels=labels).logits
        # CTranslate2 leaves the pad token out of the softmax.
        expected = logits[0, :, :-1].log_softmax(-1).gather(1, labels[0, :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores.log_probs), expected, atol=2e-4, rtol=1e-4)


def test_search_is_marians(write_marian, warnings_of):
    decoder = {"models": ["/home/train/opus.npz"], "normalize": 0.6}
    folder, _, _ = write_marian(decoder=decoder)
    converted = marian.load(folder)
    generation = converted.model.generation_config
    assert (generation.num_beams, generation.length_penalty) == (6, 0.6)
    assert generation.length_penalty_type == "hf"
    assert generation.suppress_tokens == [1]
    assert warnings_of == []
    source = converted.tokenizer(["the cat", "a dog ran"], padding=True, return_tensors="pt")
    outputs = converted.model.generate(**source, max_length=8)
    assert not (outputs == 1).any()
    assert (outputs[:, 0] == SIZE - 1).all()
    assert not (outputs[:, 1] == SIZE - 1).any()


def test_settings_of_the_search_that_have_no_place_are_named_in_one_warning(
    write_marian, warnings_of
):
    lost = {
        "word-penalty": 0.5,
        "max-length": 300,
        "max-length-crop": True,
        "output-sampling": ["topk", 10],
        "shortlist": ["lex.s2t", 50, 50],
        "skip-cost": True,
        "gemm-type": "packed8avx2",
        "search-of-tomorrow": 1,
    }
    without_effect = {
        "relative-paths": True,
        "cpu-threads": 4,
        "maxi-batch-sort": "src",
        "quiet": True,
        "alignment": "soft",
        "precision": ["float32"],
        "output-approx-knn": [],
        "no-spm-decode": False,
    }
    folder, _, _ = write_marian(decoder=lost | without_effect)
    assert marian.load(folder).model.generation_config.max_length == 512
    (warning,) = warnings_of
    assert all(f"{name} {value}" in warning for name, value in lost.items())
    assert not any(f"{name} {value}" in warning for name, value in without_effect.items())


def test_max_length_factor_has_the_default_of_marian(write_marian, warnings_of):
    folder, _, _ = write_marian(decoder={})
    settings = marian.load(folder).model.generation_config
    assert (settings.max_length_factor, settings.max_length_offset) == (3, 0)
    assert not warnings_of


def test_max_length_factor_of_decoder_yml_limits_by_the_source(write_marian, warnings_of):
    folder, _, _ = write_marian(decoder={"max-length-factor": 2.5})
    settings = marian.load(folder).model.generation_config
    assert (settings.max_length_factor, settings.max_length_offset) == (2.5, 0)
    assert not warnings_of
    settings = marian.load(folder, as_transformers=True).model.generation_config
    assert (settings.max_length_factor, settings.max_length) == (None, 512)
    assert "max-length-factor 2.5" in warnings_of[0]


def test_sampling_settings_without_sampling_are_dropped(write, tmp_path, warnings_of):
    folder = write(their_model())
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) | {"temperature": 0.7, "num_beams": 1}
    path.write_text(json.dumps(settings))
    marian.convert(folder, tmp_path / "out")
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").generation_config
    assert (saved.temperature, saved.num_beams) == (None, 1)
    assert any("temperature 0.7" in warning for warning in warnings_of)


def test_the_start_token_is_that_of_transformers(write, tmp_path):
    folder = write(their_model())
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) | {"bos_token_id": 5}
    del settings["decoder_start_token_id"]
    path.write_text(json.dumps(settings))
    ids = torch.tensor([[4, 7, 0]])
    expected = MarianMTModel.from_pretrained(folder).generate(ids)
    assert expected[0, 0] == 5
    assert marian.load(folder).model.generate(ids).tolist() == expected.tolist()


def test_an_opus_folder_becomes_a_folder_that_loads(write_marian, tmp_path):
    folder, _, _ = write_marian()
    main(["convert", "marian", str(folder), str(tmp_path / "out")])
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    source = AutoTokenizer.from_pretrained(tmp_path / "out")
    target = AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert model.config.pad_token_id == source.pad_token_id == target.pad_token_id == SIZE - 1
    assert model.config.position_encoding == "sinusoidal_t2t"
    assert (
        source.decode(target(TARGET_LINES[0]).input_ids, skip_special_tokens=True)
        == (TARGET_LINES[0])
    )
    assert model.generation_config.num_beams == 6


def test_vocabularies_of_two_sizes(write_marian, vocabulary):
    source = {name: number for name, number in vocabulary.items() if name != "<pad>"}
    target = {name: number for name, number in source.items() if number < 150}
    missing = set(source) - set(target)
    folder, weights, options = write_marian(
        vocabularies=[source, target],
        dim_vocabs=[len(source), len(target)],
        tied_embeddings_all=False,
        tied_embeddings=True,
    )
    assert missing
    converted = marian.load(folder)
    config = converted.model.config
    assert (config.vocab_size, config.decoder_vocab_size) == (SIZE, 151)
    assert config.decoder_start_token_id == converted.target_tokenizer.pad_token_id == 150
    ids = torch.tensor([converted.tokenizer("the cat").input_ids])
    with torch.no_grad():
        found = converted.model.double()(ids, decoder_input_ids=torch.tensor([[150, 5, 7]])).logits
    expected = marian_logits(weights, options, ids[0], torch.tensor([5, 7]))
    torch.testing.assert_close(found[0, :, :-1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("larger", ["source", "target"])
def test_padded_batches_of_two_vocabulary_sizes_are_scored_as_single_pairs(
    write_marian, vocabulary, larger
):
    whole = {name: number for name, number in vocabulary.items() if name != "<pad>"}
    part = {name: number for name, number in whole.items() if number < 150}
    sides = [whole, part] if larger == "source" else [part, whole]
    folder, _, _ = write_marian(
        vocabularies=sides,
        dim_vocabs=list(map(len, sides)),
        tied_embeddings_all=False,
        tied_embeddings=True,
    )
    converted = marian.load(folder)
    model, tokenizers = converted.model, (converted.tokenizer, converted.target_tokenizer)
    pairs = list(zip(SOURCE_LINES[:4], TARGET_LINES[:4], strict=True))
    assert len({len(tokenizers[0](source).input_ids) for source, _ in pairs}) > 1
    together = model.score(
        *zip(*pairs, strict=True), *tokenizers[:1], target_tokenizer=tokenizers[1]
    )
    for number, (source, target) in enumerate(pairs):
        alone = model.score([source], [target], tokenizers[0], target_tokenizer=tokenizers[1])
        torch.testing.assert_close(together.sums[number], alone.sums[0], atol=1e-4, rtol=1e-5)


def test_odd_tokens_of_a_vocabulary_are_read(tmp_path):
    path = tmp_path / "odd.yml"
    path.write_bytes(
        '"</s>": 0\n<unk>: 1\n"\\"": 2\n"\\\\": 3\n\'\'\'\': 4\n? ▁long\n: 5\n"\\x85": 6\n'
        '":": 7\ntrue: 8\n~: 9\n▁a\u2028b: 10\n1.0: 11\n▁x:y: 12\n"#": 13\n'.encode()
    )
    names = ["</s>", "<unk>", '"', "\\", "'", "▁long", "\x85", ":", "true", "~", "▁a\u2028b"]
    names += ["1.0", "▁x:y", "#"]
    assert marian_vocabulary.read_vocabulary(path) == {
        name: number for number, name in enumerate(names)
    }
    path.write_text("</s>: 0\n<unk>: 1\na: 3\n")
    with pytest.raises(ConversionError, match="not 0 to 2"):
        marian_vocabulary.read_vocabulary(path)
    path.write_text('</s>: 0\n<unk>: 1\n"\\ud800": 2\n')
    with pytest.raises(ConversionError, match="a token that is not valid text"):
        marian_vocabulary.read_vocabulary(path)
    (tmp_path / "words.json").write_text('{"</s>": 0, "<unk>": "1"}')
    with pytest.raises(ConversionError, match="not 0 to 1"):
        marian_vocabulary.read_vocabulary(tmp_path / "words.json")
    path.write_text("</s>: 0\n<unk>: 1\nsomething\n")
    with pytest.raises(ConversionError, match="line 3"):
        marian_vocabulary.read_vocabulary(path)


REFUSED = {
    "type": "s2s",
    "transformer-decoder-autoreg": "rnn",
    "transformer-no-projection": True,
    "transformer-ffn-activation": "tanh",
    "transformer-ffn-depth": 3,
    "transformer-postprocess": "dhn",
    "transformer-postprocess-emb": "n",
    "transformer-tied-layers": [1, 1],
    "transformer-train-position-embeddings": True,
    "transformer-pool": True,
    "right-left": True,
    "ulr": True,
    "lemma-dim-emb": 64,
    "factors-combine": "concat",
    "input-types": ["class", "sequence"],
    "transformer-attention-mask": "alibi",
    "transformer-of-tomorrow": "yes",
}


def test_options_of_other_models_are_refused_at_once(write_marian, tmp_path):
    weights = marian_weights(OPTIONS)
    folder, _, _ = write_marian(weights=weights, **REFUSED)
    with pytest.raises(ConversionError) as caught:
        marian.convert(folder, tmp_path / "out")
    for name in REFUSED:
        assert name in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_other_decoders_and_several_sources_are_refused(write_marian):
    folder, _, _ = write_marian(
        weights=marian_weights(OPTIONS),
        transformer_decoder_autoreg="average-attention",
        dim_vocabs=[9, 9, 9],
    )
    with pytest.raises(ConversionError, match=r"'average-attention'.*dim-vocabs \[9, 9, 9\]"):
        marian.load(folder)
    folder, _, _ = write_marian(
        "ssru", weights=marian_weights(OPTIONS), transformer_decoder_autoreg="rnn", dec_cell="ssru"
    )
    with pytest.raises(ConversionError, match=r"autoreg 'rnn'; dec-cell 'ssru'"):
        marian.load(folder)
    folder, _, _ = write_marian("ensemble", decoder={"models": ["a.npz", "b.npz"]})
    with pytest.raises(ConversionError, match="not an ensemble"):
        marian.load(folder)
    for normalize, beams in (("yes", [2]), (math.nan, 2.5), (math.inf, -1)):
        name = f"words-{normalize}"
        folder, _, _ = write_marian(name, decoder={"normalize": normalize, "beam-size": beams})
        message = (
            f"beam-size {beams!r} (not a number of beams); normalize {normalize!r} (not a number)"
        )
        with pytest.raises(ConversionError, match=re.escape(message)):
            marian.load(folder)


def test_papers_positions_need_the_papers_wavelengths(write_marian):
    folder, _, _ = write_marian()
    with pytest.raises(ConversionError, match="as_transformers"):
        marian.load(folder, paper_positions=True)


def test_damaged_marian_files_are_named_and_nothing_is_left(write_marian, tmp_path):
    folder, weights, _ = write_marian()
    path = folder / "opus.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match=r"not a complete .npz"):
        marian.convert(folder, tmp_path / "out")
    np.savez(path, **weights)
    with pytest.raises(ConversionError, match=r"special:model.yml"):
        marian.convert(folder, tmp_path / "out")
    np.savez(path, **{**weights, "special:model.yml": np.array([{}], dtype=object)})
    with pytest.raises(ConversionError, match=r"not a complete .npz"):
        marian.convert(folder, tmp_path / "out")
    with zipfile.ZipFile(path, "w") as archive:
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**59},)}}\n".encode()
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        archive.writestr("encoder_Wemb.npy", start + header)
    with pytest.raises(ConversionError, match=r"not a complete .npz"):
        marian.convert(folder, tmp_path / "out")
    text = np.frombuffer(b"type: transformer", dtype=np.int8)
    odd = {"whole": np.ones((2, 2), np.int64), "cube": np.ones((2, 2, 2), np.float32)}
    np.savez(path, **odd, **{"special:model.yml": text})
    with pytest.raises(ConversionError, match=r"whole \(int64, 2 .*cube \(float32, 3 dimensions"):
        marian.convert(folder, tmp_path / "out")
    np.savez(path, **weights, **{"special:model.yml": text[:4]})
    with pytest.raises(ConversionError, match="does not hold options"):
        marian.convert(folder, tmp_path / "out")
    path.unlink()
    with pytest.raises(ConversionError, match=r"There is no file .*opus.npz"):
        marian.convert(folder, tmp_path / "out")
    bias = "decoder_l1_context_bk"
    for name, change, message in (
        ("missing", {bias: None}, "is missing"),
        ("extra", {"decoder_l1_rnn_W": np.ones((2, 2), np.float32)}, "No rule knows"),
        ("rows", {bias: np.ones((2, 16), np.float32)}, r"has the shape \(2, 16\)"),
    ):
        changed = {n: array for n, array in (weights | change).items() if array is not None}
        other, _, _ = write_marian(name, weights=changed)
        with pytest.raises(ConversionError, match=message):
            marian.convert(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
