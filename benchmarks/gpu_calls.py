"""The calls that the GPU benchmark compares: encoding, decoding, an optimizer step, and outputs for exactness."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import CompileConfig, PreTrainedModel

from gpu_models import COMPILED, LOSSLESS, STOCK, VARIANTS, Models
from gpu_timing import halved_until_it_fits, in_turns, peak_memory, size_of

SDPA, FLASH, FLEX = BACKENDS = ("sdpa", "flash_attention_2", "flex_attention")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOKENS = {"encode": 2**15, "decode": 2**14, "static": 2**14, "train": 2**14, "exact": 2**10}  # of the first batch
NEW = 32  # tokens that are generated
QUICK_LENGTHS, QUICK_TOKENS, QUICK_NEW = {128: 8, 512: 16}, 32, 3


@dataclass(frozen=True)
class Setting:
    """The settings that all variants of a table share."""

    mode: str
    precision: str
    backend: str
    model: str
    length: int

    def __str__(self) -> str:
        return f"{self.mode} {self.model} {self.precision} {self.backend} {self.length}"

    @property
    def variants(self) -> list[str]:
        """Return the names of the variants to compare with stock."""
        if self.mode == "exact":
            return list(LOSSLESS)
        return COMPILED if self.mode == "static" or self.backend == FLEX else list(VARIANTS)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return torch.float32 if self.mode == "train" else DTYPES[self.precision]


class Bench:
    """A run of the benchmark: the device, the models, and the calls to time."""

    def __init__(self, device: torch.device, *, quick: bool):
        self.device, self.quick, self.models = device, quick, Models(device, quick=quick)
        self.new = QUICK_NEW if quick else NEW
        self.references: dict[Setting, tuple[torch.Tensor, float]] = {}  # of the last setting

    def length(self, setting: Setting) -> int:
        """Return the tokens of a sequence."""
        return QUICK_LENGTHS[setting.length] if self.quick else setting.length

    def first_batch(self, setting: Setting) -> int:
        """Return the number of sequences in the first batch to try."""
        return (QUICK_TOKENS if self.quick else TOKENS[setting.mode]) // self.length(setting)

    def load(self, setting: Setting, variant: str, backend: str | None = None) -> PreTrainedModel:
        """Return a copy of a variant on the device."""
        return self.models.on_device(setting.model, variant, setting.dtype, backend or setting.backend)

    def ids(self, model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
        """Return random tokens [batch, length], none of them special."""
        chance = torch.Generator().manual_seed(length)
        return torch.randint(10, model.config.vocab_size - 10, (batch, length), generator=chance).to(self.device)

    def encode(self, model: PreTrainedModel, setting: Setting, batch: int) -> tuple[Callable, None]:
        """Return a call that runs the encoder once."""
        ids = self.ids(model, batch, self.length(setting))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        @torch.no_grad()
        def encode():
            model.base_model(**inputs)

        return encode, None

    def decode(self, model: PreTrainedModel, setting: Setting, batch: int) -> tuple[Callable, None]:
        """Return a call that generates greedily."""
        ids = self.ids(model, batch, self.length(setting))
        options = {"num_beams": 1, "do_sample": False, "min_new_tokens": self.new, "max_new_tokens": self.new}
        if setting.mode == "static":
            compiling = CompileConfig()
            compiling._compile_all_devices = True  # so that a try on the CPU takes this path
            options |= {"cache_implementation": "static", "compile_config": compiling}

        def decode():
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            if setting.mode == "static" and not hasattr(model, "_compiled_call"):
                raise RuntimeError("generate did not compile the decode step")

        return decode, None

    def train(self, model: PreTrainedModel, setting: Setting, batch: int) -> tuple[Callable, torch.optim.Optimizer]:
        """Return a call that takes an optimizer step, and the optimizer."""
        model.train().zero_grad()  # what a step that ran out of memory left
        ids = self.ids(model, batch, self.length(setting))
        labels = ids if model.config.is_encoder_decoder else ids[:, 0] % 2
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

        def step():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, optimizer

    @torch.no_grad()
    def output(self, model: PreTrainedModel, setting: Setting) -> torch.Tensor:
        """Return the hidden states or logits [tokens, width] of a padded batch, in float64."""
        batch, length = self.first_batch(setting), self.length(setting)
        ids = self.ids(model, batch, length)
        mask = torch.ones_like(ids)
        mask[batch // 2 :, 2 * length // 3 :] = 0
        if model.config.is_encoder_decoder:
            found = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits.flatten(0, 1)
        else:  # what stands at padding means nothing
            found = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        return found.double()

    def timed(self, setting: Setting, stock: PreTrainedModel, variant: str, batch: int) -> dict:
        """Measure time and memory of a variant beside stock."""
        prepare = {"encode": self.encode, "decode": self.decode, "static": self.decode, "train": self.train}
        model = self.load(setting, variant)
        beside = prepare[setting.mode](stock, setting, batch)
        call, optimizer = prepare[setting.mode](model, setting, batch)
        found = in_turns(beside[0], call, self.device)
        tokens = batch * (self.new if prepare[setting.mode] == self.decode else self.length(setting))
        row = {"time": found.ratio, "quartiles": found.quartiles, "seconds": found.seconds, "stock": found.stock}
        row |= {"tokens/s": tokens / found.seconds}
        peak = peak_memory(call, size_of(model, optimizer), self.device)
        if peak is not None:
            row["peak MiB"] = peak
            row["peak"] = peak / peak_memory(beside[0], size_of(stock, beside[1]), self.device)
        return row

    def reference(self, setting: Setting) -> tuple[torch.Tensor, float]:
        """Return the output of stock, and the largest difference between stock's backends sdpa and eager."""
        if setting not in self.references:
            eager, sdpa, own = (
                self.output(self.load(setting, STOCK, backend), setting) for backend in ("eager", SDPA, setting.backend)
            )
            self.references = {setting: (own, (sdpa - eager).abs().max().item())}
        return self.references[setting]

    def exactness(self, setting: Setting, variant: str) -> dict:
        """Return the largest difference that a lossless change makes, beside the one between stock's backends."""
        stock, own = self.reference(setting)
        difference = (self.output(self.load(setting, variant), setting) - stock).abs().max().item()
        return {"difference": difference, "stock's own": own, "ratio": difference / own if own > 0 else None}

    def measure(self, setting: Setting, stock: PreTrainedModel, variant: str, batch: int) -> dict:
        """Compare one variant with stock, on a smaller batch if there is no memory for this one."""
        if setting.mode == "exact":
            return {"batch": batch} | self.exactness(setting, variant)
        fitting, row = halved_until_it_fits(batch, lambda size: self.timed(setting, stock, variant, size))
        return {"batch": fitting} | row
