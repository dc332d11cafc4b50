"""Models and batches for tests of the distillation."""

import torch
from model_runs import swap
from model_sizes import VOCABULARY

from families import FAMILIES


def random_batches(count: int, seed: int = 5, rows: int = 4) -> list[dict]:
    """Padded batches of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def changed_pair(family: str = "bert", kind: str = "shared+values", dim: int = 16, **more):
    """A model and its original."""
    model = FAMILIES[family].build()
    swap(model, kind, dim, tol=1e-4, **more)
    original = FAMILIES[family].build()
    with torch.no_grad():  # transformers hooks into a model when states are first asked for, and stays there
        for each in (model, original):
            each(**FAMILIES[family].inputs(), output_hidden_states=True)
    return model, original
