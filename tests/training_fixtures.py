"""Fixtures of tests that run the scripts; each conftest.py that wants them imports them."""

import os

import pytest
import translation_script
from scripts import forget_accelerate

import tiny
from collab_heads.training.options.changes import COLLABORATIVE, DISTILLATION
from collab_heads.training.options.heads import ALPHAS, HEADS, ROTATION
from collab_heads.training.options.parser import Parser
from collab_heads.training.options.run import OUTPUT, model_flags, training_flags


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """What the last test has set is forgotten."""
    yield
    forget_accelerate()


@pytest.fixture(autouse=True)
def without_sync(monkeypatch):
    """What is written need not reach the disk: a process that is killed loses nothing that it has written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A tiny BERT without a head."""
    return tiny.save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Flags that name files of generated examples; 107 for training, so that the last step is smaller."""
    folder = tmp_path_factory.mktemp("files")
    for name, count, seed in (("train", 107, 0), ("validation", 41, 1), ("test", 20, 2)):
        tiny.write_csv(folder / f"{name}.csv", tiny.rows(count, seed))
    return ["--train_file", str(folder / "train.csv"), "--validation_file", str(folder / "validation.csv")]


@pytest.fixture(scope="session")
def bilingual(tmp_path_factory):
    """Flags that name a generated corpus in two text files a split."""
    folder = tmp_path_factory.mktemp("bilingual")
    train = translation_script.write_pairs(folder, "train", 200, 0)
    return ["--train_file", *train, "--validation_file", *translation_script.write_pairs(folder, "dev", 12, 1)]


@pytest.fixture(scope="session")
def marian(bilingual, tmp_path_factory):
    """A tiny Marian that the script trained from scratch; it has begun to learn."""
    out = tmp_path_factory.mktemp("marian") / "model"
    translation_script.run(translation_script.SCRATCH, bilingual, out, *translation_script.LEARNS)
    forget_accelerate()  # the first test that asks for it may train in another precision
    return out


@pytest.fixture
def parse():
    """Parse flags of a training as the scripts do; a model is named."""
    parser = Parser()
    parser.add(*model_flags(), *COLLABORATIVE, *DISTILLATION, *HEADS, *ALPHAS, *ROTATION, *training_flags(), *OUTPUT)
    return lambda flags: parser.parse_args(["--model_name_or_path", "some", *flags.split()])
