"""Sentence encoders: their graphs put out embeddings, as sentence-transformers computes them; files are checked."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from later import Later
from model_sizes import VOCABULARY
from scipy.stats import spearmanr
from slow_cases import slow
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import tiny
from collab_heads import compress, evaluate, export, load_exported, trim_vocabulary
from collab_heads.errors import ArgumentError, CollabHeadsError, DataError, ModelStateError, UnsupportedModelError
from collab_heads.evaluation.task import Limits
from collab_heads.evaluation.tasks import Retrieval
from collab_heads.files.reading import MAX_FIELD
from collab_heads.saving.card import NAME
from collab_heads.serving import export as exports
from collab_heads.serving.export import TARGETS
from collab_heads.serving.sentence_encoder import POOLINGS, Pooling, is_sentence_encoder, sentence_encoder
from collab_heads.serving.served_card import served_card
from collab_heads.serving.text_reader import EMBEDDING, TextReader, read_texts
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
pytest.importorskip("sentence_transformers")

sentence_transformers = Later("sentence_transformers")
modules = Later("sentence_transformers.sentence_transformer.modules")
EMBEDDING_NOISE = 1e-5  # of embeddings of length 1, in float32 in another engine; seen: 3e-7
LONGEST = 8  # tokens of a text
TEXTS = ["w5 w9 w20", "w7", "", "w31 w8 w15 w60 w12 w3 w44 w9 w10 w11 w12 w13 w14", "W20 w9 w5 w50", "w4 w6"]


def store(folder, pooling="mean", prompts=None):
    """A sentence encoder of words w0 to w60 as sentence-transformers saves it; w3 and w4 stand around a text."""
    base, words = (
        folder.parent / "transformer",
        Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w3")),
    )
    FAMILIES["bert"].build().bert.save_pretrained(base)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("w3 $A w4", special_tokens=[("w3", 3), ("w4", 4)])
    named = {"pad_token": "w1", "unk_token": "w3", "model_input_names": tiny.INPUTS}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(base)
    transformer = modules.Transformer(str(base), max_seq_length=LONGEST, do_lower_case=True)
    pool = modules.Pooling(transformer.get_embedding_dimension(), pooling)
    torch.manual_seed(0)
    dense = modules.Dense(pool.get_embedding_dimension(), 40)
    parts = [transformer, pool, dense, modules.Normalize()]
    made = sentence_transformers.SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    made.save_pretrained(str(folder))
    return folder


def embedder(folder, **options):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", **options)


def exported(source, folder, to="onnx", **options):
    model = AutoModel.from_pretrained(source).eval()
    return export(model, folder, to, tokenizer=AutoTokenizer.from_pretrained(source), **options)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return store(tmp_path_factory.mktemp("encoder") / "all poolings", tuple(POOLINGS))


@pytest.fixture(scope="module")
def in_onnx(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "onnx"
    exported(encoder, folder)
    return folder


@pytest.mark.parametrize("left", (False, True))
@pytest.mark.parametrize("mode", POOLINGS)
def test_poolings_are_those_of_sentence_transformers(mode, left):
    generator, mask = torch.Generator().manual_seed(0), torch.ones(3, 7, dtype=torch.long)
    states = torch.randn(3, 7, 12, generator=generator)
    mask[1, slice(4) if left else slice(-4, None)] = 0
    features = {"token_embeddings": states, "attention_mask": mask}
    expected = modules.Pooling(12, mode)(features)["sentence_embedding"]
    found = Pooling({"embedding_dimension": 12, "pooling_mode": mode}, 12)(states, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # sums of another order


@pytest.mark.parametrize("to", ("onnx", "ctranslate2", *slow("openvino")))
def test_encode_is_that_of_sentence_transformers(to, encoder, in_onnx, tmp_path):
    folder = in_onnx
    if to != "onnx":
        exported(encoder, folder := tmp_path / to, to)
    served, expected = load_exported(folder, threads=1), embedder(encoder).encode(TEXTS)
    for batch_size in (32, 2):
        found = served.encode(TEXTS, batch_size)
        assert found.dtype == np.float32 and found.shape == (len(TEXTS), 40)
        np.testing.assert_allclose(found, expected, rtol=0, atol=EMBEDDING_NOISE)
    if to == "ctranslate2":  # whose folder has the modules beside the model
        np.testing.assert_array_equal(embedder(folder, trust_remote_code=True).encode(TEXTS, batch_size=2), found)
    assert served.reader(TEXTS)["input_ids"].shape == (len(TEXTS), LONGEST)  # cut
    assert served.encode([]).shape == (0, 40)
    batch = served.reader(TEXTS)
    with torch.no_grad():
        states = AutoModel.from_pretrained(encoder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(served(**batch).last_hidden_state[mask], states[mask], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("to", ("onnx", "ctranslate2"))
def test_evaluate_scores_the_embeddings_of_the_encoder(to, encoder, in_onnx, tmp_path):
    folder = in_onnx
    if to != "onnx":
        exported(encoder, folder := tmp_path / to, to)
    texts = [f"w{5 + number} w{9 + number % 3}" for number in range(12)]
    rows = [{"sentence1": a, "sentence2": b, "score": n % 4} for n, (a, b) in enumerate(itertools.pairwise(texts))]
    original, served = evaluate(str(encoder), folder, task="similarity", data=rows).models
    vectors = embedder(encoder).encode(texts)  # of length 1
    expected = spearmanr((vectors[:-1] * vectors[1:]).sum(-1), [row["score"] for row in rows]).statistic
    assert original.scores["Spearman"] == pytest.approx(100 * expected, abs=1e-3)
    assert served.scores["Spearman"] == pytest.approx(100 * expected, abs=1e-3) and served.flips == 0
    masked = shutil.copytree(encoder, tmp_path / "masked")  # its config names a class with a head
    edited("config.json", architectures=["BertForMaskedLM"], return_dict=False)(masked)
    headed = evaluate(str(encoder), {"masked": str(masked)}, task="similarity", data=rows).models[1]
    assert headed.scores["Spearman"] == pytest.approx(100 * expected, abs=1e-3) and headed.flips == 0


def test_a_text_is_cut_to_the_positions_of_the_model_whatever_the_folder_says(encoder):
    config, said = AutoConfig.from_pretrained(encoder), read_texts(encoder)
    most = config.max_position_embeddings
    for longest, expected in ((10 * most, most), (LONGEST, LONGEST)):
        read = TextReader(encoder, said._replace(max_seq_length=longest), config)(["w5 " * 5 * most])
        assert read["input_ids"].shape[1] == expected
    config.max_position_embeddings = -1  # of relative positions
    unlimited = TextReader(encoder, said._replace(max_seq_length=10 * most), config)
    assert unlimited(["w5 " * 5 * most])["input_ids"].shape[1] == 5 * most + 2


@pytest.mark.slow
def test_evaluate_reads_texts_as_the_folder_says(encoder, in_onnx, tmp_path):
    """Prompts, lower case, the longest text and the columns that count, of a checkpoint and of an export."""
    texts = [text for text in TEXTS if text]
    source, folder = shutil.copytree(encoder, tmp_path / "source"), shutil.copytree(in_onnx, tmp_path / "served")
    (folder / "manifest.json").unlink()
    prompts = {"query": "w9 w20 ", "passage": "w5 ", "usual": "w8 "}
    for each in (source, folder):
        edited("config_sentence_transformers.json", prompts=prompts, default_prompt_name="usual", truncate_dim=9)(each)
        edited("sentence_bert_config.json", do_lower_case=True, max_seq_length=LONGEST - 2)(
            each
        )  # as of older versions
    tokenizer, rows = AutoTokenizer.from_pretrained(source), []
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])  # as where only the settings say lower case
    models = AutoModel.from_pretrained(source).eval(), load_exported(folder, threads=1)
    for kinds, name in (((), "usual"), (("query",), "query"), (("document", "passage"), "passage")):
        expected = embedder(source).encode(texts, prompt_name=name, normalize_embeddings=True)
        for model, prefix in itertools.product(models, ("", prompts[name])):
            task = Retrieval([texts, texts], "data", Limits(2, 64, prefix))
            with torch.no_grad():
                found = task.embedded(model, tokenizer, texts, *([] if prefix else kinds)).numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=EMBEDDING_NOISE)
        rows.append(expected)
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(rows, 2)) > 10 * EMBEDDING_NOISE
    assert tokenizer("W5")["input_ids"] != tokenizer("w5")["input_ids"]  # the caller's is as it was
    data = [{"query": a, "passage": b} for a, b in itertools.pairwise(texts)]
    usual, ranked = evaluate(source, folder, task="retrieval", data=data, tokenizer=tokenizer).models
    places = (rows[1][:-1] @ rows[2][1:].T).argsort(-1)[:, ::-1]
    gains = [1 / np.log2(2 + list(row).index(number)) for number, row in enumerate(places)]
    assert usual.scores["nDCG@10"] == pytest.approx(100 * np.mean(gains)) and ranked.scores == usual.scores
    for each in (source, folder):
        edited("config_sentence_transformers.json", prompts={"usual": "w" * (MAX_FIELD + 1)})(each)
    with pytest.raises(DataError, match=r"config_sentence_transformers\.json, column 'usual': .* characters"):
        evaluate(source, source, task="retrieval", data=data)


def test_text_embeddings_inference_can_read_the_folder(in_onnx):
    """Its rules (router/src/lib.rs, backends/ort/src/lib.rs): what it parses, what it feeds, which output it takes."""
    import onnxruntime

    config, texts, pooling = (
        json.loads((in_onnx / name).read_text())
        for name in ("config.json", "sentence_bert_config.json", "1_Pooling/config.json")
    )
    numbers = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "pad_token_id")
    assert all(type(config[name]) is int for name in numbers) and isinstance(config["model_type"], str)
    assert config["architectures"] and not any(name.endswith("Classification") for name in config["architectures"])
    assert type(texts["max_seq_length"]) is int
    flags = [
        pooling[f"pooling_mode_{name}"] for name in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    ]
    assert all(type(flag) is bool for flag in flags) and any(flags[:2])
    tokenizer, session = (
        Tokenizer.from_file(str(in_onnx / "tokenizer.json")),
        onnxruntime.InferenceSession(in_onnx / "model.onnx"),
    )
    tokenizer.enable_truncation(texts["max_seq_length"])
    tokenizer.no_padding()
    rows = [tokenizer.encode(text) for text in TEXTS]
    fed = {"input_ids": config["pad_token_id"], "attention_mask": 0, "token_type_ids": 0}
    values = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    longest = max(len(row.ids) for row in rows)
    batch = {
        name: np.array([(each := getattr(row, values[name])) + [fill] * (longest - len(each)) for row in rows])
        for name, fill in fed.items()
    }
    assert {each.name for each in session.get_inputs()} <= set(fed)
    (found,) = session.run(["sentence_embedding"], {each.name: batch[each.name] for each in session.get_inputs()})
    np.testing.assert_allclose(found, load_exported(in_onnx, threads=1).encode(TEXTS), rtol=0, atol=EMBEDDING_NOISE)


def test_a_tokenizer_outside_of_the_folder_is_refused(in_onnx, tmp_path):
    folder = shutil.copytree(in_onnx, tmp_path / "linked")
    (folder / "manifest.json").unlink()
    (folder / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match=r"tokenizer\.json leads out of the folder"):
        load_exported(folder).encode(TEXTS)


@pytest.mark.slow
def test_a_model_is_called_as_before_once_it_is_exported(encoder, tmp_path):
    model = AutoModel.from_pretrained(encoder).eval()
    export(model, tmp_path / "served")
    assert "forward" not in vars(model)
    assert not (tmp_path / "served/modules.json").exists()  # without a tokenizer nothing reads texts
    assert "encode(" not in (tmp_path / "served/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("to", ("onnx", "openvino"))
@pytest.mark.parametrize("bits", (8, 4))
def test_embeddings_of_few_bits(bits, to, encoder, tmp_path):
    """Weights on grids embed as in PyTorch; in integers they are near to it."""
    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
    texts = [f"w{i} w{i + 1} w{60 - i}" for i in range(5, 50)]
    batches = [tokenizer(texts[start : start + 9], return_tensors="pt", padding=True) for start in range(0, 45, 9)]
    compress(model, batches, 0.9, bits=bits, parts=(), refine_steps=0)
    model.save_pretrained(tmp_path / "few")
    export(model, tmp_path / "served", to, tokenizer=tokenizer)
    served, expected = load_exported(tmp_path / "served"), embedder(tmp_path / "few").encode(TEXTS)
    np.testing.assert_allclose(served.encode(TEXTS), expected, rtol=0, atol=EMBEDDING_NOISE)
    export(model, tmp_path / "int8", to, tokenizer=tokenizer, int8=True)
    cosine = (load_exported(tmp_path / "int8").encode(TEXTS) * expected).sum(1)
    assert cosine.min() > 0.98, cosine  # seen: 0.996


@pytest.mark.slow
def test_a_trimmed_encoder(tmp_path):
    """Its config would bring modules and a card along, as any save of it does."""
    source, texts = tiny.write_modules(tiny.save_tiny_bert(tmp_path / "source")), ["w5 w9 w20", "w7", "w1 w2 w3"]
    small, _ = trim_vocabulary(model := AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source), texts)
    model.save_pretrained(tmp_path / "small")
    small.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "1_Pooling" / "weights.bin").write_bytes(b"large")
    exported(tmp_path / "small", tmp_path / "served")
    found, expected = load_exported(tmp_path / "served").encode(texts), embedder(source).encode(texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=EMBEDDING_NOISE)
    assert [file.name for file in (tmp_path / "served" / "1_Pooling").iterdir()] == ["config.json"]
    assert "## Vocabulary" in (tmp_path / "served" / "README.md").read_text()


def test_prompts(encoder, in_onnx, tmp_path):
    prompts = {"query": "w9 w10 ", "none": ""}
    source, folder = shutil.copytree(encoder, tmp_path / "prompts"), shutil.copytree(in_onnx, tmp_path / "served")
    (folder / "manifest.json").unlink()
    for each in (source, folder):
        file = each / "config_sentence_transformers.json"
        said = json.loads(file.read_text()) | {"prompts": prompts, "default_prompt_name": "query", "truncate_dim": 5}
        file.write_text(json.dumps(said))
    served, expected = load_exported(folder), embedder(source)
    for name in (None, "none", "query"):
        found = served.encode(TEXTS, prompt_name=name)
        np.testing.assert_allclose(found, expected.encode(TEXTS, prompt_name=name), rtol=0, atol=EMBEDDING_NOISE)
    with pytest.raises(ArgumentError, match=r"unknown prompt_name 'quer' \(did you mean 'query'\?\)"):
        served.encode(TEXTS, prompt_name="quer")


def test_texts_of_no_tokens(in_onnx):
    """Of a tokenizer that puts nothing around a text: engines fail on a batch without tokens."""
    served = load_exported(in_onnx)
    served.reader.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A")
    assert served.reader([""])["attention_mask"].tolist() == [[0]]
    assert served.encode([""]).shape == (1, 40)


def test_what_has_no_embeddings(in_onnx, folder, tmp_path):
    with pytest.raises(ModelStateError, match=r"this bert puts out no sentence_embedding.*a modules\.json"):
        load_exported(folder).encode(TEXTS)
    for wrong in ("w5", [5], [["w5", "w6"]]):
        with pytest.raises(ArgumentError, match="texts must be a list of texts"):
            load_exported(in_onnx).encode(wrong)
    bare = shutil.copytree(in_onnx, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "manifest*"))
    with pytest.raises(ModelStateError, match="has no tokenizer: export with tokenizer="):
        load_exported(bare).encode(TEXTS)


def test_a_model_with_a_head_is_no_sentence_encoder(encoder, tmp_path):
    from transformers import BertForSequenceClassification

    assert not is_sentence_encoder(BertForSequenceClassification.from_pretrained(encoder))
    shutil.copytree(encoder, tmp_path / "cross")
    settings = tmp_path / "cross" / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"model_type": "CrossEncoder"}))
    assert not is_sentence_encoder(AutoModel.from_pretrained(tmp_path / "cross"))


@pytest.mark.slow
def test_the_check_of_an_export_covers_embeddings(encoder, tmp_path, monkeypatch):
    """The engine's are another model's: also in eight bits, where little else would be an error."""
    target, load = TARGETS["onnx"], TARGETS["onnx"].load

    def wrong(model, folder):
        served = load(model, folder)
        return lambda **inputs: served(**inputs) | {EMBEDDING: torch.zeros_like(served(**inputs)[EMBEDDING])}

    monkeypatch.setattr(target, "load", wrong)
    with pytest.raises(ModelStateError, match=r"in onnx differs from PyTorch by 1 of its largest output"):
        exported(encoder, tmp_path / "served", int8=True)
    assert not list(tmp_path.iterdir())


def edited(file, **changes):
    def edit(source):
        (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | changes))

    return edit


def module(number, **changes):
    def edit(source):
        listed = json.loads((source / "modules.json").read_text())
        listed[number] |= changes
        (source / "modules.json").write_text(json.dumps(listed))

    return edit


def pickled(folder):
    return lambda source: (source / folder / "model.safetensors").rename(source / folder / "pytorch_model.bin")


def cut(file):
    return lambda source: (source / file).write_bytes((source / file).read_bytes()[:-9])


POOL, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
WRONG = {  # what the message says -> an edit of the folder
    r"a graph cannot hold the module hostile\.Pooling, but Pooling, Dense, Normalize": module(
        1, type="hostile.Pooling"
    ),
    r"a graph cannot hold the module sentence_transformers\.models\.LSTM": module(
        1, type="sentence_transformers.models.LSTM"
    ),
    r"holds Transformer, Normalize, Dense, Normalize: a graph takes": module(
        1, type="sentence_transformers.models.Normalize"
    ),
    r"leads out of .*: put the file itself there": module(1, path="../elsewhere"),
    r"pooling_mode is 'median', expected of cls, max, mean": edited(POOL, pooling_mode="median"),
    r"pooling_mode is \[\], expected": edited(POOL, pooling_mode=[]),
    r"include_prompt is False, expected true": edited(POOL, include_prompt=False),
    r"embedding_dimension of the pooling is 31": edited(POOL, embedding_dimension=31),
    r"the config of the pooling has unknown entries \['loader'\]": edited(POOL, loader="hostile"),
    r"activation_function is 'os\.system', expected one of torch\.nn": edited(DENSE, activation_function="os.system"),
    r"activation_function is 'torch\.hub\.load'": edited(DENSE, activation_function="torch.hub.load"),
    r"in_features is 5, expected 192": edited(DENSE, in_features=5),
    r"the shapes of the weights is .*, expected .*\(60000, 192\)": edited(DENSE, out_features=60_000),
    r"use_residual is True, expected false": edited(DENSE, use_residual=True),
    r"module_input_name is 'token_embeddings', expected 'sentence_embedding'": edited(
        DENSE, module_input_name="token_embeddings"
    ),
    r"2_Dense has no model\.safetensors, and pickles are not read: save it again": pickled("2_Dense"),
    r"2_Dense: ": cut("2_Dense/model.safetensors"),
    r"1_Pooling: ": cut(POOL),
    r"processing_kwargs is .*, expected \{\}, or none": edited(
        "sentence_bert_config.json", processing_kwargs={"text": {"max_length": 4}}
    ),
    r"module_output_name is 'x', expected 'token_embeddings', or none": edited(
        "sentence_bert_config.json", module_output_name="x"
    ),
    r"sentence_bert_config\.json has unknown entries \['x'\]": edited("sentence_bert_config.json", x=1),
    r"max_seq_length is -1, expected a size": edited("sentence_bert_config.json", max_seq_length=-1),
    r"default_prompt_name is 'x', expected the name of a prompt": edited(
        "config_sentence_transformers.json", default_prompt_name="x"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_graph_cannot_hold_is_refused_before_any_work(message, encoder, tmp_path, monkeypatch):
    source = shutil.copytree(encoder, tmp_path / "source")
    WRONG[message](source)
    monkeypatch.setattr(exports, "example_inputs", lambda model: pytest.fail("the work has begun"))
    with pytest.raises((DataError, UnsupportedModelError), match=message) as raised:
        exported(source, tmp_path / "served")
    assert isinstance(raised.value, CollabHeadsError) and not (tmp_path / "served").exists()


def test_folders_of_older_versions(encoder, tmp_path):
    """Flags for poolings, other names of classes; the order of poolings is that of the flags."""
    source = shutil.copytree(encoder, tmp_path / "source")
    width = json.loads((source / POOL).read_text())["embedding_dimension"]
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    (source / POOL).write_text(json.dumps({"word_embedding_dimension": width, **flags}))
    listed = json.loads((source / "modules.json").read_text())[:2]
    for each in listed:
        each["type"] = f"sentence_transformers.models.{each['type'].rpartition('.')[2]}"
    (source / "modules.json").write_text(json.dumps(listed))
    found = sentence_encoder(AutoModel.from_pretrained(source))
    assert found.steps[0].modes == ("cls", "mean") and found.texts.max_seq_length in (None, LONGEST)


def test_sentence_transformers_loads_an_export(encoder, in_onnx, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code=True"):  # it loads no class of another package without
        embedder(in_onnx)
    model, expected = embedder(in_onnx, trust_remote_code=True), embedder(encoder).encode(TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS), expected, rtol=0, atol=EMBEDDING_NOISE)
    assert (model.max_seq_length, model.get_embedding_dimension()) == (LONGEST, 40)
    assert [len(each) for each in model.encode(TEXTS[:2], output_value="token_embeddings")] == [5, 3]
    model.save_pretrained(str(tmp_path / "again"))
    again = embedder(tmp_path / "again", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(TEXTS), expected, rtol=0, atol=EMBEDDING_NOISE)
    with pytest.raises(ArgumentError, match="the model reads texts"):
        model.encode([("w5", "w6")])


def code_of(folder):
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text().replace(NAME, str(folder)), re.DOTALL)


@pytest.mark.parametrize("to", ("onnx", *slow("openvino"), "transformers"))
def test_the_code_of_a_card_runs(to, encoder, in_onnx, tmp_path):
    """All of its Python embeds a sentence, but what only loads the transformer."""
    folder, results = in_onnx if to == "onnx" else tmp_path / to, []
    if to != "onnx":
        exported(encoder, folder, to)
    for code in code_of(folder):
        exec(code, seen := {})
        results += [seen["embeddings"]] if "embeddings" in seen else []
    expected = embedder(encoder).encode(["A sentence."])
    assert len(results) == (1 if to == "transformers" else 3)
    for each in results:
        np.testing.assert_allclose(each, expected, rtol=0, atol=EMBEDDING_NOISE)


def test_a_card_may_be_edited(folder, tmp_path):
    served = shutil.copytree(folder, tmp_path / "served")
    (served / "README.md").write_text("mine")
    assert load_exported(served).config.model_type == "bert"
    assert [code.strip().splitlines()[-1] for code in code_of(folder)] == [
        "# model(**inputs), as in transformers",
        "outputs = session.run(None, named)",
    ]


NO_CARDS = [("gguf", "marian"), ("transformers.js", "marian")]  # refused before
OF_CARDS = [(name, to) for name in ("bert", "gpt2", "marian") for to in TARGETS if (to, name) not in NO_CARDS]


@pytest.mark.parametrize(("name", "to"), OF_CARDS)
def test_each_card_names_a_reader(name, to):
    text = served_card(FAMILIES[name].build(), to, "the report", False)
    assert text.startswith("---\n") and "### " in text and f"tags:\n- collab-heads\n- {to}\n" in text
    assert text.endswith("## What was exported\n\n```text\nthe report\n```\n")


@pytest.mark.parametrize("to", ["onnx", "openvino", "executorch", "transformers.js", "ctranslate2"])
def test_a_card_tokenizes_no_image_and_no_sound(to):
    for name in ("vit", "clip", "wav2vec2", "whisper"):
        text = served_card(FAMILIES[name].build(), to, "the report", False)
        assert "AutoTokenizer" not in text and "A sentence." not in text and "Translator" not in text
        alone = to == "ctranslate2" or (name == "whisper" and to != "transformers.js")
        assert alone or "AutoProcessor" in text
        assert ("ctranslate2.models.Whisper(" in text) == (name == "whisper" and to == "ctranslate2")


def test_a_stock_checkpoint_embeds_as_its_original(encoder, tmp_path):
    exported(encoder, tmp_path / "stock", "transformers")
    found, expected = (embedder(folder).encode(TEXTS) for folder in (tmp_path / "stock", encoder))
    np.testing.assert_allclose(found, expected, rtol=0, atol=EMBEDDING_NOISE)


@pytest.mark.slow
def test_without_this_package_it_says_what_to_install(in_onnx):
    code = (
        "import sys; sys.modules['collab_heads'] = None; from sentence_transformers import SentenceTransformer; "
        f"SentenceTransformer({str(in_onnx)!r}, device='cpu', trust_remote_code=True)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ImportError: this model needs collab_heads: install the package collab_heads" in found.stderr
    assert "pip install collab" not in found.stderr  # the name is on no package index; bitsandbytes names others
