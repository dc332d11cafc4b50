"""A report of a small model with all roles, and its page."""

import pytest
from chromium import Browser
from heads_by_hand import EOS, ended, model_in
from model_inputs import cast

from collab_heads import analyze_heads
from collab_heads.analysis import HeadReport

EVIL = '<script>alert("1")</script>'


@pytest.fixture(scope="session")
def report() -> HeadReport:
    """Of a pruned Marian whose name is a script."""
    model, (inputs, _) = model_in("marian", "pruned"), ended("marian")
    model.config._name_or_path = EVIL
    parts = ("statistics", "roles", "relevance", "reconstruction")
    return analyze_heads(model, [cast(inputs, model.dtype)], exclude=[EOS], parts=parts)


@pytest.fixture(scope="session")
def html(report, tmp_path_factory):
    """The path of its page."""
    return report.save_html(tmp_path_factory.mktemp("page") / "deep" / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, html):
    """The page in a browser, anew; whatever is done with it, its console stays empty."""
    browser.problems.clear()
    browser.open(html)
    browser.wait("document.querySelector('#tokens .token')")
    yield browser
    assert browser.problems == []
