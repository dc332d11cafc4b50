"""swap_to_alpha: heads as linear combinations of heads, to be learned."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ModelStateError, NonFiniteError
from collab_heads.heads.report import AlphaReport, MixedSite
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.output import alphas_of
from collab_heads.model.apply_state import apply_state
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_outputs
from collab_heads.sites.site import AttentionSite, select_sites


@checking_arguments
def swap_to_alpha(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    sites: str | Iterable[str] | None = None,
) -> AlphaReport:
    """Make the heads of each site linear combinations of its heads, before W_O, in place: Z'_i = sum_j alpha_ij Z_j.

    Every alpha starts as the identity, so that the outputs of the model do not change by a single bit. Train with a
    `HeadPenalty`, which can delay the training of the alphas until the other weights have settled, and can increase
    their nuclear norms. `fold_heads` makes a stock checkpoint of the result. Alphas are trainable also where the rest
    of the model is frozen. On an error the model is left unchanged.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> report = swap_to_alpha(model)
        >>> model.encoder.layer[0].attention.output.dense.mixing.alpha.shape  # (H, H), an identity at first
        torch.Size([4, 4])

    Args:
        model: a supported transformers model, original or collaborative, gated, pruned.
        adapter: the family's adapter, as class or instance; None looks it up by model type. Everything else that is
            done with the model, loading included, uses the adapter that `register` made known.
        sites: roles or paths; None for all sites that have heads.

    Returns:
        Heads, nuclear norm and distance from the identity per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on a role or path that the model does not have.
        ModelStateError: if a site has alphas already, one head, or an output projection that is not a plain Linear.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers).
    """
    with opened(model, adapter, "alpha", changes=True) as layers:
        available = [site.site for site in layers.with_heads]
        if not available:
            raise ModelStateError("no site of the model has heads left to mix: load the original checkpoint again")
        named = {site.path for site in select_sites(available, sites)}
        chosen = [site for site in layers.with_heads if site.path in named]
        check_outputs(layers, chosen)
        for site in chosen:
            if alphas_of(site.output) is not None:
                raise ModelStateError(
                    f"{site.path} has alphas already: fold_heads them first, or leave the site out with sites="
                )
            if site.num_heads < 2:
                raise ModelStateError(
                    f"{site.path} has a single head, nothing to mix it with: leave the site out with sites="
                )
        states = {site.path: replace(site.state, alphas=True) for site in chosen}
        # Nothing has changed up to here; nothing can fail from here on.
        for site in chosen:
            apply_state(site, states[site.path])
        layers.write(states)
        return report_alphas(layers)


def mixed_sites(model: PreTrainedModel, adapter: AttentionAdapter) -> list[tuple[AttentionSite, HeadAlphas]]:
    """Return the sites with alphas, in model order, and their alphas."""
    found = [(site, alphas_of(adapter.output_projection(model, site))) for site in adapter.sites(model)]
    return [(site, alphas) for site, alphas in found if alphas is not None]


@torch.no_grad()
def report_alphas(layers: OpenLayers) -> AlphaReport:
    """Return norms and distances of the alphas as they are now; NonFiniteError names the site with NaN or inf."""
    sites = []
    for site in layers.attention:
        alphas = alphas_of(site.output)
        if alphas is None or alphas.alpha.is_meta:
            continue
        alpha = alphas.alpha.float().cpu()
        if not torch.isfinite(alpha).all():
            raise NonFiniteError(f"{site.path}: its alphas contain NaN or inf")
        distance = float((alpha - torch.eye(site.num_heads)).norm())
        norm = float(torch.linalg.matrix_norm(alpha, "nuc"))
        sites.append(MixedSite(site.path, site.role, site.num_heads, nuclear_norm=norm, distance=distance))
    return AlphaReport(tuple(sites))
