"""The registry of adapters, and their lookup by model type."""

from collections.abc import Iterable
from importlib import import_module

from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import did_you_mean, is_list
from collab_heads.base.wrappers import check_model, is_in_engine
from collab_heads.contract.adapter import AttentionAdapter, Capability
from collab_heads.contract.model_forms import Blueprint, CTranslate2Form, GgufForm, ImageBlueprint
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.sites.record import CollabConfig, kept_heads

_ADAPTERS: dict[str, AttentionAdapter] = {}
_MODULES: dict[str, str] = {}  # model type -> the module that registers its adapter when it is imported


def register_later(module: str, model_types: Iterable[str]) -> None:
    """Name a module that registers adapters: it is imported when one of its model types is asked for.

    Args:
        module: its full name.
        model_types: all that its adapters serve.
    """
    _MODULES.update(dict.fromkeys(model_types, module))


def register(adapter: type[AttentionAdapter]) -> type[AttentionAdapter]:
    """Register an adapter (a class decorator): `get_adapter` and `from_pretrained` find it by its `model_types`.

    Args:
        adapter: the class; it is made once, without arguments.

    Raises:
        ArgumentError: if it is not a subclass of AttentionAdapter, cannot be made without arguments, or its
            `model_types` are not strings.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, AttentionAdapter)):
        raise ArgumentError(f"what is registered must be a class of AttentionAdapter, not {adapter!r:.80}")
    name, types = adapter.__name__, adapter.model_types
    if not is_list(types) or not types or not all(isinstance(each, str) and each for each in types):
        raise ArgumentError(f"{name}.model_types must be a tuple of model types, such as ('bert',), not {types!r:.80}")
    try:
        made = adapter()
    except TypeError as error:
        raise ArgumentError(f"{name} cannot be made without arguments, which an adapter has to be: {error}") from error
    for module in {_MODULES[each] for each in types if each in _MODULES} - {adapter.__module__}:
        import_module(module)  # imported later, it would replace this adapter
    _ADAPTERS.update(dict.fromkeys(types, made))
    return adapter


def all_adapters() -> dict[str, AttentionAdapter]:
    """Return model type -> adapter, sorted; imports the modelling code of every family, in about a second."""
    for module in set(_MODULES.values()):
        import_module(module)
    return {name: _ADAPTERS[name] for name in sorted(_ADAPTERS)}


def blueprints() -> dict[str, Blueprint]:
    """Return the blueprints of the model types that can be made from sizes."""
    return {name: made for adapter in all_adapters().values() for name, made in adapter.blueprints.items()}


def image_blueprints() -> dict[str, ImageBlueprint]:
    """Return the blueprints of the model types that read images and can be made from sizes."""
    return {name: made for adapter in all_adapters().values() for name, made in adapter.image_blueprints.items()}


def supported_model_types() -> list[str]:
    """Return the values of `config.model_type` that have an adapter, sorted."""
    return sorted(_ADAPTERS.keys() | _MODULES.keys())


def adapter_for_config(config: PretrainedConfig) -> AttentionAdapter:
    """Look up an adapter by `config.model_type`.

    Raises:
        UnsupportedModelError: if there is none; the message lists the supported types and, where known, the reason.
    """
    model_type, known = config.model_type, supported_model_types()
    if found := known_adapter(config):
        return found.variant(config)
    check_custom_code(model_type, getattr(config, "auto_map", None))
    raise UnsupportedModelError(
        f"model type {model_type!r} is not supported{did_you_mean(model_type, known)}. "
        f"Supported: {', '.join(known)}. Another family needs an adapter, made known with `register`: see 'Add a "
        "family' in the documentation"
    )


def check_custom_code(model_type: str | None, auto_map: object) -> None:
    """Refuse a model that brings its own attention code.

    Args:
        model_type: as its config names it.
        auto_map: the custom classes that its config names, if any.

    Raises:
        UnsupportedModelError: if there are such classes, and its type has no adapter.
    """
    if auto_map and model_type not in supported_model_types():
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: its attention is code that comes with the "
            "model, no adapter knows it, with trust_remote_code or without. An adapter of your own can teach the "
            "toolkit where it is: see 'Add a family' in the documentation"
        )


def is_lone_decoder(config: PretrainedConfig) -> bool:
    """Return True if a model is a decoder without an encoder, by its config or its family (GPT-2)."""
    adapter = known_adapter(config)
    decodes = getattr(config, "is_decoder", False) or (adapter is not None and adapter.decodes(config))
    return not config.is_encoder_decoder and decodes


def known_adapter(config: PretrainedConfig) -> AttentionAdapter | None:
    """Return the registered adapter of a model type, None where there is none."""
    if config.model_type not in _ADAPTERS and config.model_type in _MODULES:
        import_module(_MODULES[config.model_type])
    return _ADAPTERS.get(config.model_type)


def gguf_model_types() -> list[str]:
    """Return the model types that llama.cpp runs, by their adapters, sorted."""
    return [name for name, adapter in all_adapters().items() if name in adapter.gguf]


def gguf_forms() -> list[GgufForm]:
    """Return what llama.cpp needs to know of each model type that it runs."""
    return [form for adapter in all_adapters().values() for form in adapter.gguf.values()]


def layered_model_types() -> list[str]:
    """Return the model types whose layers can have configs of their own, by their adapters, sorted."""
    return [name for name, adapter in all_adapters().items() if adapter.layer_configs]


def ctranslate2_form(config: PretrainedConfig) -> CTranslate2Form:
    """Return what CTranslate2 needs to know of a model type beside its layers, by its adapter or the default."""
    adapter = known_adapter(config)
    return (adapter.ctranslate2 if adapter is not None else {}).get(config.model_type, CTranslate2Form())


def gguf_form(config: PretrainedConfig) -> GgufForm | None:
    """Return what llama.cpp needs to know of a model type, by its adapter; None where it does not run it from here."""
    adapter = known_adapter(config)
    return None if adapter is None else adapter.gguf.get(config.model_type)


@checking_arguments
def get_adapter(
    model: PreTrainedModel,
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    capability: Capability | None = None,
) -> AttentionAdapter:
    """Return the adapter to use for a model.

    Args:
        model: the model.
        adapter: a class or an instance to use instead of the registered one.
        capability: what the adapter must be able to do: one of `CAPABILITIES`.

    Raises:
        ArgumentError: if `adapter` is something else.
        UnsupportedModelError: if there is no adapter for the model, the adapter finds no attention, or it lacks the
            capability.
    """
    if not isinstance(model, PreTrainedModel) or is_in_engine(model):
        check_model(model)
    if adapter is None:
        adapter = adapter_for_config(model.config)
    elif isinstance(adapter, type) and issubclass(adapter, AttentionAdapter):
        adapter = adapter()
    elif not isinstance(adapter, AttentionAdapter):
        raise ArgumentError(f"adapter must be an AttentionAdapter class or instance, not {adapter!r}")
    adapter = adapter.variant(model.config)
    if capability is not None and capability not in adapter.capabilities:
        can = ", ".join(sorted(adapter.capabilities)) or "nothing"
        why = f": {adapter.why_not[capability]}" if capability in adapter.why_not else ""
        raise UnsupportedModelError(
            f"{type(adapter).__name__} does not say it can do {capability!r}{why}; it can: {can}"
        )
    if not adapter.sites(model):
        raise UnsupportedModelError(
            f"{type(adapter).__name__} finds no attention in {type(model).__name__} "
            f"(model type {model.config.model_type!r}); it serves: {', '.join(adapter.model_types)}"
        )
    return adapter


def head_numbers(model: PreTrainedModel, adapter: AttentionAdapter) -> dict[str, tuple[int, ...]]:
    """Return the original numbers of the heads of every site, by path."""
    states = CollabConfig.on(model).sites
    return {site.path: tuple(kept_heads(states, site)) for site in adapter.sites(model)}
