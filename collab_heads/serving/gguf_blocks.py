"""The blocks of a model as llama.cpp computes them: their sizes, and their weights by its names for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from collab_heads.contract.model_forms import GgufForm
from collab_heads.layers.fused import whole_of
from collab_heads.layers.layout import weight_of
from collab_heads.layers.weight_grid import BLOCK, bits_of
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite
from collab_heads.serving.gguf_checks import adds, head_width, is_there


@dataclass
class Block:
    """A block of the model as llama.cpp computes it: its sizes, and what of it is zeros that llama.cpp needs."""

    heads: int = 0
    key_heads: int = 0
    neurons: int = 0
    notes: list[str] = field(default_factory=list)
    weights: dict[str, tuple[Tensor, int | None]] = field(default_factory=dict)  # name -> weight, bits of its grid

    def add(self, name: str, module: Any, weight: Any, bias: Any) -> None:
        """Add a linear map: its weights [out, in], as they apply, its bias, and the module that has its grid."""
        self.weights[f"{name}.weight"] = weight, bits_of(whole_of(module))
        if bias is not None:
            self.weights[f"{name}.bias"] = bias, None

    def join(self, names: Sequence[str], joined: str) -> None:
        """Put linear maps below each other, under another name; they have one grid, since they are parts of a whole."""
        for kind in ("weight", "bias"):
            parts = [self.weights.pop(f"{name}.{kind}") for name in names]
            self.weights[f"{joined}.{kind}"] = torch.cat([tensor for tensor, _ in parts]), parts[0][1]


def blocks_of(layers: OpenLayers, form: GgufForm) -> Iterator[Block]:
    """Yield the blocks that compute something.

    llama.cpp reads the width of heads in the first block, and leaves out the attention of a block without neurons:
    such blocks get a head, or neurons, of zeros.
    """
    is_first, sites, base = True, layers.attention, layers.model.base_model
    for site, block in zip(sites, layers.feed_forwards, strict=True):
        if is_there(site, block, form) or (is_first and site is sites[-1]):
            found = Block()
            if site.num_heads:
                add_heads(found, site, form)
            elif is_first or adds(site):
                add_empty_head(found, site, form)
            add_neurons(found, block)
            for name, path in form.norms.items():
                if found.heads if name.startswith("attn") else found.neurons:
                    norm = base.get_submodule(path.format(site.site.layer))
                    found.add(name, norm, norm.weight, getattr(norm, "bias", None))
            is_first = False
            yield found


def add_heads(found: Block, site: OpenSite, form: GgufForm) -> None:
    """Add the heads of a site, with their gates and alphas in the output projection."""
    found.heads, found.key_heads = site.num_heads, max(site.groups) + 1
    query, key = cast(Any, site.projections)
    for name, module, heads in (("attn_q", query, found.heads), ("attn_k", key, found.key_heads)):
        weight, bias = module.weight, module.bias
        if form.neighbours:
            weight, bias = neighbours(weight, heads), None if bias is None else neighbours(bias, heads)
        found.add(name, module, weight, bias)
    found.add("attn_v", site.value, site.value.weight, site.value.bias)
    if form.fused is not None:
        found.join(("attn_q", "attn_k", "attn_v"), form.fused)
    found.add("attn_output", site.output, site.output_weight(), site.output.bias)


def add_empty_head(found: Block, site: OpenSite, form: GgufForm) -> None:
    """Add a head of zeros, and the bias of the output, which a site without heads still adds."""
    rows = torch.zeros(head_width(site, form), cast(Any, site.output).out_features, dtype=torch.float16)
    found.heads = found.key_heads = 1
    for name, weight in (("attn_q", rows), ("attn_k", rows), ("attn_v", rows), ("attn_output", rows.T)):
        found.add(name, site.module, weight, site.output.bias if name == "attn_output" else None)
    found.notes.append(f"{site.path}: a head of zeros, since llama.cpp needs one there")


def add_neurons(found: Block, block: OpenFeedForward) -> None:
    """Add the neurons of a block, up to a multiple of 32: blocks of few bits are whole then, and products quick."""
    count = found.neurons = block.num_neurons
    if not count and (found.heads or adds(block)):
        found.neurons = BLOCK
    found.neurons += -found.neurons % BLOCK
    if not found.neurons:
        return
    output, more = cast(Any, block.output), found.neurons - count
    names = ("ffn_gate", "ffn_up")[-len(block.first) :]
    for name, module in zip(names, cast(Any, block.first), strict=True):
        bias = None if module.bias is None else pad(module.bias, (0, more))
        found.add(name, module, pad(weight_of(module), (0, 0, 0, more)), bias)
    found.add("ffn_down", output, pad(weight_of(output), (0, more)), output.bias)
    if more:
        found.notes.append(f"{block.path}: neurons from {count} to {found.neurons}, with zeros")


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Put dimensions i and i + d/2 of heads of width d, which turn together, beside each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
