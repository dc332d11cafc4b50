"""Check, before anything is written, that this machine can do what the flags ask for."""

import os
from pathlib import Path

import torch

from collab_heads.command.flags.arguments import trains
from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.training.runs.learner import Learner

EVERYWHERE = (None, "sdpa", "eager")  # attention backends that need no check
BYTES = 16  # of a parameter in float32: itself, its gradient, and two moments of Adam
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def check_backend(learner: Learner) -> None:
    """Try a special attention backend: run one training example, with a backward pass if the run trains.

    Raises:
        ArgumentError: if the backend cannot do it: its package, the device, the precision or dropout is not supported.
    """
    args, accelerator = learner.session.args, learner.session.accelerator
    name = args.attn_implementation
    if name in EVERYWHERE:
        return
    training = trains(args)
    model = learner.model.to(accelerator.device)
    batch = {key: tensor.to(model.device) for key, tensor in learner.collate([learner.encoded["train"][0]]).items()}
    model.train(training)
    try:
        with torch.set_grad_enabled(training), accelerator.autocast():
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


def check_memory(parameters: int, sizes: str, cpu: bool) -> None:
    """Check that a model with this number of parameters can be trained in the available memory.

    Args:
        parameters: approximate number of parameters of the model.
        sizes: the sizes that give this number, for the message.
        cpu: whether GPUs are left unused.

    Raises:
        ArgumentError: if it cannot; the message holds what is needed and what there is.
    """
    available, where = memory(cpu)
    if parameters * BYTES > available:
        raise ArgumentError(
            f"{sizes} make a model of {parameters:.3g} parameters: training takes {parameters * BYTES / 1e9:,.0f} GB "
            f"(float32 weights, gradients and two moments), and {where} has {available / 1e9:,.0f} GB: ask for less"
        )


def memory(cpu: bool) -> tuple[int, str]:
    """Return the bytes that a training can use at most, and the name of the device for the message."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_properties(0).total_memory, "the GPU"
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        sizes += [int(text)] if text.isdigit() else []
    return min(sizes), "this machine"
