"""What building a new model of a family takes: the names of its sizes, and what makes its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class VocabularyForm:
    """How a model type keeps a SentencePiece vocabulary.

    Attributes:
        tokenizer: class of the tokenizer.
        special: ids of the special pieces; -1 for one that is not among the pieces.
        files: names under which it looks for the SentencePiece model.
        table: whether it wants a table of the pieces, padding last, beside the model.
    """

    tokenizer: str
    special: Mapping[str, int]
    files: tuple[str, ...]
    table: bool = False


@dataclass(frozen=True)
class Blueprint:
    """How a model type is made from a few sizes.

    Attributes:
        sizes: "d_model", "num_layers", "num_heads", "d_ff", "dropout", "max_length" or "d_head" -> names in its config.
        usual: what else its config should say.
        vocabulary: the form of its vocabulary.
    """

    sizes: Mapping[str, tuple[str, ...]]
    vocabulary: VocabularyForm
    usual: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageBlueprint:
    """How a model type that reads images is made from a few sizes.

    Attributes:
        sizes: "d_model", "num_layers", "num_heads", "d_ff" or its ratio to "d_model", "d_ff_ratio", "dropout",
            "image_size" or "patch_size" -> names in its config.
        processor: class of the image processor, which takes any `size`, `image_mean` and `image_std`.
    """

    sizes: Mapping[str, tuple[str, ...]]
    processor: str
