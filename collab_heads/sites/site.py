"""Sites of attention and of feed-forward blocks, the weights of attention, and how users name sites."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, TypeVar, overload

from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.base.option_values import FEED_FORWARD_ROLES, FeedForwardRole
from collab_heads.base.option_values import ROLES as ROLES
from collab_heads.base.option_values import Role as Role
from collab_heads.errors import ArgumentError, ShapeError


@dataclass(frozen=True)
class AttentionSite:
    """A site: one attention module of a model.

    A module that serves several layers (ALBERT) is one site, with the index of the first layer that it serves.

    Attributes:
        path: dotted path of the module, relative to the base model (`model.base_model`).
        role: "enc-self", "dec-self" or "dec-enc".
        layer: index of the layer within its stack.
        num_heads: number of heads that the module computes.
        groups: the key/value head of every head, where heads share them; None where each has its own.
        stack: the stack that it belongs to, in models that read two kinds of input ("text", "vision"); else None.
    """

    path: str
    role: Role
    layer: int
    num_heads: int
    groups: tuple[int, ...] | None = None
    stack: str | None = None

    def __post_init__(self):
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(self.groups))  # JSON has lists

    @property
    def num_key_heads(self) -> int:
        """The number of key/value heads."""
        return count_key_heads(self.num_heads, self.groups)

    @property
    def is_cached(self) -> bool:
        """True if generation keeps its keys and values: those of a decoder."""
        return self.role.startswith("dec")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without entries that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def shares_keys(self) -> bool:
        """True if several heads share a key/value head."""
        return self.num_key_heads < self.num_heads

    @property
    def heads_in_words(self) -> str:
        """The number of heads and, where they share keys, of key heads: "8 on 4"."""
        return f"{self.num_heads} on {self.num_key_heads}" if self.shares_keys else str(self.num_heads)

    @classmethod
    def from_dict(cls, described: Mapping) -> "AttentionSite":
        """Make a site from `to_dict` or `dataclasses.asdict`, also after JSON; entries of other versions are ignored.

        Args:
            described: field -> value.

        Raises:
            TypeError: if a required entry is missing.
        """
        known = {each.name: described[each.name] for each in fields(cls) if each.name in described}
        return cls(**known)


@dataclass(frozen=True)
class FeedForwardSite:
    """A site: one feed-forward block of a model.

    A block that serves several layers (ALBERT) is one site, with the index of the first layer that it serves.

    Attributes:
        path: dotted path of the module that holds its projections (in some families the whole layer), relative to the
            base model.
        role: "enc-ffn" or "dec-ffn".
        layer: index of the layer within its stack.
        num_neurons: number of neurons, which is the width of the input of the last projection.
        stack: as in `AttentionSite`.
    """

    path: str
    role: FeedForwardRole
    layer: int
    num_neurons: int
    stack: str | None = None


Site: TypeAlias = AttentionSite | FeedForwardSite
AnySite = TypeVar("AnySite", AttentionSite, FeedForwardSite, Site)


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one site in canonical form, as torch stores them: (out, in).

    H heads, H_k key/value heads (H, unless heads share them), d_k the width of a query/key head, d_v of a value head,
    D_q and D_k the widths of the query-side and key-side inputs. The bias of the key matters only where positions come
    between it and the score; elsewhere it adds to all scores of a query alike and the softmax cancels it.

    Attributes:
        query: [H, d_k, D_q].
        query_bias: [H, d_k], or None.
        key: [H_k, d_k, D_k].
        value: [H_k, d_v, D_k].
        value_bias: [H_k, d_v], or None.
        scale: factor of the dot product before the softmax (1/sqrt(d_k) for BERT and Marian, 1.0 for T5).
        key_bias: [H_k, d_k], or None.
        groups: the key/value head of every head; None where each has its own.
    """

    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    value: Tensor
    value_bias: Tensor | None
    scale: float
    key_bias: Tensor | None = None
    groups: tuple[int, ...] | None = None

    def __post_init__(self):
        heads, width = self.query.shape[:2]
        if (count_key_heads(heads, self.groups), width) != tuple(self.key.shape[:2]):
            raise ShapeError(
                f"query {tuple(self.query.shape)} and key {tuple(self.key.shape)} differ in heads or head width"
            )

    @property
    def num_heads(self) -> int:
        """The number of heads, H."""
        return self.query.shape[0]

    @property
    def dim_head(self) -> int:
        """The width of one query/key head, d_k."""
        return self.query.shape[1]

    @property
    def dim_query_key(self) -> int:
        """The width of all query heads, H * d_k: a query/key projection of this width is exact."""
        return self.num_heads * self.dim_head

    @property
    def dim_value(self) -> int:
        """The width of the values over all key/value heads, H_k * d_v."""
        return self.value.shape[0] * self.value.shape[1]


def count_key_heads(num_heads: int, groups: Sequence[int] | None) -> int:
    """Return the number of key/value heads: one more than the highest index in `groups`."""
    return num_heads if groups is None else max(groups, default=-1) + 1


def kept_groups(groups: Sequence[int], kept: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return the key/value heads that stay when some heads are kept: those that are still used, numbered anew.

    Args:
        groups: the key/value head of every head.
        kept: indices of the heads that stay, ascending.

    Returns:
        The indices of the key/value heads that stay, and the groups of the heads that stay.
    """
    used = sorted({groups[head] for head in kept})
    return used, tuple(used.index(groups[head]) for head in kept)


def group_size(groups: Sequence[int]) -> int | None:
    """Return the number of heads per key/value head, if it is the same for all and they are consecutive; else None."""
    size = len(groups) // (max(groups) + 1) if groups else 1
    return size if all(key == head // size for head, key in enumerate(groups)) else None


@overload
def per_head(tensor: Tensor, heads: int) -> Tensor: ...
@overload
def per_head(tensor: None, heads: int) -> None: ...
def per_head(tensor: Tensor | None, heads: int) -> Tensor | None:
    """Split rows into heads: [H * d, ...] -> [H, d, ...], a view; None stays None."""
    return None if tensor is None else tensor.unflatten(0, (heads, -1))


def select_sites(available: Sequence[AnySite], names: str | Iterable[str] | None) -> list[AnySite]:
    """Pick sites by role or path, in model order.

    Args:
        available: all sites of the model.
        names: a role, a path, or several of them; None for all.

    Raises:
        ArgumentError: if a name is neither a role nor a path of this model, or nothing is named.
    """
    if names is None:
        return list(available)
    if not isinstance(names, Iterable):
        raise ArgumentError(f"sites {names!r} must be a role, a path or several of them")
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ArgumentError("sites is empty: name roles or paths, or pass None for all sites")
    for name in names:
        check_name(available, name)
    return [site for site in available if site.path in names or site.role in names]


def check_name(available: Sequence[Site], name: object) -> None:
    """Raise ArgumentError unless `name` is a role that this model has, or the path of one of its sites."""
    known = (*ROLES, *FEED_FORWARD_ROLES)
    roles = [role for role in known if any(site.role == role for site in available)]
    paths = [site.path for site in available]
    if name in roles or name in paths:
        return
    if name in FEED_FORWARD_ROLES or (name in ROLES and not set(roles) & set(ROLES)):
        raise ArgumentError(f"{name} is not a role that can be named here; these can: {', '.join(roles)}")
    if name in ROLES:
        raise ArgumentError(f"the model has no {name} attention; its roles: {', '.join(roles)}")
    raise ArgumentError(
        f"{name!r} is neither a role nor a path of this model{did_you_mean(str(name), roles + paths)}; "
        f"roles: {', '.join(roles)}; paths such as {paths[0]!r}"
    )
