"""To ONNX: a folder of three graphs, which `OnnxTranslator` runs with onnxruntime.

    vaswani convert to-onnx runs/en-de out/

    from vaswani.conversion.onnx import OnnxTranslator
    print(OnnxTranslator("out/").translate(["ninety-nine"], num_beams=4))

INPUT is the folder of a model of this package, or its id on the Hub. encoder.onnx reads the source.
prefill.onnx reads the first target tokens and fills the cache. decode.onnx reads one more token.
The weights are beside them in files that end in .onnx.data, in float32 whatever the model's dtype
is. The folder also has the config, the generation config and the tokenizers.

transformers' OnnxExporter makes the graphs, for any length and batch size. If onnxruntime is
installed, the graphs are compared with the model before the folder appears.
"""

import argparse
import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.configuration_vaswani import VaswaniConfig
from ..corpora.atomic_folder import new_folder
from ..generation.settings_vaswani import VaswaniGenerationConfig
from ..modeling.modeling_vaswani import VaswaniForConditionalGeneration
from .errors import ConversionError, refuse
from .loading import add_model_arguments, open_model, open_tokenizers, save_tokenizers
from .onnx_translator import OnnxTranslator

# Sizes for tracing. All differ, because equal sizes would become one. None is 1, because the tracer
# takes 1 for a constant.
_BATCH, _SOURCE, _PROMPT = 2, 5, 3
_CLOSE = 1e-3  # largest difference of a logit that rounding explains


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `save`, all but the output."""
    add_model_arguments(parser, tokenizers=True)
    parser.add_argument(
        "--opset",
        metavar="VERSION",
        type=int,
        help="version of ONNX's operators; default: the exporter's",
    )


def save(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    opset: int | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    target_tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a folder of ONNX graphs.

    Args:
        model: a folder, an id on the Hub, or a model in memory, which stays as it is.
        output: the folder to write.
        opset: version of ONNX's operators. None is the exporter's default.
        tokenizer: is saved in the folder. None is the tokenizer in the model's folder.
        target_tokenizer: likewise, if the target has its own vocabulary.

    Raises:
        ConversionError: the model cannot be traced, a graph computes other logits than the model,
            or packages of the exporter are not installed.
        FileExistsError: `output` exists already.
    """
    exporter, options = _exporter(opset)
    tokenizers = open_tokenizers(model, tokenizer, target_tokenizer)
    original = open_model(model)
    refuse(_problems(original.config), "The model")
    # A copy, because the exporter changes the modules that it wraps.
    traced = _float32_copy(original)
    traced.set_attn_implementation("sdpa")
    with new_folder(Path(output)) as folder:
        for name, graph in _graphs(exporter, options, traced).items():
            _write(graph, folder / f"{name}.onnx")
        original.config.save_pretrained(folder)
        original.generation_config.save_pretrained(folder)
        save_tokenizers(folder, *tokenizers)
        _check(folder, _float32_copy(original))


convert = save


def _float32_copy(model: VaswaniForConditionalGeneration) -> VaswaniForConditionalGeneration:
    return copy.deepcopy(model).float().cpu().eval()


def _exporter(opset: int | None) -> tuple[Any, Any]:
    """Make the exporter of transformers, and its options."""
    try:
        from transformers.exporters import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()  # raises ImportError if it lacks packages
    except ImportError as error:
        raise ConversionError(
            f"ONNX cannot be written ({error}): it needs transformers' exporters (5.17 or newer) "
            "and pip install 'vaswani[convert]'."
        ) from error
    return exporter, OnnxConfig(dynamic=True, opset_version=opset)


def _problems(config: VaswaniConfig) -> list[str]:
    """List the settings that cannot be traced."""
    needed = max(_SOURCE, 1 + _PROMPT + 2)
    limit = config.position_limit
    if limit is not None and limit < needed:
        return [f"max_position_embeddings {limit} (tracing needs {needed} positions)"]
    return []


def _graphs(exporter: Any, options: Any, model: VaswaniForConditionalGeneration) -> dict[str, Any]:
    """Trace the three graphs. The model cannot be used afterwards."""
    token = min(model.config.vocab_size, model.lm_head.out_features) - 1
    source = {
        "input_ids": torch.full((_BATCH, _SOURCE), token),
        "attention_mask": torch.ones(_BATCH, _SOURCE, dtype=torch.long),
    }
    source["attention_mask"][0, -2:] = 0
    # The exporter traces a search, which must neither branch nor end.
    model.generation_config = VaswaniGenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    prompt = torch.full((_BATCH, _PROMPT), token)
    with contextlib.redirect_stdout(io.StringIO()):
        # The exporter's graphs for generation do not include the encoder.
        encoder = exporter.export(copy.deepcopy(model.get_encoder()), dict(source), options)
        decoder = exporter.export_for_generation(
            model, {**source, "decoder_input_ids": prompt}, options
        )
    # transformers 5.17 returns the programs, later versions objects that hold them.
    encoder = getattr(encoder, "program", encoder)
    parts = {
        name: getattr(part, "program", part)
        for name, part in getattr(decoder, "components", decoder).items()
    }
    return {"encoder": encoder, "prefill": parts["prefill"], "decode": parts["decode"]}


def _write(program: Any, path: Path) -> None:
    import onnx_ir

    graph = getattr(program, "model", program)
    onnx_ir.save(graph, path, external_data=f"{path.name}.data")


def _check(folder: Path, model: VaswaniForConditionalGeneration) -> None:
    """Compare the graphs with the model, on other sizes than were traced.

    Raises:
        ConversionError: a logit differs.
    """
    try:
        translator = OnnxTranslator(folder, strict=False)
    except ImportError:
        return
    generator = torch.Generator().manual_seed(0)
    sizes = model.config.vocab_size, model.lm_head.out_features
    sources = [torch.randint(sizes[0], (n,), generator=generator).tolist() for n in (1, 6, 3)]
    target = torch.randint(sizes[1], (len(sources), 3), generator=generator)
    decoder = translator.encode(sources)
    logits = [decoder.read(target[:, :1])]
    logits += [decoder.step(target[:, number : number + 1]) for number in (1, 2)]
    ids, mask = (torch.from_numpy(array) for array in translator.padded(sources))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    distance = (torch.stack(logits, dim=1) - expected).abs().max().item()
    if not distance <= _CLOSE * max(1.0, expected.abs().max().item()):
        raise ConversionError(
            f"The graphs do not compute what the model does: a logit differs by {distance:.2g}."
        )


__all__ = ["OnnxTranslator", "add_arguments", "convert", "save"]
