"""The families that the contract runs over: a new one joins by being listed here.

Models are tiny, random and initialised large, so that attention is far from uniform and mistakes show.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch
from model_configs import (
    albert_config,
    audio_config,
    bert_config,
    distilbert_config,
    esm_config,
    gpt2_config,
    marian_config,
    opt_config,
    rotary_config,
    stack_config,
    t5_config,
    vit_config,
    whisper_config,
)
from model_inputs import (
    batch,
    clip_batch,
    cross_batch,
    image_batch,
    lone_batch,
    siglip_batch,
    spectrum_batch,
    wave_batch,
)
from model_sizes import EXACT64, FP32_NOISE, HEAD_WIDTH, KINDS, LAYERS
from transformers import (
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
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForCausalLM,
    ElectraForSequenceClassification,
    ElectraModel,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmModel,
    EuroBertConfig,
    EuroBertForSequenceClassification,
    EuroBertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GemmaConfig,
    GemmaForCausalLM,
    GemmaModel,
    GPT2LMHeadModel,
    GPT2Model,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteModel,
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
    MinistralConfig,
    MinistralForCausalLM,
    MinistralModel,
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
    WhisperForConditionalGeneration,
    WhisperModel,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)


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


# Else the tied embedding repeats one token whatever attention says: model type -> part of a name -> factor.
SHARPENED = {
    "t5": {".o.weight": 12.0},
    "mt5": {".o.weight": 12.0},
    "pegasus": {"_attn.q_proj": 6.0, "encoder_attn.out_proj": 6.0},
    "m2m_100": {"encoder_attn.q_proj": 6.0, "encoder_attn.out_proj": 12.0},
}


MADE: dict[tuple, tuple[PreTrainedModel, torch.Tensor]] = {}  # with the state of torch's generator after it


def make(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A copy of a seeded model in evaluation mode whose biases and norms are random, too: copies take half the time."""
    key = cls, config.to_json_string(use_diff=False)
    if key not in MADE:
        MADE[key] = seeded(cls, config), torch.get_rng_state()
    torch.set_rng_state(MADE[key][1])
    return copy.deepcopy(MADE[key][0])


def seeded(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
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


def deberta(name: str, **more) -> Family:
    """As DeBERTa-v3, whose positions are made by the projections of queries and keys."""
    positions = {"pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "position_biased_input": False}
    options = {"relative_attention": True, "share_att_key": True, "position_buckets": 4, "type_vocab_size": 0}
    return Family(
        name,
        lambda: make(
            DebertaV2ForSequenceClassification, bert_config(DebertaV2Config, **{**positions, **options, **more})
        ),
        {"enc-self": LAYERS},
        DebertaV2Model,
        shares=False,
        narrows=False,
    )


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


def eurobert(name: str) -> Family:
    return Family(
        name,
        lambda: make(EuroBertForSequenceClassification, rotary_config(EuroBertConfig, attention_bias=True)),
        {"enc-self": LAYERS},
        EuroBertModel,
        exact64=FP32_NOISE,  # its norms are in float32
        eager64=FP32_NOISE,
        shares=False,
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
        deberta("deberta-v2"),
        *like(
            "deberta-v2", deberta("deberta-v2-far", position_buckets=-1, position_biased_input=True, type_vocab_size=2)
        ),
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
                "ministral",
                MinistralConfig,
                MinistralForCausalLM,
                MinistralModel,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            ),
            rotary("gemma", GemmaConfig, GemmaForCausalLM, GemmaModel),
            rotary(
                "granite",
                GraniteConfig,
                GraniteForCausalLM,
                GraniteModel,
                attention_multiplier=0.3,
                residual_multiplier=0.6,
                embedding_multiplier=3.0,
                logits_scaling=2.0,
            ),
            eurobert("eurobert"),
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


LAYOUTS = (*LAYOUTS, "t5", "t5-encoder", "vit", "opt", "mpnet", "deberta-v2", "esm", "qwen3", "modernbert")


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
