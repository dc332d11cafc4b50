"""Swap models of chemical reactions: the ALBERT of rxnmapper and the BERTs of rxnfp.

python benchmarks/chemistry.py

The models come with the packages (`pip install --no-deps rxnmapper rxnfp`); their code is not used. Reactions are made
from six templates: 32 calibrate, 32 others are measured. Errors are relative Frobenius norms against the original, over
real tokens; *same* is the share of equal predictions: of the class, or of the token at every position. The benchmark
fails unless the lossless swaps are exact.
"""

import argparse
import itertools
import random
import re
import statistics
import sys
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AlbertForMaskedLM, BertForMaskedLM, BertForSequenceClassification
from transformers.utils import logging

from collab_heads import swap_to_collaborative
from common import table, write

MODELS = {
    "rxnmapper ALBERT, masked tokens": ("rxnmapper", "albert_heads_8_uspto_all_1310k", AlbertForMaskedLM),
    "rxnfp BERT, masked tokens": ("rxnfp", "bert_pretrained", BertForMaskedLM),
    "rxnfp BERT, 50 classes": ("rxnfp", "bert_ft_10k_25s", BertForSequenceClassification),
}
WIDTH, HALF, SENTENCES, BATCH, SEED = 256, 128, 32, 16, 0
EXACT = {torch.float32: 1e-3, torch.float64: 1e-10}  # largest difference of a logit; logits are of size 10
TOKENS = re.compile(r"\[[^\]]+]|Br?|Cl?|[NOSPFIbcnosp()\.=#+\\/:~@?*$-]|>>?|%[0-9]{2}|[0-9]")
TEMPLATES = (
    "O=C(O){a}.N{b}>>O=C(N{b}){a}",
    "O=C(O){a}.OC{b}>>O=C(OC{b}){a}",
    "O=C{a}.N{b}>>C({a})N{b}",
    "O=S(=O)(Cl){a}.N{b}>>O=S(=O)(N{b}){a}",
    "BrC{a}.O{b}>>C({a})O{b}",
    "BrC{a}.S{b}>>C({a})S{b}",
)
LEFT = "c1ccccc1 c1ccc(F)cc1 c1ccc(OC)cc1 c1cccnc1 c1cc(C)ccc1Cl C1CCCCC1 CC(C)C c1ccsc1".split()
RIGHT = "c2ccccc2 c2ccc(C#N)cc2 C2CCCCC2 CCOC c2ccncc2 c2cccc(C(F)(F)F)c2".split()
COLUMNS = {
    "model": "",
    "R": "",
    "mixing": "",
    "method": "",
    "dtype": "",
    "largest": ".0e",
    "logits": ".4f",
    "hidden": ".4f",
    "same": ".3f",
    "sites": ".4f",
    "parameters": ",",
}


def reactions() -> list[str]:
    """Return reaction SMILES in a fixed random order."""
    found = [template.format(a=a, b=b) for template, a, b in itertools.product(TEMPLATES, LEFT, RIGHT)]
    random.Random(SEED).shuffle(found)
    return found


def folder(package: str, name: str) -> Path:
    """Return the folder of a model inside an installed package."""
    try:
        return Path(metadata.distribution(package).locate_file(package)) / "models" / "transformers" / name
    except metadata.PackageNotFoundError:
        sys.exit(f"the package {package} is missing: pip install --no-deps {package}")


def batches(vocabulary: list[str], smiles: list[str]) -> list[dict]:
    """Return padded batches of token ids, tokenized as the packages' own tokenizers do."""
    index = {token: i for i, token in enumerate(vocabulary)}
    rows = [torch.tensor([index[t] for t in ("[CLS]", *TOKENS.findall(s), "[SEP]")]) for s in smiles]
    found = []
    for start in range(0, len(rows), BATCH):
        ids = pad_sequence(rows[start : start + BATCH], batch_first=True, padding_value=index["[PAD]"])
        found.append({"input_ids": ids, "attention_mask": (ids != index["[PAD]"]).long()})
    return found


@torch.no_grad()
def run(model, inputs: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and last hidden states, one row per real token (logits of a classifier: one per reaction)."""
    logits, hidden = [], []
    for batch in inputs:
        mask, result = batch["attention_mask"].bool(), model(**batch, output_hidden_states=True)
        logits.append(result.logits[mask] if result.logits.ndim == 3 else result.logits)
        hidden.append(result.hidden_states[-1][mask])
    return torch.cat(logits), torch.cat(hidden)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative Frobenius norm of the difference."""
    return float((ours - theirs).norm() / theirs.norm())


def measure(name: str, measured: list[str], calibrating: list[str]) -> list[dict]:
    """Compare every swap of one model with the original."""
    package, model_name, cls = MODELS[name]
    path = folder(package, model_name)
    vocabulary = (path / "vocab.txt").read_text().split()
    inputs, calibration = batches(vocabulary, measured), batches(vocabulary, calibrating)
    stock = cls.from_pretrained(path).eval()
    rows = [{"model": name, "R": WIDTH, "method": "original", "parameters": stock.num_parameters()}]
    cases = [(mixing, None, None, dtype) for mixing in ("shared", "per_head") for dtype in EXACT]
    methods = {
        "weights only": {},
        "calibrated": {"batches": calibration, "refine_steps": 0},
        "calibrated, refined": {"batches": calibration},
    }
    cases += [(mixing, HALF, m, torch.float32) for mixing in ("shared", "per_head") for m in methods]
    for mixing, dim, method, dtype in cases:
        expected, expected_hidden = run(stock.to(dtype), inputs)
        model = cls.from_pretrained(path, dtype=dtype).eval()
        report = swap_to_collaborative(
            model, dim_shared_query_key=dim, kind=mixing, seed=SEED, **methods.get(method, {})
        )
        logits, hidden = run(model, inputs)
        rows.append(
            {
                "model": name,
                "R": dim or WIDTH,
                "mixing": mixing,
                "method": method or "lossless",
                "dtype": str(dtype).removeprefix("torch."),
                "largest": float((logits - expected).abs().max()),
                "logits": relative(logits, expected),
                "hidden": relative(hidden, expected_hidden),
                "same": float((logits.argmax(-1) == expected.argmax(-1)).double().mean()),
                "sites": statistics.mean(site.relative_error for site in report.sites),
                "parameters": model.num_parameters(),
                "seconds": report.seconds,
            }
        )
        print(table(rows[-1:], COLUMNS), flush=True)
    return rows


def main() -> None:
    """Measure, print and store; exit with an error if a lossless swap is not exact."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # every load reports the pooler, which these models do not use
    found = reactions()
    rows = [row for name in MODELS for row in measure(name, found[:SENTENCES], found[SENTENCES : 2 * SENTENCES])]
    print(table(rows, COLUMNS))
    packages = {package: metadata.version(package) for package, _, _ in MODELS.values()}
    write("chemistry", rows, packages=packages, reactions=SENTENCES)
    for row in rows:
        if row["method"] == "lossless" and row["largest"] > EXACT[getattr(torch, row["dtype"])]:
            sys.exit(f"FAIL: {row['model']}, {row['mixing']}, {row['dtype']}: {row['largest']:.1e}")
    print("PASS: lossless swaps are exact")


if __name__ == "__main__":
    main()
