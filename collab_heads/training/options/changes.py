"""The flags of the swap to collaborative attention, of the compression, and of the distillation after them."""

from argparse import Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import ALLOCATIONS, MEASURES, MODEL_SHAPES, SITE_PARTS
from collab_heads.errors import ArgumentError
from collab_heads.training.options.parser import flag, needing, options_of
from collab_heads.training.options.value_types import count, count_from_1, path, per_role, positive, width

SWAPS = ("before", "after", "between")
SWAP = ("collaborative.swap", "swap_to_collaborative")
COMPRESSED = options_of("compression.compress", "compress")["kind"].default
CHANGE = "collaborative compress_budget"  # either of them changes the layers

WIDTHS = (
    flag(
        "--dim_shared_query_key R",
        "width of the query and key of a layer, all heads together; 0.5 is half of what the model has; or per role, "
        "such as enc-self=64,dec-enc=0.5, which leaves other roles alone (default: all of it, which is exact)",
        per_role(width),
        of=SWAP,
    ),
    flag(
        "--dim_value R",
        "width of the values of a layer, all heads together, in the same forms (default: as they are; alone it leaves "
        "query and key as they are, too)",
        per_role(width),
        of=SWAP,
    ),
    flag(
        "--kind KIND",
        "shared: all heads use one projection of queries and keys; per_head: every head has its own, narrower one",
        of=SWAP,
    ),
    flag(
        "--allocation HOW",
        "uniform: the same width in every layer; balanced: as many parameters in all, but more of them in the layers "
        "where they count most",
        of=SWAP,
    ),
)
FIT = (
    flag("--refine_steps N", "gradient steps per layer that improve the fit; only with calibration", of=SWAP),
    flag(
        "--decomposition_tol TOL",
        "the decomposition stops when a sweep lowers the relative error by less",
        of=SWAP,
        option="tol",
    ),
    flag("--decomposition_method NAME", "als, or parafac of the package tensorly", of=SWAP, option="method"),
)
SHAPES = (
    "sizes of its own; ctranslate2: what this engine runs; gguf: what llama.cpp runs; uniform: what a stock config can "
    "say (default: even for models without a head, else free)"
)
COLLABORATIVE = (
    flag("--collaborative", "replace attention by collaborative attention"),
    *needing("collaborative", *WIDTHS),
    flag(
        "--compress_budget SHARE",
        "instead of --collaborative: what is to be left of the layers, such as 0.5; heads and neurons go, and queries, "
        "keys and values get narrower, where it costs least (with a new classification head --swap after or between)",
        positive,
    ),
    *needing(
        "compress_budget",
        flag("--compress_of WHAT", f"what the share is of: {', '.join(MEASURES)} (default: {MEASURES[0]})"),
        flag("--compress_parts PART...", f"what may become smaller, some of {', '.join(SITE_PARTS)} (default: all)"),
        flag("--compress_kind KIND", f"the kind of narrower queries and keys, as --kind (default: {COMPRESSED})"),
        flag(
            "--compress_shape SHAPE",
            "even: all feed-forward blocks of a stack keep the same number of neurons; free: every site has " + SHAPES,
        ),
    ),
    flag(
        "--swap WHEN",
        "when attention is replaced or compressed: before fine-tuning, after it, or between two (fine-tune, swap, "
        "fine-tune again)",
        default="before",
        needs=CHANGE,
    ),
    flag(
        "--calibration_samples N",
        "training examples on which the replacement is fitted to what the layers see; 0: from the weights alone",
        count,
        256,
    ),
    *FIT,
    flag(
        "--sites SITE...",
        "the attention to replace or compress, by role (enc-self, dec-self, dec-enc) or module path (default: all); "
        "--compress_budget also knows feed-forward blocks (enc-ffn, dec-ffn)",
        needs=CHANGE,
    ),
    flag(
        "--score_terms TERMS",
        "for ablation: content or context keeps only that term of the attention score; both keeps both",
        default="both",
    ),
)
DISTILLATION = (
    flag(
        "--distill_steps N",
        "after --collaborative or --compress_budget, before any other training: steps in which the changed attention "
        "learns to do what the original does, on 32 training examples each, without labels (default: none)",
        count_from_1,
        needs=CHANGE,
    ),
    flag(
        "--distill_from NAME",
        "folder, or name on the Hub, of the original to learn from (default: the model before the change)",
        path,
        needs="distill_steps",
    ),
)


def wants_swap(args: Namespace) -> bool:
    """Return True if the run replaces or compresses attention."""
    return args.collaborative or args.compress_budget is not None


def check_swap(args: Namespace) -> None:
    """Check the flags of a swap and of a compression against each other, without the tables of the library."""
    check_choice("--swap", args.swap, SWAPS)
    check_choice("--allocation", args.allocation, ALLOCATIONS)
    if args.allocation == "balanced" and not args.calibration_samples:
        raise ArgumentError("--allocation balanced needs --calibration_samples")
    check_choice("--score_terms", args.score_terms, ("both", "content", "context"))
    if args.compress_budget is None:
        return
    if args.collaborative:
        raise ArgumentError(
            "--compress_budget and --collaborative exclude each other: one finds the widths, the other is given them"
        )
    if not args.calibration_samples:
        raise ArgumentError("--compress_budget needs --calibration_samples")
    if args.compress_of is not None:
        check_choice("--compress_of", args.compress_of, MEASURES)
    if args.compress_shape is not None:
        check_choice("--compress_shape", args.compress_shape, MODEL_SHAPES)
    for part in args.compress_parts or ():
        check_choice("--compress_parts", part, SITE_PARTS)


def check_fit(args: Namespace) -> None:
    """Check the kind of the projections and the method of the fit against tables that take long to import."""
    from collab_heads.fitting.kinds import FITS
    from collab_heads.fitting.solvers import METHODS, check_method

    check_choice("--kind", args.kind, offered())
    check_choice("--decomposition_method", args.decomposition_method, METHODS)
    check_method(args.decomposition_method)
    why = FITS[args.kind].meaningless.get("method")
    if why is not None and args.decomposition_method != "als":
        raise ArgumentError(f"--decomposition_method has no meaning for --kind {args.kind}, {why}")
    if args.decomposition_tol >= 1:
        raise ArgumentError(f"--decomposition_tol {args.decomposition_tol} must be below 1")


def check_smaller(args: Namespace) -> None:
    """Check the budget and the kind of a compression, as `check_fit` does for a swap."""
    from collab_heads.compression.budgets import check_budget

    if args.compress_budget is not None:
        check_budget(args.compress_budget)
    if args.compress_kind is not None:
        check_choice("--compress_kind", args.compress_kind, offered())


def offered() -> list[str]:
    """Return the kinds of query/key projection that users can choose."""
    from collab_heads.fitting.kinds import FITS

    return [name for name, fit in FITS.items() if fit.is_offered]


def check_distillation(args: Namespace) -> None:
    """Check the flags of the distillation against the other flags."""
    if args.distill_steps is not None and args.score_terms != "both":
        raise ArgumentError("--distill_steps would learn what --score_terms leaves out: leave one of them out")
