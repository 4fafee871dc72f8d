"""The model's own processor, as `AutoProcessor` loads it from the model's folder. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError, how_to_get

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_LOADERS = {"image_processor": "AutoImageProcessor", "tokenizer": "AutoTokenizer"}


def load_processor(folder: Path) -> Any:
    """Return the processor of the model in `folder`. Raises ConfigurationError (one line) if there is none that loads.

    Without torchvision, which video processors require, the processor does not support videos, and Pillow scales the
    images.
    """
    try:
        import PIL  # noqa: F401
        import transformers
    except ImportError as error:
        how = how_to_get("tokengrove[images]")
        raise ConfigurationError(
            f"the model in {folder} sees images: the package {error.name} is missing; {how}"
        ) from None
    try:
        try:
            return transformers.AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except ImportError:
            return _without_videos(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"the processor of the model in {folder} cannot be loaded: {reason}") from error


def _without_videos(folder: Path) -> Any:
    import transformers

    kind = getattr(transformers, _class_name(folder))
    # The class requires a video processor.
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: type(value)})
    parts = {
        name: getattr(transformers, _LOADERS[name]).from_pretrained(folder, local_files_only=True)
        for name in kind.get_attributes()
        if name in _LOADERS
    }
    return lenient(**parts, video_processor=None)


def _class_name(folder: Path) -> str:
    for name in _FILES:
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text(encoding="utf-8")).get("processor_class")
            if named:
                return str(named)
    raise ValueError(f"none of {', '.join(_FILES)} names a processor_class")
