"""A script shows one bar at a time, and none with `--quiet`: neither its own nor those of datasets."""

import pytest
import scripts
from terminals import UP, shown

pytestmark = pytest.mark.slow


def test_a_run_shows_one_bar_at_a_time_or_none(bert, files, tmp_path, capfd):
    with shown() as terminal:
        scripts.run(bert, files, tmp_path / "seen", *scripts.SWAP, "--swap", "between", "--max_train_steps", 2)
    assert terminal.names == ["training", "swap_to_collaborative", "evaluating"]
    assert any("training:" in frame and "evaluating" in frame for frame in terminal.frames)
    assert UP not in terminal.getvalue()
    assert "tokenizing train" in capfd.readouterr().err  # by datasets, on the real stderr
    with shown() as terminal:
        scripts.run(bert, files, tmp_path / "quiet", *scripts.SWAP, "--max_train_steps", 2, "--quiet")
    assert not terminal.getvalue() and "%" not in capfd.readouterr().err
