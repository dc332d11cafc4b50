"""The BART lineage (BART, mBART, Marian, Pegasus, M2M100): one class per model for all three roles."""

from contextlib import contextmanager

import torch
from transformers.models.bart import modeling_bart
from transformers.models.m2m_100 import modeling_m2m_100
from transformers.models.marian import modeling_marian
from transformers.models.mbart import modeling_mbart
from transformers.models.pegasus import modeling_pegasus

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import Blueprint, CTranslate2Form, VocabularyForm
from collab_heads.contract.registry import register
from collab_heads.layers.attention import attend, cached_key_value, replacing, takes_cache

STACKS = ("encoder_attention_heads", "decoder_attention_heads")
NEVER = -1e9  # added to the logit of the padding


@takes_cache
def attention(self, hidden_states, key_value_states=None, cache=None, attention_mask=None, **kwargs):
    """Attend, as `forward` of every class, with the stock signature."""
    is_cross = key_value_states is not None
    states = key_value_states if is_cross else hidden_states
    key, value = cached_key_value(self, self.v_proj, states, cache, is_cross=is_cross)
    output, weights = attend(
        self, hidden_states, key, value, attention_mask, eager=self.eager, dropout=self.dropout, **kwargs
    )
    return self.out_proj(output), weights


class MarianForm(CTranslate2Form):
    """Marian for CTranslate2, whose converter starts the decoder from zeros and leaves out the last row as the padding.

    That is right for models of the Marian toolkit, whose padding transformers adds at the end, with an embedding of
    zeros. Others have another padding, or one that was trained. So here all rows stay, the decoder starts from the
    embedding of its first token, which may be zeros, and the padding is never chosen.
    """

    def token_ids(self, model):
        """Return the padding."""
        return {"<pad>": model.config.pad_token_id}

    @contextmanager
    def converting(self, part):
        """Have the converter keep all rows, and start from the embedding of the first token."""
        from ctranslate2.converters.transformers import _MODEL_LOADERS, BartLoader, MarianMTLoader

        class StartingFromPadding(MarianMTLoader):
            def set_decoder(self, spec, decoder):
                BartLoader.set_decoder(self, spec, decoder)

            def _remove_pad_weights(self, spec):
                pass

            def get_vocabulary(self, model, tokenizer):
                return BartLoader.get_vocabulary(self, model, tokenizer)

            def set_config(self, config, model, tokenizer):
                super().set_config(config, model, tokenizer)
                config.decoder_start_token = self.get_vocabulary(model, tokenizer)[model.config.decoder_start_token_id]

        name = type(part.config).__name__
        before = _MODEL_LOADERS[name]
        with torch.no_grad():
            part.final_logits_bias[:, part.config.pad_token_id] = NEVER
        _MODEL_LOADERS[name] = StartingFromPadding()
        try:
            yield
        finally:
            _MODEL_LOADERS[name] = before


@register
class MarianAdapter(AttentionAdapter):
    """An adapter for BART, mBART, Marian, Pegasus and M2M100: encoder-decoders, and their decoders alone."""

    model_types = ("marian", "bart", "mbart", "pegasus", "m2m_100")
    paths = {
        r"encoder\.layers\.(\d+)\.self_attn": "enc-self",
        r"decoder\.layers\.(\d+)\.self_attn": "dec-self",
        r"decoder\.layers\.(\d+)\.encoder_attn": "dec-enc",
    }
    replacements = replacing(
        attention,
        modeling_bart.BartAttention,
        modeling_m2m_100.M2M100Attention,
        modeling_mbart.MBartAttention,
        modeling_marian.MarianAttention,
        modeling_pegasus.PegasusAttention,
    )
    blueprints = {
        "marian": Blueprint(
            sizes={
                "d_model": ("d_model",),
                "num_layers": ("encoder_layers", "decoder_layers"),
                "num_heads": ("encoder_attention_heads", "decoder_attention_heads"),
                "d_ff": ("encoder_ffn_dim", "decoder_ffn_dim"),
                "dropout": ("dropout",),
                "max_length": ("max_position_embeddings",),
            },
            usual={"scale_embedding": True, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
            vocabulary=VocabularyForm(
                "MarianTokenizer",
                special={"eos_id": 0, "unk_id": 1, "pad_id": -1},
                files=("source.spm", "target.spm"),
                table=True,
            ),
        )
    }
    ctranslate2 = {
        "marian": MarianForm(head_entries=STACKS, chooses_padding=False),
        "bart": CTranslate2Form(head_entries=STACKS, entries={"normalize_before": False}),
        "mbart": CTranslate2Form(head_entries=STACKS, entries={"normalize_before": True}),
        "pegasus": CTranslate2Form(
            head_entries=STACKS, entries={"normalize_before": True, "normalize_embedding": False}
        ),
        "m2m_100": CTranslate2Form(head_entries=STACKS),
    }
    query, key, value, output, heads = "q_proj", "k_proj", "v_proj", "out_proj", "num_heads"
    feed_forwards = (
        FeedForwardNames(r"encoder\.layers\.\d+", ("fc1",), "fc2", "activation_fn", entry="encoder_ffn_dim"),
        FeedForwardNames(r"decoder\.layers\.\d+", ("fc1",), "fc2", "activation_fn", entry="decoder_ffn_dim"),
    )
