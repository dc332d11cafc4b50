"""What the flags of run_image_classification.py say together."""

import pytest
from later import run_image_classification

from collab_heads.errors import ArgumentError

DIRS = "--train_dir a --validation_dir b "
NEW = DIRS + "--model_type vit "
REFUSED = (
    ("--model_type vit --train_dir a", "give --train_dir and --validation_dir"),
    (DIRS, "--model_name_or_path is missing: .* or --model_type for a model from scratch"),
    (NEW + "--test_dir c", "--test_dir needs --output_dir"),
    (NEW + "--horizontal_flip 1.5", "--horizontal_flip 1.5 is a probability"),
    (NEW + "--group_by_length", "--group_by_length has no meaning for images"),
    (NEW + "--analyze --analyze_treebank x --output_dir o", "--analyze_treebank has no meaning for images"),
    (DIRS + "--model_type bert", "'bert'; known: vit, deit, dinov2"),
    (DIRS + "--model_type marian", "'marian'; known: vit, deit, dinov2"),
    (DIRS + "--config_name x --d_model 8", "--d_model need --model_type"),
    (DIRS + "--config_name x --model_type vit", "--config_name and --model_type exclude each other"),
    (DIRS + "--model_name_or_path x --patch_size 8", "--patch_size describe a model from scratch"),
    (NEW + "--mixing_init ones", "--mixing_init has no effect without --collaborative and a model from scratch"),
    (NEW + "--mixing_init zeros --collaborative", "'zeros'; known: concatenate"),
    (NEW + "--image_size 5 --patch_size 2", "--image_size 5 is not a multiple of --patch_size 2"),
    (NEW + "--num_heads 5", "--d_model 192 is not a multiple of --num_heads 5"),
    (NEW + "--dropout 1", "--dropout 1.0 must be below 1"),
    (NEW + "--collaborative --allocation balanced", "--allocation balanced has no meaning from scratch"),
    (NEW + "--compress_budget 0.5", "--compress_budget has nothing to go by"),
    (NEW + "--collaborative --distill_steps 3", "--distill_steps has no original"),
    (NEW + "--collaborative --swap after", "--swap has no meaning from scratch"),
    (NEW + "--tokenizer_name x", "tokenizer_name"),
)


@pytest.mark.parametrize("flags, message", REFUSED)
def test_what_does_not_go_together(flags, message):
    with pytest.raises(ArgumentError, match=message):
        run_image_classification.parse(flags.split())


def test_what_goes_together():
    args = run_image_classification.parse((NEW + "--collaborative --mixing_init ones --horizontal_flip 1").split())
    assert (args.model_type, args.mixing_init, args.horizontal_flip, args.d_model) == ("vit", "ones", 1.0, None)
    run_image_classification.parse((NEW + "--compress_budget 0.5 --swap after").split())
    run_image_classification.parse((DIRS + "--model_name_or_path x --image_processor_name y").split())
