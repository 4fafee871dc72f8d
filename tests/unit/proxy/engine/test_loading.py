"""The device and dtype of a loaded model. Devices that this machine lacks are only chosen, never used."""

import sys
from pathlib import Path

import pytest

from proxy.engine.tiny.model import build_tiny_model
from proxy.engine.transformers.loading import EngineOptions, best_device, load_model
from proxy.engine.transformers.sampler import drawing_device
from tokengrove.errors import ConfigurationError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_cuda_is_chosen_before_mps_and_mps_before_the_cpu(monkeypatch, cuda: bool, mps: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert best_device() == chosen


def test_a_named_device_wins_over_the_default(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    build_tiny_model(tmp_path)
    model = load_model(tmp_path, EngineOptions(device="cpu"))
    assert model.device.type == "cpu" and model.dtype == torch.float32


@pytest.mark.parametrize("device", ["cuda", "mps", "nonsense"])
def test_a_missing_device_is_a_configuration_error(tmp_path, device: str) -> None:
    if device in ("cuda", "mps") and best_device() == device:
        pytest.skip(f"{device} is here")
    build_tiny_model(tmp_path)
    with pytest.raises(ConfigurationError, match=f"--engine-arg device={device} is no device"):
        load_model(tmp_path, EngineOptions(device=device))


def test_tokens_are_sampled_on_the_device_of_the_logits_except_mps() -> None:
    devices = ("cpu", "cuda", "mps")
    assert [drawing_device(torch.device(device)).type for device in devices] == ["cpu", "cuda", "cpu"]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_package_that_cannot_be_imported_is_an_error_with_the_cause(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    cause = rf"the package {package} cannot be imported \(ModuleNotFoundError: .*{package}.*\); install it again: pip"
    with pytest.raises(ConfigurationError, match=cause):
        load_model(tmp_path, EngineOptions())
