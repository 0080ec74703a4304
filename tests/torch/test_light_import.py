"""The imports of our layers, in one new interpreter, because importing PyTorch takes seconds."""

import json
import subprocess
import sys

QUESTIONS = """
import json, sys
found = {}
import tidegate.torch
found["layers"] = sorted(sys.modules)
import tidegate.torch.observing.watcher
found["observing"] = sorted(sys.modules)
sys.modules["transformers"] = None
from tidegate.torch import GatedAttention, freeze_all_but_gates, gate_optimizer_groups
layer = GatedAttention(8, 2, gate="g1")
found["rates"] = [group["lr"] for group in gate_optimizer_groups(layer, lr=0.01)]
found["learning"] = freeze_all_but_gates(layer)
print(json.dumps(found))
"""


def test_our_layers_and_groups_import_no_transformers_and_observing_no_matplotlib():
    done = subprocess.run([sys.executable, "-c", QUESTIONS], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert "tidegate.torch.attention" in found["layers"]
    assert "transformers" not in found["layers"]
    assert "tidegate.torch.observing.watcher" in found["observing"]
    assert "matplotlib" not in found["observing"]
    assert found["rates"] == [0.1, 0.01]
    assert found["learning"] == 64
