"""Model cards of changed models: what is ours is written and replaced, what is its owner's stays."""

import re

import pytest
from huggingface_hub import ModelCard
from model_runs import swap
from transformers import BertForSequenceClassification

from collab_heads import fold_heads, model_card, prune_heads, prune_neurons, swap_to_collaborative, swap_to_gated
from collab_heads.saving import card
from collab_heads.saving.card import GENERATED, complete, is_generated
from families import FAMILIES

METRICS = {"accuracy": 0.925, "loss": 0.123456789}


def built(*changes):
    model = FAMILIES["bert"].build()
    for change in changes:
        change(model)
    return model


def shared(model):
    return swap(model, "shared", 20)


def pruned(model):
    return prune_heads(model, heads={"enc-self": [[0], [1, 2]]})


def read(folder):
    return ModelCard.load(folder / "README.md")


def test_a_saved_model_says_what_it_is_and_how_it_loads(tmp_path):
    model = built(shared, pruned, swap_to_gated)
    model.save_pretrained(tmp_path)
    card = read(tmp_path)
    assert card.data.library_name == "transformers" and card.data.base_model is None
    assert card.data.tags == ["collab-heads", "low-rank-attention", "pruned-heads", "gated-heads"]
    row = "| `encoder.layer.1.attention.self` | enc-self | 2 (4) | shared, 20 (32) |  | learned |  |"
    assert row in card.text.splitlines()
    assert (
        "`AutoModelForSequenceClassification.from_pretrained(..., trust_remote_code=True)` needs no import" in card.text
    )
    (code,) = [part for part in card.text.split("```python\n")[1:]]
    namespace = {}
    exec(code.split("```")[0].replace("path/or/name", str(tmp_path)), namespace)
    assert type(namespace["model"]) is BertForSequenceClassification
    assert namespace["model"].config.collab_heads == model.config.collab_heads


def test_feed_forward_blocks_have_a_table_of_their_own(tmp_path):
    model = FAMILIES["bert"].build()
    prune_neurons(model, [FAMILIES["bert"].inputs()], keep={"encoder.layer.1": 8})
    model.save_pretrained(tmp_path)
    card = read(tmp_path)
    assert "| `encoder.layer.1` | enc-ffn | 8 (37) |" in card.text.splitlines()
    assert "attention.self" not in card.text and card.data.tags == ["collab-heads", "pruned-neurons"]
    fold_heads(model)
    model.save_pretrained(tmp_path)
    assert "neurons" not in str(read(tmp_path))


def test_values_are_counted_over_key_heads_and_sites_stand_in_the_order_of_the_model():
    model = FAMILIES["qwen3"].build()  # 4 heads share 2 key heads of width 8
    prune_heads(model, heads={"layers.1.self_attn": [0, 1]})
    swap_to_collaborative(model, dim_value={"layers.0.self_attn": 8, "layers.1.self_attn": 4})
    rows = [line for line in model_card(model).text.splitlines() if line.startswith("| `layers")]
    assert rows == [
        "| `layers.0.self_attn` | dec-self | 4 | rotary, 32 (32) | 8 (16) |  |  |",
        "| `layers.1.self_attn` | dec-self | 2 (4) | rotary, 16 (32) | 4 (16) |  |  |",
    ]


def test_an_unchanged_model_gets_none_and_leaves_one(tmp_path):
    built().save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
    (tmp_path / "README.md").write_bytes(b"mine\r\n")
    built().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == b"mine\r\n"


OWN = "---\nlicense: mit\nlibrary_name: other\ntags:\n- mine\nwidget:\n- text: hello\n---\n\n# Mine\n\nAbout it.\n"


def test_what_the_owner_wrote_stays(tmp_path):
    (tmp_path / "README.md").write_text(OWN)
    model = built(shared)
    model.save_pretrained(tmp_path)
    once = (tmp_path / "README.md").read_text()
    card = read(tmp_path)
    said = card.data.to_dict()
    assert (said["license"], said["library_name"], said["widget"]) == (
        "mit",
        "other",
        [{"text": "hello"}],
    )
    assert said["tags"] == ["mine", "collab-heads", "low-rank-attention"]
    assert card.text.startswith("\n# Mine\n\nAbout it.\n\n<!-- collab_heads changes: begin -->")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == once
    (tmp_path / "README.md").write_text(once + "\nMore of mine.\n")
    pruned(model)
    model.save_pretrained(tmp_path)
    text = read(tmp_path).text
    assert text.index("About it.") < text.index("More of mine.") < text.index("begin -->")
    assert "2 (4)" in text and text.count("## Changed by") == 1


def test_lines_end_as_the_owner_ends_them(tmp_path):
    model, file = built(shared), tmp_path / "README.md"
    file.write_bytes(OWN.replace("\n", "\r\n").encode())
    model.save_pretrained(tmp_path)
    once = file.read_bytes()
    assert once.count(b"\n") == once.count(b"\r\n") and b"About it.\r\n" in once
    model.save_pretrained(tmp_path)
    assert file.read_bytes() == once
    file.unlink()
    file.write_text(OWN)
    model.save_pretrained(tmp_path)
    assert file.read_bytes() == once.replace(b"\r\n", b"\n")


ENDS = pytest.mark.parametrize("ends", ("\n", "\r\n"), ids=("LF", "CRLF"))


def write(folder, ends):
    """The owner's card."""
    (folder / "README.md").write_bytes(OWN.replace("\n", ends).encode())


@ENDS
def test_a_stock_model_again_keeps_only_what_is_the_owners(ends, tmp_path):
    write(tmp_path, ends)
    model = built(swap_to_gated)
    model.save_pretrained(tmp_path)
    fold_heads(model)
    model.save_pretrained(tmp_path)
    card = read(tmp_path)
    assert card.text == "\n# Mine\n\nAbout it.\n".replace("\n", ends) and card.data.tags == ["mine"]


@ENDS
def test_sections_of_before_are_replaced_whatever_the_line_ends(ends, tmp_path):
    """By `model_card`, and where a changed model is changed further and saved into another folder."""
    write(tmp_path, ends)
    model = built(shared)
    model.save_pretrained(tmp_path)
    pruned(model)
    text = str(model_card(model, card=read(tmp_path)))
    assert text.count("## Changed by") == 1 and "2 (4)" in text and "\r" not in text
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    pruned(loaded)
    loaded.save_pretrained(tmp_path / "new")
    text = read(tmp_path / "new").text
    assert text.count("## Changed by") == 1 and "2 (4)" in text and "About it." in text


def test_a_mark_at_the_beginning_of_a_card_hides_no_metadata(tmp_path):
    (tmp_path / "README.md").write_text("\ufeff" + OWN, encoding="utf-8")
    built(shared).save_pretrained(tmp_path)
    assert read(tmp_path).data.tags == ["mine", "collab-heads", "low-rank-attention"]


def test_a_class_of_the_users_is_loaded_as_that():
    """`AutoModel` would leave its head out; and a name that is none is not written into code."""
    model = built(shared)
    model.__class__ = type("MyBert", (BertForSequenceClassification,), {})
    text = model_card(model).text
    assert "from your_package import MyBert\n\nmodel = MyBert.from_pretrained(" in text
    model.__class__ = type("x import y\nz", (BertForSequenceClassification,), {})
    assert "from transformers import AutoModel\n" in model_card(model).text


def test_a_title_of_ours_is_that_of_the_model_now(tmp_path):
    model = built(swap_to_gated)
    model.save_pretrained(tmp_path)
    assert read(tmp_path).text.startswith("\n# BertForSequenceClassification, changed with collab_heads\n")
    fold_heads(model)
    model.save_pretrained(tmp_path)
    assert read(tmp_path).text == "\n# BertForSequenceClassification\n"


def test_a_link_to_a_card_stays_a_link(tmp_path, warnings_logged):
    """What it leads to may be that of other models, too."""
    (tmp_path / "card.md").write_text(OWN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").symlink_to(tmp_path / "card.md")
    built(shared).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "README.md").is_symlink() and (tmp_path / "card.md").read_text() == OWN
    assert "README.md cannot be completed as a model card, and is left as it is: it is a link" in warnings_logged.text
    (tmp_path / "card.md").unlink()
    built(shared).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "README.md").is_symlink() and not (tmp_path / "card.md").exists()


def test_a_report_and_metrics_stay_as_long_as_the_attention_is_the_same(tmp_path):
    model = built()
    report = shared(model)
    model.save_pretrained(tmp_path)
    complete(model.config, tmp_path, report=report, metrics=METRICS)
    text = read(tmp_path).text
    assert str(report) in text and "| accuracy | 0.925 |" in text and "| loss | 0.123457 |" in text
    model.save_pretrained(tmp_path)
    assert read(tmp_path).text == text
    pruned(model)
    model.save_pretrained(tmp_path)
    assert "What was done" not in read(tmp_path).text and "2 (4)" in read(tmp_path).text


def test_fences_in_names_and_reports_stay_inside_theirs():
    name, report = 'x"\n```\n# no title', "a\n```\n# no title\n````\n"
    card = str(model_card(built(swap_to_gated), report, {"a|b\nc": 1.0}, name=name))
    assert 'from_pretrained("x\\"\\n```\\n# no title")' in card
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card, flags=re.DOTALL | re.MULTILINE)
    assert "no title" not in outside and "| a\\|b c | 1 |" in outside


def test_a_card_never_stops_the_weights(tmp_path, warnings_logged):
    """Tags that YAML reads as mappings are kept; what cannot be completed is left, and the model is there."""
    model = built(pruned)
    (tmp_path / "README.md").write_text("---\ntags:\n- a: b\n---\nhello\n", encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.tags[0] == {"a": "b"}  # ours follow
    other = tmp_path / "other"
    (other / "README.md").mkdir(parents=True)
    model.save_pretrained(other)
    assert (other / "model.safetensors").is_file() and (other / "README.md").is_dir()
    assert "cannot be completed as a model card" in warnings_logged.text


def test_a_stock_model_leaves_a_card_that_speaks_of_ours(tmp_path):
    text = "No front matter. Sections of `<!-- collab_heads ` begin so.\n\n\n"
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    built().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_the_public_function(tmp_path):
    model = built()
    report = shared(model)
    card = model_card(model, report, METRICS, name="me/small")
    assert 'from_pretrained("me/small")' in card.text and str(report) in card.text
    assert (
        "accuracy" in model_card(model, metrics=METRICS).text
        and "```text" not in model_card(model, metrics=METRICS).text
    )
    own = ModelCard(OWN)
    assert "About it." in model_card(model, card=own).text and own.text == ModelCard(OWN).text


@pytest.mark.parametrize("broken", (b"---\nlicense: [mit\n---\nmine\n", b"---\n- 1\n---\nmine\n", b"\xff\xfe mine"))
def test_a_card_that_cannot_be_read_is_left(broken, tmp_path, warnings_logged):
    (tmp_path / "README.md").write_bytes(broken)
    built(shared).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == broken
    assert "README.md cannot be completed as a model card" in warnings_logged.text


def test_a_base_from_a_folder_passes_on_what_its_card_says(tmp_path):
    built().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\nbase_model: google/bert\n---\n")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    shared(model)
    model.save_pretrained(tmp_path / "small")
    card = read(tmp_path / "small")
    assert (card.data.license, card.data.base_model) == ("mit", "google/bert")
    assert "# google/bert, changed with collab_heads" in card.text


@pytest.mark.parametrize("name", ("me/base", "/no/such/folder/any more", "me/unknown"))
def test_a_base_of_the_hub_is_named_where_the_cache_knows_it(name, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    cache = {("me/base", "config.json"): "config.json", ("me/base", "README.md"): str(tmp_path / "README.md")}
    look = card.try_to_load_from_cache

    def from_cache(repo_id, filename):
        return cache.get((repo_id, filename)) or look(repo_id, filename)

    monkeypatch.setattr(card, "try_to_load_from_cache", from_cache)
    model = built(shared)
    model.config.name_or_path = name
    said = model_card(model).data.to_dict()
    expected = {"base_model": "me/base", "license": "mit"} if name == "me/base" else {}
    assert {field: said[field] for field in ("base_model", "license") if field in said} == expected


def test_the_empty_card_of_transformers_is_replaced(tmp_path):
    pytest.importorskip("jinja2")
    from transformers.utils.hub import ModelCard as Card
    from transformers.utils.hub import ModelCardData

    generated = Card.from_template(ModelCardData(tags=[], library_name="transformers"), model_description=GENERATED)
    assert is_generated(generated) and not is_generated(Card(str(generated) + "\nmine\n"))
    model = built(shared)
    (tmp_path / "README.md").write_text(str(generated), encoding="utf-8")
    complete(model.config, tmp_path)
    assert "More Information Needed" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(str(generated) + "\nmine\n", encoding="utf-8")
    complete(model.config, tmp_path)
    assert "\nmine\n" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_card_of_transformers_is_as_it_is_known(request):
    """What `push_to_hub` makes where a repository has no card."""
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils import hub

    pytest.importorskip("jinja2")
    patched = request.getfixturevalue("monkeypatch")

    def none(*_, **__):
        raise EntryNotFoundError("none")

    patched.setattr(hub.ModelCard, "load", none)
    assert is_generated(hub.create_and_tag_model_card("me/small", []))


def test_layers_stand_in_their_order():
    """A config that was saved has its sites by letters: layer 10 before layer 2."""
    paths = [f"{side}.layers.{layer}.{part}" for side in ("decoder", "encoder") for layer in (2, 10) for part in "ab"]
    assert card.in_order(dict.fromkeys(sorted(paths), 1)) == [(path, 1) for path in paths]
