"""How tests run the scripts: in this process, in another one, and in several."""

import faulthandler
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from later import run_glue

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "--learning_rate 3e-3 --num_train_epochs 2 --per_device_eval_batch_size 16 --cpu".split()
LEARNS = "--num_train_epochs 4".split()
SWAP = "--collaborative --dim_shared_query_key 16 --refine_steps 3 --calibration_samples 16".split()
LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no".split()
LAUNCH += "--main_process_port 0 --dynamo_backend no run_glue.py".split()
ADAM32 = 5e-5  # float32 gradients summed in another order, magnified where Adam divides by small ones; seen: 6e-6


def flags(bert, files, out=None, *more) -> list[str]:
    where = ["--output_dir", str(out)] if out else []
    return ["--model_name_or_path", str(bert), *files, *TRAIN, *where, *map(str, more)]


def run(*args) -> dict:
    return run_glue.main(flags(*args))


def forget_accelerate() -> None:
    """Accelerate keeps its settings for the life of a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def to_fsdp(accelerator: Accelerator, **options) -> Accelerator:
    """Accelerate makes FSDP of accelerators only, torch of CPUs, too: so it is told after it was made."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # from here it is read again
    return accelerator


HANGS = 240  # seconds after which a process is ended
FORK = multiprocessing.get_context("fork")  # a copy of this process, which has imported everything


def fork(main: Callable, arguments: list[str], **environment: str) -> BaseProcess:
    """Run a script's `main` in a process of its own, which can be killed, and says where it hangs."""

    def child():
        faulthandler.dump_traceback_later(HANGS - 20, file=sys.__stderr__)
        torch.set_num_threads(1)  # a copy has none of the threads of this process, and would wait for them forever
        os.environ.update(environment)
        forget_accelerate()
        main(arguments)

    process = FORK.Process(target=child)
    process.start()
    return process


def kill_at(checkpoint: Path, process: BaseProcess) -> None:
    """SIGKILL, right after a checkpoint appears."""
    deadline = time.monotonic() + HANGS
    while not checkpoint.exists():
        assert process.is_alive() and time.monotonic() < deadline, f"{checkpoint} did not appear"
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode < 0


def run_on_two(main: Callable, arguments: list[str]) -> None:
    """Run a script's `main` on two processes, as a launcher would.

    A process that a signal ends (CI has seen gloo die so once, in hundreds of runs) has no error to show: both begin
    again, once. An error of ours is an exit code above 0, and counts at once.
    """
    codes = exit_codes_of_two(main, arguments)
    if any(code is not None and code < 0 for code in codes):
        print(f"exit codes {codes}: a process was ended by a signal, so both begin again")
        codes = exit_codes_of_two(main, arguments)
    assert codes == [0, 0], f"exit codes {codes}; None is a process that hung, a negative one a signal"


def exit_codes_of_two(main: Callable, arguments: list[str]) -> list[int | None]:
    """Run `main` on two processes; return how each ended, None for one that did not within four minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["OMP_NUM_THREADS"] = "1"  # Accelerate would set more, and a process that was forked waits for them forever
    processes = [fork(main, arguments, RANK=str(i), LOCAL_RANK=str(i), **shared) for i in range(2)]
    deadline = time.monotonic() + HANGS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


ONCE, EVERY = "once", pytest.param("every", marks=pytest.mark.slow)
from_checkpoints = pytest.mark.parametrize("resumed", (ONCE, EVERY))


def checkpoints(out: Path, resumed: str, *, count: int | None = None) -> list[Path]:
    """The finished checkpoints of a run, or the one in the middle, if the run is resumed once."""
    folders = sorted(path for path in out.iterdir() if (path / "progress.json").exists())
    assert count is None or len(folders) == count
    assert len(folders) > 1
    return folders if resumed == "every" else folders[(len(folders) - 1) // 2 :][:1]


def start(arguments, **more) -> subprocess.Popen:
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=env, cwd=ROOT, **quiet, **more)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 0, errors.decode()[-2000:]
