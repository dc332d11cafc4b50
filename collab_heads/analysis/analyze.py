"""`analyze_heads`: all measures of a model's heads on one data set."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.chosen_sentences import Chosen, chosen_batches
from collab_heads.analysis.estimate import estimate_analysis
from collab_heads.analysis.measures.ablation import (
    Evaluate,
    ablation_curve,
    leave_one_out,
    mean_loss,
    without_heads,
)
from collab_heads.analysis.measures.passes import Observer, observe
from collab_heads.analysis.measures.sentences import (
    AttentionExamples,
    Sentences,
    rows,
    typical_sentences,
)
from collab_heads.analysis.measures.statistics import Statistics
from collab_heads.analysis.measures.worth import OF_REPORT, worth_of
from collab_heads.analysis.options import AnalysisOptions, Part
from collab_heads.analysis.relevance.contribution_comparison import (
    check_vocabularies,
    compare_contributions,
    named_models,
)
from collab_heads.analysis.relevance.head_relevance import head_relevance
from collab_heads.analysis.relevance.sides import sides_of
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.report.measurements import IMPORTANCE
from collab_heads.analysis.report.savings import cheapest
from collab_heads.analysis.roles.head_roles import excluded_queries, rare_observer, syntax_observer
from collab_heads.analysis.roles.labels import RoleThresholds, roles_from_measures
from collab_heads.analysis.roles.positional import Positional
from collab_heads.analysis.roles.syntax import Syntax
from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.estimates import say, work
from collab_heads.base.numerics import keeping_threads
from collab_heads.base.option_values import PrefixKind
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.base.report import portable_name
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter, head_numbers
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.files.conllu import Sentence
from collab_heads.heads.criteria import Gradient, Reconstruction, head_importance
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.history import HeadHistory
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import warn_few
from collab_heads.running.threads import choose_threads
from collab_heads.sites.record import CollabConfig

Result = TypeVar("Result")
THIS_MODEL = "this model"
KINDS_OF_INPUT = {"pixel_values": "image", "input_features": "recording", "input_values": "recording"}
PHASES = (
    ("looking at heads", 4),
    ("looking at examples", 0.2),
    ("finding dependencies", 2),
    ("finding readers", 0.2),
    ("measuring vectors", 2),
    ("propagating relevance", 4),
    ("measuring heads", 2),
    ("measuring the stream", 2),
    ("measuring contributions", 8),
    ("leaving heads out", 16),
    ("removing heads", 4),
)


@checking_arguments
@one_bar("analyze_heads", PHASES)
def analyze_heads(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    parts: Part | Iterable[Part] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    treebank: Treebank | str | Path | Sequence[Sentence] | None = None,
    exclude: Iterable[int] | None = None,
    token_counts: Tensor | None = None,
    thresholds: RoleThresholds | None = None,
    evaluate: Evaluate | None = None,
    metric: str = "loss",
    higher_is_better: bool = False,
    num_examples: int = 3,
    sentences: Iterable[Chosen] = (),
    contribution_sentences: int = 64,
    prefixes: PrefixKind | Sequence[PrefixKind] = "reference",
    compare_with: Mapping[str, PreTrainedModel | str | Path] | Sequence[str | Path] = (),
    gate_history: HeadHistory | None = None,
    data: str = "given batches",
) -> HeadReport:
    """Measure what the heads of a model do, and how much they matter.

    Confidence, entropy, distance, similarity, positions, rare tokens and examples share one pass without gradients.
    Relevance and gradient importance take one pass with gradients each, the cost of removal and the vectors that heads
    write one without, dependencies one pass over the treebank.
    Contributions take a backward pass per position, on some of the sentences; the ablation takes an evaluation per
    head. Memory does not grow with the number of batches.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertForSequenceClassification(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25), "labels": torch.arange(8) % 2}]
        >>> report = analyze_heads(model, batches, parts=["statistics", "gradient"], exclude=[])
        >>> report.statistics.confidence["encoder.layer.0.attention.self"].shape  # (H,)
        torch.Size([4])

    Args:
        model: a supported transformers model, original or collaborative, gated, mixed, pruned; it is left as it was.
        batches: input dicts as the model takes them, in a list or another object that can be read again. Gradient
            importance and the loss need labels; encoder-decoders need labels or decoder inputs in every batch.
        parts: some of "statistics", "roles", "worth" (norms of values, value zeroing, shares of the stream, see
            `head_worth`), "relevance", "gradient", "reconstruction" (what removal costs, see `head_importance`),
            "contributions", "ablation". None measures all that model and data allow; the ablation, which takes an
            evaluation per head, only if `evaluate` is given.
        tokenizer: the model's tokenizer; needed for a treebank, and for examples that show tokens instead of ids.
        treebank: a CoNLL-U file, its sentences, or a `Treebank`, for syntactic heads of encoders.
        exclude: ids of tokens that do not count as queries; None excludes the tokens that end a sentence.
        token_counts: [V], the number of times each token occurs in your corpus, for rare tokens; None counts the tokens
            of `batches`.
        thresholds: the shares, and the amount of data, that a head needs for a role; None for the defaults of
            `RoleThresholds`.
        evaluate: model -> the task's metric, for the ablation; None for the mean loss on `batches`.
        metric: the name of what `evaluate` measures.
        higher_is_better: whether a higher metric is better.
        num_examples: number of sentences whose attention maps are kept; their lengths are typical: the quartiles for
            three.
        sentences: sentences of your choice whose attention maps are kept, before the others: texts, pairs (text,
            translation) of an encoder-decoder or (text, text) of a classifier of pairs, or input dicts. Texts longer
            than the model reads, or than 512 tokens, are shown in pieces. They count in no measure.
        contribution_sentences: number of sentences, evenly spread over the batches, for the contributions of source
            and target (or of prompt and continuation, for a decoder whose labels are -100 for the prompt).
        prefixes: what the decoder reads while contributions are measured, one kind or several: "reference" (as in the
            batches), "own", "random"; see `token_contributions`.
        compare_with: other models, or the checkpoints of a training in order, as `compare_contributions` takes them.
            Their contributions are measured on the same sentences and stand before this model's in the report.
        gate_history: a history of a training with "gates", to show in the report.
        data: a description of the batches, for the report.

    Returns:
        The report; `print` it for a summary, `.to_string()` has a row per head, `.save_html("report.html")` a page.

    Raises:
        ArgumentError: on an unknown part, a count that is too small, batches that can be read only once, a treebank or
            texts as sentences without a tokenizer, sentences that the model cannot read, or contributions of a model or
            data without a source.
        CalibrationError: if there are no batches, the model cannot take one, or no token counted at a site.
        DataError: if the treebank is missing or broken.
        NonFiniteError: if a number is NaN or inf; the message names the site.
        ModelStateError: if the model has no heads left.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.
    """
    given = locals()  # the signature lists the options, and `AnalysisOptions` checks them: no third list
    check_wrapper(model)
    options = AnalysisOptions(**{each.name: given[each.name] for each in fields(AnalysisOptions)})
    adapter = get_adapter(model)
    if not adapter.sites_with_heads(model):
        raise ModelStateError(f"this {type(model).__name__} has no heads left to analyze")
    with work("analyze"), keeping_threads():
        report = Analysis(model, adapter, Sentences(batches), options).report()
    warn_few([report.data["sentences"]])
    return report


class Analysis:
    """One run of `analyze_heads`: its settings and the results so far.

    Attributes:
        parts: the parts to measure.
        first: the first batch.
        chosen: the inputs of the sentences of the user's choice.
        excluded: ids of tokens that do not count as queries.
        results: field of the report -> its value.
        seconds: part -> seconds it took.
        notes: notes for the reader of the report.
    """

    def __init__(self, model: PreTrainedModel, adapter: AttentionAdapter, batches: Sentences, options: AnalysisOptions):
        self.model, self.adapter, self.batches, self.options = model, adapter, batches, options
        self.sites, self.numbers = adapter.sites_with_heads(model), head_numbers(model, adapter)
        self.excluded = excluded_queries(model, options.exclude, options.tokenizer)
        sides, first = sides_of(model, adapter), next(iter(batches))
        has_source = sides is not None and sides.in_batch(first)
        given = {name for name, value in first.items() if value is not None}  # of questions, where answers begin
        has_labels = bool({"labels", "start_positions"} & given or first.get("return_loss"))  # CLIP's pairs are labels
        self.first = first
        self.parts, self.notes = options.choose(has_labels, has_source)
        self.chosen, shown = chosen_batches(model, options.tokenizer, tuple(options.sentences))
        self.notes += shown
        if "contributions" not in self.parts and (options.compare_with or options.prefixes != "reference"):
            self.notes.append("prefixes and other models were not looked at: contributions were not measured")
        if "roles" not in self.parts and options.treebank is not None:
            self.notes.append("the treebank was not looked at: roles were not measured")
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def report(self) -> HeadReport:
        syntax, options = None, self.options
        choose_threads(self.model, self.first)
        is_known = not (options.treebank or options.compare_with) and options.prefixes == "reference"
        if is_known and isinstance(self.batches.batches, Sequence):  # others may not fit in memory
            say(lambda: estimate_analysis(self.model, [*self.batches], self.parts, options.contribution_sentences))
        if "contributions" in self.parts:
            check_vocabularies(self.compared())
        if "roles" in self.parts:  # a broken treebank shows before anything is measured
            syntax = syntax_observer(self.model, self.adapter, options.treebank, options.tokenizer)
        if "statistics" in self.parts or "roles" in self.parts:
            self.observe(syntax)
        if self.chosen:
            self.see_chosen()
        if "worth" in self.parts:
            self.measure("worth", worth_of, self.batches, names=OF_REPORT, exclude=self.excluded)
        if "relevance" in self.parts:
            self.measure("relevance", head_relevance, self.batches, exclude=self.excluded)
        if "gradient" in self.parts:
            self.measure("gradient", head_importance, self.batches, criterion=Gradient(normalize=False))
            gradient = self.results["gradient"]
            self.results["gradient"] = {path: values.double() for path, values in gradient.items()}
        if "reconstruction" in self.parts:
            self.reconstruct()
        if "contributions" in self.parts:
            self.contribute()
        report = self.measured()
        return self.ablate(report) if "ablation" in self.parts else report

    def timed(self, part: str, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        begin = time.perf_counter()
        result = function(*args, **options)
        self.seconds[part] = time.perf_counter() - begin
        return result

    def measure(self, part: Part, function: Callable, batches: Iterable[Mapping], **options: Any) -> None:
        self.results[part] = self.timed(part, function, self.model, batches, **options)

    def reconstruct(self) -> None:
        """Measure what removal costs; a model that does not allow it gets a note, unless the part was requested."""
        try:
            criterion = Reconstruction()
            self.measure("reconstruction", head_importance, self.batches, criterion=criterion)
        except (ArgumentError, ModelStateError, UnsupportedModelError) as problem:
            if self.options.parts is not None:
                raise
            self.notes.append(f"the cost of removal was not measured: {problem}")
            return
        self.results["reconstruction"] = {path: each.double() for path, each in self.results["reconstruction"].items()}
        self.results["reconstruction_of_stream"] = criterion.are_of_stream

    def compared(self) -> dict[str, PreTrainedModel | str | Path]:
        """Return name -> model, of those whose contributions are measured; this one is the last."""
        others = named_models(self.options.compare_with) if self.options.compare_with else {}
        return {**others, THIS_MODEL: self.model}

    def contribute(self) -> None:
        options = self.options
        sentences = list(self.batches.spread(options.contribution_sentences))
        whole = self.timed(
            "contributions",
            compare_contributions,
            self.compared(),
            sentences,
            prefixes=options.prefixes,
            exclude=self.excluded,
            keep_relevance=True,
        )
        mine = next(run for name, run in whole.runs if name == THIS_MODEL)
        self.results["contribution_example"] = mine.typical(options.tokenizer)
        self.results["contributions"] = mine.without_relevance()
        if len(whole.runs) > 1:
            self.results["compared_contributions"] = whole.without_relevance()

    def observe(self, syntax: Syntax | None) -> None:
        """Run one pass for all measures that need no gradient, and one over the treebank, if there is one."""
        model, options = self.model, self.options
        backends = {m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
        if other := ", ".join(sorted(backends - {"eager"})):
            self.notes.append(f"attention weights were read with the eager backend; the model itself uses {other}")
        chosen = typical_sentences(model, self.batches, options.num_examples)
        statistics, examples = Statistics(), AttentionExamples(chosen, options.tokenizer, first_read(model))
        observers: list[Observer] = [statistics, examples]
        positional = rare = None
        if "roles" in self.parts:
            positional = Positional()
            rare = rare_observer(
                model,
                self.adapter,
                self.batches,
                tokenizer=options.tokenizer,
                token_counts=options.token_counts,
                exclude=self.excluded,
            )
            observers += [each for each in (positional, rare) if each is not None]
        self.pass_over("forward", self.batches, observers, "looking at heads")
        self.results["statistics"] = statistics.results(model, self.adapter, self.excluded)
        self.results["examples"] = tuple(examples.kept)
        if syntax is not None:
            self.pass_over("syntax", syntax.treebank, [syntax], "finding dependencies")
        if "roles" in self.parts:
            self.results["roles"] = roles_from_measures(
                self.sites,
                self.numbers,
                positional=positional,
                rare=rare,
                syntax=syntax,
                thresholds=options.thresholds,
            )
            roles = self.results["roles"]
            self.notes += [*roles.read(), *roles.habits(), *roles.warnings]

    def see_chosen(self) -> None:
        """Keep the attention maps of the sentences of the user's choice, before the others."""
        places = [(index, row) for index, inputs in enumerate(self.chosen) for row in range(rows(inputs))]
        examples = AttentionExamples(places, self.options.tokenizer, first_read(self.model))
        self.pass_over("examples", self.chosen, [examples], "looking at examples")
        chosen = [replace(each, chosen=True) for each in examples.kept]
        self.results["examples"] = (*chosen, *self.results.get("examples", ()))

    def pass_over(self, part: str, batches: Iterable[Mapping], observers: Sequence[Observer], what: str) -> None:
        self.timed(part, observe, self.model, batches, observers, exclude=self.excluded, what=what)

    def measured(self) -> HeadReport:
        model, states = self.model, CollabConfig.on(self.model).sites
        statistics, contributions = self.results.get("statistics"), self.results.get("contributions")
        tokens = {} if statistics is None else {s.role: statistics.tokens[s.path] for s in self.sites}
        source = portable_name(getattr(model.config, "_name_or_path", None) or "")
        return HeadReport(
            model=f"{type(model).__name__}{f' of {source}' if source else ''}",
            model_type=model.config.model_type,
            sites=tuple(self.sites),
            heads={site.path: self.numbers[site.path] for site in self.sites},
            totals={
                site.path: states[site.path].num_heads if site.path in states else site.num_heads
                for site in self.adapter.sites(model)
            },
            data={
                "name": self.options.data,
                "sentences": self.batches.count,
                "kind": KINDS_OF_INPUT.get(model.main_input_name, "sentence"),
                "query_tokens": tokens,
                "contribution_sentences": 0 if contributions is None else int(contributions.counts.max()),
            },
            gates={
                site.path: gates.open_probability().detach().double().cpu()
                for site, gates in gated_sites(model, self.adapter)
            },
            gate_history=self.options.gate_history,
            seconds=self.seconds,
            notes=tuple(self.notes),
            **self.results,
        )

    def ablate(self, report: HeadReport) -> HeadReport:
        options = self.options
        evaluate = options.evaluate or (lambda model: mean_loss(model, self.batches))
        ablation = self.timed(
            "ablation",
            leave_one_out,
            self.model,
            evaluate,
            metric=options.metric,
            higher_is_better=options.higher_is_better,
        )
        report = replace(report, ablation=ablation)
        if (cheap := cheapest(report)) is not None and cheap.heads:
            with without_heads(self.model, cheap.by_path()):
                report = replace(report, without_cheapest=float(self.timed("cheapest", evaluate, self.model)))
        return replace(report, curves=self.timed("curves", self.curves, report, evaluate))

    def curves(self, report: HeadReport, evaluate: Evaluate) -> dict[str, list[tuple[int, float]]]:
        metric = self.options.metric
        every, paths = report.scores(), {site.path for site in self.sites}
        scores = {name: every[name] for name in (*IMPORTANCE, "leave_one_out") if every.get(name, {}).keys() >= paths}
        with progress_bar(scores.items(), desc="removing heads") as ranked:
            return {name: ablation_curve(self.model, evaluate, each, metric=metric) for name, each in ranked}


def first_read(model: PreTrainedModel) -> int | None:
    """Return the id of the token that a decoder reads first, if the config names it."""
    return getattr(model.config, "decoder_start_token_id", None)
