"""Gates, alphas, removal and folding of heads, and which heads matter."""
