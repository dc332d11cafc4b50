"""How tests run the scripts: in this process, in another one, and in several."""

import os
import subprocess
import sys
from pathlib import Path

import run_glue

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


def start(arguments, **more) -> subprocess.Popen:
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=env, cwd=ROOT, **quiet, **more)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors.decode()[-2000:]
