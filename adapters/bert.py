"""BERT and its siblings: self-attention of encoders and decoders, and cross-attention."""

from contextlib import contextmanager
from typing import Any

from transformers.models.bert import modeling_bert
from transformers.models.camembert import modeling_camembert
from transformers.models.electra import modeling_electra
from transformers.models.roberta import modeling_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import CTranslate2Form, GgufForm
from collab_heads.contract.registry import register
from collab_heads.errors import UnsupportedModelError
from collab_heads.layers.attention import attend, cached_key_value, replacing, takes_cache

POSITIONS: dict[str, Any] = {"position_embedding_type": "absolute"}
FEED_FORWARD = FeedForwardNames(
    r"encoder\.layer\.\d+", ("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn"
)


@takes_cache
def self_attention(self, hidden_states, attention_mask=None, cache=None, **kwargs):
    """Attend, as `forward` of every self-attention class, with the stock signature."""
    key, value = cached_key_value(self, self.value, hidden_states, cache, is_cross=False)
    return attend(self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout.p, **kwargs)


@takes_cache
def cross_attention(self, hidden_states, encoder_hidden_states=None, attention_mask=None, cache=None, **kwargs):
    """Attend, as `forward` of every cross-attention class, with the stock signature."""
    key, value = cached_key_value(self, self.value, encoder_hidden_states, cache, is_cross=True)
    return attend(self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout.p, **kwargs)


class PooledForm(CTranslate2Form):
    """BERT for CTranslate2, whose converter (4.8) reads the pooler without asking whether there is one."""

    @contextmanager
    def converting(self, part):
        """Refuse a model without a pooler."""
        if part.pooler is None:
            raise UnsupportedModelError(
                f"CTranslate2's converter needs a pooler, and this {type(part).__name__} has none, as with heads for "
                "tokens: use to='onnx'"
            )
        yield


@register
class BertAdapter(AttentionAdapter):
    """An adapter for BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA, as encoders or as decoders."""

    model_types = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
    paths = {
        r"encoder\.layer\.(\d+)\.attention\.self": "enc-self",
        r"encoder\.layer\.(\d+)\.crossattention\.self": "dec-enc",
    }
    replacements = replacing(
        self_attention,
        modeling_bert.BertSelfAttention,
        modeling_roberta.RobertaSelfAttention,
        modeling_xlm_roberta.XLMRobertaSelfAttention,
        modeling_camembert.CamembertSelfAttention,
        modeling_electra.ElectraSelfAttention,
    ) | replacing(
        cross_attention,
        modeling_bert.BertCrossAttention,
        modeling_roberta.RobertaCrossAttention,
        modeling_xlm_roberta.XLMRobertaCrossAttention,
        modeling_camembert.CamembertCrossAttention,
        modeling_electra.ElectraCrossAttention,
    )

    output, width = "../output.dense", "all_head_size"
    layer_configs = True
    feed_forwards = (FEED_FORWARD,)
    ctranslate2 = dict.fromkeys(("roberta", "xlm-roberta", "camembert"), CTranslate2Form(entries=POSITIONS)) | {
        "bert": PooledForm(entries=POSITIONS)
    }
    gguf = {
        "bert": GgufForm(
            even="bert",
            fills=True,
            norms={
                "attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
                "layer_output_norm": "encoder.layer.{}.output.LayerNorm",
            },
            outside={
                "position_embd": "embeddings.position_embeddings",
                "token_types": "embeddings.token_type_embeddings",
                "token_embd_norm": "embeddings.LayerNorm",
            },
            head_width="attention_head_size",
            epsilon=("layer_norm_eps", "layer_norm_eps"),
            computed={"hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"), "is_decoder": (False,)},
            embeds=True,
            tokenizers={"WordPiece": "bert"},
            pre_tokenizers={"BertPreTokenizer": [{"type": "BertPreTokenizer"}]},
            normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
        )
    }

    def role(self, role, module):
        """Return "dec-self" for a model with `config.is_decoder`, which has the paths of an encoder."""
        return "dec-self" if role == "enc-self" and module.config.is_decoder else role
