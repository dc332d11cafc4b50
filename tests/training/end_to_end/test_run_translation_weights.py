"""Which heads and which weights run_translation.py ends with: chosen, learned, the best, the last, an average."""

import json

import pytest
import torch
from later import Later
from transformers import AutoModelForSeq2SeqLM
from translation_script import SCRATCH, SWAP, as_json, differing, run, weights

from collab_heads import CollabHeadsError, get_adapter

translator = Later("collab_heads.training.runs.translator")

RANKED = "--importance_samples 16".split()
CHOSEN = ("--target_heads", 6, "--head_selection", "gradient", *RANKED)


def heads(folder) -> list[tuple[str, int]]:
    """Role and number of heads of every site of a stored model."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return [(site.role, site.num_heads) for site in get_adapter(model).sites(model)]


@pytest.mark.slow
def test_an_exact_number_of_heads_per_role(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    results = run(marian, bilingual, out, "--target_heads", "enc-self=1,dec-self=2,dec-enc=3", *RANKED)
    assert heads(out) == [("enc-self", 1), ("dec-self", 2), ("dec-enc", 3)]
    assert list(results["stages"]) == ["loaded", "fine_tuned", "pruned"]
    assert results["stages"]["pruned"] == results["stages"]["fine_tuned"]
    gates = results["heads"]["gates"]
    assert (gates["heads"], gates["open"], gates["decided"]) == (12, 6, 12)
    assert as_json(results, *results) == as_json(json.loads((out / "all_results.json").read_text()), *results)
    loaded = run(out, bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"] == {"loaded": results["stages"]["pruned"]}


def test_a_configuration_of_heads(marian, bilingual, tmp_path):
    alive = tmp_path / "alive.json"
    alive.write_text('{"enc-self": [[0, 1, 1, 0]], "dec-enc": [[1, 0, 0, 0]]}')
    results = run(marian, bilingual, tmp_path / "out", "--alive_heads", alive)
    assert heads(tmp_path / "out") == [("enc-self", 2), ("dec-self", 4), ("dec-enc", 1)]
    kept = {site["path"]: list(site["kept"]) for site in results["heads"]["pruned"]["sites"]}
    assert sorted(kept.values()) == [[0], [1, 2]]
    assert list(results["stages"]) == ["loaded", "pruned", "fine_tuned"]


@pytest.mark.slow
def test_some_roles_are_fixed_and_others_learned(marian, bilingual, tmp_path):
    alive, out = tmp_path / "alive.json", tmp_path / "out"
    alive.write_text('{"enc-self": [[0, 1, 1, 0]]}')
    more = ("--alive_heads", alive, "--target_heads", "dec-enc=3", *RANKED)
    results = run(marian, bilingual, out, *more, "--checkpointing_steps", 3)
    assert heads(out) == [("enc-self", 2), ("dec-self", 4), ("dec-enc", 3)]
    assert [entry["stage"] for entry in results["history"]] == ["loaded", "pruned", "fine_tuned", "pruned"]
    assert (results["heads"]["fixed"]["removed"], results["heads"]["pruned"]["removed"]) == (2, 1)
    before = weights(out)
    again = run(marian, bilingual, out, *more, "--checkpointing_steps", 3, "--resume_from_checkpoint", out / "step_0_3")
    assert as_json(again, "heads", "history") == as_json(results, "heads", "history")
    assert differing(weights(out), before) == []


@pytest.mark.slow
def test_a_weight_per_head(marian, bilingual, tmp_path):
    more = ("--max_train_steps", 20, "--gate_learning_rate", 0.3)
    results = run(marian, bilingual, tmp_path / "out", "--gate_weight", 0.05, *more)
    number = sum(count for _, count in heads(tmp_path / "out"))
    assert number == results["heads"]["gates"]["open"] < 12
    assert run(marian, bilingual, None, "--gate_weight", 0, *more)["heads"]["pruned"]["removed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("swap", ("before", "between"))
def test_heads_and_the_swap_go_together(swap, marian, bilingual, tmp_path):
    more = (*SWAP, "--swap", swap, "--max_train_steps", 3)
    run(marian, bilingual, tmp_path / "out", *more, "--target_heads", "enc-self=1", *RANKED)
    assert heads(tmp_path / "out") == [("enc-self", 1), ("dec-self", 4), ("dec-enc", 4)]
    results = run(marian, bilingual, tmp_path / "chosen", *more, *CHOSEN)
    assert sum(count for _, count in heads(tmp_path / "chosen")) == 6
    assert list(results["stages"])[-2:] == ["pruned", {"before": "fine_tuned", "between": "fine_tuned_again"}[swap]]


@pytest.mark.slow
def test_from_scratch_with_gates(bilingual, tmp_path):
    run(SCRATCH, bilingual, tmp_path / "out", *SWAP[:3], "--target_heads", 5, *RANKED)
    assert sum(count for _, count in heads(tmp_path / "out")) == 5


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations give the BLEU that the test says, one after the other."""

    def script(*values):
        left = list(values)
        monkeypatch.setattr(
            "collab_heads.training.runs.translator.corpus_scores",
            lambda *_: ({"bleu": left.pop(0)}, {"bleu": "signature"}),
        )
        return left

    return script


EVERY = ("--eval_steps", 2, "--checkpointing_steps", 2)


@pytest.mark.slow
def test_the_best_weights_are_kept(marian, bilingual, tmp_path, scripted):
    """The first of the best, of those that were trained: not the loaded model, nor the last."""
    left, out = scripted(50.0, 1.0, 9.0, 9.0, 3.0, 9.0), tmp_path / "out"
    results = run(marian, bilingual, out, "--max_train_steps", 8, *EVERY, "--load_best_model_at_end")
    assert left == []
    assert results["best"] == {"bleu": 9.0, "stage": "fine_tuned", "step": 4}
    assert [(e["stage"], e["metrics"]["bleu"]) for e in results["history"]][-2:] == [("fine_tuned", 3.0), ("best", 9.0)]
    assert results["eval_bleu"] == 9.0
    assert differing(out, out / "step_0_4") == differing(out, out / "best") == []
    assert differing(out, out / "step_0_8") != []


@pytest.mark.slow
def test_every_phase_has_a_best_of_its_own(marian, bilingual, tmp_path, scripted):
    """That of the first is of another shape."""
    more = (*SWAP, "--swap", "between", "--max_train_steps", 6, *EVERY, "--load_best_model_at_end")
    left, out = scripted(0.0, 70.0, 80.0, 60.0, 80.0, 10.0, 2.0, 3.0, 1.0, 3.0), tmp_path / "out"
    results = run(marian, bilingual, out, *more)
    assert left == []
    assert results["best"] == {"bleu": 3.0, "stage": "fine_tuned_again", "step": 4}
    stages = ["loaded", *["fine_tuned"] * 3, "best", "swapped", *["fine_tuned_again"] * 3, "best"]
    assert [entry["stage"] for entry in results["history"]] == stages
    assert differing(out, out / "step_1_4") == []


@pytest.mark.slow
def test_the_best_of_a_pruned_model(marian, bilingual, tmp_path, scripted):
    left, out = scripted(50.0, 40.0, 9.0, 3.0, 9.0), tmp_path / "out"
    results = run(marian, bilingual, out, *CHOSEN, "--max_train_steps", 4, *EVERY, "--load_best_model_at_end")
    assert left == []
    assert differing(out, out / "step_0_2") == []
    assert sum(count for _, count in heads(out)) == 6
    assert results["best"]["step"] == 2


def mean_of(*folders) -> dict[str, torch.Tensor]:
    states = [weights(folder) for folder in folders]
    return {name: (sum(s[name].double() for s in states) / len(states)).float() for name in states[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, steps, every, names",
    (
        (1, 6, 3, ["step_0_6"]),
        (3, 9, 2, ["step_0_4", "step_0_6", "step_0_8"]),
    ),
)
def test_the_last_checkpoints_are_averaged(number, steps, every, names, marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = ("--max_train_steps", steps, "--checkpointing_steps", every, "--save_total_limit", 3)
    results = run(marian, bilingual, out, *more, "--average_checkpoints", number)
    assert list(results["stages"]) == ["loaded", "fine_tuned", "averaged"]
    assert differing(weights(out), mean_of(*(out / name for name in names))) == []
    found = sorted(path.name for path in out.glob("step_*"))
    assert found == [f"step_0_{step}" for step in range(every, steps + 1, every)][-3:]
    loaded = run(out, bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"]["loaded"] == results["stages"]["averaged"]


@pytest.mark.slow
def test_every_phase_averages_its_own_checkpoints(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = (*SWAP, "--swap", "between", "--max_train_steps", 4, "--checkpointing_steps", 2)
    run(marian, bilingual, out, *more, "--average_checkpoints", 2)
    assert differing(weights(out), mean_of(out / "step_1_2", out / "step_1_4")) == []


@pytest.mark.slow
def test_too_few_checkpoints_for_the_average_are_seen_before_training(marian, bilingual, tmp_path):
    out, epoch = tmp_path / "out", ("--max_train_samples", 60, "--checkpointing_steps", "epoch")
    for more, message in (
        (("--max_train_steps", 7, "--checkpointing_steps", 3), "training for 7 steps writes 2 checkpoints"),
        (("--max_train_steps", 7, *epoch), "training for 7 steps writes 2 checkpoints"),  # of 4 and 3 steps
        (("--max_train_steps", 0, *epoch), "training for 0 steps writes 0 checkpoints"),
    ):
        with pytest.raises(CollabHeadsError, match=f"--average_checkpoints 3: {message}: lower --checkpointing_steps"):
            run(marian, bilingual, out, *more, "--average_checkpoints", 3)
        assert not out.exists()
    run(marian, bilingual, out, "--max_train_steps", 7, *epoch, "--average_checkpoints", 2)
    assert differing(weights(out), mean_of(out / "epoch_0_1", out / "epoch_0_2")) == []
