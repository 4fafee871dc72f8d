"""In-process SGLang engine, and the values that SGLang exchanges (`wire`), which its HTTP server uses too."""
