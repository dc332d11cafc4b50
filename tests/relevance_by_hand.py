"""What is explained and what it is made of, added up by hand; batches to explain."""

from contextlib import contextmanager

import pytest
import torch
from heads_by_hand import EOS, STEPS, ended
from model_inputs import cast

from collab_heads import get_adapter
from collab_heads.analysis import head_relevance
from collab_heads.analysis.relevance.backward import conservative, explaining, leaf
from families import FAMILIES

FP32_NORMS = 2e-5  # T5's norms compute in float32 whatever the model's dtype, so other sums round otherwise; seen: 2e-6
LOSSLESS = 1e-9  # relative: decompositions of full width in float64; seen: 1e-12


def labelled(name: str) -> dict:
    """The family's batch with ends of sentences; decoders get labels."""
    inputs, _ = ended(name)
    if "decoder_input_ids" in inputs:
        ids = inputs.pop("decoder_input_ids")
        inputs["labels"] = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        inputs["labels"][0, 5] = EOS
        for row, length in enumerate(STEPS):
            inputs["labels"][row, length:] = -100
    return inputs


def relevance(model, batches, **options):
    return head_relevance(model, [cast(each, model.dtype) for each in batches], **{"exclude": [EOS], **options})


def assert_alike(found, expected, rtol=LOSSLESS):
    assert found.signed.keys() == expected.signed.keys() and found.sentences == expected.sentences
    for name in ("relevance", "signed"):
        for path, values in getattr(expected, name).items():
            limit = rtol * max(1.0, float(values.abs().max()))
            torch.testing.assert_close(getattr(found, name)[path], values, rtol=0, atol=limit, msg=f"{name} {path}")
    assert found.explained == pytest.approx(expected.explained, rel=rtol)


@torch.no_grad()
def without_biases(model):
    """Biases absorb relevance."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return model.double()


def decoder_batch(name) -> dict:
    return cast(FAMILIES[name].inputs(), torch.float64)


# the sum of the residual stream and what attention adds: path of a site -> module, whether it is what enters it
SUMS = {
    "t5": lambda path: (path.rpartition(".")[0], False),
    "mt5": lambda path: (path.rpartition(".")[0], False),
    "gpt2": lambda path: (path.removesuffix("attn") + "ln_2", True),
    "marian": lambda path: (f"{path}_layer_norm", True),
    "opt-350m": lambda path: (f"{path}_layer_norm", True),
    "bert": lambda path: (path.removesuffix("self") + "output.LayerNorm", True),
    "mpnet": lambda path: (path.removesuffix("attn") + "LayerNorm", True),
}
SUMS |= {
    name: lambda path, norm=norm: (f"{path.rpartition('.')[0]}.{norm}", True)
    for names, norm in (
        (("llama", "mistral", "qwen2", "qwen3"), "post_attention_layernorm"),
        (("opt", "biogpt"), "final_layer_norm"),
        (("gemma3",), "pre_feedforward_layernorm"),
    )
    for name in names
}
# what attention adds, where it is not what its output projection gives
ADDED = {"gemma3": lambda path: f"{path.rpartition('.')[0]}.post_attention_layernorm"}


@contextmanager
def hooked(*handles):
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cuts(model, inputs, where, adds=None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, float]:
    """Relevance at every site: of its heads (from the package), of the residual beside them; of the target's tokens."""
    adapter, base, seen = get_adapter(model), model.base_model, {}
    sites = adapter.sites(model)

    def sum_hook(site, enters):
        def after(module, args, output):
            seen[site.path, "sum"] = output[0]

        def before(module, args):
            seen[site.path, "sum"] = args[0]

        module = base.get_submodule(where(site.path)[0])
        return module.register_forward_pre_hook(before) if enters else module.register_forward_hook(after)

    def added(site):
        def hook(module, args, output):
            seen[site.path, "added"] = output.detach()

        projection = base.get_submodule(adds(site.path)) if adds else adapter.output_projection(model, site)
        return projection.register_forward_hook(hook)

    def begin(role):
        def hook(layer, args):
            seen[role] = leaf(args[0])
            return seen[role], *args[1:]

        first = next(site for site in sites if site.role == role)
        return base.get_submodule(first_path(first)).register_forward_pre_hook(hook)

    roles = [role for role in ("enc-self", "dec-self") if any(site.role == role for site in sites)]
    handles = [sum_hook(site, where(site.path)[1]) for site in sites]
    handles += [added(site) for site in sites] + [begin(role) for role in roles]
    with hooked(*handles), explaining(model):
        with conservative(model):
            logits = model(**inputs).logits
        total = logits.max(-1).values.sum()
        sums = [seen[site.path, "sum"] for site in sites]
        gradients = torch.autograd.grad(total, [*sums, *(seen[role] for role in roles)])
        total = total.detach()
    residual = {
        site.path: float(((state.detach() - seen[site.path, "added"].view_as(state)) * gradient).sum())
        for site, state, gradient in zip(sites, sums, gradients, strict=False)
    }
    target = float((seen["dec-self"].detach() * gradients[-1]).sum()) if "dec-self" in seen else 0.0
    measured = head_relevance(model, [inputs], exclude=[])
    heads = {path: float(values.sum()) * measured.sentences for path, values in measured.signed.items()}
    assert measured.explained * measured.sentences == pytest.approx(float(total), rel=1e-12)
    return heads, residual, target, float(total)


def first_path(site) -> str:
    parts = site.path.split(".")
    return ".".join(parts[: next(i for i, part in enumerate(parts) if part.isdigit()) + 1])


def missing(name, model, inputs) -> dict[str, float]:
    """Path -> |what is explained - all relevance that crosses the layer at its attention|."""
    heads, residual, target, total = cuts(model, inputs, SUMS[name], ADDED.get(name))
    sites, found = get_adapter(model).sites(model), {}
    order = {site.path: (site.layer, site.role == "dec-enc") for site in sites}
    for site in sites:
        crossing = target  # beside the encoder, the target's tokens wait
        if site.role != "enc-self":  # beside the decoder, what later attention to the source will read
            later = [s.path for s in sites if s.role == "dec-enc" and order[s.path] > order[site.path]]
            crossing = sum(heads[path] for path in later)
        found[site.path] = abs(heads[site.path] + residual[site.path] + crossing - total)
    assert abs(total) > 0.1 and max(abs(heads[site.path]) for site in sites) > 0.1
    return found


def full(inputs: dict) -> dict:
    """The same batch without padding: every position is explained."""
    return {name: value for name, value in inputs.items() if name != "attention_mask"}


def begin_relevance(model, inputs) -> tuple[float, float]:
    """The relevance of everything that enters the layers of a model, and what is explained."""
    adapter, starts = get_adapter(model), []
    inputs = {k: leaf(v) if k == "encoder_hidden_states" else v for k, v in inputs.items()}
    starts += [v for k, v in inputs.items() if k == "encoder_hidden_states"]
    sites = adapter.sites(model)
    layers = {first_path(site) for site in sites if site.layer == 0}

    def begin(layer, args):
        if not args[0].requires_grad:  # ALBERT calls a layer again and again
            starts.append(leaf(args[0]))
            return starts[-1], *args[1:]

    handles = [model.base_model.get_submodule(path).register_forward_pre_hook(begin) for path in layers]
    with hooked(*handles), explaining(model):
        with conservative(model):
            outputs = model(**inputs)
        stacks = {site.stack for site in sites if site.layer == 0} if "text_model_output" in outputs else ()
        states = [outputs[f"{stack}_model_output"].pooler_output for stack in stacks] or [outputs[0]]
        total = sum(each.max(-1).values.sum() for each in states)
        gradients = torch.autograd.grad(total, starts)
    return sum(float((s.detach() * g).sum()) for s, g in zip(starts, gradients, strict=True)), float(total.detach())
