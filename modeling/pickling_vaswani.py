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
        """Return the state, which copies keep whole and pickles keep without recording hooks."""
        return _State(super().__getstate__())


class _State(dict[str, Any]):
    """The state of a module.

    A `__deepcopy__` of the module would do the same. But PEFT's wrappers forward unknown attributes
    to the module, so a copy of a wrapper would be a copy of the module alone.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Copy the state with its hooks, so that a copied layer still records its outputs."""
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Leave out recording hooks and their mark."""
        state = {key: self[key] for key in self if key != "_output_capturing_hooks_installed"}
        state["_forward_hooks"] = OrderedDict(
            (number, hook)
            for number, hook in state["_forward_hooks"].items()
            if getattr(hook, "__module__", None) != _RECORDING
        )
        return dict, (state,)


__all__ = ["PicklableModule"]
