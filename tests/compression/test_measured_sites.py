"""A plan that was killed goes on from the file of its measurements, and ends as an unbroken one."""

import json
import sys

import pytest
import torch
from compressing import batches_of

from collab_heads import compress, plan
from collab_heads.compression import measurements
from collab_heads.errors import ArgumentError, DataError, OutputError
from collab_heads.files.folders import alone_in
from families import FAMILIES

plan_module = sys.modules["collab_heads.compression.plan"]  # the package has a function of this name
OPTIONS = {"refine_steps": 2, "seed": 3}
SAME = 1e-4  # relative, of errors that are measured twice


def planned(name, file, **options):
    return plan(FAMILIES[name].build(), batches_of(FAMILIES[name]), **OPTIONS, **options, measurements=file)


def counting(monkeypatch, stop=None):
    """Count the sites that are measured; the one with number `stop` is interrupted."""
    seen, inner = [], measurements.site_errors

    def site_errors(site, *others):
        if len(seen) == stop:
            raise KeyboardInterrupt
        seen.append(site.path)
        return inner(site, *others)

    monkeypatch.setattr(measurements, "site_errors", site_errors)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
def test_a_killed_plan_ends_as_an_unbroken_one(name, tmp_path, monkeypatch):
    file, unbroken = tmp_path / "measured.json", planned(name, None)
    counting(monkeypatch, stop=3)
    with pytest.raises(KeyboardInterrupt):
        planned(name, file)
    assert len(json.loads(file.read_text())["sites"]) == 3
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    monkeypatch.undo()
    seen = counting(monkeypatch)
    resumed = planned(name, file)
    assert seen == [site.path for site in unbroken.sites][3:]
    for one, other in zip(resumed.sites, unbroken.sites, strict=True):
        assert (one.path, one.choices, one.costs) == (other.path, other.choices, other.costs)
        assert one.errors == pytest.approx(other.errors, rel=SAME, abs=1e-9)
    again = planned(name, file)
    assert len(seen) == len(unbroken.sites) - 3 and again.sites == resumed.sites


def test_another_budget_and_another_measure_take_what_is_there(tmp_path, monkeypatch):
    file, seen = tmp_path / "measured.json", counting(monkeypatch)
    batches, reports, models = batches_of(FAMILIES["bert"]), [], []
    for given, kept in ((0.5, None), (0.8, file), (0.5, file)):
        models.append(FAMILIES["bert"].build())
        reports.append(compress(models[-1], batches, given, **OPTIONS, measurements=kept))
    planned("bert", file, of="operations", shape="free")
    assert len(seen) == 2 * len(reports[0].sites)
    assert reports[0].predicted_error == pytest.approx(reports[2].predicted_error, rel=SAME)
    assert reports[0].measured_error == pytest.approx(reports[2].measured_error, rel=SAME)
    for one, other in zip(models[0].parameters(), models[2].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_another_run_is_refused(tmp_path):
    file, batches = tmp_path / "measured.json", batches_of(FAMILIES["bert"])
    planned("bert", file)
    stored = file.read_bytes()
    model = FAMILIES["bert"].build()
    with pytest.raises(OutputError, match=r"seed was 3 and is 4.*another file for measurements"):
        plan(model, batches, **(OPTIONS | {"seed": 4}), measurements=file)
    with pytest.raises(OutputError, match="batches was"):
        plan(model, batches[1:], **OPTIONS, measurements=file)
    with pytest.raises(OutputError, match=r"parts was \['heads'.* and is \['neurons'"):
        plan(model, batches, **OPTIONS, parts="neurons", measurements=file)
    model.config.layer_norm_eps *= 2
    with pytest.raises(OutputError, match="model was"):
        plan(model, batches, **OPTIONS, measurements=file)
    model.config.layer_norm_eps /= 2
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(OutputError, match="model was"):
        plan(model, batches, **OPTIONS, measurements=file)
    assert file.read_bytes() == stored
    with alone_in(file), pytest.raises(OutputError, match="is in use"):
        with_other_thread(lambda: planned("bert", file))
    made = planned("bert", file)
    with pytest.raises(ArgumentError, match="measurements: a plan has its own"):
        compress(made.measured.model, made, 0.5, measurements=file)


def with_other_thread(work):
    """Run something in another thread, and raise what it raises."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def first(stored):
    return next(iter(next(iter(stored["sites"].values())).values()))


def test_a_run_that_goes_on_takes_the_threads_that_it_began_with(two_threads, tmp_path, monkeypatch):
    """Those of a busy machine, though it is busy no longer, and in the fits, too."""
    file, used = tmp_path / "measured.json", []

    def used_in(owner, name):
        inner = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **more: used.append(torch.get_num_threads()) or inner(*args, **more)
        )

    used_in(measurements, "CalibratedSites")
    used_in(sys.modules["collab_heads.compression.smallest"], "fit_choices")
    monkeypatch.setattr(plan_module, "choose_threads", lambda *_: torch.set_num_threads(1))
    model, batches = FAMILIES["bert"].build(), batches_of(FAMILIES["bert"])
    made = plan(model, batches, **OPTIONS, measurements=file)
    assert used == [1, 1] and torch.get_num_threads() == 2
    monkeypatch.setattr(plan_module, "choose_threads", None)
    compress(FAMILIES["bert"].build(), batches, 0.5, **OPTIONS, measurements=file)
    assert used == [1, 1, 1, 1] and torch.get_num_threads() == 2
    compress(model, made, 0.5)
    assert used == [1, 1, 1, 1, 1] and torch.get_num_threads() == 2


CHANGES = {
    "a list": lambda stored: [stored],
    "another version": lambda stored: stored | {"version": 99},
    "no run": lambda stored: {name: value for name, value in stored.items() if name != "run"},
    "negative": lambda stored: first(stored)["errors"].__setitem__(0, [first(stored)["errors"][0][0], -1.0]),
    "a text": lambda stored: first(stored)["moved"][0].__setitem__(1, "1"),
    "another size": lambda stored: first(stored)["moved"][0].__setitem__(0, 999),
    "infinite": lambda stored: first(stored).update(left=1e999),
    "a size too few": lambda stored: first(stored)["errors"].pop() and None,
    "an unknown site": lambda stored: stored["sites"].update({"encoder.9": next(iter(stored["sites"].values()))}),
    "no threads": lambda stored: stored.update(threads=0),
    "a part too few": lambda stored: next(iter(stored["sites"].values())).popitem() and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused_before_the_model_runs(change, tmp_path, monkeypatch):
    file = tmp_path / "measured.json"
    planned("bert", file)
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(CHANGES[change](stored) or stored))
    monkeypatch.setattr(measurements, "CalibratedSites", None)
    with pytest.raises(DataError, match=r"measured\.json"):
        planned("bert", file)
