"""Gates and alphas in a known state and heads removed from known places, for every test about heads.

Sites differ in the heads that they lose, the first site of every role loses all of them where it is asked for, open
gates are both whole and partial, and alphas are far from an identity.
"""

import torch
from model_inputs import cast
from model_runs import main_output, of_dtype, swap
from model_sizes import HEADS, KINDS, NARROW
from opening import alphas_in, gates_in

import collab_heads

ORIGINS = (None, *KINDS)  # the query/key projection that a model has before its heads change
LOG_ALPHAS = ((-3.0, 3.0, 1.0, 0.0), (1.0, -2.0, 0.5, -1.0), (-1.0, -2.0, 4.0, -0.5), (2.0, -1.0, 0.5, 1.0))
STATES = ("gated", "pruned", "both")


def change_queries(model, origin, dim=NARROW):
    """Give a model the query/key projections of an origin; None leaves its own."""
    if origin is not None:
        swap(model, origin, dim and dim[origin])


def adapter_sites(model):
    return collab_heads.get_adapter(model).sites(model)


def emptied(model) -> set[str]:
    """The paths of the first site of every role that has several."""
    found = {}
    for site in adapter_sites(model):
        found.setdefault(site.role, []).append(site.path)
    return {paths[0] for paths in found.values() if len(paths) > 1}


def gate(model, *, empty=True, **options) -> None:
    """Put learned gates on all heads and set them: some closed, some half open."""
    collab_heads.swap_to_gated(model, **options)
    closed = emptied(model) if empty else set()
    for index, (site, gates) in enumerate(gates_in(model)):
        values = [-1.0] * HEADS if site.path in closed else LOG_ALPHAS[index % len(LOG_ALPHAS)]
        gates.log_alpha.data.copy_(torch.tensor(values[: site.num_heads]))


@torch.no_grad()
def set_gates(projection, values) -> None:
    projection.gates.log_alpha.copy_(torch.tensor(values))


@torch.no_grad()
def mix(model) -> None:
    """Mix the heads of all sites that have two, by another random matrix at every site."""
    collab_heads.swap_to_alpha(model, sites=[site.path for site in adapter_sites(model) if site.num_heads > 1])
    for index, (site, mixing) in enumerate(alphas_in(model)):
        mixing.alpha.copy_(random_alpha(site.num_heads, index))


def random_alpha(num_heads, seed) -> torch.Tensor:
    """Neither near an identity nor symmetric; float64, so that no dtype holds all of its digits but that one."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_heads, num_heads, dtype=torch.float64, generator=generator)
    return torch.eye(num_heads, dtype=torch.float64) + noise / 2


def mixings(model) -> dict[str, torch.nn.Module]:
    """path of the site -> its alphas, where it has them: found by looking, not by the record."""
    found = {path: getattr(projection, "mixing", None) for path, projection in output_projections(model).items()}
    return {path: mixing for path, mixing in found.items() if mixing is not None}


def removal(model, *, empty=True) -> dict[str, list[int]]:
    """path -> heads to remove from a whole model: another one at every site, all at the first of every role."""
    closed = emptied(model) if empty else set()
    return {
        site.path: list(range(HEADS)) if site.path in closed else [index % HEADS]
        for index, site in enumerate(adapter_sites(model))
    }


def change_heads(model, state, *, empty=True) -> None:
    """Gates; or heads removed by gates; or heads removed by name and gates on those that are left."""
    if state == "both":
        collab_heads.prune_heads(model, heads=removal(model, empty=empty))
    gate(model, empty=empty and state != "both")
    if state == "pruned":
        collab_heads.prune_heads(model)


def changed(family, origin=None, state="pruned", *, empty=True, alphas=False, dtype=torch.float64):
    """A model of a family with its heads changed, and then mixed if it is asked for; state None changes no heads."""
    model = of_dtype(family.build(), dtype)
    change_queries(model, origin)
    if state is not None:
        change_heads(model, state, empty=empty)
    if alphas:
        mix(model)
    return model


def output_projections(model) -> dict[str, torch.nn.Module]:
    """path of the site -> its output projection."""
    adapter = collab_heads.get_adapter(model)
    return {site.path: adapter.output_projection(model, site) for site in adapter.sites(model)}


def projected(model, inputs) -> dict[str, list[torch.Tensor]]:
    """What the output projection of every site returns: path -> one tensor per call."""
    seen, handles = {}, []
    for path, projection in output_projections(model).items():
        seen[path] = []
        handles.append(projection.register_forward_hook(lambda m, i, o, path=path: seen[path].append(o)))
    with torch.no_grad():
        model(**cast(inputs, model.dtype))
    for handle in handles:
        handle.remove()
    return seen


def loss(model, inputs) -> torch.Tensor:
    """Something to differentiate."""
    result = model(**cast(inputs, model.dtype))
    return main_output(result).square().mean()
