"""The state of an optimizer comes back from a file of safetensors as it was."""

import pytest
import torch

from collab_heads.errors import OutputError
from collab_heads.training.storage.sharding import read_optimizer, write_optimizer

STATE = {
    "state": {
        "a.weight": {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).reshape(2, 3), "kind": "plain"},
        "b": {"exp_avg": torch.zeros(2, dtype=torch.bfloat16), "count": 4},
    },
    "param_groups": [{"params": ["a.weight", "b"], "lr": 1e-3, "betas": (0.9, 0.99), "fused": None, "shared": True}],
}


def test_a_state_comes_back(tmp_path):
    write_optimizer(tmp_path / "state.safetensors", STATE)
    assert not (tmp_path / "state.safetensors").read_bytes().startswith(b"PK")  # as torch's pickles do
    read = read_optimizer(tmp_path / "state.safetensors")
    assert read["param_groups"] == STATE["param_groups"]
    for name, values in STATE["state"].items():
        assert read["state"][name].keys() == values.keys()
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(read["state"][name][key], value, rtol=0, atol=0)
            else:
                assert read["state"][name][key] == value


@pytest.mark.parametrize("content", (b"", b"PK\x03\x04 no safetensors", None))
def test_a_damaged_file_is_named(content, tmp_path):
    path = tmp_path / "state.safetensors"
    if content is None:
        write_optimizer(path, STATE)
        content = path.read_bytes()[:-5]
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"state.safetensors is not a state of an optimizer, or is damaged"):
        read_optimizer(path)
