"""The report of a trimmed vocabulary: tokens and parameters before and after, and what changes for the texts."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class VocabularyReport:
    """The result of `trim_vocabulary`.

    Attributes:
        tokenizer: the new tokenizer: save it beside the model.
        tokens_before, tokens_after: the tokens of the vocabulary; of both, where encoder and decoder have their own.
        parameters_before, parameters_after: the parameters of embeddings and output layer, tied ones once.
        text_tokens: the number of tokens in the texts.
        changed_tokens: how many of these are gone, so that the text around them is divided in other ways.
        model_parameters: the parameters of the model before.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens_before: int
    tokens_after: int
    parameters_before: int
    parameters_after: int
    text_tokens: int
    changed_tokens: int
    model_parameters: int

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name != "tokenizer"}

    def __str__(self) -> str:
        whole, saved = self.model_parameters, self.parameters_before - self.parameters_after
        lines = [
            f"vocabulary: {self.tokens_before:,} -> {self.tokens_after:,} tokens",
            f"embeddings and output layer: {self.parameters_before:,} -> {self.parameters_after:,} parameters; model: "
            f"{whole:,} -> {whole - saved:,} ({-saved / whole:+.1%})",
            f"tokens of the texts: {self.text_tokens:,}, of which {self.changed_tokens:,} "
            f"({self.changed_tokens / max(1, self.text_tokens):.2%}) become other ones",
        ]
        return "\n".join(lines)
