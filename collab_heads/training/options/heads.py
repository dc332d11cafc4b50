"""The flags of heads in a training: which stay, how they are mixed, how they change places, how they are looked at."""

from argparse import Namespace
from collections.abc import Mapping

from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import CRITERION_WORDS, LOSS_KINDS, METRIC_WORDS, POLICY_WORDS, PREFIX_KINDS
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.conllu import Sentence, read_conllu
from collab_heads.files.reading import parse_json, read_text
from collab_heads.training.options.changes import wants_swap
from collab_heads.training.options.parser import flag, needing, options_of
from collab_heads.training.options.value_types import (
    count,
    count_from_1,
    interval,
    not_negative,
    path,
    per_role,
    positive,
    share_of_steps,
)


def trains(args: Namespace) -> bool:
    """Return True if the run has training steps."""
    return bool(args.num_train_epochs if args.max_train_steps is None else args.max_train_steps)


# ---- gates and pruning

SELECTIONS = ("learned", *CRITERION_WORDS)
OF_GATES = ("gate_weight", "target_heads", "alive_heads")  # each of them makes the run gate or remove heads

TARGET = flag(
    "--target_heads N",
    "keep this many heads: N in the whole model, or per role, such as enc-self=4,dec-self=4,dec-enc=6",
    per_role(count),
)
HEADS = (
    TARGET,
    flag(
        "--head_selection HOW",
        "how --target_heads are chosen: learned, by gates that close in training; or before training: gradient, of the "
        "loss; reconstruction, by how well the others can stand in for them, which the output projection then does, "
        "without labels; random",
        default="learned",
        needs="target_heads",
    ),
    flag(
        "--gate_weight X",
        "instead of a number of heads, a price: lambda per open head. Gates learn which heads are worth it "
        "(concrete_coef of Voita et al., divided by the number of gated modules)",
        not_negative,
    ),
    flag(
        "--alive_heads FILE",
        "instead, or for other roles than those that learn gates, a JSON file of heads to keep: role -> for every "
        "layer a list of 0 and 1, or module path -> such a list",
        path,
    ),
    flag(
        "--gated_sites SITE...",
        "where heads may be removed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
    ),
    flag(
        "--gate_learning_rate LR",
        "peak learning rate of the gates",
        of=("trainer.head_training", "HeadTraining"),
        option="gate_lr",
    ),
    flag("--selection_share X", "share of the steps in which learned gates go down to --target_heads", positive, 0.1),
    flag(
        "--importance_samples N",
        "training examples that rank the heads before training: the choice of --head_selection gradient, and where "
        "learned gates begin; 0: gates begin equal",
        count,
        256,
    ),
)


def read_alive(path: str) -> dict:
    """Read the JSON file of `--alive_heads`, which names the heads to keep."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:  # a DataError is one, too
        raise DataError(f"--alive_heads {path}: {error}") from error


def wants_gates(args: Namespace) -> bool:
    """Return True if the run gates or removes heads."""
    return any(getattr(args, name) is not None for name in OF_GATES)


def learns_gates(args: Namespace) -> bool:
    """Return True if gates are trained; otherwise heads are chosen and removed before training."""
    return args.gate_weight is not None or (args.target_heads is not None and args.head_selection == "learned")


def check_heads(args: Namespace) -> None:
    """Check the flags of gates and pruning against each other and the other flags."""
    check_choice("--head_selection", args.head_selection, SELECTIONS)
    given = [f"--{name}" for name in OF_GATES if getattr(args, name) is not None]
    if len(given) > 1 and not (given[1:] == ["--alive_heads"] and learns_gates(args)):
        raise ArgumentError(f"{' and '.join(given)} exclude each other: one of them says which heads stay")
    if args.gated_sites and (given in ([], ["--alive_heads"]) or isinstance(args.target_heads, Mapping)):
        raise ArgumentError(
            "--gated_sites goes with --gate_weight or a total for --target_heads; the others name their own"
        )
    if args.head_selection not in ("learned", "random") and not args.importance_samples:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --importance_samples")
    if args.selection_share > 1:
        raise ArgumentError(f"--selection_share {args.selection_share} is a share, 1 at most")
    if learns_gates(args) and not trains(args):
        name = "num_train_epochs" if args.max_train_steps is None else "max_train_steps"
        raise ArgumentError(f"gates are learned in training: --{name} is 0 (or use --head_selection gradient)")
    if given and args.compress_budget is not None:
        raise ArgumentError(f"--compress_budget and {given[0]} exclude each other: it finds the heads that stay itself")
    for name in ("dim_shared_query_key", "dim_value"):
        asked = getattr(args, name)
        widths = [each for each in (asked.values() if isinstance(asked, Mapping) else [asked]) if isinstance(each, int)]
        if given and args.collaborative and args.swap == "after" and widths:
            raise ArgumentError(
                f"--{name} {widths[0]} with --swap after is the width of heads that may be gone by then: "
                "give a share, such as 0.5, or swap before or between"
            )


# ---- alphas, and penalties that keep heads apart

ALPHAS = (
    flag("--alpha_mixing", "learn to replace every head by a combination of its layer's heads"),
    *needing(
        "alpha_mixing",
        flag(
            "--alpha_sites SITE...",
            "where heads are mixed: roles (enc-self, dec-self, dec-enc) or module paths (default: everywhere)",
        ),
        flag(
            "--alpha_start X", "share of the steps after which the alphas begin to learn (default: 0)", share_of_steps
        ),
        flag(
            "--alpha_growth_weight G",
            "gamma: how strongly the nuclear norms of the alphas are pushed to grow, one number or one per role, such "
            "as enc-self=0.05,dec-enc=0. A role of 0 keeps its alphas fixed; a role that is not named learns without a "
            "push (default: no push)",
            per_role(not_negative),
        ),
        flag("--alpha_learning_rate LR", "peak learning rate of the alphas (default: --learning_rate)", positive),
    ),
    *needing(
        "alpha_growth_weight",
        flag(
            "--alpha_growth_beside LOSS",
            "the loss that gamma is meant for: mean, as here; sum, over the target tokens of a step, as the 40 of Azov "
            "and Landau: gamma is then divided by their number (for classifiers, by the examples) (default: mean)",
        ),
        flag(
            "--alpha_growth_radius R",
            "no push in a step in which the norm has grown by this much (default: 1e-4)",
            positive,
        ),
    ),
    flag(
        "--disagreement_weight X",
        "weight of a penalty for heads of a layer whose outputs are alike (mean cosine), one number or one per role "
        "(default: no penalty)",
        per_role(not_negative),
    ),
    flag(
        "--fold_heads",
        "at the end, multiply gates and alphas into the output projection: a checkpoint that loads without this "
        "package",
        needs="alpha_mixing target_heads gate_weight alive_heads",
    ),
    flag(
        "--save_head_statistics",
        "at the end, write confidence, similarity and alphas of all heads to head_statistics/",
        needs="output_dir",
    ),
)


def check_alphas(args: Namespace) -> None:
    """Check the flags of mixing heads against each other and the other flags."""
    if args.alpha_growth_beside is not None:
        check_choice("--alpha_growth_beside", args.alpha_growth_beside, LOSS_KINDS)
    for name in ("alpha_mixing", "disagreement_weight"):
        if getattr(args, name) and not trains(args):
            raise ArgumentError(f"--{name} acts in training: there are no training steps")
    if args.fold_heads and wants_swap(args):
        raise ArgumentError("--fold_heads makes a stock checkpoint, which cannot be --collaborative or compressed")
    if args.alpha_mixing and args.compress_budget is not None and args.swap == "after":
        raise ArgumentError("--compress_budget cannot compress mixed heads: --swap before or between mixes afterwards")


def acts_in_training(args: Namespace) -> bool:
    """Return True if alphas or the disagreement penalty take part in training."""
    return args.alpha_mixing or args.disagreement_weight is not None


# ---- heads that change places

OF_ROTATE = ("metric", "count", "frequency", "rest", "start", "end", "layer_pairs", "sites")
ROTATED = options_of("rotation.head_rotation", "HeadRotation")
NUMBERS = {
    "count": ("pairs of heads that change places", ROTATED["count"].default),
    "frequency": ("epochs until they change back", ROTATED["frequency"].default),
    "rest": ("epochs from there to the next exchange", ROTATED["rest"].default),
    "start": ("epoch of the first exchange, counted from 1", ROTATED["start"].default),
    "end": ("last epoch in which heads may be exchanged", "the last"),
    "layer_pairs": ("pairs of layers between which soft exchanges heads, the outermost first", "all"),
}
ROTATION = (
    flag("--rotation_schedule FILE", "JSON file: epoch -> pairs of heads that change places before it", path),
    flag(
        "--rotate POLICY",
        "instead, let a policy choose the pairs again and again: hard, soft, local or random; one, or one per role, "
        "such as enc-self=soft,dec-enc=hard",
        per_role(str.strip, what="policy"),
    ),
    flag(
        "--rotation_metric NAME",
        "what the policy ranks heads by: confidence; output_distance (l2), of their outputs; map_distance (pairwise), "
        "of their attention maps; base; wasserstein; one, or one per role (default: confidence)",
        per_role(str.strip, what="name"),
        needs="rotate",
    ),
    *(
        flag(
            f"--rotation_{name} N",
            f"{text}; one number, or one per role, such as enc-self=2 (default: {default})",
            per_role(count),
            needs="rotate",
        )
        for name, (text, default) in NUMBERS.items()
    ),
    flag(
        "--rotation_sites ROLE...",
        "roles whose heads change places: enc-self, dec-self, dec-enc (default: all)",
        needs="rotate",
    ),
)


def check_rotation(args: Namespace) -> None:
    """Check the flags of head rotation against each other and the other flags."""
    if args.rotate and args.rotation_schedule:
        raise ArgumentError("--rotate and --rotation_schedule exclude each other: one of them says what swaps")
    if args.rotate:
        for policy in each_value(args.rotate):
            check_choice("--rotate", policy, POLICY_WORDS)
        for metric in each_value(args.rotation_metric or "confidence"):
            check_choice("--rotation_metric", metric, METRIC_WORDS)
    if not wants_rotation(args):
        return
    if not trains(args):
        raise ArgumentError("heads rotate in training: there are no training steps")
    if args.collaborative:
        raise ArgumentError("--collaborative heads share one projection: they cannot rotate")
    if args.compress_budget is not None:
        raise ArgumentError("--compress_budget gives heads of other layers other widths: they cannot rotate")
    if getattr(args, "average_checkpoints", None):
        raise ArgumentError("--average_checkpoints would average heads that changed places between checkpoints")
    everywhere = args.alpha_sites is None and args.gated_sites is None and not isinstance(args.target_heads, dict)
    if args.alpha_mixing and learns_gates(args) and everywhere:
        raise ArgumentError(
            "heads with gates and alphas cannot rotate, gates would leave and alphas stay: leave one of the three out, "
            "choose heads by --head_selection gradient, or gate and mix other sites (--gated_sites, --alpha_sites)"
        )


def each_value(given: str | dict[str, str]) -> list[str]:
    """Return the values of a flag that has one value, or one per role."""
    return list(given.values()) if isinstance(given, dict) else [given]


def wants_rotation(args: Namespace) -> bool:
    return bool(args.rotate or args.rotation_schedule)


# ---- looking at heads: `--analyze`, at the end, and `--analyze_every`, in training

LOSS = "loss"  # measured without each head unless another metric is named

ANALYSIS = (
    flag(
        "--analyze",
        "at the end, write a report on the heads, tables and pictures, to head_report/",
        needs="output_dir",
    ),
    flag(
        "--analyze_samples N",
        "validation examples that heads are looked at on (default: all)",
        count_from_1,
        needs="analyze analyze_every",
    ),
    flag(
        "--analyze_every N|epoch",
        "every N optimizer steps, or after every epoch, note how sure heads are, how open their gates, and how they "
        "are mixed; at the end draw it, still and moving, in head_history/",
        interval,
        needs="output_dir",
    ),
    flag(
        "--analyze_treebank FILE",
        "CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
        path,
        needs="analyze",
    ),
    flag(
        "--analyze_ablation METRIC",
        "also measure the model without each head, one evaluation per head: its loss, or another metric, such as bleu",
        default=False,
        nargs="?",
        const=LOSS,
        needs="analyze",
    ),
)
PREFIXES = flag(
    "--analyze_prefixes KIND...",
    "for --analyze: what the decoder has read when contributions of source and target are measured, some of reference, "
    "own (the model's translations) and random (those of other sentences) (default: reference)",
    needs="analyze",
)


def check_analysis(args: Namespace) -> None:
    """Make all checks of these flags that need neither model nor data; a treebank is read once."""
    for kind in getattr(args, "analyze_prefixes", None) or ():
        check_choice("--analyze_prefixes", kind, PREFIX_KINDS)
    if args.analyze or args.analyze_every:
        check_extra("plots", "pictures")
    if args.analyze_every:
        check_extra("train", "pictures that move", ["pillow"])
        if not trains(args):
            raise ArgumentError("--analyze_every looks at heads in training: there are no training steps")
    treebank(args)


def treebank(args: Namespace) -> list[Sentence] | None:
    """Read the sentences of the treebank; None if no treebank is given."""
    return read_conllu(args.analyze_treebank) if args.analyze_treebank else None
