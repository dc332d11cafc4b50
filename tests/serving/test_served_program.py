"""Decoders in ExecuTorch: a cache of one size in the program, which is called and generates as the original does."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from changed_heads import change_heads
from compressing import batches_of
from model_sizes import FP32_NOISE, VOCABULARY
from opening import layers_of
from tokenizers_made import TEXTS, fast

import collab_heads
from collab_heads import ServedProgram, compress, evaluate, export, load_exported, prune_heads, prune_neurons
from collab_heads.errors import ArgumentError, DataError, ModelStateError, UnsupportedModelError
from collab_heads.saving.card import NAME
from collab_heads.serving import for_graphs, served_program
from collab_heads.serving.fixed_cache import FixedCacheDecoder, room_of
from collab_heads.serving.reads_texts import known
from families import FAMILIES

ROOM, COUNT = 40, 20
DECODERS = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma3", "opt", "biogpt", "bert-decoder")


def decoder(name):
    model = FAMILIES[name].build().eval()
    model.generation_config.cache_config = {"max_cache_len": ROOM}
    return model


def half(model):
    name = model.config.model_type.removesuffix("_text")
    compress(model, batches_of(FAMILIES[name], 4), 0.5, refine_steps=0)


def parts(names, budget, **options):
    return lambda model: compress(
        model, batches_of(FAMILIES["llama"], 4), budget, parts=names, refine_steps=0, **options
    )


CHANGES = {
    "stock": lambda model: None,
    "compressed": half,
    "on grids": parts(["heads"], 0.3, bits=(8, 4)),
    "narrowed": parts(["query_key", "values"], 0.8),
    "fewer neurons": parts(["neurons"], 0.8),
    "fewer heads": lambda model: prune_heads(model, heads={"dec-self": [[0, 1], [3]]}),
    "no attention": lambda model: prune_heads(model, heads={"dec-self": [[0, 1, 2, 3]] * 2}),
    "first block gone": lambda model: block_gone(model, 0),
    "shared": lambda model: collab_heads.swap_to_collaborative(model, dim_shared_query_key=16),
    "gated, mixed": lambda model: change_heads(model, "both"),
}
CASES = [(name, "compressed") for name in DECODERS if name != "bert-decoder"] + [("bert-decoder", "stock")]
CASES += [("llama", change) for change in CHANGES if change not in ("shared", "compressed")]
CASES += [("gpt2", change) for change in ("shared", "no attention")]


def block_gone(model, layer):
    layers = layers_of(model)
    prune_heads(model, heads={layers.attention[layer].path: [0, 1, 2, 3]})
    prune_neurons(model, batches_of(FAMILIES["llama"], 4), keep={layers.feed_forwards[layer].path: 0})


def tokens(rows=1, count=COUNT):
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(0))


def rows_of_two(count):
    """The rows of a batch, the second padded on the left."""
    mask = torch.ones(2, count, dtype=torch.long)
    mask[1, :4] = 0
    return {"input_ids": tokens(2, count), "attention_mask": mask}


class InTorch:
    """A method of a program, as PyTorch runs it, which counts what it reads."""

    def __init__(self, model):
        self.decoder, self.read = FixedCacheDecoder(model, ROOM), 0

    @torch.no_grad()
    def execute(self, inputs):
        self.read += inputs[0].shape[1]
        return [self.decoder(*inputs)["logits"]]


@pytest.fixture
def in_torch(monkeypatch):
    """Return a decoder that is served by PyTorch, and the methods that it has loaded."""

    def served(model, portion=8):
        made = [InTorch(model)]
        monkeypatch.setattr(served_program, "load_method", lambda _: made.append(InTorch(model)) or made[-1])
        components = {"model": SimpleNamespace(program=SimpleNamespace(path="model.pte"))}
        config = type(model.config).from_dict(model.config.to_dict(), attn_implementation="eager")
        runners = {"model": SimpleNamespace(method=made[0])}
        given = {"config": config, "generation_config": model.generation_config}
        return ServedProgram(SimpleNamespace(components=components, runners=runners, **given), None, portion), made

    return served


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", "stock"), ("opt", "stock"), ("llama", "first block gone")],
)
def test_a_text_read_in_parts_has_the_logits_of_the_whole(name, change):
    """Places that are read again are written again."""
    model, text = decoder(name), tokens()
    CHANGES[change](model)
    held, expected, found = FixedCacheDecoder(model, ROOM), model(text).logits, torch.zeros(1, COUNT, VOCABULARY)
    for start, end in ((0, 8), (4, 8), (8, 20)):
        found[:, start:end] = held(text[:, start:end], torch.arange(start, end))["logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=FP32_NOISE * float(expected.abs().max()))


@torch.no_grad()
def test_it_is_called_and_generates_as_the_original(in_torch, caplog, monkeypatch):
    """Rows of other lengths, greedily and with beams; what a program has read is not read again."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, batch = decoder("gpt2"), rows_of_two(12)
    served, made = in_torch(model)
    counts = batch["attention_mask"].bool()
    expected = model(**batch, position_ids=(counts.cumsum(-1) - 1).clamp(min=0)).logits
    found = served(**batch).logits
    assert not found[~counts].any()
    torch.testing.assert_close(served(**batch, logits_to_keep=2).logits, found[:, -2:])
    torch.testing.assert_close(found[counts], expected[counts], rtol=0, atol=FP32_NOISE * float(expected.abs().max()))
    for beams in (1, 3):
        options = {"do_sample": False, "num_beams": beams, "min_new_tokens": 6, "max_new_tokens": 6}
        assert torch.equal(served.generate(**batch, **options), model.generate(**batch, **options))
    before = sum(each.read for each in made)
    served.generate(input_ids=tokens(1, 12) + 1, do_sample=False, min_new_tokens=5, max_new_tokens=5)
    assert sum(each.read for each in made) == before + 12 + 4
    assert len(made) == 6  # two texts with three beams
    assert not [record for record in caplog.records if "cache_config" in record.getMessage()]


@torch.no_grad()
def test_what_was_read_is_remembered_as_it_was(in_torch):
    model = decoder("gpt2")
    served, _ = in_torch(model)
    for text in ([5, 6, 7], [5, 6, 7, 5, 6, 7, 8], [5, 6, 9], [5, 6]):
        found, expected = served(torch.tensor([text]), logits_to_keep=1).logits, model(torch.tensor([text])).logits
        torch.testing.assert_close(found[0, 0], expected[0, -1], rtol=0, atol=FP32_NOISE * float(expected.abs().max()))


@torch.no_grad()
def test_a_model_in_half_precision_has_its_logits_in_it(in_torch):
    model, batch = decoder("llama").bfloat16(), rows_of_two(12)
    served, _ = in_torch(model)
    found = served(**batch).logits
    assert found.dtype == torch.bfloat16 and found[0].any(-1).all()
    assert served(**batch, logits_to_keep=1).logits.dtype == torch.bfloat16


def test_texts_that_it_does_not_read_are_refused(in_torch, monkeypatch):
    served, _ = in_torch(decoder("llama"))
    with pytest.raises(ArgumentError, match=f"a text of {ROOM + 1} tokens: the model reads {ROOM} at most"):
        served(tokens(1, ROOM + 1))
    with pytest.raises(ArgumentError, match=f"input_ids hold {VOCABULARY}: the model has {VOCABULARY} tokens"):
        served(torch.tensor([[VOCABULARY]]))
    with pytest.raises(ArgumentError, match="token_type_ids is not 0 everywhere: ExecuTorch reads no pairs"):
        served(tokens(1, 3), token_type_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ArgumentError, match="a text of no tokens: ExecuTorch reads none such"):
        served(tokens(1, 3), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ArgumentError, match=r"attention_mask has the shape \[1, 2\], and input_ids \[1, 3\]"):
        served(tokens(1, 3), torch.ones(1, 2, dtype=torch.long))
    for count in (0, 1):
        with pytest.raises(ArgumentError, match="a text of no tokens: ExecuTorch reads none such"):
            served(tokens(2, 3)[:0], logits_to_keep=count)
    with pytest.raises(ArgumentError, match="65 texts: ExecuTorch continues 64 at a time here"):
        served(tokens(65, 3), logits_to_keep=1)
    with pytest.raises(ModelStateError, match="puts out no sentence_embedding"):
        served.encode(["a"])
    monkeypatch.setattr(InTorch, "execute", lambda *_: exec("raise RuntimeError('error 18')"))
    with pytest.raises(ModelStateError, match="ExecuTorch fails on a text of 3 tokens: error 18"):
        served(tokens(1, 3))


def test_what_texts_have_in_common_is_known_but_for_the_last_token():
    assert known([1, 2, 3], []) == 0 and known([1, 2, 3], [1, 2, 3, 4]) == 2 and known([1, 5, 3], [1, 2, 3]) == 1


def test_room_is_what_a_config_says_or_what_a_model_reads():
    model = FAMILIES["llama"].build()
    assert room_of(model) == model.config.max_position_embeddings
    model.config.max_position_embeddings = 1 << 20
    assert room_of(model) == 2048
    model.generation_config.cache_config = {"max_cache_len": 9}
    assert room_of(model) == 9


def test_models_that_cannot_are_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(for_graphs, "check_extra", lambda *_: None)  # whether it is installed or not
    model = decoder("llama")
    for room in (0, "16", True, 1 << 20):
        model.generation_config.cache_config = {"max_cache_len": room}
        with pytest.raises(
            ArgumentError, match=r"cache_config\['max_cache_len'\] is .*: give a number of tokens, up to"
        ):
            export(model, tmp_path / "served", "executorch")
    model.generation_config.cache_config = None
    with pytest.raises(UnsupportedModelError, match=r"RobertaForCausalLM counts positions from its padding index on"):
        export(FAMILIES["roberta-decoder"].build().eval(), tmp_path / "served", "executorch")
    with pytest.raises(UnsupportedModelError, match=r"MarianMTModel has an encoder, too.*choose onnx or openvino"):
        export(FAMILIES["marian"].build().eval(), tmp_path / "served", "executorch")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
@pytest.mark.parametrize(("name", "change"), CASES)
def test_decoders_run_there(name, change, tmp_path):
    model = decoder(name)
    CHANGES[change](model)
    trained = [each.requires_grad for each in model.parameters()]
    report = export(model, tmp_path / "served", "executorch")
    assert report.difference < 5e-4 and report.margin <= 5e-4  # seen: 1e-4 in Gemma 3, else 1e-6
    assert ("weights on grids" in str(report)) == (change == "on grids")
    assert any(trained) and [each.requires_grad for each in model.parameters()] == trained
    assert model.generation_config.cache_config == {"max_cache_len": ROOM}
    served, batch = load_exported(tmp_path / "served", threads=1), rows_of_two(12)
    options = {"do_sample": False, "min_new_tokens": 20, "max_new_tokens": 20}
    with torch.no_grad():
        assert torch.equal(served.generate(**batch, **options), model.generate(**batch, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
def test_a_program_is_scored_beside_its_original(tmp_path):
    """Also a text that is longer than what the program reads at a time."""
    tokenizer = fast("byte-level BPE")
    model = FAMILIES["gpt2"].build().eval()
    model.resize_token_embeddings(len(tokenizer))
    export(model, tmp_path / "served", "executorch", tokenizer=tokenizer)
    data = [{"text": text} for text in TEXTS[:30]]
    report = evaluate(model, tmp_path / "served", task="perplexity", data=data, tokenizer=tokenizer)
    first, other = (each.scores["perplexity"] for each in report.models)
    assert other == pytest.approx(first, rel=1e-4)
    card, names = (tmp_path / "served/README.md").read_text(), {}
    code = card.partition("### ExecuTorch")[2].partition("```python\n")[2].partition("```")[0]
    exec(code.replace(NAME, str(tmp_path / "served")), names)
    given = tokenizer("Once", return_tensors="pt")
    assert names["text"] == model.generate(**given, do_sample=False, min_new_tokens=16, max_new_tokens=16)[0].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
def test_a_folder_that_does_not_say_its_room_is_refused(tmp_path):
    export(decoder("gpt2"), tmp_path / "served", "executorch")
    file = tmp_path / "served/generation_config.json"
    (tmp_path / "served/manifest.json").unlink()
    said = json.loads(file.read_text())
    for config in (None, {}, {"max_cache_len": -1}, {"max_cache_len": "many"}):
        file.write_text(json.dumps({**said, "cache_config": config}))
        with pytest.raises(DataError, match=r"generation_config\.json is damaged.*max_cache_len"):
            load_exported(tmp_path / "served")
    file.write_text(json.dumps({**said, "cache_config": {"max_cache_len": 100}}))  # more than the program has
    with pytest.raises(ModelStateError, match="ExecuTorch fails on a text of 60 tokens"):
        load_exported(tmp_path / "served")(tokens(1, 60))


def test_graphs_of_an_encoder_and_a_decoder_hold_no_cache():
    """They have no single program; a program without a place for each token is no decoder."""
    takes = [("input_ids",), ("input_ids", "cache_position")]
    one, other = (SimpleNamespace(metadata=SimpleNamespace(kwargs=names)) for names in takes)
    for components, holds in (
        ({"encoder": one, "decoder": one}, False),
        ({"model": one}, False),
        ({"model": other}, True),
    ):
        assert served_program.holds_cache(SimpleNamespace(components=components)) is holds
