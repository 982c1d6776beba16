"""Processes that push to a Hub, pull from it, and report their results.

A process chooses its Hub, and whether it can import the package, when it starts. Therefore `ask`
runs this file as a program, once for each role.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import transformers as hf

SENTENCES = ["A dog runs over the wet sand.", "Two men are playing chess."]
RESULTS = json.dumps({"bleu": 36.8})


def ask(role, hub, work, package=None, **given):
    """Run a role in a separate process and return its result.

    `package` is the folder to import vaswani from. Without it, the process cannot import vaswani.
    """
    task, report = work / f"{role.__name__}.task.json", work / f"{role.__name__}.json"
    task.write_text(json.dumps({"work": str(work), **given}))
    # -P keeps the folder of this file out of sys.path.
    command = [sys.executable, "-P", __file__, role.__name__, str(package or ""), task, report]
    finished = subprocess.run(
        command, env=hub.environment, cwd=work, capture_output=True, text=True, timeout=500
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return json.loads(report.read_text())


def load(place, tokenizer_place=None, **options):
    return {
        "config": hf.AutoConfig.from_pretrained(place, **options),
        "base": hf.AutoModel.from_pretrained(place, **options),
        "translator": hf.AutoModelForSeq2SeqLM.from_pretrained(place, **options),
        "encoder": hf.AutoModelForTextEncoding.from_pretrained(place, **options),
        "tokenizer": hf.AutoTokenizer.from_pretrained(tokenizer_place or place, **options),
    }


def parts_of(translator, tokenizer):
    """Return the expected result of `load`, made from a translator that was never saved."""
    return {
        "config": translator.config,
        "base": translator.model,
        "translator": translator,
        "encoder": translator.model.encoder,
        "tokenizer": tokenizer,
    }


def fingerprint(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def behaviour(loaded):
    """Return the behaviour of a model and its tokenizer, bit for bit."""
    tokenizer, translator = loaded["tokenizer"], loaded["translator"].eval()
    source = tokenizer(SENTENCES, padding=True, return_tensors="pt")
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
    """Return the packages of the classes: `vaswani`, or `transformers_modules` for remote code."""
    return sorted({type(part).__module__.split(".")[0] for part in loaded.values()})


def facts_about(loaded):
    return {"behaviour": behaviour(loaded), "packages": packages_of(loaded)}


def refusal(function, *args, **options):
    """Return the name and the message of the error that a call raises, or None."""
    try:
        function(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]


def refusals(place, **options):
    """Return the errors of loading each part."""
    loaders = {
        "config": hf.AutoConfig,
        "translator": hf.AutoModelForSeq2SeqLM,
        "tokenizer": hf.AutoTokenizer,
    }
    return {
        part: refusal(loader.from_pretrained, place, **options) for part, loader in loaders.items()
    }


def train(trainer_class, loaded, output_dir, repo_id=None, resume=None, **settings):
    model, tokenizer = loaded["translator"], loaded["tokenizer"]
    settings = {
        "max_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **({"push_to_hub": True, "hub_model_id": repo_id} if repo_id else {}),
        **settings,
    }
    Path(output_dir).mkdir()
    Path(output_dir, "results.json").write_text(RESULTS)
    trainer = trainer_class(
        model=model,
        args=hf.Seq2SeqTrainingArguments(output_dir=output_dir, **settings),
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=[dict(tokenizer(text, text_target=text)) for text in SENTENCES],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def changed(loaded, value):
    """Change the weights, for a new version."""
    with torch.no_grad():
        loaded["translator"].model.encoder.layers[0].fc2.bias.fill_(value)
    return loaded


def push(loaded, repo_id, **options):
    for part in ("translator", "tokenizer"):
        loaded[part].push_to_hub(repo_id, **options)


def without_waiting():
    """Let huggingface_hub retry a lost connection at once."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    for module in (_http, file_download):
        module.time = types.SimpleNamespace(sleep=lambda seconds: None)


# The roles of test_sharing.py


def publisher(saved, work):
    """With the package: load without trust_remote_code, push, and pull the pushed parts."""
    facts = {}
    loaded = load(saved)
    facts["folder"] = facts_about(loaded)
    # This config was never saved, so its auto_map is not yet written.
    config = type(loaded["config"])(d_model=16)
    parts = {"config": config, "model": loaded["translator"], "tokenizer": loaded["tokenizer"]}
    for name, part in parts.items():
        part.push_to_hub(f"pushed/{name}")
        part.save_pretrained(Path(work, name), push_to_hub=True, repo_id=f"saved/{name}")
    loaded["config"].save_pretrained(Path(work, "named-by-folder"), push_to_hub=True)
    for way in ("pushed", "saved"):
        facts[way] = facts_about(load(f"{way}/model", f"{way}/tokenizer"))
    return facts


def stranger(saved, work):
    """Without the package: load and pull with trust_remote_code, save three times, and push."""
    trusted = {"trust_remote_code": True}
    facts = {}
    generation = saved
    for number in (1, 2, 3):
        loaded = load(generation, **trusted)
        facts[f"generation {number}"] = facts_about(loaded)
        generation = f"{work}/generation-{number + 1}"
        loaded["translator"].save_pretrained(generation)
        loaded["tokenizer"].save_pretrained(generation)
    for way in ("pushed", "saved"):
        pulled = load(f"{way}/model", f"{way}/tokenizer", **trusted)
        facts[way] = facts_about(pulled)
    push(pulled, "pushed-again/both")
    return facts


def heir(saved, work):
    """Without the package, after the others: load the results of the publisher and stranger."""
    trusted = {"trust_remote_code": True}
    places = {"generation 4": f"{work}/generation-4", "pushed again": "pushed-again/both"}
    facts = {name: facts_about(load(place, **trusted)) for name, place in places.items()}

    tokenizer = hf.AutoTokenizer.from_pretrained(f"{saved}-tokenizer", **trusted)
    source = tokenizer(SENTENCES, padding=True, return_tensors="pt")
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


# The roles of test_hub.py


def owner(saved, work, broken):
    """With the package: train, push versions, lose connections, and load broken repositories."""
    without_waiting()
    return {
        "trainers": trained_and_pushed(saved, work),
        "interrupted training": training_that_lost_a_push(saved, work),
        "resumed": resumed_from_the_hub(saved, work),
        "versions": published_versions(saved, work),
        "interrupted": interrupted_pushes(saved),
        "broken": {name: refusals(f"broken/{name}") for name in broken},
    }


def trained_and_pushed(saved, work):
    from vaswani.training.trainer import VaswaniTrainer

    facts = {}
    for trainer_class in (hf.Seq2SeqTrainer, VaswaniTrainer):
        for strategy in ("every_save", "end", "checkpoint"):
            name = f"{trainer_class.__name__}-{strategy}"
            loaded = load(saved)
            trainer = train(
                trainer_class, loaded, f"{work}/{name}", f"trained/{name}", hub_strategy=strategy
            )
            if strategy == "end":  # transformers pushes at the end only on request
                trainer.push_to_hub()
            facts[name] = facts_about(parts_of(loaded["translator"], loaded["tokenizer"]))
    return facts


def training_that_lost_a_push(saved, work):
    from vaswani.training import saving
    from vaswani.training.trainer import VaswaniTrainer

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    saving.logger.addHandler(handler)
    loaded = load(saved)
    place = "interrupted/training"
    trainer = train(VaswaniTrainer, loaded, f"{work}/interrupted", place)
    trained_to = trainer.state.global_step
    trainer.push_to_hub()
    facts = facts_about(parts_of(loaded["translator"], loaded["tokenizer"]))
    return {**facts, "warnings": messages, "steps": trained_to}


def resumed_from_the_hub(saved, work):
    """Resume from the checkpoint that a run of two updates pushed, and train without a break."""
    from huggingface_hub import snapshot_download
    from vaswani.training.checkpoints import flaw_of
    from vaswani.training.trainer import VaswaniTrainer

    pulled = Path(snapshot_download("trained/VaswaniTrainer-checkpoint"), "last-checkpoint")
    ends = {}
    for name, resume in {"resumed": str(pulled), "straight": None}.items():
        loaded = load(saved)
        train(VaswaniTrainer, loaded, f"{work}/{name}", resume=resume, max_steps=4)
        ends[name] = behaviour(parts_of(loaded["translator"], loaded["tokenizer"]))
    return {"flaw": flaw_of(pulled), **ends}


def published_versions(saved, work):
    """Push a tag, a branch with other code, a later main, a private model, and two vocabularies."""
    from huggingface_hub import HfApi

    hub, repo_id = HfApi(), "versions/model"
    facts = {}
    loaded = load(saved)
    push(loaded, repo_id)
    hub.create_tag(repo_id, tag="v1")
    facts["v1"] = behaviour(parts_of(loaded["translator"], loaded["tokenizer"]))
    push(changed(loaded, 2.0), repo_id, revision="draft")
    code = Path(saved, "modeling_vaswani.py").read_bytes() + b"\nVERSION = 'draft'\n"
    hub.upload_file(
        path_or_fileobj=code, path_in_repo="modeling_vaswani.py", repo_id=repo_id, revision="draft"
    )
    facts["draft"] = behaviour(parts_of(loaded["translator"], loaded["tokenizer"]))
    push(changed(loaded, 3.0), repo_id)
    facts["main"] = behaviour(parts_of(loaded["translator"], loaded["tokenizer"]))
    facts["sha"] = hub.repo_info(repo_id, revision="draft").sha

    push(loaded, "private/model", private=True)

    repo_id = "two/vocabularies"
    hub.create_repo(repo_id)
    hub.upload_folder(folder_path=f"{saved}-two", repo_id=repo_id)
    hub.create_tag(repo_id, tag="v1")
    hub.upload_folder(
        folder_path=f"{saved}-two-later", repo_id=repo_id, path_in_repo="target_tokenizer"
    )
    return facts


def interrupted_pushes(saved):
    from huggingface_hub import HfApi

    facts = {}
    for number, part in enumerate(("upload", "publication")):
        place = f"interrupted/{part}"
        before = HfApi().repo_info(place).sha
        loaded = changed(load(saved), -1.0 - number)
        facts[part] = {
            "refusal": refusal(loaded["translator"].push_to_hub, place),
            "nothing is new": HfApi().repo_info(place).sha == before,
            "after it": behaviour(load(place)),
        }
        loaded["translator"].push_to_hub(place)
        facts[part]["pushed again"] = behaviour(load(place))
        facts[part]["meant"] = behaviour(parts_of(loaded["translator"], loaded["tokenizer"]))
    return facts


def reader(work, broken, trained, sha):
    """Without the package: pull all versions, invalid ones too, also with a damaged cache."""
    without_waiting()
    trusted = {"trust_remote_code": True}
    places = [*(f"trained/{name}" for name in trained), "interrupted/training", "lost/download"]
    return {
        "pulled": {place: facts_about(load(place, **trusted)) for place in places},
        "versions": read_versions(sha, **trusted),
        "private": read_private(**trusted),
        "two vocabularies": {
            version: translations("two/vocabularies", revision=version, **trusted)
            for version in ("v1", "main")
        },
        "broken": {name: refusals(f"broken/{name}", **trusted) for name in broken},
        "incomplete downloads": [str(path) for path in cache().rglob("*.incomplete")],
        "cache": damaged_cache(**trusted),
    }


def cache():
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def translations(place, **options):
    translate = hf.pipeline("translation", model=place, device="cpu", **options)
    return [translation["translation_text"] for translation in translate(SENTENCES)]


def read_versions(sha, **trusted):
    place = "versions/model"
    facts = {
        "unknown": refusals(place, revision="v9", **trusted),
        "translations of v1": translations(place, revision="v1", **trusted),
    }
    for name, revision in {"v1": "v1", "draft": "draft", "main": "main", "sha": sha}.items():
        loaded = load(place, revision=revision, **trusted)
        module = sys.modules[type(loaded["translator"]).__module__]
        facts[name] = {"behaviour": behaviour(loaded), "code": getattr(module, "VERSION", None)}
    return facts


def read_private(**trusted):
    facts = {}
    for name, token in {"without a token": "", "with a wrong token": "hf_wrong"}.items():
        with mock.patch.dict(os.environ, HF_TOKEN=token):
            facts[name] = refusals("private/model", **trusted)
    facts["cached"] = [str(path) for path in cache().glob("*private*/snapshots/*/*")]
    facts["with the token"] = behaviour(load("private/model", **trusted))
    return facts


def damaged_cache(**trusted):
    """Load from a cache with changed files, and after a change of the Hub's file."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    hub, place = HfApi(), "cache/model"
    facts = {"at first": behaviour(load(place, **trusted))}
    weights = Path(try_to_load_from_cache(place, "model.safetensors")).resolve()
    whole = weights.read_bytes()
    damages = {"cut off": whole[:-64], "zeros": bytes(len(whole)), "empty": b""}
    for name, content in damages.items():
        weights.write_bytes(content)
        facts[name] = refusals(place, **trusted)["translator"]
    hf.AutoModelForSeq2SeqLM.from_pretrained(place, force_download=True, **trusted)
    facts["fetched anew"] = behaviour(load(place, **trusted))

    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    verified = hub.verify_repo_checksums(place)
    facts["one bit"] = [mismatch["path"] for mismatch in verified.mismatches]
    weights.write_bytes(whole)

    later = Path(hf_hub_download("versions/model", "model.safetensors", revision="draft"))
    hub.upload_file(
        path_or_fileobj=later.read_bytes(), path_in_repo="model.safetensors", repo_id=place
    )
    facts["changed on the Hub"] = behaviour(load(place, **trusted))
    facts["without the Hub"] = behaviour(load(place, local_files_only=True, **trusted))
    return facts


def converter(work, commands):
    """Run commands of `vaswani convert`, and report their errors and downloads."""
    from huggingface_hub import scan_cache_dir
    from vaswani.commands.main import main

    refused = {}
    for name, command in commands.items():
        try:
            refused[name] = main(["convert", *command])
        except SystemExit as error:
            refused[name] = str(error)
    downloads = {
        repository.repo_id: [file.file_name for r in repository.revisions for file in r.files]
        for repository in scan_cache_dir().repos
    }
    return {"refusals": refused, "downloads": downloads}


# The roles of test_sibling_hub.py


def sibling_behaviour(model, tokenizer, task):
    """All that a user sees of an encoder or a decoder, to the last bit."""
    model = model.eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    facts = {
        "class": type(model).__name__,
        "token ids": batch["input_ids"].tolist(),
        "output": fingerprint(model(**batch)[0]),
        "classes": {str(number): name for number, name in model.config.id2label.items()},
    }
    text = SENTENCES[0].replace("dog", "<mask>") if task == "fill-mask" else SENTENCES[0]
    search = {"max_new_tokens": 5, "do_sample": False} if task == "text-generation" else {}
    answer = hf.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")(text, **search)
    facts["pipeline"] = json.loads(json.dumps(answer, default=float))
    if task == "text-generation":
        facts["beams"] = model.generate(**batch, max_new_tokens=5, num_beams=3).tolist()
    return facts


def facts_about_sibling(place, auto_class, task, **options):
    model = getattr(hf, auto_class).from_pretrained(place, **options)
    tokenizer = hf.AutoTokenizer.from_pretrained(place, **options)
    packages = packages_of({"model": model, "config": model.config, "tokenizer": tokenizer})
    facts = {"behaviour": sibling_behaviour(model, tokenizer, task), "packages": packages}
    return facts, (model, tokenizer)


def sibling_publisher(saved, work, siblings):
    """Has the package: pushes every sibling, and pulls its own pushes."""
    facts = {}
    for name, kind in siblings.items():
        _, parts = facts_about_sibling(f"{saved}/{name}", **kind)
        for part in parts:
            part.push_to_hub(f"siblings/{name}")
        facts[name], _ = facts_about_sibling(f"siblings/{name}", **kind)
    return facts


def sibling_stranger(work, siblings):
    """Has not: is refused without trust, pulls with trust, pushes again, and pulls that."""
    trusted = {"trust_remote_code": True}
    facts = {"untrusted": {}, "pulled": {}, "pushed again": {}}
    for name, kind in siblings.items():
        auto_class = getattr(hf, kind["auto_class"])
        facts["untrusted"][name] = refusal(auto_class.from_pretrained, f"siblings/{name}")
        facts["pulled"][name], parts = facts_about_sibling(f"siblings/{name}", **kind, **trusted)
        for part in parts:
            part.push_to_hub(f"again/{name}")
        facts["pushed again"][name], _ = facts_about_sibling(f"again/{name}", **kind, **trusted)
    return facts


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests; other numbers of threads change the last bits
    _role, _package, _task, _report = sys.argv[1:]
    if _package:
        sys.path.insert(0, _package)
        import vaswani  # noqa: F401  registers its classes
    else:
        # site-packages may have an editable install. None forbids importing the package.
        sys.modules["vaswani"] = None
    _facts = globals()[_role](**json.loads(Path(_task).read_text()))
    Path(_report).write_text(json.dumps(_facts))
