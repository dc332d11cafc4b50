"""Act once for several processes, and give all of them the same values."""

import pickle
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class LaunchedProcesses(Protocol):
    """The processes of a run, as an `accelerate.Accelerator` names them."""

    @property
    def num_processes(self) -> int: ...
    @property
    def is_main_process(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...


def agreed(processes: LaunchedProcesses, function: Callable[[], Result]) -> Result:
    """Call a function on the first process, and return its result or raise its exception on all processes.

    So no process is left waiting after an error. Use it also for results that every process could compute: the last
    bits of floating-point numbers may differ between processes.
    """
    if processes.num_processes == 1:
        return function()
    from accelerate.utils import broadcast_object_list

    outcome: list = [None, None]
    if processes.is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:  # whatever it is: the others wait for an outcome
            outcome[1] = error
    shared = [outcome[0], None if outcome[1] is None else sendable(outcome[1])]
    broadcast_object_list(shared)
    outcome = outcome if processes.is_main_process else shared
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def sendable(error: Exception) -> Exception:
    """Return an exception that other processes can read: itself, or a RuntimeError with its name and message."""
    try:
        pickle.loads(pickle.dumps(error))  # as the broadcast does
    except Exception:  # a class that is local, or whose __init__ wants other arguments than its message
        return RuntimeError(f"{type(error).__name__} in the first process: {error}")
    return error


@torch.no_grad()
def copy_from_first(processes: LaunchedProcesses, tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of the first process to all others, in place: the last bits of computed ones may differ."""
    if processes.num_processes > 1:
        for tensor in tensors:
            sent = tensor.detach().to(processes.device).contiguous()  # broadcast sends memory in its own order
            torch.distributed.broadcast(sent.reshape(-1).view(torch.uint8), src=0)  # gloo does not send all dtypes
            tensor.copy_(sent)
