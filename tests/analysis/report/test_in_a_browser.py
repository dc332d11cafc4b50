"""The page as a reader uses it: sorting, filters, maps, the head that is open, sentences; by mouse and by keyboard."""

import json

import pytest
import torch
from chromium import MISSING, PROGRAM, Browser
from tokenizers_made import fast
from transformers import AutoModel, BertConfig, GPT2Config, MarianConfig

from collab_heads import analyze_heads

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]
HALF_A_STEP = 0.5 / 255 + 1e-6  # the root of a weight is a byte
TABLE = "document.querySelector('#all table')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, html):
    """The page, anew; whatever is done with it, its console stays empty."""
    browser.problems.clear()
    browser.open(html)
    browser.wait("document.querySelector('#tokens .token')")
    yield browser
    assert browser.problems == []


def column(page, name: str) -> list[str]:
    """The cells of a column that are shown."""
    names = page.value(f"[...{TABLE}.tHead.rows[0].cells].map(c => c.textContent)")
    rows = f"[...{TABLE}.tBodies[0].rows].filter(r => !r.hidden)"
    return page.value(f"{rows}.map(r => r.cells[{names.index(name)}].textContent)")


def header(name: str) -> str:
    return f"#all th:nth-child({name}) button"


def text(page, selector: str) -> str:
    return page.value(f"document.querySelector({json.dumps(selector)}).textContent")


def choose(page, label: str, value) -> None:
    """Choose from a list by its label."""
    page.value(
        f"(() => {{ const l = [...document.querySelectorAll('label')].find(l => l.firstChild.data === '{label}'); "
        f"const s = l.querySelector('select'); s.value = {json.dumps(str(value))}; "
        "s.dispatchEvent(new Event('change')); })()"
    )


def data(page) -> dict:
    return page.value("JSON.parse(document.getElementById('data').textContent)")


def site_of(page, head: dict) -> tuple[str, int]:
    """Role and layer of a head."""
    site = data(page)["sites"][head["site"]]
    return site["group"], site["layer"]


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
    number = everything[0]["number"]
    page.type(f"enc-self layer 0 head {number}")
    assert column(page, "head") == [str(number)]


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


def test_where_a_head_looks_is_its_attention(page, report):
    """Of the last head of the last site, in the longest sentence: as the model computed it, to a byte."""
    last = len(data(page)["heads"]) - 1
    choose(page, "sentence", 2)
    page.click(f"#maps button[data-head='{last}']")
    weights, queries, keys = report.examples[2].of(report.sites[-1])
    column = "[...document.querySelectorAll('#tokens .tokens:{}-child .token{}')]"
    page.wait(f"{column.format('last', '')}.length === {len(keys)}")
    page.wait(f"{column.format('first', '')}.length === {len(queries)}")
    for query in (0, len(queries) - 1):
        page.hover(f"#tokens .tokens:first-child .token:nth-child({query + 1})")
        seen = page.value(f"{column.format('last', '')}.map(t => +t.style.getPropertyValue('--weight'))")
        roots = [weight**0.5 for weight in seen]
        assert roots == pytest.approx(weights[-1, query].sqrt().tolist(), abs=HALF_A_STEP)


def test_the_keyboard_moves_opens_and_goes_back(page):
    """Removed heads are passed over; a map is one stop of the tabulator."""
    grids, stops = "#maps [role=grid]", "document.querySelectorAll('#maps button[tabindex=\"0\"]').length"
    assert page.value(stops) == page.value(f"document.querySelectorAll('{grids}').length")
    page.value("document.querySelector('#maps button').focus()")
    page.press("ArrowDown", "ArrowRight")
    place = page.value("document.activeElement.dataset.head")
    label = page.value("document.activeElement.getAttribute('aria-label')")
    assert page.value(stops) == page.value(f"document.querySelectorAll('{grids}').length")
    page.press("Enter")
    assert label.startswith(text(page, "#head h3") + ":")
    assert page.value("document.activeElement === document.querySelector('#head h3')")
    page.press("Escape")
    assert page.value("document.activeElement.dataset.head") == place


def test_a_sentence_and_the_view_of_its_tokens(page):
    sentences = data(page)["sentences"]
    tokens = "[...document.querySelectorAll('#tokens .tokens:first-child .token span')].map(t => t.textContent)"
    assert page.value(tokens) == sentences[1]["tokens"]["encoder"]  # of middle length
    choose(page, "sentence", 2)
    page.wait(f"{tokens}.length === {len(sentences[2]['tokens']['encoder'])}")
    lines = "document.querySelectorAll('#tokens line').length"
    every = page.value(lines)
    page.hover("#tokens .tokens:first-child .token")
    assert 0 < page.value(lines) < every
    seen = page.value(
        "[...document.querySelectorAll('#tokens .tokens:last-child .token small')].map(t => t.textContent)"
    )
    said = page.value("document.querySelector('#tokens .token').getAttribute('aria-label')")
    largest = max(seen, key=lambda share: int(share.split()[0]) if share else 0)
    assert " looks at " in said and largest in said
    page.value("document.querySelector('#tokens .token').focus()")
    page.press("ArrowDown")
    assert page.value("document.activeElement.dataset.place") == "1"
    choose(page, "show as", "shading")
    page.wait("document.querySelector('#tokens .shading')")
    page.hover("#tokens .flow .token:nth-child(2)")
    looked_at = "[...document.querySelectorAll('#tokens .flow:last-child .token')]"
    assert sum(page.value(f"{looked_at}.map(t => +t.style.getPropertyValue('--weight'))")) == pytest.approx(
        1.0, abs=0.05
    )  # a byte a weight


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


CANVASES = "document.querySelectorAll('#matrices canvas')"


def test_all_heads_of_a_layer_and_one_head_in_all_layers(page, report):
    """Every map has the colours of its weights."""
    heads = data(page)["heads"]
    choose(page, "sentence", 2)
    page.click(f"#maps button[data-head='{len(heads) - 1}']")
    last = report.sites[-1]
    weights, queries, keys = report.examples[2].of(last)
    page.wait(
        f"document.querySelector('#matrices h3').textContent === 'Attention maps: {last.role}, layer {last.layer}'"
    )
    assert page.value(f"[...{CANVASES}].map(c => [c.width, c.height])") == [[len(keys), len(queries)]] * last.num_heads
    shown = page.value("[...document.querySelectorAll('.matrix')].map(b => +b.dataset.head)")
    assert shown == [place for place, head in enumerate(heads) if head["site"] == len(report.sites) - 1]
    for place in range(last.num_heads):
        pixels = f"{CANVASES}[{place}].getContext('2d').getImageData(0, 0, {len(keys)}, {len(queries)}).data"
        brightness = page.value(f"[...{pixels}].filter((_, i) => i % 4 === 1)")  # green rises along the scale
        order = sorted(range(len(brightness)), key=weights[place].flatten().tolist().__getitem__)
        assert [brightness[i] for i in order] == sorted(brightness) and len(set(brightness)) > 3
    assert page.value("document.querySelector('.matrix.open').dataset.head") == str(len(heads) - 1)
    choose(page, "beside the head that is open", "head")
    number = heads[-1]["number"]
    page.wait(f"document.querySelector('#matrices h3').textContent.endsWith('head {number}, all layers')")
    shown = page.value("[...document.querySelectorAll('.matrix')].map(b => +b.dataset.head)")
    same = [site_of(page, heads[place]) for place in shown]
    assert {role for role, _ in same} == {last.role} and {heads[place]["number"] for place in shown} == {number}
    assert len(shown) == sum(number in report.heads[s.path] for s in report.sites if s.role == last.role)
    choose(page, "beside the head that is open", "layer")


def test_maps_beside_each_other_by_mouse_and_keyboard(page):
    page.wait(f"{CANVASES}.length > 1")
    page.hover(".matrix:nth-child(2) canvas")
    assert " looks at " in text(page, "#matrices .tip") and text(page, "#matrices .tip").endswith(" %")
    assert page.value("document.querySelectorAll('.matrix[tabindex=\"0\"]').length") == 1
    page.value("document.querySelector('.matrix').focus()")
    page.press("ArrowRight")
    place = page.value("document.activeElement.dataset.head")
    label = page.value("document.activeElement.getAttribute('aria-label')")
    page.press("Enter")
    assert place == "1" and label.startswith(text(page, "#head h3") + ": ") and label.endswith(tuple(PLACES))


PLACES = ("the previous token", "the token itself", "the next token", "the first token", "the last token")


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


LENGTH = 200
TEXT = (  # Charles Dickens, A Tale of Two Cities, 1859
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only. There were a king with a large jaw and a queen with a "
    "plain face, on the throne of England; there were a king with a large jaw and a queen with a fair face, on the "
    "throne of France. In both countries it was clearer than crystal to the lords of the State preserves of loaves and "
    "fishes, that things in general were settled for ever."
)
SIZES = {"vocab_size": 500, "pad_token_id": 0}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WIDTHS = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "eos_token_id": 2, "decoder_start_token_id": 0}
LONG = {  # family -> its config, and the kind of tokenizer
    "bert": (
        BertConfig(**SIZES, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32),
        "WordPiece",
    ),
    "marian": (MarianConfig(**SIZES, **LAYERS, **WIDTHS, d_model=32, max_position_embeddings=256), "Unigram"),
    "gpt2": (GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=256), "byte-level BPE"),
}


@pytest.fixture(scope="module", params=LONG)
def long_page(request, tmp_path_factory):
    """The page of a small model that read a sentence of 200 tokens, as a translation with as many."""
    config, kind = LONG[request.param]
    torch.manual_seed(0)
    model, tokenizer = AutoModel.from_config(config, attn_implementation="eager").eval(), fast(kind, [TEXT])
    batch = tokenizer(TEXT, truncation=True, max_length=LENGTH, return_tensors="pt")
    assert batch["input_ids"].shape == (1, LENGTH)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    parts = ("statistics", "roles", "relevance", "reconstruction")
    found = analyze_heads(model, [inputs], tokenizer=tokenizer, exclude=[tokenizer.eos_token_id], parts=parts)
    return found.save_html(tmp_path_factory.mktemp("long") / "report.html")


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (400, 1400))
def test_a_long_sentence_has_a_box_of_its_own(browser, long_page, width, scheme):
    """All of its tokens are there, the open head says where they look, and the page is no wider than the window."""
    browser.problems.clear()
    browser.resize(width, 900)
    browser.scheme(scheme)
    try:
        browser.open(long_page)
        browser.wait(f"document.querySelectorAll('#tokens .token').length === {2 * LENGTH} && {CANVASES}.length > 1")
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("document.querySelector('#tokens').clientHeight") < 500
        assert browser.value("document.querySelector('#tokens').scrollHeight") > 4000
        assert browser.value(f"[{CANVASES}[0].width, {CANVASES}[0].height]") == [LENGTH, LENGTH]
        roles = {site["group"] for site in data(browser)["sites"]}
        for role in roles:
            head = next(n for n, head in enumerate(data(browser)["heads"]) if site_of(browser, head)[0] == role)
            browser.click(f"#maps button[data-head='{head}']")
            browser.wait(f"document.querySelector('.matrix.open')?.dataset.head === '{head}'")
            assert browser.value("document.querySelectorAll('#tokens .token').length") == 2 * LENGTH
            browser.hover("#tokens .token:nth-child(150)")
            browser.wait("document.querySelector('#tokens .token:nth-child(150)').ariaLabel.includes(' looks at ')")
            assert browser.value("document.documentElement.scrollWidth") <= width
        choose(browser, "show as", "shading")
        browser.wait("document.querySelector('#tokens .shading')")
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("document.querySelector('figure img').naturalWidth") > 100
        assert browser.problems == []
    finally:
        browser.resize(1200, 900)
        browser.scheme("light")


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
