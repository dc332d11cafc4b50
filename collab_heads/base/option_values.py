"""The values that string options can take, in a light module: the command line is parsed without importing torch."""

from typing import Literal, get_args

# The names of the field's papers (Voita et al. 2019, arXiv:1905.09418).
Role = Literal["enc-self", "dec-self", "dec-enc"]
ROLES: tuple[Role, ...] = get_args(Role)
FeedForwardRole = Literal["enc-ffn", "dec-ffn"]  # of feed-forward blocks
FEED_FORWARD_ROLES: tuple[FeedForwardRole, ...] = get_args(FeedForwardRole)
TableRole = Literal["embedding", "linear"]  # of tables, which have nothing but their bits to be changed

Allocation = Literal["uniform", "balanced"]  # of widths to sites
ALLOCATIONS: tuple[Allocation, ...] = get_args(Allocation)

LossKind = Literal["mean", "sum"]  # over the target tokens: the loss that the growth of alphas is added to
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)

CRITERION_WORDS = ("gradient", "reconstruction", "random")  # what heads are ranked by: the table in heads/criteria.py

Policy = Literal["hard", "soft", "local", "random"]  # which heads change places
POLICY_WORDS: tuple[Policy, ...] = get_args(Policy)

Metric = Literal["confidence", "output_distance", "map_distance", "base", "wasserstein", "l2", "pairwise"]
METRIC_WORDS: tuple[Metric, ...] = get_args(Metric)  # what heads are ranked by

SitePart = Literal["heads", "query_key", "values", "neurons"]  # what of a site can become smaller
REFINE_STEPS = 120  # Adam steps that fit a query/key projection
SITE_PARTS: tuple[SitePart, ...] = get_args(SitePart)

BITS = (3, 4, 8)  # of weights on a grid

Measure = Literal["parameters", "bytes", "operations", "cache", "time"]  # what a budget is of
MEASURES: tuple[Measure, ...] = get_args(Measure)

Engine = Literal["torch", "onnxruntime", "openvino"]  # where a budget of time is measured
ENGINE_WORDS: tuple[Engine, ...] = get_args(Engine)

# which sizes `compress` may give to different sites
ModelShape = Literal["even", "free", "ctranslate2", "gguf", "uniform"]
MODEL_SHAPES: tuple[ModelShape, ...] = get_args(ModelShape)

ExportTarget = Literal["onnx", "transformers.js", "openvino", "executorch", "ctranslate2", "gguf", "transformers"]
EXPORT_TARGETS: tuple[ExportTarget, ...] = get_args(ExportTarget)
# target -> the shape that a model must have to be exported there whatever it is; others take every shape
SHAPE_OF_TARGET: dict[ExportTarget, ModelShape] = {
    "ctranslate2": "ctranslate2",
    "gguf": "gguf",
    "transformers": "uniform",
}
LAYERED: ExportTarget = "transformers"  # whose configs can give every layer sizes of its own

ReportPart = Literal[
    "statistics", "roles", "worth", "relevance", "gradient", "reconstruction", "contributions", "ablation"
]
REPORT_PARTS: tuple[ReportPart, ...] = get_args(ReportPart)

PrefixKind = Literal["reference", "own", "random"]  # what a decoder has read when a token's contributions are measured
PREFIX_KINDS: tuple[PrefixKind, ...] = get_args(PrefixKind)

EvaluationTask = Literal["similarity", "classification", "regression", "translation", "perplexity", "retrieval"]
EVALUATION_TASKS: tuple[EvaluationTask, ...] = get_args(EvaluationTask)
