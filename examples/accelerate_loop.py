"""Section 5 of the paper, line by line, in a plain loop on Accelerate.

    python examples/accelerate_loop.py train.en train.de --output runs/loop
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py train.en train.de \
        --output runs/loop

Keep processes x `--accumulate` constant. Several processes then train the same model as one
process: an update has the same sentences, and every target token has the same weight.
`vaswani train` also evaluates, averages and resumes.
"""

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import DataCollatorForSeq2Seq
from vaswani.commands.recipes import settings
from vaswani.configuration.extras import needs
from vaswani.corpora.reading import read_pairs
from vaswani.corpora.token_batches import TokenBatchSampler
from vaswani.training.processes import describe_processes
from vaswani.training.schedule import noam_schedule

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

with needs("vaswani[train]", SystemExit):
    from accelerate import Accelerator
    from accelerate.utils import set_seed


def main(argv: list[str] | None = None) -> None:
    """Train as the command line says."""
    args = parse_args(argv)
    # Accelerate needs cpu=True without a GPU, or it would run several processes as one.
    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if args.bf16 else "no")
    accelerator.print(describe_processes(accelerator.state))
    set_seed(1)

    # 5.1 Training Data and Batching.
    tokenizer, pairs, sampler = training_data(args, accelerator.num_processes)
    config = VaswaniConfig.preset(args.preset, vocab_size=len(tokenizer), **args.set)
    model = VaswaniForConditionalGeneration(config)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=collator)

    # 5.3 Optimizer: Adam, and the learning rate of equation 3.
    fused = accelerator.device.type in ("cuda", "cpu")
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=fused)
    schedule = noam_schedule(optimizer, config.d_model, args.warmup)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # 5.4 Regularization: dropout and label smoothing act in training mode.
    model.train()
    progress = tqdm(total=args.steps, disable=not accelerator.is_main_process)
    for batches in itertools.islice(updates(loader, args.accumulate), args.steps):
        # The loss of an update is the mean over the real target tokens of all processes.
        tokens = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in batches))
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            loss = model(**batch, num_items_in_batch=tokens).loss
            # Accelerate averages gradients over processes. Their sum is needed, so multiply.
            accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.update()
        progress.set_postfix(loss=f"{accelerator.reduce(total).item():.3f}")

    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=weights)
        tokenizer.save_pretrained(args.output)
    # With gloo, a process that ends just after a reduction may hang: a thread of gloo still has to
    # release a tensor, and needs the GIL for that.
    accelerator.wait_for_everyone()
    time.sleep(1)
    accelerator.end_training()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", help="text file, one sentence per line, plain or .gz")
    add("target", help="its translation, line by line")
    add("--output", required=True, help="folder of the model")
    add("--preset", default="base", help="row of Table 3 (default: base)")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields that differ from it")
    add("--vocab-size", type=int, default=37000, help="byte pairs (default: 37000, 5.1)")
    add("--tokens", type=int, default=25000, help="tokens per batch and side (default: 25000, 5.1)")
    add("--accumulate", type=int, default=1, help="batches per update and process (default: 1)")
    add("--steps", type=int, default=100_000, help="updates (default: 100000, 5.2)")
    add("--warmup", type=int, default=4000, help="updates of warm-up (default: 4000, 5.3)")
    add("--bf16", action="store_true", help="compute in bfloat16 where it is safe")
    args = parser.parse_args(argv)
    try:
        args.set = settings(args.set)
        VaswaniConfig.preset(args.preset, **args.set)
    except (ValueError, StrictDataclassError) as error:
        parser.error(f"--preset or --set: {error}")
    return args


def training_data(
    args: argparse.Namespace, processes: int
) -> tuple[VaswaniTokenizer, list[dict[str, list[int]]], TokenBatchSampler]:
    """Train a shared vocabulary and make batches by approximate length (section 5.1)."""
    lines = read_pairs([args.source, args.target], ("source", "target"), "train")
    sources, targets = [source for source, _ in lines], [target for _, target in lines]
    tokenizer = VaswaniTokenizer.train_from_iterator(sources + targets, "bpe", args.vocab_size)
    encoded = tokenizer(sources, text_target=targets)
    pairs = [
        {"input_ids": source, "labels": target}
        for source, target in zip(encoded["input_ids"], encoded["labels"], strict=True)
    ]
    sampler = TokenBatchSampler(
        [(len(pair["input_ids"]), len(pair["labels"])) for pair in pairs],
        args.tokens,
        batches_per_update=args.accumulate * processes,
    )
    return tokenizer, pairs, sampler


def updates(loader: DataLoader, accumulate: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the batches of one update after the other, epoch after epoch without end."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        batches = iter(loader)
        while update := list(itertools.islice(batches, accumulate)):
            yield update


if __name__ == "__main__":
    main()
