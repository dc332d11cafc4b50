"""What the pages show of the command is taken by it; the examples of docs/command.md run, on tiny models."""

import json
import re
import shlex
import shutil

import commands
import pytest
import torch
from model_configs import rotary_config
from pages import PAGES
from transformers import AutoTokenizer, BertModel, LlamaConfig, LlamaForCausalLM
from translation_script import write_lines, write_pairs

import tiny
from collab_heads import swap_to_gated
from collab_heads.command import main

QUICK = {
    "--refine_steps": "2",
    "--samples": "16",
    "--examples": "0",
    "--max_source_length": "32",
    "--max_target_length": "32",
}


def lines_of(text):
    """The lines of `collab-heads` in what is shown as code, as words."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)) or text
    joined = re.sub(r"\\\n\s+", " ", blocks)
    found = re.findall(r"^ *(?:collab-heads|python -m collab_heads) (.+)$", joined, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


SHOWN = lines_of(PAGES["docs/command.md"].text)
OF_HELP = [line for name in main.COMMANDS for line in lines_of(main.COMMANDS[name].check.__doc__)]
OF_PAGES = [line for page in PAGES.values() for line in lines_of(page.text)]


@pytest.mark.parametrize("words", [*OF_HELP, *OF_PAGES], ids=" ".join)
def test_what_is_shown_is_taken(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("model: bert\ndata: text.txt\n")
    main.parser(words[0]).parse_args([word for word in words[1:] if word not in ("...", "…")])


def test_every_command_is_shown():
    assert {words[0] for words in SHOWN} == {words[0] for words in OF_HELP} == main.COMMANDS.keys()


@pytest.fixture
def names(bert, marian, files, tmp_path):
    """What the page names -> what there is here."""
    write_lines(tmp_path / "text.txt", [row["sentence1"] for row in tiny.rows(24, 1)])
    write_lines(tmp_path / "manuals.txt", [row["sentence2"] for row in tiny.rows(8, 2)])
    for split in ("dev", "train"):
        for file, end in zip(write_pairs(tmp_path, split, 16, 5), ("de", "en"), strict=True):
            (tmp_path / f"{split}.{end}").write_bytes((tmp_path / file).read_bytes())
    tiny.write_csv(tmp_path / "dev.csv", [row | {"score": number % 5} for number, row in enumerate(tiny.rows(16, 3))])
    for model, name in ((bert, "compressed"), (bert, "served"), (marian, "compressed-de-en"), (marian, "served-de-en")):
        shutil.copytree(model, tmp_path / name)
    tiny.write_modules(tmp_path / "served")
    gated = BertModel.from_pretrained(bert)
    swap_to_gated(gated)
    gated.save_pretrained(tmp_path / "gated")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "gated")
    torch.manual_seed(0)
    LlamaForCausalLM(rotary_config(LlamaConfig)).save_pretrained(tmp_path / "decoder")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "decoder")
    recipe = f"model: {bert}\ndata: text.txt\ntrim: true\nto: [onnx]\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    flags = dict(zip((flag.removeprefix("--") for flag in files[::2]), files[1::2], strict=True))
    flags |= {"model_name_or_path": str(bert), "collaborative": True, "dim_shared_query_key": {"enc-self": 16}}
    (tmp_path / "flags.json").write_text(json.dumps(flags | {"max_train_steps": 1, "calibration_samples": 8}))
    models = {"sentence-transformers/all-MiniLM-L6-v2": str(bert), "Helsinki-NLP/opus-mt-de-en": str(marian)}
    sizes = {"enc-self=256,dec-enc=0.5": "enc-self=16,dec-enc=0.5", "36": "4", "dec-enc=24": "dec-enc=2", "300": "2"}
    return models | sizes


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in SHOWN if "--demo" not in words], ids=" ".join)
def test_the_examples_run(words, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [names.get(word, word) for word in words]
    if words[1:2] == ["small"]:  # the examples before have written it
        words[1] = names["sentence-transformers/all-MiniLM-L6-v2"]
    if "--output_dir" in words:  # what a later example reads
        shutil.rmtree(words[words.index("--output_dir") + 1], ignore_errors=True)
    known = main.flags_of(main.parser(words[0]))
    quick = [part for flag, value in QUICK.items() if flag in known and flag not in words for part in (flag, value)]
    assert commands.run(*words, *quick) is not None
    if "--output_dir" in words:
        written = tmp_path / words[words.index("--output_dir") + 1]
        assert (written / "manifest.json").is_file() or (written / "report.json").is_file()
