"""Pushing and pulling with huggingface_hub's client: versions, privacy, faults on both sides.

Two processes of `hub_clients` do the work: first the owner with the package, then a reader without
it. The Hub is that of `loopback_hub`. Its faults are set before the processes start.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from hub_clients import RESULTS, SENTENCES, ask, behaviour, owner, parts_of, reader
from huggingface_hub import ModelCard
from loopback_hub import LoopbackHub
from transformers import AutoModelForSeq2SeqLM

import vaswani
from vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    VaswaniTokenizer,
    VaswaniTranslationPipeline,
)

pytestmark = pytest.mark.slow
PACKAGE = Path(vaswani.__file__).parent.parent
SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
TRAINERS = ["Seq2SeqTrainer", "VaswaniTrainer"]
STRATEGIES = ["every_save", "end", "checkpoint"]
TRAINED = [f"{trainer}-{strategy}" for trainer in TRAINERS for strategy in STRATEGIES]


def renamed(header):
    header["model.decoder.layers.0.fc9.weight"] = header.pop("model.decoder.layers.0.fc1.weight")


def too_long(header):
    header["model.decoder.layers.0.fc1.bias"]["shape"] = [10**6]


def with_header(weights, change):
    """Return the same safetensors file with another header."""
    end = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:end])
    change(header)
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + weights[end:]


def with_fields(config, **fields):
    return json.dumps({**json.loads(config), **fields}).encode()


def damaged(files):
    """Return the files of a valid repository, with one fault each."""
    weights, config = files["model.safetensors"], files["config.json"]
    code = files["search_vaswani.py"]
    *_, last_block = re.finditer(rb"^ +(?:if|for) .*:\n", code, re.M)
    replaced = {
        "weights cut off": {"model.safetensors": weights[: len(weights) // 2]},
        "weights empty": {"model.safetensors": b""},
        "weights are text": {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"},
        "header too long": {"model.safetensors": with_header(weights, too_long)},
        "weight renamed": {"model.safetensors": with_header(weights, renamed)},
        "config cut off": {"config.json": config[: len(config) // 2]},
        "config of other sizes": {"config.json": with_fields(config, d_model=32)},
        "config of fewer layers": {"config.json": with_fields(config, encoder_layers=1)},
        "config of more layers": {"config.json": with_fields(config, encoder_layers=3)},
        "generation config cut off": {"generation_config.json": b'{"num_beams": 4,'},
        "tokenizer cut off": {"tokenizer.json": files["tokenizer.json"][:-100]},
        "tokenizer config cut off": {"tokenizer_config.json": b'{"eos_token": "<'},
        "code cut off": {"search_vaswani.py": code[: last_block.end()]},
    }
    broken = {name: {**files, **change} for name, change in replaced.items()}
    for missing in ("config.json", "model.safetensors", "tokenizer.json", "search_vaswani.py"):
        kept = {name: content for name, content in files.items() if name != missing}
        broken[f"no {missing}"] = kept
    return {name.replace(" ", "-"): variant for name, variant in broken.items()}


def chars(text):
    return VaswaniTokenizer.train_from_iterator([text], kind="char", show_progress=False)


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    tokenizer = VaswaniTokenizer.train_from_iterator(SENTENCES, vocab_size=300, show_progress=False)
    config = VaswaniConfig(vocab_size=len(tokenizer), **SIZES)
    return parts_of(VaswaniForConditionalGeneration(config).eval(), tokenizer)


@pytest.fixture(scope="module")
def expected(original):
    return behaviour(original)


@pytest.fixture(scope="module")
def saved(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "both"
    original["translator"].save_pretrained(folder)
    original["tokenizer"].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_vocabularies(original, saved):
    """The results of both versions of a translator with a separate target vocabulary."""
    versions = {"v1": chars("abcdefgh"), "main": chars("ABCDEFGH")}
    config = VaswaniConfig(
        vocab_size=300,
        decoder_vocab_size=len(versions["v1"]),
        share_encoder_decoder_embeddings=False,
        **SIZES,
    )
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(config).eval()
    for part in (model, original["tokenizer"]):
        part.save_pretrained(f"{saved}-two")
    versions["v1"].save_pretrained(f"{saved}-two/target_tokenizer")
    versions["main"].save_pretrained(f"{saved}-two-later")
    said = {}
    for version, tokenizer in versions.items():
        translate = VaswaniTranslationPipeline(
            model, original["tokenizer"], target_tokenizer=tokenizer, device="cpu"
        )
        said[version] = [one["translation_text"] for one in translate(SENTENCES)]
    return said


@pytest.fixture(scope="module")
def broken(saved):
    return damaged({path.name: path.read_bytes() for path in saved.iterdir()})


@pytest.fixture(scope="module")
def hub(saved, broken):
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    with LoopbackHub() as hub:
        for repo_id in (
            "interrupted/upload",
            "interrupted/publication",
            "lost/download",
            "cache/model",
        ):
            hub.publish(repo_id, files)
        for name, variant in broken.items():
            hub.publish(f"broken/{name}", variant)
        # huggingface_hub tries six times, except for a commit, which would be made twice.
        hub.cut("PUT", "/store/interrupted/upload/.*", times=6)
        hub.cut("POST", "/api/models/interrupted/publication/commit/main", times=1)
        hub.cut("POST", "/api/models/interrupted/training/commit/main", times=1)
        hub.cut("GET", "/store/lost/download/.*", times=3)
        yield hub


@pytest.fixture(scope="module")
def published(hub, saved, work, broken, two_vocabularies):
    return ask(owner, hub, work, PACKAGE, saved=str(saved), broken=list(broken))


@pytest.fixture(scope="module")
def read(hub, saved, work, broken, published):
    given = {"broken": list(broken), "trained": TRAINED, "sha": published["versions"]["sha"]}
    return ask(reader, hub, work, **given)


# Trainers


def commits_of(hub, name):
    """Return the commits that a trainer pushed, without the first, which is empty."""
    return hub.commits(f"trained/{name}")[1:]


@pytest.mark.parametrize("name", TRAINED)
def test_every_push_of_a_trainer_is_complete(hub, saved, published, name):
    pushed = commits_of(hub, name)
    assert pushed
    for commit in pushed:
        assert set(commit.files) >= {path.name for path in saved.iterdir()}, commit.message
        assert commit.files["results.json"] == RESULTS.encode()
        config = json.loads(commit.files["config.json"])
        assert config["auto_map"]["AutoModel"] == "modeling_vaswani.VaswaniModel"
        assert config["custom_pipelines"]["translation"]["pt"] == ["AutoModelForSeq2SeqLM"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainer_pushes_when_its_strategy_says(hub, published, name):
    step = "Training in progress, step 2"
    meant = {
        "every_save": [step],
        "end": ["End of training"],
        "checkpoint": [step, f"{step}, checkpoint"],
    }
    messages = [commit.message for commit in commits_of(hub, name)]
    assert sorted(messages) == meant[name.split("-")[1]]


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainer_push_alone_behaves_as_the_trained_model(published, read, expected, name):
    trained, pulled = published["trainers"][name], read["pulled"][f"trained/{name}"]
    assert trained["behaviour"]["logits"] != expected["logits"]
    assert pulled == {**trained, "packages": ["transformers_modules"]}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_last_checkpoint_on_the_hub_has_all_that_resuming_needs(hub, saved, published, trainer):
    files = commits_of(hub, f"{trainer}-checkpoint")[-1].files
    names = {path.removeprefix("last-checkpoint/") for path in files if "/" in path}
    state = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert names >= {path.name for path in saved.iterdir()} | state


def test_training_resumes_from_the_hub_and_ends_as_without_an_interruption(published):
    facts = published["resumed"]
    assert facts["flaw"] is None
    assert facts["resumed"] == facts["straight"]


def test_a_push_that_is_lost_in_training_is_reported_and_made_up_for(hub, published, read):
    facts, place = published["interrupted training"], "interrupted/training"
    assert facts["steps"] == 2
    (warning,) = facts["warnings"]
    assert warning.startswith(f"A push to {place} failed: Server disc")
    assert "trainer.push_to_hub()" in warning
    assert [commit.message for commit in hub.commits(place)[1:]] == ["End of training"]
    assert read["pulled"][place]["behaviour"] == facts["behaviour"]


PUSHED = [f"trained/VaswaniTrainer-{strategy}" for strategy in STRATEGIES]


@pytest.mark.parametrize("place", [*PUSHED, "versions/model"])
def test_card_and_licence_arrive(hub, published, place):
    files = hub.files(place)
    card = ModelCard(files["README.md"].decode()).data
    assert (card.library_name, card.pipeline_tag) == ("transformers", "translation")
    assert f'from_pretrained("{place}")' in files["README.md"].decode()
    assert b"Apache License" in files["LICENSE-CODE"]


# Versions


@pytest.mark.parametrize(
    ("by", "version"), [("tag", "v1"), ("branch", "draft"), ("branch", "main"), ("sha", "draft")]
)
def test_a_tag_a_branch_and_a_sha_give_their_own_weights_and_code(published, read, by, version):
    found = read["versions"]["sha" if by == "sha" else version]
    assert found["behaviour"] == published["versions"][version]
    assert found["code"] == ("draft" if version == "draft" else None)


def test_versions_differ(published, expected):
    logits = [published["versions"][version]["logits"] for version in ("v1", "draft", "main")]
    assert logits[0] == expected["logits"]
    assert len(set(logits)) == 3


def test_the_pipeline_of_a_version_translates_as_the_original(original, read):
    translate = VaswaniTranslationPipeline(
        original["translator"], original["tokenizer"], device="cpu"
    )
    said = [one["translation_text"] for one in translate(SENTENCES)]
    assert read["versions"]["translations of v1"] == said


def test_a_version_that_is_not_there_is_refused_by_name(read):
    for part, (_, message) in read["versions"]["unknown"].items():
        assert message.startswith("v9 is not a valid git identifier"), part


def test_a_pipeline_has_the_target_tokenizer_of_its_version(two_vocabularies, read):
    assert two_vocabularies["v1"] != two_vocabularies["main"]
    assert read["two vocabularies"] == two_vocabularies


# Private repositories


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        ("without a token", "If this is a private repository, make sure to pass a token"),
        ("with a wrong token", "Invalid credentials"),
    ],
)
def test_a_private_model_is_refused_and_leaves_nothing(read, credentials, said):
    for part, (error, message) in read["private"][credentials].items():
        assert error == "OSError", part
        assert "private/model" in message
        assert said in message
    assert read["private"]["cached"] == []


def test_a_private_model_is_read_with_its_token(published, read):
    assert read["private"]["with the token"] == published["versions"]["main"]


# Lost connections


@pytest.mark.parametrize("moment", ["upload", "publication"])
def test_an_interrupted_push_changes_nothing_and_its_repetition_completes_it(
    published, expected, moment
):
    facts = published["interrupted"][moment]
    assert facts["refusal"]
    assert facts["nothing is new"]
    assert facts["after it"] == expected
    assert facts["pushed again"] == facts["meant"]
    assert facts["meant"]["logits"] != expected["logits"]


def test_an_interrupted_upload_names_its_file(published):
    error, message = published["interrupted"]["upload"]["refusal"]
    assert error == "RuntimeError"
    assert message == "Error while uploading 'model.safetensors' to the Hub."


def test_a_download_goes_on_where_it_was_lost(read, expected):
    assert read["pulled"]["lost/download"]["behaviour"] == expected
    assert read["incomplete downloads"] == []


# Repositories with a fault: the parts that cannot be loaded, the error, and its message

FAULTS = [
    ("weights-cut-off", ["translator"], "OSError", "deserializing header: incomplete metadata"),
    ("weights-empty", ["translator"], "OSError", "deserializing header: header too small"),
    ("weights-are-text", ["translator"], "OSError", "deserializing header: header too large"),
    ("header-too-long", ["translator"], "OSError", "deserializing header: invalid shape"),
    ("weight-renamed", ["translator"], "OSError", "lacks model.decoder.layers.0.fc1.weight:"),
    ("no-model.safetensors", ["translator"], "OSError", "pytorch_model.bin or model.safetensors."),
    ("config-of-other-sizes", ["translator"], "RuntimeError", "ignore_mismatched_sizes"),
    (
        "config-of-fewer-layers",
        ["translator"],
        "OSError",
        "has no use for model.encoder.layers.1.fc1.bias and 11 others:",
    ),
    (
        "config-of-more-layers",
        ["translator"],
        "OSError",
        "lacks model.encoder.layers.2.fc1.bias and 11 others:",
    ),
    (
        "config-cut-off",
        ["config", "translator", "tokenizer"],
        "OSError",
        "/config.json' is not a valid JSON file",
    ),
    (
        "no-config.json",
        ["config", "translator"],
        "ValueError",
        "`model_type` key in its config.json",
    ),
    (
        "generation-config-cut-off",
        ["translator"],
        "OSError",
        "/generation_config.json' is not a valid JSON file",
    ),
    ("tokenizer-cut-off", ["tokenizer"], "OSError", "/tokenizer.json is damaged: EOF while"),
    # AutoTokenizer reads the file before it knows our class.
    ("tokenizer-config-cut-off", ["tokenizer"], "JSONDecodeError", "Unterminated string"),
    ("no-tokenizer.json", ["tokenizer"], "OSError", "no-tokenizer.json has no tokenizer.json."),
]
FAULTS_OF_CODE = [
    ("code-cut-off", ["translator"], "IndentationError", "expected an indented block"),
    ("no-search_vaswani.py", ["translator"], "OSError", "have a file named search_vaswani.py."),
]


def assert_refused(said, parts, error, message):
    assert [part for part, refused in said.items() if refused] == parts
    for part in parts:
        assert said[part][0] == error
        assert message in said[part][1]


@pytest.mark.parametrize(("name", "parts", "error", "message"), FAULTS)
def test_a_damaged_repository_is_refused_by_the_package(published, name, parts, error, message):
    assert_refused(published["broken"][name], parts, error, message)


@pytest.mark.parametrize(("name", "parts", "error", "message"), FAULTS + FAULTS_OF_CODE)
def test_a_damaged_repository_is_refused_without_the_package(read, name, parts, error, message):
    assert_refused(read["broken"][name], parts, error, message)


@pytest.mark.parametrize("name", [name for name, *_ in FAULTS_OF_CODE])
def test_the_package_needs_no_code_of_a_repository(published, name):
    assert set(published["broken"][name].values()) == {None}


def test_every_fault_is_tested(broken):
    assert {name for name, *_ in FAULTS + FAULTS_OF_CODE} == set(broken)


def test_who_asks_what_is_missing_gets_the_model_and_the_answer(broken, tmp_path):
    for name, content in broken["weight-renamed"].items():
        (tmp_path / name).write_bytes(content)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is VaswaniForConditionalGeneration
    assert info["missing_keys"] == {"model.decoder.layers.0.fc1.weight"}
    assert info["unexpected_keys"] == {"model.decoder.layers.0.fc9.weight"}


# The cache


@pytest.mark.parametrize("damage", ["cut off", "zeros", "empty"])
def test_weights_that_were_damaged_in_the_cache_are_refused(read, damage):
    error, message = read["cache"][damage]
    assert error == "OSError"
    assert message.startswith("The weights of cache/model are damaged: ")
    assert "force_download=True" in message


def test_force_download_repairs_the_cache(read, expected):
    assert read["cache"]["at first"] == expected
    assert read["cache"]["fetched anew"] == expected


def test_one_changed_bit_is_found_by_hugging_face_hubs_verification(read):
    assert read["cache"]["one bit"] == ["model.safetensors"]


def test_weights_that_changed_on_the_hub_replace_those_of_the_cache(published, read):
    assert read["cache"]["changed on the Hub"] == published["versions"]["draft"]
    assert read["cache"]["without the Hub"] == published["versions"]["draft"]


def test_the_loopback_hub_knew_every_request(hub, read):
    assert hub.unknown_requests == []
