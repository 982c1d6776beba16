"""Tensor parallelism: each process holds a part of each matrix (`base_model_tp_plan`)."""

import re
from typing import Any

from .loading_vaswani import StrictlyLoadedModel


class DividedModel(StrictlyLoadedModel):
    """A model whose heads, inner states and vocabulary can be divided among processes."""

    def init_parallel_plans(self) -> None:
        """Keep the entries of the plan that this model has, because it may be a single stack."""
        super().init_parallel_plans()
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in self.named_modules()}
        for plan in filter(None, (self._tp_plan, self._fsdp_plan)):
            for name in plan.keys() - names:
                del plan[name]

    def forget_in_plans(self, module: str) -> None:
        """Remove the second name of a shared module from the tensor-parallel plan."""
        for name in (module, f"{self.base_model_prefix}.{module}"):
            (self._tp_plan or {}).pop(name, None)

    @classmethod
    def maybe_distribute_model(
        cls, model: Any, distributed_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Divide a model among processes, without splitting attention heads.

        Raises:
            ValueError: the number of heads is not a multiple of the number of processes.
        """
        processes = getattr(distributed_config, "tp_size", None) or 1
        for side in model.config.stacks:
            heads = getattr(model.config, f"{side}_attention_heads")
            if heads % processes:
                raise ValueError(
                    f"{side}_attention_heads ({heads}) cannot be divided among tp_size={processes} "
                    "processes: choose a tp_size that divides both stacks' heads."
                )
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)
