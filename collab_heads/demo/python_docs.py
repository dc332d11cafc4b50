"""Real sentences that every machine has: those of Python's documentation, which `help` shows."""

import random
import re
from pydoc_data.topics import topics

SENTENCES, PAIRS = 512, 256
PROSE = re.compile(r"(?!Changed in|New in)[A-Z](?!.*(?:::=|>>>)).*[\w)\]\"*”]\.")
END = re.compile(r"(?<=\w\w\.) (?=[A-Z])|(?<=[)\"*]\.) (?=[A-Z])")


def documentation() -> tuple[list[str], list[dict[str, str]]]:
    """Return sentences of Python's documentation, and queries for `evaluate` from other paragraphs of it.

    They differ a little between versions of Python.

    Returns:
        512 sentences; 256 dicts with the first sentence of a paragraph as "query" and the rest of it as "passage".
    """
    blocks = [" ".join(block.split()) for name in sorted(topics) for block in re.split(r"\n\s*\n", topics[name])]
    paragraphs = [END.split(block) for block in dict.fromkeys(blocks) if PROSE.fullmatch(block)]
    longer = list({each[0]: each for each in paragraphs if len(each) > 1}.values())
    random.Random(0).shuffle(longer)
    pairs = [{"query": first, "passage": " ".join(rest)} for first, *rest in longer[:PAIRS]]
    asked = {sentence for each in longer[:PAIRS] for sentence in each}
    texts = [sentence for each in longer[PAIRS:] for sentence in each if sentence not in asked]
    return texts[:SENTENCES], pairs
