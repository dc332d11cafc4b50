"""Swap a tiny model, run it, and read what it gives."""

import pickle
from collections.abc import Iterable

import pytest
import torch
from model_inputs import cast
from model_sizes import EXACT, NARROW_VALUES, WITH_VALUES
from torch.nn.utils import parametrize
from transformers import (
    PreTrainedModel,
)

import collab_heads
from collab_heads.layers.query_key import is_swapped as is_swapped


def swap(model: PreTrainedModel, kind: str, dim=None, **more):
    """The swap that the contract is about; of a kind with values these are as wide as before where `dim` is None.

    Where heads cannot share queries and keys, or those cannot be narrower, values stand in for them. How near a narrow
    projection comes is not asked: the fit stops early.
    """
    more.setdefault("tol", 0.05)
    can = collab_heads.get_adapter(model).capabilities
    if "collaborative" not in can and not ("per_head" in can and kind.removesuffix("+values") == "per_head"):
        kind = "stock+values"
    if kind in WITH_VALUES:
        kind = kind.removesuffix("+values")
        more["dim_value"] = 1.0 if dim is None else NARROW_VALUES / EXACT
        kind, dim = ("shared", None) if kind == "stock" else (kind, 1.0 if dim is None else dim)
    return collab_heads.swap_to_collaborative(model, dim_shared_query_key=dim, kind=kind, **more)


def output(model: PreTrainedModel, inputs: dict) -> torch.Tensor:
    """The first tensor that the model returns: logits or hidden states."""
    with torch.no_grad():
        return main_output(model(**cast(inputs, model.dtype)))


def main_output(result) -> torch.Tensor:
    """The logits of what a model returns, or its hidden states."""
    return next(result[name] for name in ("logits", "logits_per_text", "last_hidden_state") if name in result)


# Role -> what models call its attention maps.
MAPS = {
    "enc-self": ("attentions", "encoder_attentions"),
    "dec-self": ("attentions", "decoder_attentions"),
    "dec-enc": ("cross_attentions",),
}


def attention_maps(result, roles: Iterable[str]) -> dict[str, tuple[torch.Tensor, ...]]:
    """role -> the attention maps among what a model returns, in the order of the calls: in CLIP images come first."""
    if "text_model_output" in result:
        stacks = {"enc-self": result.vision_model_output.attentions}
        text = "dec-self" if "dec-self" in roles else "enc-self"
        return stacks | {text: stacks.get(text, ()) + result.text_model_output.attentions}
    return {role: next(result[name] for name in MAPS[role] if name in result) for role in roles}


def of_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a dtype, but for the frequencies of its positions, as `from_pretrained` leaves them."""
    frequencies = {name: tensor for name, tensor in model.named_buffers() if "inv_freq" in name}
    stored = set(model.state_dict())  # ESM stores them
    model.to(dtype)
    for name, tensor in frequencies.items():
        path, _, buffer = name.rpartition(".")
        model.get_submodule(path).register_buffer(buffer, tensor, persistent=name in stored)
    return model


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its tensors where torch would put them, so that two with the same bits compute the same bits.

    Loaded tensors lie in the file's memory, at any address; there, some processors sum in another order.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    """The model after a way through pickle; torch does not pickle weight norms (wav2vec2's position embedding)."""
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        pytest.skip("the stock model does not pickle")
    return pickle.loads(pickle.dumps(model))


def set_backend(model: PreTrainedModel, backend: str) -> None:
    """Choose the attention backend, in inner stacks too (transformers 5.17 does not reach T5's).

    A model that knows the eager one only keeps it.
    """
    if backend == "flex_attention":  # after other compiled models sizes are dynamic, and inductor writes wrong C++
        torch.compiler.reset()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._supports_sdpa:
            module.set_attn_implementation(backend)


def sites(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """path -> attention module."""
    found = collab_heads.get_adapter(model).sites(model)
    return {site.path: model.base_model.get_submodule(site.path) for site in found}


def swapped(model: PreTrainedModel) -> list[bool]:
    """Return for each site whether its queries and keys are collaborative."""
    return [is_swapped(module) for module in sites(model).values()]
