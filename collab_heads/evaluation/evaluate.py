"""evaluate: score a model and smaller ones made of it on a task of the user's, on the same examples."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import MAX_SIZE, check_choice, check_count, check_seed, missing_folder
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import EvaluationTask
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.base.report import portable_name
from collab_heads.base.wrappers import check_model
from collab_heads.errors import ArgumentError, LoadError
from collab_heads.evaluation.examples import Data, read_examples
from collab_heads.evaluation.report import EvaluatedModel, EvaluationReport, ScoreChange
from collab_heads.evaluation.scores import bootstrap_interval, on_all
from collab_heads.evaluation.task import Limits, Task
from collab_heads.evaluation.tasks import TASKS, OwnFunction
from collab_heads.running.batches import evaluating, warn_few
from collab_heads.saving.loading import class_of, load_or_explain
from collab_heads.serving.comparison import in_turns
from collab_heads.serving.exported_folder import CONFIG, EXPORT
from collab_heads.serving.served_model import load_exported

Source = PreTrainedModel | str  # a model, or the name of its folder or on the Hub
CHECKED = 4  # examples on which each model is tried before all others
TOKENIZER = "tokenizer_config.json"  # what every saved tokenizer has
# the weights in a folder, of an export or of a checkpoint; the first kind that is there counts
WEIGHTS = (
    ("*.onnx", "*.onnx.data"),
    ("openvino_*.xml", "openvino_*.bin"),
    ("*.pte",),
    ("*.gguf",),
    ("model.bin",),
    ("*.safetensors",),
    ("pytorch_model*.bin",),
    ("onnx/*.onnx",),
)


class Candidate(NamedTuple):
    """A model to be scored, with its tokenizer and the size of its weights, in 10^6 bytes."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    megabytes: float


@checking_arguments
@one_bar("evaluate", (("scoring", 10), ("timing", 1)))
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
    seed: int = 0,
) -> EvaluationReport:
    """Score a model and changed ones on a task of your own: how much did they lose, and is it more than chance?

    Each score of a changed model has the 95 % interval of its difference from the original (paired bootstrap, 1,000
    resamples). Beside it are flips, the share of answers that differ: two models with the same score may answer many
    examples differently. A model is an object, a checkpoint folder, a name on the Hub, or a folder that `export` wrote
    for ONNX Runtime or OpenVINO. All read the same examples. No model is changed.

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
            Matthews' correlation. "translation": BLEU and chrF. "perplexity": of a language model. "retrieval": nDCG
            and recall of the ten passages nearest to each query. A function takes a model and its tokenizer and returns
            a number per example, in the same order each time; the score is their mean. It is called three times for
            each model.
        data: a table (.tsv, .csv, .json, .jsonl, .parquet), a list of dicts, or a text file per column with an example
            a line; not for a function. Similarity reads the columns `sentence1`, `sentence2` and `score`,
            classification `sentence` and `label` or `sentence1`, `sentence2` and `label`, translation `source` and
            `target`, perplexity `text`, retrieval `query` and `passage`: a row for each passage that answers a query,
            and rows with an empty query for others.
        tokenizer: for models that bring none: objects, and folders without one. None: that of the original's folder.
        columns: the names of these columns in the data, in this order.
        batch_size: texts that a model reads at a time.
        max_length: tokens to which texts are cut.
        source_prefix: stands before every first text, as T5 wants it.
        seed: seed of the bootstrap.

    Returns:
        Scores, intervals, flips, sizes and times; `print` it.

    Raises:
        ArgumentError: on an unknown task, an impossible number or missing data or tokenizer.
        DataError: if the data is empty, lacks a column or a text, or has a label that a model does not know.
        LoadError: if there is no such model.
        UnsupportedModelError: if a model cannot do the task.
        MissingPackageError: if a package for the task is not installed.
    """
    check_count("batch_size", batch_size, least=1, most=MAX_SIZE)
    check_count("max_length", max_length, least=1, most=MAX_SIZE)
    check_seed(seed)
    chosen = made(task, data, columns, Limits(batch_size, max_length, source_prefix))
    others = changed if isinstance(changed, Mapping) else {name_in(source_of(changed)): changed}
    if not others:
        raise ArgumentError("changed is empty: pass a model, or several by name")
    sources = [(name, source_of(each)) for name, each in [("original", original), *others.items()]]
    for _, source in sources:
        check_source(source)
    found = opened(sources, tokenizer)
    with ExitStack() as stack:
        for each in found:
            stack.enter_context(evaluating(each.model))
        tried(chosen, found)
        return scored(chosen, found, batch_size, seed)


def check_task(source: str, task: str, data: Data, limits: Limits) -> None:
    """Raise the error of `evaluate` for a model that cannot do a task, or for bad examples, without all of the work."""
    chosen = made(task, data, None, limits)
    found = opened([("original", source)], None)
    with evaluating(found[0].model):
        tried(chosen, found)


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
    chosen = made(task, data, columns, Limits(batch_size, max_length, source_prefix))

    def score(model: PreTrainedModel) -> float:
        chosen.check(model, tokenizer)
        with evaluating(model):
            answers = chosen.answers(model, tokenizer)
        first = next(iter(chosen.scores(answers).values()))
        return chosen.SIGN * on_all(first, chosen.count(answers))

    return score


def made(task: str | Callable, data: Data | None, columns: Sequence[str] | None, limits: Limits) -> Task:
    """Return the task with its examples."""
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


def source_of(given: PreTrainedModel | str | Path) -> Source:
    """Return a model, or the name of its folder as a text."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) else given


def name_in(source: Source) -> str:
    """Return the name of a model in the table."""
    return portable_name(source) if isinstance(source, str) else type(source).__name__


def check_source(source: Source) -> None:
    """Raise an error of ours for a folder without a model, and for what is no model; other names may be on the Hub."""
    if not isinstance(source, str):
        check_model(source)
    elif os.path.isdir(source) and not os.path.isfile(os.path.join(source, CONFIG)):
        raise LoadError(f"{source} holds no model: it has no {CONFIG}")
    elif os.path.isabs(source) and not os.path.isdir(source):
        raise LoadError(f"{missing_folder(source)}: give a folder, or a name on the Hub")


def opened(sources: Sequence[tuple[str, Source]], tokenizer: Any) -> list[Candidate]:
    """Load models and their tokenizers."""
    found: list[Candidate] = []
    for name, source in sources:
        model = load(source) if isinstance(source, str) else source
        own = tokenizer or (found[0].tokenizer if found else None)
        if isinstance(source, str) and has_tokenizer(source):
            own = load_or_explain(AutoTokenizer, source)
        if own is None:
            raise ArgumentError(f"{name} brings no tokenizer: pass it as tokenizer")
        found.append(Candidate(name, model, own, megabytes(model, source)))
    return found


def load(source: str) -> PreTrainedModel:
    """Load a checkpoint with the class that its config names, or what `export` wrote, with one thread."""
    if os.path.isfile(os.path.join(source, EXPORT)):
        return load_exported(source, threads=1)
    return load_or_explain(class_of(load_or_explain(AutoConfig, source)), source)


def has_tokenizer(source: str) -> bool:
    """Return True for a folder with a tokenizer, and a name on the Hub."""
    return not os.path.isdir(source) or os.path.isfile(os.path.join(source, TOKENIZER))


def megabytes(model: PreTrainedModel, source: Source) -> float:
    """Return the size of weights in 10^6 bytes: of the files in a folder, else of the tensors in memory."""
    if isinstance(source, str) and (files := files_of_weights(Path(source))):
        return sum(file.stat().st_size for file in files) / 1e6
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers())) / 1e6


def files_of_weights(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a checkpoint or an exported model; empty for what is no folder."""
    for patterns in WEIGHTS:
        if files := [file for pattern in patterns for file in folder.glob(pattern)]:
            return files
    return []


def tried(task: Task, found: Sequence[Candidate]) -> None:
    """Check that every model can do a task, on its first examples, before any model reads all of them."""
    for each in found:
        task.check(each.model, each.tokenizer)
    if isinstance(task, OwnFunction):
        return
    first, expected = task.first(CHECKED), None
    for each in found:
        answers = first.answers(each.model, each.tokenizer)
        expected = answers if expected is None else expected
        first.flips(answers, expected)


def scored(task: Task, found: Sequence[Candidate], timed: int, seed: int) -> EvaluationReport:
    """Return the report on models that can do a task."""
    answers = [task.answers(each.model, each.tokenizer) for each in progress_bar(found, desc="scoring")]
    count, scores = task.count(answers[0]), [task.scores(each) for each in answers]
    flips = [None, *(task.flips(each, answers[0]) for each in answers[1:])]
    first = task.first(timed)
    seconds = in_turns([partial(first.answers, each.model, each.tokenizer) for each in found], task.ROUNDS)
    models = []
    for number, each in enumerate(found):
        own = {name: on_all(score, count) for name, score in scores[number].items()}
        changes = {
            name: ScoreChange(
                own[name] - on_all(scores[0][name], count), *bootstrap_interval(score, scores[0][name], count, seed)
            )
            for name, score in scores[number].items()
            if number
        }
        models.append(EvaluatedModel(each.name, own, changes, flips[number], each.megabytes, seconds[number]))
    return EvaluationReport(task.name, count, first.count(answers[0]), task.FLIPS, tuple(models))
