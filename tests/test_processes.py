"""Two processes on a CPU with gloo train the same model as one process."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import SIZES
from forks import forked
from launches import TRAIN, free_port, launch, printed_flags
from safetensors.torch import load_file
from test_batching import BUDGET, collator, training_data
from torch import distributed
from torch.distributed.checkpoint import state_dict as full
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, set_seed
from vaswani.corpora.token_batches import TokenBatchSampler

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["d_model=32", "encoder_layers=1", "decoder_layers=1", "encoder_attention_heads=4"]
SMALL += ["decoder_attention_heads=4", "encoder_ffn_dim=64", "decoder_ffn_dim=64"]


def assert_equal_weights(one, two, tolerance):
    one, two = (load_file(Path(folder) / "model.safetensors") for folder in (one, two))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=tolerance, rtol=0)


LOOP = ["--vocab-size", 340, "--steps", 12, "--tokens", 300]
# Adam amplifies differences in the last digit. With small learning rates, they stay small.
SLOW = ["--warmup", 400]


@pytest.mark.slow
def test_the_accelerate_loop_trains_a_model_that_auto_classes_load(number_words, tmp_path):
    forked(
        1, ROOT / "examples" / "accelerate_loop.py", *number_words, *LOOP, "--warmup", 4,
        "--set", *SMALL, "--output", tmp_path,
    )  # fmt: skip
    model, tokenizer = (
        auto.from_pretrained(tmp_path) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    assert model.config.d_model == 32
    batch = tokenizer(["one hundred"], text_target=["einhundert"], return_tensors="pt")
    fresh = VaswaniForConditionalGeneration(model.config).eval()
    with torch.no_grad():
        assert model(**batch).loss < fresh(**batch).loss - 0.5


def test_the_accelerate_loop_refuses_files_that_do_not_match(number_words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import accelerate_loop

    (tmp_path / "short").write_text("eins\n")
    files = [str(number_words[0]), str(tmp_path / "short")]
    with pytest.raises(ValueError, match=r"120 lines.*short has 1: .*line 2 has no partner"):
        accelerate_loop.main([*files, "--output", str(tmp_path / "model")])


@pytest.mark.parametrize(
    ("field", "complaint"),
    [("num_heads=4", "'num_heads' is unknown"), ("dropout=2", "dropout must be in")],
)
def test_the_accelerate_loop_refuses_settings_before_it_reads(
    field, complaint, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import accelerate_loop

    with pytest.raises(SystemExit):
        accelerate_loop.main(["absent.en", "absent.de", "--output", "absent", "--set", field])
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_accelerate_loop_gives_the_same_weights_with_two_processes(number_words, tmp_path):
    for processes, accumulate in ((1, 2), (2, 1)):
        forked(
            processes, ROOT / "examples" / "accelerate_loop.py", *number_words, *LOOP, *SLOW,
            "--set", *SMALL, "dropout=0.0", "--accumulate", accumulate,
            "--output", tmp_path / str(processes),
        )  # fmt: skip
    assert_equal_weights(tmp_path / "1", tmp_path / "2", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--r-drop", 2],
        ["--r-drop", 2, "--batching", "packed"],
        ["--muon"],
        # k is so large that every prefix is the reference, because processes draw other numbers.
        ["--objective", "scheduled_sampling", "--objective-settings", "k=1e9"],
    ],
)
def test_training_gives_the_same_weights_with_two_processes(number_words, tmp_path, options):
    for processes, accumulate in ((1, 2), (2, 1)):
        forked(
            processes, *TRAIN, "--train", *number_words,
            "--valid", *number_words, "--test", *number_words, "--vocab-size", 340,
            "--steps", 6, "--eval-steps", 3, *SLOW, "--max-source-tokens", 300,
            "--average", 2, "--accumulate", accumulate, "--output", tmp_path / str(processes),
            "--set", *SMALL, "dropout=0.0", *options,
        )  # fmt: skip
    assert_equal_weights(tmp_path / "1", tmp_path / "2", 1e-6)
    one, two = (json.loads((tmp_path / run / "results.json").read_text()) for run in ("1", "2"))
    for scores in (one, two):
        del scores["test"]["seconds"], scores["valid"]["seconds"]
        assert scores["averaged"] == ["checkpoint-3", "checkpoint-6"]
        assert [entry["step"] for entry in scores["log"] if "eval_bleu" in entry] == [3, 6]
    assert one["test"] == two["test"]
    assert one["valid"].keys() == two["valid"].keys()
    for name, figure in one["valid"].items():
        assert two["valid"][name] == (
            figure if isinstance(figure, str) else pytest.approx(figure, rel=1e-5)
        )
    assert (tmp_path / "2" / "learning_curve.png").exists()


@pytest.mark.slow
def test_the_first_line_of_several_processes_is_printed_once(number_words, tmp_path):
    printed = launch(
        2, *TRAIN, "--train", *number_words,
        "--vocab-size", 340, "--steps", 2, "--set", *SMALL, "--output", tmp_path / "run",
    )  # fmt: skip
    line = "Training with 2 processes on cpu (1 thread each)"
    assert printed.splitlines()[0] == line
    assert printed.count("Training with") == printed.count(" parameters") == 1


@pytest.mark.slow
def test_two_machines_of_the_readmes_command_give_the_weights_of_one_process(
    number_words, tmp_path
):
    """Two launchers with one process each represent the machines."""
    arguments = [
        *TRAIN, "--train", *number_words,
        "--vocab-size", 340, "--steps", 6, *SLOW, "--max-source-tokens", 300,
        "--set", *SMALL, "dropout=0.0",
    ]  # fmt: skip
    forked(1, *arguments, "--accumulate", 2, "--output", tmp_path / "1")
    flags = printed_flags("--num_machines")
    flags[flags.index("--main_process_ip") + 1] = "127.0.0.1"
    flags[flags.index("--main_process_port") + 1] = str(free_port())

    def machine(rank):
        flags_of_machine = list(flags)
        flags_of_machine[flags.index("--machine_rank") + 1] = str(rank)
        return launch(2, *arguments, "--output", tmp_path / "2", flags=flags_of_machine)

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(machine, range(2))
    assert first.startswith("Training with 2 processes on cpu")
    assert "Training with" not in second
    assert_equal_weights(tmp_path / "1", tmp_path / "2", 1e-6)


# The code below runs in the processes that `forked` starts.

STEPS, HALF = 8, 5


def update(model, optimizer, batches):
    """Make one update with this process's batches. Gradients are averaged over processes."""
    tokens = sum((batch["labels"] != -100).sum() for batch in batches)
    processes = 1
    if distributed.is_initialized():
        distributed.all_reduce(tokens)
        processes = distributed.get_world_size()
    for batch in batches:
        (model(**batch, num_items_in_batch=tokens).loss * processes).backward()
    optimizer.step()
    optimizer.zero_grad()


def fresh_model():
    set_seed(3)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES, dropout=0.0)).train()
    data = training_data().to_list()
    lengths = [(len(row["input_ids"]), len(row["labels"])) for row in data]
    sampler = TokenBatchSampler(lengths, BUDGET, batches_per_update=2)
    batches = [*DataLoader(data, batch_sampler=sampler, collate_fn=collator)]
    return model, [batches[2 * n % len(batches) :][:2] for n in range(STEPS)]


def sharded(output, checkpoint=None):
    """Train a model sharded by FSDP2, from a checkpoint if one is given."""
    distributed.init_process_group("gloo")
    model, batches = fresh_model()
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert any(p.to_local().numel() < p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    whole = full.StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = 0
    if checkpoint:
        saved = VaswaniForConditionalGeneration.from_pretrained(checkpoint).state_dict()
        full.set_model_state_dict(model, saved, options=whole)
        moments = torch.load(Path(checkpoint) / "optimizer.pt")
        full.set_optimizer_state_dict(model, optimizer, moments, options=whole)
        first = HALF
    for step in range(first, STEPS):
        update(model, optimizer, [batches[step][distributed.get_rank()]])
        if step + 1 in (HALF, STEPS):
            folder = Path(output) / f"step-{step + 1}"
            weights = full.get_model_state_dict(model, options=whole)
            moments = full.get_optimizer_state_dict(model, optimizer, options=whole)
            if distributed.get_rank() == 0:
                model.save_pretrained(folder, state_dict=weights)
                torch.save(moments, folder / "optimizer.pt")
            distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_fsdp2_trains_like_one_process_saves_whole_models_and_resumes(tmp_path):
    forked(2, __file__, tmp_path / "whole")
    model, batches = fresh_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in batches:
        update(model, optimizer, batch)
    saved = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "whole" / f"step-{STEPS}")
    assert saved.lm_head.weight is saved.model.encoder.embed_tokens.weight
    for name, value in saved.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-6, rtol=0)
    forked(2, __file__, tmp_path / "resumed", tmp_path / "whole" / f"step-{HALF}")
    resumed, whole = (tmp_path / run / f"step-{STEPS}" for run in ("resumed", "whole"))
    assert_equal_weights(resumed, whole, 0)


if __name__ == "__main__":
    sharded(*sys.argv[1:])
