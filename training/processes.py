"""Several processes: on what they train, and the whole weights where each holds a part of them."""

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Gather the float32 weights of a model that FSDP or DeepSpeed trains.

    Every process has to call it. The main process gets the weights under their names in the model,
    others may get less.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.

    Returns:
        The weights for `save_pretrained(state_dict=...)`, or None where every process holds them
        all, as with DDP.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return _deepspeed_weights(accelerator.unwrap_model(model))
    if kind == DistributedType.FSDP:
        return accelerator.get_state_dict(model)
    return None


def _deepspeed_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the master weights: the model's own are rounded to 16 bits, and sharded by ZeRO-3."""
    import deepspeed

    masters: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            whole = parameter.detach() if master is None else master
            masters[id(parameter)] = whole.to("cpu", torch.float32, copy=True)
    names = model.state_dict(keep_vars=True)
    return {name: masters.get(id(tensor), tensor) for name, tensor in names.items()}


def forget_sharding() -> None:
    """Load models whole from here on, in a process of its own: ZeRO-3 would shard them, too."""
    unset_hf_deepspeed_config()
