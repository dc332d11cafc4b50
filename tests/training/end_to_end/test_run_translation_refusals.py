"""What run_translation.py refuses: with a clear error, before anything is written."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import translation_models as tiny
from later import run_translation
from scripts import ROOT
from translation_script import SCRATCH, SIZES, SWAP, flags, run, write_lines

from collab_heads import CollabHeadsError

GOOD = tiny.pairs(4, 0)
BROKEN = {  # what is wrong with the training files -> their content, and the message
    "lengths": (
        {"xx": ["a"] * 4, "en": ["a"] * 3},
        r"train.xx has 4 lines and .*train.en 3: they must be translations",
    ),
    "empty": ({"xx": ["a", ""], "en": ["", "b"]}, "no pair has text on both sides"),
    "bytes": ({"xx": ["a", "b\udcfc"], "en": ["a", "b"]}, r"train.xx, line 2: not UTF-8 \(byte 0xfc\)"),
    "one file": ({"xx": ["a"]}, r"train.xx is one text file: give two"),
    "language": ({"json": [json.dumps({"xx": "a", "eng": "b"})]}, r"no column 'en' \(did you mean 'eng'\?\)"),
    "translation": ({"json": [json.dumps({"translation": {"xx": "a"}})]}, "no column 'en'; its columns: xx"),
}


def refused(message: str, model, files, out: Path, *more) -> None:
    with pytest.raises(CollabHeadsError, match=message):
        run(model, files, out, *more)
    assert not out.exists()


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(kind, marian, bilingual, tmp_path):
    content, message = BROKEN[kind]
    files = []
    for end, lines in content.items():
        path = tmp_path / f"train.{end}"
        path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
        files.append(str(path))
    refused(message, marian, ["--train_file", *files, *bilingual[3:]], tmp_path / "out")


@pytest.mark.parametrize(
    "more, message",
    (
        ("--trainable_parameters encodr", "--trainable_parameters 'encodr' matches no parameter"),
        ("--trainable_parameters ( ", r"--trainable_parameters '\(' is not a regular expression"),
        ("--label_smoothing 1", "--label_smoothing 1.0 must be below 1"),
        ("--word_dropout 1", "--word_dropout 1.0 must be below 1"),
        ("--word_dropout source=0.1,target=1.5", "--word_dropout 1.5 must be below 1"),
        ("--word_dropout enc=0.1", "'enc=0.1' is not one side=number of source, target"),
        ("--word_dropout_with random", "--word_dropout_with random has no effect without --word_dropout"),
        ("--group_by_length --max_tokens 99", "--group_by_length has no effect with --max_tokens"),
        ("--word_dropout 0.1 --word_dropout_with unk", "unknown --word_dropout_with 'unk'"),
        ("--word_dropout -0.1", "argument --word_dropout: -0.1 must be a finite number"),
        ("--length_penalty nan", "argument --length_penalty: nan must be a finite number"),
        ("--objective risk", "unknown --objective 'risk'; known: cross_entropy, minimum_risk"),
        ("--risk_samples 9", "--risk_samples have no effect without --objective minimum_risk"),
        ("--objective minimum_risk --risk_samples 1", "--risk_samples 1: .* sample 2 or more"),
        ("--objective minimum_risk --risk_samples 0", "--risk_samples 0: .* sample 2 or more"),
        ("--objective minimum_risk --risk_metric ter", "unknown --risk_metric 'ter'; known: bleu, chrf"),
        ("--objective minimum_risk --risk_sharpness -1", "argument --risk_sharpness: -1 must be a finite number"),
        ("--objective minimum_risk --word_dropout 0.1", "--word_dropout belongs to cross-entropy"),
        ("--objective minimum_risk --max_train_steps 0", "there are no training steps"),
        ("--max_tokens 0", "argument --max_tokens: 0 is too small"),
        ("--max_source_length 41", "--max_source_length 41: the model has 40 positions"),
        ("--attn_implementation flash_attention_2", "with --attn_implementation flash_attention_2 .*FlashAttention2"),
        pytest.param(
            "--attn_implementation flex_attention",
            "--attn_implementation flex_attention does not work for this run",
            marks=pytest.mark.slow,
        ),
        ("--num_beam 3", r"unknown flag '--num_beam' \(did you mean '--num_beams'\?\)"),
        ("--lr_scheduler_type invers_sqrt", r"did you mean 'inverse_sqrt'\?"),
        ("--average_checkpoints 2", "--average_checkpoints needs --checkpointing_steps"),
        ("--average_checkpoints 2 --checkpointing_steps 1 --rotate random", "would average heads that changed places"),
        ("--average_checkpoints 3 --checkpointing_steps 1 --save_total_limit 2", "--save_total_limit 2 keeps fewer"),
        ("--average_checkpoints 3 --checkpointing_steps 1 --load_best_model_at_end", "exclude each other"),
        ("--load_best_model_at_end --gate_weight 1", "--load_best_model_at_end and heads that are learned"),
        ("--load_best_model_at_end --target_heads 4", "--load_best_model_at_end and heads that are learned"),
        (
            "--average_checkpoints 2 --checkpointing_steps 1 --target_heads 4",
            "--average_checkpoints and heads that are",
        ),
        ("--dataset_name wmt16", "--dataset_name and files of your own exclude each other"),
        ("--do_predict", "--do_predict needs --test_file"),
        ("--d_model 64", "--d_model describe a model from scratch: leave them or --model_name_or_path out"),
        ("--mixing_init ones", "--mixing_init has no effect without"),
        ("--target_heads dec-enc=5", "target_heads"),
        ("--target_heads enc-slf=1", "'enc-slf=1' is not one role=number"),
        ("--collaborative --dim_shared_query_key 9000", "9000"),
        ("--model_name_or_path /nowhere", "cannot load AutoTokenizer from '/nowhere'"),
        ("--resume_from_checkpoint", "holds no finished checkpoint: to start from the beginning leave it out"),
        ("--test_file /nowhere.xx /nowhere.en", "/nowhere.xx: No such file"),
    ),
)
def test_wrong_flags(more, message, marian, bilingual, tmp_path):
    refused(message, marian, bilingual, tmp_path / "out", *more.split())


@pytest.mark.parametrize(
    "model, more, message",
    (
        (
            SCRATCH,
            "--vocab_size 5000",
            "--vocab_size 5000: the training data does not allow so many pieces: .* at most",
        ),
        (SCRATCH, "--d_model 30", "--d_model 30 is not a multiple of --num_heads 4"),
        (["--model_type", "mariam"], "", r"unknown --model_type 'mariam' \(did you mean 'marian'\?\)"),
        (SIZES, "", "--d_model, --num_layers, --num_heads, --d_ff need --model_type"),
        ([*SCRATCH, "--config_name", "x"], "", "--config_name and --model_type exclude each other"),
        ([], "", "--model_name_or_path is missing"),
        (SCRATCH, "--dropout 2", "--dropout 2.0 must be below 1"),
        (
            SCRATCH,
            "--attn_implementation flash_attention_2",
            "--attn_implementation flash_attention_2 .*FlashAttention2",
        ),
        (SCRATCH, "--collaborative --swap after", "--swap has no meaning from scratch"),
        (SCRATCH, "--collaborative --allocation balanced", "--allocation balanced has no meaning from scratch"),
        (SCRATCH, "--collaborative --mixing_init one", r"unknown --mixing_init 'one' \(did you mean 'ones'\?\)"),
        (SCRATCH, "--target_heads 13", "target_heads is 13"),
    ),
)
def test_wrong_models_from_scratch(model, more, message, bilingual, tmp_path):
    refused(message, model, bilingual, tmp_path / "out", *more.split())


@pytest.mark.parametrize(
    "files, message",
    (
        ([], "give --dataset_name, or --train_file and --validation_file"),
        (["--train_file", "x", "y"], "give --dataset_name, or --train_file and --validation_file"),
        (["--dataset_name", "x", "--target_lang", "en", "--test_file", "x", "y"], "and files of your own exclude each"),
        (["--dataset_name", "x", "--target_lang", ""], "--dataset_name needs --source_lang and --target_lang"),
    ),
)
def test_missing_data(files, message, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run_translation.parse(["--model_name_or_path", "x", "--source_lang", "xx", *files])


def test_a_missing_output_folder(marian, bilingual):
    for flag in ("--load_best_model_at_end", "--checkpointing_steps=2"):
        with pytest.raises(CollabHeadsError, match=f"{flag.split('=')[0]} needs --output_dir"):
            run(marian, bilingual, None, flag)


@pytest.mark.parametrize("kind, language", (("mbart50", "de"), ("m2m_100", "de_DE")))
def test_languages_that_the_model_does_not_know(kind, language, bilingual, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    tiny.model(kind.removesuffix("50"), size=400).save_pretrained(tmp_path / "model")
    tiny.multilingual(kind, tmp_path / "tokenizer").save_pretrained(tmp_path / "model")
    message = f"--target_lang '{language}' is not one of the model's"
    known = {"mbart50": "de_DE", "m2m_100": "de"}[kind]
    more = ("--source_lang", known, "--target_lang", language)
    refused(message, tmp_path / "model", bilingual, tmp_path / "out", *more)


@pytest.mark.slow
def test_a_changed_model(bilingual, marian, tmp_path):
    run(marian, bilingual, tmp_path / "swapped", *SWAP, "--max_train_steps", 0)
    refused("is collaborative already", tmp_path / "swapped", bilingual, tmp_path / "out", *SWAP)


def test_a_folder_in_use(marian, bilingual, tmp_path):
    write_lines(tmp_path / "thesis.txt", ["mine"])
    with pytest.raises(CollabHeadsError, match="is in use"):
        run(marian, bilingual, tmp_path, "--max_train_steps", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_an_overwritten_folder_keeps_nothing_of_the_run_before(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    run(SCRATCH, bilingual, out, "--eval_steps", 3, "--load_best_model_at_end")
    assert (out / "best").is_dir()
    (out / "thesis.txt").write_text("mine")
    run(marian, bilingual, out, "--max_train_steps", 0, "--overwrite_output_dir")
    assert [path.stem for path in (out / "translations").iterdir()] == ["validation-loaded-0"]
    assert not (out / "best").exists()
    assert (out / "thesis.txt").read_text() == "mine"


def test_the_command_line_shows_errors_without_a_traceback(bilingual, tmp_path, monkeypatch):
    command = ["run_translation.py", *flags(SCRATCH, bilingual, tmp_path / "out", "--label_smoothing", 2)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "run_translation.py"), run_name="__main__")
    assert ended.value.code == "run_translation.py: --label_smoothing 2.0 must be below 1"
