"""Small models and batches for all tests, in float64 and with fixed seeds."""

import gc
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from loopback_hub import LoopbackHub
from networks import enliven
from num2words import num2words
from small_corpus import write_corpus
from torch import nn
from transformers import GenerationMixin
from vaswani.generation import generation_vaswani

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration

SIZES = {
    "vocab_size": 19,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


# On AMD CPUs, CTranslate2 chooses oneDNN, with which its int8 scores are wrong without VNNI.
_CPU = Path("/proc/cpuinfo")
if _CPU.exists() and "vnni" not in _CPU.read_text():
    os.environ.setdefault("CT2_USE_MKL", "1")

# Files of tests need not survive a loss of power, and waiting for the disk takes time.
os.fsync = lambda descriptor: None

# For models this small, waking a second thread takes longer than the computation.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Exempt what was imported from collections of garbage. Accelerate starts many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Forget what earlier tests compiled, because torch compiles a function eight times at most."""
    torch.compiler.reset()


@pytest.fixture
def tiny_config():
    """Build a configuration with small sizes. Keyword arguments override single fields."""

    def build(**overrides):
        return VaswaniConfig(**{**SIZES, **overrides})

    return build


@pytest.fixture
def tiny_model(tiny_config):
    """Build a small model in evaluation mode, by default in float64.

    Biases and LayerNorms are random. With their initial values of 0 and 1, a test could not detect
    whether they are used.
    """

    def build(
        model_class=VaswaniForConditionalGeneration,
        *,
        seed=0,
        dtype=torch.float64,
        attn_implementation="sdpa",
        **overrides,
    ):
        torch.manual_seed(seed)
        config = tiny_config(**overrides)
        config._attn_implementation = attn_implementation
        model = model_class(config).double()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.weight.uniform_(0.5, 1.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0, 0.3)
        return model.to(dtype).eval()

    return build


@pytest.fixture
def uneven_model(tiny_model):
    """A small model in float32, with different numbers for all sizes."""
    return tiny_model(
        dtype=torch.float32,
        vocab_size=330,
        d_model=32,
        decoder_layers=3,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
    )


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus like Multi30k with a dozen sentences."""
    write_corpus(tmp_path / "data")
    monkeypatch.setenv("VASWANI_DATA", str(tmp_path / "data"))


@pytest.fixture
def padded_batch():
    """Build random token ids of given lengths, padded on the right with 0, and their mask."""

    def build(lengths, seed=0, vocab_size=SIZES["vocab_size"]):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, vocab_size, (len(lengths), max(lengths)), generator=generator)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        return ids * mask, mask

    return build


@pytest.fixture
def layer_inputs():
    """Run a model and return what enters the first layer of its encoder and of its decoder."""

    def run(model, **batch):
        seen = []
        stacks = (model.model.encoder, model.model.decoder)
        handles = [
            stack.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            for stack in stacks
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
        return seen

    return run


@pytest.fixture(scope="session")
def browser():
    """The Chromium of the system, or playwright's."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        path = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def number_words(tmp_path_factory):
    """Parallel files of English and German number words."""
    folder = tmp_path_factory.mktemp("data")
    for language in ("en", "de"):
        lines = [num2words(n, lang=language) + "\n" for n in range(100, 220)]
        (folder / f"train.{language}").write_text("".join(lines), encoding="utf-8")
    return [folder / f"train.{language}" for language in ("en", "de")]


@pytest.fixture(scope="module")
def hub():
    """A server on this machine that answers as the Hub does."""
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The working folder of the processes that a test module starts."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def quiet_exporter():
    """Ignore the exporter's own warnings, for example about experimental features."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _transformers_verbosity():
    """Restore the verbosity of transformers, because commands under test silence its warnings."""
    before = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture
def with_threads():
    before = torch.get_num_threads()

    def compute_with(threads, function):
        torch.set_num_threads(threads)
        return function()

    yield compute_with
    torch.set_num_threads(before)


@pytest.fixture
def lively_model(tiny_model):
    """Build a model whose outputs vary in words and in length."""

    def build(**overrides):
        return enliven(tiny_model(tie_word_embeddings=False, **overrides))

    return build


@pytest.fixture
def endless_model(tiny_model):
    """Build a model that never ends a sentence: the logit of the end token is about -1000."""

    def build(**overrides):
        model = tiny_model(tie_word_embeddings=False, **overrides)
        with torch.no_grad():
            model.model.decoder.layers[-1].final_layer_norm.bias[0] = 100.0
            model.lm_head.weight[:, 0] = 0.0
            model.lm_head.weight[model.config.eos_token_id, 0] = -10.0
        return model

    return build


@pytest.fixture
def source(padded_batch):
    """Four padded sentences, as inputs of a model."""
    input_ids, attention_mask = padded_batch([7, 4, 2, 5])
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.fixture
def searches(monkeypatch):
    """Count the calls of our two searches and of transformers' searches."""
    calls = dict.fromkeys(("beam_search", "greedy_search", "_beam_search", "_sample"), 0)

    def counted(owner, name):
        original = getattr(owner, name)

        def count(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    for name in ("beam_search", "greedy_search"):
        counted(generation_vaswani, name)
    for name in ("_beam_search", "_sample"):
        counted(GenerationMixin, name)
    return calls
