"""Pictures of heads, from plain numbers; they need matplotlib, `pip install matplotlib`.

Functions that draw return a matplotlib Figure, made without pyplot: nothing global changes, and no display is needed.
Animations are written to a file.
"""

from collab_heads.plots.canvas import check_matplotlib, save_figure
from collab_heads.plots.curves import budget_curve, importance_distributions, quality_curves, source_share
from collab_heads.plots.head_maps import alpha_maps, head_map, matrix_maps, role_map
from collab_heads.plots.history import history_animation, history_curves, history_strip
from collab_heads.plots.token_maps import attention_map, contribution_map

__all__ = [
    "alpha_maps",
    "attention_map",
    "budget_curve",
    "check_matplotlib",
    "contribution_map",
    "head_map",
    "history_animation",
    "history_curves",
    "history_strip",
    "importance_distributions",
    "matrix_maps",
    "quality_curves",
    "role_map",
    "save_figure",
    "source_share",
]
