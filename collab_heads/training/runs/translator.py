"""Load, feed and evaluate the translation models of `run_translation.py`."""

import math
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.data.batches import Collate, longest_first, padding_multiple, token_steps
from collab_heads.data.classification import draw
from collab_heads.data.parallel import Corpus
from collab_heads.data.translation import METRICS, Objective, WordDropout, corpus_scores, encode, translate
from collab_heads.errors import ArgumentError
from collab_heads.running.batches import longest_text
from collab_heads.saving.loading import backend_options, load_or_explain
from collab_heads.training.loop.minimum_risk import MinimumRisk
from collab_heads.training.loop.steps import TrainingSteps
from collab_heads.training.loop.training import as_trained
from collab_heads.training.options.changes import wants_swap
from collab_heads.training.options.tasks import dropout_of_sides, from_scratch
from collab_heads.training.runs.best_weights import (
    BestWeights,
    check_enough_checkpoints,
    last_checkpoints,
    load_weights,
)
from collab_heads.training.runs.learner import Learner, check_flags_fit
from collab_heads.training.runs.session import Session
from collab_heads.training.runs.swap import Phase, phases
from collab_heads.training.runs.translation_model import check_fits, freeze, freeze_unsaved, set_languages, untrained
from collab_heads.training.storage.output import TRANSLATIONS

PROBED = 8  # training sentences that minimum-risk training is tried on before it begins


@dataclass
class LastEvaluation:
    """The results of the last evaluation, other than its scores.

    Attributes:
        translations: of the validation pairs, on every process; None before the first evaluation.
        signatures: metric -> its signature of sacreBLEU, which says how it was computed.
    """

    translations: list[str] | None = None
    signatures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Translator(Learner):
    """A `Learner` of translation.

    Attributes:
        data: the pairs.
        vocabulary: folder of the files of a new vocabulary, until the model is saved.
        best: the best weights so far.
        last: the last evaluation.
    """

    project = "translation"
    primary = "bleu"

    tokenizer: PreTrainedTokenizerBase
    collate: Collate
    data: Corpus
    vocabulary: tempfile.TemporaryDirectory
    best: BestWeights
    last: LastEvaluation

    @classmethod
    def load(cls, session: Session, data: Corpus) -> "Translator":
        """Load or make tokenizer and model, and encode the data."""
        args, vocabulary = session.args, tempfile.TemporaryDirectory()
        set_seed(args.seed)
        if session.checkpoint is None and from_scratch(args):
            model, tokenizer = untrained(args, data, Path(vocabulary.name))
        else:
            model, tokenizer = load_trained(args, session.checkpoint)
        set_languages(model, tokenizer, args.source_lang, args.target_lang)
        freeze_unsaved(model)
        if args.trainable_parameters is not None:
            freeze(model, args.trainable_parameters, session.progress.get("frozen"))
        is_born_so = args.collaborative and from_scratch(args)  # collaborative from the start
        swaps = wants_swap(args) and not is_born_so
        if session.checkpoint is None:
            check_flags_fit(args, model, swaps=swaps)
        check_fits(args, model, tokenizer)
        lengths = args.max_source_length, args.max_target_length
        longest = max(*lengths, args.val_max_target_length or 0)
        with session.accelerator.main_process_first() if args.cache_dir else nullcontext():  # the others read its cache
            encoded = encode(
                data,
                tokenizer,
                args.source_prefix,
                *lengths,
                processes=args.preprocessing_num_workers,
                cache=args.cache_dir,
            )
        translator = cls(
            session=session,
            task=data.name,
            model=model,
            tokenizer=tokenizer,
            encoded=encoded,
            collate=Collate(
                model,
                tokenizer.pad_token_id,
                padding_multiple(session.accelerator.mixed_precision, longest, longest_text(model)),
                lengths if args.pad_to_max_length else (0, 0),
            ),
            phases=phases(args.swap if swaps else None),
            is_trained=not from_scratch(args),
            data=data,
            vocabulary=vocabulary,
            best=BestWeights(session),
            last=LastEvaluation(signatures=session.progress.get("signatures", {})),
        )
        translator.check_kept_weights()
        if isinstance(translator.loss, MinimumRisk) and session.checkpoint is None:
            translator.loss.check(model, translator.samples(PROBED, labels=True)[0])
        return translator

    def check_kept_weights(self) -> None:
        """Check that the best weights, or enough checkpoints to average, will be there at the end."""
        session, args = self.session, self.session.args
        if not (args.load_best_model_at_end or args.average_checkpoints):
            return
        if session.checkpoint is not None and not session.resumes_in_place:
            raise ArgumentError(
                f"--output_dir {args.output_dir}: --load_best_model_at_end and --average_checkpoints need what the run "
                f"left in {session.checkpoint.parent}: resume there"
            )
        self.best.check()
        for phase in self.phases:
            if phase.trains and args.average_checkpoints:
                steps = self.steps(phase.number)
                check_enough_checkpoints(args.average_checkpoints, args.checkpointing_steps, steps)
                if session.checkpoint is not None and phase.number == session.progress["phase"]:
                    last_checkpoints(args, phase.number, steps, session.run, until=session.progress["step"])

    @cached_property
    def loss(self) -> Objective | MinimumRisk:
        """The training loss: cross-entropy with label smoothing and word dropout, or minimum risk."""
        args, tokenizer = self.session.args, self.tokenizer
        if args.objective == "minimum_risk":
            return MinimumRisk(
                self.session.accelerator,
                tokenizer,
                samples=args.risk_samples,
                sharpness=args.risk_sharpness,
                metric=args.risk_metric,
                cross_entropy=args.risk_cross_entropy,
                longest=args.max_target_length,
            )
        source, target = dropout_of_sides(args)
        if not (source or target):
            return Objective(args.label_smoothing)
        special = tuple(tokenizer.all_special_ids)
        pieces = {"unknown": [tokenizer.unk_token_id], "random": sorted({*range(len(tokenizer))} - {*special})}
        dropout = WordDropout(source, target, tuple(pieces[args.word_dropout_with]), special)
        return Objective(args.label_smoothing, dropout)

    def steps(self, phase: int) -> TrainingSteps:
        """Return the optimizer steps of a phase; with `--max_tokens`, micro-batches are filled up to so many tokens."""
        args, examples, multiple = self.session.args, self.encoded["train"], self.collate.multiple
        if not args.max_tokens:
            return super().steps(phase)
        pairs = zip(examples["input_ids"], examples["labels"], strict=True)
        lengths = [math.ceil(max(map(len, pair)) / multiple) * multiple for pair in pairs]  # as they are padded
        of_epoch = partial(token_steps, lengths, args.max_tokens, self.batches_per_step, args.seed + phase)
        return TrainingSteps(of_epoch, args.num_train_epochs, args.max_train_steps)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens, or of sentences, over which the loss of a batch is the mean."""
        return self.loss.weight(batch)

    def samples(self, count: int, *, labels: bool) -> Sequence[Mapping[str, Tensor]]:
        """Return batches of training pairs of similar length, drawn with the run's seed."""
        drawn = draw(self.encoded["train"], count, self.session.args.seed)
        groups = longest_first(list(map(len, drawn["input_ids"])), 32)
        batches = [self.collate([drawn[i] for i in group]) for group in groups]
        return [{name: t for name, t in batch.items() if labels or name != "labels"} for batch in batches]

    def validation(self, *, generated: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Return batches of validation pairs of similar length, or with the last translations as targets."""
        args, pairs = self.session.args, self.encoded["validation"]
        sources, targets = pairs["input_ids"], pairs["labels"]
        if generated:
            if self.last.translations is None:  # resumed from the last checkpoint, so nothing was evaluated
                with as_trained(self.session.accelerator, self.model):
                    self.last.translations = self.translations("validation", self.model)
            limit = {"truncation": True, "max_length": args.val_max_target_length or args.max_target_length}
            targets = self.tokenizer(text_target=self.last.translations, **limit)["input_ids"]
        groups = longest_first(list(map(len, sources)), args.per_device_eval_batch_size)
        return (self.collate([{"input_ids": sources[i], "labels": targets[i]} for i in group]) for group in groups)

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Translate the validation pairs and return the scores of the translations."""
        self.last.translations = self.translations("validation", model)
        return self.score("validation", self.last.translations)

    @property
    def metrics(self) -> Sequence[str]:
        return METRICS

    def score(self, split: str, translations: Sequence[str]) -> dict[str, float]:
        """Return BLEU and chrF of translations of a split; their signatures are kept in `last`."""
        scores, self.last.signatures = corpus_scores(translations, self.data.splits[split]["target"])
        return scores

    def evaluated(self, stage: str, step: int, metrics: Mapping[str, float], model: PreTrainedModel) -> None:
        """Write the translations of the validation pairs, and keep the weights if they are the best."""
        if self.last.translations is not None:
            self.write_translations(f"validation-{stage}-{step}", self.last.translations)
        self.best.keep(stage, step, metrics["bleu"], model, self.save_model)

    def final_weights(self, phase: Phase) -> Iterator[str]:
        """Load the best weights, then the mean of the last ones, where the flags ask for them; yield their names."""
        count = self.session.args.average_checkpoints
        if self.best.load(phase.stage, self.model):
            yield "best"
        if count:
            steps = self.steps(phase.number)
            load_weights(self.model, last_checkpoints(self.session.args, phase.number, steps, self.session.run))
            yield "averaged"

    def translations(self, split: str, model: PreTrainedModel) -> list[str]:
        """Return the translations of a split, on every process."""
        args = self.session.args
        return translate(
            self.session.accelerator,
            model,
            self.encoded[split],
            self.collate,
            self.tokenizer,
            args.per_device_eval_batch_size,
            args.val_max_target_length or args.max_target_length,
            num_beams=args.num_beams,
            length_penalty=args.length_penalty,
        )

    def write_translations(self, name: str, translations: Sequence[str]) -> None:
        """Write a text file, one translation per line, if there is an output folder."""
        if output := self.session.writes_to:
            lines = "".join(line.replace("\n", " ") + "\n" for line in translations)
            output.write(f"{TRANSLATIONS}/{name}.txt", lines.encode("utf-8"))

    def predict(self) -> dict[str, dict[str, float]]:
        """Translate the test split, write the translations and return their scores."""
        scores = {}
        for split in self.data.named("test"):
            translations = self.translations(split, self.model)
            scores[split] = self.score(split, translations)
            self.write_translations(split, translations)
        return scores

    def state(self) -> dict:
        """Return the best evaluation, the signatures of the metrics, and the names of frozen parameters."""
        return {
            "best": self.best.evaluation,
            "best_manifest": self.best.manifest,
            "signatures": self.last.signatures,
            "frozen": [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad],
        }

    def results(self) -> dict:
        """Return the signatures of the metrics, and the best evaluation."""
        return {"signatures": self.last.signatures, "best": self.best.evaluation}


def load_trained(args: Namespace, checkpoint: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a checkpoint, or from where the flags say."""
    remote = {"trust_remote_code": args.trust_remote_code}
    source = str(checkpoint or args.model_name_or_path)
    name = str(checkpoint or args.tokenizer_name or source)
    tokenizer = load_or_explain(AutoTokenizer, name, use_fast=not args.use_slow_tokenizer, **remote)
    options = {**backend_options(args), **remote}
    return load_or_explain(AutoModelForSeq2SeqLM, source, dtype=torch.float32, **options), tokenizer
