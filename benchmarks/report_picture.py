"""Draw the picture of the report's page: MiniLM on sentences of a treebank, in Chromium.

python benchmarks/report_picture.py

It needs chromium or google-chrome, and writes docs/pictures/report.png.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import AutoModel, AutoTokenizer

from collab_heads import analyze_heads
from collab_heads.files.conllu import read_conllu
from common import PICTURES, ROOT, minilm, shared

sys.path.append(str(ROOT / "tests"))
from chromium import Browser

SENTENCES = 512  # of the treebank, from the first on
SIZE = 1400, 1390
OPENED = "#1-4"  # it finds subjects
COLOURS = 128  # of the PNG: a third of the size, and no difference to see
SHOW = """(() => { const view = [...document.querySelectorAll('#head select')].at(1); view.value = 'map';
view.dispatchEvent(new Event('change')); })()"""


def main() -> None:
    model, tokenizer = AutoModel.from_pretrained(minilm()).eval(), AutoTokenizer.from_pretrained(minilm())
    sentences = read_conllu(shared("data/ud_english_ewt/en_ewt-ud-dev.conllu"))[:SENTENCES]
    texts = sorted((sentence.text for sentence in sentences), key=len)
    limits = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    batches = [dict(tokenizer(texts[i : i + 64], **limits)) for i in range(0, len(texts), 64)]
    report = analyze_heads(model, batches, tokenizer=tokenizer, treebank=sentences)
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile", *SIZE) as browser:
        browser.open(report.save_html(Path(folder) / "report.html"), OPENED)
        browser.wait("document.querySelector('#tokens .token')")
        browser.value(SHOW)
        browser.wait("document.querySelector('.labelled')")
        browser.value("document.querySelector('#explore').scrollIntoView()")
        browser.screenshot(Path(folder) / "report.png")
        with Image.open(Path(folder) / "report.png") as image:
            image.convert("RGB").quantize(COLOURS).save(PICTURES / "report.png", optimize=True)


if __name__ == "__main__":
    main()
