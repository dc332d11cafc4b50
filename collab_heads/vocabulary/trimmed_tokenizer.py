"""The files of a tokenizer: the vocabularies in them, how texts are divided, and the same with fewer tokens."""

import json
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError
from collab_heads.files.atomic import write_json, writing
from collab_heads.files.reading import parse_json, read_text
from collab_heads.saving.vocabularies import is_pair, vocabularies_of
from collab_heads.vocabulary.token_models import TOKEN_MODELS, Bpe, TokenModel, Unigram

Text = str | Sequence[str]  # a sentence, or a source and its translation


class TokenizerFiles(ABC):
    """A tokenizer as data.

    Args:
        tokenizer: the tokenizer; it is not changed.

    Attributes:
        vocabularies: token -> id; two where encoder and decoder have their own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.vocabularies = tokenizer, vocabularies_of(tokenizer)

    @abstractmethod
    def always(self, side: int) -> set[str]:
        """Return the tokens of a vocabulary that cannot go."""

    @abstractmethod
    def parts(self, token: str) -> Collection[str]:
        """Return the tokens that a token is built from."""

    @abstractmethod
    def encode(self, texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> Sequence[Sequence[Sequence[int]]]:
        """Return the ids of texts, special tokens included, for each vocabulary: [V, N, T]."""

    @abstractmethod
    def rewrite(self, folder: Path, kept: Sequence[Mapping[str, int]]) -> None:
        """Change the files of the tokenizer in a folder, in place.

        Args:
            folder: the tokenizer was saved there.
            kept: token -> new id, for each vocabulary.
        """

    def trimmed(self, kept: Sequence[Mapping[str, int]]) -> PreTrainedTokenizerBase:
        """Return the tokenizer with fewer tokens, loaded from files as a user would load it."""
        with tempfile.TemporaryDirectory(prefix="collab_heads", ignore_cleanup_errors=True) as name:
            place = Path(name)
            with writing(place):
                self.tokenizer.save_pretrained(place)
                self.rewrite(place, kept)
                renumber_added(place / "tokenizer_config.json", kept[0])
            made = type(self.tokenizer).from_pretrained(place, local_files_only=True)
        del made.init_kwargs["local_files_only"]  # it would be stored
        made.init_kwargs |= {k: v for k, v in self.tokenizer.init_kwargs.items() if k == "local_files_only"}
        made.name_or_path = self.tokenizer.name_or_path
        return made


def renumber_added(settings: Path, ids: Mapping[str, int]) -> None:
    said = parse_json(read_text(settings))
    if "added_tokens_decoder" in said:
        said["added_tokens_decoder"] = {
            str(ids[each["content"]]): each for each in said["added_tokens_decoder"].values()
        }
        write_json(settings, said)


class FastFiles(TokenizerFiles):
    """A tokenizer of the library tokenizers: one `tokenizer.json`."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.data = json.loads(tokenizer.backend_tokenizer.to_str())
        found = self.data["model"]
        kind = found.get("type")
        if kind not in TOKEN_MODELS:
            raise ArgumentError(
                f"{type(tokenizer).__name__} divides words by {kind or 'an unknown model'}, which has no smaller "
                f"tokens to build others from: known are {', '.join(TOKEN_MODELS)}"
            )
        self.model = TOKEN_MODELS[kind](found)

    def always(self, side):
        added = {each["content"] for each in self.data["added_tokens"]}
        named: dict[str, int] = defaultdict(int)
        with_ids(self.data.get("post_processor"), named)  # asks for the tokens that it names
        unknown = {self.data["model"].get("unk_token")} | set(self.tokenizer.all_special_tokens)
        unknown.add((self.data.get("padding") or {}).get("pad_token"))
        if (place := self.data["model"].get("unk_id")) is not None:
            unknown.add(self.data["model"]["vocab"][place][0])
        return self.model.always() | added | ((named.keys() | unknown) & self.vocabularies[0].keys())

    def parts(self, token):
        return self.model.parts(token)

    def encode(self, texts, tokenizer):
        backend = tokenizer.backend_tokenizer
        padding, truncation = backend.padding, backend.truncation  # a call without them would delete them
        found = tokenizer(list(texts), verbose=False)["input_ids"]
        if padding is not None:
            backend.enable_padding(**padding)
        if truncation is not None:
            backend.enable_truncation(**truncation)
        return (found,)

    def rewrite(self, folder, kept):
        file, ids = folder / "tokenizer.json", kept[0]
        data = parse_json(read_text(file))
        data["model"] = self.model.trimmed(ids)
        data["added_tokens"] = [{**each, "id": ids[each["content"]]} for each in data["added_tokens"]]
        data["post_processor"] = with_ids(data.get("post_processor"), ids)
        if data.get("padding"):
            data["padding"]["pad_id"] = ids.get(data["padding"]["pad_token"], data["padding"]["pad_id"])
        write_json(file, data)


def with_ids(processor: Any, ids: Mapping[str, int]) -> Any:
    if not processor:
        return processor
    if "processors" in processor:
        return {**processor, "processors": [with_ids(each, ids) for each in processor["processors"]]}
    found = dict(processor)
    for name in ("sep", "cls"):
        if name in found:
            found[name] = [found[name][0], ids[found[name][0]]]
    if isinstance(named := found.get("special_tokens"), dict):
        found["special_tokens"] = {
            key: {**each, "ids": [ids[token] for token in each["tokens"]]} for key, each in named.items()
        }
    return found


class PairFiles(TokenizerFiles):
    """A tokenizer as Marian's: two SentencePiece models, and a `vocab.json` for both or one for each."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        check_extra("train", "vocabularies of SentencePiece", ["protobuf"])
        self.protos = [proto_of(each.serialized_model_proto()) for each in (tokenizer.spm_source, tokenizer.spm_target)]
        self.models = [token_model(proto) for proto in self.protos]

    def always(self, side):
        tokenizer, vocabulary = self.tokenizer, self.vocabularies[side]
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        special |= {token for token in vocabulary if token.startswith(">>") and token.endswith("<<")}  # languages
        sides = [0, 1] if len(self.vocabularies) == 1 else [side]
        special |= {each.piece for side in sides for each in self.protos[side].pieces if each.type != NORMAL}
        return vocabulary.keys() & set.union(special, *(self.models[side].always() for side in sides))

    def parts(self, token):
        return set.union(*(set(model.parts(token)) for model in self.models))

    def encode(self, texts, tokenizer):
        pairs = [(text, text) if isinstance(text, str) else text for text in texts]
        sources = tokenizer([source for source, _ in pairs], verbose=False)["input_ids"]
        targets = tokenizer(text_target=[target for _, target in pairs], verbose=False)["input_ids"]
        return (sources + targets,) if len(self.vocabularies) == 1 else (sources, targets)

    def rewrite(self, folder, kept):
        names = ("vocab.json", "target_vocab.json")
        for name, old, new in zip(names, self.vocabularies, kept, strict=False):
            write_json(folder / name, {token: new[token] for token in old if token in new})
        for number, (name, proto) in enumerate(zip(("source.spm", "target.spm"), self.protos, strict=True)):
            side = min(number, len(kept) - 1)
            gone = self.vocabularies[side].keys() - kept[side].keys()
            smaller = type(proto)()
            smaller.CopyFrom(proto)
            del smaller.pieces[:]
            smaller.pieces.extend(each for each in proto.pieces if each.type != NORMAL or each.piece not in gone)
            smaller.trainer_spec.vocab_size = len(smaller.pieces)
            (folder / name).write_bytes(smaller.SerializeToString())


NORMAL = 1  # a piece of a SentencePiece model that is not a control, unknown or byte
BPE = 2  # the type of a SentencePiece model


def proto_of(content: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return cast(Any, sentencepiece_model_pb2).ModelProto.FromString(content)


class ScoredBpe(Bpe):
    """Merges of a SentencePiece model: the neighbours whose union has the highest score first."""

    def rank(self, left, right):
        return -self.data["scores"].get(left + right, -float("inf"))


def token_model(proto: Any) -> TokenModel:
    pieces = {each.piece: each.score for each in proto.pieces if each.type == NORMAL}
    if proto.trainer_spec.model_type == BPE:
        return ScoredBpe({"vocab": pieces, "merges": [], "scores": pieces})
    return Unigram({"vocab": list(pieces.items())})


def files_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerFiles:
    """Return a tokenizer as data.

    Raises:
        ArgumentError: if it is a slow one without a fast form, or divides words in a way without smaller tokens.
    """
    if is_pair(tokenizer):
        return PairFiles(tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise ArgumentError(
            f"{type(tokenizer).__name__} is a slow tokenizer: pass one with a tokenizer.json, or Marian's"
        )
    return FastFiles(tokenizer)
