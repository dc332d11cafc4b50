"""Which heads change places: rules over the scores of the heads of a stack.

A stack is all layers of one role, each a list of places; count is the number of pairs. Higher scores are stronger; of
equal ones the earlier place is weaker.

Source: Azov and Landau 2020 (MHR-NLP-Transformers), dynamic swapping; "soft" and "local" as described there, not as
computed (its code takes the indices of the one layer for the other, and its "local" leaves the layer).
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from collab_heads.errors import ArgumentError
from collab_heads.rotation.slots import Slot

Stack = Sequence[Sequence[Slot]]
Scores = Mapping[Slot, float]
Chosen = list[tuple[Slot, Slot]]
Layer = TypeVar("Layer")


def weakest_first(slots: Iterable[Slot], scores: Scores) -> list[Slot]:
    """Places by ascending score."""
    return sorted(slots, key=scores.__getitem__)


def hard(stack: Stack, scores: Scores, count: int, seed: str) -> Chosen:
    """The strongest heads of the stack with its weakest."""
    ranked = weakest_first(chain(*stack), scores)
    return list(zip(ranked[::-1][:count], ranked[:count], strict=True))


def soft(stack: Stack, scores: Scores, count: int, seed: str) -> Chosen:
    """The weakest heads of layer i with the weakest of layer L - 1 - i; a middle layer stays."""
    ranked = [weakest_first(layer, scores)[:count] for layer in stack]
    half = len(stack) // 2
    layers = zip(ranked[:half], ranked[::-1][:half], strict=True)
    return [pair for low, high in layers for pair in zip(low, high, strict=True)]


def local(stack: Stack, scores: Scores, count: int, seed: str) -> Chosen:
    """In every layer its weakest heads with its strongest."""
    ranked = [weakest_first(layer, scores) for layer in stack]
    return [pair for layer in ranked for pair in zip(layer[:count], layer[::-1][:count], strict=True)]


def at_random(stack: Stack, scores: Scores, count: int, seed: str) -> Chosen:
    """Pairs of the stack that share no head; scores do not matter."""
    drawn = random.Random(seed).sample(list(chain(*stack)), 2 * count)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


POLICIES: dict[str, Callable[[Stack, Scores, int, str], Chosen]] = {
    "hard": hard,
    "soft": soft,
    "local": local,
    "random": at_random,
}
UNRANKED = ("random",)  # policies that need no scores


def outermost(layers: Sequence[Layer], pairs: int | None) -> Sequence[Layer]:
    """So many first layers, and as many last ones: the first pairs of "soft"; None for all."""
    return layers if pairs is None else [*layers[:pairs], *layers[-pairs:]]


def check_pairs(policy: str, role: str, stack: Stack, count: int, layer_pairs: int | None = None) -> None:
    """Raise ArgumentError if a policy would need more heads, or layers, than there are: each is in one pair at most."""
    pools = {f"all {len(stack)} layers": sum(map(len, stack))}
    if policy == "local":
        pools = {f"layer {index}": len(layer) for index, layer in enumerate(stack)}
    if policy == "soft":
        half = len(stack) // 2
        if not half:
            raise ArgumentError(f"the policy 'soft' pairs layers, {role} attention has one site: take 'local'")
        if layer_pairs is not None and layer_pairs > half:
            raise ArgumentError(
                f"layer_pairs {layer_pairs} is more than the {half} that the {len(stack)} {role} layers make: leave it "
                "out for all of them"
            )
        taken = outermost(list(enumerate(stack)), layer_pairs or half)
        pools = {f"layer {index}": len(layer) for index, layer in taken}
    for where, heads in pools.items():
        if count > heads // 2:
            raise ArgumentError(
                f"count {count} is more than half of the {heads} {role} heads of {where}: the policy {policy!r} takes "
                f"up to {heads // 2}; choose fewer, another policy, or other roles"
            )
