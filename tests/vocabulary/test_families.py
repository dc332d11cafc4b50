"""trim_vocabulary on every family that reads or writes tokens: what the model computes of kept ones stays as it is."""

import random

import pytest
import torch
from model_runs import aligned
from model_sizes import END, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_made import fast
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast
from trimming import ROUNDING, bert
from unchanged import refused

from collab_heads import trim_vocabulary
from collab_heads.errors import UnsupportedModelError
from collab_heads.vocabulary import token_tables, trim
from families import FAMILIES, each

IDS = ("input_ids", "decoder_input_ids")
LETTERS, SPECIAL = "abcdefgh", ["<s>", "<pad>", "</s>", "<unk>"]
INSIDE = [f"##{letter}" for letter in LETTERS]
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if any(key in family.inputs() for key in IDS)]


def words() -> list[str]:
    chance, count = random.Random(0), VOCABULARY - 1 - len(SPECIAL) - 2 * len(LETTERS)
    return sorted({"".join(chance.choices(LETTERS, k=4)) for _ in range(2 * count)})[:count]


USED = words()[::3]


def tokenizer_of_families() -> PreTrainedTokenizerFast:
    """Letters, words, and the special tokens that the configs of the families name; as many tokens as they have."""
    tokens = [*SPECIAL, *LETTERS, *INSIDE, *words(), "<end>"]
    assert tokens.index("<end>") == END
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix="##"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def tensors_in(outputs, path: str = "outputs") -> dict[str, torch.Tensor]:
    """Every tensor of some outputs, by its path."""
    if torch.is_tensor(outputs):
        return {path: outputs}
    items = outputs.items() if hasattr(outputs, "items") else enumerate(outputs) if isinstance(outputs, tuple) else ()
    return {where: tensor for key, value in items for where, tensor in tensors_in(value, f"{path}.{key}").items()}


@torch.no_grad()
def run(model, inputs, to) -> dict[str, torch.Tensor]:
    """Return what a model computes of inputs with other ids."""
    mapped = {key: to[value] if key in IDS else value for key, value in inputs.items()}
    more = {} if model.config.model_type in ("clip", "siglip") else {"output_hidden_states": True}
    return tensors_in(model(**mapped, **more))


def check_trimmed(name, folder):
    model, tokenizer, inputs = FAMILIES[name].build(), tokenizer_of_families(), FAMILIES[name].inputs()
    labels = model.config.id2label, model.config.label2id
    tables = {id(tensor) for table in token_tables.token_tables(model, 1) for tensor in token_tables.tensors_of(table)}
    others = {key: tensor.clone() for key, tensor in model.named_parameters() if id(tensor) not in tables}
    ids = tokenizer.get_vocab()
    kept = torch.tensor(sorted(ids[token] for token in (*SPECIAL, *LETTERS, *INSIDE, *USED, "<end>")))
    spread = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:END] % (len(kept) - 1)
    old = torch.cat([kept[spread], torch.tensor([END])])  # any id -> that of a token that stays; CLIP's end stays it
    new = torch.searchsorted(kept, old)
    expected = run(model, inputs, old)
    assert trim_vocabulary(model, tokenizer, [" ".join(USED)])[1].tokens_after == len(kept) < VOCABULARY
    found = run(model, inputs, new)
    assert found and found.keys() == expected.keys()
    for path, tensor in found.items():
        if path.endswith("logits") and expected[path].shape[-1] == VOCABULARY:
            logits = expected[path][..., kept]
            torch.testing.assert_close(tensor, logits, rtol=ROUNDING, atol=ROUNDING * logits.abs().max().item())
        else:
            assert torch.equal(tensor, expected[path]), path
    after = dict(model.named_parameters())
    assert all(torch.equal(after[key], tensor) for key, tensor in others.items())
    model.save_pretrained(folder)
    loaded = aligned(type(model).from_pretrained(folder).eval())
    again = run(loaded, inputs, new)
    assert again.keys() == found.keys() and all(torch.equal(again[path], found[path]) for path in found)
    for config in (model.config, loaded.config):
        assert (config.id2label, config.label2id) == labels


@pytest.mark.core
@pytest.mark.parametrize("name", each(TEXT_FAMILIES))
def test_states_of_kept_tokens_are_equal(name, tmp_path):
    check_trimmed(name, tmp_path)


def test_rows_in_another_order_are_seen(tmp_path, monkeypatch):
    stock = trim.keep_rows
    turned = lambda model, tables, kept: stock(model, tables, [[*kept[0][:4], *reversed(kept[0][4:])]])  # noqa: E731
    monkeypatch.setattr(trim, "keep_rows", turned)
    with pytest.raises(AssertionError, match="outputs"):
        check_trimmed("bert", tmp_path)


@pytest.mark.core
@pytest.mark.parametrize(
    "name, held", [("clip-text", "eos_token_id"), ("clip", "eos_token_id"), ("esm", "mask_token_id")]
)
def test_ids_that_modules_hold_are_renumbered(name, held):
    model, tokenizer = FAMILIES[name].build(), tokenizer_of_families()
    config = model.config.get_text_config()
    setattr(config, held, END)
    model = type(model)(model.config)
    holding = [module for module in model.modules() if held in vars(module)]
    assert holding and {getattr(module, held) for module in holding} == {END}
    made, _ = trim_vocabulary(model, tokenizer, [" ".join(USED)])
    config = model.config.get_text_config()
    assert {getattr(module, held) for module in holding} == {getattr(config, held)} == {len(made) - 1}


@pytest.mark.core
@pytest.mark.parametrize("name", each(name for name in FAMILIES if name not in TEXT_FAMILIES))
def test_families_without_texts_are_refused(name):
    model = FAMILIES[name].build()
    with refused(model, UnsupportedModelError, "reads no tokens"):
        trim_vocabulary(model, tokenizer_of_families(), USED)


def test_a_classifier_with_as_many_labels_as_tokens_stays():
    tokenizer = fast("WordPiece")
    names = {number: f"label {number}" for number in range(len(tokenizer))}
    numbers = {label: number for number, label in names.items()}
    model = bert(tokenizer, BertForSequenceClassification, id2label=names, label2id=numbers)
    weight, bias = (parameter.clone() for parameter in model.classifier.parameters())
    trim_vocabulary(model, tokenizer, ["a b c"])
    assert torch.equal(model.classifier.weight, weight) and torch.equal(model.classifier.bias, bias)
    assert model.config.id2label == names and model.config.label2id == numbers
    assert model.config.num_labels == model.classifier.out_features == len(names)
