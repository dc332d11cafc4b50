"""Measure what a model loses, sentence by sentence, if heads are left out, with W_O refitted or not.

Runs begin at the block of the head, see `collab_heads.running.blocks`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from stsb import pairs
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from translation import read

from collab_heads import get_adapter
from collab_heads.analysis.measures.ablation import silencer
from collab_heads.files.conllu import read_conllu
from collab_heads.fitting.head_regression import HeadRegression
from collab_heads.layers.layout import weight_of
from collab_heads.model.open_layers import OpenLayers, OpenSite
from collab_heads.running.batches import run_batches
from collab_heads.running.blocks import BlockStarts
from common import minilm, shared

Batches = list[dict[str, Tensor]]
DRAWS, SIZE, LONGEST = 3, 32, 64  # draws of sentences to measure on; sentences of a batch; tokens of a sentence
IGNORED = -100


@dataclass
class Case:
    """A model, the sentences on which the truth is measured, and three draws of others for the measures.

    Attributes:
        model: the model.
        tested: batches of the truth.
        draws: batches of each draw.
        exclude: ids of tokens that end sentences.
        harm: what is lost, in words.
        flow: sentences of a draw on which attention flow is measured.
        refits: draws on which W_O is refitted.
    """

    model: PreTrainedModel
    tested: Batches
    draws: list[Batches]
    exclude: list[int]
    harm: str
    flow: int
    refits: int = DRAWS

    @property
    def has_labels(self) -> bool:
        return "labels" in self.tested[0]


def chosen(count: int, number: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:number].tolist()


def batched(tokenizer, texts: Sequence[str], targets: Sequence[str] | None = None, *, own: bool = False) -> Batches:
    """Return batches of sentences of similar length, with the labels of a translation, or the tokens themselves."""
    order, found = sorted(range(len(texts)), key=lambda place: len(texts[place])), []
    for start in range(0, len(order), SIZE):
        places = order[start : start + SIZE]
        given = {"text": [texts[place] for place in places]}
        if targets is not None:
            given["text_target"] = [targets[place] for place in places]
        batch = dict(tokenizer(**given, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"))
        if own:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        elif targets is not None:
            batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, IGNORED)
        found.append(batch)
    return found


def encoder(folder: str, tested: int, drawn: int, flow: int, refits: int = DRAWS) -> Case:
    """Return a sentence encoder on STS-B: pairs of the dev set, and draws of the train set."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [text for row in pairs("dev")[: tested // 2] for text in row[:2]]
    train = [row[0] for row in pairs("train")]
    draws = [batched(tokenizer, [train[place] for place in chosen(len(train), drawn, draw)]) for draw in range(DRAWS)]
    return Case(
        model, batched(tokenizer, texts), draws, [tokenizer.sep_token_id], "1 - cosine to the original", flow, refits
    )


def translator(folder: str, tested: int = 200, drawn: int = 256, flow: int = 32) -> Case:
    """Return a translation model on Multi30k: the first pairs of a test set, and draws of the train set."""
    model = AutoModelForSeq2SeqLM.from_pretrained(shared(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(shared(folder))
    source, target = (read("test_2016_flickr", language, tested) for language in ("de", "en"))
    train = [read("train", language) for language in ("de", "en")]
    draws = []
    for draw in range(DRAWS):
        places = chosen(len(train[0]), drawn, draw)
        draws.append(batched(tokenizer, *([side[place] for place in places] for side in train)))
    return Case(model, batched(tokenizer, source, target), draws, [tokenizer.eos_token_id], "loss per token", flow)


def decoder(folder: str, tested: int, drawn: int, flow: int, refits: int) -> Case:
    """Return a decoder on UD English EWT: sentences of 8 words or more, of the test set, and draws of the dev set."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    test, dev = (
        [s.text for s in read_conllu(shared(f"data/ud_english_ewt/en_ewt-ud-{split}.conllu")) if s.text.count(" ") > 6]
        for split in ("test", "dev")
    )
    texts = [test[place] for place in chosen(len(test), tested, 0)]
    draws = [
        batched(tokenizer, [dev[place] for place in chosen(len(dev), drawn, draw)], own=True) for draw in range(DRAWS)
    ]
    return Case(model, batched(tokenizer, texts, own=True), draws, [], "loss per token", flow, refits)


CASES = {
    "minilm": ("all-MiniLM-L6-v2", lambda real: encoder(minilm(), 200, 256, 32)),
    "marian": ("Marian", lambda real: translator("models/marian-multi30k-de-en")),
    "t5": ("T5", lambda real: translator("models/t5-multi30k-de-en")),
    "mpnet": ("all-mpnet-base-v2", lambda real: encoder(str(real / "all-mpnet-base-v2"), 64, 128, 16, 1)),
    "smollm2": ("SmolLM2-135M", lambda real: decoder(str(real / "smollm2-135m-instruct"), 16, 64, 1, 1)),
}


def token_losses(logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of every sentence, and the number of its labels: [B] each."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.mT.float(), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1).double(), (labels != IGNORED).sum(1).double()


def divergences(before: Tensor, logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return KL divergences from the whole model, summed over the labels of each sentence, and their number: [B]."""
    if shifted:
        before, logits, labels = before[:, :-1], logits[:, :-1], labels[:, 1:]
    of_tokens = functional.kl_div(
        logits.float().log_softmax(-1), before.float().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    counts = labels != IGNORED
    return of_tokens.masked_fill(~counts, 0.0).sum(1).double(), counts.sum(1).double()


def embeddings(outputs: Mapping, batch: Mapping) -> Tensor:
    mask = batch["attention_mask"][..., None]
    pooled = (outputs["last_hidden_state"] * mask).sum(1) / mask.sum(1)
    return functional.normalize(pooled.double(), dim=-1)


Removed = Mapping[str, Sequence[int]]  # path -> the heads that are left out


@dataclass
class Truth:
    """Measure what a model loses on the tested sentences of a case.

    Attributes:
        case: the case.
        by_divergence: whether the harm to a model with labels is the KL divergence from the whole model's predictions,
            and not the loss.
        sites: the sites that have heads.
        weights: [S], what each sentence counts: its labels, or 1.
        whole: [S], the loss of the whole model, summed over the labels of each sentence.
    """

    case: Case
    by_divergence: bool = False
    sites: list[OpenSite] = field(init=False)
    weights: Tensor = field(init=False)
    whole: Tensor = field(init=False)

    def __post_init__(self):
        model = self.case.model
        self.sites = OpenLayers.of(model, get_adapter(model)).with_heads
        self.starts = BlockStarts(model, self.sites, self.case.tested, lambda batch: (batch,))
        self.original: list[Tensor] = []
        counts = self.losses()
        if self.by_divergence or not self.case.has_labels:
            self.original = [each for each, _ in counts]
            counts = self.losses()
        self.whole, self.weights = (torch.cat(each) for each in zip(*counts, strict=True))

    def losses(self) -> list[tuple[Tensor, Tensor]]:
        """Run the model; return losses and counts of every batch, or embeddings where there is no original yet."""
        found: list[tuple[Tensor, Tensor]] = []
        shifted = not self.case.model.config.is_encoder_decoder

        def see(_, args: tuple, batch: Mapping, outputs: Mapping) -> None:
            if self.case.has_labels and not self.by_divergence:
                found.append(token_losses(outputs["logits"], batch["labels"], shifted))
                return
            if self.by_divergence:
                logits, labels = outputs["logits"], batch["labels"]
                before = self.original[len(found)] if self.original else logits
                found.append(divergences(before, logits, labels, shifted) if self.original else (logits, logits))
                return
            now = embeddings(outputs, batch)
            if not self.original:
                found.append((now, now))
                return
            apart = 1 - (now * self.original[len(found)]).sum(-1)
            found.append((apart, torch.ones_like(apart)))

        handle = self.case.model.register_forward_hook(see, with_kwargs=True)
        try:
            run_batches(self.case.model, self.case.tested, {}, "measuring")
        finally:
            handle.remove()
        return found

    def harm(self, removed: Removed, fits: Mapping[str, HeadRegression] | None = None) -> Tensor:
        """Return what every sentence loses without some heads, summed over its labels: [S].

        Args:
            removed: path -> indices of the heads, of few sites or of all.
            fits: path -> the regression by which W_O is refitted; None to leave it as it is.
        """
        sites = [site for site in self.sites if removed.get(site.path)]
        with ExitStack() as stack:
            stack.enter_context(self.starts.at(sites[0].path))
            for site in sites:
                left_out = refitted(site, removed[site.path], fits[site.path]) if fits else silenced(site, removed)
                stack.enter_context(left_out)
            return torch.cat([losses for losses, _ in self.losses()]) - self.whole

    def of_each_head(self, fits: Mapping[str, HeadRegression] | None = None) -> Tensor:
        """Return the harm of every head alone: [heads, S]."""
        each = [self.harm({site.path: [head]}, fits) for site in self.sites for head in range(site.num_heads)]
        return torch.stack(each)

    def mean(self, harm: Tensor) -> float:
        return float(harm.sum(-1) / self.weights.sum())


@contextmanager
def silenced(site: OpenSite, removed: Removed) -> Iterator[None]:
    """Leave out heads while the context is open."""
    alive = torch.tensor([head not in removed[site.path] for head in range(site.num_heads)])
    handle = site.output.register_forward_pre_hook(silencer(alive))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
@torch.no_grad()
def refitted(site: OpenSite, removed: Sequence[int], fit: HeadRegression) -> Iterator[None]:
    """Leave out heads, with W_O and its bias refitted for those that stay, as `prune_heads` does."""
    kept = [head for head in range(site.num_heads) if head not in removed]
    weight, bias = weight_of(site.output), site.output.bias
    before = weight.clone(), None if bias is None else bias.clone()
    output = fit.output(kept) if kept else None
    added = fit.weight @ fit.mean if output is None else output.bias  # that of the mean outputs, if no head is left
    weight.zero_()
    if output is not None:
        weight[:, fit.columns(kept)] = output.weight.to(weight)
    if bias is not None:
        bias += added.to(bias)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before[0])
            if bias is not None:
                bias.copy_(before[1])
