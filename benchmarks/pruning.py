"""Measure what removed heads save: parameters, cache, time to encode, tokens per second; 100, 50 and 25 % of all heads.

python benchmarks/pruning.py [--rounds N]

The same share of heads goes from every layer (which ones does not matter for time). Encoding: a batch of 32 sequences
of 128 tokens, one CPU thread; generation: 32 sentences, 40 new tokens each, greedy and with 5 beams. Medians of
interleaved runs, as ratios to the original in the same run. Operations are counted by torch's FlopCounterMode over the
same forward pass; "share realised" is time saved / operations saved. Exits with 1 if time does not fall from share to
share, or a share realised in encoding is below one half.
"""

import argparse
import itertools
import sys

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.utils import logging

from collab_heads import get_adapter, prune_heads
from common import interleaved, minilm, shared, table, write

SHARES = (1.0, 0.5, 0.25)
BATCH, LENGTH, NEW, BEAMS = 32, 128, 40, 5
BAR = 0.5  # least share of the saved operations that must show in the encoding time
COLUMNS = {
    "model": "",
    "heads": "",
    "parameters": ",",
    "cache bytes per token": ",",
    "operations": ".3f",
    "encoding time": ".3f",
    "share realised": ".2f",
    "greedy time": ".3f",
    "greedy tokens/s": ".0f",
    "beam time": ".3f",
    "beam tokens/s": ".0f",
}


def pruned(load, share: float):
    """Return a new model with this share of the heads of every site, and the number of its heads."""
    model = load().eval()
    sites = get_adapter(model).sites(model)
    if share < 1:
        prune_heads(
            model, heads={site.path: list(range(round(share * site.num_heads), site.num_heads)) for site in sites}
        )
    return model, sum(site.num_heads for site in get_adapter(model).sites(model))


def encoding(model):
    """Return a function that encodes one batch, without padding."""
    ids = torch.randint(10, model.config.vocab_size - 10, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model

    def encode():
        with torch.no_grad():
            encoder(**inputs)

    return encode


def generation(model, beams: int):
    """Return a function that generates exactly NEW tokens for every sentence of one batch."""
    ids = torch.randint(10, model.config.vocab_size - 10, (BATCH, 20), generator=torch.Generator().manual_seed(0))
    settings = {"num_beams": beams, "do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW}

    def generate():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)

    return generate


def operations(model) -> int:
    """Return the floating-point operations of encoding one batch; eager, since torch counts none for sdpa on a CPU."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        encoding(model)()
    model.set_attn_implementation(backend)
    return counter.get_total_flops()


@torch.no_grad()
def cache_bytes(model) -> int:
    """Return the bytes that a decoder caches per token of one sentence, in self- and cross-attention of all layers.

    The result is 0 for a model without a decoder.
    """
    if not model.config.is_encoder_decoder:
        return 0
    ids = torch.full((1, 1), 5)
    cache = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return sum(tensor.numel() * tensor.itemsize for layer in layers for tensor in (layer.keys, layer.values))


def measure(name: str, load, rounds: int) -> list[dict]:
    """Return a row for every share of the heads of one model."""
    models = {share: pruned(load, share) for share in SHARES}
    tasks = {("encoding", share): encoding(model) for share, (model, _) in models.items()}
    if models[1.0][0].config.is_encoder_decoder:
        for beams, what in ((1, "greedy"), (BEAMS, "beam")):
            tasks |= {(what, share): generation(model, beams) for share, (model, _) in models.items()}
    flops = {share: operations(model) for share, (model, _) in models.items()}
    seconds = interleaved(tasks, rounds)
    rows = []
    for share, (model, heads) in models.items():
        row = {
            "model": name,
            "heads": heads,
            "parameters": model.num_parameters(),
            "operations": flops[share] / flops[1.0],
        }
        row["cache bytes per token"] = cache_bytes(model) or None
        for what in ("encoding", "greedy", "beam"):
            if (what, share) in seconds:
                row[f"{what} time"] = seconds[what, share] / seconds[what, 1.0]
                if what != "encoding":
                    row[f"{what} tokens/s"] = BATCH * NEW / seconds[what, share]
        if share < 1:
            row["share realised"] = (1 - row["encoding time"]) / (1 - row["operations"])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print and store; exit with an error if too little of the saved work shows in the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    marian = shared("models/marian-multi30k-de-en")
    rows = measure("all-MiniLM-L6-v2", lambda: AutoModel.from_pretrained(minilm()), arguments.rounds)
    rows += measure("Marian (Multi30k)", lambda: AutoModelForSeq2SeqLM.from_pretrained(marian), arguments.rounds)
    print(table(rows, COLUMNS))
    falls = all(b["encoding time"] < a["encoding time"] for a, b in itertools.pairwise(rows) if b["heads"] < a["heads"])
    realised = min(row["share realised"] for row in rows if "share realised" in row)
    passed = falls and realised >= BAR
    print(f"{'PASS' if passed else 'FAIL'}: time falls: {falls}; least share realised {realised:.2f} (bar {BAR})")
    write("pruning", rows, bar=BAR, passed=passed, batch=BATCH, length=LENGTH, rounds=arguments.rounds)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
