"""int8 weights through transformers' `quantization_config`.

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=VaswaniInt8Config())
    model.save_pretrained("int8/")  # a quarter of the size; loads like any other folder

All linear layers and embeddings are rounded, with a scale for each output channel or row. Tied
weights stay tied. LayerNorm, biases and learned positions keep their dtype.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..generation.int8_vaswani import Int8Embedding, Int8Linear

_METHOD = "vaswani_int8"
# Kinds of PEFT adapters that give the same results on int8 weights as on dequantized weights.
_ADAPTERS = (
    *("lora", "adalora", "randlora", "gralora", "vera", "ia3", "loha", "lokr", "oft", "boft"),
    *("fourierft", "waveft", "c3a", "miss", "ln_tuning"),
)
_ROUNDED_FORM: dict[type, Any] = {nn.Linear: Int8Linear, nn.Embedding: Int8Embedding}


class VaswaniInt8Config(QuantizationConfigMixin):
    """Asks `from_pretrained` for int8 weights.

    Args:
        weight_error: relative rounding error: root mean square of the change, divided by the root
            mean square of the weights. Rounding sets it; None means not yet rounded.
        quant_method: name of the quantization method, as in config.json.

    Raises:
        ValueError: `quant_method` names another method, or `weight_error` is negative or no
            number.
    """

    def __init__(self, weight_error: float | None = None, quant_method: str = _METHOD) -> None:
        if quant_method != _METHOD:
            raise ValueError(f"VaswaniInt8Config is for {_METHOD!r}, got {quant_method!r}.")
        if weight_error is not None and not (
            isinstance(weight_error, int | float) and weight_error >= 0
        ):
            raise ValueError(
                f"weight_error must be None or at least 0, got {weight_error!r}: leave it out, "
                "because rounding measures it."
            )
        self.quant_method: Any = quant_method
        self.weight_error = weight_error


class VaswaniInt8Quantizer(HfQuantizer):
    """Calls the model's own methods, so that it serves models of remote code too."""

    quantization_config: VaswaniInt8Config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not hasattr(model, "round_to_int8"):
            raise ValueError(
                f"VaswaniInt8Config is for models of Vaswani, not for {type(model).__name__}: "
                "choose another quantization_config, such as TorchAoConfig."
            )
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "int8 weights cannot be divided among processes: divide the float model, or load "
                "without tp_plan and distributed_config."
            )
        if self.pre_quantized:
            model.round_to_int8()
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            _refuse_offloaded(model)
            # The user may load other models with the same object.
            rounded = VaswaniInt8Config(model.round_to_int8())
            self.quantization_config = model.config.quantization_config = rounded
        model.requires_grad_(False)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        model.restore_from_int8(dtype or model.dtype)
        return model

    def is_serializable(self) -> bool:
        """int8 weights are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """int8 weights have no gradients."""
        return False


# Each folder of remote code has a copy of this file. The first registered class serves them all.
if _METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(_METHOD)(VaswaniInt8Config)
    register_quantizer(_METHOD)(VaswaniInt8Quantizer)


class AdaptableModule(nn.Module):
    """A module that lets PEFT wrap its layers, but no adapter be merged into int8 weights.

    PEFT casts merged weights to the dtype of the old ones. In int8, most kinds of adapters would
    give wrong answers without an error.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. PEFT replaces a layer by its wrapper in this way."""
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if isinstance(original := getattr(module, "original_module", None), nn.Module):
                _refuse_copies(name, original)
            base_layer = getattr(module, "base_layer", None)
            if isinstance(base_layer, nn.Module) and any(map(has_int8, base_layer.modules())):
                _check_adapter(module)
                module.merge = refuse_merge  # type: ignore[assignment]
        super().__setattr__(name, value)


def _refuse_copies(name: str, module: nn.Module) -> None:
    if any(map(has_int8, module.modules())):
        raise ValueError(
            f"The adapter has its own copy of {name}, which replaces int8 weights: call "
            "model.dequantize() first."
        )


def _check_adapter(wrapper: nn.Module) -> None:
    """Refuse kinds of adapters that may read int8 values as if they were the weight.

    Raises:
        ValueError: names the kind and the way out.
    """
    library, _, kind, *_ = f"{type(wrapper).__module__}...".split(".")
    # LoRA's ParamWrapper changes the weight itself (target_parameters).
    known = kind in _ADAPTERS and type(wrapper).__name__ != "ParamWrapper"
    if library == "peft" and not known:
        raise ValueError(
            f"PEFT's {type(wrapper).__name__} ({kind}) may read int8 weights as they are, without "
            f"their scales: call model.dequantize() first. These kinds are known to work: "
            f"{', '.join(_ADAPTERS)}."
        )


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Take the place of `merge` in adapters of layers with int8 weights.

    Raises:
        ValueError: always. The error names the ways out.
    """
    raise ValueError(
        "An adapter cannot be merged into int8 weights: merge it into the model that they were "
        "rounded from, or call model.dequantize() first."
    )


class RoundableModel(AdaptableModule, PreTrainedModel):
    """A model whose linear layers and embeddings can have int8 weights."""

    def round_to_int8(self) -> float | None:
        """Round all matrices.

        Returns:
            The root of the mean squared change, as a fraction of that of the weights. None for a
            model without values, whose weights are loaded later.

        Raises:
            ValueError: a weight is NaN or infinite. The error names it.
        """
        self._refuse_not_finite()
        rounded: dict[torch.Tensor, Any] = {}
        self._replace_modules(
            lambda module: (
                _ROUNDED_FORM[type(module)](module, rounded)
                if type(module) in _ROUNDED_FORM
                else module
            )
        )
        self._set_tied_keys(
            lambda tied: tied | {f"{name}_scale": f"{tied[name]}_scale" for name in tied}
        )
        for parameter in self.parameters():
            # A loaded parameter is a view of its file, which stays in memory as long as the view.
            parameter.data = parameter.data.clone()
        return _relative_change(rounded)

    def _refuse_not_finite(self) -> None:
        for name, module in self.named_modules():
            weight = module.weight if type(module) in _ROUNDED_FORM else None
            if weight is not None and not weight.is_meta and not weight.isfinite().all():
                raise ValueError(
                    f"{name}.weight has NaN or infinity, which int8 cannot represent: round an "
                    "earlier checkpoint."
                )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does. Float weights are saved as such.

        A float model may have the configuration of an int8 model, for example from `from_config`.

        Raises:
            ValueError: the weights are int8, and the configuration does not say so.
        """
        settings = vars(self.config)
        form = settings.get("quantization_config")
        # Remote code may have made the form. Its class then has another identity.
        stated = form if isinstance(form, dict) else getattr(form, "__dict__", {})
        stated_int8, is_int8 = (
            stated.get("quant_method") == _METHOD,
            any(map(has_int8, self.modules())),
        )
        if is_int8 and not stated_int8:
            raise ValueError(
                "The weights are int8, but the configuration does not say so, and the folder could "
                "not be loaded: make int8 weights with "
                "from_pretrained(..., quantization_config=VaswaniInt8Config())."
            )
        if is_int8 or not stated_int8:
            super().save_pretrained(*args, **kwargs)
            return
        del settings["quantization_config"]
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            settings["quantization_config"] = form

    def restore_from_int8(self, dtype: torch.dtype | str) -> None:
        """Give the matrices a floating-point dtype again, and let them be trained.

        `dtype` may be a name, because `save_pretrained` replaces the configuration's dtype by one.

        Raises:
            ValueError: a weight is not in memory. The error names it.
        """
        if name := _offloaded(self):
            raise ValueError(
                f"dequantize needs all weights in memory, but device_map offloads {name}: load the "
                "int8 folder without device_map."
            )
        restored: dict[nn.Parameter, nn.Parameter] = {}
        self._replace_modules(lambda module: _float_form(module, restored))
        for module in self.modules():
            if vars(module).get("merge") is refuse_merge:
                del module.merge
        self._set_tied_keys(
            lambda tied: {name: tied[name] for name in tied if not name.endswith("_scale")}
        )
        self.tie_weights()
        self.requires_grad_(True)
        nn.Module.to(self, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _replace_modules(self, replacement: Callable[[nn.Module], nn.Module]) -> None:
        """Replace modules of the model; a module that has two names keeps both."""
        replaced = {module: replacement(module) for module in self.modules() if module is not self}
        for parent in list(self.modules()):
            for name, child in parent._modules.items():
                if child is not None:
                    parent._modules[name] = replaced[child]

    def _set_tied_keys(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Change the names of tied weights, here and in the models inside this one."""
        for model in self.modules():
            if isinstance(model, PreTrainedModel):
                model._tied_weights_keys = change(model._tied_weights_keys or {})
                model.all_tied_weights_keys = change(model.all_tied_weights_keys)

    def _get_resized_embeddings(self, old_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(old_embeddings, Int8Embedding):
            raise ValueError(
                "A vocabulary of int8 weights cannot be resized: resize that of the model that "
                "they were rounded from, or call model.dequantize() first."
            )
        return super()._get_resized_embeddings(old_embeddings, *args, **kwargs)


def refuse_int8(model: Any, action: str) -> None:
    """Refuse an action that needs float weights.

    Raises:
        ValueError: the model has int8 weights. The error names the ways out.
    """
    rounded = isinstance(model, nn.Module) and any(map(has_int8, model.modules()))
    if rounded or getattr(model, "quantization_method", None) == _METHOD:
        raise ValueError(
            f"{action} needs float weights, but this model has int8 weights: use the model that "
            "they were rounded from, or what model.dequantize() returns."
        )


def _refuse_offloaded(model: nn.Module) -> None:
    """Refuse to round a model whose weights are offloaded, or are on several devices."""
    if name := _offloaded(model):
        raise ValueError(
            f"Rounding needs all weights in memory, but device_map offloads {name}: round the "
            "model without device_map and save it, because an int8 folder can be offloaded."
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"Rounding needs all weights on one device, but device_map divides them among "
            f"{', '.join(sorted(map(str, devices)))}: round the model without device_map and save "
            "it, because an int8 folder can be divided."
        )


def _offloaded(model: nn.Module) -> str | None:
    """Return the name of a weight that is not in memory, or None."""
    return next((name for name, weight in model.named_parameters() if weight.is_meta), None)


def has_int8(module: nn.Module) -> TypeGuard[Int8Linear | Int8Embedding]:
    """Tell whether a module is made for int8 weights."""
    return isinstance(module, Int8Linear | Int8Embedding)


def init_int8(module: Int8Linear | Int8Embedding) -> None:
    """Fill parameters that a checkpoint lacks with zeros, and scales with ones.

    Integers cannot be drawn as float weights are.
    """
    init.ones_(module.weight_scale)
    for tensor in (module.weight, getattr(module, "bias", None)):
        if tensor is not None:
            init.zeros_(tensor)


def _float_form(module: nn.Module, restored: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Return a float form of a module with int8 weights; other modules as they are."""
    float_form: Any
    if isinstance(module, Int8Linear):
        sizes = (module.in_features, module.out_features, module.bias is not None)
        float_form = nn.Linear(*sizes, device="meta")
        float_form.bias = module.bias
    elif isinstance(module, Int8Embedding):
        settings = {name: getattr(module, name) for name in nn.Embedding.__constants__}
        float_form = nn.Embedding(**settings, device="meta")
    else:
        return module
    if module.weight not in restored:
        restored[module.weight] = nn.Parameter(module.float_weight())
    float_form.weight = restored[module.weight]
    return float_form.train(module.training)


def _relative_change(rounded: dict[torch.Tensor, Any]) -> float | None:
    """Return the root mean squared change of rounded weights, relative to the weights."""
    change = total = 0.0
    for weight, (values, scale) in rounded.items():
        if weight.is_meta:
            return None
        exact = weight.detach().float()
        change += (exact - values * scale.float()[:, None]).square().sum().item()
        total += exact.square().sum().item()
    return round((change / total) ** 0.5, 5) if total else 0.0


__all__ = [
    "AdaptableModule",
    "RoundableModel",
    "VaswaniInt8Config",
    "VaswaniInt8Quantizer",
    "has_int8",
    "init_int8",
    "refuse_int8",
    "refuse_merge",
]
