"""Head statistics and their files: one safetensors file and one JSON file, complete or absent."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from collab_heads.base.checks import did_you_mean
from collab_heads.base.report import Cell, Report
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.atomic import write_file
from collab_heads.files.folders import alone_in
from collab_heads.files.reading import check_file, read_document
from collab_heads.sites.site import AttentionSite

TENSORS, DESCRIPTION = "head_statistics.safetensors", "head_statistics.json"
VERSION = 1


def write_statistics(folder: Path, tensors: Mapping[str, Tensor], description: Mapping) -> None:
    """Write both files, each whole or not at all; the JSON file comes last and marks them complete."""
    content = save({name: each.contiguous() for name, each in tensors.items()})
    with alone_in(folder):
        new = write_file(folder / f"{TENSORS}.new", content)  # what is most likely to fail comes before any change
        (folder / DESCRIPTION).unlink(missing_ok=True)  # or an old one would describe the new tensors for a moment
        os.replace(new, folder / TENSORS)
        write_file(folder / DESCRIPTION, (json.dumps({"version": VERSION, **description}) + "\n").encode())


def read_statistics(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Read both files.

    Returns:
        The tensors by name, and the description.
    """
    description = read_document(folder / DESCRIPTION, VERSION, "description of head statistics", dict)
    path = folder / TENSORS
    check_file(path)
    try:
        return load_file(path), description
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is missing or damaged: {error!r}") from error


Measure = Literal["confidence", "entropy", "attention_distance", "first_token", "cosine", "l2"]
OF_HEADS: tuple[Measure, ...] = ("confidence", "entropy", "attention_distance", "first_token")  # a number per head
OF_PAIRS: tuple[Measure, ...] = ("cosine", "l2")  # a number per pair of heads
MEASURES = OF_HEADS + OF_PAIRS
OF_SOME = ("first_token", "alphas")  # measures that only some sites have
# role -> stack and name of the attention, as Azov and Landau key their statistics
PLACES = {
    "enc-self": ("encoder", "self_attn"),
    "dec-self": ("decoder", "self_attn"),
    "dec-enc": ("decoder", "enc_attn"),
}


@dataclass(frozen=True, eq=False)
class HeadStatistics(Report):
    """The result of `head_statistics`; tensors are float64 on the CPU.

    Attributes:
        sites: the sites that have heads, in model order.
        measures: the measures that were taken.
        excluded: ids of the tokens that did not count as queries.
        tokens: path -> number of query tokens, summed over the layers of a module that serves several.
        confidence: path -> [H], mean over query tokens of the head's largest attention weight.
        entropy: path -> [H], mean entropy of the head's attention weights, in nats.
        attention_distance: path -> [H], mean distance in tokens from a query to the tokens that it attends to.
        first_token: path -> [H], mean weight on the first token of the sequence, over the query tokens after it;
            self-attention only.
        cosine: path -> [H, H], mean over query tokens of the cosine between the outputs of two heads.
        l2: path -> [H, H], mean Euclidean distance, likewise.
        alphas: path -> [H, H], for the sites that have alphas.
    """

    sites: tuple[AttentionSite, ...]
    measures: tuple[str, ...]
    excluded: tuple[int, ...]
    tokens: Mapping[str, int]
    confidence: Mapping[str, Tensor] = field(default_factory=dict)
    entropy: Mapping[str, Tensor] = field(default_factory=dict)
    attention_distance: Mapping[str, Tensor] = field(default_factory=dict)
    first_token: Mapping[str, Tensor] = field(default_factory=dict)
    cosine: Mapping[str, Tensor] = field(default_factory=dict)
    l2: Mapping[str, Tensor] = field(default_factory=dict)
    alphas: Mapping[str, Tensor] = field(default_factory=dict)

    def distance(self, path: str) -> Tensor:
        """Return [H], the mean Euclidean distance of every head to the other heads of its site; 0 for a single head.

        Args:
            path: of a site.

        Raises:
            ArgumentError: if "l2" was not measured, or no site with heads has this path.
        """
        if "l2" not in self.measures:
            raise ArgumentError(f'distances need the measure "l2"; these are {", ".join(self.measures)}')
        if path not in self.l2:
            raise ArgumentError(f"no statistics of {path!r}{did_you_mean(path, self.l2)}")
        return mean_distance(self.l2[path])

    def per_site(self, site: AttentionSite) -> dict[str, Tensor]:
        """Return measure (or "alphas") -> tensor for one site.

        Args:
            site: one of `sites`.
        """
        return {name: getattr(self, name)[site.path] for name in self.names() if site.path in getattr(self, name)}

    def names(self) -> tuple[str, ...]:
        """Return the names of the measures, and "alphas"."""
        return (*self.measures, "alphas")

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON, of the measures that were taken."""
        left_out = {*MEASURES} - {*self.measures}
        return {name: value for name, value in super().to_dict().items() if name not in left_out}

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, HeadStatistics) else NotImplemented

    def columns(self) -> dict[str, Cell]:
        columns: dict[str, Cell] = {"site": "{.path}", "role": "{.role}", "heads": "{.heads_in_words}"}
        columns["tokens"] = lambda site: str(self.tokens[site.path])
        for name in (each for each in MEASURES if each in self.measures):
            form = spread if name in OF_HEADS else pair_mean
            columns[name.replace("_", " ")] = partial(cell, form, getattr(self, name))
        return columns

    def closing(self) -> str:
        ends = f"without the token ids {', '.join(map(str, self.excluded))}" if self.excluded else "of any kind"
        return f"means over query tokens {ends}, and the range over heads; cosine and l2 over pairs"

    def save(self, folder: str | Path) -> None:
        """Write `head_statistics.safetensors` and `head_statistics.json` into a folder, which may hold other files.

        Tensors are named like `encoder.0.self_attn.confidence`. The JSON file describes them and repeats all numbers,
        nested as `{"encoder": [{"self_attn": {...}}, ...], "decoder": [{"self_attn": {...}, "enc_attn": {...}}, ...]}`,
        with an entry per layer that is empty if nothing was measured. Complete files replace old ones.

        Args:
            folder: is made where it is missing.

        Source: the nesting: Azov and Landau 2020 (MHR-NLP-Transformers).
        """
        sites = [
            {**s.to_dict(), "tokens": self.tokens[s.path]} | {name: s.path in getattr(self, name) for name in OF_SOME}
            for s in self.sites
        ]
        described = {"measures": self.measures, "excluded": self.excluded, "sites": sites}
        tensors = {f"{prefix(s)}.{name}": each for s in self.sites for name, each in self.per_site(s).items()}
        write_statistics(Path(folder), tensors, described | self.nested())

    def nested(self) -> dict[str, list[dict]]:
        """Return stack -> per layer: name of the attention -> measure -> numbers."""
        stacks: dict[str, list[dict]] = {"encoder": [], "decoder": []}
        for site in self.sites:
            stack, attention = PLACES[site.role]
            layers = stacks[stack]
            layers += [{} for _ in range(site.layer + 1 - len(layers))]
            layers[site.layer][attention] = {name: each.tolist() for name, each in self.per_site(site).items()}
        return stacks

    @classmethod
    def load(cls, folder: str | Path) -> "HeadStatistics":
        """Read the files that `save` wrote.

        Args:
            folder: of the two files.

        Raises:
            DataError: if a file is missing, damaged or of another version, or the two do not fit each other.
        """
        folder = Path(folder)
        tensors, described = read_statistics(folder)
        try:
            sites = [AttentionSite.from_dict(each) for each in described["sites"]]
            tokens = {each["path"]: int(each["tokens"]) for each in described["sites"]}
            measures, excluded = tuple(described["measures"]), tuple(described["excluded"])
            values = {name: pick(tensors, name, sites) for name in measures if name not in OF_SOME}
            for name in OF_SOME:
                some = [site for site, each in zip(sites, described["sites"], strict=True) if each.get(name)]
                values[name] = pick(tensors, name, some)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder}: its head statistics are incomplete: {error!r}") from error
        return cls(tuple(sites), measures, excluded, tokens, **values)


def prefix(site: AttentionSite) -> str:
    """Return the place of a site, such as "decoder.2.enc_attn"."""
    stack, attention = PLACES[site.role]
    return f"{stack}.{site.layer}.{attention}"


def pick(tensors: Mapping[str, Tensor], name: str, sites: Sequence[AttentionSite]) -> dict[str, Tensor]:
    """Return path -> tensor for one measure; raise ValueError if a shape does not fit the number of heads."""
    of_measure = {site.path: tensors[f"{prefix(site)}.{name}"] for site in sites}
    for site in sites:
        if of_measure[site.path].shape != (site.num_heads,) * (1 if name in OF_HEADS else 2):
            raise ValueError(
                f"{prefix(site)}.{name} is {tuple(of_measure[site.path].shape)}, of {site.num_heads} heads"
            )
    return of_measure


def cell(form: Callable[[Tensor], str], values: Mapping[str, Tensor], site: AttentionSite) -> str:
    return form(values[site.path]) if site.path in values else "-"


def spread(values: Tensor) -> str:
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def pair_mean(matrix: Tensor) -> str:
    heads = len(matrix)
    return f"{float((matrix.sum() - matrix.trace()) / (heads * (heads - 1))):.3f}" if heads > 1 else "-"


def mean_distance(distances: Tensor) -> Tensor:
    """Return the mean over the other heads, [H, H] -> [H]; 0 for a lone head."""
    return (distances.sum(-1) - distances.diagonal()) / max(1, len(distances) - 1)
