"""The model card of a changed model: sections of ours in a README.md, beside what its owner writes there."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.arguments import checking_arguments
from collab_heads.errors import OutputError
from collab_heads.files import write_file
from collab_heads.model.card_text import CHANGED, attention, metadata, record_digest, results, title
from collab_heads.model.marks import is_changed
from collab_heads.model.settling import settle
from collab_heads.wrappers import check_passed, model_inside

logger = logging.getLogger(__name__)

README = "README.md"
NAME = "path/or/name"  # in the example of a card that does not know where it will lie
SECTION = "<!-- collab_heads {name}: begin -->\n{text}\n<!-- collab_heads {name}: end -->"
SECTIONS = re.compile(
    r"\s*<!-- collab_heads (?P<name>[\w ]+): begin -->\n(?P<text>.*?)\n<!-- collab_heads (?P=name): end -->\s*",
    re.DOTALL,
)
TITLE = re.compile(rf"\A(# .+){re.escape(CHANGED)}$", re.MULTILINE)  # of a card that we began
# what transformers uploads where a repository has no card, with empty chapters for everything
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

    `save_pretrained` and `push_to_hub` do so by themselves, without a report. They keep what stands in a card, and also
    the report, as long as the model has the attention that it was written for.

    Args:
        model: changed; of one that is not, or is stock again, a card has no section of ours.
        report: of what was done, as `compress`, `swap_to_collaborative` or `prune_heads` return it.
        metrics: name -> what was measured.
        name: what the model is loaded by, for the example.
        card: one to complete; what its owner wrote stays.

    Returns:
        The card: `card.save(folder / "README.md")` or `card.push_to_hub(name)`.

    Raises:
        UnsupportedModelError: if the model is inside of something else; the message says how to pass it.
    """
    check_passed(model)
    settle(inner := model_inside(model))
    return completed(inner.config, card, name, report, metrics)


def completed(
    config: PretrainedConfig,
    card: ModelCard | None,
    name: str = NAME,
    report: object = None,
    metrics: Mapping[str, float] | None = None,
) -> ModelCard:
    """A card with the sections of a changed model, and in its metadata what it did not say yet."""
    owner = ModelCard(str(card)) if card is not None else ModelCard("---\n{}\n---\n" + title(config))
    sections = {found["name"]: found["text"] for found in SECTIONS.finditer(owner.text)}
    text = SECTIONS.sub("\n\n", owner.text).strip("\n")
    if not is_changed(config):
        text = TITLE.sub(r"\1", text)
    changed, done = is_changed(config), f"report {record_digest(config)}"
    wanted = {"attention": attention(config, name)} if changed else {}
    if changed and (report is not None or metrics):
        wanted[done] = results(report, metrics or {})
    elif changed and done in sections:
        wanted[done] = sections[done]
    ours = [SECTION.format(name=name, text=text) for name, text in wanted.items()]
    owner.text = "\n" + "\n\n".join(filter(None, [text, *ours])) + "\n"
    owner.data = ModelCardData(**metadata(config, owner.data.to_dict()), ignore_metadata_errors=True)
    return owner


def complete(
    config: PretrainedConfig,
    folder: Path,
    name: str = NAME,
    report: object = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write or complete the card in the folder of a changed model; of an unchanged one only take out what is ours."""
    file = folder / README
    try:
        content = file.read_bytes().decode("utf-8") if file.exists() else None
        if not is_changed(config) and (content is None or not SECTIONS.search(content)):
            return
        if file.is_symlink():
            raise OutputError("it is a link, and what it leads to may be that of other models")
        ends = "\r\n" if content is not None and "\r\n" in content else "\n"
        card = None if content is None else ModelCard(content.replace(ends, "\n"), ignore_metadata_errors=True)
        if card is not None and is_generated(card):
            card = None
        text = str(completed(config, card, name, report, metrics))
        write_file(file, text.replace("\n", ends).encode("utf-8"))
    except Exception as error:  # of YAML, huggingface_hub, encodings, disks: a card never stops the weights
        logger.warning("%s cannot be completed as a model card, and is left as it is: %s", file, error)


def is_generated(card: ModelCard) -> bool:
    """Whether a card is what transformers uploads where there is none, as it came."""
    if GENERATED not in card.text:
        return False
    try:
        empty = ModelCard.from_template(ModelCardData(**card.data.to_dict()), model_description=GENERATED)
    except ImportError:  # jinja2; without it transformers cannot have made the card here
        return False
    return empty.text.strip() == card.text.strip()
