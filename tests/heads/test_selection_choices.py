"""How users name heads: by role or path; every mistake is named."""

import pytest
import torch

from collab_heads import AttentionSite
from collab_heads.errors import ArgumentError
from collab_heads.heads.selection import alive_choice, removal_choice

SITES = [
    AttentionSite("encoder.0", "enc-self", 0, 3),
    AttentionSite("encoder.1", "enc-self", 1, 2),
    AttentionSite("decoder.0", "dec-self", 0, 2),
]
PRESENT = {"encoder.0": [0, 1, 2], "encoder.1": [0, 3], "decoder.0": []}


@pytest.mark.parametrize(
    "given, found",
    (
        ({"enc-self": [[1, 0, 1], [0, 1]]}, {"encoder.0": [1, 0, 1], "encoder.1": [0, 1]}),
        ({"enc-self": ((1, 0, 1), (0, 1))}, {"encoder.0": [1, 0, 1], "encoder.1": [0, 1]}),
        ({"encoder.1": [True, False]}, {"encoder.1": [1, 0]}),
        ({"encoder.1": torch.ones(2)}, {"encoder.1": [1, 1]}),
        ({"encoder.1": [0, 0], "dec-self": [[1, 1]]}, {"encoder.1": [0, 0], "decoder.0": [1, 1]}),
    ),
    ids=str,
)
def test_alive_heads(given, found):
    read = alive_choice(SITES, given)
    assert read == found
    assert all(type(value) is int for values in read.values() for value in values)


WRONG = [
    (None, ("alive_heads must be a dict by role or path", "None")),
    ({}, ("alive_heads must be a dict by role or path", "{}")),
    ([[1, 0, 1], [0, 1]], ("alive_heads must be a dict", "[[1, 0, 1], [0, 1]]")),
    ({"dec-enc": [[1]]}, ("the model has no dec-enc attention", "enc-self, dec-self")),
    ({"encoder": [[1]]}, ("'encoder' is neither a role nor a path",)),
    ({"encoder.2": [1]}, ("'encoder.2' is neither a role nor a path", "did you mean")),
    ({3: [1]}, ("3 is neither a role nor a path",)),
    ({"enc-self": [[1, 0, 1]]}, ("alive_heads['enc-self'] must hold one list per site, 2 in all, not 1 entries",)),
    ({"enc-self": [[1, 0, 1], [0, 1], [1, 1]]}, ("2 in all, not 3 entries",)),
    ({"enc-self": [1, 0]}, ("alive_heads['enc-self']: encoder.0 needs a list, not 1",)),
    ({"enc-self": "10"}, ("2 in all, not '10'",)),
    ({"encoder.0": 1}, ("alive_heads['encoder.0']: encoder.0 needs a list, not 1",)),
    ({"encoder.0": "101"}, ("encoder.0 needs a list, not '101'",)),
    ({"encoder.0": [1, 0]}, ("alive_heads: encoder.0 has 3 heads, the list 2 values",)),
    ({"encoder.0": [1, 0, 1, 1]}, ("alive_heads: encoder.0 has 3 heads, the list 4 values",)),
    ({"encoder.0": []}, ("alive_heads: encoder.0 has 3 heads, the list 0 values",)),
    ({"encoder.0": [1, 2, 0]}, ("alive_heads: encoder.0, head 1: 2 is neither 0 nor 1",)),
    ({"encoder.0": [1, 0, -1]}, ("encoder.0, head 2: -1 is neither 0 nor 1",)),
    ({"encoder.0": [0.5, 0, 0]}, ("encoder.0, head 0: 0.5 is neither 0 nor 1",)),
    ({"encoder.0": ["1", 0, 0]}, ("encoder.0, head 0: '1' is neither 0 nor 1",)),
    ({"encoder.0": [[1], 0, 0]}, ("encoder.0, head 0: [1] is neither 0 nor 1",)),
    ({"encoder.0": [None, 0, 0]}, ("encoder.0, head 0: None is neither 0 nor 1",)),
    ({"enc-self": [[1, 0, 1], [0, 1]], "encoder.1": [1, 1]}, ("names encoder.1 twice, by role and by path",)),
]


@pytest.mark.parametrize("given, fragments", WRONG, ids=[str(given) for given, _ in WRONG])
def test_wrong_alive_heads(given, fragments):
    with pytest.raises(ArgumentError) as caught:
        alive_choice(SITES, given)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize(
    "given, found",
    (
        ({"enc-self": [[2, 0], [3]]}, {"encoder.0": [0, 2], "encoder.1": [3]}),
        ({"enc-self": [(), (3, 0)]}, {"encoder.0": [], "encoder.1": [0, 3]}),
        ({"encoder.0": [0, 1, 2]}, {"encoder.0": [0, 1, 2]}),
        ({"dec-self": [[]]}, {"decoder.0": []}),
    ),
    ids=str,
)
def test_heads_to_remove(given, found):
    assert removal_choice(SITES, given, PRESENT) == found


WRONG_HEADS = [
    ({}, ("heads must be a dict by role or path",)),
    ([0, 1], ("heads must be a dict by role or path", "[0, 1]")),
    ({"dec-enc": [[0]]}, ("the model has no dec-enc attention",)),
    ({"encoder.0": [3]}, ("heads: encoder.0 has no head 3; it has 0, 1, 2",)),
    ({"encoder.0": [-1]}, ("encoder.0 has no head -1",)),
    ({"encoder.0": [True]}, ("encoder.0 has no head True",)),
    ({"encoder.0": [1.0]}, ("encoder.0 has no head 1.0",)),
    ({"encoder.0": ["1"]}, ("encoder.0 has no head '1'",)),
    ({"encoder.0": [[0]]}, ("encoder.0 has no head [0]",)),
    ({"encoder.1": [1]}, ("encoder.1 has no head 1; it has 0, 3",)),
    ({"decoder.0": [0]}, ("decoder.0 has no head 0; it has none",)),
    ({"encoder.0": [0, 0]}, ("encoder.0 names a head twice: [0, 0]",)),
    ({"enc-self": [[0]]}, ("heads['enc-self'] must hold one list per site, 2 in all, not 1 entries",)),
    ({"enc-self": [0, 1]}, ("encoder.0 needs a list, not 0",)),
    ({"encoder.0": 0}, ("encoder.0 needs a list, not 0",)),
    ({"encoder.0": [0], "enc-self": [[0], [0]]}, ("heads names encoder.0 twice, by role and by path",)),
]


@pytest.mark.parametrize("given, fragments", WRONG_HEADS, ids=[str(given) for given, _ in WRONG_HEADS])
def test_wrong_heads_to_remove(given, fragments):
    with pytest.raises(ArgumentError) as caught:
        removal_choice(SITES, given, PRESENT)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
