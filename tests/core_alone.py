"""Commands that work with only the wheel. `.ci/run` runs them in an environment without extras."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import vaswani

EXTRAS = ("accelerate", "datasets", "evaluate", "sacrebleu", "matplotlib", "ctranslate2", "gradio")


def command(*words, text=""):
    return subprocess.run(
        [Path(sys.executable).with_name("vaswani"), *map(str, words)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def main():
    assert not [name for name in EXTRAS if importlib.util.find_spec(name)], "extras are installed"
    assert "site-packages" in vaswani.__file__, "the wheel is not what is imported"
    lines = ["one two three", "two three four"] * 9
    tokenizer = vaswani.VaswaniTokenizer.train_from_iterator(
        lines, "bpe", vocab_size=300, show_progress=False
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    config = vaswani.VaswaniConfig(vocab_size=len(tokenizer), **sizes)
    model = vaswani.VaswaniForConditionalGeneration(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
        batch = AutoTokenizer.from_pretrained(folder)(lines[:2], return_tensors="pt", padding=True)
        assert loaded.generate(**batch, num_beams=4, max_new_tokens=5).shape[0] == 2
        assert loaded(**batch, labels=batch["input_ids"]).loss > 0
        assert loaded.score(batch["input_ids"], batch["input_ids"]).sums.shape == (2,)
        assert len(pipeline("translation", model=folder)(lines[:2], max_new_tokens=5)) == 2
        done = command("translate", folder, "--max-new-tokens", 5, text="one\n\ntwo\n")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 3
        assert command("card", folder).returncode == 0
        pairs = Path(folder, "pairs.tsv")
        pairs.write_text("one\ttwo\n")
        done = command("train", "--train", pairs, "--output", Path(folder, "new"))
        assert done.returncode == 1, done.stdout
        assert "pip install 'vaswani[train]'" in done.stderr.splitlines()[-1], done.stderr
    assert command("--help").returncode == command("train", "--help").returncode == 0
    assert command("--version").stdout.strip() == vaswani.__version__


if __name__ == "__main__":
    main()
