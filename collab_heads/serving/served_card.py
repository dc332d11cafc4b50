"""The card of an exported folder: what it is, and how each engine and server loads it."""

from dataclasses import dataclass
from typing import Any, cast

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from collab_heads.base.extras import INSTALL
from collab_heads.base.option_values import ExportTarget
from collab_heads.contract.registry import ctranslate2_form, get_adapter, is_lone_decoder
from collab_heads.running.batches import reads_texts_alone
from collab_heads.saving.card import ENCODERS, LIBRARY, NAME, TAG, VOCABULARY, base_of
from collab_heads.serving.graph_engines import ENGINES, EXACT
from collab_heads.sites.record import trimmed_vocabulary

EMBEDS, GENERATES, TRANSLATES, RUNS = "embeds", "generates", "translates", "runs"  # what models do
SEES, TRANSCRIBES = "sees", "transcribes"  # as runs and translates, but a processor of images or sound makes the inputs
EVERY = (EMBEDS, GENERATES, TRANSLATES, RUNS, SEES, TRANSCRIBES)
GRAPHS = cast(tuple[ExportTarget, ...], tuple(ENGINES))


@dataclass(frozen=True)
class Reader:
    """A program that loads an exported folder.

    Attributes:
        name: its name.
        targets: what it loads.
        does: the models that it runs, by what they do.
        code: how; a `language` and lines.
        language: of the code.
    """

    name: str
    targets: tuple[ExportTarget, ...]
    does: tuple[str, ...]
    code: str
    language: str = "python"


OURS = f"# {INSTALL}\nfrom collab_heads import load_exported\n\nmodel = load_exported('{NAME}')\n"
TOKENIZED = (
    "from transformers import AutoTokenizer\n\n"
    f"inputs = AutoTokenizer.from_pretrained('{NAME}')(['A sentence.'], padding=True, return_tensors='np')\n"
)
IN_ONNX = f"import onnxruntime\n{TOKENIZED}options = onnxruntime.SessionOptions()\n"
IN_ONNX += f"options.add_session_config_entry{EXACT}  # only without VNNI: sums of eight bits overflow\n"
IN_ONNX += f"session = onnxruntime.InferenceSession('{NAME}/model.onnx', options)\n"
IN_ONNX += "named = {each.name: inputs[each.name] for each in session.get_inputs()}\n"
IN_OPENVINO = (
    f"import openvino\n{TOKENIZED}"
    "precise = {'INFERENCE_PRECISION_HINT': 'f32'}\n"
    f"graph = openvino.Core().compile_model('{NAME}/openvino_model.xml', 'CPU', precise)\n"
    "outputs = graph({each.any_name: inputs[each.any_name] for each in graph.inputs})\n"
)
IN_EXECUTORCH = "import json\n\nfrom executorch.runtime import Runtime\n" + TOKENIZED.replace("='np'", "='pt'")
IN_EXECUTORCH += (
    f"with open('{NAME}/export.json') as file:\n"
    "    names = json.load(file)['components']['model']['metadata']['kwargs']  # in the order of the program\n"
    f"program = Runtime.get().load_program('{NAME}/model.pte').load_method('forward')\n"
    "outputs = program.execute([inputs[name] for name in names])\n"
)
CONTINUED_IN_EXECUTORCH = (
    "import torch\nfrom executorch.runtime import Runtime\nfrom transformers import AutoTokenizer\n\n"
    f"text = AutoTokenizer.from_pretrained('{NAME}')('Once')['input_ids']\n"
    f"program = Runtime.get().load_program('{NAME}/model.pte').load_method('forward')\n"
    "for step in range(16):  # it has a cache: a token is read once, at its place\n"
    "    new = text[-1:] if step else text  # 128 at a time, at most\n"
    "    places = torch.arange(len(text) - len(new), len(text))\n"
    "    text.append(int(program.execute([torch.tensor([new]), places])[0][0, -1].argmax()))"
)


def in_js(auto: str, code: str, options: str = 'dtype: "fp32"') -> str:
    """Return code for transformers.js, which loads tokenizer and model by an auto class; fp32 names the file alone."""
    return (
        f'import {{ {auto}, AutoTokenizer, env }} from "@huggingface/transformers";\n\n'
        'env.localModelPath = "";\n'
        f'const tokenizer = await AutoTokenizer.from_pretrained("{NAME}");\n'
        f'const model = await {auto}.from_pretrained("{NAME}", {{ {options} }});\n{code}'
    )


PROCESSED = f"from transformers import AutoProcessor\n\nprocessor = AutoProcessor.from_pretrained('{NAME}')\n"
PROCESSED += "inputs = processor(example, return_tensors='np')  # an image, or a sound\n"
JS_SEES = (
    f'import {{ {{architecture}}, AutoProcessor, env }} from "@huggingface/transformers";\n\n'
    'env.localModelPath = "";\n'
    f'const processor = await AutoProcessor.from_pretrained("{NAME}");\n'
    f'const model = await {{architecture}}.from_pretrained("{NAME}", {{ dtype: "{{dtype}}" }});\n'
    "const inputs = await processor(example);  // an image (RawImage.read), or a sound (read_audio)\n"
)
JS_EMBEDS = (
    'const inputs = await tokenizer(["A sentence."], { padding: true, truncation: true });\n'
    "const { sentence_embedding } = await model(inputs);"
)
JS_GENERATES = (
    'const inputs = await tokenizer("Once");\n'
    "const tokens = await model.generate({ ...inputs, max_new_tokens: 16 });\n"
    "const [text] = tokenizer.batch_decode(tokens, { skip_special_tokens: true });"
)
JS_TRANSLATES = (
    "// the tokenizer needs a tokenizer.json, which some families do not have\n"
    'const inputs = await tokenizer("A sentence.");\n'
    "const tokens = await model.generate({ ...inputs, max_new_tokens: 64, num_beams: 1 });  // it has no beams\n"
    "const [text] = tokenizer.batch_decode(tokens, { skip_special_tokens: true });"
)
JS_RUNS = 'const outputs = await model(await tokenizer("A sentence."));'
BY_CTRANSLATE2 = {EMBEDS: "Encoder", RUNS: "Encoder", GENERATES: "Generator", TRANSLATES: "Translator"}
BY_CTRANSLATE2 |= {TRANSCRIBES: "{transcriber}"}
READERS = (
    Reader(
        "collab_heads", (*GRAPHS, "ctranslate2", "gguf"), (EMBEDS,), f"{OURS}embeddings = model.encode(['A sentence.'])"
    ),
    Reader(
        "collab_heads",
        GRAPHS,
        (GENERATES, TRANSLATES, TRANSCRIBES),
        f"{OURS}# model.generate(**inputs), as in transformers",
    ),
    Reader("collab_heads", GRAPHS, (RUNS, SEES), f"{OURS}# model(**inputs), as in transformers"),
    Reader(
        "sentence-transformers",
        (*GRAPHS, "ctranslate2"),
        (EMBEDS,),
        f"# {INSTALL}, which runs the model\nfrom sentence_transformers import SentenceTransformer\n\n"
        f"embeddings = SentenceTransformer('{NAME}', trust_remote_code=True).encode(['A sentence.'])",
    ),
    Reader(
        "ONNX Runtime", ("onnx",), (EMBEDS,), f"{IN_ONNX}(embeddings,) = session.run(['sentence_embedding'], named)"
    ),
    *(
        Reader("ONNX Runtime", ("onnx",), (does,), f"{code}outputs = session.run(None, named)")
        for does, code in ((RUNS, IN_ONNX), (SEES, IN_ONNX.replace(TOKENIZED, PROCESSED)))
    ),
    Reader(
        "transformers.js (Node)",
        ("onnx",),
        (EMBEDS,),
        in_js("AutoModel", JS_EMBEDS, 'dtype: "fp32", subfolder: ""'),
        "js",
    ),
    *(
        Reader("transformers.js", ("transformers.js",), (does,), in_js(auto, code, 'dtype: "{dtype}"'), "js")
        for does, auto, code in (
            (EMBEDS, "AutoModel", JS_EMBEDS),
            (GENERATES, "AutoModelForCausalLM", JS_GENERATES),
            (TRANSLATES, "AutoModelForSeq2SeqLM", JS_TRANSLATES),
            (RUNS, "{architecture}", JS_RUNS),
        )
    ),
    *(
        Reader("transformers.js", ("transformers.js",), (does,), f"{JS_SEES}const outputs = await {call};", "js")
        for does, call in ((SEES, "model(inputs)"), (TRANSCRIBES, "model.generate(inputs)"))
    ),
    Reader(
        "text-embeddings-inference",
        ("onnx",),
        (EMBEDS,),
        f"text-embeddings-router --model-id {NAME}  # a folder",
        "bash",
    ),
    Reader("OpenVINO", ("openvino",), (EMBEDS,), f"{IN_OPENVINO}embeddings = outputs['sentence_embedding']"),
    Reader("OpenVINO", ("openvino",), (RUNS,), IN_OPENVINO.rstrip()),
    Reader("OpenVINO", ("openvino",), (SEES,), IN_OPENVINO.replace(TOKENIZED, PROCESSED).rstrip()),
    Reader("ExecuTorch", ("executorch",), (EMBEDS,), f"{IN_EXECUTORCH}embeddings = outputs[-1]"),
    Reader("ExecuTorch", ("executorch",), (RUNS,), IN_EXECUTORCH.rstrip()),
    Reader(
        "ExecuTorch",
        ("executorch",),
        (SEES,),
        IN_EXECUTORCH.replace(TOKENIZED.replace("='np'", "='pt'"), PROCESSED.replace("='np'", "='pt'")).rstrip(),
    ),
    Reader("ExecuTorch", ("executorch",), (GENERATES,), CONTINUED_IN_EXECUTORCH),
    *(
        Reader("CTranslate2", ("ctranslate2",), (does,), f"import ctranslate2\n\nmodel = ctranslate2.{kind}('{NAME}')")
        for does, kind in BY_CTRANSLATE2.items()
    ),
    Reader(
        "llama.cpp",
        ("gguf",),
        (GENERATES,),
        f"import llama_cpp\n\nmodel = llama_cpp.Llama('{NAME}/model.gguf')\n"
        "text = model('Once', max_tokens=16)['choices'][0]['text']\nmodel.close()",
    ),
    Reader(
        "llama.cpp",
        ("gguf",),
        (EMBEDS, RUNS),
        f"import llama_cpp\n\nmodel = llama_cpp.Llama('{NAME}/model.gguf', embedding=True)\n"
        "embedding = model.embed('A sentence.')  # normalize=True: of length 1\nmodel.close()",
    ),
    Reader(
        "sentence-transformers",
        ("transformers",),
        (EMBEDS,),
        "from sentence_transformers import SentenceTransformer\n\n"
        f"embeddings = SentenceTransformer('{NAME}').encode(['A sentence.'])",
    ),
    Reader(
        "transformers",
        ("transformers",),
        EVERY,
        f"import transformers\n\nmodel = transformers.{{architecture}}.from_pretrained('{NAME}')",
    ),
)


OF_LAYERS = """import json

import transformers
from {module} import {layer}

build = {layer}.__init__
{layer}.__init__ = lambda self, config, layer_idx: build(self, config.per_layer_config[layer_idx], layer_idx)
with open("{name}/config.json") as file:
    config = transformers.{config}(**json.load(file), allow_global_per_layer_attribute_access=True)
model = transformers.{architecture}.from_pretrained("{name}", config=config)"""


def layer_readers(model: PreTrainedModel) -> tuple[Reader, ...]:
    """Return what loads a checkpoint whose layers have sizes of their own: this package, or lines that build layers."""
    adapter, kind = get_adapter(model), type(model).__name__
    layer = type(model.base_model.get_submodule(adapter.layer_path(adapter.sites(model)[0].path)))
    names = {"module": layer.__module__, "layer": layer.__name__, "config": type(model.config).__name__}
    with_ours = f"import collab_heads  # {INSTALL}\nimport transformers\n\n"
    with_ours += f"model = transformers.{kind}.from_pretrained('{NAME}')"
    return (
        Reader("collab_heads", ("transformers",), EVERY, with_ours),
        Reader("transformers", ("transformers",), EVERY, OF_LAYERS.format(name=NAME, architecture=kind, **names)),
    )


def what_it_does(model: PreTrainedModel, is_encoder: bool) -> str:
    """Return what a model does, one of `EVERY`."""
    if is_encoder:
        return EMBEDS
    if not reads_texts_alone(model):
        return TRANSCRIBES if model.can_generate() else SEES
    if not model.can_generate():
        return RUNS
    return GENERATES if is_lone_decoder(model.config) else TRANSLATES


def served_card(
    model: PreTrainedModel,
    to: ExportTarget,
    report: object,
    is_encoder: bool,
    per_layer: bool = False,
    dtype: str = "fp32",
) -> str:
    """Return the text of the card of an exported folder.

    Args:
        model: the original.
        to: the target.
        report: of the export.
        is_encoder: whether the model is a sentence encoder, with a tokenizer.
        per_layer: whether its config gives layers sizes of their own.
        dtype: what transformers.js calls the numbers of its graphs.
    """
    base, trimmed, kind = base_of(model.config), trimmed_vocabulary(model.config), type(model).__name__
    library = ENCODERS if is_encoder and to != "gguf" and not per_layer else LIBRARY if to == "transformers" else to
    said: dict[str, Any] = {"library_name": library, **base, "tags": [TAG, to]}
    data = ModelCardData(**said)
    parts = [f"---\n{data.to_yaml()}\n---", f"# {base.get('base_model') or kind}, exported to {to} by collab_heads"]
    parts += [VOCABULARY.format(**trimmed)] if trimmed else []
    does = what_it_does(model, is_encoder)
    readers = layer_readers(model) if per_layer else READERS
    found = [each for each in readers if to in each.targets and does in each.does]
    parts += ["## Load it", *(part for each in found for part in (f"### {each.name}", fenced(each, model, dtype)))]
    return "\n\n".join([*parts, "## What was exported", f"```text\n{report}\n```"]) + "\n"


def fenced(reader: Reader, model: PreTrainedModel, dtype: str) -> str:
    """Return the code of a reader, fenced."""
    code, transcriber = reader.code, ctranslate2_form(model.config).transcriber
    names = {"architecture": type(model).__name__, "dtype": dtype, "transcriber": str(transcriber)}
    for name, value in names.items():
        code = code.replace(f"{{{name}}}", value)
    return f"```{reader.language}\n{code}\n```"
