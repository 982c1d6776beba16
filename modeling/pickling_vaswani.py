"""Modules that pickle after a call with `output_attentions=True`."""

import copy
from collections import OrderedDict
from typing import Any

from torch import nn

_RECORDING = "transformers.utils.output_capturing"


class PicklableModule(nn.Module):
    """A module that is pickled without the hooks by which transformers records outputs.

    The hooks are closures, which pickle refuses. The pickle leaves out the hooks and the mark that
    they are installed. The unpickled model installs them again when it needs them.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without recording hooks."""
        state = dict(super().__getstate__())
        state.pop("_output_capturing_hooks_installed", None)
        state["_forward_hooks"] = OrderedDict(
            (number, hook)
            for number, hook in self._forward_hooks.items()
            if getattr(hook, "__module__", None) != _RECORDING
        )
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "PicklableModule":
        """Copy the module with its hooks, so that a copied layer still records its outputs."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(super().__getstate__(), memo))
        return new


__all__ = ["PicklableModule"]
