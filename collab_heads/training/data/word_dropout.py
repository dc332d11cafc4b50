"""Words that a translation model does not get to see in training."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WordDropout:
    """Replaces tokens of the inputs at random; labels stay.

    Attributes:
        source: probability of a token of the source to be replaced.
        target: the same for what the decoder reads.
        replacements: [N], the ids that stand for a dropped one, all alike probable: the unknown token alone, or many.
        special: ids that are never replaced.
    """

    source: float
    target: float
    replacements: tuple[int, ...]
    special: tuple[int, ...]

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Model inputs with tokens replaced."""
        shares = {"input_ids": self.source, "decoder_input_ids": self.target}
        return inputs | {name: self.drop(inputs[name], share) for name, share in shares.items() if share}

    def drop(self, ids: Tensor, share: float) -> Tensor:
        """Replace a share of the tokens."""
        keep = torch.isin(ids, ids.new_tensor(self.special))
        keep |= torch.rand(ids.shape, device=ids.device) >= share
        others = ids.new_tensor(self.replacements)
        if len(others) > 1:
            others = others[torch.randint(len(others), ids.shape, device=ids.device)]
        return torch.where(keep, ids, others)
