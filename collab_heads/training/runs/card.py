"""The model card that a run leaves: in its output folder, and on the Hub."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from collab_heads.checks import is_number
from collab_heads.model.card import README, complete, model_card
from collab_heads.model.marks import is_changed
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.output import Output


def final_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """What a run measured last: name -> value."""
    return {name: value for name, value in results.items() if name.startswith("eval_") and is_number(value)}


def write_card(output: Output, model: PreTrainedModel, metrics: Mapping[str, float]) -> None:
    """Write the card of a changed model into the output folder. A card that the user wrote gets our sections only."""
    if (output.path / README).exists() and not output.owns(README):
        complete(model.config, output.path, metrics=metrics)
    elif is_changed(model.config):
        output.write(README, str(model_card(model, metrics=metrics)).encode("utf-8"))


def save_without_card(learner: Learner, model: PreTrainedModel, folder: Path) -> None:
    """Save a model whose files will be moved over others: its card is written beside them when the run is over."""
    learner.save_model(model, folder)
    (folder / README).unlink(missing_ok=True)
