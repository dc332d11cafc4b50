"""Every target of `make bench-NAME` on its smallest input (`make try-benchmarks`): it runs, and makes rows like those
that are stored, in a folder of its own.
"""

import gzip
import importlib
import json
import multiprocessing
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from pages import ROOT
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MPNetConfig, MPNetModel

BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
targets, tries, common = map(importlib.import_module, ("targets", "tries", "common"))
LINES = {"train": 300, "dev": 40}  # of a file of data, by the begin of its name; others have as many as "dev"
MISSED = re.compile("FAIL: ")  # a bar, by a tiny model on a busy machine
PACKAGES = "ctranslate2|gguf|llama_cpp|nncf|onnx|onnxruntime|openvino|torch_pruning"
MISSING = re.compile(f"^skipped: | is missing|MissingPackageError|PackageNotFoundError|No module named '({PACKAGES})'")
SIDE = {"hidden_size": 64, "intermediate_size": 64}
DECODER, ENCODER = "smollm2-135m-instruct", "all-mpnet-base-v2"


def cut(text: str, path: Path) -> str:
    """Return the first lines of a file, or its first sentences."""
    count = LINES.get(path.name.split(".")[0], LINES["dev"])
    if path.suffix == ".conllu":
        return "\n\n".join(text.split("\n\n")[:count]) + "\n\n"
    return "".join(text.splitlines(keepends=True)[: count + 1])  # and a header


def write_data(folder: Path) -> None:
    """Write the shared folder with short files; its models are small."""
    for path in (common.SHARED / "data").rglob("*.*"):
        opened, place = gzip.open if path.suffix == ".gz" else open, folder / path.relative_to(common.SHARED)
        if path.suffix == ".md":
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        with opened(path, "rt", encoding="utf-8", newline="") as file, opened(place, "wt", newline="") as short:
            short.write(cut(file.read(), path))
    (folder / "models").symlink_to(common.SHARED / "models")


def write_models(folder: Path) -> None:
    """Write an all-MiniLM-L6-v2 of two layers, and tiny models of the types of the others."""
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "intermediate_size": 64, "ignore_mismatched_sizes": True}
    tokenizer, model = (
        AutoTokenizer.from_pretrained(common.minilm()),
        AutoModel.from_pretrained(common.minilm(), **small),
    )
    pieces = AutoTokenizer.from_pretrained(common.shared("models/qwen3-multi30k-en"))
    encoder = MPNetConfig(vocab_size=len(tokenizer) + 2, num_hidden_layers=2, num_attention_heads=4, **SIDE)
    heads = {"initializer_range": 0.2, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    decoder = LlamaConfig(
        vocab_size=len(pieces), bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, **SIDE, **heads
    )
    made = {"minilm": (model, tokenizer), ENCODER: (MPNetModel(encoder), tokenizer)}
    for name, both in (made | {DECODER: (LlamaForCausalLM(decoder), pieces)}).items():
        for each in both:
            each.save_pretrained(folder / name)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of small data and models."""
    if not (common.SHARED / "data").exists():
        pytest.skip(f"{common.SHARED} is missing: set COLLAB_HEADS_SHARED")
    try:
        common.minilm()
    except metadata.PackageNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("small")
    write_data(folder / "shared")
    write_models(folder)
    return folder


@pytest.fixture(scope="session")
def processes():
    """Processes that begin with what most programs import, and with nothing of a program."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["collab_heads", "run_glue", "run_translation"])
    return found


def ran(processes, command: str, small: Path, folder: Path) -> str:
    """Run a command; return what it says is missing, or nothing."""
    environment = {"TMPDIR": str(folder), "COLLAB_HEADS_TRY": str(folder), "COLLAB_HEADS_SHARED": str(small / "shared")}
    models = {"SMOLLM2": str(small / DECODER), "MPNET": str(small / ENCODER)}
    program, *arguments = targets.filled(command, environment | models | {"WORK": str(folder)})
    given = program, arguments, environment, str(folder / "said.txt")
    process = processes.Process(target=tries.started, args=given, daemon=True)
    process.start()
    process.join()
    text = (folder / "said.txt").read_text()
    last = text.strip().rpartition("\n")[2]
    is_right = not process.exitcode or MISSED.match(last) or MISSING.search(last)
    assert is_right, f"{command} ended with {process.exitcode}:\n{text[-5000:]}"
    return last if MISSING.search(last) else ""


def rows_of(folder: Path, record: str) -> list[dict]:
    """Return the rows of a record; none where there is none."""
    place = folder / f"{record}.json"
    return json.loads(place.read_text())["rows"] if place.exists() else []


@pytest.mark.parametrize("name", tries.TRIES)
def test_a_target_makes_rows_like_those_that_are_stored(name, small, processes, tmp_path):
    for model in ("minilm", DECODER, ENCODER):
        (tmp_path / model).symlink_to(small / model)
    missing = ""
    for command in tries.TRIES[name]:
        missing = missing or ran(processes, command, small, tmp_path)
    for record in targets.results_of(name):
        made, stored = (rows_of(folder, record) for folder in (tmp_path / "results", common.RESULTS))
        lacking = [old.keys() - new.keys() for old in stored for new in made]
        assert missing or made, f"{record} has no rows"
        assert missing or not stored or set() in lacking, f"{record} lacks {min(lacking, key=len)}"
    if missing:
        pytest.skip(missing)
