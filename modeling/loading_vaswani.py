"""Strict loading and saving: a model is loaded completely or not at all, and pushed with a card."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from ..configuration.places_vaswani import check_model_type, check_place
from .quantization_vaswani import has_int8

# Weights of these dtypes are searched for NaN and infinity. Quantised weights have other dtypes.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def place_tied_weights_together(model: PreTrainedModel, device_map: dict[str, Any]) -> None:
    """Move tied weights in `device_map` from "disk" to the device of their twins.

    A file holds a tied weight under one name only. transformers does not find the weight on disk
    under its other names.
    """
    tied = sorted(
        {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
    )
    entries = {name: _entries_above(name, device_map) for name in tied}
    if not all(entries.values()):
        return  # Accelerate refuses modules without a device, and names them
    places = {name: device_map[above[-1]] for name, above in entries.items()}
    devices = [place for place in places.values() if place != "disk"]
    if not devices:
        return
    for name, place in places.items():
        # Accelerate confuses a module with its parent if both have an entry, so split the parent's.
        while (entry := _entries_above(name, device_map)[0]) != name:
            place_of_entry, prefix = device_map.pop(entry), f"{entry}." if entry else ""
            for child, _ in model.get_submodule(entry).named_children():
                device_map.setdefault(prefix + child, place_of_entry)
        device_map[name] = devices[0] if place == "disk" else place


def _entries_above(module: str, device_map: dict[str, Any]) -> list[str]:
    """List the entries of `device_map` for a module and its parents, the outermost first."""
    parts = module.split(".")
    prefixes = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return [prefix for prefix in prefixes if prefix in device_map]


def _refuse_float_values_with_scales(files: Iterable[str]) -> None:
    """Refuse int8 files with float values, because transformers would truncate them silently."""
    dtypes = _dtypes_in(files)
    for name, dtype in dtypes.items():
        if f"{name}_scale" in dtypes and dtype != "I8":
            raise OSError(
                f"{name} is {dtype} in a file of int8 weights, which need I8: save or round the "
                "model again."
            )


def _refuse_int8_values(files: Iterable[str], state_dict: dict[str, Any]) -> None:
    """Refuse int8 values for a float model, which would take them for weights."""
    given = {name: "I8" if v.dtype == torch.int8 else "" for name, v in state_dict.items()}
    dtypes = given | _dtypes_in(files)
    for name, dtype in dtypes.items():
        if dtype == "I8" and f"{name}_scale" in dtypes:
            raise OSError(
                f"{name} is int8, but the configuration is that of a float model: leave out "
                "config=..., or load the weights that were rounded."
            )


def _dtypes_in(files: Iterable[str]) -> dict[str, str]:
    """Return the dtypes of the tensors in safetensors files, under safetensors' names."""
    dtypes: dict[str, str] = {}
    for file in filter(lambda file: str(file).endswith(".safetensors"), files):
        with safe_open(file, framework="pt") as weights:
            dtypes |= {name: weights.get_slice(name).get_dtype() for name in list(weights.keys())}
    return dtypes


def _are_copies(first: Any, second: Any) -> bool:
    """Tell whether two tensors have the same values, but do not share memory."""
    if not (torch.is_tensor(first) and torch.is_tensor(second)):
        return False
    if first.is_meta or second.is_meta or first.data_ptr() == second.data_ptr():
        return False
    return torch.equal(first, second)


def _copy_foreign_memory(model: torch.nn.Module) -> None:
    """Copy weights that lie in memory that torch did not allocate.

    safetensors maps the file. Other programs can write to the file, and Linux does not report
    their writes. Each call of `generate` would therefore have to compare such weights again.
    """
    for weight in (*model.parameters(), *model.buffers()):
        values = weight.data
        plain = type(values) is torch.Tensor and values.layout == torch.strided
        if plain and values.is_cpu and not values.untyped_storage().resizable():
            weight.data = values.clone()


def _remove_repeated_hooks(model: torch.nn.Module) -> None:
    """Keep one offloading hook of each module. Accelerate adds a hook for each name of a module.

    transformers reads offloaded weights through a single hook when it saves them.
    """
    for module in model.modules():
        hooks = getattr(getattr(module, "_hf_hook", None), "hooks", ())
        if len(hooks) > 1 and all(getattr(hook, "offload", False) for hook in hooks):
            module._hf_hook = hooks[0]  # type: ignore[assignment]


class StrictlyLoadedModel(PreTrainedModel):
    """A model that is loaded completely or not at all, and never pushed with an empty card."""

    # The package sets both. Remote code has neither, because saved folders have no hub_cards.
    write_card: ClassVar[Callable[..., Path] | None] = None
    add_card_to_push: ClassVar[Callable[..., None] | None] = None

    _dtype_to_save: torch.dtype | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model as in transformers, but refuse incomplete weights.

        A checkpoint of the same class is refused if weights are missing or left over. Weights with
        NaN or infinity are refused too. `output_loading_info=True` loads the model anyway, and also
        returns a report.

        Raises:
            OSError: a file is missing or damaged; the weights do not fit the configuration, belong
                to another toolkit, or are not finite.
        """
        place = pretrained_model_name_or_path
        check_place(place, **kwargs)
        if (config := kwargs.get("config")) is not None and hasattr(config, "model_type"):
            check_model_type(
                place or config.name_or_path, config.model_type, *cls._loadable_types()
            )
        if isinstance(kwargs.get("device_map"), dict):
            # _load_pretrained_model changes it, and the caller keeps the original.
            kwargs["device_map"] = dict(kwargs["device_map"])
        try:
            loaded = super().from_pretrained(place, *model_args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {place} are damaged: {error}. Download the file again; for the "
                "Hub, pass force_download=True."
            ) from error
        model, info = cast(tuple[Any, dict[str, Any]], loaded)
        _copy_foreign_memory(model)
        _remove_repeated_hooks(model)
        if output_loading_info:
            return loaded
        same_class = cls.__name__ in (model.config.architectures or ())
        for verb, keys in (("lacks", "missing_keys"), ("has no use for", "unexpected_keys")):
            names = sorted(name for name in info[keys] if not model.may_be_new(name, info[keys]))
            if same_class and "state_dict" not in kwargs and names:
                others = f" and {len(names) - 1} others" if len(names) > 1 else ""
                raise OSError(
                    f"{place} {verb} {names[0]}{others}: its weights do not fit its configuration. "
                    "Download both again, or pass output_loading_info=True to load the model "
                    "anyway, with a list of these weights."
                )
        if "state_dict" not in kwargs:
            model.refuse_half_loaded(place, info["missing_keys"])
        mismatched = {name for name, *_ in info["mismatched_keys"]}
        model.refuse_new_int8(place, info["missing_keys"] | mismatched)
        if name := first_not_finite(model):
            raise OSError(
                f"{name} of {place} holds NaN or infinity: training diverged before it was saved, "
                "or the numbers are too large for the dtype. Load an earlier checkpoint or another "
                "dtype, or pass output_loading_info=True to load the model anyway."
            )
        return model

    @classmethod
    def _loadable_types(cls) -> tuple[str, ...]:
        """List the model types of configurations that a caller may pass, starting with its own."""
        config_class: Any = cls.config_class
        return (config_class.model_type,)

    def may_be_new(self, name: str, missing: Collection[str]) -> bool:
        """Tell whether a missing weight belongs to a part that a checkpoint may lack completely.

        A decoder gets new attention to an encoder when it becomes part of an encoder-decoder.
        """
        if ".encoder_attn" not in name or self.config.is_encoder_decoder:
            return False
        attention = {weight for weight, _ in self.named_parameters() if ".encoder_attn" in weight}
        return attention <= set(missing)

    def refuse_half_loaded(self, place: Any, missing: Collection[str]) -> None:
        """Refuse a model whose encoder or decoder would have random weights.

        Raises:
            OSError: the checkpoint lacks weights of a stack. The message names the stack.
        """
        for stack in ("encoder", "decoder"):
            lacking = [name for name in missing if re.match(rf"(model\.)?{stack}\.", name)]
            if any(not self.may_be_new(name, missing) for name in lacking):
                raise OSError(
                    f"{place} has no {stack} for {type(self).__name__}, whose {stack} would be "
                    f"random ({sorted(lacking)[0]} is missing): load the folder with the class "
                    "that saved it, or pass output_loading_info=True to load the model anyway."
                )

    def refuse_new_int8(self, place: Any, new: Collection[str]) -> None:
        """Refuse an int8 checkpoint that lacks weights, because new int8 weights cannot be trained.

        Raises:
            OSError: the checkpoint lacks an int8 weight or its scale, or has it in another size.
        """
        if not getattr(getattr(self, "hf_quantizer", None), "pre_quantized", False):
            return  # float weights, some of them new, were rounded together
        for name, module in self.named_modules():
            if not has_int8(module):
                continue
            lacking = {f"{name}.weight", f"{name}.weight_scale"}.intersection(new)
            if module.weight.shape != module.shape:  # transformers 5.17 loads other sizes silently
                lacking.add(f"{name}.weight")
            if lacking:
                raise OSError(
                    f"{place} has no {min(lacking)} that fits {type(self).__name__}, and new int8 "
                    "weights cannot be trained: start from the float folder that was rounded, or "
                    "pass output_loading_info=True to load the model anyway, with zeros there."
                )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, but save tied weights of a given `state_dict` once.

        Weights that were gathered from several processes have a copy of a tied matrix under each
        name. The saved dtype is that of `state_dict`, because DeepSpeed's master weights have more
        bits than the model's weights.

        Raises:
            ValueError: `quantize_dynamic` has replaced a layer.
        """
        for name, module in self.named_modules():
            if "nn.quantized" in type(module).__module__:
                raise ValueError(
                    f"{name} was replaced by quantize_dynamic, whose packed weights cannot be "
                    "saved: save the original model, and quantize it after loading."
                )
        if state_dict is not None:
            state_dict = dict(state_dict)  # transformers removes the tensors that it has written
            values = filter(torch.is_tensor, state_dict.values())
            self._dtype_to_save = next((v.dtype for v in values if v.is_floating_point()), None)
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self._dtype_to_save = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, or of a given `state_dict` while it is saved."""
        return self._dtype_to_save or super().dtype

    def gather_sharded_state_dict_for_save(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Gather the weights to save, and tie the weights again that gathering has copied."""
        weights = super().gather_sharded_state_dict_for_save(*args, **kwargs)
        # An adapter may untie the matrices, but it leaves the keys.
        tied = self.all_tied_weights_keys if self.config.tie_word_embeddings else {}
        for target, source in tied.items():
            if _are_copies(weights.get(target), weights.get(source)):
                weights[target] = weights[source]
        return weights

    @staticmethod
    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if load_config.device_map and "disk" in load_config.device_map.values():
            place_tied_weights_together(model, load_config.device_map)
        if any(map(has_int8, model.modules())):
            _refuse_float_values_with_scales(checkpoint_files or ())
        else:
            _refuse_int8_values(checkpoint_files or (), state_dict or {})
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    def _upload_modified_files(
        self,
        working_dir: str | os.PathLike,
        repo_id: str,
        files_timestamps: dict[str, float],
        **kwargs: Any,
    ) -> Any:
        # Every push of transformers calls this method, with an empty draft of a card. A translation
        # model without its map to the vocabulary has no task that a card could name.
        has_task = self.can_generate() or len(self.config.stacks) == 1
        if self.add_card_to_push is not None and has_task:
            self.add_card_to_push(working_dir, self.name_or_path, repo_id, files_timestamps)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter with NaN or infinity, or None if all are finite."""
    for name, tensor in model.named_parameters():
        readable = type(tensor) is nn.Parameter and not tensor.is_meta and tensor.dtype in _DTYPES
        if readable and not is_finite(tensor.detach()):
            return name
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether all numbers of a floating-point tensor are finite."""
    # The extremes of a tensor with NaN are NaN. Computing them needs no further memory.
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


__all__ = ["StrictlyLoadedModel", "first_not_finite", "is_finite"]
