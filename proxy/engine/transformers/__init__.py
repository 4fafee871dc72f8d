"""The in-process engine over the continuous batching of Hugging Face transformers."""
