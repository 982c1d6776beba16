"""To ONNX: a folder of graphs, which `OnnxTranslator` or `OnnxLanguageModel` runs.

    vaswani convert to-onnx runs/en-de out/

    from vaswani.conversion.onnx import OnnxLanguageModel, OnnxTranslator
    print(OnnxTranslator("out/").translate(["ninety-nine"], num_beams=4))
    print(OnnxLanguageModel("writer/").write(["A man"], max_new_tokens=20))

INPUT is the folder of a translation model or language model of this package, or its id on the Hub.
encoder.onnx reads the source; a language model has none. prefill.onnx reads the first target
tokens, or the prompt, and fills the cache. decode.onnx reads one more token. The weights are beside
them in files that end in .onnx.data, in float32 whatever the model's dtype is. The folder also has
the config, the generation config and the tokenizers.

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
from transformers.utils import logging

from ..configuration.configuration_vaswani import VaswaniConfig
from ..corpora.atomic_folder import new_folder
from ..generation.settings_vaswani import VaswaniGenerationConfig
from .errors import ConversionError, refuse
from .loading import add_model_arguments, open_model, open_tokenizers, save_tokenizers
from .onnx_graphs import padded, unknown_settings
from .onnx_language_model import OnnxLanguageModel
from .onnx_translator import OnnxTranslator

logger = logging.get_logger(__name__)

# Sizes for tracing. All differ, because the tracer would merge equal sizes. No size is 1, because
# the tracer takes 1 for a constant.
_BATCH, _SOURCE, _PROMPT = 2, 5, 3
_NEW_TOKENS = 2  # tokens that the exporter generates
_LOGIT_TOLERANCE = 1e-3  # largest difference of a logit that rounding explains


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
        tokenizer: tokenizer to save. None is the tokenizer in the model's folder.
        target_tokenizer: likewise, if the target has its own vocabulary.

    Raises:
        ConversionError: the model cannot be traced, the exporter cannot write `opset`, a graph
            computes other logits than the model, or packages of the exporter are not installed.
        FileExistsError: `output` exists already.
    """
    exporter, options = _exporter(opset)
    tokenizers = open_tokenizers(model, tokenizer, target_tokenizer)
    original: Any = open_model(model, language_models=True)
    refuse(_problems(original.config), "The model")
    # A copy, because the exporter changes the modules that it wraps.
    traced = _float32_copy(original)
    traced.set_attn_implementation("sdpa")
    with new_folder(Path(output)) as folder:
        for name, graph in _graphs_of_opset(exporter, options, traced, opset).items():
            _write(graph, folder / f"{name}.onnx")
        original.config.save_pretrained(folder)
        original.generation_config.save_pretrained(folder)
        save_tokenizers(folder, *tokenizers)
        _check(folder, _float32_copy(original))
    if unknown := unknown_settings(original.generation_config.to_diff_dict()):
        logger.warning(
            f"OnnxTranslator and OnnxLanguageModel do not know {', '.join(unknown)}, and refuse "
            f"{output} until they are removed from its generation_config.json."
        )


convert = save


def _float32_copy(model: Any) -> Any:
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
    problems = []
    translates = config.is_encoder_decoder
    needed = max(_SOURCE, 1 + _PROMPT + _NEW_TOKENS) if translates else _SOURCE + _NEW_TOKENS
    limit = config.position_limit
    if limit is not None and limit < needed:
        problems.append(f"max_position_embeddings {limit} (tracing needs {needed} positions)")
    if config.attends_to_source and not translates:
        problems.append("add_cross_attention (a language model's graphs have no source)")
    return problems


def _graphs_of_opset(exporter: Any, options: Any, model: Any, opset: int | None) -> dict[str, Any]:
    """Trace the graphs, and check their version of ONNX's operators.

    Raises:
        ConversionError: the exporter fails with `opset`, or writes another version.
    """
    try:
        graphs = _graphs(exporter, options, model)
    except Exception as error:  # the exporter raises errors of many types
        given = "" if opset is None else f" with opset {opset}"
        raise ConversionError(f"The exporter fails{given}: {error}") from error
    if opset is None:
        return graphs
    for name, program in graphs.items():
        written = getattr(program, "model", program).opset_imports.get("")
        # The exporter only logs a failed conversion, and keeps its own version.
        if written != opset:
            raise ConversionError(
                f"The exporter cannot write opset {opset}: the graph {name} has opset {written}. "
                "Leave --opset out, or pass a version that the exporter supports."
            )
    return graphs


def _graphs(exporter: Any, options: Any, model: Any) -> dict[str, Any]:
    """Trace the graphs. The model cannot be used afterwards."""
    graphs = {}
    inputs = _sample_inputs(model)
    # The exporter traces a search, which must neither branch nor end.
    model.generation_config = VaswaniGenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    with contextlib.redirect_stdout(io.StringIO()):
        if model.config.is_encoder_decoder:
            # The exporter's graphs for generation do not include the encoder.
            source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            encoder = copy.deepcopy(model.get_encoder())
            graphs["encoder"] = exporter.export(encoder, source, options)
        decoder = exporter.export_for_generation(model, inputs, options)
    parts = getattr(decoder, "components", decoder)
    graphs |= {name: parts[name] for name in ("prefill", "decode")}
    # transformers 5.17 returns the programs, later versions objects that hold them.
    return {name: getattr(graph, "program", graph) for name, graph in graphs.items()}


def _sample_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Make inputs for tracing, with padding on the side where the model has padding."""
    token = min(model.config.vocab_size, model.lm_head.out_features) - 1
    mask = torch.ones(_BATCH, _SOURCE, dtype=torch.long)
    inputs = {"input_ids": torch.full((_BATCH, _SOURCE), token), "attention_mask": mask}
    if not model.config.is_encoder_decoder:
        mask[0, :2] = 0
        return inputs
    mask[0, -2:] = 0
    return inputs | {"decoder_input_ids": torch.full((_BATCH, _PROMPT), token)}


def _write(program: Any, path: Path) -> None:
    import onnx_ir

    graph = getattr(program, "model", program)
    onnx_ir.save(graph, path, external_data=f"{path.name}.data")


def _check(folder: Path, model: Any) -> None:
    """Compare the graphs with the model, on other sizes than were traced.

    Raises:
        ConversionError: a logit differs.
    """
    compare = _compare_translation if model.config.is_encoder_decoder else _compare_text
    try:
        found, expected = compare(folder, model, torch.Generator().manual_seed(0))
    except ImportError:
        return
    distance = (found - expected).abs().max().item()
    if not distance <= _LOGIT_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise ConversionError(
            f"The graphs do not compute what the model does: a logit differs by {distance:.2g}."
        )


@torch.no_grad()
def _compare_translation(
    folder: Path, model: Any, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of three target tokens from the graphs, and from the model: (B, 3, V)."""
    translator = OnnxTranslator(folder, strict=False)
    sizes = model.config.vocab_size, model.lm_head.out_features
    sources = [torch.randint(sizes[0], (n,), generator=generator).tolist() for n in (1, 6, 3)]
    target = torch.randint(sizes[1], (len(sources), 3), generator=generator)
    decoder = translator.encode(sources)
    logits = [decoder.read(target[:, :1])]
    logits += [decoder.step(target[:, number : number + 1]) for number in (1, 2)]
    ids, mask = (torch.from_numpy(array) for array in translator.padded(sources))
    expected = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    return torch.stack(logits, dim=1), expected


@torch.no_grad()
def _compare_text(
    folder: Path, model: Any, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits after prompts and two more tokens: graphs' and model's, (B, 3, V) each."""
    size = model.config.vocab_size
    prompts = [torch.randint(size, (n,), generator=generator).tolist() for n in (1, 4, 3)]
    target = torch.randint(size, (len(prompts), 2), generator=generator)
    ids, mask = padded(prompts, 0, "left")
    decoder = OnnxLanguageModel(folder, strict=False).decoder(mask)
    logits = [decoder.read(torch.from_numpy(ids))]
    logits += [decoder.step(target[:, number : number + 1]) for number in (0, 1)]
    whole_mask = torch.cat((torch.from_numpy(mask), torch.ones_like(target)), dim=1)
    expected = model(
        torch.cat((torch.from_numpy(ids), target), dim=1),
        attention_mask=whole_mask,
        position_ids=(whole_mask.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=3,
    ).logits
    return torch.stack(logits, dim=1), expected


__all__ = ["OnnxLanguageModel", "OnnxTranslator", "add_arguments", "convert", "save"]
