"""Store the weights that two ONNX graphs of a model have in common once, in the file of one of them."""

import hashlib
import os
from pathlib import Path
from typing import Any

PAGE = 4096  # bytes, at whose multiples weights begin, so that an engine can map them into memory
LEAST = 4096  # bytes of a weight that is shared: less than that is filled up to a page


def share_weights(folder: Path, first: str, second: str) -> None:
    """Let one graph read the weights that both have from the file of the other; its own file loses them.

    Args:
        folder: of the graphs, `NAME.onnx` with the weights in `NAME.onnx.data`.
        first: the graph whose file stays as it is.
        second: the graph whose files are written again.
    """
    import onnx

    places, path = {}, folder / f"{second}.onnx"
    for tensor, content in weights_in(onnx.load(str(folder / f"{first}.onnx"), load_external_data=False), folder):
        if len(content) >= LEAST:
            places[digest(tensor, content)] = entries(tensor)
    model = onnx.load(str(path), load_external_data=False)
    written = folder / f"{second}.onnx.data.new"
    with written.open("wb") as file:
        for tensor, content in weights_in(model, folder):
            place = places.get(digest(tensor, content))
            if place is None:
                file.write(b"\0" * (-file.tell() % (PAGE if len(content) >= LEAST else 1)))
                place = {"location": f"{second}.onnx.data", "offset": str(file.tell()), "length": str(len(content))}
                file.write(content)
            del tensor.external_data[:]
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
    os.replace(written, folder / f"{second}.onnx.data")
    path.write_bytes(model.SerializeToString())


def weights_in(model: Any, folder: Path) -> list[tuple[Any, bytes]]:
    """Return the weights of a graph that stand in files beside it, with their bytes, by file and place."""
    found = []
    for tensor in model.graph.initializer:
        place = entries(tensor)
        if place:
            with (folder / place["location"]).open("rb") as file:
                file.seek(int(place.get("offset", 0)))
                found.append((tensor, file.read(int(place["length"]))))
    return found


def entries(tensor: Any) -> dict[str, str]:
    """Return where the bytes of a weight stand; nothing if they stand in the graph."""
    return {each.key: each.value for each in tensor.external_data}


def digest(tensor: Any, content: bytes) -> tuple:
    """Return what weights have in common that are the same."""
    return tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).digest()
