"""What the parts of a `HeadPenalty` share: how their arguments and states are checked."""

from collections.abc import Iterable, Mapping

from torch import nn

from collab_heads.checks import check_choice, is_number
from collab_heads.errors import ArgumentError
from collab_heads.sites import ROLES, AttentionSite

RoleWeights = float | Mapping[str, float]


def check_trainable(what: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ArgumentError if a parameter is frozen; `parameters` maps the paths of sites to theirs."""
    if frozen := [path for path, parameter in parameters.items() if not parameter.requires_grad]:
        raise ArgumentError(
            f"the {what} of {', '.join(frozen)} are frozen (PEFT freezes what is not its own): set requires_grad before"
        )


def role_weights(name: str, weights: RoleWeights | None, sites: Iterable[AttentionSite]) -> dict[str, float]:
    """One weight per role of the sites, from one for all or role -> weight; 0 for roles that are not named.

    Raises:
        ArgumentError: on a weight that is no number from 0, or a role that none of the sites has.
    """
    roles = [role for role in ROLES if any(site.role == role for site in sites)]
    weights = 0.0 if weights is None else weights
    given = weights if isinstance(weights, Mapping) else dict.fromkeys(roles, weights)
    for role, weight in given.items():
        check_choice(f"role in {name}", role, roles)
        if not is_number(weight) or weight < 0:
            where = f" of {role}" if isinstance(weights, Mapping) else ""
            raise ArgumentError(f"{name} {weight!r}{where} must be a number, 0 or more")
    return dict.fromkeys(roles, 0.0) | dict(given)


def check_state(state: Mapping, own: Mapping, progress: set[str]) -> None:
    """Raise ArgumentError unless a stored state belongs to a part with the same settings; `progress` may differ."""
    if missing := sorted(own.keys() - state.keys()):
        raise ArgumentError(f"this is not the state of this penalty: it has no {', '.join(missing)}")
    if differing := sorted(name for name in own.keys() - progress if state.get(name) != own[name]):
        names = ", ".join(f"{name} {state.get(name)!r}, not {own[name]!r}" for name in differing)
        raise ArgumentError(f"this is not the state of this penalty: {names}")
