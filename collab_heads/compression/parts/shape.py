"""The shape of a site, and a choice of smaller sizes for its parts."""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

from collab_heads.base.option_values import SITE_PARTS, SitePart
from collab_heads.fitting.kinds import FITS, kind_for
from collab_heads.model.open_layers import OpenFeedForward, OpenLayerSite, OpenSite
from collab_heads.model.site_size import FeedForwardGeometry, Geometry, TableGeometry
from collab_heads.sites.site import group_size
from collab_heads.sites.state import QueryKeyKind


@dataclass(frozen=True)
class Choice:
    """The chosen sizes of the parts of a site that become smaller; every other part stays as it is.

    Attributes:
        sizes: part -> size, in the order of the parts. Of heads it is their number. Of queries and keys it is the width
            of a head where the kind of projection divides it among the heads, else of all heads. Of values it is the
            width of a head, of neurons their number.
        bits: the bits of its weights on a grid; None where they stay floating-point numbers.
    """

    sizes: tuple[tuple[SitePart, int], ...] = ()
    bits: int | None = None

    @classmethod
    def of(cls, bits: int | None = None, **sizes: int | None) -> "Choice":
        """Make a choice of parts in their order; None leaves one as it is."""
        return cls(tuple((cast(SitePart, part), size) for part, size in sizes.items() if size is not None), bits)

    def get(self, part: SitePart) -> int | None:
        """Return the size of a part; None where it stays as it is."""
        return dict(self.sizes).get(part)

    @property
    def in_float(self) -> "Choice":
        """The same sizes, with weights that stay floating-point numbers."""
        return Choice(self.sizes)


UNCHANGED = Choice()


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a site of attention: its geometry, and the parts that may become smaller.

    Attributes:
        geometry: the present geometry.
        kind: the kind of the query/key projection that it gets.
        exact_kind: the kind of the projection that holds the stock weights unchanged.
        scale: the scale of its scores.
        parts: the parts that may become smaller.
        decodes: whether it belongs to a decoder, which is called for one token after the other.
        multiple_of: what widths that change are multiples of, over all heads.
        bits: the bits that weights may have on a grid.
    """

    geometry: Geometry
    kind: QueryKeyKind
    exact_kind: QueryKeyKind
    scale: float
    parts: tuple[SitePart, ...] = SITE_PARTS
    decodes: bool = False
    multiple_of: int = 1
    bits: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        site: OpenSite,
        kind: QueryKeyKind,
        parts: tuple[SitePart, ...] = SITE_PARTS,
        multiple_of: int = 1,
        bits: tuple[int, ...] = (),
    ) -> "AttentionShape":
        """Read the shape of a site; queries and keys stay if its family cannot narrow them to the kind."""
        exact, can_narrow = site.adapter.exact_kind, FITS[kind].capability in site.adapter.capabilities
        return cls(
            Geometry.of(site),
            kind_for(site.adapter, kind) if can_narrow else exact,
            exact,
            site.adapter.scale(site.module) if site.query_key is None else site.query_key.state.scale,
            tuple(part for part in parts if part != "query_key" or can_narrow),
            decodes=site.role != "enc-self",
            multiple_of=multiple_of,
            bits=bits,
        )

    @property
    def heads_per_key(self) -> int | None:
        """Return how many heads share a key head and are removed together; None if it differs: then all heads stay."""
        return 1 if self.geometry.groups is None else group_size(self.geometry.groups)


@dataclass(frozen=True)
class FeedForwardShape:
    """The shape of a feed-forward block, as `AttentionShape`."""

    geometry: FeedForwardGeometry
    parts: tuple[SitePart, ...] = SITE_PARTS
    multiple_of: int = 1
    bits: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        block: OpenFeedForward,
        parts: tuple[SitePart, ...] = SITE_PARTS,
        multiple_of: int = 1,
        bits: tuple[int, ...] = (),
    ) -> "FeedForwardShape":
        """Read the shape of a block."""
        return cls(FeedForwardGeometry.of(block), parts, multiple_of, bits)


@dataclass(frozen=True)
class TableShape:
    """The shape of a table, as `AttentionShape`; it has no part that becomes smaller."""

    geometry: TableGeometry
    bits: tuple[int, ...]
    parts: ClassVar[tuple[SitePart, ...]] = ()
    multiple_of: ClassVar[int] = 1


Shape: TypeAlias = AttentionShape | FeedForwardShape | TableShape


def shape_of(
    site: OpenLayerSite,
    kind: QueryKeyKind,
    parts: tuple[SitePart, ...] = SITE_PARTS,
    multiple_of: int = 1,
    bits: tuple[int, ...] = (),
) -> Shape:
    """Read the shape of a site of attention or of a feed-forward block."""
    if isinstance(site, OpenSite):
        return AttentionShape.of(site, kind, parts, multiple_of, bits)
    return FeedForwardShape.of(site, parts, multiple_of, bits)
