"""The checked options of a distillation, and the processes that run it."""

import dataclasses
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from collab_heads.base.checks import check_choice, check_count, check_seed, is_number
from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError, CalibrationError

if TYPE_CHECKING:
    from accelerate import Accelerator

Precision = Literal["no", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
EVALUATIONS = 10  # of the held-out part in a run, if `evaluate_every` is not given


@dataclass(frozen=True)
class DistillOptions:
    """The options of a distillation: arguments of `distill`."""

    steps: int = 300
    learning_rate: float = 0.01
    output_weight: float = 1.0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    patience: int = 4
    seed: int = 0

    def __post_init__(self):
        check_count("steps", self.steps, 1)
        for name in ("learning_rate", "output_weight"):
            value, least = getattr(self, name), "0 or more" if name == "output_weight" else "above 0"
            if not is_number(value) or value < 0 or (value == 0 and name == "learning_rate"):
                raise ArgumentError(f"{name} {value!r} must be a number, {least}")
        for name in ("evaluate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_count("patience", self.patience, 1)
        check_seed(self.seed)

    @property
    def steps_between_evaluations(self) -> int:
        """Return `evaluate_every`, by default a tenth of the steps."""
        return self.evaluate_every or max(1, self.steps // EVALUATIONS)

    @property
    def steps_between_checkpoints(self) -> int:
        """Return `checkpoint_every`, by default the steps between evaluations."""
        return self.checkpoint_every or self.steps_between_evaluations


def check_precision(precision: object) -> None:
    """Raise ArgumentError unless a distillation supports a precision; None leaves the choice to Accelerate."""
    if precision == "fp16":
        raise ArgumentError("mixed_precision 'fp16': small gradients become 0 in it; use 'bf16' or 'no'")
    if precision is not None:
        check_choice("mixed_precision", precision, PRECISIONS)


# ways of training that divide or replace the model, while a distillation needs each process to hold it whole
REFUSED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        num_processes, process_index: the number of processes, and the index of this one.
        device: the device on which they exchange tensors.
        precision: "no", or "bf16" for autocast.
    """

    num_processes: int
    process_index: int
    device: torch.device
    precision: str

    @classmethod
    def found(cls, accelerator: "Accelerator | None", precision: str | None, on_cpu: bool = True) -> "Processes":
        """Return the processes of an accelerator, or of the launcher that started this process.

        Args:
            accelerator: an `accelerate.Accelerator`; None for the launcher.
            precision: "no" or "bf16"; None for that of the accelerator or the launcher.
            on_cpu: whether models are on the CPU, so that several processes exchange tensors there.
        """
        check_precision(precision)
        check_extra("train", "distillations", ("accelerate",))
        from accelerate import Accelerator, PartialState

        if accelerator is not None and not isinstance(accelerator, Accelerator):
            raise ArgumentError(f"accelerator is a {type(accelerator).__name__}, expected an accelerate.Accelerator")
        # Making an Accelerator here would fix its precision for the life of the process. So does the choice of the CPU,
        # which is therefore made only for several processes.
        cpu = on_cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1
        state: Any = PartialState(cpu=cpu) if accelerator is None else accelerator
        if state.distributed_type.name in REFUSED:
            raise ArgumentError(
                f"accelerator works with {state.distributed_type.name}, which divides the model: distill with one "
                "process, or with several that each hold it whole (MULTI_CPU, MULTI_GPU)"
            )
        if precision is None:
            given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            precision = given if accelerator is None else accelerator.mixed_precision
            check_precision(precision)
        return cls(state.num_processes, state.process_index, state.device, precision)

    @property
    def is_main_process(self) -> bool:
        """Return True if this process writes files and shows progress."""
        return self.process_index == 0

    def alone(self) -> "Processes":
        """Return this process as if it were the only one."""
        return dataclasses.replace(self, num_processes=1, process_index=0)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """Return the context for products in bfloat16; without effect at precision "no"."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes, the same on all."""
        if self.num_processes == 1:
            return tensor
        from accelerate.utils import reduce

        return reduce(tensor.to(self.device), "sum").to(tensor.device)

    def check_same(self, what: str, digest: str) -> None:
        """Raise CalibrationError on all processes unless they were all given the same."""
        if self.num_processes == 1:
            return
        from accelerate.utils import gather_object

        if len(set(gather_object([digest]))) > 1:
            raise CalibrationError(
                f"the {self.num_processes} processes were given different {what}: give all the same, they share each "
                "batch"
            )
