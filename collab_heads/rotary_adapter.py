"""What families with rotary positions have in common: what works, what does not, and why."""

from collections.abc import Mapping
from typing import ClassVar

from collab_heads.attention_adapter import AttentionAdapter, Capability
from collab_heads.state import QueryKeyKind


class RotaryAdapter(AttentionAdapter):
    """Positions are rotations between projection and score, so heads cannot share one query/key projection.

    Everything else works: narrower heads keep some of their frequency pairs. Where the stock forward cannot run what is
    left (narrower heads, key heads used by unequal numbers of heads), a replacement class does, with a projection of
    the kind "rotary".
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({"per_head", "gated", "alpha", "prune", "values"})
    why_not: ClassVar[Mapping[Capability, str]] = {
        "collaborative": "rotary positions come between its projections and the score, so heads cannot share one "
        'query/key projection; narrower queries and keys of each head (kind="per_head"), narrower values '
        "(dim_value=), fewer heads and compress() work"
    }
    exact_kind: ClassVar[QueryKeyKind] = "rotary"
    positions: ClassVar[str | None] = "position_embeddings"


class NormedRotaryAdapter(RotaryAdapter):
    """Rotary positions of queries and keys that are normed per head: those cannot become narrower either.

    The norm divides a head by the size of all its dimensions together. Without some of them the others come out larger
    by a factor that differs from token to token, which no weights can undo.
    """

    capabilities: ClassVar[frozenset[Capability]] = RotaryAdapter.capabilities - {"per_head"}
    why_not: ClassVar[Mapping[Capability, str]] = {
        "collaborative": "rotary positions come between its projections and the score, so heads cannot share one "
        "query/key projection; narrower values (dim_value=), fewer heads and compress() work",
        "per_head": "its queries and keys are normed per head, over all dimensions of a head: without some of them the "
        "norm of the others would be another for every token; narrower values (dim_value=), fewer heads and compress() "
        "work",
    }
