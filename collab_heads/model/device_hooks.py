"""Take accelerate's hooks, which place and offload weights, off a module, and put them on again after a change.

accelerate is imported only where a model has such a hook.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import logging

from collab_heads.errors import SwapError
from collab_heads.layers.alphas import HeadAlphas
from collab_heads.layers.gates import HeadGates

logger = logging.get_logger("transformers.collab_heads")

HOOK = "_hf_hook"  # where accelerate keeps a module's hook
ON_MODULE = (HOOK, "_old_forward", "forward")  # the attributes that accelerate sets on the instance
OWN_FILE = "collab_heads-"  # how the names of our files in an offload folder begin
OFFLOADED = "collab_heads_offloaded"  # marks a tensor that was brought in temporarily
SMALL = (HeadGates, HeadAlphas)  # not worth offloading

Place = tuple[object, ...]  # where an offloaded tensor is


@dataclass
class HookedModule:
    """A module's hook that was taken off, with the state that the module had at that time.

    Attributes:
        hook: the hook.
        offloading: the part of the hook that offloads; None if none does.
        kind: the class of the module.
        instance: the attributes that accelerate had set on the module.
        folder: the folder to which the module's tensors were offloaded; None for memory.
        away: name -> the meta tensor that stood for an offloaded tensor.
        here: name -> the tensor that was brought in for it, and that tensor's version (torch counts writes).
    """

    hook: Any
    offloading: Any
    kind: type[nn.Module]
    instance: Mapping[str, Any]
    folder: Path | None
    away: Mapping[str, Tensor]
    here: Mapping[str, tuple[Tensor, int]]

    @classmethod
    def opened(cls, module: nn.Module, loaded: dict[Place, nn.Parameter]) -> "HookedModule":
        """Take the hook off a module and bring in the tensors that it had offloaded.

        Args:
            module: a module with a hook.
            loaded: place of an offloaded weight -> its parameter, so that tied weights stay tied; changed in place.
        """
        hook = vars(module)[HOOK]
        offloading = next((each for each in aligning(module) if each.offload), None)
        instance = {name: module.__dict__.pop(name) for name in ON_MODULE if name in vars(module)}
        if offloading is None:
            return cls(hook, None, type(module), instance, None, {}, {})
        away = {name: tensor for name, tensor in tensors_of(module, offloading).items() if tensor.is_meta}
        here = {}
        for name, stand_in in away.items():
            value = offloading.weights_map[name]
            tensor: Tensor = value.to(offloading.execution_device, stand_in.dtype)
            if isinstance(stand_in, nn.Parameter):
                tensor = loaded.setdefault(place_of(offloading, name), nn.Parameter(tensor, stand_in.requires_grad))
            setattr(tensor, OFFLOADED, True)
            set_tensor(module, name, tensor)
            here[name] = tensor, tensor._version
        return cls(hook, offloading, type(module), instance, folder_of(offloading, list(away)), away, here)

    def is_same(self, module: nn.Module) -> bool:
        """Return True if a module still has the class and the unwritten offloaded tensors that it had."""
        if type(module) is not self.kind:
            return False
        now = {} if self.offloading is None else tensors_of(module, self.offloading)
        written = (tensor._version != version for tensor, version in self.here.values())
        return now.keys() == self.here.keys() and all(now[n] is self.here[n][0] for n in now) and not any(written)

    def close(self, module: nn.Module) -> None:
        """Put the hook on a module again and offload the tensors that the module has now."""
        from accelerate.hooks import add_hook_to_module

        if self.is_same(module):
            for name, stand_in in self.away.items():
                set_tensor(module, name, stand_in.requires_grad_(self.here[name][0].requires_grad))
            module.__dict__.update(self.instance)
            return
        if self.offloading is not None:
            self.forget()
            self.offloading.weights_map = stored(tensors_of(module, self.offloading), self.folder)
        add_hook_to_module(module, self.hook)

    def forget(self) -> None:
        """Drop the offloaded copies of a module whose tensors were replaced or which was removed."""
        if self.offloading is None:
            return
        store, prefix = store_of(self.offloading)
        for name in self.away:
            for table in (getattr(store, "state_dict", store), getattr(store, "index", {})):
                table.pop(prefix + name, None)
            if prefix + name in getattr(store, "all_keys", ()):
                store.all_keys.remove(prefix + name)


def hook_new(root: nn.Module, before: Sequence[HookedModule]) -> None:
    """Offload the new submodules of a module whose weights were offloaded.

    Args:
        root: the module; the submodules that had hooks have them again.
        before: the hooks that the submodules had.
    """
    like = next((was for was in before if was.offloading is not None), None)
    if like is None:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    parts = [module for module in root.modules() if not isinstance(module, SMALL)]
    covering = [module for module in parts if any(hook.place_submodules for hook in aligning(module))]
    covered = {part for module in covering for part in module.modules()}
    for module in parts:
        if module in covered or HOOK in vars(module):
            continue
        hook = AlignDevicesHook(
            like.offloading.execution_device,
            offload=True,
            offload_buffers=like.offloading.offload_buffers,
            skip_keys=like.offloading.skip_keys,
        )
        if tensors := tensors_of(module, hook):
            hook.weights_map = stored(tensors, like.folder)
            add_hook_to_module(module, hook)


def aligning(module: nn.Module) -> list[Any]:
    """Return the hooks of a module that place or offload its weights."""
    return [hook for hook in each_hook(vars(module).get(HOOK)) if hasattr(hook, "weights_map")]


def each_hook(hook: Any) -> list[Any]:
    """Return a hook, or those inside a sequence of hooks, as a list; empty for None."""
    if hook is None:
        return []
    return [each for part in hook.hooks for each in each_hook(part)] if hasattr(hook, "hooks") else [hook]


def check_hooks(module: nn.Module) -> None:
    """Raise SwapError if a module has a hook of accelerate that does more than place weights."""
    known = aligning(module)
    if strange := [type(hook).__name__ for hook in each_hook(vars(module)[HOOK]) if hook not in known]:
        raise SwapError(
            f"a {type(module).__name__} has a hook of accelerate that is not of a device_map, {strange[0]}: take it "
            "off (accelerate.hooks.remove_hook_from_module), change the model, and put it on again"
        )


def tensors_of(module: nn.Module, hook: Any) -> dict[str, Tensor]:
    """Return the tensors of a module that an offloading hook takes away: name -> tensor."""
    from accelerate.utils import named_module_tensors

    buffers, recurse = hook.offload_buffers, hook.place_submodules
    return dict(named_module_tensors(module, include_buffers=buffers, recurse=recurse, remove_non_persistent=True))


def is_offloaded(tensor: Tensor) -> bool:
    """Return True if a tensor is offloaded, or was brought in only while a module is opened.

    Such a tensor is another object each time it is looked up.
    """
    return tensor.is_meta or hasattr(tensor, OFFLOADED)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a parameter or a buffer of a module or, by a dotted name, of a submodule."""
    path, _, last = name.rpartition(".")
    owner: Any = module.get_submodule(path)
    (owner._parameters if last in owner._parameters else owner._buffers)[last] = tensor


def store_of(hook: Any) -> tuple[Any, str]:
    """Return the mapping that holds the offloaded tensors of a hook, and the prefix of their names in it."""
    weights = hook.weights_map
    return (weights.dataset, weights.prefix) if hasattr(weights, "dataset") else (weights, "")


def place_of(hook: Any, name: str) -> Place:
    """Return the place of an offloaded tensor: an address in memory, or a name in a file or a folder."""
    store, prefix = store_of(hook)
    held = getattr(store, "state_dict", store)
    if prefix + name in held:
        tensor = held[prefix + name]  # tensors without elements, of an empty block, all have the address 0
        return (tensor.data_ptr(),) if tensor.numel() else (id(hook), name)
    place = store.index[prefix + name]
    return place.get("safetensors_file", store.save_folder), place.get("weight_name", prefix + name)


def folder_of(hook: Any, names: Sequence[str]) -> Path | None:
    """Return the folder to which tensors are offloaded; None for memory."""
    store, prefix = store_of(hook)
    index = getattr(store, "index", {})
    on_disk = [index[prefix + name] for name in names if prefix + name in index]
    if not on_disk:
        return None
    files = [Path(place["safetensors_file"]) for place in on_disk if place.get("safetensors_file")]
    own = next((file.parent for file in files if file.name.startswith(OWN_FILE)), None)
    folder = getattr(store, "save_folder", None) or own
    if folder is None:
        logger.warning_once(
            "what changes in the attention of this model, which is on disk, is kept in memory: it was loaded without "
            "offload_folder"
        )
    return None if folder is None else Path(folder)


def stored(tensors: Mapping[str, Tensor], folder: Path | None) -> Mapping[str, Tensor]:
    """Store weights as hooks take them: in memory, or in a new file of a folder."""
    from accelerate.utils import OffloadedWeightsLoader

    values = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if folder is None or not values:
        return values
    file = folder / f"{OWN_FILE}{uuid.uuid4().hex}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(values, file)
    except (OSError, SafetensorError) as error:
        logger.warning(f"{file} cannot be written, so what changed is kept in memory: {error}")
        return values
    index = {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in values.items()
    }
    return OffloadedWeightsLoader(index=index)
