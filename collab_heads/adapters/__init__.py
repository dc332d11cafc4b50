"""One adapter per model family. The files are in the top-level `adapters/` folder of the repository.

A built distribution puts them here; in a checkout, where they are not here, the folder beside `pyproject.toml` is read.
"""

import importlib
import pkgutil
from pathlib import Path

_checkout = Path(__file__).resolve().parents[2]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "adapters").is_dir():
    __path__.append(str(_checkout / "adapters"))

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")  # every family registers its adapter
