"""Conversion of Marian's own files, compared with its formulas, transformers and CTranslate2."""

import json
import math
import re
import zipfile

import numpy as np
import pytest
import torch
import yaml
from marian_folders import FIXTURES, SOURCE_LINES, TARGET_LINES, their_model
from marian_formulas import OPTIONS, SIZE, marian_logits, marian_weights
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel
from vaswani.commands.main import main
from vaswani.conversion import marian, marian_vocabulary, to_marian
from vaswani.conversion.errors import ConversionError

spms, vocabulary, write, warnings_of, batch = FIXTURES


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
