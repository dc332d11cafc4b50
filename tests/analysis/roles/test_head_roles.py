"""Roles of the heads of whole models: by hand on tiny ones, found on a real one, and every refusal."""

import json

import pytest
import torch
from heads_by_hand import EOS, backends, ended, model_in, single, sites_with_heads
from known_heads import CLS, COUNTS, PIECES, SEP, SMALL, TREEBANK, batches_of, word_pieces
from model_inputs import cast
from model_sizes import VOCABULARY
from test_real_models import SHARED
from transformers import AutoModel, AutoTokenizer
from unchanged import refused

from collab_heads.analysis import head_roles
from collab_heads.analysis.measures.passes import end_tokens
from collab_heads.analysis.roles.labels import ROLE_KINDS, RoleThresholds, role_kind
from collab_heads.analysis.roles.rare import count_tokens
from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.demo import model_folder
from collab_heads.errors import ArgumentError, CalibrationError, DataError, UnsupportedModelError
from collab_heads.files.conllu import read_conllu
from families import FAMILIES

NAMES = ("bert", "marian", "t5")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "bank.conllu"
    file.write_text(TREEBANK, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_length_give_the_same(name):
    model, (inputs, _) = model_in(name), ended(name)
    lengths, steps = (9, 5, 7), (6, 3, 5)
    apart = [single(inputs, row, lengths[row], steps[row]) for row in range(3)]
    whole, apart = (head_roles(model, each, exclude=[EOS], token_counts=COUNTS).to_dict() for each in ([inputs], apart))
    for each in (whole, apart):
        for rare in each["rare"].values():
            rare["chance"] = [round(x, 12) for x in rare["chance"]]
    assert whole == apart


def test_counts_are_those_of_the_batches(path):
    model, (batches, _) = model_in("bert"), batches_of("bert")
    given = head_roles(model, batches, exclude=[EOS], token_counts=count_tokens(model, batches))
    assert head_roles(model, batches, exclude=[EOS]).to_dict() == given.to_dict()
    assert head_roles(model, iter(batches), exclude=[EOS], token_counts=COUNTS).rare
    with refused(model, ArgumentError, "can be read only once", "token_counts"):
        head_roles(model, iter(batches), exclude=[EOS])


def test_one_pass_over_batches_and_one_over_the_treebank(path):
    model, tokenizer, (batches, _) = model_in("bert"), word_pieces(), batches_of("bert")
    both = head_roles(model, batches, exclude=[EOS], treebank=path, tokenizer=tokenizer).to_dict()
    first = head_roles(model, batches, exclude=[EOS], tokenizer=tokenizer).to_dict()
    second = head_roles(model, treebank=Treebank(path, tokenizer, model)).to_dict()
    assert both["positional"] == first["positional"] and both["rare"] == first["rare"]
    assert both["syntax"] == second["syntax"] and both["positional"] != second["positional"]
    only = head_roles(model, treebank=path, tokenizer=tokenizer, relations=("amod",)).to_dict()
    assert list(only["baselines"]) == ["amod dependent->head", "amod head->dependent"]


def test_ends_of_sentences_of_the_tokenizer(path, warnings_logged):
    """BERT's config names none, its tokenizer does: then nothing is warned of."""
    model, tokens = model_in("bert"), 7 + 10 + 10
    found = head_roles(model, treebank=path, tokenizer=word_pieces())
    assert {each.tokens for each in found.positional.values()} == {tokens - 3} and not warnings_logged.records
    found = head_roles(model, treebank=path, tokenizer=word_pieces(), exclude=[CLS, SEP])
    assert {each.tokens for each in found.positional.values()} == {tokens - 6}
    model = model_in("marian")  # its own config names one
    found, given, other = (
        head_roles(model, treebank=path, tokenizer=word_pieces(), exclude=each).to_dict()["positional"]
        for each in (None, end_tokens(model), [SEP])
    )
    assert found == given != other


def test_special_tokens_are_never_rare(path):
    """[CLS] and [SEP] are as rare as "old" here; with the tokenizer they are not candidates, [UNK] is one."""
    model = model_in("bert")
    counts = torch.full((VOCABULARY,), 5)
    counts[[CLS, SEP, PIECES.index("[UNK]")]] = 1
    batches = [{"input_ids": torch.tensor([[CLS, 5, PIECES.index("[UNK]"), 6, SEP]])}]
    chances = [
        head_roles(model, batches, exclude=[], token_counts=counts, tokenizer=each).rare.popitem()[1].chance
        for each in (None, word_pieces())
    ]
    assert chances == [(3 / 5, 3 / 5), (1 / 5, 3 / 5)]
    found = head_roles(model, batches, exclude=[CLS, SEP], token_counts=counts).rare  # what is excluded is none either
    assert found.popitem()[1].chance == pytest.approx((1 / 5, 3 / 5))


def test_images_have_positions_and_no_rare_tokens():
    if "vit" not in FAMILIES:
        pytest.skip("refused by this version of transformers")
    roles = head_roles(model_in("vit"), [cast(FAMILIES["vit"].inputs(), torch.float64)])
    assert roles.positional and roles.rare == {} and "rare tokens not measured" in str(roles)
    embedded = [{"inputs_embeds": torch.randn(1, 5, 32).double()}]
    assert head_roles(model_in("bert"), embedded, exclude=[]).rare == {}


def test_lone_decoders():
    model, (batches, _) = model_in("bert-decoder"), batches_of("bert-decoder")
    batches = [cast(each, torch.float64) for each in batches]
    roles = head_roles(model, batches, exclude=[EOS], token_counts=COUNTS)
    selves = {site.path for site in sites_with_heads(model) if site.role == "dec-self"}
    assert roles.positional.keys() == roles.rare.keys() == selves
    with refused(model, ArgumentError, "no self-attention of an encoder", "leave the treebank out"):
        head_roles(model, treebank="none.conllu", tokenizer=word_pieces())


def test_the_table_and_json(path):
    model, tokenizer = model_in("marian"), word_pieces(model_max_length=9)
    easy = RoleThresholds(positional=0.3, first_token=0.8, rare_tokens=0.1, syntactic=0.0, samples=SMALL.samples)
    roles = head_roles(model, treebank=path, tokenizer=tokenizer, thresholds=easy)
    record, said = json.loads(json.dumps(roles.to_dict())), str(roles)
    assert record["skipped"] == {"too long": 2, "not aligned": 0} and record["thresholds"]["positional"] == 0.3
    assert record["sentences"] == 1 and record["limit"] == 9
    labels = [label for each in roles.labels.values() for head in each for label in head]
    assert {role_kind(label) for label in labels} <= set(ROLE_KINDS)
    assert {role_kind(label) for label in labels} >= {"positional", "rare tokens", "syntactic"}
    assert "treebank: 1 sentences (at most 9 tokens); skipped: 2 too long, 0 not aligned" in said
    assert "dependents by relation: nsubj 1" in said and "fixed offset 1.00" in said and "two rarest" in said
    rows = [line for line in said.split("\n") if "enc-self" in line]
    assert len(rows) == sum(bool(head) for each in roles.labels.values() for head in each)
    measured = [head for path in roles.syntax for head in roles.labels[path]]
    total = sum(map(len, roles.labels.values()))
    assert f"{len(measured)} of {total} heads: " in said and len(measured) < total
    assert f"{sum(not head for head in measured)} without a role" in said
    strict = head_roles(model, treebank=path, tokenizer=tokenizer, thresholds=RoleThresholds(1, 1, 1, 1))
    assert "8 of 24 heads: 0 positional, 0 first token, 0 rare tokens, 0 syntactic, 8 without a role" in str(strict)
    assert strict.to_dict()["positional"] == record["positional"]


def test_the_model_is_left_as_it_was(path):
    model = model_in("bert").train()
    before = backends(model)
    head_roles(model, treebank=path, tokenizer=word_pieces())
    assert model.training and backends(model) == before and not any(m._forward_hooks for m in model.modules())


def test_refusals(path):
    model, tokenizer, (batches, _) = model_in("bert"), word_pieces(), batches_of("bert")
    with refused(model, ArgumentError, "no data", "batches, a treebank"):
        head_roles(model)
    with refused(model, ArgumentError, "a treebank needs the model's tokenizer"):
        head_roles(model, treebank=path)
    with refused(model, DataError, "none.conllu", "No such file"):
        head_roles(model, treebank="none.conllu", tokenizer=tokenizer)
    with refused(model, ArgumentError, "token_counts: expected a tensor"):
        head_roles(model, batches, token_counts=[1])
    with refused(model, ArgumentError, "exclude='x'"):
        head_roles(model, batches, exclude="x")
    with refused(model, CalibrationError, "empty"):
        head_roles(model, [])
    with refused(model, CalibrationError, "saw no query token"):
        head_roles(model, batches, exclude=range(VOCABULARY))
    with refused(model, ArgumentError, "relations=()"):
        head_roles(model, treebank=path, tokenizer=tokenizer, relations=())
    with pytest.raises(UnsupportedModelError):
        head_roles(torch.nn.Linear(2, 2), batches)
    for wrong in ({"positional": 1.5}, {"syntactic": -0.1}, {"rare_tokens": True}, {"positional": "0.9"}):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}=.* between 0 and 1"):
            RoleThresholds(**wrong)


@pytest.mark.shared
@pytest.mark.slow
def test_minilm_has_syntactic_heads(capsys):
    """On 200 sentences of real text."""
    bank = SHARED / "data" / "ud_english_ewt" / "en_ewt-ud-dev.conllu"
    if not bank.exists():
        pytest.skip(f"{bank} is absent")
    folder = model_folder()
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    roles = head_roles(model, treebank=read_conllu(bank)[:200], tokenizer=tokenizer)
    with capsys.disabled():
        print(f"\n{roles}")
    found = {label for each in roles.labels.values() for head in each for label in head}
    assert "obj dependent->head" in found and "positional -1" in found
    assert roles.sentences + sum(roles.skipped.values()) == 200
    best = max(float(each["obj", "dependent->head"].max()) for each in roles.syntax.values())
    assert best > roles.baselines["obj", "dependent->head"].accuracy + 0.2  # measured on all: 0.74 and 0.36
