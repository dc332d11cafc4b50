"""Find the roles of heads on data: positional, first token, rare tokens, syntactic."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.measures.passes import Observer, end_tokens, excluded_tokens, observe
from collab_heads.analysis.roles.labels import HeadRoles, RoleThresholds, roles_from_measures
from collab_heads.analysis.roles.positional import Positional
from collab_heads.analysis.roles.rare import RareTokens, count_tokens
from collab_heads.analysis.roles.syntax import RELATIONS, Syntax
from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_count
from collab_heads.base.progress import one_bar
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter, head_numbers
from collab_heads.errors import ArgumentError
from collab_heads.files.conllu import Sentence
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import modalities, reads_ids, reads_texts, reads_texts_alone
from collab_heads.saving.vocabularies import check_words

SPECIAL = ("bos", "cls", "eos", "sep", "pad", "mask", "decoder_start")  # what configs name as `..._token_id`


@checking_arguments
@one_bar("head_roles", (("finding roles", 1), ("finding dependencies", 1)))
def head_roles(
    model: PreTrainedModel,
    batches: Iterable[Mapping] | None = None,
    *,
    exclude: Iterable[int] | None = None,
    treebank: Treebank | str | Path | Sequence[Sentence] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    token_counts: Tensor | None = None,
    thresholds: RoleThresholds | None = None,
    relations: Sequence[str] = RELATIONS,
    batch_size: int = 32,
) -> HeadRoles:
    """Find the roles of self-attention heads from where their largest weights fall.

    Positional heads look at one relative position. Heads that mostly look at the first token, where heads rest that
    find nothing, are not positional; they have the role "first token" if they do so far more often than the model's
    median head and than chance. Rare-token heads, which are in the first layer, look at the rarest token of
    the sentence. All are measured on `batches`, or on the treebank if there are none (encoders only). Syntactic heads
    of an encoder find the other end of a dependency of the treebank. This takes one pass, or two with both batches and
    a treebank. Memory does not grow with the number of batches.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> roles = head_roles(model, batches, exclude=[])
        >>> roles.positional["encoder.layer.0.attention.self"].share.shape  # (H,)
        torch.Size([4])

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them. They are read once, and once more if tokens must be counted.
        exclude: ids of tokens that do not count as queries for positions and rare tokens; None excludes the tokens that
            end a sentence, as the configs name them or, if they name none (BERT), the tokenizer.
        treebank: a CoNLL-U file, its sentences, or a `Treebank`.
        tokenizer: the model's tokenizer; needed for a treebank. Its special tokens, other than unknown words, are never
            rare.
        token_counts: [V], the number of times each token occurs in your corpus; None counts the tokens of the data.
        thresholds: None for the defaults of `RoleThresholds`.
        relations: the dependencies to look for, by the main types of Universal Dependencies.
        batch_size: number of sentences per batch of the treebank.

    Returns:
        The labels and all measured shares; `print` it.

    Raises:
        ArgumentError: without data; on a treebank without a tokenizer or for a model without an encoder; on batches
            that must be counted and can be read only once; on counts, relations or token ids of a wrong type.
        CalibrationError: if there are no batches, the model cannot take one, or no token counted at a site.
        DataError: if the treebank is missing or broken, or none of its sentences can be measured.
        NonFiniteError: if attention weights are NaN.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.

    Source: Voita et al. 2019, arXiv:1905.09418, section 5.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    check_count("batch_size", batch_size, least=1)
    syntax = syntax_observer(model, adapter, treebank, tokenizer, relations, batch_size)
    exclude = excluded_queries(model, exclude, tokenizer)
    data: Iterable[Mapping]
    if batches is not None:
        data, positional = batches, Positional()
    elif syntax is not None:
        data, positional = syntax.treebank, Positional(("enc-self",))  # the decoder reads a single token
    else:
        raise ArgumentError("head_roles has no data: pass batches, a treebank, or both")
    rare = rare_observer(model, adapter, data, tokenizer=tokenizer, token_counts=token_counts, exclude=exclude)
    observers: list[Observer] = [positional] if rare is None else [positional, rare]
    if syntax is not None and batches is None:
        observers.append(syntax)  # one pass, over the treebank, is enough for all
    sites = observe(model, data, observers, exclude=exclude, what="finding roles")
    if syntax is not None and batches is not None:
        observe(model, syntax.treebank, [syntax], exclude=exclude, what="finding dependencies")
    return roles_from_measures(
        sites, head_numbers(model, adapter), positional=positional, rare=rare, syntax=syntax, thresholds=thresholds
    )


def rare_observer(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    batches: Iterable[Mapping],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    token_counts: Tensor | None = None,
    exclude: Iterable[int] = (),
) -> RareTokens | None:
    """Return the observer of rare tokens, or None for models and batches without token ids.

    The tokens of the batches are counted unless counts are given.
    """
    if not any(map(reads_ids, adapter.sites(model))) or not reads_texts(model):
        if token_counts is not None:
            raise ArgumentError(f"token_counts: {no_tokens(model)}: leave it out, it has no rare-token heads")
        return None
    counts = count_tokens(model, batches) if token_counts is None else token_counts
    if counts is None:
        return None
    readers = {site.role for site in adapter.sites(model) if reads_ids(site)}
    role = "enc-self" if "enc-self" in readers else "dec-self"
    return RareTokens(counts, {*special_tokens(model, tokenizer), *exclude}, role)


def syntax_observer(
    model: PreTrainedModel,
    adapter: AttentionAdapter,
    treebank: Treebank | str | Path | Sequence[Sentence] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    relations: Sequence[str] = RELATIONS,
    batch_size: int = 32,
) -> Syntax | None:
    """Return the observer of dependencies, with its treebank, or None without a treebank."""
    if treebank is None:
        return None
    if not reads_texts_alone(model):
        raise ArgumentError(
            f"treebank: {no_tokens(model)}, and dependencies are looked for in texts: leave the treebank out, or pass "
            "the stack that reads texts alone"
        )
    if not any(site.role == "enc-self" for site in adapter.sites_with_heads(model)):
        raise ArgumentError(
            f"this {type(model).__name__} has no self-attention of an encoder, and dependencies are looked for there "
            "only: leave the treebank out"
        )
    if not isinstance(treebank, Treebank):
        if tokenizer is None:
            raise ArgumentError("a treebank needs the model's tokenizer: pass tokenizer=")
        treebank = Treebank(treebank, tokenizer, model, batch_size=batch_size)
    return Syntax(treebank, relations)


def excluded_queries(
    model: PreTrainedModel, exclude: Iterable[int] | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Return the ids that do not count as queries.

    They are the given ones, else those that end a sentence in the configs, else those in the tokenizer.
    """
    check_words(tokenizer)
    if exclude is None and tokenizer is not None and not end_tokens(model):
        exclude = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    return excluded_tokens(model, exclude)


def no_tokens(model: PreTrainedModel) -> str:
    return f"this {type(model).__name__} reads {' and '.join(modalities(model))}"


def special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    config = model.config.get_text_config()
    ids = {getattr(config, f"{name}_token_id", None) for name in SPECIAL} | set(end_tokens(model))
    if tokenizer is not None:
        ids |= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return {each for each in ids if isinstance(each, int)}
