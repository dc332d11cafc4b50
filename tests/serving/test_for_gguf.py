"""llama.cpp computes what PyTorch does: heads, neurons and whole blocks gone, biases, rotations, grids."""

import logging
import sys

import pytest
import torch
from changed_heads import change_heads, mix
from gguf_models import (
    ENGINE_NOISE,
    GROUPED,
    ROUNDED,
    attention_gone,
    entry,
    moved,
    no_neurons,
    on_grids,
    runs,
    texts,
    values,
    written,
)
from opening import layers_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from collab_heads import compress, export, plan, prune_heads, prune_neurons, swap_to_collaborative
from collab_heads.adapters.llama import LlamaAdapter
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.files.folders import GGUF
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import WEIGHT_BITS
from collab_heads.serving.gguf_checks import check_site, form_for

gguf = pytest.importorskip("gguf", reason="pip install gguf")

FORM = LlamaAdapter.gguf["llama"]
DECODERS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
}


def pruned(model):
    """One key head of the first site gone, with its heads."""
    prune_heads(model, heads={layers_of(model).attention[0].path: [0, 1]})


def one_layer_gone(model):
    attention_gone(model, 0)
    no_neurons(model, 0)


def narrow_values(model):
    options = {"kind": "per_head", "batches": [texts()], "refine_steps": 0}
    swap_to_collaborative(model, dim_shared_query_key=0.75, dim_value=0.5, **options)


def neurons_gone(model):
    """Other numbers of neurons in every block, none of which is a multiple of 32."""
    first, second = layers_of(model).feed_forwards
    prune_neurons(model, [texts()], keep={first.path: 41, second.path: 30})


def last_gone(model):
    attention_gone(model, 1)
    no_neurons(model, 1)


def all_gone(model):
    one_layer_gone(model)
    last_gone(model)


def build(name):
    """A seeded model whose biases and norms are far from zero and one."""
    return moved(DECODERS[name])


CHANGES = {
    "stock": lambda model: None,
    "key heads gone": pruned,
    "neurons gone": neurons_gone,
    "first attention gone": lambda model: attention_gone(model, 0),
    "last attention gone": lambda model: attention_gone(model, 1),
    "first neurons gone": lambda model: no_neurons(model, 0),
    "last neurons gone": lambda model: no_neurons(model, 1),
    "first block gone": one_layer_gone,
    "last block gone": last_gone,
    "all gone": all_gone,
    "compressed": lambda model: compress(model, [texts()], 0.6, refine_steps=0, shape="gguf"),
    "gated": lambda model: change_heads(model, "gated"),
    "mixed": mix,
}


BY_DEFAULT = {("Qwen2", "key heads gone"), ("Mistral", "stock")} | {("Llama", change) for change in CHANGES}
CASES = [
    pytest.param(family, change, marks=() if (family, change) in BY_DEFAULT else pytest.mark.slow)
    for family in DECODERS
    for change in CHANGES
]


@runs
@pytest.mark.parametrize(("family", "change"), CASES)
def test_the_engine_computes_what_pytorch_does(family, change, tmp_path):
    model = build(family)
    CHANGES[change](model)
    report = export(model, tmp_path / "out", to="gguf")
    assert report.difference < ENGINE_NOISE
    assert report.agreeing == 1


@runs
@pytest.mark.parametrize("bits", (3, 4, 8))
@pytest.mark.parametrize("change", ("stock", "neurons gone", "first attention gone"))
def test_weights_on_grids_run_as_they_are(bits, change, tmp_path):
    model = build("Llama")
    CHANGES[change](model)
    report = export(on_grids(model, bits), tmp_path / "out", to="gguf")
    assert report.int8
    assert report.difference < ROUNDED


@runs
@pytest.mark.slow
@pytest.mark.parametrize("family", ("Mistral", "Qwen2"))
@pytest.mark.parametrize("change", ("key heads gone", "last block gone"))
def test_weights_on_grids_in_each_family(family, change, tmp_path):
    model = build(family)
    CHANGES[change](model)
    assert export(on_grids(model, 4), tmp_path / "out", to="gguf").difference < ROUNDED


@runs
def test_neither_ends_a_text(tmp_path):
    model, batch = build("Llama"), texts()
    first = model.generate(**batch, max_new_tokens=1, do_sample=False)[:, -1]
    model.generation_config.eos_token_id = first.unique().tolist()
    assert export(model, tmp_path / "out", to="gguf", batches=[batch]).agreeing == 1


@runs
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED | {"initializer_range": 0.1})).eval().to(dtype)
    report = export(model, tmp_path / "out", to="gguf")
    assert report.difference < 8 * torch.finfo(dtype).eps


@runs
def test_int8_keeps_grids_of_fewer_bits_and_rounds_the_rest(tmp_path):
    model = build("Llama")
    module = model.model.layers[0].mlp.up_proj
    module.weight.data = nearest_on_grid(module.weight.data, 4).weight()
    setattr(module, WEIGHT_BITS, 4)
    report = export(model, tmp_path / "out", to="gguf", int8=True)
    assert report.difference < ROUNDED
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "out" / GGUF).tensors}
    assert kinds.pop("blk.0.ffn_up.weight") == "Q4_0"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q8_0"}


@runs
@pytest.mark.parametrize(
    "rotations",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
    ],
)
def test_scaled_rotations(rotations, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**GROUPED, rope_parameters=rotations | {"rope_theta": 5000.0})
    report = export(LlamaForCausalLM(config).eval(), tmp_path / "out", to="gguf")
    assert report.difference < ENGINE_NOISE


@runs
def test_biases_everywhere_and_tied_embeddings(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    attention_gone(model, 1)
    no_neurons(model, 0)
    assert export(model, tmp_path / "out", to="gguf").difference < ENGINE_NOISE


def test_blocks_have_sizes_of_their_own_and_those_without_anything_are_left_out(tmp_path):
    model = build("Llama")
    one_layer_gone(model)
    neurons = layers_of(model).feed_forwards[1]
    prune_neurons(model, [texts()], keep={neurons.path: 41})
    reader, notes = written(model, tmp_path)
    assert [entry(reader, each) for each in ("architecture", "block_count", "feed_forward_length")] == ["llama", 1, 64]
    assert "1 blocks without heads and neurons are left out" in notes


def test_uneven_blocks_are_an_architecture_of_their_own(tmp_path):
    model = build("Qwen2")
    site = layers_of(model).attention[1]
    prune_heads(model, heads={site.path: [0, 1]})
    reader, _ = written(model, tmp_path)
    assert entry(reader, "general.architecture") == "deci"
    assert (entry(reader, "head_count"), entry(reader, "head_count_kv")) == ([4, 2], [2, 1])


@pytest.mark.parametrize(("bits", "kind"), [(3, "Q4_0"), (4, "Q4_0"), (8, "Q8_0")])
def test_weights_on_grids_are_written_exactly(bits, kind, tmp_path):
    """A 3-bit grid is one of 4 bits; the scale of a row stands in each of its blocks."""
    model = build("Llama")
    pruned(model)
    neurons_gone(model)
    found, kinds = values(written(on_grids(model, bits), tmp_path)[0])
    assert kinds == {kind, "F32"}
    mlp = model.model.layers[0].mlp
    assert torch.equal(found["blk.0.attn_v.weight"], model.model.layers[0].self_attn.v_proj.weight)
    assert torch.equal(found["blk.0.ffn_down.weight"][:, :41], mlp.down_proj.weight)
    assert found["blk.0.ffn_down.weight"].shape[1] == 64 and not found["blk.0.ffn_down.weight"][:, 41:].any()
    assert torch.equal(found["token_embd.weight"], model.model.embed_tokens.weight)


def test_weights_that_have_left_their_grid_stay_in_float32(tmp_path):
    model = on_grids(build("Llama"), 4)
    model.lm_head.weight.data[0, 0] += 0.01
    found, _ = values(written(model, tmp_path)[0])
    assert torch.equal(found["output.weight"], model.lm_head.weight)


def test_a_sliding_window_limits_the_texts(tmp_path):
    model = build("Mistral")
    model.config.sliding_window = 16
    reader, notes = written(model, tmp_path)
    assert entry(reader, "context_length") == 16
    assert any("no sliding window" in note for note in notes)


def one_head_gone(model):
    prune_heads(model, heads={layers_of(model).attention[0].path: [1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_head_gone, "layers.0.self_attn has heads with the key heads .0, 1, 1.,"),
        (
            narrow_values,
            "layers.0.self_attn has (queries and keys|values) of width .* compress the original with shape=",
        ),
    ],
)
def test_heads_that_it_does_not_have_are_refused(change, message):
    model = build("Llama")
    change(model)
    with pytest.raises(ModelStateError, match=message):
        for site in layers_of(model).attention:
            check_site(site, FORM)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: OPTForCausalLM(
                OPTConfig(
                    hidden_size=32, word_embed_proj_dim=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=64
                )
            ),
            "OPTForCausalLM is of type 'opt'",
        ),
        (lambda: LlamaModel(LlamaConfig(**GROUPED)), "LlamaModel does not predict tokens"),
        (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, hidden_act="gelu")), "has hidden_act=.gelu."),
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
            ),
            "rotary positions of type 'dynamic'",
        ),
    ],
)
def test_models_that_it_computes_otherwise_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        form_for(model())


@runs
def test_the_process_is_left_as_it_was(two_threads, tmp_path, capfd):
    before = torch.get_num_threads(), torch.get_rng_state(), sys.stdout, logging.root.manager.disable
    model = build("Llama")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.set_rng_state(before[1])
    export(model, tmp_path / "out", to="gguf")
    assert torch.get_num_threads() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert (sys.stdout, logging.root.manager.disable) == before[2:]
    assert capfd.readouterr().out == ""
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("share", [0.2, 0.16])
def test_weights_take_the_bytes_that_a_plan_counts(share, tmp_path):
    model, sizes = DECODERS["Llama"](), {"shape": "gguf", "multiple_of": 32, "refine_steps": 0}
    made = plan(model, [texts()], bits=(8, 4, 3), **sizes)
    whole = sum(each.nbytes for each in model.parameters())
    budget = f"{share * whole / 1e6:.6f}MB"
    choices = made.choose(budget)
    assert len({choice.bits for choice in choices.values()}) > 1
    compress(model, made, budget)
    reader, _ = written(model, tmp_path)
    assert sum(each.n_bytes for each in reader.tensors) == made.rest + made.share(choices) * made.whole <= share * whole
