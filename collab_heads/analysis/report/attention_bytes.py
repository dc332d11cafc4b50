"""Attention maps small enough for a page: a byte per weight, compressed, as text."""

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collab_heads.analysis.measures.attention_examples import AttentionExample
from collab_heads.sites import AttentionSite

LONGEST = 40  # tokens: with 144 heads a sentence is 230 kB before compression
STEPS = 255  # a weight is known to 0.2 %


def sentence_data(
    example: AttentionExample, sites: Sequence[AttentionSite], text: Callable[[str], str]
) -> dict[str, Any]:
    """A sentence for the page's script.

    Args:
        example: the sentence.
        sites: those of the report, in order.
        text: makes a token readable.

    Returns:
        tokens: side -> tokens, the first `LONGEST`. length: side -> how many there are in all. maps: the weights
        [H, T, S] of site after site, a byte each, 255 for 1; as zlib makes them, in base64.
    """
    packed = b"".join(
        (weights[:, :LONGEST, :LONGEST] * STEPS).round().to(torch.uint8).contiguous().numpy().tobytes()
        for weights, _, _ in (example.of(site) for site in sites)
    )
    return {
        "tokens": {side: [text(token) for token in tokens[:LONGEST]] for side, tokens in example.tokens.items()},
        "length": {side: len(tokens) for side, tokens in example.tokens.items()},
        "maps": base64.b64encode(zlib.compress(packed, 9)).decode(),
    }
