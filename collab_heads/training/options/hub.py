"""Upload of the final model to the Hub: checked before training, done after everything is saved."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.errors import ArgumentError, OutputError
from collab_heads.saving.card import README, model_card
from collab_heads.saving.marks import is_changed


def repository(args: Namespace) -> str:
    """Return the repository that the flags name, or the name of the output folder."""
    return args.hub_model_id or Path(args.output_dir).resolve().name


def check_hub(args: Namespace) -> None:
    """Check the name and the token of `--push_to_hub` before hours of training; do nothing without that flag.

    Only the upload shows if the token may write to the repository; the model is saved by then.
    """
    if not args.push_to_hub:
        return
    name = repository(args)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        flag = "--hub_model_id" if args.hub_model_id else "--push_to_hub takes the name of --output_dir,"
        raise ArgumentError(f"{flag} {name!r}: {error} Give --hub_model_id NAME or OWNER/NAME") from error
    if is_offline_mode():
        raise ArgumentError("--push_to_hub: HF_HUB_OFFLINE is set: unset it, or upload later with `hf upload`")
    token = args.hub_token or get_token()
    if token is None:
        raise ArgumentError("--push_to_hub needs a token: run `hf auth login` first, or set HF_TOKEN")
    try:
        HfApi(token=token).whoami()
    except Exception as error:  # whatever the network and the Hub raise
        reason = str(error).strip().split("\n")[0]
        raise ArgumentError(f"--push_to_hub: the Hub knows no such token, or cannot be reached: {reason}") from error


def push(
    args: Namespace,
    model: PreTrainedModel,
    preparer: PreTrainedTokenizerBase | BaseImageProcessor,
    metrics: Mapping[str, float],
) -> None:
    """Upload the model, its tokenizer or image processor, and the card of a changed one if `--push_to_hub` is given."""
    if not args.push_to_hub:
        return
    name = repository(args)
    try:
        pushed = model.push_to_hub(name, token=args.hub_token)  # type: ignore[arg-type]  # its decorator hides `self`
        preparer.push_to_hub(name, token=args.hub_token)
        if is_changed(model.config):
            push_card(model, metrics, pushed.repo_url.repo_id, args.hub_token)
    except Exception as error:  # whatever the network and the Hub raise
        raise OutputError(
            f"the run is complete and saved in {args.output_dir}; uploading it failed: {error}; once that is mended: "
            f"hf upload {name} {args.output_dir}"
        ) from error


def push_card(model: PreTrainedModel, metrics: Mapping[str, float], name: str, token: str | None) -> None:
    """Complete the card of the uploaded model with its changes and metrics, and upload it again."""
    card = model_card(model, metrics=metrics, name=name, card=ModelCard.load(name, token=token))
    HfApi(token=token).upload_file(path_or_fileobj=str(card).encode("utf-8"), path_in_repo=README, repo_id=name)
