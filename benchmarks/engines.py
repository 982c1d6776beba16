"""Our model and its peers with the same weights, behind one interface for token ids.

MarianMTModel and CTranslate2 get exactly our weights, with our table of positions, our start token
and no biases in attention. The outputs of each peer are compared with ours before it is timed.
"""

import copy
import gc
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from base_model import has_bfloat16, padded
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging
from vaswani.conversion.ctranslate2 import save
from vaswani.conversion.to_marian import to_marian
from worker import timed

from vaswani import VaswaniInt8Config

try:
    import ctranslate2
except ImportError:  # the table then says so instead of its rows
    ctranslate2 = None

OURS, PEERS_RULE = "ours", "ours, the peer's rule"
MAX_LENGTH_OFFSET = 50  # a translation has at most this many tokens more than its source (6.1)


class TorchEngine:
    """`model.generate` of our model or of MarianMTModel.

    Args:
        label: name of the engine in the table.
        model: the model, in the precision to measure and on its device.
        search: arguments of beam search that differ from the model's generation config.
        limited: whether the model itself limits translations to source length + 50 tokens.
    """

    def __init__(
        self,
        label: str,
        precision: str,
        model: PreTrainedModel,
        search: dict[str, Any] | None = None,
        limited: bool = False,
    ) -> None:
        self.label, self.precision = label, precision
        self.model, self.search, self.limited = model, search or {}, limited

    def prepare(self, sentences: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Pad a batch and move it to the device of the model."""
        batch = padded(sentences, pad=self.model.config.pad_token_id)
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}

    def run(
        self, batch: dict[str, torch.Tensor], beams: int, forced: int | None = None
    ) -> torch.Tensor:
        """Translate a prepared batch: to the end, or to exactly `forced` tokens."""
        settings: dict[str, Any] = {"num_beams": beams, **(self.search if beams > 1 else {})}
        if forced is not None:
            settings["max_new_tokens"] = forced
        elif not self.limited:
            settings["max_new_tokens"] = batch["input_ids"].shape[1] + MAX_LENGTH_OFFSET
        own = self.model.generation_config
        if forced is not None:
            settings["eos_token_id"] = None
            # transformers would restore an end token that only the call removes.
            self.model.generation_config = copy.deepcopy(own)
            self.model.generation_config.eos_token_id = None
        try:
            return self.model.generate(**batch, **settings)
        finally:
            self.model.generation_config = own

    def ids(self, output: torch.Tensor, forced: int | None = None) -> list[list[int]]:
        """Return the translations, without the start token and up to the end token."""
        eos, pad = self.model.config.eos_token_id, self.model.config.pad_token_id
        rows = []
        for row in output[:, 1:].tolist():
            if forced is None and eos in row:
                row = row[: row.index(eos) + 1]
            while forced is None and row and row[-1] == pad:
                row.pop()
            rows.append(row)
        return rows


class CTranslate2Engine:
    """`ctranslate2.Translator.translate_batch`, with token ids as tokens.

    Args:
        folder: a model from `save_for_ctranslate2`.
        precision: CTranslate2's compute type.
        threads: number of threads of a translation. There is one translation at a time.
    """

    label = "CTranslate2"

    def __init__(self, folder: Path, precision: str, device: str, threads: int, eos: int) -> None:
        self.precision, self.eos = precision, str(eos)
        self.translator = ctranslate2.Translator(
            str(folder),
            device=device,
            compute_type=precision,
            inter_threads=1,
            intra_threads=threads,
        )

    def prepare(self, sentences: Sequence[list[int]]) -> list[list[str]]:
        """Convert a batch to CTranslate2's tokens."""
        return [[str(token) for token in sentence] for sentence in sentences]

    def run(self, batch: list[list[str]], beams: int, forced: int | None = None) -> list[Any]:
        """Translate a prepared batch: to the end, or to exactly `forced` tokens."""
        longest = max(map(len, batch)) + MAX_LENGTH_OFFSET
        return self.translator.translate_batch(
            batch,
            beam_size=beams,
            length_penalty=1,
            max_decoding_length=longest if forced is None else forced,
            min_decoding_length=1 if forced is None else forced,
            return_end_token=True,
        )

    def ids(self, output: list[Any], forced: int | None = None) -> list[list[int]]:
        """Return the translations, including the end token."""
        return [[int(token) for token in result.hypotheses[0]] for result in output]

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """Return the log-probability of every target token, including the end token."""
        results = self.translator.score_batch(self.prepare(sources), self.prepare(targets))
        return [result.log_probs for result in results]


Engine = TorchEngine | CTranslate2Engine


def marian_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Build MarianMTModel with the weights of `model`, on the same device."""
    twin = to_marian(model)
    # Copy only token ids. Other settings would forbid or force tokens or change the ranking.
    names = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    twin.generation_config = GenerationConfig(
        **{name: getattr(model.config, name) for name in names}
    )
    return twin.to(model.device)


def save_for_ctranslate2(model: PreTrainedModel, folder: Path, quantization: str) -> Path:
    """Write `model` to `folder` for CTranslate2, with one of its quantizations."""
    save(model, folder, quantization)
    return folder


@torch.no_grad()
def distance_to_marian(
    model: PreTrainedModel,
    twin: PreTrainedModel,
    sources: list[list[int]],
    targets: list[list[int]],
) -> float:
    """Return the largest difference of target logits in forced decoding of a padded batch."""
    batch = padded(sources, targets, pad=model.config.pad_token_id)
    labels = batch.pop("labels").to(model.device)
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    ours, theirs = (one(**batch, decoder_input_ids=inputs).logits for one in (model, twin))
    return (ours - theirs)[labels != -100].abs().max().item()


def distance_to_ctranslate2(
    model: PreTrainedModel,
    engine: CTranslate2Engine,
    sources: list[list[int]],
    targets: list[list[int]],
) -> float:
    """Return the largest difference of a target token's log-probability.

    The targets have no `</s>` at their end.
    """
    ended = [[*target, int(engine.eos)] for target in targets]
    ours: Any = model.score(sources, ended).log_probs
    theirs = engine.score(sources, targets)
    return max(
        (mine - torch.tensor(other)).abs().max().item()
        for mine, other in zip(ours, theirs, strict=True)
    )


class Workshop:
    """Builds engines, each with its own copy of the weights of one float32 model.

    Args:
        model: the model, on the CPU.
        device: "cpu" or "cuda".
        folder: folder for CTranslate2's models.
        threads: number of threads of CTranslate2, equal to torch's.
    """

    def __init__(self, model: PreTrainedModel, device: str, folder: Path, threads: int) -> None:
        self.model, self.device, self.folder, self.threads = model, device, folder, threads

    def build(self, name: str, precision: str) -> Engine:
        """Build "ours", "ours, the peer's rule", "MarianMT" or "CTranslate2" in one precision.

        Raises:
            RuntimeError: this machine cannot run it. The message gives the reason.
        """
        if name == "CTranslate2":
            return self._ctranslate2(precision)
        model = self._torch_model(name, precision)
        if name == "MarianMT":
            return TorchEngine(name, precision, model, {"early_stopping": True})
        search = {"early_stopping": True, "length_penalty": 1.0, "length_penalty_type": "hf"}
        return TorchEngine(name, precision, model, None if name == OURS else search, limited=True)

    def _torch_model(self, name: str, precision: str) -> PreTrainedModel:
        if precision == "int8":
            folder = self.folder / "float32"
            self.model.save_pretrained(folder)
            form = VaswaniInt8Config()
            return AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=form).eval()
        if precision == "bfloat16" and self.device == "cpu" and not has_bfloat16():
            raise RuntimeError("this CPU has no bfloat16 instructions")
        model = marian_twin(self.model) if name == "MarianMT" else copy.deepcopy(self.model)
        return model.to(device=self.device, dtype=getattr(torch, precision)).eval()

    def _ctranslate2(self, precision: str) -> CTranslate2Engine:
        if ctranslate2 is None:
            raise RuntimeError("ctranslate2 is not installed")
        if self.device == "cuda" and not ctranslate2.get_cuda_device_count():
            raise RuntimeError(
                f"ctranslate2 {ctranslate2.__version__} finds no CUDA device: its build or the "
                "driver lacks support"
            )
        supported = ctranslate2.get_supported_compute_types(self.device)
        if precision not in supported:
            raise RuntimeError(f"ctranslate2 computes {', '.join(sorted(supported))} here")
        folder = self.folder / f"ctranslate2-{precision}"
        if not (folder / "model.bin").exists():
            save_for_ctranslate2(self.model, folder, precision)
        eos = self.model.config.eos_token_id
        return CTranslate2Engine(folder, precision, self.device, self.threads, eos)


def quieten() -> None:
    """Turn off progress bars and repeated advice of transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def build_alone(
    model: Path, name: str, precision: str, device: str, folder: Path, threads: int
) -> Engine:
    """Build one engine and nothing else in the process.

    Args:
        model: folder of the float32 model.
        name, precision: as for `Workshop.build`.
        device, folder, threads: as for `Workshop`.

    Raises:
        RuntimeError: this machine cannot run the engine. The message gives the reason.
    """
    quieten()
    torch.set_num_threads(threads)
    original = AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    return Workshop(original, device, folder, threads).build(name, precision)


def translator(*arguments: Any) -> Callable:
    """Build an engine, with the arguments of `build_alone`, and return a function that times it."""
    engine = build_alone(*arguments)
    gc.collect()

    def translate(
        batches: Sequence[list[list[int]]], beams: int, forced: int | None
    ) -> dict[str, Any]:
        """Translate batches one after the other, after a first batch that is not timed."""
        prepared = [engine.prepare(batch) for batch in batches]
        engine.run(prepared[0], beams, forced)
        raw: list[Any] = []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = sum(
            timed(lambda batch=batch: raw.append(engine.run(batch, beams, forced)))
            for batch in prepared
        )
        return {
            "seconds": seconds,
            "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
            "outputs": [row for output in raw for row in engine.ids(output, forced)],
        }

    return translate


__all__ = [
    "MAX_LENGTH_OFFSET",
    "OURS",
    "PEERS_RULE",
    "CTranslate2Engine",
    "Engine",
    "TorchEngine",
    "Workshop",
    "build_alone",
    "distance_to_ctranslate2",
    "distance_to_marian",
    "marian_twin",
    "quieten",
    "save_for_ctranslate2",
    "translator",
]
