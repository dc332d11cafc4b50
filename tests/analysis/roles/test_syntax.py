"""Syntactic heads: planted ones on a tiny treebank, with exact numbers; baselines by hand."""

import pytest
import torch
from known_heads import SMALL, TREEBANK, looking, rows, show, site, word_pieces

from collab_heads.analysis.measures.passes import Attention, Batch
from collab_heads.analysis.roles.labels import RoleThresholds, judge_syntax, roles_from_measures
from collab_heads.analysis.roles.syntax import Baseline, Syntax
from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.files.conllu import read_conllu
from families import FAMILIES

# by length: [CLS] dog ##s were seen . [SEP]
#            [CLS] old dog ##s chase young cat ##s . [SEP]
#            [CLS] she does ##n ' t often sing . [SEP]
DEPENDENT, GOVERNOR = "dependent->head", "head->dependent"


def bank(folder, text=TREEBANK, **more) -> Treebank:
    path = folder / "bank.conllu"
    path.write_text(text, encoding="utf-8")
    return Treebank(path, word_pieces(), FAMILIES["bert"].build(), **more)


def batches_where_heads_look(treebank, *heads):
    """Batches with heads that look, per sentence, from some tokens to others ({from: to}) and else at themselves."""
    batches = []
    for index, inputs in enumerate(treebank):
        first, length = index * treebank.batch_size, inputs["input_ids"].shape[1]
        positions = [
            [[looks[row].get(token, token) for token in range(length)] for looks in heads]
            for row in range(first, first + len(inputs["input_ids"]))
        ]
        batches.append((inputs, {"one": looking(positions, length)}))
    return batches


SUBJECTS = [{1: 4, 2: 4}, {2: 4, 3: 4}, {1: 7}]  # subject -> verb
VERBS = [{4: 1}, {4: 3}, {7: 4}]  # verb -> subject, subject, "n't" (an adverb)
OBJECTS = [{}, {6: 4, 7: 4, 4: 1}, {}]  # object -> verb, and the verb -> "old", which is not its object


@pytest.mark.parametrize("size", (1, 2, 3))
def test_accuracies_of_planted_heads(tmp_path, size):
    treebank = bank(tmp_path, batch_size=size)
    observer = show(Syntax(treebank), [site(heads=3)], batches_where_heads_look(treebank, SUBJECTS, VERBS, OBJECTS))
    (found, baselines) = observer.results()
    assert found.keys() == {"one"}
    accuracies = {kind: each.tolist() for kind, each in found["one"].items()}
    assert accuracies["nsubj", DEPENDENT] == [1.0, 0.0, 0.0]
    assert accuracies["nsubj", GOVERNOR] == [0.0, 2 / 3, 0.0]
    assert accuracies["obj", DEPENDENT] == [0.0, 0.0, 1.0]
    assert accuracies["obj", GOVERNOR] == [0.0, 0.0, 0.0]
    assert accuracies["amod", DEPENDENT] == accuracies["amod", GOVERNOR] == [0.0, 0.0, 0.0]
    assert accuracies["advmod", DEPENDENT] == [0.0, 0.0, 0.0]
    assert accuracies["advmod", GOVERNOR] == [0.0, 1.0, 0.0]  # any of the two adverbs of "sing" answers
    assert found["one"]["nsubj", DEPENDENT].dtype == torch.float64 and baselines.keys() == found["one"].keys()


def test_baselines_by_hand(tmp_path):
    """Subjects are 1, 2 and 4 words before their verbs: the nearest. "n't" and "often" are 2 and 1 before "sing"."""
    baselines = Syntax(bank(tmp_path)).baselines()
    assert baselines == {
        ("nsubj", DEPENDENT): Baseline(1, 1 / 3, 3),
        ("nsubj", GOVERNOR): Baseline(-1, 1 / 3, 3),
        ("obj", DEPENDENT): Baseline(-2, 1.0, 1),
        ("obj", GOVERNOR): Baseline(2, 1.0, 1),
        ("amod", DEPENDENT): Baseline(1, 1.0, 2),
        ("amod", GOVERNOR): Baseline(-1, 1.0, 2),
        ("advmod", DEPENDENT): Baseline(1, 1 / 2, 2),
        ("advmod", GOVERNOR): Baseline(-1, 1.0, 1),
    }
    text = TREEBANK + rows("1 She 3 nsubj", "2 often 3 advmod", "3 sing 0 root")
    assert Syntax(bank(tmp_path, text)).baselines()["nsubj", DEPENDENT] == Baseline(2, 2 / 4, 4)


def test_words_are_sums_and_means_of_their_sub_words(tmp_path):
    """Sums over those attended to: 0.2 + 0.2 beats 0.3. Means over those that attend. [CLS] is not a candidate."""
    treebank = bank(tmp_path, rows("1 Dogs 3 nsubj", "2 were 3 aux", "3 seen 0 root", "4 . 3 punct"))
    weights = torch.zeros(1, 2, 7, 7, dtype=torch.float64)
    weights[0, 0, 4] = torch.tensor([0.3, 0.2, 0.2, 0.3, 0.0, 0.0, 0.0])  # seen -> dog ##s, not were, not [CLS]
    weights[0, 1, 4] = torch.tensor([0.25, 0.15, 0.15, 0.35, 0.0, 0.0, 0.1])  # seen -> were
    weights[0, 0, 1] = torch.tensor([0.0, 0.0, 0.0, 0.6, 0.4, 0.0, 0.0])  # dog -> were, seen
    weights[0, 0, 2] = torch.tensor([0.0, 0.0, 0.0, 0.3, 0.6, 0.1, 0.0])  # ##s -> seen: 0.45 and 0.5 on average
    weights[0, 1, 1] = torch.tensor([0.0, 0.0, 0.0, 0.6, 0.4, 0.0, 0.0])
    weights[0, 1, 2] = torch.tensor([0.0, 0.0, 0.0, 0.4, 0.5, 0.1, 0.0])  # 0.5 and 0.45
    (inputs,) = treebank
    found, _ = show(Syntax(treebank), [site()], [(inputs, {"one": weights})]).results()
    assert {kind: each.tolist() for kind, each in found["one"].items()} == {
        ("nsubj", DEPENDENT): [1.0, 0.0],
        ("nsubj", GOVERNOR): [1.0, 0.0],
    }


def test_relations_between_words_that_no_token_tells_apart_are_not_asked(tmp_path):
    text = rows("1-2 cannot _ _", "1 can 3 aux", "2 not 1 advmod", "3 sing 0 root", "4 often 3 advmod")
    observer = Syntax(bank(tmp_path, text))
    assert observer.baselines() == {
        ("advmod", DEPENDENT): Baseline(-1, 1.0, 1),
        ("advmod", GOVERNOR): Baseline(1, 1.0, 1),
    }


@pytest.mark.parametrize("relations", (("dobj",), "obj", ["obj", "dobj"]))
def test_relations_by_their_main_type(tmp_path, relations):
    """The paper's dobj is obj, in files of Universal Dependencies 1 too; nsubj:pass was nsubj above."""
    for name in ("obj", "dobj", "obj:lvc"):
        observer = Syntax(bank(tmp_path, TREEBANK.replace("\tobj", f"\t{name}")), relations)
        assert observer.relations == ("obj",) and observer.baselines().keys() == {("obj", DEPENDENT), ("obj", GOVERNOR)}
    assert Syntax(bank(tmp_path), ("iobj",)).baselines() == {}


@pytest.mark.parametrize("relations", ((), [1]))
def test_relations_that_are_none(tmp_path, relations):
    with pytest.raises(ArgumentError, match="relations="):
        Syntax(bank(tmp_path), relations)


def test_labels_from_the_threshold_on(tmp_path):
    """Heads that are right in 7 and 6 of 20; any fixed offset is right in 5."""
    near = rows("1 She 2 nsubj", "2 sing 0 root", "3 often 2 advmod")
    far = [rows("1 She 3 nsubj", "2 often 3 x", "3 sing 0 root"), rows("1 sing 0 root", "2 . 1 x", "3 she 1 nsubj")]
    after = rows("1 sing 0 root", "2 she 1 nsubj")
    treebank = bank(tmp_path, "\n".join([near, *far, after] * 5))

    def head(right):
        verbs = [s.heads.index(0) + 1 for s, _ in treebank.sentences]
        subjects = [s.relations.index("nsubj") + 1 for s, _ in treebank.sentences]
        return [{a: b if i < right else a} for i, (a, b) in enumerate(zip(subjects, verbs, strict=True))]

    observer = show(Syntax(treebank, ("nsubj",)), [site()], batches_where_heads_look(treebank, head(7), head(6)))
    roles = roles_from_measures([site()], {"one": (0, 1)}, syntax=observer, thresholds=SMALL)
    assert roles.baselines["nsubj", DEPENDENT] == Baseline(-1, 5 / 20, 20)
    assert roles.syntax["one"]["nsubj", DEPENDENT].tolist() == [7 / 20, 6 / 20]
    assert roles.labels == {"one": ((f"nsubj {DEPENDENT}",), ())}  # 0.35 - 0.25 is a rounding error less than 0.1
    few = roles_from_measures([site()], {"one": (0, 1)}, syntax=observer)
    assert few.labels == {"one": ((), ())}
    said = "1 head would be called 'syntactic', but 20 words with the relation nsubj are too few to tell: it takes 100"
    assert few.warnings == (said,) and few.to_dict()["warnings"] == [said]
    kind = "nsubj", DEPENDENT
    (one,) = judge_syntax({kind: torch.ones(1)}, {kind: Baseline(-1, 0.0, 1)}, 0, RoleThresholds())
    assert one == (f"nsubj {DEPENDENT}", "1 word with the relation nsubj is too few to tell: it takes 100")


def test_the_encoder_only_and_a_module_of_several_layers(tmp_path):
    treebank = bank(tmp_path)
    batches = batches_where_heads_look(treebank, SUBJECTS, VERBS)
    (inputs, weights), sites = batches[0], [site("one"), site("b", "dec-self"), site("c", "dec-enc")]
    weights |= {"b": weights["one"], "c": weights["one"]}
    observer = Syntax(treebank)
    observer.begin(sites)
    assert show(observer, sites, batches).results()[0].keys() == {"one"}
    twice = Syntax(treebank)
    show(twice, [site()], [(inputs, {"one": weights["one"]})])
    twice.see_weights(site(), Attention(weights["one"].flip(1)), Batch(FAMILIES["bert"].build(), inputs, 0, ()))
    assert twice.results()[0]["one"]["nsubj", DEPENDENT].tolist() == [0.5, 0.5]


def test_batches_of_something_else_are_refused(tmp_path):
    treebank = bank(tmp_path, batch_size=2)
    first, second = batches_where_heads_look(treebank, SUBJECTS, VERBS)
    for batches in ([second], [first, first]):
        with pytest.raises(CalibrationError, match=r"batch \d is not that of the treebank"):
            show(Syntax(treebank), [site()], batches)
    with pytest.raises(CalibrationError, match="one saw no batch of the treebank"):
        show(Syntax(treebank), [site()], []).results()


def test_sentences_of_the_treebank_need_no_file(tmp_path):
    bank(tmp_path)
    sentences = read_conllu(tmp_path / "bank.conllu")
    given = Treebank(sentences, word_pieces(), FAMILIES["bert"].build())
    assert Syntax(given).baselines() == Syntax(bank(tmp_path)).baselines()
