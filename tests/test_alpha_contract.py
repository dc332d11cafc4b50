"""What every family must pass with mixed heads: alone, beside gates, and after removal (design, sections 6 and 8).

Parametrised over `families.FAMILIES`; what depends on the layout alone runs over `families.LAYOUTS`.
"""

import copy
import itertools
import json

import pytest
import torch
import transformers
from changed_heads import (
    adapter_sites,
    changed,
    emptied,
    gate,
    loss,
    mix,
    mixings,
    output_projections,
    projected,
    random_alpha,
    removal,
    set_gates,
)
from model_runs import aligned, output, pickled, set_backend, sites, swap
from model_sizes import EXACT64, FP32_NOISE, HEADS, KINDS
from test_head_contract import (
    BACKENDS,
    PLAIN_LOAD,
    assert_checkpointing_changes_no_gradient,
    assert_folded_equals,
    assert_pruned_equals_gated,
    assert_same_outputs,
    assert_same_sites,
    assert_same_state,
    maps_of,
    run_apart,
    shape_of,
)
from transformers import AutoConfig
from unchanged import load_without, refused

from collab_heads import fold_heads, inspect, prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.errors import ModelStateError
from collab_heads.layers.layout import weight_of
from collab_heads.layers.output import ConstantOutput, HeadOutputProjection
from families import FAMILIES, LAYOUTS, each
from test_contract import (
    GENERATION,
    assert_decoder_steps,
    assert_stepwise,
    decoder,
    of_every_family,
    prompt,
    real,
    to_decode,
)

of_layout = pytest.mark.parametrize("name", LAYOUTS)
CASES = [(name, None) for name in FAMILIES] + list(zip(LAYOUTS, itertools.cycle(KINDS)))
of_case = pytest.mark.parametrize("name, origin", each(CASES))
of_every_case = pytest.mark.parametrize("name, origin", CASES)  # the core: siblings join
AUTOCAST = torch.bfloat16


def assert_identities(model, sizes):
    """The alphas of these sites, and no others, are identities of these sizes."""
    assert {path: mixing.alpha.tolist() for path, mixing in mixings(model).items()} == {
        path: torch.eye(size).tolist() for path, size in sizes.items()
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_alphas_start_as_the_identity(family, dtype):
    """Bit-equal, with the same numbers dropped in training; twice is refused."""
    model, inputs, outputs = family.build().to(dtype), family.inputs(), []
    for _ in range(2):
        torch.manual_seed(0)
        outputs += [output(model.eval(), inputs), output(model.train(), inputs)]
        if len(outputs) == 2:
            report = swap_to_alpha(model)
    assert torch.equal(outputs[2], outputs[0])
    assert torch.equal(outputs[3], outputs[1])
    assert not torch.equal(outputs[0], outputs[1])
    assert [site.path for site in report.sites] == [site.path for site in adapter_sites(model)]
    assert {(site.heads, site.nuclear_norm, site.distance) for site in report.sites} == {(HEADS, HEADS, 0.0)}
    assert_identities(model, dict.fromkeys(sites(model), HEADS))
    with refused(model, ModelStateError, "has alphas already", "fold_heads"):
        swap_to_alpha(model)


def mix_by_hand(model, like):
    """Give a stock model the gates and alphas of another, between its heads and W_O, as the definitions say."""
    for path, projection in output_projections(like).items():
        gates, alpha = projection.gates.values().double(), projection.mixing.alpha.detach()

        def combine(module, args, gates=gates, alpha=alpha):
            heads = args[0].unflatten(-1, (HEADS, -1)) * gates[:, None]
            return (torch.einsum("ij,...jd->...id", alpha, heads).flatten(-2),)

        output_projections(model)[path].register_forward_pre_hook(combine)


def assert_mixed_equals_by_hand(family):
    """Alphas, after gates, site by site and at the end, with every backend."""
    ours, theirs, inputs = family.build().double(), family.build().double(), family.inputs()
    stock = output(ours, inputs)
    gate(ours, empty=False)
    mix(ours)
    mix_by_hand(theirs, ours)
    for backend in BACKENDS:
        set_backend(ours, backend)
        set_backend(theirs, backend)
        assert_same_outputs(ours, family, backend, projected(theirs, inputs), output(theirs, inputs))
    assert (real(output(ours, inputs), inputs) - real(stock, inputs)).abs().max() > 1e-3


@pytest.mark.core
@of_every_family
def test_mixed_equals_by_hand(family):
    assert_mixed_equals_by_hand(family)


@of_case
def test_pruned_equals_gated_and_mixed(name, origin):
    """What gates close goes; alphas, folded, start again with the heads that are left, where there are two."""
    model = assert_pruned_equals_gated(FAMILIES[name], origin, empty=origin is None, alphas=True)
    heads = {site.path: site.num_heads for site in adapter_sites(model)}
    assert min(heads.values()) < 2 or name in ("albert", "distilbert") or origin is not None
    assert_identities(model, {path: number for path, number in heads.items() if number > 1})
    assert {site.path: site.heads for site in inspect(model).alphas.sites} == {p: n for p, n in heads.items() if n > 1}


def assert_removed_equals_closed(family, origin=None):
    """Heads of a mixed model removed by name: as if fixed gates had closed them, and as if these had removed them."""
    named, inputs = changed(family, origin, None, alphas=True), family.inputs()
    heads, gated = removal(named), copy.deepcopy(named)
    stock = output(named, inputs)
    swap_to_gated(gated, alive_heads={path: [int(h not in gone) for h in range(HEADS)] for path, gone in heads.items()})
    per_site, at_the_end = projected(gated, inputs), output(gated, inputs)
    assert (real(at_the_end, inputs) - real(stock, inputs)).abs().max() > 1e-3
    prune_heads(named, heads=heads)
    assert_same_outputs(named, family, "sdpa", per_site, at_the_end)
    left = {path: HEADS - len(gone) for path, gone in heads.items() if len(gone) < HEADS}
    assert_identities(named, left)
    prune_heads(gated)
    assert gated.config.collab_heads == named.config.collab_heads
    assert_same_state(gated, named)


@of_case
def test_removed_equals_closed(name, origin):
    assert_removed_equals_closed(FAMILIES[name], origin)


def test_folded_equals(family):
    """A stock model again, of what was gated, mixed and pruned."""
    assert_folded_equals(family, "both", empty=True, alphas=True)


@of_layout
def test_folded_equals_in_every_state(name):
    for state in (None, "gated", "pruned"):
        assert_folded_equals(FAMILIES[name], state, empty=False, alphas=True)


def many_tokens(name) -> dict:
    """Inputs of more tokens than the model is wide: below that the heads are mixed, not W_O."""
    return {each: value.repeat_interleave(3, dim=0) for each, value in FAMILIES[name].inputs().items()}


@of_layout
def test_folding_alphas_alone_stores_what_was_applied(name):
    """To the last bit, where there are tokens enough to apply alphas to W_O; stock classes may sum in another order."""
    for dtype, noise in ((torch.float32, FP32_NOISE), (torch.bfloat16, 2**-7)):
        model, inputs = changed(FAMILIES[name], None, None, alphas=True, dtype=dtype), many_tokens(name)
        before = output(model, inputs)
        applied = {path: one.mixing(weight_of(one)).detach() for path, one in output_projections(model).items()}
        fold_heads(model)
        folded = {path: weight_of(one) for path, one in output_projections(model).items()}
        assert all(torch.equal(folded[path], applied[path]) for path in applied)
        gap = (output(model, inputs) - before).abs().max()
        assert gap <= noise * before.abs().max()
        assert shape_of(model) == shape_of(FAMILIES[name].build().to(dtype))


def assert_autocast_keeps_alphas(name):
    """Under autocast, alphas are not rounded: W_O is, once they are in it, as in the folded model."""
    model, inputs = changed(FAMILIES[name], None, None, alphas=True, dtype=torch.float32), many_tokens(name)
    plain, outputs = output(model, inputs), []
    for _ in range(2):
        with torch.autocast("cpu", AUTOCAST):
            outputs.append(output(model, inputs))
        if len(outputs) == 1:
            fold_heads(model)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0].float(), plain)


@of_layout
def test_autocast_does_not_round_alphas(name):
    assert_autocast_keeps_alphas(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("bert", "t5"))
def test_plain_transformers_loads_a_folded_model(name, tmp_path):
    model = changed(FAMILIES[name], None, "both", alphas=True, dtype=torch.float32)
    fold_heads(model)
    found = run_apart(PLAIN_LOAD, model, FAMILIES[name].inputs(), tmp_path)
    assert torch.equal(found, output(model, FAMILIES[name].inputs()))


@of_every_case
def test_save_and_load(name, origin, tmp_path):
    """Bit-equal, base and task model, from the same files."""
    family = FAMILIES[name]
    model, inputs = changed(family, origin, "both", alphas=True, dtype=torch.float32), family.inputs()
    assert mixings(model)
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert_same_state(loaded, model)
    assert shape_of(loaded) == shape_of(model)
    assert torch.equal(output(loaded, inputs), output(model, inputs))
    assert inspect(loaded).alphas == inspect(model).alphas
    base = family.base.from_pretrained(tmp_path)
    assert_same_state(base.base_model, model.base_model, subset=True)
    base.save_pretrained(tmp_path / "base")
    again = type(model).from_pretrained(tmp_path / "base")
    assert again.config.collab_heads == model.config.collab_heads
    assert_same_state(again.base_model, model.base_model, subset=True)


@pytest.mark.parametrize(
    "name, relative",
    (("marian", "MarianForCausalLM"), ("marian-decoder", "MarianMTModel"), ("t5", "T5EncoderModel")),
)
def test_relatives_load_the_same_files(name, relative, tmp_path):
    """One with fewer stacks, or more, loads the alphas that it has sites for, and gives them back."""
    model = changed(FAMILIES[name], None, None, alphas=True, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    other = getattr(transformers, relative).from_pretrained(tmp_path)
    assert mixings(other).keys() == sites(other).keys() & mixings(model).keys() != set()
    assert_same_sites(other, model)
    other.save_pretrained(tmp_path / "other")
    assert_same_sites(type(model).from_pretrained(tmp_path / "other"), model, of=other)


@of_layout
def test_bfloat16_sharded(name, tmp_path):
    family = FAMILIES[name]
    model = changed(family, None, "both", alphas=True, dtype=torch.bfloat16)
    assert {mixing.alpha.dtype for mixing in mixings(model).values()} == {torch.float32}
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = aligned(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    assert_same_state(loaded, model)
    assert torch.equal(output(loaded, family.inputs()), output(model, family.inputs()))


def test_missing_alphas_are_an_identity(family, tmp_path, warnings_logged):
    """A warning names them, and everything else is as saved."""
    model = changed(family, None, "both", alphas=True, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    found = load_without(model, tmp_path, "mixing.alpha", warnings_logged)
    assert found.tolist() == torch.eye(HEADS - 1).tolist()


@of_layout
def test_from_config(name, tmp_path):
    """A fresh model of the same shape: identities, and weights as the family starts."""
    model = changed(FAMILIES[name], None, "both", alphas=True, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    fresh = type(model)(AutoConfig.from_pretrained(tmp_path)).eval()
    assert shape_of(fresh) == shape_of(model)
    assert_identities(fresh, {path: HEADS - 1 for path in mixings(model)})
    assert torch.isfinite(output(fresh, FAMILIES[name].inputs())).all()
    for path in mixings(fresh):
        assert 0.001 < output_projections(fresh)[path].weight.std() < 1


@torch.no_grad()
@pytest.mark.parametrize("name", ("bert", "t5"))
def test_meta_device(name):
    """A mixed model without weights runs as the stock one does: to count what it takes."""
    model, inputs = changed(FAMILIES[name], None, "both", alphas=True), FAMILIES[name].inputs()
    expected = output(model, inputs).shape
    # transformers reads the values of a mask
    inputs = {part: value.to("meta") for part, value in inputs.items() if part != "attention_mask"}
    found = model.to("meta")(**inputs).logits
    assert found.is_meta and found.shape == expected


def change(model, step, heads, alphas, kind, before):
    """One of the steps whose order must not matter; `alphas` are those of all heads."""
    if step == "swap":
        swap(model, kind)
    elif step == "prune":
        prune_heads(model, heads=heads)
    elif step == "gate":
        swap_to_gated(model)
        for path, projection in output_projections(model).items():
            if isinstance(projection, HeadOutputProjection):
                left = [h for h in range(HEADS) if "prune" not in before or h not in heads[path]]
                set_gates(projection, [(-3.0, 0.5, 1.0, 3.0)[head] for head in left])
    else:
        swap_to_alpha(model)
        for path, mixing in mixings(model).items():
            left = [h for h in range(HEADS) if "prune" not in before or h not in heads[path]]
            mixing.alpha.data.copy_(alphas[path][left][:, left])


def orders(model):
    """Removal and alphas that may come in any order: the new heads that go have nothing of the heads that stay."""
    heads = removal(model)
    alphas = {path: random_alpha(HEADS, index) for index, path in enumerate(heads)}
    for path, gone in heads.items():
        alphas[path][[[h] for h in gone], [h for h in range(HEADS) if h not in gone]] = 0
    return heads, alphas


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", list(zip(LAYOUTS, itertools.cycle(KINDS))))
def test_every_order(name, kind):
    """Gates, alphas, a lossless swap and the removal of heads: one config, one output, whatever comes first."""
    family, configs, outputs = FAMILIES[name], [], []
    stock = family.build().double()
    heads, alphas = orders(stock)
    for order in itertools.permutations(("gate", "alpha", "swap", "prune")):
        model = copy.deepcopy(stock)
        for index, step in enumerate(order):
            change(model, step, heads, alphas, kind, order[:index])
        configs.append(model.config.collab_heads)
        outputs.append(real(output(model, family.inputs()), family.inputs()))
        assert sum(isinstance(p, ConstantOutput) for p in output_projections(model).values()) == len(emptied(model))
        assert len(mixings(model)) == len(adapter_sites(model)) - len(emptied(model)) > 0
        assert (inspect(model).alphas.sites[-1].distance == 0) == (order.index("alpha") < order.index("prune"))
    assert len(set(map(json.dumps, configs))) == 1
    for found in outputs:
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=EXACT64)
    assert (outputs[0] - real(output(stock, family.inputs()), family.inputs())).abs().max() > 1e-3


@torch.no_grad()
def test_stepwise_logits(generator_family):
    """Through dynamic and static caches, equal to one uncached pass, gated and mixed and then pruned."""
    model, inputs = changed(generator_family, None, "gated", alphas=True), to_decode(generator_family)
    expected = output(model, inputs)
    assert_stepwise(model, inputs, expected)
    prune_heads(model)
    mix_again(model)
    assert_stepwise(model, inputs, output(model, inputs))
    assert (output(model, inputs) - expected).abs().max() > 1e-3


@torch.no_grad()
def mix_again(model):
    """Alphas that removal has reset."""
    for index, mixing in enumerate(mixings(model).values()):
        mixing.alpha.copy_(random_alpha(mixing.num_heads, 100 + index))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.endswith("-decoder")])
def test_decoder_cache(name):
    """A lone decoder with mixed heads steps through its cache as it runs in one pass."""
    for cross in (False, True):
        model = decoder(name, cross)
        mix(model)
        assert len(mixings(model)) == len(sites(model))
        assert_decoder_steps(model, cross)


@pytest.mark.parametrize("name, state", (("t5", "gated"), ("pegasus", "gated"), ("mbart", None)))
def test_generation(name, state):
    """Token-identical, greedy and with beams: cached to uncached, static to dynamic, folded to mixed."""
    model = changed(FAMILIES[name], None, state, empty=False, alphas=True)
    inputs = prompt(FAMILIES[name])

    def generate(mode, **more):
        return model.generate(**inputs, **GENERATION[mode], max_new_tokens=8, min_new_tokens=8, **more).tolist()

    expected = {mode: generate(mode) for mode in ("greedy", "beams")}
    assert len({tuple(row) for rows in expected.values() for row in rows}) > 3  # they do not just repeat one token
    for mode in expected:
        assert generate(mode, use_cache=False) == expected[mode]
        assert generate(mode, cache_implementation="static") == expected[mode]
    fold_heads(model)
    assert {mode: generate(mode) for mode in expected} == expected


def test_attention_maps(family):
    """Alphas come after attention: as many maps as before, the same while they are an identity."""
    model, inputs = family.build(), family.inputs()
    set_backend(model, "eager")
    before, count = maps_of(model, inputs)
    swap_to_alpha(model)
    after, count_after = maps_of(model, inputs)
    assert count == count_after == family.num_maps
    assert before.keys() == after.keys()
    assert all(torch.equal(*pair) for path in before for pair in zip(after[path], before[path], strict=True))
    mixing = next(iter(mixings(model).values()))
    mixing.alpha.data.copy_(random_alpha(HEADS, 0))
    after, _ = maps_of(model, inputs)
    assert [[m.shape for m in maps] for maps in after.values()] == [[m.shape for m in maps] for maps in before.values()]


@pytest.mark.core
@of_every_family
def test_gradients(family):
    """Every number of every alpha learns, beside gates or not; but for them, the model is what it was."""
    model, before = family.build(), family.build().state_dict()
    swap_to_gated(model, temperature=5.0, init_log_alpha=0.0, sites=adapter_sites(model)[0].path)
    swap_to_alpha(model)
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    assert len(after.keys() - before.keys()) == len(mixings(model)) + 1
    torch.manual_seed(0)
    loss(model.train(), family.inputs()).backward()
    for path, mixing in mixings(model).items():
        assert mixing.alpha.requires_grad
        assert mixing.alpha.grad is not None and (mixing.alpha.grad != 0).all(), path
        assert output_projections(model)[path].weight.grad.abs().sum() > 0, path


@of_layout
def test_gradients_are_those_of_the_definition(name):
    """Of alphas and W_O, against autograd through the heads themselves."""
    family = FAMILIES[name]
    ours, theirs = changed(family, None, None, alphas=True), family.build().double()
    alphas = {path: mixing.alpha.detach().clone().requires_grad_() for path, mixing in mixings(ours).items()}
    for path, projection in output_projections(theirs).items():

        def combine(module, args, alpha=alphas[path]):
            return (torch.einsum("ij,...jd->...id", alpha, args[0].unflatten(-1, (HEADS, -1))).flatten(-2),)

        projection.register_forward_pre_hook(combine)
    for model in (ours, theirs):
        loss(model, family.inputs()).backward()
    for path, mixing in mixings(ours).items():
        torch.testing.assert_close(mixing.alpha.grad, alphas[path].grad, rtol=1e-9, atol=EXACT64)
        pair = (output_projections(model)[path].weight.grad for model in (ours, theirs))
        torch.testing.assert_close(*pair, rtol=1e-9, atol=EXACT64)


@of_layout
def test_gradient_checkpointing(name):
    if not FAMILIES[name].build().supports_gradient_checkpointing:
        pytest.skip("the stock model does not support it")
    model = changed(FAMILIES[name], None, "both", alphas=True)
    assert_checkpointing_changes_no_gradient(model, FAMILIES[name].inputs())
    assert all(mixing.alpha.grad is not None for mixing in mixings(model).values())


@of_layout
def test_deepcopy_and_pickle(name):
    model, inputs = changed(FAMILIES[name], None, "both", alphas=True, dtype=torch.float32), FAMILIES[name].inputs()
    expected = output(model, inputs)
    copied = copy.deepcopy(model)
    assert torch.equal(output(copied, inputs), expected)
    assert torch.equal(output(pickled(model), inputs), expected)
    fold_heads(copied)
    assert torch.equal(output(model, inputs), expected)
    assert mixings(model) and not mixings(copied)


@pytest.mark.slow
@of_layout
def test_compiles_to_one_graph(name):
    """In evaluation, and in training."""
    model, inputs = changed(FAMILIES[name], None, "both", alphas=True, dtype=torch.float32), FAMILIES[name].inputs()
    expected = output(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, inputs), expected, rtol=0, atol=FP32_NOISE)
    torch._dynamo.reset()
    if hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()  # as for fine-tuning: else a stock wav2vec2 is more than one graph
    loss(torch.compile(model.train(), fullgraph=True, backend="aot_eager"), inputs).backward()
    for mixing in mixings(model).values():
        assert torch.isfinite(mixing.alpha.grad).all() and mixing.alpha.grad.abs().sum() > 0
