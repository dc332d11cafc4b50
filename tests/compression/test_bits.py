"""Weights of few bits beside smaller sizes, in one budget of bytes."""

import json
import re

import pytest
import torch
from compressing import batches_of, first_block, first_site
from opening import layers_of
from safetensors.torch import load_file
from slow_cases import slow

from collab_heads import compress, plan, prune_heads, swap_to_collaborative, swap_to_gated
from collab_heads.base.option_values import BITS
from collab_heads.compression import fitting
from collab_heads.compression.bits import InputSums, on_grid, projections_of, rounded, rounding_errors
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.latency import resize
from collab_heads.compression.parts.part import RefittedOutput
from collab_heads.compression.parts.shape import Choice, TableShape, shape_of
from collab_heads.errors import ArgumentError, DataError, ModelStateError, NonFiniteError
from collab_heads.layers.layout import weight_of
from collab_heads.layers.weight_grid import GridWeights
from collab_heads.layers.weight_grid import on_grid as grids_in
from collab_heads.model.open_layers import OpenTable
from collab_heads.model.site_size import TableGeometry, num_bytes
from collab_heads.running.batches import run_batches
from families import FAMILIES

OPTIONS = {"bits": (8, 4, 3), "refine_steps": 0}
MANY = 24  # batches: enough for last projections to be refitted
SUMS = 1e-5  # float32 products of a few hundred tokens; differences seen: 3e-7


def built(name):
    return FAMILIES[name].build().eval()


def test_the_bytes_of_every_family_are_those_of_the_plan(family, monkeypatch):
    """Every weight with bits lies on its grid, and GPTQ has seen the inputs of every projection."""
    inner, unheard = fitting.on_grid, []

    def seen(site, bits, seconds, names):
        unheard.extend(f"{site.path} {name}" for name in names if name not in seconds)
        return inner(site, bits, seconds, names)

    monkeypatch.setattr(fitting, "on_grid", seen)
    model = family.build().eval()
    before = num_bytes(model)
    report = compress(model, batches_of(family), 0.3, **OPTIONS)
    cost = report.costs["bytes"]
    assert report.of == "bytes" and 0.2 < cost.share <= 0.3 and not unheard
    assert before - num_bytes(model) == cost.before - cost.after == before - report.model_bytes_after
    grids = list(grids_in(model))
    assert grids and all(isinstance(found, GridWeights) for _, _, found in grids)
    assert {site.bits_after for site in report.sites} & {8, 4, 3} and "bits" in str(report)


@pytest.mark.slow
def test_tables_may_have_other_bits_than_layers():
    model = built("bert")
    report = compress(model, batches_of(FAMILIES["bert"]), 0.15, bits=8, table_bits=(4, 3), refine_steps=0)
    found = {site.path: site.bits_after for site in report.sites}
    tables = {path for path in found if "embedding" in path or "pooler" in path or "classifier" in path}
    of_tables, of_layers = {found[path] for path in tables}, {found[path] for path in found.keys() - tables}
    assert of_tables & {4, 3} and of_tables <= {32, 4, 3} and 8 in of_layers and of_layers <= {32, 8}
    alone = compress(built("bert"), batches_of(FAMILIES["bert"]), 0.8, table_bits=8, refine_steps=0)
    assert alone.of == "bytes" and {site.bits_after for site in alone.sites} == {32, 8}
    assert {site.path for site in alone.sites if site.bits_after == 8} <= tables


def test_plans_keep_the_bits_of_tables(tmp_path):
    made = plan(built("bert"), batches_of(FAMILIES["bert"]), bits=8, table_bits=3, refine_steps=0)
    made.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json").options == made.options
    assert made.options.table_bits == (3,) and made.options.bits == (8,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "per_head"])
def test_swapped_sites_too(kind, monkeypatch):
    model = built("bert")
    swap_to_collaborative(model, kind=kind, dim_shared_query_key=16)
    before = num_bytes(model)
    report = compress(model, batches_of(FAMILIES["bert"]), 0.35, bits=8, parts=(), kind=kind)
    assert before - num_bytes(model) == report.costs["bytes"].before - report.costs["bytes"].after
    names = [name for name, _, _ in grids_in(model)]
    assert any("shared_query" in name for name in names) and any("shared_key" in name for name in names)


def test_a_size_of_the_whole_model_is_kept():
    model = built("bert")
    whole = num_bytes(model)
    made = plan(model, batches_of(FAMILIES["bert"]), **OPTIONS)
    for size in (0.9 * whole, 0.4 * whole, 0.2 * whole):
        choices = made.choose(f"{size / 1e3:.3f}kB")
        taken = made.rest + sum(made.option(path, choice).cost for path, choice in choices.items())
        assert 0.9 * size <= taken <= size + 1
    compress(model, made, f"{0.2 * whole / 1e6}MB")
    assert num_bytes(model) == taken


def test_a_size_needs_no_bits():
    model = built("bert")
    size = 0.7 * num_bytes(model)
    report = compress(model, batches_of(FAMILIES["bert"]), f"{size}B", refine_steps=0)
    assert report.of == "bytes" and 0.6 * size < num_bytes(model) <= size
    assert not list(grids_in(model)) and num_bytes(model) == sum(each.nbytes for each in model.parameters())


def test_without_bits_only_what_changes_leaves_its_grid(tmp_path, warnings_logged):
    model, batches = built("bert"), batches_of(FAMILIES["bert"])
    compress(model, batches, 0.3, bits=8, refine_steps=0)
    before, on_grids = num_bytes(model), {name for name, _, _ in grids_in(model)}
    block = layers_of(model).feed_forwards[0].path
    compress(model, batches, 1.0, refine_steps=0)
    assert num_bytes(model) == before and "pass bits" not in warnings_logged.text
    report = compress(model, batches, 0.7, sites=block, refine_steps=0)
    assert "pass bits, such as bits=(8, 4)" in warnings_logged.text
    left = on_grids - {name for name, _, _ in grids_in(model)}
    assert left and all(name.startswith(block) or block.rpartition(".")[0] in name for name in left)
    model.save_pretrained(tmp_path)
    taken = sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values())
    assert (report.model_bytes_before, report.model_bytes_after) == (before, taken)


def test_weights_that_are_timed_have_other_codes():
    """Equal ones become one in a graph, which two products would share."""
    site = layers_of(built("bert")).with_heads[0]
    now = resize(site, shape_of(site, "per_head", ("query_key",), 1, (8,)), Choice.of(query_key=4))
    weights = now.query_key.shared_query.weight, now.query_key.shared_key.weight
    query, key = ((127 * weight / weight.amax(1, keepdim=True)).round() for weight in weights)
    assert query.shape == key.shape and not torch.equal(query, key)


@pytest.mark.parametrize("name", ["marian", "bart"])
def test_buffers_that_are_stored_count(name, tmp_path):
    """The bias of the logits is one."""
    model = built(name)
    model.save_pretrained(tmp_path)
    assert sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values()) == num_bytes(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "qwen3"])
def test_a_stored_plan_and_stored_measurements_give_the_same(name, tmp_path):
    file, batches = tmp_path / "measured.json", batches_of(FAMILIES[name], MANY)
    one, two, three = (built(name) for _ in range(3))
    made = plan(one, batches, **OPTIONS, measurements=file)
    made.save(tmp_path / "plan.json")
    compress(one, made, 0.3)
    assert not (tmp_path / "measured.json.fits").exists()
    compress(two, batches, 0.3, plan=CompressionPlan.load(tmp_path / "plan.json"))
    compress(three, batches, 0.3, **OPTIONS, measurements=file)
    for other in (two, three):
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "gpt2"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_killed_among_the_grids_ends_as_an_unbroken_one(name, stop, tmp_path, monkeypatch):
    file, batches = tmp_path / "measured.json", batches_of(FAMILIES[name], MANY)
    whole, calls = built(name), []
    compress(whole, batches, 0.3, **OPTIONS, measurements=file)
    inner = fitting.Turn.fitted

    def stopping(*arguments):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(arguments)
        return inner(*arguments)

    monkeypatch.setattr(fitting.Turn, "fitted", stopping)
    with pytest.raises(KeyboardInterrupt):
        compress(built(name), batches, 0.3, **OPTIONS, measurements=file)
    monkeypatch.undo()
    rest = []
    monkeypatch.setattr(fitting.Turn, "fitted", lambda *arguments: rest.append(1) or inner(*arguments))
    again = built(name)
    compress(again, batches, 0.3, **OPTIONS, measurements=file)
    sites = plan(built(name), batches, **OPTIONS, measurements=file).measured.sites
    assert len(rest) + stop == len(sites)
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))


def test_a_file_of_measurements_with_other_bits_is_refused(tmp_path):
    file, batches = tmp_path / "measured.json", batches_of(FAMILIES["bert"])
    plan(built("bert"), batches, **OPTIONS, measurements=file)
    stored = json.loads(file.read_text())
    path = next(iter(stored["sites"]))
    stored["sites"][path]["bits"]["errors"] = [[8, 0.1], [5, 0.2]]
    file.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="the sizes of"):
        plan(built("bert"), batches, **OPTIONS, measurements=file)


def test_a_stored_plan_with_bits_that_no_grid_has_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    plan(built("bert"), batches_of(FAMILIES["bert"]), **OPTIONS).save(file)
    stored = json.loads(file.read_text())
    stored["sites"][0]["bits"][0] = 5
    file.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="bits of"):
        CompressionPlan.load(file)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "qwen3", *slow("marian", "opt", "clip")])
def test_sums_are_those_of_what_projections_read(name):
    """Also of cross-attention, whose keys and values read the source, and without padding."""
    model = built(name)
    batches = batches_of(FAMILIES[name], 2)
    for site in layers_of(model).in_order:
        found = InputSums(site, 1).of(model, batches)
        for key, module in projections_of(site).items():
            masks, rows = {}, []

            def keep(_, args, key=key, site=site, masks=masks, rows=rows):
                mask = masks.get(InputSums(site, 1).side_of(key))
                states = args[0].flatten(0, -2)
                rows.append(states if mask is None else states[mask.flatten()])

            handle = module.register_forward_pre_hook(keep)
            run_batches(model, batches, masks, "test")
            handle.remove()
            read = torch.cat(rows).double()
            torch.testing.assert_close(found[key], read.mT @ read, rtol=SUMS, atol=SUMS * float(read.square().sum()))


def test_a_site_that_runs_several_times_is_seen_every_time():
    model = built("albert")
    site = layers_of(model).in_order[0]
    calls = model.config.num_hidden_layers
    once, every = (InputSums(site, count).of(model, batches_of(FAMILIES["albert"])) for count in (1, calls))
    assert float(every["output"].trace()) > 1.5 * float(once["output"].trace())


def test_rounding_errors_are_those_of_the_weights_and_fall_with_bits():
    model = built("bert")
    for site in (first_site(model), first_block(model), layers_of(model).tables[0]):
        shape = of_shape(site)
        found = rounding_errors(site, shape)
        assert list(found) == [8, 4, 3] and 0 < found[8] < found[4] < found[3] < 0.1
        weights = [weight_of(module).detach() for module in projections_of(site).values()]
        whole = sum(float(weight.square().sum()) for weight in weights)
        for bits in BITS:
            pairs = zip(weights, rounded(site, bits).weights, strict=True)
            lost = sum(float((weight - each.weight()).square().sum()) for weight, each in pairs)
            assert lost / whole == pytest.approx(found[bits], rel=1e-3)


def of_shape(site):
    if isinstance(site, OpenTable):
        return TableShape(TableGeometry.of(site), (8, 4, 3))
    return shape_of(site, "per_head", bits=(8, 4, 3))


def test_gptq_leaves_less_of_the_error_than_rounding():
    model = built("bert")
    batches = batches_of(FAMILIES["bert"], MANY)
    for site in (first_site(model), first_block(model)):
        seconds = InputSums(site, 1).of(model, batches)
        lost = []
        for fit in (rounded(site, 3), on_grid(site, 3, seconds)):
            lost.append(0.0)
            for name, found in zip(fit.names, fit.weights, strict=True):
                gap = (weight_of(projections_of(site)[name]).detach() - found.weight()).double()
                lost[-1] += float((gap @ seconds[name] * gap).sum())
        assert 0 < lost[1] < 0.8 * lost[0]


@pytest.mark.slow
def test_the_last_projection_makes_up_for_the_bits_of_the_others():
    """Weights on grids move the output less where last projections are refitted on what they read then."""
    name = "gpt2"
    made = plan(built(name), batches_of(FAMILIES[name], 64), bits=3, parts=())
    choices, errors = made.choose(made.least), []
    for refits in (True, False):
        fitted = fitting.fitted_in_order(made.measured, {}, choices, refits=refits)
        assert any(isinstance(fit, RefittedOutput) for fits in fitted.values() for fit in fits) == refits
        errors.append(fitting.fitted_error(made.measured, fitted))
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.slow
def test_refits_beside_bits_must_help_on_other_examples_too(monkeypatch):
    """With bits the fits without refits are made only where `validation` is there to compare on."""
    asked, inner = [], fitting.fitted_in_order

    def watched(*arguments, refits=True):
        asked.append(refits)
        return inner(*arguments, refits=refits)

    monkeypatch.setattr(fitting, "fitted_in_order", watched)
    batches = batches_of(FAMILIES["bert"], MANY)
    compress(built("bert"), batches, 0.3, **OPTIONS)
    assert asked == [True]
    report = compress(built("bert"), batches, 0.3, **OPTIONS, validation=batches_of(FAMILIES["bert"], 2, seed=7))
    assert asked == [True, True, False] and report.validation_error > 0


def test_tables_are_found_once_with_the_layers_tied_to_them():
    tables = {table.path: len(table.modules) for table in layers_of(built("t5")).tables}
    assert tables["shared"] == 3 + built("t5").config.tie_word_embeddings
    assert not any("relative_attention_bias" in path for path in tables)  # narrower than a block
    assert all("sinus" not in type(table.output).__name__.lower() for table in layers_of(built("marian")).tables)


def test_other_linear_layers_are_tables_too():
    paths = {table.path: table.role for table in layers_of(built("bert")).tables}
    assert paths["bert.pooler.dense"] == "linear" and not any(".layer." in path for path in paths)
    assert "visual_projection" in {table.path for table in layers_of(built("clip")).tables}


@pytest.mark.slow
def test_a_plan_of_named_sites_leaves_tables_alone():
    model = built("bert")
    made = plan(model, batches_of(FAMILIES["bert"]), **OPTIONS, sites="enc-ffn")
    assert {site.role for site in made.sites} == {"enc-ffn"}
    with_tables = plan(model, batches_of(FAMILIES["bert"]), **OPTIONS, parts="neurons")
    assert {site.role for site in with_tables.sites} == {"enc-self", "enc-ffn", "embedding", "linear"}
    assert {choice.sizes for site in with_tables.sites for choice in site.choices if site.role == "enc-self"} == {()}


def test_choices_have_each_of_the_bits_and_none_where_nothing_is_left():
    model = built("bert")
    made = plan(model, batches_of(FAMILIES["bert"]), **OPTIONS)
    for site in made.sites:
        by_sizes = {}
        for choice in site.choices:
            by_sizes.setdefault(choice.sizes, set()).add(choice.bits)
        for sizes, bits in by_sizes.items():
            assert bits == ({None} if 0 in dict(sizes).values() else {None, 8, 4, 3})
        assert site.choices[-1] == Choice()


@pytest.mark.slow
def test_predictions_come_near_what_is_measured():
    """Errors of weights add to those of sizes; GPTQ's share is about that of the constant."""
    name = "gpt2"
    made = plan(built(name), batches_of(FAMILIES[name], MANY), bits=(4, 3), parts=())
    ((_, measured),) = made.measure([0.16])
    assert 1 / 3 < made.predicted(made.choose(0.16)) / measured < 3


@pytest.mark.parametrize(
    "given, said",
    [
        ({"bits": 5}, "bits=5: give some of 3, 4, 8"),
        ({"bits": (8, 2)}, "give some of 3, 4, 8"),
        ({"bits": 8, "table_bits": 5}, "table_bits=5: give some of 3, 4, 8"),
        ({"table_bits": 4, "of": "operations"}, r"table_bits=\(4,\), .* few bits save bytes, and time"),
        ({"bits": 8, "of": "operations"}, "few bits save bytes, and time"),
        ({"bits": 8, "of": "time"}, "PyTorch multiplies in float, .* engine='onnxruntime' or engine='openvino'"),
        ({"table_bits": 8, "of": "time", "engine": "openvino"}, "to look up a table takes no time: .* parts="),
        ({"engine": "onnxruntime"}, "only time is measured there: use of='time'"),
        ({"engine": "tensorrt", "of": "time"}, "engine"),
        ({"budget": "10 sheep"}, "must be a size such as '10MB'"),
        ({"budget": "0MB"}, "must be a size such as '10MB'"),
        ({"budget": "1kB"}, "kB': the weights of the model take .* fewer with bits"),
        ({"budget": "1kB", "bits": 8}, "MB at the least"),
        ({"budget": "5GB", "bits": 8}, "the weights of the model take"),
        ({"budget": "10kB", "of": "cache"}, "the plan is of cache, a size needs one of bytes"),
        ({"parts": ()}, "parts is empty"),
    ],
)
def test_impossible_requests_are_refused(given, said):
    model = built("bert")
    before = {key: each.clone() for key, each in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=said):
        compress(model, batches_of(FAMILIES["bert"]), **{"refine_steps": 0, **given})
    assert all(torch.equal(each, model.state_dict()[key]) for key, each in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_dtype_are_refused(dtype):
    with pytest.raises(ModelStateError, match=r"load it with dtype=torch\.float32"):
        plan(built("bert").to(dtype), batches_of(FAMILIES["bert"]), bits=8)


def test_gates_are_refused_with_bits_alone():
    model = built("bert")
    swap_to_gated(model)
    with pytest.raises(ModelStateError, match="has gates"):
        plan(model, batches_of(FAMILIES["bert"]), bits=8, parts=())


def test_a_weight_that_half_precision_has_no_scale_for_is_named():
    model = built("bert")
    site = first_block(model)
    with torch.no_grad():
        site.output.weight[0, 0] = 1e9
    with pytest.raises(NonFiniteError, match=f"{site.path}, output: weight"):
        rounded(site, 8)


@pytest.mark.slow
def test_heads_can_go_afterwards(tmp_path):
    """Also all of a site, whose output is a constant then."""
    model = built("bert")
    compress(model, batches_of(FAMILIES["bert"]), 0.35, bits=8, parts=())
    heads = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 1, 2, 3]}
    prune_heads(model, heads={path.removeprefix("bert."): gone for path, gone in heads.items()})
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "xlm-roberta-decoder"])
@pytest.mark.parametrize("bits", [None, (4, 3)])
def test_a_packed_model_is_compressed_again(name, bits, tmp_path):
    """The report says what it took, packed, and the file is as large as the report says."""
    model = built(name)
    compress(model, batches_of(FAMILIES[name], MANY), 0.35, bits=8, parts=())
    model.save_pretrained(tmp_path / "first")
    again = type(model).from_pretrained(tmp_path / "first")
    packed, budget = num_bytes(again), 0.5 if bits is None else 0.3
    report = compress(again, batches_of(FAMILIES[name], MANY), budget, bits=bits, of="bytes", refine_steps=0)
    assert report.model_bytes_before == packed and report.costs["bytes"].share <= budget
    again.save_pretrained(tmp_path / "second")
    stored = load_file(tmp_path / "second/model.safetensors")
    assert sum(each.nbytes for each in stored.values()) == report.model_bytes_after == num_bytes(again)


def test_a_model_of_two_dtypes_does_not_say_how_many_bytes_it_takes():
    model = built("t5").half()
    model.encoder.block[0].layer[1].DenseReluDense.wo.float()
    with pytest.raises(ModelStateError, match="sizes do not tell bytes"):
        plan(model, batches_of(FAMILIES["t5"]), of="bytes")


@pytest.mark.slow
def test_the_least_and_the_largest_size_that_a_message_names_are_possible():
    made = plan(built("bert"), batches_of(FAMILIES["bert"]), **OPTIONS)
    with pytest.raises(ArgumentError) as found:
        made.choose("1kB")
    most, least = re.findall(r"[0-9.]+ MB", str(found.value))
    for size in (most, least):
        made.choose(size)
    with pytest.raises(ArgumentError, match=r"bits=8\.0: give some of"):
        plan(built("bert"), batches_of(FAMILIES["bert"]), bits=8.0)
