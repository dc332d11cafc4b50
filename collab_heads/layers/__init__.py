"""Modules that replace stock ones in a model. They depend on tensors and on the stored state only."""
