"""Return the names of the modules that PEFT should adapt in a model whose attention was changed."""

from collections.abc import Sequence
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice, is_list
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.layers.fused import whole_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.model.open_layers import OpenLayers, OpenSite

Part = Literal["query", "key", "value", "output"]
PARTS: tuple[Part, ...] = ("query", "key", "value", "output")


@checking_arguments
def peft_targets(
    model: PreTrainedModel,
    parts: str | Sequence[str] = ("query", "value"),
) -> list[str]:
    """Return the `target_modules` for a LoRA of attention, for stock and changed models alike.

        peft.get_peft_model(model, peft.LoraConfig(target_modules=peft_targets(model)))

    PEFT's own default targets are the names of stock projections, for the model types that it knows. In collaborative
    sites queries and keys have other names. PEFT's defaults then skip them silently; PEFT raises an error only if it
    finds none of its names, or if it does not know the model type.

    Args:
        model: a transformers model, changed or not; it is not changed.
        parts: the parts of attention to adapt: "query", "key", "value" and "output", one or several. Where one
            projection makes query, key and value (GPT-2), it is adapted for any of the three.

    Returns:
        Paths of modules, in model order, each once. Sites without heads have none.

    Raises:
        ArgumentError: on an unknown part, or if there is nothing to adapt.
        ModelStateError: if an output projection holds gates or alphas, which LoRA would bypass.
        UnsupportedModelError: if there is no adapter for the model.
    """
    named: list[str] = list(parts) if is_list(parts) else [parts]  # type: ignore[list-item]
    for part in named:
        check_choice("part", part, PARTS)
    paths = {module: path for path, module in model.named_modules()}
    modules = [
        module
        for site in OpenLayers.of(model, get_adapter(model)).with_heads
        for part in PARTS
        if part in named
        for module in [module_of(site, part)]
        if module is not None
    ]
    if not modules:
        raise ArgumentError(
            f"there is nothing to adapt: no site of the model has a {' or '.join(named) or 'part'} left"
        )
    return list(dict.fromkeys(paths[module] for module in modules))


def module_of(site: OpenSite, part: str) -> nn.Module:
    """Return the Linear or Conv1D that makes a part of a site, alone or together with other parts."""
    if part == "output":
        if isinstance(site.output, HeadOutputProjection):
            raise ModelStateError(
                f"the output projection of {site.path} holds gates or alphas, which LoRA would pass by: prune_heads "
                "or fold_heads first, or leave the part out"
            )
        return site.output
    if part == "value":
        return whole_of(site.value)
    if site.query_key is not None:
        return site.query_key.shared_query if part == "query" else site.query_key.shared_key
    query, key = site.projections
    return whole_of(query if part == "query" else key)
