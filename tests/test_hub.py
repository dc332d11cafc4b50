"""`push_to_hub` carries the weights, the config, the code and the card, to a Hub on this machine and back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_hub
import pytest
from huggingface_hub import ModelCard

from collab_heads.saving.marks import SENTENCE, SOURCE, WEIGHTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CODE = SOURCE.name
LOAD = """
import sys
from transformers import AutoModelForSequenceClassification as Auto, BertModel
for load in (Auto.from_pretrained, BertModel.from_pretrained):
    try:
        load("me/pushed")
    except ValueError as error:
        print(error)
assert "collab_heads" not in sys.modules
model = Auto.from_pretrained("me/pushed", trust_remote_code=True)
print(type(model.bert.encoder.layer[0].attention.self).__name__)
"""


def python(hub, home, *arguments):
    settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_none", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **settings, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


EXPORTED = """
import sys
from collab_heads import export, load_exported
from families import FAMILIES
export(FAMILIES["bert"].build(), sys.argv[1])
load_exported(sys.argv[1], threads=1).push_to_hub("served")
"""


def test_an_exported_model_is_uploaded_whole(tmp_path):
    pytest.importorskip("jinja2", reason="huggingface_hub needs it for new cards")
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    with fake_hub.running() as hub:
        python(hub, tmp_path, "-c", EXPORTED, tmp_path / "served")
    uploaded = hub.repositories["me/served"]
    for file in (tmp_path / "served").iterdir():
        assert file.name == "README.md" or bytes(uploaded[file.name]) == file.read_bytes(), file.name


def test_what_is_uploaded_and_what_comes_back(tmp_path):
    pytest.importorskip("jinja2", reason="huggingface_hub needs it for new cards")
    with fake_hub.running() as hub:
        hub.repositories["me/owned"] = {"README.md": b"---\nlicense: mit\n---\n\nAbout mine.\n"}
        python(hub, tmp_path, ROOT / "tests" / "uploader.py", tmp_path)
        lines = python(hub, tmp_path, "-c", LOAD).splitlines()
    repositories = {
        name.removeprefix("me/"): {path: bytes(content) for path, content in files.items()}
        for name, files in hub.repositories.items()
    }
    cards = {name: ModelCard(files["README.md"].decode()) for name, files in repositories.items()}
    for name in ("pushed", "saved", "owned", "run"):
        files = repositories[name]
        assert {"model.safetensors", "config.json", CODE, "README.md"} <= files.keys(), name
        assert files[CODE] == SOURCE.read_bytes()
        assert json.loads(files["config.json"])[WEIGHTS] == SENTENCE
        assert "collab-heads" in cards[name].data.tags
        assert f'from_pretrained("me/{name}")' in cards[name].text
        assert "More Information Needed" not in cards[name].text
    assert "What was done" in cards["pushed"].text  # it was there when the model was uploaded again
    assert cards["owned"].text.startswith("\nAbout mine.\n") and cards["owned"].data.license == "mit"
    assert "| eval_accuracy | 0.5 |" in cards["run"].text and "tokenizer.json" in repositories["run"]
    assert CODE not in repositories["folded"] and "collab" not in cards["folded"].text
    assert lines[0].endswith(SENTENCE) and lines[1].endswith(SENTENCE)
    assert lines[2:] == ["CollaborativeBertSelfAttention"]
