"""Four bits on a CPU: changed models whose widths bitsandbytes reads wrongly do not load, others are read rightly."""

import pytest
import torch
from four_bits import mend
from later import bitsandbytes
from model_runs import output
from model_sizes import TEXT
from transformers import BertConfig, BertForSequenceClassification, BitsAndBytesConfig

from collab_heads import prune_heads, prune_neurons
from collab_heads.errors import UnsupportedModelError
from collab_heads.saving import four_bits
from families import FAMILIES, make

INPUTS = FAMILIES["bert"].inputs()
LOST = {"nf4": 0.1, "fp4": 0.14}  # of normal weights in blocks of 64: 0.093 and 0.125 seen
WRONG = "encoder.layer.0.attention.output.dense"
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def measured_anew():
    pytest.importorskip("bitsandbytes")
    four_bits.reads_right.cache_clear()
    yield
    four_bits.reads_right.cache_clear()


def loss(width, kind):
    """Return how far four bits move a matrix of normal numbers."""
    weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    packed = bitsandbytes.functional.quantize_4bit(weight, quant_type=kind)
    return float((bitsandbytes.functional.dequantize_4bit(*packed) - weight).norm() / weight.norm())


def is_wrong_here():
    return loss(96, "nf4") > LOST["nf4"]


def bits(kind="nf4", **more):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **more)


def built():
    return make(BertForSequenceClassification, BertConfig(initializer_range=0.3, **SIZES, **TEXT))


@pytest.fixture
def folder(tmp_path):
    """A model that reads 96 numbers in one place."""
    model = built()
    prune_heads(model, heads={"enc-self": [[0, 1], []]})
    model.save_pretrained(tmp_path / "pruned")
    return tmp_path / "pruned"


def load(folder, config=None):
    return BertForSequenceClassification.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", LOST)
def test_widths_that_are_read_rightly_are_those_that_lose_little(kind):
    """By weights that four bits hold exactly, beside normal numbers."""
    for width in range(8, 264, 8):
        assert four_bits.reads_right(width, 64, kind) == (loss(width, kind) <= LOST[kind]), width


@pytest.mark.filterwarnings("ignore")
def test_what_would_be_wrong_is_refused_with_a_way_out_that_works(folder):
    if not is_wrong_here():
        pytest.skip("bitsandbytes is right on this processor")
    with pytest.raises(UnsupportedModelError) as refused:
        load(folder, bits())
    message = str(refused.value)
    assert f"{WRONG} reads 96 numbers" in message and "1 of the modules" in message and "multiple_of=64" in message
    assert "llm_int8_skip_modules=['attention.output.dense']" in message
    model, left = load(folder), load(folder, bits(llm_int8_skip_modules=["attention.output.dense"]))
    assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in left.modules())
    for name, module in left.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = model.get_submodule(name).weight
            found = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert (found - weight).norm() <= 0.12 * weight.norm()
    load(folder, BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.filterwarnings("ignore")
def test_a_mended_version_is_not_refused_and_what_it_stored_is(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        mend(patch)
        model, four = load(folder), load(folder, bits())
        expected = output(model, INPUTS)
        assert (output(four, INPUTS) - expected).norm() < 0.5 * expected.norm()
        four.save_pretrained(tmp_path / "stored")
    four_bits.reads_right.cache_clear()
    if is_wrong_here():
        with pytest.raises(UnsupportedModelError, match="reads 96 numbers"):
            load(tmp_path / "stored")


@pytest.mark.filterwarnings("ignore")
def test_a_changed_model_of_right_widths_and_a_stock_one_load(tmp_path):
    stock, changed = built(), built()
    prune_heads(changed, heads={"enc-self": [[0, 1, 2, 3], []]})
    prune_neurons(changed, [INPUTS], keep=64)
    for name, model in (("stock", stock), ("changed", changed)):
        model.save_pretrained(tmp_path / name)
        load(tmp_path / name, bits())
