"""Estimate the time of an analysis from the speed of a forward pass."""

from collections.abc import Collection, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate
from collab_heads.base.option_values import ReportPart
from collab_heads.running.speed import measure_speed

# passes over all batches that a part takes, measured on MiniLM, a GPT-2 and a Marian
PASSES: Mapping[ReportPart, float] = {"worth": 2.5, "relevance": 3.0, "gradient": 2.5, "reconstruction": 2.5}
LOOKING = 1.7  # of statistics and roles together
POSITION = 1.1  # passes over a sentence for each position whose contributions are measured, in a Marian


def estimate_analysis(
    model: PreTrainedModel, batches: Sequence[Mapping], parts: Collection[ReportPart], contribution_sentences: int
) -> Estimate | None:
    """Estimate what the parts of a report take; None for the ablation, whose evaluations are the user's, and on GPUs.

    Args:
        model: the model.
        batches: input dicts as the model takes them.
        parts: those that are measured.
        contribution_sentences: the number of sentences of the contributions.
    """
    if "ablation" in parts or model.device.type != "cpu" or (speed := measure_speed(model, batches)) is None:
        return None
    passes = sum(PASSES.get(part, 0.0) for part in parts) + LOOKING * bool({"statistics", "roles"} & {*parts})
    if "contributions" in parts:
        positions = speed.positions / speed.rows / (2 if model.config.is_encoder_decoder else 1)  # of a target
        passes += POSITION * positions * min(1.0, contribution_sentences / speed.rows)
    return Estimate(passes * speed.seconds, None, torch.get_num_threads())
