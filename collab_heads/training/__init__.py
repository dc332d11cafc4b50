"""Train changed models: penalties for heads, heads that change places, and both in a transformers Trainer.

Names are imported when they are asked for: flags of trainings, in `options`, are read before torch is imported, and
transformers' Trainer takes two seconds more and needs accelerate.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collab_heads.heads.adamw import HeadAdamW
    from collab_heads.heads.penalty.head_penalty import HeadPenalty
    from collab_heads.rotation.head_rotation import HeadRotation
    from collab_heads.trainer.head_training import HeadTraining
    from collab_heads.trainer.heads_file import load_heads, save_heads

__all__ = ["HeadAdamW", "HeadPenalty", "HeadRotation", "HeadTraining", "load_heads", "save_heads"]

MODULES = {
    "HeadAdamW": "heads.adamw",
    "HeadPenalty": "heads.penalty.head_penalty",
    "HeadRotation": "rotation.head_rotation",
    "HeadTraining": "trainer.head_training",
    "load_heads": "trainer.heads_file",
    "save_heads": "trainer.heads_file",
}


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "HeadTraining":
        from collab_heads.base.extras import check_extra

        check_extra("train", "trainings with a Trainer", ["accelerate"])
    return getattr(import_module(f"collab_heads.{MODULES[name]}"), name)
