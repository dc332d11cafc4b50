"""Open the layers of a model for a test, with the adapter of its family."""

from collab_heads import get_adapter
from collab_heads.model.open_layers import OpenLayers


def layers_of(model):
    return OpenLayers.of(model, get_adapter(model))
