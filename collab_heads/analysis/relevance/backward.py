"""Make a model's forward pass conservative, so that input times gradient is layer-wise relevance propagation.

The model's outputs stay the same, bit for bit; its graph becomes that of a function that is linear in what flows
through it. At any cut through the model, input times gradient then sums to the explained output, less the contribution
of the biases. The rules:

- Attention weights are constants: relevance flows through values only, never through queries and keys.
- Norms: the scale is a constant. A LayerNorm is linear then, its mean included; its bias absorbs relevance, as every
  other bias does. An RMS norm has neither.
- Activations with f(0) = 0 (GELU in all its forms, SiLU, tanh, Mish, ...): y = x * (f(x) / x), the factor a constant;
  where x = 0 nothing passes. For ReLU and other piecewise linear ones that is the ordinary gradient, which they keep.
  Activations with f(0) != 0 (sigmoid) keep it, too, and do not conserve.
- Gated feed-forward layers (T5 1.1: act(W_0 x) * W_1 x): the activated branch only weighs, as attention does, so it is
  a constant, and relevance flows through the other one.

Source: attention and norms: Ali, Schnake, Eberle, Montavon, Mueller, Wolf 2022, arXiv:2202.07304; activations: the
    identity rule of Achtibat et al. 2024, arXiv:2402.05602; gated layers: as attention, our choice.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.utils import ModelOutput

from collab_heads.base.progress import progress_bar
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.fused import FusedPart
from collab_heads.layers.query_key import QueryKey
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import input_device, opened
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import each_batch, evaluating, naming_batch

Rule = Callable[[Any, Tensor, Tensor], Tensor]  # module, its input, its output -> the same output

# By their names in transformers: ReLU and its like conserve by their own gradient, the others have f(0) != 0.
_KEEP_THEIR_GRADIENT = ("relu", "leaky_relu", "prelu", "linear", "sigmoid", "laplace", "sqrtsoftplus")
_NAMED: list[Any] = [
    each[0] if isinstance(each, tuple) else each for name, each in ACT2CLS.items() if name not in _KEEP_THEIR_GRADIENT
]
ACTIVATIONS: tuple[type[nn.Module], ...] = tuple({*_NAMED, nn.GELU, nn.SiLU, nn.Tanh, nn.Mish})
# The same where a model calls a function: classification heads of RoBERTa, BART and T5, RoBERTa's language models.
FUNCTIONS = frozenset({torch.tanh, Tensor.tanh, F.gelu, F.silu, F.mish, F.hardswish})
# Functions that only weigh their own argument: ESM writes its GELU out, x * (1 + erf(x / sqrt(2))) / 2.
WEIGHTS = frozenset({torch.erf, Tensor.erf})


class Gate(torch.autograd.Function):
    """An elementwise y = f(x) with the gradient of x * (y / x), where y / x is a constant factor."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        """Return `y`, of the shape of `x`."""
        ctx.save_for_backward(x, y)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times y / x, and 0 where x = 0: there is no relevance to pass on."""
        x, y = ctx.saved_tensors
        return (gradient * (y / x).masked_fill_(x == 0, 0.0)).to(x.dtype), None


class Standardise(torch.autograd.Function):
    """y = (x - mean(x)) * weight * scale + bias over the last dimensions, with a constant scale in its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, factor: Tensor, dims: int) -> Tensor:
        """Return `y`; factor is weight * scale, dims the number of normalised dimensions."""
        ctx.save_for_backward(factor)
        ctx.dims, ctx.dtype = tuple(range(-dims, 0)), x.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of x: the mean is a projection, its transpose is itself."""
        gradient = gradient * ctx.saved_tensors[0]
        return (gradient - gradient.mean(ctx.dims, keepdim=True)).to(ctx.dtype), None, None, None


def by_ratio(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Apply the rule of activations, and of RMS norms: their y / x is weight * scale."""
    return Gate.apply(x, y.detach())


def below_all_sites(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Apply no rule: such norms are among the first convolutions of audio models, which relevance does not reach."""
    if x.requires_grad:
        raise UnsupportedModelError(f"{type(module).__name__}: a norm that relevance propagation has no rule for")
    return y


def layer_norm(module: nn.LayerNorm, x: Tensor, y: Tensor) -> Tensor:
    dims = tuple(range(-len(module.normalized_shape), 0))
    values = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(values.var(dims, correction=0, keepdim=True) + module.eps)
    if module.weight is not None:
        factor = factor * module.weight.detach()
    return Standardise.apply(x, y.detach(), factor, len(dims))


def constant(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y.detach()


class GatedFunctions(TorchFunctionMode):
    """A mode in which activations that are called as functions follow the rule of activations."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function in WEIGHTS:
            return output.detach()
        if function in FUNCTIONS:
            x = args[0] if args else kwargs["input"]
            return Gate.apply(x, output.detach())
        return output


@contextmanager
def conservative(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's forward passes build conservative graphs while the context is open; see the module for the rules.

    This works with every attention backend, and for changed models (collaborative, gated, mixed, pruned) as for stock
    ones. Outputs are the same, bit for bit. The model should be in evaluation mode: otherwise dropout is part of what
    is explained. Gradients of half-precision models have that precision; `model.float()` makes them exact.

    The rules hold for forward passes only: compute the value to explain, and gradients, after closing the context.

    Args:
        model: a supported transformers model; all hooks are removed afterwards, also on an error.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it has a norm without a rule.

    Source: Ali et al. 2022, arXiv:2202.07304.
    """
    check_wrapper(model)
    rules = rules_of(model, get_adapter(model))
    handles = []
    try:
        for module, rule in rules.items():
            handles.append(module.register_forward_hook(hook_of(rule)))
        with GatedFunctions():
            yield
    finally:
        for handle in handles:
            handle.remove()


def rules_of(model: PreTrainedModel, adapter: AttentionAdapter) -> dict[nn.Module | FusedPart, Rule]:
    """Return the rule of every module whose graph changes; raise UnsupportedModelError for a norm without one."""
    rules: dict[nn.Module | FusedPart, Rule] = {}
    scaling: tuple[type[nn.Module], ...] = ACTIVATIONS + adapter.rms_norms
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            rules[module] = layer_norm
        elif isinstance(module, scaling):
            rules[module] = by_ratio
        elif isinstance(module, nn.GroupNorm):
            rules[module] = below_all_sites
        elif is_norm(path, module):
            raise UnsupportedModelError(
                f"{path} is a {type(module).__name__}, a norm that relevance propagation has no rule for: if it only "
                f"scales, name its class in rms_norms of {type(adapter).__name__}"
            )
    # last: what is constant has no other rule
    for site in OpenLayers.of(model, adapter).with_heads:
        rules |= dict.fromkeys(score_projections(site), constant)
    for module in model.modules():
        for kind, name in adapter.gated.items():
            if isinstance(module, kind):
                rules[getattr(module, name)] = constant
    return rules


def is_norm(path: str, module: nn.Module) -> bool:
    """Return True if a module is a norm by its name.

    Norms of weights and batch norms do not count, nor do stacks of layers that are named after a norm (wav2vec2).
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or ".parametrizations." in path:
        return False
    return type(module).__name__.endswith("Norm") and not list(module.children())


def score_projections(site: OpenSite) -> Sequence[nn.Module | FusedPart]:
    """Return all projections through which the attention weights of a site depend on its inputs."""
    if site.is_swapped:
        return [each for each in cast(QueryKey, site.module.query_key).modules() if isinstance(each, nn.Linear)]
    return list(site.projections)


def hook_of(rule: Rule):
    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return rule(module, inputs[0], output)

    return hook


def explain_batches(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    batches: Iterable[Mapping],
    see: Callable[[Mapping, ModelOutput], None],
    what: str = "propagating relevance",
    cut: Callable[[Mapping], Iterable[Mapping]] = lambda batch: (batch,),
) -> None:
    """Run the model on every batch with a conservative graph; only one batch and its graph is held at a time.

    Args:
        model: the model; it runs as in `explaining`, so hooks must mark by `leaf` where graphs begin.
        adapter: its adapter.
        batches: input dicts as the model takes them; any iterable, read once.
        see: called with the inputs, on the model's device, and the model's outputs; it takes the gradients.
        what: the label of the progress bar.
        cut: batch -> the portions of it to run one after the other.
    """
    total = operator.length_hint(batches) or None
    with opened(model, adapter, of="model"), explaining(model):
        for index, batch in enumerate(progress_bar(each_batch(batches), total=total, desc=what)):
            inputs = {k: v.to(input_device(model)) if isinstance(v, Tensor) else v for k, v in batch.items()}
            for portion in cut(inputs):
                see(portion, run(model, adapter, portion, index))  # no name keeps the graph while the next one is built


def run(model: PreTrainedModel, adapter: AttentionAdapter, inputs: Mapping, index: int) -> ModelOutput:
    with conservative(model), naming_batch(model, index, inputs):
        return model(**{**inputs, "return_dict": True})


@contextmanager
def explaining(model: PreTrainedModel) -> Iterator[None]:
    """Run the model in evaluation mode with gradients, but not of its parameters.

    Only tensors that a hook makes a leaf have a gradient. Training modes and `requires_grad` of the parameters are
    restored, and nothing accumulates in them. Gradient checkpointing has no effect: it needs training mode.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def leaf(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is part of a graph, else the same values as the start of one."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
