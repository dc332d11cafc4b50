"""What the type checker of a user sees: results of public functions, and words that none of them takes."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from collab_heads.analysis.measures.results import MEASURES, Measure
from collab_heads.analysis.options import PARTS, Part
from collab_heads.base.option_values import METRIC_WORDS, Metric, Policy
from collab_heads.distillation.processes import PRECISIONS, Precision
from collab_heads.heads.penalty.alphas import BESIDE
from collab_heads.heads.penalty.parts import LossKind
from collab_heads.rotation.rules import POLICIES
from collab_heads.rotation.schedule import Direction

ROOT = Path(__file__).parents[1]
SETUP = """
from collections.abc import Mapping

from transformers import PreTrainedModel

import collab_heads
from collab_heads import *
from collab_heads.analysis import *
from collab_heads.training import *

def f(model: PreTrainedModel, batches: list[Mapping]) -> None:
"""
# an expression -> its type; modules left out
SEEN = {
    "swap_to_collaborative(model, dim_shared_query_key=8)": "SwapReport",
    "distill(model, model, batches)": "DistillReport",
    "swap_to_gated(model, sites='enc-self')": "GateReport",
    "swap_to_alpha(model)": "AlphaReport",
    "prune_heads(model, heads={'enc-self': [[0], []]})": "PruneReport",
    "fold_heads(model)": "FoldReport",
    "inspect(model).gates": "GateReport",
    "get_adapter(model)": "AttentionAdapter",
    "get_adapter(model).sites(model)": "list[AttentionSite]",
    "supported_model_types()": "list[str]",
    "HeadPenalty(model, gate_weight=0.1).total()": "Tensor",
    "HeadPenalty(model, target_heads={'enc-self': 3}, steps=5).groups()": "list[dict[str, Any]]",
    "HeadPenalty(model, growth=1.0, growth_beside='sum').finished": "bool",
    "head_importance(model, batches)": "dict[str, Tensor]",
    "most_important(model, head_importance(model, batches), 3)": "dict[str, list[int]]",
    "head_statistics(model, batches, measures='l2')": "HeadStatistics",
    "head_statistics(model, batches, measures=['l2', 'cosine']).confidence": "Mapping[str, Tensor]",
    "head_relevance(model, batches)": "HeadRelevance",
    "head_roles(model, batches)": "HeadRoles",
    "token_contributions(model, batches, prefixes='own').mean": "float",
    "compare_contributions({'a': model, 'b': 'folder'}, batches, prefixes=['own'])": "ContributionComparison",
    "leave_one_out(model, lambda m: mean_loss(m, batches))": "Ablation",
    "mean_loss(model, batches)": "float",
    "analyze_heads(model, batches, parts=['statistics'])": "HeadReport",
    "analyze_heads(model, batches).to_html()": "str",
    "HeadRotation.from_json('rotation.json')": "HeadRotation",
    "HeadRotation(policy='soft', metric='base').plan(model, 1)": "list[tuple[Slot, Slot]]",
    "evaluate(model, {'a': 'folder'}, task='retrieval', data='dev.tsv')": "EvaluationReport",
    "rotate_heads(model, [(('a', 0), ('b', 1))])": "None",
}
# a call -> the code of the error that is to be reported
REPORTED = {
    "HeadRotation(policy='softt')": "arg-type",
    "HeadRotation(policy='soft', metric='confidance')": "arg-type",
    "HeadPenalty(model, growth=1.0, growth_beside='summ')": "arg-type",
    "HeadPenalty(model, target_head=3)": "call-arg",
    "head_statistics(model, batches, measures=['confidense'])": "list-item",
    "analyze_heads(model, batches, parts='statistic')": "arg-type",
    "analyze_heads(model, batches, thresholds=0.9)": "arg-type",
    "token_contributions(model, batches, prefixes='owm')": "arg-type",
    "swap_to_gated(model, stretch=0.1)": "arg-type",
    "swap_to_collaborative(model, kind='sharedd')": "arg-type",
    "distill(model, model, batches, mixed_precision='fp16')": "arg-type",
    "evaluate(model, model, task='similarty')": "arg-type",
    "swap_to_collaborative(model, method='parafacc')": "arg-type",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, str]:
    """Expression -> what mypy says of it: a type without its modules, or the code of an error."""
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed (pip install mypy)")
    expressions = [*SEEN, *REPORTED]
    file = tmp_path_factory.mktemp("typing") / "snippet.py"
    file.write_text(SETUP + "".join(f"    reveal_type({each})\n" for each in expressions))
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--follow-imports=silent", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    first, said = SETUP.count("\n") + 1, {}
    for line, level, text in re.findall(r"snippet\.py:(\d+): (note|error): (.*)", done.stdout):
        expression = expressions[int(line) - first]
        if level == "error":
            said[expression] = re.search(r"\[([a-z-]+)\]$", text)[1]
        elif match := re.search(r'Revealed type is "(.*)"', text):
            said.setdefault(expression, re.sub(r"\b[a-z_]\w*\.(?=\w)", "", match[1]))
    return said


@pytest.mark.slow
def test_results_have_types(seen):
    assert {expression: seen.get(expression) for expression in SEEN} == SEEN


@pytest.mark.slow
def test_wrong_words_are_reported(seen):
    assert {expression: seen.get(expression) for expression in REPORTED} == REPORTED


@pytest.mark.parametrize(
    "literal, table",
    (
        (Policy, POLICIES),
        (Metric, METRIC_WORDS),
        (Measure, MEASURES),
        (Part, PARTS),
        (LossKind, BESIDE),
        (Precision, PRECISIONS),
        (Direction, ("swap", "back")),
    ),
)
def test_literals_name_what_the_tables_hold(literal, table):
    assert sorted(get_args(literal)) == sorted(table)
