"""The Marian of the shared folder with 18 of its 72 heads, repaired before it is trained on references."""

from pathlib import Path

from transformers import AutoTokenizer
from translation import MODELS, calibration, load

from collab_heads import distill, prune_heads, swap_to_gated
from collab_heads.analysis import head_importance, most_important
from common import shared

KEPT, STEPS, PAIRS, SIZE = 18, 600, 10_000, 32
MENDED = {"refitted": 0, "distilled": STEPS}  # how -> steps of distillation, after the refit


def mended(how: str, seed: int, work: Path) -> Path:
    """Return the folder of such a model, which is made if it is missing.

    W_O is refitted on 256 training pairs; the model is then distilled if `how` says so.
    """
    folder = work / f"mended-{how}-{seed}"
    if not (folder / "model.safetensors").exists():
        tokenizer = AutoTokenizer.from_pretrained(shared(MODELS["marian"]))
        original, model = load(MODELS["marian"]), load(MODELS["marian"])
        batches = calibration(tokenizer, seed)
        importance = head_importance(model, batches, criterion="gradient")
        swap_to_gated(model, alive_heads=most_important(model, importance, KEPT))
        prune_heads(model, batches=batches)
        if MENDED[how]:
            pairs = calibration(tokenizer, seed=seed + 1, count=PAIRS, size=SIZE)
            print(distill(model, original, pairs, MENDED[how], seed=seed))
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder
