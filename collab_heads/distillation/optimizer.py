"""Select and train the parameters of a distillation: the projections of changed sites, and nothing else."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.distillation.grids import TrainedGrid
from collab_heads.distillation.processes import Processes
from collab_heads.errors import ArgumentError
from collab_heads.layers.fused import whole_of
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.layers.removed import NoHeads
from collab_heads.layers.weight_grid import bits_of
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.refusals import check_feed_forwards, check_unshared


def trained_parameters(layers: OpenLayers, more: Mapping[str, nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of the projections of changed sites, feed-forward blocks included, by name.

    Weights on grids of few bits count as changed, with the biases beside them. Gates and alphas are left out, and so is
    what the user froze.

    Args:
        layers: the layers of the model.
        more: other parameters that are trained, by name.
    """
    model = layers.model
    sites = [site for site in layers.attention if site.path in layers.record.states]
    blocks = [block for block in layers.feed_forwards if block.path in layers.record.states]
    check_unshared(layers, [site for site in sites if site.num_heads], ("query", "key", "value", "output"))
    check_feed_forwards(model, [block for block in blocks if block.num_neurons])
    ours = {id(p) for site in sites for p in site_parameters(site)}
    ours |= {id(p) for block in blocks for module in block.modules for p in module.parameters()}
    on_grids = [module for module in model.modules() if bits_of(module)]
    ours |= {id(p) for module in on_grids for p in module.parameters(recurse=False)}
    ours |= {id(p) for p in (more or {}).values()}
    found = {name: p for name, p in model.named_parameters() if id(p) in ours and p.numel()}
    if not found and layers.record.states:
        raise ArgumentError(
            f"what was changed in this {type(model).__name__} has no weights left to train: "
            f"{', '.join(layers.record.states)}. Distillation trains what is left of changed sites alone"
        )
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
    few = {id(module.weight) for module in on_grids}
    for name, parameter in found.items():
        if id(parameter) in few and parameter.dtype != torch.float32:
            raise ArgumentError(
                f"{name} has few bits, which are kept in float32 alone, and is in {parameter.dtype}: load the model in "
                "float32"
            )
    return found


def site_parameters(site: OpenSite) -> Iterator[nn.Parameter]:
    """Yield the parameters of a site's projections, without those of gates and alphas."""
    inner = getattr(site.module, "query_key", None)
    modules = [] if isinstance(inner, NoHeads) else [*([inner] if site.is_swapped else site.projections), site.value]
    for module in modules:
        yield from whole_of(module).parameters()
    output = site.output
    yield from output.parameters(recurse=not isinstance(output, HeadOutputProjection))


@contextmanager
def trained_alone(model: PreTrainedModel, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Give only some parameters gradients, and restore all `requires_grad` and `grad` when the context ends.

    After an error the values of these parameters are restored, too.
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
    """Copy values into parameters, by name."""
    for name, parameter in trained.items():
        parameter.copy_(values[name])


WARM_UP = 20  # the learning rate rises over 1/20 of the steps
SMALLEST = 0.1  # least size of a tensor, as a share of the mean size of all, so that a tensor of zeros can learn
LARGEST_NORM = 1.0  # of the gradient
SCALE_RATE = 0.2  # of the learning rate, for scales of grids
SCALES = ".scales"  # ends the name of the scales of a weight
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


class MasterWeights:
    """The trained parameters, with float32 copies of those in half precision, and their AdamW without weight decay.

    A step of 0.1 % of a weight is lost in bfloat16, which has eight significant bits; such steps add up in the copy. So
    they do behind a weight on a grid.

    The learning rate of every tensor is relative to its root mean square. The factors of a decomposition differ in
    size, with a mixing of about 1 and a key of about 0.1: the same rate for all is too large for one or too small for
    the other.

    Args:
        trained: name -> parameter.
        learning_rate: the highest learning rate, relative to the root mean square of a tensor.
        steps: number of steps of the whole run.
        grids: name -> weight, for parameters that stay on grids.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        learning_rate: float,
        steps: int,
        grids: Mapping[str, TrainedGrid] = MappingProxyType({}),
    ):
        self.trained, self.grids = trained, grids
        self.masters: dict[str, Tensor] = {
            name: p.detach().float() if p.dtype.itemsize < 4 else p for name, p in trained.items() if name not in grids
        }
        self.learning_rate, self.steps = learning_rate, steps
        fused = all(p.device.type in ("cpu", "cuda") for p in trained.values())
        sizes = {name: size_of(master) for name, master in self.masters.items()}
        least = SMALLEST * sum(sizes.values()) / max(len(sizes), 1) or 1.0
        groups = [{"params": [master], "size": max(sizes[name], least)} for name, master in self.masters.items()]
        for name, grid in grids.items():
            groups += [{"params": [grid.codes], "size": size_of(grid.codes)}]
            groups += [{"params": [grid.scales], "size": SCALE_RATE * size_of(grid.scales)}]
            self.masters |= {name: grid.codes, f"{name}{SCALES}": grid.scales}
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0, fused=fused or None)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: a short rise, then half a cosine to 0."""
        rise = max(1, self.steps // WARM_UP)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))

    @torch.no_grad()
    def take_step(self, step: int, processes: Processes) -> None:
        """Take one step down the gradient, summed over processes, and clear the gradients."""
        for name, parameter in self.trained.items():
            dtype, gradient = self.masters[name].dtype, parameter.grad
            given = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.to(dtype)
            parameter.grad, given = None, processes.sum(given)
            if name in self.grids:
                self.grids[name].take(given)
            else:
                self.masters[name].grad = given
        torch.nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(step) * group["size"]
        self.adamw.step()
        self.adamw.zero_grad()
        self.show()

    def show(self) -> None:
        """Copy the float32 copies into the parameters, rounded where these lie on grids."""
        put_back(self.trained, {**self.masters, **{name: grid.shown() for name, grid in self.grids.items()}})

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, on the CPU, to be stored."""
        found = {f"weight/{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            found |= {f"{part}/{name}": self.adamw.state[master][part] for part in MOMENTS}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(state[f"weight/{name}"])
            moments = {part: state[f"{part}/{name}"].clone() for part in MOMENTS}
            self.adamw.state[master] = {
                part: moment if part == "step" and not self.adamw.defaults["fused"] else moment.to(master.device)
                for part, moment in moments.items()
            }
        self.show()


def size_of(tensor: Tensor) -> float:
    """Return the root mean square of a tensor."""
    return float(tensor.detach().square().mean().sqrt())
