"""Model cards that are pushed to the Hub."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from card_runs import FROZEN, ROOT, RUN, metadata, python_blocks, text_of, write_json
from loopback_hub import LoopbackHub, Reply
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from vaswani.training.circumstances import weights_sha256


class CheckingHub(LoopbackHub):
    """A Hub that refuses cards whose metadata violate the rules in the Hub's documentation."""

    def _admit(self, request, name, repo_id):
        if name != "validate_card":  # validation needs no token
            super()._admit(request, name, repo_id)

    def _validate_card(self, request):
        errors = [{"message": complaint} for complaint in complaints(request.json["content"])]
        return Reply({"errors": errors, "warnings": []}, 400 if errors else 200)


def complaints(content):
    """Return the errors in the metadata of a card."""
    data = metadata(content)
    languages = data.get("language", [])
    right = {
        "license": data.get("license", "mit") in ("apache-2.0", "mit", "cc-by-4.0"),
        "language": all(re.fullmatch("[a-z]{2,3}", code) for code in languages),
        "pipeline_tag": data.get("pipeline_tag", "translation") == "translation",
        "library_name": data.get("library_name", "transformers") == "transformers",
        "tags": all(isinstance(tag, str) for tag in data.get("tags", [])),
        "datasets": all(
            re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in data.get("datasets", [])
        ),
    }
    for model in data.get("model-index", []):
        for result in model["results"]:
            named = [model["name"], result["task"]["type"], *result["dataset"].values()]
            named += [metric["type"] for metric in result["metrics"]]
            values = [metric["value"] for metric in result["metrics"]]
            right["model-index"] = all(isinstance(name, str) for name in named) and all(
                isinstance(value, int | float) for value in values
            )
    return [f'"{field}" is wrong' for field, fine in right.items() if not fine]


PUBLISHER = """
import torch
from huggingface_hub import ModelCard, get_session, upload_file
from huggingface_hub.constants import ENDPOINT
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import vaswani

def validate(text):
    # Card.validate of huggingface_hub 1 asks huggingface.co, whatever the endpoint is.
    body = {"repoType": "model", "content": text}
    return get_session().post(f"{ENDPOINT}/api/validate-yaml", json=body)

model = AutoModelForSeq2SeqLM.from_pretrained("runs/numbers")
tokenizer = AutoTokenizer.from_pretrained("runs/numbers")
tokenizer.push_to_hub("user/numbers")
model.push_to_hub("user/numbers", tags=["mine"])
card = ModelCard.load("user/numbers")
assert validate(str(card)).status_code == 200
print(validate(str(card).replace("license: mit", "license: none-such")).text)

model.push_to_hub("user/changed")
upload_file(path_or_fileobj=b"# By hand", path_in_repo="README.md", repo_id="user/changed")
model.push_to_hub("user/changed")

AutoModelForSeq2SeqLM.from_pretrained("runs/by-hand").push_to_hub("user/by-hand")

with torch.no_grad():
    model.model.encoder.layers[0].fc2.bias.add_(1.0)
model.push_to_hub("user/numbers-later")
model.push_to_hub("user/numbers")
model.save_pretrained("runs/later", push_to_hub=True, repo_id="user/saved")
"""
WITHOUT_PACKAGE = "import sys\nsys.modules['vaswani'] = None\n"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The files that a client pushed, and the output of a client without the package."""
    work = tmp_path_factory.mktemp("pushed")
    folder = work / "runs" / "numbers"
    for auto_class in (AutoModelForSeq2SeqLM, AutoTokenizer):
        auto_class.from_pretrained(FROZEN).save_pretrained(folder)  # with the code
    write_json(folder / "results.json", {**RUN, "weights_sha256": weights_sha256(folder)})
    by_hand = shutil.copytree(folder, work / "runs" / "by-hand")
    (by_hand / "README.md").write_text("# By hand\n\n[all](results.json)\n")
    with contextlib.chdir(work):
        text = text_of(Path("runs/numbers"), license="mit")
    _, without_package = python_blocks(text)
    with CheckingHub() as hub:
        environment = {**hub.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        clients = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=environment,
                cwd=work,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for code in (PUBLISHER, WITHOUT_PACKAGE + without_package)
        ]
        finished = [client.communicate(timeout=300) for client in clients]
        for client, (_, errors) in zip(clients, finished, strict=True):
            assert client.returncode == 0, errors[-4000:]
        assert hub.unknown_requests == []
        names = ("numbers", "changed", "by-hand", "numbers-later", "saved")
        repositories = {
            name: [commit.files for commit in hub.commits(f"user/{name}")] for name in names
        }
    return repositories, [output for output, _ in finished], folder


@pytest.mark.slow
def test_a_push_brings_the_card_and_all_it_links_to(pushed):
    repositories, _, folder = pushed
    _, draft, first, _ = repositories["numbers"]
    assert b"36.82" not in draft["README.md"]
    text = first["README.md"].decode()
    assert "36.82" in text
    assert 'from_pretrained("user/numbers", trust_remote_code=True)' in text
    assert {"mit"} == {metadata(text)["license"]}
    assert "mine" in metadata(text)["tags"]
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert first[link] == (folder / link).read_bytes()
    assert {"LICENSE-CODE", "results.json", "learning_curve.png"} <= set(first)


@pytest.mark.slow
def test_the_hub_finds_no_fault_with_the_card_and_would_have_found_one(pushed):
    _, (printed, _), _ = pushed
    assert [error["message"] for error in json.loads(printed)["errors"]] == ['"license" is wrong']


@pytest.mark.slow
def test_a_card_changed_on_the_hub_or_in_the_folder_is_pushed_as_it_is(pushed):
    repositories, _, folder = pushed
    *_, last = repositories["changed"]
    assert last["README.md"].endswith(b"# By hand")
    *_, last = repositories["by-hand"]
    assert "# By hand\n\n[all](results.json)" in last["README.md"].decode()
    assert last["results.json"] == (folder / "results.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbers", "numbers-later", "saved"])
def test_weights_trained_further_take_no_old_number_with_them(pushed, name):
    repositories, _, _ = pushed
    *_, last = repositories[name]
    text = last["README.md"].decode()
    assert "36.82" not in text
    assert "This model has no published score." in text
    assert "LICENSE-CODE" in last


@pytest.mark.slow
def test_the_code_without_the_package_runs_as_printed(pushed):
    _, (_, printed), _ = pushed
    assert printed == "[{'translation_text': 'dreihundertzweiundvierzig'}]\n"
