"""Weights on grids are stored packed: codes and scales in place of floating-point numbers, a quarter to an eighth.

A weight `X.weight` [D, n] of b bits becomes `X.weight_codes` [D, ceil(n / 32) * 4 * b], uint8, rows filled up to whole
blocks of 32, and `X.weight_scales` [D, 2 * K], uint8, the bytes of half-precision numbers (little-endian): what is no
floating-point number keeps its value in any dtype that a model is loaded in. K is the number of scales of a row: one
for each 32 inputs, and a single one with 8 bits. Loading gives products of codes and scales, bit for bit, in float32;
in another dtype they are rounded once. A weight that has left its grid is stored in full.

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
from collab_heads.errors import ConfigError, LoadError
from collab_heads.layers.layout import is_transposed
from collab_heads.layers.weight_grid import WEIGHT_BITS, GridWeights, on_grid
from collab_heads.sites.record import GRIDS, configs_in, own_configs

CODES, SCALES = "weight_codes", "weight_scales"  # in place of "weight"
logger = logging.getLogger("transformers.collab_heads")


def note_grids(model: PreTrainedModel, *, may_pack: bool = True) -> None:
    """Write the bits of the weights that lie on grids into the configs of a model that is to be saved.

    Args:
        model: the model; its configs are copied first if they change: other models may share them.
        may_pack: whether the save can pack weights.
    """
    bits: dict[str, int] = {}
    left: dict[str, list[str]] = {}
    for name, module, found in on_grid(model):
        if found is not None and may_pack:
            bits[name] = found.bits
        elif not may_pack:
            left.setdefault("a save of this kind packs none", []).append(name)
        else:
            is_away = cast(Tensor, module.weight).is_meta
            why = "they are offloaded" if is_away else "they have left their grids of few bits"
            left.setdefault(why, []).append(name)
    for why, names in left.items():
        logger.warning("stored in full, since %s: %s", why, shortened(names, 3))
    if not has_grids(model.config, bits):
        own_configs(model)
        set_grids(model.config, bits)


def packs(save_original_format: bool = True, distributed_checkpoint: bool = False, **_: Any) -> bool:
    """Return whether `save_pretrained` can pack weights when it is called with these arguments."""
    return save_original_format and not distributed_checkpoint


def has_grids(config: PretrainedConfig, bits: Mapping[str, int]) -> bool:
    """Return True if a config and those inside it hold these bits."""
    inner = configs_in(config).values()
    return getattr(config, GRIDS, None) == (bits or None) and all(has_grids(each, bits) for each in inner)


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
    if not (noted := getattr(model.config, GRIDS, None)):
        return state
    by_place, by_name = {}, {}
    for name, module, grid in on_grid(model):
        if grid is not None and name in noted:
            weight = cast(Tensor, module.weight)
            by_place[place_of(weight)] = by_name[f"{name}.weight"] = weight, grid
    found = {}
    for name, tensor in state.items():
        pair = by_place.get(place_of(tensor)) or by_name.get(name)
        if pair is not None and name.endswith("weight") and is_same(tensor, pair[0]):
            stem, grid = name.removesuffix("weight"), pair[1]
            found[stem + CODES], found[stem + SCALES] = grid.packed(), grid.scales.view(torch.uint8)
        else:
            found[name] = tensor
    return found


def is_same(tensor: Tensor, weight: Tensor) -> bool:
    """Return True if a tensor of a state is a weight, or a copy of it."""
    return place_of(tensor) == place_of(weight) or (
        tensor.dtype == weight.dtype and torch.equal(tensor, weight.to(tensor.device))
    )


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
        rows = unpacked(module, weight, found[CODES], found[SCALES])
        return {full_layer_name: rows.to(self.dtype_of(full_layer_name, weight))}

    def module_of(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def dtype_of(self, name: str, weight: Tensor) -> torch.dtype:
        """Return the dtype of a weight in the model: some stay in float32."""
        plan = self.model._get_dtype_plan(self.model.dtype)
        return next((each for part, each in plan.items() if re.search(part.replace("*", ".*"), name)), weight.dtype)


def unpacked(module: nn.Module, weight: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight that codes and scales make, stored as that of a module, and note its bits there.

    Args:
        module: the module.
        weight: its weight, for the shape.
        codes: of any dtype that holds whole numbers from 0 to 255.
        scales: the bytes of half-precision numbers, likewise.

    Raises:
        ValueError: if they do not fit the weight, or a scale is NaN or inf.
    """
    for name, given in ((CODES, codes), (SCALES, scales)):
        if given.dim() != 2 or (name == SCALES and given.shape[1] % 2) or not torch.equal(given.byte(), given):
            raise ValueError(f"{name} {[*given.shape]} {given.dtype} are no rows of bytes")
    inputs = weight.shape[0 if is_transposed(module) else 1]
    codes, scales = (each.to(torch.uint8).contiguous() for each in (codes, scales))
    grid = GridWeights.unpacked(codes, scales.view(torch.float16), inputs)
    if not torch.isfinite(grid.scales).all():
        raise ValueError("a scale is NaN or inf")
    setattr(module, WEIGHT_BITS, grid.bits)
    return grid.weight().mT.contiguous() if is_transposed(module) else grid.weight()


def load_state(stock: Callable, model: PreTrainedModel, state_dict: Mapping[str, Any], *args, **kwargs):
    """Load a state whose weights may be packed, as Trainer does from the files of its checkpoints.

    Codes of what has no matrix in the model are left to transformers, as other names that it does not know.

    Raises:
        LoadError: if it has codes without their scales, or they are not those of the weight.
    """
    stems = [name.removesuffix(CODES) for name in state_dict if name.endswith(CODES)]
    if stems:
        state_dict, modules = dict(state_dict), dict(model.named_modules(remove_duplicate=False))
        for stem in stems:
            module = modules.get(stem.removesuffix("."))
            weight = getattr(module, "weight", None)
            if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
                continue
            if stem + SCALES not in state_dict:
                raise LoadError(
                    f"{stem}{CODES}: the scales of these codes lie in another file; load the folder with "
                    "from_pretrained"
                )
            codes, scales = (state_dict.pop(stem + name) for name in (CODES, SCALES))
            try:
                state_dict[f"{stem}weight"] = unpacked(module, weight, codes, scales).to(weight.dtype)
            except ValueError as error:
                raise LoadError(f"{stem}weight: {error}") from error
    return stock(model, state_dict, *args, **kwargs)


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (modeling_utils, "get_model_conversion_mapping"): ("hf_quantizer", converters),
    (modeling_utils, "revert_weight_conversion"): ("state_dict", packed),
    (PreTrainedModel, "load_state_dict"): ("state_dict", load_state),
}
