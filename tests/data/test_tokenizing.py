"""Tokenized splits that several runs keep in one folder."""

from busy import busy
from datasets import Dataset

from collab_heads.data.tokenizing import TOKENIZED, tokenized_in


def test_a_split_is_kept_once_and_never_replaced_while_others_read_it(tmp_path):
    made = []

    def make():
        made.append(None)
        return Dataset.from_dict({"row": [1, 2]})

    def make_late():
        tokenized_in(tmp_path, "split", make)  # another run is faster
        made.append(kept.stat().st_ino)
        return make()

    kept = tmp_path / TOKENIZED / "split"
    with busy(kept):
        assert tokenized_in(tmp_path, "split", make)["row"] == [1, 2]
        assert not kept.exists()
    assert tokenized_in(tmp_path, "split", make_late)["row"] == [1, 2]
    assert kept.stat().st_ino == made[2]
    assert tokenized_in(tmp_path, "split", make)["row"] == [1, 2]
    assert len(made) == 4
    assert [path.name for path in kept.parent.iterdir()] == ["split"]
