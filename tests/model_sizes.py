"""Sizes of the tiny models, tolerances, and the kinds of projection that the contract runs over."""

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, LAYERS = 61, 32, 4, 8, 2


KEY_HEADS = 2  # where heads share them


EXACT = HEADS * HEAD_WIDTH


EXACT64 = 1e-11  # float64 sums in another order; errors seen: 4e-14 and below


FP32_NOISE = 2e-5  # the same in float32; errors seen: 3e-6


IMAGE, PATCH = 12, 4  # pixels


MEL, FRAMES, SAMPLES = 8, 10, 50  # of audio: bins of a spectrum, frames that attend (Whisper), samples of a wave


KINDS = ("shared", "per_head")


# The same with narrower values, and those alone; what depends on the values runs over these.
WITH_VALUES = ("stock+values", "shared+values", "per_head+values")


NARROW = {"shared": 20, "per_head": 16, "stock+values": 16, "shared+values": 20, "per_head+values": 16}  # of EXACT


NARROW_VALUES = 16  # of EXACT


TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}


END = VOCABULARY - 1  # of the texts that CLIP reads
