"""The sites and tables of a model that a plan chooses for, before any is measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.option_values import SitePart
from collab_heads.compression.measures import SiteUse, Workload, count_work
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.shape import AttentionShape, Choice, FeedForwardShape, Shape, TableShape, shape_of
from collab_heads.compression.parts.table import PARTS, choices_of, resized
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.heads.prune import check_prunable
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenPart, OpenSite, OpenTable
from collab_heads.model.refusals import check_feed_forwards, check_swappable, check_values
from collab_heads.model.site_size import TableGeometry
from collab_heads.sites.site import select_sites

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
NAMED = 3  # sites in a message
TOKENS_PER_NEURON = 8  # MiniLM at half: with 9 its error is 2 % above that with 37, with 2 it is 16 % above


@dataclass(frozen=True, eq=False)
class Choosing:
    """The sites and tables that a plan chooses for.

    Attributes:
        layers: the layers of the model.
        options: the options of the plan.
        sites: the sites that may change.
        tables: the weights outside of the sites that may get few bits.
        shapes: path -> the present shape of a site, or of a table.
        work: path -> work of the site on the batches; nothing where there are none.
    """

    layers: OpenLayers
    options: PlanOptions
    sites: Sequence[OpenLayerSite]
    tables: Sequence[OpenTable]
    shapes: Mapping[str, Shape]
    work: Mapping[str, Workload]

    @classmethod
    def of(cls, layers: OpenLayers, options: PlanOptions, batches: Sequence[Mapping] | None = None) -> "Choosing":
        """Choose what may change in a model, and count its work on batches, if any; errors are those of `plan`."""
        parts, bits, table_bits = options.counted_parts, options.grid_bits, options.grid_table_bits
        sites = choose_sites(layers, options.sites, parts, has_bits=bool(bits))
        tables = layers.tables if table_bits and options.sites is None else []
        shapes: dict[str, Shape] = {
            site.path: shape_of(site, options.kind, parts, options.multiple_of, bits) for site in sites
        }
        shapes |= {table.path: TableShape(TableGeometry.of(table), table_bits) for table in tables}
        work = {} if batches is None else count_work(layers.model, batches, sites)
        return cls(layers, options, sites, tables, shapes, work)

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.layers.model

    @property
    def changing(self) -> list[OpenPart]:
        """The sites and tables that may change."""
        return [*self.sites, *self.tables]

    @property
    def uses(self) -> dict[str, SiteUse]:
        """The use of each site, and of each table, by path."""
        none = Workload(0, 0, 0, 0)
        return {p.path: SiteUse(self.shapes[p.path], p.role, self.work.get(p.path, none)) for p in self.changing}

    @cached_property
    def choices(self) -> dict[str, list[Choice]]:
        """Path -> all choices of a site; the site as it is comes last."""
        return {path: list(choices_of(shape)) for path, shape in self.shapes.items()}

    @property
    def blocks(self) -> list[OpenFeedForward]:
        """The feed-forward blocks that may change."""
        return [site for site in self.sites if isinstance(site, OpenFeedForward) and len(self.choices[site.path]) > 1]

    @property
    def attention(self) -> list[OpenSite]:
        """The sites of attention."""
        return [site for site in self.sites if isinstance(site, OpenSite)]

    def neurons(self, block: OpenFeedForward) -> list[int]:
        """Return the number of neurons with every choice of a block."""
        return [resized(self.shapes[block.path], each).neurons for each in self.choices[block.path]]

    def heads(self, site: OpenSite) -> list[tuple[int, int, int]]:
        """Return the number of heads, their width and that of their values with every choice of a site."""
        found = [resized(self.shapes[site.path], choice) for choice in self.choices[site.path]]
        return [(each.num_heads, each.query_key_width // max(each.num_heads, 1), each.dim_value) for each in found]

    def everything(self) -> dict[str, list[int]]:
        """Return the indices of all choices of every site."""
        return {path: [*range(len(each))] for path, each in self.choices.items()}


def choose_sites(
    layers: OpenLayers, names: str | Iterable[str] | None, parts: tuple[SitePart, ...], *, has_bits: bool = False
) -> list[OpenLayerSite]:
    """Return the named sites that have some of the parts, if all of them can be changed, in model order.

    Every site has weights, and counts if they may have few bits.

    Raises:
        ArgumentError: if a name is neither a role nor a path of the model.
        UnsupportedModelError: if only feed-forward blocks may change, and the adapter does not say where they are.
        ModelStateError: if a site has gates or alphas, or cannot be changed safely.
    """
    shapes = list(dict.fromkeys(PARTS[name].shape for name in parts))
    kinds = {AttentionShape: OpenSite, FeedForwardShape: OpenFeedForward}
    if not (parts or has_bits):  # of tables alone
        return []
    wanted = (OpenSite, OpenFeedForward) if has_bits else tuple(kinds[shape] for shape in shapes)
    if wanted == (OpenFeedForward,) and not layers.adapter.feed_forwards:
        raise UnsupportedModelError(
            f"{type(layers.adapter).__name__} does not say where feed-forward blocks are (`feed_forwards`)"
        )
    available = [site for site in layers.in_order if isinstance(site, OpenSite) or site.num_neurons]
    named = f"parts={', '.join(parts)}"
    if not any(isinstance(site, wanted) for site in available):
        left = {AttentionShape: "heads", FeedForwardShape: "neurons"}
        raise ModelStateError(
            f"the model has no {' or '.join(left[shape] for shape in shapes)} left: there is nothing to compress "
            f"({named})"
        )
    chosen = {site.path for site in select_sites([site.site for site in available], names)}
    sites = [site for site in available if site.path in chosen and isinstance(site, wanted)]
    if not sites:
        raise ArgumentError(f"sites={names!r} and {named} leave nothing to compress: no such site has such a part")
    attention = [site for site in sites if isinstance(site, OpenSite)]
    check_prunable(layers, attention)
    if parts:
        check_swappable(layers, [site for site in attention if not site.is_swapped])
        check_values(layers, attention)
    for site in attention:
        if isinstance(site.output, HeadOutputProjection):
            what = "gates" if site.output.gates is not None else "alphas"
            raise ModelStateError(
                f"{site.path} has {what}, whose heads are still being chosen: prune_heads(model) first, or "
                "fold_heads(model) to keep all heads"
            )
    check_feed_forwards(layers.model, [site for site in sites if isinstance(site, OpenFeedForward)])
    return sites


def warn_of_other_widths(shapes: Mapping[str, Shape], multiple_of: int) -> None:
    """Warn of sites that have widths now which are not multiples: what stays of them keeps its width."""
    others = {path: [n for n in shape.geometry.inner_widths if n % multiple_of] for path, shape in shapes.items()}
    if found := [f"{path} ({', '.join(map(str, dict.fromkeys(n)))})" for path, n in others.items() if n]:
        logger.warning(
            "multiple_of=%d: %s of the %d sites have other widths now, and keep them unless they become smaller: %s%s",
            *(multiple_of, len(found), len(shapes), ", ".join(found[:NAMED]), ", …" if len(found) > NAMED else ""),
        )


def warn_of_few_tokens(shapes: Mapping[str, Shape], work: Mapping[str, Workload]) -> None:
    """Warn if the batches hold few tokens for the neurons of some block."""
    blocks = {path: shape.geometry.neurons for path, shape in shapes.items() if isinstance(shape, FeedForwardShape)}
    tokens, neurons = min(
        ((work[path].queries, count) for path, count in blocks.items()),
        key=lambda each: each[0] / each[1],
        default=(1, 0),
    )
    if tokens < TOKENS_PER_NEURON * neurons:
        logger.warning_once(
            f"{tokens:,} tokens are few for blocks of {neurons:,} neurons, which lose more on other texts than they "
            f"need to: pass at least {TOKENS_PER_NEURON * neurons:,}, of all kinds of text that the model will read"
        )
