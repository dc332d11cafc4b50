"""Score a sentence encoder by retrieval in RTE: does it find the passage that entails a statement?"""

from collections.abc import Sequence

import torch
from stsb import Task

from collab_heads.running.embeddings import embed
from common import lines_of


class Retrieval:
    """The statements of RTE's train and dev sets that a passage entails, and all these passages, tokenized.

    Attributes:
        texts: all of them; nothing that a model was fitted to may be among them.
    """

    def __init__(self, task: Task):
        self.task = task
        rows = [line.split("\t") for split in ("train", "dev") for line in lines_of(f"data/glue/RTE/{split}.tsv")[1:]]
        entailed = [(passage, statement) for _, passage, statement, label in rows if label == "entailment"]
        passages = list(dict.fromkeys(passage for passage, _ in entailed))
        self.passages, self.passage_order = self.by_length(passages)
        self.statements, self.statement_order = self.by_length([statement for _, statement in entailed])
        place = {passage: index for index, passage in enumerate(passages)}
        self.gold = torch.tensor([place[passage] for passage, _ in entailed])
        self.texts = {text.strip() for pair in entailed for text in pair}

    def by_length(self, texts: Sequence[str]) -> tuple[list[dict], torch.Tensor]:
        """Return batches of texts of similar length, and the index of the text in every row of them."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        return self.task.tokenized([texts[index] for index in order], 64), torch.tensor(order)

    def score(self, model) -> float:
        """Return how often the passage that entails a statement is the nearest of all passages, x 100."""
        found = []
        for batches, order in (
            (self.statements, self.statement_order),
            (self.passages, self.passage_order),
        ):
            rows = embed(model, batches)
            found.append(torch.empty_like(rows).index_copy_(0, order, rows))
        statements, passages = found
        return 100 * float(((statements @ passages.T).argmax(-1) == self.gold).double().mean())
