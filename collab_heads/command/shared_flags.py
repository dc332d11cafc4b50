"""Flags that several commands have; like `flags.py` without imports that take long."""

from collab_heads.base.option_values import BITS, ENGINE_WORDS, EVALUATION_TASKS, EXPORT_TARGETS, MEASURES
from collab_heads.training.options.changes import SHAPES
from collab_heads.training.options.parser import Flag, flag
from collab_heads.training.options.tasks import TABLE
from collab_heads.training.options.value_types import count, count_from_1, path, positive, seed, share_or_size, utf8

COMPRESS, TRIM = ("compression.compress", "compress"), ("vocabulary.trim", "trim_vocabulary")
DISTILL = ("distillation.distill", "distill")
ANALYZE = ("analysis.analyze", "analyze_heads")
EVALUATE = ("evaluation.evaluate", "evaluate")

QUIET = flag("--quiet", "no progress bars, and no lines about progress where stderr is a file")
JSON = flag("--json", "print one JSON document, and messages on stderr")
ROW = "with a number, repeat that row of its table; ignores other flags"

MODEL = flag("model MODEL", "folder, or name on the Hub, of the model")
LOADING = flag("--trust_remote_code", "run Python code that comes with the model")
PREFIX = flag("--source_prefix TEXT", "text before every input, as T5 wants it", utf8, "")
DEVICE = flag("--device DEVICE", "where the model runs, such as cuda", default="cpu")
SAMPLES = (
    flag("--samples N", "sentences to fit to, drawn by the seed", count_from_1, 512),
    flag("--seed N", "seed of everything that is random", seed, 0),
)
RUNNING = (
    flag("--batch_size N", "sentences per batch", count_from_1, 32),
    flag("--max_length N", "cut sentences to this many tokens (word pieces)", count_from_1, 128),
    PREFIX,
    DEVICE,
    LOADING,
)


def output(what: str = "the changed model", default: str | None = None) -> Flag:
    return flag("--output_dir DIR", f"folder for {what}; must be new or empty", path, default)


def data(why: str = "", *, required: bool = True) -> tuple[Flag, ...]:
    """Return the flags of the input texts; `why` begins their help where they are not required."""
    return (
        flag(
            "--data FILE...",
            f"{why}text file with a sentence a line, or {TABLE}; for a translation model also the file of its "
            "translations; FILE:WEIGHT each to mix several",
            required=required,
        ),
        flag(
            "--column NAME...",
            "column of a table that holds the text, or two: text and translation, or pairs that a classifier reads",
        ),
        flag("--skip_bad_rows", "leave rows of a .tsv with too many or too few fields out"),
    )


def demo(on: str) -> Flag:
    """Return the flag `--demo`; its value is the number of a row, True for all, or False."""
    what = f"try everything on {on} with a small model"
    return flag("--demo ROW", f"{what}; {ROW}", count_from_1, False, nargs="?", const=True)


GENERATED = flag(
    "--generated N",
    "of a language model: let it write N texts of --max_length tokens, and fit to them beside --data; it "
    "then loses less on other kinds of text; as many tokens as --data has are good",
    count,
    0,
)
BUDGET = flag(
    "--budget SHARE",
    "what is to be left of the layers, such as 0.5 (default, unless another limit is given); or the size "
    "of the weights of the whole model, such as 10MB",
    share_or_size,
    of=COMPRESS,
)
SCORING = (
    flag("--evaluate FILE...", "examples to score models on, as `collab-heads evaluate` reads them"),
    flag("--task TASK", f"what they are scored on, one of {', '.join(EVALUATION_TASKS)}"),
)
SPENDING = (
    flag(
        "--max_loss POINTS",
        "instead of a budget: what the model may lose of its score on --evaluate; it becomes as small as that allows",
        of=COMPRESS,
    ),
    *SCORING,
    flag("--of WHAT", f"what the budget is of: {', '.join(MEASURES)}", of=COMPRESS),
    flag("--engine ENGINE", f"where time is measured, with --of time: {', '.join(ENGINE_WORDS)}", of=COMPRESS),
    flag(
        "--bits BITS",
        f"bits that weights may have, embeddings included, some of {', '.join(map(str, BITS))} (default: "
        "none); the budget is of bytes then, or of time in an --engine",
        count,
        of=COMPRESS,
    ),
    flag("--table_bits BITS", "the same of embeddings alone (default: --bits)", count, of=COMPRESS),
)
SHAPE = (
    flag(
        "--shape SHAPE",
        "even: all feed-forward blocks of a stack keep the same number of neurons, or none; free: "
        "every site has " + SHAPES,
        of=COMPRESS,
    ),
    flag(
        "--multiple_of N",
        "what the widths of smaller layers are multiples of; 64 suits GPUs and four bits",
        of=COMPRESS,
    ),
)
DISTILLING = (
    flag(
        "--distill_steps N",
        "training steps in which the smaller model learns to be like the original, on all of --data "
        "and without labels; 300 bring back much of what was lost",
        count,
        0,
    ),
    flag(
        "--distill_learning_rate RATE",
        "their highest learning rate, relative to the size of a weight; for a pretrained language model 0.003",
        positive,
        of=DISTILL,
        option="learning_rate",
    ),
)
INT8 = flag("--int8", "weights in eight bits, and products of integers (not for transformers)")
TO = f"one of {', '.join(EXPORT_TARGETS)}"
