"""Changed models leave Python: exported for any batch and length, as ONNX, and with weights in eight bits."""

import functools

import pytest
import torch
from closing import change_heads, mix
from torch.export import Dim

from families import FAMILIES, FP32_NOISE, NARROW, VOCABULARY, WITH_VALUES, swap

ONNX_NOISE = 1e-4  # float32 in another runtime; differences seen: 2e-5 and below
CHANGES = {
    "shared": lambda model: swap(model, "shared", NARROW["shared"]),
    "per_head": lambda model: swap(model, "per_head", NARROW["per_head"]),
    **{kind: functools.partial(swap, kind=kind, dim=NARROW[kind]) for kind in WITH_VALUES},
    "gated": lambda model: change_heads(model, "gated"),
    "alpha": mix,
    "pruned, one layer empty": lambda model: change_heads(model, "pruned"),
    "everything": lambda model: (swap(model, "shared", NARROW["shared"]), change_heads(model, "both"), mix(model)),
}
each_change = pytest.mark.parametrize("change", CHANGES)


def model_and_inputs(change, name="bert"):
    model = FAMILIES[name].build()
    CHANGES[change](model)
    return model.eval(), FAMILIES[name].inputs()


def other_inputs(batch, length):
    """Of another shape, padded."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator), "attention_mask": mask}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs)[0]


def dynamic_shapes(inputs):
    """Any batch, any length, the same for all inputs."""
    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=64)}
    return dict.fromkeys(inputs, sizes)


# from fewer tokens than the model is wide to many times that: the cheaper way through alphas differs
SHAPES = ((1, 2), (2, 5), (4, 40))


@pytest.mark.slow
@pytest.mark.parametrize("strict", (False, True))
@each_change
def test_export(change, strict):
    model, inputs = model_and_inputs(change)
    exported = torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes(inputs), strict=strict).module()
    for shape in SHAPES:
        given = other_inputs(*shape)
        torch.testing.assert_close(logits(exported, given), logits(model, given), rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
@each_change
def test_onnx(change, tmp_path):
    """Through the dynamo exporter, run by onnxruntime."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    model, inputs = model_and_inputs(change)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (), str(file), kwargs=inputs, dynamic_shapes=dynamic_shapes(inputs), dynamo=True)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for shape in SHAPES:
        given = other_inputs(*shape)
        (result,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        torch.testing.assert_close(torch.from_numpy(result), logits(model, given), rtol=0, atol=ONNX_NOISE)


INT8_LOSS = 0.4  # of logits between -2.5 and 2.5; differences seen: 0.22 and below, 0.11 for the stock model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@each_change
def test_int8(change):
    """Weights in eight bits: what is a Linear loses little, what is not stays as it is."""
    from torch.ao.quantization import quantize_dynamic

    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no engine for quantised operations")
    model, _ = model_and_inputs(change)
    quantised = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    linears = [m for m in quantised.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(linears) == sum(type(module) is torch.nn.Linear for module in model.modules())
    for shape in SHAPES:
        expected = logits(model, other_inputs(*shape))
        assert 0 < (logits(quantised, other_inputs(*shape)) - expected).abs().max() < INT8_LOSS
