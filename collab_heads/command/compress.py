"""The work of `collab-heads compress`."""

import copy
from argparse import Namespace

from collab_heads.collaborative.kinds import check_kind
from collab_heads.command.flags.signatures import options_of
from collab_heads.command.inputs import batches_of, check_class, drawn, load, read_data
from collab_heads.command.writing import drawing, write_model, write_plan
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.measurements import HELD_OUT
from collab_heads.compression.plan import plan
from collab_heads.compression.report import CompressReport
from collab_heads.data.parallel import Pairs
from collab_heads.distillation.distill import distill
from collab_heads.distillation.examples import num_examples
from collab_heads.errors import DataError


def run(args: Namespace) -> CompressReport | CompressionPlan:
    """Compress a model, print and write the result, and return the report; with `--plan` return only the plan.

    All input is read and checked before the model runs.
    """
    check_kind(args.kind)
    all_texts = read_data(args)
    loaded = load(args)
    model, tokenizer, _ = loaded
    check_class(model)
    texts = drawn(all_texts, args.samples, args.seed)
    check_enough(args, texts)
    batches = batches_of(args, model, tokenizer, texts)
    given = {name: getattr(args, name) for name in options_of("compression.plan", "plan")}
    made = plan(model, batches, **{name: value for name, value in given.items() if value is not None})
    print(made)
    if args.plan:
        if args.output_dir is not None:
            write_plan(made, args.output_dir)
        return made
    original = copy.deepcopy(model) if args.distill_steps else None
    report = compress(model, made, args.budget, max_error=args.max_error)
    print(report)
    distilled = None
    if original is not None:
        several = drawn(all_texts, num_examples(args.distill_steps, args.batch_size), args.seed)
        batches = batches_of(args, original, tokenizer, several)
        distilled = distill(model, original, batches, args.distill_steps, seed=args.seed)
        print(distilled)
    record = {
        **report.to_dict(),
        "distilled": None if distilled is None else distilled.to_dict(),
        "plan": made.to_dict(),
    }
    measured = report.costs[report.of].share, report.measured_error
    picture = drawing(made, "compression", measured)
    write_model(args, loaded, "compression", report, record, distilled=distilled, more=picture)
    return report


def check_enough(args: Namespace, texts: Pairs) -> None:
    """Raise DataError unless there are enough sentences to fit on some and to measure the error on one other."""
    if (found := len(texts["source"])) < HELD_OUT:
        raise DataError(
            f"{' and '.join(args.data)}: {found} sentences, and one of {HELD_OUT} is kept to measure on: give more "
            "(256 to 2,048 are good)"
        )
