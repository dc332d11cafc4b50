"""The families and kinds that the contract runs over: a new one joins by being listed here.

Models are tiny, random and initialised large, so that attention is far from uniform and mistakes show.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    MarianConfig,
    MarianForCausalLM,
    MarianModel,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
)

import collab_heads

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, LAYERS = 61, 32, 4, 8, 2
EXACT = HEADS * HEAD_WIDTH
EXACT64 = 1e-11  # float64 sums in another order; errors seen: 4e-14 and below
FP32_NOISE = 2e-5  # the same in float32; errors seen: 3e-6
KINDS = ("shared", "per_head")


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

    @property
    def num_sites(self) -> int:
        return sum(self.roles.values())


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


def bert_config(**more) -> BertConfig:
    return BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.3,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **more,
    )


def marian_config(**more) -> MarianConfig:
    return MarianConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        max_position_embeddings=64,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.3,
        dropout=0.1,
        attention_dropout=0.1,
        **more,
    )


def t5_config(**more) -> T5Config:
    return T5Config(
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


def make(cls: type[PreTrainedModel], config) -> PreTrainedModel:
    """A seeded model in evaluation mode whose biases and norms are random, too."""
    torch.manual_seed(0)
    model = cls(config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "relative_attention_bias" in name:
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)
        elif name.endswith(".o.weight"):
            parameter.data *= 12.0  # T5: else the tied embedding repeats one token whatever attention says
        elif name.endswith("shared.weight"):
            parameter.data *= 0.3
    return model.eval()


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "bert",
            lambda: make(BertForSequenceClassification, bert_config()),
            {"enc-self": LAYERS},
            BertModel,
        ),
        Family(
            "bert-decoder",
            lambda: make(BertLMHeadModel, bert_config(is_decoder=True, add_cross_attention=True)),
            {"dec-self": LAYERS, "dec-enc": LAYERS},
            BertModel,
            inputs=cross_batch,
        ),
        Family(
            "marian",
            lambda: make(MarianMTModel, marian_config()),
            {"enc-self": LAYERS, "dec-self": LAYERS, "dec-enc": LAYERS},
            MarianModel,
            inputs=lambda: batch(decoder=True),
            generates=True,
        ),
        Family(
            "marian-decoder",
            lambda: make(MarianForCausalLM, marian_config(is_decoder=True)),
            {"dec-self": LAYERS, "dec-enc": LAYERS},
            MarianForCausalLM,
            inputs=cross_batch,
        ),
        Family(
            "t5",
            lambda: make(T5ForConditionalGeneration, t5_config()),
            {"enc-self": LAYERS, "dec-self": LAYERS, "dec-enc": LAYERS},
            T5Model,
            inputs=lambda: batch(decoder=True),
            generates=True,
            biased=False,
        ),
        Family(
            "t5-encoder",
            lambda: make(T5EncoderModel, t5_config()),
            {"enc-self": LAYERS},
            T5EncoderModel,
            biased=False,
        ),
    )
}


def swap(model: PreTrainedModel, kind: str, dim=None, **more):
    """The swap that the contract is about."""
    return collab_heads.swap_to_collaborative(model, dim_shared_query_key=dim, mixing=kind, **more)


def output(model: PreTrainedModel, inputs: dict) -> torch.Tensor:
    """The first tensor that the model returns: logits or hidden states."""
    with torch.no_grad():
        result = model(**cast(inputs, model.dtype))
    return result.logits if "logits" in result else result.last_hidden_state


def set_backend(model: PreTrainedModel, backend: str) -> None:
    """Choose the attention backend, in inner stacks too (transformers 5.17 does not reach T5's)."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(backend)


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    """Floating-point inputs in the dtype of the model."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def sites(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """path -> attention module."""
    found = collab_heads.get_adapter(model).sites(model)
    return {site.path: model.base_model.get_submodule(site.path) for site in found}
