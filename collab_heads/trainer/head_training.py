"""HeadTraining: learn, mix and rotate heads in a training of a transformers Trainer."""

import dataclasses
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import is_number
from collab_heads.base.processes import agreed
from collab_heads.base.wrappers import has_adapters, model_inside
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CollabHeadsError, DataError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.heads.penalty.parts import PenaltyOptions
from collab_heads.heads.whole import average_whole, check_version, is_divided, is_sharded
from collab_heads.rotation.head_rotation import HeadRotation
from collab_heads.trainer.attached import attached_class

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
SELECTION_SHARE = 0.1  # of the training in which heads go down to their target, as in the scripts
OPTIONS = frozenset(field.name for field in dataclasses.fields(PenaltyOptions))


class HeadTraining(TrainerCallback, ExportableState):
    """An extension of transformers' `Trainer`, or of a subclass, that learns, mixes and rotates heads in training.

        swap_to_gated(model)
        trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=validation)
        HeadTraining(target_heads=18).attach(trainer)
        trainer.train()
        prune_heads(model)

    The penalty of gates, alphas and disagreement is added to the loss in training, not in evaluation. It counts once
    per optimizer step, however many batches the step has. Gates and alphas have parameter groups of their own in the
    optimizer, without weight decay, and are left out of gradient clipping. `log_history` holds the number of open heads
    and the norms of alphas. If the best model is loaded at the end, it is the best of those that have the target number
    of heads. A training that is resumed from a checkpoint ends as one that was never interrupted: the state of the
    heads is in `trainer_state.json`. PEFT stores its adapters alone: gates and alphas are then stored beside them, in a
    file that `load_heads` reads.

    Args:
        rotation: a `HeadRotation`, which exchanges heads before epochs; None for none.
        batches: input dicts as the model takes them, to rank the heads on for a rotation by a policy; None for the
            Trainer's evaluation set.
        gate_lr: peak learning rate of the gates.
        alpha_lr: peak learning rate of the alphas; None for that of the other weights.
        steps: as `HeadPenalty`'s; a number below 1 is a share of the training's optimizer steps; None for a tenth.
        alpha_start: as `HeadPenalty`'s; a number below 1 is a share of the training's optimizer steps.
        options: other arguments of `HeadPenalty`: `gate_weight`, `target_heads`, `scores`, `seed`, `growth`,
            `growth_beside`, `growth_radius`, `disagreement`.

    Attributes:
        penalty: of the training that is running; None before and after it, and if only a rotation was asked for.

    Raises:
        ArgumentError: on an argument that `HeadPenalty` does not have, or on an invalid value.
    """

    @checking_arguments
    def __init__(
        self,
        *,
        rotation: HeadRotation | None = None,
        batches: Iterable[Mapping] | None = None,
        gate_lr: float = 0.1,
        alpha_lr: float | None = None,
        steps: float | None = None,
        alpha_start: float | None = None,
        **options: Any,
    ):
        for name, rate in (("gate_lr", gate_lr), ("alpha_lr", alpha_lr)):
            if not (is_number(rate) and rate >= 0) and not (name == "alpha_lr" and rate is None):
                raise ArgumentError(f"{name} {rate!r:.200} must be a number, 0 or more")
        if unknown := sorted(options.keys() - OPTIONS):
            raise ArgumentError(
                f"{unknown[0]} is not an argument of a HeadPenalty; there are {', '.join(sorted(OPTIONS))}"
            )
        if batches is not None and rotation is None:
            raise ArgumentError("batches are there to rank heads on for a rotation, and there is none")
        for name, value in (("steps", steps), ("alpha_start", alpha_start)):
            if value is not None:
                check_steps(name, value)
        self.rotation, self.batches = rotation, batches
        self.rates: dict[str, Any] = {"gate_lr": gate_lr, "alpha_lr": alpha_lr}
        self.steps, self.alpha_start, self.options = steps, alpha_start, options
        self.attached: Trainer | None = None
        self.penalty: HeadPenalty | None = None
        self.progress: dict[str, Any] | None = None  # of the penalty, between two trainings
        self.counted: dict[str, int] = {}  # shares of the first training, in its steps
        self.weights: list[weakref.ref] | None = None  # of the model at the end of the last training
        self.epoch = 0

    def attach(self, trainer: Trainer) -> Trainer:
        """Attach this to a Trainer, in place, before it trains, and return the Trainer.

        Args:
            trainer: a Trainer, or one of a derived class, that has not trained yet.

        Raises:
            ArgumentError: if this or the Trainer is attached already; if it is not a Trainer; if it divides weights or
                batches in a way that heads cannot follow; if disagreement is asked for and the model does not compute
                its loss itself.
        """
        if not isinstance(cast(object, trainer), Trainer):
            raise ArgumentError(f"attach takes a transformers Trainer, not {trainer!r:.200}")
        if self.attached is not None or hasattr(trainer, "head_training"):
            raise ArgumentError("a HeadTraining is for one Trainer, and a Trainer has one HeadTraining")
        check_division(trainer, rotates=self.rotation is not None)
        if self.options.get("disagreement") is not None and not computes_loss(cast(nn.Module, trainer.model)):
            raise ArgumentError(
                f"disagreement is of one pass of a batch, and the losses of a {type(trainer.model).__name__} may take "
                "several: train without it"
            )
        self.attached = trainer
        kind: Any = type(trainer)
        trainer.__class__ = attached_class(kind)
        trainer.head_training = self  # type: ignore[attr-defined]
        trainer.add_callback(self)
        return trainer

    @property
    def trainer(self) -> Trainer:
        """The Trainer that this is attached to.

        Raises:
            ArgumentError: if it is not attached.
        """
        if self.attached is None:
            raise ArgumentError(
                f"this {type(self).__name__} is not attached to a Trainer, whose loss and optimizer it changes: "
                f"make the Trainer without it, then {type(self).__name__}(...).attach(trainer)"
            )
        return self.attached

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that is trained, without its wrappers (PEFT, sentence-transformers)."""
        return model_inside(cast(nn.Module, self.trainer.model))

    def begin(self, state: TrainerState) -> HeadPenalty | None:
        """Make the penalty of a training, before its optimizer is made, and check the rotation.

        Args:
            state: of the training, as it begins or is resumed.

        Raises:
            CollabHeadsError: if the model does not support what is asked, there is nothing to do, or the training is
                resumed from the checkpoint of one without this.
        """
        self.check_unchanged()
        name, total, epochs = type(self).__name__, state.max_steps, state.num_train_epochs
        if total and name not in cast(dict, state.stateful_callbacks):
            raise ArgumentError(f"the checkpoint was written without a {name}: begin again, or go on without one")
        if self.rotation is not None:
            if has_adapters(self.model):
                raise ArgumentError(
                    "heads that change places do so in weights that PEFT does not store: train without adapters "
                    "(merge_and_unload() them first), or leave the rotation out"
                )
            self.rotation.check(self.model, epochs or None)
        if self.progress is None:  # else a share means what it meant in the training before
            self.counted = self.counted_in(total)
        options = {**self.options, **self.counted}
        adapter = get_adapter(self.model)
        if options.get("target_heads") is None and gated_sites(self.model, adapter, learned=True):
            options.setdefault("gate_weight", 0.0)  # gates without a push also need a group of their own
        if options or self.rotation is None or mixed_sites(self.model, adapter):
            self.penalty = HeadPenalty(self.model, **options)
        return self.penalty

    def counted_in(self, total: int) -> dict[str, int]:
        """Return the steps that were given as shares, or not at all, as numbers of optimizer steps.

        Args:
            total: the optimizer steps of the training; 0 if it makes none.

        Raises:
            ArgumentError: if the number of heads would not reach its target.
        """
        counted = {}
        if self.options.get("target_heads") is not None or self.steps is not None:
            share = SELECTION_SHARE if self.steps is None else self.steps
            counted["steps"] = max(1, in_steps("steps", share, total))
            if 0 < total < counted["steps"]:
                raise ArgumentError(
                    f"steps {share!r} is more than the {total} optimizer steps of this training, in which the number "
                    "of heads would not reach target_heads"
                )
        if self.alpha_start is not None:
            counted["alpha_start"] = in_steps("alpha_start", self.alpha_start, total)
        return counted

    def abandon(self) -> None:
        """Close and drop the penalty of a training that was interrupted."""
        if self.penalty is not None:
            self.penalty.close()
            self.penalty = None

    def check_unchanged(self) -> None:
        """Raise ArgumentError if parameters were replaced since the last training: its optimizer has the old ones."""
        if self.weights is None or self.trainer.optimizer is None:
            return
        now, then = {id(each) for each in self.model.parameters()}, {id(each()) for each in self.weights}
        if now != then:
            raise ArgumentError(
                "the model was changed since the last training (prune_heads, fold_heads, ...), and the optimizer of "
                "this Trainer holds the weights of before: make a new Trainer for it, with a new HeadTraining if "
                "there are still gates or alphas to learn"
            )

    def extra(self, batch: Mapping, items: Tensor | int | None) -> Tensor | None:
        """Return the penalty of a whole optimizer step, if any.

        Args:
            batch: as the model takes it.
            items: over how many items the loss of the optimizer step is the mean; None if unknown.
        """
        return None if self.penalty is None else self.penalty.total(batch, tokens=None if items is None else int(items))

    def state(self) -> dict:
        """Return the state of the heads for a checkpoint, as a dict for JSON."""
        progress = self.progress if self.penalty is None else self.penalty.state_dict()
        rotation = None if self.rotation is None else self.rotation.state_dict()
        return {"args": {}, "attributes": {"penalty": progress, "rotation": rotation, "rates": self.rates}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the "attributes" of a dict that `state` returned, to resume its training.

        Args:
            state: "penalty" and "rotation" -> the state of each, or None.

        Raises:
            ArgumentError: if it is the state of another penalty or rotation.
            DataError: if the state is damaged.
        """
        try:
            penalty, rotation = state["penalty"], state["rotation"]
            if self.penalty is not None and penalty is not None:
                self.penalty.load_state_dict(penalty)
            if self.rotation is not None and rotation is not None:
                self.rotation.load_state_dict(rotation)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            if isinstance(error, CollabHeadsError):
                raise
            raise DataError(f"what trainer_state.json records of the heads is damaged: {error!r:.200}") from error

    def check_resumed(self, recorded: Mapping[str, Any]) -> None:
        """Raise ArgumentError if a checkpoint is of a training with other parts, or other rates of gates and alphas.

        Args:
            recorded: the "attributes" of a dict that `state` returned.
        """
        for name, part in (("penalty", self.penalty), ("rotation", self.rotation)):
            was, is_there = recorded.get(name) is not None, part is not None
            if was != is_there:
                raise ArgumentError(
                    f"the checkpoint was written {'with' if was else 'without'} a {name}, and this "
                    f"{type(self).__name__} has {'one' if is_there else 'none'}: go on with what it began with"
                )
        if (before := recorded.get("rates", self.rates)) != self.rates:
            raise ArgumentError(
                f"the rates were {before!r:.200} and are {self.rates}: go on with those of the beginning"
            )

    def on_init_end(self, args, state, control, **kwargs):
        """Raise ArgumentError if this is one of the Trainer's `callbacks`: these cannot change its loss."""
        _ = self.trainer

    def on_train_begin(self, args, state, control, **kwargs):
        """Load the state of the heads, which is that of the checkpoint if the training is resumed."""
        _ = self.trainer  # raises if this came by `add_callback`, without `attach`
        recorded = state.stateful_callbacks[type(self).__name__]["attributes"]
        if state.global_step:
            self.check_resumed(recorded)
        self.load_state(recorded)
        self.epoch = int(state.epoch or 0)

    def on_epoch_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Exchange heads before an epoch; the first process chooses, since last bits of scores may differ."""
        self.epoch += 1
        if (rotation := self.rotation) is None:
            return
        with torch.random.fork_rng(devices=[]):  # reading a data set draws, and a resumed training skips this
            batches = self.ranking_batches()
            pairs = agreed(self.trainer.accelerator, lambda: rotation.plan(self.model, self.epoch, batches))
        rotation.apply(self.model, epoch=self.epoch, optimizer=optimizer, pairs=pairs)

    def ranking_batches(self) -> Iterable[Mapping] | None:
        """Return the batches that heads are ranked on; they are only read when a ranking is due."""
        if self.batches is not None or self.trainer.eval_dataset is None:
            return self.batches
        shard = self.trainer.get_eval_dataloader()  # only this process's part: each ranks on the full set
        return DataLoader(shard.dataset, self.trainer.args.per_device_eval_batch_size, collate_fn=shard.collate_fn)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Average the gradients that FSDP does not average; drop those of alphas that do not learn, or not yet."""
        if self.penalty is not None:
            average_whole(self.trainer.accelerator, self.model)
            self.penalty.before_step()

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the penalty after an optimizer step."""
        if self.penalty is not None:
            self.penalty.step(skipped=self.trainer.accelerator.optimizer_step_was_skipped)

    def on_train_end(self, args, state, control, **kwargs):
        """Release the model; the state of the penalty is kept, for a training that is resumed."""
        self.weights = [weakref.ref(each) for each in self.model.parameters()]
        if self.penalty is not None:
            if not self.penalty.finished:
                logger.warning(
                    "the training ends before the number of heads reaches target_heads: prune_heads would leave more"
                )
            self.progress = self.penalty.state_dict()
            self.penalty.close()
            self.penalty = None


def check_division(trainer: Trainer, *, rotates: bool) -> None:
    """Raise ArgumentError if a Trainer divides weights or batches in a way that heads cannot follow."""
    if trainer.is_deepspeed_enabled:
        raise ArgumentError(
            "DeepSpeed flattens weights and gradients inside its own engine, where those of gates and alphas cannot be "
            "kept whole or reached before a step: use FSDP 2 (fsdp=True), or DDP"
        )
    if trainer.is_fsdp_xla_enabled:
        raise ArgumentError("FSDP of XLA flattens weights into parts in which there are no heads: use FSDP 2, or DDP")
    check_version(trainer.accelerator)
    if rotates and is_sharded(trainer.accelerator):
        raise ArgumentError(
            "heads change places row by row, and with FSDP a process holds only a part of the rows: use DDP, or leave "
            "the rotation out"
        )
    if is_divided(cast(nn.Module, trainer.model)):
        raise ArgumentError(
            "the weights are divided among processes already (distributed_config, tp_plan, or an earlier training): "
            "load the model whole, and let the Trainer divide it (fsdp=True)"
        )
    if trainer.args.n_gpu > 1:
        raise ArgumentError("one process on several GPUs copies the model for each: launch with torchrun (DDP)")


def computes_loss(model: nn.Module) -> bool:
    """Return True if a model computes its loss itself: a transformers model, perhaps with PEFT's adapters."""
    return isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")


def check_steps(name: str, value: float) -> None:
    """Raise ArgumentError unless a value is a whole number from 0, or a share below 1."""
    if not is_number(value) or value < 0 or (value >= 1 and value != int(value)):
        raise ArgumentError(f"{name} {value!r:.80} must be a number of optimizer steps, or a share of them below 1")


def in_steps(name: str, value: float, total: int) -> int:
    """Return a number of optimizer steps, given as one, or as a share of the `total` steps of a training."""
    check_steps(name, value)
    if isinstance(value, int) or value >= 1:
        return int(value)
    if total < 1:
        raise ArgumentError(f"{name} {value!r} is a share of the training's steps: attach before Trainer.train()")
    return math.ceil(value * total)
