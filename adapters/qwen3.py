"""Qwen3: Llama's layout with norms of the queries and keys of each head, which therefore keep their width."""

from transformers.models.qwen3 import modeling_qwen3

from collab_heads.adapters.llama import (  # type: ignore[import-untyped]
    BLOCK_NORMS,
    IN_LLAMA_CPP,
    LlamaLayout,
    attention,
    window,
)
from collab_heads.contract.model_forms import GgufForm
from collab_heads.contract.registry import register
from collab_heads.contract.special_adapters import NormedRotaryAdapter
from collab_heads.layers.attention import replacing


@register
class Qwen3Adapter(NormedRotaryAdapter, LlamaLayout):
    """An adapter for Qwen3."""

    model_types = ("qwen3",)
    replacements = replacing(attention, modeling_qwen3.Qwen3Attention, prefix="Rotary", window=window)
    rms_norms = (modeling_qwen3.Qwen3RMSNorm,)
    gated = {modeling_qwen3.Qwen3MLP: "act_fn"}
    gguf = {
        "qwen3": GgufForm(
            even="qwen3",
            norms=BLOCK_NORMS
            | {"attn_q_norm": "layers.{}.self_attn.q_norm", "attn_k_norm": "layers.{}.self_attn.k_norm"},
            computed={"hidden_act": ("silu",), "attention_bias": (False,)},
            **IN_LLAMA_CPP,
        )
    }
