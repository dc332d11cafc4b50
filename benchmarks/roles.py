"""List the heads that have one of the roles of Voita et al. 2019, in all the trained models at hand.

python benchmarks/roles.py [--deep FOLDER]

A head of self-attention is positional if 0.9 of its largest weights fall on one relative position, and one of rare
tokens if half of them fall on the rarest token of the sentence. The models of the shared folder on Multi30k
test_2016_flickr (both sides, or the English one), and with --deep the Marian of 6 + 6 layers of `nmt.py deep --keep`.
"""

import argparse

import torch
from heads_seen import translation_batches
from lm import FOLDERS, Text
from lm import load as load_decoder
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translation import MODELS

from collab_heads import analyze_heads
from common import shared, table, write

COLUMNS = {"model": "", "role": "", "heads": "", "positional": "", "first token": "", "rare tokens": ""}
COLUMNS |= dict.fromkeys(("best positional", "median", "best rare", "chance"), ".2f")
TITLES = {"marian": "Marian (3 + 3 layers)", "t5": "T5 (3 + 3)", "gpt2": "GPT-2 (4)", "qwen3": "Qwen3 (4)"}


def rows_of(model: str, report) -> list[dict]:
    """Return a row per role: how many heads have each label, and how close the closest head comes."""
    rows, roles = [], report.roles
    for role in dict.fromkeys(site.role for site in report.sites if site.path in roles.positional):
        paths = [site.path for site in report.sites if site.role == role]
        labels = [labels for path in paths for labels in roles.labels[path]]
        row: dict = {"model": model, "role": role, "heads": len(labels)}
        for kind in ("positional", "first token", "rare tokens"):
            row[kind] = sum(any(label.startswith(kind) for label in each) for each in labels)
        shares = torch.cat([roles.positional[path].share for path in paths])
        row["best positional"], row["median"] = float(shares.max()), float(shares.median())
        rare = [roles.rare[path] for path in paths if path in roles.rare]
        if rare:
            row["best rare"], row["chance"] = max(float(each.rarest.max()) for each in rare), rare[0].chance[0]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", metavar="FOLDER", help="the deeper Marian, too")
    arguments = parser.parse_args()
    folders = {TITLES[name]: shared(path) for name, path in MODELS.items()}
    folders |= {"Marian (6 + 6)": arguments.deep} if arguments.deep else {}
    rows = []
    for title, folder in folders.items():
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        batches = translation_batches(tokenizer)
        rows += rows_of(title, analyze_heads(model, batches, tokenizer=tokenizer, parts=("roles",), num_examples=0))
    for name in FOLDERS:
        text = Text(name)
        given = {"tokenizer": text.tokenizer, "parts": ("roles",), "num_examples": 0}
        rows += rows_of(TITLES[name], analyze_heads(load_decoder(name), text.test("test_2016_flickr"), **given))
    print(table(rows, COLUMNS))
    write("roles", rows)


if __name__ == "__main__":
    main()
