"""What families with rotary positions have in common: what works, what does not, and why."""

from collections.abc import Mapping
from typing import ClassVar

from collab_heads.attention_adapter import AttentionAdapter, Capability
from collab_heads.state import QueryKeyKind


class RotaryAdapter(AttentionAdapter):
    """Positions are rotations between projection and score, so heads cannot share one query/key projection.

    Everything else works. Where the stock forward cannot run what is left (narrower values, key heads used by unequal
    numbers of heads), a replacement class does, with a projection of the kind "rotary".
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({"gated", "alpha", "prune", "values"})
    why_not: ClassVar[Mapping[Capability, str]] = {
        "collaborative": "rotary positions come between its projections and the score, so heads cannot share one "
        "query/key projection; narrower values (dim_value=), fewer heads and compress() work"
    }
    exact_kind: ClassVar[QueryKeyKind] = "rotary"
