"""trim_vocabulary: keep the tokens that texts use."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_count, is_count, is_number
from collab_heads.base.progress import progress_bar
from collab_heads.base.report import Report
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError
from collab_heads.model.refusals import check_wrapper
from collab_heads.saving.vocabularies import check_words, digest, vocabularies_of
from collab_heads.sites.record import TRIMMED
from collab_heads.vocabulary.needed_ids import (
    OwnText,
    configs_of,
    ids_of,
    own_texts,
    reads_lower_case,
    with_first_words,
)
from collab_heads.vocabulary.token_tables import (
    check_positions,
    check_rows,
    count_parameters,
    keep_rows,
    own_parts,
    token_tables,
)
from collab_heads.vocabulary.trimmed_tokenizer import Text, TokenizerFiles, files_of

AT_ONCE = 1000  # texts that are divided together
CHECKED = 2000  # texts that are divided again by the new tokenizer
SHOWN = 8  # names in a report


@dataclass(frozen=True)
class VocabularyReport(Report):
    """The report of `trim_vocabulary`.

    Attributes:
        tokens_before, tokens_after: the tokens of the vocabulary; of both, where encoder and decoder have their own.
        parameters_before, parameters_after: the parameters of embeddings and output layer, tied ones once.
        text_tokens: the number of tokens in the texts.
        changed_tokens: how many of these are gone, so that the text around them is divided in other ways.
        model_parameters: the parameters of the model before.
        own_texts: where texts were found that the model reads and no user writes, such as its chat template.
        own_tokens: the tokens of these that the given texts do not have; they stay.
    """

    tokens_before: int
    tokens_after: int
    parameters_before: int
    parameters_after: int
    text_tokens: int
    changed_tokens: int
    model_parameters: int
    own_texts: tuple[str, ...] = ()
    own_tokens: int = 0

    def lines(self) -> list[str]:
        whole, saved = self.model_parameters, self.parameters_before - self.parameters_after
        lines = [
            f"vocabulary: {self.tokens_before:,} -> {self.tokens_after:,} tokens",
            f"embeddings and output layer: {self.parameters_before:,} -> {self.parameters_after:,} parameters; model: "
            f"{whole:,} -> {whole - saved:,} ({-saved / whole:+.1%})",
            f"tokens of the texts: {self.text_tokens:,}, of which {self.changed_tokens:,} "
            f"({self.changed_tokens / max(1, self.text_tokens):.2%}) become other ones",
        ]
        if self.own_texts:
            shown = ", ".join(self.own_texts[:SHOWN]) + (", ..." if len(self.own_texts) > SHOWN else "")
            lines.append(
                f"also kept, because the model reads it itself: {shown} ({self.own_tokens:,} tokens that the texts do "
                "not have)"
            )
        return lines


@checking_arguments
def trim_vocabulary(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Text],
    *,
    keep: int | float | None = None,
    min_count: int = 1,
    show_progress: bool = True,
) -> tuple[PreTrainedTokenizerBase, VocabularyReport]:
    """Keep the tokens that texts use: in the tokenizer, the embeddings, the output layer and the ids of the configs.

    The model is changed in place, and the checkpoint is one that plain transformers loads. For texts of kept tokens
    it computes what it did. Special and added tokens, single characters and bytes stay, and so does all that a kept
    token is built from; so texts get no unknown tokens that they did not have (where each character is a token of
    its own), and other words become shorter pieces. What the model reads and no user writes counts as used: its
    chat template, prefixes in its configs, and the prompts of the sentence-transformers folder that it was loaded
    from. Other models that share its config, its embeddings or their weights keep all tokens. One that shares a
    module around these, or has the model as a part (`classifier.bert`), changes with it, and its config does not
    fit any more: trim the whole, or a copy. Source: the method of Abdaoui et al. 2020 ("Load What You Need"), with
    the tokenizer.

    Examples:
        >>> from transformers import AutoModel, AutoTokenizer
        >>> from collab_heads.demo import model_folder, sentences
        >>> model = AutoModel.from_pretrained(model_folder())
        >>> tokenizer = AutoTokenizer.from_pretrained(model_folder())
        >>> tokenizer, report = trim_vocabulary(model, tokenizer, sentences(64, seed=0))
        >>> model.get_input_embeddings().weight.shape[0] == len(tokenizer) == report.tokens_after
        True

    Args:
        model: the model, stock or changed by this package.
        tokenizer: its tokenizer, with a `tokenizer.json` (WordPiece, BPE, Unigram), or Marian's; it is not changed.
        texts: what the model will read and write: sentences, or pairs of a source and its translation.
        keep: the number of tokens that stay, or their share of the vocabulary: those that the texts use most, then
            those that come first in the vocabulary. None: all that the texts use.
        min_count: how often the texts must use a token, without `keep`.
        show_progress: show a progress bar, where stderr is a terminal.

    Returns:
        The new tokenizer, which belongs beside the model, and what was saved; `print` it.

    Raises:
        ArgumentError: if the tokenizer is slow, or of another model, or `keep` is less than what must stay, or given
            with `min_count`.
        CalibrationError: if there are no texts.
        ModelStateError: if the new tokenizer would divide a text of kept tokens in another way; nothing changes then.
        UnsupportedModelError: if the model is wrapped or reads no tokens, its embeddings are quantised, or it has other
            tables of tokens.
    """
    check_wrapper(model)
    check_count("min_count", min_count, 1)
    check_keep(keep)
    if keep is not None and min_count > 1:
        raise ArgumentError("keep and min_count exclude each other: keep takes the tokens that the texts use most")
    check_words(tokenizer)
    files = files_of(tokenizer)
    tables = token_tables(model, len(files.vocabularies))
    check_rows(tables, files.vocabularies)
    if isinstance(texts, Mapping):
        raise ArgumentError("texts is a dict: pass a list of texts, or of pairs of a source and its translation")
    given = list(texts)
    check_texts(given)
    if lowers := reads_lower_case(model):
        given = [text.lower() if isinstance(text, str) else [each.lower() for each in text] for text in given]
    counts = count_tokens(files, given, show_progress)
    first = next(text for pair in given for text in ((pair,) if isinstance(pair, str) else pair) if text)
    own = own_texts(model, tokenizer, first.split(maxsplit=1)[0] if first.strip() else first)
    if lowers:
        own = [OwnText(each.where, each.text.lower(), tuple(map(str.lower, each.prefixes))) for each in own]
    behind = with_first_words(own, given)
    of_own = count_tokens(files, [each.text for each in own], show_progress=False)
    used = [one + two for one, two in zip(counts, count_tokens(files, behind, show_progress=False), strict=True)]
    needed = set[int]().union(*(ids_of(config) for config in configs_of(model)))
    kept = [
        chosen(files, side, used[side], needed | of_own[side].keys(), keep, min_count)
        for side in range(len(files.vocabularies))
    ]
    same_padding(files, kept, getattr(model.config, "pad_token_id", None))
    if len(kept) == 1:  # a padding that is no token has a row all the same
        held = {*files.vocabularies[0].values()}
        kept[0] = sorted({*kept[0], *(each for each in needed - held if each < len(tables[0].module.weight))})
    ids = [dict(zip(each, range(len(each)), strict=True)) for each in kept]
    check_positions(model, ids[0])
    made = files.trimmed(
        [
            {token: new[old] for token, old in vocabulary.items() if old in new}
            for vocabulary, new in zip(files.vocabularies, ids, strict=True)
        ]
    )
    check_same(files, made, [*given[:CHECKED], *(each.text for each in own), *behind[:CHECKED]], ids)
    whole, before = sum(parameter.numel() for parameter in model.parameters()), count_parameters(tables)
    rows = [table.module.weight.shape[0] for table in tables]
    tables = own_parts(model, tables)
    keep_rows(model, tables, kept)
    said = {"before": rows[0], "after": len(kept[0]), "digest": digest(vocabularies_of(made))}
    setattr(model.config, TRIMMED, said)
    return made, VocabularyReport(
        tokens_before=sum(map(len, files.vocabularies)),
        tokens_after=sum(len({*each.values()} & new.keys()) for each, new in zip(files.vocabularies, ids, strict=True)),
        parameters_before=before,
        parameters_after=count_parameters(tables),
        text_tokens=sum(each.total() for each in counts),
        changed_tokens=sum(
            count for each, new in zip(counts, ids, strict=True) for token, count in each.items() if token not in new
        ),
        model_parameters=whole,
        own_texts=tuple(dict.fromkeys(each.where for each in own)),
        own_tokens=sum(len(mine.keys() - each.keys()) for mine, each in zip(of_own, counts, strict=True)),
    )


def check_keep(keep: int | float | None) -> None:
    if keep is None or is_count(keep) or (is_number(keep) and not isinstance(keep, int) and 0 < keep <= 1):
        return
    raise ArgumentError(f"keep {keep!r:.40} must be a number of tokens, or a share of them above 0 and at most 1")


def check_texts(texts: Sequence[Text]) -> None:
    for number, text in enumerate(texts):
        pair = (text,) if isinstance(text, str) else text
        is_pair = isinstance(pair, list | tuple) and 1 <= len(pair) <= 2
        if not is_pair or not all(isinstance(each, str) for each in pair):
            raise ArgumentError(f"texts[{number}] must be a text, or a source and its translation, not {text!r:.60}")
    if not any(text if isinstance(text, str) else "".join(text) for text in texts):
        raise CalibrationError("there are no texts, or all are empty: pass those that the model will read")


def count_tokens(files: TokenizerFiles, texts: Sequence[Text], show_progress: bool) -> list[Counter[int]]:
    counts = [Counter[int]() for _ in files.vocabularies]
    bar = progress_bar(total=len(texts), desc="counting tokens", unit=" texts", disable=not show_progress)
    with bar:
        for start in range(0, len(texts), AT_ONCE):
            batch = texts[start : start + AT_ONCE]
            for count, rows in zip(counts, files.encode(batch, files.tokenizer), strict=True):
                for row in rows:
                    count.update(row)
            bar.update(len(batch))
    return counts


def chosen(
    files: TokenizerFiles,
    side: int,
    counts: Mapping[int, int],
    needed: set[int],
    keep: int | float | None,
    min_count: int,
) -> list[int]:
    """Return the ids of a vocabulary that stay, in order."""
    vocabulary = files.vocabularies[side]
    token_of = {number: token for token, number in vocabulary.items()}

    def with_parts(token: str) -> set[int]:
        return {vocabulary[each] for each in (token, *files.parts(token)) if each in vocabulary}

    kept = set[int]()
    for token in {*files.always(side), *(token_of[number] for number in needed & token_of.keys())}:
        kept |= with_parts(token)
    most = len(vocabulary) if keep is None else keep if isinstance(keep, int) else int(keep * len(vocabulary))
    if most < len(kept):
        raise ArgumentError(
            f"keep {keep} is less than the {len(kept):,} special tokens, characters and others that must stay: raise it"
        )
    used = [number for number in counts.keys() & token_of.keys() if counts[number] >= min_count]
    others = sorted(token_of) if keep is not None else ()  # most vocabularies begin with frequent tokens
    for number in (*sorted(used, key=lambda each: (-counts[each], each)), *others):
        if number not in kept and len(more := with_parts(token_of[number]) - kept) <= most - len(kept):
            kept |= more
    return sorted(kept)


def same_padding(files: TokenizerFiles, kept: list[list[int]], padding: int | None) -> None:
    """Keep more tokens of one of two vocabularies, in place, so that the padding has one new id in both."""
    if len(kept) == 1 or padding is None:
        return
    places = [sum(each < padding for each in side) for side in kept]
    fewer = min(range(2), key=places.__getitem__)
    others = [
        each for each in sorted(files.vocabularies[fewer].values()) if each < padding and each not in {*kept[fewer]}
    ]
    kept[fewer] = sorted([*kept[fewer], *islice(others, abs(places[0] - places[1]))])


def check_same(
    files: TokenizerFiles, made: PreTrainedTokenizerBase, texts: Sequence[Text], ids: Sequence[Mapping[int, int]]
) -> None:
    for old, new, mapping in zip(files.encode(texts, files.tokenizer), files.encode(texts, made), ids, strict=True):
        for before, after in zip(old, new, strict=True):
            if all(each in mapping for each in before) and [mapping[each] for each in before] != after:
                raise ModelStateError(
                    f"{type(made).__name__} with fewer tokens divides a text of kept tokens in another way: "
                    f"{files.tokenizer.convert_ids_to_tokens([*before])} becomes {made.convert_ids_to_tokens([*after])}"
                )
