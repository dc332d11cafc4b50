"""run_translation.py from end to end, on tiny models: data, phases, results and files."""

import gzip
import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import translation_models as tiny
from model_runs import swapped
from transformers import AutoModelForSeq2SeqLM
from translation_script import LEARNS, SIZES, SWAP, as_json, differing, run, translations, weights, write_lines

from collab_heads.data.translation import Objective, corpus_scores
from collab_heads.training.runs import swap as swapping

REFERENCES = tiny.pairs(12, 1)["target"]


def test_a_model_from_scratch_learns_and_is_what_was_saved(marian, bilingual):
    """The saved model, loaded by the same script with nothing to train, gives the scores that the run ended with."""
    ended = json.loads((marian / "all_results.json").read_text())
    first, last = (entry["metrics"] for entry in ended["history"])
    assert [entry["step"] for entry in ended["history"]] == [75, 150]
    assert ended["stages"] == {"fine_tuned": last}
    assert last["chrf"] > 1.5 * first["chrf"] > 0  # seen: from 7 to 18, from 9 to 20
    assert {name: ended[f"eval_{name}"] for name in last} == last
    assert first != last
    assert ended["signatures"] == corpus_scores(REFERENCES, REFERENCES)[1]
    assert (ended["swap"], ended["heads"], ended["best"]) == (None, None, None)
    loaded = run(marian, bilingual, None, "--max_train_steps", 0)
    assert loaded["stages"] == {"loaded": last}
    model = AutoModelForSeq2SeqLM.from_pretrained(marian)
    assert (model.num_parameters(), model.config.d_model) == (ended["parameters"], 32)
    assert loaded["parameters"] == ended["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ("marian", "t5"))
@pytest.mark.parametrize("mixing", ("shared", "per_head"))
def test_collaborative_from_scratch(model_type, mixing, bilingual, tmp_path):
    more = ("--collaborative", "--kind", mixing, "--dim_shared_query_key", 16, "--source_prefix", "to English: ")
    results = run(["--model_type", model_type, *SIZES], bilingual, tmp_path / "out", *more)
    assert list(results["stages"]) == ["fine_tuned"]
    assert results["swap"] is None
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert all(swapped(model))
    assert model.num_parameters() == results["parameters"]
    again = run(tmp_path / "out", bilingual, None, "--max_train_steps", 0, *more[-2:])
    assert again["stages"] == {"loaded": results["stages"]["fine_tuned"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap, stages",
    (
        ("before", ["loaded", "swapped", "fine_tuned"]),
        ("after", ["loaded", "fine_tuned", "swapped"]),
        ("between", ["loaded", "fine_tuned", "swapped", "fine_tuned_again"]),
    ),
)
def test_a_checkpoint_is_swapped(swap, stages, marian, bilingual, tmp_path, monkeypatch):
    seen, stock = [], swapping.swap

    def spy(args, model, calibration):
        seen.extend(calibration)
        return stock(args, model, calibration)

    monkeypatch.setattr(swapping, "swap", spy)
    out = tmp_path / "out"
    results = run(marian, bilingual, out, *SWAP, "--swap", swap)
    assert list(results["stages"]) == stages
    assert as_json(results, *results) == as_json(json.loads((out / "all_results.json").read_text()), *results)
    assert sum(len(batch["input_ids"]) for batch in seen) == 16
    assert all(sorted(batch) == ["attention_mask", "decoder_input_ids", "input_ids"] for batch in seen)
    assert [site["dim"] for site in results["swap"]["sites"]] == [16, 16, 16]
    assert 0 < results["swap"]["mean_output_error"] < 1
    assert [entry["steps"] for entry in results["train"]] == [6] * (len(stages) - 2)
    assert all(swapped(AutoModelForSeq2SeqLM.from_pretrained(out)))


def test_a_lossless_swap_translates_the_same(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    results = run(marian, bilingual, out, "--collaborative", "--calibration_samples", 0, "--max_train_steps", 0)
    assert translations(out, "validation-swapped-0") == translations(out, "validation-loaded-0")
    assert results["stages"]["swapped"] == results["stages"]["loaded"]


@pytest.mark.parametrize(
    "family", ("bart", "mbart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mbart50", "m2m_100", "t5")))
)
def test_every_family_learns_three_sentences_by_heart(family, tmp_path):
    """Languages, prefix, what the decoder starts from, training and generation: any mistake would show."""
    folder, count = tmp_path / "start", 3
    (tmp_path / "tokenizer").mkdir()
    more, languages = {}, ("xx", "en")
    if family in ("bart", "t5"):
        tokenizer = tiny.tokenizer("t5" if family == "t5" else "marian", tmp_path / "tokenizer")
        more = {"eos_token_id": 0, "pad_token_id": 89, "decoder_start_token_id": 0} if family == "bart" else {}
    else:
        tokenizer = tiny.multilingual(family, tmp_path / "tokenizer")
        languages = ("de", "en") if family == "m2m_100" else ("de_DE", "en_XX")
        more = {"decoder_start_token_id": 2} if family == "mbart50" else {}
    size = tiny.VOCABULARY if family in ("bart", "t5") else 400
    tiny.model(family.removesuffix("50"), size=size, **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pairs = tiny.pairs(count, 0)
    files = [write_lines(tmp_path / f"x.{side}", lines) for side, lines in pairs.items()]
    flags = ("--source_lang", languages[0], "--target_lang", languages[1], *LEARNS)
    prefix = ("--source_prefix", "translate: ") if family == "t5" else ()
    data = ["--train_file", *files, "--validation_file", *files]
    results = run(folder, data, tmp_path / "out", *flags, *prefix, "--max_train_steps", 90)
    assert results["eval_bleu"] > 90
    assert results["stages"]["loaded"]["bleu"] < 10
    assert [line.strip() for line in translations(tmp_path / "out", "validation-fine_tuned-90")] == pairs["target"]


@pytest.mark.slow
def test_translations_of_every_evaluation_are_written_and_tracked(marian, bilingual, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    results = run(marian, bilingual, out, *SWAP, "--eval_steps", 4, "--with_tracking", "--logging_steps", 2)
    names = ["loaded-0", "swapped-0", "fine_tuned-4", "fine_tuned-6"]
    assert sorted(path.stem for path in (out / "translations").iterdir()) == sorted(f"validation-{n}" for n in names)
    for name, entry in zip(names, results["history"], strict=True):
        assert name == f"{entry['stage']}-{entry['step']}"
        assert corpus_scores(translations(out, f"validation-{name}"), REFERENCES)[0] == entry["metrics"]
    events = EventAccumulator(str(out / "logs" / "translation"))
    events.Reload()
    assert [point.step for point in events.Scalars("eval_bleu")] == [0, 0, 4, 6]
    assert [point.step for point in events.Scalars("train_loss")] == [2, 4, 6]


@pytest.mark.slow
def test_beam_and_length_settings_reach_generation(marian, bilingual, tmp_path):
    found = {}
    for name, more in (
        ("beam 1", ()),
        ("beam 2", ("--num_beams", 2)),
        ("prefix", ("--source_prefix", "li dolo ")),
        ("short", ("--val_max_target_length", 5)),
        ("long", ("--length_penalty", 8, "--num_beams", 4)),
        ("brief", ("--length_penalty", -8, "--num_beams", 4)),
    ):
        run(marian, bilingual, tmp_path / name, "--max_train_steps", 0, *more)
        found[name] = translations(tmp_path / name, "validation-loaded-0")
    assert found["beam 1"] not in (found["beam 2"], found["prefix"])
    assert sum(map(len, found["short"])) < 0.7 * sum(map(len, found["beam 1"]))
    assert sum(map(len, found["long"])) > sum(map(len, found["brief"]))


@pytest.mark.slow
def test_half_precision_pads_no_further_than_the_positions(marian, bilingual, tmp_path):
    """Twenty, where sources as long would be padded to 24."""
    short = shutil.copytree(marian, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    lengths = "--max_source_length", 20, "--max_target_length", 20, "--source_prefix", "a b " * 20
    run(short, bilingual, None, "--max_train_steps", 1, "--mixed_precision", "bf16", *lengths)


@pytest.mark.parametrize("precision, multiple", (("no", 1), ("bf16", 8)))
def test_no_batch_has_more_tokens_than_asked_for(precision, multiple, marian, bilingual, monkeypatch):
    """Padding to a multiple of 8 included, where mixed precision wants it."""
    seen, stock = [], Objective.__call__

    def spy(self, model, batch):
        seen.append([tuple(batch[name].shape) for name in ("input_ids", "labels")])
        return stock(self, model, batch)

    monkeypatch.setattr(Objective, "__call__", spy)
    run(marian, bilingual, None, "--mixed_precision", precision, "--gradient_accumulation_steps", 2)
    assert len(seen) == 12
    assert all(rows * width <= 400 for shapes in seen for rows, width in shapes)
    assert max(rows * width for shapes in seen for rows, width in shapes) > 350
    assert all(width % multiple == 0 for shapes in seen for _, width in shapes)
    assert len({rows for (rows, _), _ in seen}) > 1


def table(path: Path, pairs, nested: bool) -> str:
    rows = [dict(zip(("xx", "en"), pair, strict=True)) for pair in zip(pairs["source"], pairs["target"], strict=True)]
    rows = [{"translation": row} for row in rows] if nested else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_the_same_pairs_from_text_tables_and_the_hub(marian, bilingual, tmp_path, monkeypatch, capsys):
    """Gzipped, with an empty line, as JSON of either kind: the same run."""
    pairs = {"train": tiny.pairs(200, 0), "validation": tiny.pairs(12, 1), "test": tiny.pairs(7, 2)}
    zipped = {}
    for split, sides in pairs.items():
        lines = [(side[:3], [""] if name == "source" else ["no source"], side[3:]) for name, side in sides.items()]
        zipped[split] = [tmp_path / f"{split}.{end}.gz" for end in ("xx", "en")]
        for path, parts in zip(zipped[split], lines, strict=True):
            path.write_bytes(gzip.compress("".join(f"{line}\n" for part in parts for line in part).encode()))
    columns, nested = (
        {split: [table(tmp_path / f"{split}{kind}.jsonl", sides, kind)] for split, sides in pairs.items()}
        for kind in (False, True)
    )
    expected = run(marian, bilingual, None)
    for files in (zipped, columns, nested):
        data = ["--train_file", *files["train"], "--validation_file", *files["validation"]]
        found = run(marian, data, None)
        assert found["history"] == expected["history"]
        assert found["arguments"]["data"] == expected["arguments"]["data"]
    assert "dropped 1 of 201 pairs" in capsys.readouterr().out

    def load_dataset(name, config, *, split):
        assert (name, config) == ("own/scenes", "xx-en")
        return [json.loads(line) for line in Path(nested[split][0]).read_text().splitlines()]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = ["--dataset_name", "own/scenes", "--dataset_config_name", "xx-en"]
    found = run(marian, hub, None)
    assert found["history"] == expected["history"]
    assert found["task"] == "own/scenes"
    assert list(run(marian, hub, None, "--do_predict")["stages"]) == ["loaded", "fine_tuned", "test"]


@pytest.mark.slow
def test_the_test_split_is_translated_and_scored(marian, bilingual, tmp_path):
    pairs = tiny.pairs(7, 2)
    files = [write_lines(tmp_path / f"test.{side}", lines) for side, lines in pairs.items()]
    out = tmp_path / "out"
    results = run(marian, bilingual, out, "--test_file", *files, "--max_eval_samples", 5, "--max_train_samples", 9)
    assert list(results["stages"]) == ["loaded", "fine_tuned", "test"]
    found = translations(out, "test")
    assert len(found) == 7
    assert results["stages"]["test"] == corpus_scores(found, pairs["target"])[0]
    assert results["eval_bleu"] == results["stages"]["fine_tuned"]["bleu"]  # of the validation split
    assert len(translations(out, "validation-fine_tuned-6")) == 5
    assert results["train"][0]["examples"] <= 6 * 9


@pytest.mark.slow
def test_same_seed_same_run(marian, bilingual):
    more = ("--word_dropout", 0.2, "--label_smoothing", 0.1, "--max_train_steps", 3)
    histories = [run(marian, bilingual, None, *more, "--seed", seed)["history"] for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]
    plain = [run(marian, bilingual, None, *flags)["history"] for flags in (more[4:], (*more[:2], *more[4:]), more[2:])]
    assert plain[0] != plain[1]
    assert plain[0] != plain[2]


@pytest.mark.slow
def test_only_the_named_parameters_are_trained(marian, bilingual, tmp_path):
    """Pruning the encoder with the decoder frozen: to the last bit, weight decay or not."""
    out, before = tmp_path / "out", weights(marian)
    more = ("--trainable_parameters", r"model\.encoder\.layers", "--weight_decay", 0.1)
    run(marian, bilingual, out, *more)
    trained = {name for name in before if name.startswith("model.encoder.layers")}
    moved = set(differing(out, marian))
    assert moved <= trained
    assert len(moved) > 0.9 * len(trained)  # but for key biases
    results = run(marian, bilingual, tmp_path / "pruned", *more, "--target_heads", "enc-self=1")
    after = weights(tmp_path / "pruned")
    assert results["heads"]["pruned"]["removed"] == 3
    assert [name for name in before.keys() - trained if not torch.equal(after[name], before[name])] == []
