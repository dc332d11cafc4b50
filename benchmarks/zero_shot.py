r"""Score decoders without examples or training, by the log-likelihood of answers: SST-2, RTE and CoLA.

    python benchmarks/zero_shot.py ORIGINAL [SMALLER ...] [--limit 400]

ORIGINAL and SMALLER are folders; those of `real_decoder.py` lie in WORK/real_decoder/, as METHOD-BUDGET-DRAW. The
tokenizer is the original's. Of each dev set the first examples count. SST-2 and RTE: accuracy x 100, where the answer
is the word with the larger log-likelihood after the prompt; prompts and words are those of the Language Model
Evaluation Harness of EleutherAI (lm_eval/tasks/glue/{sst2,rte}/default.yaml). CoLA: the area under the ROC curve x 100
of the log-likelihood of a sentence, summed over its tokens, as a sign that it is acceptable; longer sentences have
lower sums. "Flips" is the share of answers that differ from the original's, x 100.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from common import lines_of, table, write

LIMIT, AT_ONCE = 400, 16  # examples of each task; rows of a batch
WORDS = {"SST-2": ("negative", "positive"), "RTE": ("True", "False")}  # in the order of their labels
COLUMNS = {"model": "", "SST-2": ".1f", "RTE": ".1f", "CoLA": ".1f", "flips, SST-2": ".1f", "flips, RTE": ".1f"}
Request = tuple[list[int], list[int]]  # tokens of a context, and of what goes on from it


def prompts(task: str, limit: int) -> tuple[list[str], list[int]]:
    """Return the prompts of SST-2 or RTE, and their labels."""
    rows = [line.split("\t") for line in lines_of(f"data/glue/{task}/dev.tsv")[1 : limit + 1]]
    if task == "SST-2":
        asked = [f"{text}\nQuestion: Is this sentence positive or negative?\nAnswer:" for text, _ in rows]
        return asked, [int(label) for _, label in rows]
    asked = [f"{passage}\nQuestion: {statement} True or False?\nAnswer:" for _, passage, statement, _ in rows]
    return asked, [int(label == "not_entailment") for *_, label in rows]


def request(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> Request:
    """Return the tokens of a context and of its continuation, as they are where both are one text."""
    whole, before = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context + continuation, context)
    )
    return whole[: len(before)], whole[len(before) :]


def sentence(tokenizer: PreTrainedTokenizerBase, text: str) -> Request:
    """Return a whole sentence as the continuation of the token that begins a text."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return [first], tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, requests: Sequence[Request]) -> list[float]:
    """Return the log-likelihood of every continuation, summed over its tokens.

    Requests whose tokens differ in the last one only, as prompts with answers of one token, are one row of a batch.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}  # what a model reads -> the requests that it serves
    for number, (context, continuation) in enumerate(requests):
        sharing.setdefault((*context, *continuation)[:-1], []).append(number)
    found, ordered = [0.0] * len(requests), sorted(sharing, key=len)
    for start in range(0, len(ordered), AT_ONCE):
        rows = ordered[start : start + AT_ONCE]
        ids = torch.zeros(len(rows), len(rows[-1]), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
        first = min(len(requests[number][0]) for row in rows for number in sharing[row]) - 1
        kept = torch.arange(first, ids.shape[1])  # logits of all tokens of long prompts would fill the memory
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits
        for place, row in enumerate(rows):
            for number in sharing[row]:
                context, continuation = requests[number]
                begin = len(context) - 1 - first
                likely = logits[place, begin : begin + len(continuation)].double().log_softmax(-1)
                found[number] = float(likely.gather(-1, torch.tensor(continuation)[:, None]).sum())
    return found


def scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int = LIMIT) -> dict:
    """Return the score of every task x 100, and under "answers" those of SST-2 and RTE, one digit each."""
    found: dict = {"answers": {}}
    for task, words in WORDS.items():
        asked, labels = prompts(task, limit)
        likely = log_likelihoods(model, [request(tokenizer, text, f" {word}") for text in asked for word in words])
        answers = torch.tensor(likely).view(-1, len(words)).argmax(-1)
        found[task] = 100 * float((answers == torch.tensor(labels)).double().mean())
        found["answers"][task] = "".join(map(str, answers.tolist()))
    rows = [line.split("\t") for line in lines_of("data/glue/CoLA/dev.tsv")[:limit]]  # without a header
    likely = log_likelihoods(model, [sentence(tokenizer, row[-1]) for row in rows])
    return found | {"CoLA": 100 * float(roc_auc_score([int(row[1]) for row in rows], likely))}


def flips(found: Mapping[str, Mapping[str, str]], original: Mapping[str, Mapping[str, str]]) -> dict[str, float]:
    """Return the share of answers x 100 that differ between the scores of two models, by task."""
    pairs = {
        task: list(zip(answers, original["answers"][task], strict=True)) for task, answers in found["answers"].items()
    }
    return {f"flips, {task}": 100 * sum(a != b for a, b in each) / len(each) for task, each in pairs.items()}


def rows_of(folders: Iterable[str], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict]:
    """Return the row of every model; the first is the original."""
    rows: list[dict] = []
    for folder in folders:
        rows.append(
            {"model": Path(folder).name} | scores(AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer, limit)
        )
        rows[-1] |= flips(rows[-1], rows[0])
        print(table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders; the first is the original")
    parser.add_argument("--limit", type=int, default=LIMIT, help="examples of each task")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.models[0])
    rows = rows_of(arguments.models, tokenizer, arguments.limit)
    print(table(rows, COLUMNS))
    write("zero_shot", [{name: row[name] for name in COLUMNS} for row in rows])


if __name__ == "__main__":
    main()
