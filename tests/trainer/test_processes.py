"""Two processes end as one: the penalty counts once, and heads change places alike."""

import pytest
import torch
from safetensors.torch import load_file
from scripts import forget_accelerate, run_on_two
from trainers import BATCH, classifier, exact, gated, head_training, mixed, trainer_of

from collab_heads.training import HeadRotation

pytestmark = pytest.mark.slow

ADAM32 = 5e-5  # float32 gradients summed in another order, magnified where Adam divides by small ones
KINDS = {
    "a target": (gated, exact),
    "alphas": (mixed, lambda: head_training(growth=0.05, alpha_start=2)),
    "a rule": (lambda model: model, lambda: head_training(rotation=HeadRotation(policy="local", exclude=()))),
}


def trained(kind, folder, batch):
    """Train and save, on as many processes as there are."""
    change, heads = KINDS[kind]
    model = change(classifier(0.0))
    trainer = trainer_of(model, folder, heads(), per_device_train_batch_size=batch)
    trainer.model_accepts_loss_kwargs = False  # transformers would add up the losses of processes, as for a decoder
    trainer.train()
    trainer.save_model()
    return trainer.args.world_size


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_end_as_one(kind, tmp_path):
    assert trained(kind, tmp_path / "one", BATCH) == 1
    forget_accelerate()

    def main(arguments):
        assert trained(kind, tmp_path / "two", BATCH // 2) == 2

    run_on_two(main, [])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(two[name], tensor, rtol=0, atol=ADAM32)
