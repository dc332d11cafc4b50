"""Operations of attention, counted by torch."""

from collections import defaultdict

import torch
from model_runs import set_backend
from torch.utils.flop_counter import FlopCounterMode

import collab_heads
from collab_heads.model.open_site import open_sites


def attention_operations(model, batches):
    """path -> multiplications in attention and its output projection; with eager scores, which torch counts."""
    set_backend(model, "eager")
    counter, found, started, handles = FlopCounterMode(display=False), defaultdict(int), {}, []

    def watch(path, module):
        def begin(*_):
            started[path] = counter.get_total_flops()

        def end(*_):
            found[path] += (counter.get_total_flops() - started[path]) // 2  # it counts additions, too

        handles.extend([module.register_forward_pre_hook(begin), module.register_forward_hook(end)])

    for site in open_sites(model, collab_heads.get_adapter(model)):
        watch(site.path, site.module)
        if not any(module is site.output for module in site.module.modules()):
            watch(site.path, site.output)
    with torch.no_grad(), counter:
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return dict(found)
