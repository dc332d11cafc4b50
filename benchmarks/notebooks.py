"""The notebooks with their outputs, so that they show on a repository's page.

python benchmarks/notebooks.py [--names translate ...]

Runs them from top to bottom, those on translation with the small Marian of the shared folder and the pairs beside them,
the others as they are, and writes them back with what they printed and drew. Progress bars and warnings are left out;
pictures have at most 256 colours. The metadata say of which code and versions the outputs are, and how many seconds the
run took on one thread: a test compares.
"""

import argparse
import base64
import hashlib
import io
import os
import resource
import shutil
import tempfile
import time

import nbformat
from nbclient import NotebookClient
from PIL import Image

from collab_heads.demo.models import PACKAGE
from common import ROOT, shared, versions

FOLDER = ROOT / "notebooks"
MODEL = "models/marian-multi30k-de-en"
ENCODERS = ("compress", "serve")  # run with the model that they bring
KEPT = ("stream", "display_data", "execute_result")


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return the SHA-256 of the code of a notebook."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode("utf-8")).hexdigest()


def executed(name: str) -> nbformat.NotebookNode:
    """Run a notebook and return it with its new outputs."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if name not in ENCODERS:
        settings = {"MODEL": str(shared(MODEL)), "SOURCE": "pairs.de", "TARGET": "pairs.en"}
        environment |= {f"COLLAB_HEADS_{key}": value for key, value in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        for pairs in FOLDER.glob("pairs.*"):
            shutil.copy(pairs, folder)
        client = NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}})
        began, used = time.perf_counter(), cpu_of_children()
        client.execute(env=environment)
        seconds = {"wall": time.perf_counter() - began, "cpu": cpu_of_children() - used}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = nbformat.NotebookNode()
            cell.outputs = [light(output) for output in cell.outputs if is_kept(output)]
    notebook.metadata["collab_heads"] = {
        "code": digest(notebook),
        "model": PACKAGE if name in ENCODERS else MODEL,
        "versions": versions(),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    return notebook


def cpu_of_children() -> float:
    """Return the seconds that ended processes of this one computed, which other programs do not lengthen as much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def is_kept(output: nbformat.NotebookNode) -> bool:
    """Return True if an output is for readers: neither a progress bar nor a warning."""
    return output.output_type in KEPT and output.get("name") != "stderr"


def light(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return an output with a smaller picture."""
    if "image/png" in output.get("data", {}):
        picture, stored = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))), io.BytesIO()
        picture.convert("RGB").quantize(256).save(stored, "PNG", optimize=True)
        output.data["image/png"] = base64.b64encode(stored.getvalue()).decode("ascii")
    return output


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("--names", nargs="+", default=names, choices=names)
    for name in parser.parse_args().names:
        notebook, path = executed(name), FOLDER / f"{name}.ipynb"
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        print(name, f"{path.stat().st_size / 1e3:.0f} kB", notebook.metadata["collab_heads"]["seconds"], flush=True)


if __name__ == "__main__":
    main()
