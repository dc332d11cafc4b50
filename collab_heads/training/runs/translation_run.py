"""One run of `run_translation.py`: how translation models are loaded, fed and measured."""

import logging
import math
import tempfile
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from collab_heads.errors import ArgumentError, OutputError
from collab_heads.folders import MANIFEST, digest
from collab_heads.training.data.batches import longest_first, token_steps
from collab_heads.training.data.classification import draw
from collab_heads.training.data.collate import Collate
from collab_heads.training.data.translation import Objective, corpus_scores, encode, num_targets, translate
from collab_heads.training.flags import swapping
from collab_heads.training.flags.translation_arguments import from_scratch
from collab_heads.training.loop.averaging import last_checkpoints, load_weights
from collab_heads.training.loop.loop import num_steps, place, weight_bytes
from collab_heads.training.runs import head_steps
from collab_heads.training.runs.continuing import lies_below
from collab_heads.training.runs.loading import load_or_explain
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.scratch import fresh
from collab_heads.training.runs.translation_model import check_fits, freeze, freeze_unsaved, set_languages
from collab_heads.training.storage.checkpoint import check_whole
from collab_heads.training.storage.output import BEST, TRANSLATIONS

logger = logging.getLogger(__name__)


class TranslationRun(Run):
    """A `Run` of translation; `data` is a `collab_heads.training.data.parallel.Corpus`."""

    name = "translation"

    def load(self):
        """Load or make tokenizer and model, and encode the data."""
        args = self.args
        self.task = self.data.name
        self.best: dict | None = self.progress.get("best")
        self.best_manifest: str | None = self.progress.get("best_manifest")  # the digest of that of the best weights
        self.last: list[str] | None = None  # translations of the validation pairs
        self.signatures: dict = self.progress.get("signatures", {})
        self.scratch = tempfile.TemporaryDirectory()  # a new vocabulary's files, until the model is saved
        self.starts_trained = not from_scratch(args)
        set_seed(args.seed)
        if self.checkpoint is None and from_scratch(args):
            self.model, self.tokenizer = fresh(args, self.data, Path(self.scratch.name))
        else:
            self.load_trained(str(self.checkpoint or args.model_name_or_path))
        set_languages(self.model, self.tokenizer, args.source_lang, args.target_lang)
        freeze_unsaved(self.model)
        if args.trainable_parameters is not None:
            freeze(self.model, args.trainable_parameters, self.progress.get("frozen"))
        self.check_model()
        self.encoded = encode(
            self.data, self.tokenizer, args.source_prefix, args.max_source_length, args.max_target_length
        )
        multiple = 8 if self.accelerator.mixed_precision != "no" else 1
        self.collate = Collate(self.model, self.tokenizer.pad_token_id, multiple)
        self.check_checkpoints()

    def load_trained(self, source: str) -> None:
        """Load a checkpoint."""
        args, remote = self.args, {"trust_remote_code": self.args.trust_remote_code}
        name = str(self.checkpoint or args.tokenizer_name or source)
        self.tokenizer = load_or_explain(AutoTokenizer, name, use_fast=not args.use_slow_tokenizer, **remote)
        backend = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
        self.model = load_or_explain(AutoModelForSeq2SeqLM, source, dtype=torch.float32, **backend, **remote)

    def check_model(self):
        """A model from scratch is collaborative already, as asked for."""
        if self.checkpoint is None and from_scratch(self.args):
            swapping.check_model(Namespace(**vars(self.args) | {"collaborative": False}), self.model)
            head_steps.check(self)
        else:
            super().check_model()
        check_fits(self.args, self.model, self.tokenizer)

    def check_checkpoints(self) -> None:
        """Check that the best weights, or as many checkpoints as are to be averaged, will be there at the end."""
        args = self.args
        if not (args.load_best_model_at_end or args.average_checkpoints):
            return
        if self.checkpoint is not None and not lies_below(self.checkpoint, self.output_dir):
            raise ArgumentError(
                f"--output_dir {self.output_dir}: --load_best_model_at_end and --average_checkpoints need what the run "
                f"left in {self.checkpoint.parent}: go on there"
            )
        if self.best is not None and not (self.output_dir / BEST / "config.json").is_file():
            raise OutputError(f"--load_best_model_at_end: {self.output_dir / BEST} is gone; {self.best} was the best")
        if self.best is not None:
            check_whole(self.output_dir / BEST)
        for phase, (_, trains) in enumerate(self.plan()):
            if not (trains and args.average_checkpoints):
                continue
            order, every = self.order(phase), args.checkpointing_steps
            steps = num_steps(args, order)
            count = (place(order, steps - 1)[0] + 1 if steps else 0) if every == "epoch" else steps // every
            if count < args.average_checkpoints:
                raise ArgumentError(
                    f"--average_checkpoints {args.average_checkpoints}: training for {steps} steps writes {count} "
                    "checkpoints: lower --checkpointing_steps"
                )

    def plan(self):
        """A model from scratch is collaborative from the start: nothing is swapped."""
        return ((False, True),) if from_scratch(self.args) else super().plan()

    def hooks(self, phase, stage):
        """Batches by tokens, and a loss with label smoothing and word dropout."""
        args, tokenizer = self.args, self.tokenizer
        special = tuple(tokenizer.all_special_ids)
        loss = Objective(args.label_smoothing, args.word_dropout, tokenizer.unk_token_id, special)
        return replace(super().hooks(phase, stage), loss=loss)

    def order(self, phase: int):
        """Epoch -> optimizer steps, of so many tokens with `--max_tokens`."""
        args, examples, multiple = self.args, self.encoded["train"], self.collate.multiple
        if not args.max_tokens:
            return super().order(phase)
        pairs = zip(examples["input_ids"], examples["labels"], strict=True)
        lengths = [math.ceil(max(map(len, pair)) / multiple) * multiple for pair in pairs]  # as they are padded
        return partial(token_steps, lengths, args.max_tokens, self.share(), args.seed + phase)

    def record_of_run(self):
        """Also which evaluation was the best, and what is frozen."""
        frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        best = {"best": self.best, "best_manifest": self.best_manifest}
        return {**super().record_of_run(), **best, "signatures": self.signatures, "frozen": frozen}

    def weight(self, batch):
        """The loss is a mean over target pieces."""
        return num_targets(batch)

    def samples(self, count, *, labels):
        """Batches of training pairs of like length, drawn by the seed."""
        drawn = draw(self.encoded["train"], count, self.args.seed)
        batches = [
            self.collate([drawn[i] for i in batch]) for batch in longest_first(list(map(len, drawn["input_ids"])), 32)
        ]
        return [{name: t for name, t in batch.items() if labels or name != "labels"} for batch in batches]

    def validation(self, *, own=False):
        """Batches of validation pairs of like length; `own`: with the model's last translations as targets."""
        args, pairs = self.args, self.encoded["validation"]
        sources, targets = pairs["input_ids"], pairs["labels"]
        if own:
            if self.last is None:  # resumed from the last checkpoint: nothing was left to train and to evaluate
                self.last = self.translations("validation")
            limit = {"truncation": True, "max_length": args.val_max_target_length or args.max_target_length}
            targets = self.tokenizer(text_target=self.last, **limit)["input_ids"]
        batches = longest_first(list(map(len, sources)), args.per_device_eval_batch_size)
        return (self.collate([{"input_ids": sources[i], "labels": targets[i]} for i in batch]) for batch in batches)

    def evaluate(self, stage, epoch=0, step=0, model=None):
        """Translate the validation pairs, score them, and keep the translations and the best weights."""
        model = model or self.model
        translations = self.last = self.translations("validation", model)
        scores, self.signatures = corpus_scores(translations, self.data.splits["validation"]["target"])
        self.record(stage, epoch, step, scores)
        if self.output_dir and self.accelerator.is_main_process:
            self.write_translations(f"validation-{stage}-{step}", translations)
        trains = stage.startswith("fine_tuned")
        best = self.best["bleu"] if self.best and self.best["stage"] == stage else -1.0  # of this phase
        if trains and self.args.load_best_model_at_end and scores["bleu"] > best:
            self.best = {"bleu": scores["bleu"], "stage": stage, "step": step}
            if self.accelerator.is_main_process:
                size = weight_bytes(model)
                self.output.write_folder(BEST, lambda folder: self.save_model(model, folder), size)
                self.best_manifest = digest(self.output_dir / BEST / MANIFEST)["sha256"]
            self.accelerator.wait_for_everyone()

    def translations(self, split: str, model=None) -> list[str]:
        """Translate a split."""
        args = self.args
        longest = args.val_max_target_length or args.max_target_length
        settings = {"num_beams": args.num_beams, "length_penalty": args.length_penalty, "max_length": longest}
        collate, size = self.collate, args.per_device_eval_batch_size
        examples = self.encoded[split]
        return translate(self.accelerator, model or self.model, examples, collate, self.tokenizer, size, **settings)

    def write_translations(self, name: str, translations) -> None:
        """A text file, a translation a line."""
        lines = "".join(line.replace("\n", " ") + "\n" for line in translations)
        self.output.write(f"{TRANSLATIONS}/{name}.txt", lines.encode("utf-8"))

    def train(self, phase, resume):
        """Also take the best or the averaged weights at the end of a phase."""
        super().train(phase, resume)
        args = self.args
        if args.load_best_model_at_end and self.best and self.best["stage"] == self.trained[-1]["stage"]:
            self.check_best()
            load_weights(self.model, [self.output_dir / BEST])
            self.evaluate("best")
        if args.average_checkpoints:
            load_weights(self.model, last_checkpoints(self.output_dir, phase, args.average_checkpoints))
            self.evaluate("averaged")

    def check_best(self) -> None:
        """Say so if the best weights are those of a run that was killed, and this one was not as good again."""
        if self.accelerator.is_main_process and self.best_manifest is not None:
            if digest(self.output_dir / BEST / MANIFEST)["sha256"] != self.best_manifest:
                logger.warning(
                    "%s is not of the evaluation %s: a run that was killed has replaced it, and this one, with other "
                    "rounding, did not come by these weights again",
                    self.output_dir / BEST,
                    self.best,
                )

    def results(self):
        """Also the signatures of the metrics, and the best evaluation."""
        return {**super().results(), "signatures": self.signatures, "best": self.best}

    def predict(self):
        """Translate the test split and score it."""
        for split in self.data.named("test"):
            translations = self.translations(split)
            scores, self.signatures = corpus_scores(translations, self.data.splits[split]["target"])
            self.record(split, 0, 0, scores)
            if self.output_dir and self.accelerator.is_main_process:
                self.write_translations(split, translations)
