"""Whether the attention backend that the flags name works here, tried on one example before anything is written."""

from typing import TYPE_CHECKING

import torch

from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.training.arguments import trains

if TYPE_CHECKING:
    from collab_heads.training.run import Run

EVERYWHERE = (None, "sdpa", "eager")


def check_backend(run: "Run") -> None:
    """Take one training example forward, and backward where the run trains, on the device of the run.

    Raises:
        ArgumentError: if the backend cannot do it: its package, the device, the precision or dropout is not supported.
    """
    name = run.args.attn_implementation
    if name in EVERYWHERE:
        return
    model, training = run.model.to(run.accelerator.device), trains(run.args)
    batch = {key: tensor.to(model.device) for key, tensor in run.collate([run.encoded["train"][0]]).items()}
    model.train(training)
    try:
        with torch.set_grad_enabled(training), run.accelerator.autocast():
            loss = model(**batch).loss
        if training:
            loss.backward()
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever torch and the backend raise
        reason = str(error).strip().split("\n")[0]
        raise ArgumentError(
            f"--attn_implementation {name} does not work for this run ({type(error).__name__}: {reason}): leave it "
            "out, or use sdpa or eager"
        ) from error
    finally:
        model.zero_grad()
        model.eval()
