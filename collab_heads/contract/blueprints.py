"""Blueprints: how to build a new model of a family, by the names of its sizes, and the processor of its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class VocabularyForm:
    """The form in which a model type keeps a SentencePiece vocabulary.

    Attributes:
        tokenizer: class of the tokenizer.
        special: ids of the special pieces; -1 for one that is not among the pieces.
        files: names under which the tokenizer looks for the SentencePiece model.
        table: whether it needs a table of the pieces, padding last, beside the model.
    """

    tokenizer: str
    special: Mapping[str, int]
    files: tuple[str, ...]
    table: bool = False


@dataclass(frozen=True)
class Blueprint:
    """A recipe for a model type: how to make one from a few sizes.

    Attributes:
        sizes: "d_model", "num_layers", "num_heads", "d_ff", "dropout", "max_length" or "d_head" -> names in its config.
        usual: the other entries of its config.
        vocabulary: the form of its vocabulary.
    """

    sizes: Mapping[str, tuple[str, ...]]
    vocabulary: VocabularyForm
    usual: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageBlueprint:
    """A recipe for a model type that reads images: how to make one from a few sizes.

    Attributes:
        sizes: "d_model", "num_layers", "num_heads", "d_ff" or its ratio to "d_model", "d_ff_ratio", "dropout",
            "image_size" or "patch_size" -> names in its config.
        processor: class of the image processor, which takes any `size`, `image_mean` and `image_std`.
    """

    sizes: Mapping[str, tuple[str, ...]]
    processor: str
