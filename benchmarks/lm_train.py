"""A small Llama on Multi30k's English side: a decoder with rotary positions whose queries and keys are not normed.

    python benchmarks/lm_train.py [FOLDER] [--steps 1500]

Of the size of the shared Qwen3, with its pieces and its training: 1,500 steps of 64 sentences, AdamW to 2e-3 with 150
steps of warm-up and a cosine. One thread, seeds fixed: a machine of the same kind makes the same weights.
Without FOLDER it goes to WORK/llama-multi30k-en, where `rotary_widths.py` looks for it.
"""

import argparse
import math
import time

import torch
from lm import END, PADDING, START, Text, perplexity
from transformers import LlamaConfig, LlamaForCausalLM

from common import WORK

LLAMA = WORK / "llama-multi30k-en"
ROWS, RATE, WARM_UP, EVERY = 64, 2e-3, 150, 100


def small_llama() -> LlamaForCausalLM:
    """Build a random Llama: 4 layers, 256 wide, 8 query heads and 4 key/value heads of 32, tied embeddings."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of its peak."""
    return min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: LlamaForCausalLM, text: Text, steps: int) -> None:
    """Train in place, on sentences in a new order in every epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    model.train()
    step, epoch, started = 0, 0, time.perf_counter()
    while step < steps:
        for batch in text.batches(text.sentences("train", seed=epoch), ROWS):
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate(step, steps)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0:
                print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
            if step == steps:
                break
        epoch += 1
    model.eval()


def main() -> None:
    """Train, measure and store the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(LLAMA), help="where the model goes")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, text = small_llama(), Text("qwen3")
    train(model, text, arguments.steps)
    model.save_pretrained(arguments.folder)
    text.tokenizer.save_pretrained(arguments.folder)
    print({name: round(perplexity(model, text.test(name)), 2) for name in ("val", "test_2016_flickr")})


if __name__ == "__main__":
    main()
