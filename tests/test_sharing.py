"""What is saved or pushed works elsewhere, with this package and without it.

Whether the package is there, and which Hub is meant, is settled when a process starts. So three
client processes do all the work, in this order, and the tests assert on the facts they report:

publisher   has the package: loads without trust, pushes, trains, pulls its own pushes
stranger    has not: loads and pulls with trust, saves again three generations deep, pushes again
heir        has not, and comes last: loads what the two of them left
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopback_hub import USER, LoopbackHub
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    MarianConfig,
    MarianMTModel,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

import vaswani
from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniGenerationConfig,
    VaswaniModel,
    VaswaniTokenizer,
)

ROOMS = Path(inspect.getfile(VaswaniConfig)).parent.parent
CODE = {
    path.name: path
    for room in ("configuration", "modeling", "tokenization")
    for path in (ROOMS / room).glob("*_vaswani.py")
}
CONFIG_FILES = {"config.json", *CODE}
MODEL_FILES = {"model.safetensors", "generation_config.json", *CONFIG_FILES}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", *CODE}
CARD = {"README.md"}

SENTENCES = ["A dog runs over the wet sand.", "Two men are playing chess."]
SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32,
}

# The functions from here to `heir` also run in the clients, which get their source text: what they
# use is imported inside.


def load(place, tokenizer_place=None, **options):
    import transformers as hf

    return {
        "config": hf.AutoConfig.from_pretrained(place, **options),
        "base": hf.AutoModel.from_pretrained(place, **options),
        "translator": hf.AutoModelForSeq2SeqLM.from_pretrained(place, **options),
        "encoder": hf.AutoModelForTextEncoding.from_pretrained(place, **options),
        "tokenizer": hf.AutoTokenizer.from_pretrained(tokenizer_place or place, **options),
    }


def parts_of(translator, tokenizer):
    """What `load` should give back, taken from a translator that was never saved."""
    return {
        "config": translator.config,
        "base": translator.model,
        "translator": translator,
        "encoder": translator.model.encoder,
        "tokenizer": tokenizer,
    }


def fingerprint(tensor):
    import hashlib

    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def behaviour(loaded, sentences):
    """All that a user sees of a model and its tokenizer, to the last bit."""
    tokenizer, translator = loaded["tokenizer"], loaded["translator"].eval()
    source = tokenizer(sentences, padding=True, return_tensors="pt")
    inputs = {**source, "decoder_input_ids": source["input_ids"].flip(1)}
    beams = translator.generate(**source, num_beams=4)
    return {
        "token ids": source["input_ids"].tolist(),
        "decoded": tokenizer.batch_decode(source["input_ids"], skip_special_tokens=True),
        "logits": fingerprint(translator(**inputs).logits),
        "base": fingerprint(loaded["base"].eval()(**inputs).last_hidden_state),
        "encoder": fingerprint(loaded["encoder"].eval()(**source).last_hidden_state),
        "beams": beams.tolist(),
        "length limit": translator.generation_config.max_length_offset,
    }


def packages_of(loaded):
    """Where the classes come from: `vaswani`, or `transformers_modules` for trusted code."""
    return sorted({type(part).__module__.split(".")[0] for part in loaded.values()})


def facts_about(loaded, sentences):
    return {"behaviour": behaviour(loaded, sentences), "packages": packages_of(loaded)}


def train(loaded, sentences, hub_strategy, output_dir):
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, tokenizer = loaded["translator"], loaded["tokenizer"]
    arguments = Seq2SeqTrainingArguments(
        output_dir=output_dir,
        max_steps=2,
        save_steps=2,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        push_to_hub=True,
        hub_strategy=hub_strategy,
        hub_model_id=f"trained/{hub_strategy}",
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=[dict(tokenizer(text, text_target=text)) for text in sentences],
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def publisher(saved, work, sentences):
    from pathlib import Path

    facts = {}
    loaded = load(saved)
    facts["folder"] = facts_about(loaded, sentences)
    # A config that was never saved: nothing has written its auto_map yet.
    config = type(loaded["config"])(d_model=16)
    parts = {"config": config, "model": loaded["translator"], "tokenizer": loaded["tokenizer"]}
    for name, part in parts.items():
        part.push_to_hub(f"pushed/{name}")
        part.save_pretrained(Path(work, name), push_to_hub=True, repo_id=f"saved/{name}")
    loaded["config"].save_pretrained(Path(work, "named-by-folder"), push_to_hub=True)
    for way in ("pushed", "saved"):
        pulled = load(f"{way}/model", f"{way}/tokenizer")
        facts[way] = facts_about(pulled, sentences)

    for strategy in ("every_save", "end"):
        trainer = train(loaded, sentences, strategy, f"{work}/{strategy}")
        if strategy == "end":  # which stands for: when asked
            trainer.push_to_hub()
        trained = parts_of(loaded["translator"], loaded["tokenizer"])
        facts[strategy] = facts_about(trained, sentences)
    return facts


def stranger(saved, work, sentences):
    trusted = {"trust_remote_code": True}
    facts = {}
    generation = saved
    for number in (1, 2, 3):
        loaded = load(generation, **trusted)
        facts[f"generation {number}"] = facts_about(loaded, sentences)
        generation = f"{work}/generation-{number + 1}"
        loaded["translator"].save_pretrained(generation)
        loaded["tokenizer"].save_pretrained(generation)
    for way in ("pushed", "saved"):
        pulled = load(f"{way}/model", f"{way}/tokenizer", **trusted)
        facts[way] = facts_about(pulled, sentences)
    pulled["translator"].push_to_hub("pushed-again/both")
    pulled["tokenizer"].push_to_hub("pushed-again/both")
    return facts


def heir(saved, work, sentences):
    import transformers as hf

    trusted = {"trust_remote_code": True}
    places = {
        "generation 4": f"{work}/generation-4",
        "pushed again": "pushed-again/both",
        "checkpoint": f"{work}/every_save/checkpoint-2",
        "every_save": "trained/every_save",
        "end": "trained/end",
    }
    facts = {name: facts_about(load(place, **trusted), sentences) for name, place in places.items()}

    tokenizer = hf.AutoTokenizer.from_pretrained(f"{saved}-tokenizer", **trusted)
    source = tokenizer(sentences, padding=True, return_tensors="pt")
    facts["tokenizer alone"] = source["input_ids"].tolist()
    base = hf.AutoModel.from_pretrained(f"{saved}-base", **trusted)
    outputs = base(**source, decoder_input_ids=source["input_ids"].flip(1))
    facts["base alone"] = fingerprint(outputs.last_hidden_state)
    encoder = hf.AutoModelForTextEncoding.from_pretrained(f"{saved}-encoder", **trusted)
    facts["encoder alone"] = fingerprint(encoder(**source).last_hidden_state)
    auto_classes = (hf.AutoModel, hf.AutoModelForSeq2SeqLM, hf.AutoModelForTextEncoding)
    facts["config alone"] = {}
    for place in (f"{saved}-config", "pushed/config", "saved/config"):
        config = hf.AutoConfig.from_pretrained(place, **trusted)
        facts["config alone"][place] = [
            type(auto_class.from_config(config, **trusted)).__name__ for auto_class in auto_classes
        ]
    return facts


WITH_PACKAGE = f"""import sys
sys.path.insert(0, {str(Path(vaswani.__file__).parent.parent)!r})
import vaswani
"""
# An editable install would be found through site-packages; None in sys.modules forbids the name.
WITHOUT_PACKAGE = """import sys
sys.modules["vaswani"] = None
try:
    import vaswani
except ImportError:
    pass
else:
    raise SystemExit("vaswani can be imported")
"""


def facts_of_client(client, hub, saved, work):
    """Run `client` in a process of its own and return what it returns."""
    prelude = WITH_PACKAGE if client is publisher else WITHOUT_PACKAGE
    tools = (load, parts_of, fingerprint, behaviour, packages_of, facts_about, train)
    given = {"saved": str(saved), "work": str(work), "sentences": SENTENCES}
    report = work / f"{client.__name__}.json"
    ending = f"""
import json
facts = {client.__name__}(**{given!r})
with open({str(report)!r}, "w") as file:
    json.dump(facts, file)
"""
    program = work / f"{client.__name__}.py"
    sources = [inspect.getsource(function) for function in (*tools, client)]
    program.write_text("\n".join([prelude, *sources, ending]))
    # -P keeps the program's folder off sys.path.
    finished = subprocess.run(
        [sys.executable, "-P", str(program)],
        env=hub.environment,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def original():
    """A model and its tokenizer in memory, with settings that are nobody's default."""
    torch.manual_seed(0)
    tokenizer = VaswaniTokenizer.train_from_iterator(SENTENCES, vocab_size=300, show_progress=False)
    config = VaswaniConfig(vocab_size=len(tokenizer), norm_position="pre", **SIZES)
    translator = VaswaniForConditionalGeneration(config).eval()
    translator.generation_config.max_length_offset = 3
    return parts_of(translator, tokenizer)


@pytest.fixture(scope="module")
def expected(original):
    return behaviour(original, SENTENCES)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    """The folder with model and tokenizer; beside it, one folder for each of the other saves."""
    folder = tmp_path_factory.mktemp("saved") / "both"
    original["translator"].save_pretrained(folder)
    original["tokenizer"].save_pretrained(folder)
    config = VaswaniConfig(vocab_size=len(original["tokenizer"]), norm_position="pre", **SIZES)
    config.save_pretrained(f"{folder}-config")
    original["tokenizer"].save_pretrained(f"{folder}-tokenizer")
    original["base"].save_pretrained(f"{folder}-base")
    encoder = VaswaniEncoderModel(config)
    encoder.encoder.load_state_dict(original["encoder"].state_dict())
    encoder.save_pretrained(f"{folder}-encoder")
    return folder


@pytest.fixture(scope="module")
def published(hub, saved, work):
    return facts_of_client(publisher, hub, saved, work)


@pytest.fixture(scope="module")
def found_by_stranger(hub, saved, work, published):
    return facts_of_client(stranger, hub, saved, work)


@pytest.fixture(scope="module")
def found_by_heir(hub, saved, work, found_by_stranger):
    return facts_of_client(heir, hub, saved, work)


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


# Registration


def test_the_auto_classes_know_the_model_type():
    config = AutoConfig.for_model("vaswani", vocab_size=11, **SIZES)
    assert type(config) is VaswaniConfig
    assert config.vocab_size == 11
    assert type(AutoModel.from_config(config)) is VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniForConditionalGeneration
    assert type(AutoModelForTextEncoding.from_config(config)) is VaswaniEncoderModel


def test_with_the_package_the_auto_classes_give_its_classes_without_trust(saved):
    loaded = load(saved)
    assert [type(part) for part in loaded.values()] == [
        VaswaniConfig,
        VaswaniModel,
        VaswaniForConditionalGeneration,
        VaswaniEncoderModel,
        VaswaniTokenizer,
    ]
    assert type(loaded["translator"].generation_config) is VaswaniGenerationConfig


def test_with_the_package_nothing_changes_by_saving_and_loading(saved, expected):
    assert behaviour(load(saved), SENTENCES) == expected


# What a save leaves


@pytest.mark.parametrize(
    ("suffix", "files"),
    [
        ("", MODEL_FILES | TOKENIZER_FILES),
        ("-config", CONFIG_FILES),
        ("-tokenizer", TOKENIZER_FILES),
        ("-base", MODEL_FILES - {"generation_config.json"}),
        ("-encoder", MODEL_FILES - {"generation_config.json"}),
    ],
)
def test_every_save_leaves_a_flat_folder_with_the_code(saved, suffix, files):
    assert names_in(f"{saved}{suffix}") == files


def test_the_code_that_travels_is_known():
    assert set(CODE) >= {
        "configuration_vaswani.py",
        "modeling_vaswani.py",
        "generation_vaswani.py",
        "scoring_vaswani.py",
        "tokenization_vaswani.py",
        "pipeline_vaswani.py",
    }


@pytest.mark.parametrize("name", CODE)
def test_code_is_saved_unchanged_but_for_imports_across_rooms(saved, name):
    flat = (saved / name).read_text(encoding="utf-8").splitlines()
    source = CODE[name].read_text(encoding="utf-8").splitlines()
    for room in ("configuration", "modeling", "tokenization"):
        source = [line.replace(f"from ..{room}.", "from .") for line in source]
    assert flat == source
    assert not any(line.lstrip().startswith("from ..") for line in flat)


def test_a_trainer_checkpoint_holds_model_code_and_tokenizer(work, published):
    assert names_in(work / "every_save" / "checkpoint-2") >= MODEL_FILES | TOKENIZER_FILES


def outcome_of_save(part, path):
    try:
        return part.save_pretrained(path)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ["config", "translator", "tokenizer"])
def test_saving_over_a_file_fails_as_in_transformers_and_writes_nothing(original, tmp_path, kind):
    path = tmp_path / "file"
    path.write_text("kept")
    stock_config = MarianConfig(vocab_size=9, pad_token_id=0, **SIZES)
    stock = {
        "config": lambda: stock_config,
        "translator": lambda: MarianMTModel(stock_config),
        "tokenizer": lambda: TokenizersBackend(
            tokenizer_object=original["tokenizer"].backend_tokenizer
        ),
    }[kind]()
    assert outcome_of_save(original[kind], path) == outcome_of_save(stock, path)
    assert names_in(tmp_path) == {"file"}
    assert path.read_text() == "kept"


def test_a_config_that_transformers_refuses_to_save_leaves_no_folder(tmp_path):
    config = VaswaniConfig(**SIZES)
    config.num_beams = 4
    with pytest.raises(ValueError, match="generation parameters"):
        config.save_pretrained(tmp_path / "folder")
    assert names_in(tmp_path) == set()


# Folders in a process without the package


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_folder_alone_behaves_as_the_original_in_every_generation(
    found_by_stranger, expected, number
):
    facts = found_by_stranger[f"generation {number}"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


def test_the_last_generation_behaves_as_the_original_in_a_process_that_saw_no_other(
    found_by_heir, expected
):
    facts = found_by_heir["generation 4"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_every_generation_has_the_same_files_and_the_same_code(
    saved, work, found_by_stranger, number
):
    generation = work / f"generation-{number}"
    assert names_in(generation) == names_in(saved)
    for name in CODE:
        assert (generation / name).read_bytes() == (saved / name).read_bytes()


def test_a_trainer_checkpoint_alone_behaves_as_the_trained_model(
    published, found_by_heir, expected
):
    trained = published["every_save"]["behaviour"]
    assert trained["logits"] != expected["logits"]
    assert found_by_heir["checkpoint"]["behaviour"] == trained


def test_a_config_alone_builds_every_model(found_by_heir):
    models = ["VaswaniModel", "VaswaniForConditionalGeneration", "VaswaniEncoderModel"]
    assert list(found_by_heir["config alone"].values()) == [models] * 3


def test_a_tokenizer_alone_gives_the_same_ids(found_by_heir, expected):
    assert found_by_heir["tokenizer alone"] == expected["token ids"]


@pytest.mark.parametrize("part", ["base", "encoder"])
def test_a_model_without_a_head_saved_alone_gives_the_same_states(found_by_heir, expected, part):
    assert found_by_heir[f"{part} alone"] == expected[part]


# The Hub


@pytest.mark.parametrize("way", ["pushed", "saved"])
@pytest.mark.parametrize(
    ("kind", "files"),
    [("config", CONFIG_FILES), ("model", MODEL_FILES), ("tokenizer", TOKENIZER_FILES)],
)
def test_every_push_is_complete(hub, published, way, kind, files):
    assert set(hub.files(f"{way}/{kind}")) - CARD == files


def test_a_config_pushed_without_repo_id_takes_the_name_of_its_folder(hub, published):
    assert set(hub.files(f"{USER}/named-by-folder")) - CARD == CONFIG_FILES


def test_what_is_pushed_is_what_is_saved(hub, saved, published):
    files = hub.files("pushed/model")
    for name in MODEL_FILES - {"config.json"}:
        assert files[name] == (saved / name).read_bytes()


@pytest.mark.parametrize("way", ["folder", "pushed", "saved"])
def test_loading_and_pulling_with_the_package_needs_no_trust(published, expected, way):
    facts = published[way]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["vaswani"]


@pytest.mark.parametrize("way", ["pushed", "saved"])
def test_a_pull_without_the_package_behaves_as_the_original(found_by_stranger, expected, way):
    facts = found_by_stranger[way]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


def test_a_push_from_pulled_classes_is_complete_and_points_to_itself(hub, saved, found_by_heir):
    files = hub.files("pushed-again/both")
    assert set(files) - CARD == MODEL_FILES | TOKENIZER_FILES
    for name in CODE:
        assert files[name] == (saved / name).read_bytes()
    # "repository--module.Class" would fetch the code from the repository it was pulled from.
    for name in ("config.json", "tokenizer_config.json"):
        assert b"--" not in files[name]


def test_a_push_from_pulled_classes_behaves_as_the_original(found_by_heir, expected):
    facts = found_by_heir["pushed again"]
    assert facts["behaviour"] == expected
    assert facts["packages"] == ["transformers_modules"]


@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_every_push_of_a_trainer_is_complete(hub, published, strategy):
    _, *commits = hub.commits(f"trained/{strategy}")
    assert commits
    for commit in commits:
        assert set(commit.files) >= MODEL_FILES | TOKENIZER_FILES, commit.message


@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_a_trainer_push_alone_behaves_as_the_trained_model(published, found_by_heir, strategy):
    assert found_by_heir[strategy]["behaviour"] == published[strategy]["behaviour"]
    assert found_by_heir[strategy]["packages"] == ["transformers_modules"]


def test_the_loopback_hub_knew_every_request(hub, found_by_heir):
    assert hub.unknown_requests == []
