"""Models whose heads are measured, in every state, and what their heads do by other means than the package's."""

import math

import torch
from changed_heads import change_heads, output_projections
from model_inputs import batch, cast
from model_runs import attention_maps, set_backend, swap
from model_sizes import EXACT64, HEADS, LAYERS

import collab_heads
from collab_heads.analysis import head_statistics
from collab_heads.analysis.measures.results import MEASURES
from families import FAMILIES

FAR = 1e-3  # what differs on purpose differs by more

MEASURED = (
    "bert",
    "bert-decoder",
    "distilbert",
    "albert",
    "albert-groups",
    "marian",
    "bart",
    "gpt2-decoder",
    "t5",
    "t5-encoder",
    "opt",
    "biogpt",
    "mpnet",
    "esm",
    "vit",
)
MEASURED = tuple(name for name in MEASURED if name in FAMILIES)
PAD, EOS, LENGTHS, STEPS = {"t5": 0, "mt5": 0}, 2, (9, 5, 7), (6, 3, 5)


def mix(model) -> None:
    """Alphas that differ from the identity."""
    collab_heads.swap_to_alpha(model)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("mixing.alpha"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


CHANGES = {
    "stock": lambda model: None,
    "shared": lambda model: swap(model, "shared", 20),
    "per_head": lambda model: swap(model, "per_head", 16),
    "gated": lambda model: change_heads(model, "gated"),
    "mixed": mix,
    "pruned": lambda model: change_heads(model, "pruned"),
    "pruned shared": lambda model: (swap(model, "shared", 20), change_heads(model, "both")),
}


def model_in(name: str, change: str = "stock", dtype=torch.float64):
    """A model of a family, on transformers' own backend, after a change to its heads."""
    model = FAMILIES[name].build().to(dtype)
    CHANGES[change](model)
    set_backend(model, "sdpa")
    return model


def backends(model) -> dict[str, str]:
    return {n: m.config._attn_implementation for n, m in model.named_modules() if hasattr(m, "set_attn_implementation")}


def sites_with_heads(model):
    return collab_heads.get_adapter(model).sites_with_heads(model)


def maps_by_hand(model, inputs) -> dict[str, list[torch.Tensor]]:
    """path -> the attention maps [B, H, T, S] that the model itself gives under the eager backend, one per layer."""
    before = backends(model)
    set_backend(model, "eager")
    with torch.no_grad():
        result = model(**cast(inputs, model.dtype), output_attentions=True)
    for name, backend in before.items():
        model.get_submodule(name).set_attn_implementation(backend)
    found = {}
    for site in sites_with_heads(model):
        maps = attention_maps(result, {each.role for each in sites_with_heads(model)})[site.role]
        found[site.path] = [maps[layer] for layer in layers_of(model, site)]
    return found


def layers_of(model, site) -> list[int]:
    """The layers that a site serves, as `output_attentions` counts them."""
    if model.config.model_type == "siglip":  # which counts layers of texts first and runs those of images first
        return [(site.layer + LAYERS) % (2 * LAYERS)]
    if model.config.model_type != "albert":
        return [site.layer]
    config = model.config
    groups = [
        int(layer * config.num_hidden_groups / config.num_hidden_layers) for layer in range(config.num_hidden_layers)
    ]
    inner = int(site.path.split(".")[-2])
    mine = int(site.path.split(".")[2])
    return [layer * config.inner_group_num + inner for layer, group in enumerate(groups) if group == mine]


def outputs_by_hand(model, inputs) -> dict[str, list[torch.Tensor]]:
    """path -> what goes into the output projection, [B, T, H, d_v], one per layer, with the model's own backend."""
    heads, seen, handles = {site.path: site.num_heads for site in sites_with_heads(model)}, {}, []
    for path, projection in output_projections(model).items():
        if path in heads:

            def hook(module, args, path=path):
                seen.setdefault(path, []).append(args[0].view(*args[0].shape[:2], heads[path], -1))

            handles.append(projection.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(**cast(inputs, model.dtype))
    for handle in handles:
        handle.remove()
    return seen


def ended(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A padded batch whose sentences end in EOS, and which query tokens count: "encoder", "decoder" -> [B, T] bool."""
    family = FAMILIES[name]
    inputs = {key: value.clone() for key, value in family.inputs().items()}
    if "pixel_values" in inputs:
        return inputs, {"encoder": torch.ones(3, 10, dtype=torch.bool)}
    counts = torch.zeros(3, 9, dtype=torch.bool)
    if "encoder_hidden_states" in inputs:  # a lone decoder, padded on the left
        for row, length in enumerate(LENGTHS):
            inputs["input_ids"][row, -1] = EOS
            counts[row, 9 - length : 8] = True
        inputs["input_ids"][1, 4] = EOS  # the first token of a decoder counts whatever it is
        return inputs, {"decoder": counts}
    alone = family.roles.keys() == {"dec-self"}
    if alone:
        inputs = batch()
    for row, length in enumerate(LENGTHS):
        inputs["input_ids"][row, length - 1] = EOS
        counts[row, : length - 1] = True
    if alone:
        inputs["input_ids"][1, 0] = EOS  # the first token of a decoder counts whatever it is
    if "decoder_input_ids" not in inputs:
        return inputs, {"decoder" if alone else "encoder": counts}
    pad, steps = PAD.get(name, 1), torch.zeros(3, 6, dtype=torch.bool)
    inputs["decoder_input_ids"][:, 0] = pad
    for row, length in enumerate(STEPS):
        inputs["decoder_input_ids"][row, length : length + 1] = EOS
        inputs["decoder_input_ids"][row, length + 1 :] = pad
        steps[row, :length] = True
    return inputs, {"encoder": counts, "decoder": steps}


def by_hand(model, batches, counts) -> dict[str, dict[str, torch.Tensor]]:
    """measure -> path -> its mean over query tokens, one token at a time."""
    sums = {name: {} for name in MEASURES}
    for inputs, masks in zip(batches, counts, strict=True):
        maps, outputs = maps_by_hand(model, inputs), outputs_by_hand(model, inputs)
        for site in sites_with_heads(model):
            mask = masks["encoder" if site.role == "enc-self" else "decoder"]
            for weights, heads in zip(maps[site.path], outputs[site.path], strict=True):
                for row, token in mask.nonzero().tolist():
                    each = heads[row, token]
                    pairs = [[(a, b) for b in each] for a in each]
                    query, starts = (
                        token - first_token(inputs, row, site.role, 0),
                        first_token(inputs, row, site.role, 1),
                    )
                    looks = [weights[row, h, token].tolist() for h in range(site.num_heads)]
                    values = {
                        "entropy": torch.tensor(
                            [-sum(w * math.log(w) for w in look if w > 0) for look in looks], dtype=torch.float64
                        ),
                        "attention_distance": torch.tensor(
                            [sum(w * abs(query - (key - starts)) for key, w in enumerate(look)) for look in looks],
                            dtype=torch.float64,
                        ),
                        "confidence": torch.stack([weights[row, h, token].max() for h in range(site.num_heads)]),
                        "first_token": torch.stack([weights[row, h, token, starts] for h in range(site.num_heads)]),
                        "cosine": torch.tensor(
                            [[a @ b / (a.norm() * b.norm()) for a, b in line] for line in pairs], dtype=torch.float64
                        ),
                        "l2": torch.tensor([[(a - b).norm() for a, b in line] for line in pairs], dtype=torch.float64),
                    }
                    if site.role == "dec-enc" or query == 0:
                        del values["first_token"]
                    for name, value in values.items():
                        sums[name].setdefault(site.path, []).append(value.double())
    return {name: {path: torch.stack(each).mean(0) for path, each in paths.items()} for name, paths in sums.items()}


def first_token(inputs, row: int, role: str, side: int) -> int:
    """Where a sentence begins after padding on the left; side 0: queries, 1: keys."""
    lone = "encoder_hidden_states" in inputs
    name = "encoder_attention_mask" if lone and role == "dec-enc" and side else "attention_mask"
    if name not in inputs or (not lone and role != "enc-self" and (side == 0 or role == "dec-self")):
        return 0  # tests pad decoders of encoder-decoders on the right
    return inputs[name][row].tolist().index(1)


def single(inputs, row: int, length: int, steps: int) -> dict[str, torch.Tensor]:
    """One sentence of a batch without its padding."""
    keep = {"input_ids": length, "attention_mask": length, "decoder_input_ids": steps, "labels": steps}
    return {name: value[row : row + 1, : keep[name]] for name, value in inputs.items()}


def measure(model, batches, **options):
    """Statistics of float64 batches, EOS excluded as the tests' sentences end in it."""
    return head_statistics(model, [cast(each, model.dtype) for each in batches], **{"exclude": [EOS], **options})


def assert_alike(found, expected, atol=EXACT64) -> None:
    """All statistics agree."""
    for name in MEASURES:
        values = expected[name] if isinstance(expected, dict) else getattr(expected, name)
        assert getattr(found, name).keys() == values.keys() and values
        for path, value in values.items():
            torch.testing.assert_close(getattr(found, name)[path], value, rtol=0, atol=atol, msg=f"{name} {path}")


def far(one, other, path, name="confidence") -> bool:
    return float((getattr(one, name)[path] - getattr(other, name)[path]).abs().max()) > FAR


assert HEADS == 4  # what the changes above are made for
