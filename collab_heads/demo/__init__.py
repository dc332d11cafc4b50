"""A small pretrained model and generated corpora, for examples and tests that need no network."""

from collab_heads.demo.bilingual import corpus
from collab_heads.demo.english import sentences
from collab_heads.demo.models import model_folder, translation_model
from collab_heads.demo.paraphrases import pairs
from collab_heads.demo.python_docs import documentation

__all__ = ["corpus", "documentation", "model_folder", "pairs", "sentences", "translation_model"]
