"""Models for the tests of GGUF, and what is in the files that are written of them."""

import pytest
import torch
from opening import layers_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from collab_heads import prune_heads, prune_neurons
from collab_heads.base.extras import is_installed
from collab_heads.files.folders import GGUF
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.layout import PLAIN, weight_of, write_weight
from collab_heads.layers.weight_grid import WEIGHT_BITS
from collab_heads.serving.for_gguf import Gguf

runs = pytest.mark.skipif(not is_installed("llama_cpp"), reason="pip install llama-cpp-python")

ENGINE_NOISE = 1e-5  # float32 in another engine, of the largest logit
ROUNDED = 0.2  # what weights of few bits multiply has eight; seen: 0.1, while the weights themselves are equal
GROUPED = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
GROUPED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
GROUPED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def moved(make):
    """A seeded model whose biases and norms are far from zero and one."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


FOR_BERT = GROUPED | {"initializer_range": 0.1, "hidden_act": "gelu_new", "max_position_embeddings": 40}


def bert():
    return moved(lambda: BertModel(BertConfig(**FOR_BERT), add_pooling_layer=False))


def llama_for(tokenizer, **sizes):
    """A seeded Llama with three tokens more than a tokenizer has."""
    torch.manual_seed(0)
    sizes |= {"vocab_size": len(tokenizer) + 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**GROUPED | sizes)).eval()


PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "b",
    "##b",
    "ab",
    "##ba",
    "A",
    "\u00e9",
    "e",
    ".",
    "\u4f60",
]


def word_pieces(lowercase=True, words=PIECES, **options):
    """A tokenizer of pieces of words."""
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, **options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        each: f"[{each[:-6].upper()}]" for each in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def in_folder(folder, pooling, *more):
    """BERT as the transformer of a sentence encoder, loaded from its folder."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    bert().save_pretrained(folder / "base")
    word_pieces().save_pretrained(folder / "base")
    transformer = modules.Transformer(str(folder / "base"), max_seq_length=12)
    parts = [transformer, modules.Pooling(64, pooling), *(make(modules) for make in more)]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder / "encoder"))
    return BertModel.from_pretrained(folder / "encoder").eval()


def texts():
    tokens = torch.randint(5, 60, (8, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def attention_gone(model, layer):
    site = layers_of(model).attention[layer]
    prune_heads(model, heads={site.path: [*range(site.num_heads)]})


def no_neurons(model, layer):
    prune_neurons(model, [texts()], keep={layers_of(model).feed_forwards[layer].path: 0})


def on_grids(model, bits):
    """Put all linear maps and embeddings of a model on a grid, in place."""
    for module in model.modules():
        if isinstance(module, (*PLAIN, torch.nn.Embedding)):
            write_weight(module, nearest_on_grid(weight_of(module).data, bits).weight())
            setattr(module, WEIGHT_BITS, bits)
    return model


def written(model, folder, **options):
    """Write a model without running it, and return the reader of the file and the notes."""
    notes = Gguf().write(model, folder, texts(), **{"tokenizer": None, "int8": False} | options)
    import gguf

    return gguf.GGUFReader(folder / GGUF), notes


def values(reader):
    """Return the values of the weights in a file by name, and their types."""
    import gguf

    found = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    kinds = {each.tensor_type.name for each in reader.tensors}
    return {name: torch.tensor(each) for name, each in found.items()}, kinds


def entry(reader, name):
    return next(field.contents() for key, field in reader.fields.items() if key.endswith(name))
