"""What a result says of itself: the command, and the versions; no secrets."""

import pytest
import torch

from collab_heads.training.runs.session import provenance


def test_provenance_is_the_command_and_the_versions(monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_glue.py", "--seed", "3"])
    found = provenance()
    assert found["command"] == "run_glue.py --seed 3"
    public, _, _ = torch.__version__.partition("+")  # torch adds what it was built for, a wheel need not
    assert found["versions"]["torch"].partition("+")[0] == public
    assert {"python", "transformers", "collab-heads"} < found["versions"].keys()


@pytest.mark.parametrize("flags", (["--hub_token", "hf_secret"], ["--hub_token=hf_secret"]))
def test_provenance_holds_no_secrets(flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_glue.py", "--push_to_hub", *flags])
    assert "hf_secret" not in str(provenance())
