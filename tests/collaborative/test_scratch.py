"""Training from scratch: a config that any from_config builds."""

import copy

import pytest
import torch
from model_configs import bert_config, marian_config, t5_config
from model_inputs import batch
from model_runs import aligned, is_swapped, output, sites, swapped
from model_sizes import EXACT, FP32_NOISE, HEADS, KINDS
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPTNeoConfig,
    LlamaConfig,
    MarianConfig,
    T5Config,
)
from unchanged import assert_unchanged, snapshot

from collab_heads import collaborative_config, get_adapter, swap_to_collaborative
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.layers.shared_query_key import MIXING_STD, block_mixing
from families import FAMILIES

CONFIGS = {"bert": bert_config, "marian": marian_config, "t5": t5_config}
TASKS = {"bert": AutoModelForSequenceClassification, "marian": AutoModelForSeq2SeqLM, "t5": AutoModelForSeq2SeqLM}
SAMPLING = 0.1  # relative error of a standard deviation estimated from some thousand draws; seen: 0.03


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


def inputs(name):
    return batch(decoder=name != "bert")


def build(cls, config, seed=0):
    torch.manual_seed(seed)
    return cls.from_config(config).eval()


def query_keys(model):
    return [module.query_key for module in sites(model).values()]


@pytest.mark.parametrize("mixing", KINDS)
@pytest.mark.parametrize("dim", (None, 16, 0.25, {"enc-self": 20}))
def test_from_config(name, mixing, dim):
    config = CONFIGS[name]()
    before = config.to_dict()
    ours = collaborative_config(config, dim_shared_query_key=dim, kind=mixing)
    assert config.to_dict() == before
    for cls in (AutoModel, TASKS[name]):
        model = build(cls, ours)
        swapped = {path: module for path, module in sites(model).items() if is_swapped(module)}
        assert swapped.keys() == ours.collab_heads["sites"].keys()
        assert len(swapped) == (2 if isinstance(dim, dict) else len(sites(model)))
        assert torch.isfinite(output(model, inputs(name))).all()
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert all(
            parameter.requires_grad for module in swapped.values() for parameter in module.query_key.parameters()
        )


def test_same_record_as_a_swap(name):
    model = TASKS[name].from_config(CONFIGS[name]())
    swap_to_collaborative(model, dim_shared_query_key=20)
    assert collaborative_config(CONFIGS[name](), dim_shared_query_key=20).collab_heads == model.config.collab_heads


@pytest.mark.parametrize("family", ("qwen3", "modernbert"))
def test_narrower_values_where_heads_cannot_share(family):
    """Of nothing else is there a record, as after a swap; the model that it builds computes and trains."""
    swapped = FAMILIES[family].build()
    config = collaborative_config(swapped.config, dim_value=0.5)
    swap_to_collaborative(swapped, dim_value=0.5)
    assert config.collab_heads == swapped.config.collab_heads
    model = type(swapped)(config)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in swapped.named_parameters()}
    model(**FAMILIES[family].inputs()).logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("start", ("concatenate", "ones", "normal", "xavier"))
@pytest.mark.parametrize("dim", (20, None))
def test_mixing_starts(name, start, dim):
    model = build(AutoModel, collaborative_config(CONFIGS[name](), dim, mixing_init=start))
    found = torch.stack([query_key.mixing.detach() for query_key in query_keys(model)])
    assert found.shape[1:] == (HEADS, dim or EXACT)
    if start == "xavier":
        bound = (6 / sum(found.shape[1:])) ** 0.5
        assert 0.8 * bound < found.abs().max() <= bound
        assert found.mean().abs() < 4 * bound / (3 * found.numel()) ** 0.5
    elif start == "normal":
        draws = 2 * HEADS * 20  # at least
        assert float(found.std()) == pytest.approx(MIXING_STD, rel=4 / (2 * draws) ** 0.5)
        assert found.mean().abs() < 4 * MIXING_STD / draws**0.5
        assert not torch.equal(found[0], found[1])
    else:
        expected = torch.ones(HEADS, dim or EXACT) if start == "ones" else block_mixing(HEADS, dim or EXACT).float()
        assert all(torch.equal(each, expected) for each in found)


def wide(name):
    """Configs whose head width is not their width over heads where the family allows it: formulas must tell apart."""
    size = {"vocab_size": 61, "max_position_embeddings": 64}
    if name == "bert":
        return BertConfig(
            **size,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=8,
            initializer_range=0.3,
        )
    if name == "marian":
        return MarianConfig(
            **size,
            d_model=96,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            pad_token_id=1,
            decoder_start_token_id=1,
            init_std=0.3,
        )
    return T5Config(
        vocab_size=61, d_model=96, d_kv=16, num_heads=4, num_layers=1, d_ff=8, decoder_start_token_id=0, pad_token_id=0
    )


@pytest.mark.parametrize("mixing", KINDS)
@pytest.mark.parametrize("dim", (None, 0.5))
def test_starts_as_wide_as_stock(name, mixing, dim):
    stock, ours = (
        AutoModel.from_config(wide(name)),
        AutoModel.from_config(collaborative_config(wide(name), dim, kind=mixing)),
    )
    adapter = get_adapter(stock)
    for theirs, module in zip(sites(stock).values(), sites(ours).values(), strict=True):
        query_key = module.query_key
        for projection, own in zip(
            adapter.projections(theirs), (query_key.shared_query, query_key.shared_key), strict=True
        ):
            assert float(own.weight.std()) == pytest.approx(float(projection.weight.std()), rel=SAMPLING)
            assert abs(own.weight.mean()) < SAMPLING * own.weight.std()
        assert not torch.equal(query_key.shared_query.weight, query_key.shared_key.weight)
    if name == "t5":
        first = next(iter(sites(ours).values())).query_key
        assert float(first.shared_query.weight.std()) == pytest.approx((96 * 16) ** -0.5, rel=SAMPLING)
        assert float(first.shared_key.weight.std()) == pytest.approx(96**-0.5, rel=SAMPLING)


@torch.no_grad()
@pytest.mark.parametrize("mixing", KINDS)
def test_full_width_is_a_stock_model(name, mixing):
    """Read back into the stock model, the weights give the same output."""
    ours, stock = build(TASKS[name], collaborative_config(wide(name), kind=mixing)), build(TASKS[name], wide(name), 1)
    adapter, state = get_adapter(stock), ours.state_dict()
    missing = stock.load_state_dict(
        {key: value for key, value in state.items() if "query_key" not in key}, strict=False
    )
    assert missing.unexpected_keys == []
    for path, module in sites(stock).items():
        query, key = adapter.projections(module)
        query_key = ours.base_model.get_submodule(path).query_key
        query.weight.copy_(query_key.shared_query.weight)
        key.weight.copy_(query_key.shared_key.weight)
        if query.bias is not None:
            assert query.bias.abs().max() == key.bias.abs().max() == 0  # as the families initialise them
            if mixing == "shared":
                assert query_key.content_bias.weight.abs().max() == 0
            else:
                assert query_key.shared_query.bias.abs().max() == 0
    torch.testing.assert_close(
        output(ours, inputs(name)), output(stock, inputs(name)), rtol=FP32_NOISE, atol=FP32_NOISE
    )


def test_other_weights_start_as_stock_ones(name):
    """Standard deviations of everything that is not ours."""
    stock, ours = build(AutoModel, wide(name)), build(AutoModel, collaborative_config(wide(name), 16))
    theirs = dict(stock.named_parameters())
    for key, parameter in ours.named_parameters():
        if "query_key" not in key and parameter.numel() > 2000:
            assert float(parameter.std()) == pytest.approx(float(theirs[key].std()), rel=SAMPLING), key


@pytest.mark.parametrize("mixing", KINDS)
def test_one_step_lowers_a_loss(name, mixing):
    model = build(TASKS[name], collaborative_config(CONFIGS[name](), 16, kind=mixing))
    given = inputs(name)
    given["labels"] = torch.tensor([0, 1, 0]) if name == "bert" else given.pop("decoder_input_ids")
    mine = [parameter for query_key in query_keys(model) for parameter in query_key.parameters()]
    optimizer = torch.optim.SGD(mine, lr=1e-3)  # only what is ours moves
    before = model(**given).loss
    before.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in mine)
    optimizer.step()
    assert model(**given).loss < before


@pytest.mark.parametrize("mixing", KINDS)
def test_saved_and_loaded(name, mixing, tmp_path):
    start = "normal" if mixing == "shared" else "concatenate"
    model = build(TASKS[name], collaborative_config(CONFIGS[name](), 16, kind=mixing, mixing_init=start))
    model.save_pretrained(tmp_path)
    loaded = aligned(TASKS[name].from_pretrained(tmp_path).eval())
    assert loaded.config.collab_heads == model.config.collab_heads
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert torch.equal(output(loaded, inputs(name)), output(model, inputs(name)))


@pytest.mark.parametrize(
    "arguments, fragments",
    (
        ({"dim_shared_query_key": 33}, ("33", "1 to 32")),
        ({"dim_shared_query_key": True}, ("True", "an int")),
        ({"dim_shared_query_key": {"dec-self": 8}}, ("no dec-self",)),
        ({"sites": "enc_self"}, ("did you mean 'enc-self'",)),
        ({"kind": "full"}, ("'full'", "shared, per_head")),
        ({"mixing_init": "one"}, ("'one'", "did you mean 'ones'")),
    ),
)
def test_refused_arguments(arguments, fragments):
    config = bert_config()
    before = config.to_dict()
    with pytest.raises(ArgumentError) as caught:
        collaborative_config(config, **arguments)
    assert all(fragment in str(caught.value) for fragment in fragments)
    assert config.to_dict() == before


def test_a_changed_config_is_refused():
    with pytest.raises(ModelStateError, match="stock config"):
        collaborative_config(collaborative_config(bert_config(), 16))


@pytest.mark.parametrize(
    "config, fragment",
    (
        (GPTNeoConfig(hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]), "'gpt_neo'"),
        (LlamaConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2), "rotary"),
    ),
)
def test_unsupported_configs(config, fragment):
    with pytest.raises(UnsupportedModelError, match=fragment):
        collaborative_config(config)


@pytest.mark.parametrize("config", (None, "bert-base-uncased", {"model_type": "bert"}), ids=repr)
def test_not_a_config(config):
    with pytest.raises(ArgumentError, match="config must be a PreTrainedConfig, not"):
        collaborative_config(config)


def test_a_model_in_place_of_a_config():
    model = AutoModel.from_config(bert_config())
    before = snapshot(model)
    with pytest.raises((ArgumentError, UnsupportedModelError), match="BertModel"):
        collaborative_config(model)
    assert_unchanged(model, before)


def test_the_stock_config_stays_usable(name):
    config = CONFIGS[name]()
    ours = collaborative_config(config, 16)
    assert not hasattr(config, "collab_heads")
    assert not any(swapped(build(AutoModel, copy.deepcopy(config))))
    assert all(swapped(build(AutoModel, ours)))
