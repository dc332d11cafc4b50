"""The target GGUF: a file for llama.cpp, which runs decoders, and encoders of texts.

Its architecture `deci` takes the number of heads, key heads and neurons of every block, and one width for all heads;
the others take one size for all blocks. Weights on grids are written as they are: those of 3 and 4 bits as Q4_0, and
those of 8 bits as Q8_0, where a row repeats its scale in each block. Both have blocks of 32 codes along the input, with
a half-precision scale each.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.progress import progress_bar
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import get_adapter, gguf_form
from collab_heads.errors import ArgumentError, CollabHeadsError, UnsupportedModelError
from collab_heads.files.folders import GGUF
from collab_heads.layers.weight_grid import BLOCK, OF_ROWS, GridWeights, bits_of
from collab_heads.model.open_layers import OpenLayers
from collab_heads.serving.comparison import NEW_TOKENS, Differences, compare_generation, greedy, in_turns
from collab_heads.serving.ctranslate2_engines import without_rules
from collab_heads.serving.example_inputs import rows_of, without_labels
from collab_heads.serving.exported_folder import GENERATION
from collab_heads.serving.gguf_blocks import Block, blocks_of
from collab_heads.serving.gguf_checks import check_sites, form_for
from collab_heads.serving.gguf_engines import Embeds, Greedy
from collab_heads.serving.gguf_file import NORMALIZE
from collab_heads.serving.gguf_tokenizers import add_tokenizer, check_tokenizer, check_tokens, has_template
from collab_heads.serving.sentence_encoder import (
    Normalize,
    SentenceEncoder,
    is_sentence_encoder,
    sentence_encoder,
    write_texts,
)
from collab_heads.serving.target import Target, first_line
from collab_heads.serving.text_reader import EMBEDDING, STATES

logger = logging.getLogger(__name__)
POOLINGS = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}  # as a folder of sentence-transformers says


class Gguf(Target):
    """GGUF, which llama.cpp reads: on processors, GPUs and phones."""

    name, has_int8 = "gguf", True
    tolerance = 0.01  # GELU is its tanh formula, from a table in half precision; seen: 1e-3 in MiniLM, 3e-5 in GPT-2
    int8_tolerance = 0.3  # what weights of few bits multiply is rounded, too; seen: 0.1; another model differs by 1

    def is_int8(self, model, int8):
        return int8 or any(bits_of(module) for module in model.modules())

    def check_installed(self, int8):
        super().check_installed(int8)
        check_extra(self.name, f"exports to {self.name}")

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        form = form_for(model)
        check_sites(OpenLayers.of(model, get_adapter(model)))
        check_encoder(encoder_of(model))
        if tokenizer is not None:
            check_tokenizer(tokenizer, form, model.config.vocab_size)
            if not (form.embeds or has_template(tokenizer)):
                logger.warning(
                    "the tokenizer has no chat template, or several: set tokenizer.chat_template to write one"
                )

    @torch.no_grad()
    def write(self, model, folder, example, *, tokenizer, int8):
        """Write the model and its tokenizer into one file."""
        if "input_ids" not in example:
            raise ArgumentError(f"llama.cpp reads input_ids: the batches hold {', '.join(sorted(example))}")
        layers = OpenLayers.of(model, get_adapter(model))
        form = cast(GgufForm, gguf_form(model.config))
        blocks = list(blocks_of(layers, form))
        notes = [each for block in blocks for each in block.notes]
        if gone := len(layers.attention) - len(blocks):
            notes.append(f"{gone} blocks without heads and neurons are left out")
        if (encoder := encoder_of(model)) is not None:
            write_texts(encoder, folder)
        if model.can_generate():
            cast(Any, model).generation_config.to_json_file(folder / GENERATION)
        return (*notes, *write_file(folder / GGUF, model, form, blocks, tokenizer, int8))

    def load(self, model, folder, tokens=512):
        if not model.can_generate():
            return Embeds(folder / GGUF, tokens)
        ends = model.generation_config.eos_token_id
        return Greedy(folder / GGUF, tokens, torch.tensor([] if ends is None else ends, dtype=torch.long).flatten())

    @torch.no_grad()
    def compare(self, model, folder, batches, tokenizer):
        """Compare, without padding, logits and greedy tokens after every text, or its states or its embedding.

        The tokens into which both cut a text are compared, too.
        """
        inputs, found = [without_labels(batch) for batch in batches], Differences()
        rows = [row for batch in inputs for row in rows_of(batch)]
        try:
            engine = self.load(model, folder, max(row["input_ids"].shape[1] for row in rows) + NEW_TOKENS)
            if tokenizer is not None:
                check_tokens(engine, tokenizer)
            add, *calls = (generating if model.can_generate() else embedding)(model, engine, found)
            for row in progress_bar(rows, desc="comparing"):
                add(row)
            return found.comparison(*in_turns([partial(call, inputs[0]) for call in calls]))
        except CollabHeadsError:
            raise
        except (RuntimeError, ValueError) as error:
            message = f"llama.cpp fails on {type(model).__name__}: {first_line(error)}: use another engine (to=)"
            raise UnsupportedModelError(message) from error


Calls = tuple[Callable[[Mapping], object], ...]


def generating(model: PreTrainedModel, engine: Greedy, found: Differences) -> Calls:
    """Return how a row is compared of two that generate, and how each runs a batch."""
    plain = without_rules(model)

    def add(row: Mapping) -> None:
        compare_generation(found, greedy(plain, row), engine.generate(**row))

    return add, partial(greedy, plain), lambda batch: engine.generate(**batch)


def embedding(model: PreTrainedModel, engine: Embeds, found: Differences) -> Calls:
    """Return how a row is compared of two that put out states, or embeddings, and how each runs a batch.

    llama.cpp pools, and the layers after that are those of PyTorch: see `check_encoder`.
    """
    encoder = encoder_of(model)

    def add(row: Mapping) -> None:
        expected, other = model(**row).last_hidden_state, engine(row["input_ids"][0].tolist())
        if encoder is None:
            found.add(STATES, expected, other)
        else:
            found.add(EMBEDDING, encoder(expected, None), nn.Sequential(*encoder.steps[1:])(other))

    return (
        add,
        lambda batch: model(**batch),
        lambda batch: [engine(row["input_ids"][0].tolist()) for row in rows_of(batch)],
    )


def encoder_of(model: PreTrainedModel) -> SentenceEncoder | None:
    """Return what stands beside the transformer of a sentence encoder; None for any other model."""
    return sentence_encoder(model) if is_sentence_encoder(model) else None


def check_encoder(encoder: SentenceEncoder | None) -> None:
    """Raise UnsupportedModelError if llama.cpp has no such pooling, or a layer after it is not written for it."""
    if encoder is None:
        return
    if len(encoder.poolings) != 1 or encoder.poolings[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{encoder.source} pools by {', '.join(encoder.poolings)}, llama.cpp by one of {', '.join(POOLINGS)}: use "
            "to='onnx'"
        )
    for layer in encoder.steps[1:]:
        if not isinstance(layer, Normalize):
            raise UnsupportedModelError(
                f"{encoder.source} has a layer {type(layer).__name__} after the pooling, which is not written for "
                "llama.cpp: use to='onnx'"
            )


def stored(weight: Tensor, bits: int | None, int8: bool) -> tuple[np.ndarray, Any]:
    """Return a weight as llama.cpp stores it, and its type; `int8` is for weights that lie on no grid of `bits`."""
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import quantize

    values, kind = weight.detach().float().contiguous(), Type.F32
    if weight.ndim == 2:
        kind = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}.get(weight.dtype, Type.F32)
        if weight.shape[1] % BLOCK == 0:
            if bits is not None and (grid := GridWeights.of(values, bits)) is not None:
                return grid_blocks(grid), Type.Q8_0 if bits == OF_ROWS else Type.Q4_0
            kind = Type.Q8_0 if int8 else kind
    return quantize(values.numpy(), kind), kind


def grid_blocks(grid: GridWeights) -> np.ndarray:
    """Return weights on a grid in the blocks of Q4_0 or Q8_0: [out, bytes].

    A block is its scale, and 32 codes: bytes, or the first sixteen, counted from -8, in the lower halves of bytes and
    the others in the upper halves.
    """
    codes = grid.codes.numpy().reshape(len(grid.codes), -1, BLOCK)
    scales = np.broadcast_to(grid.scales.numpy(), codes.shape[:2])[..., None]
    packed: Any = codes.view(np.uint8)
    if grid.bits != OF_ROWS:
        low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
        packed = low | high << 4
    return np.concatenate([np.ascontiguousarray(scales).view(np.uint8), packed], axis=-1).reshape(len(codes), -1)


def write_file(
    file: Path, model: PreTrainedModel, form: GgufForm, blocks: Sequence[Block], tokenizer: Any, int8: bool
) -> Iterator[str]:
    """Write a model of these blocks, and yield notes; `int8` is for weights that lie on no grid."""
    from gguf import GGUFWriter

    base, embeddings = cast(Any, model.base_model), cast(Any, model.get_input_embeddings())
    output = embeddings if form.embeds else cast(Any, model.get_output_embeddings())
    size, sizes = len(embeddings.weight), [(block.heads, block.key_heads, block.neurons) for block in blocks]
    is_even = len(set(sizes)) == 1
    heads, key_heads, neurons = sizes[0] if is_even else map(list, zip(*sizes, strict=True))
    tensors = {"token_embd.weight": (embeddings.weight, bits_of(embeddings) or bits_of(output))}
    if output.weight is not embeddings.weight:
        tensors["output.weight"] = output.weight, bits_of(output)
    facts = {"block_count": len(blocks), "head_count": heads, "head_count_kv": key_heads}
    facts |= {"feed_forward_length": neurons, "embedding_length": embeddings.embedding_dim, "vocab_size": size}
    facts |= {form.epsilon[0]: getattr(model.config, form.epsilon[1])}
    writer = GGUFWriter(file, form.even if is_even else cast(str, form.uneven))
    yield from add_positions(facts, tensors, model, form)
    if form.embeds:
        yield from add_encoder(facts, model)
        encoder = encoder_of(model)
        writer.add_bool(NORMALIZE, encoder is not None and len(encoder.steps) > 1)
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    yield from add_tokenizer(writer, tokenizer, form, size)
    for number, block in enumerate(blocks):
        tensors |= {f"blk.{number}.{name}": each for name, each in block.weights.items()}
    written = {name: stored(weight, bits, int8) for name, (weight, bits) in tensors.items()}
    for name, module in ((name, base.get_submodule(path)) for name, path in form.outside.items()):
        for kind, weight in module.named_parameters():  # llama.cpp adds them in float32
            written[f"{name}.{kind}"] = stored(weight.float(), None, False)
    for name, (values, type_of_values) in written.items():
        writer.add_tensor(name, values, raw_dtype=type_of_values)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def add_positions(
    facts: dict[str, Any], tensors: dict[str, Any], model: PreTrainedModel, form: GgufForm
) -> Iterator[str]:
    """Add how many tokens a text may have, and how heads turn with their places, and yield notes."""
    config = model.config
    window, facts["context_length"] = getattr(config, form.window, None), getattr(config, form.positions)
    if window is not None and window < facts["context_length"]:
        yield f"llama.cpp knows no sliding window: what it puts out for more than {window} tokens is wrong"
        facts["context_length"] = window
    if form.rotations is None:
        return
    rotations = cast(Any, model.base_model.get_submodule(form.rotations))
    frequencies, theta = rotations.inv_freq.float().cpu(), rotations.config.rope_parameters["rope_theta"]
    width = 2 * len(frequencies)
    factors = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width) / frequencies
    if not torch.equal(factors, torch.ones_like(factors)):
        tensors["rope_freqs.weight"] = factors, None
    facts |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), width) | {"rope_freq_base": theta}


def add_encoder(facts: dict[str, Any], model: PreTrainedModel) -> Iterator[str]:
    """Add what an encoder puts out, and yield notes."""
    from gguf import PoolingType

    encoder, types = encoder_of(model), model.config.type_vocab_size
    pooling = "NONE" if encoder is None else POOLINGS[encoder.poolings[0]]
    facts |= {"causal_attention": False, "token_type_count": types, "pooling_type": PoolingType[pooling]}
    if types > 1:
        yield "llama.cpp takes every token for one of the first type: pairs of texts differ"
    if encoder is None:
        yield "the file puts out the states: the pooler is left out"
    else:
        yield f"llama.cpp cuts no text: pass at most {encoder.texts.max_seq_length} tokens, as the original reads"
    if encoder is not None and len(encoder.steps) > 1:
        yield "embeddings have length 1 where the caller asks for that, as llama_cpp.Llama.embed(…, normalize=True)"
