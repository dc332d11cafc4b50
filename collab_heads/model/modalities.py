"""What a model reads: texts, images or audio; and batches that hold something else."""

import inspect
from collections.abc import Mapping

from transformers import PreTrainedModel

# What a model reads -> the names of its inputs, the usual one first, and what makes them.
MODALITIES = {
    "texts": (("input_ids", "inputs_embeds"), "tokenizer"),
    "images": (("pixel_values",), "image processor"),
    "audio": (("input_features", "input_values"), "feature extractor"),
}


def modalities(model: PreTrainedModel) -> dict[str, str]:
    """What a model reads -> the name of the input: of CLIP texts and images, of Whisper audio."""
    taken = inspect.signature(model.forward).parameters
    return {kind: name for kind, (names, _) in MODALITIES.items() for name in reversed(names) if name in taken}


def reads_texts(model: PreTrainedModel) -> bool:
    """Whether a model reads texts, as one does whose inputs have names that are not known here."""
    return not (read := modalities(model)) or "texts" in read


def reads_texts_alone(model: PreTrainedModel) -> bool:
    """Whether texts are all that a model reads."""
    return reads_texts(model) and len(modalities(model)) <= 1


def check_modalities(model: PreTrainedModel, batch: Mapping) -> None:
    """Raise ValueError if a batch holds images for a model of texts, or the like, or only a part of what it reads."""
    read = modalities(model)
    held = {
        kind: [name for name in names if batch.get(name) is not None]
        for kind, (names, _) in MODALITIES.items()
        if any(batch.get(name) is not None for name in names)
    }
    if not read or not held or held.keys() == read.keys():
        return
    wanted = " and ".join(f"{kind} ({name})" for kind, name in read.items())
    found = " and ".join(f"{kind} ({', '.join(names)})" for kind, names in held.items())
    makers = " and ".join(f"its {MODALITIES[kind][1]}" for kind in read)
    raise ValueError(f"it reads {wanted}, and the batch holds {found}: pass what {makers} returns")
