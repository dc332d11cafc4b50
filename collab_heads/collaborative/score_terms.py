"""Ablate the score: keep only its content term, or only its context term.

With a query bias the score of a head is x.W_Q^T W_K.y + b_Q.W_K y. The first term (context) compares query and key; the
second (content) depends on the key alone.

Source: Cordonnier, Loukas, Jaggi 2020, arXiv:2006.16362, section 2.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.checks import check_choice
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.query_key import QueryKey
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.model.opened import opened

Term = Literal["content", "context"]
TERMS: tuple[Term, ...] = get_args(Term)


@torch.no_grad()
def restrict_scores(model: PreTrainedModel, terms: Term) -> int:
    """Keep one term of the score of every site, in place; set the parameters of the other to zero and freeze them.

    This works before and after a swap. To do both, swap first: a content-only score leaves nothing to decompose.

    Args:
        model: a supported model.
        terms: "content" or "context".

    Returns:
        The number of sites.

    Raises:
        ArgumentError: if `terms` is neither.
        UnsupportedModelError: if "content" is requested for a model without query biases.
    """
    with opened(model) as layers:
        parameters = check_terms(layers, terms)
        for context, content in parameters:
            dropped = context if terms == "content" else content
            if dropped is not None:
                dropped.requires_grad_(False)
                dropped.zero_()
        return len(parameters)


def check_terms(layers: OpenLayers, terms: Term) -> list[tuple[Tensor, Tensor | None]]:
    """Check that the scores can be restricted, and change nothing; arguments and errors are those of `restrict_scores`.

    Returns:
        The `term_parameters` of every site.
    """
    check_choice("terms", terms, TERMS)
    parameters = []
    for site in layers.with_heads:
        context, content = term_parameters(site)
        if terms == "content" and content is None:
            raise UnsupportedModelError(
                f"{site.path} has no query bias, so its score has no content term: nothing would be left"
            )
        parameters.append((context, content))
    return parameters


def term_parameters(site: OpenSite) -> tuple[Tensor, Tensor | None]:
    """Return the parameter to set to zero to drop the context term, and that for the content term, if there is one."""
    query_key = getattr(site.module, "query_key", None)
    if isinstance(query_key, QueryKey):
        return query_key.context_parameter, query_key.content_parameter
    query, _ = site.projections
    return query.weight, query.bias
