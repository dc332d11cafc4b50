"""Texts that a model reads and no user writes: their tokens stay when a vocabulary is trimmed."""

import json

import commands
import pytest
import torch
from tokenizers_made import FEW, TEXTS, WORDS, fast
from transformers import AutoTokenizer, BertModel, LlamaConfig, LlamaForCausalLM
from trimming import bert, states, tokens_of

from collab_heads import trim_vocabulary
from collab_heads.vocabulary.needed_ids import own_texts

ROLES = ["system", "developer", "user", "assistant", "tool"]
DEFAULT = "You are a helpful assistant"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<s>system\n" + DEFAULT + "</s>{% endif %}"
    "{% if tools %}Functions that may help:{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}"
    "{% if message.tool_calls %}calling{% endif %}<s>{{ message.role }} says {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant"
    "{% if enable_thinking %}pondering{% else %}nothing thought{% endif %}{% endif %}"
)
SAID = [
    "Functions that may help: calling nothing thought pondering says",
    *ROLES,
    DEFAULT,
    "Today is December July May",
]


@pytest.fixture
def chatting():
    """A language model whose tokenizer has the words of its chat template as whole tokens."""
    tokenizer = fast("byte-level BPE", [*TEXTS, *(f"{text} {text}\n" for text in [*SAID, " ".join(SAID)] * 9)])
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).eval(), tokenizer


def chats(tokenizer, **more):
    """Return the tokens of conversations of each form."""
    talks = [
        [{"role": "user", "content": FEW[0]}],
        [{"role": "system", "content": FEW[1]}, {"role": "user", "content": FEW[0]}],
        [{"role": "user", "content": FEW[0]}, {"role": "assistant", "content": FEW[2]}],
        [
            {"role": "user", "content": FEW[0]},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "a"}}]},
            {"role": "tool", "content": FEW[2]},
        ],
    ]
    return [
        tokenizer.convert_ids_to_tokens(
            tokenizer.apply_chat_template(talk, return_dict=True, add_generation_prompt=asks, **more)["input_ids"]
        )
        for talk in talks
        for asks in (False, True)
    ]


def test_chats_are_read_as_before(chatting):
    model, tokenizer = chatting
    switches = {}, {"enable_thinking": True}, {"tools": [{"type": "function", "function": {"name": "a"}}]}
    expected = [chats(tokenizer, **each) for each in switches]
    made, report = trim_vocabulary(model, tokenizer, FEW)
    assert [chats(made, **each) for each in switches] == expected
    assert report.own_texts == ("chat template",) and 10 < report.own_tokens
    assert f"the model reads it itself: chat template ({report.own_tokens} tokens that the texts" in str(report)
    assert report.changed_tokens == 0 and report.to_dict()["own_texts"] == ["chat template"]


def test_dates_and_several_templates(chatting):
    model, tokenizer = chatting
    dated = "Today is {{ strftime_now('%d %B %Y') }}{{ messages[0].content }}"
    tokenizer.chat_template = {"default": TEMPLATE, "dated": dated}
    kept, _ = trim_vocabulary(model, tokenizer, FEW)
    for text in ("Today is 31 December", "Today is 24 July", " May"):
        assert tokens_of(kept, [text]) == tokens_of(tokenizer, [text])
    assert {each.where for each in own_texts(model, tokenizer, "a")} == {"chat template"}


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% if", "{{ nothing.at.all }}"])
def test_a_template_that_cannot_be_written_changes_nothing(chatting, template):
    model, tokenizer = chatting
    tokenizer.chat_template = template
    _, report = trim_vocabulary(model, tokenizer, FEW)
    assert report.own_texts == () and report.own_tokens == 0 and "itself" not in str(report)


def test_prompts_of_a_sentence_encoder_stay(tmp_path):
    first, last = (sorted(set(" ".join(TEXTS).split()) - set(" ".join(FEW).split()))[each] for each in (0, -1))
    for name in ("Unigram", "byte-level BPE"):
        tokenizer, folder = fast(name), tmp_path / name
        bert(tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        prompts = {"query": f"{first}: ", "passage": f"{last} - ", "none": "", "damaged": 3}
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
        given = [*FEW, *WORDS[-20:]]  # behind a space, these words are other tokens
        texts = [prompts[prompt] + text for prompt in ("query", "passage") for text in given]
        model = BertModel.from_pretrained(folder).eval()
        expected = states(model, tokenizer, texts)
        made, report = trim_vocabulary(model, AutoTokenizer.from_pretrained(folder), given)
        assert report.own_texts == ("prompt 'query'", "prompt 'passage'")
        assert tokens_of(made, texts) == tokens_of(tokenizer, texts)
        assert torch.equal(states(model, made, texts), expected)
    for damaged in ("[]", "{", '{"prompts": ["a"]}'):
        (folder / "config_sentence_transformers.json").write_text(damaged)
        assert not own_texts(BertModel.from_pretrained(folder), tokenizer, "a")
    (tmp_path / "modules.json").write_text("[]")  # an older folder, which has the model in one of its own
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert len(own_texts(BertModel.from_pretrained(folder), tokenizer, "a")) == 2


def test_texts_count_as_a_sentence_encoder_reads_them(tmp_path):
    """It may lower-case them before the tokenizer, also in an older folder."""
    tokenizer, folder = fast("WordPiece"), tmp_path / "model"
    bert(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _, expected = trim_vocabulary(bert(tokenizer), tokenizer, FEW)
    shouted = [text.upper() for text in FEW]
    for place in (folder, tmp_path):
        (tmp_path / "modules.json").write_text("[]")
        file = place / "sentence_bert_config.json"
        file.write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
        made, report = trim_vocabulary(BertModel.from_pretrained(folder), tokenizer, shouted)
        assert (report.tokens_after, report.changed_tokens) == (expected.tokens_after, 0)
        assert tokens_of(made, FEW) == tokens_of(tokenizer, FEW)
        file.unlink()
    _, report = trim_vocabulary(BertModel.from_pretrained(folder), tokenizer, shouted)
    assert report.tokens_after < expected.tokens_after


def test_prefixes_in_configs_stay_whatever_else_goes():
    tokenizer = fast("WordPiece")
    model, others = bert(tokenizer), [word for word in " ".join(TEXTS).split() if word not in " ".join(FEW)][:4]
    model.config.task_specific_params = {"translation": {"prefix": others[0], "max_length": 300}}
    model.config.prompts, model.config.prefix, model.config.query_instruction = {"a": others[1]}, None, [others[2]]
    model.config.id2label, model.config.label2id = {0: "prefix"}, {"prefix": 0}
    model.config.prefix_projection = True
    expected = {"task_specific_params.translation.prefix", "prompts", "query_instruction"}
    assert {each.where for each in own_texts(model, tokenizer, "a")} == expected
    made, report = trim_vocabulary(model, tokenizer, FEW, min_count=50)
    assert {*report.own_texts} == expected and report.changed_tokens > 0
    assert tokens_of(made, others[:3]) == tokens_of(tokenizer, others[:3])


def test_the_command_takes_a_prefix(tmp_path):
    tokenizer = fast("byte-level BPE", [*TEXTS, *["summarise this: summarise this:"] * 20])
    bert(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(FEW))
    flags = ("trim", tmp_path / "model", "--data", tmp_path / "texts.txt", "--output_dir")
    texts = ["summarise this: " + text for text in FEW]
    commands.run(*flags, tmp_path / "with", "--source_prefix", "summarise this: ")
    commands.run(*flags, tmp_path / "without")
    expected, found, without = (
        tokens_of(each, texts)
        for each in (tokenizer, *(AutoTokenizer.from_pretrained(tmp_path / name) for name in ("with", "without")))
    )
    assert found == expected != without
