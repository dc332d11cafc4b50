"""Run a model for measuring: in evaluation mode, with an attention backend that fits, and left as it was."""

from collections.abc import Collection
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


@contextmanager
def evaluating(model: PreTrainedModel):
    """Evaluation mode without gradients; every module's own mode is restored, and what a forward pass notes."""
    modes = {module: module.training for module in model.modules()}
    inside = [module for module in modes if isinstance(module, PreTrainedModel)]
    problems = [(each.config, each.config.problem_type) for each in inside]  # classifiers note it, by their labels
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for config, problem in problems:
            config.problem_type = problem


@contextmanager
def attention_backend(model: PreTrainedModel, backend: str, accepted: Collection[str]):
    """Use a backend where the model and its stacks have none of the accepted ones; what they had is restored."""
    # One by one: transformers 5.17 does not reach T5's stacks from the model. And in the configs: its
    # set_attn_implementation judges by the source of a class, and refuses those that were written in a notebook.
    stacks = {m: m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)}
    try:
        for stack, before in stacks.items():
            if before not in accepted:
                stack.config._attn_implementation = backend
        yield
    finally:
        for stack, before in stacks.items():  # from the outside in: setting a config sets those in it
            stack.config._attn_implementation = before
