"""Store the weights of a decoder as llama.cpp's own quantiser does, by how large what they read is, and run it there.

It needs the packages llama-cpp-python and gguf.
"""

import ctypes
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from collab_heads import export


class InLlama:
    """A decoder in llama.cpp that is called as one of transformers is, for its loss.

    Args:
        file: of the model.
        parameters: how many it has.
        tokens: the most tokens of a text.
    """

    def __init__(self, file: Path, parameters: int, tokens: int):
        import llama_cpp

        sizes = {"n_ctx": tokens, "n_batch": tokens, "n_threads": 1, "n_threads_batch": 1}
        self.engine, self.parameters = llama_cpp.Llama(str(file), logits_all=True, verbose=False, **sizes), parameters

    def num_parameters(self) -> int:
        return self.parameters

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        """Return the mean loss of texts of one length, of which the labels are the tokens."""
        losses = []
        for row in input_ids:
            self.engine.reset()
            self.engine.eval(row.tolist())
            scores = torch.from_numpy(self.engine.scores[: len(row) - 1])
            losses.append(cross_entropy(scores, row[1:]))
        return SimpleNamespace(loss=torch.stack(losses).mean())


@torch.no_grad()
def importance(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean square of what every linear layer reads, by its name: [width]."""
    names = {each: name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    sums: dict[str, Tensor] = {}
    count = 0

    def add(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares = args[0].double().square().flatten(0, -2).sum(0)
        sums[names[layer]] = sums.get(names[layer], torch.zeros_like(squares)) + squares

    handles = [layer.register_forward_pre_hook(add) for layer in names]
    for batch in batches:
        model(**batch, use_cache=False)
        count += batch["input_ids"].numel()
    for handle in handles:
        handle.remove()
    return {name: (each / count).float() for name, each in sums.items()}


def quantised(source: Path, target: Path, kind: str, weights: Mapping[str, Tensor]) -> None:
    """Quantise a file as llama.cpp does.

    Args:
        source: the file, in float16 or float32.
        target: the new file.
        kind: the type, as `Q4_K_M`.
        weights: how much each column of a tensor counts, by the name of the tensor in the file.
    """
    import llama_cpp
    from llama_cpp import llama_cpp as library

    each, kept = library.llama_model_imatrix_data, []
    entries = (each * (len(weights) + 1))()  # the last one is empty: the end
    for entry, (name, values) in zip(entries, weights.items(), strict=False):
        data = (ctypes.c_float * len(values))(*values.tolist())
        kept.append(data)
        entry.name, entry.data, entry.size = name.encode(), data, len(values)
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.ftype = 1, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.imatrix = ctypes.cast(entries, ctypes.POINTER(each))
    if failed := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama_model_quantize returned {failed}")


def in_type(
    model: PreTrainedModel, tokenizer: Any, batches: Iterable[Mapping[str, Tensor]], kind: str, tokens: int
) -> tuple[InLlama, float]:
    """Return a model with its weights in a type of llama.cpp, and the bytes of its tensors.

    Args:
        model: the model in float32.
        tokenizer: its tokenizer.
        batches: what the importance matrix is made of.
        kind: the type, as `Q4_K_M`.
        tokens: the most tokens of a text.
    """
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    weights = {}
    for name, values in importance(model, batches).items():
        if (found := names.get_name(name)) is not None:
            weights[f"{found}.weight"] = values
    with TemporaryDirectory() as place, suppress(PermissionError):
        folder = Path(place)
        export(model, folder / "float", to="gguf", tokenizer=tokenizer)
        target = folder / "model.gguf"
        quantised(folder / "float" / "model.gguf", target, kind, weights)
        size = sum(int(each.n_bytes) for each in gguf.GGUFReader(target).tensors)
        served = InLlama(target, model.num_parameters(), tokens)  # it maps the file, which may go
    return served, size
