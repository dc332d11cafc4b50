"""Architectures of llama.cpp whose blocks have one size: they compute what PyTorch does; uneven ones are refused."""

import pytest
import torch
from changed_heads import change_heads
from gguf_models import (
    ENGINE_NOISE,
    FOR_BERT,
    GROUPED,
    ROUNDED,
    attention_gone,
    bert,
    entry,
    in_folder,
    moved,
    no_neurons,
    on_grids,
    runs,
    texts,
    values,
    word_pieces,
    written,
)
from opening import layers_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from collab_heads import compress, export, prune_heads, prune_neurons, swap_to_collaborative
from collab_heads.errors import ModelStateError, UnsupportedModelError
from collab_heads.files.folders import GGUF
from collab_heads.serving.for_gguf import check_encoder, encoder_of
from collab_heads.serving.gguf_checks import check_sites, form_for

pytest.importorskip("gguf", reason="pip install gguf")

GELU_NOISE = 5e-3  # its table of GELU has steps of half precision; seen: 1e-3, of states that are far from 1
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
MODELS = {
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=40, **SIZES)),
}
NOISE = {"Qwen3": ENGINE_NOISE, "GPT-2": GELU_NOISE, "BERT": GELU_NOISE}


def build(name):
    return bert() if name == "BERT" else moved(MODELS[name])


def fewer_neurons(model):
    """As many in every block, and no multiple of 32."""
    prune_neurons(model, [texts()], keep={block.path: 41 for block in layers_of(model).feed_forwards})


def fewer_key_heads(model):
    """The second key head of every site gone, with its heads."""
    prune_heads(model, heads={site.path: [2, 3] for site in layers_of(model).attention})


def block_gone(model):
    attention_gone(model, 0)
    no_neurons(model, 0)
    with torch.no_grad():
        for site in (layers_of(model).attention[0], layers_of(model).feed_forwards[0]):
            if site.output.bias is not None:
                site.output.bias.zero_()


CHANGES = {
    "stock": lambda model: None,
    "fewer neurons": fewer_neurons,
    "uniform": lambda model: compress(model, [texts()], 0.75, refine_steps=0, shape="uniform"),
    "gated": lambda model: change_heads(model, "gated"),
}
CASES = [(family, change) for family in NOISE for change in CHANGES]
CASES += [("Qwen3", "fewer key heads"), ("Qwen3", "block gone"), ("GPT-2", "block gone")]
CHANGES |= {"fewer key heads": fewer_key_heads, "block gone": block_gone}


@runs
@pytest.mark.parametrize(("family", "change"), CASES)
def test_the_engine_computes_what_pytorch_does(family, change, tmp_path):
    model = build(family)
    CHANGES[change](model)
    report = export(model, tmp_path / "out", to="gguf", batches=[texts()])
    assert report.difference < NOISE[family]
    assert report.agreeing == (None if family == "BERT" else 1)


@runs
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("family", NOISE)
def test_weights_on_grids_run_as_they_are(family, bits, tmp_path):
    report = export(on_grids(build(family), bits), tmp_path / "out", to="gguf", batches=[texts()])
    assert report.int8
    assert report.difference < ROUNDED


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (8, "Q8_0")])
def test_weights_on_grids_are_written_exactly(bits, kind, tmp_path):
    """Fused projections stay fused; positions are added in float32."""
    model = on_grids(build("GPT-2"), bits)
    fewer_neurons(model)
    reader, _ = written(model, tmp_path)
    found, kinds = values(reader)
    assert kinds == {kind, "F32"}
    block = model.transformer.h[0]
    assert torch.equal(found["blk.0.attn_qkv.weight"], block.attn.c_attn.weight.T)
    assert torch.equal(found["blk.0.ffn_down.weight"][:, :41], block.mlp.c_proj.weight.T)
    assert torch.equal(found["position_embd.weight"], model.transformer.wpe.weight)
    assert next(each.tensor_type.name for each in reader.tensors if each.name == "position_embd.weight") == "F32"


def test_a_block_that_is_gone_is_left_out(tmp_path):
    model = build("GPT-2")
    block_gone(model)
    reader, notes = written(model, tmp_path)
    assert entry(reader, "block_count") == 1
    assert "1 blocks without heads and neurons are left out" in notes


def one_key_head_gone(model):
    prune_heads(model, heads={layers_of(model).attention[1].path: [2, 3]})


def one_head_gone(model):
    prune_heads(model, heads={layers_of(model).attention[1].path: [1]})


def neurons_differ(model):
    prune_neurons(model, [texts()], keep={layers_of(model).feed_forwards[1].path: 32})


def swapped(model):
    """Queries and keys of their full width, in projections of their own."""
    swap_to_collaborative(model, kind="per_head", dim_shared_query_key=1.0, batches=[texts()], refine_steps=0)


def narrowed(model):
    swap_to_collaborative(model, kind="per_head", dim_shared_query_key=0.5, batches=[texts()], refine_steps=0)


def shared(model):
    swap_to_collaborative(model, kind="shared", dim_shared_query_key=0.5, batches=[texts()], refine_steps=0)


def a_head_gone_everywhere(model):
    prune_heads(model, heads={site.path: [1] for site in layers_of(model).attention})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Qwen3", one_key_head_gone, r"layers\.1\.self_attn has 2 heads, .* here 4: compress .* shape='uniform'"),
        ("Qwen3", neurons_differ, r"layers\.1\.mlp has 32 neurons, .* here 64: compress .* shape='uniform'"),
        ("Qwen3", lambda model: attention_gone(model, 0), r"layers\.0\.self_attn has 0 heads, .* at least 1: "),
        ("Qwen3", one_head_gone, r"layers\.1\.self_attn has heads with the key heads .* shape='uniform'"),
        ("GPT-2", lambda model: attention_gone(model, 0), r"h\.0\.attn has 0 heads, .* here 4: .* shape='uniform'"),
        ("GPT-2", swapped, r"h\.0\.attn has other projections of queries and keys .* shape='uniform'"),
        ("GPT-2", narrowed, r"h\.0\.attn has queries and keys of width 8, .* here 16: .* shape='uniform'"),
        ("BERT", narrowed, r"attention\.self has queries and keys of width 8, .* here 16: .* shape='uniform'"),
        ("BERT", shared, r"attention\.self has queries and keys of width 8, .* here 16: .* shape='uniform'"),
        ("GPT-2", neurons_differ, r"h\.1\.mlp has 32 neurons, .* here 256: compress .* shape='uniform'"),
        ("GPT-2", a_head_gone_everywhere, r"h\.0\.attn has 3 heads, .* here 4: compress .* shape='uniform'"),
        ("BERT", a_head_gone_everywhere, r"attention\.self has 3 heads, .* here 4: compress .* shape='uniform'"),
        ("BERT", swapped, r"layer\.0\.attention\.self has other projections of queries and keys .* shape='uniform'"),
        ("BERT", block_gone, r"layer\.0\.attention\.self has 0 heads, .* here 4: compress .* shape='uniform'"),
    ],
)
def test_sizes_that_it_does_not_have_are_refused(family, change, message):
    model = build(family)
    change(model)
    with pytest.raises(ModelStateError, match=message):
        check_sites(layers_of(model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: BertForMaskedLM(BertConfig(**FOR_BERT)), "does not put out states alone"),
        (lambda: BertModel(BertConfig(**FOR_BERT, is_decoder=True)), "has is_decoder=True"),
        (lambda: BertModel(BertConfig(**FOR_BERT | {"hidden_act": "relu"})), "has hidden_act='relu'"),
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, **SIZES, scale_attn_weights=False)),
            "has scale_attn_weights=False",
        ),
        (
            lambda: Qwen3ForCausalLM(
                Qwen3Config(**GROUPED, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
            ),
            "rotary positions of type 'linear'",
        ),
        (lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, attention_bias=True)), "has attention_bias=True"),
    ],
)
def test_models_that_it_computes_otherwise_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        form_for(model())


@runs
@pytest.mark.slow
@pytest.mark.parametrize("pooling", ("mean", "cls", "lasttoken"))
def test_embeddings_are_those_of_the_sentence_encoder(pooling, tmp_path):
    import llama_cpp
    from sentence_transformers import SentenceTransformer

    model = in_folder(tmp_path, pooling, lambda modules: modules.Normalize())
    report = export(model, tmp_path / "out", to="gguf", tokenizer=word_pieces(), batches=[texts()])
    assert report.difference < GELU_NOISE
    expected = torch.tensor(SentenceTransformer(str(tmp_path / "encoder"), device="cpu").encode(["Abba a.b", "b"]))
    engine = llama_cpp.Llama(str(tmp_path / "out" / GGUF), embedding=True, verbose=False)
    found = torch.tensor([engine.embed(text, normalize=True) for text in ("Abba a.b", "b")])
    engine.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=GELU_NOISE)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ("max", (), "pools by max, llama.cpp by one of mean, cls, lasttoken"),
        ("mean", (lambda modules: modules.Dense(64, 8),), "has a layer Dense after the pooling"),
    ],
)
def test_encoders_that_it_does_not_have_are_refused(pooling, more, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        check_encoder(encoder_of(in_folder(tmp_path, pooling, *more)))
