"""The facts that `inspect` returns: for people (`str`) and for machines (`to_dict`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_heads.base.report import Cell, Report, table_of
from collab_heads.heads.report import AlphaReport, GateReport

# what the toolkit can do with attention and feed-forward blocks -> in words
IN_WORDS = {
    "collaborative": "queries and keys that heads share",
    "per_head": "narrower queries and keys",
    "values": "narrower values",
    "prune": "fewer heads",
    "neurons": "fewer neurons",
    "gated": "gates",
    "alpha": "mixed heads",
}


@dataclass(frozen=True)
class FamilyFacts(Report):
    """The facts about a type of model: the roles of its attention, and what the toolkit can do with it.

    Attributes:
        model_type: as its config names it.
        adapter: name of the adapter's class.
        roles: the roles that its attention can have.
        capabilities: the operations that the toolkit supports.
        why_not: unsupported operation -> the reason.
    """

    model_type: str
    adapter: str
    roles: Sequence[str]
    capabilities: Sequence[str]
    why_not: Mapping[str, str]

    def lines(self) -> list[str]:
        return [
            f"{self.model_type}: attention of the roles {', '.join(self.roles)} ({self.adapter})",
            f"possible: {in_words(self.capabilities) or 'nothing'}",
            *(f"not possible: {IN_WORDS[name]}: {why}" for name, why in self.why_not.items()),
        ]


def in_words(capabilities: Sequence[str]) -> str:
    return ", ".join(words for name, words in IN_WORDS.items() if name in capabilities)


@dataclass(frozen=True)
class FamilyList(Report):
    """The facts about all types of models.

    Attributes:
        families: one per type.
    """

    ENTRIES = "families"
    families: Sequence[FamilyFacts]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts by model type."""
        return {each.model_type: each.to_dict() for each in self.families}

    def columns(self) -> dict[str, Cell]:
        return {
            "model type": "{.model_type}",
            "roles": lambda family: ", ".join(family.roles),
            "possible": lambda family: in_words(family.capabilities),
        }

    def closing(self) -> str:
        return f"{len(self.families)} types; inspect TYPE says what is not possible, and why"


@dataclass(frozen=True)
class SiteFacts:
    """The facts about one attention module.

    Attributes:
        path, role, layer: the site.
        kind: the kind of its query/key projection; "stock" for that of the family.
        heads: the number of its heads.
        heads_before: the number of its heads before any was removed.
        key_heads: the number of key/value heads.
        kept: the original numbers of its heads.
        query_key: width of its queries and keys, over all heads.
        value: width of its values, over all key/value heads.
        gates: the kind of its gates; None if it has none.
        open: the original numbers of heads whose gates are open; None without gates, or if their weights are not in a
            local folder.
        alphas: whether its heads are mixed.
        parameters: of its four projections.
        cache: elements cached per token; 0 outside of decoders.
    """

    path: str
    role: str
    layer: int
    kind: str
    heads: int
    heads_before: int
    key_heads: int
    kept: Sequence[int]
    query_key: int
    value: int
    gates: str | None
    open: Sequence[int] | None
    alphas: bool
    parameters: int
    cache: int

    @property
    def changes(self) -> str:
        """Gates and alphas, in words; "-" without them."""
        gates = (self.gates or "") + ("" if self.open is None else f", {len(self.open)} open")
        return ", ".join([f"gates ({gates})"] * bool(gates) + ["alphas"] * self.alphas) or "-"


@dataclass(frozen=True)
class BlockFacts:
    """The facts about one feed-forward block.

    Attributes:
        path, role, layer: the block.
        neurons: the number of its neurons.
        neurons_before: the number of its neurons before any was removed.
        parameters: of its projections.
    """

    path: str
    role: str
    layer: int
    neurons: int
    neurons_before: int
    parameters: int


@dataclass(frozen=True)
class ModelFacts(Report):
    """The facts about a model.

    Attributes:
        model: its name or folder.
        model_class: name of its class.
        family: the facts about its type.
        sites: its attention modules, in order.
        blocks: its feed-forward blocks, in order; none if the adapter does not say where they are.
        gates: the gates of its heads; no sites where there are none, or a name on the Hub was given.
        alphas: its alphas, likewise.
        parameters: of the whole model.
        vocabulary: the tokens "before" and "after" the vocabulary was trimmed; None if it was not.
    """

    TOTALS = ("totals",)
    model: str
    model_class: str
    family: FamilyFacts
    sites: Sequence[SiteFacts]
    blocks: Sequence[BlockFacts]
    gates: GateReport
    alphas: AlphaReport
    parameters: int
    vocabulary: Mapping[str, int] | None = None

    @property
    def totals(self) -> dict[str, int]:
        """Return sums over sites (heads, parameters, elements cached per token) and over feed-forward blocks."""
        names = ("heads", "heads_before", "parameters", "cache")
        found = {name: sum(getattr(site, name) for site in self.sites) for name in names}
        found |= {name: sum(getattr(block, name) for block in self.blocks) for name in ("neurons", "neurons_before")}
        return found | {"feed_forward": sum(block.parameters for block in self.blocks)}

    def lines(self) -> list[str]:
        tables = [[f"{self.model}: {self.model_class}", str(self.family)], super().lines(), self.about_blocks()]
        tables += [[str(report)] for report in (self.gates, self.alphas) if report.sites]
        if self.vocabulary is not None:
            tables.append([f"vocabulary: {self.vocabulary['after']:,} of {self.vocabulary['before']:,} tokens"])
        return ["\n\n".join("\n".join(lines) for lines in tables if lines)]

    def columns(self) -> dict[str, Cell]:
        columns: dict[str, Cell] = {
            "role": "{.role}",
            "site": "{.path}",
            "query/key kind": "{.kind}",
            "heads": lambda site: of_before(site.heads, site.heads_before),
            "key heads": "{.key_heads}",
            "query/key width": "{.query_key}",
            "value width": "{.value}",
            "parameters": "{.parameters:,}",
            "cache/token": lambda site: str(site.cache or "-"),
            "gates, alphas": "{.changes}",
        }
        says_something = {
            "query/key kind": any(site.kind != "stock" for site in self.sites),
            "key heads": any(site.key_heads != site.heads for site in self.sites),
            "cache/token": any(site.cache for site in self.sites),
            "gates, alphas": any(site.changes != "-" for site in self.sites),
        }
        return {name: cell for name, cell in columns.items() if says_something.get(name, True)}

    def closing(self) -> str:
        totals, share = self.totals, self.totals["parameters"] / self.parameters
        heads = of_before(totals["heads"], totals["heads_before"], " heads")
        cache = f", {totals['cache']:,} elements cached per token" if totals["cache"] else ""
        return f"{heads}, {totals['parameters']:,} parameters of attention ({share:.0%} of {self.parameters:,}){cache}"

    def about_blocks(self) -> list[str]:
        if not self.blocks:
            return []
        columns: dict[str, Cell] = {
            "role": "{.role}",
            "block": "{.path}",
            "neurons": lambda block: of_before(block.neurons, block.neurons_before),
            "parameters": "{.parameters:,}",
        }
        neurons, before, count = (self.totals[name] for name in ("neurons", "neurons_before", "feed_forward"))
        last = f"{of_before(f'{neurons:,}', f'{before:,}', ' neurons')}, {count:,} parameters of feed-forward blocks"
        return [table_of(columns, self.blocks, f"{last} ({count / self.parameters:.0%})")]


def of_before(now: int | str, before: int | str, what: str = "") -> str:
    return f"{now}{what}" if now == before else f"{now}{what} of {before}"
