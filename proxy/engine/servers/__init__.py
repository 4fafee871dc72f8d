"""Engine servers over HTTP (SGLang, vLLM), pooled into one engine."""
