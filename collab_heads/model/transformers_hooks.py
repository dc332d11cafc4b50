"""Changed models load like any other: what of transformers is wrapped for it.

Importing the package wraps `PreTrainedModel.post_init` (a model whose config records changed sites is rebuilt before
weights are loaded or initialised) and `PreTrainedModel._initialize_weights` (changed modules initialise themselves).
What is wrapped around saving stands in `saving_hooks`, around static caches in `static_cache`,
around tokenizers in `tokenizer_files`.
Models without the record pass through untouched.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires

import transformers
from packaging.requirements import Requirement
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import Cache

from collab_heads.errors import UnsupportedVersionError
from collab_heads.model.four_bits import leave_wide_kernel
from collab_heads.model.initialize import initialize_changed
from collab_heads.model.marks import unmark
from collab_heads.model.rebuild import rebuild
from collab_heads.model.saving_hooks import around, install_saving_hooks, missing_functions
from collab_heads.model.static_cache import make_early, note_states
from collab_heads.model.tokenizer_files import save_tokenizer
from collab_heads.record import FIELD

# What is wrapped -> the arguments it is called with, by position; more of them may follow.
WRAPPED = {"post_init": ("self",), "_initialize_weights": ("self", "module")}
MARK = "collab_heads"  # attribute of a method that is wrapped already
# what else is wrapped -> the function that is called instead, with the stock one and its arguments
MORE: dict[tuple[type, str], Callable] = {
    (StaticCache, "__init__"): note_states,
    (Cache, "early_initialization"): make_early,
    (PreTrainedTokenizerBase, "save_pretrained"): save_tokenizer,
}


def install_hooks(model_class: type[PreTrainedModel] = PreTrainedModel) -> None:
    """Wrap `post_init` and `_initialize_weights` of the class that all models inherit from, and the rest, once.

    Raises:
        UnsupportedVersionError: if this version of transformers has no such methods, or calls them otherwise.
    """
    check_wrapped(model_class)
    if missing := missing_functions():
        raise unsupported("; ".join(missing))
    install_saving_hooks()
    for (where, name), instead in MORE.items():
        if not hasattr(stock := getattr(where, name), MARK):
            setattr(where, name, around(stock, instead))
    if hasattr(model_class.post_init, MARK):
        return
    stock_post_init, stock_initialize = model_class.post_init, model_class._initialize_weights

    @functools.wraps(stock_post_init)
    def post_init(self):
        unmark(self.config)
        rebuild(self)
        stock_post_init(self)

    @functools.wraps(stock_initialize)
    def _initialize_weights(self, module: nn.Module, *args, **kwargs):
        def stock(target: nn.Module) -> None:
            stock_initialize(self, target, *args, **kwargs)

        if getattr(module, "_is_hf_initialized", False) or not initialize_changed(self, module, stock):
            stock(module)
        if hasattr(self.config, FIELD):
            leave_wide_kernel(module)

    for name, wrapper in (("post_init", post_init), ("_initialize_weights", _initialize_weights)):
        setattr(wrapper, MARK, True)
        setattr(model_class, name, wrapper)


def check_wrapped(model_class: type) -> None:
    """Raise UnsupportedVersionError unless a class has the methods that are wrapped, with the arguments they take."""
    for name, expected in WRAPPED.items():
        method = getattr(model_class, name, None)
        if not callable(method):
            raise unsupported(f"{model_class.__name__} has no method {name}")
        arguments = inspect.signature(method).parameters.values()
        needed = [argument.name for argument in arguments if argument.default is argument.empty and is_single(argument)]
        if tuple(needed) != expected:
            raise unsupported(f"{model_class.__name__}.{name} takes ({', '.join(needed)}), not ({', '.join(expected)})")


def is_single(argument: inspect.Parameter) -> bool:
    """Whether an argument is one, not `*args` or `**kwargs`."""
    return argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)


def unsupported(reason: str) -> UnsupportedVersionError:
    """The error that says why this version of transformers does not do, and which ones do."""
    return UnsupportedVersionError(
        f"transformers {transformers.__version__} cannot load models that collab_heads has changed: {reason}; "
        f"install {supported_versions()}"
    )


def supported_versions() -> str:
    """The versions of transformers that the package asks for, as pip takes them."""
    try:
        wanted = [Requirement(line) for line in requires("collab-heads") or ()]
    except PackageNotFoundError:  # a checkout that is not installed
        wanted = []
    named = [str(each) for each in wanted if each.name == "transformers"]
    return repr(named[0]) if named else "a version that pyproject.toml allows"
