"""A bilingual corpus from a grammar of our own: English scenes, and the same in an invented language.

The invented language puts the verb last and adjectives after their nouns, marks the object with a suffix, lets
adjectives agree with the number of their noun, and has one word for "with" and "near" whose meaning its noun decides: a
model must move words, look ahead and look back.
"""

import random
from collections.abc import Sequence

NOUNS = {  # singular, plural, stem
    "dog": ("dogs", "haru"),
    "cat": ("cats", "mino"),
    "child": ("children", "telu"),
    "woman": ("women", "sena"),
    "man": ("men", "karo"),
    "bird": ("birds", "vipi"),
    "horse": ("horses", "dolo"),
    "ball": ("balls", "bum"),
    "house": ("houses", "tor"),
    "tree": ("trees", "lesh"),
    "boat": ("boats", "nav"),
    "book": ("books", "kit"),
}
PLACES = ("house", "tree", "boat")  # "ul" beside these means near, beside others with
VERBS = {  # singular, plural, stem
    "sees": ("see", "ok"),
    "carries": ("carry", "ber"),
    "follows": ("follow", "shek"),
    "likes": ("like", "am"),
    "paints": ("paint", "pik"),
    "finds": ("find", "tro"),
}
ADJECTIVES = {"red": "rud", "small": "mik", "old": "vet", "happy": "gai", "white": "bel", "quiet": "shi"}
ADVERBS = {"today": "nun", "slowly": "lan", "often": "mult", "never": "nik"}


def corpus(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw sentence pairs, English first; a seed gives the same ones on every version of Python."""
    chance = random.Random(seed)
    pairs = [sentence(chance) for _ in range(count)]
    return [english for english, _ in pairs], [other for _, other in pairs]


def sentence(chance: random.Random) -> tuple[str, str]:
    """Draw one scene in both languages."""
    plural = chance.random() < 0.4
    subject, subject_there = noun_phrase(chance, plural, "")
    thing, thing_there = noun_phrase(chance, chance.random() < 0.4, "n")
    verb = chance.choice(sorted(VERBS))
    words, there = [*subject], [*subject_there]
    adverb = chance.choice([*sorted(ADVERBS), "", "", ""])
    if adverb:
        there.append(ADVERBS[adverb])
    words += [VERBS[verb][0] if plural else verb, *thing]
    if chance.random() < 0.4:
        place = chance.random() < 0.5
        names = PLACES if place else sorted(set(NOUNS) - set(PLACES))
        extra, extra_there = noun_phrase(chance, chance.random() < 0.3, "", names)
        words += ["near" if place else "with", *extra]
        there += [*extra_there, "ul"]
    there += [*thing_there, VERBS[verb][1] + ("im" if plural else "a")]
    words += [adverb] if adverb else []
    return " ".join(words) + " .", " ".join(there) + " ."


def noun_phrase(
    chance: random.Random, plural: bool, suffix: str, names: Sequence[str] = tuple(sorted(NOUNS))
) -> tuple[list[str], list[str]]:
    """Draw a noun with up to two adjectives: before it in English, after it in the other language."""
    noun = chance.choice(list(names))
    adjectives = chance.sample(sorted(ADJECTIVES), chance.choice((0, 0, 1, 1, 2)))
    article = "some" if plural else chance.choice(("a", "the"))
    there = "li " if article == "the" else ""
    stem = NOUNS[noun][1] + ("s" if plural else "") + suffix
    described = [ADJECTIVES[adjective] + ("os" if plural else "o") for adjective in adjectives]
    words = [*adjectives, NOUNS[noun][0] if plural else noun]
    article = "an" if article == "a" and words[0][0] in "aeiou" else article
    return [article, *words], [*there.split(), stem, *described]
