"""GPU kernels without a GPU: their numbers under Triton's interpreter, and their compilation for Hopper and Blackwell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

# In a process of its own, because Triton decides at import whether it interprets. fp32: bf16 products are wrong there.
INTERPRETED = """
import torch
from titan_nemotron.ops import experts, experts_triton, head

random = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=random)

experts_triton.BLOCK = 16
for rows, size in ((5, 40), (1, 16), (3, 1), (0, 8)):
    h, da, weights = draw(rows, size), draw(rows, size), draw(rows)
    torch.testing.assert_close(experts_triton.activate(h, weights), experts._activate(h, weights))
    ours = experts_triton.activate_backward(h, da.clone(), weights)
    torch.testing.assert_close(ours, experts._activate_backward(h, da.clone(), weights))

h, w = draw(9, 8) * torch.linspace(0.1, 30, 9)[:, None], draw(50, 8)
targets = torch.randint(50, (9,), generator=random)
targets[3] = -100
for scales, temperature in ((None, 1.0), (draw(9), 0.6)):
    compute = lambda path: head._gradients(h, w, targets, scales, temperature, True, True, path)
    torch.testing.assert_close(compute("liger"), compute("chunked"), atol=1e-5, rtol=1e-5)
print("equal")
"""


def test_interpreted_kernels_equal_plain_torch():
    """Ours, and the loss of the output layer with Liger's."""
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and "equal" in result.stdout, result.stderr


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for(capability, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titan_nemotron.ops import experts_triton

    for kernel in (experts_triton.activate_kernel, experts_triton.activate_backward_kernel):
        signature = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        signature["BLOCK"] = "constexpr"
        source = ASTSource(kernel, signature, constexprs={"BLOCK": experts_triton.BLOCK})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
