"""evaluate: score a model and smaller ones made of it on a task of the user's, on the same examples."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import MAX_SIZE, check_choice, check_count, check_seed
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import EvaluationTask
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.errors import ArgumentError
from collab_heads.evaluation.candidates import Candidate, candidates, check_source, megabytes, name_in, running
from collab_heads.evaluation.examples import Data, read_examples
from collab_heads.evaluation.report import EvaluatedModel, EvaluationReport, ScoreChange
from collab_heads.evaluation.scores import bootstrap_interval, on_all
from collab_heads.evaluation.task import Limits, Task
from collab_heads.evaluation.tasks import TASKS, OwnFunction
from collab_heads.files.reading import check_field
from collab_heads.running.batches import evaluating, warn_few
from collab_heads.saving.loading import check_device
from collab_heads.serving.comparison import in_turns

CHECKED = 4  # examples on which each model is tried before all others


@checking_arguments
@one_bar("evaluate", (("trying", 1), ("scoring", 10)))
def evaluate(
    original: PreTrainedModel | str | Path,
    changed: PreTrainedModel | str | Path | Mapping[str, PreTrainedModel | str | Path],
    *,
    task: EvaluationTask | Callable[[Any, Any], Sequence[float]],
    data: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    columns: Sequence[str] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    source_prefix: str = "",
    device: str = "cpu",
    seed: int = 0,
) -> EvaluationReport:
    """Score a model and changed ones on a task of your own: how much did they lose, and is it more than chance?

    Each score of a changed model has the 95 % interval of its difference from the original (paired bootstrap, 1,000
    resamples). Beside it are flips, the share of answers that differ: two models with the same score may answer many
    examples differently. A model is an object, a checkpoint folder, a name on the Hub, or a folder that `export` wrote
    for ONNX Runtime, OpenVINO, ExecuTorch or llama.cpp, or of an encoder or a translation model for CTranslate2. All
    read the same examples. Each is loaded twice: for a few examples, so that errors come before the work, and for all.
    The original then stays in memory, with one other model at a time. Objects stay as they are, and where they are.

    Examples:
        >>> from transformers import AutoModel
        >>> from collab_heads.demo import model_folder, pairs
        >>> model = AutoModel.from_pretrained(model_folder())
        >>> _ = prune_heads(model, heads={"enc-self": [[0, 1]] + [[]] * 5})
        >>> data = pairs(128, seed=0)  # dicts with sentence1, sentence2 and label; better: a file of your own
        >>> report = evaluate(model_folder(), {"two heads less": model}, task="similarity", data=data)
        >>> [each.name for each in report.models], list(report.models[1].changes)
        (['original', 'two heads less'], ['Spearman'])

    Args:
        original: the model that the others are compared with.
        changed: a changed model, or several by name.
        task: what to score. "similarity" is of pairs of texts: Spearman's correlation of the cosine of their embeddings
            with a number. "classification": accuracy, F1 (of class 1 of two, else the mean over the classes) and
            Matthews' correlation. "regression": Spearman's and Pearson's correlation of a number with that which the
            model gives to a text or a pair of texts. "translation": BLEU and chrF. "perplexity": of a language model.
            "retrieval": nDCG and recall of the ten passages nearest to each query. A function takes a model and its
            tokenizer and returns a number per example, in the same order each time; the score is their mean. It is
            called three times for each changed model, and for the original once, and twice for each of these.
        data: a table (.tsv, .csv, .json, .jsonl, .parquet), a list of dicts, or a text file per column with an example
            a line; not for a function. Similarity reads the columns `sentence1`, `sentence2` and `score`,
            classification `sentence` and `label` or `sentence1`, `sentence2` and `label`, regression the same with
            `score`, translation `source` and `target`, perplexity `text`, retrieval `query` and `passage`: a row for
            each passage that answers a query, and rows with an empty query for others.
        tokenizer: for models that bring none: objects, and folders without one. None: that of the original's folder.
        columns: the names of these columns in the data, in this order.
        batch_size: texts that a model reads at a time.
        max_length: tokens to which texts are cut.
        source_prefix: stands before every first text, as T5 wants it.
        device: where checkpoints are loaded to, such as "cuda"; exported models run on the processor.
        seed: seed of the bootstrap.

    Returns:
        Scores, intervals, flips, sizes and times; `print` it.

    Raises:
        ArgumentError: on an unknown task or device, an impossible number or missing data or tokenizer.
        DataError: if the data is empty, lacks a column or a text, or has a label that a model does not know.
        LoadError: if there is no such model.
        UnsupportedModelError: if a model cannot do the task.
        MissingPackageError: if a package for the task is not installed.
    """
    check_count("batch_size", batch_size, least=1, most=MAX_SIZE)
    check_count("max_length", max_length, least=1, most=MAX_SIZE)
    check_seed(seed)
    check_device(device)
    chosen = made(task, data, columns, Limits(batch_size, max_length, source_prefix))
    others = changed if isinstance(changed, Mapping) else {name_in(source_of(changed)): changed}
    if not others:
        raise ArgumentError("changed is empty: pass a model, or several by name")
    sources = [(name, source_of(each)) for name, each in [("original", original), *others.items()]]
    for _, source in sources:
        check_source(source)
    found = candidates(sources, tokenizer)
    try_all(chosen, found, device)
    first = chosen.first(batch_size)
    every = all_scored(chosen, first, found, device)
    return compared(chosen, found, every, first.count(every[0].answers), seed)


def check_task(source: str, task: Task, device: str) -> None:
    """Raise the error of `evaluate` for a model that cannot do a task, without all of the work."""
    try_all(task, candidates([("original", source)], None), device)


@checking_arguments
def scorer(
    task: EvaluationTask,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Sequence[str] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    source_prefix: str = "",
) -> Callable[[PreTrainedModel], float]:
    """Make the function that scores a model on a task of your own, for `compress(…, max_loss=…, evaluate=…)`.

    The score is the first of the task in `evaluate`: Spearman, accuracy, BLEU or nDCG, x 100; of perplexity, where less
    is better, it is the negative.

    Examples:
        >>> from transformers import AutoModel, AutoTokenizer
        >>> from collab_heads.demo import model_folder, pairs
        >>> score = scorer("similarity", pairs(128, seed=0), AutoTokenizer.from_pretrained(model_folder()))
        >>> 50 < score(AutoModel.from_pretrained(model_folder())) < 100
        True

    Args:
        task: what to score; see `evaluate` for this and the others.
        data: the examples.
        tokenizer: the tokenizer of the models.
        columns: the names of the columns in the data.
        batch_size: texts that a model reads at a time.
        max_length: tokens to which texts are cut.
        source_prefix: stands before every first text, as T5 wants it.

    Returns:
        A function of a model. The model is not changed.

    Raises:
        CollabHeadsError: as in `evaluate`; the function, too, for a model that cannot do the task.
    """
    for name, value in {"batch_size": batch_size, "max_length": max_length}.items():
        check_count(name, value, least=1, most=MAX_SIZE)
    return partial(score_of, made(task, data, columns, Limits(batch_size, max_length, source_prefix)), tokenizer)


def score_of(task: Task, tokenizer: Any, model: PreTrainedModel) -> float:
    """Return the first score of a task, for which more is better."""
    task.check(model, tokenizer)
    with evaluating(model):
        answers = task.answers(model, tokenizer)
    first = next(iter(task.scores(answers).values()))
    return task.SIGN * on_all(first, task.count(answers))


def made(task: str | Callable, data: Data | None, columns: Sequence[str] | None, limits: Limits) -> Task:
    """Return the task with its examples."""
    check_field("source_prefix", None, limits.source_prefix)
    if callable(task):
        if data is not None or columns is not None:
            raise ArgumentError("a function has its own examples: leave data and columns out")
        return OwnFunction(task)
    check_choice("task", task, TASKS)
    kind = TASKS[task]  # type: ignore[index]
    check_extra("train", f"evaluations of {task}", kind.PACKAGES)
    if data is None:
        raise ArgumentError(f"data is missing, the examples of {task}: pass a table, a list of dicts or text files")
    read, where = read_examples(data, kind.COLUMNS, columns)
    chosen = kind(read, where, limits)
    warn_few([len(chosen)])
    return chosen


def source_of(given: PreTrainedModel | str | Path) -> PreTrainedModel | str:
    """Return a model, or the name of its folder as a text."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) else given


def try_all(task: Task, found: Sequence[Candidate], device: str) -> None:
    """Check that every model can do a task, on its first examples, before any model reads all of them."""
    expected = None
    for each in progress_bar(found, desc="trying"):
        answers = tried(task, each, device)
        if answers is not None:
            expected = answers if expected is None else expected
            task.first(CHECKED).flips(answers, expected)


def tried(task: Task, candidate: Candidate, device: str) -> Any:
    """Return what a model answers to the first examples; None for a function, which reads all or none."""
    with running(candidate, device) as model:
        task.check(model, candidate.tokenizer)
        if isinstance(task, OwnFunction):
            return None
        return task.first(CHECKED).answers(model, candidate.tokenizer)


class Scored(NamedTuple):
    """The answers of a model, its size and its time.

    Attributes:
        answers: to all examples.
        megabytes: the size of its weights, in 10^6 bytes.
        seconds: of the first examples.
        time: the same as a share of the original's, in turns with it.
    """

    answers: Any
    megabytes: float
    seconds: float
    time: float


def all_scored(task: Task, first: Task, found: Sequence[Candidate], device: str) -> list[Scored]:
    """Return what each model answers, and its time for the first examples, in turns with the original.

    Other work on the machine then slows both alike. The original stays in memory, and one other model at a time.
    """
    original, every = found[0], list[Scored]()
    with running(original, device) as stock:
        answers, size = task.answers(stock, original.tokenizer), megabytes(stock, original.source)
        of_stock = partial(first.answers, stock, original.tokenizer)
        for each in progress_bar(found[1:], desc="scoring"):
            with running(each, device) as model:
                its_answers = task.answers(model, each.tokenizer)
                of_model = partial(first.answers, model, each.tokenizer)
                before, seconds = in_turns([of_stock, of_model], task.ROUNDS)
                if not every:
                    every.append(Scored(answers, size, before, 1.0))
                every.append(Scored(its_answers, megabytes(model, each.source), seconds, seconds / before))
                del model, of_model  # before the next one is loaded
    return every


def compared(
    task: Task, found: Sequence[Candidate], every: Sequence[Scored], timed: int, seed: int
) -> EvaluationReport:
    """Return the report on what the models answered, the original first."""
    original = every[0].answers
    count, scores = task.count(original), [task.scores(each.answers) for each in every]
    models = []
    for number, (candidate, each) in enumerate(zip(found, every, strict=True)):
        own = {name: on_all(score, count) for name, score in scores[number].items()}
        changes = {
            name: ScoreChange(
                own[name] - on_all(scores[0][name], count), *bootstrap_interval(score, scores[0][name], count, seed)
            )
            for name, score in scores[number].items()
            if number
        }
        flips = task.flips(each.answers, original) if number else None
        models.append(EvaluatedModel(candidate.name, own, changes, flips, *each[1:]))
    return EvaluationReport(task.name, count, timed, task.FLIPS, tuple(models))
