r"""Serve original and compressed models in engines: quality, size on disk and time, float and int8, on one thread.

    python benchmarks/serving.py minilm [--budgets 0.5 0.33 0.25] [--steps 300]
    python benchmarks/serving.py marian --budgets 0.5 0.33 --steps 0 1000 [--sentences N]
    python benchmarks/serving.py gpt2
    python benchmarks/serving.py --table

Whole layers are compressed with 2,048 sentences, or pairs, and distilled as in compression.py, GPT-2 as in lm.py;
Marian and GPT-2 in the shape that CTranslate2 runs. all-MiniLM-L6-v2 encodes 1 x 32 and 32 x 128 random tokens; its
score is Spearman x 100 on STS-B dev, and elsewhere the accuracy x 100 of a classifier on the embeddings of SST-2.
Marian translates 32 sentences with beams of 5; its score is BLEU on test_2016_flickr. GPT-2 continues 1 and 16 captions
of test_2016_flickr, after 16 tokens, by 48 tokens, greedily and with a cache; its score is the perplexity on val, which
every engine computes itself, and "same tokens" is the share of the 16 x 48 that are those of the same model in PyTorch.
All that a model is timed in is timed in turns: wall time, one thread each, as a share of that of the original in
PyTorch, and in the same engine. Compressed models are kept in WORK/serving, and rows in WORK/serving.jsonl: a new one
takes the place of an older one of the same setting, all others stay.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compression import SentenceEncoder, Translator, task_of
from lm import END, PADDING, Text, load, perplexity
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from collab_heads import compress, distill, export, load_exported
from collab_heads.errors import CollabHeadsError
from common import RESULTS, WORK, RowStore, interleaved, record, table

RECORD, MODELS = RESULTS / "serving.json", WORK / "serving"
SHAPES = {"minilm": "even", "marian": "ctranslate2", "gpt2": "ctranslate2"}
ENGINES = {
    "minilm": (("onnx", False), ("onnx", True), ("openvino", False), ("ctranslate2", False), ("ctranslate2", True)),
    "marian": (("onnx", False), ("onnx", True), ("ctranslate2", False), ("ctranslate2", True)),
    "gpt2": tuple((engine, int8) for engine in ("onnx", "openvino", "ctranslate2") for int8 in (False, True)),
}
BUDGETS, PAIRS, ROUNDS = (0.5, 0.33, 0.25), 2048, 7
DISTILLATION = {"minilm": {}, "marian": {"learning_rate": 0.003, "output_weight": 10.0, "patience": 12}, "gpt2": {}}
PROMPT, NEW, ROWS = 16, 48, 16  # tokens that GPT-2 reads, and adds; captions
INPUTS = {
    "minilm": {"1 x 32": (1, 32), "32 x 128": (32, 128)},
    "marian": {"32 sentences": (32, 0)},
    "gpt2": {"1 caption": (1, PROMPT), f"{ROWS} captions": (ROWS, PROMPT)},
}
COLUMNS = {
    "model": "",
    "kept": "",
    "steps": "",
    "engine": "",
    "score": ".2f",
    "lost": ".2f",
    "lost elsewhere": ".2f",
    "same tokens": ".1%",
    "megabytes": ".1f",
    "time": "",
    "against original": "",
}


class Encoding:
    """A model in CTranslate2 that encodes, called as in transformers.

    Args:
        folder: of the converted model.
    """

    def __init__(self, folder: Path):
        import ctranslate2

        self.engine = ctranslate2.Encoder(str(folder), intra_threads=1, inter_threads=1)
        self.view = ctranslate2.StorageView

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> BaseModelOutput:
        lengths = self.view.from_array(attention_mask.sum(1).to(torch.int32).numpy())
        outputs = self.engine.forward_batch(self.view.from_array(input_ids.to(torch.int32).numpy()), lengths)
        return BaseModelOutput(last_hidden_state=torch.from_numpy(np.array(outputs.last_hidden_state)))


class Translating:
    """A model in CTranslate2 that translates, called as in transformers.

    Args:
        folder: of the converted model.
        tokenizer: its tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: Any):
        import ctranslate2

        self.engine = ctranslate2.Translator(str(folder), intra_threads=1, inter_threads=1)
        self.tokenizer = tokenizer

    def generate(self, input_ids, attention_mask, num_beams: int, max_length: int, **options: Any) -> torch.Tensor:
        rows = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        texts = [self.tokenizer.convert_ids_to_tokens(row) for row in rows]
        found = self.engine.translate_batch(texts, beam_size=num_beams, max_decoding_length=max_length)
        chosen = [self.tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
        return torch.nested.nested_tensor(chosen).to_padded_tensor(self.tokenizer.pad_token_id)


class Continuing:
    """A model in CTranslate2 that continues texts, called as in transformers.

    Args:
        folder: of the converted model.
        tokenizer: its tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: Any):
        import ctranslate2

        self.engine = ctranslate2.Generator(str(folder), intra_threads=1, inter_threads=1)
        self.tokenizer = tokenizer

    def generate(self, input_ids, attention_mask, max_new_tokens: int, **options: Any) -> torch.Tensor:
        texts = [self.tokenizer.convert_ids_to_tokens(row.tolist()) for row in input_ids]
        length = {"max_length": max_new_tokens, "min_length": max_new_tokens}
        found = self.engine.generate_batch(texts, **length, sampling_topk=1, include_prompt_in_result=False)
        return torch.cat([input_ids, torch.tensor([each.sequences_ids[0] for each in found])], dim=1)

    def perplexity(self, batches: Sequence[Mapping]) -> float:
        """Return the perplexity per token, as the engine scores it."""
        total, count = 0.0, 0
        for batch in batches:
            rows = [
                row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ]
            for scored in self.engine.score_batch([self.tokenizer.convert_ids_to_tokens(row) for row in rows]):
                total, count = total - sum(scored.log_probs), count + len(scored.log_probs)
        return math.exp(total / count)


class Continuer:
    """The task of compressing a small GPT-2 of English captions: model, data and scores."""

    def __init__(self, arguments: argparse.Namespace):
        self.text = Text("gpt2", arguments.sentences)
        self.tokenizer = self.text.tokenizer
        long = [ids for ids in self.text.sentences("test_2016_flickr") if len(ids) > PROMPT]
        self.prompts = torch.tensor([ids[:PROMPT] for ids in long[:ROWS]])
        self.chosen: dict[Any, torch.Tensor] = {}

    def load(self):
        return load("gpt2")

    def batches(self, draw: int, count: int) -> list[dict]:
        """Return a draw of calibration batches."""
        return self.text.calibration(draw, count)

    def unlabelled(self, draw: int) -> list[dict]:
        """Return a draw of batches for distillation."""
        return self.text.unlabelled(draw)

    def score(self, model) -> float:
        """Return the perplexity."""
        batches = self.text.test("val")
        return model.perplexity(batches) if isinstance(model, Continuing) else perplexity(model, batches)

    def continued(self, model, rows: int = ROWS) -> torch.Tensor:
        """Continue the first prompts: [rows, PROMPT + NEW]."""
        prompts = self.prompts[:rows]
        options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False, "num_beams": 1}
        more = {"eos_token_id": END, "pad_token_id": PADDING}
        return model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **options, **more)

    def same_tokens(self, model, budget: float) -> float:
        """Return the share of the tokens that the model in PyTorch, which comes first, also chose."""
        new = self.continued(model)[:, PROMPT:]
        return float((new == self.chosen.setdefault(budget, new)).float().mean())


def prepared(name: str, task: SentenceEncoder | Translator | Continuer, budget: float, steps: int) -> tuple[Any, float]:
    """Return a compressed and distilled model, and the seconds that this took; it is kept for the next run."""
    if budget == 1:
        return task.load(), 0.0
    folder = MODELS / f"{name}-{budget}-{steps}"
    if not (folder / "seconds.json").exists():
        model, started = task.load(), time.perf_counter()
        compress(model, task.batches(0, PAIRS), budget, shape=SHAPES[name], seed=0)
        if steps:
            distill(model, task.load(), task.unlabelled(0), steps, seed=0, **DISTILLATION[name])
        model.save_pretrained(folder)
        (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - started))
    return type(task.load()).from_pretrained(folder).eval(), json.loads((folder / "seconds.json").read_text())


def served(name: str, task: Any, model: Any, engine: str, int8: bool, folder: Path) -> tuple[Any, float]:
    """Export a model and load it in its engine; return it with its size in megabytes."""
    tokenizer = task.task.tokenizer if name == "minilm" else task.tokenizer
    batches = [{key: tensor[:4] for key, tensor in batch.items()} for batch in task.batches(0, 256)[:1]]
    report = export(model, folder, engine, tokenizer=tokenizer, int8=int8, batches=batches)
    if engine != "ctranslate2":
        return load_exported(folder, threads=1), report.megabytes
    if name == "minilm":
        return Encoding(folder), report.megabytes
    return (Translating if name == "marian" else Continuing)(folder, tokenizer), report.megabytes


def calls(name: str, task: Any, model: Any) -> dict[str, Callable[[], object]]:
    """Return what is timed of a model, by the names of `INPUTS`."""
    generator, found = torch.Generator().manual_seed(0), {}
    for words, (rows, tokens) in INPUTS[name].items():
        if name == "minilm":
            ids = torch.randint(1000, 30_000, (rows, tokens), generator=generator)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            found[words] = lambda inputs=inputs: model(**inputs)
        elif name == "gpt2":
            found[words] = lambda rows=rows: task.continued(model, rows)
        else:
            inputs = task.tokenizer(task.sources[:rows], return_tensors="pt", padding=True)
            found[words] = lambda inputs=inputs: model.generate(**inputs, num_beams=5, do_sample=False, max_length=80)
    return found


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows of a model: every share in every engine, timed in turns."""
    task, timed, rows = Continuer(arguments) if name == "gpt2" else task_of(name, arguments), {}, {}
    place = MODELS / "exported" / str(time.time_ns())
    steps_of = dict(zip(arguments.budgets, itertools.cycle(arguments.steps)))
    for budget in (1.0, *arguments.budgets):
        steps = steps_of.get(budget, 0)
        with torch.enable_grad():
            model, seconds = prepared(name, task, budget, steps)
        for engine, int8 in (("PyTorch", False), *ENGINES[name]):
            row = {"model": name, "budget": budget, "engine": engine, "int8": int8, "steps": steps}
            row |= {"seconds": seconds, "sentences": arguments.sentences}
            runs, megabytes = model, sum(parameter.nbytes for parameter in model.parameters()) / 1e6
            if engine != "PyTorch":
                try:
                    folder = place / f"{budget}-{engine}-{int8}"
                    runs, megabytes = served(name, task, model, engine, int8, folder)
                except CollabHeadsError as error:
                    print(name, budget, engine, int8, error, flush=True)
                    continue
            row |= {"megabytes": megabytes, "score": task.score(runs)}
            if name == "gpt2":
                row["same tokens"] = task.same_tokens(runs, budget)
            elif arguments.elsewhere:
                row["elsewhere"] = task.score_elsewhere(runs)
            print(row, flush=True)
            rows[budget, engine, int8] = row
            for words, call in calls(name, task, runs).items():
                timed.setdefault(words, {})[budget, engine, int8] = call
    torch.set_num_threads(1)
    for words, functions in timed.items():
        for key, value in interleaved(functions, ROUNDS).items():
            rows[key].setdefault("times", {})[words] = value
    yield from rows.values()


def compared(rows: list[dict]) -> list[dict]:
    """Return the rows with what they lost, and their times as shares of the original's."""
    found, originals = [], {(r["model"], r["engine"], r["int8"]): r for r in rows if r["budget"] == 1}
    for row in rows:
        original, own = originals[row["model"], "PyTorch", False], originals[row["model"], row["engine"], row["int8"]]
        new = row | {"kept": f"{row['budget']:.2g}", "lost": original["score"] - row["score"]}
        if row["model"] == "gpt2":  # a smaller perplexity is better
            new["lost"] = -new["lost"]
        new["engine"] += ", int8" if row["int8"] else ""
        if row.get("elsewhere") is not None:
            new["lost elsewhere"] = original["elsewhere"] - row["elsewhere"]
        new |= {"time": shares(row, original), "against original": shares(row, own), "own score": own["score"]}
        found.append(new)
    return found


def shares(row: Mapping, other: Mapping) -> str:
    """Return the times of a row as shares of those of another one."""
    return ", ".join(f"{seconds / other['times'][words]:.3f}" for words, seconds in row["times"].items())


def in_order(store: RowStore) -> list[dict]:
    """Return the newest row of every setting, model by model."""
    rows = store.newest(lambda row: tuple(row[name] for name in ("model", "budget", "steps", "engine")))
    return sorted(rows, key=lambda row: [*SHAPES].index(row["model"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--steps", nargs="+", type=int, default=[300], help="of distillation, for every budget")
    parser.add_argument("--sentences", type=int, help="to translate")
    parser.add_argument("--elsewhere", action="store_true", help="score MiniLM on SST-2, too")
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if unknown := set(arguments.models) - set(SHAPES):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    store = RowStore("serving")
    for name in arguments.models:
        for row in compared([*measure(name, arguments)]):
            store.add(row)
        runs = json.loads(RECORD.read_text()).get("runs", {}) if RECORD.exists() else {}
        runs[name] = {key: value for key, value in record([]).items() if key != "rows"}
        store.save(in_order(store), runs=runs)
    print(table(in_order(store), COLUMNS))


if __name__ == "__main__":
    main()
