from pathlib import Path

import pytest

from tests.nvml_box import Box
from tests.serving import ROOT


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """Make a box of two empty GPUs. Supervisors that start after this see these GPUs and no others."""
    path = tmp_path / "box.json"
    monkeypatch.setenv("MODELCTL_TEST_BOX", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "stand_in_nvml"))
    return Box(path)
