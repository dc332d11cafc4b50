"""analyze_heads: everything that can be seen of the heads of a model, on one data set."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.measures.ablation import Evaluate, ablation_curve, leave_one_out, mean_loss
from collab_heads.analysis.measures.examples import Examples
from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.measures.passes import observe
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.analysis.measures.statistics import Statistics
from collab_heads.analysis.relevance.contributions import token_contributions
from collab_heads.analysis.relevance.head_relevance import head_relevance
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.report.measurements import IMPORTANCE
from collab_heads.analysis.roles.head_roles import ended, rare_observer, syntax_observer
from collab_heads.analysis.roles.labels import RoleThresholds, roles_from_measures
from collab_heads.analysis.roles.positional import Positional
from collab_heads.analysis.treebank.conllu import Sentence
from collab_heads.analysis.treebank.treebank_batches import Treebank
from collab_heads.checks import check_choice, check_count
from collab_heads.errors import ArgumentError, SwapError
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.importance import head_importance
from collab_heads.model.refusals import check_wrapper
from collab_heads.registry import AttentionAdapter, get_adapter, head_numbers
from collab_heads.state import CollabConfig
from collab_heads.text import portable_name

PARTS = ("statistics", "roles", "relevance", "gradient", "contributions", "ablation")
NO_SOURCE = "only encoder-decoders have a source and a target to tell apart"


def analyze_heads(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    parts: Iterable[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    treebank: Treebank | str | Path | Sequence[Sentence] | None = None,
    exclude: Iterable[int] | None = None,
    token_counts: Tensor | None = None,
    thresholds: RoleThresholds | None = None,
    evaluate: Evaluate | None = None,
    metric: str = "loss",
    higher_is_better: bool = False,
    num_examples: int = 1,
    contribution_sentences: int = 64,
    gate_history: GateHistory | None = None,
    data: str = "given batches",
) -> HeadReport:
    """Measure what the heads of a model do, and how much they matter.

    One pass without gradients for confidence, entropy, distance, similarity, positions, rare tokens and examples; one
    with gradients for relevance and one for gradient importance; one over the treebank for dependencies; a backward
    pass per position for contributions, on some sentences; an evaluation per head for the ablation. Memory does not
    grow with the number of batches.

    Args:
        model: a supported transformers model, original or collaborative, gated, mixed, pruned; it is left as it was.
        batches: input dicts as the model takes them, in a list or another object that can be read again. Labels are
            needed for gradient importance and the loss, and encoder-decoders need them or decoder inputs throughout.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        parts: some of "statistics", "roles", "relevance", "gradient", "contributions", "ablation"; None for all that
            model and data allow, without the ablation, which takes an evaluation per head.
        tokenizer: the model's; needed for a treebank, and for examples with tokens instead of ids.
        treebank: a CoNLL-U file, its sentences, or a `Treebank`, for syntactic heads of encoders.
        exclude: ids of tokens that do not count as queries; None for the ends of sentences.
        token_counts: [V], how often every token is in your corpus, for rare tokens; None counts those of `batches`.
        thresholds: from when on a head has a role; None for the paper's.
        evaluate: model -> the task's metric, for the ablation; None for the mean loss on `batches`.
        metric: what it is called.
        higher_is_better: whether a higher metric is a better one.
        num_examples: sentences whose attention maps are kept, the first ones of the data.
        contribution_sentences: how many sentences contributions of source and target are measured on, the first ones.
        gate_history: gates over training, to be shown beside.
        data: what the batches are, for the report.

    Returns:
        The report; `print` it, or `.save_html("report.html")`.

    Raises:
        ArgumentError: on an unknown part, a count that cannot be, batches that can be read only once, a treebank
            without a tokenizer.
        CalibrationError: if there are no batches, the model cannot take one, or no token counted at a site.
        DataError: if the treebank is missing or broken.
        NonFiniteError: if a number is NaN or inf; the site is named.
        SwapError: if the model has no heads left.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.
    """
    check_wrapper(model)
    check_count("num_examples", num_examples)
    check_count("contribution_sentences", contribution_sentences, least=1)
    adapter = get_adapter(model, adapter)
    if not adapter.sites_with_heads(model):
        raise SwapError(f"this {type(model).__name__} has no heads left to analyze")
    analysis = Analysis(model, adapter, Sentences(batches), ended(model, exclude, tokenizer))
    chosen = analysis.choose(parts, evaluate)
    syntax = syntax_observer(model, adapter, treebank, tokenizer) if "roles" in chosen else None
    if "statistics" in chosen or "roles" in chosen:
        examples = Examples(num_examples, tokenizer, getattr(model.config, "decoder_start_token_id", None))
        analysis.look(chosen, examples, tokenizer, token_counts, syntax, thresholds)
    if "relevance" in chosen:
        analysis.measure("relevance", head_relevance, exclude=analysis.exclude)
    if "gradient" in chosen:
        analysis.measure("gradient", head_importance, normalize=False)
    if "contributions" in chosen:
        analysis.measure("contributions", token_contributions, contribution_sentences, exclude=analysis.exclude)
    report = analysis.report(data, gate_history)
    if "ablation" not in chosen:
        return report
    return analysis.ablate(report, evaluate or (lambda m: mean_loss(m, analysis.batches)), metric, higher_is_better)


class Analysis:
    """What the parts of an analysis share.

    Attributes:
        found: part -> its result.
        seconds: part -> how long it took.
        notes: what a reader must know.
    """

    def __init__(self, model: PreTrainedModel, adapter: AttentionAdapter, batches: Sentences, exclude: tuple[int, ...]):
        self.model, self.adapter, self.batches, self.exclude = model, adapter, batches, exclude
        self.sites, self.numbers = adapter.sites_with_heads(model), head_numbers(model, adapter)
        self.found: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    def choose(self, parts: Iterable[str] | None, evaluate: Evaluate | None) -> list[str]:
        """The parts to measure: those asked for, or all that model and data allow."""
        asked = None if parts is None else [parts] if isinstance(parts, str) else list(parts)
        for part in asked or ():
            check_choice("part", part, PARTS)
        if asked == []:
            raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}")
        has_labels = next(iter(self.batches)).get("labels") is not None
        lacks = {
            "gradient": "" if has_labels else "gradient importance was not measured: the batches have no labels",
            "contributions": "" if self.model.config.is_encoder_decoder else NO_SOURCE,
            "ablation": "" if evaluate or asked else "heads were not left out: pass evaluate, or ask for the ablation",
        }
        if asked is not None:
            if "contributions" in asked and lacks["contributions"]:
                raise ArgumentError(f"part 'contributions': {NO_SOURCE}")
            return asked
        self.notes += [why for part, why in lacks.items() if why and part != "contributions"]
        return [part for part in PARTS if not lacks.get(part)]

    def timed(self, part: str, function: Callable[[], Any]) -> Any:
        """Call a function, and note how long it takes."""
        start = time.perf_counter()
        result = function()
        self.seconds[part] = time.perf_counter() - start
        return result

    def measure(self, part: str, function: Callable, sentences: int | None = None, **options) -> None:
        """Measure a part that makes passes of its own, on all or on the first sentences."""
        batches = self.batches if sentences is None else self.batches.first(sentences)
        self.found[part] = self.timed(part, lambda: function(self.model, batches, self.adapter, **options))

    def look(self, chosen, examples, tokenizer, token_counts, syntax, thresholds) -> None:
        """One pass for all that needs no gradient, and one over the treebank."""
        common = {"adapter": self.adapter, "exclude": self.exclude}
        backends = {m.config._attn_implementation for m in self.model.modules() if isinstance(m, PreTrainedModel)}
        if other := ", ".join(sorted(backends - {"eager"})):
            self.notes.append(f"attention weights were read with the eager backend; the model itself uses {other}")
        statistics, positional, rare = Statistics(), None, None
        if "roles" in chosen:
            options = {"tokenizer": tokenizer, "token_counts": token_counts, "exclude": self.exclude}
            positional, rare = Positional(), rare_observer(self.model, self.adapter, self.batches, **options)
        observers = [each for each in (statistics, examples, positional, rare) if each is not None]
        self.timed("forward", lambda: observe(self.model, self.batches, observers, **common, what="looking at heads"))
        self.found |= {"statistics": statistics.results(self.model, self.adapter, self.exclude)}
        self.found |= {"examples": tuple(examples.found)}
        if "roles" in chosen:
            if syntax is not None:
                bank = syntax.treebank
                self.timed("syntax", lambda: observe(self.model, bank, [syntax], **common, what="finding dependencies"))
            kinds = {"positional": positional, "rare": rare, "syntax": syntax, "thresholds": thresholds}
            self.found["roles"] = roles_from_measures(self.sites, self.numbers, **kinds)

    def report(self, data: str, gate_history: GateHistory | None) -> HeadReport:
        """What was found so far."""
        model, states = self.model, CollabConfig.of(self.model.config).sites
        statistics, contributions = self.found.get("statistics"), self.found.get("contributions")
        if gradient := self.found.get("gradient"):
            self.found["gradient"] = {path: values.double() for path, values in gradient.items()}
        tokens = {} if statistics is None else {s.role: statistics.tokens[s.path] for s in self.sites}
        measured_on = {"name": data, "sentences": self.batches.count, "query_tokens": tokens}
        measured_on["contribution_sentences"] = 0 if contributions is None else int(contributions.counts.max())
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
            data=measured_on,
            gates={
                site.path: gates.open_probability().detach().double().cpu()
                for site, gates in gated_sites(model, self.adapter)
            },
            gate_history=gate_history,
            seconds=self.seconds,
            notes=tuple(self.notes),
            **self.found,
        )

    def ablate(self, report: HeadReport, evaluate: Evaluate, metric: str, higher_is_better: bool) -> HeadReport:
        """Add the ablation, and a curve for every measure of importance."""
        common = self.model, evaluate
        options = {"metric": metric, "higher_is_better": higher_is_better}
        left_out = self.timed("ablation", lambda: leave_one_out(*common, self.adapter, **options))
        report = replace(report, ablation=left_out)
        scores = {name: values for name, values in report.scores().items() if name in (*IMPORTANCE, "leave_one_out")}
        curves = self.timed(
            "curves",
            lambda: {n: ablation_curve(*common, s, self.adapter, metric=metric) for n, s in scores.items()},
        )
        return replace(report, curves=curves)
