"""The images of exports: checks the options that this server can fulfil, and reads each image when an encoder wants it.

Images are read from the database one at a time, without the image cache of turns, which a large export would flush.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from proxy.export_formats.image_table import ImageEntry, WantedImage
from proxy.images.decode import decode_image
from proxy.rendering import Renderer
from proxy.store.stored_images import StoredImages
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import PositionsOf
from proxy.types import ImageFile
from proxy.vision.sample_inputs import SampleInputs, load_sample_inputs
from tokengrove.errors import ConfigurationError, NotFound, UnsupportedParameter
from tokengrove.options.export import ExportFormat, Images

_FIELD = "multi_modal_inputs"


class ExportImages:
    """Reads images. `stored`: the images of all sessions. `renderer`: of the model, with images for a vision model."""

    def __init__(self, stored: StoredImages, renderer: Renderer) -> None:
        self._stored, self._renderer = stored, renderer
        self._inputs: SampleInputs | None = None
        self._loading = asyncio.Lock()

    def over(self, stored: StoredImages) -> ExportImages:
        """These, with other stored images."""
        other = copy(self)
        other._stored = stored
        return other

    async def prepared(self, options: LayoutOptions, name: ExportFormat) -> LayoutOptions:
        """Return the options with the model's placeholders, and with `auto` replaced by its value for the model.

        Raises UnsupportedParameter for `multi_modal_inputs` that the server, the model or the format does not support.
        """
        options = replace(options, placeholders=self._renderer.placeholders)
        if options.multi_modal_inputs is False:
            return options
        if self._renderer.images is None:
            if options.multi_modal_inputs == "auto":
                return replace(options, multi_modal_inputs=False)
            why = self._renderer.blind or "this server's model sees no images"
            raise UnsupportedParameter(f"'{_FIELD}': {why}; leave it out, or give \"auto\"", param=_FIELD)
        _check_together(options, name)
        inputs = await self._load()
        return replace(options, multi_modal_inputs=True, mrope=inputs.three)

    def positions(self, options: LayoutOptions) -> PositionsOf | None:
        """The position rule for samples with these prepared options; None if they have no positions."""
        return self._inputs.positions if options.mrope and self._inputs is not None else None

    async def read(self, wanted: WantedImage, options: LayoutOptions) -> ImageEntry:
        """Return an image. Raises NotFound if it was deleted with its last session since the samples were made."""
        found = await self._stored.read([wanted.digest])
        if not found:
            raise NotFound(f"the image {wanted.digest} was deleted while this export ran; export again")
        if not options.multi_modal_inputs or self._inputs is None:
            return ImageEntry(found[0], {})
        return await asyncio.to_thread(_entry, found[0], wanted.details, self._inputs)

    async def _load(self) -> SampleInputs:
        async with self._loading:
            if self._inputs is None:
                assert self._renderer.images is not None
                processor = self._renderer.images.vision
                try:
                    self._inputs = await asyncio.to_thread(load_sample_inputs, processor)
                except ConfigurationError as error:
                    raise UnsupportedParameter(f"'{_FIELD}': {error}", param=_FIELD) from error
        return self._inputs


def _entry(file: ImageFile, details: Sequence[str], inputs: SampleInputs) -> ImageEntry:
    image = decode_image(file.data)
    return ImageEntry(file, {detail: inputs.arrays(image, detail) for detail in details})


def _check_together(options: LayoutOptions, name: ExportFormat) -> None:
    if options.images is Images.NONE:
        raise UnsupportedParameter(
            f"'{_FIELD}' needs the places of images: leave out 'images', or give references or bytes", param=_FIELD
        )
    if options.outline:
        raise UnsupportedParameter(f"'{_FIELD}' does not work with 'outline', which has no arrays", param=_FIELD)
    if name is ExportFormat.PARQUET:
        raise UnsupportedParameter(
            f"'{_FIELD}' does not work with format parquet, whose rows would have gigabytes each; use npz, "
            "safetensors, arrow or json",
            param=_FIELD,
        )
