"""Messages to token ids, and sampled ids back to messages. Sampled ids are never decoded and re-encoded.

The entry point is `load_renderer(settings, folder)`: it returns a `Renderer`, which renders conversations, bridges from
turn to the next, and parses outputs. `templates` renders, `parsing` and `tool_calls` read outputs.
"""

from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.renderer import Renderer, load_renderer

__all__ = ["OutputParser", "Renderer", "load_renderer"]
