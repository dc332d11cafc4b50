"""What a model card says of a changed model: its attention now, its base, how it is loaded, what was measured."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import transformers
from huggingface_hub import ModelCard, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PretrainedConfig

from collab_heads.extras import INSTALL
from collab_heads.model.marks import is_changed, marked, names_our_code
from collab_heads.record import FIELD, CollabConfig, configs_in
from collab_heads.state import SiteState

LIBRARY, TAG = "transformers", "collab-heads"
# part of a site's state -> tag of a model that has it
TAGS = {"query_key": "low-rank-attention", "kept": "pruned-heads", "gates": "gated-heads", "alphas": "mixed-heads"}
CHANGED = ", with its attention changed"  # in the title of a card
HEADER = ("site", "role", "heads", "query/key", "values", "gates", "mixed")


def title(config: PretrainedConfig) -> str:
    """The first line of a card that has no text yet."""
    base = base_of(config).get("base_model") or next(iter(config.architectures or ()), config.model_type)
    return f"\n# {base}{CHANGED}\n"


def attention(config: PretrainedConfig, name: str) -> str:
    """What the attention of a model is now, and how it is loaded."""
    key_heads = getattr(config.get_text_config(), "num_key_value_heads", None)
    rows = [row(path, state, key_heads) for path, state in changed_sites(config).items()]
    return "\n".join(
        [
            "## Attention changed by collab_heads",
            "",
            "This model needs the package `collab_heads`; without it, it does not load.",
            "",
            *loading(config, name),
            "",
            "What each changed site of attention is now, and in brackets what it was:",
            "",
            markdown_row(HEADER),
            markdown_row(["---"] * len(HEADER)),
            *map(markdown_row, rows),
        ]
    )


def loading(config: PretrainedConfig, name: str) -> list[str]:
    """The lines that load a model."""
    model = next((name for name in config.architectures or () if hasattr(transformers, name)), "AutoModel")
    written = marked(config)
    autos = (
        [auto for auto, ours in written.auto_map.items() if ours.endswith(f".{model}")]
        if names_our_code(written)
        else []
    )
    lines = [
        "```python",
        f"# {INSTALL}",
        "import collab_heads  # from now on transformers loads what it changed",
        f"from transformers import {model}",
        "",
        f'model = {model}.from_pretrained("{name}")',
        "```",
    ]
    if autos:
        lines += ["", f"`{autos[0]}.from_pretrained(..., trust_remote_code=True)` needs no import."]
    return lines


def changed_sites(config: PretrainedConfig) -> dict[str, SiteState]:
    """Return the sites that a config and its inner configs record, by path; inner paths begin with the inner name."""
    sites = dict(CollabConfig.of(config).sites)
    if not hasattr(config, FIELD):
        for name, inner in configs_in(config).items():
            sites |= {f"{name.removesuffix('_config')}.{path}": state for path, state in changed_sites(inner).items()}
    return sites


def row(path: str, state: SiteState, key_heads: int | None) -> list[str]:
    """The cells of one site; `key_heads` is how many there were, of a model whose heads share key heads."""
    query_key, values, gates = state.query_key, state.values, state.gates
    value_heads = state.heads, state.num_heads
    if query_key is not None and query_key.groups is not None:
        value_heads = len(set(query_key.groups)), key_heads or state.num_heads
    heads = f"{state.heads} ({state.num_heads})"
    return [
        f"`{path}`",
        state.role,
        heads if state.kept is not None else str(state.num_heads),
        f"{query_key.kind}, {query_key.dim} ({state.num_heads * query_key.dim_head})" if query_key else "",
        f"{value_heads[0] * values.dim} ({value_heads[1] * values.dim_head})" if values else "",
        gates.kind if gates else "",
        "yes" if state.alphas else "",
    ]


def markdown_row(cells: list[str] | tuple[str, ...]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def results(report: object, metrics: Mapping[str, float]) -> str:
    """What was done, and what was measured."""
    done = ["## What was done", "", "```text", *str(report).splitlines(), "```"] if report is not None else []
    table = [("metric", "value"), ("---", "---"), *((name, f"{value:.6g}") for name, value in metrics.items())]
    measured = ["## What was measured", "", *map(markdown_row, table)] if metrics else []
    return "\n".join([*done, *([""] if done and measured else []), *measured])


def metadata(config: PretrainedConfig, said: Mapping) -> dict:
    """The metadata of a card: what it says, and what it does not say yet."""
    tags = said.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    if not is_changed(config):
        return {**said, "tags": [tag for tag in tags if tag not in {TAG, *TAGS.values()}] or None}
    sites = changed_sites(config).values()
    ours = [TAG, *(tag for part, tag in TAGS.items() if any(getattr(site, part) for site in sites))]
    tags = [tag for tag in tags if tag not in TAGS.values()]
    return {
        "library_name": LIBRARY,
        **base_of(config),
        **said,
        "tags": [*tags, *(tag for tag in ours if tag not in tags)],
    }


def base_of(config: PretrainedConfig) -> dict[str, str]:
    """`base_model` and `license` of what a model was loaded from, as far as they are known on this machine.

    A repository of the Hub is known by its name where it is in the cache; a folder by what its own card says.
    """
    name = config.name_or_path
    if not name:
        return {}
    if Path(name).is_dir():
        return said_of(Path(name, "README.md"))
    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        readme = try_to_load_from_cache(name, "README.md")
    except HFValidationError:  # a path that is not there any more
        return {}
    said = said_of(Path(readme)) if isinstance(readme, str) else {}
    return {**said, "base_model": name} if is_cached else {}


def said_of(readme: Path) -> dict[str, str]:
    """The base and the license that a card names; empty if there is none, or none that can be read."""
    try:
        said = ModelCard(readme.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no such file, or of YAML, huggingface_hub, encodings
        return {}
    return {field: said[field] for field in ("base_model", "license") if said.get(field)}


def record_digest(config: PretrainedConfig) -> str:
    """A short name for the attention that a config records."""
    record = json.dumps(CollabConfig(changed_sites(config)).to_dict(), sort_keys=True)
    return hashlib.sha256(record.encode()).hexdigest()[:12]
