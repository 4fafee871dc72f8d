"""In-process engine over Hugging Face transformers' continuous batching."""
