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
    """A description of a decoder for llama.cpp, whose architectures turn pairs of neighbouring dimensions.

    Attributes:
        even: the architecture of a model whose blocks have the same sizes.
        uneven: the architecture of one whose blocks have sizes of their own.
        attention_norm: where the norm before the attention of layer {} is, relative to the base model.
        feed_forward_norm: where the norm before its feed-forward block is.
        last_norm: where the norm before the output layer is.
        rotations: where the module is that makes cosines and sines.
        epsilon: the config entry for the number in the roots of the norms.
        positions: the config entry for the most tokens of a text.
        window: the config entry for the tokens that a token sees, if not all.
        activation: the config entry for the activation, and the one that llama.cpp has.
        frequencies: the types of rotary positions whose frequencies are the same for texts of any length.
        byte_level: how it calls byte-level BPE.
        pre_tokenizers: how it calls the steps in which tokenizers cut a text into words -> what `tokenizer.json` says
            of each of them.
        whole_words: those of them with which a word that is a token is not made by merges.
    """

    even: str = "llama"
    uneven: str = "deci"
    attention_norm: str = "layers.{}.input_layernorm"
    feed_forward_norm: str = "layers.{}.post_attention_layernorm"
    last_norm: str = "norm"
    rotations: str = "rotary_emb"
    epsilon: str = "rms_norm_eps"
    positions: str = "max_position_embeddings"
    window: str = "sliding_window"
    activation: tuple[str, str] = ("hidden_act", "silu")
    frequencies: tuple[str, ...] = ("default", "linear", "llama3")
    byte_level: str = "gpt2"
    pre_tokenizers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    whole_words: tuple[str, ...] = ("llama-bpe",)


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
