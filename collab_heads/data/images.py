"""Read images from folders, one folder per class; an error names the file that is broken."""

import hashlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import BaseImageProcessor

from collab_heads.base.progress import progress_bar
from collab_heads.data.classification import Labels
from collab_heads.data.glue import Data, sort_labels
from collab_heads.data.glue_tasks import Task
from collab_heads.errors import DataError
from collab_heads.files.reading import read_bytes

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
DEEP = ("I", "F")  # beginnings of modes with more than 8 bits a channel
# what a name of a file cannot have in a table; halves of characters stand for bytes that are not UTF-8
NO_NAME = re.compile(r"[\t\r\n\ud800-\udfff]")
DEEP_COLOURS = re.compile(r";16[BLN]")  # of the ways in which Pillow unpacks those of colours into modes with 8
FILE, DIGEST = "file", "sha256"  # columns of a split, beside "label"


def from_folders(folders: Mapping[str, str | Path], *, show_progress: bool = True) -> Data:
    """Read a task from folders of images: `FOLDER/CLASS/*.png`, and so on for other types of files.

    Every file is opened once, so that a broken one is found now and not in the third epoch. Files are ordered
    round-robin over the classes: the first of each, the second of each, and so on.

    Args:
        folders: split ("train", "validation", "test") -> its folder.
        show_progress: whether to show a progress bar, since many files take a while.

    Returns:
        A task with the classes of the training split, sorted by name, or by number if all are numbers.
    """
    found = {split: class_folders(Path(folder)) for split, folder in folders.items()}
    names = sort_labels(set(found["train"]))
    if len(names) == 1:
        raise DataError(f"{folders['train']}: all images are of the class {names[0]!r}: there is nothing to learn")
    for split, classes in found.items():
        if other := set(names) ^ classes.keys():
            here, missing = sorted(other & classes.keys()), sorted(other - classes.keys())
            raise DataError(
                f"{folders[split]} has other classes than {folders['train']}: "
                + "; ".join(
                    f"{what} {', '.join(those)}"
                    for what, those in (("only here:", here), ("not here:", missing))
                    if those
                )
            )
    splits: dict[str, dict[str, list]] = {}
    for split, classes in found.items():
        order = sorted((rank, number) for number, name in enumerate(names) for rank in range(len(classes[name])))
        files = [classes[names[number]][rank] for rank, number in order]
        with progress_bar(files, desc=f"reading {split} images", disable=not show_progress) as bar:
            digests = [digest_of(file) for file in bar]
        splits[split] = {FILE: list(map(str, files)), DIGEST: digests, "label": [number for _, number in order]}
    return Data(Task(None, (FILE,), tuple(names), "classification"), splits)


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return class -> its images, sorted by name; hidden files and files of other types are ignored."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: expected one with a folder of images for every class")
    visible = visible_in(folder)
    if loose := [path for path in visible if path.suffix.lower() in SUFFIXES and path.is_file()]:
        raise DataError(f"{loose[0]} is of no class: put images into a folder for their class, {folder}/CLASS/")
    classes = {path.name: images_in(path) for path in visible if path.is_dir()}
    if not classes:
        raise DataError(f"{folder} has no class folders: expected {folder}/CLASS/ with images")
    return classes


def visible_in(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted by name, without hidden files; raise DataError on names that are no text."""
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    for path in paths:
        if NO_NAME.search(path.name):
            raise DataError(f"{str(path)!a}: its name is not UTF-8, or has a tab or a line break: rename it")
    return paths


def images_in(folder: Path) -> list[Path]:
    """Return the images of one class, sorted by name; raise DataError if there are none."""
    paths = visible_in(folder)
    if deeper := [path for path in paths if path.is_dir()]:
        raise DataError(f"{deeper[0]} is a folder inside a class: images lie in {folder} itself")
    images = [path for path in paths if path.suffix.lower() in SUFFIXES]
    if not images:
        others = f"; it has {len(paths)} other file(s), such as {paths[0].name}" if paths else ""
        raise DataError(f"{folder}: the class has no images ({' '.join(SUFFIXES)}){others}: add some, or remove it")
    return images


def digest_of(path: Path) -> str:
    """Return the SHA-256 of an image, once it has been decoded: a resumed run must see the same images."""
    content = read_bytes(path)
    decode(path, content)
    return hashlib.sha256(content).hexdigest()


def read_image(path: str | Path) -> Image.Image:
    """Read an image as RGB: turned as its EXIF data say, on white if it is transparent.

    Of an animation the first frame is read.
    """
    return decode(Path(path), read_bytes(path))


def decode(path: Path, content: bytes) -> Image.Image:
    """Decode the content of an image file; see `read_image`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(content))
            is_deep = has_deep_channels(image)
            image.load()
            upright = ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise DataError(f"{path} is not an image, or of a type that cannot be read ({len(content):,} bytes)") from error
    except Exception as error:  # each image format raises its own errors on damaged files
        raise DataError(f"{path} is a broken image: {error}") from error
    if is_deep:
        raise DataError(f"{path} has more than 8 bits a channel: save it with 8")
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    image = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def has_deep_channels(image: Image.Image) -> bool:
    """Return True if an image that is opened, and not loaded, has more than 8 bits a channel; colours lose theirs."""
    ways = [(tile[0], tile[3]) for tile in getattr(image, "tile", ())]
    deep_colours = any(DEEP_COLOURS.search(str(arguments)) for _, arguments in ways)
    largest = [arguments[1] for codec, arguments in ways if codec.startswith("ppm") and isinstance(arguments, tuple)]
    return image.mode.startswith(DEEP) or deep_colours or any(value > 255 for value in largest)


PIXELS, AXIS = "pixel_values", -1  # [B, channels, height, width]: the axis that a mirror turns round


def encode_images(data: Data, labels: Labels) -> dict[str, Dataset]:
    """Return the file names of every split and the model's numbers of the labels; images are read later."""
    return {
        split: Dataset.from_dict(
            {FILE: columns[FILE], "labels": [int(labels.to_model(label)) for label in columns["label"]]}
        )
        for split, columns in data.splits.items()
    }


@dataclass(frozen=True)
class CollateImages:
    """Collator that reads the images of a batch.

    Attributes:
        processor: brings them to the size and the range that the model takes.
    """

    processor: BaseImageProcessor

    def __call__(self, examples: Sequence[Mapping]) -> dict[str, Tensor]:
        """Return [B, channels, height, width] pixels, and [B] labels if the examples have them."""
        images = [read_image(example[FILE]) for example in examples]
        batch = {PIXELS: self.processor(images=images, return_tensors="pt")[PIXELS]}
        if "labels" in examples[0]:
            batch["labels"] = torch.tensor([example["labels"] for example in examples])
        return batch


@dataclass(frozen=True)
class Mirrored:
    """The model's own loss, on images of which some are mirrored left to right.

    The choice is drawn in the process that trains, as dropout is: a resumed run mirrors the same images as one that was
    not interrupted.

    Attributes:
        probability: that an image is mirrored.
    """

    probability: float

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch, with images mirrored."""
        pixels = batch[PIXELS]
        chosen = (torch.rand(len(pixels)) < self.probability).to(pixels.device)  # (B)
        mirrored = torch.where(chosen[:, None, None, None], pixels.flip(AXIS), pixels)
        return model(**{**batch, PIXELS: mirrored}).loss
