"""What `collab-heads inspect` finds: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collab_heads.text import text_table


@dataclass(frozen=True)
class FamilyFacts:
    """What works with a type of model.

    Attributes:
        model_type: as its config names it.
        adapter: the class that knows the family.
        roles: that its attention can have.
        capabilities: what can be done with it.
        why_not: what cannot, and why.
    """

    model_type: str
    adapter: str
    roles: Sequence[str]
    capabilities: Sequence[str]
    why_not: Mapping[str, str]

    def to_dict(self) -> dict:
        """Ready for JSON."""
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
    """What works with all types of models.

    Attributes:
        families: one per type.
    """

    families: Sequence[FamilyFacts]

    def to_dict(self) -> dict:
        """Ready for JSON."""
        return {each.model_type: each.to_dict() for each in self.families}

    def __str__(self) -> str:
        rows = [(each.model_type, ", ".join(each.roles), ", ".join(each.capabilities)) for each in self.families]
        return text_table(("model type", "roles", "can"), rows, f"{len(rows)} types; what cannot: inspect TYPE")


@dataclass(frozen=True)
class SiteFacts:
    """A module of attention.

    Attributes:
        path, role, layer: the site.
        kind: of its query/key projection; "stock" for that of the family.
        heads: that it has.
        heads_before: that it had before any was removed.
        key_heads: heads of keys and values.
        kept: the original numbers of its heads.
        query_key: width of its queries and keys, over all heads.
        value: width of its values, over all key heads.
        gates: their kind; None without.
        open: the original numbers of heads whose gates are open; None without gates, or where no weights are here.
        alphas: whether its heads are mixed.
        parameters: of its four projections.
        cache: elements cached per token; 0 where nothing is.
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
        """Its line of the table."""
        heads = str(self.heads) if self.heads == self.heads_before else f"{self.heads} of {self.heads_before}"
        gates = self.gates or ""
        if self.open is not None:
            gates += f", {len(self.open)} open"
        changes = ", ".join(filter(None, (f"gates ({gates})" if gates else "", "alphas" if self.alphas else "")))
        numbers = self.key_heads, self.query_key, self.value, f"{self.parameters:,}", self.cache or "-"
        return self.role, self.path, self.kind, heads, *map(str, numbers), changes or "-"


@dataclass(frozen=True)
class ModelFacts:
    """What is in a model.

    Attributes:
        model: its name or folder.
        model_class: as its config names it.
        family: what works with it.
        sites: its modules of attention, in order.
        parameters: of the whole model.
    """

    model: str
    model_class: str
    family: FamilyFacts
    sites: Sequence[SiteFacts]
    parameters: int

    @property
    def totals(self) -> dict[str, int]:
        """Over all sites: heads, parameters of attention, elements cached per token."""
        names = ("heads", "heads_before", "parameters", "cache")
        return {name: sum(getattr(site, name) for site in self.sites) for name in names}

    def to_dict(self) -> dict:
        """Ready for JSON."""
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
        return f"{self.model}: {self.model_class}\n{self.family}\n\n{table}"
