"""Gated, mixed and pruned models load like any other: missing tensors, dtypes, the meta device, older readers."""

import pytest
import torch
from changed_heads import NARROW, changed, emptied, output_projections
from model_configs import bert_config
from model_inputs import cast
from model_runs import aligned, output, sites, swap
from transformers import AutoConfig, AutoModel, PreTrainedModel, T5ForConditionalGeneration
from unchanged import load_without

from collab_heads import prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.layers.shared_query_key import block_mixing
from collab_heads.saving.rebuild import rebuild
from families import FAMILIES, LAYOUTS, make

SOME = ("bert", "marian", "t5")


def saved(name, folder, origin=None):
    model = changed(FAMILIES[name], origin, "both", alphas=True, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", SOME)
def test_missing_learned_gates_are_open(name, tmp_path, warnings_logged):
    model = saved(name, tmp_path)
    found = load_without(model, tmp_path, "gates.log_alpha", warnings_logged)
    assert found.tolist() == [2.5] * len(found)


def test_missing_fixed_gates_are_open(tmp_path, warnings_logged):
    model = FAMILIES["bert"].build()
    swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 0], [0, 0, 1, 1]]})
    model.save_pretrained(tmp_path)
    assert load_without(model, tmp_path, "gates.alive", warnings_logged).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "name, part, deviation",
    (
        ("bert", "layer.1.attention.output.dense.weight", 0.3),
        ("marian", "encoder.layers.1.self_attn.out_proj.weight", 0.3),
        ("t5", "encoder.block.1.layer.0.SelfAttention.o.weight", 32**-0.5),
        ("gpt2-decoder", "h.1.attn.c_proj.weight", 0.3 / (2 * 2) ** 0.5),  # its own rule, by the number of layers
        ("gpt2-decoder", "h.1.crossattention.c_proj.weight", 0.3 / (2 * 2) ** 0.5),
        ("bert", "layer.1.attention.output.dense.bias", 0),
        ("bert", "layer.0.attention.output.dense.bias", 0),  # of a site without heads
        ("marian", "decoder.layers.0.self_attn.out_proj.bias", 0),
        ("t5", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 32**-0.5),
    ),
)
def test_missing_stock_parameters_start_as_the_family_starts(name, part, deviation, tmp_path, warnings_logged):
    model = saved(name, tmp_path)
    found = load_without(model, tmp_path, part, warnings_logged)
    assert torch.isfinite(found).all()
    assert found.std().item() == pytest.approx(deviation, rel=0.25)


@pytest.mark.parametrize("part", ("mixing", "shared_query.weight", "shared_key.weight", "content_bias.weight"))
@pytest.mark.parametrize("removed", ([1], [0, 1, 3]))
def test_missing_parts_of_a_narrow_projection_with_fewer_heads(part, removed, tmp_path, warnings_logged):
    """Also where more dimensions are shared than the heads that are left had."""
    model = FAMILIES["bert"].build()
    swap(model, "shared", NARROW["shared"])
    prune_heads(model, heads={"enc-self": [removed, removed]})
    model.save_pretrained(tmp_path)
    found = load_without(model, tmp_path, f"query_key.{part}", warnings_logged)
    assert torch.isfinite(found).all()
    if part == "mixing":
        assert torch.equal(found, block_mixing(4 - len(removed), 20).float())
    else:
        assert found.std() == 0 if part.startswith("content") else 0.2 < found.std() < 0.4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_checkpoint_logs_nothing(name, tmp_path, warnings_logged):
    model = saved(name, tmp_path, "shared")
    type(model).from_pretrained(tmp_path)
    assert "MISSING" not in warnings_logged.text and "UNEXPECTED" not in warnings_logged.text


@pytest.mark.parametrize("origin", (None, "shared", "per_head"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_rebuilding_twice_is_harmless(name, origin):
    model, inputs = changed(FAMILIES[name], origin, "both", alphas=True), FAMILIES[name].inputs()
    before, parameters = output(model, inputs), [id(parameter) for parameter in model.parameters()]
    rebuild(model)
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert torch.equal(output(model, inputs), before)


@pytest.mark.parametrize("name", SOME)
def test_meta_device(name, tmp_path):
    model = saved(name, tmp_path)
    with torch.device("meta"):
        empty = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *output_projections(empty)[PATHS[name]].buffers()))
    shapes = {key: tensor.shape for key, tensor in model.base_model.state_dict().items()}
    assert {key: tensor.shape for key, tensor in empty.state_dict().items()}.items() <= shapes.items()


PATHS = {
    "bert": "encoder.layer.1.attention.self",
    "marian": "decoder.layers.1.encoder_attn",
    "t5": "decoder.block.1.layer.1.EncDecAttention",
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_dtype_on_loading(dtype, tmp_path):
    model = saved("marian", tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path, dtype=dtype).eval())
    precise = torch.promote_types(dtype, torch.float32)  # of gates and alphas, as where they were put in
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (precise if name.endswith("alpha") else dtype)
    result = output(loaded, cast(FAMILIES["marian"].inputs(), dtype))
    assert result.dtype == dtype and torch.isfinite(result).all()
    whole, halved = (changed(FAMILIES["marian"], None, "both", alphas=True, dtype=torch.float32) for _ in range(2))
    for (name, parameter), other in zip(halved.to(dtype).named_parameters(), whole.parameters(), strict=True):
        if name.endswith("alpha"):
            parameter.data = other.data.to(precise)
    assert torch.equal(output(halved, cast(FAMILIES["marian"].inputs(), dtype)), result)


def test_fixed_gates_are_saved(tmp_path):
    model = FAMILIES["t5"].build()
    swap_to_gated(model, alive_heads={"dec-enc": [[1, 0, 0, 1], [0, 1, 1, 1]]})
    model.save_pretrained(tmp_path)
    loaded = aligned(T5ForConditionalGeneration.from_pretrained(tmp_path).eval())
    gates = [p.gates for p in output_projections(loaded).values() if isinstance(p, HeadOutputProjection)]
    assert [gate.alive.tolist() for gate in gates] == [[1, 0, 0, 1], [0, 1, 1, 1]]
    assert torch.equal(output(loaded, FAMILIES["t5"].inputs()), output(model, FAMILIES["t5"].inputs()))


def test_what_older_readers_see(monkeypatch, tmp_path, warnings_logged):
    """Without the hooks, gates and alphas are unexpected and fewer heads a mismatch: nothing loads silently."""
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    swap_to_alpha(model)
    model.save_pretrained(tmp_path / "gated")
    saved("bert", tmp_path / "pruned")
    monkeypatch.setattr(PreTrainedModel, "post_init", PreTrainedModel.post_init.__wrapped__)
    type(model).from_pretrained(tmp_path / "gated")
    assert "UNEXPECTED" in warnings_logged.text
    assert "gates.log_alpha" in warnings_logged.text and "mixing.alpha" in warnings_logged.text
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path / "pruned")


def test_a_fresh_pruned_model_starts_as_the_family_starts():
    """By the rules of the family: the same spread everywhere."""
    config = changed(FAMILIES["bert"], state="both").config
    fresh = make(FAMILIES["bert"].build().__class__, config)
    stock = make(FAMILIES["bert"].build().__class__, bert_config())
    assert len(emptied(fresh)) == 1
    for path, module in sites(fresh).items():
        for name, parameter in (*module.named_parameters(), *output_projections(fresh)[path].named_parameters()):
            if parameter.ndim == 2:
                theirs = dict(
                    (*sites(stock)[path].named_parameters(), *output_projections(stock)[path].named_parameters())
                )
                assert parameter.std().item() == pytest.approx(theirs[name].std().item(), rel=0.15)
