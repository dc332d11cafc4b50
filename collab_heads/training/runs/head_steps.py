"""What a run does to heads: before its last training, in it, and after it."""

from typing import TYPE_CHECKING

from torch.optim import Optimizer
from transformers import PreTrainedModel

from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.errors import ArgumentError
from collab_heads.heads.alpha import alpha_report
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.registry import get_adapter
from collab_heads.rotation.dynamic import DynamicRotation
from collab_heads.rotation.manual import HeadRotation
from collab_heads.state import CollabConfig
from collab_heads.training.flags import alphas, pruning, rotating
from collab_heads.training.loop.loop import num_steps
from collab_heads.training.runs import analysis
from collab_heads.training.runs.analysis import GateRecorder
from collab_heads.training.storage.output import STATISTICS
from collab_heads.training.storage.reservation import agreed

if TYPE_CHECKING:
    from collab_heads.training.runs.run import Run


def check(run: "Run") -> None:
    """Check early, before anything is written, that the loaded model has what the flags name."""
    pruning.check_model(run.args, run.model)
    alphas.check_model(run.args, run.model)


def start(run: "Run") -> None:
    """Put gates and alphas on the heads; or choose heads, remove them, and evaluate what is left."""
    if pruning.wants_gates(run.args):
        common = run.accelerator, run.args, run.model, lambda n: run.samples(n, labels=True)
        report = pruning.start(*common)
        if report is None:
            run.scores = pruning.ranking(*common)
        else:
            run.accelerator.print(report)
            run.heads["pruned"] = report.to_dict()
            run.evaluate("pruned")
    if run.args.alpha_mixing:
        alphas.start(run.args, run.model)
    if run.rotation is not None:  # again: heads may be gone, or have gates by now
        run.rotation.check(run.model, run.epochs())


def record_gates(run: "Run") -> None:
    """Note from here on how open the gates are, for the report."""
    if run.args.analyze and pruning.learns_gates(run.args) and gated_sites(run.model, get_adapter(run.model)):
        steps = num_steps(run.args, run.order(run.last_training()))
        run.recorder = GateRecorder(run.model, steps, run.progress.get("gates_over_training"))


def hooks(run: "Run") -> dict:
    """The hooks of the last training: what it adds for the heads, and which of them change places."""
    args, found = run.args, {}
    record_gates(run)
    if pruning.learns_gates(args) or alphas.acts_in_training(args):
        found["penalty"] = lambda total: penalty(run, total)
        found["rates"] = {"gate_lr": args.gate_learning_rate, "alpha_lr": args.alpha_learning_rate}
    if run.rotation is not None:
        found["before_epoch"] = lambda model, epoch, optimizer: rotate(run, model, epoch, optimizer)
    if run.recorder is not None:
        found["after_step"] = run.recorder
    return found


def penalty(run: "Run", total: int) -> HeadPenalty | None:
    """What a training of `total` optimizer steps adds; None if the heads that it was for are gone."""
    options = alphas.penalty_options(run.args, run.model, total)
    if pruning.learns_gates(run.args):
        options |= pruning.penalty_options(run.args, total, run.scores)
    return None if all(value is None for value in options.values()) else HeadPenalty(run.model, **options)


def check_rotating(run: "Run", rotation: HeadRotation | DynamicRotation) -> None:
    """Raise ArgumentError if heads are to rotate where there will be gates and alphas: gates travel, alphas do not."""
    args = run.args
    if run.checkpoint is None and args.alpha_mixing and pruning.learns_gates(args):
        gated = {site.path for site in pruning.chosen_sites(args, run.model)}
        mixed = {site.path for site in alphas.chosen_sites(args, run.model)}
        if both := sorted(gated & mixed & rotating.rotating_paths(rotation, run.model)):
            raise ArgumentError(
                f"{both[0]} would have gates and alphas, so its heads cannot rotate: name other sites with "
                "--gated_sites, --alpha_sites or --rotation_sites, or choose heads by --head_selection importance"
            )


def rotate(run: "Run", model: PreTrainedModel, epoch: int, optimizer: Optimizer) -> None:
    """Let heads change places before an epoch; the first process chooses for all."""
    pairs = agreed(run.accelerator, lambda: run.rotation.plan(model, epoch, run.validation()))
    run.rotation.apply(model, epoch=epoch, optimizer=optimizer, pairs=pairs)
    if pairs:
        named = ", ".join(f"{first} with {second}" for first, second in pairs)
        run.accelerator.print(f"epoch {epoch}: {len(pairs)} pairs of heads changed places: {named}")


def end(run: "Run") -> None:
    """Remove the heads that training closed, and evaluate what is left; note what else became of them."""
    if run.args.alpha_mixing:
        run.heads["alphas"] = alpha_report(run.model).to_dict()  # gates that are removed take them into W_O
    if pruning.learns_gates(run.args):
        gates, report = pruning.finish(run.model)
        run.accelerator.print(report)
        run.heads |= {"gates": gates, "pruned": report.to_dict()}
        run.evaluate("pruned")
    if run.rotation is not None:
        run.heads["rotation"] = run.rotation.history


def progress(run: "Run") -> dict:
    """What a checkpoint must know of the heads to go on."""
    return {
        "heads": run.heads,
        "rotation": run.rotation and run.rotation.state_dict(),
        "gates_over_training": run.recorder and run.recorder.state(),
    }


def show(run: "Run") -> None:
    """Measure the heads of the final model on the validation examples, as far as asked to."""
    save_statistics(run)
    analysis.save_report(run, ends(run))


def save_statistics(run: "Run") -> None:
    """Measure the heads on the validation examples, as the final model sees them, if asked to."""
    if not run.args.save_head_statistics:
        return
    batches = run.validation(own=True)  # all processes make what there is to be made
    if run.accelerator.is_main_process:
        found = head_statistics(run.model, batches, exclude=ends(run))
        run.accelerator.print(found)
        run.output.write_folder(STATISTICS, found.save)


def ends(run: "Run") -> list[int]:
    """The tokens that end sentences, which do not count where heads are measured."""
    own = run.tokenizer.eos_token_id, run.tokenizer.sep_token_id
    return sorted({token for token in own if token is not None})


def fold(run: "Run") -> bool:
    """Make a stock model of it, if asked to and it is none; whether it was done."""
    due = run.args.fold_heads and bool(CollabConfig.of(run.model.config).sites)
    if due:
        report = fold_heads(run.model)
        run.accelerator.print(report)
        run.heads["folded"] = report.to_dict()
        run.evaluate("folded")
    return due


def new_rotation(run: "Run") -> HeadRotation | DynamicRotation | None:
    """The rotation that the flags describe, checked against model and epochs; None without."""
    rotation = rotating.rotation_of(run.args, ends(run))
    if rotation is not None:
        rotation.check(run.model, run.epochs())
        check_rotating(run, rotation)
        if run.progress.get("rotation"):
            rotation.load_state_dict(run.progress["rotation"])
    return rotation
