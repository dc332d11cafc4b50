"""Learn, mix and rotate heads in a training of a transformers Trainer."""
