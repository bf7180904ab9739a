#include <cuda_runtime.h>

#include "tiny/grid.h"

__global__ void scale_kernel(float* values, int count, float factor) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) values[at] *= factor;
}

// Scales `count` floats of host memory on GPU 0; returns the CUDA error, 0 for success.
extern "C" int tiny_scale(float* values, int count, float factor) {
  float* device = nullptr;
  cudaError_t error = cudaMalloc(&device, count * sizeof(float));
  if (error) return error;
  cudaMemcpy(device, values, count * sizeof(float), cudaMemcpyHostToDevice);
  scale_kernel<<<tiny_blocks(count), TINY_THREADS>>>(device, count, factor);
  error = cudaGetLastError();
  if (!error) error = cudaMemcpy(values, device, count * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(device);
  return error;
}
