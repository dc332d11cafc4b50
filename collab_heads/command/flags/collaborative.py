"""The flags of the swap to collaborative attention."""

import argparse
from collections.abc import Callable

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import ALLOCATIONS, MEASURES, MODEL_SHAPES, SITE_PARTS
from collab_heads.command.flags.parsing import count, count_from_1, path, per_role, positive, width
from collab_heads.command.flags.signatures import option_adder, options_of
from collab_heads.errors import ArgumentError

SWAPS = ("before", "after", "between")
SWAP = ("collaborative.swap", "swap_to_collaborative")
COMPRESSED = options_of("compression.compress", "compress")["kind"].default
OF_COMPRESSION = ("compress_of", "compress_kind", "compress_parts", "compress_shape")


def add_collaborative_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the swap to collaborative attention and of the compression."""
    group = parser.add_argument_group("collaborative attention")
    add = group.add_argument
    add("--collaborative", action="store_true", help="replace attention by collaborative attention")
    add_width_arguments(add)
    add(
        "--compress_budget",
        type=positive,
        metavar="SHARE",
        help="instead of --collaborative: what is to be left of the layers, such as 0.5; heads and neurons go, and "
        "queries, keys and values get narrower, where it costs least (with a new classification head --swap after or "
        "between)",
    )
    add("--compress_of", metavar="WHAT", help=f"what the share is of: {', '.join(MEASURES)} (default: {MEASURES[0]})")
    add(
        "--compress_parts",
        nargs="+",
        metavar="PART",
        help=f"what may become smaller, some of {', '.join(SITE_PARTS)} (default: all)",
    )
    add(
        "--compress_kind",
        metavar="KIND",
        help=f"the kind of narrower queries and keys, as --kind (default: {COMPRESSED})",
    )
    add(
        "--compress_shape",
        metavar="SHAPE",
        help="even: all feed-forward blocks of a stack keep the same number of neurons; free: every site has sizes of "
        "its own; ctranslate2: what this engine runs; uniform: what a stock config can say "
        "(default: even for models without a head, else free)",
    )
    add(
        "--swap",
        default="before",
        metavar="WHEN",
        help="when attention is replaced or compressed: before fine-tuning, after it, or between two (fine-tune, swap, "
        "fine-tune again)",
    )
    add(
        "--calibration_samples",
        type=count,
        default=256,
        metavar="N",
        help="training examples on which the replacement is fitted to what the layers see; 0: from the weights alone",
    )
    add_fit_arguments(add)
    add(
        "--sites",
        nargs="+",
        metavar="SITE",
        help="the attention to replace or compress, by role (enc-self, dec-self, dec-enc) or module path (default: "
        "all); --compress_budget also knows feed-forward blocks (enc-ffn, dec-ffn)",
    )
    add(
        "--score_terms",
        default="both",
        metavar="TERMS",
        help="for ablation: content or context keeps only that term of the attention score; both keeps both",
    )


def add_width_arguments(add: Callable[..., object]) -> None:
    """Add the flags for the widths of queries, keys and values; `add` is `add_argument` of a parser or a group."""
    add_option = option_adder(add, *SWAP)
    add_option(
        "dim_shared_query_key",
        type=per_role(width),
        metavar="R",
        help="width of the query and key of a layer, all heads together; 0.5 is half of what the model has; "
        "or per role, such as enc-self=64,dec-enc=0.5, which leaves other roles alone (default: all of it, which is "
        "exact)",
    )
    add_option(
        "dim_value",
        type=per_role(width),
        metavar="R",
        help="width of the values of a layer, all heads together, in the same forms (default: as they are; alone it "
        "leaves query and key as they are, too)",
    )
    add_option(
        "kind",
        metavar="KIND",
        help="shared: all heads use one projection of queries and keys; per_head: every head has its own, narrower one",
    )
    add_option(
        "allocation",
        metavar="HOW",
        help="uniform: the same width in every layer; balanced: as many parameters in all, but more of them in the "
        "layers where they count most",
    )


def add_fit_arguments(add: Callable[..., object]) -> None:
    """Add the flags for the fit of the replacement; `add` is `add_argument` of a parser or a group."""
    add_option = option_adder(add, *SWAP)
    add_option(
        "refine_steps",
        metavar="N",
        help="gradient steps per layer that improve the fit; only with calibration",
    )
    add_option(
        "tol",
        flag="decomposition_tol",
        metavar="TOL",
        help="the decomposition stops when a sweep lowers the relative error by less",
    )
    add_option("method", flag="decomposition_method", metavar="NAME", help="als, or parafac of the package tensorly")


def check_swap(args: argparse.Namespace) -> None:
    """Check the flags of a swap against each other, without the tables of the library.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    check_choice("--swap", args.swap, SWAPS)
    check_choice("--allocation", args.allocation, ALLOCATIONS)
    if args.allocation == "balanced" and not args.calibration_samples:
        raise ArgumentError("--allocation balanced needs --calibration_samples")
    check_choice("--score_terms", args.score_terms, ("both", "content", "context"))
    of_swap = "dim_shared_query_key", "dim_value", "kind", "allocation"
    if not args.collaborative and any(getattr(args, name) != options_of(*SWAP)[name].default for name in of_swap):
        raise ArgumentError(
            "--dim_shared_query_key, --dim_value, --kind and --allocation have no effect without --collaborative"
        )
    if not wants_swap(args) and (args.sites, args.swap) != (None, "before"):
        raise ArgumentError("--sites and --swap have no effect without --collaborative or --compress_budget")
    check_compression(args)


def check_fit(args: argparse.Namespace) -> None:
    """Check the kind of the projections and the method of the fit; raises the errors of `check_swap`.

    The valid values are in tables of the library, which takes long to import.
    """
    from collab_heads.collaborative.kinds import FITS
    from collab_heads.collaborative.solvers import METHODS, check_method

    check_choice("--kind", args.kind, offered())
    check_choice("--decomposition_method", args.decomposition_method, METHODS)
    check_method(args.decomposition_method)
    why = FITS[args.kind].meaningless.get("method")
    if why is not None and args.decomposition_method != "als":
        raise ArgumentError(f"--decomposition_method has no meaning for --kind {args.kind}, {why}")
    if args.decomposition_tol >= 1:
        raise ArgumentError(f"--decomposition_tol {args.decomposition_tol} must be below 1")


def check_smaller(args: argparse.Namespace) -> None:
    """Check the budget and the kind of a compression against tables of the library, as `check_fit` does for a swap."""
    from collab_heads.compression.compression_plan import check_budget

    if args.compress_budget is not None:
        check_budget(args.compress_budget)
    if args.compress_kind is not None:
        check_choice("--compress_kind", args.compress_kind, offered())


def offered() -> list[str]:
    """Return the kinds of query/key projection that users can choose."""
    from collab_heads.collaborative.kinds import FITS

    return [name for name, fit in FITS.items() if fit.is_offered]


def wants_swap(args: argparse.Namespace) -> bool:
    """Return True if the run replaces or compresses attention."""
    return args.collaborative or args.compress_budget is not None


def check_compression(args: argparse.Namespace) -> None:
    """Check the flags of the compression; raises the errors of `check_swap`."""
    if args.compress_budget is None:
        if given := [f"--{flag}" for flag in OF_COMPRESSION if getattr(args, flag) is not None]:
            raise ArgumentError(f"{' and '.join(given)} have no effect without --compress_budget")
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


def add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the distillation from the original model."""
    add = parser.add_argument_group("distillation").add_argument
    add(
        "--distill_steps",
        type=count_from_1,
        metavar="N",
        help="after --collaborative or --compress_budget, before any other training: steps in which the changed "
        "attention learns to do what the original does, on 32 training examples each, without labels (default: none)",
    )
    add(
        "--distill_from",
        type=path,
        metavar="NAME",
        help="folder, or name on the Hub, of the original to learn from (default: the model before the change)",
    )


def check_distillation(args: argparse.Namespace) -> None:
    """Check the flags of the distillation against the other flags.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    if args.distill_steps is None:
        if args.distill_from is not None:
            raise ArgumentError("--distill_from needs --distill_steps")
        return
    if not wants_swap(args):
        raise ArgumentError("--distill_steps needs --collaborative or --compress_budget: else there is nothing to mend")
    if args.score_terms != "both":
        raise ArgumentError("--distill_steps would learn what --score_terms leaves out: leave one of them out")
