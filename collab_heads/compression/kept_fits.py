"""Keep fits beside the file of measurements until `compress` is done: one that was killed goes on from there."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from collab_heads.compression.bits import GridFit
from collab_heads.compression.parts.heads import KeptHeads
from collab_heads.compression.parts.neurons import KeptNeurons
from collab_heads.compression.parts.part import Fit, RefittedOutput
from collab_heads.compression.parts.query_key import Projection
from collab_heads.compression.parts.shape import Choice
from collab_heads.compression.parts.values import NarrowValues
from collab_heads.errors import DataError
from collab_heads.files.atomic import write_file
from collab_heads.files.checkpoint import digest_of
from collab_heads.layers.query_key import QueryKey
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.layers.values import ValueWeights
from collab_heads.layers.weight_grid import GridWeights
from collab_heads.model.apply_state import OutputWeights
from collab_heads.sites.state import QueryKeyState, ValueState

END, KEY = ".fits", "fits"
STORED = {  # what fits consist of
    each.__name__: each
    for each in (
        *(KeptHeads, KeptNeurons, NarrowValues, Projection, RefittedOutput, GridFit),
        *(OutputWeights, ValueWeights, ValueState, QueryKeyState, GridWeights),
    )
}


@dataclass(frozen=True)
class KeptFits:
    """The fits of a run that are done.

    Attributes:
        folder: holds one file a site and choice; None to keep nothing. Other runs may keep theirs there.
        run: the description of the run: its model, batches and options.
    """

    folder: Path | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def beside(cls, file: str | Path | None, run: Mapping[str, Any]) -> "KeptFits":
        """Return the fits that belong to a file of measurements."""
        return cls(None if file is None else Path(f"{file}{END}"), run)

    def place(self, path: str, choices: Mapping[str, Choice]) -> Path | None:
        """Return the file of a site's fits, which depend on some choices."""
        if self.folder is None:
            return None
        sizes = {name: (dict(choice.sizes), choice.bits) for name, choice in choices.items()}
        return self.folder / f"{self.prefix}{digest_of([('choices', sizes), ('site', path)])}.safetensors"

    @property
    def prefix(self) -> str:
        """The beginning of the names of this run's files."""
        return f"{digest_of([('run', dict(self.run))])}-"

    def find(self, path: str, choices: Mapping[str, Choice]) -> list[Fit] | None:
        """Return the fits of a site, None if there are none.

        Args:
            path: of the site.
            choices: path -> choice, of all sites on which the fits depend.

        Raises:
            DataError: if the file is damaged.
        """
        file = self.place(path, choices)
        if file is None or not file.exists():
            return None
        try:
            with safe_open(file, "pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}
                return [unpacked(each, tensors) for each in json.loads(stored.metadata()[KEY])]
        except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise DataError(f"{file} holds no fits of a site ({error}): delete it to fit the site again") from error

    def add(self, path: str, choices: Mapping[str, Choice], fits: Sequence[Fit]) -> None:
        """Write the fits of a site.

        Raises:
            OutputError: if the file cannot be written.
        """
        if (file := self.place(path, choices)) is not None:
            tensors: dict[str, Tensor] = {}
            described = json.dumps([packed(each, tensors) for each in fits])
            write_file(file, save(tensors, {KEY: described}))

    def remove(self) -> None:
        """Delete what this run has kept, and the folder if nothing else is there."""
        if self.folder is not None:
            with suppress(OSError):
                for file in self.folder.glob(f"{self.prefix}*"):
                    file.unlink()
                self.folder.rmdir()


def packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a part of a fit as JSON; tensors are added to `tensors`, and stand under their names there."""
    if isinstance(value, Tensor):
        name = f"{len(tensors):03}"
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, QueryKey):
        weights = {name: packed(each, tensors) for name, each in value.state_dict().items()}
        frozen = [name for name, each in value.named_parameters() if not each.requires_grad]
        about = {"heads": value.num_heads, "weights": weights, "frozen": frozen, "training": value.training}
        return {"query_key": packed(value.state, tensors), **about}
    if dataclasses.is_dataclass(value):
        fields = {each.name: packed(getattr(value, each.name), tensors) for each in dataclasses.fields(value)}
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [packed(each, tensors) for each in value]
    return value


def unpacked(stored: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `packed` described, on the devices where it was; other errors on anything else."""
    if isinstance(stored, list):
        return [unpacked(each, tensors) for each in stored]
    if not isinstance(stored, dict):
        return stored
    if "tensor" in stored:
        return tensors[stored["tensor"]].to(stored["device"])
    if "query_key" in stored:
        weights = {name: unpacked(each, tensors) for name, each in stored["weights"].items()}
        query, key = (weights[f"{name}.weight"] for name in ("shared_query", "shared_key"))
        state, dims = unpacked(stored["query_key"], tensors), (query.shape[1], key.shape[1])
        made = build_query_key(state, stored["heads"], *dims, device=query.device, dtype=query.dtype)
        made.load_state_dict(weights)
        for name in stored["frozen"]:
            made.get_parameter(name).requires_grad_(False)
        return made.train(stored["training"])
    fields = {name: unpacked(each, tensors) for name, each in stored["fields"].items()}
    return STORED[stored["class"]](**fields)
