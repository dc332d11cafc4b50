"""The family that docs/add-a-family.md makes, by following it, passes what every family must pass."""

from dataclasses import replace

import pytest
import test_alpha_contract
import test_head_contract
from changed_heads import ORIGINS
from model_inputs import batch
from model_sizes import KINDS, LAYERS
from pages import PAGES

import test_contract
from collab_heads import AttentionAdapter
from collab_heads.contract import registry
from families import Family

PAGE = PAGES["docs/add-a-family.md"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the examples of the page define: the model, its adapter, how to make one."""
    before, namespace = dict(registry._ADAPTERS), {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for line, code in PAGE.examples:
            exec(compile("\n" * (line - 1) + code, PAGE.name, "exec"), namespace)
        yield namespace
    registry._ADAPTERS.clear()
    registry._ADAPTERS.update(before)


@pytest.fixture
def reader(made) -> Family:
    """A row of the contract."""
    return Family("reader", made["make"], {"enc-self": LAYERS}, made["ReaderModel"], inputs=batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ("eager", "sdpa"))
def test_lossless(reader, kind, backend):
    test_contract.assert_lossless(reader, kind, backend)


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_of_the_contract(reader, kind, tmp_path):
    test_contract.test_save_and_load(reader, kind, tmp_path)
    test_contract.test_gradients(reader, kind)
    test_contract.test_report_and_parameters(reader, kind)
    test_contract.test_second_swap_is_refused(reader, kind)


@pytest.mark.parametrize("origin", ORIGINS)
def test_pruned_equals_gated(reader, origin):
    for empty in (False, True):
        test_head_contract.assert_pruned_equals_gated(reader, origin, empty)


def test_folded_and_mixed(reader):
    test_head_contract.test_folded_equals(reader)
    test_alpha_contract.test_mixed_equals_by_hand(reader)


MISTAKES = {
    "another projection": {"projections": lambda self, module: (module.match, module.ask)},
    "another scale": {"read": lambda self, module: replace(AttentionAdapter.read(self, module), scale=1.0)},
    "no bias": {"read": lambda self, module: replace(AttentionAdapter.read(self, module), query_bias=None)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_first_thing_to_test_sees_a_mistake(made, reader, mistake, monkeypatch):
    for name, wrong in MISTAKES[mistake].items():
        monkeypatch.setattr(made["ReaderAdapter"], name, wrong)
    (line, code) = next(example for example in PAGE.examples if "def make" in example[1])
    with pytest.raises(AssertionError):
        exec(compile("\n" * (line - 1) + code, PAGE.name, "exec"), dict(made))


def test_a_mistake_in_the_attention_shows(made, reader, monkeypatch):
    """Padding that is attended."""
    stock = made["CollaborativeReaderAttention"].forward
    monkeypatch.setattr(
        made["CollaborativeReaderAttention"], "forward", lambda self, states, attention_mask=None: stock(self, states)
    )
    with pytest.raises(AssertionError):
        test_contract.assert_lossless(reader, "shared", "eager")
