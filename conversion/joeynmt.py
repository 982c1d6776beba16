r"""JoeyNMT 2: a Transformer's checkpoint, config.yaml and vocabularies.

    python -m vaswani.conversion joeynmt models/deen out/
    python -m vaswani.conversion joeynmt 30000.ckpt out/ --config config.yaml \
        --source-vocab src_vocab.txt --target-vocab trg_vocab.txt

INPUT is a checkpoint or the folder of a training, of which best.ckpt is taken, else latest.ckpt,
else the only .ckpt. What is not named is looked for beside the checkpoint: config.yaml,
src_vocab.txt, trg_vocab.txt (else the file that data.src.voc_file names), SentencePiece models.

What differs between JoeyNMT and this package:

* An encoder without the option layer_norm is "post" up to JoeyNMT 2.1, and from 2.2 on "pre"
  without the LayerNorm after the stack, which has no counterpart here. joeynmt_version decides.
* Dropout rates are the decoder's, for both stacks. tied_embeddings without tied_softmax is carried
  over as two equal tables.
* tokenizer: level word (at single spaces), char and bpe with SentencePiece, lowercase and normalize
  included. Where source and target differ in their tokens, the folder holds the source's tokenizer
  and target_tokenizer/ the target's. Decoding leaves out <unk> as a special token.
* SentencePiece's table of characters is applied by the tokenizers library, which loses a combining
  accent right after a character that the table replaces by others, such as a ligature.
* --pretokenized makes tokenizers of the vocabularies alone, which take tokens between spaces:
  whatever cuts text into tokens is then done by you: Moses, SentencePiece, and subword-nmt, which
  JoeyNMT lets split again what the vocabulary lacks.
* generation: the beam, its length penalty, the limit of the output, and what is never generated are
  those of the section testing. max_output_length: -1 is 1.5 times the longest source of a batch
  there, and 1.5 times each source's own length here. The search stops when no open hypothesis can
  win; JoeyNMT's has a rule of its own, for which ended hypotheses keep their place in the beam.
"""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ..configuration.configuration_vaswani import VaswaniConfig
from ..modeling.modeling_vaswani import SinusoidalPositions
from ..tokenization.tokenization_vaswani import VaswaniTokenizer
from .checkpoints import Converted, build_model, read_checkpoint, refuse
from .files import holds_tensors, read_text
from .joeynmt_config import Section, read_config
from .rules import ConversionError, Drop, Rename, Rule, Tensors, to_ours
from .sentencepiece import SPACE, SentencePiece
from .subword_nmt import SPACES, joined_by_spaces

# Scores of a training's statistics may be numbers of NumPy.
_HARMLESS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")
# torch.tanh, the fourth that JoeyNMT names, cannot be built there.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
_SPECIALS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of ids
_EMPTY_WORD = "\n"  # no line of a vocabulary holds it
_OUTER_SPACE = Regex(rf"\A[{SPACES}]+|[{SPACES}]+\z")  # what str.strip takes away
# What the option normalize does to sources and to translations.
_TIDY: list[tuple[str | Regex, str]] = [
    ("\u200b", ""),
    (Regex("[ \u3000]+"), " "),
    *((f" {mark}", mark) for mark in "?!,.:"),
    (_OUTER_SPACE, ""),
]


def _check_positions(name: str, table: torch.Tensor) -> None:
    """Refuse a table of positions that is not the paper's."""
    if table.dim() == 3 and len(table) == 1 and table.shape[-1] % 2 == 0:
        width = table.shape[-1]
        config = VaswaniConfig(d_model=width, encoder_attention_heads=1, decoder_attention_heads=1)
        ours = SinusoidalPositions(config)(0, table.shape[1], torch.device("cpu"))
        # In float32, angles of thousands are known to 1e-4.
        if torch.allclose(table[0].float(), ours, rtol=0, atol=1e-3):
            return
    raise ConversionError(f"{name} is not the table of sines and cosines of section 3.5.")


def _attention(theirs: str, ours: str) -> list[Rule]:
    names = {"k_layer": "k_proj", "v_layer": "v_proj", "q_layer": "q_proj"}
    names |= {"output_layer": "out_proj"}
    return [Rename(f"{theirs}.{a}.{{kind}}", f"{ours}.{b}.{{kind}}") for a, b in names.items()]


def _feed_forward(theirs: str, ours: str) -> list[Rule]:
    names = {"layer_norm": "final_layer_norm", "pwff_layer.0": "fc1", "pwff_layer.3": "fc2"}
    return [
        Rename(f"{theirs}.feed_forward.{a}.{{kind}}", f"{ours}.{b}.{{kind}}")
        for a, b in names.items()
    ]


_ENCODER, _DECODER = "encoder.layers.{i}", "decoder.layers.{i}"
RULES: tuple[Rule, ...] = (
    Rename("src_embed.lut.weight", "model.encoder.embed_tokens.weight"),
    Rename("trg_embed.lut.weight", "model.decoder.embed_tokens.weight"),
    Drop("{stack}.pe.pe", _check_positions),
    *_attention(f"{_ENCODER}.src_src_att", f"model.{_ENCODER}.self_attn"),
    Rename(f"{_ENCODER}.layer_norm.{{kind}}", f"model.{_ENCODER}.self_attn_layer_norm.{{kind}}"),
    *_feed_forward(_ENCODER, f"model.{_ENCODER}"),
    *_attention(f"{_DECODER}.trg_trg_att", f"model.{_DECODER}.self_attn"),
    Rename(f"{_DECODER}.x_layer_norm.{{kind}}", f"model.{_DECODER}.self_attn_layer_norm.{{kind}}"),
    *_attention(f"{_DECODER}.src_trg_att", f"model.{_DECODER}.encoder_attn"),
    Rename(
        f"{_DECODER}.dec_layer_norm.{{kind}}", f"model.{_DECODER}.encoder_attn_layer_norm.{{kind}}"
    ),
    *_feed_forward(_DECODER, f"model.{_DECODER}"),
    Rename("{stack}.layer_norm.{kind}", "model.{stack}.layer_norm.{kind}"),
    Rename("decoder.output_layer.weight", "lm_head.weight"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `convert` takes."""
    parser.add_argument("checkpoint", metavar="INPUT", help="a .ckpt file, or a training's folder")
    parser.add_argument("--config", help="default: config.yaml beside the checkpoint")
    parser.add_argument("--source-vocab", help="default: src_vocab.txt beside the checkpoint")
    parser.add_argument("--target-vocab", help="default: trg_vocab.txt beside the checkpoint")
    parser.add_argument(
        "--pretokenized", action="store_true", help="texts will be tokens between spaces"
    )


def convert(checkpoint: str | Path, output: str | Path, **options: Any) -> None:
    """Write a folder that `from_pretrained` reads; options are those of `load`.

    Raises:
        ConversionError: as `load`.
        FileExistsError: the folder is there already.
    """
    load(checkpoint, **options).save(Path(output))


def load(
    checkpoint: str | Path,
    *,
    config: str | Path | None = None,
    source_vocab: str | Path | None = None,
    target_vocab: str | Path | None = None,
    pretokenized: bool = False,
) -> Converted:
    """Read a JoeyNMT model and its tokenizers.

    Raises:
        ConversionError: files are missing or damaged, options have no counterpart here (names
            all), or weights, vocabularies and configuration do not belong together.
    """
    file = _checkpoint_file(Path(checkpoint))
    problems: list[str] = []
    options = read_config(Path(config) if config else file.parent / "config.yaml", problems)
    data = options.section("data")
    symbols = _Symbols.read(data.section("special_symbols"))
    vocabularies = [
        _Vocabulary.read(data.section(side), side, named, file.parent, symbols, pretokenized)
        for side, named in (("src", source_vocab), ("trg", target_vocab))
    ]
    data.ignore("train", "dev", "test", "dataset_type", "dataset_cfg", "sample_train_subset")
    data.ignore("sample_dev_subset", "random_train_subset", "random_dev_subset")
    data.refuse_the_rest()
    fields = _network(options, vocabularies)
    generation = _generation(options.section("testing"), symbols)
    backends = [vocabulary.backend() for vocabulary in vocabularies]
    refuse(problems, str(file))

    tensors = _weights(file)
    for name, vocabulary in zip(("src", "trg"), vocabularies, strict=True):
        table = tensors.get(f"{name}_embed.lut.weight")
        if table is not None and len(table) != len(vocabulary.tokens):
            raise ConversionError(
                f"{vocabulary.file} makes a vocabulary of {len(vocabulary.tokens)} tokens, but "
                f"{name}_embed of the checkpoint has {len(table)}."
            )
    model = build_model(VaswaniConfig(**fields), to_ours(RULES, tensors))
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    source, target = (backend for backend in backends if backend is not None)
    one = source.to_str() == target.to_str()
    return Converted(model, _dressed(source, symbols), None if one else _dressed(target, symbols))


def _checkpoint_file(given: Path) -> Path:
    if given.is_file():
        return given
    if not given.is_dir():
        raise ConversionError(f"There is no file or folder {given}.")
    found = sorted(given.glob("*.ckpt"))
    for name in ("best.ckpt", "latest.ckpt"):
        if (given / name).is_file():
            return given / name
    if len(found) == 1 and found[0].is_file():
        return found[0]
    names = ", ".join(path.name for path in found) or "no .ckpt"
    raise ConversionError(f"{given} holds {names}: name the checkpoint to convert.")


def _weights(file: Path) -> Tensors:
    content = read_checkpoint(file, _HARMLESS)
    state = content.get("model_state") if isinstance(content, dict) else None
    if not holds_tensors(state):
        raise ConversionError(f"{file} holds no model_state: it is no checkpoint of JoeyNMT.")
    return dict(state)


def _network(options: Section, vocabularies: list["_Vocabulary"]) -> dict[str, Any]:
    """The fields of VaswaniConfig that the section model asks for."""
    model = options.section("model")
    encoder, decoder = model.section("encoder"), model.section("decoder")
    model.ignore("initializer", "init_weight", "init_gain", "init_rnn_orthogonal")
    model.ignore("embed_initializer", "embed_init_weight", "embed_init_gain")
    model.ignore("bias_initializer", "bias_init_weight", "lstm_forget_gate")
    kinds = encoder.get("type", "recurrent"), decoder.get("type", "transformer")
    if kinds != ("transformer", "transformer"):
        model.complain(f"type of model.encoder and model.decoder: {', '.join(kinds)}")
        return {}
    if model.values.get("initializer") == "xavier_normal":
        model.complain(
            "model.initializer: xavier_normal (it gives the residual connections DeepNet's weights)"
        )
    source, target = (len(vocabulary.tokens) for vocabulary in vocabularies)
    tied = model.get("tied_embeddings", False)
    if tied and vocabularies[0].tokens != vocabularies[1].tokens:
        model.complain("model.tied_embeddings: True (the two vocabularies differ)")
    fields: dict[str, Any] = {
        "vocab_size": source,
        "decoder_vocab_size": target,
        "tie_word_embeddings": model.get("tied_softmax", False),
        "share_encoder_decoder_embeddings": tied,
        "attention_bias": True,
        "layer_norm_eps": 1e-6,
        "label_smoothing": options.section("training").get("label_smoothing", 0.0),
        "unk_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "decoder_start_token_id": 2,
    }
    model.refuse_the_rest()
    widths, norms, scales, activations = [], [], [], []
    for side, section, layers, heads in (("encoder", encoder, 8, 4), ("decoder", decoder, 4, 8)):
        fields |= {
            f"{side}_layers": section.get("num_layers", layers),
            f"{side}_attention_heads": section.get("num_heads", heads),
            f"{side}_ffn_dim": section.get("ff_size", 2048),
        }
        widths.append(section.get("hidden_size", 512))
        norms.append(_norm_position(section, side, options.get("joeynmt_version", "")))
        activations.append(section.get("activation", "relu"))
        section.require("alpha", 1.0, 1.0, "the residual connections have no weight here")
        dropout = section.get("dropout", 0.1)
        fields |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), dropout)
        embeddings = section.section("embeddings")
        embeddings.ignore("dropout", "freeze", "load_pretrained")
        # With tied embeddings, JoeyNMT reads no other option of the decoder's.
        if tied and side == "decoder":
            embeddings.ignore("scale", "embedding_dim")
        else:
            widths.append(embeddings.get("embedding_dim", 64))
            scales.append(embeddings.get("scale", False))
        embeddings.refuse_the_rest()
        # Options of recurrent networks, which a Transformer there passes over.
        section.ignore("freeze", "rnn_type", "bidirectional", "attention", "init_hidden")
        section.ignore("input_feeding", "hidden_dropout", "bridge")
        section.refuse_the_rest()
    for what, values in (
        ("hidden_size and embedding_dim", widths),
        ("layer_norm", norms),
        ("embeddings.scale", scales),
        ("activation", activations),
    ):
        if len(set(values)) > 1 and None not in values:
            shown = ", ".join(str(value) for value in values)
            model.complain(f"{what} of model.encoder and model.decoder differ: {shown}")
    if activations[0] not in _ACTIVATIONS:
        model.complain(f"model.encoder.activation: {activations[0]} is unknown")
    fields |= {
        "d_model": widths[0],
        "norm_position": norms[0],
        "scale_embedding": scales[0],
        "activation_function": _ACTIVATIONS.get(activations[0]),
    }
    if not model.problems:
        try:
            VaswaniConfig(**fields)
        except StrictDataclassError as error:
            model.complain(f"section model: {error.__cause__ or error}")
    return fields


def _norm_position(section: Section, side: str, version: str) -> str | None:
    value = section.get("layer_norm", None, str)
    if value not in (None, "pre", "post"):
        section.complain(f"{section.name}layer_norm: {value} is unknown")
        return None
    if value is None and side == "encoder":
        found = re.match(r"(\d+)\.(\d+)", version)
        if not found or (int(found[1]), int(found[2])) >= (2, 2):
            section.complain(
                "model.encoder.layer_norm is missing (then JoeyNMT 2.2 and later norm before each "
                "layer and not after the stack, which has no counterpart here; for a model of "
                "JoeyNMT 2.0 or 2.1 write post)"
            )
            return None
    return value or "post"


def _generation(testing: Section, symbols: "_Symbols") -> dict[str, Any]:
    """The settings of `generate` that the section testing asks for."""
    testing.ignore("load_model", "batch_size", "batch_type", "eval_metrics", "eval_metric")
    testing.ignore("sacrebleu_cfg", "sacrebleu", "n_best", "return_attention", "return_prob")
    beams = testing.get("beam_size", 1)
    alpha = testing.get("alpha", testing.get("beam_alpha", -1.0), float)
    settings: dict[str, Any] = {
        "num_beams": max(beams, 1),
        "length_penalty_type": "gnmt",
        "length_penalty": max(alpha, 0.0),
    }
    never = [2, *range(4, 4 + len(symbols.further))]
    if beams > 1:
        never.append(1)  # the greedy search may choose it
    if not testing.get("generate_unk", True):
        never.append(0)
    settings["suppress_tokens"] = sorted(never)
    if (least := testing.get("min_output_length", 1)) > 0:
        settings["min_new_tokens"] = least
    if (most := testing.get("max_output_length", -1)) >= 0:
        settings |= {"max_new_tokens": most, "max_length_offset": 0}
    else:
        settings |= {"max_length_factor": 1.5, "max_length_offset": 0}
    way_out = "JoeyNMT's counts the source too; take it out to convert the model without it"
    if testing.get("repetition_penalty", -1.0) > 1:
        testing.complain(f"testing.repetition_penalty ({way_out})")
    if testing.get("no_repeat_ngram_size", -1) > 0:
        testing.complain(f"testing.no_repeat_ngram_size ({way_out})")
    testing.refuse_the_rest()
    return settings


@dataclass
class _Symbols:
    """Special tokens: those of `_SPECIALS`, in their order, and further ones."""

    first: list[str]
    further: list[str]

    @classmethod
    def read(cls, section: Section) -> "_Symbols":
        """Read data.special_symbols, which only JoeyNMT 2.3 has."""
        first = []
        for position, (name, usual) in enumerate(_SPECIALS.items()):
            first.append(section.get(f"{name}_token", usual))
            section.require(f"{name}_id", position, position, "JoeyNMT counts otherwise itself")
        further = [section.get("sep_token", None, str)]
        section.ignore("sep_id")
        section.unread.discard("lang_tags")
        tags = section.values.get("lang_tags") or []
        if isinstance(tags, list):
            further += map(str, tags)
        else:
            section.complain(f"data.special_symbols.lang_tags: {tags!r} is no list")
        symbols = cls(first, [token for token in further if token is not None])
        if len(set(symbols.all)) != len(symbols.all):
            section.complain(f"data.special_symbols: {', '.join(symbols.all)} are not different")
        section.refuse_the_rest()
        return symbols

    @property
    def all(self) -> list[str]:
        return self.first + self.further


@dataclass
class _Vocabulary:
    """The tokens of one side, and how its texts become tokens."""

    section: Section
    symbols: _Symbols
    file: Path
    tokens: list[str]
    level: str
    folder: Path
    before: list[normalizers.Normalizer] = field(default_factory=list)
    normalize: bool = False

    @classmethod
    def read(
        cls,
        section: Section,
        side: str,
        named: str | Path | None,
        folder: Path,
        symbols: _Symbols,
        pretokenized: bool,
    ) -> "_Vocabulary":
        """Read data.src or data.trg and the file with its vocabulary."""
        section.ignore("lang", "max_length", "min_length", "voc_min_freq", "voc_limit")
        file = folder / f"{side}_vocab.txt"
        voc_file = section.get("voc_file", "")
        if named:
            file = Path(named)
        elif not file.is_file() and voc_file:
            file = folder / Path(voc_file).name
        option = "--source-vocab" if side == "src" else "--target-vocab"
        if not file.is_file():
            raise ConversionError(f"There is no file {file}: name it by {option}.")
        tokens = list(dict.fromkeys([*symbols.all, *read_text(file).splitlines()]))
        level = section.get("level", "")
        why = "it adds the embedding of <unk> to what is no prompt"
        section.require("has_prompt", False, False, why)
        vocabulary = cls(section, symbols, file, tokens, level, folder)
        vocabulary.normalize = section.get("normalize", False)
        lowercase = section.get("lowercase", False)
        if pretokenized:
            section.values["tokenizer_cfg"] = None
            vocabulary.level, vocabulary.normalize = "word", False
        if vocabulary.normalize:
            vocabulary.before += _normalize()
        if lowercase and not pretokenized:
            vocabulary.before += _lowercase()
        return vocabulary

    def backend(self) -> Tokenizer | None:
        """Build the tokenizer; None where that is impossible, which is noted as a problem."""
        way_out = "tokenize before, and pass --pretokenized"
        options = self.section.section("tokenizer_cfg")
        options.ignore("lang", "nbest_size", "alpha", "dropout", "num_threads")
        # Those by which its script has trained what cuts the text.
        options.ignore("model_type", "character_coverage", "num_merges")
        kind = self.section.get("tokenizer_type", self.section.get("bpe_type", "sentencepiece"))
        if options.get("pretokenizer", "none").lower() != "none":
            options.complain(f"{options.name}pretokenizer: moses ({way_out})")
        backend = None
        if self.level in ("word", "char"):
            options.ignore("model_file", "codes", "separator", "vocab_file")
            backend = self._words() if self.level == "word" else self._characters()
        elif self.level != "bpe":
            self.section.complain(f"{self.section.name}level: {self.level!r} is unknown")
        elif kind == "sentencepiece":
            file = self.folder / Path(options.get("model_file", "")).name
            try:
                backend = self._pieces(SentencePiece.read(file))
            except ConversionError as error:
                problem = str(error).removesuffix(".")
                options.complain(f"{options.name}model_file: {problem} ({way_out})")
        else:
            options.ignore("codes", "separator")
            self.section.complain(f"{self.section.name}tokenizer_type: {kind} ({way_out})")
        self.section.ignore("tokenizer_type", "bpe_type")
        options.refuse_the_rest()
        self.section.refuse_the_rest()
        return backend

    def _after(self) -> list[decoders.Decoder]:
        """What `normalize` does to the output."""
        if not self.normalize:
            return []
        return [decoders.Fuse(), *(decoders.Replace(*change) for change in _TIDY)]

    def _words(self) -> Tokenizer:
        vocab = {token or _EMPTY_WORD: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(models.WordLevel(vocab, unk_token=self.symbols.first[0]))
        # Between two spaces, JoeyNMT finds the empty word.
        gap = normalizers.Replace(Regex(r"(?<= )(?= )|\A(?= )|(?<= )\z"), _EMPTY_WORD)
        backend.normalizer = normalizers.Sequence([*self.before, gap])
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_EMPTY_WORD, ""), joined_by_spaces(), *self._after()]
        )
        return backend

    def _characters(self) -> Tokenizer:
        vocab = {token: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(models.WordLevel(vocab, unk_token=self.symbols.first[0]))
        backend.normalizer = normalizers.Sequence([*self.before, normalizers.Replace(" ", SPACE)])
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Sequence(
            [decoders.Fuse(), decoders.Replace(SPACE, " "), *self._after()]
        )
        return backend

    def _pieces(self, model: SentencePiece) -> Tokenizer:
        """SentencePiece restricted to a vocabulary, as JoeyNMT does by SetVocabulary."""
        special, known = self.symbols.all, set(self.tokens)
        strangers = [t for t in self.tokens if t not in model.scores and t not in special]
        lost = [piece for piece in model.scores if piece not in known]
        # Entries that SentencePiece finds in no text; merges cannot make them.
        hidden = [] if model.bpe else [token for token in special if token not in model.scores]
        cuts = {token: model.cut(token) for token in hidden}
        problems = list(model.problems)
        if model.byte_fallback:
            problems.append("byte_fallback")
        elif strangers:
            problems.append(f"it has no piece {strangers[0]!r}, which {self.file.name} has")
        # SentencePiece keeps single characters, each of which JoeyNMT then takes for <unk>.
        if lost and (model.bpe or any(len(piece) == 1 for piece in lost)):
            problems.append(f"its piece {lost[0]!r} is not in {self.file.name}")
        problems += [
            f"it does not keep apart {token!r} as text and as a token"
            for token, cut in cuts.items()
            if cut is None
        ]
        refuse(problems, str(model.path))
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        backend = Tokenizer(model.model(vocabulary, self.symbols.first[0], model.lowest))
        steps = [*self.before, *model.normalizers()]
        if tags := [token for token in self.symbols.further if token in model.scores]:
            after_space = f"\\A{SPACE}(?={'|'.join(map(re.escape, tags))})"
            steps.append(normalizers.Replace(Regex(after_space), ""))
        backend.normalizer = normalizers.Sequence(steps)
        if hidden:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(cut, "merged_with_previous") for cut in cuts.values() if cut]
            )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.Fuse(),
                decoders.Replace(_OUTER_SPACE, ""),
                *self._after(),
            ]
        )
        return backend


def _normalize() -> list[normalizers.Normalizer]:
    """The option normalize: NFKC, plain quotes, single spaces, none before some marks."""
    changes = [("\u2019", "'"), ("“", '"'), ("”", '"'), *_TIDY]
    return [normalizers.NFKC(), *(normalizers.Replace(*change) for change in changes)]


def _lowercase() -> list[normalizers.Normalizer]:
    """str.lower, which knows the sigma at the end of a word; the library's Lowercase does not."""
    ending = Regex(r"\p{Cased}\p{Case_Ignorable}*\KΣ(?!\p{Case_Ignorable}*\p{Cased})")
    return [normalizers.Replace(ending, "ς"), normalizers.Lowercase()]


def _dressed(backend: Tokenizer, symbols: _Symbols) -> VaswaniTokenizer:
    unk, pad, bos, eos = symbols.first
    backend.post_processor = TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, 3)]
    )
    return VaswaniTokenizer(
        tokenizer_object=backend,
        unk_token=unk,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        extra_special_tokens=symbols.further,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


__all__ = ["add_arguments", "convert", "load"]
