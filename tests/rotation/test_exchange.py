"""Swapping heads: what moves, what stays, what it does to the output and to the training after it."""

import copy

import pytest
import torch
from accelerate import Accelerator
from changed_heads import gate, loss, output_projections
from model_runs import output, sites
from model_sizes import EXACT64, HEAD_WIDTH, HEADS
from unchanged import assert_unchanged, snapshot

from collab_heads import prune_heads, rotate_heads, swap_to_alpha, swap_to_gated
from collab_heads.rotation.exchange import Slot
from collab_heads.training import HeadAdamW, HeadPenalty
from families import FAMILIES

BERT = "encoder.layer.{}.attention.self"
# Family -> two places (path, head), and the names of the projections.
PLACES = {
    "bert": ((BERT.format(0), 1), (BERT.format(1), 3), "query", "key", "value"),
    "distilbert": (
        ("transformer.layer.0.attention", 0),
        ("transformer.layer.1.attention", 2),
        "q_lin",
        "k_lin",
        "v_lin",
    ),
    "albert": (
        ("encoder.albert_layer_groups.0.albert_layers.0.attention", 0),
        ("encoder.albert_layer_groups.0.albert_layers.0.attention", 3),
        *("query", "key", "value"),
    ),
    "marian": (
        ("decoder.layers.0.encoder_attn", 2),
        ("decoder.layers.1.encoder_attn", 0),
        "q_proj",
        "k_proj",
        "v_proj",
    ),
    "t5": (
        ("encoder.block.0.layer.0.SelfAttention", 3),
        ("encoder.block.1.layer.0.SelfAttention", 1),
        *("q", "k", "v"),
    ),
}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",)}
FORGOTTEN = 1e-4  # what three steps with another head's moments do to the output at least; seen: 5.7e-4
each_family = pytest.mark.parametrize("name", PLACES)
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def build(name, dtype=torch.float64):
    return FAMILIES[name].build().to(dtype)


def train(model, optimizer, inputs, steps=3):
    """Some steps without noise: the model stays in evaluation mode."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, inputs).backward()
        optimizer.step()
    optimizer.zero_grad()


def rows_of(module, names, head):
    """The rows of a head, by name: slices of the parameters."""
    chosen = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
    return {f"{i}.{part}": p[chosen] for i, n in enumerate(names) for part, p in getattr(module, n).named_parameters()}


@torch.no_grad()
def swap_by_hand(model, first, second, names):
    """Without the library: the modules are found by name, the rows by counting."""
    ends = [rows_of(model.base_model.get_submodule(path), names, head) for path, head in (first, second)]
    for name, rows in ends[0].items():
        kept = rows.clone()
        rows.copy_(ends[1][name])
        ends[1][name].copy_(kept)


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model and its optimizer."""
    names = {p: name for name, p in model.named_parameters()}
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for p, state in optimizer.state.items():
        found |= {f"{names[p]} {k}": v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def assert_equal(first: dict, second: dict):
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def differing(first: dict, second: dict) -> set[str]:
    return {name for name, tensor in first.items() if not torch.equal(tensor, second[name])}


@each_family
def test_it_is_the_swap_by_hand(name):
    first, second, *names = PLACES[name]
    model, expected, inputs = build(name), build(name), FAMILIES[name].inputs()
    before = output(model, inputs)
    swap_by_hand(expected, first, second, names)
    rotate_heads(model, [(Slot(*first), Slot(*second))])
    assert_equal(model.state_dict(), expected.state_dict())
    assert torch.equal(output(model, inputs), output(expected, inputs))
    assert not torch.allclose(output(model, inputs), before, atol=1e-4)


@each_family
@each_optimizer
def test_twice_is_not_at_all(name, kind):
    """To the bit, moments included; in between, rows and moments of the projections are elsewhere, and only these."""
    first, second, *names = PLACES[name]
    model = build(name, torch.float32)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, FAMILIES[name].inputs())
    modules = [model.base_model.get_submodule(path) for path, _ in (first, second)]
    modules[0].get_submodule(names[0]).weight.requires_grad_(False)
    start, before, held = snapshot(model), everything(model, optimizer), list(map(id, optimizer.state))
    rotate_heads(model, [(first, second)], optimizer)
    moved = {p for module in modules for n in names for p in module.get_submodule(n).parameters()}
    own = [name for name, p in model.named_parameters() if p in moved]
    expected = {f"{name}{state}" for name in own for state in ("", *(f" {moment}" for moment in MOMENTS[kind]))}
    assert differing(everything(model, optimizer), before) == expected
    rotate_heads(model, [(first, second)], optimizer)
    assert_equal(everything(model, optimizer), before)
    assert_unchanged(model, start)
    assert list(map(id, optimizer.state)) == held


@pytest.mark.parametrize("kind", MOMENTS)
def test_moments_go_where_the_rows_go(kind):
    first, second, *names = PLACES["bert"]
    model = build("bert")
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, FAMILIES["bert"].inputs())

    def rows(end, name, moment):
        linear = model.base_model.get_submodule(end[0]).get_submodule(name)
        chosen = slice(end[1] * HEAD_WIDTH, (end[1] + 1) * HEAD_WIDTH)
        return [optimizer.state[p][moment][chosen].clone() for p in (linear.weight, linear.bias)]

    cases = [(name, moment) for name in names for moment in MOMENTS[kind]]
    before = [(rows(first, *case), rows(second, *case)) for case in cases]
    rotate_heads(model, [(first, second)], optimizer)
    for case, (one, other) in zip(cases, before, strict=True):
        assert all(map(torch.equal, rows(first, *case), other))
        assert all(map(torch.equal, rows(second, *case), one))
        assert not any(map(torch.equal, one, other))


def test_pairs_are_swapped_one_after_the_other():
    """Three places in a ring: the order matters, and the reversed order undoes it."""
    path = BERT.format(0)
    pairs = [(Slot(path, 0), Slot(path, 1)), (Slot(path, 1), Slot(path, 2))]
    model = build("bert")
    weight = sites(model)[path].value.weight
    heads = weight.detach().clone().unflatten(0, (HEADS, -1))
    rotate_heads(model, pairs)
    assert torch.equal(weight.unflatten(0, (HEADS, -1)), heads[[1, 2, 0, 3]])
    rotate_heads(model, pairs[::-1])
    assert torch.equal(weight.unflatten(0, (HEADS, -1)), heads)
    rotate_heads(model, [])
    assert torch.equal(weight.unflatten(0, (HEADS, -1)), heads)


def relabel(model, optimizer, path, pair, *, with_state=True):
    """Swap two heads of a site, and by hand the columns of W_O and their moments: other names for the same function."""
    rotate_heads(model, [((path, pair[0]), (path, pair[1]))], optimizer if with_state else None)
    weight = output_projections(model)[path].weight
    tensors = [weight, *(t for t in optimizer.state[weight].values() if t.shape == weight.shape)]
    order = list(range(HEADS))
    order[pair[0]], order[pair[1]] = order[pair[1]], order[pair[0]]
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.unflatten(1, (HEADS, -1))[:, order].flatten(1))


def gated(family):
    """Gates that are open, half open and closed; AdamW with one second moment for all of them."""
    model = build(family)
    gate(model, empty=False)
    penalty = HeadPenalty(model, gate_weight=0.01)
    group = penalty.groups(gate_lr=0.05)[0] | {"shared": True}
    return model, HeadAdamW([{"params": penalty.others(model)}, group], lr=0.01)


def plain(kind):
    def make(family):
        model = build(family)
        return model, OPTIMIZERS[kind](model)

    return make


TRAINED = {"adamw": plain("adamw"), "sgd": plain("sgd"), "gated": gated}


@pytest.mark.parametrize("family", ("bert", "distilbert", "albert", "marian", "t5"))
@pytest.mark.parametrize("made", TRAINED)
def test_training_goes_on_as_if_heads_had_other_names(family, made):
    """Rows, columns of W_O, gates and moments together are a renaming: without the moments it is none."""
    path = "decoder.block.1.layer.1.EncDecAttention" if family == "t5" else PLACES[family][0][0]  # no position bias
    inputs = FAMILIES[family].inputs()
    model, optimizer = TRAINED[made](family)
    train(model, optimizer, inputs)
    renamed, forgetful = (copy.deepcopy((model, optimizer)) for _ in range(2))
    relabel(*renamed, path, (0, 2))
    relabel(*forgetful, path, (0, 2), with_state=False)
    assert not torch.equal(output_projections(renamed[0])[path].weight, output_projections(model)[path].weight)
    expected = output(model, inputs)
    torch.testing.assert_close(output(renamed[0], inputs), expected, rtol=0, atol=EXACT64)
    torch.testing.assert_close(output(forgetful[0], inputs), expected, rtol=0, atol=EXACT64)
    for case in ((model, optimizer), renamed, forgetful):
        train(*case, inputs)
    assert not torch.allclose(output(model, inputs), expected, atol=FORGOTTEN)
    gaps = [(output(other, inputs) - output(model, inputs)).abs().max() for other, _ in (renamed, forgetful)]
    assert gaps[0] < EXACT64  # seen: 5e-15
    assert gaps[1] > FORGOTTEN


def test_the_position_bias_of_t5_stays():
    """It is a table of its own, by the number of the place; and a swapped head meets the bias of its new place."""
    (path, _), _, *names = PLACES["t5"]
    model, expected, inputs = build("t5"), build("t5"), FAMILIES["t5"].inputs()
    bias = sites(model)[path].relative_attention_bias.weight.clone()
    rotate_heads(model, [((path, 0), (path, 3))])
    assert torch.equal(sites(model)[path].relative_attention_bias.weight, bias)
    swap_by_hand(expected, (path, 0), (path, 3), names)
    assert torch.equal(output(model, inputs), output(expected, inputs))
    with torch.no_grad():  # had it travelled, the output would be another
        table = sites(model)[path].relative_attention_bias.weight
        table.copy_(table[:, [3, 1, 2, 0]])
    assert not torch.allclose(output(model, inputs), output(expected, inputs), atol=1e-4)


def test_places_of_a_pruned_model_keep_their_numbers():
    """Head 3 of a site that lost head 1 is its third: rows 16 to 24."""
    model = build("bert")
    prune_heads(model, heads={"enc-self": [[1], [0, 2]]})
    modules = [sites(model)[BERT.format(layer)] for layer in (0, 1)]
    before = [
        module.value.weight.detach().clone().unflatten(0, (count, -1))
        for module, count in zip(modules, (3, 2), strict=True)
    ]
    rotate_heads(model, [((BERT.format(0), 3), (BERT.format(1), 1))])
    after = [
        module.value.weight.detach().unflatten(0, (count, -1)) for module, count in zip(modules, (3, 2), strict=True)
    ]
    assert torch.equal(after[0][2], before[1][0]) and torch.equal(after[1][0], before[0][2])
    assert torch.equal(after[0][:2], before[0][:2]) and torch.equal(after[1][1], before[1][1])


def test_a_pruned_t5_keeps_its_columns_of_the_position_bias():
    model, inputs = build("t5"), FAMILIES["t5"].inputs()
    paths = [path for path in sites(model) if path.startswith("encoder")]
    prune_heads(model, heads={"enc-self": [[1], [0]]})
    before, kept = output(model, inputs), [list(sites(model)[path].kept_heads) for path in paths]
    rotate_heads(model, [((paths[0], 3), (paths[1], 1))])
    assert not torch.allclose(output(model, inputs), before, atol=1e-4)
    assert [list(sites(model)[path].kept_heads) for path in paths] == kept == [[0, 2, 3], [1, 2, 3]]
    rotate_heads(model, [((paths[0], 3), (paths[1], 1))])
    assert torch.equal(output(model, inputs), before)


def gates_at(model) -> list:
    return [projection.gates for projection in output_projections(model).values()]


def test_gates_travel_with_their_heads():
    model, optimizer = gated("bert")
    train(model, optimizer, FAMILIES["bert"].inputs())
    before = everything(model, optimizer)
    first, second = gates_at(model)
    values = [first.log_alpha.tolist(), second.log_alpha.tolist()]
    moments = [optimizer.state[gates.log_alpha]["exp_avg"].tolist() for gates in (first, second)]
    assert optimizer.state[first.log_alpha]["mean_square"].ndim == 0  # the group's, no head's own
    places = [((BERT.format(0), 1), (BERT.format(1), 3))]
    rotate_heads(model, places, optimizer)
    for one, other in (values, moments):
        one[1], other[3] = other[3], one[1]
    assert [first.log_alpha.tolist(), second.log_alpha.tolist()] == values
    assert [optimizer.state[gates.log_alpha]["exp_avg"].tolist() for gates in (first, second)] == moments
    rotate_heads(model, places, optimizer)
    assert_equal(everything(model, optimizer), before)


def test_fixed_gates_travel_too():
    model = build("bert")
    swap_to_gated(model, alive_heads={"enc-self": [[0, 1, 1, 1], [1, 1, 0, 0]]})
    rotate_heads(model, [((BERT.format(0), 0), (BERT.format(1), 1))])
    assert [gates.alive.tolist() for gates in gates_at(model)] == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_what_a_subset_has_drawn_travels_too():
    """The head that sits this step out sits it out in its new place."""
    model = build("bert")
    swap_to_gated(model)
    HeadPenalty(model, target_heads=3, steps=4)
    first, second = gates_at(model)
    before = [{name: part.clone() for name, part in gates.draw._asdict().items()} for gates in (first, second)]
    rotate_heads(model, [((BERT.format(0), 2), (BERT.format(1), 0))])
    assert before[0]["noise"][2] != before[1]["noise"][0]
    for name in ("open", "noise", "threshold"):
        one, other = (getattr(gates.draw, name) for gates in (first, second))
        assert one[2] == before[1][name][0] and other[0] == before[0][name][2]
        assert one[[0, 1, 3]].equal(before[0][name][[0, 1, 3]]) and other[1:].equal(before[1][name][1:])


def test_alphas_stay():
    model, expected, inputs = build("bert"), build("bert"), FAMILIES["bert"].inputs()
    first, second, *names = PLACES["bert"]
    generator = torch.Generator().manual_seed(3)
    alphas = [torch.randn(HEADS, HEADS, generator=generator).double() for _ in range(2)]
    for made in (model, expected):
        swap_to_alpha(made)
        for projection, alpha in zip(output_projections(made).values(), alphas, strict=True):
            projection.mixing.alpha.data.copy_(alpha)
    swap_by_hand(expected, first, second, names)
    rotate_heads(model, [(first, second)])
    assert all(torch.equal(p.mixing.alpha, a) for p, a in zip(output_projections(model).values(), alphas, strict=True))
    assert torch.equal(output(model, inputs), output(expected, inputs))


def test_an_optimizer_of_accelerate():
    first, second, *_ = PLACES["bert"]
    model = build("bert", torch.float32)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, OPTIMIZERS["adamw"](model))
    train(accelerator.unwrap_model(wrapped), optimizer, FAMILIES["bert"].inputs())
    direct = copy.deepcopy((model, optimizer.optimizer))
    rotate_heads(*direct[:1], [(first, second)], direct[1])
    rotate_heads(accelerator.unwrap_model(wrapped), [(first, second)], optimizer)
    assert_equal(everything(model, optimizer), everything(*direct))


def test_without_an_optimizer_the_moments_stay():
    first, second, *_ = PLACES["bert"]
    model = build("bert")
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, FAMILIES["bert"].inputs())
    before = everything(model, optimizer)
    rotate_heads(model, [(first, second)])
    assert differing(everything(model, optimizer), before) == differing(dict(model.state_dict()), before)
    assert len(optimizer.state) == len(list(model.parameters()))


def test_an_optimizer_before_its_first_step():
    """There are no moments yet, and none are made."""
    first, second, *names = PLACES["bert"]
    model = build("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    rotate_heads(model, [(first, second)], optimizer)
    assert not optimizer.state
    expected = build("bert")
    swap_by_hand(expected, first, second, names)
    assert_equal(model.state_dict(), expected.state_dict())


def test_an_adapter_can_be_given():
    first, second, *_ = PLACES["bert"]
    model, expected = build("bert"), build("bert")
    rotate_heads(model, [(first, second)])
    rotate_heads(expected, [(first, second)])
    assert_equal(model.state_dict(), expected.state_dict())
