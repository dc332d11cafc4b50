"""English sentences from a small grammar: enough text to calibrate and to compare, with no network."""

import random

NOUNS = (
    "dog cat child teacher doctor driver musician farmer river mountain garden kitchen library market train bicycle "
    "computer newspaper government company hospital island bridge painting engine forest harbour student scientist"
).split()
ADJECTIVES = (
    "small old bright quiet heavy foreign careful hungry wooden famous narrow modern broken friendly expensive empty "
    "distant green sudden ordinary"
).split()
VERBS = (
    "watches finds carries repairs describes follows sells paints crosses visits remembers builds closes ignores "
    "measures photographs improves borrows"
).split()
PLACES = (
    "near the station",
    "in the city",
    "behind the old house",
    "at the university",
    "on the beach",
    "across the border",
    "under the bridge",
    "in front of the museum",
)
TIMES = ("today", "every morning", "after the meeting", "in 1998", "last week", "at night", "during the storm")
FRAMES = (
    "{a} {v} {b}.",
    "{a} {v} {b} {p}.",
    "{t}, {a} {v} {b} {p}.",
    "{a} {v} {b}, but {c} {w} {d}.",
    "Why does nobody say that {a} {v} {b} {t}?",
    "According to {c}, {a} {v} {b} and {w} {d} {p}.",
    "{a}, which {w} {d}, {v} {b} {t}.",
    "Officials said that {n} people saw how {a} {v} {b} {p} {t}.",
)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return `count` sentences, the same for the same seed."""
    rng = random.Random(seed)

    def phrase() -> str:
        adjective = rng.choice(("", rng.choice(ADJECTIVES) + " "))
        return f"{rng.choice(('the', 'a', 'another', 'every'))} {adjective}{rng.choice(NOUNS)}"

    def sentence() -> str:
        verb, other = rng.choice(VERBS), rng.choice(VERBS)
        text = rng.choice(FRAMES).format(
            a=phrase(),
            b=phrase(),
            c=phrase(),
            d=phrase(),
            v=verb,
            w=other,
            p=rng.choice(PLACES),
            t=rng.choice(TIMES),
            n=rng.randint(2, 900),
        )
        return text[0].upper() + text[1:]

    return [sentence() for _ in range(count)]
