"""Names of models and data for reports, which travel further than the folders of the machine that made them."""

from pathlib import Path


def portable(name: str) -> str:
    """What a model or a file is called anywhere: the last two parts of an absolute path; any other name as it is."""
    path = Path(name)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else name
