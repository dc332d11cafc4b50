"""Whatever a flag is given, the command takes it or says in one line what is wrong."""

import pytest
from slow_cases import slow

from collab_heads import CollabHeadsError
from collab_heads.command import main
from collab_heads.errors import LONGEST

VALUES = ("", "nan", "inf", "-1", "1e400", "1" * 5000, "x" * 300, "\udcff", "\0", "/nowhere/at/all", "[]", "a=b", "=")
NEEDED = {
    "inspect": ["bert"],
    "compress": ["bert", "--data", __file__, "--plan"],
    "shrink": ["bert", "--data", __file__, "--output_dir", "new"],
    "swap": ["bert", "--output_dir", "new"],
    "prune": ["bert", "--output_dir", "new"],
    "trim": ["bert", "--data", __file__, "--output_dir", "new"],
    "export": ["bert", "--output_dir", "new"],
    "encode": ["bert", __file__, "--output", "new.npy"],
    "generate": ["bert", __file__, "--output", "new.txt"],
    "evaluate": ["bert", "bert", "--task", "similarity", "--data", __file__],
    "fold": ["bert", "--output_dir", "new"],
    "analyze": ["bert", "--data", __file__, "--output_dir", "new"],
    "glue": ["--model_name_or_path", "bert", "--task_name", "mrpc"],
    "translate": ["--model_name_or_path", "marian", "--train_file", __file__, "--validation_file", __file__],
    "images": ["--model_name_or_path", "vit", "--train_dir", ".", "--validation_dir", "."],
}


TRAININGS = ("glue", "translate", "images")  # import what trains


@pytest.mark.parametrize("name", [*(name for name in main.COMMANDS if name not in TRAININGS), *slow(*TRAININGS)])
def test_no_flag_ends_in_a_traceback(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    raw = []
    main.read([name, *NEEDED[name]])  # what is needed is right
    for flag in main.flags_of(main.parser(name)):
        for value in VALUES if flag != "--help" else ():
            try:
                main.read([name, *NEEDED[name], flag, value])
            except CollabHeadsError as error:
                if not 10 < len(str(error)) <= LONGEST:
                    raw.append(f"{flag} {value!r:.20}: {len(str(error))} characters: {error!s:.200}")
            except (Exception, SystemExit) as error:
                raw.append(f"{flag} {value!r:.20}: {type(error).__name__}: {error!s:.200}")
    assert not raw, "\n".join(raw)
