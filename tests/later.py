"""Modules that are imported when a test uses them: collection does not wait for training, PEFT and torch's compiler."""

import importlib

import pytest


class Later:
    """Stands for a module that takes seconds of processor, of itself or by what it imports.

    A test that uses an optional one which is not installed is skipped.
    """

    def __init__(self, name: str, *, optional: bool = False) -> None:
        self.__dict__.update(_name=name, _optional=optional, _replaced={})

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("_"):  # pytest looks for marks of its own
            raise AttributeError(attribute)
        found = pytest.importorskip(self._name) if self._optional else importlib.import_module(self._name)
        return getattr(found, attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        module = importlib.import_module(self._name)
        self._replaced.setdefault(attribute, getattr(module, attribute))
        setattr(module, attribute, value)

    def __delattr__(self, attribute: str) -> None:
        """Set what was there at first again: so pytest's `monkeypatch` undoes what is no entry of an object's own."""
        if attribute in self._replaced:  # not if it was set twice, and is set again already
            setattr(importlib.import_module(self._name), attribute, self._replaced.pop(attribute))


run_glue, run_translation, run_image_classification = map(
    Later, ("run_glue", "run_translation", "run_image_classification")
)
peft, bitsandbytes = (Later(name, optional=True) for name in ("peft", "bitsandbytes"))
