"""Training with several processes: their devices, barriers, and gathering sharded weights."""

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..configuration.extras import needs
from .rendezvous import renew_store

with needs("vaswani[train]"):
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import broadcast_object_list, str_to_bool


def device_settings() -> dict[str, Any]:
    """Return the TrainingArguments that several processes on a machine without GPUs need.

    Without GPUs, transformers and Accelerate connect processes and accept bfloat16 only with
    `use_cpu`. That setting disables DeepSpeed, so a run with DeepSpeed gets the backend's name.
    """
    if torch.accelerator.is_available():
        return {}
    return {"ddp_backend": "gloo"} if uses_deepspeed() else {"use_cpu": True}


def uses_deepspeed() -> bool:
    """Tell whether the launcher has chosen DeepSpeed."""
    return bool(str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))


def join_processes() -> PartialState:
    """Connect the processes that a launcher has started, as TrainingArguments does."""
    renew_store()
    settings = device_settings()
    return PartialState(cpu="use_cpu" in settings, backend=settings.get("ddp_backend"))


def describe_processes(state: PartialState) -> str:
    """Return a sentence with the number of processes and their device."""
    number, kind = state.num_processes, state.device.type
    line = f"Training with {number} process{'es' if number > 1 else ''} on {kind}"
    if kind != "cpu":
        return line
    threads = torch.get_num_threads()
    each = " each" if number > 1 else ""
    return f"{line} ({threads} thread{'s' if threads > 1 else ''}{each})"


def of_main_process(value: Any) -> Any:
    """Return the main process's value in every process, because their disks may differ."""
    values = [value]
    broadcast_object_list(values)
    return values[0]


def patient_barrier() -> Callable[[], None]:
    """Return a function that waits for all processes without a practical time limit."""
    if not distributed.is_initialized():
        return lambda: None
    group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
    return lambda: distributed.barrier(group)


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Gather the float32 weights of a model that FSDP or DeepSpeed trains.

    Every process has to call it. The main process gets all weights under their names in the model.
    Other processes may get fewer.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.

    Returns:
        The weights for `save_pretrained(state_dict=...)`, or None if every process holds all
        weights, as with DDP.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return _deepspeed_weights(accelerator.unwrap_model(model))
    if kind == DistributedType.FSDP:
        return accelerator.get_state_dict(model)
    return None


def _deepspeed_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the master weights. The model's own are rounded to 16 bits, and ZeRO-3 shards them."""
    import deepspeed

    masters: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            gathered = parameter.detach() if master is None else master
            masters[id(parameter)] = gathered.to("cpu", torch.float32, copy=True)
    names = model.state_dict(keep_vars=True)
    return {name: masters.get(id(tensor), tensor) for name, tensor in names.items()}


def forget_sharding() -> None:
    """Load models whole from now on. Otherwise ZeRO-3 would shard them too."""
    unset_hf_deepspeed_config()
