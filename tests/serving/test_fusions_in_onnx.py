"""Exported graphs run without the operators that ONNX Runtime makes of an addition and what follows it."""

import pytest
import torch
from served_outputs import assert_same_outputs, text_batch

from collab_heads import export, load_exported
from families import FAMILIES

pytestmark = pytest.mark.slow

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

FUSED = {"SkipLayerNormalization", "BiasGelu"}


def operators(path):
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


def run_as(path, folder):
    """Return the operators that the engine runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "run.onnx")
    ort.InferenceSession(str(path), options)
    return operators(folder / "run.onnx")


@pytest.mark.parametrize("int8", [False, True])
def test_additions_stay_apart(int8, tmp_path):
    """Before the normalisations of residuals, and before activations; also after products of integers."""
    model = FAMILIES["bert"].build().eval()
    export(model, tmp_path / "served", int8=int8)
    run = run_as(tmp_path / "served" / "model.onnx", tmp_path)
    assert "Sum" in run and not run & FUSED, run
    if not int8:
        assert_same_outputs(model, load_exported(tmp_path / "served"), text_batch(3, 17))


def test_the_engine_would_fuse_them(tmp_path, monkeypatch):
    """Else nothing needs to be kept apart."""
    monkeypatch.setattr("collab_heads.serving.for_graphs.keep_additions_apart", lambda program: None)
    export(FAMILIES["bert"].build().eval(), tmp_path / "served")
    assert run_as(tmp_path / "served" / "model.onnx", tmp_path) >= FUSED


def test_additions_of_other_types_stay(tmp_path):
    """ONNX Runtime has sums of float32 only."""
    export(FAMILIES["bert"].build().eval().to(torch.float16), tmp_path / "served")
    assert "Sum" not in operators(tmp_path / "served" / "model.onnx")
