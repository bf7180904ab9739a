#include <cuda_runtime.h>

#include "tiny/grid.h"

__global__ void sum_kernel(const float* values, int count, float* total) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  float mine = at < count ? values[at] : 0.0f;
  for (int offset = 16; offset; offset /= 2) mine += __shfl_down_sync(0xffffffffu, mine, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(total, mine);
}

// The sum of `count` floats of host memory, computed on GPU 0; returns the CUDA error, 0 for success.
extern "C" int tiny_sum(const float* values, int count, float* total) {
  float* device = nullptr;
  cudaError_t error = cudaMalloc(&device, (count + 1) * sizeof(float));
  if (error) return error;
  cudaMemset(device, 0, (count + 1) * sizeof(float));
  cudaMemcpy(device, values, count * sizeof(float), cudaMemcpyHostToDevice);
  sum_kernel<<<tiny_blocks(count), TINY_THREADS>>>(device, count, device + count);
  error = cudaGetLastError();
  if (!error) error = cudaMemcpy(total, device + count, sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(device);
  return error;
}
