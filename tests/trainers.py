"""Tiny trainings with transformers' Trainer."""

import random

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

import collab_heads.training
from collab_heads import swap_to_alpha, swap_to_gated

WORDS, EXAMPLES, EPOCHS, BATCH = 60, 40, 2, 8
STEPS = EPOCHS * EXAMPLES // BATCH
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 2}


def classifier(dropout=0.1):
    """A random BERT: 2 layers, width 32, 4 heads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    more = {"intermediate_size": 48, "max_position_embeddings": 32, "initializer_range": 0.1}
    return BertForSequenceClassification(BertConfig(**sizes, **more, **drop))


def examples(count=EXAMPLES, seed=0):
    """Sentences whose label is the half of the vocabulary that they are from; all of the same length."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        label = chance.randrange(2)
        words = [chance.randrange(30 * label, 30 * label + 30) for _ in range(7)]
        found.append({"input_ids": words, "attention_mask": [1] * 7, "labels": label})
    return found


def gated(model):
    swap_to_gated(model)
    return model


def mixed(model):
    swap_to_alpha(model)
    return model


def adapted(model):
    """A model with random adapters on queries and values, whose gates and alphas train."""
    import peft

    torch.manual_seed(1)
    lora = peft.LoraConfig(target_modules=["query", "value"], r=2, lora_dropout=0.1, modules_to_save=["classifier"])
    wrapped = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if name.endswith(("log_alpha", ".alpha")):
            parameter.requires_grad_(True)
    return wrapped


def trainer_of(model, folder, heads=None, kind=None, **arguments):
    """A Trainer of a model, with a HeadTraining if there is one."""
    defaults = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3}
    args = transformers.TrainingArguments(str(folder), **{**defaults, "save_strategy": "no", **QUIET, **arguments})
    trainer = (kind or transformers.Trainer)(
        model=model, args=args, train_dataset=examples(), eval_dataset=examples(16, seed=1)
    )
    return trainer if heads is None else heads.attach(trainer)


def train(model, folder, heads=None, **arguments):
    """Train a model, and return it."""
    trainer_of(model, folder, heads, **arguments).train()
    return model


def same_weights(first, second):
    """Whether two models have the same weights, bit for bit; and the names of those that differ."""
    ours, theirs = first.state_dict(), second.state_dict()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def head_training(**options):
    return collab_heads.training.HeadTraining(**options)  # which imports transformers' Trainer


def exact(**options):
    """A HeadTraining to three heads, in half of the training."""
    return head_training(target_heads=3, steps=0.5, **options)
