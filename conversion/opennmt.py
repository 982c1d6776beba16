r"""From OpenNMT-py 2 or 3: a Transformer's checkpoint, which holds its options and vocabularies.

    vaswani convert opennmt model_step_100000.pt out/

INPUT is a .pt file. With save_format safetensors, OpenNMT-py 3 writes the weights to a second file,
which must stay beside the first.

Differences between OpenNMT-py and this package:

* Network. OpenNMT-py's Transformer is always pre-norm, and its generator always has a bias
  (lm_head_bias). Without add_ffnbias, the biases of the feed-forward networks become zeros. With
  share_embeddings but not share_decoder_embeddings, the output has two equal tables.
* End tokens. Targets end in "</s>", sources do not. Encode targets with `text_target`. If the two
  vocabularies differ, the target's tokenizer is in target_tokenizer/.
* Tokenizers. The tokenizers look up tokens that are separated by white space, or by spaces for
  version 3. Transforms such as BPE, SentencePiece or pyonmttok are not carried over. Run them
  before and after. Decoding with skip_special_tokens leaves out <unk>, which is a special token
  here.
* Search. A checkpoint does not store it, so the generation config has the defaults of OpenNMT-py's
  translate. Version 2: 5 beams, no length penalty, at most 100 tokens. Version 3: 5 beams, mean
  log-probability, at most 250 tokens. Version 3's max_length_ratio, a lower limit for short
  sources, is not carried over. OpenNMT-py counts "<s>" in its length penalties, and finished
  hypotheses keep their place in its beam, so that it can find worse translations.
* Label smoothing. Version 2 spreads it over all entries of the target's vocabulary except the right
  one and padding. This package and version 3 spread it over all. The rate is carried over as it is.
* Dropout. The last rate of a schedule (dropout_steps) is carried over.
* Guided alignment (lambda_align) changes no translation and is left out.
"""

import argparse
import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.positions_vaswani import SinusoidalPositions
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .errors import ConversionError, refuse, refusing
from .loading import Converted, build_model
from .opennmt_options import (
    END,
    PAD,
    START,
    UNK,
    Vocabularies,
    complete_options,
    generation_config,
    model_config,
    option_problems,
)
from .reading import is_dense, read_checkpoint
from .rules import Drop, Rename, Rule, Tensors, to_ours
from .subword_nmt import SPACES, joined_by_spaces

# Classes in checkpoints of version 2: its vocabularies are pickled in torchtext's fields.
_HARMLESS = (
    "argparse.Namespace",
    "functools.partial",
    *(
        f"onmt.inputters.{name}"
        for name in (
            "text_dataset.TextMultiField",
            "text_dataset._feature_tokenize",
            "inputter.AlignField",
            "inputter.make_src",
            "inputter.make_tgt",
            "inputter.parse_align_idx",
        )
    ),
    *(
        f"torchtext.{name}"
        for name in (
            "data.field.Field",
            "data.field.LabelField",
            "data.field.RawField",
            "data.utils._split_tokenizer",
            "vocab.Vocab",
        )
    ),
)
_SPACE = f"[{SPACES}]"
_INNER_BIASES = (".fc1.bias", ".fc2.bias")


def _check_positions(config: VaswaniConfig, name: str, table: torch.Tensor) -> None:
    """Refuse a table of positions that differs from the one of `config`."""
    if table.shape[-1:] == (config.d_model,):
        table = table.float().reshape(-1, config.d_model)
        expected = SinusoidalPositions(config)(0, len(table), table.device)
        # Sines of large angles have three digits in float32, all sines in half precision.
        if torch.allclose(table, expected, rtol=0, atol=4e-3):
            return
    raise ConversionError(
        f"{name} is not the table of position_encoding={config.position_encoding!r}."
    )


def rules(config: VaswaniConfig) -> list[Rule]:
    """Pair OpenNMT-py's names with ours. The generator's names start with "generator."."""
    table: list[Rule] = [Rename("generator.{kind}", "lm_head.{kind}")]
    attention = {
        "linear_query": "q_proj",
        "linear_keys": "k_proj",
        "linear_values": "v_proj",
        "final_linear": "out_proj",
    }
    stacks = {
        "encoder": (
            "transformer",
            {"self_attn": "self_attn"},
            {"layer_norm": "self_attn_layer_norm"},
        ),
        "decoder": (
            "transformer_layers",
            {"self_attn": "self_attn", "context_attn": "encoder_attn"},
            {"layer_norm_1": "self_attn_layer_norm", "layer_norm_2": "encoder_attn_layer_norm"},
        ),
    }
    for stack, (layers, attentions, names) in stacks.items():
        embedding, theirs, ours = (
            f"{stack}.embeddings.make_embedding",
            f"{stack}.{layers}.{{i}}",
            f"model.{stack}.layers.{{i}}",
        )
        names = names | {
            "feed_forward.layer_norm": "final_layer_norm",
            "feed_forward.w_1": "fc1",
            "feed_forward.w_2": "fc2",
        }
        for their_name, our_name in attentions.items():
            names |= {f"{their_name}.{a}": f"{our_name}.{b}" for a, b in attention.items()}
        table += [
            Rename(f"{embedding}.emb_luts.0.weight", f"model.{stack}.embed_tokens.weight"),
            Drop(f"{embedding}.pe.pe", lambda *found: _check_positions(config, *found)),
            Rename(f"{stack}.layer_norm.{{kind}}", f"model.{stack}.layer_norm.{{kind}}"),
        ]
        table += [
            Rename(f"{theirs}.{their_name}.{{kind}}", f"{ours}.{our_name}.{{kind}}")
            for their_name, our_name in names.items()
        ]
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`, all but the output."""
    parser.add_argument("checkpoint", type=Path, metavar="INPUT", help="checkpoint, a .pt file")


def convert(checkpoint: str | Path, output: str | Path) -> None:
    """Write a folder for `from_pretrained`.

    Raises:
        ConversionError: the checkpoint cannot be converted exactly.
        FileExistsError: `output` exists already.
    """
    load(checkpoint).save(Path(output))


def load(checkpoint: str | Path) -> Converted:
    """Convert a checkpoint in memory.

    Raises:
        ConversionError: the file is damaged or cannot be converted exactly.
    """
    path = Path(checkpoint)
    content = read_checkpoint(path, _HARMLESS)
    if not isinstance(content, dict) or not {"opt", "vocab"} <= set(content):
        raise ConversionError(f"{path} lacks opt and vocab: it is not a checkpoint of OpenNMT-py.")
    given = content["opt"]
    given = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    with refusing(f"The options in {path} make no model"):
        vocabularies = Vocabularies.read(content["vocab"], path)
        options = complete_options(given, vocabularies.version)
        refuse(option_problems(options) + vocabularies.problems, str(path))
        config = model_config(options, vocabularies)
    tensors = to_ours(rules(config), _weights(content, path))
    if not options["add_ffnbias"]:
        tensors |= _zero_biases(tensors)
    model = build_model(config, tensors)
    model.generation_config = generation_config(config, vocabularies.version)
    source = _tokenizer(vocabularies.source, vocabularies.version, source_eos=False)
    if vocabularies.source == vocabularies.target:
        return Converted(model, source)
    target = _tokenizer(vocabularies.target, vocabularies.version, source_eos=True)
    return Converted(model, source, target)


def _zero_biases(tensors: Tensors) -> Tensors:
    """Make zero biases for feed-forward networks, if the tensors have none at all."""
    if any(name.endswith(_INNER_BIASES) for name in tensors):
        return {}
    return {
        f"{name.removesuffix('weight')}bias": matrix.new_zeros(matrix.shape[:1])
        for name, matrix in tensors.items()
        if name.endswith((".fc1.weight", ".fc2.weight"))
    }


def _weights(content: dict[str, Any], path: Path) -> Tensors:
    """Collect all weights under current names, those of the generator as "generator."."""
    weights, generator = content.get("model"), content.get("generator")
    generator = {} if generator is None else generator
    if weights is None:
        weights = _weights_beside(path)
    for part in (weights, generator):
        if not isinstance(part, Mapping) or not all(isinstance(name, str) for name in part):
            raise ConversionError(f"model or generator of {path} is not a dict of weights.")
    # Version 0 stores the mask of future tokens, which is no weight.
    merged = {
        _current_name(name): weight
        for name, weight in weights.items()
        if not re.fullmatch(r"decoder\.transformer_layers\.\d+\.mask", name)
    }
    merged |= {f"generator.{name.removeprefix('0.')}": w for name, w in generator.items()}
    for name, weight in merged.items():
        if not isinstance(weight, torch.Tensor) or not is_dense(weight):
            raise ConversionError(
                f"{name} of {path} is not a dense tensor of floating-point numbers."
            )
    return merged


def _weights_beside(path: Path) -> Tensors:
    """Read the safetensors files that belong to a checkpoint without weights."""
    stem = path.name.removesuffix(".pt")
    files = sorted(path.parent.glob(f"{glob.escape(stem)}*.safetensors"))
    files = [file for file in files if re.fullmatch(r"(\.\w+)?", file.stem[len(stem) :])]
    if not files:
        raise ConversionError(
            f"{path} holds no model, and there is no {stem}.safetensors beside it."
        )
    try:
        return {name: weight for file in files for name, weight in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"The weights beside {path} are damaged: {error}") from error


def _current_name(name: str) -> str:
    """Rename the LayerNorms of old checkpoints, as OpenNMT-py does when it loads them."""
    name = re.sub(r"(layer_norm(_\d+)?)\.a_2$", r"\1.weight", name)
    return re.sub(r"(layer_norm(_\d+)?)\.b_2$", r"\1.bias", name)


def _tokenizer(tokens: list[str], version: int, source_eos: bool) -> VaswaniTokenizer:
    """Make a tokenizer for tokens between spaces. `source_eos` adds "</s>" to sources too."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.normalizer = normalizers.Replace(Regex(rf"\A{_SPACE}+|{_SPACE}+\z"), "")
    between = Regex(f"{_SPACE}+" if version == 2 else " +")
    backend.pre_tokenizer = pre_tokenizers.Split(between, "removed")
    backend.decoder = joined_by_spaces()
    return VaswaniTokenizer(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        bos_token=START if START in vocabulary else None,
        eos_token=END if END in vocabulary else None,
        add_eos_token=source_eos,
        source_eos=source_eos,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


__all__ = ["add_arguments", "convert", "load", "rules"]
