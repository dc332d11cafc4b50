"""What a run leaves in its output folder, for tests of who may write there."""

import pytest

from collab_heads.files.folders import write_folder
from collab_heads.training.storage.output import Output


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def texts(folder):
    """Relative path -> text, of every file that is not a manifest."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def writer(**files):
    def fill(folder):
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return fill


OLD = writer(config__json="old", model__safetensors="old weights", merges__txt="old merges")
NEW = writer(config__json="new", model__safetensors="new weights", tokenizer__json="new tokenizer")


@pytest.fixture
def output(tmp_path):
    """What a run leaves."""
    output = Output(tmp_path / "out")
    output.path.mkdir()
    output.save()
    output.write("translations/validation.txt", b"ours")
    write_folder(output.path / "step_0_5", writer(progress__json="{}", config__json="step"))
    output.write_folder("best", writer(config__json="best"))
    (output.path / "logs" / "glue").mkdir(parents=True)
    (output.path / "logs" / "glue" / "own.txt").write_text("mine")
    output.note_logs(lambda: (output.path / "logs" / "glue" / "events").write_text("1"))
    (output.path / "logs" / "glue" / "events").write_text("1 2")  # they grow
    output.write_model(OLD)
    output.write("all_results.json", b"{}")
    return output


def again(output):
    """As the next run sees it."""
    return Output(output.path)
