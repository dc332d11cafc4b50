"""What a distillation trains: the projections of the sites that were changed, and nothing else."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.distillation.processes import Processes
from collab_heads.errors import ArgumentError
from collab_heads.layers.fused import whole_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.layers.removed import NoHeads
from collab_heads.model.open_site import OpenSite, open_sites
from collab_heads.model.refusals import check_unshared
from collab_heads.sites.record import CollabConfig


def trained_parameters(model: PreTrainedModel, adapter: AttentionAdapter) -> dict[str, nn.Parameter]:
    """The parameters of the query/key, value and output projections of changed sites, by name; no gates, no alphas.

    What the user froze stays frozen.

    Raises:
        ArgumentError: if no site was changed, all is frozen, or one is in a dtype that cannot be trained.
        SwapError: if a projection of a changed site is another one's, too.
    """
    changed = CollabConfig.on(model).sites
    sites = [site for site in adapter.sites(model) if site.path in changed]
    with_heads = [site for site in sites if site.num_heads]
    check_unshared(model, adapter, with_heads, ("query", "key", "value", "output"))
    ours = {id(p) for site in open_sites(model, adapter, sites) for p in site_parameters(site)}
    found = {name: p for name, p in model.named_parameters() if id(p) in ours}
    if not found:
        raise ArgumentError(
            f"nothing in this {type(model).__name__} was changed, so there is nothing to train: change it first "
            "(swap_to_collaborative, prune_heads), or load what you saved with collab_heads imported"
        )
    found = {name: p for name, p in found.items() if p.requires_grad}
    if not found:
        raise ArgumentError(
            f"everything that was changed in this {type(model).__name__} is frozen, so there is nothing to train: call "
            "model.requires_grad_(True), or set it for what is to be trained"
        )
    for name, parameter in found.items():
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ArgumentError(
                f"{name} is in {parameter.dtype}, in which small gradients are lost: distill in float32 or bfloat16 "
                "(model.float()), and convert the model after it"
            )
    return found


def site_parameters(site: OpenSite) -> Iterator[nn.Parameter]:
    """The parameters of a site's projections; those of gates and alphas stay as they are."""
    inner = getattr(site.module, "query_key", None)
    modules = [] if isinstance(inner, NoHeads) else [*([inner] if site.is_swapped else site.projections), site.value]
    for module in modules:
        yield from whole_of(module).parameters()
    output = site.output
    yield from output.parameters(recurse=not isinstance(output, HeadOutputProjection))


@contextmanager
def trained_alone(model: PreTrainedModel, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let only some parameters have gradients; what had gradients, and which, is as before afterwards.

    After an error their values are, too.
    """
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    values = {name: parameter.detach().clone() for name, parameter in trained.items()}
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in trained.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    except BaseException:
        put_back(trained, values)
        raise
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


@torch.no_grad()
def put_back(trained: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set parameters to what they were, or are to be."""
    for name, parameter in trained.items():
        parameter.copy_(values[name])


WARM_UP = 20  # the rate rises over one of so many steps
SMALLEST = 0.1  # a tensor counts as no smaller than this share of the mean size of all, so that one of zeros can learn
LARGEST_NORM = 1.0  # of the gradient
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


class MasterWeights:
    """The trained parameters, with float32 copies of those in half precision, and their AdamW without weight decay.

    A step of 1 % of a weight is lost in bfloat16, which has eight bits: it adds up in the copy.

    Every tensor's rate is relative to its root mean square. The factors of a decomposition have sizes of their own, a
    mixing of about 1 and a key of about 0.1: one rate for all harms the one, or does not move the other.

    Args:
        trained: name -> parameter.
        learning_rate: at its highest, relative to the root mean square of a tensor.
        steps: of the whole run.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], learning_rate: float, steps: int):
        self.trained = trained
        self.masters: dict[str, Tensor] = {
            name: p.detach().float() if p.dtype.itemsize < 4 else p for name, p in trained.items()
        }
        self.learning_rate, self.steps = learning_rate, steps
        fused = all(p.device.type in ("cpu", "cuda") for p in trained.values())
        sizes = [float(master.detach().square().mean().sqrt()) for master in self.masters.values()]
        least = SMALLEST * sum(sizes) / len(sizes) or 1.0
        groups = [
            {"params": [master], "size": max(size, least)}
            for master, size in zip(self.masters.values(), sizes, strict=True)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0, fused=fused or None)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: a short rise, then half a cosine to 0."""
        rise = max(1, self.steps // WARM_UP)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))

    @torch.no_grad()
    def take_step(self, step: int, processes: Processes) -> None:
        """One step down the gradient, summed over processes; the gradients are gone after it."""
        for name, master in self.masters.items():
            gradient = self.trained[name].grad
            given = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
            self.trained[name].grad = None
            master.grad = processes.sum(given)
        torch.nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(step) * group["size"]
        self.adamw.step()
        self.adamw.zero_grad()
        self.show()

    def show(self) -> None:
        """Put the float32 copies into the parameters."""
        put_back(self.trained, self.masters)

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, named, to be stored."""
        found = {f"weight/{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            found |= {f"{part}/{name}": self.adamw.state[master][part] for part in MOMENTS}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, master in self.masters.items():
            master.copy_(state[f"weight/{name}"])
            moments = {part: state[f"{part}/{name}"].clone() for part in MOMENTS}
            self.adamw.state[master] = {
                part: moment if part == "step" and not self.adamw.defaults["fused"] else moment.to(master.device)
                for part, moment in moments.items()
            }
        self.show()
