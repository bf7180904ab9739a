/* Holds a CUDA context and some memory on GPU 0 and keeps using it, as a monitor does: cuda_holder MIB HEARTBEAT.
 * Built as `dcgm-exporter`, a protected name: it must survive every reset. Needs libcuda.so.1 at run time only. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*call1)(unsigned);
typedef int (*device_get)(int *, int);
typedef int (*retain)(void **, int);
typedef int (*set_current)(void *);
typedef int (*mem_alloc)(unsigned long long *, size_t);
typedef int (*mem_set)(unsigned long long, unsigned char, size_t);
typedef int (*call0)(void);

static void *library;

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(2);
    }
    return found;
}

static void must(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "%s: CUDA error %d\n", what, code);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)atol(argc > 1 ? argv[1] : "64") << 20;
    const char *heartbeat = argc > 2 ? argv[2] : "/dev/null";
    unsigned long long memory = 0;
    void *context = NULL;
    int device = 0;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    must(((call1)symbol("cuInit"))(0), "cuInit");
    must(((device_get)symbol("cuDeviceGet"))(&device, 0), "cuDeviceGet");
    must(((retain)symbol("cuDevicePrimaryCtxRetain"))(&context, device), "cuDevicePrimaryCtxRetain");
    must(((set_current)symbol("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    must(((mem_alloc)symbol("cuMemAlloc_v2"))(&memory, bytes), "cuMemAlloc");
    for (unsigned long beat = 1;; beat++) {
        must(((mem_set)symbol("cuMemsetD8_v2"))(memory, (unsigned char)beat, bytes), "cuMemsetD8");
        must(((call0)symbol("cuCtxSynchronize"))(), "cuCtxSynchronize");
        FILE *file = fopen(heartbeat, "w");
        if (file) {
            fprintf(file, "%lu", beat);
            fclose(file);
        }
        usleep(200000);
    }
}
