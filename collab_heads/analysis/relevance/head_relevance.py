"""The contribution of every head to a model's output: layer-wise relevance propagation to the outputs of heads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.measures.passes import check_exclude, end_tokens
from collab_heads.analysis.relevance.backward import explain_batches, leaf
from collab_heads.analysis.relevance.sides import checked_target_values, top_logits
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.report import Cell, Report
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.heads.criteria import broken_site
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.refusals import check_wrapper
from collab_heads.sites.site import AttentionSite

RelevanceTarget = Callable[[ModelOutput, Mapping], Tensor]


@dataclass(frozen=True, eq=False)
class HeadRelevance(Report):
    """The result of `head_relevance`; tensors are float64 on the CPU.

    Attributes:
        sites: the sites that have heads, in model order.
        relevance: path -> [H], the share of each head in the relevance of its layer, 0 or more. The sum is 1, or less
            if all heads of the layer have relevance 0 in some sentences.
        signed: path -> [H], the mean relevance itself over sentences, and over the layers of a module that serves
            several, in units of the target. A head with a negative one speaks against the model's output.
        explained: the mean over sentences of the target, summed over its positions.
        sentences: number of sentences.
        positions: number of explained positions, of all sentences.
        excluded: ids of the tokens that did not count as positions.
    """

    sites: tuple[AttentionSite, ...]
    relevance: Mapping[str, Tensor]
    signed: Mapping[str, Tensor]
    explained: float
    sentences: int
    positions: int
    excluded: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, HeadRelevance) else NotImplemented

    def columns(self) -> dict[str, Cell]:
        def strongest(site: AttentionSite) -> str:
            shares = self.relevance[site.path]
            order = shares.argsort(descending=True, stable=True).tolist()
            return ", ".join(f"{head} ({shares[head]:.2f})" for head in order[:3])

        return {
            "site": "{.path}",
            "role": "{.role}",
            "heads": "{.heads_in_words}",
            "strongest heads (share)": strongest,
            "weakest": lambda site: f"{self.relevance[site.path].min():.3f}",
            "relevance of all": lambda site: f"{float(self.signed[site.path].sum()):.3f}",
        }

    def closing(self) -> str:
        said = f"{self.explained:.3f} is explained per sentence: means of {self.sentences} sentences"
        return f"{said}, {self.positions} positions"


class RunningRelevance:
    """Sums over sentences of the relevance of a site's heads, in float64 on the CPU.

    Attributes:
        count: number of sentences seen, in every layer that the module serves.
        shares: [H], sum of the normalised relevances.
        signed: [H], sum of the relevances themselves.
    """

    def __init__(self):
        self.count = 0
        self.shares = self.signed = torch.zeros((), dtype=torch.float64)

    def add(self, relevance: Tensor) -> None:
        sizes = relevance.abs()
        whole = sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)  # all are 0: no shares
        self.count += len(relevance)
        self.shares = self.shares + (sizes / whole).sum(0)
        self.signed = self.signed + relevance.sum(0)


@checking_arguments
def head_relevance(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    exclude: Iterable[int] | None = None,
    target: RelevanceTarget | None = None,
) -> HeadRelevance:
    """Measure how much every head contributes to the top-1 logits, by conservative relevance propagation.

    This takes one forward and one backward pass per batch, with the model's own attention backend; memory does not grow
    with the number of batches. The relevance of a head in a sentence is its output (as it enters the output projection,
    before gates and alphas) times the gradient, summed over tokens and neurons, with the graph of `conservative`. In
    every layer, heads, residual stream and biases together sum to what is explained. Per sentence, absolute values are
    divided by their sum over the heads of the layer; all sentences count the same.

    If a sentence has several positions (translation), the sum of their logits is explained: the graph is linear, so the
    relevances of positions add up. Voita et al. normalise at every position instead, which takes a backward pass each.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> relevance = head_relevance(model, batches, exclude=[])
        >>> relevance.relevance["encoder.layer.0.attention.self"].shape  # (H,)
        torch.Size([4])

    Args:
        model: a supported transformers model, original or collaborative, gated, mixed, pruned; it runs in evaluation
            mode and is left as it was. In half precision the gradients are coarse, too; `model.float()` makes them
            exact.
        batches: input dicts as the model takes them; any iterable, read once. Encoder-decoders need labels or decoder
            inputs: of a reference, or of the model's own translation, `model.generate(...)[:, :-1]`.
        exclude: ids of tokens that are not positions to explain, instead of `eos_token_id` and `sep_token_id` of the
            config and the generation config; for models that predict something at every token.
        target: what to explain instead of `top_logits`: a function of the outputs and the inputs of a batch that
            returns one number per sentence [B] or per position [B, P], which depends on the outputs.

    Returns:
        The relevance of every site that has heads; `print` it.

    Raises:
        ArgumentError: if `exclude` holds anything but token ids, the target has another shape, or the outputs need a
            target.
        CalibrationError: if there are no batches, the model cannot take one (the message holds its index), a mask does
            not fit, no position counted, or a site was not reached.
        NonFiniteError: if a relevance is NaN or inf; the message names the site whose weights are to blame.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or a norm has no rule.

    Source: Ali et al. 2022, arXiv:2202.07304; of heads: Voita et al. 2019, arXiv:1905.09418, section 4.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    excluded = end_tokens(model) if exclude is None else check_exclude(exclude)
    sites = adapter.sites_with_heads(model)
    side = "encoder" if all(site.role == "enc-self" for site in adapter.sites(model)) else "decoder"
    sums = {site.path: RunningRelevance() for site in sites}
    outputs_of_heads: list[tuple[AttentionSite, Tensor]] = []  # of the batch under way, in the order of the calls
    explained_by_batch: list[tuple[float, int, int]] = []  # what was explained, sentences, positions

    def listen(site: AttentionSite):
        def hook(projection, inputs):
            concatenated = leaf(inputs[0])  # (B, T, H * d_v)
            outputs_of_heads.append((site, concatenated))
            return concatenated, *inputs[1:]

        return hook

    def see(inputs: Mapping, outputs: ModelOutput) -> None:
        if target is None:
            values, counts = top_logits(model, outputs, inputs, excluded, side)
        else:
            values, counts = checked_target_values(target(outputs, inputs), model)
        values, kept = values.masked_fill(~counts, 0.0), counts.any(-1).cpu()
        for site, relevance in propagate(values, outputs_of_heads):
            sums[site.path].add(relevance[kept])
        explained_by_batch.append((float(values.detach().cpu().double().sum()), int(kept.sum()), int(counts.sum())))
        outputs_of_heads.clear()

    handles = [adapter.output_projection(model, site).register_forward_pre_hook(listen(site)) for site in sites]
    try:
        explain_batches(model, adapter, batches, see)
    finally:
        for handle in handles:
            handle.remove()
    explained, sentences, positions = map(sum, zip(*explained_by_batch, strict=True))
    if not sentences:
        raise CalibrationError(
            f"no position counted: every one was padding or one of the excluded ids {list(excluded)}"
        )
    check_sums(model, adapter, sites, sums)
    return HeadRelevance(
        sites=tuple(sites),
        relevance={path: running.shares / running.count for path, running in sums.items()},
        signed={path: running.signed / running.count for path, running in sums.items()},
        explained=explained / sentences,
        sentences=sentences,
        positions=positions,
        excluded=excluded,
    )


def check_sums(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    sites: list[AttentionSite],
    sums: Mapping[str, RunningRelevance],
) -> None:
    for path, running in sums.items():
        if not running.count:
            raise CalibrationError(f"{path} was not reached by any batch")
        if not torch.isfinite(running.signed).all():
            path = broken_site(OpenLayers.of(model, adapter).with_heads) or path
            raise NonFiniteError(f"{path}: the relevance of its heads is NaN or inf; look at its weights and inputs")


def propagate(
    values: Tensor, concatenated_heads: Iterable[tuple[AttentionSite, Tensor]]
) -> list[tuple[AttentionSite, Tensor]]:
    """Run one backward pass and return the relevance of heads.

    Args:
        values: [B, P], the values to explain.
        concatenated_heads: sites and their concatenated heads [N, T, H * d_v], where N is B, or B times the number of
            choices.

    Returns:
        The sites, in the same order, with the relevance of their heads per sentence: [B, H], float64 on the CPU.
    """
    states = [concatenated for _, concatenated in concatenated_heads]
    if not states:
        return []
    if not values.requires_grad:
        raise ArgumentError("what is to be explained does not depend on the output of any head")
    # the values need not depend on every layer
    gradients = torch.autograd.grad(values.sum(), states, allow_unused=True, materialize_grads=True)
    by_site = []
    for (site, state), gradient in zip(concatenated_heads, gradients, strict=True):
        product = state.detach() * gradient
        product = product.to(torch.promote_types(product.dtype, torch.float32)).unflatten(-1, (site.num_heads, -1))
        relevance = product.sum((1, -1)).cpu().double()  # (N, H)
        by_site.append((site, relevance.unflatten(0, (len(values), -1)).sum(1)))
    return by_site
