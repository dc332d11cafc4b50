"""Quantise a sentence encoder with ONNX Runtime or NNCF, as they ship, and run it in their engine, on one thread.

The graph is that of `collab_heads.export`. Megabytes (10^6 bytes) are those of all weights in the file that is written,
with scales and zero points: the tensors of the ONNX file, with their names, or OpenVINO's file of weights. Engines
compute as they do by default, except that OpenVINO keeps float32 for what is not quantised: it rounds the inputs of
compressed products to eight bits, in groups of 32. ONNX Runtime does so for int8, and in four bits where it is asked.

- `to_int8`: dynamic quantisation, of all weights, with one scale for a matrix, or for each of its columns.
- `to_4_bits`: `MatMulNBitsQuantizer` in blocks of 32, which keeps the pooler (0.6 MB of all-MiniLM-L6-v2) and scales
  in float32, and rounds embeddings in any case. Of its methods, GPTQ alone takes data, and does what rounding does: it
  spreads errors by the lower triangle of an upper triangular matrix, which is zero (1.31.1, `gptq` in
  `neural_compressor/weight_only.py`). So it has no row.
- `nncf_bits`: weights of eight bits, or of four in groups of 32, the embeddings, too (`all_layers=True`). Its AWQ finds
  nothing to scale in a BERT, and changes nothing. GPTQ with scale estimation does less than GPTQ alone: no row, either.
- `nncf_mixed`: the smallest share of four bits at which the weights take no more than a size. The other matrices have
  eight, by the error of their weights, which needs no data.

NNCF does not know which tokens are padding, so it gets sentences without any: for GPTQ, which sums over tokens, in
batches of one length each; for scale estimation, which takes the mean of a batch, one by one.
"""

import bisect
import functools
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab_heads import export, load_exported
from collab_heads.errors import ArgumentError

BLOCK = 32
GRAPHS = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
PLACES = 1000  # steps of a share


def of_one_length(batches: Iterable[Mapping[str, Tensor]], count: int) -> list[dict[str, Any]]:
    """Return the texts of batches in batches without padding, as NumPy arrays [count or fewer, length]."""
    rows = defaultdict(list)
    for batch in batches:
        for index, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            rows[length].append({name: tensor[index, :length] for name, tensor in batch.items()})
    together = [same[start : start + count] for same in rows.values() for start in range(0, len(same), count)]
    return [{name: torch.stack([row[name] for row in some]).numpy() for name in some[0]} for some in together]


@functools.cache
def exported(encoder: Any, engine: str) -> tempfile.TemporaryDirectory:
    """Export the original, once."""
    place = tempfile.TemporaryDirectory()
    example = {name: tensor[:4] for name, tensor in encoder.task.batches[0].items()}
    export(encoder.load(), place.name, engine, batches=[example])
    return place


def served(encoder: Any, engine: str, quantise: Callable[[Path, Path], float]) -> tuple[Any, dict[str, float]]:
    """Quantise the graph of the original, and load it in its engine.

    Args:
        encoder: has the original.
        engine: "onnx" or "openvino".
        quantise: reads a graph at the first path, writes another one to the second, and returns its megabytes.

    Returns:
        The model in its engine, and the megabytes of its weights with the processor seconds of the quantisation.
    """
    original, graph = Path(exported(encoder, engine).name), GRAPHS[engine]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "served"
        shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.onnx*", "*.xml", "*.bin"))
        started = time.process_time()
        megabytes = quantise(original / graph, folder / graph)
        seconds = time.process_time() - started
        return load_exported(folder, threads=1, check=False), {"MB": megabytes, "seconds": seconds}


def written(path: Path) -> float:
    """Return the megabytes of the weights of an ONNX file."""
    import onnx

    return sum(tensor.ByteSize() for tensor in onnx.load(path).graph.initializer) / 1e6


def to_int8(source: Path, target: Path, *, by_column: bool) -> float:
    """Quantise a graph dynamically with ONNX Runtime, and return the megabytes of its weights."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target, per_channel=by_column)
    return written(target)


def to_4_bits(source: Path, target: Path, *, method: str = "Default", **options: Any) -> float:
    """Quantise a graph with ONNX Runtime: embeddings by rounding, products by "Default", which rounds, too, or "HQQ".

    Returns:
        The megabytes of its weights.
    """
    import onnx

    logging.basicConfig(level=logging.WARNING)  # before the import, which sets it to INFO
    from onnxruntime.quantization import matmul_nbits_quantizer as quantizers

    embeddings = quantizers.DefaultWeightOnlyQuantConfig(block_size=BLOCK, op_types_to_quantize=("Gather",))
    products = getattr(quantizers, f"{method}WeightOnlyQuantConfig")(block_size=BLOCK, **options)
    model = onnx.load(source)
    for config in (embeddings, products):
        quantizer = quantizers.MatMulNBitsQuantizer(model, algo_config=config)
        quantizer.process()
        model = quantizer.model.model
    onnx.save(model, target)
    return written(target)


def in_onnx(draw: Any, size: float, *, quantise: Callable[..., float], **options: Any) -> tuple[Any, dict[str, float]]:
    """Quantise the graph of the original, and run it in ONNX Runtime.

    Args:
        draw: has the original.
        size: is not used.
        quantise: `to_int8` or `to_4_bits`.
        options: of that.
    """
    return served(draw.encoder, "onnx", functools.partial(quantise, **options))


def compressed(source: Path, **options: Any) -> Any:
    """Compress the weights of a graph with NNCF."""
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    if options["mode"] is nncf.CompressWeightsMode.INT4_SYM:
        options |= {"group_size": BLOCK, "all_layers": True}
    return nncf.compress_weights(openvino.Core().read_model(source), **options)


def save(model: Any, target: Path) -> float:
    """Write a graph of OpenVINO, and return the megabytes of its weights."""
    import openvino

    openvino.save_model(model, target, compress_to_fp16=False)
    return target.with_suffix(".bin").stat().st_size / 1e6


def nncf_bits(draw: Any, size: float, *, mode: str, data: str = "", count: int = 1) -> tuple[Any, dict[str, float]]:
    """Compress all weights with NNCF to one number of bits, without data or with an option that takes it.

    Args:
        draw: has the original, and the sentences.
        size: is not used.
        mode: of NNCF.
        data: the option; empty for none.
        count: how many sentences it takes together.
    """
    import nncf

    options = {"mode": nncf.CompressWeightsMode[mode]}
    if data:
        batches = of_one_length(draw.batches, count)
        options |= {data: True, "dataset": nncf.Dataset(batches), "subset_size": len(batches)}
    return served(draw.encoder, "openvino", lambda source, target: save(compressed(source, **options), target))


def nncf_mixed(draw: Any, size: float) -> tuple[Any, dict[str, float]]:
    """Compress weights with NNCF to four and eight bits, to a size in megabytes.

    Raises:
        ArgumentError: if four bits everywhere exceed the size.
    """
    import nncf

    def quantise(source: Path, target: Path) -> float:
        def excess(place: int) -> float:
            model = compressed(source, mode=nncf.CompressWeightsMode.INT4_SYM, ratio=place / PLACES)
            return size - save(model, target)

        place = bisect.bisect_left(range(PLACES + 1), 0, key=excess)  # more of four bits, fewer bytes
        if place > PLACES:
            raise ArgumentError(f"four bits everywhere exceed {size} MB")
        return size - excess(place)

    return served(draw.encoder, "openvino", quantise)


def in_float(draw: Any, size: float, *, engine: str) -> tuple[Any, dict[str, float]]:
    """Run the original in an engine."""

    def quantise(source: Path, target: Path) -> float:
        if engine == "onnx":
            import onnx

            onnx.save(onnx.load(source), target)
            return written(target)
        import openvino

        return save(openvino.Core().read_model(source), target)

    return served(draw.encoder, engine, quantise)


PEERS: dict[str, Callable[[Any, Any], tuple[Any, dict[str, float]]]] = {
    "ONNX Runtime": functools.partial(in_float, engine="onnx"),
    "ONNX Runtime, int8": functools.partial(in_onnx, quantise=to_int8, by_column=False),
    "ONNX Runtime, int8, by column": functools.partial(in_onnx, quantise=to_int8, by_column=True),
    "ONNX Runtime, 4 bits": functools.partial(in_onnx, quantise=to_4_bits),
    "ONNX Runtime, 4 bits, int8 inputs": functools.partial(in_onnx, quantise=to_4_bits, accuracy_level=4),
    "ONNX Runtime, 4 bits, HQQ": functools.partial(in_onnx, quantise=to_4_bits, method="HQQ"),
    "OpenVINO": functools.partial(in_float, engine="openvino"),
    "NNCF, 8 bits": functools.partial(nncf_bits, mode="INT8_ASYM"),
    "NNCF, 4 bits": functools.partial(nncf_bits, mode="INT4_SYM"),
    "NNCF, 4 bits, scale estimation": functools.partial(nncf_bits, mode="INT4_SYM", data="scale_estimation"),
    "NNCF, 4 bits, GPTQ": functools.partial(nncf_bits, mode="INT4_SYM", data="gptq", count=32),
    "NNCF, 4 and 8 bits": nncf_mixed,
}
WITH_DATA = ("NNCF, 4 bits, scale estimation", "NNCF, 4 bits, GPTQ")
WITH_SIZE = ("NNCF, 4 and 8 bits",)
