"""The interface of an export target: write a model, load what was written, and compare both."""

import io
import logging
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from collab_heads.base.option_values import ExportTarget
from collab_heads.errors import ArgumentError
from collab_heads.serving.comparison import Comparison, compare

# how torch.onnx and OpenVINO name what they cannot convert
MISSING_OPERATORS = re.compile(
    r"No (?:ONNX function|conversion rule) found for (?:<OpOverload\(op='|operations: )([\w., ]+)"
)


class Target(ABC):
    """A target of an export.

    Attributes:
        name: its name in `to=`.
        tolerance: the largest difference of an output from PyTorch's, as a share of PyTorch's largest output.
        int8_tolerance: the same with weights of eight bits.
        has_int8: whether it takes weights of eight bits.
        has_own_code: whether it computes an architecture by code of its own, which may not know all that a config can
            say. Without eight bits, a difference shows.
        site_seconds: what an export takes for each attention site, about: of a model that does not generate, and of one
            that does.
        embeds: whether it puts out embeddings of texts, where the model is a sentence encoder.
    """

    name: ClassVar[ExportTarget]
    tolerance: ClassVar[float] = 1e-3  # of float32 in another engine; seen: 2e-6 to 1e-5
    int8_tolerance: ClassVar[float] = 0.9  # seen: up to 0.2; zeros differ by 1, and another model by more
    has_int8: ClassVar[bool] = False
    has_own_code: ClassVar[bool] = False
    site_seconds: ClassVar[tuple[float, float]] = (0.1, 0.1)
    embeds: ClassVar[bool] = False

    def check(self, model: PreTrainedModel, int8: bool, tokenizer: Any) -> None:
        """Raise an error if the target is not installed, or cannot take the model or its tokenizer, or None."""
        self.check_installed(int8)

    def check_installed(self, int8: bool) -> None:
        """Raise an error if the target is not installed, or takes no weights of eight bits; this needs no model."""
        if int8 and not self.has_int8:
            raise ArgumentError(
                f"int8=True: {self.name} takes no weights of eight bits here; all targets do but transformers"
            )

    def is_int8(self, model: PreTrainedModel, int8: bool) -> bool:
        """Return True if the engine multiplies weights of a model in eight bits."""
        return int8

    @abstractmethod
    def write(
        self, model: PreTrainedModel, folder: Path, example: Mapping, *, tokenizer: Any, int8: bool
    ) -> tuple[str, ...]:
        """Write a model into a folder; return notes for the report. The model is not changed.

        Args:
            model: the model, in evaluation.
            folder: an empty folder.
            example: a batch of at least two rows.
            tokenizer: the tokenizer, or None.
            int8: whether weights have eight bits.
        """

    @abstractmethod
    def load(self, model: PreTrainedModel, folder: Path) -> Any:
        """Load what was written, to run it in one thread."""

    def settle(self, model: PreTrainedModel, folder: Path, int8: bool) -> None:
        """Bring what was written, and compared, into its last form; most targets leave it as it is."""
        return

    def compare(self, model: PreTrainedModel, folder: Path, batches: Sequence[Mapping], tokenizer: Any) -> Comparison:
        """Compare what was written with its original on some batches."""
        return compare(model, self.load(model, folder), batches, generates=model.can_generate())


EXPORTING = threading.RLock()  # what an exporter changes belongs to the process: streams, warnings, logging, tables


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress and the warnings of an exporter off the screen; one thread at a time."""
    with EXPORTING, ExitStack() as stack:
        disabled = logging.root.manager.disable
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            with root_logger_kept():
                yield
        finally:
            logging.disable(disabled)


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Restore the root logger when the context ends: OpenVINO changes it, and leaves it so after an error."""
    root = logging.root
    level, handlers, filters = root.level, list(root.handlers), list(root.filters)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:], root.filters[:] = handlers, filters


def why(error: BaseException) -> str:
    """Return the operators that an engine does not have, where an exporter names them; else the first line."""
    each: BaseException | None = error
    while each is not None:
        if found := MISSING_OPERATORS.search(str(each)):
            return f"the engine has no operator {found[1]}"
        each = each.__cause__
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the name of the error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
