"""The page as a reader uses it: the table, filters, maps, the head that is open; by mouse and by keyboard."""

import json
from dataclasses import replace

import pytest
import torch
from chromium import MISSING, PROGRAM
from report_page import ACTIVE, TABLE, choose, column, data, site_of, text

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]


def header(name: str) -> str:
    return f"#all th:nth-child({name}) button"


def test_the_table_sorts_by_a_click(page):
    names = page.value(f"[...{TABLE}.tHead.rows[0].cells].map(c => c.textContent)")
    place = names.index("confidence") + 1
    before = column(page, "confidence")
    for how, reverse in (("descending", True), ("ascending", False)):
        page.click(header(place))
        found = [float(cell) for cell in column(page, "confidence")]
        assert found == sorted(map(float, before), reverse=reverse) != list(map(float, before))
        assert page.value(f"{TABLE}.tHead.rows[0].cells[{place - 1}].ariaSort") == how
    page.click(header(names.index("first token") + 1))  # cross-attention has none of it
    cells = column(page, "first token")
    empty = cells.count("")
    assert empty and cells[-empty:] == [""] * empty
    page.value(f"document.querySelector('{header(1)}').focus()")
    page.press("Enter")
    assert column(page, "role") == sorted(column(page, "role"))


def test_filters_count_for_maps_and_table(page):
    everything = data(page)["heads"]
    choose(page, "role", "dec-enc")
    assert set(column(page, "role")) == {"dec-enc"}
    choose(page, "layer", 1)
    assert set(column(page, "layer")) == {"1"}
    shown = len(column(page, "head"))
    assert text(page, "#filters output") == f"{shown} of {len(everything)} heads" and 0 < shown < len(everything)
    left = page.value("[...document.querySelectorAll('#maps button:not(.faded)')].map(cell => cell.dataset.head)")
    assert set(map(int, left)) == {
        place for place, head in enumerate(everything) if site_of(page, head) == ("dec-enc", 1)
    }
    page.click("#filters button")
    assert len(column(page, "head")) == len(everything)
    page.value("document.querySelector('#filters input').focus()")
    (role, layer), number = site_of(page, everything[0]), everything[0]["number"]
    page.type(f"{role} layer {layer} head {number}")
    assert column(page, "head") == [str(number)] and column(page, "layer") == [str(layer)]


def test_hovering_tells_the_numbers_and_shows_the_head_in_every_map(page):
    page.hover("#maps figure:nth-of-type(1) button[data-head='1']")  # no head has a role: the first measure's
    head, measure = data(page)["heads"][1], data(page)["measures"][0]
    said = text(page, "#tip")
    assert measure["name"] in said and f"head {head['number']}" in said
    assert f"{head['values'][0]:.3g}" in said and not page.value("document.querySelector('#tip').hidden")
    pointed = page.value("[...document.querySelectorAll('#maps .pointed')].map(c => c.dataset.head)")
    assert pointed == ["1"] * page.value("document.querySelectorAll('#maps figure').length")


def test_a_click_opens_a_head(page):
    page.click("#maps figure:nth-of-type(2) button[data-head='5']")
    head, sites = data(page)["heads"][5], data(page)["sites"]
    title = f"{sites[head['site']]['group']}, layer {sites[head['site']]['layer']}, head {head['number']}"
    assert text(page, "#head h3") == title
    page.wait(f"document.querySelector('#head .words').textContent.startsWith({json.dumps(title)})")
    assert "% of attention to" in text(page, "#head .words")
    assert page.value("document.querySelectorAll('#head tbody tr').length") > 5
    page.click("#head ul.heads button")
    assert text(page, "#head h3").endswith(f"head {head['nearest'][0][0]}")
    page.click("#all tbody tr:nth-child(3) td:nth-child(5)")
    assert text(page, "#head h3").endswith(f"head {data(page)['heads'][2]['number']}")
    page.click("#savings a[data-head]")
    opened = page.value("document.querySelector('#savings a[data-head]').dataset.head")
    assert page.value("document.querySelector('#maps .open').dataset.head") == opened


STOPS = "document.querySelectorAll('#maps [tabindex=\"0\"]').length"


def test_the_keyboard_moves_opens_and_goes_back(page):
    """Removed heads are passed over; all maps are two stops of the tabulator: a head, and the legend of its map."""
    assert page.value(STOPS) == 2
    page.value("document.querySelector('#maps [data-head][tabindex=\"0\"]').focus()")
    page.press("ArrowDown", "ArrowRight")
    place = page.value(f"{ACTIVE}.dataset.head")
    label = page.value(f"{ACTIVE}.getAttribute('aria-label')")
    assert page.value(STOPS) == 2
    page.press("PageDown")
    assert page.value(f"{ACTIVE}.dataset.head") == place
    second = data(page)["measures"][1]["name"]
    assert f": {second} " in page.value(f"{ACTIVE}.getAttribute('aria-label')")
    assert page.value(f"{ACTIVE}.closest('figure').querySelector('summary').tabIndex") == 0 and page.value(STOPS) == 2
    page.press("PageUp", "PageUp", "Enter")  # there is none above the first
    assert label.startswith(text(page, "#head h3") + ":")
    assert page.value(f"{ACTIVE} === document.querySelector('#head h3')")
    page.press("Escape")
    assert page.value(f"{ACTIVE}.dataset.head") == place


def test_few_tabs_lead_to_the_maps(page):
    """A link at the top is the first stop; what is open is where the maps are entered."""
    page.value("document.activeElement.blur()")
    page.press("Tab")
    assert page.value(f"{ACTIVE}.textContent") == "Skip to the maps"
    assert page.value(f"{ACTIVE}.getBoundingClientRect().left") >= 0
    page.press("Enter")
    assert page.value(f"{ACTIVE}.dataset.head === document.querySelector('#maps .open').dataset.head")
    page.click("#all tbody tr:nth-child(4) td:nth-child(5)")
    assert page.value("document.querySelector('#maps [data-head][tabindex=\"0\"]').dataset.head") == "3"
    page.value("document.querySelector('.skip a:nth-child(2)').focus()")
    page.press("Enter")
    assert page.value(f"{ACTIVE} === document.querySelector('.matrix.open')")


def test_columns_have_the_numbers_of_heads(page):
    """Above the cells of their heads, in every map."""
    for grid in range(page.value("document.querySelectorAll('#maps [role=grid]').length")):
        found = f"document.querySelectorAll('#maps [role=grid]')[{grid}]"
        middle = "(e => { const r = e.getBoundingClientRect(); return Math.round(r.left + r.width / 2); })"
        numbers = page.value(f"[...{found}.querySelectorAll('.numbers span')].slice(1).map(e => e.textContent)")
        assert numbers == list(map(str, range(4)))
        places = page.value(f"[...{found}.querySelectorAll('.numbers span')].slice(1).map({middle})")
        cells = page.value(
            f"[...{found}.querySelectorAll('[data-head]')].map(e => [Number(e.dataset.head), {middle}(e)])"
        )
        for head, place in cells:
            assert abs(places[data(page)["heads"][head]["number"]] - place) <= 1


def test_colours_are_those_of_the_scale(browser, report, tmp_path):
    """One outlier: the others keep their colours, and the legend says how."""
    values = {site.path: torch.linspace(0, 0.9, site.num_heads) + place for place, site in enumerate(report.sites)}
    values[report.sites[-1].path][-1] = 1e6
    browser.problems.clear()
    browser.open(replace(report, statistics=None, worth=None, gates=values).save_html(tmp_path / "report.html"))
    browser.wait("document.querySelector('#maps figure:last-of-type .cell, #maps button')")
    place = next(n for n, each in enumerate(data(browser)["measures"]) if each["name"] == "gate")
    figure = "[...document.querySelectorAll('#maps figure')].find(f => f.textContent.startsWith('Gates'))"
    assert data(browser)["measures"][place]["scale"] == "rank"
    legend = browser.value(f"{figure}.querySelector('.key').textContent")
    assert legend.startswith("0") and "1.0e+6" in legend and "by rank: the middle is " in legend
    colours = browser.value(f"[...{figure}.querySelectorAll('button')].map(b => getComputedStyle(b).backgroundImage)")
    assert len(set(colours)) == len(colours) > 4 and browser.problems == []


CODE = "document.querySelector('.code pre').textContent"


def test_code_is_copied(page):
    page.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    assert page.value("document.querySelectorAll('main pre').length") == page.value(
        "document.querySelectorAll('.code .copy').length"
    )
    page.click(".code .copy")
    page.wait("document.querySelector('.code .copy').textContent === 'copied'")
    assert page.value("navigator.clipboard.readText()") == page.value(CODE) and "prune_heads" in page.value(CODE)
    page.wait("document.querySelector('.code .copy').textContent === 'copy'")


def test_code_is_selected_where_the_clipboard_is_closed(page):
    page.value(
        "document.execCommand = () => false; navigator.clipboard.writeText = () => Promise.reject(new Error()); 0"
    )
    page.click(".code .copy")
    page.wait("document.querySelector('.code .copy').textContent.startsWith('selected')")
    assert page.value("getSelection().toString()").split() == page.value(CODE).split()


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_can_be_read_at_400_pixels_in_light_and_dark(page, scheme):
    page.resize(400, 800)
    page.scheme(scheme)
    try:
        assert page.value("document.documentElement.scrollWidth") <= 400
        ground, ink = page.value(
            "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
        )
        dark, light = "rgb(21, 22, 26)", "rgb(255, 255, 255)"
        assert ground == (dark if scheme == "dark" else light) != ink
        page.click("#maps button[data-head='2']")
        page.wait("document.querySelector('#head').getBoundingClientRect().top < 400")
    finally:
        page.resize(1200, 900)
        page.scheme("light")


def test_every_head_has_an_address(page, html):
    """It opens the head, in a new page and in this one; opening a head changes the address."""
    heads = data(page)["heads"]
    page.click("#maps button[data-head='2']")
    assert page.value("location.hash") == f"#{heads[2]['anchor']}" == f"#{text(page, '#head .anchor')[1:]}"
    page.open(html, f"#{heads[4]['anchor']}")
    page.wait("document.querySelector('#tokens .token')")
    opened = "document.querySelector('#maps .open').dataset.head"
    assert page.value(opened) == "4"
    assert (
        page.value("(() => { const r = document.querySelector('#head').getBoundingClientRect(); return r.top; })()")
        < 450
    )
    page.value(f"location.hash = '{heads[1]['anchor']}'")
    page.wait(f"{opened} === '1'")
    page.value("location.hash = 'all'")  # a section
    site = data(page)["sites"][heads[0]["site"]]
    page.open(html, f"#{site['layer']}-{heads[0]['number']}")  # without the role: the first that has such a head
    page.wait(f"{opened} === '0'")
    page.open(html, "#9-9")
    page.wait("document.querySelector('#tokens .token')")
    assert page.value(opened) == "0"


def test_everything_that_can_be_used_has_a_name(page):
    nameless = page.value(
        "[...document.querySelectorAll('button, a, select, input, img')].filter(e => !(e.getAttribute('aria-label') || "
        "e.alt || e.textContent || e.closest('label'))).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_without_scripts_the_numbers_are_there(browser, html, report):
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(html)
        root = browser.send("DOM.getDocument", depth=-1, pierce=True)["root"]
        found = browser.send("DOM.querySelectorAll", nodeId=root["nodeId"], selector="#all tbody tr")["nodeIds"]
        assert len(found) == len(report.rows()[1])
        assert browser.send("DOM.querySelector", nodeId=root["nodeId"], selector="noscript p.warning")["nodeId"]
        assert not browser.send("DOM.querySelector", nodeId=root["nodeId"], selector="#explorer *")["nodeId"]
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
