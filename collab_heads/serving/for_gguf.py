"""The target GGUF: a file for llama.cpp, which runs decoders of the Llama line whose blocks have sizes of their own.

Its architecture `deci` takes the number of heads, key heads and neurons of every block, and one width for all heads.
Weights on grids are written as they are: those of 3 and 4 bits as Q4_0, and those of 8 bits as Q8_0, where a row
repeats its scale in each block. Both have blocks of 32 codes along the input, with a half-precision scale each.

Shapes: D width of the model, d width of a head, F neurons of a block, V tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import get_adapter, known_adapter
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.layers.layout import weight_of
from collab_heads.layers.weight_grid import BLOCK, OF_ROWS, GridWeights, bits_of
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers, OpenSite
from collab_heads.serving.comparison import NEW_TOKENS, compare
from collab_heads.serving.ctranslate2_engines import rows_of, without_rules
from collab_heads.serving.target import Target, first_line, quiet
from collab_heads.sites.site import group_size

FILE = "model.gguf"
ROTATIONS = ("default", "linear", "llama3")  # whose frequencies are the same for texts of any length
ADVICE = "compress with parts=('heads', 'neurons')"
BYTES = ("ByteLevel", True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# how a tokenizer cuts a text into words -> how llama.cpp calls this
PRE_TOKENIZERS: Mapping[tuple, str] = {
    (BYTES,): "gpt-2",
    (("Digits", True), BYTES): "smollm",
    (("Split", LLAMA3), ("ByteLevel", False)): "llama-bpe",
    (("Split", LLAMA3.replace("{1,3}", "")), ("ByteLevel", False)): "qwen2",
}
# its words are cut, and its tokens numbered, alike in both, if a tokenizer was written rightly
PROBE = (
    "I'm sure we'll see 3, 44 and 12345 things\u2026 \n\n\tna\u00efve caf\u00e9s (\u4f60\u597d, \u043c\u0438\u0440)  "
    "don't! x = y[0] + 7.5; \U0001f600"
)


@dataclass
class Block:
    """A block of the model as llama.cpp computes it.

    Attributes:
        heads: its heads.
        key_heads: its heads of keys and values.
        neurons: its neurons.
        weights: name -> weight, and the bits of the grid that it may lie on.
        filled: what of it is zeros that llama.cpp needs, or nothing.
    """

    heads: int = 0
    key_heads: int = 0
    neurons: int = 0
    weights: dict[str, tuple[Tensor, int | None]] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)

    def add(self, name: str, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        """Add a linear map: its weights [out, in], as they apply, its bias, and the module that has its grid."""
        self.weights[f"{name}.weight"] = weight, bits_of(module)
        if bias is not None:
            self.weights[f"{name}.bias"] = bias, None


class Gguf(Target):
    """GGUF, which llama.cpp reads: on processors, GPUs and phones."""

    name, has_int8 = "gguf", True
    int8_tolerance = 0.2  # what weights of few bits multiply is rounded to eight; seen: see tests

    def is_int8(self, model, int8):
        return int8 or any(bits_of(module) for module in model.modules())

    def check_installed(self, int8):
        super().check_installed(int8)
        check_extra(self.name, f"exports to {self.name}")

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
        check_family(model)
        adapter = get_adapter(model)
        for site in OpenLayers.of(model, adapter).attention:
            check_site(site)
        if tokenizer is not None:
            check_tokenizer(tokenizer, model.config.vocab_size)

    @torch.no_grad()
    def write(self, model, folder, example, *, tokenizer, int8):
        """Write the model and its tokenizer into one file."""
        layers = OpenLayers.of(model, get_adapter(model))
        form, notes = cast(GgufForm, layers.adapter.gguf), []
        blocks = list(blocks_of(layers, form, packs=int8))
        if len(blocks) < len(layers.attention):
            notes.append(f"{len(layers.attention) - len(blocks)} blocks without heads and neurons are left out")
        notes += [each for block in blocks for each in block.filled]
        notes += write_file(folder / FILE, model, form, blocks, tokenizer, int8)
        return tuple(notes)

    def load(self, model, folder, tokens=512):
        ends = model.generation_config.eos_token_id
        return LlamaCpp(folder / FILE, tokens, torch.tensor([] if ends is None else ends).reshape(-1).tolist())

    def compare(self, model, folder, batches, tokenizer):
        """Compare logits and greedy tokens after every text, in one thread, and how both cut a text into tokens."""
        longest = max((batch["input_ids"].shape[1] for batch in batches), default=0)
        try:
            engine = self.load(model, folder, longest + NEW_TOKENS)
            if tokenizer is not None:
                check_tokens(engine, tokenizer)
            return compare(without_rules(model), engine, batches, generates=True)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(f"llama.cpp fails on {type(model).__name__}: {first_line(error)}") from error


class LlamaCpp:
    """A model in llama.cpp that generates greedily as one of PyTorch does, in one thread, with a cache in float32.

    Args:
        file: the model.
        tokens: the most tokens of a text.
        ends: the tokens that end a text, which are not chosen.
    """

    def __init__(self, file: Path, tokens: int, ends: Sequence[int]):
        import llama_cpp

        self.library, self.ends, float32 = llama_cpp, list(ends), llama_cpp.GGML_TYPE_F32
        sizes = {"n_ctx": tokens, "n_batch": tokens, "n_threads": 1, "n_threads_batch": 1}
        with quiet():
            self.engine = llama_cpp.Llama(str(file), type_k=float32, type_v=float32, verbose=False, **sizes)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens after those before, and return the logits after the last one: [V]."""
        self.engine.eval(tokens)
        found = self.library.llama_get_logits_ith(self.engine.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, shape=(self.engine.n_vocab(),)).copy())

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> SimpleNamespace:
        """Continue the rows of a batch greedily: `sequences` [B, new tokens], and `logits` of every step, [B, V]."""
        chosen, steps = [], []
        for row in rows_of({"input_ids": input_ids, "attention_mask": attention_mask}):
            self.engine.reset()
            read, found = row["input_ids"][0].tolist(), []
            for _ in range(NEW_TOKENS):
                found.append(self.logits(read))
                read = [int(found[-1].index_fill(0, torch.tensor(self.ends, dtype=torch.long), -torch.inf).argmax())]
                chosen.append(read[0])
            steps.append(torch.stack(found))
        return SimpleNamespace(
            sequences=torch.tensor(chosen).reshape(-1, NEW_TOKENS), logits=torch.stack(steps).unbind(1)
        )


def check_family(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if llama.cpp computes something else than a model of this family and config."""
    adapter, config, name = known_adapter(model.config), model.config, type(model).__name__
    form = None if adapter is None else adapter.gguf
    if form is None:
        raise UnsupportedModelError(
            f"{name} is of type {config.model_type!r}: GGUF is written of Llama, Mistral and Qwen2; use to='onnx'"
        )
    if not (model.can_generate() and isinstance(model.get_output_embeddings(), nn.Linear)):
        raise UnsupportedModelError(f"{name} does not predict tokens, and llama.cpp does: use to='onnx'")
    if getattr(config, form.activation[0]) != form.activation[1]:
        found = getattr(config, form.activation[0])
        raise UnsupportedModelError(f"{name} has the activation {found!r}, and llama.cpp {form.activation[1]!r}")
    rotations = model.base_model.get_submodule(form.rotations)
    if rotations.rope_type not in ROTATIONS:
        raise UnsupportedModelError(
            f"{name} has rotary positions of type {rotations.rope_type!r}: those of {', '.join(ROTATIONS)} are written"
        )


def check_site(site: OpenSite) -> None:
    """Raise ModelStateError if llama.cpp has no such heads; the message says which call makes others."""
    if not site.num_heads:
        return
    width = getattr(site.module, site.adapter.head_width[1])
    found = {"queries and keys": site.query_key_width // site.num_heads, "values": site.value_width}
    for what, each in found.items():
        if each != width:
            raise ModelStateError(
                f"{site.path} has {what} of width {each}, while all heads of llama.cpp have one width, here {width}: "
                f"{ADVICE}"
            )
    if group_size(site.groups) is None:
        raise ModelStateError(
            f"{site.path} has key heads that serve unequal numbers of heads ({site.groups} are the key heads of its "
            f"heads), while those of llama.cpp serve equal numbers: {ADVICE}, or prune all heads of a key head"
        )


def blocks_of(layers: OpenLayers, form: GgufForm, *, packs: bool) -> Iterator[Block]:
    """Yield the blocks that compute something.

    llama.cpp reads the width of heads in the first block, and leaves out the attention of a block without neurons:
    such blocks get a head, or neurons, of zeros.

    Args:
        layers: the opened layers of a model.
        form: how llama.cpp names them.
        packs: whether all weights get eight bits.
    """
    is_first, last = True, len(layers.attention) - 1
    for site, block in zip(layers.attention, layers.feed_forwards, strict=True):
        biases = [bias for each in (site.output, block.output) if (bias := each.bias) is not None]
        is_needed = site.num_heads or block.num_neurons or any(bias.any() for bias in biases)
        if not is_needed and not (is_first and site.site.layer == last):
            continue
        found, base = Block(), layers.model.base_model
        for name, path in (("attn_norm", form.attention_norm), ("ffn_norm", form.feed_forward_norm)):
            norm = base.get_submodule(path.format(site.site.layer))
            found.add(name, norm, norm.weight.float(), None)
        if site.num_heads:
            add_heads(found, site)
        elif is_first or (site.output.bias is not None and site.output.bias.any()):
            add_empty_head(found, site)
        add_neurons(found, block, packs=packs)
        is_first = False
        yield found


def add_heads(found: Block, site: OpenSite) -> None:
    """Add the heads of a site, with their gates and alphas in the output projection."""
    query, key = site.projections
    found.heads, found.key_heads = site.num_heads, max(site.groups) + 1
    for name, module, heads in (("attn_q", query, found.heads), ("attn_k", key, found.key_heads)):
        bias = module.bias
        found.add(name, module, neighbours(module.weight, heads), None if bias is None else neighbours(bias, heads))
    found.add("attn_v", site.value, site.value.weight, site.value.bias)
    found.add("attn_output", site.output, site.output_weight(), site.output.bias)


def add_empty_head(found: Block, site: OpenSite) -> None:
    """Add a head of zeros, and the bias of the output, which a site without heads still adds."""
    width, dim = getattr(site.module, site.adapter.head_width[1]), site.output.out_features
    rows = torch.zeros(width, dim, dtype=torch.float16)
    found.heads = found.key_heads = 1
    for name in ("attn_q", "attn_k", "attn_v"):
        found.add(name, site.module, rows, None)
    found.add("attn_output", site.module, rows.T.contiguous(), site.output.bias)
    found.filled.append(f"{site.path}: a head of zeros, since llama.cpp needs one there")


def add_neurons(found: Block, block: OpenFeedForward, *, packs: bool) -> None:
    """Add the neurons of a block: as many as it has, or up to a multiple of 32 where weights have few bits."""
    count, wanted = block.num_neurons, block.num_neurons
    is_packed = packs or any(bits_of(module) for module in block.modules)
    if not count and (found.heads or block.output.bias is not None):
        wanted = BLOCK
    elif is_packed:
        wanted += -count % BLOCK
    if not wanted:
        return
    found.neurons = wanted
    for name, module in zip(("ffn_gate", "ffn_up"), block.first, strict=True):
        bias = None if module.bias is None else filled(module.bias, wanted)
        found.add(name, module, filled(weight_of(module), wanted), bias)
    columns = filled(weight_of(block.output).T, wanted).T.contiguous()
    found.add("ffn_down", block.output, columns, block.output.bias)
    if wanted > count:
        found.filled.append(f"{block.path}: neurons from {count} to {wanted}, with zeros")


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Put the dimensions of a head that turn together beside each other: i and i + d/2 become 2i and 2i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def filled(rows: Tensor, count: int) -> Tensor:
    """Add rows of zeros."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def stored(weight: Tensor, bits: int | None, int8: bool) -> tuple[np.ndarray, Any]:
    """Return a tensor as llama.cpp stores it, and its type.

    Args:
        weight: [out, in], or [n], which stays in float32.
        bits: of the grid on which it lies; None if it lies on none.
        int8: whether other weights get eight bits.
    """
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import quantize

    values = weight.detach().float().contiguous()
    if weight.ndim == 1:
        return values.numpy(), Type.F32
    if weight.shape[1] % BLOCK == 0:
        if bits is not None and (grid := GridWeights.of(values, bits)) is not None:
            return grid_blocks(grid), Type.Q8_0 if bits == OF_ROWS else Type.Q4_0
        if int8:
            return quantize(values.numpy(), Type.Q8_0), Type.Q8_0
    found = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}.get(weight.dtype, Type.F32)
    return quantize(values.numpy(), found), found


def grid_blocks(grid: GridWeights) -> np.ndarray:
    """Return weights on a grid in the blocks of Q4_0 or Q8_0: [out, bytes]; inputs are a multiple of 32.

    A block is its scale, and 32 codes: bytes, or the first sixteen, counted from -8, in the lower halves of bytes and
    the others in the upper halves.
    """
    codes = grid.codes.numpy().reshape(len(grid.codes), -1, BLOCK)
    scales = np.broadcast_to(grid.scales.numpy(), codes.shape[:2])[..., None]
    if grid.bits == OF_ROWS:
        packed = codes.view(np.uint8)
    else:
        low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
        packed = low | high << 4
    return np.concatenate([np.ascontiguousarray(scales).view(np.uint8), packed], axis=-1).reshape(len(codes), -1)


def write_file(
    file: Path, model: PreTrainedModel, form: GgufForm, blocks: Sequence[Block], tokenizer: Any, int8: bool
) -> Iterator[str]:
    """Write a model, and yield notes.

    Args:
        file: the file.
        model: the model.
        form: how llama.cpp names its parts.
        blocks: its blocks.
        tokenizer: its tokenizer, or None.
        int8: whether weights that lie on no grid get eight bits.
    """
    from gguf import GGUFWriter

    config, base = model.config, model.base_model
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = [(block.heads, block.key_heads, block.neurons) for block in blocks]
    is_even = len(set(sizes)) == 1
    heads, key_heads, neurons = sizes[0] if is_even else map(list, zip(*sizes, strict=True))
    writer = GGUFWriter(file, form.even if is_even else form.uneven)
    window, positions = getattr(config, form.window, None), getattr(config, form.positions)
    if window is not None and window < positions:
        yield f"texts have at most {window} tokens there, since llama.cpp knows no sliding window"
        positions = window
    writer.add_block_count(len(blocks))
    writer.add_context_length(positions)
    writer.add_embedding_length(embeddings.weight.shape[1])
    writer.add_vocab_size(len(embeddings.weight))
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_feed_forward_length(neurons)
    writer.add_layer_norm_rms_eps(getattr(config, form.epsilon))
    factors = add_rotations(writer, base.get_submodule(form.rotations))
    yield from add_tokenizer(writer, tokenizer, len(embeddings.weight))
    tensors = {"token_embd.weight": (embeddings.weight, bits_of(embeddings) or bits_of(output))}
    if output.weight is not embeddings.weight:
        tensors["token_embd.weight"] = embeddings.weight, bits_of(embeddings)
        tensors["output.weight"] = output.weight, bits_of(output)
    tensors["output_norm.weight"] = base.get_submodule(form.last_norm).weight, None
    if not torch.equal(factors, torch.ones_like(factors)):
        tensors["rope_freqs.weight"] = factors, None
    for number, block in enumerate(blocks):
        tensors |= {f"blk.{number}.{name}": each for name, each in block.weights.items()}
    for name, (weight, bits) in tensors.items():
        values, kind = stored(weight, bits, int8)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_rotations(writer: Any, rotations: Any) -> Tensor:
    """Add the width of heads and the base of their frequencies; return what these are divided by, [d / 2]."""
    frequencies = rotations.inv_freq.float().cpu()
    width, base = 2 * len(frequencies), rotations.config.rope_parameters["rope_theta"]
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(base)
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)) / frequencies


def check_tokenizer(tokenizer: Any, size: int) -> None:
    """Raise UnsupportedModelError if llama.cpp cuts texts into other tokens than a tokenizer.

    Args:
        tokenizer: the tokenizer.
        size: the tokens of the model.
    """
    name = type(tokenizer).__name__
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(f"{name} has no tokenizer.json, from which its form for llama.cpp is made")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model, cut = backend["model"], cuts(backend["pre_tokenizer"])
    is_plain = not any(model.get(each) for each in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    normalizer = (backend["normalizer"] or {}).get("type")  # NFC, which llama.cpp leaves out: texts mostly are
    if model["type"] != "BPE" or not is_plain or cut not in PRE_TOKENIZERS or normalizer not in (None, "NFC"):
        raise UnsupportedModelError(
            f"{name} is none that is written for llama.cpp: these are byte-level BPE, cut as by GPT-2, SmolLM, Llama 3 "
            "or Qwen2. Pass tokenizer=None for a file that takes ids only"
        )
    if len(tokenizer) > size:
        raise ArgumentError(f"{name} has {len(tokenizer)} tokens, the model {size}: pass the tokenizer of the model")


def cuts(pre_tokenizer: Mapping[str, Any] | None) -> tuple:
    """Return the steps in which a tokenizer cuts texts into words, as `PRE_TOKENIZERS` names them."""
    given = pre_tokenizer or {"type": None}
    found = []
    for step in given["pretokenizers"] if given["type"] == "Sequence" else [given]:
        setting = {
            "ByteLevel": step.get("use_regex") if not step.get("add_prefix_space") else None,
            "Digits": step.get("individual_digits"),
            "Split": step.get("pattern", {}).get("Regex") if step.get("behavior") == "Isolated" else None,
        }
        found.append((step["type"], setting.get(step["type"])))
    return tuple(found)


def add_tokenizer(writer: Any, tokenizer: Any, size: int) -> Iterator[str]:
    """Add the tokens, the merges, the special tokens and the chat template of a tokenizer, and yield notes."""
    from gguf import TokenType

    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        yield "the file has no tokenizer, since none was given: it takes ids"
        return
    backend, numbers = json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.get_vocab()
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    for token, number in numbers.items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[cuts(backend["pre_tokenizer"])])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = backend["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    around = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(around[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(around[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    else:
        yield "the file has no chat template, since the tokenizer has none, or several"


def check_tokens(engine: LlamaCpp, tokenizer: Any) -> None:
    """Raise UnsupportedModelError if llama.cpp cuts a text into other tokens than the tokenizer."""
    found = engine.engine.tokenize(PROBE.encode())
    expected = tokenizer(PROBE)["input_ids"]
    if found != expected:
        raise UnsupportedModelError(
            f"llama.cpp cuts {PROBE!r} into the tokens {found}, and the tokenizer into {expected}: nothing was "
            "written. Pass tokenizer=None for a file that takes ids only"
        )
