"""Operations of attention and of feed-forward blocks, counted by torch."""

from collections import defaultdict

import torch
from model_runs import set_backend
from opening import layers_of
from torch.utils.flop_counter import FlopCounterMode


def attention_operations(model, batches):
    """path -> multiplications in attention and its output projection."""
    modules = {}
    for site in layers_of(model).with_heads:
        is_inside = any(module is site.output for module in site.module.modules())
        modules[site.path] = (site.module,) if is_inside else site.modules
    found = operations_in(model, batches, modules)
    return {path: count - len(batches) * of_positions(modules[path][0]) for path, count in found.items()}


def of_positions(module):
    """Those of projected positions, which a batch of any size needs once."""
    if not getattr(module, "relative_attention", False):
        return 0
    query = module.query_key.shared_query if hasattr(module, "query_key") else module.query_proj
    return 2 * 2 * module.pos_ebd_size * query.weight.numel()


def feed_forward_operations(model, batches):
    """path -> multiplications in feed-forward blocks."""
    blocks = layers_of(model).feed_forwards
    return operations_in(model, batches, {block.path: block.modules for block in blocks})


def layer_operations(model, batches):
    """path -> multiplications in attention and in feed-forward blocks."""
    return attention_operations(model, batches) | feed_forward_operations(model, batches)


def operations_in(model, batches, modules):
    """path -> multiplications in its modules; with eager scores, which torch counts."""
    set_backend(model, "eager")
    counter, found, started, handles = FlopCounterMode(display=False), defaultdict(int), {}, []

    def watch(path, module):
        def begin(*_):
            started[path] = counter.get_total_flops()

        def end(*_):
            found[path] += (counter.get_total_flops() - started[path]) // 2  # it counts additions, too

        handles.extend([module.register_forward_pre_hook(begin), module.register_forward_hook(end)])

    for path, of_site in modules.items():
        for module in of_site:
            watch(path, module)
    with torch.no_grad(), counter:
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return dict(found)
