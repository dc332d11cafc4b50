"""A user's own adapter, written outside the package, and what the lookup says about models it does not know."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_configs import albert_config
from model_inputs import batch
from model_runs import aligned, is_swapped, output, swapped
from model_sizes import FP32_NOISE, HEAD_WIDTH, HEADS, LAYERS, VOCABULARY, WIDTH
from transformers import AlbertModel, BertConfig, GPTNeoConfig, SplinterConfig, SplinterModel
from transformers.models.splinter.modeling_splinter import SplinterSelfAttention, eager_attention_forward
from unchanged import refused

from collab_heads import (
    AttentionAdapter,
    fold_heads,
    get_adapter,
    prune_heads,
    register,
    supported_model_types,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.adapters.bert import BertAdapter
from collab_heads.contract import registry
from collab_heads.contract.registry import adapter_for_config, is_lone_decoder
from collab_heads.errors import ArgumentError, CalibrationError, UnsupportedModelError
from collab_heads.layers.attention import attend, cached_key_value
from collab_heads.layers.layout import widths
from collab_heads.layers.query_key import split_heads
from families import FAMILIES, make

ROOT = Path(__file__).parents[2]


class CollaborativeSplinterSelfAttention(SplinterSelfAttention):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        key, value = cached_key_value(self, self.value, hidden_states, None, is_cross=False)
        eager, dropout = eager_attention_forward, self.attention_dropout
        return attend(self, hidden_states, key, value, attention_mask, eager=eager, dropout=dropout, **kwargs)


class SplinterAdapter(AttentionAdapter):
    model_types = ("splinter",)
    paths = {r"encoder\.layer\.(\d+)\.attention\.self": "enc-self"}  # noqa: RUF012
    replacements = {SplinterSelfAttention: CollaborativeSplinterSelfAttention}  # noqa: RUF012
    output = "../output.dense"


def splinter():
    config = SplinterConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return make(SplinterModel, config)


@pytest.fixture
def registered():
    assert "splinter" not in supported_model_types()
    assert register(SplinterAdapter) is SplinterAdapter
    yield
    del registry._ADAPTERS["splinter"]


def assert_lossless(adapter):
    for mixing in ("shared", "per_head"):
        model, inputs = splinter().double(), batch()
        before = output(model, inputs)
        swap_to_collaborative(model, adapter, kind=mixing)
        assert all(is_swapped(layer.attention.self) for layer in model.encoder.layer)
        torch.testing.assert_close(
            output(model, inputs), before, rtol=0, atol=FP32_NOISE
        )  # Splinter's softmax is in float32; seen: 4e-7


@pytest.mark.parametrize("adapter", (None, SplinterAdapter, SplinterAdapter()), ids=("registered", "class", "instance"))
@pytest.mark.parametrize("mixing", ("shared", "per_head"))
def test_own_adapter(adapter, mixing, registered, tmp_path):
    assert "splinter" in supported_model_types()
    assert_lossless(adapter)
    model = splinter()
    swap_to_collaborative(model, adapter, 16, kind=mixing, batches=[batch()], refine_steps=3)
    model.save_pretrained(tmp_path)
    loaded = aligned(SplinterModel.from_pretrained(tmp_path).eval())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(swapped(loaded))
    assert torch.equal(output(loaded, batch()), output(model, batch()))


class SilentSplinterSelfAttention(SplinterSelfAttention):
    """Attention in plain torch, past transformers' attention interface."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query, key, value = (
            split_heads(projection(hidden_states), HEADS) for projection in (self.query, self.key, self.value)
        )
        weights = (self.scaling * query @ key.mT).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2), weights


class SilentAdapter(SplinterAdapter):
    replacements = {SilentSplinterSelfAttention: CollaborativeSplinterSelfAttention}  # noqa: RUF012


@pytest.mark.parametrize("allocation", ("uniform", "balanced"))
def test_attention_that_cannot_be_recorded(allocation):
    """The site is named, and what works without a record."""
    model = splinter()
    for path in ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"):
        model.get_submodule(path).__class__ = SilentSplinterSelfAttention
    with refused(model, CalibrationError, "encoder.layer.0.attention.self", "refine_steps=0", "allocation='uniform'"):
        swap_to_collaborative(model, SilentAdapter, 16, batches=[batch()], allocation=allocation, refine_steps=3)
    report = swap_to_collaborative(model, SilentAdapter, 16, batches=[batch()], refine_steps=0)
    assert report.calibrated


def test_attention_that_comes_with_the_model_is_refused_in_a_sentence_of_its_own():
    """By its config; of a family that is known the code of its own may be anything, such as a tokenizer's."""
    config = SplinterConfig(auto_map={"AutoModel": "own.OwnModel"})
    with pytest.raises(UnsupportedModelError, match=r"'splinter' .* is code that comes with the model, no adapter"):
        adapter_for_config(config)
    assert adapter_for_config(BertConfig(auto_map={"AutoModel": "own.OwnModel"})).model_types[0] == "bert"


@pytest.mark.parametrize("adapter", (SplinterAdapter, SplinterAdapter()), ids=("class", "instance"))
def test_own_adapter_without_registration(adapter, tmp_path):
    """It can be passed; to load what was saved, it must be registered."""
    assert "splinter" not in supported_model_types()
    assert_lossless(adapter)
    model = splinter()
    swap_to_collaborative(model, adapter, 16)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'splinter' is not supported"):
        SplinterModel.from_pretrained(tmp_path)
    register(SplinterAdapter)
    try:
        loaded = aligned(SplinterModel.from_pretrained(tmp_path).eval())
        assert torch.equal(output(loaded, batch()), output(model, batch()))
    finally:
        del registry._ADAPTERS["splinter"]


def test_gates_and_alphas_without_registration():
    model = splinter()
    assert swap_to_gated(model, SplinterAdapter).open == LAYERS * HEADS
    assert len(swap_to_alpha(model, SplinterAdapter).sites) == LAYERS
    with refused(model, UnsupportedModelError, "'splinter' is not supported", "register"):
        prune_heads(model)


@pytest.mark.parametrize("adapter", (None, SplinterAdapter), ids=("registered", "class"))
def test_heads_with_an_own_adapter(adapter, registered, tmp_path):
    """Gates, removal, folding and loading need nothing beyond where the projections are."""
    model = splinter().double()
    alive = {"enc-self": [[1, 0, 0, 1], [0, 0, 0, 0]]}
    swap_to_gated(model, adapter, alive_heads=alive)
    gated = output(model, batch())
    assert (gated - output(splinter().double(), batch())).abs().max() > 1e-3
    report = prune_heads(model)
    assert [site.kept for site in report.sites] == [(0, 3), ()]
    torch.testing.assert_close(output(model, batch()), gated, rtol=0, atol=FP32_NOISE)  # its softmax is in float32
    model.save_pretrained(tmp_path)
    loaded = aligned(SplinterModel.from_pretrained(tmp_path, dtype=torch.float64).eval())
    assert torch.equal(output(loaded, batch()), output(model, batch()))
    fold_heads(model)
    assert model.state_dict().keys() == splinter().state_dict().keys()
    torch.testing.assert_close(output(model, batch()), gated, rtol=0, atol=FP32_NOISE)


def test_lookup():
    model = splinter()
    assert type(get_adapter(model, SplinterAdapter)) is SplinterAdapter
    instance = SplinterAdapter()
    assert get_adapter(model, instance) is instance
    assert {"bert", "marian", "t5"} <= set(supported_model_types())
    assert supported_model_types() == sorted(supported_model_types())


def test_model_types_are_read_from_the_files_as_they_register_them():
    registered = {name: type(each).__module__ for name, each in registry.all_adapters().items()}
    assert registered == registry._MODULES and len(registered) > 30


FRESH = """
import pickle, sys
from concurrent.futures import ThreadPoolExecutor
from transformers import AutoConfig
import collab_heads
from collab_heads.contract.registry import adapter_for_config
"""
LATER = {
    "models load, copy and pickle": """
from transformers import BertModel
loaded = pickle.load(open("model.pickle", "rb"))
print(type(loaded.bert.encoder.layer[0].attention.self).__name__)
print(type(BertModel.from_pretrained("saved").encoder.layer[0].attention.self).__module__)
""",
    "each file by name": """
print(collab_heads.adapters.bert.BertAdapter.__name__, hasattr(collab_heads.adapters, "nothing"))
from collab_heads.adapters import marian
print(marian.__name__)
""",
    "at the same time": """
with ThreadPoolExecutor(4) as pool:
    configs = map(AutoConfig.for_model, ("bert", "roberta", "electra", "camembert"))
    found = list(pool.map(adapter_for_config, configs))
print(len(set(map(id, found))), type(found[0]).__name__)
""",
    "an own adapter stays": """
class Own(collab_heads.AttentionAdapter):
    model_types = ("bert",)
collab_heads.register(Own)
print(*(type(adapter_for_config(AutoConfig.for_model(name))).__name__ for name in ("bert", "roberta", "bert")))
""",
}
PRINTED = {
    "models load, copy and pickle": "CollaborativeBertSelfAttention collab_heads.adapters.bert",
    "each file by name": "BertAdapter False collab_heads.adapters.marian",
    "at the same time": "1 BertAdapter",
    "an own adapter stays": "Own BertAdapter Own",
}
MODELS_LOAD, *OTHERS = LATER


@pytest.mark.slow
@pytest.mark.parametrize("what", (MODELS_LOAD, *OTHERS))
def test_files_of_families_are_imported_when_they_are_needed(what, tmp_path):
    model = FAMILIES["bert"].build()
    swap_to_collaborative(model, dim_shared_query_key=16)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    command = [sys.executable, "-c", FRESH + LATER[what]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == PRINTED[what].split(), done.stderr


def test_sites_of_an_own_adapter():
    found = SplinterAdapter().sites(splinter())
    assert [(site.path, site.role, site.layer, site.num_heads) for site in found] == [
        (f"encoder.layer.{layer}.attention.self", "enc-self", layer, HEADS) for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_of_every_family(name):
    """Roles and counts as listed; the output projection takes the heads of its site."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    adapter = get_adapter(model)
    found = adapter.sites(model)
    assert {role: sum(site.role == role for site in found) for role in family.roles} == family.roles
    assert len(found) == family.num_sites
    assert set(family.roles) <= set(adapter.roles)
    for site in found:
        assert site.num_heads == HEADS
        assert widths(adapter.output_projection(model, site))[0] == HEADS * HEAD_WIDTH
        assert adapter.read(model.base_model.get_submodule(site.path)).dim_head == HEAD_WIDTH
    for role, count in family.roles.items() if "albert" not in name else ():
        assert [site.layer for site in found if site.role == role] == list(range(count))


@pytest.mark.parametrize(
    "layers, groups, inner, expected",
    (
        (3, 1, 1, [0]),
        (5, 2, 2, [0, 1, 6, 7]),
        (7, 3, 1, [0, 3, 5]),
        (2, 3, 1, [0, 1]),  # group 1 serves no layer: what is never called is not a site
    ),
)
def test_layers_of_albert(layers, groups, inner, expected):
    """A site's layer is the index of the first attention map that its module makes."""
    model = AlbertModel(albert_config(num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner))
    adapter, called = get_adapter(model), []
    for path, module in model.named_modules():
        if path.endswith(".attention"):
            module.register_forward_hook(lambda *_, path=path: called.append(path))
    output(model.eval(), batch())
    assert [site.layer for site in adapter.sites(model)] == expected
    assert [called.index(site.path) for site in adapter.sites(model)] == expected
    assert {site.path for site in adapter.sites(model)} == set(called)


def test_unsupported_models():
    with pytest.raises(UnsupportedModelError) as caught:
        get_adapter(splinter())
    message = str(caught.value)
    assert "'splinter' is not supported" in message
    assert ", ".join(supported_model_types()) in message
    assert "Add a family" in message
    assert "rotary" not in message


@pytest.mark.parametrize("name", ("qwen3", "modernbert"))
def test_why_heads_cannot_share_beside_rotary_positions(name):
    model = FAMILIES[name].build()
    with refused(model, UnsupportedModelError, "rotary positions come between", "dim_value=", "compress()"):
        swap_to_collaborative(model)


def test_the_nearest_type_is_suggested():
    config = GPTNeoConfig()
    config.model_type = "mariam"
    with pytest.raises(UnsupportedModelError, match="did you mean 'marian'"):
        adapter_for_config(config)


def test_an_adapter_that_finds_nothing():
    with pytest.raises(
        UnsupportedModelError, match=r"BertAdapter finds no attention in SplinterModel .*'splinter'.*bert"
    ):
        get_adapter(splinter(), BertAdapter)


@pytest.mark.parametrize("adapter", ("splinter", 3, SplinterModel))
def test_not_an_adapter(adapter):
    with pytest.raises(ArgumentError, match="AttentionAdapter class or instance"):
        get_adapter(splinter(), adapter)


def test_not_a_model():
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel, got str"):
        get_adapter("splinter")


def test_which_models_are_decoders_without_an_encoder():
    """By their config, or by their family where that has nothing else."""
    names = ("bert", "bert-decoder", "marian", "marian-decoder", "gpt2", "gpt2-decoder", "t5-encoder")
    found = {name for name in names if is_lone_decoder(FAMILIES[name].build().config)}
    assert found == {"bert-decoder", "marian-decoder", "gpt2", "gpt2-decoder"}
    assert not is_lone_decoder(splinter().config)
