"""A report in a terminal: a summary first, a row per head when it is asked for."""

from dataclasses import replace

from collab_heads.analysis.report.head_report import MORE, NO_ROLE, summary
from collab_heads.analysis.report.savings import cheapest


def test_the_summary_comes_first_and_rows_when_asked_for(report):
    header, rows = report.text_rows()
    told, whole = str(report), report.to_string()
    assert told.splitlines()[:2] == report.described()[:2]
    assert told.endswith(MORE) and "to_string()" in MORE
    assert whole.startswith(told.removesuffix(MORE).rstrip()) and MORE not in whole
    below = whole.removeprefix(told.removesuffix(MORE).rstrip()).strip().splitlines()
    assert below[0].split("  ")[0] == header[0] and len(below) == 2 + len(rows)
    assert [line.split()[:3] for line in below[2:]] == [row[:3] for row in rows]


def test_the_summary_has_means_roles_and_what_can_go(report):
    told, (header, rows) = str(report), summary(report)
    assert all(name in told for name in header) and all(row[3] in told for row in rows)
    assert [row[:3] for row in rows] == [[site.role, "1", "2"] for site in report.sites]
    labelled = [labels for every in report.roles.labels.values() for labels in every]
    assert f"{sum(not labels for labels in labelled)} {NO_ROLE}" in told
    found = cheapest(report)
    assert f"What can go: {len(found.heads)} of 6 heads; {found.said}:" in told
    for path, numbers in found.by_path().items():
        site = next(site for site in report.sites if site.path == path)
        assert f"  {site.role}, layer {site.layer}: {', '.join(map(str, numbers))}" in told


def test_what_was_not_measured_is_left_out(report):
    told = str(replace(report, roles=None, reconstruction=None))
    assert "What heads do" not in told and "What can go" not in told and "reconstruction" not in told
