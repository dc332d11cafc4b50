"""Measure the house: files, lines, public names, how often `compress` opens a model, what tests import and take.

python benchmarks/house.py            # half a minute
python benchmarks/house.py --tests    # also runs the default tests, on two processes
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

import collab_heads
from common import RESULTS, ROOT, write

# (file, function) -> what a call of it does; those of open_site.py and open_feed_forward.py are of older trees
OPENS = {
    ("open_layers.py", "of"): "sites opened",
    ("open_layers.py", "feed_forwards"): "feed-forwards opened",
    ("record.py", "on"): "record read",
    ("open_site.py", "open_sites"): "sites opened",
    ("open_feed_forward.py", "open_feed_forwards"): "feed-forwards opened",
}
LATE = r"Later\(.collab_heads\."
PUBLIC = r"collab_heads\.(?:analysis|training)"
IMPORTS = {
    "imports of internals in tests": rf"^\s*(?:from collab_heads\.\S+ import|import collab_heads\.)|{LATE}",
    "of them, of collab_heads.errors": r"^\s*from collab_heads\.errors import",
    "of them, of collab_heads.analysis and training": rf"^\s*(?:from {PUBLIC} import|import {PUBLIC}$)",
    "imports of the package in tests": r"^\s*(?:from collab_heads import|import collab_heads$)",
}


def sizes() -> dict[str, int]:
    """Count the files and lines of the library, and its public names."""
    files = [file for top in ("collab_heads", "adapters") for file in (ROOT / top).rglob("*.py")]
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    return {"files": len(files), "lines": lines, "public names at the root": len(collab_heads.__all__)}


def opens() -> dict[str, int]:
    """Count how often one `compress` of a BERT of two layers opens it."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64))
    batches = [{"input_ids": torch.randint(1, 1000, (8, 12))} for _ in range(4)]
    counts = Counter(dict.fromkeys(OPENS.values(), 0))

    def watch(frame, event, _):
        code = frame.f_code
        done = OPENS.get((Path(code.co_filename).name, code.co_name)) if event == "call" else None
        if done and "collab_heads" in code.co_filename:
            counts[done] += 1

    sys.setprofile(watch)
    try:
        collab_heads.compress(model.eval(), batches, 0.5)
    finally:
        sys.setprofile(None)
    return dict(counts)


def imports() -> dict[str, int]:
    """Count the lines of tests that import the package: its internals, and what is public."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    return {
        name: sum(len(re.findall(pattern, text, re.MULTILINE)) for text in texts) for name, pattern in IMPORTS.items()
    }


def pytest(*arguments: str) -> tuple[float, float]:
    """Run the default tests; return the seconds of processor and of the clock that it took."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(ROOT / "tests")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - began


def tests(*, run: bool) -> dict[str, float]:
    """Measure the default tests: their collection, of processor time, and, if they are run, minutes."""
    first, _ = pytest("--collect-only")
    again, _ = pytest("--collect-only")  # the first run may have had to compile the tests
    found = {"seconds of collection, first": round(first, 1), "seconds of collection, again": round(again, 1)}
    if run:
        found["minutes of the default tests"] = round(pytest("-n", "2")[1] / 60, 1)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="run the default tests, too")
    parser.add_argument("--tree", default="now", help="name of the row that is stored beside those of other names")
    arguments = parser.parse_args()
    measured = {"tree": arguments.tree, **sizes(), **opens(), **imports(), **tests(run=arguments.tests)}
    for name, value in measured.items():
        print(f"{name:<{max(map(len, measured))}}  {value:>8}")
    stored = RESULTS / "house.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    write("house", [*(row for row in rows if row["tree"] != arguments.tree), measured])
