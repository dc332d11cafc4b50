"""HeadRotation: exchange heads before the epochs that a schedule names."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, CollabHeadsError, DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.rotation.exchange import plan_exchanges, swap_heads, unwrapped_adapter
from collab_heads.rotation.head_rows import Pairs, Slot, slot_pairs
from collab_heads.rotation.schedule import (
    History,
    Schedule,
    check_epoch,
    check_settings,
    distinct,
    plain_json,
    read_schedule,
)


class HeadRotation:
    """A rotation by a schedule: W_Q, W_K and W_V of heads change places, with their biases and optimizer state.

        rotation = HeadRotation.from_json("rotation.json")
        rotation.check(model, epochs=12)
        for epoch in range(1, 13):
            rotation.apply(model, epoch=epoch, optimizer=optimizer)
            train(model, epoch)

    To exchange head 0 of the decoder's cross-attention in layer 1 (counted from 0) with that in layer 5 before epoch 3:

        {"3": [{"role": "dec-enc", "layers": [1, 5], "heads": [0, 0]}]}

    or, by paths relative to the base model, `{"paths": [..., ...], "heads": [0, 0]}`, or in the form of the source.

    Args:
        schedule: epoch, counted from 1 -> exchanges made before it starts, in order.

    Raises:
        ArgumentError: on an invalid schedule; epoch and exchange are named.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping", manual.
    """

    def __init__(self, schedule: Mapping):
        self.schedule: Schedule = read_schedule(schedule)
        self.record = History()

    @classmethod
    def from_json(cls, path: str | Path) -> "HeadRotation":
        """Read the schedule from a JSON file, in the source's form or in one of ours.

        Args:
            path: of the file.

        Raises:
            DataError: if the file cannot be read or holds no schedule; the message names it.
        """
        try:
            return cls(parse_json(read_text(path), object_pairs_hook=distinct))
        except DataError:
            raise
        except ValueError as error:  # an ArgumentError is a ValueError, and so is JSON's
            raise DataError(f"{path}: {error}") from error

    @property
    def history(self) -> list[dict]:
        """The exchanges so far, ready for JSON: epoch, kind ("swap"), pairs of [path, head]."""
        return plain_json(self.record.entries)

    def check(self, model: PreTrainedModel, epochs: int | None = None) -> None:
        """Check the whole schedule against a model, before training; nothing is changed.

        Args:
            model: as `apply` will take it.
            epochs: how many epochs the training has, if known.

        Raises:
            ArgumentError: on an epoch after the last, or a layer, head or path that does not exist.
            CollabHeadsError: on any other exchange that `swap_heads` would refuse; the message names the epoch.
        """
        if epochs is not None:
            check_epoch("epochs", epochs)
            if late := [epoch for epoch in self.schedule if epoch > epochs]:
                raise ArgumentError(f"the schedule has epoch {late[0]}, the training {epochs}: no such epoch starts")
        for epoch in self.schedule:
            try:
                plan_exchanges(model, self.pairs(model, epoch), None)
            except CollabHeadsError as error:
                raise type(error)(f"epoch {epoch}: {error}") from error

    def pairs(self, model: PreTrainedModel, epoch: int) -> list[tuple[Slot, Slot]]:
        """Return the pairs of the schedule for an epoch, as places in a model.

        Args:
            model: a supported transformers model, whose layers the schedule counts.
            epoch: counted from 1.
        """
        sites = unwrapped_adapter(model).sites(model)
        return [(first.slot(sites), second.slot(sites)) for first, second in self.schedule.get(epoch, ())]

    def plan(
        self, model: PreTrainedModel, epoch: int, batches: Iterable[Mapping] | None = None
    ) -> list[tuple[Slot, Slot]]:
        """Return the exchanges that `apply` would make before an epoch; nothing is changed.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
            batches: not used here, but by `DynamicRotation`.

        Returns:
            Pairs of places, in order; empty if nothing is due, or the epoch was applied already.

        Raises:
            ArgumentError: on an epoch before the last one applied, or a layer that the model does not have.
        """
        return self.pairs(model, epoch) if self.record.comes(epoch) else []

    def apply(
        self,
        model: PreTrainedModel,
        *,
        epoch: int,
        optimizer: torch.optim.Optimizer | None = None,
        batches: Iterable[Mapping] | None = None,
        pairs: Pairs | None = None,
    ) -> list[tuple[Slot, Slot]]:
        """Make the exchanges that are due before an epoch, in place; call it before every epoch.

        A second call for the same epoch (in a training that is resumed in its middle) does nothing. On an error model,
        optimizer and history are left unchanged.

        Args:
            model: see `swap_heads`.
            epoch: the epoch that is about to start, counted from 1.
            optimizer: see `swap_heads`.
            batches: not used.
            pairs: the pairs to exchange instead of the plan, such as the plan of another rank.

        Returns:
            The pairs that were exchanged.

        Raises:
            CollabHeadsError: as `plan` and `swap_heads`.
        """
        if not self.record.comes(epoch):
            return []
        due = self.plan(model, epoch) if pairs is None else slot_pairs(pairs)
        swap_heads(model, due, optimizer)
        self.record.add(epoch, "swap", due)
        return due

    def settings(self) -> dict[str, Any]:
        """Return the schedule in a form for JSON."""
        ends = {
            epoch: [list(map(dataclasses.asdict, pair)) for pair in pairs] for epoch, pairs in self.schedule.items()
        }
        return plain_json({"schedule": ends})

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the history, ready for JSON: save it beside the checkpoint of the model."""
        return self.settings() | self.record.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state, with the model and the optimizer of the same checkpoint.

        Args:
            state: what `state_dict` returned, also after JSON.

        Raises:
            ArgumentError: if it is not a state of this schedule.
        """
        record = History.of(state)
        check_settings(self.settings(), state)
        self.record = record
