"""collab-heads: which command, its flags from the line or a file, how it ends, what shells are told."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from collab_heads.base import command_start
from collab_heads.base.checks import check_choice
from collab_heads.base.command_start import is_command
from collab_heads.base.option_values import MEASURES, MODEL_SHAPES, POLICY_WORDS
from collab_heads.command import main
from collab_heads.command.main import SHELLS
from collab_heads.errors import ArgumentError, DataError
from collab_heads.rotation.rules import POLICIES

STARTED = """
import sys
sys.argv[:1] = ["/somewhere/collab-heads"]
from collab_heads.command.main import main
import collab_heads
print(collab_heads.swap_to_collaborative.__name__, "torch" in sys.modules)
"""
GLUE = ("--task_name", "mrpc", "--model_name_or_path", "bert-base-uncased")
TRANSLATE = ("--train_file", "pairs.csv", "--validation_file", "pairs.csv")
IMAGES = ("--train_dir", ".", "--validation_dir", ".")
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may run where it is ignored
sys.argv[:1] = ["/somewhere/collab-heads"]
import collab_heads
"""
LIGHT = """
import json, sys
for argv in json.loads(sys.argv[1]):
    sys.argv = ["/somewhere/collab-heads", *argv]
    try:
        import collab_heads
    except SystemExit as ended:
        heavy = {"torch", "transformers", "accelerate", "numpy"} & sys.modules.keys()
        print(json.dumps({"code": ended.code, "heavy": sorted(heavy)}))
"""


def left(capsys, *argv):
    """Exit code and stdout of a command that only says something."""
    with pytest.raises(SystemExit) as ended:
        main.read(argv)
    return ended.value.code, capsys.readouterr().out


@pytest.mark.parametrize("argv", ([], ["-h"], ["--help"]))
def test_help_names_the_commands(argv, capsys):
    code, said = left(capsys, *argv)
    assert code == 0 and all(f"\n  {name} " in said for name in main.COMMANDS)


def test_the_version_is_said(capsys):
    code, said = left(capsys, "--version")
    assert code == 0 and said.startswith("collab-heads ") and said.strip()[-1].isdigit()


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert main.main(["analyse", "model"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "collab-heads: unknown command 'analyse' (did you mean 'analyze'?); known: inspect, compress"
    )


def test_exit_codes(tmp_path, monkeypatch, capsys):
    """Done, failed, wrong flags, interrupted; every problem is one line."""
    monkeypatch.setattr(main, "run", lambda name, args: {"seen": args.model})
    assert main.main(["inspect", "bert"]) == 0
    assert main.main(["fold", "bert", "--output_dir", __file__]) == 1
    assert main.main(["fold", "bert"]) == 2

    def stop(name, args):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run", stop)
    assert main.main(["inspect", "bert"]) == 130
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("collab-heads: ") for line in said)


def test_the_page_says_what_the_exit_codes_are(bert, tmp_path, capsys):
    """Of every kind that the table of docs/command.md names."""
    page = (Path(main.__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
    words = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)}
    assert words.keys() == {0, 1, 2, 130}
    text = written(tmp_path / "text", "a dog\n")
    used = tmp_path / "used"
    shutil.copytree(bert, used)
    (tmp_path / "config.json").write_text("{")
    data, out = ("--data", text), ("--output_dir", tmp_path / "out")
    cases = {
        "a model": ("compress", tmp_path / "smal", *data, "--plan"),
        "a file": ("compress", bert, "--data", tmp_path / "none", "--plan"),
        "damaged": ("inspect", tmp_path),
        "the output folder is in use": ("fold", bert, "--output_dir", used),
        "the model cannot be changed in this way": ("fold", bert, *out),
        "unknown": ("fold", bert, *out, "--wrong", "1"),
        "in conflict with another one": ("prune", bert, *out, "--target_heads", "4", "--alive_heads", text),
        "not for this model": ("compress", bert, "--data", text, text, "--plan"),
    }
    expected = {said: next(code for code, text in words.items() if said in text) for said in cases}
    found = {said: main.main(list(map(str, argv))) for said, argv in cases.items()}
    capsys.readouterr()
    assert found == expected and set(expected.values()) == {1, 2}


def test_a_folder_that_is_not_there_is_answered_with_the_nearest(bert, tmp_path, monkeypatch, capsys):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("collab_heads.saving.loading.is_offline_mode", lambda: True)
    for name, near in (("smal", "small"), (f"{tmp_path}/smal", f"{tmp_path}/small"), ("./smal", "small")):
        assert main.main(["inspect", name]) == 1
        said = capsys.readouterr().err
        assert f"there is no folder {name!r} (did you mean {near!r}?)" in said and said.count("\n") == 1
    assert main.main(["inspect", "m" * 300]) == 1
    assert "there is no folder 'mmm" in (said := capsys.readouterr().err) and len(said) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("argv", (["--help"], ["compress", "--help"], ["--print_completion", "bash"], ["inspect"]))
def test_output_that_nobody_takes_gives_no_traceback(argv, tmp_path):
    """As of a full disk, for which a file that is only read stands, and of `| true`, which has ended."""

    def run(argv, **streams):
        command = [sys.executable, "-m", "collab_heads", *argv]
        return subprocess.run(command, text=True, check=False, cwd=tmp_path, **streams)

    with written(tmp_path / "full", "").open() as full:
        done = run(argv, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1 and "collab-heads: cannot write or read: [Errno" in done.stderr
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr
        assert run(["fold", "x"], stdout=full, stderr=full).returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    done = run(argv, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_json_is_alone_on_stdout(monkeypatch, capsys):
    def work(name, args):
        print("a table")
        return {"seen": args.model}

    monkeypatch.setattr(main, "run", work)
    assert main.main(["inspect", "bert", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"seen": "bert"} and said.err == "a table\n"
    monkeypatch.setenv("RANK", "1")
    assert main.main(["inspect", "bert", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_help_and_wrong_flags_import_nothing_heavy(tmp_path):
    asked = {
        ("--help",): 0,
        **{(name, "--help"): 0 for name in main.COMMANDS},
        ("--version",): 0,
        ("--print_completion", "bash"): 0,
        ("compress", "x", "--bugdet", "1"): 2,
        ("compress", "/nowhere", "--data", "x", "--plan"): 1,
        ("analyze", "x", "--data", "x", "--source_prefix", "\udcff"): 2,
        ("analyze", "x", "--data", "nothing"): 1,
        ("translate", "--train_file", "none", "--validation_file", "none", "--model_name_or_path", "x"): 1,
        ("glue", *GLUE, "--push_to_hub"): 2,
        ("glue", *GLUE, "--alpha_growth_beside", "sum"): 2,
        ("glue", *GLUE, "--rotate", "softly"): 2,
        ("glue", *GLUE, "--rotate", "soft", "--num_train_epochs", "0"): 2,
        ("glue", *GLUE, "--analyze_samples", "8"): 2,
        ("translate", *TRANSLATE, "--label_smoothing", "1"): 2,
        ("images", "--train_dir", "none", "--validation_dir", "none", "--model_type", "vit"): 1,
        ("images", "--model_type", "vit"): 2,
        ("images", "--train_dir", "pairs.csv", "--validation_dir", ".", "--model_type", "vit"): 1,
        ("images", *IMAGES, "--model_type", "vit", "--image_size", "5"): 2,
        ("translate", *TRANSLATE, "--model_name_or_path", "x", "--d_model", "8"): 2,
        ("translate", *TRANSLATE, "--model_name_or_path", "x", "--risk_samples", "8"): 2,
        ("translate", *TRANSLATE, "--model_type", "marian", "--alpha_mixing", "--alpha_growth_beside", "men"): 2,
    }
    written(tmp_path / "pairs.csv", "de,en\n")
    command = [sys.executable, "-c", LIGHT, json.dumps(list(asked))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]
    assert found == [{"code": code, "heavy": []} for code in asked.values()]


def test_the_words_of_flags_are_those_of_the_library():
    assert set(POLICY_WORDS) == POLICIES.keys()


@pytest.mark.slow
def test_the_package_is_whole_once_the_flags_are_right(tmp_path):
    """As a module and as the script: what the command imported is what `import collab_heads` gives."""
    done = subprocess.run([sys.executable, "-c", STARTED, "inspect"], capture_output=True, text=True, check=True)
    assert done.stdout == "swap_to_collaborative True\n"
    asked = [sys.executable, "-m", "collab_heads", "inspect", "bert", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["adapter"] == "BertAdapter"


@pytest.mark.parametrize(
    ("argv", "original", "found"),
    (
        (["/bin/collab-heads", "inspect"], ["python", "/bin/collab-heads", "inspect"], True),
        (["collab-heads.exe"], ["python"], True),
        (["-m", "inspect"], ["python", "-X", "dev", "-m", "collab_heads", "inspect"], True),
        (["-m"], ["python", "-m", "collab_heads.analysis"], False),
        (["-m"], ["python", "-m", "pytest", "collab_heads"], False),
        (["-m", "-m"], ["python", "-mpytest"], False),
        (["train.py", "collab-heads"], ["python", "train.py", "collab-heads"], False),
        (["-c", "collab_heads"], ["python", "-c", "import collab_heads", "collab_heads"], False),
        ([], [], False),
    ),
)
def test_only_the_command_looks_at_the_command_line(argv, original, found):
    assert is_command(argv, original) is found


def written(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_a_file_of_flags(tmp_path):
    flags = {
        "model": "bert",
        "data": ["a.txt"],
        "budget": 0.4,
        "plan": False,
        "sites": None,
        "parts": ["heads", "values"],
    }
    file = written(tmp_path / "flags.json", flags)

    def parse(argv):
        return main.parser("compress").parse_args(argv)

    args = parse([str(file)])
    assert (args.model, args.data, args.budget, args.plan) == ("bert", ["a.txt"], 0.4, False)
    assert args.parts == ["heads", "values"] and args.sites is None and args.samples == 512
    args = parse([str(file), "roberta", "--budget", "0.2", "--plan", "--data", "b.txt"])
    assert (args.model, args.data, args.budget, args.plan) == ("roberta", ["b.txt"], 0.2, True)
    assert args.parts == ["heads", "values"]
    written(file, {"data": "a.txt"})
    assert parse([str(file), "bert"]).data == ["a.txt"]
    with pytest.raises(ArgumentError, match="required: MODEL"):
        parse([str(file)])


def test_a_file_of_flags_in_yaml_as_the_line_would_have_them(tmp_path):
    pytest.importorskip("yaml")
    text = "--model: bert\noutput_dir: out\ndim_shared_query_key: {enc-self: 32, dec-enc: 0.5}\ndecomposition_tol: 1e-5"
    args = main.parser("swap").parse_args([str(written(tmp_path / "a.yaml", text))])
    line = "bert --output_dir out --dim_shared_query_key enc-self=32,dec-enc=0.5 --decomposition_tol 1e-5"
    assert args == main.parser("swap").parse_args(line.split())
    assert args.dim_shared_query_key == {"enc-self": 32, "dec-enc": 0.5}
    file = written(tmp_path / "b.yml", "output_dir: out\nresume_from_checkpoint: true")
    resume = main.parser("glue").parse_args([str(file)])
    assert resume.resume_from_checkpoint == "latest"


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    (
        ({"bugdet": 1}, ArgumentError, r"unknown flag in .*x.json: 'bugdet' \(did you mean 'budget'\?\)"),
        ({"fp16": True}, ArgumentError, "unknown flag in .*x.json: 'fp16'"),
        ({"plan": "yes"}, ArgumentError, "x.json: plan: 'yes' is not true or false"),
        ({"budget": "much"}, ArgumentError, "x.json: budget: .much. must be a size such as"),
        ({"budget": -1}, ArgumentError, "x.json: budget: -1 must be a finite number"),
        ({"budget": [1]}, ArgumentError, r"x.json: budget: \[1\] is not one value"),
        ({"of": True}, ArgumentError, "x.json: of: true is not a value"),
        ([1], DataError, "is one object, such as"),
        ("{", DataError, "x.json: not a file of flags"),
    ),
)
def test_files_of_flags_that_are_refused(flags, error, said, tmp_path):
    with pytest.raises(error, match=said):
        commands.parse("compress", written(tmp_path / "x.json", flags))
    with pytest.raises(DataError, match="No such file"):
        commands.parse("compress", tmp_path / "missing.yaml")


def test_a_missing_flag_hides_no_wrong_one():
    with pytest.raises(ArgumentError, match=r"unknown flag '--dota' .did you mean '--data'"):
        commands.parse("compress", "bert", "--dota", "x")


def completed(script, *words):
    """What bash offers for the last of some words."""
    line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _collab_heads; echo ${{COMPREPLY[@]}}"
    bash = [shutil.which("bash"), "-c", f"{script}\n{line}"]
    return subprocess.run(bash, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_flags(capsys):
    _, script = left(capsys, "--print_completion", "bash")
    assert completed(script, "collab-heads", "co") == ["compress"]
    assert completed(script, "collab-heads", "compress", "--bud") == ["--budget"]
    assert completed(script, "collab-heads", "inspect", "--bud") == []
    assert completed(script, "collab-heads", "compress", "bert", "fi") == []  # which leaves it to the files
    assert completed(script, "collab-heads", "export", "small", "--to", "o") == ["onnx", "openvino"]
    assert completed(script, "collab-heads", "shrink", "small", "--to", "onnx", "transformers.") == ["transformers.js"]
    assert completed(script, "collab-heads", "evaluate", "a", "b", "--task", "sim") == ["similarity"]
    assert completed(script, "collab-heads", "evaluate", "a", "b", "--data", "sim") == []
    assert completed(script, "collab-heads", "compress", "bert", "--of", "") == list(MEASURES)
    assert completed(script, "collab-heads", "compress", "bert", "--shape", "") == list(MODEL_SHAPES)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_flags_and_values(tmp_path, capsys):
    (tmp_path / "script.fish").write_text(left(capsys, "--print_completion", "fish")[1])
    for line, expected in {
        "co": ["compress"],
        "compress bert --bud": ["--budget"],
        "compress bert --of ": sorted(MEASURES),
        "shrink small --to o": ["onnx", "openvino"],
    }.items():
        said = ["fish", "--no-config", "-c", f'source {tmp_path}/script.fish; complete -C "collab-heads {line}"']
        assert subprocess.run(said, capture_output=True, text=True, check=True).stdout.split() == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_is_told_every_flag(shell, capsys):
    _, script = left(capsys, "--print_completion", shell)
    for name in main.COMMANDS:
        for flag in main.flags_of(main.parser(name)):
            assert flag.removeprefix("--") in script
    with pytest.raises(ArgumentError, match="unknown --print_completion 'basch'"):
        check_choice("--print_completion", "basch", SHELLS)


def test_a_command_advises_commands():
    problem = ArgumentError("it has gates: prune_heads or fold_heads them first, or leave it out with sites=")
    said = "it has gates: collab-heads prune or collab-heads fold them first, or leave it out with --sites"
    assert main.in_words(problem) == said


def test_quiet_is_no_part_of_the_work(monkeypatch):
    seen = []
    monkeypatch.setattr("collab_heads.base.progress.is_watched", lambda: True)
    monkeypatch.setattr("collab_heads.command.work.run_inspect", lambda args: seen.append(is_progress_bar_enabled()))
    enable_progress_bar()
    try:
        for flags in ((), ("--quiet",)):
            commands.run("inspect", "bert", *flags)
    finally:
        disable_progress_bar()
    assert seen == [True, False]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.slow
def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    asked = [sys.executable, "-c", INTERRUPTED, "inspect", "bert"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "collab-heads: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    "given, spins", (({}, "20000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "7"}, "7"))
)
def test_threads_of_the_command_leave_the_cores_to_others_unless_they_are_told(given, spins, monkeypatch):
    """Before torch is imported, which reads it then."""
    looked = []
    monkeypatch.setattr(command_start.os, "environ", dict(given))
    monkeypatch.setattr(command_start, "is_command", lambda *_: True)
    monkeypatch.setattr(command_start, "change_handler", lambda *_: None)
    seen = SimpleNamespace(look=lambda argv: looked.append(os.environ.get("GOMP_SPINCOUNT")))
    monkeypatch.setattr(command_start, "import_module", lambda name: seen)
    command_start.start_command()
    assert looked == [spins]
