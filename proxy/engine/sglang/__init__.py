"""The in-process SGLang engine, and the values that SGLang exchanges (`wire`), also over HTTP."""
