"""The adapter contract: where the attention of a model family is, and how its weights are laid out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_heads.contract.feed_forward import FeedForwardNames
from collab_heads.contract.model_forms import Blueprint, CTranslate2Form, GgufForm, ImageBlueprint
from collab_heads.errors import ArgumentError
from collab_heads.layers.fused import Projection, whole_of
from collab_heads.layers.query_key import QueryKey, is_swapped
from collab_heads.layers.removed import NoHeads, NoValues, is_empty, keep_rows
from collab_heads.sites.site import ROLES, AttentionSite, AttentionWeights, Role, count_key_heads, kept_groups, per_head
from collab_heads.sites.state import FeedForwardState, QueryKeyKind, SiteState

Capability = Literal["collaborative", "per_head", "gated", "alpha", "prune", "values", "neurons"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


class AttentionAdapter:
    """An adapter: where the attention of a model family is, and how its weights are laid out.

    Most of an adapter is data: fill in the class attributes, and override a method where the layout differs. An adapter
    holds no state. The replacement classes hold the family's collaborative `forward`; each subclasses its stock class
    and is defined under its own name in the adapter's module, so that models pickle and outputs are recorded.

    Attributes:
        model_types: values of `config.model_type` that this adapter serves.
        paths: regular expression of a site's path relative to the base model -> role; group 1 is the layer index.
        replacements: stock attention class -> collaborative class.
        shrunk: stock attention class -> its class with fewer heads; only where the stock forward cannot run them.
        query, key, value: names of the projections in the attention module.
        output: name of the output projection in the attention module, after "../" of one beside it; None where it is
            elsewhere.
        heads: name of the head count in the attention module.
        width: name of the attribute for the width over all heads in the attention module; None where it has none, or
            where that is the model's width.
        head_width: the config entry and the attribute of the attention module for the width of a head, where it is not
            always the model's width divided by its heads.
        head_counts: the config entries for the number of heads of every layer, and of its key/value heads (None where
            heads share none). Only with `head_width`: otherwise fewer heads would be wider.
        layer_configs: whether each stock layer is made from a config and its number, so that layers can have configs of
            their own (`per_layer_config` of transformers).
        position_table: name of the embedding in an attention module that has a column for every head, where the first
            layer computes from it a position bias for all layers of its stack.
        weights_at: index of the weights [B, H, T, S] in the outputs of the attention module.
        weights_argument: the argument of its forward that must be True to return the weights, if there is one.
        uses_interface: whether stock attention goes through transformers' attention interface; if not, `score_biases`
            returns what it adds to its scores.
        positions: the argument of its forward that holds cosines and sines, where positions are rotations of queries
            and keys; else None.
        rms_norms: the norms that only scale, without a mean and a bias.
        gated: class of a gated feed-forward -> name of the activation whose output multiplies its other branch.
        feed_forwards: where its feed-forward blocks are.
        roles: the roles that models of the family can have.
        capabilities: what the toolkit can do with this family.
        why_not: for each missing capability: the reason, and what to do instead.
        exact_kind: the kind of query/key projection that can hold the stock weights unchanged.
        variants: a config entry -> its value -> the adapter for such models, where these have other capabilities.
        blueprints: model type -> how to make a new model and vocabulary of it; where the scripts can.
        image_blueprints: the same for model types that read images.
        ctranslate2: model type -> what CTranslate2 needs to know beside its layers; where the default does not fit.
        gguf: model type -> what llama.cpp needs to know; none where it cannot run them from here.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    paths: ClassVar[Mapping[str, Role]] = {}
    replacements: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    shrunk: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    query: ClassVar[str] = "query"
    key: ClassVar[str] = "key"
    value: ClassVar[str] = "value"
    output: ClassVar[str | None] = None
    heads: ClassVar[str] = "num_attention_heads"
    width: ClassVar[str | None] = None
    head_width: ClassVar[tuple[str, str] | None] = None
    head_counts: ClassVar[tuple[str, str | None] | None] = None
    layer_configs: ClassVar[bool] = False
    position_table: ClassVar[str | None] = None
    weights_at: ClassVar[int] = -1
    weights_argument: ClassVar[str | None] = None
    uses_interface: ClassVar[bool] = True
    positions: ClassVar[str | None] = None
    rms_norms: ClassVar[tuple[type[nn.Module], ...]] = ()
    gated: ClassVar[Mapping[type[nn.Module], str]] = {}
    feed_forwards: ClassVar[tuple[FeedForwardNames, ...]] = ()
    roles: ClassVar[tuple[Role, ...]] = ROLES
    capabilities: ClassVar[frozenset[Capability]] = frozenset(CAPABILITIES)
    why_not: ClassVar[Mapping[Capability, str]] = {}
    exact_kind: ClassVar[QueryKeyKind] = "per_head"
    variants: ClassVar[Mapping[str, Mapping[object, type["AttentionAdapter"]]]] = {}
    blueprints: ClassVar[Mapping[str, Blueprint]] = {}
    image_blueprints: ClassVar[Mapping[str, ImageBlueprint]] = {}
    ctranslate2: ClassVar[Mapping[str, CTranslate2Form]] = {}
    gguf: ClassVar[Mapping[str, GgufForm]] = {}

    def variant(self, config: PretrainedConfig) -> "AttentionAdapter":
        """Return the adapter for a model of the family with this config: this one, or one of its `variants`.

        Args:
            config: the config of the model.
        """
        for entry, adapters in self.variants.items():
            if found := adapters.get(getattr(config, entry, None)):
                return found()
        return self

    def sites(self, model: PreTrainedModel) -> list[AttentionSite]:
        """List the attention modules of a model, swapped or not, in model order.

        Args:
            model: a model of the family, or one that holds it (a task model).
        """
        sites, attention = [], tuple(self.replacements)
        for path, module in model.base_model.named_modules():
            if isinstance(module, attention):
                for pattern, role in self.paths.items():
                    if match := re.fullmatch(pattern, path):
                        heads, groups = self.num_heads(module), self.groups(module)
                        sites.append(AttentionSite(path, self.role(role, module), int(match[1]), heads, groups))
        return sites

    def knows(self, path: str, state: SiteState | FeedForwardState) -> bool:
        """Return True if a site with a state can have a path in models of the family.

        Args:
            path: dotted path relative to the base model, see `AttentionSite`.
            state: the state of an attention module or of a feed-forward block.
        """
        if isinstance(state, SiteState):
            return any(re.fullmatch(pattern, path) for pattern in self.paths)
        return any(re.fullmatch(names.block, path) for names in self.feed_forwards)

    def layer_path(self, path: str) -> str:
        """Return the path of the layer that holds a site of attention.

        Args:
            path: dotted path of the site, see `AttentionSite`.
        """
        found = next(match for pattern in self.paths if (match := re.fullmatch(pattern, path)))
        return path[: found.end(1)]

    @property
    def layer_sizes(self) -> tuple[str, ...]:
        """The config entries for sizes that layers can have of their own, where `layer_configs`."""
        counts = self.head_counts or ()
        return (*(name for name in counts if name), *dict.fromkeys(names.entry for names in self.feed_forwards))

    def num_heads(self, module: nn.Module) -> int:
        """Return the number of heads of an attention module, stock or changed.

        Args:
            module: an attention module.
        """
        return cast(int, getattr(module, self.heads))

    def groups(self, module: nn.Module) -> tuple[int, ...] | None:
        """Return the key/value head of every head of an attention module; None where each has its own.

        Args:
            module: an attention module, stock or changed.
        """
        return None

    def sites_with_heads(self, model: PreTrainedModel) -> list[AttentionSite]:
        """List the sites that have not lost all their heads, in model order.

        Args:
            model: see `sites`.
        """
        return [site for site in self.sites(model) if site.num_heads]

    def role(self, role: Role, module: nn.Module) -> Role:
        """Refine the role that the path suggests (a BERT decoder has the paths of an encoder).

        Args:
            role: that of the pattern in `paths` which its path matches.
            module: the attention module.
        """
        return role

    def decodes(self, config: PretrainedConfig) -> bool:
        """Return True if a model without an encoder is a decoder whatever `config.is_decoder` says.

        Args:
            config: the config of the model.
        """
        return "enc-self" not in self.roles

    def projections(self, module: nn.Module) -> tuple[Projection, Projection]:
        """Return the query and key projections of a stock attention module.

        Args:
            module: a stock attention module.
        """
        return getattr(module, self.query), getattr(module, self.key)

    def value_projection(self, module: nn.Module) -> Projection:
        """Return the value projection of a stock or swapped attention module.

        Args:
            module: an attention module that has heads.
        """
        return getattr(module, self.value)

    def output_projection(self, model: PreTrainedModel, site: AttentionSite) -> nn.Module:
        """Return the output projection of a site: the Linear or Conv1D that takes its concatenated heads.

        Args:
            model: the model that holds the site.
            site: one of its `sites`.

        Raises:
            ArgumentError: if the adapter does not say where it is (`output`).
        """
        if self.output is None:
            raise ArgumentError(f"{type(self).__name__} does not say where the output projection of {site.path} is")
        name = self.output.removeprefix("../")
        parent = site.path if name == self.output else site.path.rpartition(".")[0]
        return model.base_model.get_submodule(f"{parent}.{name}")

    def read(self, module: nn.Module) -> AttentionWeights:
        """Read the weights of a stock attention module, per head, without copying.

        Args:
            module: a stock attention module.
        """
        heads, groups = self.num_heads(module), self.groups(module)
        (query, key), value = self.projections(module), self.value_projection(module)
        key_heads = count_key_heads(heads, groups)
        return AttentionWeights(
            query=per_head(query.weight, heads),
            query_bias=per_head(query.bias, heads),
            key=per_head(key.weight, key_heads),
            value=per_head(value.weight, key_heads),
            value_bias=per_head(value.bias, key_heads),
            scale=self.scale(module),
            key_bias=per_head(key.bias, key_heads),
            groups=groups,
        )

    def scale(self, module: nn.Module) -> float:
        """Return the factor of the dot product of a stock attention module, before the softmax.

        Args:
            module: a stock attention module.
        """
        return float(cast(float, module.scaling))

    def note_scale(self, module: nn.Module, scale: float) -> None:
        """Set the factor by which a stock attention module multiplies its dot products, in place.

        Args:
            module: a stock attention module.
            scale: the factor, before the softmax.
        """
        setattr(module, "scaling", scale)  # noqa: B010  an attribute, no submodule

    def score_biases(self, module: nn.Module, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return what a call of a stock attention module adds to its scores, where `uses_interface` is False.

        Args:
            module: the attention module.
            arguments: the arguments of its forward, by name; those that were left out are missing.

        Returns:
            Masks and position biases, which broadcast to [B, H, T, S].

        Raises:
            ArgumentError: if the adapter does not override this method.
        """
        raise ArgumentError(f"{type(self).__name__} does not say what its attention adds to its scores: score_biases")

    def positions_met(self, module: nn.Module) -> int:
        """Return how many projected positions the query and the key of a token meet, each in a product of its own.

        Args:
            module: an attention module, stock or changed.
        """
        return 0

    def stock_class(self, module: nn.Module) -> type[nn.Module] | None:
        """Return the stock class of a site, also of a changed one; None for a class unknown to this adapter.

        Args:
            module: any module.
        """
        for stock, replaced in self.replacements.items():
            if type(module) in (stock, replaced, self.shrunk.get(stock)):
                return stock
        return None

    def stock_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the query, key and value projections in a stock attention module.

        Args:
            module: a stock attention module.
        """
        return self.query, self.key, self.value

    def install(self, module: nn.Module, query_key: nn.Module) -> None:
        """Turn an attention module into its collaborative class, in place: hooks and other state stay.

        Args:
            module: a stock attention module, or a collaborative one that gets another projection.
            query_key: the module that makes queries and keys, see `collab_heads.layers.query_key_kinds`.
        """
        stock = cast(type[nn.Module], self.stock_class(module))  # that of every module in `sites`
        module.__class__ = self.replacements[stock]
        for name in (self.query, self.key):
            if hasattr(module, name):
                delattr(module, name)
        module.query_key = query_key

    def uninstall(self, module: nn.Module, query: nn.Linear, key: nn.Linear) -> None:
        """Undo `install`, with other projections of the query and the key, in place.

        Args:
            module: a collaborative attention module.
            query: the new query projection, of any width.
            key: the new key projection; without a bias where the softmax cancels it.
        """
        module.__class__ = cast(type[nn.Module], self.stock_class(module))
        del module.query_key
        setattr(module, self.query, query)
        setattr(module, self.key, key)
        self.note_width(module)

    def token_masks(
        self, config: PretrainedConfig, inputs: Mapping, masks: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Refine which tokens count, where the attention masks of a family do not say it (`token_masks`).

        Args:
            config: of the model.
            inputs: a batch as the model takes it.
            masks: "encoder", "decoder" -> the masks that follow from the attention masks and the decoder's inputs:
                [B, T] bool, or None where all tokens count.

        Returns:
            The masks, which may also have entries for stacks with masks of their own (`AttentionSite.stack`) and for
            the "output".
        """
        return masks

    def shrink(self, module: nn.Module, kept: list[int]) -> None:
        """Keep only some heads of an attention module, in place; the output projection does not change.

        Args:
            module: stock or changed.
            kept: indices among the heads that it has now, ascending.
        """
        heads, groups = self.num_heads(module), self.groups(module)
        key_heads, kept_keys = count_key_heads(heads, groups), kept
        if groups is not None:
            kept_keys, groups = kept_groups(groups, kept)
        if not kept:
            delattr(module, self.value)  # torch lets only a module replace a module
            setattr(module, self.value, NoValues())
            self.install(module, NoHeads().train(module.training))
        elif is_swapped(module):
            cast(QueryKey, module.query_key).keep_heads(kept)
            keep_rows(whole_of(self.value_projection(module)), kept_keys, key_heads)
        else:
            query, _ = self.projections(module)
            for whole, parts in self.wholes(module).items():
                left, total = (kept, heads) if whole is whole_of(query) else (kept_keys, key_heads)
                keep_rows(whole, [part * total + head for part in range(parts) for head in left], parts * total)
            stock = cast(type[nn.Module], self.stock_class(module))
            module.__class__ = self.shrunk.get(stock, stock)
        self.note_heads(module, len(kept), groups)
        self.note_width(module)

    def note_heads(self, module: nn.Module, heads: int, groups: tuple[int, ...] | None) -> None:
        """Set the number of heads of an attention module, and the key/value heads that they use, in place.

        Args:
            module: an attention module.
            heads: the number of heads that it has now.
            groups: the key/value head of every head; None where each has its own.
        """
        setattr(module, self.heads, heads)

    def runs_groups(self, groups: tuple[int, ...] | None) -> bool:
        """Return True if the stock forward runs heads with these key/value heads; else a site needs `exact_kind`.

        Args:
            groups: the key/value head of every head; None where each has its own.
        """
        return groups is None

    def wholes(self, module: nn.Module) -> dict[nn.Module, int]:
        """Return the modules that make query, key and value of a stock module -> how many of these each makes.

        Args:
            module: a stock attention module.
        """
        return dict.fromkeys(map(whole_of, (*self.projections(module), self.value_projection(module))), 1)

    def note_width(self, module: nn.Module) -> None:
        """Set the width of the values of an attention module, if it has such an attribute (`width`).

        Args:
            module: an attention module whose values have their new width.
        """
        if self.width is not None:
            setattr(module, self.width, self.value_projection(module).out_features)

    @torch.no_grad()
    def restore(self, module: nn.Module, stock: nn.Module, kept: Sequence[int]) -> None:
        """Undo `shrink` on a site that is not collaborative, in place: removed heads come back as zeros.

        Args:
            module: the attention module.
            stock: a freshly built stock module with all the heads that `module` gets; its projections, in the dtype and
                on the device of the model, move to `module`.
            kept: the places of the heads of `module` among those of `stock`.
        """
        heads, groups = self.num_heads(stock), self.groups(stock)
        kept_keys = kept if groups is None else kept_groups(groups, kept)[0]
        of_keys = count_key_heads(heads, groups), kept_keys
        for name in (self.query, self.key, self.value):
            old, full = getattr(module, name, None), getattr(stock, name)
            total, left = (heads, kept) if name == self.query else of_keys
            for part, tensor in full.named_parameters():
                tensor.zero_()
                if kept:
                    rows = getattr(old, part)
                    tensor.unflatten(0, (total, -1))[list(left)] = rows.unflatten(0, (len(left), -1))
                    tensor.requires_grad_(rows.requires_grad)
            setattr(module, name, full.train(module.training))
        if is_empty(module):
            del module.query_key
        self.note_heads(module, heads, groups)
        if self.width is not None:
            setattr(module, self.width, getattr(stock, self.width))
        module.__class__ = type(stock)
