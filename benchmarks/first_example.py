"""The first example of the README, as a reader runs it: what it prints.

python benchmarks/first_example.py
"""

import contextlib
import re
import tempfile

from common import ROOT, write


def first_example() -> str:
    """Return the code of the first Python example of the README."""
    return re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)[1]


def main() -> None:
    """Run it, and write the scores of both models to the results."""
    printed: list = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(first_example(), {"print": printed.append})
    compressed, evaluated = printed
    for each in printed:
        print(each)
    sizes = compressed.model_parameters_before, compressed.model_parameters_after
    rows = [
        {"method": each.name, "parameters": size, "MB": each.megabytes, **each.scores, "flips": each.flips}
        for each, size in zip(evaluated.models, sizes, strict=True)
    ]
    write("first_example", rows, examples=evaluated.examples)


if __name__ == "__main__":
    main()
