"""Of two that write one folder, only the one whose content is there says that it worked; killed ones leave no trace."""

import hashlib
import json
import os
import random
import signal
import time
from contextlib import suppress

import pytest
import torch
from busy import IN_USE, busy, in_child
from commands import run
from compressing import batches_of
from distilling import changed_pair, random_batches
from killed_saves import killed_at
from known_heads import word_pieces
from model_runs import swap
from trimming import bert

from collab_heads import analyze_heads, distill, export
from collab_heads.analysis import head_statistics
from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import new_checkpoint
from collab_heads.files.folders import MANIFEST, damage, recover, retire, write_folder
from collab_heads.files.locks import PARTIAL, WRITING
from families import FAMILIES

ENOUGH = 200  # races


def stock(seed=0):
    model = FAMILIES["bert"].build().bert.eval()
    with torch.no_grad():
        model.embeddings.LayerNorm.bias.fill_(seed)
    return model


def changed(seed=0):
    model = stock(seed)
    swap(model, "shared", 20)
    return model


def source(place):
    """A folder with a stock model and its tokenizer."""
    tokenizer = word_pieces()
    bert(tokenizer).save_pretrained(place / "source")
    tokenizer.save_pretrained(place / "source")
    return place / "source"


def export_it(folder):
    export(stock(), folder, "transformers")


def save_over_a_changed_one(folder):
    with suppress(OutputError):
        changed().save_pretrained(folder)
    stock(1).save_pretrained(folder)


def run_a_command(folder):
    run("swap", source(folder.parent), "--dim_shared_query_key", 20, "--output_dir", folder)


def distill_it(folder):
    model, original = changed_pair()
    distill(model, original, random_batches(8), 2, output_dir=folder.parent, checkpoint_every=1)


def save_statistics(folder):
    head_statistics(stock(), batches_of(FAMILIES["bert"])).save(folder)


def save_report(folder):
    analyze_heads(stock(), batches_of(FAMILIES["bert"]), parts=["statistics"]).save(folder)


def write_checkpoint(folder):
    with new_checkpoint(folder, {"run": {}}) as partial:
        (partial / "state").write_text("mine")


WRITERS = {  # each writes a folder of the name that it is given; `distill` always writes one called "distillation"
    "export": export_it,
    "changed model": lambda folder: changed().save_pretrained(folder),
    "command": run_a_command,
    "distillation": distill_it,
    "statistics": save_statistics,
    "report": save_report,
    "checkpoint": write_checkpoint,
    "deleted": lambda folder: retire(folder),
    "recovered": recover,
}


def inside(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_the_second_writer_is_refused_and_changes_nothing(name, tmp_path):
    folder = tmp_path / "place" / "distillation"
    write_folder(folder.with_name("distillation.partial"), lambda partial: None)  # as a living writer has it
    before = inside(folder.parent)
    with busy(folder), pytest.raises(OutputError, match=f"distillation {IN_USE}.*: wait for its end, or choose"):
        WRITERS[name](folder)
    now = inside(folder.parent)
    assert {path: now.get(path) for path in before} == before
    assert not folder.exists()


def test_a_stock_model_is_saved_over_a_changed_one_alone_and_elsewhere_freely(tmp_path):
    changed().save_pretrained(tmp_path / "changed")
    before = inside(tmp_path / "changed")
    for folder in (tmp_path / "changed", tmp_path / "new"):
        with busy(folder):
            if folder.name == "changed":
                with pytest.raises(OutputError, match=IN_USE):
                    stock(1).save_pretrained(folder)
            else:
                stock(1).save_pretrained(folder)
    assert inside(tmp_path / "changed") == before
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_of_several_processes_that_save_one_model_the_others_wait_for_no_lock(tmp_path):
    with busy(tmp_path / "model"):
        changed().save_pretrained(tmp_path / "model", is_main_process=False)


def test_a_living_writer_ends_its_folder_and_a_killed_one_makes_way(tmp_path):
    folder, calls = tmp_path / "model", []

    def slowly(begun):
        def fill(partial):
            (partial / "model").write_text("first")
            begun()
            signal.pause()

        write_folder(folder, fill)

    def fill(partial):
        calls.append(partial)
        (partial / "model").write_text("second")

    with in_child(slowly) as writer:
        with pytest.raises(OutputError, match=f'{IN_USE} .."process": {writer}'):
            write_folder(folder, fill)
        assert calls == []
        assert (tmp_path / f"model{PARTIAL}" / "model").read_text() == "first"
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        write_folder(folder, fill)
    assert (folder / "model").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize("there", (False, True))
def test_a_killed_export_leaves_only_what_the_next_one_takes_away(there, tmp_path, monkeypatch):
    """At every operation on files. The folder itself is whole, or empty."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    model, ends = stock(), set()
    for number in range(200):
        place = tmp_path / str(number)
        folder = place / "model"
        place.mkdir()
        if there:
            folder.mkdir()
        died = killed_at(number, lambda folder=folder: export(model, folder, "transformers"))
        names = {path.name for path in place.iterdir()}
        assert names <= {"model", f"model{PARTIAL}", f"model{WRITING}"}
        if whole := folder.exists() and any(folder.iterdir()):
            assert damage(folder) is None
            assert f"model{PARTIAL}" not in names
        else:
            assert folder.exists() == there
        ends.add(whole)
        if not died:
            break
        if number % 5 == 0 and not whole:
            export(model, folder, "transformers")
            assert [path.name for path in place.iterdir()] == ["model"]
    assert ends == {True, False}
    assert number > 10


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    for name in ("scratch", "elsewhere"):
        (tmp_path / "disk" / name).mkdir(parents=True)
    os.symlink(tmp_path / "disk" / "scratch", tmp_path / "exported")
    os.symlink(tmp_path / "disk" / "elsewhere", tmp_path / "swapped")
    export(stock(), tmp_path / "exported", "transformers")
    run("swap", source(tmp_path), "--dim_shared_query_key", 20, "--output_dir", tmp_path / "swapped")
    for link, name in (("exported", "scratch"), ("swapped", "elsewhere")):
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / "disk" / name / "model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "exported", "swapped", "source"}
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"scratch", "elsewhere"}


def digest(folder):
    """Of what differs between the writers of a race."""
    names = ("model.safetensors", "trim.json", "vocab.txt", "tokenizer.json", "config.json", MANIFEST, "state")
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names if (folder / n).is_file()}


def plain_folder(number, folder, place):
    def fill(partial):
        for name in ("state", "config.json"):
            (partial / name).write_text(json.dumps([number] * 1000))

    write_folder(folder, fill, only_new=True)


def trim(number, folder, place):
    run("trim", place / "source", "--data", place / f"{number}.txt", "--keep", 26, "--output_dir", folder, "--quiet")


# name -> its writer, and its share of the races
RACES = {
    "folder": (plain_folder, 100),
    "export": (lambda number, folder, place: export(MODELS[number], folder, "transformers"), 40),
    "save": (lambda number, folder, place: CHANGED[number].save_pretrained(folder), 40),
    "trim": (trim, 20),
}
MODELS, CHANGED = [], []


def race(write, number, folder, place, delay):
    """Write in another process; returns its id."""
    if not (child := os.fork()):
        code = 2
        with suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            time.sleep(delay)
            try:
                write(number, folder, place)
                code = 0
            except OutputError as error:
                code = 1 if IN_USE in str(error) or "is not empty" in str(error) or "is in use" in str(error) else 2
        os._exit(code)
    return child


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_two_hundred_races_without_a_loss(name, tmp_path):
    """A model that is saved over another one, after the end of that save, is the one exception: both have worked."""
    write, count = RACES[name]
    MODELS[:], CHANGED[:] = [stock(0), stock(1)], [changed(0), changed(1)]
    source(tmp_path)
    for number, words in enumerate(("she can chase", "the dog")):
        (tmp_path / f"{number}.txt").write_text(f"{words}\n" * 40)
    alone = []
    for number in (0, 1):
        folder = tmp_path / f"alone{number}"
        assert os.waitpid(race(write, number, folder, tmp_path, 0), 0)[1] == 0
        alone.append(digest(folder))
    assert alone[0] != alone[1]
    chance, refused = random.Random(name), 0
    for round_ in range(count):
        folder = tmp_path / f"round{round_}" / "both"
        delays = chance.choice((0, 0, 0.003, 0.02, 0.1)), 0
        children = [race(write, number, folder, tmp_path, delays[number]) for number in (0, 1)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 1}, codes
        assert digest(folder) in [alone[number] for number in (0, 1) if codes[number] == 0]
        assert name == "save" or sorted(codes) == [0, 1]
        assert [path.name for path in folder.parent.iterdir()] == ["both"]
        refused += sum(codes)
    assert refused
