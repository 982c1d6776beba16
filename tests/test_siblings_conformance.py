"""The common tests of transformers for the encoder alone and the decoder alone."""

import unittest
from typing import ClassVar
from unittest import mock

import pytest
import torch
from test_conformance import configuration_common, modeling_common, testing_utils
from transformers.models.auto import modeling_auto

from vaswani import (
    VaswaniDecoderConfig,
    VaswaniDecoderModel,
    VaswaniEncoderConfig,
    VaswaniEncoderModel,
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)

pytestmark = pytest.mark.slow
SIZES = {"vocab_size": 99, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class SiblingTester:
    """The small config and inputs that ModelTesterMixin needs."""

    batch_size = 13
    seq_length = encoder_seq_length = decoder_seq_length = 7
    hidden_size = 32
    num_attention_heads = 4
    num_hidden_layers = 2
    is_training = True

    def __init__(self, config_class, **sizes):
        self.config_class, self.sizes = config_class, sizes

    def get_config(self):
        return self.config_class(**SIZES, **self.sizes)

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.seq_length)
        input_ids = torch.randint(3, 99, shape, device=testing_utils.torch_device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        return self.get_config(), inputs


class SiblingTests:
    # This test is skipped unless the file of the config has a recent year.
    test_can_init_all_missing_weights_before_2023 = True
    model_type: str
    tasks: ClassVar[dict]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # The mixin reads these names to find models with labels. Registration does not add them.
        for task, model_class in cls.tasks.items():
            names = getattr(modeling_auto, f"{task}_MAPPING_NAMES")
            entry = {cls.model_type: model_class.__name__}
            cls.enterClassContext(mock.patch.dict(names, entry))


class EncoderTest(SiblingTests, modeling_common.ModelTesterMixin, unittest.TestCase):
    model_type = "vaswani_encoder"
    tasks: ClassVar = {
        "MODEL": VaswaniEncoderModel,
        "MODEL_FOR_MASKED_LM": VaswaniForMaskedLM,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION": VaswaniForSequenceClassification,
        "MODEL_FOR_TOKEN_CLASSIFICATION": VaswaniForTokenClassification,
    }
    all_model_classes = tuple(tasks.values())

    def setUp(self):
        self.model_tester = SiblingTester(VaswaniEncoderConfig, encoder_ffn_dim=37)

    def test_config(self):
        tester = configuration_common.ConfigTester(
            self, config_class=VaswaniEncoderConfig, d_model=40
        )
        tester.run_common_tests()


class DecoderTest(
    SiblingTests,
    modeling_common.ModelTesterMixin,
    modeling_common.GenerationTesterMixin,
    unittest.TestCase,
):
    model_type = "vaswani_decoder"
    tasks: ClassVar = {"MODEL": VaswaniDecoderModel, "MODEL_FOR_CAUSAL_LM": VaswaniForCausalLM}
    all_model_classes = tuple(tasks.values())
    all_generative_model_classes = (VaswaniForCausalLM,)

    def setUp(self):
        self.model_tester = SiblingTester(VaswaniDecoderConfig, decoder_ffn_dim=37)

    def test_config(self):
        tester = configuration_common.ConfigTester(
            self, config_class=VaswaniDecoderConfig, d_model=40
        )
        tester.run_common_tests()
