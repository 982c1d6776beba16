"""The ONNX graphs and their search, compared with the model and its `generate`."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from vaswani.conversion import onnx as converter
from vaswani.conversion.errors import ConversionError
from vaswani.conversion.onnx import OnnxTranslator, save

from vaswani import VaswaniTokenizer

EOS = 2
OPTIONS = {
    "paper": {},
    "pre-norm, learned positions, two vocabularies": {
        "norm_position": "pre",
        "position_encoding": "learned",
        "max_position_embeddings": 30,
        "position_offset": 2,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 23,
        "attention_bias": True,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "d_k": 3,
        "d_v": 5,
    },
    "fairseq's sinusoids, untied": {
        "position_encoding": "sinusoidal_t2t",
        "position_offset": 2,
        "tie_word_embeddings": False,
        "final_layer_norm": True,
        "lm_head_bias": True,
        "activation_function": "gelu",
        "scale_embedding": False,
    },
}
SEARCHES = [
    {},
    {"max_new_tokens": 7},
    {"num_beams": 4, "max_length_offset": 9},
    {"num_beams": 4, "max_length_offset": 6, "length_penalty": 0.0},
    {"num_beams": 2, "max_length_offset": 9, "length_penalty": -1.0},
    {"num_beams": 2, "max_length_offset": 2, "max_length_factor": 1.3},
    {"num_beams": 3, "max_new_tokens": 9, "early_stopping": False},
    {
        "num_beams": 4,
        "max_new_tokens": 9,
        "early_stopping": True,
        "length_penalty": 1.0,
        "length_penalty_type": "hf",
    },
]


def exporting():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip("transformers.exporters", reason="transformers has no exporters")


class ModelAsSession:
    """A session like onnxruntime's that runs the model instead of a graph."""

    def __init__(self, model, path):
        self.model, self.part = model, path.rpartition("/")[2].removesuffix(".onnx")
        caches = [
            f"past_key_values.{kind}_attention_cache.layers.{layer}.{what}"
            for kind in ("self", "cross")
            for layer in range(model.config.decoder_layers)
            for what in ("keys", "values")
        ]
        self.caches = caches
        source = ["attention_mask", "encoder_outputs.last_hidden_state", "decoder_input_ids"]
        self.inputs, self.outputs = {
            "encoder": (["input_ids", "attention_mask"], ["last_hidden_state"]),
            "prefill": (source, ["logits", *caches]),
            "decode": (
                [*source, *(f"input.{name}" for name in caches)],
                ["logits", *(f"output.{name}" for name in caches)],
            ),
        }[self.part]

    def get_inputs(self):
        return [SimpleNamespace(name=name) for name in self.inputs]

    def get_outputs(self):
        return [SimpleNamespace(name=name) for name in self.outputs]

    @torch.no_grad()
    def run(self, names, feed):
        assert names == self.outputs
        assert feed.keys() == set(self.inputs)
        given = {name: torch.from_numpy(array) for name, array in feed.items()}
        if self.part == "encoder":
            return [self.model.model.encoder(**given).last_hidden_state.numpy()]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        sides = (cache.self_attention_cache, cache.cross_attention_cache)
        if self.part == "decode":
            tensors = iter(given[f"input.{name}"] for name in self.caches)
            for kind, side in enumerate(sides):
                for layer in range(self.model.config.decoder_layers):
                    side.update(next(tensors), next(tensors), layer)
                    cache.is_updated[layer] = kind == 1
        logits = self.model(
            encoder_outputs=(given["encoder_outputs.last_hidden_state"],),
            attention_mask=given["attention_mask"],
            decoder_input_ids=given["decoder_input_ids"],
            past_key_values=cache,
            use_cache=True,
        ).logits
        layers = [layer for side in sides for layer in side.layers]
        arrays = [tensor.numpy() for layer in layers for tensor in (layer.keys, layer.values)]
        return [logits.numpy(), *arrays]


@pytest.fixture
def translator_of(monkeypatch, tmp_path):
    """Build a translator that runs the model instead of graphs."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    def build(model, **options):
        model.config.save_pretrained(tmp_path)
        model.generation_config.save_pretrained(tmp_path)
        monkeypatch.setattr(
            onnxruntime, "InferenceSession", lambda path, *_, **__: ModelAsSession(model, path)
        )
        return OnnxTranslator(tmp_path, **options)

    return build


def sentences(lengths, size=19, seed=0):
    """Random sentences that end in </s>."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, size, (n - 1,), generator=generator).tolist() for n in lengths]
    return [[*row, EOS] for row in rows]


def batch_of(sources):
    width = max(map(len, sources))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in sources])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sources])
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, sources, **search):
    """Return the output of `generate` after the start token and up to the end token."""
    factor, offset = search.get("max_length_factor", 1), search.get("max_length_offset", 50)
    limits = [int(factor * len(row) + offset) for row in sources]
    if search.get("max_new_tokens"):
        limits = [search["max_new_tokens"]] * len(sources)
    rows = model.generate(**batch_of(sources), **search)[:, 1:].tolist()
    cut = [row[:limit] for row, limit in zip(rows, limits, strict=True)]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in cut]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_the_search_finds_what_generate_finds(tiny_model, translator_of, search):
    ended = set()
    for seed in range(3):
        model = tiny_model(
            seed=seed, init_std=1.0, tie_word_embeddings=False, lm_head_bias=True, decoder_layers=1
        )
        with torch.no_grad():
            model.lm_head.bias[EOS] += seed
        translator = translator_of(model)
        for lengths in ([5, 1, 8, 3, 6], [4]):
            sources = sentences(lengths, seed=seed)
            found = translator.generate(sources, **search)
            assert found == generated(model, sources, **search)
            ended |= {len(row) for row in found if row[-1] == EOS}
    assert len(ended) > 2


def test_settings_and_limits_come_from_the_generation_config(tiny_model, translator_of):
    model = tiny_model()
    model.generation_config.update(num_beams=3, length_penalty=0.2, max_length_offset=4)
    sources = sentences([3, 6])
    assert translator_of(model).generate(sources) == generated(
        model, sources, num_beams=3, length_penalty=0.2, max_length_offset=4
    )
    model.generation_config.max_length_factor = 0.5
    assert translator_of(model).generate(sources) == generated(
        model, sources, num_beams=3, length_penalty=0.2, max_length_offset=4, max_length_factor=0.5
    )
    model.generation_config.update(max_length_offset=0, max_length_factor=None)
    model.generation_config.update(max_new_tokens=5, num_beams=1)
    translator = translator_of(model)
    assert translator.generate(sources) == generated(model, sources, max_new_tokens=5)
    limit = {"max_length_offset": 7}
    assert translator.generate(sources, **limit) == generated(model, sources, **limit)
    model.generation_config.max_new_tokens = None
    with pytest.raises(ValueError, match="Nothing limits the translations"):
        translator_of(model).generate(sources)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"num_beams": 0}, r"^num_beams must be an integer from 1 to 10000, got 0"),
        ({"num_beams": 2.5}, r"^num_beams must be an integer from 1 to 10000, got 2\.5"),
        ({"length_penalty_type": "GNMT"}, r"^length_penalty_type must be one of .* got 'GNMT'"),
        ({"length_penalty": 500.0}, r"^length_penalty must lie between -64 and 64"),
        ({"early_stopping": "nevr"}, r"early_stopping.* must be .*nevr"),
        ({"max_new_tokens": "4"}, r"^max_new_tokens must be a number of tokens"),
    ],
    ids=str,
)
def test_senseless_settings_are_refused_by_value(tiny_model, translator_of, setting, complaint):
    with pytest.raises(ValueError, match=complaint):
        translator_of(tiny_model()).generate(sentences([3]), **setting)


@pytest.mark.parametrize("token", [-1, -100, 19])
def test_tokens_without_an_entry_are_refused(tiny_model, translator_of, token):
    with pytest.raises(ValueError, match=f"^Token id {token} is outside the 19 entries"):
        translator_of(tiny_model()).generate([[5, token, EOS]])


def test_bad_words_do_not_ban_the_end_token(tiny_model, translator_of):
    model = tiny_model(tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[EOS] += 9
    model.generation_config.bad_words_ids = [[EOS], [7]]
    assert translator_of(model).generate(sentences([4])) == [[EOS]]
    assert generated(model, sentences([4])) == [[EOS]]


def test_learned_positions_limit_the_translations(tiny_model, translator_of):
    model = tiny_model(position_encoding="learned", max_position_embeddings=12)
    sources = sentences([5, 11])
    found = translator_of(model).generate(sources, num_beams=2)
    assert max(map(len, found)) <= 11
    expected = model.generate(**batch_of(sources), num_beams=2)[:, 1:].tolist()
    assert [row[: len(ours)] for row, ours in zip(expected, found, strict=True)] == found
    with pytest.raises(ValueError, match=r"Source 1 has 13 tokens.* 12 .*max_position_embeddings"):
        translator_of(model).generate(sentences([5, 13]))
    model.generation_config.suppress_tokens = [2]  # translations do not end before their limit
    with pytest.raises(ValueError, match=r"A translation has 13 tokens.* 12 "):
        translator_of(model).generate(sources, num_beams=2, max_new_tokens=14)


def test_several_end_tokens_end_a_translation(tiny_model, translator_of):
    model = tiny_model()
    model.generation_config.eos_token_id = [2, 7, 9]
    sources = sentences([5, 2, 7])
    for beams in (1, 3):
        found = translator_of(model).generate(sources, num_beams=beams)
        rows = model.generate(**batch_of(sources), num_beams=beams)[:, 1:].tolist()
        assert [row[: len(ours)] for row, ours in zip(rows, found, strict=True)] == found
        assert {row[-1] for row in found} & {7, 9}


RULES = [
    {"suppress_tokens": [3, 4, 5, 6, 7, 8, 9, 10]},
    {"bad_words_ids": [[4], [9]], "renormalize_logits": True},
    {"min_length": 5},
    {"min_new_tokens": 4, "forced_eos_token_id": 2},
    # as of fairseq's models
    {"min_length": 2, "suppress_tokens": [0], "forced_eos_token_id": 2},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("beams", [1, 4])
def test_rules_about_single_tokens_are_obeyed(tiny_model, translator_of, rules, beams):
    changed = 0
    for seed in range(3):
        model = tiny_model(
            seed=seed, init_std=1.0, tie_word_embeddings=False, lm_head_bias=True, decoder_layers=1
        )
        with torch.no_grad():
            model.lm_head.bias[EOS] += 2
        sources = sentences([5, 1, 8, 3, 6], seed=seed)
        limits = {"max_new_tokens": 7, "max_length_offset": 0, "num_beams": beams}
        free = generated(model, sources, **limits)
        model.generation_config.update(**limits, **rules)
        found = translator_of(model).generate(sources)
        rows = model.generate(**batch_of(sources))[:, 1:].tolist()
        assert found == [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
        changed += found != free
    assert changed


def test_an_end_token_numbered_0_ends_a_translation(tiny_model, translator_of):
    model = tiny_model(seed=1, init_std=1.0, tie_word_embeddings=False, lm_head_bias=True)
    model.generation_config.update(eos_token_id=0, pad_token_id=1, max_length_offset=9)
    with torch.no_grad():
        model.lm_head.bias[0] += 4
    found = translator_of(model).generate(sentences([5, 2, 7, 4]), num_beams=3)
    assert any(row[-1] == 0 for row in found)
    assert not any(0 in row[:-1] for row in found)


def test_no_sources_give_no_translations_and_empty_ones_are_refused(tiny_model, translator_of):
    translator = translator_of(tiny_model())
    assert translator.generate([]) == []
    with pytest.raises(ValueError, match="Source 1 has no tokens"):
        translator.generate([[4, 2], []])
    with pytest.raises(ValueError, match="`max_new_tokens` must be greater than 0"):
        translator.generate([[4, 2]], max_new_tokens=0)
    translator.settings = {"max_length": 1, "decoder_start_token_id": EOS}
    with pytest.raises(ValueError, match="at least 1 new token, but its limit is 0"):
        translator.generate([[4, 2]])


def test_settings_that_the_search_lacks_are_refused_at_once(tiny_model, translator_of):
    model = tiny_model()
    model.generation_config.update(no_repeat_ngram_size=2, repetition_penalty=1.3)
    model.generation_config.bad_words_ids = [[4], [5, 6]]
    with pytest.raises(
        ValueError, match=r"no_repeat_ngram_size=2, repetition_penalty=1\.3, bad_words_ids of sev"
    ):
        translator_of(model)


def test_settings_that_change_nothing_are_not_refused(tiny_model, translator_of):
    model = tiny_model()
    expected = generated(model, [[4, 2]])
    model.generation_config.update(repetition_penalty=1.0, num_return_sequences=1, top_k=50)
    assert translator_of(model).generate([[4, 2]]) == expected


def test_positions_too_few_to_trace_are_refused(tiny_model, tmp_path):
    exporting()
    model = tiny_model(position_encoding="learned", max_position_embeddings=3)
    with pytest.raises(ConversionError, match="max_position_embeddings 3"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_opset_that_the_exporter_does_not_write_is_refused(monkeypatch):
    program = SimpleNamespace(opset_imports={"": 18})
    monkeypatch.setattr(converter, "_graphs", lambda *_: {"encoder": program})
    assert converter._graphs_of_opset(None, None, None, 18) == {"encoder": program}
    assert converter._graphs_of_opset(None, None, None, None) == {"encoder": program}
    with pytest.raises(ConversionError, match=r"cannot write opset 12: .* encoder has opset 18"):
        converter._graphs_of_opset(None, None, None, 12)

    def failing(*_):
        raise RuntimeError("no such opset")

    monkeypatch.setattr(converter, "_graphs", failing)
    with pytest.raises(ConversionError, match="fails with opset 99: no such opset"):
        converter._graphs_of_opset(None, None, None, 99)
    with pytest.raises(ConversionError, match="The exporter fails: no such opset"):
        converter._graphs_of_opset(None, None, None, None)


def test_without_exporters_the_error_says_what_is_needed(monkeypatch, tiny_model, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers.exporters", None)
    with pytest.raises(ConversionError, match=r"pip install 'vaswani\[convert\]'"):
        save(tiny_model(), tmp_path / "out")


def test_settings_that_the_folders_reader_refuses_are_said_when_it_is_written(
    monkeypatch, tiny_model, tmp_path
):
    warnings = []
    monkeypatch.setattr(converter.logger, "warning", warnings.append)
    for name, value in (("_exporter", ({}, {})), ("_graphs_of_opset", {}), ("_check", None)):
        monkeypatch.setattr(converter, name, lambda *_, value=value: value)
    model = tiny_model()
    save(model, tmp_path / "plain")
    assert not warnings
    model.generation_config.update(no_repeat_ngram_size=2)
    save(model, tmp_path / "other")
    assert "do not know no_repeat_ngram_size=2, and refuse" in warnings[0]


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_exporter")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_graphs_compute_what_the_model_does(tiny_model, tmp_path, options):
    exporting()
    model = tiny_model(**options, dtype=torch.float32, attn_implementation="eager")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(model, tmp_path / "out")
    translator = OnnxTranslator(tmp_path / "out", threads=1)

    sizes = model.config.vocab_size, model.config.decoder_vocab_size
    for lengths, prompt in (([1, 6, 4], 1), ([9], 4), ([2, 3], 2)):
        sources = sentences(lengths, sizes[0])
        target = torch.randint(sizes[1], (len(lengths), prompt + 3))
        decoder = translator.encode(sources)
        logits = [decoder.read(target[:, :prompt])]
        logits += [decoder.step(target[:, prompt + step, None]) for step in range(3)]
        with torch.no_grad():
            expected = model(**batch_of(sources), decoder_input_ids=target).logits
        for step, ours in enumerate(logits):
            torch.testing.assert_close(ours, expected[:, prompt + step - 1], atol=1e-5, rtol=1e-5)

    sources = sentences([5, 1, 8, 3, 6], sizes[0])
    for search in ({"max_length_offset": 9}, {"max_length_offset": 9, "num_beams": 4}):
        assert translator.generate(sources, **search) == generated(model, sources, **search)

    # The model is unchanged, and its fast search still runs.
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_exporter")
@pytest.mark.filterwarnings("ignore")
def test_text_goes_in_and_out_by_the_tokenizers_of_the_folder(tiny_model, tmp_path):
    exporting()
    tokenizers = [
        VaswaniTokenizer.train_from_iterator(
            [letters], kind="char", vocab_size=19, show_progress=False
        )
        for letters in ("abcdefghijklmnop", "ABCDEFGHIJKLMNOP")
    ]
    model = tiny_model(share_encoder_decoder_embeddings=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "ours")
    tokenizers[0].save_pretrained(tmp_path / "ours")
    tokenizers[1].save_pretrained(tmp_path / "ours" / "target_tokenizer")
    save(str(tmp_path / "ours"), tmp_path / "out")
    texts = ["cab", "", "hi"]
    ids = model.float().generate(
        **tokenizers[0](texts, padding=True, return_tensors="pt"), num_beams=2
    )
    expected = tokenizers[1].batch_decode(ids, skip_special_tokens=True)
    expected[1] = ""
    translator = OnnxTranslator(tmp_path / "out")
    assert translator.translate(texts, num_beams=2) == expected
    assert translator.translate(["", " "]) == ["", ""]
    with pytest.raises(TypeError, match="texts is the string 'cab': pass a list of texts"):
        translator.translate("cab")


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_exporter")
@pytest.mark.filterwarnings("ignore")
def test_graphs_that_compute_something_else_leave_no_folder(monkeypatch, tiny_model, tmp_path):
    exporting()
    write = converter._graphs

    def other_weights(exporter, options, model):
        with torch.no_grad():
            model.lm_head.weight[5] += 1
        return write(exporter, options, model)

    monkeypatch.setattr(converter, "_graphs", other_weights)
    with pytest.raises(ConversionError, match="a logit differs by"):
        save(tiny_model(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
