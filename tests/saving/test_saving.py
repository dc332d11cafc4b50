"""A save that is killed leaves the old model, the new one, or a folder that refuses to load and says so."""

import errno
import json
import random
import shutil
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from compressing import batches_of
from killed_saves import killed_at, stopped_at
from load_without_package import refusal
from model_runs import aligned, output
from safetensors import SafetensorError
from slow_cases import slow
from transformers import AutoModel, BertForSequenceClassification, CLIPVisionModel, LlamaForCausalLM
from unhooked import take_off_hooks

from collab_heads import fold_heads, prune_heads, prune_neurons, swap_to_gated
from collab_heads.errors import ConfigError, OutputError
from collab_heads.saving.marks import FUSION, SENTENCE, UNFINISHED, WEIGHTS
from collab_heads.saving.ties import TIE, read_metadata
from families import FAMILIES

SHARDS = {"max_shard_size": "40KB"}


def llama(seed, *removed):
    model, chance = FAMILIES["llama"].build(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.1)
    if removed:
        prune_heads(model, heads={"dec-self": [list(removed), list(removed)]})
    return model


def gated(seed):
    model = llama(seed)
    swap_to_gated(model, alive_heads={"dec-self": [[1, 0, 1, 1], [1, 1, 0, 1]]})
    return model


def with_fewer_neurons(seed):
    model = llama(seed)
    prune_neurons(model, batches_of(FAMILIES["llama"], 4), keep=0.5)
    return model


OLD_AND_NEW = {  # what is there, what is saved over it, and how both are
    "another changed": (lambda: llama(1, 1), lambda: llama(2, 2), {}),
    "another changed, in shards": (lambda: llama(1, 1), lambda: llama(2, 2), SHARDS),
    "the same change": (lambda: llama(1, 1), lambda: llama(2, 1), SHARDS),
    "other neurons": (lambda: with_fewer_neurons(1), lambda: with_fewer_neurons(2), {}),
    "stock over changed": (lambda: gated(1), lambda: llama(2), {}),
    "changed over stock": (lambda: llama(1), lambda: gated(2), {}),
}


@pytest.fixture
def inputs():
    return FAMILIES["llama"].inputs()


def loaded(folder, inputs):
    """The output of what a folder loads as, or the error that says why it does not."""
    try:
        return output(aligned(LlamaForCausalLM.from_pretrained(folder).eval()), inputs)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        return error


def without_hooks(load):
    """Call a function with transformers as it is where nobody has imported the package."""
    with pytest.MonkeyPatch.context() as patch:
        take_off_hooks(patch)
        return load()


class Folders:
    """A folder with an old model, in which a new one is saved again and again."""

    def __init__(self, case, folder, inputs):
        old, self.new, self.how = OLD_AND_NEW[case]
        self.before, self.folder, self.inputs, self.new = folder / "before", folder / "now", inputs, self.new()
        old().save_pretrained(self.before, **self.how)
        self.new.save_pretrained(folder / "after", **self.how)
        self.whole = {name: loaded(folder / name, inputs) for name in ("before", "after")}
        self.stock = {name for name in self.whole if TIE not in tied(folder / name)}
        assert not torch.equal(*self.whole.values())

    def save(self):
        self.new.save_pretrained(self.folder, **self.how)

    def after(self, dies, number):
        """What is there after a save that died: which model, or how its folder refuses; None if it lived."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.before, self.folder)
        died = dies(number, self.save)
        found = loaded(self.folder, self.inputs)
        without = without_hooks(lambda: loaded(self.folder, self.inputs))
        known = self.which(found)
        assert known is not None or isinstance(found, Exception), "it loads, and is neither model"
        assert isinstance(without, Exception) or self.which(without) in self.stock
        if known is None:
            assert isinstance(found, ConfigError) and str(self.folder) in str(found) and "save the model" in str(found)
        elif known not in self.stock:
            assert str(without).endswith(SENTENCE)
        assert died or known == "after"
        return (known or "refused") if died else None

    def which(self, found):
        if isinstance(found, Exception):
            return None
        return next((name for name, whole in self.whole.items() if torch.equal(found, whole)), None)


def tied(folder):
    return read_metadata(next(iter(folder.glob("*.safetensors"))))


BY_DEFAULT = ("changed over stock", "the same change")
CASES = [*BY_DEFAULT, *slow(*(case for case in OLD_AND_NEW if case not in BY_DEFAULT))]


@pytest.mark.parametrize("case", CASES)
def test_a_save_that_dies_at_any_operation(case, tmp_path, inputs):
    folders, found = Folders(case, tmp_path, inputs), []
    while (what := folders.after(stopped_at, len(found))) is not None:
        found.append(what)
    assert found == sorted(found, key=["before", "refused", "after"].index)  # in this order
    assert {"before", "refused"} <= set(found) and len(found) > 8


@pytest.mark.slow
def test_two_hundred_killed_saves(tmp_path, inputs):
    """Each case at every operation; the rest at operations that chance picks."""
    chance, told = random.Random(28), Counter()
    cases = {case: Folders(case, tmp_path / case.replace(" ", "-"), inputs) for case in OLD_AND_NEW}
    points = {case: 0 for case in cases}
    for case, folders in cases.items():
        while (what := folders.after(killed_at, points[case])) is not None:
            points[case], told = points[case] + 1, told + Counter([what])
    while told.total() < 200:
        case = chance.choice(list(cases))
        told[cases[case].after(killed_at, chance.randrange(points[case]))] += 1
    assert told.keys() <= {"before", "refused", "after"} and told["refused"] > 50


def test_without_the_mark_some_deaths_are_silent(tmp_path, inputs, monkeypatch):
    """What these tests would see."""
    monkeypatch.setattr("collab_heads.saving.saving.unfinished", lambda config: config)
    monkeypatch.setattr("collab_heads.saving.ties.check_tie", lambda config, files: True)
    folders = Folders("another changed", tmp_path, inputs)
    with pytest.raises(AssertionError, match="neither model"):
        for number in range(20):
            folders.after(stopped_at, number)


def stored(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_save_that_fails_before_the_weights_leaves_the_config(tmp_path, inputs):
    llama(1, 1).save_pretrained(tmp_path)
    before, model = stored(tmp_path), llama(2, 2)
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.save_pretrained(tmp_path)
    assert stored(tmp_path) == before
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "config.json").exists()


def test_a_save_that_fails_among_the_weights_is_not_one(tmp_path, inputs, monkeypatch):
    llama(1, 1).save_pretrained(tmp_path)
    model = llama(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collab_heads.saving.saving.sort_metadata", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.save_pretrained(tmp_path)
    assert stored(tmp_path)[WEIGHTS] == UNFINISHED and stored(tmp_path)[FUSION] == {UNFINISHED: True}
    with pytest.raises(ConfigError, match=r"save did not end.*save the model into it again"):
        AutoModel.from_pretrained(tmp_path)
    told = without_hooks(lambda: loaded(tmp_path, inputs))
    assert isinstance(told, ValueError) and str(told).endswith(UNFINISHED)
    model.save_pretrained(tmp_path)
    assert torch.equal(loaded(tmp_path, inputs), output(aligned(model.eval()), inputs))


def failing(error):
    if error is not None:
        raise error


@contextmanager
def full_at(size):
    """Let no file become larger, as on a full disk."""
    resource = pytest.importorskip("resource")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    """As safetensors tells it, in no error of Python's."""
    with full_at(20_000):
        with pytest.raises(OutputError, match=f"cannot write {tmp_path}/model.safetensors: the disk.*about 0.. MB"):
            llama(1, 1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*model.safetensors: .*Is a directory \(os error 21\)"):
        llama(1, 1).save_pretrained(tmp_path)


def test_the_parts_of_an_unfinished_model_do_not_load_either(tmp_path):
    """Nor with a config that was saved again, with the package or without."""
    model = FAMILIES["clip"].build()
    swap_to_gated(model, sites="dec-self")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collab_heads.saving.saving.sort_metadata", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.save_pretrained(tmp_path)
    for again in (lambda save: None, lambda save: save(), without_hooks):
        again(lambda: type(model.config).from_pretrained(tmp_path).save_pretrained(tmp_path))
        for part in (CLIPVisionModel, type(model)):
            with pytest.raises(ConfigError, match="save did not end"):
                part.from_pretrained(tmp_path)
            assert without_hooks(lambda part=part: refusal(lambda: part.from_pretrained(tmp_path))).endswith(UNFINISHED)


def test_a_save_in_shards_replaces_one_file(tmp_path, inputs):
    """Transformers loads the one file before any shard, and leaves it there."""
    llama(1, 1).save_pretrained(tmp_path)
    model = llama(2, 1)
    model.save_pretrained(tmp_path, **SHARDS)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(loaded(tmp_path, inputs), output(aligned(model.eval()), inputs))
    model = llama(3, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(loaded(tmp_path, inputs), output(aligned(model.eval()), inputs))


def test_stock_saves_are_those_of_transformers(tmp_path, monkeypatch):
    """No file is written otherwise than without the package."""
    model = FAMILIES["bert"].build()
    monkeypatch.setattr("collab_heads.saving.saving.replace", None)
    for name in ("once", "once"):
        model.save_pretrained(tmp_path / name)
    without_hooks(lambda: model.save_pretrained(tmp_path / "theirs"))
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "once" / file.name).read_bytes() == file.read_bytes()


def test_a_folded_model_over_its_changed_one(tmp_path):
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    model.save_pretrained(tmp_path)
    fold_heads(model)
    model.save_pretrained(tmp_path)
    assert TIE not in tied(tmp_path) and {WEIGHTS, FUSION} & stored(tmp_path).keys() == set()
    assert without_hooks(lambda: BertForSequenceClassification.from_pretrained(tmp_path)) is not None


def test_the_same_model_is_the_same_bytes(tmp_path):
    """Two entries of metadata come from safetensors in any order."""
    model = gated(1)
    for name in map(str, range(8)):
        model.save_pretrained(tmp_path / name)
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in map(str, range(8))}) == 1


def test_a_disk_that_is_full_before_any_weight_is_replaced_leaves_the_old_model(tmp_path, monkeypatch):
    """Of one file of weights, nothing is new; of several, the first is."""
    old = llama(0)
    old.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with full_at(20_000), pytest.raises(OutputError, match="What was there before stays: make room"):
        llama(1, 1).save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    inputs = FAMILIES["llama"].inputs()
    assert torch.equal(loaded(tmp_path, inputs), output(aligned(old.eval()), inputs))
    errors = iter((None, OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr("collab_heads.saving.saving.sort_metadata", lambda file: failing(next(errors)))
    with pytest.raises(OutputError, match="Other files of the weights there are new already"):
        llama(1, 1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert "save did not end" in str(loaded(tmp_path, inputs))


def test_a_card_that_cannot_be_read_stops_no_save(tmp_path, monkeypatch):
    """Root reads every file, so the reading itself fails here."""
    (tmp_path / "README.md").write_text("mine")
    read = Path.read_bytes

    def refused(file):
        if file.name == "README.md":
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", refused)
    llama(1, 1).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "model.safetensors").exists()


def test_what_cannot_be_cleaned_up_does_not_hide_the_cause(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*config.json"):
        llama(1, 1).save_pretrained(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
