"""Translation models: how pairs are encoded, batched by tokens, trained on, translated and scored."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sacrebleu
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.collaborative.calibrate import evaluating
from collab_heads.training.batches import longest_first
from collab_heads.training.parallel import Corpus

IGNORED = -100  # labels that do not count


def encode(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, prefix: str, max_source: int, max_target: int
) -> dict[str, Dataset]:
    """Tokenize every split: `input_ids` and `labels`, truncated to their limits.

    Args:
        corpus: the pairs.
        tokenizer: with its languages set, where it has any.
        prefix: put before every source sentence (T5).
        max_source: the longest input, in pieces.
        max_target: the longest output, in pieces.
    """

    def tokenize(pairs: Mapping[str, list[str]]) -> dict[str, list]:
        inputs = tokenizer([prefix + line for line in pairs["source"]], truncation=True, max_length=max_source)
        labels = tokenizer(text_target=pairs["target"], truncation=True, max_length=max_target)
        return {"input_ids": inputs["input_ids"], "labels": labels["input_ids"]}

    encoded = {}
    for split, pairs in corpus.splits.items():
        raw = Dataset.from_dict(pairs)
        encoded[split] = raw.map(tokenize, batched=True, remove_columns=raw.column_names, desc=f"tokenizing {split}")
    return encoded


@dataclass(frozen=True)
class Collate:
    """Pad pairs into a batch; decoder inputs are the labels shifted right, as the model does it.

    Attributes:
        model: whose decoder inputs they are.
        pad: id of the padding piece.
        multiple: lengths are rounded up to a multiple of it.
    """

    model: PreTrainedModel
    pad: int
    multiple: int = 1

    def __call__(self, pairs: Sequence[Mapping]) -> dict[str, Tensor]:
        """The batch: input_ids and attention_mask [B, S]; with labels, also decoder_input_ids and labels [B, T]."""
        ids = self.padded([pair["input_ids"] for pair in pairs], self.pad)
        lengths = torch.tensor([len(pair["input_ids"]) for pair in pairs])
        batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if "labels" in pairs[0]:
            labels = self.padded([pair["labels"] for pair in pairs], IGNORED)
            batch |= {"decoder_input_ids": shifted(self.model, labels), "labels": labels}
        return batch

    def padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """Rows of pieces as one tensor."""
        width = math.ceil(max(map(len, rows)) / self.multiple) * self.multiple
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The decoder's inputs, [B, T] as the labels: these shifted right, as the model itself does it."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return own(labels=labels)
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id  # M2M100 shifts so in its forward
    inputs = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return inputs.masked_fill(inputs == IGNORED, pad)


@dataclass(frozen=True)
class Objective:
    """The training loss: cross-entropy per target piece.

    Attributes:
        smoothing: share of the probability that is spread over all pieces (label smoothing).
        dropped: probability of a source or target word piece to be replaced by the unknown one (word dropout).
        unknown: id of the unknown piece.
        special: ids that are never replaced.
    """

    smoothing: float
    dropped: float
    unknown: int | None
    special: tuple[int, ...]

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over the target pieces of a batch."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.dropped:
            inputs |= {name: self.drop(inputs[name]) for name in ("input_ids", "decoder_input_ids")}
        logits = model(**inputs, use_cache=False).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
        )

    def drop(self, ids: Tensor) -> Tensor:
        """Replace pieces at random."""
        keep = torch.isin(ids, torch.tensor(self.special, device=ids.device))
        keep |= torch.rand(ids.shape, device=ids.device) >= self.dropped
        return torch.where(keep, ids, self.unknown)


def num_targets(batch: Mapping[str, Tensor]) -> int:
    """How many target pieces the loss of a batch is over."""
    return int((batch["labels"] != IGNORED).sum())


def translate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    examples: Dataset,
    collate: Callable,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    **settings,
) -> list[str]:
    """Translate all examples, in their order, on every process.

    Args:
        accelerator: its processes share the work.
        model: unwrapped; every module's mode is restored.
        examples: encoded; labels are not looked at.
        collate: a list of examples -> a batch.
        tokenizer: of the target.
        size: sentences at a time on one process.
        **settings: of `generate`, such as `num_beams`, `length_penalty`, `max_length`, `forced_bos_token_id`.
    """
    batches = longest_first([len(ids) for ids in examples["input_ids"]], size)
    own, found = batches[accelerator.process_index :: accelerator.num_processes], []
    with evaluating(model):
        for indices in tqdm(own, desc="translating", leave=False, disable=not accelerator.is_main_process):
            batch = collate([{"input_ids": examples[i]["input_ids"]} for i in indices])
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            tokens = model.generate(**batch, do_sample=False, **settings)
            found += zip(indices, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True)
    if accelerator.num_processes > 1:
        found = gather_object(found)
    return [text for _, text in sorted(found)]


def corpus_scores(translations: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """SacreBLEU and chrF of translations against one reference each, and their signatures."""
    metrics = {"bleu": sacrebleu.metrics.BLEU(force=True), "chrf": sacrebleu.metrics.CHRF()}
    scores = {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}
    return scores, {name: str(metric.get_signature()) for name, metric in metrics.items()}
