"""Where heads look in sentences, on the page: lines, shading, maps with tokens; pieces and words; long sentences."""

import pytest
import torch
from chromium import MISSING, PROGRAM
from report_page import ACTIVE, CANVASES, choose, data, site_of, text
from tokenizers_made import fast
from transformers import AutoModel, BertConfig, GPT2Config, MarianConfig

from collab_heads import analyze_heads

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]
HALF_A_STEP = 0.5 / 255 + 1e-6  # the root of a weight is a byte


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


def test_a_map_with_its_tokens(page, report):
    """Its labels are the tokens, its pixels the weights; the cell under the mouse is said in words."""
    choose(page, "sentence", 2)
    choose(page, "show as", "map")
    page.wait("document.querySelector('#tokens .labelled')")
    page.click(f"#maps button[data-head='{len(data(page)['heads']) - 1}']")
    weights, queries, keys = report.examples[2].of(report.sites[-1])
    labels = "[...document.querySelectorAll('#tokens .labelled .{} .token span')].map(t => t.textContent)"
    page.wait(f"{labels.format('key')}.length === {len(keys)} && {labels.format('query')}.length === {len(queries)}")
    assert page.value("(c => [c.width, c.height])(document.querySelector('.labelled canvas'))") == [
        len(keys),
        len(queries),
    ]
    side = page.value("document.querySelector('.labelled canvas').getBoundingClientRect().height") / len(queries)
    for query in range(len(queries)):  # a label stands beside its row
        box = page.value(
            f"(r => [r.top, r.bottom])(document.querySelectorAll('.query .token')[{query}].getBoundingClientRect())"
        )
        top = page.value("document.querySelector('.labelled canvas').getBoundingClientRect().top")
        assert box == pytest.approx([top + query * side, top + (query + 1) * side], abs=1)
    query, key = len(queries) - 1, len(keys) // 2
    left, top = page.value("(r => [r.left, r.top])(document.querySelector('.labelled canvas').getBoundingClientRect())")
    cell = {"x": left + (key + 0.5) * side, "y": top + (query + 0.5) * side}
    page.send("Input.dispatchMouseEvent", type="mouseMoved", **cell)
    said = text(page, "#head .said")
    tokens = [page.value(labels.format(side))[place] for side, place in (("query", query), ("key", key))]
    assert said.startswith(f"{tokens[0]} looks at {tokens[1]}: ") and said.endswith(" %")
    assert int(said.split()[-2]) == pytest.approx(100 * float(weights[-1, query, key]), abs=1.5)
    page.value("document.querySelector('.labelled .query .token').focus()")
    page.press("ArrowDown")
    assert page.value(f"{ACTIVE}.dataset.place") == "1" and " looks at " in text(page, "#head .said")


def test_words_instead_of_pieces(browser, long_page):
    """Attention to a word is the sum over its pieces, from a word their mean; all views and maps show words."""
    browser.problems.clear()
    browser.open(long_page)
    pieces, count = "document.querySelectorAll('#tokens .tokens:first-child .token')", "{}.length === {}"
    browser.wait(count.format(pieces, LENGTH))
    words = data(browser)["sentences"][0]["words"]
    side = data(browser)["sites"][0]["sides"][0]
    starts, texts = words[side]["starts"], words[side]["texts"]
    assert {"wisdom", "foolishness"} <= set(texts) and len(texts) < LENGTH
    shown = "[...document.querySelectorAll('#tokens .tokens:last-child .token')]"
    place = next(n for n, text in enumerate(texts) if text == "foolishness")
    first, last = starts[place], starts[place + 1]

    def weights(count: int) -> list[list[float]]:
        rows = []
        for query in range(count):
            browser.hover(f"#tokens .tokens:first-child .token:nth-child({query + 1})")
            rows.append(browser.value(f"{shown}.map(t => +t.style.getPropertyValue('--weight'))"))
        return rows

    by_piece = torch.tensor(weights(last), dtype=torch.float64)
    choose(browser, "of", "words")
    browser.wait(count.format(pieces, len(texts)))
    by_word = torch.tensor(weights(place + 1), dtype=torch.float64)
    summed = torch.stack([each.sum(1) for each in by_piece.tensor_split(starts[1:], dim=1)], 1)
    expected = torch.stack([each.mean(0) for each in summed.tensor_split(starts[1 : place + 1])])
    torch.testing.assert_close(by_word, expected.clamp(max=1), rtol=0, atol=1e-9)
    assert last - first > 1 and "word in this sentence" in text(browser, "#head .words").replace("itself ", "")
    assert browser.value(f"{CANVASES}[0].width") == len(texts)
    choose(browser, "show as", "map")
    browser.wait("document.querySelector('#tokens .labelled canvas')")
    assert browser.value("document.querySelector('.labelled canvas').height") == len(texts)
    assert browser.problems == []
