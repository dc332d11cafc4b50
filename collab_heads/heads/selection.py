"""Read and check how users name heads: which are alive (the format of Voita et al.), and which to remove."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from collab_heads.base.checks import check_choice, is_index, is_list
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.sites.site import ROLES, AttentionSite, check_name


def alive_choice(available: Sequence[AttentionSite], alive_heads: Mapping) -> dict[str, list[int]]:
    """Read a fixed configuration of gates.

    Args:
        available: all sites of the model.
        alive_heads: role -> one list per site of that role, in model order; or path -> one list. A list holds a 0 or
            a 1 for every head that the site has now: `{"enc-self": [[1, 0, 1, 1], [0, 1, 1, 1]]}`.

    Returns:
        path -> the list, for the named sites.

    Raises:
        ArgumentError: on a name, a shape or a value that does not fit; the site is named.
    """

    def check(site: AttentionSite, values: Sequence) -> None:
        if len(values) != site.num_heads:
            raise ArgumentError(f"alive_heads: {site.path} has {site.num_heads} heads, the list {len(values)} values")
        for head, value in enumerate(values):
            if value not in (0, 1):
                raise ArgumentError(f"alive_heads: {site.path}, head {head}: {value!r} is neither 0 nor 1")

    return {
        path: [int(v) for v in values]
        for path, values in per_site(available, alive_heads, "alive_heads", check).items()
    }


def removal_choice(
    available: Sequence[AttentionSite], heads: Mapping, numbers: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Read which heads to remove.

    Args:
        available: all sites of the model.
        heads: role -> one list of heads per site of that role, in model order; or path -> one list of heads. Heads
            keep the numbers that they had before any was removed.
        numbers: path -> the original numbers of the heads that the site has now.

    Returns:
        path -> heads to remove, ascending, for the named sites.

    Raises:
        ArgumentError: on a name or a head that does not exist; the site is named.
    """

    def check(site: AttentionSite, values: Sequence) -> None:
        for head in values:
            if not is_index(head, 1 << 30) or head not in numbers[site.path]:
                left = ", ".join(map(str, numbers[site.path])) or "none"
                raise ArgumentError(f"heads: {site.path} has no head {head!r}; it has {left}")
        if len(set(values)) < len(values):
            raise ArgumentError(f"heads: {site.path} names a head twice: {list(values)}")

    return {path: sorted(values) for path, values in per_site(available, heads, "heads", check).items()}


def per_site(
    available: Sequence[AttentionSite], by_name: object, what: str, check: Callable[[AttentionSite, Sequence], None]
) -> dict[str, Sequence]:
    """Assign lists, given by role or path, to sites, and check each."""
    if not isinstance(by_name, Mapping) or not by_name:
        raise ArgumentError(
            f"{what} must be a dict by role or path, such as {{'enc-self': [...]}}, not {by_name!r:.200}"
        )
    by_path: dict[str, Sequence] = {}
    for name, values in by_name.items():
        check_name(available, name)
        sites = [site for site in available if name in (site.path, site.role)]
        lists = plain(values) if name in ROLES else [values]
        if not is_list(lists) or len(lists) != len(sites):
            count = f"{len(lists)} entries" if is_list(lists) else repr(lists)[:200]
            raise ArgumentError(f"{what}[{name!r}] must hold one list per site, {len(sites)} in all, not {count}")
        for site, site_values in zip(sites, map(plain, lists), strict=True):
            if not is_list(site_values):
                raise ArgumentError(f"{what}[{name!r}]: {site.path} needs a list, not {site_values!r:.200}")
            if site.path in by_path:
                raise ArgumentError(f"{what} names {site.path} twice, by role and by path")
            check(site, site_values)
            by_path[site.path] = site_values
    return by_path


def plain(value: object) -> object:
    """Convert arrays, tensors and their numbers to Python's own, also inside a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(item) for item in value] if is_list(value) else value


Target = int | Mapping[str, int]


def roles_of_heads(sites: Sequence[AttentionSite]) -> list[str]:
    """Return the role of every head of some sites, in their order."""
    return [site.role for site in sites for _ in range(site.num_heads)]


def check_target(target: Target, roles: Sequence[str], name: str = "target_heads") -> None:
    """Check a number of heads against the heads that exist.

    Args:
        target: a total, or role -> number.
        roles: the role of every head, [N].
        name: of the argument, for errors.

    Raises:
        ArgumentError: on a number below 0 or above what exists, on a role without heads, on a missing role, and on a
            total so small that it would empty a role.
    """
    available = list(dict.fromkeys(roles))
    if isinstance(target, Mapping):
        for role, count in target.items():
            check_choice(f"role in {name}", role, available)
            check_num_heads(count, sum(r == role for r in roles), f"{name}[{role!r}]", f"{role} heads")
        if missing := [role for role in available if role not in target]:
            raise ArgumentError(
                f"{name} names no number for the gated heads of {', '.join(missing)}: add it, or gate other sites only"
            )
        return
    check_num_heads(target, len(roles), name, "heads")
    if target < len(available):
        raise ArgumentError(
            f"{name} {target} would empty a role: the heads have {len(available)} roles "
            f"({', '.join(available)}) and each keeps at least one; to empty a role say so with a number per role"
        )


def check_num_heads(count: object, most: int, what: str, kind: str) -> None:
    """Raise ArgumentError unless `count` is a whole number from 0 to `most`."""
    if not is_index(count, most + 1):
        raise ArgumentError(f"{what} is {count!r}, must be a whole number from 0 to the {most} {kind} that exist")


def check_scores(scores: Mapping[str, Tensor | Sequence[float]], sites: Sequence[AttentionSite]) -> dict[str, Tensor]:
    """Check that there is a finite score for every head of some sites.

    Args:
        scores: path -> [H].
        sites: the sites.

    Returns:
        path -> [H], float32.

    Raises:
        ArgumentError: if a site has no scores, or not one for every head that it has now.
        NonFiniteError: if a score is NaN or inf; the site is named.
    """
    check_by_path(scores)
    checked = {}
    for site in sites:
        if site.path not in scores:
            raise ArgumentError(f"scores lack {site.path}: measure the heads of this model")
        try:
            checked[site.path] = torch.as_tensor(scores[site.path]).detach().float().cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ArgumentError(f"scores of {site.path} must be one number per head: {error}") from error
        if checked[site.path].shape != (site.num_heads,):
            raise ArgumentError(
                f"scores of {site.path} have shape {tuple(checked[site.path].shape)}, it has {site.num_heads} heads: "
                "measure them again after pruning"
            )
        if not torch.isfinite(checked[site.path]).all():
            raise NonFiniteError(f"scores of {site.path} contain NaN or inf")
    return checked


def check_by_path(scores: object) -> None:
    """Raise ArgumentError unless scores are a dict."""
    if not isinstance(scores, Mapping):
        raise ArgumentError(f"scores must be a dict, path -> one number per head, not {scores!r:.80}")


def choose(scores: Tensor, roles: Sequence[str], target: Target) -> Tensor:
    """Pick the heads with the highest scores: [N], bool.

    A total keeps at least the best head of every role; numbers per role are kept exactly.

    Args:
        scores: [N].
        roles: the role of every head, [N].
        target: a total, or role -> number.
    """
    chosen, members = torch.zeros_like(scores, dtype=torch.bool), members_of(roles, scores.device)
    if isinstance(target, Mapping):
        for role, indices in members.items():
            chosen[indices[scores[indices].topk(target[role]).indices]] = True
        return chosen
    ranked = scores.clone()
    for indices in members.values():
        ranked[indices[scores[indices].argmax()]] = torch.inf
    chosen[ranked.topk(target).indices] = True
    return chosen


def members_of(roles: Sequence[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the indices of the heads of each role."""
    return {
        role: torch.tensor([i for i, role_of_head in enumerate(roles) if role_of_head == role], device=device)
        for role in dict.fromkeys(roles)
    }


def on_the_way(target: Target, roles: Sequence[str], progress: float) -> Target:
    """Return the number of heads after a share of the steps to the target: it falls evenly, and never below the target.

    Args:
        target: a total, or role -> number.
        roles: the role of every head, [N].
        progress: from 0 (all heads) to 1 (the target).
    """
    if isinstance(target, Mapping):
        return {role: between(sum(r == role for r in roles), count, progress) for role, count in target.items()}
    return between(len(roles), target, progress)


def between(start: int, end: int, progress: float) -> int:
    """Return a whole number between `start` and `end`, rounded towards `start`."""
    return start - int((start - end) * min(1.0, progress))
