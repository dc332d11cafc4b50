"""The options of trainings as flags: declared once, in light modules, and checked before anything long is imported."""
