"""Attention maps of a pruned model with empty maps in the places of removed heads, as viewers of attention expect."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.contract.registry import get_adapter, head_numbers
from collab_heads.errors import ArgumentError, ShapeError
from collab_heads.model.refusals import check_wrapper
from collab_heads.sites.record import CollabConfig
from collab_heads.sites.site import Role


@checking_arguments
def maps_in_place(
    model: PreTrainedModel, attentions: Sequence[Tensor], *, role: Role | None = None
) -> tuple[Tensor, ...]:
    """Return attention maps with as many heads in every layer as the original has.

    Layers of a pruned model differ in their number of heads. Viewers such as bertviz want the same number in each:
    removed heads get a map of zeros, and all heads stand at their original numbers.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from collab_heads import prune_heads
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> report = prune_heads(model, heads={"encoder.layer.0.attention.self": [1]})
        >>> model.set_attn_implementation("eager")
        >>> output = model(torch.arange(25)[None], output_attentions=True)
        >>> [maps.shape[1] for maps in output.attentions]
        [3, 4]
        >>> [maps.shape[1] for maps in maps_in_place(model, output.attentions)]
        [4, 4]

    Args:
        model: a supported transformers model, original or changed.
        attentions: the maps of each layer, [B, H, T, S], as the model returns them with `output_attentions=True`.
        role: whose maps they are: "enc-self", "dec-self" or "dec-enc"; None for a model with one role.

    Returns:
        The maps of each layer, [B, original H, T, S].

    Raises:
        ArgumentError: if the model has no such role, or several and none is named, or a map is no tensor.
        ShapeError: if there are not as many maps as layers, or not as many heads in one as the model has.
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
    """
    check_wrapper(model)
    adapter, states = get_adapter(model), CollabConfig.on(model).sites
    sites, numbers = adapter.sites(model), head_numbers(model, adapter)
    roles = list(dict.fromkeys(site.role for site in sites))
    if role is None and len(roles) > 1:
        raise ArgumentError(
            f"this {type(model).__name__} has maps of {', '.join(roles)}: say with role= which these are"
        )
    if role is not None:
        check_choice("role", role, roles)
    chosen = [site for site in sites if role in (None, site.role)]
    if len(chosen) == 1:  # a module that serves several layers
        chosen *= len(attentions)
    if len(chosen) != len(attentions):
        raise ShapeError(f"attentions has the maps of {len(attentions)} layers, and the model has {len(chosen)}")
    if others := [maps for maps in attentions if not isinstance(maps, Tensor)]:
        raise ArgumentError(f"attentions holds {others[0]!r:.80}: pass the maps of each layer, tensors")
    placed = []
    for layer, (site, maps) in enumerate(zip(chosen, attentions, strict=True)):
        kept = numbers[site.path]
        if maps.ndim != 4 or maps.shape[1] != len(kept):
            raise ShapeError(
                f"attentions[{layer}] has the shape {tuple(maps.shape)}, and {site.path} has {len(kept)} heads: "
                f"expected (batch, {len(kept)}, tokens, tokens)"
            )
        total = states[site.path].num_heads if site.path in states else site.num_heads
        whole = maps.new_zeros(maps.shape[0], total, *maps.shape[2:])
        whole[:, list(kept)] = maps
        placed.append(whole)
    return tuple(placed)
