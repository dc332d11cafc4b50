"""Measure how far attention flow moves if the map of a head is left out.

The maps Ã of all layers, see `rollout`, are the capacities of a network: the edge from token i of a layer to token j of
the layer below carries at most Ã[i, j]. The flow of an input token is the largest flow from an output token to it. As
for rollout, the worth of a head is ours: half the sum of the absolute differences between the flows of all input tokens
with and without its map in the mean, both divided by their sums.

This takes a maximum flow for every head and input token, tens of times as long as a pass of the model. So it is
measured at one output token of each sentence.

Source: Abnar and Zuidema 2020, arXiv:2005.00928, section 3.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.rollout import Following, Maps
from collab_heads.analysis.measures.statistics import RunningMean
from collab_heads.running.batches import sides

UNIT = 2**24  # of whole numbers, which the maximum flow takes, for a capacity of 1


class Network:
    """The network of the maps of one sentence.

    Args:
        calls: its calls, with maps [1, H, T, S] and without padding, in the order in which they ran.

    Attributes:
        inputs: the nodes of the input tokens, of all sides.
        outputs: side -> the nodes of its output tokens.
    """

    def __init__(self, calls: Sequence[Maps]):
        lengths: dict[str, int] = {}
        for call in calls:
            lengths |= dict(zip(sides(call.site), call.weights.shape[-2:], strict=True))
        self.inputs = list(range(sum(lengths.values())))
        self.outputs = {side: nodes.numpy() for side, nodes in zip(lengths, self.split(lengths), strict=True)}
        self.size = len(self.inputs)
        tails, heads, capacities = [], [], []
        self.edges: list[tuple[slice, slice]] = []  # of every call: of its map, and of the residual connection
        count = 0
        for call in calls:
            queries, keys = sides(call.site)
            below, read = self.outputs[queries], self.outputs[keys]
            above = np.arange(self.size, self.size + len(below))
            tails += [np.repeat(above, len(read)), above]
            heads += [np.tile(read, len(above)), below]
            capacities += [halved(call.mean[0]), np.full(len(above), UNIT // 2, np.int32)]
            of_map = slice(count, count + len(above) * len(read))
            count = of_map.stop + len(above)
            self.edges.append((of_map, slice(of_map.stop, count)))
            self.size += len(above)
            self.outputs[queries] = above
        self.tails, self.heads = np.concatenate(tails), np.concatenate(heads)
        self.capacities = np.concatenate(capacities)

    def split(self, lengths: Mapping[str, int]) -> Sequence[Tensor]:
        return torch.tensor(self.inputs).split(list(lengths.values()))

    def flows(self, output: int, changed: Mapping[int, Tensor | None] | None = None) -> Tensor:
        """Return the share of every input token in the flows from an output token: [I].

        Args:
            output: the node of the output token.
            changed: number of a call -> its mean map [T, S], instead of the mean over all heads; None for the residual
                connection alone.
        """
        from scipy.sparse import coo_array, csr_array
        from scipy.sparse.csgraph import maximum_flow

        capacities = self.capacities.copy()
        for call, weights in (changed or {}).items():
            of_map, of_rest = self.edges[call]
            capacities[of_map] = 0 if weights is None else halved(weights)
            if weights is None:
                capacities[of_rest] = UNIT
        # the sum of both edges where a token reads itself
        edges = coo_array((capacities, (self.tails, self.heads)), shape=(self.size, self.size))
        network = csr_array(edges, dtype=np.int32)
        found = torch.tensor([maximum_flow(network, output, each).flow_value for each in self.inputs]).double()
        return found / found.sum()


def halved(weights: Tensor) -> np.ndarray:
    return (weights.flatten() * (UNIT / 2)).round().int().cpu().numpy()


class Flow(Following):
    """An observer that averages, over sentences, how far the flow from one output token moves without each head.

    Args:
        model: the model.
        seed: of the draw of output tokens.
    """

    def __init__(self, model: PreTrainedModel, seed: int = 0):
        super().__init__(model)
        self.generator = torch.Generator().manual_seed(seed)

    def follow(self, calls: Sequence[Maps]) -> None:
        for row in range(len(calls[0].weights)):
            sentence = [self.of_row(call, row) for call in calls]
            network = Network(sentence)
            for side in dict.fromkeys(sides(self.output_of(calls, call.site))[0] for call in calls):
                self.follow_from(network, sentence, row, side)

    def of_row(self, call: Maps, row: int) -> Maps:
        """Return the maps of one sentence without its padding."""
        weights = call.weights[row]
        masks = self.batch.unpadded_queries(call.site), self.batch.keys(call.site)
        for dim, mask in enumerate(masks, 1):
            if mask is not None:
                weights = weights.index_select(dim, mask[row].to(weights.device).nonzero().flatten())
        return Maps(call.site, weights[None])

    def follow_from(self, network: Network, sentence: Sequence[Maps], row: int, side: str) -> None:
        """Draw an output token of a side, and measure the heads whose maps it depends on."""
        sites = [call.site for call in sentence if sides(self.output_of(sentence, call.site))[0] == side]
        reads = next(call.site for call in sentence if sides(call.site)[0] == side)
        counts, whole = self.batch.queries(reads), self.batch.unpadded_queries(reads)
        nodes = torch.from_numpy(network.outputs[side])
        if counts is not None:
            nodes = nodes[(counts[row] if whole is None else counts[row][whole[row]]).cpu()]
        if not len(nodes):
            return
        output = int(nodes[torch.randint(len(nodes), (1,), generator=self.generator)])
        before = network.flows(output)
        for path in dict.fromkeys(site.path for site in sites):
            own = {number: call.without_each() for number, call in enumerate(sentence) if call.site.path == path}
            moved = []
            for head in range(sentence[next(iter(own))].weights.shape[1]):
                changed = {number: None if each is None else each[0, head] for number, each in own.items()}
                moved.append((network.flows(output, changed) - before).abs().sum() / 2)
            self.means.setdefault(path, RunningMean()).add(torch.stack(moved)[None])
