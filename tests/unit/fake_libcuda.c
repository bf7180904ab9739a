/* A stand-in for libcuda.so.1 over host memory: the calls that cuda_probe.py makes, with faults on demand.
   FAKE_CUDA_GPUS       PCI ids, comma separated: the devices 0, 1, ..
   FAKE_CUDA_FREE_MIB   memory of each device (256)
   FAKE_CUDA_PIECE_MIB  largest single allocation (all)
   FAKE_CUDA_FAULT      PCI id/call=code, PCI id/call=hang, PCI id/fill=flip (one bit of what is written) */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define MAX 4096
static char gpu[64] = "";
static struct { uint64_t address; size_t size; } held[MAX];
static size_t in_use;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}

static const char *fault(const char *call) {
    const char *text = getenv("FAKE_CUDA_FAULT");
    char key[256];
    snprintf(key, sizeof key, "%s/%s=", gpu, call);
    return text && !strncmp(text, key, strlen(key)) ? text + strlen(key) : 0;
}

static int entered(const char *call) {
    const char *what = fault(call);
    if (!what) return 0;
    if (!strcmp(what, "hang")) for (;;) pause();
    if (!strcmp(what, "die")) _exit(9);
    return atoi(what);
}

#define ENTER(name) do { int code = entered(name); if (code) return code; } while (0)

int cuInit(unsigned flags) { (void)flags; ENTER("cuInit"); return getenv("CUDA_VISIBLE_DEVICES") ? 100 : 0; }

int cuDeviceGetByPCIBusId(int *device, const char *id) {
    const char *all = getenv("FAKE_CUDA_GPUS");
    const char *at = all ? strstr(all, id) : 0;
    if (!at) return 101;
    snprintf(gpu, sizeof gpu, "%s", id);
    *device = 0;
    for (const char *c = all; c < at; c++) *device += *c == ',';
    ENTER("cuDeviceGetByPCIBusId");
    return 0;
}

int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { (void)device; return flags == 4 ? 0 : 1; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    *context = (void *)(intptr_t)(device + 1);
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; ENTER("cuDevicePrimaryCtxRelease_v2"); return in_use ? 999 : 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuCtxSynchronize(void) { ENTER("cuCtxSynchronize"); return 0; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER("cuMemGetInfo_v2");
    *total = number("FAKE_CUDA_FREE_MIB", 256) * MIB;
    *free_bytes = *total - in_use;
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    ENTER("cuMemAlloc_v2");
    size_t limit = number("FAKE_CUDA_FREE_MIB", 256) * MIB, piece = number("FAKE_CUDA_PIECE_MIB", 1 << 20) * MIB;
    if (size > piece || in_use + size > limit) return 2;
    for (int i = 0; i < MAX; i++)
        if (!held[i].address) {
            held[i].address = (uint64_t)(uintptr_t)malloc(size);
            held[i].size = size;
            in_use += size;
            *address = held[i].address;
            return 0;
        }
    return 2;
}

int cuMemFree_v2(uint64_t address) {
    for (int i = 0; i < MAX; i++)
        if (held[i].address == address) {
            free((void *)(uintptr_t)address);
            in_use -= held[i].size;
            held[i].address = 0;
            return 0;
        }
    return 1;
}

int cuMemsetD32_v2(uint64_t address, unsigned value, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint32_t *)(uintptr_t)address)[i] = value;
    if (fault("fill") && count > 4) ((uint32_t *)(uintptr_t)address)[count - 1] ^= 1;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return 0; }

int cuModuleLoadData(void **module, const char *image) {
    ENTER("cuModuleLoadData");
    *module = (void *)1;
    return strstr(image, ".target sm_52") ? 0 : 218;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = (void *)(intptr_t)(strcmp(name, "fill") ? 2 : 1);
    return 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **args, void **extra) {
    ENTER("cuLaunchKernel");
    if (!gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || shared || stream || extra) return 1;
    uint32_t *words = (uint32_t *)(uintptr_t)*(uint64_t *)args[0];
    uint32_t count = *(uint32_t *)args[1], seed = *(uint32_t *)args[2], wrong = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t x = i * 0x9E3779B1u + seed, expected[4] = {x, x + 1, ~x, x ^ seed};
        if (function == (void *)1) memcpy(words + 4 * (size_t)i, expected, 16);
        else wrong += memcmp(words + 4 * (size_t)i, expected, 16) != 0;
    }
    if (function == (void *)1) {
        if (fault("fill")) words[4 * (size_t)count - 1] ^= 1;
    } else *(uint32_t *)(uintptr_t)*(uint64_t *)args[3] += wrong;
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 101 ? "CUDA_ERROR_INVALID_DEVICE"
          : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
          : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
