"""Translation models from scratch: sizes, vocabulary, collaborative attention."""

import pytest
import torch
import translation_models as tiny
from later import run_translation
from model_runs import sites, swapped
from opening import record_of
from transformers import AutoModelForSeq2SeqLM

from collab_heads import CollabHeadsError
from collab_heads.contract.registry import blueprints
from collab_heads.data.batches import Collate
from collab_heads.data.translation import Objective, encode
from collab_heads.errors import ArgumentError
from collab_heads.training.runs.translation_model import untrained

CORPUS = tiny.data(train=300, validation=5)
SMALL = "--d_model 32 --num_layers 1 --num_heads 4 --d_ff 48 --vocab_size 90".split()
FILES = "--train_file a b --validation_file a b".split()
BOTH = pytest.mark.parametrize("model_type", blueprints())


def make(folder, *flags):
    args = run_translation.parse([*FILES, *map(str, flags)])
    torch.manual_seed(0)
    return untrained(args, CORPUS, folder)


@BOTH
def test_sizes_land_in_the_config(model_type, tmp_path):
    lengths = ("--max_source_length", 40, "--max_target_length", 30, "--val_max_target_length", 50)
    sizes = ("--d_model", 48, "--num_layers", 2, "--num_heads", 3, "--d_ff", 80, "--dropout", 0.25, "--vocab_size", 95)
    model, tokenizer = make(tmp_path, "--model_type", model_type, *sizes, *lengths)
    config = model.config
    assert config.model_type == model_type
    assert (config.d_model, config.vocab_size, len(tokenizer)) == (48, 95, 95)
    assert (len(model.get_encoder().layers if model_type == "marian" else model.encoder.block)) == 2
    assert (len(model.get_decoder().layers if model_type == "marian" else model.decoder.block)) == 2
    names = blueprints()[model_type].sizes
    wanted = {"d_model": 48, "num_layers": 2, "num_heads": 3, "d_head": 16, "d_ff": 80, "dropout": 0.25}
    wanted |= {"max_length": 50}
    assert {name: {getattr(config, own) for own in owns} for name, owns in names.items()} == {
        name: {wanted[name]} for name in names
    }
    padding = tokenizer.pad_token_id
    assert (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id) == (
        padding,
        padding,
        tokenizer.eos_token_id,
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@BOTH
def test_what_is_made_is_saved_and_learns(model_type, tmp_path):
    model, tokenizer = make(tmp_path / "new", "--model_type", model_type, *SMALL, "--dropout", 0)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    state = model.state_dict()
    assert [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, state[name])] == []
    examples = encode(CORPUS, tokenizer, "", 40, 40)["train"]
    batch = Collate(model, tokenizer.pad_token_id)([examples[i] for i in range(8)])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(40):
        losses.append(Objective()(model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("mixing, width", (("shared", 16), ("shared", 0.25), ("per_head", 16)))
@BOTH
def test_collaborative_from_scratch(model_type, mixing, width, tmp_path):
    more = ("--collaborative", "--kind", mixing, "--dim_shared_query_key", width)
    model, _ = make(tmp_path, "--model_type", model_type, *SMALL, *more)
    assert len(sites(model)) == 3
    assert all(swapped(model))
    states = [site.query_key for site in record_of(model).sites.values()]
    dim = {"shared": 8 if width == 0.25 else 16, "per_head": 16}[mixing]
    assert [(state.kind, state.dim) for state in states] == [(mixing, dim)] * 3
    plain, _ = make(tmp_path, "--model_type", model_type, *SMALL)
    assert model.num_parameters() < plain.num_parameters()


def test_only_some_sites_and_another_start(tmp_path):
    more = ("--collaborative", "--sites", "enc-self", "--mixing_init", "ones")
    model, _ = make(tmp_path, "--model_type", "marian", *SMALL, *more)
    assert swapped(model).count(True) == 1
    mixing = next(tensor for name, tensor in model.state_dict().items() if name.endswith("mixing"))
    assert (mixing == 1).all()


def test_a_config_and_a_tokenizer_of_ones_own(tmp_path):
    config = tiny.model("bart", size=500).config
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path / "config")
    tokenizer = tiny.tokenizer("marian", tmp_path / "tokenizer")
    flags = ("--config_name", tmp_path / "config", "--attn_implementation", "eager")
    model, found = make(tmp_path / "new", *flags, "--tokenizer_name", tmp_path / "tokenizer")
    assert found.get_vocab() == tokenizer.get_vocab()
    assert not (tmp_path / "new").exists()
    assert (model.config.model_type, model.config.vocab_size, model.config.encoder_ffn_dim) == ("bart", 90, 48)
    assert model.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(ArgumentError, match="unknown model type for a vocabulary from scratch 'bart'"):
        make(tmp_path / "new", *flags)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--model_type marian --d_model 30 --num_heads 4", "--d_model 30 is not a multiple of --num_heads 4"),
        ("--model_type t5 --d_model 30 --num_heads 4", "--d_model 30 is not a multiple of --num_heads 4"),
        ("--model_type marian --vocab_size 5000", "--vocab_size 5000: .* so many pieces"),
        ("--model_type marian --collaborative --dim_shared_query_key 300", "300"),
        ("--model_type marian --collaborative --sites enc-sefl", "did you mean 'enc-self'"),
        ("--config_name /nowhere", "cannot load AutoConfig from '/nowhere'"),
    ),
)
def test_what_cannot_be_made_is_refused(flags, message, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        make(tmp_path / "new", *["--vocab_size", "90", *flags.split()])


def test_a_config_whose_sizes_do_not_fit_is_refused(tmp_path):
    config = tiny.model("bart").config
    config.d_model = 30
    config.save_pretrained(tmp_path / "config")
    tiny.tokenizer("marian", tmp_path / "tokenizer")
    with pytest.raises(ArgumentError, match=r"no bart of these sizes: .*30"):
        make(tmp_path, "--config_name", tmp_path / "config", "--tokenizer_name", tmp_path / "tokenizer")
