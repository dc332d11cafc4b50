"""Operations are those that torch counts, for every family, before and after."""

import pytest
import torch
from compressing import batches_of
from counting import attention_operations, feed_forward_operations, layer_operations
from model_runs import set_backend
from model_sizes import KINDS, VOCABULARY
from opening import layers_of
from torch.utils.flop_counter import FlopCounterMode

from collab_heads import compress, prune_heads, swap_to_collaborative
from collab_heads.compression.measures import SiteUse, count_work, operations
from collab_heads.compression.parts.shape import UNCHANGED, AttentionShape, Choice, FeedForwardShape
from collab_heads.compression.parts.table import PARTS, resized
from collab_heads.errors import CalibrationError
from collab_heads.model.apply_state import keep_neurons
from families import FAMILIES, each

MARIAN = FAMILIES["marian"]


def sites_of(model):
    return layers_of(model).with_heads


def translations(*lengths):
    """Batches of sources and targets of these lengths; two of three sources are padded."""
    generator, found = torch.Generator().manual_seed(0), []
    for source, target in lengths:
        mask = torch.ones(3, source, dtype=torch.long)
        mask[1:, source // 2 :] = 0
        ids = [torch.randint(3, VOCABULARY, (3, length), generator=generator) for length in (source, target)]
        found.append({"input_ids": ids[0], "attention_mask": mask, "decoder_input_ids": ids[1]})
    return found


@pytest.mark.parametrize("name", each(FAMILIES))
def test_operations_are_those_that_torch_counts(name):
    """With the eager backend: fused ones fill the narrower of keys and values up with zeros."""
    family = FAMILIES[name]
    batches = batches_of(family, 2)
    for kind in KINDS if family.shares else ["per_head"]:
        model = family.build()
        work = count_work(model, batches, sites_of(model))
        uses = {
            site.path: SiteUse(AttentionShape.of(site, kind), site.role, work[site.path]) for site in sites_of(model)
        }
        before = {path: operations(use, UNCHANGED) for path, use in uses.items()}
        assert attention_operations(model, batches) == before
        (narrow,) = {next(iter(PARTS["query_key"].sizes(use.shape)), None) for use in uses.values()}
        shape, choice = next(iter(uses.values())).shape, Choice.of(heads=2, query_key=narrow, values=4)
        prune_heads(model, heads={path: [2, 3] for path in uses})
        geometry = resized(shape, choice)
        dim = None if narrow is None else geometry.query_key_width
        value = PARTS["values"].total(geometry)
        swap_to_collaborative(model, dim_shared_query_key=dim, dim_value=value, kind=kind)
        after = {path: operations(use, choice) for path, use in uses.items()}
        assert attention_operations(model, batches) == after
        assert sum(after.values()) < 0.7 * sum(before.values())


@pytest.mark.parametrize("name", each(FAMILIES))
def test_operations_of_feed_forward_blocks_are_those_that_torch_counts(name):
    model, batches = FAMILIES[name].build(), batches_of(FAMILIES[name], 2)
    layers = layers_of(model)
    blocks = layers.feed_forwards
    work = count_work(model, batches, blocks)
    for choice in (UNCHANGED, Choice.of(neurons=16), Choice.of(neurons=0)):
        uses = {block.path: SiteUse(FeedForwardShape.of(block), block.role, work[block.path]) for block in blocks}
        expected = {path: operations(use, choice) for path, use in uses.items()}
        for block in blocks:
            if choice != UNCHANGED:
                layers.write({block.path: keep_neurons(block, block.state, range(choice.get("neurons")))})
        assert feed_forward_operations(model, batches) == expected


def test_a_batch_that_cannot_be_divided_runs_whole():
    model, batch = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    positions = torch.arange(batch["input_ids"].shape[1])[None]
    divided, whole = (
        count_work(model, [each], sites_of(model)) for each in (batch, {**batch, "position_ids": positions})
    )
    assert whole == divided


@pytest.mark.parametrize("lengths", [[(40, 8)], [(4, 30), (12, 3)]], ids=["long sources", "long targets"])
def test_a_budget_of_operations_is_kept_where_lengths_differ(lengths):
    model, batches = MARIAN.build(), translations(*lengths)
    before = sum(layer_operations(model, batches).values())
    report = compress(model, batches, 0.5, of="operations", refine_steps=0)
    after = sum(layer_operations(model, batches).values())
    assert report.costs["operations"].before == before
    assert report.costs["operations"].after == after <= 0.5 * before
    assert report.costs["operations"].share == after / before


def test_sites_that_no_batch_reaches_are_named():
    model = MARIAN.build()
    with pytest.raises(CalibrationError, match=r"decoder\.layers\.0\.self_attn saw no tokens"):
        count_work(model.model.encoder, [{"input_ids": torch.ones(1, 3, dtype=torch.long)}], sites_of(model))


ONE_BY_ONE = {name: (3 * 3 - 3) * width for name, width in (("clip", 24), ("siglip", 32))}  # texts by images


@pytest.mark.parametrize("name", ("bert", "gpt2", "t5", "vit", "wav2vec2", "whisper", "clip", "siglip", "qwen3"))
@pytest.mark.parametrize("parts", (("heads", "query_key", "values", "neurons"), "neurons"), ids=("all", "neurons"))
def test_the_share_of_a_models_operations_counts_all_of_them(name, parts):
    """Output layers, convolutions, attention that is not compressed, SigLIP's attention that pools; as torch counts.

    Each text of a batch is taken with one image, as if batches had one row.
    """
    family = FAMILIES[name]
    model, batches = family.build(), batches_of(family, 3)
    with torch.no_grad():
        counts = []
        for _ in range(2):
            set_backend(model, "eager")
            with FlopCounterMode(display=False) as counter:
                for batch in batches:
                    model(**batch)
            counts.append(counter.get_total_flops() / 2 - len(batches) * ONE_BY_ONE.get(name, 0))
            if len(counts) == 1:
                set_backend(model, "sdpa")
                with torch.enable_grad():
                    report = compress(model, batches, 0.5, parts=parts, refine_steps=0)
    assert report.operations_share == pytest.approx(counts[1] / counts[0], abs=1e-9)
    assert f"{report.operations_share:.1%} of its multiplications" in str(report)


def test_a_linear_that_is_called_by_keyword():
    class Keyword(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, states):
            return self.linear(input=states)

    model = FAMILIES["bert"].build()
    model.classifier = Keyword(model.classifier)
    assert compress(model, batches_of(FAMILIES["bert"]), 0.8, refine_steps=0).operations_share < 1
