"""The record of a changed model in `model.config.collab_heads`, from which it is rebuilt.

It holds the state, not the history: a version and, per site path relative to the base model, the site's state.

    {"version": 1,
     "sites": {"encoder.layer.0.attention.self":
         {"role": "enc-self", "num_heads": 12, "kept": [0, 2, 3, 7],
          "query_key": {"kind": "shared", "dim": 128, "dim_head": 32, "scale": 0.17677669529663687, "bias": true,
                        "mixing_init": "concatenate"},
          "values": {"dim": 16, "dim_head": 32},
          "gates": {"kind": "learned", "temperature": 0.33, "stretch": [-0.1, 1.1]}, "alphas": true},
         "encoder.layer.0": {"role": "enc-ffn", "num_neurons": 1536, "neurons": 384}}}

Parts that a site does not have are left out. A site of attention is built in the order kept, query_key, values, gates,
alphas, no matter in which order it was changed.

For a model in use, its modules are the truth: the attention module of a changed site, or the module that
holds a changed feed-forward block, holds its state. Models share configs,
and layers move between models. A model is built from its config, and its config is brought in line with its modules
when the model is changed and when it is saved (`model/record_sync.py`).
"""

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.checks import is_count
from collab_heads.base.option_values import FEED_FORWARD_ROLES
from collab_heads.errors import ConfigError
from collab_heads.sites.site import AttentionSite, FeedForwardSite
from collab_heads.sites.state import FeedForwardState, GateState, QueryKeyState, SiteState, ValueState, expect

FIELD = "collab_heads"
TRIMMED = "trimmed_vocabulary"  # what `trim_vocabulary` did: {"before": tokens, "after": tokens}
GRIDS = "collab_heads_bits"  # the bits of the weights that a checkpoint holds packed, by module
STATE = "collab_state"  # attribute of the module at the path of a changed site: its state
VERSION = 1
STACK = "_config"
WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
)  # FSDP 1, checkpoints, compile


@dataclass(frozen=True)
class CollabConfig:
    """The record of a model: the state of each changed site, by path."""

    states: Mapping[str, SiteState | FeedForwardState] = field(default_factory=dict)

    @property
    def sites(self) -> dict[str, SiteState]:
        """The states of the changed sites of attention, by path."""
        return {path: state for path, state in self.states.items() if isinstance(state, SiteState)}

    @property
    def feed_forwards(self) -> dict[str, FeedForwardState]:
        """The states of the changed feed-forward blocks, by path."""
        return {path: state for path, state in self.states.items() if isinstance(state, FeedForwardState)}

    @classmethod
    def on(cls, model: PreTrainedModel) -> "CollabConfig":
        """Read the states of the modules of a model; its config, which others may share, may say something else.

        For a stack that the model does not have, such as the decoder of a `T5EncoderModel`, the config is read.
        """
        base = model.base_model
        modules = base.named_modules(remove_duplicate=False)  # a layer may stand in several places
        states = {plain_path(path): vars(module).get(STATE) for path, module in modules}
        stacks = {name for name, _ in base.named_children()}
        elsewhere = {p: state for p, state in cls.of(model.config).states.items() if p.split(".")[0] not in stacks}
        return cls(elsewhere | {path: state for path, state in states.items() if state is not None})

    @classmethod
    def of(cls, config: PretrainedConfig) -> "CollabConfig":
        """Read the record in a config, from which a model is built; empty if it records no change.

        Raises:
            ConfigError: if the record comes from a newer version or is invalid; the site is named.
        """
        states = dict(cls.alone(config).states)
        for prefix, stack in stacks_of(config):
            of_stack = {prefix + path: state for path, state in cls.alone(stack).states.items()}
            states = {path: state for path, state in states.items() if not path.startswith(prefix)} | of_stack
        return cls(states)

    @classmethod
    def alone(cls, config: PretrainedConfig) -> "CollabConfig":
        """Read the record of a config without the configs inside it."""
        return cls.read(getattr(config, FIELD, None))

    @classmethod
    def read(cls, record: object) -> "CollabConfig":
        """Read the JSON form; None stands for a model without changed sites.

        Raises:
            ConfigError: if the record comes from a newer version or is invalid; the site is named.
        """
        if record is None:
            return cls()
        if not isinstance(record, Mapping) or not isinstance(record.get("sites"), Mapping):
            raise ConfigError(f"config.{FIELD} must hold 'version' and 'sites', not {record!r:.200}")
        version = record.get("version")
        if not is_count(version):
            raise ConfigError(f"config.{FIELD}.version must be a positive integer, not {version!r}")
        if version > VERSION:
            raise ConfigError(
                f"config.{FIELD} has version {version}, this package reads up to {VERSION}: upgrade collab_heads"
            )
        check_keys(record, {"version", "sites"}, FIELD)
        for path in record["sites"]:
            expect(isinstance(path, str), f"a path in config.{FIELD}.sites", path, "a string")
        return cls({path: parse_site(path, site) for path, site in record["sites"].items()})

    @overload
    def site(self, site: AttentionSite) -> SiteState: ...
    @overload
    def site(self, site: FeedForwardSite) -> FeedForwardState: ...
    def site(self, site: Any) -> Any:
        """Return the state of a site; a stock state if it was never changed."""
        if site.path in self.states:
            return self.states[site.path]
        if isinstance(site, AttentionSite):
            return SiteState(site.role, site.num_heads)
        return FeedForwardState(site.role, site.num_neurons, site.num_neurons)

    def with_sites(self, states: Mapping[str, Any]) -> "CollabConfig":
        """Return a record in which the states of some sites are added or replaced; stock sites are left out."""
        return CollabConfig({p: state for p, state in {**self.states, **states}.items() if not state.is_stock})

    def to_dict(self) -> dict:
        sites = {path: state.to_dict() for path, state in self.states.items()}
        return json.loads(json.dumps({"version": VERSION, "sites": sites}))  # lists for tuples, as a loaded one has

    def write(self, model: PreTrainedModel, before: "CollabConfig | None" = None) -> None:
        """Store the record in the modules of a model, in its config and in those of its inner stacks.

        A model without changed sites has no record. T5 gives each stack its own copy of the config. A stack with a
        config of its own kind, such as CLIP's for texts, which loads alone from the files of the whole, has its part in
        that config. If the config of a model does not match its modules, another model shares the config: the model
        gets its own copy.

        Args:
            model: the model.
            before: the record of its modules, where it is known.
        """
        if not (CollabConfig.on(model) if before is None else before).is_in(model):
            own_configs(model)
        ordered: dict[str, SiteState | FeedForwardState] = {}
        for path, module in model.base_model.named_modules(remove_duplicate=False):
            if state := self.states.get(plain_path(path)):
                setattr(module, STATE, state)
                ordered[plain_path(path)] = state
            elif STATE in vars(module):
                delattr(module, STATE)
        for config, part in CollabConfig(ordered | dict(self.states)).parts(model):  # in the order of the model
            if part.states:
                setattr(config, FIELD, part.to_dict())
            elif hasattr(config, FIELD):
                delattr(config, FIELD)

    def is_in(self, model: PreTrainedModel) -> bool:
        """Return True if the configs of a model have this record."""
        return all(CollabConfig.alone(config) == part for config, part in self.parts(model))

    def parts(self, model: PreTrainedModel) -> list[tuple[PretrainedConfig, "CollabConfig"]]:
        """Return the configs of a model and of its stacks with the record for each; other inner models are left out."""
        stacks = stacks_of(model.config)
        inside = [module.config for module in model.base_model.modules() if isinstance(module, PreTrainedModel)]
        configs = [model.config, *inside]
        wanted = {stack.model_type: self.part(prefix) for prefix, stack in stacks} | {model.config.model_type: self}
        distinct = {id(config): config for config in [*configs, *(stack for _, stack in stacks)]}
        return [(each, wanted[each.model_type]) for each in distinct.values() if each.model_type in wanted]

    def part(self, prefix: str) -> "CollabConfig":
        """Return the record of the sites whose paths begin with a prefix; the prefix is removed."""
        inside = {path: state for path, state in self.states.items() if path.startswith(prefix)}
        return CollabConfig({path.removeprefix(prefix): state for path, state in inside.items()})


def stacks_of(config: PretrainedConfig) -> list[tuple[str, PretrainedConfig]]:
    """Return the stacks that have a config inside this one: the prefix of their paths, and the config.

    By the convention of transformers, `config.text_config` is the config of `model.text_model`.
    """
    stacks = {name: config for name, config in configs_in(config).items() if name.endswith(STACK)}
    return [(name.removesuffix(STACK) + "_model.", stack) for name, stack in stacks.items()]


def configs_in(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """Return the configs inside a config by name: those of stacks, and of the two models of an encoder-decoder."""
    inner = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return {name: each for name, each in inner.items() if isinstance(each, PretrainedConfig)}


def own_configs(model: PreTrainedModel) -> None:
    """Give a model and its submodules copies of their configs; a config that several of them share stays shared."""
    copies: dict[int, Any] = {}  # by identity of what was copied; also of the configs in a config
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            copy.deepcopy(module.config, copies)
    for module in model.modules():
        held = {name: each for name, each in vars(module).items() if isinstance(each, PretrainedConfig)}
        vars(module).update({name: copies[id(each)] for name, each in held.items() if id(each) in copies})


def forget(config: PretrainedConfig) -> None:
    """Remove the record of changes from a config, for what needs nothing of this package."""
    for name in (FIELD, GRIDS):
        if hasattr(config, name):
            delattr(config, name)


def is_valid(config: PretrainedConfig, entries: Mapping[str, int]) -> bool:
    """Return True if transformers accepts a config with these entries.

    Llama's config, for example, needs a width that is a multiple of the heads.
    """
    changed = {**copy.deepcopy(config).to_dict(), **entries}
    try:
        type(config).from_dict(changed)
    except Exception:  # of huggingface_hub's validation, which has its own classes
        return False
    return True


def plain_path(path: str) -> str:
    """Return a path without the parts that wrappers of inner modules add to it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


# The parts of a site, and the entries that their records have in every version, so that none needs a default.
# `mixing_init` matters for new models only.
PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "query_key": (QueryKeyState, ("kind", "dim", "dim_head", "scale", "bias")),
    "values": (ValueState, ("dim", "dim_head")),
    "gates": (GateState, ("kind", "temperature", "stretch")),
}


def parse_site(path: str, record: object) -> SiteState | FeedForwardState:
    """Read one site of the record; errors name the path."""
    try:
        if isinstance(record, Mapping) and record.get("role") in FEED_FORWARD_ROLES:
            block = FeedForwardState(**checked_entries(record, FeedForwardState, path, ("num_neurons", "neurons")))
            expect(not block.is_stock, "neurons", block.neurons, "fewer than num_neurons")
            return block
        entries = checked_entries(record, SiteState, path, ("role", "num_heads"))
        for name, (state, required) in PARTS.items():
            if name in entries:
                entries[name] = state(**checked_entries(entries[name], state, f"{path}.{name}", required))
        expect("kept" not in entries or entries["kept"] is not None, "kept", None, "a list of heads, or no such entry")
        site = SiteState(**entries)
        expect(not site.is_stock, "the site", record, "one with a query_key, kept, gates or alphas")
        return site
    except (KeyError, TypeError, ValueError) as error:  # a ConfigError is a ValueError, and so is Python's own
        raise ConfigError(f"config.{FIELD}, site {path!r}: {error}") from error


def checked_entries(record: object, state: type, where: str, required: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a part of the record; each must be a field of the state class."""
    return check_keys(record, {field.name for field in dataclasses.fields(state)}, where, required)


def check_keys(record: object, known: set[str], where: str, required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entries of a mapping.

    Raises:
        ConfigError: if it is not a mapping, has entries that this version does not know, or lacks required ones.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {record!r:.200}")
    if unknown := set(record) - known:
        raise ConfigError(f"{where} has unknown entries {sorted(unknown, key=str)}; known: {sorted(known)}")
    if missing := [name for name in required if name not in record]:
        raise ConfigError(f"{where} has no {', '.join(missing)}: the file is damaged, or was written by hand")
    return dict(record)


def kept_heads(record: Mapping[str, SiteState], site: AttentionSite) -> Sequence[int]:
    """Return the original numbers of the heads that a site has now."""
    state = record.get(site.path)
    return range(site.num_heads) if state is None else state.head_numbers


def trimmed_vocabulary(config: PretrainedConfig) -> dict[str, int] | None:
    """Return the tokens "before" and "after" `trim_vocabulary`, as a config says; None if it says none."""
    said = getattr(config, TRIMMED, None)
    counts = {name: said.get(name) for name in ("before", "after")} if isinstance(said, Mapping) else {}
    return counts if counts and all(map(is_count, counts.values())) else None  # type: ignore[return-value]
