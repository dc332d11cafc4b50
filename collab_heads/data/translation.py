"""Encode sentence pairs, train on them with word dropout, translate, and score translations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sacrebleu
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.progress import progress_bar
from collab_heads.data.batches import IGNORED, check_room, longest_first, tokenize
from collab_heads.data.parallel import Corpus
from collab_heads.data.tokenizing import digest_of_tokens, tokenized_by, tokenized_in
from collab_heads.running.translations import translations


@dataclass(frozen=True)
class WordDropout:
    """Word dropout: tokens of the inputs are replaced at random; labels stay.

    Attributes:
        source: probability that a token of the source is replaced.
        target: the same for what the decoder reads.
        replacements: [N], the ids that replace a token, all equally probable: the unknown token alone, or many.
        special: ids that are never replaced.
    """

    source: float
    target: float
    replacements: tuple[int, ...]
    special: tuple[int, ...]

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return model inputs with tokens replaced."""
        shares = {"input_ids": self.source, "decoder_input_ids": self.target}
        return inputs | {name: self.drop(inputs[name], share) for name, share in shares.items() if share}

    def drop(self, ids: Tensor, share: float) -> Tensor:
        """Replace every token that is not special with probability `share`."""
        keep = torch.isin(ids, ids.new_tensor(self.special))
        keep |= torch.rand(ids.shape, device=ids.device) >= share
        others = ids.new_tensor(self.replacements)
        if len(others) > 1:
            others = others[torch.randint(len(others), ids.shape, device=ids.device)]
        return torch.where(keep, ids, others)


def encode(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    max_source: int,
    max_target: int,
    *,
    processes: int | None = None,
    cache: str | None = None,
) -> dict[str, Dataset]:
    """Tokenize every split: `input_ids` and `labels`, truncated to their limits.

    Args:
        corpus: the pairs.
        tokenizer: with its languages set, where it has any.
        prefix: put before every source sentence (T5).
        max_source: the longest input, in tokens.
        max_target: the longest output, in tokens.
        processes: number of processes that tokenize; None for this one alone.
        cache: folder to which tokenized splits are written, and from which they are read; None for none.
    """
    check_room("--max_source_length", max_source, tokenizer)
    check_room("--max_target_length", max_target, tokenizer)

    def tokenized(pairs: Mapping[str, list[str]]) -> dict[str, list]:
        return tokenize(pairs, tokenizer, prefix, max_source, max_target)

    encoded = {}
    for split, pairs in corpus.splits.items():
        raw = Dataset.from_dict(pairs)
        languages = [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
        settings = [prefix, max_source, max_target, *languages]
        name = "" if cache is None else digest_of_tokens(pairs, tokenizer, settings)
        make = partial(
            raw.map,
            tokenized,
            batched=True,
            remove_columns=raw.column_names,
            new_fingerprint=split,  # datasets caches nothing: the tokenizer need not be hashed
            desc=f"tokenizing {split}",
        )
        if processes is not None and processes > 1:
            make = partial(tokenized_by, processes, pairs, tokenizer, (prefix, max_source, max_target), split)
        encoded[split] = tokenized_in(cache, name, make)
    return encoded


@dataclass(frozen=True)
class Objective:
    """The training loss: cross-entropy per target token.

    Attributes:
        smoothing: share of the probability that is spread over all tokens (label smoothing).
        dropout: replaces words of the inputs; None for none.
    """

    smoothing: float = 0.0
    dropout: WordDropout | None = None

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the target tokens of a batch."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.dropout is not None:
            inputs = self.dropout(inputs)
        logits = model(**inputs, use_cache=False).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
        )

    @staticmethod
    def weight(batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens over which the loss of a batch is the mean."""
        return num_targets(batch)


def num_targets(batch: Mapping[str, Tensor]) -> int:
    """Return the number of target tokens of a batch."""
    return int((batch["labels"] != IGNORED).sum())


def translate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    examples: Dataset,
    collate: Callable,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    most: int,
    **settings: Any,
) -> list[str]:
    """Translate all examples, in their order, on every process.

    Args:
        accelerator: its processes share the work.
        model: unwrapped; every module's mode is restored.
        examples: encoded; labels are ignored.
        collate: a list of examples -> a batch.
        tokenizer: of the target.
        size: sentences at a time on one process.
        most: tokens of a translation at most, the end token included.
        **settings: of `generate`, such as `num_beams` and `length_penalty`.
    """
    batches = longest_first([len(ids) for ids in examples["input_ids"]], size)
    share = batches[accelerator.process_index :: accelerator.num_processes]
    shown = progress_bar(share, desc="translating", disable=not accelerator.is_main_process)
    batched = (collate([{"input_ids": examples[i]["input_ids"]} for i in indices]) for indices in shown)
    found = translations(model, tokenizer, batched, most, **settings)
    numbered = [pair for indices, texts in zip(share, found, strict=True) for pair in zip(indices, texts, strict=True)]
    if accelerator.num_processes > 1:
        numbered = gather_object(numbered)
    return [text for _, text in sorted(numbered)]


METRICS = ("bleu", "chrf")


def corpus_scores(translations: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return BLEU and chrF of translations against one reference each, and sacreBLEU's signatures."""
    metrics = {"bleu": sacrebleu.metrics.BLEU(force=True), "chrf": sacrebleu.metrics.CHRF()}
    scores = {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}
    return scores, {name: str(metric.get_signature()) for name, metric in metrics.items()}
