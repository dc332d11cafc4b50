"""A prompt and its continuation: their shares by another computation, padding on either side, what is refused."""

import pytest
import torch
from heads_by_hand import CHANGES, EOS, model_in
from model_configs import rotary_config
from model_sizes import EXACT64, LAYERS
from relevance_by_hand import FP32_NORMS
from transformers import LlamaForSequenceClassification, LlamaModel
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import analyze_heads, prune_heads
from collab_heads.analysis import token_contributions
from collab_heads.analysis.relevance.backward import conservative, explaining
from collab_heads.errors import ArgumentError, CalibrationError, UnsupportedModelError
from families import FAMILIES, make

DECODERS = tuple(n for n, family in FAMILIES.items() if family.roles.keys() == {"dec-self"} and family.generates)
PROMPTS, CONTINUATIONS, PADDING = (4, 2, 3), (5, 3, 3), 1
FAR = 1e-3


def sentences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, 60, (prompt + more,), generator=generator).tolist()
        for prompt, more in zip(PROMPTS, CONTINUATIONS, strict=True)
    ]


def batch(rows=range(3), left: bool = False) -> dict[str, torch.Tensor]:
    """Prompts and continuations as trainers of instructions give them; the end of one is excluded elsewhere."""
    length = max(PROMPTS[row] + CONTINUATIONS[row] for row in rows)
    inputs = {name: [] for name in ("input_ids", "attention_mask", "labels")}
    for row in rows:
        ids = sentences()[row]
        labels, pad = [-100] * PROMPTS[row] + ids[PROMPTS[row] :], length - len(ids)
        for name, values, filler in (
            ("input_ids", ids, PADDING),
            ("attention_mask", [1] * len(ids), 0),
            ("labels", labels, -100),
        ):
            inputs[name].append([filler] * pad + values if left else values + [filler] * pad)
    return {name: torch.tensor(values) for name, values in inputs.items()}


def by_hand(model) -> list[list[float]]:
    """Sentence by sentence, position by position: what the model says of a text that ends there, from embeddings."""
    shares = []
    for ids, prompt in zip(sentences(), PROMPTS, strict=True):
        shares.append([])
        for end in range(prompt, len(ids)):  # the token before `end` predicts the one at it
            with explaining(model):
                states = model.get_input_embeddings()(torch.tensor([ids[:end]])).detach().requires_grad_()
                with conservative(model):
                    logits = model(inputs_embeds=states).logits
                (slope,) = torch.autograd.grad(logits[0, -1].max(), states)
            sizes = [abs(float(token @ each)) for token, each in zip(states[0].detach(), slope[0], strict=True)]
            shares[-1].append(sum(sizes[:prompt]) / sum(sizes))
    return shares


def contributions(model, batches, **options):
    return token_contributions(model, batches, **options)


def shares_of(found) -> list[list[float]]:
    return [row.tolist() for row in found.rows("source")]


@pytest.mark.parametrize("left", (False, True))
@pytest.mark.parametrize("name", ("qwen3", "mistral"))
def test_it_is_the_share_of_the_prompt_at_every_position(name, left):
    """Keys that heads share; a window of five tokens, which the first prompt leaves. Rotations see distances alone."""
    model = model_in(name)
    expected, found = by_hand(model), contributions(model, [batch(left=left)])
    assert found.counts.tolist() == [3, 3, 3, 1, 1] and found.names == ("prompt", "continuation")
    for row, shares in zip(shares_of(found), expected, strict=True):
        assert row == pytest.approx(shares, abs=FP32_NORMS)
        assert row[0] == pytest.approx(1, abs=EXACT64)  # nothing was said yet
        assert max(row[1:]) < 1 - FAR
    for position, share in enumerate(found.source.tolist()):
        shares = [row[position] for row in expected if len(row) > position]
        assert share == pytest.approx(sum(shares) / len(shares), abs=FP32_NORMS)
    assert found.mean == pytest.approx(sum(map(sum, expected)) / sum(CONTINUATIONS), abs=FP32_NORMS)


def test_labels_say_what_counts_and_not_the_ends_of_sentences():
    """Prompts may end in what ends a sentence elsewhere, and a label may be one."""
    model, inputs = model_in("qwen3"), batch()
    inputs["input_ids"][0, PROMPTS[0] - 1] = EOS
    inputs["input_ids"][1, 3] = inputs["labels"][1, 3] = EOS
    for exclude in (None, [], [EOS]):
        assert contributions(model, [inputs], exclude=exclude).counts.tolist() == [3, 3, 3, 1, 1]


def test_turns():
    """A later question is not a continuation: its tokens count as prompt, and what predicts them is not explained."""
    model, inputs = model_in("qwen3"), batch([0])
    whole = shares_of(contributions(model, [inputs]))[0]
    inputs["labels"][0, 6] = -100  # the third of five
    found = shares_of(contributions(model, [inputs]))[0]
    assert len(found) == 4 and found[:2] == pytest.approx(whole[:2], abs=EXACT64)
    assert all(mine > all_said + FAR for mine, all_said in zip(found[2:], whole[3:], strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder(name):
    model = model_in(name)
    whole = contributions(model, [batch()])
    assert whole.counts.tolist() == [3, 3, 3, 1, 1] and ((whole.source > 0) & (whole.source < 1 + EXACT64)).all()
    apart = contributions(model, [batch([2]), batch([0, 1])])
    torch.testing.assert_close(apart.source, whole.source, rtol=0, atol=FP32_NORMS)


@pytest.mark.parametrize("change", ("gated", "mixed", "pruned"))
@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_changed_models(name, change):
    assert change in CHANGES
    found = contributions(model_in(name, change), [batch()])
    assert found.counts.tolist() == [3, 3, 3, 1, 1] and 0 < found.mean < 1


def test_without_heads_a_token_sees_itself_alone():
    model = model_in("qwen3")
    prune_heads(model, heads={"dec-self": [[0, 1, 2, 3]] * LAYERS})
    found = contributions(model, [batch()])
    assert found.source.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_what_a_model_itself_makes_of_a_prompt():
    model = FAMILIES["qwen3"].build()
    ids = torch.tensor([sentences()[0][:4], sentences()[1][:4]])
    said = model.generate(input_ids=ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    labels = said.clone()
    labels[:, :4] = -100
    assert contributions(model, [{"input_ids": said, "labels": labels}]).counts.tolist() == [2, 2, 2]


@pytest.mark.slow
def test_the_table_the_numbers_and_the_report():
    model, inputs = model_in("qwen3"), batch()
    found = contributions(model, [inputs])
    assert str(found).split("\n")[0].split()[:4] == ["position", "sentences", "prompt", "continuation"]
    assert f"the prompt gives {found.mean:.3f} of all 11 tokens" in str(found)
    assert found.to_dict()["names"] == ["prompt", "continuation"]
    report = analyze_heads(model, [inputs], exclude=[EOS])
    assert report.contributions == token_contributions(model, [inputs]) and report.data["contribution_sentences"] == 3
    plain = {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}
    assert analyze_heads(model, [plain], exclude=[EOS]).contributions is None  # no prompt
    with refused(model, ArgumentError, "decoders a prompt and its continuation", "-100"):
        analyze_heads(model, [plain], parts="contributions")
    pytest.importorskip("matplotlib")
    assert report.plot()["source_share"].axes[0].get_ylabel() == "share of the prompt"


def test_the_model_is_left_as_it_was():
    model = model_in("qwen3", dtype=torch.float32).train()
    before = snapshot(model)
    contributions(model, [batch()])
    assert_unchanged(model, before)


def test_what_is_refused():
    model, inputs = FAMILIES["qwen3"].build(), batch()
    with refused(model, CalibrationError, "needs labels that say where its prompt ends", "-100"):
        token_contributions(model, [{name: inputs[name] for name in ("input_ids", "attention_mask")}])
    with refused(model, CalibrationError, "a sentence has no prompt"):
        token_contributions(model, [{**inputs, "labels": inputs["input_ids"]}])
    padded = {name: values[1:2] for name, values in inputs.items()}
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    with refused(model, CalibrationError, "a sentence has no prompt"):  # padding is none
        token_contributions(model, [padded])
    with refused(model, CalibrationError, "no position counted"):
        token_contributions(model, [{**inputs, "labels": torch.full_like(inputs["labels"], -100)}])
    bare = make(LlamaModel, rotary_config(type(FAMILIES["llama"].build().config)))
    with refused(bare, CalibrationError, "labels (3, 9) do not fit what this LlamaModel puts out, (3, 1)"):
        token_contributions(bare, [inputs])
    classes = make(LlamaForSequenceClassification, rotary_config(type(FAMILIES["llama"].build().config)))
    report = analyze_heads(classes, [{**inputs, "labels": torch.tensor([0, 1, 1])}], exclude=[EOS])
    assert report.contributions is None and report.gradient is not None
    config = rotary_config(type(FAMILIES["gemma3"].build().config), use_bidirectional_attention=True, sliding_window=5)
    reads = make(type(FAMILIES["gemma3"].build()), config)
    with refused(reads, UnsupportedModelError, "no decoder without cross-attention"):
        token_contributions(reads, [inputs])
