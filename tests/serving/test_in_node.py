"""transformers.js runs what `export` wrote, by the code of its card: needs node, and a folder with that package.

`npm install @huggingface/transformers` in a folder, and COLLAB_HEADS_NODE=folder. `ONNXRUNTIME_NODE_INSTALL=skip`
leaves out what that package fetches elsewhere, for GPUs.
"""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer

from collab_heads import compress, export, load_exported
from collab_heads.demo import model_folder, sentences
from collab_heads.saving.card import NAME

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
FOLDER = os.environ.get("COLLAB_HEADS_NODE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER and shutil.which("node")), reason="needs node, and COLLAB_HEADS_NODE=folder"),
]
SAME_ENGINE = 1e-6  # ONNX Runtime of another version; seen: 0
TEXTS = ["A man is playing a guitar.", "Short", "Ein Satz auf Deutsch: äöü.", "It fell for the third time."]


def in_node(code, place, folder):
    """The embeddings of the texts by code for Node that names a place."""
    code = re.sub(r"import (\{.*?\}) from (.*?);", rf"const \1 = createRequire({json.dumps(FOLDER + '/')})(\2);", code)
    code = code.replace(place, str(folder)).replace('["A sentence."]', "[text]")
    first, last = code.split("const inputs")
    body = f"{first}const found = [];\nfor (const text of {json.dumps(TEXTS)}) {{\nconst inputs{last}"
    script = folder.parent / "embed.mjs"
    script.write_text(
        f'import {{ createRequire }} from "node:module";\n{body}\nfound.push(sentence_embedding.tolist()[0]);\n}}\n'
        "console.log(JSON.stringify(found));"
    )
    printed = subprocess.run(["node", script], check=True, capture_output=True, text=True, timeout=120).stdout
    return np.array(json.loads(printed.splitlines()[-1]))


def code_of(folder):
    (code,) = re.findall(r"```js\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def test_an_export_within_its_checkpoint_needs_no_subfolder(tmp_path):
    """The layout of `collab-heads shrink`, which is that of the Hub."""
    model, tokenizer = AutoModel.from_pretrained(model_folder()).eval(), AutoTokenizer.from_pretrained(model_folder())
    root = tmp_path / "small"
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    export(model, root / "onnx", tokenizer=tokenizer)
    code = code_of(root / "onnx").replace(', subfolder: ""', "")
    expected = np.concatenate([load_exported(root / "onnx").encode([text]) for text in TEXTS])
    np.testing.assert_allclose(in_node(code, NAME, root), expected, rtol=0, atol=SAME_ENGINE)


@pytest.mark.parametrize("kind", ("float", "int8", "four bits"))
def test_the_code_of_the_card_embeds_as_here(kind, tmp_path):
    model, tokenizer = AutoModel.from_pretrained(model_folder()).eval(), AutoTokenizer.from_pretrained(model_folder())
    if kind == "four bits":
        batches = [tokenizer(sentences(16, seed=seed), padding=True, return_tensors="pt") for seed in range(2)]
        compress(model, batches, "12.95MB", bits=4, parts=(), refine_steps=0)
    report = export(model, tmp_path / "served", tokenizer=tokenizer, int8=kind == "int8")
    served = load_exported(tmp_path / "served")
    found = in_node(code_of(tmp_path / "served"), NAME, tmp_path / "served")
    expected = np.concatenate([served.encode([text]) for text in TEXTS])
    print(f"\n{kind}: {report.megabytes:.1f} MB, largest difference {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_ENGINE)
