"""The models of the GPU benchmark: shapes of known models with random weights, and every change of their attention."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, PreTrainedModel

from collab_heads import (
    collaborative_config,
    get_adapter,
    prune_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)

SEED = 0
SPREAD = 0.05  # standard deviation of weights and biases: large enough for attention that is far from uniform
QUICK = {"vocab_size": 128, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Shape:
    """A model to build: its type, its auto class, its sizes, and the sizes that a quick try replaces."""

    model_type: str
    auto: type
    sizes: dict
    quick: dict


SHAPES = {
    "encoder": Shape(  # BERT-base
        "bert",
        AutoModelForSequenceClassification,
        {"initializer_range": SPREAD},
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64} | QUICK,
    ),
    "translator": Shape(  # a base-sized Marian
        "marian",
        AutoModelForSeq2SeqLM,
        {
            "vocab_size": 32000,
            "pad_token_id": 31999,
            "decoder_start_token_id": 31999,
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "scale_embedding": True,
            "dropout": 0.1,
            "init_std": SPREAD,
        },
        {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"pad_token_id": 127, "decoder_start_token_id": 127}
        | QUICK,
    ),
}


def half_of_the_heads(model: PreTrainedModel) -> None:
    """Remove the second half of the heads of every site."""
    sites = get_adapter(model).sites(model)
    prune_heads(model, heads={site.path: list(range(site.num_heads // 2, site.num_heads)) for site in sites})


@dataclass(frozen=True)
class Variant:
    """A recipe for a variant.

    Attributes:
        born: arguments of `collaborative_config`; random weights are enough, because only time is measured.
        change: changes a copy of the stock model in place.
    """

    born: dict | None = None
    change: Callable[[PreTrainedModel], object] = lambda model: None


def swap(mixing: str, values: float | None = None) -> Variant:
    """Return a swap at full width."""
    return Variant(change=partial(swap_to_collaborative, dim_shared_query_key=1.0, dim_value=values, kind=mixing))


def narrow(share: float, mixing: str, values: float | None = None) -> Variant:
    """Return a variant with shares of the width of queries and keys, and of values."""
    return Variant({"dim_shared_query_key": share, "dim_value": values, "kind": mixing})


STOCK = "stock"
VARIANTS = {  # in order of importance
    STOCK: Variant(),  # a second copy against the first: what the clock alone makes of one model
    "per_head 1/2, values 1/2": narrow(1 / 2, "per_head", 1 / 2),
    "shared 1/3": narrow(1 / 3, "shared"),
    "half of the heads": Variant(change=half_of_the_heads),
    "per_head 1/4, values 1/4": narrow(1 / 4, "per_head", 1 / 4),
    "values 1/2": Variant({"dim_value": 1 / 2}),
    "gates": Variant(change=swap_to_gated),
    "alphas": Variant(change=swap_to_alpha),
    "per_head 1": swap("per_head"),
    "shared 1": swap("shared"),
}
COMPILED = list(VARIANTS)[:4]  # where each costs a compilation
LOSSLESS = {
    **{name: VARIANTS[name] for name in ("per_head 1", "shared 1", "gates", "alphas")},
    "per_head 1, values 1": swap("per_head", 1.0),
    "shared 1, values 1": swap("shared", 1.0),
}


class Models:
    """The models on the CPU in float32, each built once, and their copies on the device."""

    def __init__(self, device: torch.device, *, quick: bool = False):
        self.device, self.quick = device, quick
        self.made: dict[tuple[str, str], PreTrainedModel] = {}

    def fresh(self, name: str, born: dict | None) -> PreTrainedModel:
        """Build a model of a shape in evaluation mode, with random weights and biases."""
        shape = SHAPES[name]
        config = AutoConfig.for_model(shape.model_type, **shape.sizes | (shape.quick if self.quick else {}))
        if born is not None:
            config = collaborative_config(config, **born)
        torch.manual_seed(SEED)
        model = shape.auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith("bias"):  # zeros else, and the bias of the query would not be seen
                    parameter.normal_(0.0, SPREAD)
        return model

    def on_cpu(self, name: str, variant: str) -> PreTrainedModel:
        """Return a variant of a shape on the CPU; callers copy it."""
        if (name, variant) not in self.made:
            how = (VARIANTS | LOSSLESS)[variant]
            if how.born is not None or variant == STOCK:
                model = self.fresh(name, how.born)
            else:
                model = copy.deepcopy(self.on_cpu(name, STOCK))
                how.change(model)
            self.made[name, variant] = model
        return self.made[name, variant]

    def on_device(self, name: str, variant: str, dtype: torch.dtype, backend: str) -> PreTrainedModel:
        """Return a copy of a model on the device, with the given dtype and attention backend."""
        model = copy.deepcopy(self.on_cpu(name, variant)).to(self.device, dtype)
        model.set_attn_implementation(backend)
        return model
