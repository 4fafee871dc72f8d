"""The encoder of a format."""

from __future__ import annotations

from proxy.formats.areal import ArealEncoder
from proxy.formats.arrow import ArrowEncoder, ParquetEncoder
from proxy.formats.base import Encoder, Format
from proxy.formats.npz import NpzEncoder
from proxy.formats.safetensors import SafetensorsEncoder
from proxy.formats.text import JsonEncoder, JsonlEncoder
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
