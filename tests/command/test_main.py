import pytest

from collab_heads.command import main


@pytest.mark.parametrize("argv", ([], ["-h"], ["--help"]))
def test_help_names_the_commands(argv, capsys):
    assert main.main(argv) == 0
    assert "commands: analyze, compress;" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert main.main(["analyse", "model"]) == 1
    assert (
        capsys.readouterr().err
        == "collab_heads: unknown command 'analyse' (did you mean 'analyze'?); known: analyze, compress\n"
    )


def test_a_command_gets_the_rest_and_its_error_is_one_line(capsys, tmp_path):
    argv = ["analyze", str(tmp_path), "--data", str(tmp_path / "none.txt"), "--output_dir", str(tmp_path / "out")]
    assert main.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("collab_heads: ") and "none.txt" in said and "Traceback" not in said
