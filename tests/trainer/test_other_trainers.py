"""Classes made from Trainer: with generation, of sentence-transformers, of TRL."""

import pytest
import torch
from datasets import Dataset
from trainers import BATCH, QUIET, STEPS, exact, examples, gated, same_weights
from transformers import AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

import tiny
from collab_heads import inspect, prune_heads, swap_to_gated
from collab_heads.errors import ArgumentError
from collab_heads.training import HeadTraining
from families import FAMILIES

pytestmark = pytest.mark.slow

PAIRS = [{"input_ids": each["input_ids"], "labels": each["input_ids"][::-1]} for each in examples()]


def arguments(kind, folder, **more):
    batches = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    return kind(
        str(folder), num_train_epochs=2, learning_rate=1e-3, **{**batches, "save_strategy": "no", **QUIET, **more}
    )


def assert_goes_on(build, folder, **more):
    """The number of heads is exact, and a resumed training ends in the same weights; `build` makes a Trainer."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    unbroken = build(**saving, **more)
    unbroken.train()
    again = build(**saving, **more)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert unbroken.state.global_step == STEPS
    assert same_weights(again.model, unbroken.model) == []
    model = unbroken.head_training.model
    assert inspect(model).gates.open == 3
    return unbroken


def test_with_generation(tmp_path):
    def build(**more):
        model = gated(FAMILIES["marian"].build())
        args = arguments(
            Seq2SeqTrainingArguments, tmp_path, predict_with_generate=True, generation_max_length=8, **more
        )
        metrics = {"compute_metrics": lambda prediction: {"length": prediction.predictions.shape[1]}}
        trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS[:8], **metrics)
        return exact().attach(trainer)

    trainer = assert_goes_on(build, tmp_path, eval_strategy="epoch")
    assert any(each.get("eval_length") for each in trainer.state.log_history)


def sentences(count):
    """Pairs of sentences of the same half of a vocabulary."""
    rows = tiny.rows(count, 0)
    return Dataset.from_list([{"anchor": each["sentence1"], "positive": each["sentence2"]} for each in rows])


def test_of_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    bert = tiny.save_tiny_bert(tmp_path / "bert")

    def build(heads=None, **more):
        model = library.SentenceTransformer(str(bert), device="cpu")
        swap_to_gated(model[0].auto_model)
        args = arguments(library.SentenceTransformerTrainingArguments, tmp_path, **more)
        trainer = library.SentenceTransformerTrainer(
            model=model, args=args, train_dataset=sentences(40), loss=losses.MultipleNegativesRankingLoss(model)
        )
        return (heads or exact()).attach(trainer)

    trainer = assert_goes_on(build, tmp_path)
    prune_heads(trainer.model[0].auto_model)
    trainer.save_model(str(tmp_path / "small"))
    again = library.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    kept = [again.encode("w1 w2 w3"), trainer.model.encode("w1 w2 w3")]
    torch.testing.assert_close(*map(torch.as_tensor, kept), rtol=0, atol=1e-6)
    with pytest.raises(ArgumentError, match="the losses of a SentenceTransformer may take several"):
        build(HeadTraining(disagreement=0.1))


def test_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    data = Dataset.from_list([{"input_ids": each["input_ids"]} for each in examples()])
    tokenizer = tiny.save_tiny_bert(tmp_path / "bert")

    def build(**more):
        args = arguments(trl.SFTConfig, tmp_path, max_length=16, **{**more, "bf16": False})
        words = AutoTokenizer.from_pretrained(tokenizer)
        words.eos_token = "[SEP]"
        trainer = trl.SFTTrainer(
            model=gated(FAMILIES["gpt2"].build()), args=args, train_dataset=data, processing_class=words
        )
        return exact().attach(trainer)

    assert_goes_on(build, tmp_path)
