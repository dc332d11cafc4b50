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


@pytest.mark.parametrize("kind", ("float", "int8", "four bits"))
def test_the_code_of_the_card_embeds_as_here(kind, tmp_path):
    model, tokenizer = AutoModel.from_pretrained(model_folder()).eval(), AutoTokenizer.from_pretrained(model_folder())
    if kind == "four bits":
        batches = [tokenizer(sentences(16, seed=seed), padding=True, return_tensors="pt") for seed in range(2)]
        compress(model, batches, "12.95MB", bits=4, parts=(), refine_steps=0)
    report = export(model, tmp_path / "served", tokenizer=tokenizer, int8=kind == "int8")
    (code,) = re.findall(r"```js\n(.*?)```", (tmp_path / "served" / "README.md").read_text(), re.DOTALL)
    code = re.sub(r"import (\{.*?\}) from (.*?);", rf"const \1 = createRequire({json.dumps(FOLDER + '/')})(\2);", code)
    code = code.replace(NAME, str(tmp_path / "served")).replace('["A sentence."]', "[text]")
    first, last = code.split("const inputs")
    body = f"{first}const found = [];\nfor (const text of {json.dumps(TEXTS)}) {{\nconst inputs{last}"
    script = tmp_path / "embed.mjs"
    script.write_text(
        f'import {{ createRequire }} from "node:module";\n{body}\nfound.push(sentence_embedding.tolist()[0]);\n}}\n'
        "console.log(JSON.stringify(found));"
    )
    printed = subprocess.run(["node", script], check=True, capture_output=True, text=True, timeout=120).stdout
    found, served = np.array(json.loads(printed.splitlines()[-1])), load_exported(tmp_path / "served")
    expected = np.concatenate([served.encode([text]) for text in TEXTS])
    print(f"\n{kind}: {report.megabytes:.1f} MB, largest difference {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_ENGINE)
