"""distill: train a changed model to reproduce its original, without labels."""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.estimates import say, work
from collab_heads.base.numerics import keeping_threads
from collab_heads.base.processes import agreed, copy_from_first
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.contract.registry import get_adapter
from collab_heads.distillation.checkpoint import Checkpoint, DistillReport, Progress, resumed
from collab_heads.distillation.estimate import estimate_distillation
from collab_heads.distillation.examples import (
    check_apart,
    check_pair,
    embeddings,
    in_order,
    joined,
    list_batches,
    says_of_vocabulary,
    split,
)
from collab_heads.distillation.gap import Gap
from collab_heads.distillation.grids import trained_grids
from collab_heads.distillation.optimizer import MasterWeights, put_back, trained_alone, trained_parameters
from collab_heads.distillation.processes import DistillOptions, Precision, Processes
from collab_heads.files.checkpoint import digest_of_batches, digest_of_model
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.refusals import check_finite_sites
from collab_heads.running.batches import Batch, Part, evaluating
from collab_heads.running.threads import choose_threads
from collab_heads.running.translations import with_translations

if TYPE_CHECKING:
    from accelerate import Accelerator


PHASES = ("translating", 1), ("distilling", 10)


@checking_arguments
@torch.inference_mode(False)
def distill(
    model: PreTrainedModel,
    original: PreTrainedModel,
    batches: Iterable[Mapping],
    steps: int = 300,
    *,
    original_batches: Iterable[Mapping] | None = None,
    learning_rate: float = 0.01,
    output_weight: float = 1.0,
    evaluate_every: int | None = None,
    patience: int = 4,
    seed: int = 0,
    mixed_precision: Precision | None = None,
    accelerator: "Accelerator | None" = None,
    output_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
) -> DistillReport:
    """Train the changed layers of a model, in place, to reproduce its original, without labels.

    `distill` trains only the projections of changed sites (query/key, values, output with its bias; those of
    changed feed-forward blocks), except parameters that are frozen (`requires_grad=False`). Gates, alphas and
    everything else stay as they are. Weights that `compress` put on grids of few bits are trained there, embeddings
    included. The loss is the squared error of the hidden states of every layer, relative to their variance over
    tokens, plus the error of the output. The latter is that of the logits if there is a head (2 KL if they are a
    distribution), else that of the mean of the last hidden state over tokens. Padding does not count, and a token
    of outlying norm, as the first one in many decoders, counts as one of usual norm.

    Both models run in evaluation mode, without dropout, since the model should reproduce what the original does in use.
    Afterwards modes, gradients and `requires_grad` are as before. After any error or interruption the model is as
    before the call.

    If the vocabulary of the model was trimmed (`trim_vocabulary`) and that of the original was not, each reads an
    example in its own tokens: pass `original_batches`. The hidden states of every layer are then compared by their mean
    over the tokens of an example, and the token embeddings are trained, too.

    A part of the batches is held out (every eighth, at most about 16). In the end the model gets the weights that were
    best on this part, so its held-out error is never larger than before.

    Examples:
        >>> import copy
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
        >>> model = BertModel(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> original = copy.deepcopy(model)
        >>> report = compress(model, batches, 0.5, refine_steps=2)
        >>> report = distill(model, original, batches, steps=4)
        >>> report.after.total(1.0) <= report.before.total(1.0)  # the error on held-out batches
        True

    Args:
        model: a model changed by `swap_to_collaborative`, `prune_heads`, `compress` or the like; in float32, float64 or
            bfloat16 (then the steps add up in float32 copies). With weights of few bits, in float32.
        original: the model that it was made from, or one of the same class and sizes, in any mode; it is only run.
        batches: input dicts as the model takes them, an iterable that is listed once (it has to fit in memory). Labels
            serve only as inputs for the decoder of an encoder-decoder. If the decoder has no inputs, the original first
            translates the batches, greedily.
        steps: the largest number of optimizer steps, one batch each.
        original_batches: the same examples in the same order, in the tokens of the original, where its vocabulary is
            another one; for models that embed or classify texts. None: both read `batches`.
        learning_rate: the highest learning rate of AdamW, for each tensor relative to its root mean square. It rises
            for a short time, then falls to 0 as a cosine.
        output_weight: weight of the output's error, relative to the mean of the layers' errors.
        evaluate_every: steps between evaluations on the held-out part; None for a tenth of `steps`.
        patience: stop after this number of evaluations in a row without improvement, that over the untrained model
            apart.
        seed: seed of the order of the batches.
        mixed_precision: "bf16" for autocast, "no", or None for the setting of the accelerator or the launcher.
        accelerator: an `accelerate.Accelerator`, prepared for one or several processes. Each of them holds the whole
            model and is given the same batches; they divide every batch among them. None for the launcher's processes.
        output_dir: checkpoints are written to its subfolder `distillation`. To resume a run that was killed, call
            `distill` again with the same arguments; the result is the same bit by bit. The subfolder is removed when
            the run is complete.
        checkpoint_every: steps between checkpoints; None for `evaluate_every`.

    Returns:
        A report with the held-out errors before and after, and the steps, tokens and time used; `print` it.

    Raises:
        ArgumentError: on an argument that cannot work, models that do not fit each other, or nothing to train.
        UnsupportedModelError: if a model is wrapped, or returns nothing by which it can be compared.
        CalibrationError: if there are no batches, one holds no tokens, or the models cannot take one; the message has
            its number.
        NonFiniteError: if an output of a model, or a weight of its attention, contains NaN or inf; the weight is named.
        ModelStateError: if a changed site shares a projection with another site.
        OutputError: if a checkpoint cannot be written, is damaged, or is of another run.
        MissingPackageError: if Accelerate is not installed.
    """
    started = time.perf_counter()
    options = DistillOptions(steps, learning_rate, output_weight, evaluate_every, checkpoint_every, patience, seed)
    apart = original_batches is not None
    check_pair(model, original, says_of_vocabulary if apart else None)
    layers, given = (OpenLayers.of(each, get_adapter(each)) for each in (model, original))
    trained = trained_parameters(layers, embeddings(model) if apart else None)
    check_apart(trained, original)
    for each in (layers, given):
        check_finite_sites(each.model, each.in_order)
    processes = Processes.found(accelerator, mixed_precision, model.device.type == "cpu")
    listed = list_batches(model, batches)
    if original_batches is not None:
        listed = joined(model, original, listed, original_batches)
    run = {**dataclasses.asdict(options), "mixed_precision": processes.precision, "processes": processes.num_processes}
    if processes.num_processes > 1 or output_dir is not None:
        run |= digests(model, original, listed)
        processes.check_same("batches", run["batches"])
    checkpoint = None if output_dir is None else Checkpoint(output_dir, run)
    with (
        resumed(processes, checkpoint) as saved,
        evaluating(original),
        evaluating(model),
        trained_alone(model, trained),
        one_bar("distill", PHASES, disable=not processes.is_main_process),
        work("distill"),
        keeping_threads(),
    ):
        train, held_out = split(listed, steps)
        places = in_order(len(train), seed, steps)
        read = sorted(set(places))  # others need no translation
        found = with_translations(original, [*(train[place] for place in read), *held_out])
        chosen = dict(zip(read, found, strict=False))
        in_turn, held_out = [chosen[place] for place in places], found[len(read) :]
        copy_from_first(processes, trained.values())
        if saved is not None:
            torch.set_num_threads(saved[0].threads)
        elif processes.num_processes == 1:
            choose_threads(original, in_turn[0][1])
        if processes.num_processes == 1 and not apart:
            size = sum(parameter.nbytes for parameter in trained.values())
            some = [batch for _, batch in in_turn]
            say(lambda: estimate_distillation(original, model, some, steps, size))
        gap = Gap.measured(model, original, processes, held_out, output_weight)
        weights = MasterWeights(trained, learning_rate, steps, trained_grids(model, trained))
        progress = Distillation(gap, weights, options, in_turn, held_out, checkpoint).run(saved, started)
        put_back(trained, progress.best)
    errors = dict(progress.history)
    return DistillReport(
        before=errors[0],
        after=errors[progress.best_step],
        best_step=progress.best_step,
        steps=progress.step,
        steps_asked=steps,
        history=tuple(progress.history),
        trained_parameters=sum(parameter.numel() for parameter in trained.values()),
        batches=len(train),
        held_out_batches=len(held_out),
        tokens=progress.tokens,
        seconds=progress.seconds,
    )


def digests(model: PreTrainedModel, original: PreTrainedModel, batches: list[Batch]) -> dict[str, str]:
    """Return digests of both models and of the batches, by which a checkpoint recognises its run."""
    return {
        "model": digest_of_model(model),
        "original": digest_of_model(original),
        "batches": digest_of_batches(batches),
    }


class Distillation:
    """The training loop: steps on one part of the batches, evaluations on the other.

    Args:
        gap: the gap to minimise.
        weights: the trained parameters and their optimizer.
        options: the options of the distillation.
        in_turn: the batch of every step, with its number.
        held_out: the batches to evaluate on, with their numbers.
        checkpoint: where to save; None for no checkpoints.
    """

    def __init__(
        self,
        gap: Gap,
        weights: MasterWeights,
        options: DistillOptions,
        in_turn: Part,
        held_out: Part,
        checkpoint: Checkpoint | None,
    ):
        self.gap, self.weights, self.options = gap, weights, options
        self.in_turn, self.held_out, self.checkpoint = in_turn, held_out, checkpoint

    def run(self, saved: tuple[Progress, dict[str, Tensor]] | None, started: float) -> Progress:
        """Train to the end, from the beginning or from a checkpoint.

        Args:
            saved: the content of a checkpoint; None to start at the beginning.
            started: `time.perf_counter()` at the start of the call.
        """
        progress, state = saved if saved is not None else (Progress(), {})
        if state:
            self.weights.load(state)
        else:
            self.evaluate(progress)
        started -= progress.seconds
        with progress_bar(total=self.options.steps, initial=progress.step, desc="distilling") as bar:
            while progress.step < self.options.steps and not self.is_stale(progress):
                self.take_step(progress)
                bar.update()
                if self.is_due(progress, self.options.steps_between_evaluations):
                    self.evaluate(progress)
                    bar.show(f"held-out error {self.total(-1, progress):.3g}")
                progress.seconds = time.perf_counter() - started
                if self.checkpoint is not None and progress.step % self.options.steps_between_checkpoints == 0:
                    self.save(progress)
        progress.seconds = time.perf_counter() - started
        return progress

    def take_step(self, progress: Progress) -> None:
        _, tokens = self.gap.backward(*self.in_turn[progress.step])
        self.weights.take_step(progress.step, self.gap.processes)
        progress.step += 1
        progress.tokens += tokens

    def is_due(self, progress: Progress, every: int) -> bool:
        """Return True after `every` steps, and after the last step."""
        return progress.step % every == 0 or progress.step == self.options.steps

    def evaluate(self, progress: Progress) -> None:
        """Measure the held-out part, and keep the weights if they are the best so far."""
        progress.history.append((progress.step, self.gap.error(self.held_out)))
        totals = [self.total(index, progress) for index in range(len(progress.history))]
        if len(totals) == 1 or totals[-1] < min(totals[:-1]):
            progress.best_step = progress.step
            progress.best = {name: p.detach().clone() for name, p in self.weights.trained.items()}

    def total(self, index: int, progress: Progress) -> float:
        """Return the total held-out error of an evaluation, given by its index in the history."""
        return progress.history[index][1].total(self.options.output_weight)

    def is_stale(self, progress: Progress) -> bool:
        """Return True if the last `patience` evaluations brought no improvement.

        The error before training does not count: the first steps, whose learning rate is highest, often raise the error
        of a model that was fitted in closed form, and later ones bring it below where it began.
        """
        totals = [self.total(index, progress) for index in range(1, len(progress.history))]
        return bool(totals) and len(totals) - 1 - totals.index(min(totals)) >= self.options.patience

    def save(self, progress: Progress) -> None:
        """Write a checkpoint on the first process; an error is raised on all."""
        checkpoint, processes = self.checkpoint, self.gap.processes
        if checkpoint is not None:
            agreed(processes, lambda: checkpoint.save(progress, self.weights.state()))
