"""What can go, and how: what is named costs least, and nothing is said that was not measured."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest
import torch
from heads_by_hand import EOS, ended, model_in

from collab_heads import prune_heads
from collab_heads.analysis.measures.ablation import Ablation
from collab_heads.analysis.report.savings import (
    COMPRESS,
    PLAN,
    WITHOUT_COSTS,
    cheapest,
    kept_heads,
    most_alike,
    predicted,
    savings_html,
)


class Plan:
    """What a plan tells of its budgets."""

    def to_dict(self):
        budgets = [0.2 + 0.8 * step / 63 for step in range(64)]
        return {"of": "cache", "curve": [(budget, 1 - budget) for budget in budgets]}


def harmful(report, harms: dict[str, list[float]], higher_is_better: bool = False) -> Ablation:
    sign = -1 if higher_is_better else 1
    without = {site.path: 2.0 + sign * torch.tensor(harms[site.path]).double() for site in report.sites}
    return Ablation(report.sites, report.heads, "loss", 2.0, without, higher_is_better)


@pytest.mark.parametrize("higher_is_better", (False, True))
def test_the_best_measure_there_is_names_the_cheapest(report, higher_is_better):
    total, costs = sum(site.num_heads for site in report.sites), iter(torch.arange(99.0).tolist())
    harms = {site.path: [next(costs) for _ in range(site.num_heads)][::-1] for site in reversed(report.sites)}
    found = cheapest(replace(report, ablation=harmful(report, harms, higher_is_better)))
    assert found.measure == "leave_one_out" and found.said == "how much worse the loss is without them"
    last = report.sites[-1]
    assert [cost for _, cost in found.heads] == [float(n) for n in range(len(found.heads))]
    assert len(found.heads) == -(-total // 10) and found.heads[0][0].number == report.heads[last.path][-1]
    assert cheapest(report).measure == "absolute_relevance"
    assert cheapest(replace(report, relevance=None)) is None
    assert WITHOUT_COSTS in unescape(savings_html(replace(report, relevance=None)))


def test_no_layer_loses_all_its_heads(report, monkeypatch):
    """Half of six heads, of which the two cheapest are all of a site."""
    monkeypatch.setattr("collab_heads.analysis.report.savings.CHEAPEST", 0.5)
    first = report.sites[0]
    harms = {site.path: [0.0 if site == first else 1.0] * site.num_heads for site in report.sites}
    names = cheapest(replace(report, ablation=harmful(report, harms))).by_path()
    assert {site.num_heads for site in report.sites} == {2} and len(names[first.path]) == 1
    assert len(names) == 3 and sum(map(len, names.values())) == 3


def test_the_lines_do_it(report):
    """What the page gives to copy is what `prune_heads` and the command take."""
    text = unescape(re.sub(r"<[^>]+>", "", savings_html(report)))
    heads = ast.literal_eval(re.search(r"prune_heads\(model, batches, heads=(\{.*?\})", text, re.DOTALL)[1])
    model, (inputs, _) = model_in("marian", "pruned"), ended("marian")
    before = {site.path: site.num_heads for site in report.sites}
    prune_heads(model, heads=heads, batches=[inputs])
    assert {path: list(numbers) for path, numbers in heads.items()} == cheapest(report).by_path()
    assert sum(before.values()) - sum(map(len, heads.values())) > 0 and EOS not in before
    assert "\n".join([*PLAN, *COMPRESS]) in text


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


def test_prices_that_were_measured_or_planned(report):
    assert kept_heads(report) is None and "heads kept" not in savings_html(report)
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
