"""Make the inputs of a sentence encoder from texts, as its folder of sentence-transformers says.

A folder comes from anywhere: what is in it is checked, and no code in it is run.

Shapes: N texts, d width of an embedding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from collab_heads.base.checks import MAX_SIZE, check_choice, check_count, is_index, is_list
from collab_heads.base.progress import progress_bar
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import check_field, own_file, parse_json, read_text
from collab_heads.saving.source_files import OF_TEXTS, SETTINGS
from collab_heads.sites.record import check_keys
from collab_heads.sites.state import expect

EMBEDDING, STATES = "sentence_embedding", "last_hidden_state"  # outputs of a graph
OF_FORWARD = {"method": "forward", "method_output_name": STATES}
# settings of the transformer in its folder -> the values with which it puts out the states of texts
PLAIN: dict[str, tuple] = {
    "transformer_task": ("feature-extraction",),
    "modality_config": ({"text": OF_FORWARD}, {}),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({},),
    "unpad_inputs": (False, True),  # a matter of speed
}


class Texts(NamedTuple):
    """The settings with which a sentence encoder reads texts.

    Attributes:
        max_seq_length: the most tokens of a text, if the model has positions for so many; None for what the tokenizer
            says.
        do_lower_case: whether texts are lower-cased first.
        prompts: name -> text before every text.
        default_prompt_name: the prompt of texts for which none is named.
        similarity_fn_name: how embeddings are compared; None if the folder does not say.
        truncate_dim: the columns of an embedding that are returned; None for all.
    """

    max_seq_length: int | None
    do_lower_case: bool
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    similarity_fn_name: str | None
    truncate_dim: int | None

    def prompt(self, *names: str) -> str:
        """Return the prompt of the first of these names that there is, else the default one; "" without any.

        Args:
            names: what texts are, such as `query`.
        """
        name = next((name for name in names if name in self.prompts), self.default_prompt_name)
        return "" if name is None else self.prompts[name]

    def lower_case(self, tokenizer: Any) -> None:
        """Have a tokenizer lower-case texts first, if the encoder reads them so.

        Args:
            tokenizer: is changed.

        Raises:
            DataError: if it is none of the package tokenizers, which can.
        """
        if self.do_lower_case:
            from tokenizers import normalizers

            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise DataError(f"do_lower_case in {OF_TEXTS}: a {type(tokenizer).__name__} cannot do that")
            others = [backend.normalizer] if backend.normalizer else []
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Raise what is wrong with the files of a module as a DataError that names their folder."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of parsers: of any kind
        raise DataError(f"{place}: {error!s:.300}") from error


def read_json(file: Path) -> dict:
    """Return the content of a JSON file, which must be a mapping; an empty one if there is no such file."""
    if not own_file(file, file.parent).exists():
        return {}
    return check_keys(found := parse_json(read_text(file)), set(found) if isinstance(found, dict) else set(), file.name)


def read_texts(folder: Path) -> Texts:
    """Return how the sentence encoder in a folder reads texts.

    Raises:
        DataError: if a setting has no valid value, or is of a transformer that reads something else.
    """
    with naming(folder):
        files = [folder / OF_TEXTS, *sorted(folder.glob("sentence_*_config.json"))]  # older names are of families
        own = read_json(next((file for file in files if file.exists()), files[0]))
        of_all = read_json(folder / SETTINGS)
        check_keys(own, {*PLAIN, "max_seq_length", "do_lower_case"}, OF_TEXTS)
        for name, values in PLAIN.items():
            expect(own.get(name) in (None, *values), name, own.get(name), f"{values[0]!r}, or none")
        found = Texts(
            own.get("max_seq_length"),
            own.get("do_lower_case", False),
            of_all.get("prompts") or {},
            of_all.get("default_prompt_name"),
            of_all.get("similarity_fn_name"),
            of_all.get("truncate_dim"),
        )
        for name in ("max_seq_length", "truncate_dim"):
            value = getattr(found, name)
            expect(value is None or (is_index(value, MAX_SIZE) and value > 0), name, value, "a size or null")
        expect(isinstance(found.do_lower_case, bool), "do_lower_case", found.do_lower_case, "true or false")
        is_map = isinstance(found.prompts, dict) and all(isinstance(text, str) for text in found.prompts.values())
        expect(is_map, "prompts", found.prompts, "texts by name")
        for name, text in found.prompts.items():
            check_field(SETTINGS, name, text)
        default, measure = found.default_prompt_name, found.similarity_fn_name
        expect(default is None or default in found.prompts, "default_prompt_name", default, "the name of a prompt")
        expect(measure is None or isinstance(measure, str), "similarity_fn_name", measure, "a name")
        return found


class TextReader:
    """Make the inputs of a graph from texts, as sentence-transformers does.

    Args:
        folder: of the tokenizer; no code in it is run, and nothing is loaded from elsewhere.
        texts: how texts are read.
        config: of the model.
    """

    def __init__(self, folder: Path, texts: Texts, config: PretrainedConfig):
        self.texts = texts
        with naming(folder):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        most, places = self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", -1)
        most = texts.max_seq_length or most
        is_limited = places is not None and places > 0  # relative positions know no limit
        self.tokenizer.model_max_length = min(most, places) if is_limited else most
        texts.lower_case(self.tokenizer)

    def __call__(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Return the inputs for some texts, padded and cut to what the model reads.

        Args:
            texts: the texts.
            prompt: stands before each.
        """
        several, options = [f"{prompt or ''}{text}" for text in texts], {"padding": True, "truncation": "longest_first"}
        rows = self.tokenizer(several, return_tensors="pt", **options)
        if not rows["input_ids"].shape[1]:  # texts of no tokens: engines fail on them
            rows = self.tokenizer(several, return_tensors="pt", padding="max_length", max_length=1)
        return dict(rows)

    @torch.no_grad()
    def encode(
        self, run: Callable[..., Any], texts: Sequence[str], batch_size: int, prompt_name: str | None, width: int
    ) -> np.ndarray:
        """Return the embeddings of texts, [N, d], float32.

        Args:
            run: puts out `EMBEDDING` for the inputs of some texts.
            texts: the texts, N of them; those of similar length are read together.
            batch_size: texts that are read at a time.
            prompt_name: the prompt that stands before each; None for the default, if there is one.
            width: d.

        Raises:
            ArgumentError: if a text is none, or there is no such prompt.
        """
        check_count("batch_size", batch_size, least=1, most=MAX_SIZE)
        if not is_list(texts) or not all(isinstance(text, str) for text in texts):
            raise ArgumentError(f"texts must be a list of texts, not {texts!r:.80}")
        if prompt_name is not None:
            check_choice("prompt_name", prompt_name, self.texts.prompts)
        prompt = self.texts.prompt(*([] if prompt_name is None else [prompt_name]))
        order = np.argsort([-len(text) for text in texts], kind="stable")
        found = np.empty((len(texts), width), dtype=np.float32)
        for start in progress_bar(range(0, len(texts), batch_size), desc="encoding"):
            chunk = order[start : start + batch_size]
            found[chunk] = run(**self([texts[index] for index in chunk], prompt))[EMBEDDING].numpy()
        return found[:, : self.texts.truncate_dim]
