"""Open the layers of a model for a test, with the adapter of its family, and see what it says of its sites."""

from collab_heads import get_adapter
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.gating import gated_sites
from collab_heads.model.open_layers import OpenLayers
from collab_heads.sites.record import CollabConfig


def layers_of(model):
    return OpenLayers.of(model, get_adapter(model))


def gates_in(model, **options):
    """The sites with gates, and these."""
    return gated_sites(model, get_adapter(model), **options)


def alphas_in(model):
    """The sites with alphas, and these."""
    return mixed_sites(model, get_adapter(model))


def record_of(model):
    """Return the record of sites and blocks in the config of a model."""
    return CollabConfig.of(model.config)
