"""A language model in CTranslate2 gives the texts of `generate` and the scores of the model."""

import pytest
import torch
from vaswani.conversion import ctranslate2 as conversion
from vaswani.conversion.errors import ConversionError

from vaswani import VaswaniDecoderConfig, VaswaniForCausalLM

ctranslate2 = pytest.importorskip("ctranslate2")
SIZES = {"vocab_size": 29, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4}


def model_of(**settings):
    torch.manual_seed(3)
    config = VaswaniDecoderConfig(**SIZES, decoder_ffn_dim=24, **settings)
    return VaswaniForCausalLM(config).eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_position": "pre", "activation_function": "gelu", "lm_head_bias": True},
        {"position_encoding": "learned", "max_position_embeddings": 40, "attention_bias": True},
        {"d_k": 3, "d_v": 5, "position_encoding": "sinusoidal_concat"},
    ],
)
def test_a_language_model_writes_and_scores_the_same(tmp_path, settings):
    model = model_of(**settings)
    conversion.save(model, tmp_path / "out")
    generator = ctranslate2.Generator(str(tmp_path / "out"), intra_threads=1)
    prompt = torch.tensor([[2, 7, 11]])
    tokens = [str(token) for token in prompt[0].tolist()]
    for beams in (1, 3):
        found = generator.generate_batch(
            [tokens],
            **{"beam_size": beams, "max_length": 8, "min_length": 8, "length_penalty": 1.0},
            include_prompt_in_result=False,
        )[0].sequences_ids[0]
        wanted = model.generate(
            prompt, num_beams=beams, max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        assert found == wanted[0, 3:].tolist()
    text = torch.randint(3, 29, (1, 9))
    scored = generator.score_batch([[str(token) for token in text[0].tolist()]])[0].log_probs
    logs = model(text).logits[:, :-1].log_softmax(dim=-1)
    expected = logs.gather(2, text[:, 1:, None])[0, :, 0].tolist()
    assert scored[-8:] == pytest.approx(expected, abs=1e-4)


def test_a_decoder_with_attention_to_a_source_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="add_cross_attention"):
        conversion.save(model_of(add_cross_attention=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()
