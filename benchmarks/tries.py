"""The smallest run of every target of `targets.py`, which `make try-benchmarks` makes.

Data and models are small ones (`COLLAB_HEADS_SHARED`, `COLLAB_HEADS_TRY`), trainings have two steps, and the constants
of `SMALLER` are replaced in every program that has them. Programs that start themselves again do so as they are.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SMALLER: dict[str, object] = {
    "attention.SHUFFLES": 1,
    "bytes.TIMED": {"1 x 16": (1, 16, 1)},
    "calibration.BUDGETS": (0.5,),
    "compression.OTHERS": 20,
    "compression.PROBE": 20,
    "digits.BORN": {"shared": (32,)},
    "digits.LONGER": {"shared": (16,)},
    "digits.MORE_SEEDS": (1,),
    "digits.SEEDS": (1,),
    "digits.SWAPPED": {"shared": (32,)},
    "encoder_peers.BUDGETS": (0.5,),
    "encoder_peers.EXAMPLES": 16,
    "estimates.STEPS": 1,
    "glue.SENTENCES": 200,
    "head_worth.RESAMPLES": 2,
    "head_worth.DIVISIONS": 2,
    "layer_peers.BUDGETS": (0.5,),
    "lm.CALIBRATION": 32,
    "lm.LAYERS": (0.5,),
    "lm.MORE": 32,
    "lm.NEW": 4,
    "lm.ROUNDS": 1,
    "peers.BUDGETS": (0.5,),
    "peers.EXAMPLES": 16,
    "pruning.BATCH": 2,
    "pruning.LENGTH": 16,
    "pruning.NEW": 4,
    "real_decoder.OWN": 4,
    "real_decoder.PIECES": 4,
    "real_decoder.STEPS": 1,
    "real_decoder.TESTED": 2,
    "real_encoder.CALIBRATION": 16,
    "real_encoder.ROUNDS": 1,
    "real_encoder.STEPS": 1,
    "real_encoder.UNLABELLED": 16,
    "repair.KEPT": (18,),
    "rotary_widths.SHARES": (0.5,),
    "rotary_widths.STEPS": 1,
    "serving.PAIRS": 16,
    "serving.NEW": 4,
    "serving.ROUNDS": 1,
    "serving_decoder.NEW": 4,
    "serving_decoder.PROMPT": 128,
    "serving_decoder.ROUNDS": 1,
    "swap_speed.MANY": 16,
    "swap_speed.SENTENCES": 16,
    "translation.SETTINGS": [(64, "calibrated")],
    "translation_bytes.PAIRS": 16,
}
TWO_STEPS = ("--max_train_steps", "2", "--eval_steps", "2")

TRIES: dict[str, tuple[str, ...]] = {
    "stsb": ("stsb.py --draws 1 --widths 64", "stsb.py --refined --draws 1 --widths 64"),
    "translation": ("translation.py --models marian",),
    "decomposition": ("decomposition.py --rounds 1 --skip-base",),
    "swap-speed": ("swap_speed.py --rounds 1",),
    "attention": ("attention.py --rounds 1",),
    "training": ("training.py --rounds 3",),
    "nmt-speed": ("nmt_speed.py --rounds 4 --tokens 100",),
    "nmt-speed-inference": ("nmt_speed.py --inference --rounds 4",),
    "pruning": ("pruning.py --rounds 1",),
    "first-example": ("first_example.py",),
    "compression": (
        "compression.py minilm --methods refined --draws 1 --budgets 0.5 --calibration 16",
        "compression.py t5 --parts layers --draws 1 --budgets 0.5 --calibration 16 --steps 1",
    ),
    "calibration": ("calibration.py --kinds pairs --counts 16",),
    "dropped-layers": ("dropped_layers.py --layers 1 --steps 0 --learning_rates 0.01",),
    "layer-peers": (
        "layer_peers.py --tasks rte --draws 0 --examples 16 --methods compress 'Kwon et al. 2022' K-prune GRAIL "
        "'Torch-Pruning, Taylor'",
    ),
    "encoder-peers": ("encoder_peers.py --draws 0",),
    "peers": (
        "peers.py --tasks rte --draws 1 --methods 'Torch-Pruning, Taylor' 'Kwon et al. 2022' "
        "'prune_heads, reconstruction' compress",
    ),
    "lm": ("lm.py gpt2 qwen3 --steps 1",),
    "rotary-widths": ("lm_train.py --steps 1", "rotary_widths.py --draws 1"),
    "real-decoder": (
        "real_decoder.py $SMOLLM2 --draws 0 --budgets 0.4 --methods 'compress, and its own, distilled'",
        "real_decoder.py $SMOLLM2 --draws 0 --budgets 0.7 --methods compress 'blocks dropped, angular' SliceGPT "
        "ReplaceMe FLAP 2SSP OSSCAR '8 bits alone'",
        "real_decoder.py $SMOLLM2 --draws 0 --methods 'Q4_K_M alone, in llama.cpp'",
    ),
    "zero-shot": ("zero_shot.py $SMOLLM2 $SMOLLM2 --limit 8",),
    "real-encoder": (
        "real_encoder.py $MPNET --draws 0 --budgets 0.5 --methods compress 'compress, distilled' K-prune GRAIL "
        "'int8 alone' '4 bits alone' all-MiniLM-L6-v2",
        "real_encoder.py $MPNET --draws 0 --methods paraphrase-MiniLM-L3-v2",
    ),
    "bytes": (
        "bytes.py --draws 0 --sizes 8 --methods 'compress, 8, 4 and 3 bits' '8 bits'",
        "bytes.py --draws 0 --methods 'trimmed, compress, 8, 4 and 3 bits'",
        "bytes.py --draws 0 --methods 'export, int8' 'ONNX Runtime, 4 bits' 'NNCF, 4 bits'",
    ),
    "translation-bytes": ("translation_bytes.py --models marian --draws 0",),
    "serving": (
        "serving.py minilm --budgets 0.5 --steps 0 --elsewhere",
        "serving.py marian gpt2 --budgets 0.5 --steps 0 --sentences 4",
    ),
    "serving-grids": ("serving_grids.py --rounds 1",),
    "serving-decoder": ("serving_decoder.py $SMOLLM2 --budgets 0.4",),
    "vocabulary": (
        "vocabulary.py minilm --layers 1.0 --kept 0.32 --rounds 1",
        "vocabulary.py minilm --steps 1 --layers 1.0 --kept 0.32",
        "vocabulary.py mt5 --pieces 1000",
    ),
    "compression-speed": ("compression_speed.py --seconds 0.01 --threads 1",),
    "block-profile": ("block_profile.py --seconds 0.01",),
    "scale": ("scale.py measure --widths 128 --layers 2",),
    "real-sizes": ("real_sizes.py --models mpnet --work forward swap save load",),
    "estimates": ("estimates.py --rows 6",),
    "kills": ("kills.py --kills 1",),
    "gpu": ("gpu.py --minutes 0.5",),
    "values": ("stsb.py --values --draws 1",),
    "repair": ("repair.py --draws 1",),
    "glue-seeds": tuple(
        f"glue.py --tasks rte mrpc stsb cola wnli sst2 --settings original 64 --seeds 0{more}"
        for more in ("", " --table --name glue_seeds")
    ),
    "heads": ("heads.py --seeds 0 --settings original 'importance 9'", "heads.py --seeds 0 --table"),
    "images": ("digits.py", "digits.py --longer"),
    "chemistry": ("chemistry.py",),
    "nmt-heads": ("nmt.py heads --rows original 'importance 18' --seeds 0", "nmt.py heads --seeds 0 --table"),
    "seen": tuple(f"heads_seen.py {part}" for part in ("marian", "minilm", "balance", "speed")),
    "head-worth": ("head_worth.py marian", "head_worth.py marian --divergence"),
    "contributions": ("contributions.py --sentences 2",),
    "roles": ("roles.py",),
}


def started(program: str, arguments: Sequence[str], environment: Mapping[str, str], said: str) -> None:
    """Run a program in this process, which has imported none before, with its output in a file."""
    os.environ.update(environment)
    tempfile.tempdir = None  # read again
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv, sys.path = [program, *arguments], [str(HERE), *sys.path]
    for script in ("run_glue", "run_image_classification", "run_translation"):
        module = importlib.import_module(script)
        module.main = lambda flags, main=module.main: main([*flags, *TWO_STEPS])
    main = importlib.import_module(program.removesuffix(".py")).main
    programs = {name: module for name, module in sys.modules.items() if (HERE / f"{name}.py").exists()}
    for name, value in SMALLER.items():
        program, constant = name.split(".")
        if program in programs:
            before = getattr(programs[program], constant)
            for module in programs.values():  # it may have been imported
                if getattr(module, constant, None) is before:
                    setattr(module, constant, value)
    main()
