"""What is stored in `model.config.collab_heads`: the single source of truth for rebuilding a changed model.

State, not history: a version and, per site path relative to the base model, what the site is now.

    {"version": 1,
     "sites": {"encoder.layer.0.attention.self":
         {"role": "enc-self", "num_heads": 12,
          "query_key": {"kind": "shared", "dim": 128, "dim_head": 32, "scale": 0.17677669529663687, "bias": true,
                        "mixing_init": "concatenate"}}}}
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.errors import ConfigError
from collab_heads.sites import ROLES

FIELD = "collab_heads"
VERSION = 1
KINDS = ("shared", "per_head")
MAX_SCALE = 1e6  # scores are scaled by 1 or less; anything near this is a damaged file
MIXING_INITS = ("concatenate", "ones", "normal")


@dataclass(frozen=True)
class QueryKeyState:
    """The query/key projection of a site.

    Attributes:
        kind: "shared" (full mixing) or "per_head" (narrower ordinary heads).
        dim: R, the width over all heads.
        dim_head: d_k, the width of a query/key head of the original module; at R = H * d_k the swap is exact.
        scale: factor of the dot product, that of the original module.
        bias: whether the original query had a bias.
        mixing_init: how training from scratch starts: "concatenate" (0/1 blocks), "ones" or "normal".
    """

    kind: str
    dim: int
    dim_head: int
    scale: float
    bias: bool
    mixing_init: str = "concatenate"

    def __post_init__(self):
        expect(self.kind in KINDS, "query_key.kind", self.kind, f"one of {', '.join(KINDS)}")
        expect(is_count(self.dim), "query_key.dim", self.dim, "a positive integer")
        expect(is_count(self.dim_head), "query_key.dim_head", self.dim_head, "a positive integer")
        valid_scale = isinstance(self.scale, int | float) and 0 < self.scale <= MAX_SCALE
        expect(valid_scale and not isinstance(self.scale, bool), "query_key.scale", self.scale, "a positive number")
        expect(isinstance(self.bias, bool), "query_key.bias", self.bias, "true or false")
        expect(
            self.mixing_init in MIXING_INITS,
            "query_key.mixing_init",
            self.mixing_init,
            f"one of {', '.join(MIXING_INITS)}",
        )


@dataclass(frozen=True)
class SiteState:
    """What one site is now.

    Attributes:
        role: "enc-self", "dec-self" or "dec-enc".
        num_heads: number of heads of the original module.
        query_key: the query/key projection that replaced the original one.
    """

    role: str
    num_heads: int
    query_key: QueryKeyState

    def __post_init__(self):
        expect(self.role in ROLES, "role", self.role, f"one of {', '.join(ROLES)}")
        expect(is_count(self.num_heads), "num_heads", self.num_heads, "a positive integer")
        exact = self.num_heads * self.query_key.dim_head
        expect(self.query_key.dim <= exact, "query_key.dim", self.query_key.dim, f"at most {exact}, which is exact")
        if self.query_key.kind == "per_head" and self.query_key.dim % self.num_heads:
            raise ConfigError(
                f"query_key.dim {self.query_key.dim} of a per_head site is not a multiple of its {self.num_heads} heads"
            )


@dataclass(frozen=True)
class CollabConfig:
    """The whole record of a model."""

    sites: Mapping[str, SiteState] = field(default_factory=dict)

    @classmethod
    def of(cls, config: PretrainedConfig) -> "CollabConfig":
        """Read `config.collab_heads`; empty if the model was never changed.

        Raises:
            ConfigError: if the record comes from a newer version or does not make sense; the site is named.
        """
        record = getattr(config, FIELD, None)
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
        return cls({path: parse_site(path, site) for path, site in record["sites"].items()})

    def with_sites(self, sites: Mapping[str, SiteState]) -> "CollabConfig":
        """Return a record in which `sites` are added or replaced."""
        return CollabConfig({**self.sites, **sites})

    def to_dict(self) -> dict:
        """The JSON form."""
        return {"version": VERSION, "sites": {path: dataclasses.asdict(site) for path, site in self.sites.items()}}

    def write(self, model: PreTrainedModel) -> None:
        """Store the record in the config of a model and of its inner stacks (T5 gives each stack its own copy)."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and module.config.model_type == model.config.model_type:
                setattr(module.config, FIELD, self.to_dict())


def parse_site(path: str, record: object) -> SiteState:
    """Read one site of the record; errors name the path."""
    try:
        check_keys(record, {f.name for f in dataclasses.fields(SiteState)}, path)
        query_key = record["query_key"]
        check_keys(query_key, {f.name for f in dataclasses.fields(QueryKeyState)}, f"{path}.query_key")
        return SiteState(**{**record, "query_key": QueryKeyState(**query_key)})
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(f"config.{FIELD}, site {path!r}: {error}") from error


def check_keys(record: object, known: set[str], where: str) -> None:
    """Raise ConfigError if `record` is no mapping or has entries that this version does not know."""
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {record!r:.200}")
    if unknown := set(record) - known:
        raise ConfigError(f"{where} has unknown entries {sorted(unknown)}; known: {sorted(known)}")


def expect(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}, expected {wanted}")


def is_count(value: object) -> bool:
    """Whether `value` is a positive integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
