"""The target GGUF: a file for llama.cpp, which runs decoders whose blocks have sizes of their own.

Its architecture `deci` takes the number of heads, key heads and neurons of every block, and one width for all heads.
Weights on grids are written as they are: those of 3 and 4 bits as Q4_0, and those of 8 bits as Q8_0, where a row
repeats its scale in each block. Both have blocks of 32 codes along the input, with a half-precision scale each.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.progress import progress_bar
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CollabHeadsError, UnsupportedModelError
from collab_heads.layers.weight_grid import BLOCK, OF_ROWS, GridWeights, bits_of
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenLayerSite, OpenSite
from collab_heads.serving.comparison import NEW_TOKENS, Differences, compare_generation, greedy, in_turns
from collab_heads.serving.ctranslate2_engines import rows_of, without_rules
from collab_heads.serving.example_inputs import without_labels
from collab_heads.serving.gguf_checks import (
    IDS_ONLY,
    NORMALIZED,
    check_sites,
    check_tokenizer,
    cut_as,
    form_for,
    head_width,
)
from collab_heads.serving.target import Target, first_line, quiet

FILE = "model.gguf"
PROBE = "I'm: 3 or 12345 caf\u00e9s\u2026 \n\n\t(\u4f60\u597d, \u043c\u0438\u0440)  don't! x = y[0] + 7.5; \U0001f600"


@dataclass
class Block:
    """A block of the model as llama.cpp computes it: its sizes, and what of it is zeros that llama.cpp needs."""

    heads: int = 0
    key_heads: int = 0
    neurons: int = 0
    notes: list[str] = field(default_factory=list)
    weights: dict[str, tuple[Tensor, int | None]] = field(default_factory=dict)  # name -> weight, bits of its grid

    def add(self, name: str, module: Any, weight: Any, bias: Any) -> None:
        """Add a linear map: its weights [out, in], as they apply, its bias, and the module that has its grid."""
        self.weights[f"{name}.weight"] = weight, bits_of(module)
        if bias is not None:
            self.weights[f"{name}.bias"] = bias, None


class Gguf(Target):
    """GGUF, which llama.cpp reads: on processors, GPUs and phones."""

    name, has_int8 = "gguf", True
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
        if tokenizer is not None:
            check_tokenizer(tokenizer, form, model.config.vocab_size)

    @torch.no_grad()
    def write(self, model, folder, example, *, tokenizer, int8):
        """Write the model and its tokenizer into one file."""
        if "input_ids" not in example:
            raise ArgumentError(f"llama.cpp reads input_ids: the batches hold {', '.join(sorted(example))}")
        layers = OpenLayers.of(model, get_adapter(model))
        form = cast(GgufForm, layers.adapter.gguf)
        blocks = list(blocks_of(layers, form))
        notes = [each for block in blocks for each in block.notes]
        if gone := len(layers.attention) - len(blocks):
            notes.append(f"{gone} blocks without heads and neurons are left out")
        return (*notes, *write_file(folder / FILE, model, form, blocks, tokenizer, int8))

    def load(self, model, folder, tokens=512):
        ends = model.generation_config.eos_token_id
        return Greedy(folder / FILE, tokens, torch.tensor([] if ends is None else ends, dtype=torch.long).flatten())

    @torch.no_grad()
    def compare(self, model, folder, batches, tokenizer):
        """Compare logits and greedy tokens after every text, without padding, and how both cut a text into tokens."""
        inputs, plain = [without_labels(batch) for batch in batches], without_rules(model)
        rows, found = [row for batch in inputs for row in rows_of(batch)], Differences()
        try:
            engine = self.load(model, folder, max(row["input_ids"].shape[1] for row in rows) + NEW_TOKENS)
            if tokenizer is not None:
                check_tokens(engine, tokenizer)
            for row in progress_bar(rows, desc="comparing"):
                compare_generation(found, greedy(plain, row), engine.generate(**row))
            return found.comparison(*in_turns([lambda: greedy(plain, inputs[0]), lambda: engine.generate(**inputs[0])]))
        except CollabHeadsError:
            raise
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(f"llama.cpp fails on {type(model).__name__}: {first_line(error)}") from error


class Greedy:
    """A model in llama.cpp that generates greedily as one of PyTorch does, in one thread, with a cache in float32."""

    def __init__(self, file: Path, tokens: int, ends: Tensor):
        import llama_cpp

        self.library, self.ends, float32 = llama_cpp, ends, llama_cpp.GGML_TYPE_F32
        sizes: dict[str, Any] = {"n_ctx": tokens, "n_batch": tokens, "n_threads": 1, "n_threads_batch": 1}
        with quiet():
            self.engine = llama_cpp.Llama(str(file), type_k=float32, type_v=float32, verbose=False, **sizes)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens after those before, and return the logits after the last one: [V]."""
        self.engine.eval(tokens)
        found = self.library.llama_get_logits_ith(self.engine.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, shape=(self.engine.n_vocab(),)).copy())

    def generate(self, **inputs: Tensor) -> SimpleNamespace:
        """Continue the rows of a batch greedily: `sequences` [B, new tokens], and `logits` of every step, [B, V]."""
        chosen, steps = [], []
        for row in rows_of(inputs):
            self.engine.reset()
            read, found = row["input_ids"][0].tolist(), []
            for _ in range(NEW_TOKENS):
                found.append(self.logits(read))
                read = [int(found[-1].index_fill(0, self.ends, -torch.inf).argmax())]
                chosen.append(read[0])
            steps.append(torch.stack(found))
        return SimpleNamespace(sequences=torch.tensor(chosen).view(len(steps), -1), logits=torch.stack(steps).unbind(1))


def blocks_of(layers: OpenLayers, form: GgufForm) -> Iterator[Block]:
    """Yield the blocks that compute something.

    llama.cpp reads the width of heads in the first block, and leaves out the attention of a block without neurons:
    such blocks get a head, or neurons, of zeros.
    """
    is_first, sites = True, layers.attention
    for site, block in zip(sites, layers.feed_forwards, strict=True):
        if site.num_heads or block.num_neurons or adds(site) or adds(block) or (is_first and site is sites[-1]):
            found, base = Block(), layers.model.base_model
            if site.num_heads:
                add_heads(found, site)
            elif is_first or adds(site):
                add_empty_head(found, site)
            add_neurons(found, block)
            norms = ("attn_norm", form.attention_norm, found.heads), ("ffn_norm", form.feed_forward_norm, found.neurons)
            for name, path in (each[:2] for each in norms if each[2]):
                norm = base.get_submodule(path.format(site.site.layer))
                found.add(name, norm, norm.weight, None)
            is_first = False
            yield found


def adds(site: OpenLayerSite) -> bool:
    """Return True if a site adds a bias to the residual stream, even with nothing left in it."""
    bias = cast(Any, site.output).bias
    return bias is not None and bool(bias.any())


def add_heads(found: Block, site: OpenSite) -> None:
    """Add the heads of a site, with their gates and alphas in the output projection."""
    found.heads, found.key_heads = site.num_heads, max(site.groups) + 1
    query, key = cast(Any, site.projections)
    for name, module, heads in (("attn_q", query, found.heads), ("attn_k", key, found.key_heads)):
        bias = None if module.bias is None else neighbours(module.bias, heads)
        found.add(name, module, neighbours(module.weight, heads), bias)
    found.add("attn_v", site.value, site.value.weight, site.value.bias)
    found.add("attn_output", site.output, site.output_weight(), site.output.bias)


def add_empty_head(found: Block, site: OpenSite) -> None:
    """Add a head of zeros, and the bias of the output, which a site without heads still adds."""
    rows = torch.zeros(head_width(site), cast(Any, site.output).out_features, dtype=torch.float16)
    found.heads = found.key_heads = 1
    for name, weight in (("attn_q", rows), ("attn_k", rows), ("attn_v", rows), ("attn_output", rows.T)):
        found.add(name, site.module, weight, site.output.bias if name == "attn_output" else None)
    found.notes.append(f"{site.path}: a head of zeros, since llama.cpp needs one there")


def add_neurons(found: Block, block: OpenFeedForward) -> None:
    """Add the neurons of a block, up to a multiple of 32: blocks of few bits are whole then, and products quick."""
    count = found.neurons = block.num_neurons
    if not count and (found.heads or adds(block)):
        found.neurons = BLOCK
    found.neurons += -found.neurons % BLOCK
    if not found.neurons:
        return
    output, more = cast(Any, block.output), found.neurons - count
    for name, module in zip(("ffn_gate", "ffn_up"), cast(Any, block.first), strict=True):
        bias = None if module.bias is None else pad(module.bias, (0, more))
        found.add(name, module, pad(module.weight, (0, 0, 0, more)), bias)
    found.add("ffn_down", output, pad(output.weight, (0, more)), output.bias)
    if more:
        found.notes.append(f"{block.path}: neurons from {count} to {found.neurons}, with zeros")


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Put dimensions i and i + d/2 of heads of width d, which turn together, beside each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


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

    config, base = model.config, cast(Any, model.base_model)
    embeddings, output = cast(Any, model.get_input_embeddings()), cast(Any, model.get_output_embeddings())
    size, rotations = len(embeddings.weight), base.get_submodule(form.rotations)
    sizes = [(block.heads, block.key_heads, block.neurons) for block in blocks]
    is_even = len(set(sizes)) == 1
    heads, key_heads, neurons = sizes[0] if is_even else map(list, zip(*sizes, strict=True))
    tensors = {"token_embd.weight": (embeddings.weight, bits_of(embeddings) or bits_of(output))}
    if output.weight is not embeddings.weight:
        tensors["output.weight"] = output.weight, bits_of(output)
    tensors["output_norm.weight"] = base.get_submodule(form.last_norm).weight, None
    for number, block in enumerate(blocks):
        tensors |= {f"blk.{number}.{name}": each for name, each in block.weights.items()}
    writer = GGUFWriter(file, form.even if is_even else form.uneven)
    window, positions = getattr(config, form.window, None), getattr(config, form.positions)
    if window is not None and window < positions:
        yield f"llama.cpp knows no sliding window: what it puts out for more than {window} tokens is wrong"
        positions = window
    frequencies, theta = rotations.inv_freq.float().cpu(), rotations.config.rope_parameters["rope_theta"]
    width = 2 * len(frequencies)
    factors = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width) / frequencies
    if not torch.equal(factors, torch.ones_like(factors)):
        tensors["rope_freqs.weight"] = factors, None
    facts = {"block_count": len(blocks), "head_count": heads, "head_count_kv": key_heads, "context_length": positions}
    facts |= {"feed_forward_length": neurons, "embedding_length": embeddings.embedding_dim, "vocab_size": size}
    facts |= {"layer_norm_rms_eps": getattr(config, form.epsilon), "rope_freq_base": theta}
    facts |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), width)
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    yield from add_tokenizer(writer, tokenizer, form, size)
    for name, (weight, bits) in tensors.items():
        values, kind = stored(weight, bits, int8)
        writer.add_tensor(name, values, raw_dtype=kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def add_tokenizer(writer: Any, tokenizer: Any, form: GgufForm, size: int) -> Iterator[str]:
    """Add the tokens, the merges, the special tokens and the chat template of a tokenizer, and yield notes."""
    from gguf import TokenType

    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        yield "the file has no tokenizer, since none was given: it takes ids"
        return
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    for token, number in tokenizer.get_vocab().items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        if token.lstrip or token.rstrip or token.single_word:
            yield f"llama.cpp cuts texts at {token.content!r} also within words, and keeps the spaces beside it"
    if backend["normalizer"] is not None:
        yield f"texts should be in the form {NORMALIZED}, to which llama.cpp does not bring them"
    writer.add_tokenizer_model(form.byte_level)
    writer.add_tokenizer_pre(cut_as(backend["pre_tokenizer"], form))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(each) for each in backend["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    first, *_, last = tokenizer("a b")["input_ids"]
    writer.add_add_bos_token(first == tokenizer.bos_token_id)
    writer.add_add_eos_token(last == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    else:
        yield "the file has no chat template, since the tokenizer has none, or several"


def check_tokens(engine: Greedy, tokenizer: Any) -> None:
    found, expected = engine.engine.tokenize(PROBE.encode()), tokenizer(PROBE)["input_ids"]
    if found != expected:
        raise UnsupportedModelError(
            f"llama.cpp cuts {PROBE!r} into the tokens {found}, not {expected}: nothing was written. {IDS_ONLY}"
        )
