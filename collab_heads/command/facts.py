"""The facts that `collab-heads inspect` shows: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collab_heads.base.display import text_table


@dataclass(frozen=True)
class FamilyFacts:
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

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}: {self.adapter}, {', '.join(self.roles)}",
            f"can: {', '.join(self.capabilities) or 'nothing'}",
            *(f"cannot: {name}: {why}" for name, why in self.why_not.items()),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class FamilyList:
    """The facts about all types of models.

    Attributes:
        families: one per type.
    """

    families: Sequence[FamilyFacts]

    def to_dict(self) -> dict:
        """Return the facts by model type."""
        return {each.model_type: each.to_dict() for each in self.families}

    def __str__(self) -> str:
        rows = [(each.model_type, ", ".join(each.roles), ", ".join(each.capabilities)) for each in self.families]
        return text_table(("model type", "roles", "can"), rows, f"{len(rows)} types; what cannot: inspect TYPE")


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

    def row(self) -> tuple[str, ...]:
        """Return the site's row of the table."""
        heads = str(self.heads) if self.heads == self.heads_before else f"{self.heads} of {self.heads_before}"
        gates = self.gates or ""
        if self.open is not None:
            gates += f", {len(self.open)} open"
        changes = ", ".join(filter(None, (f"gates ({gates})" if gates else "", "alphas" if self.alphas else "")))
        numbers = self.key_heads, self.query_key, self.value, f"{self.parameters:,}", self.cache or "-"
        return self.role, self.path, self.kind, heads, *map(str, numbers), changes or "-"


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

    def row(self) -> tuple[str, ...]:
        """Return the block's row of the table."""
        is_whole = self.neurons == self.neurons_before
        neurons = str(self.neurons) if is_whole else f"{self.neurons} of {self.neurons_before}"
        return self.role, self.path, neurons, f"{self.parameters:,}"


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model.

    Attributes:
        model: its name or folder.
        model_class: name of its class.
        family: the facts about its type.
        sites: its attention modules, in order.
        blocks: its feed-forward blocks, in order; none if the adapter does not say where they are.
        parameters: of the whole model.
        vocabulary: the tokens "before" and "after" the vocabulary was trimmed; None if it was not.
    """

    model: str
    model_class: str
    family: FamilyFacts
    sites: Sequence[SiteFacts]
    blocks: Sequence[BlockFacts]
    parameters: int
    vocabulary: Mapping[str, int] | None = None

    @property
    def totals(self) -> dict[str, int]:
        """Return sums over sites (heads, parameters, elements cached per token) and over feed-forward blocks."""
        names = ("heads", "heads_before", "parameters", "cache")
        found = {name: sum(getattr(site, name) for site in self.sites) for name in names}
        found |= {name: sum(getattr(block, name) for block in self.blocks) for name in ("neurons", "neurons_before")}
        return found | {"feed_forward": sum(block.parameters for block in self.blocks)}

    def to_dict(self) -> dict:
        """Return the facts and the totals."""
        return {**dataclasses.asdict(self), "totals": self.totals}

    def __str__(self) -> str:
        header = ("role", "site", "kind", "heads", "key heads", "query/key", "value", "parameters", "cache", "on heads")
        totals, share = self.totals, self.totals["parameters"] / self.parameters
        heads = f"{totals['heads']} heads" + (
            f" of {totals['heads_before']}" if totals["heads"] < totals["heads_before"] else ""
        )
        cache = f", {totals['cache']:,} elements cached per token" if totals["cache"] else ""
        last = f"{heads}, {totals['parameters']:,} parameters of attention ({share:.0%} of {self.parameters:,}){cache}"
        table = text_table(header, [site.row() for site in self.sites], last)
        return f"{self.model}: {self.model_class}\n{self.family}\n\n{table}" + self.table_of_blocks() + self.trimmed()

    def trimmed(self) -> str:
        """Return a sentence on the vocabulary, if it was trimmed."""
        if self.vocabulary is None:
            return ""
        return f"\n\nvocabulary: {self.vocabulary['after']:,} of {self.vocabulary['before']:,} tokens"

    def table_of_blocks(self) -> str:
        """Return the table of the feed-forward blocks, if there are any."""
        if not self.blocks:
            return ""
        neurons, before, count = (self.totals[name] for name in ("neurons", "neurons_before", "feed_forward"))
        last = f"{neurons:,} neurons" + (f" of {before:,}" if neurons < before else "")
        last += f", {count:,} parameters of feed-forward blocks ({count / self.parameters:.0%})"
        return "\n\n" + text_table(
            ("role", "block", "neurons", "parameters"), [block.row() for block in self.blocks], last
        )
