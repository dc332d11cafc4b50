"""Alphas, disagreement, rotation, folding and head statistics in run_translation.py, from end to end."""

import json
from dataclasses import replace

import pytest
import torch
from later import Later, run_translation
from model_sizes import HEADS
from scripts import ADAM32, checkpoints, finish, fork, from_checkpoints, kill_at, start
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translation_script import (
    PROCESSES,
    SCRATCH,
    SWAP,
    as_json,
    differing,
    flags,
    run,
    translations,
    weights,
)

from collab_heads import CollabHeadsError, rotate_heads
from collab_heads.analysis import HeadStatistics, head_statistics
from collab_heads.rotation.exchange import Slot

analysis = Later("collab_heads.training.runs.analysis")
head_steps = Later("collab_heads.training.runs.head_steps")

GROWTH = "--alpha_growth_weight enc-self=5,dec-enc=2 --alpha_growth_radius 0.1".split()
RANKED = "--importance_samples 16".split()
PATHS = {
    "enc-self": "encoder.layers.0.self_attn",
    "dec-self": "decoder.layers.0.self_attn",
    "dec-enc": "decoder.layers.0.encoder_attn",
}
EPOCHS = ("--max_train_samples", 40)  # epochs of 3 steps


def exchange(role: str, *heads: int) -> dict:
    return {"role": role, "layers": [0, 0], "heads": list(heads)}


@pytest.fixture
def schedule(tmp_path):
    """Write a schedule; its path."""

    def write(content) -> str:
        path = tmp_path / "rotation.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


def alphas(folder) -> dict[str, torch.Tensor]:
    """Part of the name -> stored alphas."""
    found = {name: tensor for name, tensor in weights(folder).items() if name.endswith("mixing.alpha")}
    return {role: next(t for name, t in found.items() if path in name) for role, path in PATHS.items() if found}


def test_alphas_learn_from_their_start_on_and_are_saved(marian, bilingual, tmp_path):
    """ceil(0.5 * 4) steps without; the model that loads translates as the one that was trained."""
    out = tmp_path / "out"
    more = ("--alpha_mixing", "--alpha_start", 0.5, *GROWTH, "--max_train_steps", 4, "--checkpointing_steps", 1)
    results = run(marian, bilingual, out, *more)
    for step in range(1, 5):
        found = alphas(out / f"step_0_{step}")
        assert list(found) == list(PATHS)
        assert all(torch.equal(alpha, torch.eye(HEADS)) == (step <= 2) for alpha in found.values())
    report = {site["path"]: site for site in results["heads"]["alphas"]["sites"]}
    assert sorted(report) == sorted(PATHS.values())
    norms = {role: report[path]["nuclear_norm"] for role, path in PATHS.items()}
    assert min(norms["enc-self"], norms["dec-enc"]) > HEADS + 0.005
    loaded = run(out, bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"] == {"loaded": results["stages"]["fine_tuned"]}
    assert loaded["parameters"] == results["parameters"] == 3 * HEADS * HEADS + base_parameters(marian)


def base_parameters(folder) -> int:
    return AutoModelForSeq2SeqLM.from_pretrained(folder).num_parameters()


@pytest.mark.parametrize("model_type", ("marian", "t5"))
@pytest.mark.slow
def test_from_scratch_with_all_at_once_and_folded(model_type, bilingual, tmp_path):
    """A stock checkpoint that translates the same."""
    more = ("--alpha_mixing", *GROWTH, "--disagreement_weight", "dec-enc=0.1", "--max_train_steps", 4)
    model = ["--model_type", model_type, *SCRATCH[2:]]
    results = run(model, bilingual, tmp_path / "out", *more, "--fold_heads", "--save_head_statistics")
    assert list(results["stages"]) == ["fine_tuned", "folded"]
    assert results["stages"]["folded"] == results["stages"]["fine_tuned"]
    assert len(results["heads"]["folded"]["alphas"]) == 3
    assert "collab_heads" not in (tmp_path / "out" / "config.json").read_text()
    assert not alphas(tmp_path / "out")
    loaded = run(tmp_path / "out", bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"] == {"loaded": results["stages"]["folded"]}
    assert len(HeadStatistics.load(tmp_path / "out" / "head_statistics").alphas) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, last",
    (
        (("--target_heads", "enc-self=1,dec-enc=3"), "pruned"),
        (("--target_heads", 8, "--head_selection", "gradient"), "fine_tuned"),
        ((*SWAP, "--swap", "between"), "fine_tuned_again"),
    ),
    ids=("target", "importance", "between"),
)
def test_alphas_go_with_all_else(more, last, marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = (*more, "--alpha_mixing", *GROWTH, "--max_train_steps", 3, *RANKED)
    results = run(marian, bilingual, out, *more)
    assert list(results["stages"])[-1] == last
    report = results["heads"]["alphas"]["sites"]
    assert report
    assert all(site["distance"] > 0.01 for site in report)
    loaded = run(out, bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"] == {"loaded": results["stages"][last]}
    assert loaded["parameters"] == results["parameters"]


@pytest.fixture
def measured(monkeypatch):
    """The batches on which a run has measured its heads."""
    seen, stock = [], analysis.head_statistics

    def spy(model, batches, **options):
        seen[:] = batches
        return stock(model, seen, **options)

    monkeypatch.setattr("collab_heads.training.runs.analysis.head_statistics", spy)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("precision", ("no", "bf16"))
def test_statistics_are_of_the_models_own_translations(precision, marian, bilingual, tmp_path, measured):
    """Not of the references; also after a run that had nothing left to train, and so did not translate."""
    out = tmp_path / "out"
    more = ("--save_head_statistics", "--max_train_steps", 2, "--checkpointing_steps", 2)
    more += ("--mixed_precision", precision)
    run(marian, bilingual, out, *more, "--per_device_eval_batch_size", 5)
    written = translations(out, "validation-fine_tuned-2")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert [len(batch["labels"]) for batch in measured] == [5, 5, 2]
    rows = [[i for i in row.tolist() if i != -100] for batch in measured for row in batch["labels"]]
    assert sorted(rows) == sorted(tokenizer(text_target=written)["input_ids"])
    sources = [tokenizer.decode(row, skip_special_tokens=True) for batch in measured for row in batch["input_ids"]]
    lengths = [int(batch["attention_mask"].sum(1).max()) for batch in measured]
    assert lengths == sorted(lengths, reverse=True) and len(set(sources)) == 12
    first = HeadStatistics.load(out / "head_statistics")
    assert first == head_statistics(AutoModelForSeq2SeqLM.from_pretrained(out), measured)
    (out / "head_statistics" / "head_statistics.json").unlink()
    more = (*more, "--per_device_eval_batch_size", 5, "--resume_from_checkpoint", out / "step_0_2")
    run(marian, bilingual, out, *more)
    assert HeadStatistics.load(out / "head_statistics") == first


@pytest.mark.slow
def test_disagreement_drives_heads_apart(marian, bilingual, tmp_path):
    """Where it has a weight."""
    found = {}
    for weight in ("dec-enc=0", "dec-enc=3"):
        out = tmp_path / weight
        run(marian, bilingual, out, "--disagreement_weight", weight, "--save_head_statistics", "--max_train_steps", 8)
        cosine = HeadStatistics.load(out / "head_statistics").cosine[PATHS["dec-enc"]]
        found[weight] = float((cosine.sum() - cosine.diagonal().sum()) / (HEADS * (HEADS - 1)))
    assert found["dec-enc=3"] < found["dec-enc=0"] - 0.1


@pytest.mark.slow
def test_heads_change_places_as_scheduled(schedule, marian, bilingual, tmp_path, monkeypatch):
    """In all three roles; the weights are those of a training whose loop calls rotate_heads by hand."""
    found = {"2": [exchange("enc-self", 0, 1), exchange("dec-enc", 2, 3)], "4": [exchange("dec-self", 0, 3)]}
    out = tmp_path / "out"
    more = (*EPOCHS, "--max_train_steps", 11)
    results = run(marian, bilingual, out, *more, "--rotation_schedule", schedule(found))
    pairs = {
        int(epoch): [[[PATHS[one["role"]], head] for head in one["heads"]] for one in exchanges]
        for epoch, exchanges in found.items()
    }
    expected = [{"epoch": epoch, "kind": "swap", "pairs": pairs[epoch]} for epoch in (2, 4)]
    assert as_json(results["heads"], "rotation") == as_json({"rotation": expected}, "rotation")

    def before_epoch(model, epoch, optimizer):
        own = [tuple(Slot(*end) for end in pair) for pair in pairs.get(epoch, [])]
        rotate_heads(model, own, optimizer)

    monkeypatch.setattr(head_steps.HeadSteps, "add_to", lambda self, hooks: replace(hooks, before_epoch=before_epoch))
    run(marian, bilingual, tmp_path / "hand", *more)
    assert differing(out, tmp_path / "hand") == []


@pytest.mark.slow
def test_roles_rotate_in_cycles_of_their_own(marian, bilingual, tmp_path):
    more = ("--rotate", "hard", "--rotation_count", "enc-self=2,dec-enc=1", "--rotation_start", "enc-self=1,dec-enc=2")
    results = run(marian, bilingual, tmp_path / "out", *EPOCHS, "--max_train_steps", 9, *more, "--alpha_mixing")
    done = results["heads"]["rotation"]
    roles = {path: role for role, path in PATHS.items()}
    kinds = [(entry["epoch"], entry["kind"], [roles[pair[0][0]] for pair in entry["pairs"]]) for entry in done]
    assert kinds == [
        (1, "swap", ["enc-self"] * 2),
        (2, "back", ["enc-self"] * 2),
        (2, "swap", ["dec-enc"]),
        (3, "back", ["dec-enc"]),
        (3, "swap", ["enc-self"] * 2),
    ]


@pytest.mark.parametrize(
    "content, message",
    (
        ({"1": [{"paths": [PATHS["dec-self"], PATHS["dec-enc"]], "heads": [0, 1]}]}, "across roles"),
        ({"1": [{"paths": [PATHS["enc-self"], PATHS["dec-self"]], "heads": [0, 1]}]}, "across roles"),
        ({"99": [exchange("enc-self", 0, 1)]}, "the schedule has epoch 99, the training"),
        ({"1": [exchange("dec-enc", 0, 4)]}, "does not exist"),
        ({"1": [{**exchange("dec-enc", 0, 1), "layers": [0, 1]}]}, "the model has no dec-enc layer 1"),
    ),
)
def test_wrong_schedules_are_refused_before_anything_is_written(
    content, message, schedule, marian, bilingual, tmp_path
):
    with pytest.raises(CollabHeadsError, match=message):
        run(marian, bilingual, tmp_path / "out", "--rotation_schedule", schedule(content))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more, message",
    (
        (("--rotate", "soft"), "pairs layers"),
        (("--rotate", "local", "--rotation_count", 3), "count 3 is more than half of the 4 enc-self heads"),
        (("--alpha_mixing", "--alpha_growth_weight", "dec-enc=1", "--alpha_sites", "enc-self"), "unknown role in"),
        (("--disagreement_weight", "enc-self=nan"), "must be a finite number"),
        (("--fold_heads", *SWAP, "--alpha_mixing"), "cannot be --collaborative"),
    ),
)
def test_wrong_flags_are_refused_before_anything_is_written(more, message, marian, bilingual, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(marian, bilingual, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


RUNS = {
    "alphas": ("--alpha_mixing", *GROWTH, "--alpha_start", 0.3, "--trainable_parameters", "decoder"),
    "gates": ("--alpha_mixing", *GROWTH, "--target_heads", 5, "--selection_share", 0.8, *RANKED),
    "cycle": (
        *EPOCHS,
        "--rotate",
        "hard",
        "--rotation_frequency",
        2,
        "--max_train_steps",
        9,
        "--checkpointing_steps",
        4,
    ),
    "roles": (
        *EPOCHS,
        "--rotate",
        "enc-self=local,dec-self=random,dec-enc=hard",
        "--rotation_metric",
        "enc-self=pairwise,dec-enc=wasserstein",
        "--rotation_frequency",
        2,
        "--checkpointing_steps",
        "epoch",
    ),
    "epochs": (*EPOCHS, "--rotate", "local", "--alpha_mixing", *GROWTH, "--checkpointing_steps", "epoch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@from_checkpoints
def test_resuming_in_one_process(name, resumed, marian, bilingual, tmp_path):
    """From checkpoints of a run, in place: the same end; alphas are trained also where all else is frozen."""
    more, out = ("--max_train_steps", 6, "--checkpointing_steps", 2, *RUNS[name]), tmp_path / "out"
    whole = run(marian, bilingual, out, *more)
    expected = weights(out)
    for folder in checkpoints(out, resumed):
        found = run(marian, bilingual, out, *more, "--resume_from_checkpoint", folder)
        assert as_json(found, "history", "heads") == as_json(whole, "history", "heads")
        assert differing(weights(out), expected) == []
    if name == "alphas":
        assert all(site["distance"] > 0 for site in whole["heads"]["alphas"]["sites"])


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(marian, bilingual, tmp_path):
    """SIGKILL right after a checkpoint appears, heads swapped and alphas under way."""
    more = ("--alpha_mixing", *GROWTH, "--alpha_start", 0.2, "--rotate", "hard", "--rotation_frequency", 2)
    more = (*more, *EPOCHS, "--max_train_steps", 12, "--checkpointing_steps", 3, "--save_head_statistics")
    unbroken = run(marian, bilingual, tmp_path / "unbroken", *more)
    assert len(unbroken["heads"]["rotation"]) > 2
    out = tmp_path / "killed"
    kill_at(out / "step_0_6", fork(run_translation.main, flags(marian, bilingual, out, *more)))
    assert not (out / "all_results.json").exists()
    resumed = run(marian, bilingual, out, *more, "--resume_from_checkpoint")
    assert as_json(resumed, "history", "heads") == as_json(unbroken, "history", "heads")
    assert differing(out, tmp_path / "unbroken") == []
    found, expected = (HeadStatistics.load(folder / "head_statistics") for folder in (out, tmp_path / "unbroken"))
    assert found == expected


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(bilingual, tmp_path):
    """Without dropout, whose random numbers differ: the same swaps and alphas, and statistics of translations."""
    model = (*SCRATCH, "--dropout", 0)
    more = ("--alpha_mixing", *GROWTH, "--alpha_start", 0.2, "--rotate", "hard", "--max_train_steps", 8)
    more = (*more, "--max_train_samples", 60, "--save_head_statistics", "--checkpointing_steps", 8)
    one = run(model, bilingual, tmp_path / "one", *more, "--gradient_accumulation_steps", 2)
    finish(start([*PROCESSES, *flags(model, bilingual, tmp_path / "two", *more)]))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    assert as_json(two["heads"], "rotation") == as_json(one["heads"], "rotation")
    assert len(one["heads"]["rotation"]) > 2
    found, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name in expected:
        if name.endswith("k_proj.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam makes steps
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=ADAM32)
    # nothing is left to train: both processes translate before the first one measures
    first = HeadStatistics.load(tmp_path / "two" / "head_statistics")
    resume = ("--resume_from_checkpoint", tmp_path / "two" / "step_0_8")
    finish(start([*PROCESSES, *flags(model, bilingual, tmp_path / "two", *more, *resume)]))
    assert HeadStatistics.load(tmp_path / "two" / "head_statistics") == first
