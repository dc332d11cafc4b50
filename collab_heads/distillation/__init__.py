"""Label-free distillation of a changed model from its original."""
