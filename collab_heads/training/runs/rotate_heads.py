"""The rotation of heads that the flags describe, and where it cannot be."""

from argparse import Namespace
from collections.abc import Iterable

from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError
from collab_heads.rotation.dynamic import DynamicRotation
from collab_heads.rotation.manual import HeadRotation
from collab_heads.training.flags.pruning import learns_gates
from collab_heads.training.flags.rotating import OF_ROTATE
from collab_heads.training.runs.choose_heads import sites_to_gate
from collab_heads.training.runs.mix_heads import sites_to_mix

Rotation = HeadRotation | DynamicRotation


def rotation_of(args: Namespace, exclude: Iterable[int] | None = None) -> Rotation | None:
    """The rotation that the flags describe; `exclude` holds ids of tokens that do not count in rankings.

    Raises:
        CollabHeadsError: if the schedule cannot be read, or a setting cannot be.
    """
    if args.rotation_schedule:
        return HeadRotation.from_json(args.rotation_schedule)
    if not args.rotate:
        return None
    names = {name: "roles" if name == "sites" else name for name in OF_ROTATE}
    values = {parameter: getattr(args, f"rotation_{name}") for name, parameter in names.items()}
    return DynamicRotation(
        args.rotate, seed=args.seed, exclude=exclude, **{k: v for k, v in values.items() if v is not None}
    )


def rotating_paths(rotation: Rotation, model: PreTrainedModel) -> set[str]:
    """The sites whose heads may change places."""
    if isinstance(rotation, HeadRotation):
        return {slot.path for epoch in rotation.schedule for pair in rotation.pairs(model, epoch) for slot in pair}
    return {slot.path for _, stack in rotation.stacks(model).values() for layer in stack for slot in layer}


def check_rotating_sites(args: Namespace, model: PreTrainedModel, rotation: Rotation) -> None:
    """Raise ArgumentError if heads are to rotate where there will be gates and alphas: gates travel, alphas do not."""
    if not (args.alpha_mixing and learns_gates(args)):
        return
    gated = {site.path for site in sites_to_gate(args, model)}
    mixed = {site.path for site in sites_to_mix(args, model)}
    if both := sorted(gated & mixed & rotating_paths(rotation, model)):
        raise ArgumentError(
            f"{both[0]} would have gates and alphas, so its heads cannot rotate: name other sites with "
            "--gated_sites, --alpha_sites or --rotation_sites, or choose heads by --head_selection gradient"
        )
