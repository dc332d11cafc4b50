"""Run a model to measure it: in evaluation mode, with a suitable attention backend, and restore its state."""

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, device, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from collab_heads.base.memory import give_back_memory
from collab_heads.base.option_values import FeedForwardRole, Role
from collab_heads.base.progress import progress_bar
from collab_heads.contract.registry import is_lone_decoder, known_adapter
from collab_heads.errors import ArgumentError, CalibrationError, CollabHeadsError
from collab_heads.model.opened import input_device
from collab_heads.sites.site import AttentionSite, Site

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
CHUNKS = "chunk_size_feed_forward"  # attribute of the layers of BERT and others


@contextmanager
def evaluating(model: PreTrainedModel):
    """Switch to evaluation mode without gradients; every module's mode and every config's problem type are restored.

    Feed-forward blocks take all tokens at once (`chunk_size_feed_forward`), so that masks fit what they read.
    """
    modes = {module: module.training for module in model.modules()}
    inside = [module for module in modes if isinstance(module, PreTrainedModel)]
    problems = [(each.config, each.config.problem_type) for each in inside]  # classifiers set it from their labels
    chunks = {module: vars(module)[CHUNKS] for module in modes if CHUNKS in vars(module)}
    model.eval()
    try:
        for module in chunks:
            setattr(module, CHUNKS, 0)
        with torch.no_grad():
            yield
    finally:
        for module, size in chunks.items():
            setattr(module, CHUNKS, size)
        for module, mode in modes.items():
            module.training = mode
        for config, problem in problems:
            config.problem_type = problem


@contextmanager
def attention_backend(model: PreTrainedModel, backend: str, accepted: Collection[str]):
    """Use a backend where the model and its stacks have none of the accepted ones; theirs are restored."""
    # One by one: transformers 5.17 does not reach T5's stacks from the model. And in the configs: its
    # set_attn_implementation judges by the source of a class, and refuses those that were written in a notebook.
    stacks = {m: m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
    try:
        for stack, before in stacks.items():
            if before not in accepted:
                stack.config._attn_implementation = backend
        yield
    finally:
        for stack, before in stacks.items():  # from the outside in: setting a config sets those in it
            stack.config._attn_implementation = before


# Modality -> the names of its inputs, the usual one first, and the processor that makes them.
MODALITIES = {
    "texts": (("input_ids", "inputs_embeds"), "tokenizer"),
    "images": (("pixel_values",), "image processor"),
    "audio": (("input_features", "input_values"), "feature extractor"),
}


def modalities(model: PreTrainedModel | type[PreTrainedModel]) -> dict[str, str]:
    """Return the modalities that a model reads, with the name of the input: CLIP texts and images, Whisper audio."""
    taken = inspect.signature(model.forward).parameters
    return {kind: name for kind, (names, _) in MODALITIES.items() for name in reversed(names) if name in taken}


def reads_texts(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Return True if a model reads texts, or only inputs whose names are not known here."""
    return not (read := modalities(model)) or "texts" in read


def reads_texts_alone(model: PreTrainedModel) -> bool:
    """Return True if a model reads texts and nothing else."""
    return reads_texts(model) and len(modalities(model)) <= 1


def longest_text(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that a model takes, by its config; None without a limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # positions that start after a padding index (RoBERTa) leave fewer than the table has
    unused = [t.padding_idx + 1 for t in tables if t.num_embeddings == positions and t.padding_idx is not None]
    return positions - max(unused, default=0)


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens that a model takes, special ones included, or None without a limit."""
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 1e9 else []  # a huge number means: unknown
    limits += [] if (positions := longest_text(model)) is None else [positions]
    return min(limits, default=None)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, highest: int) -> None:
    """Raise ArgumentError if the highest id that a tokenizer gives has no embedding in a model."""
    known = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if highest >= known:
        raise ArgumentError(
            f"the {type(tokenizer).__name__} gives the id {highest}, but the {type(model).__name__} has {known} "
            "embeddings: pass the tokenizer of this model"
        )


def check_modalities(model: PreTrainedModel, batch: Mapping) -> None:
    """Raise ValueError if a batch holds other modalities than the model reads, or only some of them."""
    read = modalities(model)
    held = {
        kind: [name for name in names if batch.get(name) is not None]
        for kind, (names, _) in MODALITIES.items()
        if any(batch.get(name) is not None for name in names)
    }
    if not read or not held or held.keys() == read.keys():
        return
    wanted = " and ".join(f"{kind} ({name})" for kind, name in read.items())
    found = " and ".join(f"{kind} ({', '.join(names)})" for kind, names in held.items())
    makers = " and ".join(f"its {MODALITIES[kind][1]}" for kind in read)
    raise ValueError(f"it reads {wanted}, and the batch holds {found}: pass what {makers} returns")


# role -> the stack whose padding counts on the query side and on the key side
IMAGES = "vision"  # the one side of which no batch holds token ids
MASKS: dict[Role | FeedForwardRole, tuple[str, str]] = {
    "enc-self": ("encoder", "encoder"),
    "dec-self": ("decoder", "decoder"),
    "dec-enc": ("decoder", "encoder"),
    "enc-ffn": ("encoder", "encoder"),
    "dec-ffn": ("decoder", "decoder"),
}


def sides(site: Site) -> tuple[str, str]:
    """Return the stacks whose padding counts on the query side and on the key side of a site."""
    return MASKS[site.role] if site.stack is None else (site.stack, site.stack)


def reads_ids(site: AttentionSite) -> bool:
    """Return True if the queries of a site are tokens of texts, if the batches hold token ids at all."""
    return sides(site)[0] != IMAGES


def token_masks(model: PreTrainedModel, inputs: Mapping) -> dict[str, Tensor | None]:
    """Return which tokens count, by stack ("encoder", "decoder", ...): [B, T] bool, or None where all do.

    Audio models have frames for tokens, image models patches; a model with two stacks also has a mask for each of them.
    """
    masks, adapter = masks_of_tokens(model, inputs), known_adapter(model.config)
    return masks if adapter is None else adapter.token_masks(model.config, inputs, masks)


def output_mask(model: PreTrainedModel, inputs: Mapping) -> Tensor | None:
    """Return which tokens of the output count, if it has tokens: [B, T] bool, or None where all do."""
    masks = token_masks(model, inputs)
    return masks.get("output", masks["decoder"])  # of the only stack, where there is one


def masks_of_tokens(model: PreTrainedModel, inputs: Mapping) -> dict[str, Tensor | None]:
    """Return the token masks that follow from the attention masks and the decoder's inputs."""
    config = model.config
    attention_mask = as_bool(inputs.get("attention_mask"))
    if not config.is_encoder_decoder:
        if is_lone_decoder(config):  # it cross-attends to what the caller passes in
            return {"encoder": as_bool(inputs.get("encoder_attention_mask")), "decoder": attention_mask}
        return {"encoder": attention_mask, "decoder": attention_mask}
    decoder_mask, ids = as_bool(inputs.get("decoder_attention_mask")), decoder_ids(model, inputs)
    if decoder_mask is None and ids is not None and config.pad_token_id is not None:
        decoder_mask = ids != config.pad_token_id
        decoder_mask[:, 0] = True  # the start token is often the padding token
    return {"encoder": attention_mask, "decoder": decoder_mask}


def decoder_ids(model: PreTrainedModel, inputs: Mapping) -> Tensor | None:
    """Return the tokens that the decoder of an encoder-decoder reads, [B, T]; None where the inputs hold embeddings.

    Without decoder inputs it reads the labels or, where these are not tokens (BART's and T5's classifiers), the source,
    shifted right: position t holds the token of t - 1. The value at position 0 does not matter: it is the start token.
    """
    if inputs.get("decoder_input_ids") is not None or inputs.get("decoder_inputs_embeds") is not None:
        return inputs.get("decoder_input_ids")
    labels = inputs.get("labels")
    is_text = labels is not None and labels.ndim == 2 and not labels.is_floating_point()
    source = labels if is_text else inputs.get("input_ids")
    if source is None:
        return None
    shifted = torch.cat([source[:, :1], source[:, :-1]], dim=1)
    pad = model.config.pad_token_id
    return shifted.masked_fill(shifted == -100, 0 if pad is None else pad)


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Return an attention mask as bool [B, T]; (B, choices, T) of multiple-choice models is flattened as they do."""
    return None if mask is None else mask.bool().flatten(0, -2)


Batch = dict[str, Any]
Part = list[tuple[int, Batch]]  # batches with their numbers


def without_unread_labels(model: PreTrainedModel, batch: Mapping) -> Batch:
    """Return a batch without gradients, and without its labels unless a decoder reads them."""
    kept = {name: fit_for_training(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
    reads = model.config.is_encoder_decoder and not has_decoder_inputs(batch) and has_text_labels(batch)
    if not reads:
        kept.pop("labels", None)
    return kept


def fit_for_training(tensor: Tensor) -> Tensor:
    """Return a tensor without a gradient, also if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def has_decoder_inputs(batch: Mapping) -> bool:
    """Return True if a batch holds the inputs of the decoder."""
    return any(batch.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def has_text_labels(batch: Mapping) -> bool:
    """Return True if the labels of a batch are tokens: [B, T]."""
    labels = batch.get("labels")
    return isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()


def num_rows(batch: Mapping) -> int | None:
    """Return the number of examples in a batch; None where its tensors disagree."""
    counts = {len(value) if value.ndim else 0 for value in batch.values() if isinstance(value, Tensor)}
    simple = all(isinstance(value, Tensor | int | float | str | None) for value in batch.values())
    return counts.pop() if len(counts) == 1 and simple else None


def select(batch: Mapping, rows: slice | Tensor) -> Batch:
    """Return some rows of a batch, by a slice or [B] bool; values that are not tensors are kept."""

    def part(value: Tensor) -> Tensor:
        return value[rows.to(value.device) if isinstance(rows, Tensor) else rows]

    return {name: part(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def moved(batch: Mapping, device: device) -> Batch:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def check_batches(batches: Iterable[Mapping]) -> list[Mapping]:
    """Return batches as a list; raise CalibrationError if there are none or they are not dicts."""
    return list(each_batch(batches))


def each_batch(batches: Iterable[Mapping]) -> Iterator[Mapping]:
    """Yield batches one by one, as they are asked for; raise the errors of `check_batches` when they occur."""
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}, expected an iterable of input dicts, "
            "such as [tokenizer(texts, return_tensors='pt', padding=True), ...]"
        )
    index = -1
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise CalibrationError(f"batch {index} is a {type(batch).__name__}, expected a dict of model inputs")
        for name, value in batch.items():
            if not isinstance(name, str):
                raise CalibrationError(f"batch {index}: {name!r:.80} is not the name of a model input")
            if isinstance(value, Tensor) and value.is_meta:
                raise CalibrationError(f"batch {index}: its {name} is on the meta device, without values")
            if "mask" in name and not isinstance(value, Tensor | Mapping | None):
                raise CalibrationError(f"batch {index}: its {name} is a {type(value).__name__}, expected a tensor")
            if "mask" in name and isinstance(value, Tensor) and bool(value.isnan().any()):
                raise CalibrationError(f"batch {index}: its {name} holds NaN: give 1 for a token, and 0 for padding")
        if num_rows(batch) == 0:
            raise CalibrationError(f"batch {index} holds no examples: leave it out")
        yield batch
    if index < 0:
        raise CalibrationError("batches is empty: pass 32 to 512 sentences as batches of model inputs")


FEW = 128  # examples; with fewer, fits and rankings say little about others


def warn_few(counts: Sequence[int | None]) -> None:
    """Warn if batches hold fewer than 128 examples; the counts are those of `num_rows`."""
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and sum(known) < FEW:
        logger.warning_once(
            f"{sum(known)} examples are few: what is measured on them, or fitted to them, may be quite different on "
            f"others; pass at least {FEW}, at best 256 to 2,048"
        )


class NoticingFew(Iterable[Mapping]):
    """Batches that are counted while they are passed on, for `warn_few`; one is held at a time.

    Args:
        batches: an iterable of batches; `each_batch` checks them.
    """

    def __init__(self, batches: Iterable[Mapping]):
        self.batches = batches

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    def __iter__(self) -> Iterator[Mapping]:
        counts = []
        for batch in each_batch(self.batches):
            counts.append(num_rows(batch))
            yield batch
        warn_few(counts)


class EnoughSeen(Exception):
    """Raised by a hook that needs nothing of the modules after it: `run_batches` goes on with the next portion."""


def run_batches(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    masks: dict[str, Tensor | None],
    what: str,
    masks_of: Callable[[PreTrainedModel, Mapping], Mapping[str, Tensor | None]] | None = None,
    cut: Callable[[Mapping], Iterable[Mapping]] = lambda batch: (batch,),
) -> None:
    """Run the model on every batch, without gradients; one batch is held at a time.

    Args:
        model: the model.
        batches: checked as they come, see `each_batch`.
        masks: filled with the token masks of the current batch.
        what: the text beside the progress bar.
        masks_of: returns the content of `masks` for a model and a batch; None for `token_masks`.
        cut: batch -> the portions of it that are run one after the other.
    """
    total, masks_of = operator.length_hint(batches) or None, masks_of or token_masks
    device = input_device(model)
    with evaluating(model):
        for index, batch in enumerate(progress_bar(each_batch(batches), total=total, desc=what)):
            inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            with naming_batch(model, index, inputs):
                for portion in cut(inputs):
                    masks.clear()
                    masks.update(masks_of(model, portion))
                    with suppress(EnoughSeen):
                        model(**portion)
    give_back_memory()


@contextmanager
def naming_batch(model: PreTrainedModel, index: int, inputs: Mapping) -> Iterator[None]:
    """Raise whatever a model raises about its inputs as CalibrationError that names the batch."""
    try:
        check_modalities(model, inputs)
        yield
    except CollabHeadsError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"{type(model).__name__} cannot take batch {index} with {sorted(inputs)}: {error}"
        ) from error
