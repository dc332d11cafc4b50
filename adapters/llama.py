"""Llama and its siblings (Mistral, Ministral, Qwen2, Gemma, Granite): decoders with rotary positions.

Heads may share keys. Rotations come between projection and score, so heads cannot share one query/key projection here;
everything else works. Where the stock forward cannot run the heads that are left (narrower heads, key heads used by
unequal numbers of heads), `attention` does.
"""

from typing import Any

from torch import nn
from transformers.models.gemma import modeling_gemma
from transformers.models.granite import modeling_granite
from transformers.models.llama import modeling_llama
from transformers.models.ministral import modeling_ministral
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import RotaryAdapter
from collab_heads.layers.attention import replacing, takes_cache
from collab_heads.layers.query_key import is_swapped
from collab_heads.layers.removed import is_empty
from collab_heads.layers.rotary_attention import rotary_attention
from collab_heads.sites.site import group_size

BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated"}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
LLAMA3, QWEN2 = (SPLIT | {"pattern": {"Regex": WORDS % each + r"|\s+(?!\S)|\s+"}} for each in ("{1,3}", ""))
PRE_TOKENIZERS = {  # by their names in llama.cpp
    "gpt-2": [BYTES | {"use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}],
    "llama-bpe": [LLAMA3, BYTES | {"use_regex": False}],
    "qwen2": [QWEN2, BYTES | {"use_regex": False}],
}
TOKENIZERS: dict[str, Any] = {"tokenizers": {"BPE": "gpt2", "SentencePiece": "llama"}}
TOKENIZERS |= {"pre_tokenizers": PRE_TOKENIZERS, "whole_words": ("llama-bpe",)}
BLOCK_NORMS = {"attn_norm": "layers.{}.input_layernorm", "ffn_norm": "layers.{}.post_attention_layernorm"}
IN_LLAMA_CPP: dict[str, Any] = TOKENIZERS | {"outside": {"output_norm": "norm"}, "rotations": "rotary_emb"}
IN_LLAMA_CPP |= {"epsilon": ("layer_norm_rms_eps", "rms_norm_eps")}
NORMS = ("q_norm", "k_norm")  # norms of the queries and keys of each head, where the family has them


@takes_cache
def attention(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
    """Attend with narrower heads or any key heads, as `forward` of all classes, with the stock signature."""
    output, weights = rotary_attention(
        self,
        self.v_proj,
        hidden_states,
        attention_mask,
        cache,
        positions=position_embeddings,
        rotate=self.home.apply_rotary_pos_emb,
        norms=(self.q_norm, self.k_norm) if hasattr(self, "q_norm") else None,
        eager=self.eager,
        dropout=self.attention_dropout,
        **(self.window() if hasattr(self, "window") else {}),
        **kwargs,
    )
    return self.o_proj(output), weights


def window(self):
    """Return the argument of the backend for the sliding window that the module names."""
    return {"sliding_window": self.sliding_window}


def window_of_config(self):
    """Return the argument of the backend for the sliding window of the config, one for all layers."""
    return {"sliding_window": getattr(self.config, "sliding_window", None)}


class LlamaLayout(RotaryAdapter):
    """The layout of attention in Llama and its siblings."""

    paths = {r"layers\.(\d+)\.self_attn": "dec-self"}
    query, key, value, output = "q_proj", "k_proj", "v_proj", "o_proj"
    feed_forwards = (FeedForwardNames(r"layers\.\d+\.mlp", ("gate_proj", "up_proj"), "down_proj", "act_fn"),)
    roles = ("dec-self",)
    head_width, head_counts = ("head_dim", "head_dim"), ("num_attention_heads", "num_key_value_heads")
    layer_configs = True

    def num_heads(self, module):
        """Return the number of heads from the shape of the weights: no attribute holds it."""
        if is_swapped(module) or is_empty(module):
            return module.query_key.num_heads
        return module.q_proj.out_features // module.head_dim

    def groups(self, module):
        """Return the key head of every head: equal numbers of heads for each, unless heads were removed."""
        if is_swapped(module):
            return module.query_key.groups
        size = module.num_key_value_groups
        return getattr(module, "key_heads", tuple(head // size for head in range(self.num_heads(module))))

    def note_heads(self, module, heads, groups):
        """Set the number of heads per key head, which backends read, in place.

        Where it differs between key heads, they are repeated before the backend is called, and `key_heads` is set.
        """
        size = group_size(groups)
        module.num_key_value_groups = size or 1
        if size is None:
            module.key_heads = groups
        elif hasattr(module, "key_heads"):
            del module.key_heads

    def install(self, module, query_key):
        """As `AttentionAdapter`; a site without heads also loses its norms."""
        super().install(module, query_key)
        for norm in NORMS:
            if is_empty(module) and hasattr(module, norm):
                delattr(module, norm)

    def restore(self, module, stock, kept):
        """As `AttentionAdapter`; norms are restored with weights of 1, since all heads are zeros."""
        super().restore(module, stock, kept)
        for norm in NORMS:
            if hasattr(stock, norm) and not hasattr(module, norm):
                nn.init.ones_(getattr(stock, norm).weight)
                setattr(module, norm, getattr(stock, norm).train(module.training))

    def runs_groups(self, groups):
        """Return True if every key head has the same number of heads."""
        return group_size(groups) is not None


@register
class LlamaAdapter(LlamaLayout):
    """An adapter for Llama, Mistral, Ministral, Qwen2, Gemma and Granite."""

    model_types = ("llama", "mistral", "ministral", "qwen2", "gemma", "granite")
    replacements = (
        replacing(
            attention,
            modeling_llama.LlamaAttention,
            modeling_gemma.GemmaAttention,
            modeling_granite.GraniteAttention,
            prefix="Rotary",
        )
        | replacing(attention, modeling_mistral.MistralAttention, prefix="Rotary", window=window_of_config)
        | replacing(
            attention,
            modeling_qwen2.Qwen2Attention,
            modeling_ministral.MinistralAttention,
            prefix="Rotary",
            window=window,
        )
    )
    rms_norms = (
        modeling_llama.LlamaRMSNorm,
        modeling_mistral.MistralRMSNorm,
        modeling_ministral.MinistralRMSNorm,
        modeling_qwen2.Qwen2RMSNorm,
        modeling_gemma.GemmaRMSNorm,
        modeling_granite.GraniteRMSNorm,
    )
    gguf = dict.fromkeys(
        ("llama", "mistral", "qwen2"),
        GgufForm(
            even="llama",
            uneven="deci",
            norms=BLOCK_NORMS,
            neighbours=True,
            frequencies=("default", "linear", "llama3"),
            computed={"hidden_act": ("silu",)},
            **IN_LLAMA_CPP,
        ),
    )
    gated = dict.fromkeys(
        (
            modeling_llama.LlamaMLP,
            modeling_mistral.MistralMLP,
            modeling_ministral.MinistralMLP,
            modeling_qwen2.Qwen2MLP,
            modeling_gemma.GemmaMLP,
            modeling_granite.GraniteMLP,
        ),
        "act_fn",
    )
