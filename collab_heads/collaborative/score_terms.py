"""Ablate the score: keep only its content term, or only its context term.

With a query bias the score of a head is x.W_Q^T W_K.y + b_Q.W_K y. The first term (context) compares query and key; the
second (content) depends on the key alone.

Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362, section 2.
"""

from torch import nn
from transformers import PreTrainedModel

from collab_heads.checks import check_choice
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.query_key import is_swapped
from collab_heads.registry import AttentionAdapter, get_adapter

TERMS = ("content", "context")


def restrict_scores(
    model: PreTrainedModel, terms: str, adapter: type[AttentionAdapter] | AttentionAdapter | None = None
) -> int:
    """Keep one term of the score of every site, in place; the other's parameters become zero and stay so in training.

    Works before and after a swap. Restrict after swapping: there is nothing to decompose in a content-only score.

    Args:
        model: a supported model.
        terms: "content" or "context".
        adapter: as in `swap_to_collaborative`.

    Returns:
        The number of sites.

    Raises:
        ArgumentError: if `terms` is neither.
        UnsupportedModelError: if "content" is asked of a model without query biases.
    """
    found = check_terms(model, terms, adapter)
    for context, content in found:
        dropped = context if terms == "content" else content
        if dropped is not None:
            dropped.data.zero_()
            dropped.requires_grad_(False)
    return len(found)


def check_terms(
    model: PreTrainedModel, terms: str, adapter: type[AttentionAdapter] | AttentionAdapter | None = None
) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
    """Check that the scores can be restricted, without doing it; the arguments and errors of `restrict_scores`.

    Returns:
        Per site, what `score_terms` says.
    """
    check_choice("terms", terms, TERMS)
    adapter, found = get_adapter(model, adapter), []
    for site in adapter.sites_with_heads(model):
        found.append(score_terms(adapter, model.base_model.get_submodule(site.path)))
        if terms == "content" and found[-1][1] is None:
            raise UnsupportedModelError(
                f"{site.path} has no query bias, so its score has no content term: nothing would be left"
            )
    return found


def score_terms(adapter: AttentionAdapter, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The parameter whose zero leaves only the content term, and the one whose zero leaves only the context term."""
    if not is_swapped(module):
        query, _ = adapter.projections(module)
        return query.weight, query.bias
    query_key = module.query_key
    if query_key.state.kind == "per_head":
        return query_key.shared_query.weight, query_key.shared_query.bias
    content = query_key.content_bias
    return query_key.mixing, None if content is None else content.weight
