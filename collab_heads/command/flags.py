"""The commands and their flags; like `checks.py` and `training/options/` without imports that take long."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc

from collab_heads.base.option_values import EVALUATION_TASKS, REPORT_PARTS, SITE_PARTS
from collab_heads.command import checks
from collab_heads.command.shared_flags import (
    ANALYZE,
    BUDGET,
    COMPRESS,
    DEVICE,
    DISTILLING,
    EVALUATE,
    GENERATED,
    INT8,
    LOADING,
    MODEL,
    PREFIX,
    RUNNING,
    SAMPLES,
    SCORING,
    SHAPE,
    SPENDING,
    TO,
    TRIM,
    data,
    demo,
    output,
)
from collab_heads.training.options import heads, tasks
from collab_heads.training.options.changes import COLLABORATIVE, DISTILLATION, FIT, SWAP, WIDTHS
from collab_heads.training.options.parser import Flag, Parser, flag
from collab_heads.training.options.run import OUTPUT, model_flags, training_flags
from collab_heads.training.options.tasks import TABLE
from collab_heads.training.options.value_types import count_from_1, path, width

CHANGES = (
    ("collaborative attention", COLLABORATIVE),
    ("distillation", DISTILLATION),
    ("heads", heads.HEADS),
    ("mixing heads", heads.ALPHAS),
    ("rotating heads", heads.ROTATION),
    ("looking at heads", heads.ANALYSIS),
)
Groups = Sequence[tuple[str | None, Sequence[Flag]]]


def alone(*flags: Flag) -> Groups:
    return ((None, flags),)


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        summary: for the list of commands.
        check: makes all checks that need no model; its docstring is the help.
        groups: title of a group (None: no group) and its flags, in order.
    """

    summary: str
    check: Callable[[Namespace], None]
    groups: Groups

    def parser(self, prog: str | None = None) -> Parser:
        made = Parser(prog=prog, description=getdoc(self.check))
        for title, flags in self.groups:
            made.add(*flags, group=title)
        return made


COMMANDS = {
    "inspect": Command(
        "what is in a model: its attention, layer by layer, parameters, cache; what works with a family",
        checks.inspect,
        alone(
            flag("model MODEL", "folder, or name on the Hub, of a model; or the type of a model", nargs="?"), LOADING
        ),
    ),
    "compress": Command(
        "make layers smaller where it costs least: heads, queries and keys, values, neurons",
        checks.compress,
        alone(
            MODEL,
            *data(),
            output("the smaller model"),
            flag(
                "--validation FILE...",
                "texts of another kind than --data, in the same form: the error on them is reported, too",
            ),
            GENERATED,
            flag("--plan", "only show what every budget would cost; the model stays as it is"),
            flag(
                "--measurements FILE",
                "keep what is measured of every layer in this file, as soon as it is known, and the fits beside it: a "
                "run that was killed goes on from there, and one with another budget begins with what was measured",
                path,
                of=COMPRESS,
            ),
            BUDGET,
            flag(
                "--max_error ERROR",
                "instead of a budget: by how much the output may change, such as 0.1; the model becomes as "
                "small as that allows",
                of=COMPRESS,
            ),
            *SPENDING,
            flag(
                "--kind KIND",
                "per_head: every head has its own, narrower query and key; shared: all heads use one, which is "
                "smallest, and slow",
                of=COMPRESS,
            ),
            flag(
                "--sites SITE",
                "the sites that may change, by role (enc-self, dec-self, dec-enc; feed-forward: enc-ffn, "
                "dec-ffn) or module path (default: all)",
                of=COMPRESS,
            ),
            flag(
                "--parts PART", f"what may become smaller, some of {', '.join(SITE_PARTS)} (default: all)", of=COMPRESS
            ),
            *SHAPE,
            flag("--refine_steps N", "gradient steps per layer that improve the fit", of=COMPRESS),
            *DISTILLING,
            *SAMPLES,
            *RUNNING,
        ),
    ),
    "shrink": Command(
        "all of it: trim, compress, distill, export and score a model",
        checks.shrink,
        alone(
            MODEL,
            *data(),
            output("the smaller model, what is exported of it, and the recipe"),
            flag("--trim", "first drop the tokens that --data does not use"),
            GENERATED,
            BUDGET,
            *SPENDING,
            *SHAPE,
            *DISTILLING,
            flag("--to TARGET...", f"what else to write the model for, some of {TO.removeprefix('one of ')}"),
            INT8,
            flag("--push NAME", "upload the result to this repository of the Hub, private unless it exists"),
            *SAMPLES,
            *RUNNING,
        ),
    ),
    "swap": Command(
        "narrower or shared queries and keys, narrower values, of widths that you give",
        checks.swap,
        alone(
            MODEL,
            *WIDTHS,
            flag(
                "--sites SITE",
                "the attention to replace, by role (enc-self, dec-self, dec-enc) or module path (default: all)",
                of=SWAP,
            ),
            *data("what the replacement is fitted to: ", required=False),
            output(),
            *FIT,
            *SAMPLES,
            *RUNNING,
        ),
    ),
    "prune": Command(
        "remove heads",
        checks.prune,
        alone(
            MODEL,
            heads.TARGET,
            flag(
                "--head_selection HOW",
                "which heads stay: reconstruction, those that the others can least stand in for; gradient, by the "
                "gradient of the loss (translation models and language models); random",
                of=("heads.prune", "prune_heads"),
                option="criterion",
            ),
            flag(
                "--alive_heads FILE",
                "instead, a JSON file that names the heads to keep: role -> for every layer a list of 0 and 1, or "
                "module path -> such a list",
                path,
            ),
            flag(
                "--sites SITE...",
                "where heads may be removed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
            ),
            flag("--no_repair", "do not fit the output projections so that the other heads make up"),
            *data("what heads are measured on, and the others fitted to: ", required=False),
            output(),
            *SAMPLES,
            *RUNNING,
        ),
    ),
    "trim": Command(
        "keep the tokens that texts use: a smaller vocabulary, embeddings and output layer",
        checks.trim,
        alone(
            MODEL,
            *data(),
            output("the trimmed model"),
            flag("--keep N", "tokens that stay, or their share of the vocabulary; default: all used", width, of=TRIM),
            flag("--min_count N", "how often the texts must use a token, without --keep", count_from_1, of=TRIM),
            PREFIX,
            LOADING,
        ),
    ),
    "export": Command(
        "for ONNX Runtime, transformers.js, OpenVINO, ExecuTorch, CTranslate2, llama.cpp or plain transformers",
        checks.export,
        alone(
            MODEL,
            output("the exported model"),
            flag("--to TARGET", TO, of=("serving.export", "export")),
            INT8,
            flag("--per_layer", "sizes of its own for every layer in the config (only for transformers)"),
            LOADING,
        ),
    ),
    "encode": Command(
        "the embeddings of texts, by a sentence encoder or what `export` wrote of one",
        checks.encode,
        alone(
            flag("model MODEL", "folder, or name on the Hub, of a sentence encoder; or a folder that `export` wrote"),
            flag("file FILE", "text file with a text a line", path),
            flag("--output FILE", "where the embeddings go: a new .npy file, with a row for each line", path),
            flag("--batch_size N", "texts per batch", count_from_1, 32),
            flag("--prompt_name NAME", "the prompt of the model that stands before each text (default: the model's)"),
            LOADING,
        ),
    ),
    "generate": Command(
        "the translations of texts, or what a language model writes after them",
        checks.generate,
        alone(
            flag("model MODEL", "folder, or name on the Hub, of a model; or a folder that `export` wrote"),
            flag("file FILE", "text file with a text a line", path),
            flag("--output FILE", "where the texts go: a new file, with a line for each line", path),
            flag("--max_new_tokens N", "how many tokens a language model writes at most", count_from_1, 64),
            flag("--batch_size N", "texts per batch, of a translation model", count_from_1, 32),
            flag("--max_length N", "cut lines to this many tokens (word pieces)", count_from_1, 128),
            PREFIX,
            LOADING,
        ),
    ),
    "evaluate": Command(
        "score models on a task of yours: what did they lose, how many answers differ, how fast are they",
        checks.evaluate,
        alone(
            flag("original ORIGINAL", "folder, or name on the Hub, of the model that the others are compared with"),
            flag("changed CHANGED...", "the same of changed models, or folders that `collab-heads export` wrote"),
            flag("--task TASK", f"one of {', '.join(EVALUATION_TASKS)}", required=True),
            flag(
                "--data FILE...",
                f"the examples: {TABLE}; or a text file for each column, with an example a line",
                required=True,
            ),
            flag(
                "--column NAME...",
                "the columns of the table, in the order of the task (default: sentence1 sentence2 score; sentence "
                "label, or sentence1 sentence2 label; source target; text; query passage)",
            ),
            flag("--batch_size N", "texts per batch", count_from_1, of=EVALUATE),
            flag("--max_length N", "cut texts to this many tokens (word pieces)", count_from_1, of=EVALUATE),
            PREFIX,
            DEVICE,
            flag("--seed N", "seed of the bootstrap", of=EVALUATE),
        ),
    ),
    "fold": Command(
        "back to a stock model, which loads without this package, where that is possible",
        checks.fold,
        alone(MODEL, output(), LOADING),
    ),
    "analyze": Command(
        "show what the heads of a model do",
        checks.analyze,
        alone(
            MODEL,
            *data(),
            flag(
                "--treebank FILE",
                "CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
            ),
            output("the report", "head_report"),
            flag(
                "--parts PART",
                f"parts of the report, some of {', '.join(REPORT_PARTS)} (default: all but {REPORT_PARTS[-1]})",
                of=ANALYZE,
            ),
            flag(
                "--prefixes KIND",
                "what the decoder of a translation model has read when contributions are measured: reference, the "
                "second text; own, what the model makes of the first; random, the translations of others (default: "
                "reference)",
                of=ANALYZE,
            ),
            flag(
                "--compare_with MODEL",
                "other models, or checkpoints of a training in order, to measure the contributions of beside this "
                "one's",
                of=ANALYZE,
            ),
            flag("--samples N", "use only the first N sentences (default: all)", count_from_1),
            flag(
                "--examples N",
                "sentences, of typical lengths, whose attention is shown",
                of=ANALYZE,
                option="num_examples",
            ),
            flag(
                "--sentences FILE...",
                "text file with sentences of your choice, whose attention is shown before that of the examples; of a "
                "translation model two, or one and its own translations; long ones are shown in pieces",
            ),
            *SCORING,
            flag("--all_heads", "print a row per head, below the summary"),
            *RUNNING,
        ),
    ),
    "glue": Command(
        "fine-tune on GLUE or on tables of your own (run_glue.py)",
        checks.glue,
        (
            (None, [demo("a generated task")]),
            ("data", tasks.GLUE),
            ("model", model_flags()),
            *CHANGES,
            ("training", training_flags(of_tasks=True)),
            ("output", OUTPUT),
        ),
    ),
    "translate": Command(
        "train, compress and prune translation models (run_translation.py)",
        checks.translate,
        (
            (None, [demo("a generated language")]),
            ("data", tasks.PAIRS),
            ("model", model_flags()),
            (tasks.FROM_SCRATCH, tasks.TRANSLATION_SCRATCH),
            *CHANGES,
            (None, [heads.PREFIXES]),
            ("training", training_flags()),
            ("translation", tasks.TRANSLATION),
            ("what training makes small", tasks.RISK),
            ("output", OUTPUT),
        ),
    ),
    "images": Command(
        "train, compress and prune classifiers of images",
        checks.images,
        (
            (None, [demo("handwritten digits")]),
            ("data", tasks.IMAGES),
            ("model", model_flags(of_images=True)),
            (tasks.FROM_SCRATCH, tasks.IMAGE_SCRATCH),
            *CHANGES,
            ("training", training_flags()),
            ("output", OUTPUT),
        ),
    ),
}
