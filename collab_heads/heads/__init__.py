"""Gates, alphas, and the ranking, removal and folding of heads."""
