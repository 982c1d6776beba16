"""Marian's own folders, as OPUS-MT publishes them.

decoder.yml has the settings of the search, and names the weights (.npz) and two vocabularies. The
.npz also has the options of the training, as special:model.yml. source.spm and target.spm split
text. Marian has no padding token. This module adds one at the end, as transformers does.
"""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.utils import logging

from ..generation.settings_vaswani import VaswaniGenerationConfig
from .errors import ConversionError, refuse
from .marian_names import MAX_LENGTH
from .marian_vocabulary import is_sentencepiece, read_vocabulary
from .reading import parse_yaml, read_text
from .rules import Tensors

logger = logging.get_logger(__name__)

# Logit of the added padding token: low enough for a probability of 0, even in float16.
_PAD_LOGIT = -1e4

# Options that this package reads.
_MODEL_OPTIONS = """
dec-depth dim-emb dim-vocabs enc-depth input-types output-omit-bias tied-embeddings
tied-embeddings-all tied-embeddings-src transformer-decoder-autoreg transformer-decoder-dim-ffn
transformer-decoder-ffn-depth transformer-dim-ffn transformer-ffn-activation transformer-ffn-depth
transformer-heads transformer-postprocess transformer-postprocess-emb transformer-postprocess-top
transformer-preprocess type
"""
# Options that change nothing in a trained Transformer.
_HARMLESS = """
bert-train-type-embeddings bert-type-vocab-size dec-cell dec-cell-base-depth dec-cell-high-depth
dim-rnn enc-cell enc-cell-depth enc-type layer-normalization separator-symbol skip
transformer-aan-activation transformer-aan-depth transformer-aan-nogate transformer-depth-scaling
transformer-dim-aan transformer-dropout transformer-dropout-attention transformer-dropout-ffn
transformer-guided-alignment-layer ulr-dim-emb ulr-dropout ulr-softmax-temperature
ulr-trainable-transformation version
"""
# Options of decoder.yml that this package reads, and those that change no translation.
_DECODER_OPTIONS = "allow-unk beam-size models normalize vocabs"
_HARMLESS_TO_DECODE = """
alignment check-nan cpu-threads data-threads devices input interpolate-env-vars log log-level
log-time-zone maxi-batch maxi-batch-sort mini-batch mini-batch-words model-mmap n-best num-devices
output quiet quiet-translation relative-paths seed sigterm stat-freq tsv tsv-fields version
word-scores workspace
"""
# Values that switch an option off, besides empty ones.
_OFF = {
    "factors-combine": "sum",
    "gemm-type": "float32",
    "precision": ["float32"],
    "transformer-attention-mask": "default",
}

_SIZES = ("dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn")

# Marian's functions: what Marian computes, and what transformers computes instead.
ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "swish": ("swish", "swish"),
    "gelu": ("quick_gelu", "gelu"),
}

# Preprocess, postprocess and postprocess-top without dropout: norm_position, final_layer_norm.
PLACEMENTS: dict[tuple[str, str, str], tuple[Literal["post", "pre"], bool]] = {
    ("", "an", ""): ("post", False),
    ("", "an", "n"): ("post", True),
    ("n", "a", ""): ("pre", False),
    ("n", "a", "n"): ("pre", True),
}

_FLOATS = (np.float16, np.float32, np.float64)
# Errors that NumPy raises for a damaged .npz.
_DAMAGE = (
    *(OSError, ValueError, TypeError, EOFError, KeyError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True)
class MarianFolder:
    """A folder of Marian.

    Args:
        path: the folder.
        decoder: the options of decoder.yml.
        options: the options of special:model.yml.
        weights: the weights, in Marian's names and layout.
    """

    path: Path
    decoder: dict[str, Any]
    options: dict[str, Any]
    weights: Tensors

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read decoder.yml and the weights. `vocabularies` reads the vocabularies.

        Raises:
            ConversionError: files are missing or damaged, or the folder does not hold one model
                with one source and one target.
        """
        decoder = _options(read_text(path / "decoder.yml"), f"{path / 'decoder.yml'}")
        names, vocabularies = decoder.get("models"), decoder.get("vocabs")
        problems = []
        if not isinstance(names, list) or len(names) != 1:
            problems.append(f"models {names} (one, not an ensemble)")
        if not isinstance(vocabularies, list) or len(vocabularies) != 2:
            problems.append(f"vocabs {vocabularies} (one of the source and one of the target)")
        refuse(problems, str(path))
        weights, options = _read_npz(_file(path, decoder["models"][0]))
        return cls(path, decoder, options, weights)

    @property
    def shares(self) -> bool:
        """Whether source and target share one table of embeddings."""
        return any(self.options.get(f"tied-embeddings-{kind}") for kind in ("all", "src"))

    @property
    def ties(self) -> bool:
        """Whether the target's table is also the output projection."""
        return any(self.options.get(f"tied-embeddings{kind}") for kind in ("-all", ""))

    @property
    def placement(self) -> tuple[str, str, str]:
        """Places of the LayerNorms in Marian's letters: a key of `PLACEMENTS`, or a problem."""

        def letters(part: str, default: str) -> str:
            # "d" is dropout, which does nothing in a trained model.
            return str(self.options.get(f"transformer-{part}", default) or "").replace("d", "")

        before, after = letters("preprocess", ""), letters("postprocess", "dan")
        return before, after, letters("postprocess-top", "")

    def problems(self) -> list[str]:
        """List the options without a counterpart here, in Marian's spelling."""
        problems = [*self._network_problems(), *self._size_problems()]
        beams, exponent = (self.decoder.get(name) for name in ("beam-size", "normalize"))
        if not isinstance(beams, int | None) or (beams or 0) < 0:
            problems.append(f"beam-size {beams!r} (not a number of beams)")
        if not isinstance(exponent, int | float | None) or not math.isfinite(exponent or 0):
            problems.append(f"normalize {exponent!r} (not a number)")
        for name in sorted(
            self.options.keys() - {*_MODEL_OPTIONS.split(), *_HARMLESS.split()}, key=str
        ):
            if self.options[name] and self.options[name] != _OFF.get(name):
                problems.append(f"{name} {self.options[name]!r}")
        return problems

    def _network_problems(self) -> list[str]:
        options = self.options
        problems = []

        def expect(name: str, *allowed: Any) -> None:
            value = options.get(name, allowed[0])
            if value not in allowed:
                problems.append(f"{name} {value!r}")

        expect("type", "transformer")
        expect("transformer-decoder-autoreg", "self-attention")
        if options.get("transformer-decoder-autoreg") == "rnn":
            problems.append(f"dec-cell {options.get('dec-cell')!r}")
        expect("transformer-ffn-depth", 2)
        expect("transformer-decoder-ffn-depth", 0, 2)
        expect("transformer-postprocess-emb", "d", "")
        activation = options.get("transformer-ffn-activation")
        if str(activation) not in ACTIVATIONS:
            problems.append(f"transformer-ffn-activation {activation!r}")
        if self.placement not in PLACEMENTS:
            problems += [
                f"transformer-{part} {options.get(f'transformer-{part}', '')!r}"
                for part in ("preprocess", "postprocess", "postprocess-top")
            ]
        return problems

    def _size_problems(self) -> list[str]:
        options = self.options
        problems = []
        types = options.get("input-types") or []
        if not isinstance(types, list) or any(kind != "sequence" for kind in types):
            problems.append(f"input-types {types}")
        sizes = options.get("dim-vocabs")
        if not isinstance(sizes, list) or [type(size) for size in sizes] != [int, int]:
            problems.append(f"dim-vocabs {sizes} (one source and one target)")
        elif sizes[0] != sizes[1] and self.shares:
            problems.append(f"dim-vocabs {sizes} (tied, but of different sizes)")
        for name in _SIZES:
            if not isinstance(options.get(name), int) or options[name] < 1:
                problems.append(f"{name} {options.get(name)}")
        if isinstance(options.get("dim-emb"), int) and options["dim-emb"] % 2:
            problems.append(f"dim-emb {options['dim-emb']} (odd)")
        return problems

    def tensors(self, as_transformers: bool) -> Tensors:
        """Return the weights, with layers numbered from 0 and names that do not depend on tying.

        The embedding of the padding token is zeros, which is also Marian's first decoder input.

        Args:
            as_transformers: give the padding token the logit 0. Otherwise it is never chosen.

        Raises:
            ConversionError: there is one table of embeddings, but the options tie none.
        """
        named: Tensors = {}
        for name, tensor in self.weights.items():
            stack, found, rest = name.partition("_l")
            number, _, part = rest.partition("_")
            if found and number.isdecimal():
                name = f"{stack}_l{int(number) - 1}_{part}"
            # Marian stores vectors as rows. Its first versions did not.
            named[name] = tensor[None] if tensor.dim() == 1 else tensor
        if "Wemb" in named:
            if not self.shares:
                raise ConversionError("The weights tie embeddings (Wemb), but the options do not.")
            named["encoder_Wemb"] = named.pop("Wemb")
        if "decoder_ff_logit_out_W" in named:
            named["decoder_ff_logit_out_Wt"] = named.pop("decoder_ff_logit_out_W").T.contiguous()
        bias = "decoder_ff_logit_out_b"
        if self.options.get("output-omit-bias") and "encoder_Wemb" in named:
            no_bias = named["encoder_Wemb"].new_zeros(1, self.options["dim-vocabs"][1])
            named.setdefault(bias, no_bias)
        for name in ("encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_Wt"):
            if name in named:
                named[name] = pad(named[name], (0, 0, 0, 1))
        if bias in named:
            named[bias] = pad(named[bias], (0, 1), value=0.0 if as_transformers else _PAD_LOGIT)
        return named

    def vocabularies(self) -> list[dict[str, int]]:
        """Read the tokens and ids of the source and of the target, and add "<pad>" to each.

        Raises:
            ConversionError: a vocabulary cannot be read, has another size than in the options, or
                has a "<pad>" already.
        """
        found = [read_vocabulary(_file(self.path, name)) for name in self.decoder["vocabs"]]
        sizes = self.options["dim-vocabs"]
        for vocabulary, size, name in zip(found, sizes, self.decoder["vocabs"], strict=True):
            if len(vocabulary) != size:
                raise ConversionError(
                    f"{name} has {len(vocabulary)} entries, dim-vocabs says {size}."
                )
            if "<pad>" in vocabulary:
                raise ConversionError(
                    f"{name} has an entry '<pad>', which is the name of the padding token here."
                )
            vocabulary["<pad>"] = size
        return found

    def sentencepiece_models(self) -> list[Path]:
        """Name the models that split the source and the target. A vocabulary may be one itself."""
        models = []
        for side, name in zip(("source", "target"), self.decoder["vocabs"], strict=True):
            own = is_sentencepiece(Path(str(name)))
            models.append(_file(self.path, name) if own else self.path / f"{side}.spm")
        return models

    def generation(self, target: dict[str, int], as_transformers: bool) -> VaswaniGenerationConfig:
        """Turn Marian's search settings into ours, and warn about those that are lost.

        Args:
            target: the target's vocabulary.
            as_transformers: search as the model's copy on the Hub does.
        """
        decoder = self.decoder
        factor = decoder.get("max-length-factor", 3)  # Marian's default is 3
        if as_transformers:
            factor = None
        known = {*_DECODER_OPTIONS.split(), *_HARMLESS_TO_DECODE.split()}
        if factor:
            known.add("max-length-factor")
        lost = [
            f"{name} {value}"
            for name, value in decoder.items()
            if name not in known and value and value != _OFF.get(name)
        ]
        if lost:
            logger.warning(
                f"These settings of {self.path / 'decoder.yml'} are not carried over: "
                f"{', '.join(lost)}."
            )
        pad_id, end, unknown = (target[token] for token in ("<pad>", "</s>", "<unk>"))
        forbidden = [] if decoder.get("allow-unk") or as_transformers else [unknown]
        return VaswaniGenerationConfig(
            num_beams=int(decoder.get("beam-size") or 12),
            length_penalty_type="hf",
            # Marian's default is 0. `true` means 1, like --normalize without a number.
            length_penalty=1.0 if as_transformers else float(decoder.get("normalize") or 0.0),
            early_stopping=False,
            max_length_offset=0,
            max_length_factor=float(factor) if factor else None,
            max_length=MAX_LENGTH,
            pad_token_id=pad_id,
            eos_token_id=end,
            decoder_start_token_id=pad_id,
            suppress_tokens=forbidden or None,
            bad_words_ids=[[pad_id]] if as_transformers else None,
            forced_eos_token_id=end if as_transformers else None,
        )


def _file(folder: Path, name: Any) -> Path:
    """Find a file that decoder.yml names, perhaps by its path on the machine of the training."""
    for path in (folder / str(name), folder / Path(str(name)).name):
        if path.is_file():
            return path
    raise ConversionError(f"There is no file {folder / Path(str(name)).name}.")


def _options(text: str | bytes, place: str) -> dict[str, Any]:
    found = parse_yaml(text, place)
    if not isinstance(found, dict):
        raise ConversionError(f"{place} does not hold options.")
    return found


def _read_npz(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the weights, and the options that are stored among them.

    Raises:
        ConversionError: the file is damaged, or Marian did not write it after a training.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            loaded = {name: np.asarray(arrays[name]) for name in arrays.files}
    except _DAMAGE as error:
        raise ConversionError(f"{path} is not a complete .npz: {error}") from error
    text = loaded.pop("special:model.yml", None)
    if text is None:
        raise ConversionError(f"{path} has no special:model.yml: Marian did not write it.")
    options = _options(text.tobytes().rstrip(b"\0"), f"special:model.yml of {path}")
    wrong = [
        f"{name} ({array.dtype}, {array.ndim} dimensions)"
        for name, array in loaded.items()
        if array.dtype not in _FLOATS or array.ndim not in (1, 2)
    ]
    if wrong:
        raise ConversionError(
            f"{path} holds weights that are not vectors or matrices of floats: {', '.join(wrong)}."
        )
    return {name: torch.from_numpy(array) for name, array in loaded.items()}, options


__all__ = ["ACTIVATIONS", "PLACEMENTS", "MarianFolder"]
