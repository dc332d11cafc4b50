"""The model card that a run leaves, beside what the owner of the folder wrote; its folders name the package."""

import json

import pytest
from huggingface_hub import ModelCard
from load_without_package import refusal
from scripts import run
from transformers import BertForSequenceClassification

from collab_heads.saving.marks import SENTENCE, SOURCE, WEIGHTS

pytestmark = pytest.mark.slow

RUN = "--collaborative --dim_shared_query_key 16 --refine_steps 0 --num_train_epochs 1 --max_eval_samples 5".split()


OVERWRITE = ("--overwrite_output_dir", "--checkpointing_steps", "epoch")


def test_a_run_leaves_a_card_beside_what_the_owner_wrote(bert, files, tmp_path, request):
    out = tmp_path / "out"
    run(bert, files, out, *RUN)
    (out / "README.md").write_text("About mine.\n")
    results = run(bert, files, out, *RUN, *OVERWRITE)
    assert json.loads((out / "config.json").read_text())[WEIGHTS] == SENTENCE
    assert (out / SOURCE.name).read_bytes() == SOURCE.read_bytes()
    assert card(out).text.startswith("\nAbout mine.\n")
    assert f"| eval_accuracy | {results['eval_accuracy']:.6g} |" in card(out).text
    assert [path.name for path in out.glob("README*")] == ["README.md"]
    checkpoints = list(out.glob("epoch*"))
    assert checkpoints
    request.getfixturevalue("without_hooks")
    for folder in (out, *checkpoints):
        assert refusal(lambda folder=folder: BertForSequenceClassification.from_pretrained(folder)).endswith(SENTENCE)


def test_a_run_writes_its_own_card_again(bert, files, tmp_path):
    out = tmp_path / "out"
    run(bert, files, out, *RUN)
    assert "| eval_accuracy |" in card(out).text and "README.md" in (out / "manifest.json").read_text()
    run(bert, files, out, "--num_train_epochs", 1, "--max_eval_samples", 5, *OVERWRITE)
    assert not (out / "README.md").exists() and WEIGHTS not in (out / "config.json").read_text()


def card(folder):
    return ModelCard.load(folder / "README.md")
