"""Build a new model of a family by the names of its sizes, and describe it for engines: the data of an adapter."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel


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


@dataclass(frozen=True)
class GgufForm:
    """A description of a model type for llama.cpp. Paths are relative to the base model, {} is a layer.

    Attributes:
        even: the architecture of a model whose blocks have the same sizes.
        uneven: the architecture of one whose blocks have sizes of their own; None where there is none.
        fills: whether the heads of a block must fill the width of the model.
        norms: name of a norm of a block -> where it is.
        outside: name of an embedding or a norm outside of the blocks -> where it is.
        fused: the name of the projection for query, key and value; None where each has its own.
        head_width: the attribute of the attention module for the width of a head.
        rotations: where the module is that makes cosines and sines; None for learned positions.
        neighbours: whether rotations turn pairs of neighbouring dimensions.
        frequencies: the types of rotary positions whose frequencies are the same for texts of any length.
        epsilon: the name of the number in the roots of the norms, and the config entry for it.
        positions: the config entry for the most tokens of a text.
        window: the config entry for the tokens that a token sees, if not all.
        computed: config entry -> the values of it that the architecture computes; None where the entry is missing.
        embeds: whether it puts out states, or the embeddings of texts, and predicts no tokens.
        tokenizers: how `tokenizer.json` calls a kind of tokenizer -> how llama.cpp does.
        pre_tokenizers: how it calls the steps in which tokenizers cut a text into words -> what `tokenizer.json` says
            of each of them.
        whole_words: those of them with which a word that is a token is not made by merges.
        normalizer: what `tokenizer.json` says of what is done to texts before, for pieces of words.
    """

    even: str
    norms: Mapping[str, str]
    outside: Mapping[str, str]
    epsilon: tuple[str, str]
    uneven: str | None = None
    fills: bool = False
    fused: str | None = None
    head_width: str = "head_dim"
    rotations: str | None = None
    neighbours: bool = False
    frequencies: tuple[str, ...] = ("default",)
    positions: str = "max_position_embeddings"
    window: str = "sliding_window"
    computed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    embeds: bool = False
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    pre_tokenizers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    whole_words: tuple[str, ...] = ()
    normalizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CTranslate2Form:
    """A description of a model type for CTranslate2's converter and engines. A family may override the methods.

    Attributes:
        entries: entries of a config that the converter (4.8) reads, and configs of transformers 5 say no more.
        head_entries: the config entries for the number of heads of every stack.
        transcriber: the engine that transcribes sound, as a path in the package; None for a type that reads text.
        chooses_padding: whether the engine can choose the padding as a token.
    """

    entries: Mapping[str, Any] = field(default_factory=dict)
    head_entries: tuple[str, ...] = ("num_attention_heads",)
    transcriber: str | None = None
    chooses_padding: bool = True

    def complete(self, prepared: PreTrainedModel, model: PreTrainedModel) -> None:
        """Complete the configs of a copy whose layers have stock names, in place.

        Args:
            prepared: the copy, which a converter reads.
            model: its original.
        """
        for name, value in self.entries.items():
            setattr(prepared.config, name, value)

    def token_ids(self, model: PreTrainedModel) -> Mapping[str, int]:
        """Return the tokens that the converter or the engine looks up by name -> id.

        Args:
            model: the model.
        """
        return {}

    def prompt(self, model: PreTrainedModel) -> Sequence[int]:
        """Return the ids with which a transcript begins, without times; only with a `transcriber`.

        Args:
            model: the model.
        """
        return [model.config.decoder_start_token_id]

    @contextmanager
    def converting(self, part: PreTrainedModel) -> Iterator[None]:
        """Have the converter read a model rightly, in this context.

        Args:
            part: what is converted; its weights may change, in place.
        """
        yield
