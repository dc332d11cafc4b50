"""Checks for wrappers of transformers models, and functions that find the model inside."""

from torch import nn
from transformers import PreTrainedModel

from collab_heads.errors import UnsupportedModelError

# Class name of a wrapper -> what to do instead. Names rather than classes: no optional package is imported.
_CHANGE_INSTEAD = {
    "DistributedDataParallel": "swap the inner model (model.module) before wrapping, on every rank with the same data",
    "DataParallel": "swap the inner model (model.module) before wrapping",
    "FullyShardedDataParallel": "swap before sharding, or save the model and load it whole",
    "FSDPModule": "swap before sharding, or save the model and load it whole",
    "DeepSpeedEngine": "swap before deepspeed.initialize",
    "OptimizedModule": "swap before torch.compile (the original is model._orig_mod)",
    "PeftModel": "swap the base model before adding adapters, or merge_and_unload() them first",
    (IN_ENGINE := "ModelInEngine"): "load the model that was exported, and export it again",
}
MERGE_FIRST = _CHANGE_INSTEAD["PeftModel"]
# Class name of an object that works with a changed model inside, too -> where that model is.
_PASS_INSTEAD = {
    "SentenceTransformer": "model[0].auto_model",
    "SparseEncoder": "model[0].auto_model",
    "MultiVectorEncoder": "model[0].auto_model",
    "CrossEncoder": "model.model",
    "Pipeline": "pipeline.model",
}


def check_model(model: object) -> None:
    """Raise UnsupportedModelError unless `model` is a transformers model; for a known wrapper it says what to do."""
    for base in type(model).__mro__:
        if instead := _CHANGE_INSTEAD.get(base.__name__):
            raise UnsupportedModelError(f"cannot change a {base.__name__} in place: {instead}")
    check_passed(model)
    if isinstance(model, PreTrainedModel):
        return
    where = path_inside(model) if isinstance(model, nn.Module) else None
    hint = "" if where is None else f"; there is one inside: pass model.get_submodule({where!r})"
    raise UnsupportedModelError(f"expected a transformers PreTrainedModel, got {type(model).__name__}{hint}")


def names_wrapper(name: str) -> bool:
    """Return True for the name of a class that holds a model, by which such a class is known."""
    return name in _CHANGE_INSTEAD or name in _PASS_INSTEAD


def is_in_engine(model: object) -> bool:
    """Return True for an exported model, which is a transformers model without weights."""
    return any(base.__name__ == IN_ENGINE for base in type(model).__mro__)


def check_passed(model: object) -> None:
    """Raise UnsupportedModelError for an object, such as a pipeline, whose inputs differ from those of its model."""
    for base in type(model).__mro__:
        if inside := _PASS_INSTEAD.get(base.__name__):
            raise UnsupportedModelError(
                f"expected the transformers model inside a {base.__name__}: pass {inside}, and go on with the "
                f"{base.__name__}, which then has the changed model"
            )


def has_adapters(model: nn.Module) -> bool:
    """Return True if a transformers model contains PEFT adapters.

    `peft_config` alone does not show this: PEFT 0.18 leaves it behind when it unloads the adapters.
    """
    modules = (type(module).__module__ for module in model.modules())
    return bool(getattr(model, "peft_config", None)) and any(name.startswith("peft.") for name in modules)


def path_inside(model: nn.Module) -> str | None:
    """Return the path of the first transformers model in a module; None if there is none."""
    return next((path for path, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)


def model_inside(model: nn.Module) -> PreTrainedModel:
    """Return the first transformers model in a module, which may be the module itself.

    Raises:
        UnsupportedModelError: if there is none.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModelError(f"there is no transformers model in a {type(model).__name__}")
