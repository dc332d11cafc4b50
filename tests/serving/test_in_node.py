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
import torch
from later import Later
from tokenizers_made import fast
from transformers import (
    AutoModel,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
)

from collab_heads import compress, export, load_exported, prune_heads
from collab_heads.demo import model_folder, sentences
from collab_heads.saving.card import NAME

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
sentence_transformers = Later("sentence_transformers", optional=True)
FOLDER = os.environ.get("COLLAB_HEADS_NODE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER and shutil.which("node")), reason="needs node, and COLLAB_HEADS_NODE=folder"),
]
ENGINE_NOISE = 1e-5  # of embeddings of length 1 in another engine, in float32; seen: 2e-7
# the same in eight bits, of a graph whose additions the engine fuses and one where it does not: sums of another last
# digit, at the border of two codes, are rounded to the one or the other; seen: 6e-4
OTHER_CODES = 5e-3
SAME_ENGINE = 1e-6  # ONNX Runtime of another version; seen: 0
TEXTS = ["A man is playing a guitar.", "Short", "Ein Satz auf Deutsch: äöü.", "It fell for the third time."]


def in_node(code, place, folder, made="sentence_embedding.tolist()[0]"):
    """Run code for Node on each text, in a folder in place of the one that it names; return the results."""
    code = re.sub(r"import (\{.*?\}) from (.*?);", rf"const \1 = createRequire({json.dumps(FOLDER + '/')})(\2);", code)
    code = code.replace(place, str(folder)).replace('["A sentence."]', "[each]")
    first, last = code.split("const inputs")
    body = f"{first}const found = [];\nfor (const each of {json.dumps(TEXTS)}) {{\nconst inputs{last}"
    script = folder.parent / "embed.mjs"
    script.write_text(
        f'import {{ createRequire }} from "node:module";\n{body}\nfound.push({made});\n}}\n'
        "console.log(JSON.stringify(found));"
    )
    printed = subprocess.run(["node", script], check=True, capture_output=True, text=True, timeout=120).stdout
    return json.loads(printed.splitlines()[-1])


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


def test_a_decoder_of_uneven_layers_writes_as_here(tmp_path):
    torch.manual_seed(0)
    tokenizer = fast("byte-level BPE")
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=len(tokenizer), n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    prune_heads(model, heads={"dec-self": [[0, 1], [], [2]]})
    export(model, tmp_path / "served", "transformers.js", tokenizer=tokenizer)
    code = code_of(tmp_path / "served").replace('tokenizer("Once")', "tokenizer(each)")
    found = in_node(code, NAME, tmp_path / "served", "text")
    for text, written in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert written == tokenizer.decode(whole[0], skip_special_tokens=True)


def test_a_translation_model_of_uneven_layers_writes_as_here(tmp_path):
    torch.manual_seed(0)
    tokenizer = fast("byte-level BPE")
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": len(tokenizer)}
    model = BartForConditionalGeneration(BartConfig(**sizes, forced_eos_token_id=None, decoder_start_token_id=2)).eval()
    prune_heads(model, heads={"dec-enc": [[0, 1], []], "dec-self": [[], [3]]})
    export(model, tmp_path / "served", "transformers.js", tokenizer=tokenizer)
    code = code_of(tmp_path / "served").replace('tokenizer("A sentence.")', "tokenizer(each)")
    found = in_node(code, NAME, tmp_path / "served", "tokens.tolist()[0].map(Number)")
    options = {"max_new_tokens": 64, "num_beams": 1, "do_sample": False}
    for text, written in zip(TEXTS, found, strict=True):
        assert written == model.generate(**tokenizer(text, return_tensors="pt"), **options)[0].tolist()


def minilm(kind):
    """MiniLM, on grids of four bits if `kind` says so, and its tokenizer."""
    model, tokenizer = AutoModel.from_pretrained(model_folder()).eval(), AutoTokenizer.from_pretrained(model_folder())
    if kind == "four bits":
        batches = [tokenizer(sentences(16, seed=seed), padding=True, return_tensors="pt") for seed in range(2)]
        compress(model, batches, "12.95MB", bits=4, parts=(), refine_steps=0)
    return (model.half() if kind == "half" else model), tokenizer


FORMS = {"float": "", "half": "_fp16", "int8": "_quantized", "four bits": "_q4"}


@pytest.mark.parametrize("kind", FORMS)
def test_the_embeddings_of_an_encoder_in_its_own_layout(kind, tmp_path):
    (model, tokenizer), suffix = minilm(kind), FORMS[kind]
    export(model, tmp_path / "served", "transformers.js", tokenizer=tokenizer, int8=kind == "int8")
    assert not (tmp_path / "served/modules.json").exists()
    assert [each.name for each in (tmp_path / "served/onnx").iterdir()] == [f"model{suffix}.onnx"]
    found = in_node(code_of(tmp_path / "served"), NAME, tmp_path / "served")
    if suffix:
        export(model, tmp_path / "here", tokenizer=tokenizer, int8=kind == "int8")
        expected = np.concatenate([load_exported(tmp_path / "here").encode([text]) for text in TEXTS])
    else:
        expected = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=OTHER_CODES if kind == "int8" else ENGINE_NOISE)


@pytest.mark.parametrize("kind", ("float", "int8", "four bits"))
def test_the_code_of_the_card_embeds_as_here(kind, tmp_path):
    model, tokenizer = minilm(kind)
    report = export(model, tmp_path / "served", tokenizer=tokenizer, int8=kind == "int8")
    served = load_exported(tmp_path / "served")
    found = in_node(code_of(tmp_path / "served"), NAME, tmp_path / "served")
    expected = np.concatenate([served.encode([text]) for text in TEXTS])
    print(f"\n{kind}: {report.megabytes:.1f} MB, largest difference {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_ENGINE)
