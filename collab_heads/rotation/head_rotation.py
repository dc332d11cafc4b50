"""HeadRotation: exchange heads before epochs, by a schedule or by a rule that ranks them."""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_seed
from collab_heads.base.option_values import Metric, Policy
from collab_heads.errors import ArgumentError, CollabHeadsError, DataError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.rotation.exchange import (
    Pairs,
    Slot,
    moving,
    plan_exchanges,
    rotate_heads,
    slot_pairs,
    unwrapped_adapter,
)
from collab_heads.rotation.rules import RoleSettings, SlotPairs, Stack, read_settings, scores_for, settings_for
from collab_heads.rotation.schedule import (
    Direction,
    Exchanged,
    History,
    Schedule,
    check_epoch,
    check_settings,
    distinct,
    pairs_to_json,
    plain_json,
    read_exchanged,
    read_schedule,
)
from collab_heads.sites.record import CollabConfig, kept_heads
from collab_heads.sites.site import ROLES

Setting = int | Mapping[str, int]


class Due(NamedTuple):
    """The exchange of a role that is due: "swap" or "back", of which places, and the pairs that change back."""

    direction: Direction
    settings: RoleSettings
    stack: Stack
    back: SlotPairs


class HeadRotation:
    """A rotation: before some epochs heads change places (W_Q, W_K, W_V, biases, optimizer state), and train there.

    By a schedule, read from JSON or given as a dict:

        rotation = HeadRotation.from_json("rotation.json")
        rotation.check(model, epochs=12)
        for epoch in range(1, 13):
            rotation.apply(model, epoch=epoch, optimizer=optimizer)
            train(model, epoch)

    To exchange head 0 of the decoder's cross-attention in layer 1 (counted from 0) with that in layer 5 before epoch 3:

        {"3": [{"role": "dec-enc", "layers": [1, 5], "heads": [0, 0]}]}

    or, by paths relative to the base model, `{"paths": [..., ...], "heads": [0, 0]}`, or in the form of the source.

    By a policy, which picks heads by their scores; they change places, train there, and change back:

        rotation = HeadRotation(policy="soft", count=2, start=3, end=10)
        rotation.apply(model, epoch=epoch, optimizer=optimizer, batches=validation)

    Before epoch `start` heads change places; they train `frequency` epochs, change back, rest `rest` epochs, and so on.
    Heads that are still exchanged in epoch `end` change back before the next one. To end a training with all heads in
    their own places, set `end` to its last epoch or earlier, and call `apply` once more after the last, for epoch
    `end` + 1.

    Args:
        schedule: epoch, counted from 1 -> exchanges made before it starts, in order. All other arguments are for a
            policy.
        policy: "hard": the strongest heads of a stack with its weakest; "soft": the weakest of layer i with the
            weakest of layer L - 1 - i; "local": in every layer the weakest with the strongest; "random": any two of
            the stack. Heads are ranked by `metric`: the strongest is the one with the highest score.
        metric: the score of a head. "confidence"; "output_distance" ("l2"): the mean distance of its outputs to
            those of the other heads of its layer; "map_distance" (the source's "pairwise"): the same of its attention
            maps, which ranks heads differently; "base": the largest weight of its map, which is 1 for every head of
            causal attention; "wasserstein": the distance of its weights from equal ones. The last three are means over
            sentences.
        count: pairs of heads (where heads share key heads: pairs of key heads with all their heads), per stack (hard,
            random), per layer (local) or per pair of layers (soft).
        frequency: epochs from an exchange until the exchange back.
        rest: epochs from there until the next exchange.
        start: epoch, counted from 1, before which the first exchange is made.
        end: the last epoch with exchanged heads; None for no end.
        layer_pairs: for "soft" only: exchange heads of this many pairs of layers, the outermost first; None for all.
        roles: the roles that rotate, each as a separate stack; None for those that a setting names, or all.
        seed: of the policy "random", which draws new pairs for every exchange.
        exclude: ids of tokens that are ignored when heads are ranked; None for the end-of-sentence tokens that the
            config names (BERT's config names none: give `[tokenizer.sep_token_id]`).

    The arguments from `policy` to `layer_pairs` are one value, or role -> value, such as `HeadRotation(policy={
    "enc-self": "soft", "dec-enc": "hard"}, metric={"enc-self": "confidence", "dec-enc": "pairwise"}, layer_pairs={
    "enc-self": 2})`: then the named roles rotate, each with its own settings. Heads are measured once per epoch for all
    metrics.

    Raises:
        ArgumentError: without a schedule and a policy, or with both; on an invalid schedule (epoch and exchange are
            named), an unknown policy, metric or role, numbers below 1, and `layer_pairs` for another policy.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping", manual and dynamic.
    """

    @checking_arguments
    def __init__(
        self,
        schedule: Mapping | None = None,
        *,
        policy: Policy | Mapping[str, Policy] | None = None,
        metric: Metric | Mapping[str, Metric] = "confidence",
        count: Setting = 1,
        frequency: Setting = 1,
        rest: Setting = 1,
        start: Setting = 1,
        end: Setting | None = None,
        layer_pairs: Setting | None = None,
        roles: str | Iterable[str] | None = None,
        seed: int = 0,
        exclude: Iterable[int] | None = None,
    ):
        if (schedule is None) == (policy is None):
            raise ArgumentError("a rotation needs a schedule, or a policy that chooses the heads: give one of the two")
        check_seed(seed)
        options: dict[str, Any] = {"policy": "hard" if policy is None else policy, "metric": metric, "count": count}
        options |= {"frequency": frequency, "rest": rest, "start": start, "end": end, "layer_pairs": layer_pairs}
        self.role_settings = read_settings(roles, options)
        self.schedule: Schedule | None = None if schedule is None else read_schedule(schedule)
        if self.schedule is not None:
            if self.role_settings != {None: RoleSettings("hard")}:
                raise ArgumentError("a schedule names its heads: leave metric, roles and numbers out")
            self.role_settings = {}
        self.policy, self.metric = policy, metric
        self.seed, self.exclude = seed, exclude
        self.record = History()
        self.exchanged: dict[str, Exchanged] = {}  # role -> its heads that a policy has put into other places

    @classmethod
    def from_json(cls, path: str | Path) -> "HeadRotation":
        """Read a schedule from a JSON file, in the source's form or in one of ours.

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
        """The exchanges so far, ready for JSON: epoch, kind ("swap" or "back"), pairs of [path, head]."""
        return plain_json(self.record.entries)

    def check(self, model: PreTrainedModel, epochs: int | None = None) -> None:
        """Check the rotation against a model, before training; nothing is changed.

        Args:
            model: as `apply` will take it.
            epochs: how many epochs the training has, if known.

        Raises:
            ArgumentError: on an epoch, a start or an end beyond the last epoch; a role, layer, head or path that the
                model does not have; a count above half of the heads (of the stack, or of a layer where the policy takes
                heads by layer).
            CollabHeadsError: if `rotate_heads` would refuse an exchange of the schedule, whose epoch is named, or one
                that the policy could choose.
        """
        if epochs is not None:
            check_epoch("epochs", epochs)
        if self.schedule is not None:
            if epochs is not None and (late := [epoch for epoch in self.schedule if epoch > epochs]):
                raise ArgumentError(f"the schedule has epoch {late[0]}, the training {epochs}: no such epoch starts")
            for epoch in self.schedule:
                try:
                    plan_exchanges(model, self.scheduled(model, epoch), None)
                except CollabHeadsError as error:
                    raise type(error)(f"epoch {epoch}: {error}") from error
            return
        for role, (settings, stack) in self.stacks(model).items():
            settings.check_epochs(epochs)
            settings.check_stack(role, stack)
            pools = stack if settings.policy == "local" else [list(chain(*stack))]
            plan_exchanges(model, [pair for slots in pools for pair in pairwise(slots)], None)

    def scheduled(self, model: PreTrainedModel, epoch: int) -> SlotPairs:
        """Return the pairs of the schedule for an epoch, as places in a model.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
        """
        sites = unwrapped_adapter(model).sites(model)
        return [(first.slot(sites), second.slot(sites)) for first, second in (self.schedule or {}).get(epoch, ())]

    def stacks(self, model: PreTrainedModel) -> dict[str, tuple[RoleSettings, Stack]]:
        """Return the settings of every role that a policy rotates, and the places of its heads, layer by layer.

        Args:
            model: a supported transformers model.
        """
        sites, record = unwrapped_adapter(model).sites(model), CollabConfig.on(model).sites
        layers: dict[str, list[list[Slot]]] = {}
        for site in sorted(sites, key=lambda site: (ROLES.index(site.role), site.layer)):
            layers.setdefault(site.role, []).append(list(moving(site, kept_heads(record, site))))
        by_role = settings_for(list(layers), self.role_settings)
        return {role: (settings, layers[role]) for role, settings in by_role.items()}

    def paths(self, model: PreTrainedModel) -> set[str]:
        """Return the paths of the sites whose heads may change places.

        Args:
            model: a supported transformers model.
        """
        if self.schedule is not None:
            return {slot.path for epoch in self.schedule for pair in self.scheduled(model, epoch) for slot in pair}
        return {slot.path for _, stack in self.stacks(model).values() for layer in stack for slot in layer}

    def plan(self, model: PreTrainedModel, epoch: int, batches: Iterable[Mapping] | None = None) -> SlotPairs:
        """Return the exchanges that `apply` would make before an epoch; nothing is changed.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
            batches: input dicts as the model takes them, on which a policy ranks the heads (the validation set); they
                are read only if an exchange is due, and not for the policy "random".

        Returns:
            Pairs of places, in order, exchanges back first; empty if nothing is due, or the epoch was applied already.

        Raises:
            ArgumentError: on an epoch before the last one applied; as `check`; if heads must be ranked without batches.
            CollabHeadsError: if the heads cannot be measured.
        """
        if not self.record.comes(epoch):
            return []
        if self.schedule is not None:
            return self.scheduled(model, epoch)
        due = self.due(model, epoch)
        swaps = {role: what for role, what in due.items() if what.direction == "swap"}
        for role, what in swaps.items():
            what.settings.check_stack(role, what.stack)
        ranked = [what.settings for what in swaps.values()]
        scores = scores_for(ranked, model, batches, unwrapped_adapter(model), self.exclude)
        chosen = [
            what.settings.choose(what.stack, scores.get(what.settings.metric, {}), f"{self.seed} {epoch} {role}")
            for role, what in swaps.items()
        ]
        return [pair for what in due.values() for pair in what.back] + list(chain(*chosen))

    def due(self, model: PreTrainedModel, epoch: int) -> dict[str, Due]:
        """Return what a policy has to do before an epoch, for the roles that have something due.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
        """
        due = {}
        for role, (settings, stack) in self.stacks(model).items():
            away = self.exchanged.get(role)
            if direction := settings.due(epoch, None if away is None else away.since):
                due[role] = Due(direction, settings, stack, [] if away is None else away.pairs[::-1])
        return due

    def apply(
        self,
        model: PreTrainedModel,
        *,
        epoch: int,
        optimizer: torch.optim.Optimizer | None = None,
        batches: Iterable[Mapping] | None = None,
        pairs: Pairs | None = None,
    ) -> SlotPairs:
        """Make the exchanges that are due before an epoch, in place; call it before every epoch.

        A second call for the same epoch (in a training that is resumed in its middle) does nothing. On an error model,
        optimizer and history are left unchanged.

        Args:
            model: see `rotate_heads`.
            epoch: the epoch that is about to start, counted from 1.
            optimizer: see `rotate_heads`.
            batches: see `plan`.
            pairs: the plan of another rank for this epoch, to be used instead of a new one.

        Returns:
            The pairs that were exchanged.

        Raises:
            ArgumentError: if the given pairs are not those of a policy that are due.
            CollabHeadsError: as `plan` and `rotate_heads`.
        """
        if not self.record.comes(epoch):
            return []
        planned = self.plan(model, epoch, batches) if pairs is None else slot_pairs(pairs)
        if self.schedule is not None:
            rotate_heads(model, planned, optimizer)
            self.record.add(epoch, "swap", planned)
            return planned
        due = self.due(model, epoch)
        roles: dict[str, str] = {site.path: site.role for site in unwrapped_adapter(model).sites(model)}
        by_role = pairs_by_role(epoch, planned, due, roles)
        rotate_heads(model, planned, optimizer)
        made: dict[Direction, SlotPairs] = {"back": [], "swap": []}
        for role, what in due.items():
            made[what.direction] += by_role[role]
            if what.direction == "swap":
                self.exchanged[role] = Exchanged(epoch, by_role[role])
            else:
                del self.exchanged[role]
        for direction, of_direction in made.items():
            self.record.add(epoch, direction, of_direction)
        return planned

    def settings(self) -> dict[str, Any]:
        """Return the schedule, or the settings of the policy, in a form for JSON."""
        if self.schedule is not None:
            named = {epoch: [list(map(dataclasses.asdict, pair)) for pair in p] for epoch, p in self.schedule.items()}
            return plain_json({"schedule": named})
        cycles = {role or "all": settings.numbers for role, settings in self.role_settings.items()}
        return plain_json({"policy": self.policy, "metric": self.metric, "seed": self.seed, "cycles": cycles})

    def state_dict(self) -> dict[str, Any]:
        """Return settings, history and the heads that are exchanged now, for JSON: save it beside the checkpoint."""
        state = self.settings() | self.record.state_dict()
        if self.schedule is not None:
            return state
        return state | plain_json(
            {"swapped": {r: {"since": e.since, "pairs": pairs_to_json(e.pairs)} for r, e in self.exchanged.items()}}
        )

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state, with the model and the optimizer of the same checkpoint.

        Args:
            state: what `state_dict` returned, also after JSON.

        Raises:
            ArgumentError: if it is not a state of a rotation with this schedule or these settings.
        """
        record = History.of(state)
        check_settings(self.settings(), state)
        self.exchanged = {} if self.schedule is not None else read_exchanged(state.get("swapped"))
        self.record = record


def pairs_by_role(
    epoch: int, pairs: Iterable[tuple[Slot, Slot]], due: Mapping[str, Due], roles: Mapping[str, str]
) -> dict[str, SlotPairs]:
    """Group pairs by their role.

    Args:
        epoch: the epoch before which they are to be exchanged.
        pairs: of all roles.
        due: what is due before this epoch.
        roles: path of a site -> its role.
    """
    by_role: dict[str, SlotPairs] = {role: [] for role in due}
    for first, second in pairs:
        role = roles.get(first.path)
        if role is None or role not in due:
            raise ArgumentError(f"{first} and {second}: nothing of {role or 'this path'} is due at epoch {epoch}")
        by_role[role].append((first, second))
    for role, what in due.items():
        if not by_role[role] or (what.direction == "back" and by_role[role] != what.back):
            raise ArgumentError(f"the pairs of {role} are not what is due before epoch {epoch}: {what.direction}")
    return by_role
