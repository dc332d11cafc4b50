"""swap_to_gated: put gates on heads, to be learned or fixed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import is_number
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.errors import ArgumentError, ConfigError, ModelStateError
from collab_heads.heads.report import GatedSite, GateReport
from collab_heads.heads.selection import alive_choice
from collab_heads.layers.gates import HeadGates
from collab_heads.layers.output import gates_of
from collab_heads.model.apply_state import apply_state
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_outputs
from collab_heads.sites.site import AttentionSite, select_sites
from collab_heads.sites.state import GateState


@checking_arguments
def swap_to_gated(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    sites: str | Iterable[str] | None = None,
    alive_heads: Mapping | None = None,
    temperature: float = 0.33,
    stretch: tuple[float, float] = (-0.1, 1.1),
    init_log_alpha: float | None = None,
) -> GateReport:
    """Put Hard Concrete gates between the heads of a model and their output projections, in place.

    Without `init_log_alpha` the outputs of the model in evaluation do not change. Train with a `HeadPenalty`, then call
    `prune_heads`. Gates are trainable also where the rest of the model is frozen, and are in float32 also where it is
    in half precision. On an error the model is left unchanged.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> report = swap_to_gated(model, alive_heads={"enc-self": [[1, 1, 0, 1], [1, 0, 0, 1]]})
        >>> [site.open for site in report.sites]  # closed heads pass exactly 0
        [(0, 1, 3), (0, 3)]

    Args:
        model: a supported transformers model, original or collaborative, whole or pruned.
        adapter: the family's adapter, as class or instance; None looks it up by model type. Everything else that is
            done with the model, loading included, uses the adapter that `register` made known.
        sites: roles or paths; None for all sites that have heads.
        alive_heads: a fixed configuration instead of learned gates: role -> a list of 0 and 1 per layer, or path -> one
            list. Only the sites that it names are gated.
        temperature: of the samples in training.
        stretch: (gamma, zeta), the interval to which samples are stretched before they are clipped to [0, 1].
        init_log_alpha: the initial value of learned gates, as a logit; None for one at which all are open: 2.5, or
            more where temperature and stretch need it.

    Returns:
        Heads and open heads per site; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is wrapped.
        ArgumentError: on an invalid role, path, configuration or number.
        ModelStateError: if a site has gates already, or its output projection is not a plain Linear.

    Source: Voita et al. 2019, arXiv:1905.09418, section 5.1.
    """
    state = checked_state("learned" if alive_heads is None else "fixed", temperature, stretch, init_log_alpha)
    if alive_heads is not None and sites is not None:
        raise ArgumentError("alive_heads names its sites itself: leave sites out")
    with opened(model, adapter, "gated", changes=True) as layers:
        available = [site.site for site in layers.with_heads]
        if not available:
            raise ModelStateError("no site of the model has heads left to gate: load the original checkpoint again")
        alive = {} if alive_heads is None else alive_choice(available, alive_heads)
        named = {site.path for site in select_sites(available, sites)} if alive_heads is None else alive
        chosen = [site for site in layers.with_heads if site.path in named]
        check_outputs(layers, chosen)
        for site in chosen:
            if gates_of(site.output) is not None:
                raise ModelStateError(f"{site.path} has gates already: prune_heads or fold_heads them first")
        states = {site.path: replace(site.state, gates=state) for site in chosen}
        # Nothing has changed up to here; nothing can fail from here on.
        for site in chosen:
            apply_state(site, states[site.path])
            gates = cast(HeadGates, gates_of(site.output))
            with torch.no_grad():
                if alive:
                    gates.alive.copy_(torch.tensor(alive[site.path]))
                elif init_log_alpha is not None:
                    gates.log_alpha.fill_(init_log_alpha)
        layers.write(states)
        return report_gates(layers)


def checked_state(
    kind: Literal["learned", "fixed"], temperature: Any, stretch: Any, init_log_alpha: object
) -> GateState:
    """Return the state of new gates.

    Raises:
        ArgumentError: on an invalid number, which is named.
    """
    try:
        state = GateState(kind, temperature, stretch)
    except ConfigError as error:
        raise ArgumentError(str(error).removeprefix("gates.")) from error
    if init_log_alpha is not None and not (is_number(init_log_alpha) and abs(init_log_alpha) < 1e4):
        raise ArgumentError(f"init_log_alpha {init_log_alpha!r} must be a number")
    return state


def gated_sites(
    model: PreTrainedModel, adapter: AttentionAdapter, *, learned: bool = False
) -> list[tuple[AttentionSite, HeadGates]]:
    """Return the sites with gates, or only those with learned gates, in model order, together with their gates."""
    found = [(site, gates_of(adapter.output_projection(model, site))) for site in adapter.sites(model)]
    return [(site, gates) for site, gates in found if gates is not None and (gates.state.is_learned or not learned)]


def learn_as(model: PreTrainedModel, adapter: AttentionAdapter, kind: Literal["learned", "subset"]) -> None:
    """Set the kind of all learned gates of a model: "learned" or "subset"."""
    layers, changed = OpenLayers.of(model, adapter), {}
    for site, gates in gates_in(layers):
        if gates.state.is_learned:
            gates.state, gates.draw = replace(gates.state, kind=kind), None
            changed[site.path] = replace(site.state, gates=gates.state)
    layers.write(changed)


def gates_in(layers: OpenLayers) -> list[tuple[OpenSite, HeadGates]]:
    """Return the sites that have gates, in model order, and their gates."""
    found = [(site, gates_of(site.output)) for site in layers.attention]
    return [(site, gates) for site, gates in found if gates is not None]


@torch.no_grad()
def report_gates(layers: OpenLayers) -> GateReport:
    """Return which heads are open now, by the rule of evaluation; sites whose gates have no weights are left out."""
    sites = []
    for site, gates in gates_in(layers):
        if any(each.is_meta for each in gates.state_dict().values()):
            continue
        sites.append(
            GatedSite(
                path=site.path,
                role=site.role,
                heads=site.num_heads,
                open=tuple(site.head_numbers[i] for i in gates.is_open().nonzero().flatten().tolist()),
                expected_open=float(gates.open_probability().sum()),
                decided=int(gates.is_decided().sum()),
            )
        )
    return GateReport(tuple(sites))
