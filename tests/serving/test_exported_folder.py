"""The content of a folder is checked before it is used: types, files, shapes, and each bit."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from damaged_exports import copied, edits, flipped, hostile, outcome, unwanted
from model_sizes import VOCABULARY

from collab_heads import export, load_exported
from collab_heads.errors import DataError
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")

ENGINES = ("onnx", "openvino")


def inputs():
    tokens = torch.randint(4, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@torch.no_grad()
def expected_of(folder):
    return load_exported(folder, threads=1)(**inputs())


def description(folder):
    return json.loads((folder / "export.json").read_text())


def write(folder, edited, file="export.json"):
    (folder / file).write_text(json.dumps(edited))


@pytest.fixture
def bad(folder, tmp_path):
    """A copy made by hand, without the digests."""
    return copied(folder, tmp_path / "bad", manifest=False)


@pytest.mark.slow
def test_no_code_of_a_folder_runs(bad, monkeypatch):
    """The module that the folder names stands on the path, and says so when it is imported."""
    (bad / "hostile.py").write_text("raise SystemExit('code of the folder ran')\n")
    monkeypatch.syspath_prepend(str(bad))
    for what, edited in hostile(description(bad)):
        write(bad, edited)
        outcomes = Counter([outcome(bad, inputs(), None)])
        assert not unwanted(outcomes) and "hostile" not in sys.modules, (what, outcomes)
        if "Cache" not in what:  # what a cache says is left aside, and its tensors must be those of the graph
            assert outcomes == {"seen": 1}, what


@pytest.mark.parametrize(
    "said",
    [
        {"auto_map": {"AutoConfig": "hostile.Config"}},
        {"auto_map": {"AutoConfig": "hostile.Config"}, "model_type": "hostile"},
        {"attn_implementation": "someone/kernels"},
        {"configuration_files": ["config.0.0.0.json"]},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
    ],
)
def test_a_config_names_no_code(said, bad, monkeypatch):
    """Neither of the folder nor of the Hub."""
    (bad / "hostile.py").write_text("raise SystemExit('code of the folder ran')\n")
    monkeypatch.syspath_prepend(str(bad))
    write(bad, json.loads((bad / "config.json").read_text()) | said, "config.json")
    if "model_type" in said:
        with pytest.raises(
            DataError, match=r"config\.json is damaged.*model_type is 'hostile'.*export the model again"
        ):
            load_exported(bad)
    else:
        assert load_exported(bad).config._attn_implementation == "eager"


def test_a_folder_copied_by_hand_loads(bad, folder):
    assert outcome(bad, inputs(), expected_of(folder)) == "same"


def test_edits_of_the_description(bad, folder):
    """Some of all; the slow test goes over more, and over decoders."""
    expected, whole = expected_of(folder), list(edits(description(bad)))
    outcomes = Counter()
    for _, edited in random.Random(0).sample(whole, 40):
        write(bad, edited)
        outcomes[outcome(bad, inputs(), expected)] += 1
    assert not unwanted(outcomes) and outcomes["seen"] > 20, outcomes


def edited_in(place, value):
    def edit(whole):
        part = whole
        for name in place[:-1]:
            part = part[name]
        part[place[-1]] = value
        return whole

    return edit


MODEL = ("components", "model")
EDITS = {  # what the message says -> an edit
    r"schema_version is 2, expected 1": edited_in(("schema_version",), 2),
    r"export_format is 'dynamo', expected one of onnx, openvino": edited_in(("export_format",), "dynamo"),
    r"export_format is 'openvino'|file of model is 'model.onnx'": edited_in(("export_format",), "openvino"),
    r"the file of model is '\.\./bad/model\.onnx', expected 'model\.onnx'": edited_in(
        (*MODEL, "file"), "../bad/model.onnx"
    ),
    r"the file of model is '/elsewhere/model\.onnx'": edited_in((*MODEL, "file"), "/elsewhere/model.onnx"),
    r"components has unknown entries \['other'\]": edited_in(("components", "other"), {}),
    r"components is \['encoder'\]|encoder has no file": edited_in(("components",), {"encoder": {}}),
    r"metadata of model has unknown entries \['loader'\]": edited_in((*MODEL, "metadata", "loader"), "x"),
    r"kwargs of model is \['input_ids'\], expected the names of in_spec": edited_in(
        (*MODEL, "metadata", "kwargs"), {"input_ids": {"rank": 2, "shape": [2, 12], "dtype": "int64"}}
    ),
    r"the rank of input_ids is 3, expected 2": edited_in(
        (*MODEL, "metadata", "kwargs", "input_ids"), {"rank": 3, "shape": [2, 12, 1], "dtype": "int64"}
    ),
    r"export_device of model is 'cuda', expected 'cpu'": edited_in((*MODEL, "metadata", "export_device"), "cuda"),
    r"out_constants of model is \[\[0, 1\]\], expected pairs of a number and null": edited_in(
        (*MODEL, "metadata", "out_constants"), [[0, 1]]
    ),
    r"out_constants is \[\[7, None\]\], expected numbers below 2": edited_in(
        (*MODEL, "metadata", "out_constants"), [[7, None]]
    ),
    r"the output 'loss' is 'loss', expected one of the graph|the output is 'loss'": lambda whole: json.loads(
        json.dumps(whole).replace(r"[\\\"logits\\\"]", r"[\\\"loss\\\"]")
    ),
}


@pytest.mark.parametrize("message", EDITS)
def test_what_contradicts_itself_is_named(message, bad):
    write(bad, EDITS[message](description(bad)))
    with pytest.raises(DataError, match=rf"export\.json is damaged.*({message}).*export the model again"):
        load_exported(bad)


def test_each_flip_is_seen(folder, tmp_path):
    """Of the graph, the weights, every JSON file, and the digests themselves."""
    outcomes = Counter(outcome(tmp_path / "bad", inputs(), None) for _ in flipped(folder, tmp_path / "bad", 25))
    assert outcomes == {"seen": 25}


def test_digests_name_the_file_and_may_be_left_out(folder, tmp_path):
    bad = copied(folder, tmp_path / "bad")
    write(bad, json.loads((bad / "config.json").read_text()) | {"id2label": {"0": "good", "1": "bad"}}, "config.json")
    with pytest.raises(DataError, match=r"config\.json has \d+ bytes instead of \d+.*or pass check=False"):
        load_exported(bad)
    assert load_exported(bad, check=False).config.id2label[0] == "good"
    (bad / "config.json").write_bytes((folder / "config.json").read_bytes())
    (bad / "cache.json").write_text("{}")
    with pytest.raises(DataError, match=r"manifest\.json does not list cache\.json: export the model again"):
        load_exported(bad)
    with pytest.raises(DataError, match=r"cache\.json is damaged.*the file has no layers"):
        load_exported(bad, check=False)
    (bad / "manifest.json").write_text('{"name": "of a web page"}')
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        load_exported(bad)


def test_what_is_cut_off_or_gone(bad):
    for file in sorted(file for file in bad.iterdir() if file.name != "README.md"):
        content = file.read_bytes()
        for kept in (None, b"", content[: len(content) // 2], b"\0" * len(content)):
            file.unlink()
            if kept is not None:
                file.write_bytes(kept)
            if file.suffix != ".data" or kept is None or len(kept) < len(content):  # weights of zeros are weights
                with pytest.raises(DataError, match=rf"{file.name}.*(export the model again|not an export to onnx)"):
                    load_exported(bad)
            file.write_bytes(content)
    assert outcome(bad, inputs(), None) == "other"


def moved_weights(folder, location):
    import onnx

    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def test_weights_lie_in_the_folder(bad, tmp_path):
    weights = bad / "model.onnx.data"
    weights.rename(tmp_path / "model.onnx.data")
    for location in ("../model.onnx.data", str(tmp_path / "model.onnx.data"), "config.json"):
        moved_weights(bad, location)
        with pytest.raises(
            DataError, match=r"model\.onnx is damaged.*a file of weights is '.*', expected one of model"
        ):
            load_exported(bad)
    moved_weights(bad, "model.onnx.data")
    weights.symlink_to(tmp_path / "model.onnx.data")
    with pytest.raises(DataError, match=r"model\.onnx\.data leads out of the folder, to .*: put the file itself there"):
        load_exported(bad)


def test_the_cache_of_the_hub_keeps_its_files_elsewhere(folder, tmp_path):
    snapshot = tmp_path / "models--me--served" / "snapshots" / "1"
    shutil.copytree(folder, snapshot)
    blobs = tmp_path / "models--me--served" / "blobs"
    blobs.mkdir()
    for file in snapshot.iterdir():
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert outcome(snapshot, inputs(), expected_of(folder)) == "same"


def test_a_folder_that_is_none(folder, tmp_path):
    with pytest.raises(DataError, match=r"no such folder: '.*/brt' \(did you mean 'bert'\?\)"):
        load_exported(folder.parent / "brt")
    for path in ("nowhere/at/all", "x" * 300, str(folder / "config.json")):
        with pytest.raises(DataError, match="no such folder"):
            load_exported(path)
    with pytest.raises(DataError, match=r"has no export\.json, so it is not an export to onnx, openvino, executorch"):
        load_exported(tmp_path)
    for name in ("openvino", "onnx"):
        (tmp_path / "whole" / name).mkdir(parents=True)
        (tmp_path / "whole" / name / "export.json").write_text("{}")
    with pytest.raises(DataError, match=r"the exports are in onnx, openvino: load one of these folders"):
        load_exported(tmp_path / "whole")
    assert load_exported(str(folder)).config.model_type == "bert"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gpt2", "marian"))
@pytest.mark.parametrize("to", ENGINES)
def test_a_decoder_loads_where_nothing_was_exported(to, name, tmp_path):
    model = FAMILIES[name].build().eval()
    export(model, tmp_path / "served", to)
    options = "max_new_tokens=4, min_new_tokens=4, do_sample=False"
    code = (
        f"import torch; from collab_heads import load_exported; served = load_exported({str(tmp_path / 'served')!r}); "
        f"print(served.generate(torch.arange(4, 10).view(1, 6), {options}).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    expected = model.generate(torch.arange(4, 10).view(1, 6), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert json.loads(found.stdout.splitlines()[-1]) == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("to", ENGINES)
def test_two_hundred_flips(to, tmp_path):
    """Printed: `pytest -s`."""
    outcomes = Counter()
    for name in ("bert", "marian"):
        export(FAMILIES[name].build(), tmp_path / name, to)
        outcomes += Counter(
            outcome(tmp_path / "bad", {}, None) for _ in flipped(tmp_path / name, tmp_path / "bad", 100)
        )
    print(f"\n{to}: 200 one-bit flips of exported folders: {dict(outcomes)}")
    assert outcomes == {"seen": 200}


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [("bert", 400), ("gpt2", 200), ("marian", 100)])
@pytest.mark.parametrize("to", ENGINES)
def test_many_edits_without_digests(to, name, count, tmp_path):
    """Printed: `pytest -s`."""
    good = tmp_path / "served"
    export(FAMILIES[name].build(), good, to)
    expected, bad, outcomes = expected_of(good), copied(good, tmp_path / "bad", manifest=False), Counter()
    whole = list(edits(description(good)))
    todo = list(chain(hostile(description(good)), random.Random(0).sample(whole, count)))
    for what, edited in todo:
        write(bad, edited)
        outcomes[outcome(bad, inputs(), expected)] += 1
        assert not unwanted(outcomes), (what, outcomes)
    print(f"\n{name}, {to}: {len(todo)} edits of export.json: {dict(outcomes)}")
    write(bad, description(good))
    if (good / "cache.json").exists():
        outcomes = Counter()
        for what, edited in edits(json.loads((good / "cache.json").read_text())):
            write(bad, edited, "cache.json")
            outcomes[outcome(bad, inputs(), expected)] += 1
            assert not unwanted(outcomes), (what, outcomes)
        print(f"{name}, {to}: {outcomes.total()} edits of cache.json: {dict(outcomes)}")
