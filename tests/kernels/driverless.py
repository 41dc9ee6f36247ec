"""Launches kernels on tensors of a CPU, by a CUDA driver that runs nothing and keeps what each launch passes it.

`python driverless.py` prints a line of JSON: by kernel, [launched directly, whether Triton's own way to a launch passes
the same]. Needs a C compiler, as Triton does.
"""

import ctypes
import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

DRIVER = """
#include <stdint.h>
#include <string.h>
#define NONE(name) int name() { return 0; }
#define GIVES(name, type, value) int name(type *x) { *x = (type)(value); return 0; }
NONE(cuCtxSetCurrent) NONE(cuCtxSetLimit) NONE(cuFuncSetAttribute) NONE(cuFuncSetCacheConfig) NONE(cuModuleUnload)
NONE(cuGetErrorString) NONE(cuTensorMapEncodeIm2col)
GIVES(cuCtxGetCurrent, void *, 1) GIVES(cuDevicePrimaryCtxRetain, void *, 1)
GIVES(cuDevicePrimaryCtxRetain_v2, void *, 1) GIVES(cuModuleLoadData, void *, 1) GIVES(cuModuleGetFunction, void *, 1)
GIVES(cuCtxGetDevice, int, 0) GIVES(cuDeviceGet, int, 0) GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuStreamIsCapturing, int, 0) GIVES(cuOccupancyMaxActiveClusters, int, 1) GIVES(cuFuncGetAttribute, int, 1024)
GIVES(cuDeviceGetAttribute, int, 227 << 10) GIVES(cuCtxGetLimit, size_t, 0)
int cuPointerGetAttribute(uint64_t *x, int kind, uint64_t address) { *x = address; return 0; }
int cuPointerGetAttributes(unsigned n, int *kinds, void **x, uint64_t address) {
  for (unsigned i = 0; i < n; i++) {
    if (kinds[i] == 3) *(uint64_t *)x[i] = address; else *(int *)x[i] = 0;
  }
  return 0;
}
int cuTensorMapEncodeTiled(uint64_t *map, unsigned type, unsigned rank, uint64_t address, const uint64_t *shape,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned fill) {
  memset(map, 0, 128);
  map[0] = address;
  map[1] = type | rank << 8 | interleave << 16 | swizzle << 24 | (uint64_t)promotion << 32 | (uint64_t)fill << 40;
  for (unsigned i = 0; i < rank; i++) {
    map[2 + i] = shape[i] | (uint64_t)box[i] << 44;
    map[8 + i] = i + 1 < rank ? strides[i] : 0;
  }
  return 0;
}
int sizes[256], count;
unsigned char kept[1 << 16];
int cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
  unsigned char *end = kept + 32;
  memcpy(kept, config, 28);  /* grid, block, shared memory */
  memcpy(end, config + 8, 8);  /* stream */
  end += 8;
  for (int i = 0; i < count; end += sizes[i++]) memcpy(end, parameters[i], sizes[i]);
  return 0;
}
"""
SIZES = {"i1": 1, "i8": 1, "i32": 4, "i64": 8, "fp32": 4}
STREAM = 7


def sizes(signature) -> list[int]:
    """Return the bytes of each parameter; a tensor for TMA is a descriptor, its shape and its strides.

    The last two are addresses of scratch memory.
    """
    found = []
    for kind in signature:
        if isinstance(kind, tuple):
            found += sizes(kind)[:-2]
        elif kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            found += [128, *[4] * rank, *[8] * rank]
        elif kind != "constexpr":
            found.append(8 if kind.startswith("*") else SIZES[kind])
    return [*found, 8, 8]


def load(work: Path) -> ctypes.CDLL:
    """Compile the driver, and make it Triton's; return it."""
    (work / "driver.c").write_text(DRIVER)
    library = work / "libcuda.so.1"
    command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", work / "driver.c", "-o", library]
    subprocess.run(command, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(work)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    active = CudaDriver.__new__(CudaDriver)
    active.utils, active.launcher_cls = CudaUtils(), CudaLauncher
    active.get_current_device = torch.cuda.current_device = lambda: 0
    active.get_current_stream = torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(active)
    return driver


def compare(driver: ctypes.CDLL) -> dict:
    """Launch a kernel of each kind twice, the second time by ours, and then by Triton's own way."""
    from fox_kernels.decoding.append import append_step
    from fox_kernels.hopper import forward as hopper
    from fox_kernels.host.launch import Runner
    from fox_kernels.options import Options
    from fox_kernels.triton import forward as plain
    from fox_kernels.triton.tiles import Copies, Tile

    launched = {}
    run = Runner.__call__

    def passed() -> bytes:
        kept = (ctypes.c_ubyte * (1 << 16)).in_dll(driver, "kept")
        found = bytes(kept)
        ctypes.memset(kept, 0, len(found))
        return found

    def watch(self, grid, copied, arguments, *rest):
        of_parameters = sizes(self.compiled.src.signature.values())
        (ctypes.c_int * 256).in_dll(driver, "sizes")[: len(of_parameters)] = of_parameters
        ctypes.c_int.in_dll(driver, "count").value = len(of_parameters)
        passed()
        run(self, grid, copied, arguments, *rest)
        ours = passed()
        blocks = [how and hopper.Blocks(x, *how).descriptor() for x, how in zip(copied, self.described, strict=True)]
        self.compiled[grid](*blocks, *arguments, *self.constants)
        launched[self.compiled.name] = self.short, ours == passed()

    Runner.__call__ = watch
    hopper.processors = lambda device: 132
    plain.describable = lambda *_: True
    plain.tile_for = lambda *_: Tile(64, 64, 4, 2, Copies.OWN)
    q, k, v = (torch.randn(1, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    c = torch.rand(1, 2, 300), torch.rand(1, 2, 300)
    x, length = torch.randn(1, 1, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    buffers = [*torch.zeros(2, 1, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 64, 1)]
    weight, bias = torch.nn.Parameter(torch.randn(2, 128)), torch.nn.Parameter(torch.randn(2))
    for _ in range(2):
        hopper.launch_forward(q, k, v, *c, Options(0.125))
        plain.launch_forward(q, k, v, *c, Options(0.125))
        with torch.no_grad():
            append_step(buffers, length, x, x, x, x, weight, bias, x[..., :32], x[..., 32:64])
    return launched


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(compare(load(Path(work)))))
