"""The work of `collab-heads prune`."""

from argparse import Namespace
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.command.flags.heads import read_alive
from collab_heads.command.inputs import calibration, check_class, load
from collab_heads.command.writing import write_model
from collab_heads.contract.registry import get_adapter, is_lone_decoder
from collab_heads.errors import ArgumentError
from collab_heads.heads.criteria import criterion_of
from collab_heads.heads.gating import gated_sites, swap_to_gated
from collab_heads.heads.importance import head_importance, most_important
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import PruneReport
from collab_heads.sites.site import select_sites


def run(args: Namespace) -> PruneReport:
    """Choose heads, remove the others, print and write the result, and return the report."""
    alive = None if args.alive_heads is None else read_alive(args.alive_heads)
    loaded = load(args)
    model = loaded.model
    check_class(model)
    if alive is None and args.target_heads is None and not gated_sites(model, get_adapter(model)):
        raise ArgumentError(
            "the model has no gates that say which heads go: give --target_heads (how many stay), or --alive_heads"
        )
    batches = calibration(args, loaded)
    if args.target_heads is not None:
        alive = most_important(model, scores(args, model, batches), args.target_heads)
    if alive is not None:
        swap_to_gated(model, alive_heads=alive)  # else the gates of the trained model say which heads stay
    report = prune_heads(model, batches=None if args.no_repair else batches)
    print(report)
    write_model(args, loaded, "prune", report)
    return report


def scores(args: Namespace, model: PreTrainedModel, batches: Sequence[Mapping] | None) -> dict[str, Tensor]:
    """Score every head of the sites that `--target_heads` and `--sites` name: path -> [H]."""
    names = list(args.target_heads) if isinstance(args.target_heads, Mapping) else args.sites
    sites = select_sites(get_adapter(model).sites_with_heads(model), names)
    criterion = criterion_of(args.head_selection, seed=args.seed)
    if criterion.needs_labels:
        batches = [with_labels(model, batch) for batch in batches or ()]
    measured = head_importance(model, batches, criterion=criterion)
    return {site.path: measured[site.path] for site in sites}


def with_labels(model: PreTrainedModel, batch: Mapping) -> Mapping:
    """Add the labels of a language model, its own tokens, to a batch; return the batch of any other model unchanged."""
    if not is_lone_decoder(model.config):
        return batch
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
