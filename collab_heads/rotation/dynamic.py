"""DynamicRotation: exchange heads by their scores, train them there, and exchange them back, again and again."""

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.base.checks import check_seed
from collab_heads.base.option_values import Metric, Policy
from collab_heads.rotation.exchange import plan_exchanges, swap_heads, unwrapped_adapter
from collab_heads.rotation.head_rows import Pairs, Slot, moving, slot_pairs
from collab_heads.rotation.ranking import Due, SlotPairs, due_before, pairs_by_role, scores_for
from collab_heads.rotation.role_settings import RoleSettings, Stack, read_settings, settings_for
from collab_heads.rotation.schedule import (
    Direction,
    Exchanged,
    History,
    check_epoch,
    check_settings,
    pairs_to_json,
    plain_json,
    read_exchanged,
)
from collab_heads.sites.record import CollabConfig, kept_heads
from collab_heads.sites.site import ROLES

Setting = int | Mapping[str, int]


class DynamicRotation:
    """A rotation in which a rule picks heads that change places, train there, and change back.

        rotation = DynamicRotation("soft", count=2, start=3, end=10)
        rotation.check(model, epochs=12)
        for epoch in range(1, 13):
            rotation.apply(model, epoch=epoch, optimizer=optimizer, batches=validation)
            train(model, epoch)

    Before epoch `start` heads change places; they train `frequency` epochs, change back, rest `rest` epochs, and so on.
    Heads that are still exchanged in epoch `end` change back before the next one. To end a training with all heads in
    their own places, set `end` to its last epoch or earlier, and call `apply` once more after the last, for epoch
    `end` + 1.

    Args:
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

    The arguments up to `layer_pairs` are one value, or role -> value, such as `DynamicRotation({"enc-self": "soft",
    "dec-enc": "hard"}, {"enc-self": "confidence", "dec-enc": "pairwise"}, layer_pairs={"enc-self": 2})`: then the named
    roles rotate, each with its own settings. Heads are measured once per epoch for all metrics.

    Raises:
        ArgumentError: on an unknown policy, metric or role, numbers below 1, and `layer_pairs` for another policy.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping", dynamic.
    """

    def __init__(
        self,
        policy: Policy | Mapping[str, Policy],
        metric: Metric | Mapping[str, Metric] = "confidence",
        *,
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
        check_seed(seed)
        options: dict[str, Any] = {"policy": policy, "metric": metric, "count": count, "frequency": frequency}
        options |= {"rest": rest, "start": start, "end": end, "layer_pairs": layer_pairs}
        self.role_settings = read_settings(roles, options)
        self.policy, self.metric = policy, metric
        self.seed, self.exclude = seed, exclude
        self.record = History()
        self.exchanged: dict[str, Exchanged] = {}  # role -> its heads that are in other places now

    @property
    def history(self) -> list[dict]:
        """The exchanges so far, ready for JSON: epoch, kind ("swap" or "back"), pairs of [path, head]."""
        return plain_json(self.record.entries)

    def check(self, model: PreTrainedModel, epochs: int | None = None) -> None:
        """Check the settings against a model, before training; nothing is changed.

        Args:
            model: as `apply` will take it.
            epochs: how many epochs the training has, if known.

        Raises:
            ArgumentError: on a role that the model does not have, a count above half of the heads (of the stack, or
                of a layer where the policy takes heads by layer), a start or an end beyond the last epoch.
            CollabHeadsError: if `swap_heads` would refuse to swap heads of a stack.
        """
        if epochs is not None:
            check_epoch("epochs", epochs)
            for settings in self.role_settings.values():
                settings.check_epochs(epochs)
        for role, (settings, stack) in self.stacks(model).items():
            settings.check_stack(role, stack)
            pools = stack if settings.policy == "local" else [list(chain(*stack))]
            neighbours = [pair for slots in pools for pair in pairwise(slots)]
            plan_exchanges(model, neighbours, None)

    def stacks(self, model: PreTrainedModel) -> dict[str, tuple[RoleSettings, Stack]]:
        """Return the settings of every role that rotates, and the places of its heads, layer by layer.

        Args:
            model: a supported transformers model.
        """
        sites, record = unwrapped_adapter(model).sites(model), CollabConfig.on(model).sites
        layers: dict[str, list[list[Slot]]] = {}
        for site in sorted(sites, key=lambda site: (ROLES.index(site.role), site.layer)):
            layers.setdefault(site.role, []).append(list(moving(site, kept_heads(record, site))))
        by_role = settings_for(list(layers), self.role_settings)
        return {role: (settings, layers[role]) for role, settings in by_role.items()}

    def plan(
        self, model: PreTrainedModel, epoch: int, batches: Iterable[Mapping] | None = None
    ) -> list[tuple[Slot, Slot]]:
        """Return the exchanges that `apply` would make before an epoch; nothing is changed.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
            batches: input dicts as the model takes them, on which to rank the heads (the validation set); they are read
                only if an exchange is due, and not for the policy "random".

        Returns:
            Pairs of places, in order, exchanges back first; empty if nothing is due, or the epoch was applied already.

        Raises:
            ArgumentError: as `check`, and if heads must be ranked without batches.
            CollabHeadsError: if the heads cannot be measured.
        """
        if not self.record.comes(epoch):
            return []
        due = self.due(model, epoch)
        back = [pair for what in due.values() for pair in what.back]
        swaps = {role: what for role, what in due.items() if what.direction == "swap"}
        for role, what in swaps.items():
            what.settings.check_stack(role, what.stack)
        ranked = [what.settings for what in swaps.values()]
        scores = scores_for(ranked, model, batches, unwrapped_adapter(model), self.exclude)
        chosen = [
            what.settings.choose(what.stack, scores.get(what.settings.metric, {}), f"{self.seed} {epoch} {role}")
            for role, what in swaps.items()
        ]
        return back + list(chain(*chosen))

    def due(self, model: PreTrainedModel, epoch: int) -> dict[str, Due]:
        """Return what is due before an epoch, for the roles that have something due.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
        """
        return due_before(epoch, self.stacks(model), self.exchanged)

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
            batches: see `plan`.
            pairs: the plan of another rank for this epoch, to be used instead of a new one.

        Returns:
            The pairs that were exchanged.

        Raises:
            ArgumentError: if the given pairs are not those that are due.
            CollabHeadsError: as `plan` and `swap_heads`.
        """
        if not self.record.comes(epoch):
            return []
        planned = self.plan(model, epoch, batches) if pairs is None else slot_pairs(pairs)
        due = self.due(model, epoch)
        roles: dict[str, str] = {s.path: s.role for s in unwrapped_adapter(model).sites(model)}
        by_role = pairs_by_role(epoch, planned, due, roles)
        swap_heads(model, planned, optimizer)
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
        """Return the settings of the rotation, in a form for JSON."""
        cycles = {role or "all": settings.numbers for role, settings in self.role_settings.items()}
        return plain_json({"policy": self.policy, "metric": self.metric, "seed": self.seed, "cycles": cycles})

    def state_dict(self) -> dict[str, Any]:
        """Return the heads that are exchanged now and the history, for JSON: save it beside the checkpoint."""
        swapped = {
            role: {"since": exchanged.since, "pairs": pairs_to_json(exchanged.pairs)}
            for role, exchanged in self.exchanged.items()
        }
        return self.settings() | self.record.state_dict() | plain_json({"swapped": swapped})

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state, with the model and the optimizer of the same checkpoint.

        Args:
            state: what `state_dict` returned, also after JSON.

        Raises:
            ArgumentError: if it is not a state of a rotation with these settings.
        """
        record = History.of(state)
        check_settings(self.settings(), state)
        self.exchanged, self.record = read_exchanged(state.get("swapped")), record
