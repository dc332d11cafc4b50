"""Weights on grids are stored packed, and load as they were, bit for bit."""

import copy
import json

import pytest
import torch
from compressing import batches_of
from model_runs import aligned, output
from safetensors.torch import load_file, save_file
from slow_cases import slow
from transformers import EncoderDecoderModel

from collab_heads import compress, export, fold_heads, model_card
from collab_heads.errors import ConfigError, LoadError
from collab_heads.layers.weight_grid import bits_of, on_grid
from collab_heads.model.site_size import num_bytes
from collab_heads.saving.marks import WEIGHTS, is_mark
from collab_heads.saving.ties import TIE, read_metadata
from collab_heads.sites.record import GRIDS
from families import FAMILIES

SOME = ("bert", "t5", "gpt2", *slow("marian", "qwen3", "bart", "clip", "albert", "opt", "esm"))


def small(name, budget=0.3, **options):
    """A model with weights of several bits."""
    model = FAMILIES[name].build().eval()
    compress(model, batches_of(FAMILIES[name]), budget, **{"bits": (8, 4, 3), "refine_steps": 0, **options})
    return model


def same(one, other, dtype=torch.float32):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(left.to(dtype), right) for (name, left), (again, right) in pairs)


def stored(folder):
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.mark.parametrize("name", SOME)
def test_a_model_is_stored_packed_and_loads_as_it_was(name, tmp_path):
    model = small(name)
    model.save_pretrained(tmp_path / "one")
    tensors = stored(tmp_path / "one")
    assert sum(each.nbytes for each in tensors.values()) == num_bytes(model)
    assert any(key.endswith("weight_codes") for key in tensors)
    again = type(model).from_pretrained(tmp_path / "one").eval()
    inputs = FAMILIES[name].inputs()
    assert same(model, again) and torch.equal(output(aligned(model), inputs), output(aligned(again), inputs))
    assert [(n, bits_of(m)) for n, m, _ in on_grid(again)] == [(n, bits_of(m)) for n, m, _ in on_grid(model)]
    assert all(parameter.is_floating_point() for parameter in again.parameters())
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_shards_and_other_dtypes(name, tmp_path):
    model = small(name)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(model, type(model).from_pretrained(tmp_path))
    for dtype in (torch.bfloat16, torch.float16):
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
        pairs = zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
        assert all(torch.equal(whole.to(each.dtype), each) for whole, each in pairs)


def test_what_is_trained_leaves_its_grid_and_is_stored_in_full(tmp_path, caplog):
    model = small("bert")
    first, second = [module for _, module, _ in on_grid(model)][-2:]
    with torch.no_grad():
        first.weight.mul_(1.0001)
    model.save_pretrained(tmp_path)
    assert "stored in full, since they have left their grids" in caplog.text
    again = type(model).from_pretrained(tmp_path)
    assert same(model, again)
    names = {module: name for name, module in model.named_modules()}
    assert bits_of(again.get_submodule(names[first])) is None and bits_of(again.get_submodule(names[second]))


def test_once_nothing_is_on_a_grid_the_model_is_stock(tmp_path):
    model = small("bert", parts=())
    model.save_pretrained(tmp_path / "packed")
    assert getattr(model.config, GRIDS) and TIE in read_metadata(tmp_path / "packed/model.safetensors")
    assert is_mark(json.loads((tmp_path / "packed/config.json").read_text())[WEIGHTS])  # stock refuses it
    with torch.no_grad():
        for _, module, _ in on_grid(model):
            module.weight.mul_(1.0001)
    model.save_pretrained(tmp_path / "full")
    assert GRIDS not in json.loads((tmp_path / "full/config.json").read_text())
    assert TIE not in read_metadata(tmp_path / "full/model.safetensors")


@pytest.mark.slow
def test_weights_and_config_belong_together(tmp_path):
    model = small("bert", parts=())
    model.save_pretrained(tmp_path / "packed")
    FAMILIES["bert"].build().save_pretrained(tmp_path / "stock")
    config = tmp_path / "packed/config.json"
    whole = json.loads(config.read_text())
    bits = whole[GRIDS]
    for wrong, said in (
        (None, "does not belong to its config"),
        ({**bits, next(iter(bits)): 3 if bits[next(iter(bits))] != 3 else 4}, "does not belong to its config"),
        ({next(iter(bits)): 5}, "must name bits"),
        ([4], "must name bits"),
    ):
        config.write_text(json.dumps({key: each for key, each in (whole | {GRIDS: wrong}).items() if each is not None}))
        with pytest.raises(ConfigError, match=said):
            type(model).from_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("damage", ["codes", "scales", "narrow"])
def test_damaged_codes_are_refused(damage, tmp_path):
    model = small("bert", parts=())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, said = load_file(file), read_metadata(file)
    name = next(key for key in tensors if key.endswith("weight_codes"))
    if damage == "narrow":
        tensors[name] = tensors[name][:, :-4].contiguous()
    else:
        del tensors[name if damage == "codes" else name.replace("codes", "scales")]
    save_file(tensors, file, dict(said))
    with pytest.raises(RuntimeError):
        type(model).from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_part_of_the_model_loads_from_the_files_of_the_whole(tmp_path):
    model = small("clip")
    model.save_pretrained(tmp_path)
    text = type(FAMILIES["clip-text"].build()).from_pretrained(tmp_path)
    own, whole = (
        {key.removeprefix("text_model."): weight for key, weight in each.state_dict().items()} for each in (text, model)
    )
    shared = own.keys() & whole.keys()
    assert len(shared) > 20 and all(torch.equal(own[key], whole[key]) for key in shared)


@pytest.mark.slow
def test_a_stock_checkpoint_and_a_card(tmp_path):
    model = small("bert", 0.12, shape="uniform")
    before = copy.deepcopy(model.state_dict())
    assert "stored in" in str(model_card(model))
    export(model, tmp_path / "stock", to="transformers")
    assert GRIDS not in json.loads((tmp_path / "stock/config.json").read_text())
    assert not any("codes" in key for key in stored(tmp_path / "stock"))
    assert all(torch.equal(each, model.state_dict()[key]) for key, each in before.items())
    assert any(bits_of(module) for module in model.modules())
    fold_heads(model)
    model.save_pretrained(tmp_path / "folded")
    assert same(model, type(model).from_pretrained(tmp_path / "folded"))


@pytest.mark.slow
def test_trainer_loads_the_files_of_a_checkpoint(tmp_path):
    """It reads them with `load_state_dict`, not strictly: what it does not know would stay as it is."""
    model = small("gpt2")
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    told = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert same(model, other) and not told.unexpected_keys
    assert [bits_of(module) for _, module, _ in on_grid(other)] == [bits_of(module) for _, module, _ in on_grid(model)]


@pytest.mark.slow
def test_codes_without_their_scales_are_named(tmp_path):
    model = small("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    halves = {name: each for name, each in tensors.items() if not name.endswith("weight_scales")}
    with pytest.raises(LoadError, match="the scales of these codes lie in another file"):
        model.load_state_dict(halves, strict=False)


@pytest.mark.slow
def test_a_state_that_is_given_is_packed_where_it_is_that_of_the_model(tmp_path):
    model = small("bert")
    model.save_pretrained(tmp_path / "own")
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=state)
    assert stored(tmp_path / "own").keys() == stored(tmp_path / "given").keys()
    state = {name: each + 1 for name, each in state.items() if each.is_floating_point()}
    model.save_pretrained(tmp_path / "other", state_dict=state)
    assert not any(name.endswith("weight_codes") for name in stored(tmp_path / "other"))


@pytest.mark.slow
def test_a_save_that_cannot_pack_says_so(tmp_path, caplog):
    model = small("bert")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "a save of this kind packs none" in caplog.text
    assert GRIDS not in json.loads((tmp_path / "config.json").read_text())
    assert same(model, type(model).from_pretrained(tmp_path))


@pytest.mark.slow
def test_models_that_share_a_config_keep_their_own(tmp_path):
    model = small("bert", parts=())
    other = type(model)(model.config)
    model.save_pretrained(tmp_path / "packed")
    assert hasattr(model.config, GRIDS) and not hasattr(other.config, GRIDS)
    other.save_pretrained(tmp_path / "other")
    assert hasattr(model.config, GRIDS)


@pytest.mark.parametrize("name", ["xlm-roberta-decoder", *slow("bart", "t5")])
def test_a_weight_that_modules_share_has_one_name(name, tmp_path):
    """It is marked in all of them after `compress`, and in one after a load."""
    model = small(name)
    model.save_pretrained(tmp_path / "one")
    again = type(model).from_pretrained(tmp_path / "one")
    assert num_bytes(again) == num_bytes(model)
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "two/config.json").read_bytes()


@pytest.mark.slow
def test_nan_among_the_scales_is_refused(tmp_path):
    model = small("bert", parts=())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, said = load_file(file), read_metadata(file)
    name = next(key for key in tensors if key.endswith("weight_scales"))
    tensors[name][0, :2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    save_file(tensors, file, dict(said))
    with pytest.raises(RuntimeError):
        type(model).from_pretrained(tmp_path)


def test_fields_and_attributes_of_others_stay(tmp_path):
    model = FAMILIES["bert"].build()
    model.config.weight_bits = 4
    model.weight_bits = 4
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.weight_bits == 4


def test_a_model_that_was_folded_is_a_stock_checkpoint(tmp_path, caplog):
    model = small("bert", parts=("heads", "neurons"))
    fold_heads(model)
    assert "weights of few bits are stored in full from now on" in caplog.text
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {GRIDS, WEIGHTS} & config.keys()
    assert not any(name.endswith("weight_codes") for name in stored(tmp_path))


def test_bits_of_a_config_inside_that_holds_no_longer_are_dropped(tmp_path):
    """An encoder that was packed stands in a model of half precision, of which nothing lies on a grid."""
    encoder, whole = FAMILIES["bert"].build().bert, FAMILIES["bert"].build().config
    encoder.config = whole
    whole.collab_heads_bits = {"encoder.layer.0.attention.self.query": 4}
    decoder = FAMILIES["xlm-roberta-decoder"].build()
    EncoderDecoderModel(encoder=encoder, decoder=decoder).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert GRIDS not in config["encoder"] and WEIGHTS not in config and WEIGHTS not in config["encoder"]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda codes, scales: (codes[0, 0], scales), r"weight_codes \[\] torch.uint8 are no rows of bytes"),
        (lambda codes, scales: (codes.long() + 256, scales), r"weight_codes .* torch.int64 are no rows of bytes"),
        (lambda codes, scales: (codes, scales[:, :-1]), "weight_scales .* are no rows of bytes"),
        (lambda codes, scales: (codes[:-1], scales), ""),
    ],
)
def test_a_state_with_codes_that_are_none_names_the_weight(change, said, tmp_path):
    model = small("bert", parts=())
    model.save_pretrained(tmp_path)
    state = stored(tmp_path)
    stem = next(name for name in state if name.endswith("weight_codes")).removesuffix("_codes")
    state[f"{stem}_codes"], state[f"{stem}_scales"] = change(state[f"{stem}_codes"], state[f"{stem}_scales"])
    with pytest.raises(LoadError, match=f"^{stem}: {said}"):
        FAMILIES["bert"].build().load_state_dict(state)


def test_codes_of_what_the_model_lacks_are_unexpected(tmp_path):
    """As weights are: `strict=False` passes them over."""
    model = small("bert", parts=())
    model.save_pretrained(tmp_path)
    state = stored(tmp_path)
    lost = {f"other.{name}": each for name, each in state.items() if name.endswith(("codes", "scales"))}
    found = FAMILIES["bert"].build().load_state_dict(state | lost, strict=False)
    assert set(found.unexpected_keys) == lost.keys()
