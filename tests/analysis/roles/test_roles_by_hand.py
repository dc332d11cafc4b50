"""Roles of the heads of whole models, by other means: one token at a time, one word at a time."""

import pytest
import torch
from heads_by_hand import EOS, maps_by_hand, model_in, sites_with_heads
from known_heads import COUNTS, TREEBANK, batches_of, word_pieces

from collab_heads.analysis import head_roles
from collab_heads.analysis.roles.treebank import Treebank

NAMES = ("bert", "marian", "t5")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "bank.conllu"
    file.write_text(TREEBANK, encoding="utf-8")
    return file


def looks_by_hand(model, batches, counts, role):
    """path -> per query token that counts: its row of ids, its position, and where every head looks."""
    found = {}
    for inputs, masks in zip(batches, counts, strict=True):
        maps = maps_by_hand(model, inputs)
        for site in sites_with_heads(model):
            if site.role == role:
                for row, token in masks["encoder" if role == "enc-self" else "decoder"].nonzero().tolist():
                    real = [
                        i for i, kept in enumerate(inputs["attention_mask"][row].tolist()) if kept or role == "dec-self"
                    ]
                    looks = maps[site.path][0][row, :, token].argmax(-1).tolist()
                    found.setdefault(site.path, []).append((inputs["input_ids"][row].tolist(), real, token, looks))
    return found


@pytest.mark.parametrize("change", ("stock", "pruned"))
@pytest.mark.parametrize("name", NAMES)
def test_positions_and_rare_tokens_by_hand(name, change):
    model, (batches, counts) = model_in(name, change), batches_of(name)
    roles = head_roles(model, batches, exclude=[EOS], token_counts=COUNTS)
    special = {EOS, *(getattr(model.config, f"{each}_token_id", None) for each in ("pad", "bos", "decoder_start"))}
    ranks = [float("inf") if i in special else int(each) for i, each in enumerate(COUNTS)]
    for role in ("enc-self", "dec-self"):
        for path, tokens in looks_by_hand(model, batches, counts, role).items():
            numbers, total = roles.positional[path], len(tokens)
            assert numbers.tokens == total
            for head in range(len(tokens[0][3])):
                offsets = [looks[head] - token for _, _, token, looks in tokens]
                share = offsets.count(int(numbers.offset[head])) / total
                assert numbers.share[head] == share == max(offsets.count(each) for each in offsets) / total
                if role == "enc-self":
                    hits = []
                    for ids, real, _, looks in tokens:
                        order = sorted(ranks[ids[i]] for i in real)
                        hits.append([ranks[ids[looks[head]]] <= each for each in order[:2]])
                    expected = [sum(each) / total for each in zip(*hits, strict=True)]
                    rare = roles.rare[path]
                    assert [rare.rarest[head], rare.two_rarest[head]] == expected
    encoders = {site.path for site in sites_with_heads(model) if site.role == "enc-self"}
    assert roles.rare.keys() == encoders and roles.syntax == roles.baselines == {} and roles.sentences == 0
    assert roles.heads.keys() == roles.labels.keys() == {site.path for site in roles.sites}
    if change == "pruned":
        assert any(max(numbers) >= len(numbers) for numbers in roles.heads.values())  # original numbers, with gaps


@pytest.mark.parametrize("name", NAMES)
def test_dependencies_by_hand(name, path):
    """Word attention one sentence at a time, without padding, one word at a time."""
    model, tokenizer = model_in(name), word_pieces()
    roles = head_roles(model, treebank=path, tokenizer=tokenizer, batch_size=2)
    bank = Treebank(path, tokenizer, model)
    right, asked = {}, {}
    for sentence, aligned in bank.sentences:
        inputs = {"input_ids": torch.tensor([aligned.ids]), "attention_mask": torch.ones(1, len(aligned.ids)).long()}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[9]])
        maps = maps_by_hand(model, inputs)
        pieces = [
            [t for t, unit in enumerate(aligned.token_units) if unit == word] for word in range(aligned.num_units)
        ]
        answers = {}
        for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
            if relation in ("nsubj", "nsubj:pass", "obj", "amod", "advmod"):
                kind = relation.split(":")[0]
                answers.setdefault((kind, "dependent->head", word), set()).add(head - 1)
                answers.setdefault((kind, "head->dependent", head - 1), set()).add(word)
        for (*kind, word), wanted in answers.items():
            asked[tuple(kind)] = asked.get(tuple(kind), 0) + 1
            for site in sites_with_heads(model):
                if site.role == "enc-self":
                    for head, weights in enumerate(maps[site.path][0][0]):
                        sums = [sum(weights[a, b] for a in pieces[word] for b in other) for other in pieces]
                        key = (site.path, tuple(kind), head)
                        right[key] = right.get(key, 0) + (sums.index(max(sums)) in wanted)
    assert roles.sentences == 3 and asked == {kind: each.queries for kind, each in roles.baselines.items()}
    assert roles.syntax.keys() == {site.path for site in sites_with_heads(model) if site.role == "enc-self"}
    for (path, kind, head), count in right.items():
        assert roles.syntax[path][kind][head] == count / asked[kind]
    assert roles.positional.keys() == roles.rare.keys() == roles.syntax.keys()  # a decoder of one token tells nothing
