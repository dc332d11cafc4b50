"""Leaving heads out: as removing them, without removing them; curves; what is refused."""

import copy

import pytest
import torch
from heads_by_hand import CHANGES, ended, model_in
from model_inputs import cast
from model_sizes import EXACT64, HEADS
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.analysis import ablation_curve, leave_one_out, mean_loss, without_heads
from collab_heads.contract.registry import head_numbers
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.layers.output import gates_of
from families import FAMILIES

FAR = 1e-4


def logits(model, inputs):
    with torch.no_grad():
        output = model(**cast(inputs, model.dtype))
    return output.logits if "logits" in output else output[0]


def labelled(name):
    inputs, _ = ended(name)
    if "decoder_input_ids" in inputs:
        inputs["labels"] = inputs["decoder_input_ids"].clone()
        inputs["labels"][:, :2] = -100
    else:
        inputs["labels"] = torch.tensor([0, 1, 1])
    return inputs


@pytest.mark.parametrize(
    "name, change", [(n, c) for n in ("bert", "marian", "t5") for c in CHANGES] + [("albert", "stock")]
)
def test_it_computes_as_if_the_heads_were_removed(name, change):
    model, (inputs, _) = model_in(name, change), ended(name)
    adapter = collab_heads.get_adapter(model)
    numbers = head_numbers(model, adapter)
    site = adapter.sites_with_heads(model)[-1]
    gates = gates_of(adapter.output_projection(model, site))
    place = -1 if gates is None else gates.is_open().tolist().index(True)
    heads = {site.path: [numbers[site.path][place]]}
    whole, removed = logits(model, inputs), copy.deepcopy(model)
    collab_heads.prune_heads(removed, heads=heads)
    with without_heads(model, heads):
        found = logits(model, inputs)
    torch.testing.assert_close(found, logits(removed, inputs), rtol=0, atol=1e-4 if name == "t5" else EXACT64)
    assert float((found - whole).abs().max()) > FAR
    assert torch.equal(logits(model, inputs), whole)


def test_heads_keep_their_numbers_when_others_are_gone():
    model = model_in("bert")
    path = collab_heads.get_adapter(model).sites(model)[0].path
    collab_heads.prune_heads(model, heads={path: [0, 2]})
    assert head_numbers(model, collab_heads.get_adapter(model))[path] == (1, 3)
    with refused(model, ArgumentError, f"{path} has no head 0; it has 1, 3"), without_heads(model, {path: [0]}):
        pass
    found = leave_one_out(model, lambda m: float(logits(m, ended("bert")[0]).sum()), sites=[path])
    assert found.heads == {path: (1, 3)} and found.without[path].shape == (2,)


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_leaving_one_out_by_hand(name):
    model, batches = model_in(name), [cast(labelled(name), torch.float64)]
    whole = mean_loss(model, batches)  # transformers sets config.problem_type
    before, calls = snapshot(model), []

    def evaluate(model):
        calls.append(1)
        return mean_loss(model, batches)

    found = leave_one_out(model, evaluate)
    assert_unchanged(model, before)
    heads = sum(site.num_heads for site in found.sites)
    assert len(calls) == heads + 1 and found.metric == "loss" and found.original == whole
    for site in (found.sites[0], found.sites[-1]):
        for head in (0, HEADS - 1):
            removed = copy.deepcopy(model)
            collab_heads.prune_heads(removed, heads={site.path: [head]})
            assert float(found.without[site.path][head]) == pytest.approx(mean_loss(removed, batches), abs=EXACT64)
    changes = torch.cat([*found.harm().values()])
    assert changes.abs().max() > FAR and changes.unique().numel() == heads
    assert torch.equal(found.harm()[site.path], found.without[site.path] - found.original)
    better = leave_one_out(model, lambda m: -mean_loss(m, batches), sites=site.path, higher_is_better=True)
    assert torch.equal(better.harm()[site.path], found.harm()[site.path]) and better.to_dict()["higher_is_better"]
    assert found.to_dict()["without"][site.path] == found.without[site.path].tolist()
    assert f"{found.original:.4f} with all" in str(found) and site.path in str(found)


def test_the_mean_loss_counts_labels_whatever_batch_they_are_in():
    model, inputs = model_in("marian"), cast(labelled("marian"), torch.float64)
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(3)]
    rows[1]["labels"][:, 3:] = inputs["labels"][1, 3:] = -100
    whole, one_by_one = mean_loss(model, [inputs]), mean_loss(model, rows)
    assert one_by_one == pytest.approx(whole, abs=EXACT64)
    assert abs(sum(mean_loss(model, [row]) for row in rows) / 3 - whole) > FAR
    examples = cast(labelled("bert"), torch.float64)
    parts = [{key: value[part] for key, value in examples.items()} for part in (slice(0, 2), slice(2, 3))]
    model = model_in("bert")
    assert mean_loss(model, parts) == pytest.approx(mean_loss(model, [examples]), abs=EXACT64)
    decoder, texts = model_in("gpt2"), ended("gpt2")[0]["input_ids"]  # nothing predicts its first token
    short = [{"input_ids": rows, "labels": rows} for rows in (texts[:2], texts[2:, :3])]
    labels = torch.full_like(texts, -100)
    labels[:2], labels[2:, :3] = texts[:2], texts[2:, :3]
    whole = mean_loss(decoder, [{"input_ids": texts, "labels": labels}])
    assert mean_loss(decoder, short) == pytest.approx(whole, abs=EXACT64)


def test_a_curve_removes_the_least_important_heads_first():
    model, batches = model_in("marian"), [cast(labelled("marian"), torch.float64)]
    adapter = collab_heads.get_adapter(model)
    sites = adapter.sites(model)
    scores = {site.path: torch.arange(HEADS) + 10.0 * place for place, site in enumerate(sites)}
    points = ablation_curve(model, lambda m: mean_loss(m, batches), scores, counts=[5, 24, 22])
    assert [kept for kept, _ in points] == [24, 22, 5]
    assert points[0][1] == mean_loss(model, batches)
    removed = copy.deepcopy(model)
    collab_heads.prune_heads(removed, heads={sites[0].path: [0, 1]})
    assert points[1][1] == pytest.approx(mean_loss(removed, batches), abs=EXACT64)
    few = copy.deepcopy(model)
    roles = {role: [site for site in sites if site.role == role][-1] for role in ("enc-self", "dec-self", "dec-enc")}
    best = {site.path: [HEADS - 1] for site in roles.values()}
    ranked = sorted(
        ((float(scores[s.path][h]), s.path, h) for s in sites for h in range(HEADS) if h not in best.get(s.path, [])),
        reverse=True,
    )
    for _, path, head in ranked[:2]:
        best.setdefault(path, []).append(head)
    collab_heads.prune_heads(
        few, heads={s.path: [h for h in range(HEADS) if h not in best.get(s.path, [])] for s in sites}
    )
    assert points[2][1] == pytest.approx(mean_loss(few, batches), abs=EXACT64)
    standard = ablation_curve(model, lambda m: 1.0, scores)
    assert [kept for kept, _ in standard] == [24, 21, 18, 15, 12, 9, 6, 3]


def test_what_is_refused():
    model, batches = model_in("bert"), [cast(labelled("bert"), torch.float64)]
    path = collab_heads.get_adapter(model).sites(model)[0].path
    with refused(model, ArgumentError, "'enc-sel'", "did you mean 'enc-self'"):
        leave_one_out(model, lambda m: 0.0, sites="enc-sel")
    with refused(model, NonFiniteError, f"the BLEU without head 1 of {path} is nan"):
        values = iter([1.0, 2.0, float("nan")])
        leave_one_out(model, lambda m: next(values), metric="BLEU")
    with refused(model, NonFiniteError, "the loss of the whole model is inf"):
        leave_one_out(model, lambda m: float("inf"))
    with refused(model, ArgumentError, "scores lack"):
        ablation_curve(model, lambda m: 0.0, {path: torch.ones(HEADS)})
    scores = {site.path: torch.ones(HEADS) for site in collab_heads.get_adapter(model).sites(model)}
    with refused(model, ArgumentError, "target_heads is 99"):
        ablation_curve(model, lambda m: 0.0, scores, counts=[3, 99])
    with refused(model, CalibrationError, "gives no loss"):
        mean_loss(model, [{k: v for k, v in batches[0].items() if k != "labels"}])
    with refused(model, CalibrationError, "empty"):
        mean_loss(model, [])

    def fails(model):
        raise KeyError("of the caller's")

    before = snapshot(model)
    with pytest.raises(KeyError, match="of the caller's"):
        leave_one_out(model, fails)
    assert_unchanged(model, before)


def test_hooks_are_gone_after_an_error():
    model, (inputs, _) = model_in("t5"), ended("t5")
    path = collab_heads.get_adapter(model).sites(model)[0].path
    whole = logits(model, inputs)
    with pytest.raises(RuntimeError, match="within"), without_heads(model, {path: [0]}):
        raise RuntimeError("within")
    assert torch.equal(logits(model, inputs), whole)
    assert FAMILIES["t5"].num_sites == 6
