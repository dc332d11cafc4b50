"""The worth of heads against loops, edited models and linear programs; what is left as it was; what is refused."""

import pytest
import torch
from changed_heads import adapter_sites
from heads_by_hand import EOS, FAR, ended, first_token, layers_of, maps_by_hand, model_in, sites_with_heads
from model_inputs import cast
from model_runs import set_backend
from model_sizes import EXACT64, FP32_NOISE, HEADS
from opening import layers_of as opened_layers
from slow_cases import slow
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.analysis import head_worth
from collab_heads.analysis.measures.worth import QUICK, WORTH
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError, UnsupportedModelError
from collab_heads.running.batches import sides
from collab_heads.running.residual_readers import find_readers

STOCK = ("bert", "albert", "marian", "t5", "gpt2", "opt", "mpnet", "qwen3", "gemma3")
CASES = [(name, "stock") for name in STOCK] + [
    (name, change) for name in ("bert", "marian") for change in ("shared", "gated", "mixed", "pruned")
]
NO_STREAM = ("albert",)  # its module runs twice


def worth(model, inputs, measures=QUICK, **options):
    return head_worth(model, [cast(inputs, model.dtype)], measures=measures, **{"exclude": [EOS], **options}).values


def counted(inputs, counts, site):
    """Row and token of every query token that counts."""
    return counts["encoder" if sides(site)[0] == "encoder" else "decoder"].nonzero().tolist()


def hooked(model, inputs, modules, before=True):
    """What each module reads first, or puts out, in every call: module -> list of tensors."""
    seen, handles = {}, []
    for module in modules:
        if before:
            hook = lambda mod, args, module=module: seen.setdefault(module, []).append(args[0])  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        else:
            hook = lambda mod, args, out, module=module: seen.setdefault(module, []).append(out)  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        model(**cast(inputs, model.dtype))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name, change", CASES)
def test_norms_of_weighted_values_one_pair_of_tokens_at_a_time(name, change):
    model, (inputs, counts) = model_in(name, change), ended(name)
    set_backend(model, "eager")  # values too are compared on one backend
    found, maps = worth(model, inputs, ("value_norm", "context_norm")), maps_by_hand(model, inputs)
    largest = 0.0
    for site in opened_layers(model).with_heads:
        values = hooked(model, inputs, [site.value], before=False)[site.value]
        columns = site.output_weight().unflatten(-1, (site.num_heads, -1))  # (D, H, d_v)
        sums = {"value_norm": [], "context_norm": []}
        for weights, value in zip(maps[site.path], values, strict=True):
            value = value.unflatten(-1, (site.site.num_key_heads, -1))
            for row, token in counted(inputs, counts, site.site):
                first = first_token(inputs, row, site.role, 1)
                norms = torch.zeros(2, site.num_heads, dtype=torch.float64)
                for head, key_head in enumerate(site.groups):
                    for key in range(weights.shape[-1]):
                        vector = weights[row, head, token, key] * columns[:, head] @ value[row, key, key_head]
                        norms[0, head] += vector.norm()
                        if site.role == "dec-enc" or key not in (token, first):
                            norms[1, head] += vector.norm()
                sums["value_norm"].append(norms[0])
                sums["context_norm"].append(norms[1])
        for measure, each in sums.items():
            expected = torch.stack(each).mean(0)
            torch.testing.assert_close(found[measure][site.path], expected, rtol=0, atol=EXACT64, msg=measure)
            largest = max(largest, float(expected.max()))
    assert largest > FAR


def streams(model, inputs, reader, site, counts):
    """What the reader of a site reads, and what the site puts out, at the tokens that count: [N, D] each."""
    read = hooked(model, inputs, [model.get_submodule(reader.name)])[model.get_submodule(reader.name)][0]
    put_out = hooked(model, inputs, [site.output], before=False)[site.output][0]
    places = counted(inputs, counts, site.site)
    read = read.view_as(put_out)
    return [torch.stack([each[row, token] for row, token in places]) for each in (read, put_out)]


@pytest.mark.parametrize("name, change", [*(case for case in CASES if case[0] not in NO_STREAM), ("dinov2", "stock")])
def test_the_stream_of_a_model_whose_values_are_zeroed(name, change):
    """The model runs without each head, and what it has in the stream is compared with the whole model's."""
    model, (inputs, counts) = model_in(name, change).eval(), ended(name)
    found = worth(model, inputs, ("value_zeroing", "contribution"))
    sites = opened_layers(model).with_heads
    readers = find_readers(model, sites, cast(inputs, model.dtype))
    largest = dict.fromkeys(found, 0.0)
    assert found["contribution"].keys() == found["value_zeroing"].keys() == {site.path for site in sites}
    for reader in readers:
        site = reader.site
        stream, put_out = streams(model, inputs, reader, site, counts)
        turned, shares = [], []
        for head in range(site.num_heads):
            with silenced(site, head):
                without, _ = streams(model, inputs, reader, site, counts)
            turned.append(1 - torch.cosine_similarity(stream, without, dim=-1))
            shares.append(stream.abs().sum(-1) - without.abs().sum(-1))
        rest = (stream.abs().sum(-1) - (put_out * reader.scale).abs().sum(-1)).clamp(min=0)
        shares = torch.stack(shares, -1).clamp(min=0)
        shares = shares / (shares.sum(-1) + rest)[:, None]
        expected = {"value_zeroing": torch.stack(turned, -1).mean(0), "contribution": shares.mean(0)}
        for measure, values in expected.items():
            atol = FP32_NOISE if name == "dinov2" else EXACT64  # whose scale is measured in float32
            torch.testing.assert_close(found[measure][site.path], values, rtol=0, atol=atol, msg=measure)
            largest[measure] = max(largest[measure], float(values.max()))
    assert min(largest.values()) > FAR / 10


class silenced:
    """A context in which the values of one head are zero as they enter the output projection."""

    def __init__(self, site, head):
        self.site, self.head = site, head

    def hook(self, module, args):
        heads = args[0].unflatten(-1, (self.site.num_heads, -1)).clone()
        heads[..., self.head, :] = 0
        return (heads.flatten(-2), *args[1:])

    def __enter__(self):
        self.handle = self.site.output.register_forward_pre_hook(self.hook, prepend=True)

    def __exit__(self, *_):
        self.handle.remove()


def test_zeroed_weights_of_values_do_the_same():
    """The values themselves, weight and bias: what the measure is named after."""
    model, (inputs, counts) = model_in("bert").eval(), ended("bert")
    found = worth(model, inputs, "value_zeroing")["value_zeroing"]
    site = opened_layers(model).with_heads[1]
    reader = find_readers(model, [site], cast(inputs, model.dtype))[0]
    stream, _ = streams(model, inputs, reader, site, counts)
    for head in range(HEADS):
        before = {part: part.detach().clone() for part in (site.value.weight, site.value.bias)}
        with torch.no_grad():
            for part in before:
                part.unflatten(0, (HEADS, -1))[head] = 0
            without, _ = streams(model, inputs, reader, site, counts)
            for part, values in before.items():
                part.copy_(values)
        turned = (1 - torch.cosine_similarity(stream, without, dim=-1)).mean()
        torch.testing.assert_close(found[site.path][head], turned, rtol=0, atol=EXACT64)


def steps_of(model, inputs):
    """(site, maps [B, H, T, S]) of every call, in the order in which they run."""
    maps, calls = maps_by_hand(model, inputs), []
    for site in sites_with_heads(model):
        calls += [(site, layer, each) for layer, each in zip(layers_of(model, site), maps[site.path], strict=True)]
    order = {"enc-self": 0, "dec-self": 1, "dec-enc": 2}
    calls.sort(key=lambda call: (call[0].role != "enc-self", call[1], order[call[0].role]))
    return [(site, weights.double()) for site, _, weights in calls]


def mixing(steps, row, without=None):
    """The matrices of the calls over the tokens of both sides, one weight at a time."""
    lengths = {}
    for site, weights in steps:
        for side, length in zip(sides(site), weights.shape[-2:], strict=True):
            lengths[side] = length
    starts, start = {}, 0
    for side, length in lengths.items():
        starts[side], start = start, start + length
    matrices = []
    for site, weights in steps:
        matrix = torch.eye(start, dtype=torch.float64)
        heads = [h for h in range(weights.shape[1]) if without != (site.path, h)]
        queries, keys = (starts[side] for side in sides(site))
        for token in range(weights.shape[-2]):
            matrix[queries + token] *= 0.5
            for key in range(weights.shape[-1]):
                mean = sum(float(weights[row, head, token, key]) for head in heads) / len(heads)
                matrix[queries + token, keys + key] += 0.5 * mean
        matrices.append(matrix)
    return matrices, starts


@pytest.mark.parametrize("name, change", [*slow(*CASES[: len(STOCK)]), ("bert", "shared"), ("marian", "pruned")])
def test_rollout_is_the_product_of_all_maps(name, change):
    model, (inputs, counts) = model_in(name, change), ended(name)
    found, steps = worth(model, inputs, "rollout")["rollout"], steps_of(model, inputs)
    for site in sites_with_heads(model):
        if site.num_heads == 1:
            continue
        out = "decoder" if model.config.is_encoder_decoder else sides(site)[0]
        expected = torch.zeros(site.num_heads, dtype=torch.float64)
        places = counts[out].nonzero().tolist()
        for row in range(3):
            whole, starts = mixing(steps, row)
            rolled = torch.linalg.multi_dot(whole[::-1])
            for head in range(site.num_heads):
                other = torch.linalg.multi_dot(mixing(steps, row, (site.path, head))[0][::-1])
                moved = (rolled - other).abs().sum(-1) / 2
                expected[head] += sum(float(moved[starts[out] + t]) for r, t in places if r == row)
        expected /= len(places)
        torch.testing.assert_close(found[site.path], expected, rtol=0, atol=EXACT64)
        assert float(expected.max()) > FAR


def largest_flow(matrices, output, goal):
    """The largest flow through layers of capacities, as a linear program over all edges."""
    from scipy.optimize import linprog

    size = len(matrices[0])
    edges = [
        (layer, i, j, float(matrix[i, j]))
        for layer, matrix in enumerate(matrices)
        for i in range(size)
        for j in range(size)
        if matrix[i, j] > 0
    ]
    rows = []
    for layer in range(1, len(matrices)):  # what comes in from above goes out below
        for node in range(size):
            rows.append([(e[0] == layer and e[2] == node) - (e[0] == layer - 1 and e[1] == node) for e in edges])
    gain = [-float(e[0] == 0 and e[2] == goal) for e in edges]
    last = len(matrices) - 1
    bounds = [(0, e[3] if (e[0] < last or e[1] == output) and (e[0] > 0 or e[2] == goal) else 0) for e in edges]
    return -linprog(gain, A_eq=rows, b_eq=[0] * len(rows), bounds=bounds).fun


@pytest.mark.parametrize(
    "name, change", [("bert", "stock"), ("marian", "stock"), ("qwen3", "stock"), ("albert", "stock")]
)
def test_flow_is_the_largest_by_a_linear_program(name, change):
    """Of one sentence of few tokens, so that one token counts, and is drawn."""
    model, (inputs, _) = model_in(name, change), ended(name)
    cut = {key: value[:1, :3].clone() for key, value in inputs.items()}
    read = "decoder_input_ids" if "decoder_input_ids" in cut else "input_ids"
    cut[read][0, 1:] = EOS
    cut[read][0, 1 if name in ("bert", "albert") else 0] = 7  # the token that counts
    if name in ("bert", "albert"):
        cut[read][0, 0] = EOS
    token = 1 if name in ("bert", "albert") else 0
    found, steps = worth(model, cut, "flow")["flow"], steps_of(model, cut)
    for site in sites_with_heads(model):
        out = "decoder" if model.config.is_encoder_decoder else sides(site)[0]
        shares = {}
        for without in (None, *((site.path, head) for head in range(site.num_heads))):
            matrices, starts = mixing(steps, 0, without)
            flows = torch.tensor([largest_flow(matrices, starts[out] + token, j) for j in range(len(matrices[0]))])
            shares[without] = flows / flows.sum()
        moved = [float((shares[site.path, h] - shares[None]).abs().sum()) / 2 for h in range(site.num_heads)]
        torch.testing.assert_close(found[site.path].tolist(), moved, rtol=0, atol=1e-6)  # whole numbers of 2⁻²⁴


def test_batches_of_any_size_give_the_same():
    model, (inputs, _) = model_in("marian"), ended("marian")
    parts = [{key: value[i:j] for key, value in inputs.items()} for i, j in ((0, 1), (1, 3))]
    whole, split = (
        head_worth(model, batches, exclude=[EOS]).values for batches in ([cast(inputs, model.dtype)], iter(parts))
    )
    assert whole.keys() == split.keys() == set(QUICK)
    for measure in QUICK:
        for path, values in whole[measure].items():
            torch.testing.assert_close(split[measure][path], values, rtol=0, atol=EXACT64)


def test_a_lone_head_leaves_the_residual_connection():
    model, (inputs, counts) = model_in("bert"), ended("bert")
    collab_heads.prune_heads(model, heads={"enc-self": [[1, 2, 3], [1, 2, 3]]})
    found, steps = worth(model, inputs, ("rollout", "flow")), steps_of(model, inputs)
    moved = 0.0
    for row, token in counts["encoder"].nonzero().tolist():
        (one, two), _ = mixing(steps, row)
        moved += float((two @ one - two)[token].abs().sum()) / 2
    path = steps[0][0].path
    assert float(found["rollout"][path]) == pytest.approx(moved / int(counts["encoder"].sum()), abs=EXACT64)
    assert float(found["flow"][path]) > FAR


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    for name in ("bert", "t5"):
        model, (inputs, _) = model_in(name, dtype=torch.float32).train(), ended(name)
        before, state = snapshot(model), torch.get_rng_state()
        first, second = (worth(model, inputs, WORTH) for _ in range(2))
        assert all(torch.equal(first[m][path], second[m][path]) for m in WORTH for path in first[m])
        assert_unchanged(model, before)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_table_and_what_some_sites_lack():
    model, (inputs, _) = model_in("albert"), ended("albert")
    found = head_worth(model, [cast(inputs, model.dtype)], exclude=[EOS])
    assert found.values["contribution"] == {} and found.values["rollout"]
    assert "value zeroing" in str(found) and found.to_dict()["values"]["contribution"] == {}
    bare = model_in("bert")
    collab_heads.prune_heads(bare, heads={"enc-self": [list(range(HEADS))] * 2})
    assert head_worth(bare, [cast(ended("bert")[0], bare.dtype)], exclude=[EOS]).sites == ()


def test_bad_arguments_are_refused():
    model, (inputs, _) = model_in("bert"), ended("bert")
    path = adapter_sites(model)[0].path
    for options, *fragments in (
        ({"measures": ("value_nrm",)}, "'value_nrm'", "did you mean 'value_norm'"),
        ({"measures": ()}, "measures is empty", "value_norm, context_norm"),
        ({"exclude": [None]}, "[None]", "sep_token_id"),
        ({"seed": -1}, "seed"),
    ):
        with refused(model, ArgumentError, *fragments):
            head_worth(model, [inputs], **options)
    for measure in WORTH:
        with refused(model, CalibrationError, "no query token that counts", path):
            head_worth(model, [{"input_ids": torch.full((2, 3), EOS)}], measures=measure, exclude=[EOS])
    for batches, fragment in (([], "empty"), ("text", "expected an iterable"), ([inputs, ["text"]], "batch 1")):
        with refused(model, CalibrationError, fragment):
            head_worth(model, batches, exclude=[EOS])
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        head_worth(torch.nn.DataParallel(model), [inputs])
    model.base_model.get_submodule(path).value.weight.data[0, 0] = float("nan")
    with refused(model, NonFiniteError, path, "NaN or inf"):
        head_worth(model, [inputs], measures="value_norm", exclude=[EOS])
