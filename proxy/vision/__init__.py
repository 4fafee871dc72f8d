"""Images as the model sees them: the model's own processor, its tokens and tensors. Needs the extra `images`."""
