"""A save drops references to foreign code: trusting our folder runs only our code."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)
from vaswani.training.trainer import VaswaniTrainer

from vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    VaswaniTokenizer,
    VaswaniTranslationPipeline,
)

STRANGER = "raise SystemExit('the code of mallory runs')\n"


def save_clean(folder):
    tokenizer = VaswaniTokenizer.train_from_iterator(
        ["one two three"], kind="char", show_progress=False
    )
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    torch.manual_seed(0)
    config = VaswaniConfig(vocab_size=len(tokenizer), **sizes, **heads)
    VaswaniForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def change(path, **entries):
    content = json.loads(path.read_text())
    for name, value in entries.items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    save_clean(folder)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A repository with our weights and code, and references to further code."""
    folder = tmp_path_factory.mktemp("hostile")
    save_clean(folder)
    (folder / "custom_generate").mkdir()
    for name in ("mallory.py", "custom_generate/generate.py"):
        (folder / name).write_text(STRANGER)
    foreign = {"AutoModelForCausalLM": "mallory.Model", "AutoModel": "them/mallory--mallory.M"}
    translation = {"impl": "mallory.Pipeline", "pt": ["AutoModelForSeq2SeqLM"]}
    change(
        folder / "config.json",
        auto_map={**foreign, "AutoTokenizer": ["mallory.Tokenizer", None]},
        custom_pipelines={"translation": translation, "more": dict(translation)},
    )
    change(
        folder / "tokenizer_config.json",
        auto_map={"AutoProcessor": "mallory.Processor", "AutoTokenizer": ["mallory.T", None]},
    )
    change(folder / "generation_config.json", custom_generate="them/mallory")
    return folder


def config(folder, output):
    AutoConfig.from_pretrained(folder).save_pretrained(output)


def config_by_its_fields(folder, output):
    VaswaniConfig(**AutoConfig.from_pretrained(folder).to_dict()).save_pretrained(output)


def config_updated_by_its_fields(folder, output):
    config = VaswaniConfig()
    config.update(AutoConfig.from_pretrained(folder).to_dict())
    config.save_pretrained(output)


def config_copied(folder, output):
    copy.deepcopy(AutoConfig.from_pretrained(folder)).save_pretrained(output)


def config_read_from_its_file(folder, output):
    VaswaniConfig.from_json_file(folder / "config.json").save_pretrained(output)


def model(folder, output):
    AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(output)


def tokenizer(folder, output):
    AutoTokenizer.from_pretrained(folder).save_pretrained(output)


def tokenizer_trained_anew(folder, output):
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.train_new_from_iterator(["three two"], 40).save_pretrained(output)


def whole_pipeline(folder, output):
    translator = pipeline(
        "translation", model=str(folder), pipeline_class=VaswaniTranslationPipeline, device="cpu"
    )
    translator.save_pretrained(output)


def trained(trainer_class, folder, output):
    arguments = Seq2SeqTrainingArguments(output, use_cpu=True, report_to="none")
    trainer_class(
        model=AutoModelForSeq2SeqLM.from_pretrained(folder),
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(folder),
    ).save_model()


def trainer(folder, output):
    trained(Seq2SeqTrainer, folder, output)


def our_trainer(folder, output):
    trained(VaswaniTrainer, folder, output)


def adapter(folder, output):
    base = AutoModelForSeq2SeqLM.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder).save_pretrained(output)


def merged_adapter(folder, output):
    base = AutoModelForSeq2SeqLM.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    adapted.merge_and_unload().save_pretrained(output)


WAYS = [
    *(config, config_by_its_fields, config_updated_by_its_fields, config_copied),
    *(config_read_from_its_file, model, tokenizer, tokenizer_trained_anew, whole_pipeline),
    *(trainer, our_trainer, adapter, merged_adapter),
]


def foreign_in(folder):
    """Return the files of a folder that refer to the foreign code."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if b"mallory" in path.read_bytes()]


@pytest.mark.parametrize("save", WAYS)
def test_no_save_repeats_what_a_loaded_folder_says_of_code(save, hostile, tmp_path):
    assert len(foreign_in(hostile)) == 5
    save(hostile, tmp_path)
    assert foreign_in(tmp_path) == []
    for name in ("config.json", "tokenizer_config.json"):
        if not (tmp_path / name).exists():
            continue
        saved = json.loads((tmp_path / name).read_text())
        ours = json.loads((hostile / name).read_text())
        for key in ("auto_map", "custom_pipelines"):
            assert saved.get(key, {}).keys() <= ours.get(key, {}).keys()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_what_is_saved_of_a_hostile_folder_is_what_is_saved_of_a_clean_one(
    name, clean, hostile, tmp_path
):
    for folder, output in ((clean, tmp_path / "clean"), (hostile, tmp_path / "hostile")):
        model(folder, output)
        tokenizer(folder, output)
    assert (tmp_path / "hostile" / name).read_text() == (tmp_path / "clean" / name).read_text()


def test_the_fields_of_a_loaded_configuration_are_plain_values(hostile):
    fields = AutoConfig.from_pretrained(hostile).to_dict()
    assert yaml.safe_load(yaml.safe_dump(fields)) == fields
    assert fields["auto_map"]["AutoModelForCausalLM"] == "mallory.Model"


@pytest.mark.slow
def test_remote_code_does_not_repeat_them_either(hostile, clean, tmp_path):
    program = f"""
import sys
sys.modules["vaswani"] = None
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
for number, folder in enumerate(({str(hostile)!r}, {str(clean)!r})):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    model.save_pretrained(f"model-{{number}}")
    AutoConfig.from_pretrained(folder, trust_remote_code=True).save_pretrained(f"config-{{number}}")
tokenizer = AutoTokenizer.from_pretrained({str(clean)!r}, trust_remote_code=True)
tokenizer.save_pretrained("tokenizer-1")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert foreign_in(tmp_path) == []
    for part in ("config", "model"):
        saved = [(tmp_path / f"{part}-{number}" / "config.json").read_text() for number in (0, 1)]
        assert saved[0] == saved[1]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("custom_pipelines", "mine", "custom_pipelines"),
        ("custom_pipelines", ["mine"], "custom_pipelines"),
        ("custom_pipelines", {"mine": "mine.Mine"}, r"custom_pipelines\['mine'\]"),
        ("auto_map", ["mine.Mine"], "auto_map"),
        ("auto_map", "mine.Mine", "auto_map"),
    ],
)
def test_references_to_code_that_are_no_mapping_are_refused_by_file_and_value(
    key, value, name, clean, tmp_path
):
    fields = json.loads((clean / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, key: value}))
    shown = re.escape(repr(value["mine"] if isinstance(value, dict) else value))
    message = rf"{name} in the config\.json of {tmp_path} must be a mapping, got {shown}: remove"
    for load in (AutoConfig, AutoModelForSeq2SeqLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)


def test_a_class_that_a_user_registers_is_saved_with_its_code(clean, tmp_path, monkeypatch):
    """transformers trusts code that this process defines, without `trust_remote_code`."""
    (tmp_path / "mine.py").write_text(
        "from vaswani import VaswaniForConditionalGeneration\n\n\n"
        "class MyModel(VaswaniForConditionalGeneration):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import mine

    mine.MyModel.register_for_auto_class("AutoModelForSeq2SeqLM")
    first, second = tmp_path / "first", tmp_path / "second"
    mine.MyModel.from_pretrained(clean).save_pretrained(first)
    mine.MyModel.from_pretrained(first).save_pretrained(second)
    for folder in (first, second):
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoModelForSeq2SeqLM"] == "mine.MyModel"
        assert (folder / "mine.py").exists()
    # Saved by our own class, the folder is ours again.
    model(first, tmp_path / "third")
    assert b"mine" not in (tmp_path / "third" / "config.json").read_bytes()
