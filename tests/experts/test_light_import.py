import subprocess
import sys

LOADED = """
import sys
import tidegate.experts
print([name for name in ("torch", "jax", "flax", "transformers") if name in sys.modules])
"""


def test_the_package_loads_neither_pytorch_nor_jax():
    done = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
