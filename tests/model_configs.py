"""Configs of the tiny models: two layers, width 32, four heads."""

from model_sizes import END, FRAMES, HEAD_WIDTH, HEADS, IMAGE, KEY_HEADS, LAYERS, MEL, PATCH, TEXT, VOCABULARY, WIDTH
from transformers import (
    AlbertConfig,
    BertConfig,
    DistilBertConfig,
    EsmConfig,
    GPT2Config,
    M2M100Config,
    MarianConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)


def bert_config(cls: type[PreTrainedConfig] = BertConfig, **more) -> PreTrainedConfig:
    return cls(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=37,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **{"num_hidden_layers": LAYERS, "initializer_range": 0.3, **TEXT, **more},
    )


def esm_config(positions: str = "absolute", **more) -> EsmConfig:
    """Without its scaling for masked tokens, which makes NaN of a sentence that is nothing but padding."""
    return bert_config(
        EsmConfig,
        position_embedding_type=positions,
        pad_token_id=1,
        mask_token_id=2,
        token_dropout=False,
        emb_layer_norm_before=True,
        **more,
    )


def albert_config(**more) -> AlbertConfig:
    """Its norm's epsilon is far from the default, so that a lost one shows."""
    return bert_config(AlbertConfig, embedding_size=16, initializer_range=0.2, layer_norm_eps=1e-3, **more)


def distilbert_config() -> DistilBertConfig:
    return DistilBertConfig(
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=37,
        initializer_range=0.3,
        dropout=0.1,
        attention_dropout=0.1,
        **TEXT,
    )


def vit_config(cls: type[PreTrainedConfig] = ViTConfig, **more) -> PreTrainedConfig:
    return cls(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        initializer_range=0.3,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=IMAGE,
        patch_size=PATCH,
        encoder_stride=PATCH,
        **more,
    )


def stack_config(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A stack of CLIP or SigLIP, for texts or images."""
    return cls(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        projection_dim=24,
        attention_dropout=0.1,
        initializer_factor=3.0,
        image_size=IMAGE,
        patch_size=PATCH,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=1,
        **TEXT,
    )


def whisper_config() -> WhisperConfig:
    """Without what keeps it from writing some tokens, none of which exist here."""
    return marian_config(
        WhisperConfig,
        num_mel_bins=MEL,
        max_source_positions=FRAMES,
        max_target_positions=64,
        bos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def audio_config(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Normed frame by frame: the usual norm over time would see padding."""
    return cls(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        conv_dim=(16, 16),
        conv_kernel=(4, 3),
        conv_stride=(2, 2),
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.3,
        layerdrop=0.0,  # training steps must repeat
        mask_time_prob=0.0,
        pad_token_id=0,
    )


def marian_config(cls: type[PreTrainedConfig] = MarianConfig, **more) -> PreTrainedConfig:
    """Of Marian and of all of BART's lineage. Without layer drop: training steps must repeat."""
    return cls(
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        pad_token_id=1,
        eos_token_id=2,
        # as pretrained models have it; M2M100 gives padding no position, so that stock caches disagree after it
        decoder_start_token_id=2 if cls is M2M100Config else 1,
        init_std=0.3,
        dropout=0.1,
        attention_dropout=0.1,
        **TEXT,
        **more,
    )


def gpt2_config(**more) -> GPT2Config:
    """Its scale differs from layer to layer, so that one that is not read from the module shows."""
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=37,
        initializer_range=0.3,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        **more,
    )


def t5_config(cls: type[PreTrainedConfig] = T5Config, **more) -> PreTrainedConfig:
    return cls(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD_WIDTH,
        num_heads=HEADS,
        num_layers=LAYERS,
        d_ff=37,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        **more,
    )


def rotary_config(cls: type[PreTrainedConfig], **more) -> PreTrainedConfig:
    """Two heads share a key head."""
    return cls(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_WIDTH,
        intermediate_size=37,
        initializer_range=0.3,
        attention_dropout=0.1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **TEXT,
        **more,
    )


def opt_config(**more) -> OPTConfig:
    return OPTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=37,
        init_std=0.3,
        dropout=0.1,
        attention_dropout=0.1,
        **{"word_embed_proj_dim": WIDTH, **TEXT, **more},
    )
