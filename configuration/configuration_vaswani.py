"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al., 2017)."""

import copy
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from .names_vaswani import complaints, meant_names
from .places_vaswani import check_model_type, check_place
from .remote_code_vaswani import (
    TasksOfFolder,
    is_own,
    references_of_file,
    save_remote_code,
    without_marks,
)

logger = logging.get_logger(__name__)

# The largest count of positions that float32 holds exactly. Other programs compare
# max_position_embeddings with integers, so sinusoids need an integer that limits nothing.
NO_LONGEST_SEQUENCE = 2**24
_AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
    "AutoModelForTextEncoding": "encoder_vaswani.EncoderOfTranslationModel",
}
_CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipeline_vaswani.VaswaniTranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
    }
}
_CODE_FIELDS = ("auto_map", "custom_pipelines")
# A damaged config.json might have a number of layers that takes hours to build.
_MOST_LAYERS = 1000


def _complete_tables_of_peft(model_type: str) -> None:
    """Let PEFT use BART's `target_modules` by default, because the layers have BART's names.

    PEFT looks them up by model type. This function does nothing if PEFT is not imported yet.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "bart" in table:
            table.setdefault(model_type, table["bart"])


def _tensor_parallel_plan() -> dict[str, str]:
    """Return how processes divide each matrix: by outputs (colwise) or by inputs (rowwise)."""
    plan = {}
    for stack, attentions in (
        ("encoder", ("self_attn",)),
        ("decoder", ("self_attn", "encoder_attn")),
    ):
        layer = f"{stack}.layers.*"
        plan[f"{stack}.embed_tokens"] = "embedding_rowwise"
        for attention in attentions:
            for projection in ("q_proj", "k_proj", "v_proj"):
                plan[f"{layer}.{attention}.{projection}"] = "colwise"
            plan[f"{layer}.{attention}.out_proj"] = "rowwise"
        plan |= {f"{layer}.fc1": "colwise", f"{layer}.fc2": "rowwise"}
    return plan


@strict
class VaswaniConfig(PreTrainedConfig):
    r"""Sizes and switches of the Transformer; the defaults are the paper's base model (Table 3).

    The fields have the names of BART and Marian. The paper's symbols follow in brackets.

    Args:
        vocab_size: entries of the source vocabulary, or of the shared one (5.1: about 37000 byte
            pairs for English-German).
        decoder_vocab_size: entries of the target vocabulary; None means `vocab_size`.
        d_model: width of every sub-layer's output [d_model].
        encoder_layers, decoder_layers: identical layers in each stack [N].
        encoder_attention_heads, decoder_attention_heads: heads [h].
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward networks [d_ff].
        d_k, d_v: width of a head's keys and queries, and of its values; None means d_model / h.
        dropout: rate on each sub-layer's output and on the sums of embeddings and positions
            (5.4) [P_drop].
        attention_dropout, activation_dropout: rates inside the sub-layers; the paper has neither.
        label_smoothing: probability that is spread evenly over the vocabulary (5.4) [epsilon_ls].
            It acts in training mode only: the evaluation loss is the logarithm of the perplexity.
        activation_function: function between the two linear maps of 3.3; the paper has ReLU.
        norm_position: "post" is LayerNorm(x + Sublayer(x)) (3.1); "pre", for imported checkpoints,
            is x + Sublayer(LayerNorm(x)) with one more LayerNorm after each stack.
        final_layer_norm: one more LayerNorm after each stack (torch.nn.Transformer has it in both
            placements); None adds it with norm_position="pre" only.
        position_encoding: "sinusoidal" is the paper's table, sine and cosine interleaved (3.5);
            "sinusoidal_concat" has all sines, then all cosines (MarianMTModel); "sinusoidal_t2t"
            the same with tensor2tensor's frequencies (fairseq, and Marian itself); "learned" is
            row (E) of Table 3.
        position_offset: number of the first position (fairseq and BART start at 2).
        max_position_embeddings: longest sequence with "learned" positions. Sinusoids have no limit.
            With them, None becomes 2**24, the largest count of positions that float32 holds.
        attention_bias: biases in W^Q, W^K, W^V and W^O; the paper has none (3.2.2).
        lm_head_bias: a bias in the pre-softmax linear map; the paper has none (3.4).
        scale_embedding: multiply embeddings by sqrt(d_model) (3.4).
        layer_norm_eps: epsilon of every LayerNorm.
        init_std: standard deviation of new embeddings; None means d_model^-0.5, which gives scaled
            embeddings unit variance.
        initializer: distribution of new matrices, which the paper does not state. "xavier" is
            Xavier's uniform distribution. "fairseq" divides it by sqrt(2) for W^Q, W^K and W^V, and
            draws W_1 and W_2 from the bounds of nn.Linear. Biases start at 0.
        tie_word_embeddings: one matrix for target embedding and pre-softmax map (3.4). False unties
            all three matrices, as everywhere in transformers.
        share_encoder_decoder_embeddings: the source embedding shares this matrix (3.4).
        decoder_start_token_id: first input of the decoder; the labels are shifted right after it.

    Raises:
        ValueError: a name is not a field, but resembles one, or is another library's name for one.
            Files may hold such names; loading them logs a warning.
        StrictDataclassFieldValidationError: a field has the wrong type or an unknown value.
        StrictDataclassClassValidationError: fields are out of range or contradict each other.
    """

    model_type = "vaswani"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "encoder_last_hidden_state",
    ]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    # The encoder-only and decoder-only configurations override these five.
    stacks: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    readable_types: ClassVar[tuple[str, ...]] = ("vaswani",)  # model types of a config.json
    _absent: ClassVar[frozenset[str]] = frozenset()  # fields that the configuration lacks
    _own_auto_map: ClassVar[dict[str, str]] = _AUTO_MAP
    _own_pipelines: ClassVar[dict[str, Any]] = _CUSTOM_PIPELINES

    # Tensor parallelism divides heads, inner states and the vocabulary among processes.
    base_model_tp_plan: ClassVar[dict[str, str]] = _tensor_parallel_plan()
    # transformers' FSDP2 shards each layer. All other modules, such as embeddings, are one group.
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {
        "encoder.layers.*": "free_full_weight",
        "decoder.layers.*": "free_full_weight",
    }

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    d_k: int | None = None
    d_v: int | None = None
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.1
    activation_function: str = "relu"
    norm_position: Literal["post", "pre"] = "post"
    final_layer_norm: bool | None = None
    position_encoding: Literal["sinusoidal", "sinusoidal_concat", "sinusoidal_t2t", "learned"] = (
        "sinusoidal"
    )
    position_offset: int = 0
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    lm_head_bias: bool = False
    scale_embedding: bool = True
    layer_norm_eps: float = 1e-5
    init_std: float | None = None
    initializer: Literal["xavier", "fairseq"] = "xavier"
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    unk_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        """Set the defaults that depend on other fields, and refuse misspelt and foreign names."""
        # A dict from `to_dict`, and so every saved file, has the version of transformers.
        loaded = kwargs.pop("_loaded", False) or self.transformers_version is not None
        if wrong := self._complaints_about(kwargs):
            if not loaded:
                raise ValueError(wrong)
            logger.warning(f"{wrong} The value is kept as an attribute, but has no effect.")
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.max_position_embeddings is None and self.position_encoding != "learned":
            self.max_position_embeddings = NO_LONGEST_SEQUENCE
        self.custom_pipelines = self._own_pipelines
        self._mark_code_of_file(kwargs)
        super().__post_init__(**kwargs)
        self.architectures = self.architectures or []  # AutoModel needs a list

    def _mark_code_of_file(self, kwargs: dict[str, Any]) -> None:
        """Mark references to code that come from a file, so that saving can leave them out."""
        place = kwargs.get("name_or_path")
        if "auto_map" in kwargs:
            kwargs["auto_map"] = references_of_file("auto_map", kwargs["auto_map"], place)
        if "custom_pipelines" in kwargs:
            pipelines = references_of_file("custom_pipelines", kwargs["custom_pipelines"], place)
            kwargs["custom_pipelines"] = self._own_pipelines | {
                task: references_of_file(f"custom_pipelines[{task!r}]", pipeline, place)
                for task, pipeline in pipelines.items()
            }

    @classmethod
    def _complaints_about(cls, names: Iterable[str]) -> str:
        """Describe names that are misspelt fields, or other libraries' names for fields."""
        known = [*cls._own_fields(), *cls.attribute_map]
        # Other models have further special tokens, whose names resemble ours.
        foreign = [name for name in names if name not in known and not name.endswith("_token_id")]
        wrong = [name for name in foreign if meant_names(name, known)]
        return f"{cls.__name__}: {complaints(wrong, known)}" if wrong else ""

    @classmethod
    def _own_fields(cls) -> list[str]:
        """List the fields that transformers' own configuration does not have."""
        own = {
            name
            for kind in cls.__mro__
            if issubclass(kind, VaswaniConfig)
            for name in inspect.get_annotations(kind)
        }
        fields = (field.name for field in dataclasses.fields(cls))
        return [name for name in fields if name in own and name not in cls._absent]

    @property
    def attends_to_source(self) -> bool:
        """Whether the decoder's layers have attention to an encoder's output."""
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field. With a shared vocabulary, `vocab_size` sets `decoder_vocab_size` too."""
        fields = vars(self)
        equal_sizes = fields.get("decoder_vocab_size") == fields.get("vocab_size")
        if name == "vocab_size" and equal_sizes and fields.get("share_encoder_decoder_embeddings"):
            super().__setattr__("decoder_vocab_size", value)
        super().__setattr__(name, value)

    @property
    def position_limit(self) -> int | None:
        """Tokens of the longest sequence with learned positions; None for sinusoids."""
        return self.max_position_embeddings if self.position_encoding == "learned" else None

    @property
    def custom_pipelines(self) -> dict[str, dict[str, Any]]:
        """Classes of pipelines by task. This is a copy, because transformers writes to it."""
        return TasksOfFolder(copy.deepcopy(vars(self)["custom_pipelines"]))

    @custom_pipelines.setter
    def custom_pipelines(self, pipelines: dict[str, dict[str, Any]]) -> None:
        vars(self)["custom_pipelines"] = pipelines

    def validate_architecture(self) -> None:
        """Refuse values out of range and fields that contradict each other."""
        super().validate_architecture()
        self._refuse_out_of_range()
        for side in self.stacks:
            heads = getattr(self, f"{side}_attention_heads")
            if (self.d_k is None or self.d_v is None) and self.d_model % heads != 0:
                raise ValueError(
                    f"d_model ({self.d_model}) must be a multiple of {side}_attention_heads "
                    f"({heads}), or d_k and d_v must both be given."
                )
        if self.position_encoding == "learned":
            if self.max_position_embeddings in (None, NO_LONGEST_SEQUENCE):
                raise ValueError(
                    "position_encoding='learned' needs the length of the longest sequence: set "
                    f"max_position_embeddings (it is {self.max_position_embeddings}), or use a "
                    "sinusoidal encoding."
                )
        elif self.d_model % 2 != 0:
            raise ValueError(
                f"d_model ({self.d_model}) must be even for position_encoding="
                f"{self.position_encoding!r} (pairs of sine and cosine): choose an even d_model or "
                "position_encoding='learned'."
            )
        if self.share_encoder_decoder_embeddings and self.vocab_size != self.decoder_vocab_size:
            raise ValueError(
                "share_encoder_decoder_embeddings=True needs one vocabulary, but vocab_size is "
                f"{self.vocab_size} and decoder_vocab_size {self.decoder_vocab_size}: make them "
                "equal, or set share_encoder_decoder_embeddings=False."
            )

    def _refuse_out_of_range(self) -> None:
        sizes = [
            "vocab_size",
            "decoder_vocab_size",
            "d_model",
            "d_k",
            "d_v",
            "max_position_embeddings",
        ]
        for side in self.stacks:
            sizes += [f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim"]
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
            if name.endswith("_layers") and value > _MOST_LAYERS:
                raise ValueError(f"{name} must be at most {_MOST_LAYERS}, got {value}.")
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}; 0 switches it off.")
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function {self.activation_function!r} is unknown to transformers; "
                f"choose one of {', '.join(ACT2FN)}."
            )
        if self.position_offset < 0:
            raise ValueError(f"position_offset must be 0 or more, got {self.position_offset}.")
        for name in ("layer_norm_eps", "init_std"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be greater than 0, got {value}.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read fields as transformers does. A file may hold foreign names; a call may not."""
        if wrong := cls._complaints_about(kwargs):
            raise ValueError(wrong)
        return super().from_dict({**config_dict, "_loaded": True}, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Self:
        """Read a file as transformers does. The file may hold foreign names."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Find a config.json as transformers does, but refuse other types of models.

        Raises:
            OSError: the path does not exist, or holds a model of another type or toolkit.
        """
        place = pretrained_model_name_or_path
        check_place(place, **kwargs)
        found, kwargs = super().get_config_dict(place, **kwargs)
        check_model_type(place, found.get("model_type"), *cls.readable_types)
        return cls._own_part(found), kwargs

    @classmethod
    def _own_part(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Take what belongs to this configuration out of a config.json."""
        return found

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "VaswaniConfig":
        """Build a row of Table 3 by its name in `presets()`; keywords override single fields.

        Raises:
            ValueError: no row has that name, or a keyword is not a field.
        """
        if name not in _TABLE_3:
            raise ValueError(
                f"Unknown preset {name!r}; the rows of Table 3 are {', '.join(_TABLE_3)}."
            )
        known = [field.name for field in dataclasses.fields(cls) if field.name not in cls._absent]
        known += [*cls.attribute_map, "attn_implementation", "output_attentions"]
        if wrong := complaints(overrides, known):
            raise ValueError(f"{cls.__name__}: {wrong}")
        changes = {
            field: value for field, value in _TABLE_3[name][0].items() if field not in cls._absent
        }
        return cls(**{**changes, **overrides})

    @classmethod
    def presets(cls) -> dict[str, dict[str, Any]]:
        """List the rows of Table 3: changes from base, and the paper's results.

        `perplexity` is per byte pair, `bleu` is on newstest2013, and `parameters` are in millions.
        `parameters` are None if the table leaves them out, because they equal those of base.
        """
        columns = ("steps", "perplexity", "bleu", "parameters")
        return {
            name: {"changes": dict(changes), **dict(zip(columns, numbers, strict=True))}
            for name, (changes, numbers) in _TABLE_3.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all fields. PEFT calls this method before it looks up default target modules."""
        _complete_tables_of_peft(self.model_type)
        fields = super().to_dict()
        # Safe writers of YAML refuse subclasses of str.
        code = {name: without_marks(fields[name]) for name in _CODE_FIELDS if name in fields}
        return fields | code

    def update(self, config_dict: dict[str, Any]) -> None:
        """Set attributes as transformers does, and mark references to code as a file's."""
        fields = dict(config_dict)
        self._mark_code_of_file(fields)
        super().update(fields)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save config.json and flat copies of the code, so that the folder works alone."""
        self._drop_code_of_file()
        super().save_pretrained(save_directory, **kwargs)
        # transformers copies the code of a class that is remote code (_auto_class is set).
        if self._auto_class is None:
            save_remote_code(save_directory)
        if push_to_hub:
            # Push after all files are written, because transformers would push config.json only.
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def _drop_code_of_file(self) -> None:
        """Replace references to code by this package's, because a file may name strangers' code."""
        auto_map = getattr(self, "auto_map", None) or {}
        self.auto_map = self._own_auto_map | {
            name: code for name, code in auto_map.items() if is_own(code)
        }
        # Version 0.1 wrote this configuration beside an encoder's weights.
        if self.architectures == ["VaswaniEncoderModel"] and len(self.stacks) == 2:
            self.auto_map["AutoModel"] = _AUTO_MAP["AutoModelForTextEncoding"]
        self.custom_pipelines = self._own_pipelines | {
            task: pipeline
            for task, pipeline in self.custom_pipelines.items()
            if is_own(pipeline.get("impl"))
        }


def _both(**sizes: int) -> dict[str, int]:
    """Set the same size in encoder and decoder, as every row of Table 3 does."""
    return {
        f"{side}_{name}": value for name, value in sizes.items() for side in ("encoder", "decoder")
    }


# Name: (difference from base, (steps, perplexity, BLEU, parameters in millions)).
# Row (B) changes d_k only: the parameters in the table imply that d_v stays 64.
_TABLE_3: dict[str, tuple[dict[str, Any], tuple[int, float, float, int | None]]] = {
    "base": ({}, (100_000, 4.92, 25.8, 65)),
    "A-h1": (_both(attention_heads=1), (100_000, 5.29, 24.9, None)),
    "A-h4": (_both(attention_heads=4), (100_000, 5.00, 25.5, None)),
    "A-h16": (_both(attention_heads=16), (100_000, 4.91, 25.8, None)),
    "A-h32": (_both(attention_heads=32), (100_000, 5.01, 25.4, None)),
    "B-dk16": ({"d_k": 16}, (100_000, 5.16, 25.1, 58)),
    "B-dk32": ({"d_k": 32}, (100_000, 5.01, 25.4, 60)),
    "C-N2": (_both(layers=2), (100_000, 6.11, 23.7, 36)),
    "C-N4": (_both(layers=4), (100_000, 5.19, 25.3, 50)),
    "C-N8": (_both(layers=8), (100_000, 4.88, 25.5, 80)),
    "C-d256": ({"d_model": 256, "d_k": 32, "d_v": 32}, (100_000, 5.75, 24.5, 28)),
    "C-d1024": ({"d_model": 1024, "d_k": 128, "d_v": 128}, (100_000, 4.66, 26.0, 168)),
    "C-dff1024": (_both(ffn_dim=1024), (100_000, 5.12, 25.4, 53)),
    "C-dff4096": (_both(ffn_dim=4096), (100_000, 4.75, 26.2, 90)),
    "D-drop0.0": ({"dropout": 0.0}, (100_000, 5.77, 24.6, None)),
    "D-drop0.2": ({"dropout": 0.2}, (100_000, 4.95, 25.5, None)),
    "D-ls0.0": ({"label_smoothing": 0.0}, (100_000, 4.67, 25.3, None)),
    "D-ls0.2": ({"label_smoothing": 0.2}, (100_000, 5.47, 25.7, None)),
    "E-learned": (
        {"position_encoding": "learned", "max_position_embeddings": 1024},
        (100_000, 4.92, 25.7, None),
    ),
    "big": (
        {"d_model": 1024, "dropout": 0.3, **_both(ffn_dim=4096, attention_heads=16)},
        (300_000, 4.33, 26.4, 213),
    ),
}


def refuse_other_config(model_class: Any, config: Any) -> None:
    """Refuse to build a model from the configuration of another kind of model of this package.

    Raises:
        TypeError: names the configuration that the class needs.
    """
    needed = model_class.config_class
    other_types = {"vaswani", "vaswani_encoder", "vaswani_decoder"} - {needed.model_type}
    if config.model_type in other_types:
        raise TypeError(
            f"{model_class.__name__} needs a {needed.__name__}, got a {type(config).__name__}: "
            f"make a {needed.__name__} with the same sizes."
        )


__all__ = ["NO_LONGEST_SEQUENCE", "VaswaniConfig", "refuse_other_config"]
