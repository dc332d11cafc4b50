"""Weights on grids lie packed in graphs, whatever reads them there, and engines compute what PyTorch does."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from compressing import batches_of
from served_outputs import ENGINE_NOISE, assert_same_outputs, assert_same_tokens, text_batch
from slow_cases import slow
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from collab_heads import compress, export, load_exported
from collab_heads.errors import ArgumentError
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import WEIGHT_BITS, GridWeights, codes_of, num_blocks, on_grid
from collab_heads.model.site_size import num_bytes
from collab_heads.serving import graph_engines
from collab_heads.serving.graph_engines import ENGINES as GRAPHS
from collab_heads.serving.grids_in_graphs import DYNAMIC_QUANTISATION, Grids, pack_openvino
from collab_heads.serving.grids_in_onnx import DOMAIN, pack_onnx
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
ops = openvino.opset13

ALONE = 0.02  # of the largest value: seen with a range for each token 0, with one for all 0.12
ROWS = 40  # of a weight
WIDTHS = (64, 37)  # whole blocks, and a last block that is filled up
ENGINES = ("onnx", "openvino")


def put_on_grid(module, bits, seed=0):
    """Any codes, scales of either sign, and a row of zeros."""
    outputs, inputs = module.weight.shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(codes_of(bits)[0], 1 << bits - 1, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.randn(outputs, num_blocks(inputs, bits), generator=generator).half()
    scales[1] = 0
    module.weight.data = GridWeights(codes, scales, bits).weight()
    setattr(module, WEIGHT_BITS, bits)


def linear(width, bits):
    module = nn.Linear(width, ROWS)
    put_on_grid(module, bits)
    return module


def states(width, *shape):
    return torch.randn(*shape, width, generator=torch.Generator().manual_seed(1)).numpy()


IDS = np.array([[0, 1, 39], [7, -1, 2]])
BIAS = np.linspace(-3, 3, ROWS, dtype=np.float32)
# how a graph reads W [D, n] -> operator, attributes, inputs (W and its transpose are W and T), the other input
READS = {
    "rows": ("Gather", {}, ("W", "x"), lambda width: IDS),
    "product": ("MatMul", {}, ("x", "T"), lambda width: states(width, 2, 5)),
    "product with a bias": ("Gemm", {}, ("x", "T", "b"), lambda width: states(width, 5)),
    "product with the transpose": ("Gemm", {"transB": 1}, ("x", "W", "b"), lambda width: states(width, 5)),
    "product with what is transposed there": ("MatMul", {}, ("x", "t"), lambda width: states(width, 2, 5)),
    "along the outputs": ("MatMul", {}, ("x", "W"), lambda width: states(ROWS, 2, 5)),
    "half of the product": ("Gemm", {"alpha": 0.5}, ("x", "T"), lambda width: states(width, 5)),
}
OPERATORS = {"rows": "GatherBlockQuantized", **{name: "MatMulNBits" for name in list(READS)[1:5]}}


def onnx_graph(read, weight):
    """A graph that reads a weight in one way, and what it is given."""
    operator, attributes, names, other = READS[read]
    given = other(weight.shape[1])
    kind = onnx.TensorProto.INT64 if operator == "Gather" else onnx.TensorProto.FLOAT
    stored = ["W" if name == "t" else name for name in names]
    tensors = {"W": weight, "T": np.ascontiguousarray(weight.T), "b": BIAS}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Transpose", ["W"], ["t"], perm=[1, 0])] * ("t" in names)
        + [onnx.helper.make_node(operator, names, ["y"], **attributes)],
        "read",
        [
            onnx.helper.make_tensor_value_info(
                "x", kind, [f"d{size}" for size in range(given.ndim - 1)] + [given.shape[-1]]
            )
        ],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(tensors[name], name) for name in tensors if name in stored],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    return ir.from_proto(made), given


def run_onnx(program, given):
    options = GRAPHS["onnx"].options(None)["session_options"]
    return ort.InferenceSession(ir.to_proto(program).SerializeToString(), options).run(None, {"x": given})[0]


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ENGINE_NOISE * abs(expected).max())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", (8, 4, 3))
@pytest.mark.parametrize("read", READS)
def test_what_reads_a_weight_in_onnx(read, bits, width):
    module = linear(width, bits)
    program, given = onnx_graph(read, module.weight.detach().numpy())
    expected, grids = run_onnx(program, given), Grids(nn.Sequential(module))
    pack_onnx(program, grids)
    assert_close(run_onnx(program, given), expected)
    operators = {node.op_type for node in program.graph}
    stored = sum(each.const_value.nbytes for each in program.graph.initializers.values()) - BIAS.nbytes
    packed = next(on_grid(nn.Sequential(module)))[2].num_bytes
    if bits != 8 and read not in OPERATORS:  # the note says so
        assert operators == {READS[read][0]} and "in floating point" in [*grids.notes()][1]
    else:
        assert stored <= packed + (200 if bits == 3 else 60) and ["1 of 1" in note for note in grids.notes()] == [True]
        # ONNX Runtime multiplies by eight bits only in integers: it computes the weight when it loads
        assert (OPERATORS.get(read) in operators) == (bits != 8)


def test_a_weight_that_two_read_is_stored_once():
    """As tied embeddings do: a table looks rows up, and the output layer multiplies by it."""
    for bits in (8, 4):
        module = linear(64, bits)
        weight, names = module.weight.detach().numpy(), ("ids", "x", "rows", "scores")
        kinds = [onnx.TensorProto.INT64, *[onnx.TensorProto.FLOAT] * 3]
        ids, x, rows, scores = map(onnx.helper.make_tensor_value_info, names, kinds, [["a"], ["a", 64], None, None])
        nodes = [onnx.helper.make_node("Gather", ["W", "ids"], ["rows"])]
        nodes.append(onnx.helper.make_node("MatMul", ["x", "T"], ["scores"]))
        tensors = [onnx.numpy_helper.from_array(each, name) for name, each in (("W", weight), ("T", weight.T.copy()))]
        graph = onnx.helper.make_graph(nodes, "tied", [ids, x], [rows, scores], tensors)
        imports = [onnx.helper.make_opsetid("", 18)]
        program = ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))
        pack_onnx(program, Grids(nn.Sequential(module)))
        shape = (ROWS, 2, 16) if bits == 4 else (ROWS, 64)
        assert [tuple(each.shape) for each in program.graph.initializers.values()].count(shape) == 1
        given = {"ids": IDS[0], "x": states(64, 3)}
        found = ort.InferenceSession(ir.to_proto(program).SerializeToString()).run(None, given)
        assert_close(found[0], weight[IDS[0]])
        assert_close(found[1], given["x"] @ weight.T)


def openvino_graph(read, weight):
    given = READS[read][3](weight.shape[1])
    if read == "rows":
        x = ops.parameter([-1, -1], openvino.Type.i64)
        y = ops.gather(ops.constant(weight), x, ops.constant(np.array(0)))
    else:
        x = ops.parameter([-1] * (given.ndim - 1) + [given.shape[-1]], openvino.Type.f32)
        name, flipped = READS[read][2][1], "transB" in READS[read][1]
        stored = np.ascontiguousarray(weight.T) if name == "T" else weight
        y = ops.matmul(x, ops.constant(stored), False, flipped)
    return openvino.Model([ops.result(y)], [x]), given


def run_openvino(program, given, **options):
    options = {"INFERENCE_PRECISION_HINT": "f32", **options}
    return next(iter(openvino.Core().compile_model(program, "CPU", options)([given]).values()))


OPENVINO = ("rows", "product", "product with the transpose", "along the outputs")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", (8, 4, 3))
@pytest.mark.parametrize("read", OPENVINO)
def test_what_reads_a_weight_in_openvino(read, bits, width, tmp_path):
    module = linear(width, bits)
    program, given = openvino_graph(read, module.weight.detach().numpy())
    expected, grids = run_openvino(program, given), Grids(nn.Sequential(module))
    pack_openvino(program, grids)
    openvino.save_model(program, tmp_path / "read.xml", compress_to_fp16=False)
    assert_close(run_openvino(openvino.Core().read_model(tmp_path / "read.xml"), given), expected)
    packed = next(on_grid(nn.Sequential(module)))[2]
    packed = GridWeights(packed.codes, packed.scales, max(bits, 4)).num_bytes
    if read == "along the outputs":
        assert "in floating point" in [*grids.notes()][1]
    else:
        assert (tmp_path / "read.bin").stat().st_size <= packed + 100
        assert ["1 of 1" in note for note in grids.notes()] == [True]


def test_openvino_keeps_whole_blocks_packed_in_memory():
    """Of other weights it makes floating-point numbers: filling up the states instead takes time at every call."""
    for width, kind in zip(WIDTHS, ("i4", "f32"), strict=True):
        module = linear(width, 4)
        program, _ = openvino_graph("product", module.weight.detach().numpy())
        pack_openvino(program, Grids(nn.Sequential(module)))
        compiled = openvino.Core().compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        operators = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
        found = [each["runtimePrecision"].value for each in operators if each["layerType"].value == "FullyConnected"]
        assert found == [kind]


SOME = ("bert", *slow("gpt2", "llama", "marian", "t5", "albert", "qwen3", "vit", "clip", "whisper"))


SOME_IN_INTEGERS = ("bert", "gpt2", "llama", "marian", "t5", "albert", "vit")
FOLDED = {"clip": "vision_model.", "whisper": "encoder."}  # every input has all positions: nothing is looked up


def small(name):
    """A compressed model with weights of several bits."""
    model = FAMILIES[name].build().eval()
    compress(model, batches_of(FAMILIES[name], 4), 0.15, bits=(8, 4, 3), refine_steps=0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("to", ("onnx", "openvino"))
@pytest.mark.parametrize("name", SOME)
def test_models_with_weights_on_grids(name, to, tmp_path):
    model = small(name)
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing in (None, 1)
    names = [each for each, _, _ in on_grid(model)]
    absent = [each for each in names if name in FOLDED and FOLDED[name] in each and "position" in each]
    assert f"{len(names) - len(absent)} of {len(names)} weights on grids are packed: " in str(report)
    assert [note.partition(": ")[2] for note in report.notes[1:]] == absent
    if name in ("vit", "clip", "whisper"):
        return
    served = load_exported(tmp_path / "served", threads=1)
    if model.can_generate():
        assert_same_tokens(model, served, text_batch(3, 9, left=not model.config.is_encoder_decoder))
    else:
        assert_same_outputs(model, served, text_batch(3, 17))


@pytest.mark.slow
@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("name", SOME_IN_INTEGERS)
def test_models_in_integers(name, to, tmp_path):
    """Compressed models, some of whose weights lie on grids."""
    report = export(small(name), tmp_path / "served", to, int8=True)
    assert report.int8 and report.difference < 0.3
    assert any("packed" in note for note in report.notes)
    assert load_exported(tmp_path / "served", threads=1) is not None


def large_enough(bits):
    """A BERT beside whose weights the graph counts little, on one grid."""
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 200, "num_hidden_layers": 2}
    model = BertModel(BertConfig(vocab_size=3000, max_position_embeddings=64, **sizes)).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            put_on_grid(module, bits)
            module.weight.data = nearest_on_grid(torch.randn_like(module.weight) / 8, bits).weight()
    return model


@pytest.mark.parametrize("to, bits", slow(("onnx", 4), ("onnx", 3), ("openvino", 4)))
def test_weights_take_as_much_as_in_a_checkpoint(to, bits, tmp_path):
    model = large_enough(bits)
    report = export(model, tmp_path / "served", to)
    files = {path.suffix: path.stat().st_size for path in (tmp_path / "served").iterdir()}
    weights = files[".data"] if to == "onnx" else files[".bin"]
    assert report.difference <= ENGINE_NOISE and weights <= 1.01 * num_bytes(model) + 5000
    assert abs(1e6 * report.megabytes - sum(files.values())) < 2000  # the manifest comes last


@pytest.mark.slow
@pytest.mark.parametrize("to", ENGINES)
def test_a_large_tied_table_is_stored_once(to, tmp_path):
    """The exporter to ONNX transposes it in the graph, and not a small one."""
    sizes = {"n_embd": 96, "n_layer": 1, "n_head": 4, "vocab_size": 3000, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).eval()
    put_on_grid(model.lm_head, 4)
    report = export(model, tmp_path / "served", to)
    weights = next(path for path in (tmp_path / "served").iterdir() if path.suffix in (".data", ".bin"))
    assert report.agreeing == 1 and report.notes == ("1 of 1 weights on grids are packed: 1 of 4 bits",)
    assert weights.stat().st_size <= 1.01 * num_bytes(model) + 2000


def rounded_states(states):
    """States as graphs for ONNX Runtime round them: each token to 127 steps on either side of 0."""
    sizes = np.maximum(abs(states).max(-1, keepdims=True), np.float32(1e-30))
    return np.round(states / sizes * 127) * np.float32(1 / 127) * sizes


PRODUCTS = ("product", "product with a bias", "product with the transpose", "product with what is transposed there")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("read", PRODUCTS)
@pytest.mark.parametrize("is_on_grid", [True, False])
def test_products_of_integers_in_onnx(is_on_grid, read, width):
    """The weights are those of the grid; only states are rounded, and weights that lie on none."""
    module = linear(width, 8)
    if not is_on_grid:
        module.weight.data = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2))
        del module.collab_weight_bits
    program, given = onnx_graph(read, module.weight.detach().numpy())
    grids = Grids(nn.Sequential(module), 8)
    pack_onnx(program, grids)
    weight = (module.weight.detach() if is_on_grid else nearest_on_grid(module.weight.detach(), 8).weight()).numpy()
    assert_close(run_onnx(program, given), rounded_states(given) @ weight.T + BIAS * ("b" in READS[read][2]))
    packed, rounded = "1 of 1 weights on grids are packed: 1 of 8 bits", "weights rounded to 8 bits: 1"
    assert [*grids.notes()] == [packed if is_on_grid else rounded]
    assert "MatMulIntegerToFloat" in {node.op_type for node in program.graph}


@pytest.mark.parametrize(
    ("text", "expected"), (("flags : fpu avx2", True), ("flags : avx512f avx512_vnni", False), ("avx_vnni", False))
)
def test_exact_sums_are_asked_for_where_others_overflow(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_engines, "PROCESSORS", tmp_path / "cpuinfo")
    assert graph_engines.sums_overflow()  # nothing is known
    (tmp_path / "cpuinfo").write_text(text)
    options, (name, value) = GRAPHS["onnx"].options(1)["session_options"], graph_engines.EXACT
    if expected:
        assert options.get_session_config_entry(name) == value
    else:
        with pytest.raises(RuntimeError, match=name):
            options.get_session_config_entry(name)


def test_products_of_integers_do_not_overflow():
    """Processors without VNNI add the products of two inputs in 16 bits, unless the engine is told to be exact."""
    weight = torch.full((ROWS, 64), 127 / 128)  # the scale is a number of half precision
    program, _ = onnx_graph("product", weight.numpy())
    pack_onnx(program, Grids(nn.Sequential(nn.Linear(64, ROWS)), 8))
    given = np.ones((2, 3, 64), dtype=np.float32)
    assert_close(run_onnx(program, given), given @ weight.numpy().T)


def test_products_of_one_weight_in_integers():
    """Layers that share their weights read them several times; without VNNI the engine loads no graph that does."""
    module = nn.Linear(64, 64)
    put_on_grid(module, 8)
    names = ("x", "y", "z", "w")
    x, *_, w = map(onnx.helper.make_tensor_value_info, names, [onnx.TensorProto.FLOAT] * 4, [["a", 64]] + [None] * 3)
    nodes = [onnx.helper.make_node("MatMul", [name, "T"], [after]) for name, after in pairwise(names)]
    weight = module.weight.detach().numpy()
    stored = [onnx.numpy_helper.from_array(weight.T.copy(), "T")]
    graph = onnx.helper.make_graph(nodes, "shared", [x], [w], stored)
    imports = [onnx.helper.make_opsetid("", 18)]
    program = ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))
    pack_onnx(program, Grids(nn.Sequential(module), 8))
    assert [tuple(each.shape) for each in program.graph.initializers.values()].count((64, 64)) == 1
    given = expected = states(64, 5)
    for _ in nodes:
        expected = rounded_states(expected) @ weight.T
    assert_close(run_onnx(program, given), expected)


@pytest.mark.parametrize("read", PRODUCTS)
def test_each_token_is_rounded_over_a_range_of_its_own(read):
    """One is a thousand times as large as the others, which are not rounded to nothing beside it; one is zero."""
    module = linear(64, 8)
    program, given = onnx_graph(read, module.weight.detach().numpy())
    given[..., 0, :], given[..., 1, :] = 1000 * given[..., 0, :], 0
    pack_onnx(program, Grids(nn.Sequential(module), 8))
    expected = rounded_states(given) @ module.weight.detach().numpy().T + BIAS * ("b" in READS[read][2])
    found = run_onnx(program, given)
    for token in range(given.shape[-2]):
        assert_close(found[..., token, :], expected[..., token, :])
        assert_close(run_onnx(program, given[..., token : token + 1, :]), found[..., token : token + 1, :])
    exact = given @ module.weight.detach().numpy().T + BIAS * ("b" in READS[read][2])
    assert abs(found - exact)[..., 2:, :].max() < 0.02 * abs(exact)[..., 2:, :].max()


@pytest.mark.slow
def test_outputs_in_integers_do_not_depend_on_the_texts_beside(tmp_path):
    model = FAMILIES["bert"].build().eval()
    export(model, tmp_path / "served", int8=True)
    served, batch = load_exported(tmp_path / "served", threads=1), text_batch(4, 17)
    together = served(**batch)[0]
    for row, found in enumerate(together):
        mask = batch["attention_mask"][row].bool()
        alone = served(**{name: each[row : row + 1, mask] for name, each in batch.items()})[0][0]
        torch.testing.assert_close(alone, found, rtol=0, atol=ALONE * float(found.abs().max()))


def test_a_bias_that_is_added_to_a_product_of_few_bits_joins_it():
    module = linear(64, 4)
    names, kinds = ("x", "y", "z"), [onnx.TensorProto.FLOAT] * 3
    x, y, z = map(onnx.helper.make_tensor_value_info, names, kinds, [["a", 64], None, None])
    for outputs, is_joined in (([y], True), ([y, z], False)):  # where the product itself is an output, it stays
        nodes = [onnx.helper.make_node("MatMul", ["x", "T"], ["z"]), onnx.helper.make_node("Add", ["b", "z"], ["y"])]
        tensors = {"T": module.weight.detach().numpy().T.copy(), "b": BIAS}
        stored = [onnx.numpy_helper.from_array(each, name) for name, each in tensors.items()]
        graph = onnx.helper.make_graph(nodes, "linear", [x], outputs, stored)
        imports = [onnx.helper.make_opsetid("", 18)]
        program = ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))
        pack_onnx(program, Grids(nn.Sequential(module)))
        assert ("Add" in {node.op_type for node in program.graph}) != is_joined
        given = states(64, 5)
        assert_close(run_onnx(program, given), given @ tensors["T"] + BIAS)


def test_rows_in_integers_and_what_stays():
    """Tables are rounded by rows; what is narrow, or read otherwise, stays as it is."""
    weight = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2))
    for read, stays in (("rows", False), ("half of the product", True)):
        program, given = onnx_graph(read, weight.numpy())
        expected, grids = run_onnx(program, given), Grids(nn.Sequential(), 8)
        pack_onnx(program, grids)
        found = run_onnx(program, given)
        assert [*grids.notes()] == [] if stays else ["weights rounded to 8 bits: 1"]
        assert_close(found, expected if stays else nearest_on_grid(weight, 8).weight().numpy()[given])
    narrow, given = onnx_graph("product", weight[:, :20].numpy().copy())
    pack_onnx(narrow, Grids(nn.Sequential(), 8))
    assert {node.op_type for node in narrow.graph} == {"MatMul"}


def test_integers_in_openvino():
    """Weights are those of the grid; whether states are rounded, the engine decides for the processor."""
    weight = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2))
    for read in OPENVINO:
        program, given = openvino_graph(read, weight.numpy())
        grids = Grids(nn.Sequential(), 8)
        pack_openvino(program, grids)
        assert [*grids.notes()] == ["weights rounded to 8 bits: 1"]
        assert not program.has_rt_info(["runtime_options", DYNAMIC_QUANTISATION])
        way = weight.mT if read == "along the outputs" else weight  # outputs by inputs
        on_grid = nearest_on_grid(way, 8).weight()
        on_grid = (on_grid.mT if read == "along the outputs" else on_grid).numpy()
        expected, _ = openvino_graph(read, np.ascontiguousarray(on_grid))
        as_it_is = {DYNAMIC_QUANTISATION: 0}
        assert_close(run_openvino(program, given, **as_it_is), run_openvino(expected, given, **as_it_is))


@pytest.mark.parametrize("to, bits", [("onnx", 8), *slow(("onnx", 4), ("openvino", 8), ("openvino", 4))])
def test_a_model_in_integers(bits, to, tmp_path):
    """Weights on grids keep their bits, the others get eight."""
    model = large_enough(bits)
    module = model.encoder.layer[0].intermediate.dense
    del module.collab_weight_bits
    report = export(model, tmp_path / "served", to, int8=True)
    assert report.notes[0] == "weights rounded to 8 bits: 1" and "packed: " in report.notes[1]
    assert report.difference < 0.1
    files = {path.suffix: path.stat().st_size for path in (tmp_path / "served").iterdir()}
    weights = files[".data"] if to == "onnx" else files[".bin"]
    assert weights <= 1.01 * (num_bytes(model) - 3 * module.weight.numel()) + 5000


def test_half_precision_is_refused_in_integers(tmp_path):
    model = FAMILIES["bert"].build().eval().to(torch.bfloat16)
    for to in ENGINES:
        with pytest.raises(ArgumentError, match=r"int8=True: the model has weights in torch\.bfloat16; load it with "):
            export(model, tmp_path / "served", to, int8=True)
    assert not list(tmp_path.iterdir())


def test_states_stay_in_floating_point_wherever_the_graph_loads(tmp_path):
    """OpenVINO would round them to eight bits on many processors; who wants that asks for it."""
    module = linear(64, 4)
    program, _ = openvino_graph("product", module.weight.detach().numpy())
    pack_openvino(program, Grids(nn.Sequential(module)))
    openvino.save_model(program, tmp_path / "read.xml", compress_to_fp16=False)
    for options, size in (({}, 0), ({DYNAMIC_QUANTISATION: 32}, 32)):
        compiled = openvino.Core().compile_model(tmp_path / "read.xml", "CPU", options)
        assert compiled.get_property(DYNAMIC_QUANTISATION) == size


@pytest.mark.parametrize("version, domains", [("1.22.1", {""}), ("1.23.0", {DOMAIN}), ("2.0.0", {DOMAIN})])
def test_an_older_onnx_runtime_gets_floating_point_numbers(version, domains, monkeypatch):
    module = linear(64, 4)
    program, _ = onnx_graph("product", module.weight.detach().numpy())
    grids = Grids(nn.Sequential(module))
    monkeypatch.setattr(ort, "__version__", version)
    pack_onnx(program, grids)
    assert {node.domain for node in program.graph if node.op_type.startswith("MatMul")} == domains
    if domains == {""}:
        assert [*grids.notes()] == [
            "0 of 1 weights on grids are packed",
            "in floating point, as the installed engine has no operator for what reads them: 0",
        ]


def test_notes_name_what_is_not_packed():
    model = nn.Sequential(linear(64, 4), linear(64, 4), linear(37, 3))
    with torch.no_grad():
        model[1].weight.mul_(1.0001)
    program, _ = onnx_graph("product", model[2].weight.detach().numpy())
    grids = Grids(model.append(copy.deepcopy(model[2])))  # equal weights count once
    pack_onnx(program, grids)
    assert [*grids.notes()] == [
        "1 of 2 weights on grids are packed: 1 of 3 bits, which the engine reads as 4",
        "left out or changed by the exporter: 0",
        "in floating point, as they have left their grids: 1",
    ]
