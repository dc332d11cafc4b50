"""Run a model from one of its blocks on, where everything before this block is as it was.

The outputs of the block before are kept for every portion of the batches. A run that begins there computes the same as
a run of the whole model, bit for bit. The blocks are found by trying, whatever the family: they are the members of
lists of modules that hold sites, each must run once in a forward pass, and a run that begins at the second, the middle
or the last of them must put out what the whole model does. Where they do not (ALBERT, whose one block serves all
layers), or where the kept outputs would take too much memory, the whole model runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from collab_heads.model.open_layers import OpenLayerSite
from collab_heads.running.batches import EnoughSeen, run_batches

SHARE = 0.5  # of the memory of the model: the most that kept outputs may take
LEAST = 256 * 2**20  # bytes that they may take in any case


class BlockStarts:
    """Starts at the blocks of a model, on the same batches each time.

    Args:
        model: the model; up to a start it must stay as it was when this start was kept.
        sites: sites in the blocks.
        batches: input dicts as the model takes them.
        cut: batch -> its portions, as in `run_batches`.

    Attributes:
        blocks: the paths of the blocks, in the order in which they run; empty where no run can begin inside the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Iterable[OpenLayerSite],
        batches: Sequence[Mapping],
        cut: Callable[[Mapping], Iterable[Mapping]],
    ):
        self.model, self.batches, self.cut = model, batches, cut
        self.limit = max(SHARE * sum(parameter.nbytes for parameter in model.parameters()), LEAST)
        self.start, self.number = 0, -1  # the first block that is run, and the portion that is run
        self.kept: dict[str, list[Any]] = {}  # list of blocks -> portion -> output of its last block before the start
        names = {module: name for name, module in model.named_modules()}
        self.block_of = {site.path: self.block_around(names[site.output]) for site in sites}

    @cached_property
    def blocks(self) -> list[str]:
        """The blocks, found when they are asked for."""
        return self.found(dict.fromkeys(block for block in self.block_of.values() if block))

    def block_around(self, name: str) -> str:
        """Return the path of the outermost member of a list of modules around a module; empty if there is none."""
        names = name.split(".")
        for end in range(1, len(names)):
            if isinstance(self.model.get_submodule(".".join(names[:end])), nn.ModuleList):
                return ".".join(names[: end + 1])
        return ""

    def found(self, blocks: Iterable[str]) -> list[str]:
        """Return the blocks in the order in which they run, if runs that begin at them put out what the model does."""
        first: list[Mapping] = []
        inputs = 0  # bytes, of all portions
        for portion in (portion for batch in self.batches for portion in self.cut(batch)):
            first = first or [portion]
            inputs += bytes_of(portion)
        run: list[tuple[str, Any]] = []
        with ExitStack() as stack:
            for name in self.around(blocks):
                hook = self.model.get_submodule(name).register_forward_hook(
                    lambda _, args, out, name=name: run.append((name, copied(out)))
                )
                stack.callback(hook.remove)
            whole = self.put_out(first)
        order = [name for name, _ in run]
        if len(order) < 2 or len(set(order)) < len(order):
            return []
        largest = max(bytes_of(out) for _, out in run) * len({list_of(name) for name in order})
        if largest * inputs > self.limit * max(bytes_of(first), 1):  # outputs grow with the inputs
            return []
        self.blocks = order
        for start in sorted({1, len(order) // 2, len(order) - 1}):
            self.start, self.kept = start, {list_of(name): [out] for name, out in run[:start]}
            with self.skipping():
                again = self.put_out(first)
            if len(again) != len(whole) or not all(map(torch.equal, again, whole)):
                order = []
                break
        self.restart()
        return order

    def around(self, blocks: Iterable[str]) -> list[str]:
        """Return the paths of all members of the lists that hold some blocks."""
        lists = dict.fromkeys(map(list_of, blocks))
        return [f"{each}.{name}" for each in lists for name, _ in self.model.get_submodule(each).named_children()]

    def put_out(self, portions: Sequence[Mapping]) -> list[Tensor]:
        """Run portions; return the tensors that the model puts out."""
        found: list[Tensor] = []

        def hook(_: nn.Module, args: tuple, inputs: Mapping, outputs: Any) -> None:
            values = outputs.values() if isinstance(outputs, Mapping) else outputs
            found.extend(value for value in values if isinstance(value, Tensor))

        handle = self.model.register_forward_hook(hook, with_kwargs=True)
        try:
            run_batches(self.model, portions, {}, "finding blocks")
        finally:
            handle.remove()
        return found

    def restart(self) -> None:
        """Forget what was kept: after a change in front of the start."""
        self.start, self.kept = 0, {}

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Let runs on the batches begin at the block of a site, while the context is open.

        Everything before this block must be as it will be; the block itself may change inside the context.
        """
        self.advance(path)
        with self.skipping():
            yield

    @contextmanager
    def within(self, paths: Collection[str]) -> Iterator[None]:
        """Let one run on the batches begin at the first block of some sites, and end after the last.

        The run keeps what the last block puts out, and later runs can begin there.
        """
        numbers = [self.blocks.index(self.block_of[path]) for path in paths if self.block_of[path] in self.blocks]
        if len(numbers) < len(paths):  # a site is outside of the blocks
            yield
            return
        self.advance(min(paths, key=lambda path: self.blocks.index(self.block_of[path])))
        with self.keeping(max(numbers) + 1):
            yield

    def runs(self, path: str, paths: Collection[str]) -> bool:
        """Return False if a site does not run before the last of some sites: behind it, or in front of the start."""
        numbers = {block: number for number, block in enumerate(self.blocks)}
        own, *others = (numbers.get(self.block_of.get(each, "")) for each in (path, *paths))
        known = [number for number in others if number is not None and number >= self.start]
        return own is None or len(known) < len(paths) or self.start <= own <= max(known)

    def advance(self, path: str) -> None:
        """Keep what the model puts out in front of the block of a site, which later starts begin with."""
        block = self.block_of[path]
        wanted = self.blocks.index(block) if block in self.blocks else 0
        if wanted < self.start:
            self.restart()
        if wanted == self.start:
            return
        with self.keeping(wanted):
            run_batches(self.model, self.batches, {}, "running blocks", cut=self.cut)

    @contextmanager
    def keeping(self, stop: int) -> Iterator[None]:
        """Let one run on the batches begin at the start, and end at another block, which is the start afterwards."""
        passed = self.blocks[self.start : stop]

        def keep(name: str, output: Any) -> None:
            self.kept.setdefault(list_of(name), [])[self.number : self.number + 1] = [copied(output)]
            if name == passed[-1]:
                raise EnoughSeen

        try:
            with ExitStack() as stack:
                for name in {list_of(name): name for name in passed}.values():  # the last of each list
                    hook = self.model.get_submodule(name).register_forward_hook(
                        lambda _, args, out, name=name: keep(name, out)
                    )
                    stack.callback(hook.remove)
                stack.enter_context(self.skipping())
                yield
        except BaseException:
            self.restart()  # some portions are ahead of others
            raise
        self.start = stop
        if stop == len(self.blocks):
            self.restart()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Let the blocks before the start put out what was kept; the portions of the batches come in their order."""
        skipped = {name: self.model.get_submodule(name) for name in self.blocks[: self.start]}
        before = {block: vars(block)["forward"] for block in skipped.values() if "forward" in vars(block)}
        self.number = -1

        def count(*_: object) -> None:
            self.number += 1

        handle = self.model.register_forward_pre_hook(count)
        try:
            for name, block in skipped.items():
                block.forward = partial(self.put_out_kept, list_of(name))
            yield
        finally:
            handle.remove()
            for block in skipped.values():
                vars(block).pop("forward", None)
                vars(block).update({"forward": before[block]} if block in before else {})

    def put_out_kept(self, of_list: str, *_: object, **__: object) -> Any:
        """Return what the last block of a list in front of the start put out for the present portion, as a copy."""
        return copied(self.kept[of_list][self.number])


def copied(output: Any) -> Any:
    """Return the output of a block with tensors of its own: later blocks may change theirs in place."""
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, output)


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in inputs or outputs."""
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def list_of(block: str) -> str:
    """Return the path of the list that holds a block."""
    return block.rpartition(".")[0]
