"""What every family must pass with gates, removed heads and sites without heads (design, sections 6 and 8).

Parametrised over `families.FAMILIES` and the query/key projections that a model can have before
(`changed_heads.ORIGINS`); the collaborative ones run over `families.LAYOUTS` alone: siblings compute the same.
"""

import copy
import itertools
import json
import subprocess
import sys

import pytest
import torch
import transformers
from changed_heads import (
    ORIGINS,
    STATES,
    adapter_sites,
    change_heads,
    change_queries,
    changed,
    emptied,
    gate,
    loss,
    mix,
    output_projections,
    projected,
    removal,
    set_gates,
)
from model_inputs import repadded
from model_runs import aligned, attention_maps, of_dtype, output, pickled, set_backend, sites, swap
from model_sizes import EXACT64, FP32_NOISE, HEAD_WIDTH, HEADS, KINDS
from transformers import AutoConfig
from unchanged import refused

from collab_heads import fold_heads, get_adapter, inspect, prune_heads, swap_to_gated
from collab_heads.errors import ModelStateError
from collab_heads.layers.output import ConstantOutput, HeadOutputProjection
from collab_heads.layers.removed import is_empty
from families import FAMILIES, LAYOUTS, each
from test_contract import (
    GENERATION,
    LOAD_IN_A_FRESH_PROCESS,
    RELATIVES,
    assert_decoder_steps,
    assert_stepwise,
    caches_of,
    decoder,
    prompt,
    real,
    stepwise,
    to_decode,
    without_dropout,
)

BACKENDS = ("eager", "sdpa")
GENERATORS = ("m2m_100", "t5", "opt")  # others repeat one token after their first layers lost all heads
of_origin = pytest.mark.parametrize("origin", ORIGINS)
CASES = [(name, origin) for origin in ORIGINS for name in (FAMILIES if origin is None else LAYOUTS)]
of_case = pytest.mark.parametrize("name, origin", each(CASES))
of_every_case = pytest.mark.parametrize("name, origin", CASES)  # the core: siblings join
of_layout = pytest.mark.parametrize("name", LAYOUTS)
with_empty_sites = pytest.mark.parametrize("empty", (False, True), ids=("some-left", "none-left"))


@of_case
def test_gates_start_open(name, origin):
    """Bit-equal; twice is refused."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    change_queries(model, origin)
    expected = output(model, inputs)
    report = swap_to_gated(model)
    assert all(isinstance(p, HeadOutputProjection) for p in output_projections(model).values())
    assert (report.heads, report.open, len(report.sites)) == (family.num_sites * HEADS,) * 2 + (family.num_sites,)
    assert torch.equal(output(model, inputs), expected)
    with refused(model, ModelStateError, "has gates already", "prune_heads or fold_heads"):
        swap_to_gated(model)


def assert_pruned_equals_gated(family, origin, empty, alphas=False):
    """Removing closed heads changes nothing, site by site and at the end, with every backend."""
    model, inputs = family.build().double(), family.inputs()
    change_queries(model, origin)
    stock = output(model, inputs)
    gate(model, empty=empty)
    if alphas:
        mix(model)
    before = {}
    for backend in BACKENDS:
        set_backend(model, backend)
        before[backend] = projected(model, inputs), output(model, inputs)
    assert (real(before["sdpa"][1], inputs) - real(stock, inputs)).abs().max() > 1e-3
    opened = {site.path: site.open for site in inspect(model).gates.sites}
    prune_heads(model)
    assert {site.path: site.num_heads for site in adapter_sites(model)} == {p: len(h) for p, h in opened.items()}
    assert {path for path, module in sites(model).items() if is_empty(module)} == (emptied(model) if empty else set())
    for backend in BACKENDS:
        set_backend(model, backend)
        assert_same_outputs(model, family, backend, *before[backend])
    return model


def assert_same_outputs(model, family, backend, per_site, at_the_end):
    inputs, tolerance = family.inputs(), family.eager64 if backend == "eager" else family.exact64
    found = projected(model, inputs)
    assert found.keys() == per_site.keys()
    assert sum(map(len, found.values())) == family.num_maps
    for path in found:
        for ours, theirs in zip(found[path], per_site[path], strict=True):
            torch.testing.assert_close(real(ours, inputs), real(theirs, inputs), rtol=0, atol=tolerance, msg=path)
    ours = real(output(model, inputs), inputs)
    torch.testing.assert_close(ours, real(at_the_end, inputs), rtol=0, atol=tolerance)


@with_empty_sites
@pytest.mark.core
@of_every_case
def test_pruned_equals_gated(name, origin, empty):
    assert_pruned_equals_gated(FAMILIES[name], origin, empty)


def shape_of(model):
    """All that a stock checkpoint and its classes show."""
    state = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    # by their names: torch makes a class for every module with a weight norm
    return state, {name: (type(module).__module__, type(module).__qualname__) for name, module in model.named_modules()}


def assert_folded_equals(family, state, empty, alphas=False):
    """Folding changes nothing and leaves a stock model."""
    model, inputs = changed(family, None, state, empty=empty, alphas=alphas), family.inputs()
    per_site, before = projected(model, inputs), output(model, inputs)
    fold_heads(model)
    stock, adapter, says = family.build(), get_adapter(model), model.config.to_dict()
    entries = () if adapter.head_counts is None else (*adapter.head_counts, adapter.head_width[0])
    stock.config.update({entry: says[entry] for entry in entries if entry in says})  # fewer heads, where it can say so
    assert says | {"dtype": None} == stock.config.to_dict() | {"dtype": None}
    assert shape_of(model) == shape_of(of_dtype(type(stock)(stock.config), torch.float64))
    assert not any(hasattr(m.config, "collab_heads") for m in model.modules() if hasattr(m, "config"))
    assert not any(module.training for module in model.modules())
    assert_same_outputs(model, family, "sdpa", per_site, before)
    return model


def test_folded_equals(family):
    assert_folded_equals(family, "both", empty=True)


@with_empty_sites
@pytest.mark.parametrize("state", STATES)
@of_layout
def test_folded_equals_in_every_state(name, state, empty):
    assert_folded_equals(FAMILIES[name], state, empty)


PLAIN_LOAD = """
import sys, torch, transformers
torch.set_num_threads(1)
folder, model_class = sys.argv[1:]
model, info = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True)
assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
assert "collab_heads" not in sys.modules
for tensor in (*model.parameters(), *model.buffers()):
    tensor.data = tensor.data.clone()  # model_runs.aligned
with torch.no_grad():
    result = model.eval()(**torch.load(folder + "/inputs.pt"))
names = ("logits", "logits_per_text", "last_hidden_state")
torch.save(next(result[name] for name in names if name in result), folder + "/output.pt")
"""


def run_apart(script, model, inputs, folder):
    """The output of a saved model in a process of its own."""
    model.save_pretrained(folder)
    torch.save(inputs, folder / "inputs.pt")
    subprocess.run([sys.executable, "-c", script, str(folder), type(model).__name__], check=True, capture_output=True)
    return torch.load(folder / "output.pt")


@pytest.mark.slow
@of_layout
def test_plain_transformers_loads_a_folded_model(name, tmp_path):
    model, inputs = changed(FAMILIES[name], None, "both", dtype=torch.float32), FAMILIES[name].inputs()
    before = output(model, inputs)
    fold_heads(model)
    found = run_apart(PLAIN_LOAD, model, inputs, tmp_path)
    assert torch.equal(found, output(model, inputs))
    torch.testing.assert_close(real(found, inputs), real(before, inputs), rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("name, origin", list(zip(LAYOUTS, itertools.cycle(ORIGINS))))
def test_load_in_a_fresh_process(name, origin, tmp_path):
    model, inputs = changed(FAMILIES[name], origin, "both", dtype=torch.float32), FAMILIES[name].inputs()
    assert torch.equal(run_apart(LOAD_IN_A_FRESH_PROCESS, model, inputs, tmp_path), output(model, inputs))


@pytest.mark.parametrize("name, origin", each((name, origin) for name, origin in CASES if FAMILIES[name].padded))
def test_padding_is_ignored(name, origin):
    model, inputs = changed(FAMILIES[name], origin, "both"), FAMILIES[name].inputs()
    before, after = output(model, inputs), output(model, repadded(inputs))
    torch.testing.assert_close(real(after, inputs), real(before, inputs), rtol=0, atol=EXACT64)


SAVED = [(name, None, state) for name in LAYOUTS for state in ("gated", "pruned")]
SAVED += [(name, origin, "both") for name, origin in CASES]


@pytest.mark.parametrize("name, origin, state", SAVED)  # of every family, too
def test_save_and_load(name, origin, state, tmp_path):
    """Bit-equal, base and task model, from the same files."""
    family = FAMILIES[name]
    model, inputs = changed(family, origin, state, dtype=torch.float32), family.inputs()
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert_same_state(loaded, model)
    assert shape_of(loaded) == shape_of(model)
    assert torch.equal(output(loaded, inputs), output(model, inputs))
    base = family.base.from_pretrained(tmp_path)
    assert_same_state(base.base_model, model.base_model, subset=True)
    base.save_pretrained(tmp_path / "base")
    again = type(model).from_pretrained(tmp_path / "base")
    assert again.config.collab_heads == model.config.collab_heads
    assert_same_state(again.base_model, model.base_model, subset=True)


def assert_same_state(ours, theirs, subset=False):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    if not subset:
        assert ours.keys() == theirs.keys()
    own = {name for name in theirs if "gates" in name or "mixing" in name or "query_key" in name}
    assert own <= ours.keys()
    assert {name: ours[name].shape for name in ours.keys() & theirs.keys()} == {
        name: theirs[name].shape for name in ours.keys() & theirs.keys()
    }
    assert [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "name, relative",
    each((name, cls) for name, many in RELATIVES.items() if name in FAMILIES for cls in many),
)
def test_relatives_load_the_same_files(name, relative, tmp_path):
    """Another class of the family loads what it has of the changed sites, and gives it back, bit by bit."""
    model = changed(FAMILIES[name], None, "both", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    other = getattr(transformers, relative).from_pretrained(tmp_path)
    assert_same_sites(other, model)
    assert all(torch.isfinite(tensor).all() for tensor in other.state_dict().values())
    other.save_pretrained(tmp_path / "other")
    assert_same_sites(type(model).from_pretrained(tmp_path / "other"), model, of=other)


def assert_same_sites(ours, theirs, of=None):
    """The sites that two models (and a third) have in common, and their output projections."""
    shared = sites(ours).keys() & sites(theirs).keys() & sites(of or ours).keys()
    assert shared
    for of_model in (sites, output_projections):
        for path in shared:
            modules = of_model(ours)[path], of_model(theirs)[path]
            assert type(modules[0]) is type(modules[1])
            ours_at, theirs_at = (module.state_dict() for module in modules)
            assert ours_at.keys() == theirs_at.keys()
            assert [name for name in ours_at if not torch.equal(ours_at[name], theirs_at[name])] == []


@of_origin
@of_layout
def test_bfloat16_sharded(name, origin, tmp_path):
    family = FAMILIES[name]
    model = changed(family, origin, "both", dtype=torch.bfloat16)
    gates = [p.gates.log_alpha for p in output_projections(model).values() if isinstance(p, HeadOutputProjection)]
    assert {log_alpha.dtype for log_alpha in gates} == {torch.float32}  # steps of a training would be lost
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = aligned(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    assert_same_state(loaded, model)
    assert torch.equal(output(loaded, family.inputs()), output(model, family.inputs()))


@of_every_case
def test_from_config(name, origin, tmp_path):
    """A fresh model of the same shape: finite, gates open, nothing left uninitialised."""
    family = FAMILIES[name]
    model = changed(family, origin, "both", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    fresh = type(model)(AutoConfig.from_pretrained(tmp_path)).eval()
    assert shape_of(fresh) == shape_of(model)
    assert all(torch.isfinite(tensor).all() for tensor in fresh.state_dict().values())
    assert torch.isfinite(output(fresh, family.inputs())).all()
    for projection in output_projections(fresh).values():
        if isinstance(projection, ConstantOutput):
            assert projection.bias is None or projection.bias.abs().max() == 0
        else:
            assert projection.gates.log_alpha.tolist() == [2.5] * projection.gates.num_heads
            assert 0.001 < projection.weight.std() < 1


@torch.no_grad()
@pytest.mark.parametrize("origin, empty", ((None, False), (None, True), ("shared", True), ("per_head", True)))
def test_stepwise_logits(generator_family, origin, empty):
    """Through dynamic and static caches, equal to one uncached pass and to the gated model."""
    inputs, model = to_decode(generator_family), changed(generator_family, origin, "gated", empty=empty)
    gated = output(model, inputs)
    prune_heads(model)
    assert_stepwise(model, inputs, gated)


@pytest.mark.parametrize("cross", (False, True))
@pytest.mark.parametrize("name", each(name for name in FAMILIES if name.endswith("-decoder")))
def test_decoder_cache(name, cross):
    """A lone decoder whose first layer has no heads steps through its cache as it runs in one pass."""
    for origin in ORIGINS if name in LAYOUTS else (None,):
        model = decoder(name, cross)
        change_queries(model, origin)
        change_heads(model, "pruned")
        assert is_empty(sites(model)[next(s.path for s in adapter_sites(model) if s.role == "dec-self")])
        assert_decoder_steps(model, cross)


@pytest.mark.parametrize("origin, empty", ((None, False), (None, True), ("shared", True)))
@pytest.mark.parametrize("name", GENERATORS)
def test_generation(name, origin, empty):
    """Token-identical: pruned to gated, cached to uncached, static to dynamic."""
    model = changed(FAMILIES[name], origin, "gated", empty=empty)
    inputs = prompt(FAMILIES[name])

    def generate(mode, **more):
        torch.manual_seed(0)
        return model.generate(**inputs, **GENERATION[mode], max_new_tokens=10, min_new_tokens=8, **more).tolist()

    expected = {mode: generate(mode) for mode in GENERATION}
    assert len({tuple(row) for rows in expected.values() for row in rows}) > 3  # they do not just repeat one token
    prune_heads(model)
    assert {mode: generate(mode) for mode in GENERATION} == expected
    assert generate("beams", use_cache=False) == expected["beams"]
    assert generate("beams", cache_implementation="static") == expected["beams"]


@torch.no_grad()
@of_origin
def test_cache_elements(generator_family, origin):
    """What a cache holds per token is what the report promises."""
    model, inputs = changed(generator_family, origin, "gated"), to_decode(generator_family)
    report = prune_heads(model)
    _, cache = stepwise(model, inputs)
    for role, part in caches_of(cache).items():
        promised = [site for site in report.sites if site.role == role]
        for site, layer in zip(promised, part.layers, strict=True):
            batch, length = layer.keys.shape[0], layer.keys.shape[-2]
            assert (layer.keys.numel() + layer.values.numel()) / (batch * length) == site.cache_after
            if not site.heads_after:
                assert site.cache_after == 1
            elif origin is None:
                assert site.cache_after == 2 * HEAD_WIDTH * site.heads_after


@of_layout
@pytest.mark.parametrize("kind", KINDS)
def test_every_order(name, kind):
    """Gates, a lossless swap and the removal of heads: one config, one output, whatever comes first."""
    family, configs, outputs = FAMILIES[name], [], []
    for order in itertools.permutations(("gate", "swap", "prune")):
        model = family.build().double()
        heads = removal(model)
        for step in order:
            if step == "swap":
                swap(model, kind)
            elif step == "prune":
                prune_heads(model, heads={path: heads[path] for path in heads})
            else:
                swap_to_gated(model)
                for path, projection in output_projections(model).items():
                    if isinstance(projection, HeadOutputProjection):
                        pruned = "prune" in order[: order.index("gate")]
                        left = [h for h in range(HEADS) if not pruned or h not in heads[path]]
                        set_gates(projection, [(-3.0, 0.5, 1.0, 3.0)[head] for head in left])
        configs.append(model.config.collab_heads)
        outputs.append(real(output(model, family.inputs()), family.inputs()))
        assert sum(isinstance(p, ConstantOutput) for p in output_projections(model).values()) == len(emptied(model))
    assert all(config == configs[0] for config in configs)
    assert len(set(map(json.dumps, configs))) == 1  # dicts compare in any order; files should not differ either
    for found in outputs:
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=EXACT64)


@of_layout
@of_origin
def test_every_order_with_closed_gates(name, origin):
    """What the gates close is removed, before the swap or after: one config, one output, that of the gated model."""
    family, configs, outputs = FAMILIES[name], [], []
    for steps in (("gate", "swap", "prune"), ("swap", "gate", "prune"), ("gate", "prune", "swap"), ("gate", "swap")):
        model = family.build().double()
        for step in steps:
            if step == "swap":
                change_queries(model, origin, dim=None)
            else:
                (gate if step == "gate" else prune_heads)(model)
        configs.append(model.config.collab_heads)
        outputs.append(real(output(model, family.inputs()), family.inputs()))
    assert configs[0] == configs[1] == configs[2] != configs[3]
    for found in outputs:
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=EXACT64)


@of_case
def test_pruning_twice_equals_once(name, origin):
    """Heads keep their original numbers."""
    family = FAMILIES[name]
    models, whole = [], family.build().double()
    change_queries(whole, origin)
    for steps in (((0,), (2,)), ((2,), (0,)), ((0, 2),)):
        model = copy.deepcopy(whole)
        for heads in steps:
            prune_heads(model, heads={role: [list(heads)] * number for role, number in family.roles.items()})
        models.append(model)
    assert {tuple(s["kept"]) for s in models[0].config.collab_heads["sites"].values()} == {(1, 3)}
    for model in models[1:]:
        assert model.config.collab_heads == models[0].config.collab_heads
        assert_same_state(model, models[0])
        assert torch.equal(output(model, family.inputs()), output(models[0], family.inputs()))


@of_case
def test_gates_of_a_pruned_model(name, origin):
    """Removed by name, then by gates: the same as all by name, where the open gates are whole."""
    family = FAMILIES[name]
    model, inputs = family.build().double(), family.inputs()
    change_queries(model, origin)
    by_name = copy.deepcopy(model)
    prune_heads(model, heads={role: [[1]] * number for role, number in family.roles.items()})
    before = output(model, inputs)
    swap_to_gated(model)
    assert torch.equal(output(model, inputs), before)
    for projection in output_projections(model).values():
        set_gates(projection, (3.0, -1.0, 3.0))  # of heads 0, 2, 3
    assert {site.open for site in inspect(model).gates.sites} == {(0, 3)}
    assert {site.kept for site in prune_heads(model).sites} == {(0, 3)}
    prune_heads(by_name, heads={role: [[1, 2]] * number for role, number in family.roles.items()})
    assert model.config.collab_heads == by_name.config.collab_heads
    assert torch.equal(output(model, inputs), output(by_name, inputs))


def maps_of(model, inputs):
    """path -> the attention maps of its calls, and how many maps there are in all."""
    calls = {}
    handles = [
        module.register_forward_hook(lambda m, i, o, path=path: calls[path[0]].append(path[1]))
        for path, module in (((site.role, site.path), sites(model)[site.path]) for site in adapter_sites(model))
    ]
    calls = {site.role: [] for site in adapter_sites(model)}
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    found, maps = {}, attention_maps(result, calls)
    for role, paths in calls.items():
        for path, one in zip(paths, maps[role], strict=True):
            found.setdefault(path, []).append(one)
    return found, sum(map(len, maps.values()))


@of_case
def test_attention_maps(name, origin):
    """The maps of the heads that are left, those of the gated model; none, but of the right shape, where none is."""
    family = FAMILIES[name]
    model, inputs = changed(family, origin, "gated", dtype=torch.float32), family.inputs()
    set_backend(model, "eager")
    kept = {site.path: list(site.open) for site in inspect(model).gates.sites}
    gated, _ = maps_of(model, inputs)
    prune_heads(model)
    pruned, count = maps_of(model, inputs)
    assert count == family.num_maps
    assert gated.keys() == pruned.keys() == kept.keys()
    for path in kept:
        for ours, theirs in zip(pruned[path], gated[path], strict=True):
            assert theirs.shape[1] == HEADS
            torch.testing.assert_close(ours, theirs[:, kept[path]], rtol=0, atol=FP32_NOISE, msg=path)


@pytest.mark.core
@of_every_case
def test_gradients(name, origin):
    """Gates and all that is left of the sites learn; nothing else has changed."""
    family = FAMILIES[name]
    model, before = family.build(), family.build().state_dict()
    change_queries(model, origin)
    prune_heads(model, heads=removal(model))
    swap_to_gated(model, temperature=5.0, init_log_alpha=0.0)  # so warm that samples are hardly ever clipped
    own = {id(p) for module in sites(model).values() for p in module.parameters()}
    own |= {id(p) for module in output_projections(model).values() for n, p in module.named_parameters() if n != "bias"}
    others = {name: p for name, p in model.named_parameters() if id(p) not in own}
    assert len(others) > len(before) / 5
    assert [name for name, p in others.items() if not torch.equal(p, before[name])] == []
    model.train()
    torch.manual_seed(0)
    loss(model, family.inputs()).backward()
    for path, projection in output_projections(model).items():
        for part, parameter in (*sites(model)[path].named_parameters(), *projection.named_parameters()):
            assert parameter.requires_grad
            assert parameter.grad is not None, (path, part)
            if part not in ("key.bias", "k_lin.bias", "k_proj.bias"):  # the softmax cancels it
                assert parameter.grad.abs().sum() > 0, (path, part)
        if isinstance(projection, HeadOutputProjection):
            assert (projection.gates.log_alpha.grad != 0).all()


@of_origin
@of_layout
def test_a_training_step(name, origin):
    """Clipping and AdamW work on gated and pruned models, with sites and whole models without heads."""
    inputs = FAMILIES[name].inputs()
    for state in ("both", "nothing left"):
        model = FAMILIES[name].build()
        change_queries(model, origin)
        if state == "nothing left":
            prune_heads(model, heads={site.path: list(range(HEADS)) for site in adapter_sites(model)})
        else:
            change_heads(model, state)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
        torch.manual_seed(0)
        loss(model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert norm > 0
        learning = {name for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        assert learning == {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        constants = [p for p in output_projections(model).values() if isinstance(p, ConstantOutput)]
        assert len(constants) == (len(adapter_sites(model)) if state == "nothing left" else len(empties(model)))
        assert constants[-1].bias is None or constants[-1].bias.grad is not None
        assert torch.isfinite(output(model.eval(), inputs)).all()


def empties(model):
    return [path for path, module in sites(model).items() if is_empty(module)]


@of_layout
def test_training_with_open_fixed_gates_is_the_stock_one(name):
    """They draw no random numbers: with one seed the same attention and outputs are dropped."""
    family, outputs = FAMILIES[name], []
    model = family.build().train()
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(output(model, family.inputs()))
        if len(outputs) == 1:
            swap_to_gated(model, alive_heads={role: [[1] * HEADS] * n for role, n in family.roles.items()})
    assert torch.equal(*outputs)
    assert not torch.equal(output(model, family.inputs()), outputs[0])


@of_origin
@of_layout
def test_gradient_checkpointing(name, origin):
    """The same gradients: recomputed gates are those that were drawn, sites without heads do not break it."""
    family = FAMILIES[name]
    if not family.build().supports_gradient_checkpointing:
        pytest.skip("the stock model does not support it")
    assert_checkpointing_changes_no_gradient(changed(family, origin, "both"), family.inputs())


def assert_checkpointing_changes_no_gradient(model, inputs):
    without_dropout(model)
    parts, grads = [*sites(model).values(), *output_projections(model).values()], []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train().zero_grad()
        torch.manual_seed(0)
        loss(model, inputs).backward()
        grads.append([p.grad for part in parts for p in part.parameters()])
    assert sum(grad is not None for grad in grads[0]) > len(grads[0]) / 2
    for plain, *checkpointed in zip(*grads, strict=True):
        for grad in checkpointed:
            assert (plain is None) == (grad is None)
            if plain is not None:
                torch.testing.assert_close(grad, plain, rtol=1e-9, atol=EXACT64)


@of_case
def test_deepcopy_and_pickle(name, origin):
    model, inputs = changed(FAMILIES[name], origin, "both", dtype=torch.float32), FAMILIES[name].inputs()
    expected = output(model, inputs)
    assert torch.equal(output(copy.deepcopy(model), inputs), expected)
    assert torch.equal(output(pickled(model), inputs), expected)


def test_hooks_survive(family):
    """On the sites and on their output projections, from stock to gated to mixed to pruned to stock."""
    model, calls = family.build(), []
    for module in (*sites(model).values(), *output_projections(model).values()):
        module.register_forward_hook(lambda *_: calls.append(1))
    for step in (gate, mix, prune_heads, swap_to_gated, fold_heads):
        step(model)
        calls.clear()
        output(model, family.inputs())
        assert len(calls) == 2 * family.num_maps


@pytest.mark.parametrize("origin", KINDS)
@of_layout
def test_calibration_of_changed_models(name, origin):
    """swap_to_collaborative with calibration and refinement, beside gates and sites without heads."""
    family = FAMILIES[name]
    for state in ("gated", "both"):
        model = changed(family, None, state, dtype=torch.float32)
        before, heads = output(model, family.inputs()), [site.num_heads for site in adapter_sites(model)]
        dims = {site.path: 0.5 for site in adapter_sites(model) if site.num_heads}
        report = swap(model, origin, dims, batches=[family.inputs()], refine_steps=2)
        assert {site.path for site in report.sites} == set(dims)
        assert all(site.output_error < 1 for site in report.sites)
        assert [site.num_heads for site in adapter_sites(model)] == heads
        after = output(model, family.inputs())
        assert torch.isfinite(after).all()
        assert not torch.equal(after, before)
        lossless = changed(family, None, state, dtype=torch.float32)
        swap(lossless, origin, None, batches=[family.inputs()])
        found, expected = (real(result, family.inputs()) for result in (output(lossless, family.inputs()), before))
        torch.testing.assert_close(found, expected, rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
@of_layout
@of_origin
def test_compiles_to_one_graph(name, origin):
    """In evaluation, and in training, where gates are drawn."""
    model, inputs = changed(FAMILIES[name], origin, "both", dtype=torch.float32), FAMILIES[name].inputs()
    expected = output(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, inputs), expected, rtol=0, atol=FP32_NOISE)
    torch._dynamo.reset()
    if hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()  # as for fine-tuning: else a stock wav2vec2 is more than one graph
    loss(torch.compile(model.train(), fullgraph=True, backend="aot_eager"), inputs).backward()
    for projection in output_projections(model).values():
        if isinstance(projection, HeadOutputProjection):
            assert torch.isfinite(projection.gates.log_alpha.grad).all()


def test_nothing_left_at_all(family, tmp_path):
    """A model without any head runs, saves, loads and folds."""
    model, inputs = family.build(), family.inputs()
    prune_heads(model, heads={site.path: list(range(HEADS)) for site in adapter_sites(model)})
    expected = output(model, inputs)
    assert torch.isfinite(expected).all()
    model.save_pretrained(tmp_path)
    assert torch.equal(output(aligned(type(model).from_pretrained(tmp_path).eval()), inputs), expected)
    assert all(type(projection) is ConstantOutput for projection in output_projections(model).values())
    fold_heads(model)
    stock = output_projections(family.build())
    assert all(type(each) is type(stock[path]) for path, each in output_projections(model).items())
    torch.testing.assert_close(real(output(model, inputs), inputs), real(expected, inputs), rtol=0, atol=FP32_NOISE)
