"""What can go, and how: what is named costs least, and nothing is said that was not measured."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest
import torch
from heads_by_hand import ended, model_in
from model_inputs import cast

from collab_heads import prune_heads
from collab_heads.analysis import Ablation
from collab_heads.analysis.report.savings import (
    COMPRESS,
    PLAN,
    WITHOUT_COSTS,
    cheapest,
    fewer_heads,
    kept_heads,
    metric_without,
    most_alike,
    percent,
    predicted,
    savings_html,
)

RIDGED = 0.02  # relative: costs follow from an inverse with a ridge, losses from what is left; 0.005 was measured here


class Plan:
    """What a plan tells of its budgets."""

    of = "cache"

    def curve(self):
        budgets = [0.2 + 0.8 * step / 63 for step in range(64)]
        return [(budget, 1 - budget) for budget in budgets]


def harmful(report, harms: dict[str, list[float]], higher_is_better: bool = False) -> Ablation:
    sign = -1 if higher_is_better else 1
    without = {site.path: 2.0 + sign * torch.tensor(harms[site.path]).double() for site in report.sites}
    return Ablation(report.sites, report.heads, "loss", 2.0, without, higher_is_better)


def with_costs(report, costs: dict[str, list[float]]):
    return replace(report, reconstruction={path: torch.tensor(each).double() for path, each in costs.items()})


def test_the_heads_that_cost_least_together_are_named(report):
    """By their joint cost, whatever a head costs alone."""
    total, costs = sum(site.num_heads for site in report.sites), iter(torch.linspace(0.01, 1, 99).tolist())
    given = {site.path: [next(costs) for _ in range(site.num_heads)][::-1] for site in reversed(report.sites)}
    alone = harmful(report, {site.path: [0.0] * site.num_heads for site in report.sites})
    found = cheapest(replace(with_costs(report, given), ablation=alone))
    last = report.sites[-1]
    assert len(found.heads) == -(-total // 10) and found.heads[0][0].number == report.heads[last.path][-1]
    assert found.heads[0][1] == pytest.approx(0.01) and list(found.lost()) == list(found.by_path())
    assert cheapest(replace(report, reconstruction=None)) is None
    assert WITHOUT_COSTS in unescape(savings_html(replace(report, reconstruction=None)))


def test_no_layer_loses_all_its_heads(report):
    """Even where all of a layer cost nothing, and where more heads are wanted than can go."""
    first = report.sites[0]
    free = with_costs(report, {s.path: [0.0 if s == first else 0.5] * s.num_heads for s in report.sites})
    assert {site.num_heads for site in report.sites} == {2}
    assert len(cheapest(free, 3).by_path()[first.path]) == 1
    removed = cheapest(free, 99).by_path()
    assert [len(removed[site.path]) for site in report.sites] == [1] * len(report.sites)
    alone = replace(report, sites=report.sites[:1], heads={first.path: report.heads[first.path][:1]})
    one_head = replace(alone, sites=(replace(first, num_heads=1),), reconstruction={first.path: torch.ones(1)})
    assert cheapest(one_head).heads == [] and "keeps it" in savings_html(replace(one_head, statistics=None))


def lost_by(pruned, report) -> dict[str, float]:
    """Return what sites lost, as a share of the stream: the last head of a site costs all of its output."""
    return {site.path: site.share_lost * float(report.reconstruction[site.path].max()) for site in pruned.sites}


@pytest.mark.parametrize(
    "share, said", ((0.5, "50.0%"), (0.01, "1.0%"), (0.00012, "0.012%"), (0.0, "0.0%"), (-1e-17, "-0.0%"))
)
def test_small_costs_are_not_nothing(share, said):
    assert percent(share) == said


def test_the_lines_do_it_at_the_cost_that_is_named(report):
    """`prune_heads` takes the text that the page gives to copy, and loses as much by layer as the page says."""
    text = unescape(re.sub(r"<[^>]+>", "", savings_html(report)))
    heads = ast.literal_eval(re.search(r"prune_heads\(model, batches, heads=(\{.*?\})", text, re.DOTALL)[1])
    model, (inputs, _) = model_in("marian", "pruned"), ended("marian")
    found = cheapest(report)
    pruned = prune_heads(model, heads=heads, batches=[cast(inputs, model.dtype)])
    assert {path: list(numbers) for path, numbers in heads.items()} == found.by_path()
    assert pruned.removed == len(found.heads) > 0
    assert lost_by(pruned, report) == pytest.approx(found.lost(), rel=RIDGED)
    assert f"by {percent(max(found.lost().values()))} of its variance at most" in text
    assert "\n".join([*PLAN, *COMPRESS]) in text


def test_the_price_of_fewer_heads_is_that_of_pruning(report):
    """The same heads stay as with `keep=`."""
    inputs, total = ended("marian")[0], sum(site.num_heads for site in report.sites)
    for kept, mean, most in fewer_heads(report):
        assert len(report.sites) <= kept < total
        model = model_in("marian", "pruned")
        pruned = prune_heads(model, [cast(inputs, model.dtype)], keep=kept)
        assert {s.path: sorted({*report.heads[s.path]} - {*s.kept}) for s in pruned.sites} == cheapest(
            report, total - kept
        ).by_path()
        lost = [*lost_by(pruned, report).values()]
        assert (sum(lost) / len(report.sites), max(lost)) == pytest.approx((mean, most), rel=RIDGED)
    assert [kept for kept, _, _ in fewer_heads(report)] == [round(0.9 * total), round(0.75 * total), round(0.5 * total)]
    assert fewer_heads(replace(report, reconstruction=None)) == []


@pytest.mark.slow
def test_the_command_has_the_flags():
    words = " ".join([*PLAN, *COMPRESS]).split()
    assert words[:5] == ["python", "-m", "collab_heads", "compress", "MODEL"]
    told = subprocess.run([sys.executable, *words[1:4], "--help"], capture_output=True, text=True, check=True).stdout
    flags = {word for word in words if word.startswith("--")}
    assert flags == {"--data", "--plan", "--budget", "--output_dir"} and all(flag in told for flag in flags)


def test_pairs_are_the_most_alike_of_one_layer(report):
    pairs = most_alike(report)
    cosines = sorted(
        (
            float(matrix[i, j])
            for matrix in report.statistics.cosine.values()
            for j in range(len(matrix))
            for i in range(j)
        ),
        reverse=True,
    )
    assert [cosine for *_, cosine in pairs] == pytest.approx(cosines[:5])
    assert all(one.site == other.site and one.number < other.number for one, other, _ in pairs)
    assert most_alike(replace(report, statistics=None)) == []
    near = {path: torch.ones_like(matrix) for path, matrix in report.statistics.cosine.items()}
    alike = replace(report, statistics=replace(report.statistics, cosine=near))
    assert "could do the work of both" in savings_html(alike) and "No two put out" in savings_html(report)


def test_the_metric_without_the_heads_that_can_go(report):
    ablation = harmful(report, {site.path: [0.0] * site.num_heads for site in report.sites})
    measured = replace(report, ablation=ablation, without_cheapest=2.5)
    said = "Loss: 2 with all heads, 2.5 without them, W_O as it is"
    assert metric_without(measured) == said and said in savings_html(measured) and said in str(measured)
    for unknown in (report, replace(measured, without_cheapest=None), replace(measured, ablation=None)):
        assert metric_without(unknown) == "" and "W_O as it is" not in savings_html(unknown) + str(unknown)


def test_prices_that_were_measured_or_planned(report):
    assert kept_heads(report) is None and "Measured, without training" not in savings_html(report)
    curves = {"gradient": [(4, 3.0), (8, 2.0)], "confidence": [(4, 9.0), (8, 2.0)]}
    ablation = harmful(report, {site.path: [0.0] * site.num_heads for site in report.sites})
    measured = replace(report, ablation=ablation, curves=curves)
    assert kept_heads(measured) == ("gradient", [(8, 2.0), (4, 3.0)])
    better = replace(measured, ablation=replace(ablation, higher_is_better=True))
    assert kept_heads(better)[0] == "confidence"
    assert predicted(Plan())[0] == "cache"
    budgets = [budget for budget, _ in predicted(Plan())[1]]
    assert budgets == pytest.approx([0.9, 0.75, 0.5, 0.33, 0.25], abs=0.01)  # 0.1 is below the least
    text = savings_html(measured, Plan())
    assert '<td class="number">8</td>' in text and "by budget of cache" in text and PLAN[0] + "\n" + PLAN[1] not in text
