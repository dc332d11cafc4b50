"""Explanations of all measures of a report, in a sentence or two each."""

# measure -> its section of the page, if that has another name
SECTIONS = {
    "leave_one_out": "ablation",
    "absolute_relevance": "relevance",
    "positional": "roles",
    "rare_tokens": "roles",
}
# measure -> the title of its map, if its section has several maps
MAPS = {
    "absolute_relevance": "Absolute relevance",
    "positional": "Share on the best offset",
    "rare_tokens": "Share on the rarest token",
}

TITLES = {
    "heads": "All heads",
    "roles": "What heads do",
    "confidence": "Confidence",
    "entropy": "Entropy",
    "attention_distance": "Attention distance",
    "first_token": "Attention to the first token",
    "similarity": "Similarity",
    "l2_distance": "Distance to the other heads",
    "relevance": "Relevance",
    "gradient": "Gradient importance",
    "reconstruction": "Cost of removal",
    "ablation": "Without each head",
    "contributions": "Source and target",
    "alphas": "Alphas",
    "gate": "Gates",
    "examples": "Attention maps",
}
LEGENDS = {
    "heads": "Every head that the model has now, by the numbers of the original model.",
    "roles": "By default, positional: the largest weight falls on one relative position for at least 90 "
    "% of the tokens. First token: it falls on the first token of the sequence for at least half of the "
    "tokens after it; such a head looks nowhere in particular and is not positional. Rare tokens: in "
    "the first layer, it falls on the rarest token of the "
    "sentence for at least half of them. Syntactic: it finds the other end of a dependency at "
    "least 10 points more often than the best fixed offset does, from dependent to head or back "
    "(Voita et al. 2019).",
    "confidence": "The mean over query tokens of the largest attention weight; ends of sentences and padding "
    "do not count (Voita et al. 2019). 1 is a head that always looks at a single token.",
    "entropy": "The mean entropy of the attention weights of a query token, in nats: 0 where it looks at "
    "one token, the logarithm of the sentence's length where it looks at all alike.",
    "attention_distance": "How many tokens away a query token looks, averaged by its weights; between the two "
    "sentences of a translation, positions are compared as they are.",
    "first_token": "The mean weight on the first token of the sequence, over the query tokens after it, in "
    "self-attention. A head with nothing to look for rests there: a sink (Xiao et al. 2023).",
    "similarity": "The mean cosine and Euclidean distance between the outputs of two heads of a layer, for "
    "the same token. Heads that do the same have a cosine near 1.",
    "l2_distance": "The mean Euclidean distance of a head's outputs to those of the layer's other heads.",
    "relevance": "What the head contributes to the top-1 logit by layer-wise relevance propagation, "
    "attention weights and scales of norms held constant (Ali et al. 2022): absolute values, as "
    "shares of the layer's heads. Absolute relevance is the size of the mean itself, which layers "
    "can be compared by. The balance is 1 where all heads matter alike and 0 where one head has "
    "everything.",
    "gradient": "The mean absolute gradient of the loss by a gate on the head (Michel et al. 2019): an "
    "estimate, in one backward pass, of how much the loss depends on it.",
    "reconstruction": "The share of the layer's output (its mean square) that is lost once the head is removed "
    "together with all heads of the layer that cost less, and W_O is refitted for those that stay. The last head of a "
    "layer costs 1.",
    "ablation": "How much worse the metric is without the head, all else as it is (Michel et al. 2019); and "
    "the metric with only the most important heads, by each measure.",
    "contributions": "How much of each generated token's top-1 logit comes from the source, the rest from the "
    "target prefix (of a decoder alone: from the prompt, the rest from its continuation so far): shares of "
    "absolute relevance (after Voita, Sennrich, Titov 2021). Entropies say how widely a share is spread over its "
    "tokens, in nats; the influence of a source token is what it gives to the whole output, where 1 is the mean. Means "
    "over sentences, with 95 % intervals. Prefixes of its own are the model's translations, random ones those of other "
    "sentences.",
    "alphas": "Mixed heads: row i makes the new head i. Shown is the difference from the identity, where "
    "each head is itself.",
    "gate": "The probability that a head's gate is open (Voita et al. 2019): below one half it is more likely closed.",
    "examples": "Where sentences of typical lengths look: rows attend, columns are attended to, one map per head.",
}


def measure_title(name: str) -> str:
    """Return the title of a measure's map."""
    return MAPS.get(name) or TITLES[SECTIONS.get(name, name)]
