"""A language model in onnxruntime, and the search over its graphs, against `generate`."""

import re

import pytest
import torch
from test_conversion_onnx import exporting
from transformers import DynamicCache
from vaswani.conversion import ctranslate2, onnx, onnx_graphs, to_marian
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.onnx import OnnxLanguageModel, OnnxTranslator, save

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniTokenizer,
)

EOS = 2
SIZES = {"vocab_size": 19, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4}
OPTIONS = {
    "paper": {},
    "pre-norm, learned positions": {
        "norm_position": "pre",
        "position_encoding": "learned",
        "max_position_embeddings": 30,
        "position_offset": 2,
        "attention_bias": True,
        "d_k": 3,
        "d_v": 5,
    },
    "fairseq's sinusoids, untied": {
        "position_encoding": "sinusoidal_t2t",
        "tie_word_embeddings": False,
        "lm_head_bias": True,
        "activation_function": "gelu",
        "scale_embedding": False,
    },
}
SEARCHES = [
    {},
    {"num_beams": 4},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 2, "length_penalty": 0.6, "length_penalty_type": "gnmt"},
]


def model_of(seed=0, **settings):
    """Build a random model whose texts differ and sometimes end."""
    torch.manual_seed(seed)
    ends = {"init_std": 1.0, "tie_word_embeddings": False, "lm_head_bias": True, **settings}
    model = VaswaniForCausalLM(VaswaniDecoderConfig(**SIZES, decoder_ffn_dim=24, **ends)).eval()
    with torch.no_grad():
        if model.lm_head.bias is not None:
            model.lm_head.bias[EOS] += 2
    return model


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 19, (n,), generator=generator).tolist() for n in lengths]


def generated(model, prompts, **search):
    """Return the continuations of prompts, which are padded on the left, without padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    rows = model.generate(ids, attention_mask=mask, **search)[:, width:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


class ModelAsGraph:
    """A fake onnxruntime session that runs the model instead of the graph."""

    def __init__(self, model, path):
        self.model, self.part = model, path.rpartition("/")[2].removesuffix(".onnx")

    def run(self, feed):
        """Run one graph over named arrays, as `run_graph` does with a session."""
        given = {name: torch.from_numpy(array) for name, array in feed.items()}
        cache = DynamicCache()
        names = [
            [f"past_key_values.layers.{layer}.{what}" for what in ("keys", "values")]
            for layer in range(self.model.config.decoder_layers)
        ]
        if self.part == "decode":
            for layer, pair in enumerate(names):
                cache.update(*(given.pop(name) for name in pair), layer)
        assert given.keys() == {"input_ids", "attention_mask", "position_ids"}
        with torch.no_grad():
            logits = self.model(**given, past_key_values=cache, use_cache=True).logits
        outputs = {"logits": logits.numpy()}
        for layer, (keys, values) in zip(cache.layers, names, strict=True):
            outputs |= {keys: layer.keys.numpy(), values: layer.values.numpy()}
        return outputs


@pytest.fixture
def writer_of(monkeypatch, tmp_path):
    """Build a writer whose graphs are the model itself."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    def build(model):
        model.config.save_pretrained(tmp_path)
        model.generation_config.save_pretrained(tmp_path)
        monkeypatch.setattr(
            onnxruntime, "InferenceSession", lambda path, *_, **__: ModelAsGraph(model, path)
        )
        monkeypatch.setattr(onnx_graphs, "run_graph", lambda session, feed: session.run(feed))
        return OnnxLanguageModel(tmp_path)

    return build


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_the_search_writes_what_generate_writes(writer_of, search):
    lengths = set()
    for seed in range(3):
        model = model_of(seed)
        writer = writer_of(model)
        for prompts in (prompts_of([5, 1, 8, 3, 6], seed), prompts_of([4], seed)):
            found = writer.generate(prompts, max_new_tokens=9, **search)
            assert found == generated(model, prompts, max_new_tokens=9, **search)
            lengths |= {len(row) for row in found if row[-1] == EOS}
    assert len(lengths) > 1


@pytest.mark.parametrize("beams", [1, 3])
def test_settings_and_rules_come_from_the_generation_config(writer_of, beams):
    model, prompts = model_of(), prompts_of([5, 1, 8])
    model.generation_config.update(num_beams=beams, max_length=14, min_length=11)
    model.generation_config.suppress_tokens = [5, 6, 7]
    found = writer_of(model).generate(prompts)
    assert found == generated(model, prompts)
    assert all(3 <= len(row) <= 6 for row in found)
    assert not {5, 6, 7} & {token for row in found for token in row}


def test_texts_without_a_limit_or_without_room_are_refused(writer_of):
    model = model_of()
    writer = writer_of(model)
    assert writer.generate([]) == []
    with pytest.raises(ValueError, match=r"^Nothing limits the texts: pass max_new_tokens\.$"):
        writer.generate([[3, 4]])
    with pytest.raises(ValueError, match=r"^Prompt 1 has no tokens: begin an empty text with"):
        writer.generate([[3, 4], []], max_new_tokens=3)
    model.generation_config.max_length = 3
    with pytest.raises(ValueError, match=r"^max_length 3 leaves no room after the 4 tokens"):
        writer_of(model).generate([[3, 4, 5, 6]])


def test_positions_beyond_a_learned_table_are_refused(writer_of):
    model = model_of(position_encoding="learned", max_position_embeddings=8)
    model.generation_config.eos_token_id = None
    writer = writer_of(model)
    assert len(writer.generate([[3] * 6], max_new_tokens=3)[0]) == 3
    with pytest.raises(
        ValueError, match=r"^A text has 9 tokens, more than the 8 learned positions"
    ):
        writer.generate([[3] * 6], max_new_tokens=9)


def test_an_encoder_is_refused_by_all_conversions_in_one_sentence(tmp_path):
    encoder = VaswaniEncoderModel(VaswaniEncoderConfig.preset("C-N2", vocab_size=9, d_model=8))
    encoder.save_pretrained(tmp_path / "encoder")
    for module, needed in (
        (onnx, "'vaswani' or 'vaswani_decoder'"),
        (ctranslate2, "'vaswani' or 'vaswani_decoder'"),
        (to_marian, "'vaswani'"),
    ):
        for model, words in (
            (
                tmp_path / "encoder",
                f"of type 'vaswani_encoder', but this conversion needs {needed}.",
            ),
            (encoder, "VaswaniEncoderModel cannot be converted: pass a VaswaniForConditionalGen"),
        ):
            with pytest.raises(ConversionError, match=re.escape(words)):
                module.convert(model, tmp_path / "out")


def test_a_folder_of_the_other_kind_is_refused_in_one_sentence(tiny_model, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model_of().config.save_pretrained(tmp_path / "writes")
    tiny_model().config.save_pretrained(tmp_path / "translates")
    with pytest.raises(OSError, match="holds a decoder alone"):
        OnnxTranslator(tmp_path / "writes")
    with pytest.raises(OSError, match="holds a translation model"):
        OnnxLanguageModel(tmp_path / "translates")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"add_cross_attention": True}, "add_cross_attention"),
        (
            {"position_encoding": "learned", "max_position_embeddings": 4},
            "max_position_embeddings 4",
        ),
    ],
)
def test_models_that_cannot_be_traced_are_refused(tmp_path, settings, words):
    exporting()
    with pytest.raises(ConversionError, match=words):
        save(model_of(**settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_exporter")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_graphs_compute_what_the_model_does(tmp_path, options):
    exporting()
    model = model_of(**options)
    save(model, tmp_path / "out")
    writer = OnnxLanguageModel(tmp_path / "out", threads=1)
    for lengths in ([5, 1, 8, 3, 6], [1], [7, 7]):
        prompts = prompts_of(lengths)
        ids, mask = onnx_graphs.padded(prompts, 0, "left")
        decoder, new = writer.decoder(mask), torch.randint(19, (len(prompts), 3))
        logits = [decoder.read(torch.from_numpy(ids))]
        logits += [decoder.step(new[:, step, None]) for step in range(3)]
        for row, prompt in enumerate(prompts):
            text = torch.tensor([prompt + new[row].tolist()])
            with torch.no_grad():
                expected = model(text).logits[0, len(prompt) - 1 :]
            ours = torch.stack([step[row] for step in logits])
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        for search in SEARCHES:
            found = writer.generate(prompts, max_new_tokens=9, **search)
            assert found == generated(model, prompts, max_new_tokens=9, **search)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_exporter")
@pytest.mark.filterwarnings("ignore")
def test_texts_are_continued_by_the_tokenizer_of_the_folder(tmp_path):
    exporting()
    plain = VaswaniTokenizer.train_from_iterator(
        ["abcdefghijklmnop"], kind="char", vocab_size=19, show_progress=False
    )
    tokenizer, model = plain.for_language_model(), model_of()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "ours")
    save(str(tmp_path / "ours"), tmp_path / "out")
    texts = ["cab", "", "hi"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = model.generate(**batch, num_beams=2, max_new_tokens=6)
    expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
    writer = OnnxLanguageModel(tmp_path / "out")
    assert writer.write(texts, num_beams=2, max_new_tokens=6) == expected
