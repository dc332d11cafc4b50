"""How users name heads: which are alive (the format of Voita et al.), and which to remove."""

from collections.abc import Callable, Mapping, Sequence

from collab_heads.checks import is_index, is_list
from collab_heads.errors import ArgumentError
from collab_heads.sites import ROLES, AttentionSite, check_name


def alive_choice(available: Sequence[AttentionSite], alive_heads: Mapping) -> dict[str, list[int]]:
    """Read a fixed configuration of gates.

    Args:
        available: all sites of the model.
        alive_heads: role -> one list per site of that role, in model order; or path -> one list. A list holds a 0 or
            a 1 for every head that the site has now: `{"enc-self": [[1, 0, 1, 1], [0, 1, 1, 1]]}`.

    Returns:
        path -> that list, for the sites named.

    Raises:
        ArgumentError: on a name, a shape or a value that does not fit; the site is named.
    """

    def check(site: AttentionSite, values: Sequence) -> None:
        if len(values) != site.num_heads:
            raise ArgumentError(f"alive_heads: {site.path} has {site.num_heads} heads, the list {len(values)} values")
        for head, value in enumerate(values):
            if value not in (0, 1) or isinstance(value, str | float):
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
        path -> heads to remove, ascending, for the sites named.

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
    """Spread lists by role or path over sites, checking each."""
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
    """Arrays, tensors and their numbers as Python's own, also inside a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(item) for item in value] if is_list(value) else value
