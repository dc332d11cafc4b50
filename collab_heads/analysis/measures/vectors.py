"""Measures of the vectors that heads write: norms of weighted values, value zeroing, contributions to the stream.

Shapes: B sentences, T query tokens, S key tokens, H heads, d_v width of a value head, D width of the model, N query
tokens that count.

A head h of a site writes T_h = W_O,h z_h for every query token, with z_h = Σ_j A_h[i, j] v_j the output of the head and
W_O,h its columns of W_O, gates and alphas included. The bias of W_O belongs to no head. The stream s is what the next
module reads: the input of the site plus its whole output. In Gemma 3, where a norm comes before the input is added, it
is the output alone.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.measures.statistics import RunningMean, first_and_later
from collab_heads.base.numerics import float64
from collab_heads.model.open_layers import OpenSite
from collab_heads.running.batches import sides
from collab_heads.running.residual_readers import Reader, watching
from collab_heads.sites.site import AttentionSite

CHUNK = 256  # tokens whose written vectors are in memory at once


def value_zeroing(stream: Tensor, written: Tensor, rest: Tensor) -> Tensor:
    """Return how far the stream turns if the values of a head are zeroed: 1 - cos(s, s - T_h), [N, H].

    The paper zeroes the values of one token in all heads, and compares the outputs of the layer, behind the
    feed-forward block. Here the values of all tokens are zeroed in one head, and the stream behind the site is
    compared, which takes no further pass.

    Args:
        stream: [N, D], s.
        written: [N, H, D], T_h.
        rest: [N, D], the input of the site.

    Source: Mohebbi, Zuidema, Chrupała, Alishahi 2023, arXiv:2301.12971, section 3.
    """
    square = stream.square().sum(-1)[:, None]  # (N, 1)
    shared = (written @ stream[..., None]).squeeze(-1)  # (N, H)
    left = (square - 2 * shared + written.square().sum(-1)).clamp(min=0)  # ‖s - T_h‖²
    scale = (square * left).sqrt()
    return 1 - torch.where(scale > 0, (square - shared) / scale.clamp(min=torch.finfo(scale.dtype).tiny), 0.0)


def contribution(stream: Tensor, written: Tensor, rest: Tensor) -> Tensor:
    """Return the share of a head in the stream, [N, H]: max(0, ‖s‖₁ - ‖s - T_h‖₁), divided by the sum of all parts.

    The parts are the heads and the input of the site; with it the shares sum to 1. The papers' parts are tokens: ALTI
    sums over heads, and multiplies by the norm that follows. Parts of a stream without its norm, heads among them, are
    those of Ferrando and Voita.

    Args:
        stream: [N, D], s.
        written: [N, H, D], T_h.
        rest: [N, D], the input of the site.

    Source: Ferrando, Gállego, Costa-jussà 2022, arXiv:2203.04212, section 3 (ALTI); of heads: Ferrando and Voita 2024,
        arXiv:2403.00824, section 2.
    """
    size = stream.abs().sum(-1)  # (N,)
    heads = (size[:, None] - (stream[:, None] - written).abs().sum(-1)).clamp(min=0)
    whole = heads.sum(-1) + (size - (stream - rest).abs().sum(-1)).clamp(min=0)
    return heads / whole.clamp(min=torch.finfo(whole.dtype).tiny)[:, None]


def value_norm(site: AttentionSite, attention: Attention, norms: Tensor, batch: Batch) -> Tensor:
    """Return the norms of the vectors that a head adds up, Σ_j A_h[i, j] ‖W_O,h v_j‖, of every query token i: [N, H].

    Args:
        site: the site.
        attention: its attention.
        norms: [B, S, H], ‖W_O,h v_j‖, with v_j = W_V,h x_j + b_V,h.
        batch: the batch.

    Source: Kobayashi, Kuribayashi, Yokoi, Inui 2020, arXiv:2004.10102, sections 2 and 3.
    """
    return weighted(site, float64(attention.weights), norms, batch)


def context_norm(site: AttentionSite, attention: Attention, norms: Tensor, batch: Batch) -> Tensor:
    """Return the same norms as `value_norm`, of other tokens than the query token itself and the first one: [N, H].

    Its ratio to `value_norm` is the share of what a head brings from other tokens. Heads with nothing to look for
    attend to the first token. Between two sequences all key tokens count.

    Args:
        site: the site.
        attention: its attention.
        norms: [B, S, H].
        batch: the batch.

    Source: as `value_norm`; without the token itself: Kobayashi et al. 2021, arXiv:2109.07152, section 3.
    """
    weights = float64(attention.weights)
    queries, keys = sides(site)
    if queries == keys:
        length, count = weights.shape[-2:]
        places = torch.arange(count, device=weights.device)
        own = places == places[count - length :, None]  # (T, S)
        first, _ = first_and_later(site, attention, batch)
        weights = weights.masked_fill(own | (places == first[:, None])[:, None, None], 0.0)
    return weighted(site, weights, norms, batch)


def weighted(site: AttentionSite, weights: Tensor, norms: Tensor, batch: Batch) -> Tensor:
    return batch.counted(site, torch.einsum("bhts,bsh->bth", weights, norms))


OfStream = Callable[[Tensor, Tensor, Tensor], Tensor]
OF_STREAM: dict[str, OfStream] = {"value_zeroing": value_zeroing, "contribution": contribution}
OfValues = Callable[[AttentionSite, Attention, Tensor, Batch], Tensor]
OF_VALUES: dict[str, OfValues] = {"value_norm": value_norm, "context_norm": context_norm}


def columns_of(site: OpenSite) -> Tensor:
    """Return the columns of W_O that read each head: [H, D, d_v]."""
    return float64(site.output_weight()).unflatten(-1, (site.num_heads, -1)).movedim(1, 0)


class Vectors(Observer):
    """An observer that averages measures of written vectors over query tokens.

    Args:
        measures: some of `OF_STREAM` and `OF_VALUES`.
        sites: the open sites of the model.
        readers: where the stream is read, of the sites that have such a place; none where no measure needs it.
    """

    def __init__(self, measures: Sequence[str], sites: Sequence[OpenSite], readers: Sequence[Reader]):
        self.of_stream = [name for name in measures if name in OF_STREAM]
        self.of_values = [name for name in measures if name in OF_VALUES]
        self.open = {site.path: site for site in sites}
        self.readers = readers if self.of_stream else ()
        self.weights, self.outputs = bool(self.of_values), bool(self.of_stream)
        self.grams: dict[str, Tensor] = {}
        if self.of_values:
            self.grams = {site.path: columns_of(site).mT @ columns_of(site) for site in sites}  # (H, d_v, d_v)
        self.values: dict[str, Tensor] = {}
        self.means: dict[tuple[str, str], RunningMean] = {}

    def listening(self, model: PreTrainedModel) -> ExitStack:
        """Return a context in which values and streams are seen."""
        stack = ExitStack()
        for path, site in self.open.items() if self.of_values else ():
            handle = site.value.register_forward_hook(self.keeper(path))
            stack.callback(handle.remove)
        for reader in self.readers:
            stack.enter_context(watching(model, reader, self.stream_of(reader)))
        return stack

    def keeper(self, path: str) -> Callable[[nn.Module, tuple, Tensor], None]:
        def keep(_: nn.Module, __: tuple, values: Tensor) -> None:
            self.values[path] = values

        return keep

    def add(self, path: str, measure: str, values: Tensor) -> None:
        self.means.setdefault((measure, path), RunningMean()).add(values)

    def see_outputs(self, site: AttentionSite, outputs: Tensor, batch: Batch) -> None:
        """Keep the batch for the stream, which is seen next."""
        self.batch = batch

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        each = float64(self.values.pop(site.path)).unflatten(-1, (site.num_key_heads, -1))  # (B, S, H_k, d_v)
        each = each[:, :, list(self.open[site.path].groups)]
        squares = torch.einsum("bshv,hvw,bshw->bsh", each, self.grams[site.path], each)
        for measure in self.of_values:
            self.add(site.path, measure, OF_VALUES[measure](site, attention, squares.clamp(min=0).sqrt(), batch))

    def stream_of(self, reader: Reader) -> Callable[[Tensor, Tensor, Tensor], None]:
        site = self.open[reader.site.path]
        scale = float64(reader.scale)

        def see(inputs: Tensor, put_out: Tensor, stream: Tensor) -> None:
            columns = columns_of(site)
            rows = inputs, put_out, stream.view_as(put_out)
            counted = [float64(self.batch.counted(site.site, each)) for each in rows]
            for heads, whole, read in zip(*(each.split(CHUNK) for each in counted), strict=True):
                parts = heads.unflatten(-1, (site.num_heads, -1)).movedim(1, 0) @ columns.mT  # (H, N, D)
                written, rest = (parts * scale).movedim(0, 1), read - whole * scale
                for measure in self.of_stream:
                    self.add(site.path, measure, OF_STREAM[measure](read, written, rest))

        return see

    def results(self) -> dict[str, dict[str, RunningMean]]:
        """Return measure -> path -> the mean over query tokens."""
        found: dict[str, dict[str, RunningMean]] = {name: {} for name in (*self.of_values, *self.of_stream)}
        for (measure, path), mean in self.means.items():
            found[measure][path] = mean
        return found
