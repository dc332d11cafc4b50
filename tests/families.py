"""The families and kinds that the contract runs over: a new one joins by being listed here.

Models are tiny, random and initialised large, so that attention is far from uniform and mistakes show.
"""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AlbertModel,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BartModel,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BioGptConfig,
    BioGptForCausalLM,
    BioGptModel,
    CamembertConfig,
    CamembertForCausalLM,
    CamembertForSequenceClassification,
    CamembertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForCausalLM,
    ElectraForSequenceClassification,
    ElectraModel,
    EsmConfig,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    HubertConfig,
    HubertForCTC,
    HubertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Model,
    MarianConfig,
    MarianForCausalLM,
    MarianModel,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    MT5Config,
    MT5EncoderModel,
    MT5ForConditionalGeneration,
    MT5Model,
    OPTConfig,
    OPTForCausalLM,
    OPTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForSequenceClassification,
    RobertaModel,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperModel,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

import collab_heads

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, LAYERS = 61, 32, 4, 8, 2
KEY_HEADS = 2  # where heads share them
EXACT = HEADS * HEAD_WIDTH
EXACT64 = 1e-11  # float64 sums in another order; errors seen: 4e-14 and below
FP32_NOISE = 2e-5  # the same in float32; errors seen: 3e-6
IMAGE, PATCH = 12, 4  # pixels
MEL, FRAMES, SAMPLES = 8, 10, 50  # of audio: bins of a spectrum, frames that attend (Whisper), samples of a wave
KINDS = ("shared", "per_head")
# The same with narrower values, and those alone; what depends on the values runs over these.
WITH_VALUES = ("stock+values", "shared+values", "per_head+values")
NARROW = {"shared": 20, "per_head": 16, "stock+values": 16, "shared+values": 20, "per_head+values": 16}  # of EXACT
NARROW_VALUES = 16  # of EXACT


@dataclass(frozen=True)
class Family:
    """One row of the contract."""

    name: str
    build: Callable[[], PreTrainedModel]
    roles: dict[str, int]  # role -> number of sites
    base: type[PreTrainedModel]
    inputs: Callable[[], dict[str, torch.Tensor]] = field(default=lambda: batch())
    generates: bool = False
    biased: bool = True  # whether the query has a bias
    maps: int | None = None  # attention maps of one forward pass, where that is not one per site
    exact64: float = EXACT64  # tolerance in float64
    eager64: float = EXACT64  # the same of the eager backend
    shares: bool = True  # whether heads can share a query/key projection
    narrows: bool = True  # whether each head's queries and keys can be narrower
    like: str | None = None  # the family whose attention has the same forward, where it is not this one's own
    beside: str | None = None  # the family that runs by default, where forwards differ by a norm, a window or a mask

    @property
    def num_sites(self) -> int:
        return sum(self.roles.values())

    @property
    def num_maps(self) -> int:
        return self.maps or self.num_sites

    @property
    def padded(self) -> bool:
        return "attention_mask" in self.inputs()


def batch(decoder: bool = False) -> dict[str, torch.Tensor]:
    """A padded batch of three sentences."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask[2, 7:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if decoder:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 6), generator=generator)
    return inputs


def cross_batch() -> dict[str, torch.Tensor]:
    """A batch for a lone decoder with cross-attention."""
    inputs = batch()
    states = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, 4:] = 0
    # left padding, as decoders are batched
    return {
        "input_ids": inputs["input_ids"].flip(1),
        "attention_mask": inputs["attention_mask"].flip(1),
        "encoder_hidden_states": states,
        "encoder_attention_mask": mask,
    }


def lone_batch() -> dict[str, torch.Tensor]:
    """A batch for a lone decoder without cross-attention, padded before its sentences, but for their first token.

    So every token has one to attend to: eager softmaxes in float32 make NaN of a row of float64's lowest numbers.
    """
    inputs = {name: value.flip(1) for name, value in batch().items()}
    inputs["attention_mask"][:, 0] = 1
    return inputs


def image_batch(masked: bool = False) -> dict[str, torch.Tensor]:
    """Three images; with a mask over the class token, the distillation token and the patches."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"pixel_values": torch.randn(3, 3, IMAGE, IMAGE, generator=generator)}
    if masked:
        inputs["attention_mask"] = torch.ones(3, 2 + (IMAGE // PATCH) ** 2, dtype=torch.long)
        inputs["attention_mask"][1, 6:] = 0
    return inputs


def clip_batch() -> dict[str, torch.Tensor]:
    """Three texts with their ends, and a token that is left out: a causal stack does not see padding after texts."""
    inputs = batch()
    inputs["input_ids"].clamp_(max=END - 1)
    inputs["input_ids"].scatter_(1, inputs["attention_mask"].sum(1, keepdim=True) - 1, END)
    inputs["attention_mask"][:, 2] = 0
    return inputs


def siglip_batch() -> dict[str, torch.Tensor]:
    """Three texts padded on the left: SigLIP reads the last position."""
    return {name: value.flip(1) for name, value in batch().items()}


def spectrum_batch() -> dict[str, torch.Tensor]:
    """Three spectra as Whisper takes them, and what its decoder reads."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, MEL, 2 * FRAMES, generator=generator)
    return {"input_features": features, "decoder_input_ids": batch(decoder=True)["decoder_input_ids"]}


def wave_batch() -> dict[str, torch.Tensor]:
    """Three waves of different lengths."""
    mask = torch.ones(3, SAMPLES, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, 37:] = 0
    values = torch.randn(3, SAMPLES, generator=torch.Generator().manual_seed(1))
    return {"input_values": values * mask, "attention_mask": mask}


def repadded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch with other content in its padding."""
    changed, padded = dict(inputs), inputs["attention_mask"] == 0
    if "input_ids" in inputs:
        changed["input_ids"] = torch.where(padded, 7, inputs["input_ids"])
    if "encoder_attention_mask" in inputs:
        hidden = (inputs["encoder_attention_mask"] == 0)[..., None]
        changed["encoder_hidden_states"] = inputs["encoder_hidden_states"].masked_fill(hidden, 9.0)
    if "input_values" in inputs:
        changed["input_values"] = inputs["input_values"].masked_fill(padded, 9.0)
    if "pixel_values" in inputs and "input_ids" not in inputs:  # the mask is that of the texts where there are any
        patches = padded[:, -((IMAGE // PATCH) ** 2) :].view(-1, 1, IMAGE // PATCH, IMAGE // PATCH)
        pixels = patches.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
        changed["pixel_values"] = inputs["pixel_values"].masked_fill(pixels, 9.0)
    return changed


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


TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
END = VOCABULARY - 1  # of the texts that CLIP reads


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


# Else the tied embedding repeats one token whatever attention says: model type -> part of a name -> factor.
SHARPENED = {
    "t5": {".o.weight": 12.0},
    "mt5": {".o.weight": 12.0},
    "pegasus": {"_attn.q_proj": 6.0, "encoder_attn.out_proj": 6.0},
    "m2m_100": {"encoder_attn.q_proj": 6.0, "encoder_attn.out_proj": 12.0},
}


def make(cls: type[PreTrainedModel], config) -> PreTrainedModel:
    """A seeded model in evaluation mode whose biases and norms are random, too."""
    torch.manual_seed(0)
    model = cls(config)
    generator = torch.Generator().manual_seed(3)
    # a random ALBERT, or an OPT that normalises last, makes one token of all where its norms' biases are large
    norm_last = not getattr(config, "do_layer_norm_before", True)
    noise = 0.1 if config.model_type == "albert" or norm_last else 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "relative_attention_bias" in name:
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
        elif name.endswith("shared.weight"):
            parameter.data *= 0.3
        else:
            for part, factor in SHARPENED.get(config.model_type, {}).items():
                parameter.data *= factor if part in name else 1.0
    return model.eval()


def bert_encoder(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base) -> Family:
    return Family(name, lambda: make(task, bert_config(config)), {"enc-self": LAYERS}, base)


def bert_decoder(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base) -> Family:
    return Family(
        name,
        lambda: make(task, bert_config(config, is_decoder=True, add_cross_attention=True)),
        {"dec-self": LAYERS, "dec-enc": LAYERS},
        base,
        inputs=cross_batch,
    )


def beside(name: str, *others: Family) -> tuple[Family, ...]:
    """Families whose attention is another one's but for a norm, a window or a mask: they run as siblings do."""
    return tuple(replace(family, beside=name) for family in others)


def like(name: str, *siblings: Family) -> tuple[Family, ...]:
    """Families whose attention is a copy of another family's: they run in `make test-slow`."""
    return tuple(replace(family, like=name) for family in siblings)


def albert(name: str, num_sites: int, maps: int, **more) -> Family:
    return Family(
        name,
        lambda: make(AlbertForSequenceClassification, albert_config(**more)),
        {"enc-self": num_sites},
        AlbertModel,
        maps=maps,
    )


def translator(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base, **more) -> Family:
    return Family(
        name,
        lambda: make(task, marian_config(config, **more)),
        {"enc-self": LAYERS, "dec-self": LAYERS, "dec-enc": LAYERS},
        base,
        inputs=lambda: batch(decoder=True),
        generates=True,
    )


def lone_decoder(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel]) -> Family:
    return Family(
        name,
        lambda: make(task, marian_config(config, is_decoder=True)),
        {"dec-self": LAYERS, "dec-enc": LAYERS},
        task,
        inputs=cross_batch,
    )


def gpt2(name: str, *, cross: bool) -> Family:
    roles = {"dec-self": LAYERS, "dec-enc": LAYERS} if cross else {"dec-self": LAYERS}
    return Family(
        name,
        lambda: make(GPT2LMHeadModel, gpt2_config(add_cross_attention=cross)),
        roles,
        GPT2Model,
        inputs=cross_batch if cross else lone_batch,
    )


def t5(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base) -> Family:
    return Family(
        name,
        lambda: make(task, t5_config(config)),
        {"enc-self": LAYERS, "dec-self": LAYERS, "dec-enc": LAYERS},
        base,
        inputs=lambda: batch(decoder=True),
        generates=True,
        biased=False,
    )


def t5_encoder(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel]) -> Family:
    return Family(name, lambda: make(task, t5_config(config)), {"enc-self": LAYERS}, task, biased=False)


def vit(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base, *, biased: bool, masked: bool):
    return Family(
        name,
        lambda: make(task, vit_config(config, qkv_bias=biased)),
        {"enc-self": LAYERS},
        base,
        inputs=lambda: image_batch(masked),
        biased=biased,
        eager64=FP32_NOISE,  # its eager softmax is in float32
    )


def rotary(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base, **more) -> Family:
    return Family(
        name,
        lambda: make(task, rotary_config(config, **more)),
        {"dec-self": LAYERS},
        base,
        inputs=lone_batch,
        generates=True,
        biased="attention_bias" in more or config is Qwen2Config,
        exact64=FP32_NOISE,  # their norms are in float32
        eager64=FP32_NOISE,
        shares=False,
        narrows=config not in (Qwen3Config, Gemma3TextConfig),  # whose queries and keys are normed
    )


def esm(name: str, task: type[PreTrainedModel]) -> Family:
    return Family(name, lambda: make(task, esm_config()), {"enc-self": LAYERS}, EsmModel)


def rotary_esm(name: str) -> Family:
    return Family(
        name,
        lambda: make(EsmForSequenceClassification, esm_config("rotary")),
        {"enc-self": LAYERS},
        EsmModel,
        exact64=FP32_NOISE,  # its rotations are in float32
        eager64=FP32_NOISE,
        shares=False,
    )


def causal_esm(name: str) -> Family:
    def build() -> PreTrainedModel:
        return make(EsmForMaskedLM, esm_config(is_decoder=True))

    return Family(name, build, {"dec-self": LAYERS}, EsmModel, inputs=lone_batch)


def opt(name: str, **more) -> Family:
    return Family(
        name,
        lambda: make(OPTForCausalLM, opt_config(**more)),
        {"dec-self": LAYERS},
        OPTModel,
        inputs=lone_batch,
        generates=True,
        biased=more.get("enable_bias", True),
        eager64=FP32_NOISE,  # its eager softmax is in float32
    )


def modernbert(name: str) -> Family:
    """Its second layer looks at a window."""
    return Family(
        name,
        lambda: make(
            ModernBertForSequenceClassification,
            bert_config(
                ModernBertConfig,
                layer_types=["full_attention", "sliding_attention"],
                local_attention=8,  # so that all padding sees a token: float64 has NaN else
                attention_bias=True,
                attention_dropout=0.1,
                mlp_dropout=0.1,
                pad_token_id=1,
            ),
        ),
        {"enc-self": LAYERS},
        ModernBertModel,
        exact64=FP32_NOISE,  # its rotations are in float32
        eager64=FP32_NOISE,
        shares=False,
    )


def text_and_image(name: str, model: type[PreTrainedModel], roles: dict[str, int], texts, *configs) -> Family:
    """CLIP or SigLIP as a whole; `configs` are those of the whole, of its texts and of its images."""
    whole, *stacks = configs

    def build() -> PreTrainedModel:
        text, vision = (stack_config(stack).to_dict() for stack in stacks)
        more = {"projection_dim": 24, "logit_scale_init_value": 0.0, "initializer_factor": 3.0}
        return make(model, whole(text_config=text, vision_config=vision, **more))

    return Family(name, build, roles, model, lambda: texts() | image_batch(), eager64=FP32_NOISE)


def stack(name: str, model: type[PreTrainedModel], config: type[PreTrainedConfig], role: str, inputs) -> Family:
    """One of their stacks alone."""
    return Family(name, lambda: make(model, stack_config(config)), {role: LAYERS}, model, inputs, eager64=FP32_NOISE)


def audio(name: str, config: type[PreTrainedConfig], task: type[PreTrainedModel], base) -> Family:
    return Family(name, lambda: make(task, audio_config(config)), {"enc-self": LAYERS}, base, inputs=wave_batch)


FAMILIES = {
    family.name: family
    for family in (
        bert_encoder("bert", BertConfig, BertForSequenceClassification, BertModel),
        *like(
            "bert",
            bert_encoder("roberta", RobertaConfig, RobertaForSequenceClassification, RobertaModel),
            bert_encoder("xlm-roberta", XLMRobertaConfig, XLMRobertaForSequenceClassification, XLMRobertaModel),
            bert_encoder("camembert", CamembertConfig, CamembertForSequenceClassification, CamembertModel),
            bert_encoder("electra", ElectraConfig, ElectraForSequenceClassification, ElectraModel),
        ),
        bert_decoder("bert-decoder", BertConfig, BertLMHeadModel, BertModel),
        *like(
            "bert-decoder",
            bert_decoder("roberta-decoder", RobertaConfig, RobertaForCausalLM, RobertaModel),
            bert_decoder("xlm-roberta-decoder", XLMRobertaConfig, XLMRobertaForCausalLM, XLMRobertaModel),
            bert_decoder("camembert-decoder", CamembertConfig, CamembertForCausalLM, CamembertModel),
            bert_decoder("electra-decoder", ElectraConfig, ElectraForCausalLM, ElectraModel),
        ),
        Family(
            "distilbert",
            lambda: make(DistilBertForSequenceClassification, distilbert_config()),
            {"enc-self": LAYERS},
            DistilBertModel,
        ),
        albert("albert-groups", 4, 6, num_hidden_layers=3, num_hidden_groups=2, inner_group_num=2),
        *like("albert-groups", albert("albert", 1, 3, num_hidden_layers=3)),
        translator("marian", MarianConfig, MarianMTModel, MarianModel),
        *like(
            "marian",
            translator("bart", BartConfig, BartForConditionalGeneration, BartModel),
            translator("mbart", MBartConfig, MBartForConditionalGeneration, MBartModel),
            translator("pegasus", PegasusConfig, PegasusForConditionalGeneration, PegasusModel, scale_embedding=True),
            translator("m2m_100", M2M100Config, M2M100ForConditionalGeneration, M2M100Model),
            Family(
                "biogpt",
                lambda: make(BioGptForCausalLM, bert_config(BioGptConfig)),
                {"dec-self": LAYERS},
                BioGptModel,
                inputs=lone_batch,
                generates=True,
            ),
        ),
        lone_decoder("marian-decoder", MarianConfig, MarianForCausalLM),
        *like("marian-decoder", lone_decoder("bart-decoder", BartConfig, BartForCausalLM)),
        gpt2("gpt2-decoder", cross=True),
        *like("gpt2-decoder", gpt2("gpt2", cross=False)),
        t5("t5", T5Config, T5ForConditionalGeneration, T5Model),
        *like("t5", t5("mt5", MT5Config, MT5ForConditionalGeneration, MT5Model)),
        t5_encoder("t5-encoder", T5Config, T5EncoderModel),
        *like("t5-encoder", t5_encoder("mt5-encoder", MT5Config, MT5EncoderModel)),
        bert_encoder("mpnet", MPNetConfig, MPNetForSequenceClassification, MPNetModel),
        esm("esm", EsmForSequenceClassification),
        *like("esm", esm("esm-lm", EsmForMaskedLM)),
        *beside("esm", causal_esm("esm-causal")),
        opt("opt"),
        *like(
            "opt",
            # as the one of 350 million parameters, and as Galactica
            opt("opt-350m", do_layer_norm_before=False, word_embed_proj_dim=16),
            opt("opt-unbiased", enable_bias=False, layer_norm_elementwise_affine=False),
        ),
        vit("vit", ViTConfig, ViTForImageClassification, ViTModel, biased=True, masked=False),
        *like("vit", vit("dinov2", Dinov2Config, Dinov2ForImageClassification, Dinov2Model, biased=True, masked=False)),
        text_and_image(
            "clip",
            CLIPModel,
            {"dec-self": LAYERS, "enc-self": LAYERS},
            clip_batch,
            CLIPConfig,
            CLIPTextConfig,
            CLIPVisionConfig,
        ),
        *like(
            "clip",
            stack("clip-text", CLIPTextModel, CLIPTextConfig, "dec-self", clip_batch),
            stack("clip-vision", CLIPVisionModel, CLIPVisionConfig, "enc-self", image_batch),
        ),
        text_and_image(
            "siglip",
            SiglipModel,
            {"enc-self": 2 * LAYERS},
            siglip_batch,
            SiglipConfig,
            SiglipTextConfig,
            SiglipVisionConfig,
        ),
        *like(
            "siglip",
            stack("siglip-text", SiglipTextModel, SiglipTextConfig, "enc-self", siglip_batch),
            stack("siglip-vision", SiglipVisionModel, SiglipVisionConfig, "enc-self", image_batch),
        ),
        Family(
            "whisper",
            lambda: make(WhisperForConditionalGeneration, whisper_config()),
            {"enc-self": LAYERS, "dec-self": LAYERS, "dec-enc": LAYERS},
            WhisperModel,
            inputs=spectrum_batch,
            generates=True,
        ),
        audio("wav2vec2", Wav2Vec2Config, Wav2Vec2ForCTC, Wav2Vec2Model),
        *like("wav2vec2", audio("hubert", HubertConfig, HubertForCTC, HubertModel)),
        # ViT's forward, but the only images with a mask
        vit("deit", DeiTConfig, DeiTForImageClassification, DeiTModel, biased=False, masked=True),
        modernbert("modernbert"),
        rotary_esm("esm-rotary"),
        rotary("qwen3", Qwen3Config, Qwen3ForCausalLM, Qwen3Model),  # norms of queries and keys
        *beside(
            "qwen3",
            rotary("llama", LlamaConfig, LlamaForCausalLM, LlamaModel, attention_bias=True),
            rotary("qwen2", Qwen2Config, Qwen2ForCausalLM, Qwen2Model),
            rotary("mistral", MistralConfig, MistralForCausalLM, MistralModel, sliding_window=5),
            rotary(
                "gemma3",
                Gemma3TextConfig,
                Gemma3ForCausalLM,
                Gemma3TextModel,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=HEAD_WIDTH,
            ),
        ),
    )
}


# Those whose tests all run by default. Of other adapters the core of the contract does; `make test-slow` has the rest.
ALWAYS = ("bert", "marian", "gpt2-decoder", "t5", "qwen3")

# One family of each layout, for what depends on the layout alone.
LAYOUTS = ("bert", "bert-decoder", "distilbert", "albert-groups", "marian", "marian-decoder", "gpt2-decoder")
LAYOUTS = (*LAYOUTS, "t5", "t5-encoder", "vit", "opt", "mpnet", "esm", "qwen3", "modernbert")
LAYOUTS = (*LAYOUTS, "clip", "siglip", "whisper", "wav2vec2", "biogpt")


def each(cases: Iterable) -> list:
    """Parameters of a test, a name of a family or a tuple that holds one: by default those with a forward of their own.

    The siblings of each (`Family.like`) join in `make test-slow`.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * any(map(is_sibling, case))) for case in cases]


def cannot_share(values: Iterable) -> bool:
    """Whether parameters of a test name a family and a kind of query/key projection that its sites cannot have."""
    named = [value for value in values if isinstance(value, str)]
    families = [FAMILIES[value] for value in named if value in FAMILIES]
    kinds = {value.removesuffix("+values") for value in named} & set(KINDS)
    can = {"shared": all(f.shares for f in families), "per_head": all(f.narrows for f in families)}
    return not all(can[kind] for kind in kinds)


def is_left_to_slow(values: Iterable, *, core: bool) -> bool:
    """Whether parameters of a test name a family for which it does not run by default."""
    named = [value for value in values if isinstance(value, str) and value in FAMILIES]
    return any(is_sibling(name) or (name not in ALWAYS and not core) for name in named)


def is_sibling(value: object) -> bool:
    """Whether a parameter names a family whose forward is another's, or nearly."""
    return isinstance(value, str) and value in FAMILIES and (FAMILIES[value].like or FAMILIES[value].beside) is not None


def swap(model: PreTrainedModel, kind: str, dim=None, **more):
    """The swap that the contract is about; of a kind with values these are as wide as before where `dim` is None.

    Where heads cannot share queries and keys, or those cannot be narrower, values stand in for them.
    """
    can = collab_heads.get_adapter(model).capabilities
    if "collaborative" not in can and not ("per_head" in can and kind.removesuffix("+values") == "per_head"):
        kind = "stock+values"
    if kind in WITH_VALUES:
        kind = kind.removesuffix("+values")
        more["dim_value"] = 1.0 if dim is None else NARROW_VALUES / EXACT
        kind, dim = ("shared", None) if kind == "stock" else (kind, 1.0 if dim is None else dim)
    return collab_heads.swap_to_collaborative(model, dim_shared_query_key=dim, kind=kind, **more)


def output(model: PreTrainedModel, inputs: dict) -> torch.Tensor:
    """The first tensor that the model returns: logits or hidden states."""
    with torch.no_grad():
        return main_output(model(**cast(inputs, model.dtype)))


def main_output(result) -> torch.Tensor:
    """The logits of what a model returns, or its hidden states."""
    return next(result[name] for name in ("logits", "logits_per_text", "last_hidden_state") if name in result)


# Role -> what models call its attention maps.
MAPS = {
    "enc-self": ("attentions", "encoder_attentions"),
    "dec-self": ("attentions", "decoder_attentions"),
    "dec-enc": ("cross_attentions",),
}


def attention_maps(result, roles: Iterable[str]) -> dict[str, tuple[torch.Tensor, ...]]:
    """role -> the attention maps among what a model returns, in the order of the calls: in CLIP images come first."""
    if "text_model_output" in result:
        stacks = {"enc-self": result.vision_model_output.attentions}
        text = "dec-self" if "dec-self" in roles else "enc-self"
        return stacks | {text: stacks.get(text, ()) + result.text_model_output.attentions}
    return {role: next(result[name] for name in MAPS[role] if name in result) for role in roles}


def of_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a dtype, but for the frequencies of its positions, as `from_pretrained` leaves them."""
    frequencies = {name: tensor for name, tensor in model.named_buffers() if "inv_freq" in name}
    stored = set(model.state_dict())  # ESM stores them
    model.to(dtype)
    for name, tensor in frequencies.items():
        path, _, buffer = name.rpartition(".")
        model.get_submodule(path).register_buffer(buffer, tensor, persistent=name in stored)
    return model


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its tensors where torch would put them, so that two with the same bits compute the same bits.

    Loaded tensors lie in the file's memory, at any address; there, some processors sum in another order.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    """The model after a way through pickle; torch does not pickle weight norms (wav2vec2's position embedding)."""
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        pytest.skip("the stock model does not pickle")
    return pickle.loads(pickle.dumps(model))


def set_backend(model: PreTrainedModel, backend: str) -> None:
    """Choose the attention backend, in inner stacks too (transformers 5.17 does not reach T5's).

    A model that knows the eager one only keeps it.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._supports_sdpa:
            module.set_attn_implementation(backend)


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    """Floating-point inputs in the dtype of the model."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def sites(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """path -> attention module."""
    found = collab_heads.get_adapter(model).sites(model)
    return {site.path: model.base_model.get_submodule(site.path) for site in found}
