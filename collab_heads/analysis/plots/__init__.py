"""Pictures of heads, from plain numbers; they need matplotlib, `pip install matplotlib`.

Functions that draw return a matplotlib Figure, made without pyplot: nothing global changes, and no display is needed.
Animations are written to a file.
"""

from collab_heads.analysis.plots.attention_maps import attention_map
from collab_heads.analysis.plots.canvas import check_matplotlib, save_figure
from collab_heads.analysis.plots.contributions import contribution_curves, contribution_history, contribution_map
from collab_heads.analysis.plots.curves import budget_curve, importance_distributions, quality_curves, source_share
from collab_heads.analysis.plots.head_history import history_animation, history_curves, history_strip
from collab_heads.analysis.plots.head_maps import head_map, role_map
from collab_heads.analysis.plots.matrices import alpha_maps, matrix_maps

__all__ = [
    "alpha_maps",
    "attention_map",
    "budget_curve",
    "check_matplotlib",
    "contribution_curves",
    "contribution_history",
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
