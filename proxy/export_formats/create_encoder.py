"""The encoder of a format."""

from __future__ import annotations

from proxy.export_formats.areal import ArealEncoder
from proxy.export_formats.arrow import ArrowEncoder, ParquetEncoder
from proxy.export_formats.encoder import Encoder, Format
from proxy.export_formats.npz import NpzEncoder
from proxy.export_formats.safetensors import SafetensorsEncoder
from proxy.export_formats.text import JsonEncoder, JsonlEncoder
from proxy.trajectory.columns import columns_of, text_labels
from proxy.trajectory.options import ExportOptions


def encoder(name: Format, options: ExportOptions) -> Encoder:
    """A new encoder. Raises UnsupportedParameter where what it needs is not installed."""
    match name:
        case Format.JSON:
            return JsonEncoder()
        case Format.JSONL:
            return JsonlEncoder()
        case Format.AREAL:
            return ArealEncoder()
        case Format.NPZ:
            return NpzEncoder(columns_of(options))
        case Format.SAFETENSORS:
            return SafetensorsEncoder(columns_of(options))
        case Format.ARROW:
            return ArrowEncoder(columns_of(options), text_labels(options))
        case Format.PARQUET:
            return ParquetEncoder(columns_of(options), text_labels(options))
