"""Narrow heads as a stock model: T5's config says how wide a head is."""

import json
import re
import subprocess
import sys

import pytest
import torch
from model_runs import output, sites
from model_sizes import EXACT64
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention
from unchanged import refused

from collab_heads import fold_heads, prune_heads, swap_to_collaborative, swap_to_gated
from collab_heads.errors import ModelStateError
from families import FAMILIES

T5S = [pytest.param(name, id=name) for name in ("t5", "t5-encoder")]
FIRST = "encoder.block.0.layer.0.SelfAttention"
# what a process that never imported collab_heads makes of a checkpoint
PLAIN = """
import sys, torch, transformers
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], dtype=torch.float64).eval()
inputs = torch.load(sys.argv[1] + "/inputs.pt")
print(model(**inputs).logits.tolist())
assert "collab_heads" not in sys.modules
"""


def narrow(model, share=0.5):
    swap_to_collaborative(model, dim_shared_query_key=share, dim_value=share, kind="per_head")


@pytest.mark.parametrize("name", T5S)
@pytest.mark.parametrize("gates", [False, True])
def test_the_folded_model_is_a_stock_one_that_computes_the_same(name, gates):
    family = FAMILIES[name]
    model = family.build().double().eval()
    narrow(model)
    if gates:
        swap_to_gated(model, alive_heads={FIRST: [1, 0, 1, 1]})
    before, parameters = output(model, family.inputs()), model.num_parameters()
    report = fold_heads(model)
    assert report.head_width == model.config.d_kv == 4
    assert "heads of width 4 stay" in str(report)
    assert model.num_parameters() == parameters
    for module in sites(model).values():
        assert type(module) is T5Attention
        assert (module.key_value_proj_dim, module.inner_dim, module.q.out_features) == (4, 16, 16)
    assert not hasattr(model.config, "collab_heads")
    torch.testing.assert_close(output(model, family.inputs()), before, rtol=0, atol=EXACT64)


@pytest.mark.slow
def test_plain_transformers_loads_it(tmp_path):
    family = FAMILIES["t5"]
    model = family.build().double().eval()
    narrow(model)
    expected = output(model, family.inputs())
    fold_heads(model)
    model.save_pretrained(tmp_path)
    torch.save(family.inputs(), tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    found = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT64)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)
    generated = [each.generate(**family.inputs(), max_length=8) for each in (model, again)]
    assert torch.equal(*generated)


def test_at_full_width_it_is_the_original():
    family = FAMILIES["t5"]
    model, stock = family.build(), family.build()
    swap_to_collaborative(model, kind="per_head")
    fold_heads(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: swap_to_collaborative(model, dim_shared_query_key=16), "that share their queries and keys"),
        (lambda model: swap_to_collaborative(model, dim_shared_query_key=16, kind="per_head"), "of several widths"),
        (lambda model: swap_to_collaborative(model, dim_value=16), "of several widths have no stock form"),
        (
            lambda model: swap_to_collaborative(
                model, dim_shared_query_key=16, dim_value=16, kind="per_head", sites="enc-self"
            ),
            "of several widths have no stock form",
        ),
        (lambda model: (prune_heads(model, heads={FIRST: [1]}), narrow(model)), "has fewer heads"),
    ],
)
def test_what_no_stock_model_is_is_refused(change, message):
    model = FAMILIES["t5"].build()
    change(model)
    with refused(model, ModelStateError, message, "import collab_heads where it is loaded"):
        fold_heads(model)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
def test_images(name, tmp_path):
    """Their scale follows from the width, and the key has a bias again, of zeros."""
    family = FAMILIES[name]
    model = family.build().double().eval()
    narrow(model)
    before, scales = output(model, family.inputs()), {module.scaling for module in sites(model).values()}
    assert fold_heads(model).head_width == model.config.head_dim == 4
    assert {module.scaling for module in sites(model).values()} != scales
    torch.testing.assert_close(output(model, family.inputs()), before, rtol=0, atol=EXACT64)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(output(again.eval(), family.inputs()), before, rtol=0, atol=EXACT64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"dim_shared_query_key": 0.5, "kind": "per_head"}, "keep frequency pairs of their own"),
        ("llama", {}, "of several widths .*layers.0.self_attn 8 and 4"),
        ("qwen3", {}, "of several widths .*layers.0.self_attn 8 and 4"),
    ],
)
def test_rotary_heads_that_no_stock_model_has(name, options, message):
    model = FAMILIES[name].build()
    swap_to_collaborative(model, dim_value=0.5, **options)
    with refused(model, ModelStateError, "import collab_heads where it is loaded") as caught:
        fold_heads(model)
    assert re.search(message, str(caught.value))
