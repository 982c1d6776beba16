"""Training objectives by name. The default is the model's own loss, its likelihood (5.4).

r_drop               Liang et al., 2021             reinforce   Ranzato et al., 2016
scheduled_sampling   Mihaylova and Martins, 2019    risk        Shen et al., 2016
"""

import inspect
from typing import Any

from .objective import Loss, Objective, ObjectiveError
from .r_drop import RDrop
from .scheduled_sampling import ScheduledSampling
from .sequence_objectives import MinimumRisk, Reinforce

_KINDS: dict[str, type[Objective]] = {
    "r_drop": RDrop,
    "reinforce": Reinforce,
    "risk": MinimumRisk,
    "scheduled_sampling": ScheduledSampling,
}


def make_objective(name: str, **settings: Any) -> Objective:
    """Make an objective by its name.

    Raises:
        ObjectiveError: the name, a setting or a value is unknown.
    """
    if name not in _KINDS:
        raise ObjectiveError(f"There is no objective {name!r}: choose one of {', '.join(_KINDS)}.")
    known = inspect.signature(_KINDS[name]).parameters
    if unknown := sorted(settings.keys() - known.keys()):
        raise ObjectiveError(
            f"The objective {name!r} has no setting {unknown[0]!r}: it has {', '.join(known)}."
        )
    try:
        return _KINDS[name](**settings)
    except ObjectiveError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # for example a word for a number
        raise ObjectiveError(f"The objective {name!r} cannot take {settings}: {error}") from error


def objective_of(objective: str | Loss | None) -> Loss | None:
    """Return the objective of a name. An objective or None is returned unchanged.

    Raises:
        ObjectiveError: the name is unknown, or the objective is a class or cannot be called.
    """
    if objective is None:
        return None
    if isinstance(objective, str):
        return make_objective(objective)
    if isinstance(objective, type):
        raise ObjectiveError(
            f"objective is the class {objective.__name__}: pass an instance, such as "
            f"{objective.__name__}()."
        )
    if not callable(objective):
        raise ObjectiveError(
            "objective must be a name, an Objective or a function (model, inputs, update) -> loss, "
            f"got {objective!r}."
        )
    return objective


__all__ = ["make_objective", "objective_of"]
