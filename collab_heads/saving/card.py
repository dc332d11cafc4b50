"""Write the model card of a changed model: its layers now, its base, how to load it, what was measured."""

import copy
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import transformers
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.extras import INSTALL
from collab_heads.base.wrappers import check_passed, model_inside
from collab_heads.errors import OutputError
from collab_heads.files.atomic import write_file
from collab_heads.files.reading import own_file, read_text
from collab_heads.model.record_sync import sync_record
from collab_heads.saving.grids import note_grids
from collab_heads.saving.marks import is_changed, marked, names_our_code
from collab_heads.saving.source_files import CLASSES, encoder_class, encoder_source, same_source
from collab_heads.sites.record import FIELD, GRIDS, CollabConfig, configs_in, trimmed_vocabulary
from collab_heads.sites.state import SiteState

T = TypeVar("T")
LIBRARY, ENCODERS, TAG = "transformers", "sentence-transformers", "collab-heads"
# part of a site's state -> tag of a model that has it
TAGS = {"query_key": "low-rank-attention", "kept": "pruned-heads", "gates": "gated-heads", "alphas": "mixed-heads"}
BLOCK_TAG = "pruned-neurons"  # of a model with fewer neurons
OURS = {*TAGS.values(), BLOCK_TAG}
PASSED_ON = ("base_model", "license", "license_name", "license_link")  # metadata that hold for every derived model
DESCRIBED = ("language", "pipeline_tag")  # and for one of the same architecture
ORIGINAL, ORIGINAL_TITLE = "original", "## Card of the original model"
CHANGED = ", changed with collab_heads"  # in the title of a card
HEADER = ("site", "role", "heads", "query/key", "values", "gates", "mixed")
BLOCK_HEADER = ("feed-forward block", "role", "neurons")


def title(config: PretrainedConfig) -> str:
    """Return the first line of a card that has no text yet."""
    first = original_text(config).partition("\n\n")[2].partition("\n")[0]
    named = base_of(config).get("base_model") or (first.startswith("# ") and first.removeprefix("# ").strip())
    base = named or next(iter(config.architectures or ()), config.model_type)
    return f"\n# {base}{CHANGED}\n"


def changes(config: PretrainedConfig, name: str, encoder: str | None) -> str:
    """Return the section on what is changed in a model and on how to load it."""
    states, bits = changed_states(config), getattr(config, GRIDS, None) or {}
    key_heads = getattr(config.get_text_config(), "num_key_value_heads", None)
    rows = [row(path, state, key_heads) for path, state in in_order(states.sites)]
    of_blocks = [
        [f"`{path}`", state.role, f"{state.neurons} ({state.num_neurons})"]
        for path, state in in_order(states.feed_forwards)
    ]
    tables = [table(HEADER, rows) if rows else "", table(BLOCK_HEADER, of_blocks) if of_blocks else ""]
    return "\n".join(
        [
            "## Changed by collab_heads",
            "",
            "This model needs the package `collab_heads`; without it, it does not load.",
            "",
            *loading(config, name, encoder),
            *(["", BITS.format(", ".join(map(str, sorted(set(bits.values())))))] if bits else []),
            *(["", "What each changed part is now, and in brackets what it was:"] if any(tables) else []),
            "",
            "\n\n".join(filter(None, tables)),
        ]
    )


def in_order(states: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return the states of sites by their paths, layers by number; a config that was saved has them by letters."""
    return sorted(
        states.items(), key=lambda item: [part.zfill(8) if part.isdigit() else part for part in item[0].split(".")]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        [" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (header, ["---"] * len(header), *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def loading(config: PretrainedConfig, name: str, encoder: str | None) -> list[str]:
    """Return the lines of code that load a model, by a class of sentence-transformers if `encoder` names one."""
    autos, model = our_autos(config), encoder
    if encoder:
        library, needs_import = "sentence_transformers", "AutoModel" not in autos
        code = f"{encoder}(%s{'' if needs_import else ', trust_remote_code=True'})"
        more = "" if needs_import else "After `import collab_heads` it loads without `trust_remote_code=True`."
    else:
        named = [name for name in config.architectures or () if str(name).isidentifier()]
        model = next((name for name in named if hasattr(transformers, name)), named[0] if named else "AutoModel")
        library = "transformers" if hasattr(transformers, model) else "your_package"  # whose class it is
        needs_import, code = True, f"{model}.from_pretrained(%s)"
        auto = next((auto for auto, ours in autos.items() if ours.endswith(f".{model}")), None)
        more = f"`{auto}.from_pretrained(..., trust_remote_code=True)` needs no import." if auto else ""
    return [
        "```python",
        f"# {INSTALL}{', and sentence-transformers' if encoder else ''}",
        *(["import collab_heads  # from now on transformers loads what it changed"] if needs_import else []),
        f"from {library} import {model}",
        "",
        f"model = {code % json.dumps(name, ensure_ascii=False)}",
        "```",
        *(["", more] if more else []),
    ]


def our_autos(config: PretrainedConfig) -> dict[str, str]:
    """Return auto class -> our code, which `trust_remote_code=True` runs; empty for a model with code of its own."""
    written = marked(config)
    return dict(written.auto_map) if names_our_code(written) else {}


def changed_states(config: PretrainedConfig) -> CollabConfig:
    """Return what a config and its inner configs record; inner paths begin with the inner name."""
    states = dict(CollabConfig.of(config).states)
    if not hasattr(config, FIELD):
        for name, inner in configs_in(config).items():
            prefix = f"{name.removesuffix('_config')}."
            states |= {prefix + path: state for path, state in changed_states(inner).states.items()}
    return CollabConfig(states)


def row(path: str, state: SiteState, key_heads: int | None) -> list[str]:
    """Return the cells of one site; `key_heads` is the original number of key heads, where heads share them."""
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


def results(report: object, metrics: Mapping[str, float]) -> str:
    """Return the sections on what was done and what was measured."""
    said = "" if report is None else str(report)
    fence = "`" * (1 + max(map(len, re.findall(r"`+", said)), default=2))  # longer than any in the report
    done = ["## What was done", "", f"{fence}text", *said.splitlines(), fence] if report is not None else []
    rows = [(name, f"{value:.6g}") for name, value in metrics.items()]
    measured = ["## What was measured", "", *table(("metric", "value"), rows).split("\n")] if metrics else []
    return "\n".join([*done, *([""] if done and measured else []), *measured])


def metadata(config: PretrainedConfig, said: Mapping, encoder: str | None) -> dict:
    """Return the metadata of a card, completed by ours where it has none."""
    tags = said.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    if not is_changed(config):
        return {**said, "tags": [tag for tag in tags if tag not in {TAG, *OURS}] or None}
    states = changed_states(config)
    ours = [TAG, *(tag for part, tag in TAGS.items() if any(getattr(site, part) for site in states.sites.values()))]
    ours += [BLOCK_TAG] if states.feed_forwards else []
    tags = [tag for tag in tags if tag not in OURS]
    return {
        "library_name": ENCODERS if encoder else LIBRARY,
        **base_of(config),
        **(said_of(source / README, DESCRIBED) if (source := same_source(config)) else {}),
        **said,
        "tags": [*tags, *(tag for tag in ours if tag not in tags)],
    }


def base_of(config: PretrainedConfig) -> dict[str, str]:
    """Return `base_model` and `license` of the model that a config was loaded from, as far as this machine knows them.

    A repository of the Hub is known by its name if it is in the cache; a folder by its own card.
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


def said_of(readme: Path, fields: Sequence[str] = PASSED_ON) -> dict[str, str]:
    """Return some metadata of a card; empty if there is no card, or none that can be read."""
    try:
        said = ModelCard(read_text(own_file(readme, readme.parent)), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no such file, or of YAML, huggingface_hub, encodings
        return {}
    return {field: said[field] for field in fields if said.get(field)}


def original_text(config: PretrainedConfig) -> str:
    """Return the text of the card in the folder that a model was loaded from, without our sections; "" if none.

    A source that is a changed model itself passes on the text of its own original.
    """
    source = same_source(config)
    try:
        card = unix(read_text(own_file(source / README, source))) if source else ""
        text = ModelCard(card, ignore_metadata_errors=True).text if source else ""
    except Exception:  # no such file, or of YAML, huggingface_hub, encodings
        return ""
    kept = [found["text"] for found in SECTIONS.finditer(text) if found["name"] == ORIGINAL]
    if kept:
        return kept[0]
    text = TITLE.sub("", SECTIONS.sub("\n\n", text).strip("\n"), count=1).strip()
    return f"{ORIGINAL_TITLE}\n\n{text}" if text else ""


def record_digest(config: PretrainedConfig) -> str:
    record = json.dumps(changed_states(config).to_dict(), sort_keys=True)
    return hashlib.sha256(record.encode()).hexdigest()[:12]


logger = logging.getLogger(__name__)
README = "README.md"
NAME = "path/or/name"  # in the example of a card whose place is not known yet
SECTION = "<!-- collab_heads {name}: begin -->\n{text}\n<!-- collab_heads {name}: end -->"
SECTIONS = re.compile(
    r"\s*<!-- collab_heads (?P<name>[\w ]+): begin -->\n(?P<text>.*?)\n<!-- collab_heads (?P=name): end -->\s*",
    re.DOTALL,
)
BITS = "Weights are stored in {} bits; `collab_heads_bits` of the config says which."
VOCABULARY = (
    "## Vocabulary\n\nTrimmed by collab_heads from {before:,} to {after:,} tokens; use the tokenizer of this "
    "repository."
)
TITLE = re.compile(rf"\A(# .+){re.escape(CHANGED)}$", re.MULTILINE)  # the title of a card that we created
# the text that transformers uploads where a repository has no card, with empty chapters for everything
GENERATED = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


@checking_arguments
def model_card(
    model: PreTrainedModel,
    report: object = None,
    metrics: Mapping[str, float] | None = None,
    *,
    name: str = NAME,
    card: ModelCard | None = None,
) -> ModelCard:
    """Write, or complete, the card of a changed model: what was changed, from which base, how to load it.

    `save_pretrained` and `push_to_hub` do this automatically, without a report. They keep the existing text of a card,
    and also the report as long as the model is the one for which it was written.

    Args:
        model: a changed model; the card of an unchanged one, or of one that is stock again, has no section of ours.
        report: what was done, as `compress`, `swap_to_collaborative` or `prune_heads` return it.
        metrics: name -> what was measured.
        name: the name or path from which the example loads the model.
        card: a card to complete; the text of its owner stays.

    Returns:
        The card: `card.save(folder / "README.md")` or `card.push_to_hub(name)`.

    Raises:
        UnsupportedModelError: if the model is inside a wrapper; the message says how to pass it.
    """
    check_passed(model)
    sync_record(inner := model_inside(model))
    note_grids(inner)
    config = copy.copy(inner.config)
    config.architectures = [type(inner).__name__]  # as a save writes it; before, it is that of the source
    return completed(config, card, name, report, metrics)


def completed(
    config: PretrainedConfig,
    card: ModelCard | None,
    name: str = NAME,
    report: object = None,
    metrics: Mapping[str, float] | None = None,
    *,
    encoder: str | None = None,
) -> ModelCard:
    """Return a card with the sections of a changed model, and with the metadata that were missing.

    The text of the original stands below ours in a new card, and stays there. A sentence encoder is loaded by its class
    of sentence-transformers: `encoder`, or that of its source.
    """
    owner = ModelCard("---\n{}\n---\n" + title(config) if card is None else unix(str(card)))
    sections = {found["name"]: found["text"] for found in SECTIONS.finditer(owner.text)}
    text = SECTIONS.sub("\n\n", owner.text).strip("\n")
    if not is_changed(config) and trimmed_vocabulary(config) is None:
        text = TITLE.sub(r"\1", text)
    if encoder is None and (source := encoder_source(config)) is not None:
        encoder = encoder_class(source)
    if encoder is None and owner.data.get("library_name") == ENCODERS:
        encoder = CLASSES[0]
    changed, done = is_changed(config), f"report {record_digest(config)}"
    wanted = {"changes": changes(config, name, encoder)} if changed else {}
    if trimmed := trimmed_vocabulary(config):
        wanted["vocabulary"] = VOCABULARY.format(**trimmed)
    if changed and (report is not None or metrics):
        wanted[done] = results(report, metrics or {})
    elif changed and done in sections:
        wanted[done] = sections[done]
    original = original_text(config) if card is None else sections.get(ORIGINAL)
    if wanted and original:
        wanted[ORIGINAL] = original
    ours = [SECTION.format(name=name, text=text) for name, text in wanted.items()]
    owner.text = "\n" + "\n\n".join(filter(None, [text, *ours])) + "\n"
    owner.data = ModelCardData(**metadata(config, owner.data.to_dict(), encoder), ignore_metadata_errors=True)
    return owner


def complete(
    config: PretrainedConfig,
    folder: Path,
    name: str = NAME,
    report: object = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write or complete the card in a folder; for an unchanged model only our sections are removed."""
    file = folder / README
    try:
        content = file.read_bytes().decode("utf-8-sig") if file.exists() else None
        is_ours = is_changed(config) or trimmed_vocabulary(config) is not None
        if not is_ours and (content is None or not SECTIONS.search(unix(content))):
            return
        if file.is_symlink():
            raise OutputError("it is a link, and what it leads to may be that of other models")
        ends = "\r\n" if content is not None and "\r\n" in content else "\n"
        card = None if content is None else ModelCard(unix(content), ignore_metadata_errors=True)
        if card is not None and is_generated(card):
            card = None
        text = str(completed(config, card, name, report, metrics, encoder=encoder_class(folder)))
        write_file(file, text.replace("\n", ends).encode("utf-8"))
    except Exception as error:  # of YAML, huggingface_hub, encodings, disks: a card never stops the weights
        logger.warning("%s cannot be completed as a model card, and is left as it is: %s", file, error)


def unix(text: str) -> str:
    """Return a text with the line ends that our sections have."""
    return text.replace("\r\n", "\n")


def is_generated(card: ModelCard) -> bool:
    """Return True if a card is the unchanged one that transformers uploads where there is none."""
    if GENERATED not in card.text:
        return False
    try:
        empty = ModelCard.from_template(ModelCardData(**card.data.to_dict()), model_description=GENERATED)
    except ImportError:  # jinja2; without it transformers cannot have made the card here
        return False
    return empty.text.strip() == card.text.strip()
