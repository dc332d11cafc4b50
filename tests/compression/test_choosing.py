"""Few tokens for the neurons are named before anything is measured."""

from compressing import first_site

from collab_heads.compression.choosing import warn_of_few_tokens
from collab_heads.compression.measures import Workload
from collab_heads.compression.parts.shape import AttentionShape, FeedForwardShape
from collab_heads.model.site_size import FeedForwardGeometry
from families import FAMILIES


def test_few_tokens_for_the_neurons_are_named(warnings_logged):
    work = {"wide": Workload(1, 99, 99, 99), "narrow": Workload(1, 99, 99, 99), "heads": Workload(1, 9, 9, 9)}
    shapes = {"heads": AttentionShape.of(first_site(FAMILIES["bert"].build()), "per_head")}
    shapes |= {
        name: FeedForwardShape(FeedForwardGeometry(neurons, (8, 8), 1, (0, False)))
        for name, neurons in (("wide", 13), ("narrow", 12))
    }
    warn_of_few_tokens({name: shape for name, shape in shapes.items() if name != "wide"}, work)
    assert not warnings_logged.messages
    warn_of_few_tokens(shapes, work)
    (said,) = warnings_logged.messages
    assert said.startswith("99 tokens are few for blocks of 13 neurons") and "pass at least 104," in said
