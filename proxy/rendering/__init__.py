"""Messages to token ids and sampled ids back to messages; what was sampled is never decoded and encoded again.

`load_renderer(settings, folder)` is the only way in: it gives a `Renderer`, which renders, bridges and parses.
"""

from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.renderer import Renderer, load_renderer

__all__ = ["OutputParser", "Renderer", "load_renderer"]
