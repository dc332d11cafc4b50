"""Heads with known roles: attention weights made by hand, a tiny treebank, and a tokenizer that knows its words."""

import torch
from heads_by_hand import ended
from model_sizes import VOCABULARY
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from collab_heads import AttentionSite
from collab_heads.analysis.measures.passes import Attention, Batch
from collab_heads.analysis.roles.labels import RoleThresholds, SampleSizes
from families import FAMILIES

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = ("old", "dog", "##s", "chase", "young", "cat", ".", "she", "does", "##n", "'", "t", "often", "sing")
PIECES = (*SPECIAL, *PIECES, "were", "seen", "can", "##not", "cannot", "du")
CLS, SEP = 2, 3
SMALL = RoleThresholds(samples=SampleSizes(1, 1, 1, chance=10.0))  # however little was seen
COUNTS = torch.arange(VOCABULARY, 0, -1) // 2  # pairs of tokens are equally rare, the last ones rarest


def site(path: str = "one", role: str = "enc-self", layer: int = 0, heads: int = 2) -> AttentionSite:
    return AttentionSite(path, role, layer, heads)


def word_pieces(**more) -> PreTrainedTokenizerFast:
    """A fast WordPiece tokenizer, [CLS] before and [SEP] behind."""
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"model_max_length": 64, **named, **more})


def rows(*words: str) -> str:
    """Lines of CoNLL-U from "id form head relation [misc]"."""
    lines = []
    for word in words:
        number, form, head, relation, *misc = word.split(" ")
        lines.append("\t".join([number, form, "_", "_", "_", "_", head, relation, "_", *(misc or "_")]))
    return "\n".join(lines) + "\n"


DOGS = "# sent_id = dogs\n# text = Old dogs chase young cats.\n" + rows(
    "1 Old 2 amod",
    "2 dogs 3 nsubj",
    "3 chase 0 root",
    "4 young 5 amod",
    "5 cats 3 obj SpaceAfter=No",
    "6 . 3 punct",
)
SINGS = "# text = She doesn't often sing.\n" + rows(
    "1 She 5 nsubj",
    "2-3 doesn't _ _",
    "2 does 5 aux",
    "3 n't 5 advmod",
    "4 often 5 advmod",
    "5 sing 0 root SpaceAfter=No",
    "6 . 5 punct",
)
SEEN = rows("1 Dogs 3 nsubj:pass", "2 were 3 aux:pass", "3 seen 0 root SpaceAfter=No", "4 . 3 punct")
TREEBANK = f"{DOGS}\n{SINGS}\n{SEEN}\n"


def looking(positions: list[list[list[int]]], length: int) -> torch.Tensor:
    """Weights [B, H, T, S] that are largest at the positions [B, H, T], in float64; the rest is spread evenly."""
    positions = torch.tensor(positions)
    weights = torch.full((*positions.shape, length), 0.4 / (length - 1), dtype=torch.float64)
    return weights.scatter_(-1, positions[..., None], 0.6)


def show(observer, sites, batches, *, model: str = "bert", exclude=()):
    """Start an observer and let it see batches: (inputs, site -> weights)."""
    observer.begin(sites)
    built = FAMILIES[model].build()
    for index, (inputs, weights) in enumerate(batches):
        batch = Batch(built, inputs, index, tuple(exclude))
        for each in sites:
            observer.see_weights(each, Attention(weights[each.path]), batch)
    return observer


def text(ids: list[list[int]], lengths: list[int] | None = None, left: bool = False) -> dict[str, torch.Tensor]:
    """Inputs with a mask of so many tokens per row, at the left or padded on the left."""
    ids = torch.tensor(ids)
    lengths = torch.tensor(lengths or [ids.shape[1]] * len(ids))[:, None]
    places = torch.arange(ids.shape[1])
    mask = places >= ids.shape[1] - lengths if left else places < lengths
    return {"input_ids": ids, "attention_mask": mask.long()}


def batches_of(name):
    """Two batches of unequal size, and which query tokens count, as the tests of statistics have them."""
    inputs, counts = ended(name)
    parts = slice(0, 2), slice(2, 3)
    return [[{key: value[part] for key, value in each.items()} for part in parts] for each in (inputs, counts)]
