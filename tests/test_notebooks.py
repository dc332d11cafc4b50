"""The notebooks run from top to bottom, with a tiny model and generated sentences."""

import ast
import hashlib
import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
import torch
from translation_models import model, pairs, tokenizer

import collab_heads

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = ("translate", "attention_maps", "dead_heads", "compress", "contributions")
MODULES = {"collab_heads", "collab_heads.analysis"}  # beside these two, what users import
PUBLIC = {
    "collab_heads": set(collab_heads.__all__),
    "collab_heads.analysis": {"plots"},
    "collab_heads.analysis.plots": None,  # any name that is not private
    "collab_heads.analysis.measures.head_history": {"HeadHistory", "Moment"},
}
TRAIN_STEPS, TRAIN_BATCH = 60, 32
SMALL = {"PAIRS": 12, "STEPS": 6, "MAX_TOKENS": 12, "SENTENCE": 1}


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


def labelled(tok, texts: dict[str, list[str]]) -> dict:
    batch = dict(tok(texts["source"], text_target=texts["target"], padding=True, return_tensors="pt"))
    batch["labels"].masked_fill_(batch["labels"] == tok.pad_token_id, -100)
    return batch


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, str]:
    """The environment of a small run: a Marian that knows some words of the grammar's languages, and pairs of them."""
    folder = tmp_path_factory.mktemp("tiny")
    tok, tiny = tokenizer("marian", folder / "vocabulary"), model("marian")
    optimizer = torch.optim.AdamW(tiny.train().parameters(), lr=1e-2)
    data = pairs(TRAIN_STEPS * TRAIN_BATCH, seed=5)
    for start in range(0, TRAIN_STEPS * TRAIN_BATCH, TRAIN_BATCH):
        batch = labelled(tok, {side: texts[start : start + TRAIN_BATCH] for side, texts in data.items()})
        tiny(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tiny.save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    found = {"MODEL": str(folder / "model")}
    for side, texts in pairs(SMALL["PAIRS"] + 5, seed=6).items():
        path = folder / f"pairs.{side}"
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        found[side.upper()] = str(path)
    return {f"COLLAB_HEADS_{name}": str(value) for name, value in (found | SMALL).items()}


@pytest.fixture
def run(settings, tmp_path):
    """Run a notebook in a kernel of this Python, in an empty folder: the notebook with its outputs."""
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    def execute(name: str) -> nbformat.NotebookNode:
        notebook = read(name)
        with tempfile.TemporaryDirectory(prefix="nb") as sockets:  # short: the path of a socket has a limit
            manager = KernelManager(
                # no installed kernels: "python3" is then ipykernel in this very Python
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
                kernel_name="python3",
                transport="ipc" if os.name == "posix" else "tcp",  # a sandbox may lack even the loopback device
                connection_file=str(Path(sockets, "kernel.json")),
            )
            client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
            own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": sockets, "MPLBACKEND": "agg"}
            try:
                client.execute(env={**os.environ, **own, **settings})
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


@pytest.mark.parametrize("name", NAMES)
def test_they_use_what_is_public(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code(notebook):
        assert private_imports(cell.source) == []
    assert private_imports("from collab_heads.layers.gates import HeadGates") == ["collab_heads.layers.gates.HeadGates"]


@pytest.mark.parametrize("name", NAMES)
def test_their_outputs_are_of_this_code_and_of_no_machine(name):
    """`python benchmarks/notebooks.py` writes them; a page that shows them must not be heavy."""
    notebook, stored = read(name), (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    source = "\0".join(cell.source for cell in code(notebook))
    assert notebook.metadata.collab_heads["code"] == hashlib.sha256(source.encode()).hexdigest(), "run it again"
    kinds = {(output.output_type, output.get("name")) for cell in code(notebook) for output in cell.outputs}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    assert printed(notebook) and (name == "translate" or pictures(notebook))
    assert len(stored) < 600_000
    assert not re.search(r"/(work|tmp|home|root)/", stored)


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
    assert pictures(notebook) == 7 and "what it does" in printed(notebook)
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
