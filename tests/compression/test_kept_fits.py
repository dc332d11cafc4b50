"""A call of `compress` that was killed goes on at the next fit, and ends as an unbroken one."""

import pytest
import torch
from compressing import batches_of

from collab_heads import compress, plan
from collab_heads.compression import fitting
from collab_heads.compression.kept_fits import KeptFits, packed, unpacked
from collab_heads.compression.parts.part import RefittedOutput
from collab_heads.compression.parts.shape import Choice
from collab_heads.errors import DataError
from collab_heads.layers.query_key_kinds import build_query_key
from collab_heads.model.apply_state import OutputWeights
from collab_heads.sites.state import QueryKeyState
from families import FAMILIES

OPTIONS = {"refine_steps": 2, "seed": 3}
MANY = 24  # batches: enough for last projections to be refitted


def compressed(name, file):
    model = FAMILIES[name].build().eval()
    compress(model, batches_of(FAMILIES[name], MANY), 0.5, **OPTIONS, measurements=file)
    return model


def counting(monkeypatch, name, stop=None):
    """Count the calls of a function of `fitting`; that with number `stop` is interrupted."""
    calls, inner = [], getattr(fitting, name)

    def counted(*arguments):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(arguments)
        return inner(*arguments)

    monkeypatch.setattr(fitting, name, counted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "gpt2"])
@pytest.mark.parametrize("step, is_late", [("fit_site", False), ("refit", True), ("fit_site", True), ("refit", False)])
def test_a_killed_run_ends_as_an_unbroken_one(name, step, is_late, tmp_path, monkeypatch):
    file = tmp_path / "measured.json"
    plan(FAMILIES[name].build().eval(), batches_of(FAMILIES[name], MANY), **OPTIONS, measurements=file)
    whole = {each: counting(monkeypatch, each) for each in ("fit_site", "refit")}
    unbroken = compressed(name, file)
    monkeypatch.undo()
    stop = len(whole[step]) - 1 if is_late else 1
    counting(monkeypatch, step, stop)
    with pytest.raises(KeyboardInterrupt):
        compressed(name, file)
    kept = len(list((tmp_path / "measured.json.fits").iterdir()))
    assert kept == stop + (len(whole["fit_site"]) if step == "refit" else 0)
    monkeypatch.undo()
    rest = {each: counting(monkeypatch, each) for each in ("fit_site", "refit")}
    resumed = compressed(name, file)
    assert sum(map(len, rest.values())) == sum(map(len, whole.values())) - kept
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    for (path, one), other in zip(unbroken.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad, path
    assert [each.training for each in unbroken.modules()] == [each.training for each in resumed.modules()]


def test_what_others_keep_there_stays(tmp_path):
    """Files of the user's, and fits of another run with the same file."""
    file, folder = tmp_path / "measured.json", tmp_path / "measured.json.fits"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    one, other = (KeptFits.beside(file, {"seed": seed}) for seed in (0, 1))
    for kept in (one, other):
        kept.add("a", {}, [])
    other.remove()
    assert one.find("a", {}) == [] and other.find("a", {}) is None
    one.remove()
    assert [each.name for each in folder.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_another_budget_fits_anew(tmp_path, monkeypatch):
    file, batches = tmp_path / "measured.json", batches_of(FAMILIES["bert"], MANY)
    counting(monkeypatch, "refit", 0)
    with pytest.raises(KeyboardInterrupt):
        compress(FAMILIES["bert"].build().eval(), batches, 0.5, **OPTIONS, measurements=file)
    monkeypatch.undo()
    for budget, again in ((0.3, False), (0.5, True)):
        calls = counting(monkeypatch, "fit_site")
        model = FAMILIES["bert"].build().eval()
        report = compress(model, plan(model, batches, **OPTIONS, measurements=file), budget)
        changed = [site for site in report.sites if site.parameters_after < site.parameters_before]
        assert again or len(changed) / 2 < len(calls) <= len(changed)
        monkeypatch.undo()
        assert not (tmp_path / "measured.json.fits").exists()


def test_measured_budgets_leave_nothing_behind(tmp_path):
    file = tmp_path / "measured.json"
    made = plan(FAMILIES["bert"].build().eval(), batches_of(FAMILIES["bert"], MANY), **OPTIONS, measurements=file)
    made.measure([0.5])
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def some_fits():
    return [RefittedOutput(OutputWeights(torch.randn(4, 3), torch.randn(4, dtype=torch.float64)))]


def test_fits_depend_on_model_choices_and_site(tmp_path):
    choices = {"a": Choice.of(neurons=4), "b": Choice()}
    kept = KeptFits.beside(tmp_path / "file", {"model": "1"})
    kept.add("a", choices, some_fits())
    assert len(kept.find("a", choices)) == 1
    assert kept.find("b", choices) is None
    assert kept.find("a", {"a": Choice.of(neurons=8), "b": Choice()}) is None
    assert kept.find("a", {"a": Choice.of(neurons=4)}) is None
    assert KeptFits.beside(tmp_path / "file", {"model": "2"}).find("a", choices) is None
    kept.add("b", choices, [])
    assert kept.find("b", choices) == []
    kept.remove()
    assert kept.find("a", choices) is None and not list(tmp_path.iterdir())


def test_without_a_file_nothing_is_kept():
    kept = KeptFits.beside(None, {})
    kept.add("a", {}, some_fits())
    kept.remove()
    assert kept.find("a", {}) is None


def test_bits_and_types_of_tensors_stay():
    tensors, (fit,) = {}, some_fits()
    again = unpacked(packed(fit, tensors), tensors)
    assert torch.equal(again.output.weight, fit.output.weight)
    assert again.output.bias.dtype == torch.float64 and torch.equal(again.output.bias, fit.output.bias)


def test_a_frozen_projection_stays_frozen():
    state = QueryKeyState("per_head", 8, 4, 0.5, bias=True)
    made, tensors = build_query_key(state, 2, 16, 12, dtype=torch.float64).eval(), {}
    for parameter in made.parameters():
        torch.nn.init.ones_(parameter)
    made.shared_key.weight.requires_grad_(False)
    again = unpacked(packed(made, tensors), tensors)
    assert again.state == state and not again.training
    for (name, one), other in zip(made.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad, name


def damaged(file):
    content = file.read_bytes()
    return {
        "cut": content[:-8],
        "empty": b"",
        "an unknown class": content.replace(b"RefittedOutput", b"RefittedOutpux"),
        "an unknown tensor": content.replace(b'\\"000\\"', b'\\"009\\"'),
        "no device": content.replace(b'\\"device\\": \\"cpu\\"', b'\\"device\\": \\"cpx\\"'),
        "a field too few": content.replace(b'\\"bias\\"', b'\\"bent\\"'),
    }


@pytest.mark.parametrize(
    "how", ["cut", "empty", "an unknown class", "an unknown tensor", "no device", "a field too few"]
)
def test_damaged_fits_are_refused(how, tmp_path):
    kept, choices = KeptFits.beside(tmp_path / "file", {}), {"a": Choice.of(neurons=4)}
    kept.add("a", choices, some_fits())
    file = kept.place("a", choices)
    changed = damaged(file)[how]
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    with pytest.raises(DataError, match=rf"{file.name} holds no fits of a site .* delete it"):
        kept.find("a", choices)
