"""Weights on grids are stored packed: codes and scales in place of floating-point numbers, a quarter to an eighth.

A weight `X.weight` [D, n] of b bits becomes `X.weight_codes` [D, K * 4 * b], uint8, and `X.weight_scales` [D, 2 * K],
uint8, the bytes of half-precision numbers (little-endian): what is no floating-point number keeps its value in any
dtype that a model is loaded in. K is the number of blocks of 32. Loading gives products of codes and scales, bit for
bit, in float32; in another dtype they are rounded once. A weight that has left its grid is stored in full.

The config has the bits by module, so that weights and config are tied (`ties`), and the marks of a changed model.
transformers' own converters of weights do the loading.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.core_model_loading import ConversionOps, WeightConverter

from collab_heads.base.checks import shortened
from collab_heads.base.option_values import BITS
from collab_heads.errors import ConfigError
from collab_heads.layers.layout import is_transposed
from collab_heads.layers.weight_grid import WEIGHT_BITS, GridWeights, on_grid
from collab_heads.sites.record import GRIDS, configs_in

CODES, SCALES = "weight_codes", "weight_scales"  # in place of "weight"
logger = logging.getLogger("transformers.collab_heads")


def note_grids(model: PreTrainedModel) -> None:
    """Write the bits of the weights that lie on grids into the configs of a model that is to be saved."""
    bits, left = {}, []
    for name, _, found in on_grid(model):
        if found is None:
            left.append(name)
        else:
            bits[name] = found.bits
    if left:
        logger.warning("stored in full, since they have left their grids of few bits: %s", shortened(left, 3))
    set_grids(model.config, bits)


def set_grids(config: PretrainedConfig, bits: Mapping[str, int]) -> None:
    """Write bits by module into a config and into those inside it, which load alone from the files of the whole."""
    if bits:
        setattr(config, GRIDS, dict(bits))
    elif hasattr(config, GRIDS):
        delattr(config, GRIDS)
    for inner in configs_in(config).values():
        set_grids(inner, bits)


def packed(stock: Callable, model: PreTrainedModel, state_dict: dict[str, Tensor], *args, **kwargs):
    """Pack the weights of a state that lie on grids, before it is divided into files."""
    kept = vars(model).get("_weight_conversions")
    if kept is not None:
        vars(model)["_weight_conversions"] = [each for each in kept if not is_ours(each)]
    state = stock(model, state_dict, *args, **kwargs)
    grids = {place_of(cast(Tensor, module.weight)): found for _, module, found in on_grid(model) if found is not None}
    found = {}
    for name, tensor in state.items():
        grid = grids.get(place_of(tensor))
        if grid is None or not name.endswith("weight"):
            found[name] = tensor
        else:
            stem = name.removesuffix("weight")
            found[stem + CODES], found[stem + SCALES] = grid.packed(), grid.scales.view(torch.uint8)
    return found


def place_of(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def converters(stock: Callable, model: PreTrainedModel, *args, **kwargs):
    """Return the converters for the weights of a model; one of ours is the first, if its config has bits."""
    found = stock(model, *args, **kwargs)
    if not (bits := getattr(model.config, GRIDS, None)):
        return found
    check_bits(bits)
    return [WeightConverter([CODES, SCALES], "weight", [Unpack(model)]), *found]


def check_bits(bits: object) -> None:
    """Raise ConfigError unless a config has bits by module."""
    is_valid = isinstance(bits, Mapping) and all(isinstance(name, str) and each in BITS for name, each in bits.items())
    if not is_valid:
        raise ConfigError(f"config.{GRIDS} must name bits ({', '.join(map(str, BITS))}) by module, not {bits!r:.200}")


def is_ours(converter: object) -> bool:
    return any(isinstance(each, Unpack) for each in getattr(converter, "operations", ()))


class Unpack(ConversionOps):
    """Turns codes and scales into a weight, and notes its bits in the module that gets it.

    Args:
        model: the model that is being loaded.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __deepcopy__(self, memo: dict) -> "Unpack":
        """Return the same: the loader copies converters for every weight."""
        return self

    def convert(  # type: ignore[override]  # the loader passes names, and takes a tensor for a list
        self, input_dict: dict[str, Any], *, full_layer_name: str, **_: Any
    ) -> dict[str, Tensor]:
        """Return the weight under its full name.

        Args:
            input_dict: codes and scales, each alone or as the only member of a list.
            full_layer_name: the name of the weight.

        Raises:
            ValueError: if they are not those of the weight.
        """
        found = {name: each[0] if isinstance(each, list) else each for name, each in input_dict.items()}
        if found.keys() != {CODES, SCALES}:
            raise ValueError(f"{full_layer_name} has {', '.join(found)} alone")
        weight, module = self.model.get_parameter(full_layer_name), self.module_of(full_layer_name)
        inputs = weight.shape[0 if is_transposed(module) else 1]
        codes, scales = (found[name].to(torch.uint8).contiguous() for name in (CODES, SCALES))
        grid = GridWeights.unpacked(codes, scales.view(torch.float16), inputs)
        setattr(module, WEIGHT_BITS, grid.bits)
        rows = grid.weight()
        rows = rows.mT.contiguous() if is_transposed(module) else rows
        return {full_layer_name: rows.to(self.dtype_of(full_layer_name, weight))}

    def module_of(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def dtype_of(self, name: str, weight: Tensor) -> torch.dtype:
        """Return the dtype of a weight in the model: some stay in float32."""
        plan = self.model._get_dtype_plan(self.model.dtype)
        return next((each for part, each in plan.items() if re.search(part.replace("*", ".*"), name)), weight.dtype)


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (modeling_utils, "get_model_conversion_mapping"): ("hf_quantizer", converters),
    (modeling_utils, "revert_weight_conversion"): ("state_dict", packed),
}
