"""Two graphs read the weights that they have in common from one file."""

import numpy as np
import pytest
from transformers import BertConfig, BertModel

from collab_heads import export
from collab_heads.errors import UnsupportedModelError
from collab_heads.serving import for_graphs
from collab_heads.serving.for_graphs import LEAST, share_weights

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
SIDE = 64
assert 4 * SIDE * SIDE > LEAST


def write(folder, name, weights):
    """A graph that multiplies its input by every weight in turn."""
    steps, last = [], "x"
    for number in range(len(weights)):
        steps.append(onnx.helper.make_node("MatMul", [last, f"w{number}"], [f"y{number}"]))
        last = f"y{number}"
    kind, shape = onnx.TensorProto.FLOAT, ["rows", SIDE]
    ends = [onnx.helper.make_tensor_value_info(each, kind, shape) for each in ("x", last)]
    stored = [onnx.numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)]
    graph = onnx.helper.make_graph(steps, name, ends[:1], ends[1:], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    data = {"save_as_external_data": True, "location": f"{name}.onnx.data", "size_threshold": 0}
    onnx.save(model, str(folder / f"{name}.onnx"), **data)


def run(folder, name, x):
    return ort.InferenceSession(str(folder / f"{name}.onnx")).run(None, {"x": x})[0]


def test_common_weights_are_stored_once(tmp_path):
    generator = np.random.default_rng(0)
    common, own, other = (generator.standard_normal((SIDE, SIDE)).astype(np.float32) / 8 for _ in range(3))
    write(tmp_path, "first", [other, common])
    write(tmp_path, "second", [common, own, common + 1])
    x = generator.standard_normal((3, SIDE)).astype(np.float32)
    before = [run(tmp_path, name, x) for name in ("first", "second")]
    stays = (tmp_path / "first.onnx.data").read_bytes()
    share_weights(tmp_path, "first", "second")
    assert all((run(tmp_path, name, x) == old).all() for name, old in zip(("first", "second"), before, strict=True))
    assert (tmp_path / "first.onnx.data").read_bytes() == stays
    assert (tmp_path / "second.onnx.data").stat().st_size == 2 * own.nbytes
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_a_graph_that_the_engine_cannot_load_is_not_called_damaged(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(for_graphs, "check_dtypes", lambda *given: None)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = BertModel(BertConfig(**sizes)).eval().bfloat16()
    with pytest.raises(UnsupportedModelError, match=r"onnx fails on BertModel, .*NOT_IMPLEMENTED"):
        export(model, tmp_path / "served", to="onnx")
    assert not [*tmp_path.iterdir()]


def test_graphs_without_common_weights_stay_as_they_are(tmp_path):
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(2)]
    for name, weight in zip(("first", "second"), weights, strict=True):
        write(tmp_path, name, [weight])
    share_weights(tmp_path, "first", "second")
    x = np.eye(SIDE, dtype=np.float32)
    np.testing.assert_array_equal(run(tmp_path, "second", x), weights[1])
    assert (tmp_path / "second.onnx.data").stat().st_size == weights[1].nbytes
