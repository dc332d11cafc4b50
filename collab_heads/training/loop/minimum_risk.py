"""Minimum-risk training (Shen et al. 2016): make the better ones of the model's own translations more probable.

For every source sentence, translations are sampled from the model, and the reference is added. Among these candidates Y

    Q(y) = p(y)^a / Σ p(y')^a        loss = Σ Q(y) · (1 - score(y))        score: sentence BLEU or chrF, 0 to 1

Each candidate counts once, however often it was drawn. The model should already be trained, so that its samples are
sentences. A baseline would change nothing: the Q of a sentence sum to one, so a constant has no gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from collab_heads.data.batches import IGNORED
from collab_heads.errors import ArgumentError
from collab_heads.running.batches import evaluating
from collab_heads.running.translations import generate

METRICS: dict[str, Callable[[], Any]] = {
    "bleu": lambda: BLEU(effective_order=True),  # leaves out n-gram orders that a sentence is too short for
    "chrf": CHRF,
}
SPARE = 10  # tokens that a sample may have beyond twice the longest reference of its batch


@dataclass(frozen=True)
class Candidates:
    """The candidate translations of a batch, N in all, without duplicates.

    Attributes:
        inputs: [N, T], inputs of the decoder.
        targets: [N, T], target tokens; `IGNORED` after the end of a sentence.
        owner: [N], the row of the batch that a candidate translates, in ascending order.
        references: [N], True for the references.
    """

    inputs: Tensor
    targets: Tensor
    owner: Tensor
    references: Tensor


@dataclass(frozen=True)
class MinimumRisk:
    """The training loss: expected risk of a model's own translations, averaged over sentences.

    Attributes:
        accelerator: of the run; it unwraps the model.
        tokenizer: of the target.
        samples: translations drawn per sentence.
        sharpness: the exponent a of p; at 0 all candidates have the same weight.
        metric: "bleu" or "chrf".
        cross_entropy: weight of the references' cross-entropy (per sentence the mean over tokens), which is added.
        longest: the most tokens that a sample may have.
    """

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    samples: int
    sharpness: float
    metric: str
    cross_entropy: float
    longest: int

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the sentences of a batch; samples are drawn with torch's global generator."""
        candidates = self.candidates(self.accelerator.unwrap_model(model), batch)
        risks = self.risks(candidates).to(batch["input_ids"].device)
        log_p = self.log_probabilities(model, batch, candidates)
        sentences = len(batch["input_ids"])
        loss = (shares(self.sharpness * log_p.sum(1), candidates.owner, sentences) * risks).sum()
        if self.cross_entropy:
            those = candidates.references
            lengths = (candidates.targets[those] != IGNORED).sum(1)
            loss = loss - self.cross_entropy * (log_p[those].sum(1) / lengths).sum()
        return loss / sentences

    @staticmethod
    def weight(batch: Mapping[str, Tensor]) -> int:
        """Return the number of sentences over which the loss of a batch is the mean."""
        return len(batch["input_ids"])

    def candidates(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Candidates:
        """Sample translations in evaluation mode, add the references and remove duplicates."""
        longest = min(self.longest, 2 * batch["labels"].shape[1] + SPARE)
        with evaluating(model):
            drawn = generate(
                model,
                {name: batch[name] for name in ("input_ids", "attention_mask")},
                do_sample=True,
                num_return_sequences=self.samples,
                num_beams=1,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_length=longest,
            ).unflatten(0, (-1, self.samples))
        rows = [
            (sentence, [*whole], is_reference)
            for sentence, (reference, start, samples) in enumerate(
                zip(batch["labels"].tolist(), batch["decoder_input_ids"][:, 0].tolist(), drawn.tolist(), strict=True)
            )
            for whole, is_reference in self.each_once([start, *reference], samples)
        ]
        width = max(len(whole) for _, whole, _ in rows) - 1
        pad = self.tokenizer.pad_token_id
        filled = [(whole[:-1] + [pad] * (width + 1 - len(whole)), whole[1:]) for _, whole, _ in rows]
        device = batch["input_ids"].device
        return Candidates(
            inputs=torch.tensor([inputs for inputs, _ in filled], device=device),
            targets=torch.tensor([[*said, *[IGNORED] * (width - len(said))] for _, said in filled], device=device),
            owner=torch.tensor([sentence for sentence, _, _ in rows], device=device),
            references=torch.tensor([is_reference for _, _, is_reference in rows], device=device),
        )

    def each_once(self, reference: Sequence[int], samples: Sequence[Sequence[int]]) -> list[tuple[list[int], bool]]:
        """Return the distinct candidates of a sentence, cut at their end, the reference (marked True) first."""
        first = self.ended([token for token in reference if token != IGNORED])
        others = dict.fromkeys(tuple(self.ended(sample)) for sample in samples)
        others.pop(tuple(first), None)
        return [(first, True), *((list(sample), False) for sample in others)]

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """Cut tokens after the end token; one in first place does not count: decoders may start with it."""
        tokens = list(tokens)
        end = self.tokenizer.eos_token_id
        return tokens[: tokens.index(end, 1) + 1] if end in tokens[1:] else tokens

    def check(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        """Check that a model's samples of some sentences give it something to learn from.

        The random generators are left as they were.
        """
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            candidates = self.candidates(model, batch)
        sampled = candidates.targets[~candidates.references]
        sentences = len(batch["input_ids"])
        if not len(sampled):
            raise ArgumentError(
                f"--objective minimum_risk: all {self.samples} samples of each of {sentences} training sentences are "
                "the reference itself: the model knows these pairs by heart, and there is nothing to choose between; "
                "train on others, or with more --risk_samples"
            )
        if torch.isin(sampled, sampled.new_tensor([IGNORED, *self.tokenizer.all_special_ids])).all():
            raise ArgumentError(
                f"--objective minimum_risk: all samples of {sentences} training sentences are empty: train the model "
                "with cross-entropy first"
            )

    def risks(self, candidates: Candidates) -> Tensor:
        """Return 1 - score of every candidate against the reference of its sentence, [N]."""
        texts = self.tokenizer.batch_decode(
            candidates.targets.masked_fill(candidates.targets == IGNORED, self.tokenizer.pad_token_id),
            skip_special_tokens=True,
        )
        owners, metric = candidates.owner.tolist(), METRICS[self.metric]()
        references = {
            owner: text
            for owner, text, is_reference in zip(owners, texts, candidates.references.tolist(), strict=True)
            if is_reference
        }
        scores = [metric.sentence_score(text, [references[o]]).score for text, o in zip(texts, owners, strict=True)]
        return 1 - torch.tensor(scores) / 100

    def log_probabilities(self, model: nn.Module, batch: Mapping[str, Tensor], candidates: Candidates) -> Tensor:
        """Return the log p of every token of every candidate, [N, T], 0 after the end; encodes sources once."""
        encoder = self.accelerator.unwrap_model(model).get_encoder()
        with self.accelerator.autocast():
            states = encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        logits = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states[candidates.owner]),
            attention_mask=batch["attention_mask"][candidates.owner],
            decoder_input_ids=candidates.inputs,
            use_cache=False,
        ).logits
        flat = candidates.targets.flatten()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat, ignore_index=IGNORED, reduction="none")
        return -losses.view_as(candidates.targets)


def shares(scores: Tensor, owner: Tensor, sentences: int) -> Tensor:
    """Return the softmax of scores [N] over the candidates of each sentence, [N]."""
    highest = scores.new_full((sentences,), -torch.inf).scatter_reduce(0, owner, scores.detach(), "amax")
    powers = (scores - highest[owner]).exp()
    return powers / scores.new_zeros(sentences).index_add(0, owner, powers)[owner]
