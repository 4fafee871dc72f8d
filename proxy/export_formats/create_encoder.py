"""Create the encoder of a format."""

from __future__ import annotations

from proxy.export_formats.areal import ArealEncoder
from proxy.export_formats.arrow import ArrowEncoder, ParquetEncoder
from proxy.export_formats.encoder import Encoder
from proxy.export_formats.image_table import ImageTable
from proxy.export_formats.npz import NpzEncoder
from proxy.export_formats.safetensors import SafetensorsEncoder
from proxy.export_formats.text import JsonEncoder, JsonlEncoder
from proxy.trajectory.columns import columns_of, side_names, text_labels
from proxy.trajectory.layout_options import LayoutOptions
from tokengrove.options.export import ExportFormat


def encoder(name: ExportFormat, options: LayoutOptions) -> Encoder:
    """Create an encoder for one answer. Raises UnsupportedParameter if the format's library is not installed."""
    match name:
        case ExportFormat.JSON:
            return JsonEncoder(ImageTable(options), outlined=options.outline)
        case ExportFormat.JSONL:
            return JsonlEncoder(ImageTable(options), outlined=options.outline)
        case ExportFormat.AREAL:
            return ArealEncoder(ImageTable(options), side_names(options))
        case ExportFormat.NPZ:
            return NpzEncoder(columns_of(options), ImageTable(options))
        case ExportFormat.SAFETENSORS:
            return SafetensorsEncoder(columns_of(options), ImageTable(options))
        case ExportFormat.ARROW:
            return ArrowEncoder(columns_of(options), text_labels(options), ImageTable(options))
        case ExportFormat.PARQUET:
            return ParquetEncoder(columns_of(options), text_labels(options), ImageTable(options))
