"""Fine-tune a saved model with transformers' Seq2SeqTrainer alone.

    python examples/fine_tune.py runs/quickstart pairs.tsv --output runs/fine-tuned

Each line of pairs.tsv has a source and its translation, separated by a tab. Only the import of
vaswani is special to this package. Other encoder-decoder models are fine-tuned in the same way.
"""

import argparse

from datasets import Features, Value, load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import vaswani  # noqa: F401  (registers the model with the Auto classes)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder or Hub id of a saved model")
parser.add_argument("pairs", help="file with lines of source, tab, translation")
parser.add_argument("--output", default="runs/fine-tuned", help="default: %(default)s")
parser.add_argument("--epochs", type=float, default=3, help="default: %(default)s")
parser.add_argument("--learning-rate", type=float, default=1e-4, help="default: %(default)s")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
pairs = load_dataset(
    "csv",
    data_files=args.pairs,
    split="train",
    delimiter="\t",
    column_names=["source", "target"],
    usecols=[0, 1],  # further columns are not read
    index_col=False,
    quoting=3,  # csv.QUOTE_NONE: quotation marks are part of the text
    keep_default_na=False,
    features=Features({"source": Value("string"), "target": Value("string")}),  # digits are text
)
if "" in pairs["target"]:
    parser.error(f"{args.pairs} has a line with nothing after the tab: remove the line.")
# Some models split the two sides differently.
target_tokenizer = (
    model.target_tokenizer(tokenizer) if hasattr(model, "target_tokenizer") else tokenizer
)
data = pairs.map(
    lambda batch: {
        "input_ids": tokenizer(batch["source"])["input_ids"],
        "labels": target_tokenizer(text_target=batch["target"])["input_ids"],
    },
    batched=True,
    remove_columns=pairs.column_names,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=32,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    ),
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
if target_tokenizer is not tokenizer:
    target_tokenizer.save_pretrained(f"{args.output}/target_tokenizer")
print(f"The model is in {args.output}: vaswani translate {args.output} FILE")
