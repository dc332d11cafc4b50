"""Open models in CTranslate2: check their folder, and read the kind that their file says."""

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from collab_heads.base.checks import MAX_SIZE, is_index
from collab_heads.base.extras import check_extra
from collab_heads.errors import DataError, UnsupportedModelError
from collab_heads.files.folders import damage
from collab_heads.files.reading import parse_json, read_text
from collab_heads.serving.exported_folder import CONFIG, naming, read_json
from collab_heads.serving.for_ctranslate2 import POSITIONS
from collab_heads.serving.graph_engines import AGAIN, check_inside
from collab_heads.serving.in_engine import ModelInEngine
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import Texts
from collab_heads.sites.state import expect

WEIGHTS = "model.bin"  # as CTranslate2 names the file
ENCODES = b"TransformerEncoderSpec"  # what the file of an encoder begins with, after two numbers
VERSION = 6  # of that file; one of another version may have its parts elsewhere
TABLE = re.compile(rb"encoder/embeddings_\d/weight\0")  # of tokens, and then of their types


class Converted(ModelInEngine):
    """A model in CTranslate2.

    Args:
        folder: what `export` wrote for CTranslate2.
        config: of the model; gets the positions that the folder says.
        runner: the class of CTranslate2 that runs it.
        does: what it does, for messages.
        threads: of the engine.
        check: whether its files are compared with their digests.

    Raises:
        DataError: if a file in the folder is damaged.
        UnsupportedModelError: if the model is of another kind.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, runner: str, does: str, threads: int, check: bool):
        super().__init__(config)
        check_extra("ctranslate2", "models in CTranslate2")
        import ctranslate2

        if check and (wrong := damage(folder)):
            raise DataError(f"{folder} is damaged: {wrong}: {AGAIN}")
        check_inside(folder / WEIGHTS)
        self.folder, self.width = folder, 0
        self.texts: Texts | None = None
        with naming(folder / CONFIG):
            self.stored = read_json(folder, CONFIG)
            longest = self.config.max_position_embeddings = self.stored.get(POSITIONS)
            valid = longest is None or (is_index(longest, MAX_SIZE) and longest > 0)
            expect(valid, POSITIONS, longest, "a size or null")
        try:
            options = {"device": "cpu", "intra_threads": threads, "inter_threads": 1}
            self.engine = getattr(ctranslate2, runner)(str(folder), **options)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{folder} is no {does} of CTranslate2 ({first_line(error)}): load it with ctranslate2 itself"
            ) from error


def is_converted(folder: Path) -> bool:
    """Return True for a folder with a model for CTranslate2."""
    return os.path.isfile(folder / WEIGHTS) and "model_type" not in config_in(folder)


def encodes(folder: Path) -> bool:
    """Return True if the model in a folder for CTranslate2 is an encoder."""
    with (folder / WEIGHTS).open("rb") as file:
        return file.read(6 + len(ENCODES))[6:] == ENCODES


def table_sizes(folder: Path) -> list[int]:
    """Return how many tokens, and how many types of them, an encoder in CTranslate2 knows, by its file.

    Args:
        folder: of a model that the engine has loaded.
    """
    with (folder / WEIGHTS).open("rb") as file:

        def number(kind: str) -> int:
            return int(struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0])

        found = dict[bytes, int]()
        version, _, _, count = number("I"), file.read(number("H")), number("I"), number("I")
        for _ in range(count if version == VERSION else 0):
            name, shape = file.read(number("H")), [number("I") for _ in range(number("B"))]
            if TABLE.fullmatch(name):
                found[name] = shape[0]
            file.seek(1, os.SEEK_CUR)  # the type of its numbers
            file.seek(number("I"), os.SEEK_CUR)
    return [found[name] for name in sorted(found)]


def config_in(folder: Path) -> Mapping[str, Any]:
    """Return the config in a folder; an empty one if it is none."""
    try:
        found = parse_json(read_text(folder / CONFIG))
    except (DataError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
