"""Bits alone: every large weight lies on its grid, its moments are those of real tokens, and its bytes count."""

import importlib

import pytest
import torch
from pages import ROOT
from transformers import LlamaConfig, LlamaForCausalLM, MPNetConfig, MPNetModel

from collab_heads.fitting.weight_grid import gptq, nearest_on_grid


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bits_alone")


def decoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, tie_word_embeddings=True, **sizes)).eval()


def encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MPNetModel(MPNetConfig(vocab_size=100, **sizes), add_pooling_layer=False).eval()


def ids(rows=6, length=20, seed=1):
    return torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def seen_by(model, name, batches, masks):
    """Second moments of what a layer reads, of tokens that masks do not hide."""
    rows = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: rows.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    rows = torch.cat([each[mask.bool()] for each, mask in zip(rows, masks, strict=True)]).double()
    return rows.mT @ rows


@pytest.mark.parametrize("bits, table_bits", [(4, 8), (3, 4)])
def test_a_decoder_lies_on_its_grid(program, bits, table_bits):
    model, original, batches = decoder(), decoder(), [{"input_ids": ids()}]
    size = program.on_grid(model, batches, bits, table_bits)
    name, masks = "model.layers.1.mlp.down_proj", [torch.ones(6, 20)]
    expected = gptq(original.get_submodule(name).weight, seen_by(original, name, batches, masks), bits)
    same = model.get_submodule(name).weight == expected.weight()
    assert same.float().mean() > 0.99  # codes next to the middle of two points may differ
    table = nearest_on_grid(original.model.embed_tokens.weight, table_bits)
    assert torch.equal(model.model.embed_tokens.weight, table.weight())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linear = sum(each.weight.numel() for name, each in model.named_modules() if name.endswith("proj"))
    norms = sum(each.numel() for each in model.parameters() if each.ndim == 1)
    scales = 100 * (1 if table_bits == 8 else 2)  # a row of 64 numbers has one with eight bits, else one for each 32
    assert size == linear * (bits + 0.5) / 8 + table.codes.numel() * table_bits / 8 + 2 * scales + 4 * norms


def test_padding_does_not_count(program):
    mask = torch.ones(6, 20, dtype=torch.long)
    mask[:3, 12:] = 0
    model, original = encoder(), encoder()
    batch = {"input_ids": ids().masked_fill(mask == 0, 1), "attention_mask": mask}
    program.on_grid(model, [batch], 4)
    name = "encoder.layer.0.intermediate.dense"
    expected = gptq(original.get_submodule(name).weight, seen_by(original, name, [batch], [mask]), 4)
    assert (model.get_submodule(name).weight == expected.weight()).float().mean() > 0.99
    positions = "encoder.relative_attention_bias.weight"  # 4 wide
    assert torch.equal(model.get_parameter(positions), original.get_parameter(positions))
