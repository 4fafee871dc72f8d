"""What the model sees of an image: the model's own processor, its tokens and tensors. Needs the extra `images`."""
