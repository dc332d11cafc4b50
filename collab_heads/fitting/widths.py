"""Turn the arguments of a user (`dim_shared_query_key`, `dim_value`) into a width per site."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TypeVar

from collab_heads.errors import ArgumentError
from collab_heads.sites.site import AttentionSite, Site, check_name

Width = int | float | None
Asked = TypeVar("Asked")
HEAD_MULTIPLE = 4  # of a narrowed head's width; odd widths are slow everywhere


def widths_asked(
    available: Sequence[Site],
    chosen: Sequence[Site],
    asked: Asked | Mapping[str, Asked],
    argument: str = "dim_shared_query_key",
) -> dict[str, Asked]:
    """Return the width that is requested for each site: path -> int, share or None.

    Args:
        available: all sites of the model.
        chosen: those that the user's `sites` selected.
        asked: one value for all sites, or a dict by role or path; a path takes precedence over its role.
        argument: the name of the user's argument, for errors.

    Returns:
        The sites to change and their widths. If `asked` is a dict, only the sites that it names.

    Raises:
        ArgumentError: if a key of the dict names nothing among the chosen sites.
    """
    if not isinstance(asked, Mapping):
        return {site.path: asked for site in chosen}
    if not asked:
        raise ArgumentError(f"{argument} is an empty dict: name roles or paths, or pass a number")
    for name in asked:
        check_name(available, name)
        if not any(name in (site.role, site.path) for site in chosen):
            raise ArgumentError(f"{argument} names {name!r}, which sites= leaves out")
    return {
        site.path: asked[site.path] if site.path in asked else asked[site.role]
        for site in chosen
        if site.path in asked or site.role in asked
    }


def resolve_width(asked: Width, site: AttentionSite, exact: int, argument: str = "dim_shared_query_key") -> int:
    """Turn an int, a share or None into a width for one site.

    Args:
        asked: an int from 1 to `exact`; a float in (0, 1], a share of `exact`, rounded; None for `exact`.
        site: the site, for errors.
        exact: the full width: H * d_k, or H_k * d_v for values.
        argument: the name of the user's argument, for errors.

    Raises:
        ArgumentError: if the value is out of range, a bool, or of another type.
    """
    where = f"{argument} {asked!r} for {site.path}"
    if asked is None:
        return exact
    if isinstance(asked, bool) or not isinstance(asked, Real):
        raise ArgumentError(f"{where}: expected an int, a share in (0, 1], a dict of those, or None")
    if isinstance(asked, Integral):
        if not 1 <= asked <= exact:
            raise ArgumentError(f"{where}: expected 1 to {exact} (heads x head width, which is exact)")
        return int(asked)
    if not (math.isfinite(asked) and 0 < asked <= 1):
        raise ArgumentError(f"{where}: a float is a share of {exact} and must be in (0, 1]; for a width pass an int")
    return max(1, round(float(asked) * exact))


def rounded_up(asked: int, num_heads: int, dim_head: int) -> int:
    """Round a width over all heads up so that every head gets a multiple of 4, at most its original width.

    Args:
        asked: the requested width over all heads, 1 to H * dim_head.
        num_heads: H.
        dim_head: the original width of a head.
    """
    share = math.ceil(math.ceil(asked / num_heads) / HEAD_MULTIPLE) * HEAD_MULTIPLE
    return num_heads * min(share, dim_head)
