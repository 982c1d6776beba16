"""The common model tests of transformers, from the source distribution of the installed version.

The wheel has no tests, so the source distribution is downloaded once into the user's cache. It does
not contain the mixins for `generate` and for exporters, so they do not run here.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest import mock

import pytest
import torch
import transformers
from transformers import testing_utils
from transformers.models.auto import modeling_auto

from vaswani import (
    VaswaniConfig,
    VaswaniEncoderModel,
    VaswaniForConditionalGeneration,
    VaswaniModel,
    VaswaniTokenizer,
)

# This package is not called `tests`, because this folder has that name.
PACKAGE = "transformers_tests"

# Settings of every config, with values other than the defaults.
COMMON_SETTINGS = {
    "architectures": ["VaswaniModel"],
    "bos_token_id": 6,
    "chunk_size_feed_forward": 5,
    "decoder_start_token_id": 10,
    "dtype": "float16",
    "eos_token_id": 8,
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "output_attentions": True,
    "output_hidden_states": True,
    "pad_token_id": 7,
    "problem_type": "regression",
    "return_dict": False,
    "tie_word_embeddings": False,
}


def downloaded_tests():
    """Return the folder `tests` of the source distribution of the installed transformers."""
    release = f"transformers-{transformers.__version__}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vaswani"
    tests = cache / release / "tests"
    if tests.is_dir():
        return tests
    tests.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        download(f"transformers=={transformers.__version__}", scratch)
        with tarfile.open(Path(scratch) / f"{release}.tar.gz") as archive:
            archive.extractall(scratch, filter="data")
        new = Path(scratch) / release / "tests"
        # The tests read two files that are not in the distribution. Empty files suffice.
        (new / "__init__.py").touch()
        (new / "fixtures").mkdir()
        (new / "fixtures" / "sample_text.txt").touch()
        try:
            new.rename(tests)
        except OSError:
            # A parallel run may have created the folder between the check and the rename.
            if not tests.is_dir():
                raise
    return tests


def download(requirement, folder):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    try:
        result = subprocess.run(
            [*command, "--dest", folder, requirement], capture_output=True, text=True, timeout=300
        )
    except subprocess.TimeoutExpired:
        reason = "pip took more than 300 seconds"
    else:
        if result.returncode == 0:
            return
        reason = (result.stderr.strip() or f"pip ended with {result.returncode}").splitlines()[-1]
    pytest.skip(
        f"The tests of {requirement} cannot be downloaded from PyPI: {reason}",
        allow_module_level=True,
    )


def importable(name, **contents):
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


importable(PACKAGE, __path__=[str(downloaded_tests())])
# Three modules that the mixins import, but that are not in the source distribution.
importable(f"{PACKAGE}.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
importable(
    f"{PACKAGE}.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {})
)
importable(f"{PACKAGE}.utils.test_configuration_utils", config_common_kwargs=COMMON_SETTINGS)

# transformers' `slow` skips without RUN_SLOW, even with `-m slow`. Here only the option decides.
# Other marks change between versions, so --strict-markers does not check them.
with (
    mock.patch.object(testing_utils, "_run_slow_tests", True),
    mock.patch.object(pytest.mark, "_config", None),
):
    configuration_common = import_module(f"{PACKAGE}.test_configuration_common")
    modeling_common = import_module(f"{PACKAGE}.test_modeling_common")
    tokenization_common = import_module(f"{PACKAGE}.test_tokenization_common")


class VaswaniModelTester:
    """The small config and inputs that ModelTesterMixin needs."""

    batch_size = 13
    encoder_seq_length = 9
    decoder_seq_length = seq_length = 7
    hidden_size = 32
    num_attention_heads = 4
    num_hidden_layers = 2
    is_training = True

    def get_config(self):
        return VaswaniConfig(
            vocab_size=99,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            encoder_attention_heads=self.num_attention_heads,
            decoder_attention_heads=self.num_attention_heads,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
        )

    def random_tokens(self, length):
        first_ordinary = 3
        return torch.randint(
            first_ordinary, 99, (self.batch_size, length), device=testing_utils.torch_device
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = self.random_tokens(self.encoder_seq_length)
        decoder_input_ids = self.random_tokens(self.decoder_seq_length)
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": torch.ones_like(decoder_input_ids),
        }


class VaswaniModelTest(
    modeling_common.ModelTesterMixin, modeling_common.GenerationTesterMixin, unittest.TestCase
):
    all_model_classes = (VaswaniModel, VaswaniForConditionalGeneration)
    is_encoder_decoder = True
    # This test is skipped unless the file of the config has a recent year.
    test_can_init_all_missing_weights_before_2023 = True

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # The mixin reads these names to find models with labels. Registration does not add them.
        for names, model_class in (
            (modeling_auto.MODEL_MAPPING_NAMES, VaswaniModel),
            (
                modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
                VaswaniForConditionalGeneration,
            ),
        ):
            cls.enterClassContext(mock.patch.dict(names, vaswani=model_class.__name__))

    def setUp(self):
        self.model_tester = VaswaniModelTester()

    def test_config(self):
        tester = configuration_common.ConfigTester(self, config_class=VaswaniConfig, d_model=40)
        tester.run_common_tests()


class VaswaniEncoderModelTester(VaswaniModelTester):
    encoder_seq_length = 7
    # Without a target the model has no loss, so it cannot be trained.
    is_training = False

    def get_config(self):
        # If this is True, the mixin expects decoder inputs and outputs.
        config = super().get_config()
        config.is_encoder_decoder = False
        return config

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {name: inputs[name] for name in ("input_ids", "attention_mask")}


class VaswaniEncoderModelTest(modeling_common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (VaswaniEncoderModel,)
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = VaswaniEncoderModelTester()


CORPUS = [
    "This is the first sentence, and this is the second one.",
    "Wonderful: no inspiration, an amazing example full of subtokens!",
    "Hello world! How are you? I was born in 92000, and this is a test.",
    "low lower lowest new newer newest wide wider widest",
] * 4


class TokenizerTests(
    tokenization_common.TokenizerTesterMixin, tokenization_common.TokenizersBackendTesterMixin
):
    """Both mixins with a tokenizer trained here, instead of one from the Hub."""

    tokenizer_class = rust_tokenizer_class = VaswaniTokenizer
    # This test rebuilds a tokenizer by an `__init__` with vocabulary and merges. VaswaniTokenizer
    # does not have one, so that transformers loads tokenizer.json unchanged.
    test_tokenizer_from_extractor = False
    options: ClassVar[dict]

    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, folder)
        tokenizer = VaswaniTokenizer.train_from_iterator(
            CORPUS, vocab_size=500, show_progress=False, **cls.options
        )
        tokenizer.save_pretrained(folder)
        cls.from_pretrained_id = folder
        super().setUpClass()

    def test_tokenize_special_tokens(self):
        # By default, a special token inside a text is ordinary text.
        recognising = partial(self.get_tokenizer, split_special_tokens=False)
        with mock.patch.object(self, "get_tokenizer", recognising):
            super().test_tokenize_special_tokens()

    def test_training_new_tokenizer(self):
        with self.adapted_training():
            super().test_training_new_tokenizer()

    def test_training_new_tokenizer_with_special_tokens_change(self):
        with self.adapted_training():
            super().test_training_new_tokenizer_with_special_tokens_change()

    @contextmanager
    def adapted_training(self):
        """Adapt transformers' test to our tokenizers.

        The test trains 100 entries, which is too few for bpe with its 256 bytes. It compares
        decoded text with normalised text, but our decoding reverses the normalisation, so both
        sides are normalised here.
        """
        reserved = 256 if self.options["kind"] == "bpe" else 0
        train, decode = VaswaniTokenizer.train_new_from_iterator, VaswaniTokenizer.decode

        def train_with_bytes(tokenizer, lines, vocab_size, **kwargs):
            return train(tokenizer, lines, vocab_size + reserved, **kwargs)

        def decode_normalised(tokenizer, *args, **kwargs):
            normalizer = tokenizer.backend_tokenizer.normalizer
            text = decode(tokenizer, *args, **kwargs)
            return normalizer.normalize_str(text) if normalizer else text

        with (
            mock.patch.object(VaswaniTokenizer, "train_new_from_iterator", train_with_bytes),
            mock.patch.object(VaswaniTokenizer, "decode", decode_normalised),
        ):
            yield


class BpeTokenizerTest(TokenizerTests, unittest.TestCase):
    options: ClassVar = {"kind": "bpe"}


class WordpieceTokenizerTest(TokenizerTests, unittest.TestCase):
    options: ClassVar = {"kind": "wordpiece"}


class UnigramTokenizerTest(TokenizerTests, unittest.TestCase):
    options: ClassVar = {"kind": "unigram"}


class WordTokenizerTest(TokenizerTests, unittest.TestCase):
    options: ClassVar = {"kind": "word"}


class CharTokenizerTest(TokenizerTests, unittest.TestCase):
    options: ClassVar = {"kind": "char"}

    def test_alignment_methods(self):
        self.skipTest("It counts the words between spaces; to this kind every character is a word.")


class RegexTokenizerTest(TokenizerTests, unittest.TestCase):
    # The mixin makes texts by joining random tokens, but this kind knows only tokens it has seen.
    options: ClassVar = {"kind": "regex", "pattern": "[A-Za-z ]"}

    def test_alignment_methods(self):
        self.skipTest("It counts the words between spaces; to this kind every match is a word.")
