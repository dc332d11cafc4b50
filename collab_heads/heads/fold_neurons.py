"""Choose the neurons of a folded model: fewer than in the original, where the family's config can say so.

Each feed-forward block has as many neurons as the block that has most left, of those that one config entry counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.heads.fold_layout import stock_twin
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenFeedForward, counted_together
from collab_heads.sites.state import FeedForwardState


@dataclass(frozen=True)
class NeuronCount:
    """The number of neurons of the feed-forward blocks of a folded model that one config entry counts.

    Attributes:
        config: the config of the model or stack that has the blocks.
        entries: its entry with the new value; empty if the blocks have as many neurons as in the original.
        blocks: the blocks.
        count: the number of neurons that each of them has in the folded model.
    """

    config: PretrainedConfig
    entries: Mapping[str, int]
    blocks: Sequence[OpenFeedForward]
    count: int


def fold_neurons(
    model: PreTrainedModel, blocks: Sequence[OpenFeedForward], states: Mapping[str, FeedForwardState]
) -> list[NeuronCount]:
    """Choose the neurons of a folded model: as few as its configs can say and each block needs.

    Args:
        model: the model.
        blocks: all its feed-forward blocks.
        states: path -> the recorded states of the changed ones.
    """
    found = []
    for group in counted_together(blocks):
        whole = max(states[block.path].num_neurons if block.path in states else block.num_neurons for block in group)
        count, config = max(1, *(block.num_neurons for block in group)), group[0].config
        if count < whole and can_say(model, group, count):
            found.append(NeuronCount(config, {group[0].entry: count}, group, count))
        else:
            found.append(NeuronCount(config, {}, group, whole))
    return found


def can_say(model: PreTrainedModel, blocks: Sequence[OpenFeedForward], count: int) -> bool:
    """Return True if a config entry gives these blocks another number of neurons, and changes nothing else.

    That of SigLIP's images counts the neurons of its pooling, too; DINOv2 has one that it ignores.
    """
    config, entry = blocks[0].config, blocks[0].entry
    if not hasattr(config, entry):
        return False
    try:
        other, stock = stock_twin(model, [(config, {entry: count})]), stock_twin(model, [])
    except Exception:  # of huggingface_hub's validation, which has its own classes
        return False
    outputs = {name: module for name, module in model.named_modules() if module in {block.output for block in blocks}}
    if any(widths(other.get_submodule(name))[0] != count for name in outputs):
        return False
    inside = {name for name, module in model.named_modules() if any(module in block.modules for block in blocks)}
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    changed = [name for name, tensor in other.state_dict().items() if tensor.shape != shapes[name]]
    return all(name.rpartition(".")[0] in inside for name in changed)
