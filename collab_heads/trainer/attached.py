"""The methods of a Trainer that a `HeadTraining` changes: loss, optimizer, gradient clipping and files."""

import functools
import inspect
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, Trainer
from transformers.utils import CONFIG_NAME

from collab_heads.base.wrappers import has_adapters
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.heads.adamw import HeadAdamW
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.heads.whole import is_sharded, keep_whole
from collab_heads.model.record_sync import sync_record
from collab_heads.saving.card import NAME, complete
from collab_heads.sites.record import FIELD
from collab_heads.trainer.heads_file import beside_adapters, load_heads, save_heads

ADAMW = frozenset(inspect.signature(torch.optim.AdamW).parameters) - {"params"}


class AttachedTrainer(Trainer):
    """A Trainer whose methods take heads into account; `attached_class` puts it before another class."""

    head_training: Any  # a `HeadTraining`, whose module imports this one

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the Trainer's loss; in training, with this batch's share of the optimizer step's penalty."""
        batch = dict(inputs)  # the Trainer removes labels from `inputs`
        result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        extra = self.head_training.extra(batch, num_items_in_batch) if model.training else None
        if extra is None:
            return result
        if self.is_loss_of_step(num_items_in_batch):
            extra = extra / self.current_gradient_accumulation_steps
        loss, *outputs = result if return_outputs else (result,)
        loss = loss + extra.to(loss.device)
        return (loss, *outputs) if return_outputs else loss

    def is_loss_of_step(self, items: torch.Tensor | int | None) -> bool:
        """Return True if the losses of a step's batches are summed, not averaged: as `training_step` decides."""
        if getattr(self, "loss_is_scaled_for_ga", None) is not None:
            return bool(self.loss_is_scaled_for_ga)
        return self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and items is not None)

    def _inner_training_loop(self, *args, **kwargs):
        """Train; the penalty of a training that was interrupted (out of memory, by hand) is discarded first."""
        self.head_training.abandon()
        return super()._inner_training_loop(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        """Return the Trainer's optimizer with groups for gates and alphas; gates that share a moment need AdamW."""
        given = self.optimizer is not None
        keep_whole(self.accelerator, self.head_training.model)
        penalty = self.head_training.begin(self.state)
        optimizer = super().create_optimizer(*args, **kwargs)
        if penalty is None:
            return optimizer
        groups = penalty.groups(**self.head_training.rates)
        if given:
            check_given(optimizer, penalty)
        else:
            self.optimizer = with_groups(optimizer, groups, scaled=self.accelerator.scaler is not None)
        return self.optimizer

    def _clip_grad_norm(self, model):
        """Clip the gradients of all weights but gates and alphas, which have scales of their own."""
        penalty = self.head_training.penalty
        if penalty is None:
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_(penalty.others(model), self.args.max_grad_norm)

    def _determine_best_metric(self, metrics, trial):
        """Decide as the Trainer does; a model that still has more heads than its target is never the best one."""
        penalty = self.head_training.penalty
        if penalty is not None and not penalty.finished:
            return False
        return super()._determine_best_metric(metrics=metrics, trial=trial)

    def _save(self, output_dir=None, *args, **kwargs):
        """Save the model; if PEFT stores its adapters alone, save gates and alphas beside them."""
        super()._save(output_dir, *args, **kwargs)
        if self.args.should_save:
            save_heads(self.head_training.model, Path(output_dir or cast(str, self.args.output_dir)))

    def _save_optimizer_and_scheduler(self, *args, **kwargs):
        """Save optimizer and schedule; on FSDP the state of all parameters, also of alphas that wait."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if isinstance(optimizer, HeadAdamW) and is_sharded(self.accelerator):
            optimizer.complete_state()
        super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        """Load the model, and the gates and alphas that are stored beside its adapters."""
        check_same_heads(self.head_training.model, Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        if beside_adapters(self.head_training.model):
            load_heads(self.head_training.model, resume_from_checkpoint)

    def _load_best_model(self):
        """Load the best model, and the gates and alphas that are stored beside its adapters."""
        check_same_heads(self.head_training.model, Path(cast(str, self.state.best_model_checkpoint)))
        super()._load_best_model()
        if beside_adapters(self.head_training.model):
            load_heads(self.head_training.model, cast(str, self.state.best_model_checkpoint))

    def _load_callback_state(self):
        """Load the states of callbacks but that of the `HeadTraining`, which it reads when the training begins."""
        name, stored = type(self.head_training).__name__, cast(dict, self.state.stateful_callbacks)
        ours = stored.pop(name, None)
        super()._load_callback_state()
        if ours is not None:
            stored[name] = ours

    def create_model_card(self, *args, **kwargs):
        """Write the Trainer's card, and add what the attention of the model is."""
        super().create_model_card(*args, **kwargs)
        model = self.head_training.model
        if self.is_world_process_zero() and not has_adapters(model):  # its folder holds adapters alone
            sync_record(model)
            complete(model.config, Path(cast(str, self.args.output_dir)), self.hub_model_id or NAME)

    def log(self, logs, *args, **kwargs):
        """Log the metrics of gates and alphas beside a training loss."""
        penalty = self.head_training.penalty
        if penalty is not None and "loss" in logs:
            logs = logs | {name: value for name, value in penalty.metrics().items() if "/" not in name}
        return super().log(logs, *args, **kwargs)


@functools.cache
def attached_class(kind: Any) -> type[Trainer]:
    """Return the class that a Trainer of class `kind` becomes; it keeps the name, which cards and logs show."""
    return type(kind.__name__, (AttachedTrainer, kind), {"__module__": kind.__module__})


def check_same_heads(model: PreTrainedModel, checkpoint: Path) -> None:
    """Raise ArgumentError if a checkpoint is of a model whose attention was changed in another way.

    A Trainer loads what fits and warns of the rest. Checkpoints of PEFT and sharded ones are not checked: they say
    nothing of the model.
    """
    file = checkpoint / CONFIG_NAME
    if not file.is_file():
        return
    sync_record(model)
    try:
        stored = changed_sites(read_text(file))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} is not a config of a changed model: {error!r:.200}: it is damaged, resume from another checkpoint"
        ) from error
    ours = changed_sites(model.config.to_json_string())
    if stored != ours:
        raise ArgumentError(
            f"{checkpoint} is of a model whose attention was changed in another way (its {file.name} says how): change "
            "this one as it was changed before that training, and not during it"
        )


def changed_sites(config: str) -> dict[str, Any]:
    """Return what a config's text records of each changed site; gates are reduced to whether there are some."""
    sites = (parse_json(config).get(FIELD) or {}).get("sites", {})
    return {path: {**site, "gates": bool(site.get("gates"))} for path, site in sites.items()}


def with_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], scaled: bool) -> torch.optim.Optimizer:
    """Return an optimizer with groups of their own for gates and alphas; no state exists yet.

    Args:
        optimizer: as the Trainer made it, with all trainable parameters.
        groups: of gates and alphas; their parameters are taken out of the other groups.
        scaled: whether gradients are scaled (fp16): AdamW is then not fused, since a fused step does not tell that it
            was skipped.
    """
    apart = {id(parameter) for group in groups for parameter in group["params"]}
    kept = [{**g, "params": [p for p in g["params"] if id(p) not in apart]} for g in optimizer.param_groups]
    kept = [group for group in kept if group["params"]]
    if type(optimizer) is torch.optim.AdamW:
        options = {name: value for name, value in optimizer.defaults.items() if name in ADAMW}
        if scaled:
            options["fused"] = None
            kept = [{**group, "fused": None} for group in kept]
        return HeadAdamW([*kept, *groups], **options)
    check_shared(optimizer, groups)
    optimizer.param_groups[:] = kept
    for group in groups:
        plain = dict(group)
        plain.pop("shared", None)  # only HeadAdamW knows it
        optimizer.add_param_group(plain)
    return optimizer


def check_given(optimizer: Any, penalty: HeadPenalty) -> None:
    """Raise ArgumentError if the optimizer that a Trainer was given does not train gates and alphas as needed."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # in a second training accelerate wraps it
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) not in held for parameter in penalty.parameters()):
        raise ArgumentError(
            "the optimizer that the Trainer was given holds no gates and alphas: give it HeadPenalty.groups(), or let "
            "the Trainer make its own (optimizers=None)"
        )
    check_shared(optimizer, penalty.groups())


def check_shared(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise ArgumentError if gates share a second moment and the optimizer is not a `HeadAdamW`."""
    if any(group.get("shared") for group in groups) and not isinstance(optimizer, HeadAdamW):
        raise ArgumentError(
            f"target_heads needs AdamW, whose second moment the gates share, not {type(optimizer).__name__}: "
            "TrainingArguments(optim='adamw_torch_fused'), or collab_heads.training.HeadAdamW if you make it yourself"
        )
