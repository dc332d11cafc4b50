"""Alphas, disagreement, folding and head statistics in run_glue.py, from end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from later import Later, run_glue
from model_sizes import HEADS
from opening import alphas_in, record_of
from scripts import ADAM32, LAUNCH, SWAP, checkpoints, finish, flags, fork, from_checkpoints, kill_at, run, start
from transformers import AutoModelForSequenceClassification
from translation_script import as_json, differing, weights

import tiny
from collab_heads import CollabHeadsError, get_adapter, inspect, prune_heads
from collab_heads.analysis import HeadStatistics, head_statistics

training = Later("collab_heads.training.loop.training")
analysis = Later("collab_heads.training.runs.analysis")

RANKED = "--importance_samples 32".split()
GROWTH = "--alpha_growth_weight 5 --alpha_growth_radius 0.1".split()
NARROW = [*SWAP[:1], "--dim_shared_query_key", "0.5", *SWAP[3:]]
PATHS = [f"encoder.layer.{layer}.attention.self" for layer in (0, 1)]
FP32_NOISE = 1e-5  # float32 sums in another order, over two layers; seen: 5e-7


def load(folder: Path):
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def alphas(folder: Path) -> list[torch.Tensor]:
    """The stored alphas, layer by layer."""
    return [tensor for name, tensor in sorted(weights(folder).items()) if name.endswith("mixing.alpha")]


def identity(alpha: torch.Tensor) -> bool:
    return torch.equal(alpha, torch.eye(len(alpha)))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 44, (5, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load(folder)(**batch()).logits


def check_loads(results: dict, out: Path, files) -> None:
    """What was saved is the model that the run ended with."""
    last = results["history"][-1]["metrics"]
    assert run(out, files, None, "--num_train_epochs", 0)["stages"] == {"loaded": last}
    model = load(out)
    assert model.num_parameters() == results["parameters"]
    assert as_json(results, *results) == as_json(json.loads((out / "all_results.json").read_text()), *results)


@pytest.mark.slow
def test_alphas_learn_from_their_start_on(bert, files, tmp_path):
    """ceil(0.4 * 6) steps without; then they move, and their norms rise. The saved model has them."""
    out = tmp_path / "out"
    more = ("--alpha_mixing", "--alpha_start", 0.4, *GROWTH, "--max_train_steps", 6, "--checkpointing_steps", 1)
    results = run(bert, files, out, *more)
    for step in range(1, 7):
        found = alphas(out / f"step_0_{step}")
        assert [identity(alpha) for alpha in found] == [step <= 3] * 2
    assert len(differing(out / "step_0_2", out / "step_0_1")) > 20  # all else trains from the first step on
    report = results["heads"]["alphas"]["sites"]
    assert report == inspect(load(out)).alphas.to_dict()["sites"]
    assert [site["path"] for site in report] == PATHS
    assert all(site["distance"] > 0 for site in report)
    plain = run(bert, files, None, *more[:3], "--max_train_steps", 6)["heads"]["alphas"]["sites"]
    pushed = [pair[0]["nuclear_norm"] - pair[1]["nuclear_norm"] for pair in zip(report, plain, strict=True)]
    assert min(pushed) > 0.004  # of 3 steps on 4 singular values, 0.018 at most; seen: 0.0075
    check_loads(results, out, files)
    assert all(record_of(load(out)).sites[path].alphas for path in PATHS)


def test_without_a_start_alphas_learn_at_once_and_only_where_asked(bert, files, tmp_path):
    out = tmp_path / "out"
    more = ("--alpha_mixing", "--alpha_sites", PATHS[1], "--max_train_steps", 1)
    results = run(bert, files, out, *more)
    (alpha,) = alphas(out)
    assert not identity(alpha)
    assert [site["path"] for site in results["heads"]["alphas"]["sites"]] == PATHS[1:]


@pytest.fixture
def watched(monkeypatch):
    """The parameter groups of the optimizer, and what each step's gradient is clipped over."""
    seen = {"groups": [], "clipped": []}
    groups_of, clip = training.parameter_groups, torch.nn.utils.clip_grad_norm_

    def parameter_groups(model, *args, **options):
        found = groups_of(model, *args, **options)
        names = {id(p): name for name, p in model.named_parameters()}
        seen["names"] = names
        seen["groups"].append([{**g, "params": [names[id(p)] for p in g["params"]]} for g in found])
        return found

    def clip_grad_norm_(parameters, *args, **options):
        parameters = list(parameters)
        seen["clipped"].append([seen["names"][id(p)] for p in parameters])
        return clip(parameters, *args, **options)

    monkeypatch.setattr("collab_heads.training.loop.training.parameter_groups", parameter_groups)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("rate", (None, 0.02))
def test_alphas_have_a_group_of_their_own(rate, bert, files, watched):
    """Without weight decay, with a rate of their own if one is given, and out of the clipping; also beside gates."""
    more = ("--alpha_mixing", "--weight_decay", 0.1, "--max_train_steps", 1, "--gate_weight", 0.1)
    run(bert, files, None, *more, *(("--alpha_learning_rate", rate) if rate else ()))
    (groups,) = watched["groups"]
    (own,) = [g for g in groups if any(name.endswith("mixing.alpha") for name in g["params"])]
    assert sorted(own["params"]) == [f"bert.encoder.layer.{i}.attention.output.dense.mixing.alpha" for i in (0, 1)]
    assert own["weight_decay"] == 0.0
    assert own.get("lr") == rate
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.0, 0.0]
    (clipped,) = watched["clipped"]
    assert not [name for name in clipped if "alpha" in name]
    assert len(clipped) == len(watched["names"]) - 4


@pytest.mark.slow
def test_alphas_of_a_loaded_model_do_not_decay(bert, files, tmp_path, watched):
    """Trained on without --alpha_mixing, they are weights like others, but for the decay."""
    run(bert, files, tmp_path / "first", "--alpha_mixing", "--max_train_steps", 2)
    results = run(tmp_path / "first", files, tmp_path / "out", "--weight_decay", 0.1, "--max_train_steps", 2)
    decayed, plain = watched["groups"][1]
    assert [name.endswith("mixing.alpha") for name in plain["params"]].count(True) == 2
    assert not [name for name in decayed["params"] if "alpha" in name]
    assert "alphas" not in (results["heads"] or {})
    assert all(
        not torch.equal(*pair) for pair in zip(alphas(tmp_path / "first"), alphas(tmp_path / "out"), strict=True)
    )
    with pytest.raises(CollabHeadsError, match="has alphas already: fold_heads them first"):
        run(tmp_path / "first", files, tmp_path / "other", "--alpha_mixing")
    assert not (tmp_path / "other").exists()


LOADS = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
batch = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(**batch).logits, sys.argv[3])
assert not [name for name in sys.modules if name.startswith("collab_heads")], "not a stock checkpoint"
"""


@pytest.mark.slow
def test_folding_makes_a_stock_checkpoint(bert, files, tmp_path):
    """The same outputs, and nothing of ours in the config."""
    more = ("--alpha_mixing", *GROWTH, "--max_train_steps", 6)
    run(bert, files, tmp_path / "mixed", *more)
    results = run(bert, files, tmp_path / "folded", *more, "--fold_heads")
    assert list(results["stages"]) == ["fine_tuned", "folded"]
    assert results["stages"]["folded"] == results["stages"]["fine_tuned"]
    assert results["heads"]["folded"]["alphas"] == list(PATHS)
    assert results["heads"]["alphas"]["sites"][0]["distance"] > 0  # as they were learned
    assert "collab_heads" not in (tmp_path / "folded" / "config.json").read_text()
    assert not alphas(tmp_path / "folded")
    torch.testing.assert_close(logits(tmp_path / "folded"), logits(tmp_path / "mixed"), rtol=0, atol=FP32_NOISE)
    check_loads(results, tmp_path / "folded", files)


@pytest.mark.slow
def test_a_folded_model_loads_without_this_package(bert, files, tmp_path):
    """In a fresh process, pruned heads as zeros and alphas in W_O."""
    more = ("--alpha_mixing", *GROWTH, "--target_heads", 3, *RANKED, "--max_train_steps", 6)
    run(bert, files, tmp_path / "mixed", *more)
    run(bert, files, tmp_path / "folded", *more, "--fold_heads")
    torch.save(batch(), tmp_path / "batch.pt")
    command = [sys.executable, "-c", LOADS, tmp_path / "folded", tmp_path / "batch.pt", tmp_path / "logits.pt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found, logits(tmp_path / "mixed"), rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
def test_folding_gates_and_what_has_nothing_to_fold(bert, files, tmp_path):
    """Removed heads come back as zeros; a weight that closes none leaves a stock model, which is none the worse."""
    results = run(bert, files, tmp_path / "out", "--target_heads", 3, *RANKED, "--max_train_steps", 4, "--fold_heads")
    assert list(results["stages"]) == ["fine_tuned", "pruned", "folded"]
    assert sum(map(len, results["heads"]["folded"]["restored"].values())) == 2 * HEADS - 3
    assert results["stages"]["folded"] == results["stages"]["pruned"]
    check_loads(results, tmp_path / "out", files)
    assert "collab_heads" not in (tmp_path / "out" / "config.json").read_text()
    results = run(bert, files, tmp_path / "whole", "--gate_weight", 0.0, "--max_train_steps", 2, "--fold_heads")
    assert results["heads"]["pruned"]["removed"] == 0
    assert "collab_heads" not in (tmp_path / "whole" / "config.json").read_text()
    check_loads(results, tmp_path / "whole", files)


@pytest.mark.slow
def test_a_collaborative_model_cannot_be_folded(bert, files, tmp_path):
    """Which is said before training, not after it."""
    run(bert, files, tmp_path / "first", *SWAP, "--max_train_steps", 1)
    with pytest.raises(CollabHeadsError, match="collaborative"):
        run(tmp_path / "first", files, tmp_path / "out", "--alpha_mixing", "--fold_heads", "--max_train_steps", 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, stages",
    (
        (("--target_heads", 5), ["fine_tuned", "pruned"]),
        (("--target_heads", 5, "--head_selection", "gradient"), ["pruned", "fine_tuned"]),
        (("--gate_weight", 0.01, "--gate_learning_rate", 0.2), ["fine_tuned", "pruned"]),
        ((*NARROW, "--swap", "between"), ["fine_tuned", "swapped", "fine_tuned_again"]),
        ((*NARROW, "--swap", "after"), ["fine_tuned", "swapped"]),
        ((*NARROW, "--swap", "between", "--target_heads", 5), ["fine_tuned", "swapped", "fine_tuned_again", "pruned"]),
    ),
    ids=("target", "importance", "weight", "between", "after", "between-target"),
)
def test_alphas_go_with_all_else(more, stages, bert, files, tmp_path):
    """The report is of what was learned, before heads go and the alphas of those that are left start again."""
    out = tmp_path / "out"
    more = (*more, "--alpha_mixing", *GROWTH, "--max_train_steps", 5, *RANKED)
    results = run(bert, files, out, *more)
    assert list(results["stages"]) == stages
    report = results["heads"]["alphas"]["sites"]
    assert report
    assert all(site["distance"] > 0.005 for site in report)
    left = [site.num_heads for site in get_adapter(load(out)).sites(load(out))]
    if "--target_heads" in more:
        assert sum(left) == 5
    mixed = {site.path: mixing.num_heads for site, mixing in alphas_in(load(out))}
    assert list(mixed.values()) == [heads for heads in left if heads > 1]
    if stages[-1] == "pruned":
        assert results["stages"]["pruned"] == results["stages"][stages[-2]]
    check_loads(results, out, files)


@pytest.mark.slow
def test_what_is_left_to_mix(bert, files, tmp_path):
    """Of a configuration with one head here and three there; and of one with single heads, where there is nothing."""
    alive = tmp_path / "alive.json"
    alive.write_text('{"enc-self": [[0, 1, 0, 0], [1, 1, 0, 1]]}')
    more = ("--alive_heads", alive, "--alpha_mixing", "--alpha_growth_weight", "enc-self=2", "--max_train_steps", 2)
    results = run(bert, files, tmp_path / "out", *more)
    assert [(site["path"], site["heads"]) for site in results["heads"]["alphas"]["sites"]] == [(PATHS[1], 3)]
    check_loads(results, tmp_path / "out", files)
    alive.write_text('{"enc-self": [[0, 1, 0, 0], [1, 0, 0, 0]]}')
    more = (*more, "--disagreement_weight", "enc-self=1", "--checkpointing_steps", 1)
    results = run(bert, files, tmp_path / "single", *more)
    assert results["heads"]["alphas"]["sites"] == []
    assert results["heads"]["pruned"]["removed"] == 6
    check_loads(results, tmp_path / "single", files)
    again = run(bert, files, tmp_path / "single", *more, "--resume_from_checkpoint", tmp_path / "single" / "step_0_1")
    assert again["history"] == results["history"]


@pytest.mark.slow
def test_head_statistics_of_the_final_model(bert, files, tmp_path, monkeypatch):
    """On the validation examples, before folding: of the heads that training left."""
    measured, stock = [], analysis.head_statistics

    def spy(model, batches, **options):
        measured.extend(batches)
        return stock(model, measured, **options)

    monkeypatch.setattr("collab_heads.training.runs.analysis.head_statistics", spy)
    out = tmp_path / "out"
    more = ("--alpha_mixing", *GROWTH, "--save_head_statistics", "--max_train_steps", 4)
    run(bert, files, out, *more, "--per_device_eval_batch_size", 10)
    found = HeadStatistics.load(out / "head_statistics")
    assert [len(batch["labels"]) for batch in measured] == [10, 10, 10, 10, 1]
    assert found == head_statistics(load(out), measured, exclude=[tiny.SPECIAL.index("[SEP]")])
    assert all(not identity(alpha.float()) for alpha in found.alphas.values())
    run(bert, files, tmp_path / "folded", *more, "--fold_heads")
    assert HeadStatistics.load(tmp_path / "folded" / "head_statistics").alphas.keys() == set(PATHS)


def likeness(out: Path) -> float:
    """The mean cosine of different heads, over layers."""
    found = HeadStatistics.load(out / "head_statistics").cosine.values()
    return float(torch.stack([(each.sum() - each.diagonal().sum()) / (HEADS * (HEADS - 1)) for each in found]).mean())


@pytest.mark.slow
def test_disagreement_drives_heads_apart(bert, files, tmp_path):
    found = {}
    for weight in (0, 2):
        more = ("--disagreement_weight", weight, "--save_head_statistics", "--num_train_epochs", 1)
        run(bert, files, tmp_path / str(weight), *more)
        found[weight] = likeness(tmp_path / str(weight))
    assert found[2] < found[0] - 0.1


@pytest.mark.slow
def test_disagreement_with_gradient_checkpointing(bert, files, tmp_path):
    """It hears the heads that the forward pass made, once; layers that run again change nothing."""
    more = ("--disagreement_weight", 1, "--alpha_mixing", *GROWTH, "--max_train_steps", 3)
    run(bert, files, tmp_path / "plain", *more)
    run(bert, files, tmp_path / "checkpointing", *more, "--gradient_checkpointing")
    found, expected = weights(tmp_path / "checkpointing"), weights(tmp_path / "plain")
    for name in expected:
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=ADAM32)


@pytest.mark.slow
def test_bf16(bert, files, tmp_path):
    """All at once, in half precision; the weights and alphas stay in full."""
    more = ("--alpha_mixing", *GROWTH, "--disagreement_weight", 0.1, "--mixed_precision", "bf16", "--rotate", "hard")
    results = run(bert, files, tmp_path / "out", *more, "--num_train_epochs", 4, "--save_head_statistics")
    assert results["eval_accuracy"] > 0.8
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.float32}
    assert all(site["distance"] > 0 for site in results["heads"]["alphas"]["sites"])
    assert [entry["epoch"] for entry in results["heads"]["rotation"]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_micro_batches_share_the_growth_of_a_step(files, tmp_path):
    """Accumulated or not: the same gradient, so the same alphas; without dropout, whose random numbers differ."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    growth = ("--alpha_mixing", "--alpha_growth_weight", 0.002, "--alpha_growth_radius", 1.0)
    found = []
    for size, share in ((8, 1), (2, 4)):
        more = ("--per_device_train_batch_size", size, "--gradient_accumulation_steps", share, "--max_train_steps", 5)
        run(bert, files, tmp_path / str(size), *growth, *more)
        found.append(alphas(tmp_path / str(size)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ADAM32)


RUNS = {
    "alphas": ("--alpha_mixing", *GROWTH, "--alpha_start", 0.3),
    "gates": ("--alpha_mixing", *GROWTH, "--target_heads", 3, "--selection_share", 0.8, *RANKED),
    "chosen": ("--alpha_mixing", *GROWTH, "--target_heads", 5, "--head_selection", "gradient", *RANKED),
    "between": ("--alpha_mixing", *GROWTH, *NARROW, "--swap", "between", "--checkpointing_steps", 4),
    "disagreement": ("--disagreement_weight", 0.5, "--mixed_precision", "bf16", "--gradient_accumulation_steps", 2),
    "statistics": ("--save_head_statistics", "--fold_heads", "--alpha_mixing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@from_checkpoints
def test_resuming_in_one_process(name, resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place: the same end."""
    more, out = ("--max_train_steps", 6, "--checkpointing_steps", 2, *RUNS[name]), tmp_path / "out"
    whole = run(bert, files, out, *more)
    expected, statistics = weights(out), out / "head_statistics"
    measured = HeadStatistics.load(statistics) if statistics.exists() else None
    for folder in checkpoints(out, resumed, count=2 if name == "between" else 3):
        found = run(bert, files, out, *more, "--resume_from_checkpoint", folder)
        assert as_json(found, "history", "heads") == as_json(whole, "history", "heads")
        assert differing(weights(out), expected) == []
        assert measured is None or HeadStatistics.load(statistics) == measured


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(bert, files, tmp_path):
    """SIGKILL while two heads have changed places, right after a checkpoint appears."""
    more = ("--alpha_mixing", *GROWTH, "--alpha_start", 0.2, "--rotate", "hard", "--rotation_frequency", 2)
    more = (*more, "--per_device_train_batch_size", 36, "--num_train_epochs", 5, "--checkpointing_steps", 2)
    unbroken = run(bert, files, tmp_path / "unbroken", *more)
    assert [(e["epoch"], e["kind"]) for e in unbroken["heads"]["rotation"]] == [(1, "swap"), (3, "back"), (4, "swap")]
    out = tmp_path / "killed"
    kill_at(out / "step_0_4", fork(run_glue.main, flags(bert, files, out, *more)))
    assert not (out / "all_results.json").exists()
    resumed = run(bert, files, out, *more, "--resume_from_checkpoint")
    assert as_json(resumed, "history", "heads") == as_json(unbroken, "history", "heads")
    assert differing(out, tmp_path / "unbroken") == []


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(files, tmp_path):
    """Without dropout, whose random numbers differ: the same swaps, alphas and weights."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = ("--alpha_mixing", *GROWTH, "--alpha_start", 0.2, "--rotate", "hard")
    more = (*more, "--num_train_epochs", 3, "--save_head_statistics")
    one = run(bert, files, tmp_path / "one", *more, "--per_device_train_batch_size", 36)
    finish(start([*LAUNCH, *flags(bert, files, tmp_path / "two", *more, "--per_device_train_batch_size", 18)]))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    assert as_json(two["heads"], "rotation") == as_json(one["heads"], "rotation")
    assert [entry["epoch"] for entry in two["heads"]["rotation"]] == [1, 2, 3]
    found, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert len([name for name in expected if name.endswith("mixing.alpha")]) == 2
    for name in expected:
        if name.endswith("key.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam makes steps
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=ADAM32)
    assert HeadStatistics.load(tmp_path / "two" / "head_statistics").sites


@pytest.mark.parametrize(
    "more, message",
    (
        (("--alpha_mixing", "--alpha_sites", "dec-self"), "the model has no dec-self attention"),
        (("--alpha_start", 0.2), "--alpha_start needs --alpha_mixing"),
        (("--disagreement_weight", "dec-self=1"), "unknown role in --disagreement_weight 'dec-self'"),
        (("--alpha_mixing", "--max_train_steps", 0), "--alpha_mixing acts in training"),
        (("--fold_heads",), "--fold_heads needs"),
    ),
)
def test_what_cannot_work_is_refused_before_anything_is_written(more, message, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_a_single_head_is_refused_before_anything_is_written(bert, files, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    prune_heads(model, heads={PATHS[0]: [0, 1, 2]})
    model.save_pretrained(tmp_path / "pruned")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "pruned" / name).write_bytes((bert / name).read_bytes())
    with pytest.raises(CollabHeadsError, match=f"{PATHS[0]}: a single head cannot be mixed"):
        run(tmp_path / "pruned", files, tmp_path / "out", "--alpha_mixing")
    assert not (tmp_path / "out").exists()
