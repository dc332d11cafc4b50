"""Parallel text: pairs of sentences from text files, from tables, or from the Hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from collab_heads.data.tables import check_columns, is_table, read_table, read_text, text_of
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import check_field

TRANSLATION = "translation"  # the column of Hub data sets: {"de": "...", "en": "..."}
Pairs = dict[str, list[str]]  # "source" and "target" -> sentences


@dataclass(frozen=True)
class Corpus:
    """Sentences and their translations.

    Attributes:
        name: of the data set, or of the first file.
        splits: "train", "validation", "test" -> "source" and "target" -> sentences.
        dropped: split -> pairs left out because a side was empty.
    """

    name: str
    splits: Mapping[str, Pairs]
    dropped: Mapping[str, int]

    def named(self, name: str) -> list[str]:
        return [name] if name in self.splits else []

    def first(self, limits: Mapping[str, int | None]) -> "Corpus":
        """Return only the first pairs; `limits`: split -> how many, or None for all."""
        splits = {
            split: {side: lines[: limits.get(split)] for side, lines in pairs.items()}
            for split, pairs in self.splits.items()
        }
        return Corpus(self.name, splits, self.dropped)


def from_files(files: Mapping[str, Sequence[str | Path]], source: str | None, target: str | None) -> Corpus:
    """Read a corpus from files.

    Args:
        files: split -> one table (see `read_table`: a column per language, or a column `translation` that holds both),
            or two text files with a sentence a line (source first). Both may be packed (`.gz`, `.zip`).
        source: language of the input, which is the name of its column; not needed for text files.
        target: language of the output.
    """
    splits, dropped = {}, {}
    for split, names in files.items():
        paths = [Path(name) for name in names]
        if len(paths) == 2:
            sides = read_two(paths[0], paths[1])
        elif len(paths) == 1:
            if not is_table(paths[0]):
                raise ArgumentError(f"{paths[0]} is one text file: give two, the source and its translation")
            if source is None or target is None:
                raise ArgumentError(f"{paths[0]} is a table: name its columns with --source_lang and --target_lang")
            sides = pairs_of(paths[0], read_table(paths[0]), source, target)
        else:
            raise ArgumentError(f"{len(paths)} files for {split}: give one table, or two text files")
        splits[split], dropped[split] = without_empty(" and ".join(map(str, paths)), *sides)
    return Corpus(str(next(iter(files.values()))[0]), splits, dropped)


def from_hub(name: str, config: str | None, source: str, target: str, *, splits: Sequence[str]) -> Corpus:
    """Download a corpus from the Hub; it has a column `translation`, or one per language."""
    import datasets

    pairs, dropped = {}, {}
    for split in splits:
        try:
            rows = list(datasets.load_dataset(name, config, split=split))
        except Exception as error:  # whatever the Hub and its loaders raise, with what was asked for
            raise DataError(f"cannot load {name!r} ({config}), split {split!r}: {error}") from error
        where = f"{name}, split {split}"
        pairs[split], dropped[split] = without_empty(where, *pairs_of(where, rows, source, target))
    return Corpus(name, pairs, dropped)


def read_two(source: Path, target: Path) -> list[list[str]]:
    """Read two text files with one sentence per line."""
    sides = [read_lines(source), read_lines(target)]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: they must be translations of "
            "each other, line by line"
        )
    return sides


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, packed or not; only a newline ends a line."""
    lines = [line.rstrip("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, 1):
        check_field(f"{path}, line {number}", None, line)
        if "\0" in line:  # valid UTF-8, but no text file has them
            raise DataError(f"{path}, line {number}: a null byte, so it is not a text file: give one, in UTF-8")
    return lines


def pairs_of(where: str | Path, rows: Sequence[Mapping], source: str, target: str) -> list[list[str]]:
    """Return the sentences of the two languages, in the order of the rows, without line breaks."""
    return [[text.replace("\n", " ") for text in side] for side in columns_of(where, rows, (source, target))]


def columns_of(where: str | Path, rows: Sequence[Mapping], names: Sequence[str]) -> list[list[str]]:
    """Return the texts of some columns, or what a column `translation` holds of them; "" where there is null."""
    if not rows:
        raise DataError(f"{where} has no rows")
    if TRANSLATION in rows[0] and TRANSLATION not in names and not set(names) <= rows[0].keys():
        rows = [row.get(TRANSLATION) or {} for row in rows]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise DataError(f"{where}, row {number}: its {TRANSLATION} is {row!r:.80}, expected an object")
    check_columns(where, rows, names)
    columns: list[list[str]] = [[] for _ in names]
    for number, row in enumerate(rows, 1):
        for column, name in zip(columns, names, strict=True):
            field = f"{where}, row {number}, column {name!r}"
            text = "" if row[name] is None else text_of(row[name], field)
            check_field(field, None, text)
            column.append(text)
    return columns


def without_empty(where: str, source: Sequence[str], target: Sequence[str]) -> tuple[Pairs, int]:
    """Drop pairs with an empty side; return the others and how many were dropped, which is also printed."""
    full = [i for i, pair in enumerate(zip(source, target, strict=True)) if all(line.strip() for line in pair)]
    if not full:
        raise DataError(f"{where}: no pair has text on both sides")
    if missing := len(source) - len(full):
        tqdm.write(f"{where}: dropped {missing} of {len(source):,} pairs with an empty side")
    return {"source": [source[i] for i in full], "target": [target[i] for i in full]}, missing
