"""DynamicRotation: heads change places as their scores say, and change back, in a cycle of epochs."""

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise

import torch
from transformers import PreTrainedModel

from collab_heads.checks import check_choice, check_seed
from collab_heads.errors import ArgumentError
from collab_heads.registry import AttentionAdapter
from collab_heads.rotation.cycles import Cycle, present_cycles, read_cycles
from collab_heads.rotation.exchange import Pairs, Slot, plan_swaps, slot_pairs, swap_heads, unwrapped_adapter
from collab_heads.rotation.history import History, check_epoch, check_settings, pairs_to_json, plain_json, read_swapped
from collab_heads.rotation.policies import POLICIES, UNRANKED, Stack, check_count
from collab_heads.rotation.ranking import METRICS, head_strengths
from collab_heads.sites import ROLES
from collab_heads.state import CollabConfig, kept_heads

Setting = int | Mapping[str, int]


class DynamicRotation:
    """Heads that a rule picks change places, train there, and change back.

        rotation = DynamicRotation("soft", count=2, start=3, end=10)
        rotation.check(model, epochs=12)
        for epoch in range(1, 13):
            rotation.apply(model, epoch=epoch, optimizer=optimizer, batches=validation)
            train(model, epoch)

    Before epoch `start` heads swap; they train `frequency` epochs, swap back, rest `rest` epochs, and so on, up to
    epoch `end`; what is swapped then swaps back before the next one. To leave a training with all heads in their
    places, let `end` be its last epoch or earlier, and call `apply` once more after the last, for epoch `end` + 1.

    Args:
        policy: "hard": the strongest heads of a stack with its weakest; "soft": the weakest of layer i with the
            weakest of layer L - 1 - i; "local": in every layer the weakest with the strongest; "random": any two of
            the stack.
        metric: what makes a head strong. "confidence"; "output_distance" ("l2"): the mean distance of its outputs to
            those of the other heads of its layer; "map_distance" (the source's "pairwise"): the same of its attention
            maps, which ranks heads differently; "base": the largest weight of its map, which is 1 for every head of
            causal attention; "wasserstein": how far its weights are from equal ones. The last three are means over
            sentences.
        count: pairs: per stack (hard, random), per layer (local) or per pair of layers (soft).
        frequency: epochs from a swap until the swap back.
        rest: epochs from there until the next swap.
        start: epoch, counted from 1, before which the first swap is.
        end: the last epoch with swapped heads; None for no end.
        roles: the roles that rotate, each a stack of its own; None for those that a setting names, or all.
        seed: of the policy "random", which draws anew in every swap.
        exclude: ids of tokens that do not count where heads are ranked; None for the ends of sentences that the config
            names (BERT's names none: give `[tokenizer.sep_token_id]`).
        adapter: the family's adapter, as class or instance; None looks it up by model type.

    `count`, `frequency`, `rest`, `start` and `end` are numbers, or role -> number: each role has a cycle of its own.

    Raises:
        ArgumentError: on an unknown policy, metric or role, and numbers that cannot be.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers), "parameter swapping", dynamic.
    """

    def __init__(
        self,
        policy: str,
        metric: str = "confidence",
        *,
        count: Setting = 1,
        frequency: Setting = 1,
        rest: Setting = 1,
        start: Setting = 1,
        end: Setting | None = None,
        roles: str | Iterable[str] | None = None,
        seed: int = 0,
        exclude: Iterable[int] | None = None,
        adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    ):
        check_choice("policy", policy, POLICIES)
        check_choice("metric", metric, METRICS)
        check_seed(seed)
        settings = {"count": count, "frequency": frequency, "rest": rest, "start": start, "end": end}
        self.cycles = read_cycles(roles, settings)
        self.policy, self.metric, self.seed, self.exclude, self.adapter = policy, metric, seed, exclude, adapter
        self.record = History()
        self.swapped: dict[str, tuple[int, list[tuple[Slot, Slot]]]] = {}  # role -> (since epoch, pairs)

    @property
    def history(self) -> list[dict]:
        """The exchanges so far, ready for JSON: epoch, kind ("swap" or "back"), pairs of [path, head]."""
        return plain_json(self.record.entries)

    def check(self, model: PreTrainedModel, epochs: int | None = None) -> None:
        """Check the settings against a model, before training; nothing changes.

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
            for cycle in self.cycles.values():
                cycle.check_epochs(epochs)
        for role, (cycle, stack) in self.stacks(model).items():
            check_count(self.policy, role, stack, cycle.count)
            pools = stack if self.policy == "local" else [list(chain(*stack))]
            neighbours = [pair for slots in pools for pair in pairwise(slots)]
            plan_swaps(model, neighbours, None, self.adapter)

    def stacks(self, model: PreTrainedModel) -> dict[str, tuple[Cycle, Stack]]:
        """For every role that rotates its cycle, and the places of its heads, layer by layer."""
        sites, record = unwrapped_adapter(model, self.adapter).sites(model), CollabConfig.of(model.config).sites
        layers: dict[str, list[list[Slot]]] = {}
        for site in sorted(sites, key=lambda site: (ROLES.index(site.role), site.layer)):
            slots = [Slot(site.path, head) for head in kept_heads(record, site)]
            layers.setdefault(site.role, []).append(slots)
        return {role: (cycle, layers[role]) for role, cycle in present_cycles(self.cycles, list(layers)).items()}

    def plan(
        self, model: PreTrainedModel, epoch: int, batches: Iterable[Mapping] | None = None
    ) -> list[tuple[Slot, Slot]]:
        """What `apply` would exchange before an epoch; nothing changes.

        Args:
            model: a supported transformers model.
            epoch: counted from 1.
            batches: input dicts as the model takes them, to rank the heads on (the validation set); they are only
                read in an epoch with a swap, and not for the policy "random".

        Returns:
            Pairs of places, in order: what swaps back, then what swaps; none where nothing is due, or the epoch was
            done already.

        Raises:
            ArgumentError: as `check`, and if heads must be ranked without batches.
            CollabHeadsError: whatever measuring heads refuses.
        """
        if not self.record.comes(epoch):
            return []
        due, scores = self.due(model, epoch), {}
        back = [pair for role, (kind, _, _) in due.items() if kind == "back" for pair in self.swapped[role][1][::-1]]
        swaps = {role: (cycle, stack) for role, (kind, cycle, stack) in due.items() if kind == "swap"}
        for role, (cycle, stack) in swaps.items():
            check_count(self.policy, role, stack, cycle.count)
        if swaps and self.policy not in UNRANKED:
            if batches is None:
                raise ArgumentError(f"the policy {self.policy!r} ranks heads by {self.metric}: it needs batches")
            adapter = unwrapped_adapter(model, self.adapter)
            scores = head_strengths(model, batches, adapter, self.metric, self.exclude)
        choose = POLICIES[self.policy]
        chosen = [choose(own[1], scores, own[0].count, f"{self.seed} {epoch} {role}") for role, own in swaps.items()]
        return back + list(chain(*chosen))

    def due(self, model: PreTrainedModel, epoch: int) -> dict[str, tuple[str, Cycle, Stack]]:
        """The roles for which something is due before an epoch: what, by which cycle, in which stack."""
        found = {}
        for role, (cycle, stack) in self.stacks(model).items():
            since = self.swapped[role][0] if role in self.swapped else None
            if kind := cycle.kind(epoch, since):
                found[role] = (kind, cycle, stack)
        return found

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

        Called again for the same epoch (a training resumed in its middle) it does nothing. On an error model,
        optimizer and history are left as they were.

        Args:
            model: see `swap_heads`.
            epoch: the epoch that is about to start, counted from 1.
            optimizer: see `swap_heads`.
            batches: see `plan`.
            pairs: the plan of another rank for this epoch, instead of a new one.

        Returns:
            What was exchanged.

        Raises:
            ArgumentError: if the given pairs are not what is due.
            CollabHeadsError: as `plan` and `swap_heads`.
        """
        if not self.record.comes(epoch):
            return []
        pairs = self.plan(model, epoch, batches) if pairs is None else slot_pairs(pairs)
        due = self.due(model, epoch)
        parts = self.by_role(model, epoch, pairs, due)
        swap_heads(model, pairs, optimizer, self.adapter)
        exchanged: dict[str, list] = {"back": [], "swap": []}
        for role, (kind, _, _) in due.items():
            exchanged[kind] += parts[role]
            if kind == "swap":
                self.swapped[role] = (epoch, parts[role])
            else:
                del self.swapped[role]
        for kind, own in exchanged.items():
            self.record.add(epoch, kind, own)
        return pairs

    def by_role(self, model, epoch: int, pairs: list[tuple[Slot, Slot]], due: Mapping) -> dict[str, list]:
        """Pairs by their role; an ArgumentError unless they are what is due."""
        roles = {site.path: site.role for site in unwrapped_adapter(model, self.adapter).sites(model)}
        parts: dict[str, list] = {role: [] for role in due}
        for pair in pairs:
            if (role := roles.get(pair[0].path)) not in due:
                raise ArgumentError(
                    f"{pair[0]} and {pair[1]}: nothing of {role or 'this path'} is due at epoch {epoch}"
                )
            parts[role].append(pair)
        for role, own in parts.items():
            if not own or (due[role][0] == "back" and own != self.swapped[role][1][::-1]):
                raise ArgumentError(f"the pairs of {role} are not what is due before epoch {epoch}: {due[role][0]}")
        return parts

    def settings(self) -> dict:
        """What the rotation was made with, in a form for JSON."""
        cycles = {role or "all": vars(cycle) for role, cycle in self.cycles.items()}
        return plain_json({"policy": self.policy, "metric": self.metric, "seed": self.seed, "cycles": cycles})

    def state_dict(self) -> dict:
        """What is swapped now, and the history, ready for JSON: save it beside the checkpoint of the model."""
        swapped = {role: {"since": since, "pairs": pairs_to_json(own)} for role, (since, own) in self.swapped.items()}
        return self.settings() | self.record.state_dict() | plain_json({"swapped": swapped})

    def load_state_dict(self, state: dict) -> None:
        """Go on from there, with the model and the optimizer of the same checkpoint.

        Raises:
            ArgumentError: if it is not a state of a rotation with these settings.
        """
        record = History.of(state)
        check_settings(self.settings(), state)
        self.swapped, self.record = read_swapped(state.get("swapped")), record
