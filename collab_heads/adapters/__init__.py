"""One adapter per model family. The files are in the top-level `adapters/` folder of the repository.

A built distribution puts them here; in a checkout, where they are not here, the folder beside `pyproject.toml` is read.
A file is imported when a model type of it is asked for: it imports the modelling code of its family.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType

from collab_heads.contract.registry import register_later

_checkout = Path(__file__).resolve().parents[2]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "adapters").is_dir():
    __path__.append(str(_checkout / "adapters"))


def _model_types(source: str) -> list[str]:
    """Return the model types that a file serves, from its source: those in `model_types = (...)` of its classes."""
    classes = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
    entries = [each for made in classes for each in made.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    stated = [each.value for each in entries if each.value and ast.unparse(each).startswith("model_types")]
    return [model_type for each in stated for model_type in ast.literal_eval(each)]


_files = {file.stem: file for folder in __path__ for file in Path(folder).glob("*.py") if file.stem != "__init__"}
for _name, _file in sorted(_files.items()):
    register_later(f"{__name__}.{_name}", _model_types(_file.read_text(encoding="utf-8")))


def __getattr__(name: str) -> ModuleType:
    if name not in _files:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
