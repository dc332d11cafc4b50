"""Flags: what their values mean, what is refused, and what a continued run must share."""

from argparse import ArgumentTypeError

import pytest

from collab_heads.errors import ArgumentError
from collab_heads.training import arguments
from collab_heads.training.arguments import Parser, check_shared, count, count_from_1, fingerprint, interval, width


@pytest.fixture
def parse():
    """Parse flags as the scripts do; a model is named."""
    parser = Parser(allow_abbrev=False)
    arguments.add_model_arguments(parser)
    arguments.add_collaborative_arguments(parser)
    arguments.add_training_arguments(parser)
    arguments.add_output_arguments(parser)
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
        (arguments.positive, "0"),
        (arguments.positive, "inf"),
        (arguments.not_negative, "-0.1"),
        (arguments.not_negative, "nan"),
    ):
        with pytest.raises(ArgumentTypeError):
            parse(text)
    assert (arguments.positive("1e-9"), arguments.not_negative("0")) == (1e-9, 0.0)


@pytest.mark.parametrize(
    "flags, message",
    (
        (["--learningrate", "1"], r"unknown flag '--learningrate' \(did you mean '--learning_rate'\?\)"),
        (["--mixin=shared"], r"unknown flag '--mixin' \(did you mean '--mixing'\?\)"),
        (["--learning_rat", "1"], r"unknown flag '--learning_rat' "),  # no abbreviations
        (["stray"], "unexpected argument 'stray'"),
        (["--learning_rate"], r"expected one argument \(see --help\)"),
        (["--learning_rate", "0"], "argument --learning_rate: 0 is too small"),
        (["--dim_shared_query_key", "half"], "argument --dim_shared_query_key: invalid width value: 'half'"),
        (["--checkpointing_steps", "0"], "argument --checkpointing_steps: 0 is too small: 1 or more"),
    ),
)
def test_wrong_flags_are_refused_with_the_nearest(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        parse(*flags)


def test_flags_mean_what_they_say(parse):
    args = parse("--checkpointing_steps", "epoch", "--resume_from_checkpoint", "--sites", "enc-self", "dec-enc")
    assert (args.checkpointing_steps, args.resume_from_checkpoint) == ("epoch", "latest")
    assert args.sites == ["enc-self", "dec-enc"]
    assert parse("--resume_from_checkpoint", "here").resume_from_checkpoint == "here"
    assert parse().resume_from_checkpoint is None


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--collaborative --swap betwen", r"unknown --swap 'betwen' \(did you mean 'between'\?\)"),
        ("--collaborative --decomposition_method pca", "unknown --decomposition_method 'pca'"),
        ("--score_terms contnt", r"did you mean 'content'"),
        ("--mixed_precision fp8", "unknown --mixed_precision 'fp8'"),
        ("--lr_scheduler_type liner", r"did you mean 'linear'"),
        ("--swap after", "without --collaborative"),
        ("--sites enc-self", "without --collaborative"),
        ("--push_to_hub", "--push_to_hub needs --output_dir"),
        ("--checkpointing_steps 5", "--checkpointing_steps needs --output_dir"),
        ("--warmup_ratio 0.1 --num_warmup_steps 3", "--warmup_ratio is a share from 0 to 1"),
        ("--warmup_ratio 1.5", "--warmup_ratio is a share from 0 to 1"),
    ),
)
def test_flags_that_do_not_go_together_are_refused(flags, message, parse):
    with pytest.raises(ArgumentError, match=message):
        check_shared(parse(*flags.split()))


@pytest.mark.parametrize(
    "flags", ("", "--collaborative --swap between --mixing per_head", "--output_dir o --checkpointing_steps 5")
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
        "--mixing per_head --decomposition_method parafac",
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
        "--dim_shared_query_key 8",
        "--gradient_accumulation_steps 2",
        "--mixed_precision bf16",
        "--score_terms content",
        "--group_by_length",
        "--max_train_steps 7",
    ):
        name = flags.split()[0].removeprefix("--")
        other = fingerprint(parse(*flags.split()))
        assert {key for key in first if first[key] != other[key]} == {name}
