"""Pairs of English sentences from a small grammar, to fine-tune on with no network: do both say the same?

Words are exchanged for a synonym (1) or for another word (0), or the voice changes with the roles kept (1) or swapped
(0). No word is more frequent with one of the labels, so that a bag of words stays near chance; the words that differ,
and how many, bring a linear classifier to 0.6.
"""

import random
from dataclasses import dataclass, replace

# every row holds words of one meaning, and no two rows overlap
NOUNS = (
    ("doctor", "physician"),
    ("child", "kid"),
    ("dog", "hound"),
    ("thief", "burglar"),
    ("soldier", "trooper"),
    ("lawyer", "attorney"),
    ("king", "monarch"),
    ("cook", "chef"),
    ("woman", "lady"),
    ("tourist", "traveler"),
)
ADJECTIVES = (
    ("tiny", "little"),
    ("famous", "renowned"),
    ("hungry", "starving"),
    ("rich", "wealthy"),
    ("angry", "furious"),
    ("sick", "ill"),
    ("brave", "courageous"),
)
# present and participle; none holds in both directions, as "meets" would
VERBS = (
    ("watches watched", "observes observed"),
    ("calls called", "phones phoned"),
    ("hires hired", "employs employed"),
    ("hates hated", "detests detested"),
    ("teaches taught", "instructs instructed"),
    ("rescues rescued", "saves saved"),
)
ROWS = {"agent": NOUNS, "patient": NOUNS, "verb": VERBS, "adjective": ADJECTIVES}

ROLE_SHARE = 0.15  # of the pairs that keep all words; a short fine-tuning learns these last
ADJECTIVE_SHARE = 0.3
SYNONYMS = (1, 2)  # how many words of a pair with label 1 are exchanged
OTHERS = (1, 2, 3, 4)  # and with label 0: more of them, or a short fine-tuning does not get off the ground


@dataclass(frozen=True)
class Event:
    """Who does what to whom; `adjective` describes the agent and may be empty."""

    agent: str
    patient: str
    verb: str
    adjective: str = ""


def render(event: Event, passive: bool) -> str:
    """Return the sentence in the active or the passive voice."""
    present, participle = event.verb.split()
    agent = " ".join(filter(None, ("the", event.adjective, event.agent)))
    words = f"the {event.patient} is {participle} by {agent}" if passive else f"{agent} {present} the {event.patient}"
    return f"T{words[1:]}."


def pairs(count: int, seed: int = 0) -> list[dict]:
    """Return `count` pairs, the same for the same seed: "sentence1", "sentence2" and "label", 1 if both say the same.

    The labels are balanced to within one. Take the development set from another seed.
    """
    rng = random.Random(seed)
    labels = [index % 2 for index in range(count)]
    rng.shuffle(labels)
    return [_pair(label, rng) for label in labels]


def _pair(label: int, rng: random.Random) -> dict:
    nouns = rng.sample(NOUNS, 2)
    adjective = rng.choice(rng.choice(ADJECTIVES)) if rng.random() < ADJECTIVE_SHARE else ""
    first = Event(rng.choice(nouns[0]), rng.choice(nouns[1]), rng.choice(rng.choice(VERBS)), adjective)
    passive = rng.random() < 0.5
    if rng.random() < ROLE_SHARE:
        # always in the other voice: identical sentences, and swapped ones in one voice, would give the label away
        second = first if label else replace(first, agent=first.patient, patient=first.agent)
        return _item(label, render(first, passive), render(second, not passive))
    slots = [slot for slot in ROWS if getattr(first, slot)]
    chosen = rng.sample(slots, min(len(slots), rng.choice(SYNONYMS if label else OTHERS)))
    words = {slot: _synonym(slot, first) if label else _other(slot, first, rng) for slot in chosen}
    if words.get("agent") in _row("patient", words.get("patient", "")):  # both nouns fell on one meaning
        words["agent"] = first.agent
    return _item(label, render(first, passive), render(replace(first, **words), rng.random() < 0.5))


def _item(label: int, first: str, second: str) -> dict:
    return {"sentence1": first, "sentence2": second, "label": label}


def _row(slot: str, word: str) -> tuple[str, ...]:
    return next((row for row in ROWS[slot] if word in row), ())


def _synonym(slot: str, event: Event) -> str:
    word = getattr(event, slot)
    return next(synonym for synonym in _row(slot, word) if synonym != word)


def _other(slot: str, event: Event, rng: random.Random) -> str:
    """Return a word of another meaning; a noun also differs in meaning from the other noun of the event."""
    present = (event.agent, event.patient, getattr(event, slot))
    return rng.choice([word for row in ROWS[slot] for word in row if not set(row) & set(present)])
