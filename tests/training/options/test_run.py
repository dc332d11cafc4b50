"""Flags: what their values mean, what is refused, and what a continued run must share."""

from argparse import ArgumentTypeError

import pytest
from accelerate.utils import set_seed
from later import run_glue

from collab_heads.errors import ArgumentError
from collab_heads.training.options import hub as training_hub
from collab_heads.training.options.changes import COLLABORATIVE, DISTILLATION
from collab_heads.training.options.parser import Parser
from collab_heads.training.options.run import (
    OUTPUT,
    check_tables,
    check_together,
    fingerprint,
    model_flags,
    training_flags,
)
from collab_heads.training.options.value_types import (
    MAX_SEED,
    count,
    count_from_1,
    interval,
    not_negative,
    positive,
    width,
)


def check_shared(args):
    check_together(args)
    check_tables(args)


@pytest.fixture
def parse():
    """Parse flags as the scripts do; a model is named."""
    parser = Parser()
    parser.add(*model_flags(), *COLLABORATIVE, *DISTILLATION, *training_flags(), *OUTPUT)
    return lambda *flags: parser.parse_args(["--model_name_or_path", "x", *flags])


@pytest.mark.parametrize("text, value", (("128", 128), ("1", 1), ("0.5", 0.5), ("1.0", 1.0), ("1e-1", 0.1)))
def test_widths_are_whole_and_shares_are_not(text, value):
    assert (width(text), type(width(text))) == (value, type(value))


@pytest.mark.parametrize("text, value", (("1", 1), ("500", 500), ("epoch", "epoch")))
def test_an_interval_is_a_number_of_steps_or_an_epoch(text, value):
    assert interval(text) == value


@pytest.mark.parametrize("text", ("0", "-1", "2.5", "epochs", ""))
def test_other_intervals_are_refused(text):
    with pytest.raises((ArgumentTypeError, ValueError)):
        interval(text)


def test_numbers_have_their_limits():
    assert (count("0"), count_from_1("1")) == (0, 1)
    for parse, text in (
        (count, "-1"),
        (count_from_1, "0"),
        (count_from_1, "-3"),
        (positive, "0"),
        (positive, "inf"),
        (not_negative, "-0.1"),
        (not_negative, "nan"),
    ):
        with pytest.raises(ArgumentTypeError):
            parse(text)
    assert (positive("1e-9"), not_negative("0")) == (1e-9, 0.0)


@pytest.mark.parametrize(
    "flags, message",
    (
        (["--learningrate", "1"], r"unknown flag '--learningrate' \(did you mean '--learning_rate'\?\)"),
        (["--modl=bert"], r"unknown flag '--modl' \(did you mean '--model_name_or_path'\?\); --help shows all"),
        (["--learning_rat", "1"], r"unknown flag '--learning_rat' "),  # no abbreviations
        (["--fp16"], "unknown flag '--fp16'"),
        (["--seed", "4294967296"], "argument --seed: 4294967296 is too large: 4,294,901,760 at most"),
        (["--max_train_steps", "9" * 30], "argument --max_train_steps: 9{30} is too large: 2,147,483,647 at most"),
        (["--num_train_epochs", "1e30"], "argument --num_train_epochs: 1e30 is too large: .* --max_train_steps takes"),
        (["stray"], "unexpected argument 'stray'"),
        (["--learning_rate"], r"expected one argument \(see --help\)"),
        (["--learning_rate", "0"], "argument --learning_rate: 0 is too small"),
        (
            ["--dim_shared_query_key", "half"],
            "argument --dim_shared_query_key: invalid number, or role=number, value: 'half'",
        ),
        (["--checkpointing_steps", "0"], "argument --checkpointing_steps: 0 is too small: 1 or more"),
    ),
)
def test_wrong_flags_are_refused_with_the_nearest(flags, message, parse):
    with pytest.raises(ArgumentError, match=message) as caught:
        parse(*flags)
    assert len(str(caught.value)) < 160  # not all flags that there are


def test_every_seed_is_one_that_the_generators_take(parse):
    set_seed(parse("--seed", str(MAX_SEED)).seed + 1000)  # phases and processes add to it


@pytest.fixture
def hub(monkeypatch):
    """A Hub that knows one token."""
    monkeypatch.setattr(training_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(training_hub, "get_token", lambda: None)

    def whoami(api):
        if api.token != "good":
            raise OSError("401: Invalid user token.\nrequest id: 7")

    monkeypatch.setattr(training_hub.HfApi, "whoami", whoami)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--output_dir a --hub_token good --hub_model_id a/b/c", "--hub_model_id 'a/b/c': Repo id must be in the form"),
        (
            "--output_dir run--2 --hub_token good",
            "name of --output_dir, 'run--2': Cannot have -- .* --hub_model_id",
        ),
        ("--output_dir a", "--push_to_hub needs a token: run `hf auth login`"),
        ("--output_dir a --hub_token bad", "knows no such token, or cannot be reached: 401: Invalid user token.$"),
    ),
)
def test_what_cannot_be_uploaded_is_refused_before_training(flags, message, parse, hub):
    with pytest.raises(ArgumentError, match=message):
        check_shared(parse("--push_to_hub", *flags.split()))


def test_what_can_be_uploaded(parse, hub, monkeypatch):
    check_shared(parse("--push_to_hub", "--output_dir", ".", "--hub_token", "good"))  # called as the current folder
    monkeypatch.setattr(training_hub, "is_offline_mode", lambda: True)
    with pytest.raises(ArgumentError, match="HF_HUB_OFFLINE is set"):
        check_shared(parse("--push_to_hub", "--output_dir", "a", "--hub_token", "good"))


def test_flags_mean_what_they_say(parse):
    wanted = ["--output_dir", "o", "--collaborative"]
    args = parse(
        *wanted, "--checkpointing_steps", "epoch", "--resume_from_checkpoint", "--sites", "enc-self", "dec-enc"
    )
    assert (args.checkpointing_steps, args.resume_from_checkpoint) == ("epoch", "latest")
    assert args.sites == ["enc-self", "dec-enc"]
    assert parse("--output_dir", "o", "--resume_from_checkpoint", "here").resume_from_checkpoint == "here"
    assert parse().resume_from_checkpoint is None


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--collaborative --swap betwen", r"unknown --swap 'betwen' \(did you mean 'between'\?\)"),
        ("--collaborative --decomposition_method pca", "unknown --decomposition_method 'pca'"),
        ("--score_terms contnt", r"did you mean 'content'"),
        ("--mixed_precision fp8", "unknown --mixed_precision 'fp8'"),
        ("--lr_scheduler_type liner", r"did you mean 'linear'"),
        ("--swap after", "needs --collaborative"),
        ("--sites enc-self", "needs --collaborative"),
        ("--push_to_hub", "--push_to_hub needs --output_dir"),
        ("--checkpointing_steps 5", "--checkpointing_steps needs --output_dir"),
        ("--warmup_ratio 0.1 --num_warmup_steps 3", "--warmup_ratio is a share from 0 to 1"),
        ("--warmup_ratio 1.5", "--warmup_ratio is a share from 0 to 1"),
        ("--lr_scheduler_type constant --num_warmup_steps 3", "constant has no warm-up: choose constant_with_warmup"),
        ("--lr_scheduler_type constant --warmup_ratio 0.1", "constant has no warm-up: choose constant_with_warmup"),
        ("--lr_scheduler_type polynomial --learning_rate 1e-7", "polynomial ends at 1e-07; give a higher one"),
        ("--overwrite_output_dir", "--overwrite_output_dir needs --output_dir"),
        ("--save_total_limit 2", "--save_total_limit needs --checkpointing_steps$"),
        ("--report_to all", "--report_to needs --with_tracking$"),
        ("--hub_model_id m --hub_token t", "--hub_model_id, --hub_token need --push_to_hub$"),
    ),
)
def test_flags_that_do_not_go_together_are_refused(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        check_shared(parse(*flags.split()))


@pytest.mark.parametrize(
    "flags", ("", "--collaborative --swap between --kind per_head", "--output_dir o --checkpointing_steps 5")
)
def test_flags_that_go_together_are_taken(flags, parse):
    check_shared(parse(*flags.split()))


def test_a_model_must_be_named(parse):
    args = parse()
    args.model_name_or_path = None
    with pytest.raises(ArgumentError, match="--model_name_or_path is missing"):
        check_shared(args)


@pytest.mark.parametrize(
    "flags",
    (
        "--kind per_head --decomposition_method parafac",
        "--decomposition_tol 1.5",
        "--allocation balanced --calibration_samples 0",
    ),
)
def test_what_the_swap_would_refuse_is_refused_before_training(flags, parse):
    with pytest.raises(ArgumentError):
        check_shared(parse("--collaborative", "--swap", "after", *flags.split()))


def test_a_continued_run_may_differ_in_where_it_writes_and_in_nothing_else(parse):
    first = fingerprint(parse("--output_dir", "a"))
    free = "--output_dir b --overwrite_output_dir --resume_from_checkpoint --checkpointing_steps 5 --save_total_limit 2"
    free += " --logging_steps 1 --with_tracking --report_to all --push_to_hub --hub_model_id m --hub_token secret"
    assert fingerprint(parse(*free.split(), "--dataloader_num_workers", "2")) == first
    assert "secret" not in str(fingerprint(parse(*free.split())))
    for flags in (
        "--learning_rate 1",
        "--seed 1",
        "--collaborative",
        "--dim_shared_query_key 8 --collaborative",
        "--gradient_accumulation_steps 2",
        "--mixed_precision bf16",
        "--score_terms content",
        "--group_by_length",
        "--max_train_steps 7",
    ):
        names = {each.removeprefix("--") for each in flags.split() if each.startswith("--")}
        other = fingerprint(parse(*flags.split()))
        assert {key for key in first if first[key] != other[key]} == names


@pytest.mark.parametrize("task, epochs", (("rte", 10), ("SST2", 10), ("mrpc", 3), ("wnli", 3), ("cola", 3)))
def test_automatic_epochs_are_those_of_the_task(task, epochs):
    """As epfml/collaborative-attention's run_glue.py sets them; a run that goes on may name the number instead."""
    flags = ["--model_name_or_path", "x", "--task_name", task]
    automatic = run_glue.parse([*flags, "--num_train_epochs", "auto"])
    assert automatic.num_train_epochs == epochs
    assert fingerprint(automatic) == fingerprint(run_glue.parse([*flags, "--num_train_epochs", str(epochs)]))
    assert run_glue.parse(flags).num_train_epochs == 3  # unless they are asked for


def test_automatic_epochs_are_for_tasks(parse):
    own = ["--model_name_or_path", "x", "--train_file", "a.csv", "--validation_file", "b.csv"]
    with pytest.raises(ArgumentError, match="--num_train_epochs auto is for GLUE's tasks"):
        run_glue.parse([*own, "--num_train_epochs", "auto"])
    with pytest.raises(ArgumentError, match="argument --num_train_epochs: invalid epochs value: 'auto'"):
        parse("--num_train_epochs", "auto")  # other scripts
    with pytest.raises(ArgumentError, match="invalid number of epochs, or auto value: 'autoo'"):
        run_glue.parse([*own, "--num_train_epochs", "autoo"])
    with pytest.raises(ArgumentError, match="-1 must be a finite number"):
        run_glue.parse([*own, "--num_train_epochs", "-1"])
