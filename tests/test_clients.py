"""Other programs: they work with our models as with other translation models of transformers."""

import copy
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import ROOT, Page, environment
from huggingface_hub.errors import StrictDataclassError
from num2words import num2words
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextIteratorStreamer,
    default_data_collator,
    pipeline,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.pipelines import PIPELINE_REGISTRY
from vaswani.conversion.to_marian import to_marian

from vaswani import (
    VaswaniConfig,
    VaswaniDecoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniModel,
    VaswaniTranslationPipeline,
)

FROZEN = Path(__file__).resolve().parent / "frozen" / "0.1"
ENGLISH = ["seven", "nine hundred and ninety-nine"]
GERMAN = ["sieben", "neunhundertneunundneunzig"]
EXAMPLES = os.environ.get("TRANSFORMERS_EXAMPLES")
PAGE = Page(ROOT / "docs" / "clients.md")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FROZEN)


@pytest.fixture
def model():
    """A model of number words, with num_beams=4 in its generation config."""
    return AutoModelForSeq2SeqLM.from_pretrained(FROZEN)


@pytest.fixture(scope="module")
def batch(tokenizer):
    return tokenizer(ENGLISH, padding=True, return_tensors="pt")


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """A folder saved by this version, with its code."""
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def translated(tokenizer, batch):
    def translate(model, **settings):
        output = model.generate(**{**batch, **settings})
        return tokenizer.batch_decode(output, skip_special_tokens=True)

    return translate


# max_position_embeddings, which scripts and sentence-transformers compare with integers


@pytest.mark.parametrize("encoding", ["sinusoidal", "sinusoidal_concat", "sinusoidal_t2t"])
def test_sinusoids_have_an_integer_for_the_longest_sequence_that_limits_nothing(encoding, tmp_path):
    config = VaswaniConfig(position_encoding=encoding)
    config.save_pretrained(tmp_path)
    for found in (config, AutoConfig.from_pretrained(tmp_path), copy.deepcopy(config)):
        assert type(found.max_position_embeddings) is int
        assert min(found.max_position_embeddings, 10**6) == 10**6
    positions = torch.arange(config.max_position_embeddings - 1, config.max_position_embeddings + 2)
    # float32 represents all integers up to this limit, and not the next one.
    assert positions.float().unique().tolist() == positions[:2].tolist()


def test_a_number_that_is_given_stays_and_learned_positions_need_one():
    assert VaswaniConfig(max_position_embeddings=77).max_position_embeddings == 77
    unlimited, learned = VaswaniConfig().to_dict(), {"position_encoding": "learned"}
    with pytest.raises(StrictDataclassError, match="set max_position_embeddings"):
        VaswaniConfig(**{**unlimited, **learned})
    with pytest.raises(ValueError, match="set max_position_embeddings"):
        VaswaniModel(VaswaniConfig.from_dict(unlimited, **learned))


def test_a_config_of_version_0_1_with_null_is_compared_with_integers_by_trusted_code(folder):
    shutil.copy(FROZEN / "config.json", folder)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] is None
    trusted = get_class_from_dynamic_module("configuration_vaswani.VaswaniConfig", str(folder))
    assert trusted.__module__.startswith("transformers_modules.")
    for config_class in (trusted, AutoConfig):
        assert config_class.from_pretrained(folder).max_position_embeddings >= 1024


def test_marianmt_gets_a_table_of_positions_it_can_hold(tiny_model):
    unlimited = tiny_model(position_encoding="sinusoidal_concat", attention_bias=True)
    assert to_marian(unlimited).config.max_position_embeddings == 1024
    limited = tiny_model(
        position_encoding="sinusoidal_concat", attention_bias=True, max_position_embeddings=60
    )
    assert to_marian(limited).config.max_position_embeddings == 60


# transformers' example scripts


def encoded(tokenizer, numbers, **padding):
    sources, targets = (
        [num2words(number, lang=language) for number in numbers] for language in ("en", "de")
    )
    data = tokenizer(
        sources, text_target=targets, truncation=True, **{"max_length": 1024, **padding}
    )
    rows = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    for row in rows:
        ignored = -100 if padding else None
        row["labels"] = [ignored if token == 0 else token for token in row["labels"]]
    return rows


def trainer_of_the_scripts(model, tokenizer, folder, static=False, **settings):
    padding = {"padding": "max_length", "max_length": 24} if static else {}
    rows = encoded(tokenizer, range(100, 116), **padding)
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=4,
        save_steps=2,
        predict_with_generate=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    return Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        processing_class=tokenizer,
        data_collator=default_data_collator if static else collator,
        compute_metrics=lambda outcome: {"shape": list(outcome.predictions.shape)},
    )


@pytest.mark.parametrize(
    ("static", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2}),
        pytest.param(
            *(False, {"torch_compile": True, "torch_compile_backend": "eager"}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["as printed", "pad_to_max_length", "label smoothing", "torch_compile"],
)
def test_the_steps_of_the_example_scripts(model, tokenizer, tmp_path, static, settings):
    config = model.config
    assert hasattr(config, "max_position_embeddings")
    assert not config.max_position_embeddings < 1024
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert config.decoder_start_token_id is not None
    trainer = trainer_of_the_scripts(model, tokenizer, tmp_path, static, **settings)
    before = trainer.evaluate(max_length=30, num_beams=2)
    trained = trainer.train()
    assert trained.global_step == 4
    assert trainer.evaluate(max_length=30, num_beams=2)["eval_loss"] != before["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset, max_length=30, num_beams=1)
    assert predicted.predictions.shape[0] == 4
    trainer.save_model()
    resumed = trainer_of_the_scripts(model, tokenizer, tmp_path, static, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_label_smoothing_of_the_trainer_without_a_collator_names_the_way_out(
    model, tokenizer, tmp_path
):
    trainer = trainer_of_the_scripts(
        model, tokenizer, tmp_path, static=True, label_smoothing_factor=0.1
    )
    with pytest.raises(ValueError, match="factor at 0") as error:
        trainer.train()
    assert "DataCollatorForSeq2Seq(model=model)" in str(error.value)


METRIC = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        references = datasets.Value("string")
        if {several}:
            references = datasets.Sequence(references)
        features = {{"predictions": datasets.Value("string"), "references": references}}
        return evaluate.MetricInfo("", "", features=datasets.Features(features))

    def _compute(self, predictions, references, use_stemmer=False):
        pairs = zip(predictions, references)
        return {{"score": float(sum(one in several for one, several in pairs))}}
"""


@pytest.fixture
def working_folder(tmp_path):
    """Data for the scripts, and replacements for their downloads."""
    for name, first in (("train", 100), ("valid", 200), ("test", 300)):
        pairs = [(num2words(n), num2words(n, lang="de")) for n in range(first, first + 8)]
        translation = [{"translation": {"en": source, "de": target}} for source, target in pairs]
        summary = [{"text": source, "summary": target} for source, target in pairs]
        for task, rows in (("translation", translation), ("summarization", summary)):
            lines = "\n".join(map(json.dumps, rows))
            (tmp_path / f"{task}.{name}.json").write_text(lines)
    for metric, several in (("sacrebleu", True), ("rouge", False)):
        (tmp_path / metric).mkdir()
        (tmp_path / metric / f"{metric}.py").write_text(METRIC.format(several=several))
    stub = "class data:\n    find = print\n\n\ndef sent_tokenize(text):\n    return [text]\n"
    (tmp_path / "nltk.py").write_text(stub)
    # Python runs this file first, so that the package cannot be imported.
    blocked = "import sys\nsys.modules['vaswani'] = None\n"
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(blocked)
    return tmp_path


def test_a_script_is_started_with_the_package_as_printed(tmp_path, monkeypatch):
    trusted, imported = (shlex.split(line) for line in PAGE.commands("sh"))
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.found = (__name__, sys.argv)\n")
    assert imported[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", ["-c", str(script), *imported[4:]])
    exec(imported[2], {})
    assert sys.found == ("__main__", [str(script), *imported[4:]])
    assert [word for word in trusted[2:] if word != "--trust_remote_code"] == imported[4:]


@pytest.mark.slow
@pytest.mark.skipif(
    not EXAMPLES, reason="TRANSFORMERS_EXAMPLES must name a checkout of transformers' repository"
)
@pytest.mark.parametrize("with_package", [True, False], ids=["package", "trusted code"])
@pytest.mark.parametrize("written_by", ["this version", "0.1"])
@pytest.mark.parametrize("task", ["translation", "summarization"])
def test_the_official_scripts_run_unedited(
    task, written_by, with_package, working_folder, folder, monkeypatch
):
    (script,) = Path(EXAMPLES).glob(f"**/pytorch/{task}/run_{task}.py")
    if written_by == "0.1":
        shutil.copy(FROZEN / "config.json", folder)
    trusted, imported = (shlex.split(line) for line in PAGE.commands("sh"))
    command = imported if with_package else trusted
    if task == "summarization":
        languages = command.index("--source_lang")
        del command[languages : languages + 4]
    places = {
        "python": sys.executable,
        "run_translation.py": str(script),
        "runs/quickstart": str(folder),
        "runs/tuned": "out",
        "train.json": f"{task}.train.json",
        "valid.json": f"{task}.valid.json",
    }
    command = [places.get(word, word) for word in command]
    command += ["--do_predict", "--test_file", f"{task}.test.json", "--max_steps", "4"]
    command += ["--save_steps", "2", "--report_to", "none"]
    package = environment()["PYTHONPATH"] if with_package else "blocked"
    extra = {"PYTHONPATH": os.pathsep.join([package, "."])}
    extra |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(working_folder / "home")}
    finished = subprocess.run(
        command,
        cwd=working_folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    results = json.loads((working_folder / "out" / "all_results.json").read_text())
    assert {"train_loss", "eval_loss", "predict_loss"} <= results.keys()
    assert (working_folder / "out" / "generated_predictions.txt").read_text(encoding="utf-8")
    assert AutoConfig.from_pretrained(working_folder / "out").max_position_embeddings >= 1024


# sentence-transformers and other programs that load an encoder by AutoModel


def test_an_encoder_saved_alone_is_what_automodel_loads(model, folder, batch, tmp_path):
    encoder = AutoModelForTextEncoding.from_pretrained(folder)
    encoder.save_pretrained(tmp_path / "encoder")
    loaded = AutoModel.from_pretrained(tmp_path / "encoder")
    assert type(loaded) is VaswaniEncoderModel
    expected = model.get_encoder()(**batch).last_hidden_state
    assert torch.equal(loaded(**batch).last_hidden_state, expected)
    saved = json.loads((tmp_path / "encoder" / "config.json").read_text())
    assert saved["auto_map"]["AutoModel"] == "encoder_vaswani.VaswaniEncoderModel"
    assert type(AutoModel.from_pretrained(folder)) is VaswaniModel
    assert type(AutoModel.from_config(VaswaniConfig.preset("C-N2", vocab_size=9))) is VaswaniModel


def test_automodel_loads_the_encoder_of_a_translation_model_where_the_config_says_so(folder, batch):
    loaded = AutoModel.from_pretrained(folder, architectures=["VaswaniEncoderModel"])
    assert type(loaded) is VaswaniEncoderModel
    assert loaded(**batch).last_hidden_state.shape == (*batch["input_ids"].shape, 32)


def test_sentence_transformers_encodes_with_an_encoder(folder, tokenizer, tmp_path):
    reason = "pip install sentence-transformers"
    library = pytest.importorskip("sentence_transformers", reason=reason)
    modules = pytest.importorskip("sentence_transformers.models", reason=reason)
    encoder = AutoModelForTextEncoding.from_pretrained(folder)
    for part in (encoder, tokenizer):
        part.save_pretrained(tmp_path / "encoder")
    word = modules.Transformer(str(tmp_path / "encoder"))
    assert word.max_seq_length >= 10**6
    sentences = library.SentenceTransformer(modules=[word, modules.Pooling(32)], device="cpu")
    alone, padded = sentences.encode(ENGLISH[:1]), sentences.encode([*ENGLISH, "one " * 700])
    assert abs(alone[0] - padded[0]).max() < 1e-5
    assert abs(padded[0] - padded[1]).max() > 1e-2


# Pipelines


@pytest.mark.parametrize("given", ["folder", "parts", "no name of the task", "trusted folder"])
def test_the_translation_pipeline_of_transformers(given, model, tokenizer, folder):
    calls = {
        "folder": (("translation",), {"model": str(folder)}),
        "parts": (("translation",), {"model": model, "tokenizer": tokenizer}),
        "no name of the task": ((), {"model": str(folder)}),
        "trusted folder": (("translation",), {"model": str(folder), "trust_remote_code": True}),
    }
    names, arguments = calls[given]
    translator = pipeline(*names, **arguments, device="cpu")
    assert type(translator) is VaswaniTranslationPipeline
    assert (translator.task, translator.model.device.type) == ("translation", "cpu")
    assert [one["translation_text"] for one in translator(ENGLISH, num_beams=2)] == GERMAN


def test_a_pipeline_takes_dtype_device_and_batch_size(folder):
    translator = pipeline(
        "translation", model=str(folder), dtype=torch.bfloat16, device="cpu", batch_size=1
    )
    assert translator.model.dtype == torch.bfloat16
    assert translator("seven") == [{"translation_text": "sieben"}]


def test_other_models_are_refused_by_the_translation_pipeline(tokenizer):
    names = ("layers", "ffn_dim", "attention_heads")
    sizes = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in names}
    other = MarianMTModel(MarianConfig(vocab_size=9, d_model=4, pad_token_id=0, **sizes))
    with pytest.raises(ValueError, match=r"VaswaniForConditionalGeneration.*MarianMTModel"):
        pipeline("translation", model=other, tokenizer=tokenizer, device="cpu")


def test_a_folders_own_code_runs_only_for_tasks_that_are_not_registered(monkeypatch):
    config = VaswaniConfig(custom_pipelines={"mine": {"impl": "mine.Mine", "pt": []}})
    assert list(config.custom_pipelines) == ["translation", "mine"]
    assert "translation" not in config.custom_pipelines
    assert "mine" in config.custom_pipelines
    monkeypatch.delitem(PIPELINE_REGISTRY.supported_tasks, "translation")
    assert "translation" in config.custom_pipelines


# generate


@pytest.mark.parametrize("settings", [{}, {"max_new_tokens": 12}, {"output_scores": True}])
@pytest.mark.parametrize("name", ["inputs", "input_ids"])
def test_padding_without_a_mask_is_masked(tiny_model, padded_batch, name, settings):
    model, (ids, mask) = tiny_model(), padded_batch([6, 2, 4])
    settings = {"num_beams": 3, "return_dict_in_generate": True, **settings}
    expected = model.generate(ids, attention_mask=mask, **settings)
    found = model.generate(**{name: ids}, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.sequences_scores, expected.sequences_scores)
    shown = model.generate(ids, attention_mask=torch.ones_like(mask), **settings)
    assert not torch.allclose(shown.sequences_scores, expected.sequences_scores)


def test_padding_that_may_be_an_end_is_not_masked_and_transformers_warns(model, batch, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "transformers.generation.utils.logger.warning_once", lambda text, *_: warnings.append(text)
    )
    ends = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 2)
    output = model.generate(ends, pad_token_id=2)
    assert any("attention mask is not set" in text for text in warnings)
    everything = torch.ones_like(ends)
    expected = model.generate(ends, attention_mask=everything, pad_token_id=2)
    assert torch.equal(output, expected)


def test_a_streamer_beside_the_folders_beams_is_told_to_pass_num_beams_1(model, tokenizer):
    source = tokenizer("seven", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    with pytest.raises(ValueError, match=r"pass num_beams=1.*num_beams=4"):
        model.generate(**source, streamer=streamer)
    with pytest.raises(ValueError, match="pass num_beams=1"):
        model.generate(**source, streamer=streamer, do_sample=True)
    model.generate(**source, streamer=streamer, num_beams=1)
    assert "".join(streamer) == "sieben"


# Copies, dtypes and devices


@pytest.mark.parametrize("through", [pickle.dumps, "torch.save"])
def test_a_model_is_pickled_after_its_attentions_were_recorded(tiny_model, through, tmp_path):
    model = tiny_model(attn_implementation="eager")
    call = {"input_ids": torch.tensor([[5, 6, 2]]), "labels": torch.tensor([[7, 2]])}
    recorded = model(**call, output_attentions=True, output_hidden_states=True)
    if through == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        again = pickle.loads(through(model))
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        found = again(**call, output_attentions=True)[name]
        assert len(found) == 2
        assert all(map(torch.equal, found, recorded[name]))
    assert again.lm_head.weight is again.model.encoder.embed_tokens.weight


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_compiled_model_is_copied_and_pickled_as_in_torch(tiny_model, copied):
    model, call = tiny_model(), {"input_ids": torch.tensor([[5, 2]]), "labels": torch.tensor([[2]])}
    model.compile(backend="eager")
    loss = model(**call).loss
    again = copied(model)
    assert again._compiled_call_impl is None
    assert torch.equal(again(**call).loss, loss)


def test_a_copied_layer_goes_on_recording_its_attentions(tiny_model):
    model = tiny_model(attn_implementation="eager")
    call = {"input_ids": torch.tensor([[5, 6, 2]]), "labels": torch.tensor([[7, 2]])}
    model(**call, output_attentions=True)
    model.model.encoder.layers.append(copy.deepcopy(model.model.encoder.layers[0]))
    assert len(model(**call, output_attentions=True).encoder_attentions) == 3


def test_return_dict_false_in_the_config_gives_tuples_and_traces(folder, batch):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, return_dict=False)
    inputs = (*batch.values(), torch.tensor([[2, 5], [2, 6]]))
    expected = model(*inputs, return_dict=True).logits
    pairs = [[5, 6, 2]], [[7, 2]]
    scores = AutoModelForSeq2SeqLM.from_pretrained(folder).score(*pairs).sums
    assert torch.equal(model.score(*pairs).sums, scores)
    output = model(*inputs)
    assert isinstance(output, tuple)
    assert torch.equal(output[0], expected)
    model.config.use_cache = False
    traced = torch.jit.trace(model, inputs, strict=False)
    torch.testing.assert_close(traced(*inputs)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_translate_alike(model, translated, dtype):
    assert translated(model.to(dtype)) == GERMAN


PLACES = {
    "decoder on disk": {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu"},
    "encoder on disk": {"model.encoder": "disk", "model.decoder": "cpu", "lm_head": "cpu"},
    "head on disk": {"model": "cpu", "lm_head": "disk"},
    "all but the head on disk": {"": "disk", "lm_head": "cpu"},
    "a table apart": {"": "cpu", "model.decoder": "disk", "model.decoder.embed_tokens": "cpu"},
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("where", PLACES)
def test_parts_on_disk_translate(where, translated, tmp_path):
    given = dict(PLACES[where])
    model = AutoModelForSeq2SeqLM.from_pretrained(
        FROZEN, device_map=PLACES[where], offload_folder=tmp_path
    )
    assert given == PLACES[where], "the caller's own map was changed"
    if where != "head on disk":  # the head shares its matrix with the embeddings
        assert any(weight.is_meta for weight in model.parameters())
    assert translated(model) == GERMAN
    if where != "all on disk":
        assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    assert translated(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")) == GERMAN


def test_learned_positions_on_disk_are_read_for_padded_prompts(tmp_path):
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = VaswaniDecoderConfig(
        vocab_size=19, d_model=16, position_encoding="learned", max_position_embeddings=9, **sizes
    )
    whole = VaswaniForCausalLM(config).eval()
    whole.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "disk"
    )
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    call = {"attention_mask": (ids > 0).long(), "max_new_tokens": 3}
    assert torch.equal(model.generate(ids, **call), whole.generate(ids, **call))


def test_separate_tables_stay_where_they_are_told_to(tiny_model, tmp_path):
    tiny_model(
        vocab_size=19, decoder_vocab_size=23, share_encoder_decoder_embeddings=False
    ).save_pretrained(tmp_path / "model")
    model = VaswaniForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=PLACES["encoder on disk"], offload_folder=tmp_path / "disk"
    )
    assert model.model.encoder.embed_tokens.weight.is_meta
    assert model.generate(torch.tensor([[5, 2]]), max_new_tokens=3).shape[0] == 1


def test_an_empty_model_is_filled_by_accelerate(model, translated):
    accelerate = pytest.importorskip("accelerate", reason="pip install 'vaswani[train]'")
    with accelerate.init_empty_weights():
        empty = AutoModelForSeq2SeqLM.from_config(model.config)
    empty.tie_weights()
    filled = accelerate.load_checkpoint_and_dispatch(
        empty, str(FROZEN / "model.safetensors"), device_map={"": "cpu"}
    )
    assert translated(filled.eval(), num_beams=4) == GERMAN


# Adapters and quantization


def test_peft_finds_the_target_modules_by_itself(model):
    peft = pytest.importorskip("peft", reason="pip install peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM"))
    found = {name.rpartition(".")[2] for name in adapted.base_model.targeted_module_names}
    assert found == {"q_proj", "v_proj"}
    assert len(adapted.base_model.targeted_module_names) == 6
    for config in (peft.IA3Config, peft.LNTuningConfig):
        again = peft.get_peft_model(
            AutoModelForSeq2SeqLM.from_pretrained(FROZEN), config(task_type="SEQ_2_SEQ_LM")
        )
        assert again.get_nb_trainable_parameters()[0] > 0


@pytest.mark.slow
def test_importing_the_package_does_not_import_peft():
    code = "import sys, vaswani; vaswani.VaswaniConfig().to_dict(); sys.exit('peft' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_dynamic_quantization_translates_alike_and_is_not_saved_by_half(
    model, translated, tmp_path
):
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    layer = quantized.model.decoder.layers[0].fc1
    assert type(layer) is torch.ao.nn.quantized.dynamic.Linear
    assert translated(quantized) == GERMAN
    with pytest.raises(ValueError, match="quantize it after loading"):
        quantized.save_pretrained(tmp_path / "quantized")
    assert not (tmp_path / "quantized").exists()


def test_torchao_translates_alike_and_is_saved(translated, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    from transformers import TorchAoConfig

    form = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantized = AutoModelForSeq2SeqLM.from_pretrained(FROZEN, quantization_config=form)
    assert type(quantized.model.decoder.layers[0].fc1.weight) is not nn.Parameter
    assert translated(quantized) == GERMAN
    quantized.save_pretrained(tmp_path)
    assert translated(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)) == GERMAN


def test_bitsandbytes_translates_alike_and_is_saved(translated, tmp_path):
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    form = BitsAndBytesConfig(load_in_8bit=True)
    options = {"device_map": "cpu"}
    quantized = AutoModelForSeq2SeqLM.from_pretrained(FROZEN, quantization_config=form, **options)
    assert type(quantized.model.decoder.layers[0].fc1) is not nn.Linear
    assert translated(quantized) == GERMAN
    quantized.save_pretrained(tmp_path)
    assert translated(AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **options)) == GERMAN
