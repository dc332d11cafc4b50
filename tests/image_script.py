"""Images that the tests draw, and how they run run_image_classification.py on them."""

import random
from pathlib import Path

from later import run_image_classification
from PIL import Image, ImageDraw

COMMON = "--learning_rate 3e-3 --num_train_epochs 2 --per_device_eval_batch_size 16 --seed 1 --cpu".split()
SIZES = "--d_model 32 --num_layers 2 --num_heads 4 --d_ff 64 --image_size 16 --patch_size 4".split()
SCRATCH = ["--model_type", "vit", *SIZES]
SWAP = "--collaborative --dim_shared_query_key 16 --refine_steps 3 --calibration_samples 16".split()
LEARNS = "--num_train_epochs 12 --per_device_train_batch_size 8".split()


def draw(shape: str, chance: random.Random, size: int = 16) -> Image.Image:
    """A shape somewhere, on a dark ground."""
    image = Image.new("RGB", (size, size), tuple(chance.randrange(60) for _ in range(3)))
    left, top = (chance.randrange(1, size // 2) for _ in range(2))
    box = (left, top, left + size // 3 + 1, top + size // 3 + 1)
    colour = tuple(chance.randrange(160, 256) for _ in range(3))
    pen = ImageDraw.Draw(image)
    {"disc": pen.ellipse, "line": lambda where, fill: pen.line(where, fill), "square": pen.rectangle}[shape](
        box, fill=colour
    )
    return image


def write_images(folder: Path, count: int, seed: int, shapes=("disc", "line", "square")) -> Path:
    """So many images of every shape, in a folder for each."""
    chance = random.Random(seed)
    for shape in shapes:
        (folder / shape).mkdir(parents=True)
        for number in range(count):
            draw(shape, chance).save(folder / shape / f"{number:03}.png")
    return folder


def flags(model, files, out=None, *more) -> list[str]:
    """The command line; `model` is a folder, or the flags of one from scratch."""
    which = ["--model_name_or_path", model] if isinstance(model, str | Path) else model
    where = ["--output_dir", out] if out else []
    return [str(word) for word in (*which, *files, *COMMON, *where, *more)]


def run(*args) -> dict:
    """In this process."""
    return run_image_classification.main(flags(*args))
