"""Read configs whose layers have sizes of their own (`per_layer_config`), which others wrote.

transformers 5.23 reads such configs, and refuses to build models from them. Here a model is built from one config for
all layers, and a record of what each layer lacks. So before a model is built, its config gets sizes that are enough for
every layer, and after it the record that follows from their own sizes:

    {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
     "per_layer_config": {"1": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}}}

gives layer 1 the first heads of the first key head, and its 48 neurons.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.checks import is_index, is_size
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import adapter_for_config, known_adapter
from collab_heads.errors import ConfigError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.sites.record import FIELD, CollabConfig, is_valid
from collab_heads.sites.state import SIZE, FeedForwardState, SiteState, expect

LAYERS = "per_layer_config"  # fields of a config, of transformers
AMBIGUOUS = "allow_global_per_layer_attribute_access"  # whether what layers have of their own can be read of all
SIZES = "collab_layer_sizes"  # attribute of a config until its model is built, and of the model until it is loaded
DIGITS = 9  # of the number of a layer
MOST = 4096  # heads of a layer; beyond any model


def read_config(stock: Callable, config_class: type[PretrainedConfig], config_dict: dict, **kwargs: Any) -> Any:
    """Make a config from a dict. Sizes of layers are checked first and set last: some classes refuse to be made."""
    given = config_dict.get(LAYERS)
    adapter = None if given is None else reader(config_class)  # imports the modelling code of the family
    if adapter is None:
        return stock(config_class, config_dict, **kwargs)
    plain = {name: value for name, value in config_dict.items() if name != LAYERS}
    found = stock(config_class, plain, **kwargs)
    config = found[0] if isinstance(found, tuple) else found
    check_sizes(adapter, config, given)
    try:
        setattr(config, LAYERS, given)
    except (TypeError, ValueError) as error:  # of transformers, which checks what it knows
        raise ConfigError(f"config.{LAYERS} is {given!r:.200}: {error}") from error
    return found


def build_even(stock: Callable, model: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
    """Begin to build a model, from sizes that are enough for every layer where layers have their own."""
    adapter = reader(config) if isinstance(config, PretrainedConfig) else None
    sizes = None if adapter is None else take_sizes(adapter.variant(config), config)
    stock(model, config, *args, **kwargs)
    if sizes:
        setattr(model, SIZES, sizes)


def reader(config: Any) -> AttentionAdapter | None:
    """Return the adapter for a config, or a class of configs, whose layers can have sizes of their own."""
    adapter = known_adapter(config)
    return adapter if adapter is not None and adapter.layer_configs else None


def check_sizes(adapter: AttentionAdapter, config: PretrainedConfig, given: Any) -> dict[int, dict[str, Any]]:
    """Return the sizes that a config gives layers, by number.

    Raises:
        ConfigError: if a layer is none of the model, or a size is none; the layer, the entry and its value are named.
    """
    expect(isinstance(given, Mapping), f"config.{LAYERS}", given, "a layer -> its own entries")
    found, count = dict[int, dict[str, Any]](), config.num_hidden_layers
    for layer, entries in given.items():
        number = int(layer) if str(layer).isdecimal() and len(str(layer)) <= DIGITS else -1
        is_new = is_index(number, count) and number not in found
        expect(is_new, f"a layer in config.{LAYERS}", layer, f"each of the layers 0 to {count - 1} once at most")
        expect(isinstance(entries, Mapping), where(number), entries, "its own entries of the config")
        for name in adapter.layer_sizes:
            expect(is_size(entries.get(name, 1)), f"{where(number)}, {name}", entries.get(name), SIZE)
        found[number] = dict(entries)
    return found


def where(layer: int) -> str:
    return f"config.{LAYERS} of layer {layer}"


def take_sizes(adapter: AttentionAdapter, config: PretrainedConfig) -> dict[int, dict[str, int]] | None:
    """Take the sizes of layers out of a config, which gets sizes that are enough for all, in place.

    Returns:
        The sizes of every layer, by its number; None where all are those of the config.

    Raises:
        ConfigError: if no such layers can be built; the layer, the entry and its value are named.
    """
    if not getattr(config, "is_heterogeneous", LAYERS in vars(config)):  # before 5.23 an entry like any other
        return None
    own = check_sizes(adapter, config, config.to_dict().get(LAYERS, {}))
    expect(not hasattr(config, FIELD), f"config.{LAYERS}", own, f"none beside config.{FIELD}: take one of the two out")
    for number, entries in own.items():
        for name in entries.keys() - set(adapter.layer_sizes):
            known = ", ".join(adapter.layer_sizes)
            expect(False, f"{where(number)}, {name}", entries[name], f"none: layers can have their own {known}")
    even = copy.deepcopy(config)  # on an error the config stays as it is, or the next model would have even layers
    drop_sizes(even)
    common: dict[str, Any] = {name: getattr(even, name, None) for name in adapter.layer_sizes}
    for name, size in common.items():
        expect(is_size(size), f"config.{name}", size, f"{SIZE}, since layers have their own")
    if not own:
        return None
    sizes: dict[int, dict[str, Any]] = {
        number: common | own.get(number, {}) for number in range(config.num_hidden_layers)
    }
    entries = enough(adapter, even, common, sizes)
    drop_sizes(config)
    config.update(entries)
    setattr(config, SIZES, sizes)
    return sizes


def drop_sizes(config: PretrainedConfig) -> None:
    if LAYERS in vars(config):
        delattr(config, LAYERS)
    else:
        setattr(config, LAYERS, None)
    vars(config).pop(AMBIGUOUS, None)


def enough(
    adapter: AttentionAdapter, config: PretrainedConfig, common: Mapping[str, int], sizes: Mapping[int, dict[str, int]]
) -> dict[str, int]:
    """Return the entries of a config whose layers have all heads and neurons that any layer has."""
    found = {name: max(each[name] for each in (common, *sizes.values())) for name in adapter.layer_sizes}
    if adapter.head_counts is None or adapter.head_width is None:
        return found
    (entry, key_entry), (width_entry, _) = adapter.head_counts, adapter.head_width
    expect(common[entry] <= MOST, f"config.{entry}", common[entry], f"at most {MOST}, since layers have their own")
    for number, each in sizes.items():
        heads, keys = heads_of(adapter, each)
        expect(heads <= MOST, f"{where(number)}, {entry}", heads, f"at most {MOST}")
        expect(heads % keys == 0, f"{where(number)}, {entry}", heads, f"a multiple of its {key_entry}, {keys}")
    width = getattr(config, width_entry, None)
    if width is None:
        for number, each in sizes.items():
            wanted = f"{common[entry]}, since the config has no {width_entry}, by which heads of all layers are as wide"
            expect(each[entry] == common[entry], f"{where(number)}, {entry}", each[entry], wanted)
        width = config.hidden_size // common[entry]
    counts = [heads_of(adapter, each) for each in (common, *sizes.values())]
    keys, sharing = max(keys for _, keys in counts), max(heads // keys for heads, keys in counts)
    # some classes want a number of heads that divides the width; one between n and 2 n does
    choices = itertools.product(range(keys, 2 * keys + 1), range(sharing, 2 * sharing + 1))
    for keys, sharing in sorted(choices, key=lambda choice: choice[0] * choice[1]):
        entries = found | {entry: keys * sharing, width_entry: width}
        entries |= {} if key_entry is None else {key_entry: keys}
        if is_size(keys * sharing) and is_valid(config, entries):
            return entries
    raise ConfigError(f"config.{LAYERS}: no {entry} that the config allows is enough for all layers")


def heads_of(adapter: AttentionAdapter, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of heads, and of key heads, of a layer."""
    entry, key_entry = cast(tuple[str, str | None], adapter.head_counts)
    return sizes[entry], sizes[entry if key_entry is None else key_entry]


def record_sizes(model: PreTrainedModel) -> None:
    """Record which heads and neurons the layers of a freshly built model lack, by the sizes that its config had."""
    if not hasattr(model.config, SIZES):
        return
    layers = opened_layers(model)
    if layers.attention:  # a stack inside of the model may have other paths: the model around it records them
        sizes = vars(model.config).pop(SIZES)
        setattr(model.config, FIELD, CollabConfig(dict(states_of(layers, sizes))).to_dict())


def opened_layers(model: PreTrainedModel) -> OpenLayers:
    return OpenLayers.of(model, adapter_for_config(model.config))


def states_of(
    layers: OpenLayers, sizes: Mapping[int, Mapping[str, int]]
) -> Iterator[tuple[str, SiteState | FeedForwardState]]:
    """Yield the sites that lack heads or neurons, and their states."""
    for site in layers.attention if layers.adapter.head_counts is not None else ():
        heads, keys = heads_of(layers.adapter, sizes[site.site.layer])
        size = site.num_heads // site.site.num_key_heads
        kept = tuple(key * size + head for key in range(keys) for head in range(heads // keys))
        if heads < site.num_heads:
            yield site.path, SiteState(site.role, site.num_heads, kept=kept)
    for block in layers.feed_forwards:
        neurons = sizes[block.site.layer][block.entry]
        if neurons < block.num_neurons:
            yield block.path, FeedForwardState(block.site.role, block.num_neurons, neurons)


def check_layer_weights(model: PreTrainedModel, lost: set[str], files: Any) -> None:
    """Check that weights fit the sizes that a config gave layers.

    Args:
        model: the model; it forgets these sizes.
        lost: the names of weights that are missing, or have another shape.
        files: those of the weights.

    Raises:
        ConfigError: if one of a layer is among them; the layer and its sizes are named.
    """
    sizes = vars(model).pop(SIZES)
    layers = opened_layers(model)
    names = {module: name for name, module in model.named_modules()}
    for site in layers.attention:
        layer = names[model.base_model.get_submodule(layers.adapter.layer_path(site.path))]
        for name in sorted(each for each in lost if each.startswith(f"{layer}.")):
            of_layer = ", ".join(f"{entry} {size}" for entry, size in sizes[site.site.layer].items())
            raise ConfigError(
                f"config.{LAYERS} does not fit the weights{f' in {files[0]}' if files else ''}: layer "
                f"{site.site.layer} has {of_layer} by the config, and {name} is missing or has another shape"
            )


# (where, name of the function) -> (what it must take, the function that is called instead)
HOOKS: dict[tuple[Any, str], tuple[str, Callable]] = {
    (PretrainedConfig, "from_dict"): ("config_dict", read_config),
    (PreTrainedModel, "__init__"): ("config", build_even),
}
