/* A double of NVIDIA's management library (libnvidia-ml.so.1) for a host without a GPU.
 *
 * It answers from the state folder named by GPU_SIMULATOR_STATE (default /run/simulated-gpu); the folder's layout and
 * the faults are described in simulator/gpu_state.py. Written against the public NVML API as nvidia-ml-py declares it:
 * struct layouts, versions and return codes are those of its bindings. No dependencies beyond libc.
 *
 * Memory belongs to whoever holds the POSIX record lock on an allocation's file. The first reader that finds an
 * allocation without an owner notes the moment in a `.gone` file; RELEASE_MS later the memory has returned and any
 * reader removes both. A reader that may not write there counts ownerless memory as returned at once.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB (1024ULL * 1024ULL)
#define RELEASE_MS 150
#define MAX_GPUS 64
#define MAX_PROCESSES 512
#define PATH_SIZE 1024
#define TEXT_SIZE 4096
#define NO_INSTANCE 0xFFFFFFFFu

typedef int nvmlReturn_t;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef struct {
    int index, minor;
    char uuid[96], bus[32], name[96];
    unsigned long long total_mib, reserved_mib;
    int major_capability, minor_capability;
    unsigned domain, bus_number, device_number;
} Device;
typedef Device *nvmlDevice_t;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned pid; unsigned long long used; } nvmlProcessInfo_v1_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } nvmlProcessInfo_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned version, sensor; int temperature; } nvmlTemperature_v1_t;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;
typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    unsigned value_type;
    nvmlReturn_t result;
    union { double d; unsigned u; unsigned long long ull; } value;
} nvmlFieldValue_t;

static char state_folder[PATH_SIZE - 256];
static Device devices[MAX_GPUS];
static int device_count;
static int users; /* calls of init less calls of shutdown */
static char spin;

static void lock(void) { while (__atomic_test_and_set(&spin, __ATOMIC_ACQUIRE)) usleep(100); }
static void unlock(void) { __atomic_clear(&spin, __ATOMIC_RELEASE); }

/* --- the state folder ------------------------------------------------------------------------------------------- */

/* Reads a small text file below the state folder; returns its length or -1. */
static ssize_t read_text(const char *name, char *text, size_t size) {
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s/%s", state_folder, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t length = read(fd, text, size - 1);
    close(fd);
    if (length < 0) return -1;
    text[length] = 0;
    return length;
}

/* Text of a fault of one GPU, or of the host where device is NULL; -1 where the fault is not set. */
static ssize_t fault_text(const Device *device, const char *fault, char *text, size_t size) {
    char name[128];
    if (device) snprintf(name, sizeof name, "faults/%d/%s", device->index, fault);
    else snprintf(name, sizeof name, "faults/%s", fault);
    return read_text(name, text, size);
}

static int fault_set(const Device *device, const char *fault) {
    char text[8];
    return fault_text(device, fault, text, sizeof text) >= 0;
}

static long fault_number(const Device *device, const char *fault, long otherwise) {
    char text[64];
    return fault_text(device, fault, text, sizeof text) > 0 ? atol(text) : otherwise;
}

/* Does a word of a fault file name this function? "power" names nvmlDeviceGetPowerUsage and its like. */
static int names_function(const char *word, const char *function) {
    if (!strncasecmp(word, "nvml", 4)) return !strcasecmp(word, function);
    if (!strcasecmp(word, "processes")) return strcasestr(function, "RunningProcesses") != NULL;
    const char *field = strncmp(function, "nvmlDeviceGet", 13) ? function + 4 : function + 13;
    return !strncasecmp(word, field, strlen(word));
}

/* Looks for a line of the fault file whose first word names the function. Returns 1 with the rest of the line in
 * *number (0 where there is none), else 0. */
static int fault_names(const Device *device, const char *fault, const char *function, int *number) {
    char text[TEXT_SIZE], *rest = NULL;
    if (fault_text(device, fault, text, sizeof text) <= 0) return 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char word[128];
        int value = 0;
        if (sscanf(line, "%127s %d", word, &value) < 1 || !names_function(word, function)) continue;
        if (number) *number = value;
        return 1;
    }
    return 0;
}

static void block_while_hung(const Device *device, const char *function) {
    while (fault_names(device, "hang", function, NULL)) usleep(50000);
}

/* What stands between a caller and the answer: not initialised, a hang, a lost GPU, a forbidden or unsupported field. */
static nvmlReturn_t gate(const Device *device, const char *function) {
    char text[64], folder[PATH_SIZE];
    int code = 0;
    block_while_hung(NULL, function);
    if (!__atomic_load_n(&users, __ATOMIC_ACQUIRE)) return UNINITIALIZED;
    if (!device) return SUCCESS;
    if (device < devices || device >= devices + device_count) return INVALID_ARGUMENT;
    snprintf(folder, sizeof folder, "%s/faults/%d", state_folder, device->index);
    if (access(folder, F_OK) != 0) return SUCCESS;
    block_while_hung(device, function);
    if (fault_set(device, "lost")) return GPU_IS_LOST;
    if (fault_names(device, "no_permission", function, NULL)) return NO_PERMISSION;
    if (fault_text(device, "no_permission", text, sizeof text) == 0) return NO_PERMISSION;
    if (fault_names(device, "not_supported", function, NULL)) return NOT_SUPPORTED;
    if (fault_names(device, "error", function, &code)) return code;
    return SUCCESS;
}

#define GATE(device, function)                                                                                        \
    do {                                                                                                              \
        nvmlReturn_t gate_result = (device) ? gate((device), (function)) : INVALID_ARGUMENT;                          \
        if (gate_result != SUCCESS) return gate_result;                                                               \
    } while (0)

static int load_devices(void) {
    char text[MAX_GPUS * 256], *rest = NULL;
    if (read_text("gpus.tsv", text, sizeof text) < 0) return -1;
    device_count = 0;
    for (char *line = strtok_r(text, "\n", &rest); line && device_count < MAX_GPUS; line = strtok_r(NULL, "\n", &rest)) {
        Device *device = &devices[device_count];
        memset(device, 0, sizeof *device);
        if (sscanf(line, "%d\t%d\t%95[^\t]\t%31[^\t]\t%95[^\t]\t%llu\t%llu\t%d.%d", &device->index, &device->minor,
                   device->uuid, device->bus, device->name, &device->total_mib, &device->reserved_mib,
                   &device->major_capability, &device->minor_capability) != 9)
            continue;
        sscanf(device->bus, "%x:%x:%x", &device->domain, &device->bus_number, &device->device_number);
        device_count++;
    }
    return 0;
}

/* --- memory and its owners -------------------------------------------------------------------------------------- */

typedef struct {
    unsigned long long used_mib;
    int count;
    struct { unsigned pid; unsigned long long mib; int graphics; } processes[MAX_PROCESSES];
} Usage;

static void add_process(Usage *usage, unsigned pid, unsigned long long mib, int graphics) {
    for (int i = 0; i < usage->count; i++)
        if (usage->processes[i].pid == pid && usage->processes[i].graphics == graphics) {
            usage->processes[i].mib += mib;
            return;
        }
    if (usage->count == MAX_PROCESSES) return;
    usage->processes[usage->count].pid = pid;
    usage->processes[usage->count].mib = mib;
    usage->processes[usage->count].graphics = graphics;
    usage->count++;
}

/* The caller's own descriptor of that file, or -1. Opening and closing the file a second time would end its lock. */
static int own_descriptor(int folder, const char *name) {
    struct stat wanted, found;
    if (fstatat(folder, name, &wanted, 0) != 0) return -1;
    DIR *listing = opendir("/proc/self/fd");
    if (!listing) return -1;
    int match = -1;
    for (struct dirent *entry; match < 0 && (entry = readdir(listing));) {
        if (entry->d_name[0] == '.') continue;
        int fd = atoi(entry->d_name);
        if (fstat(fd, &found) == 0 && found.st_ino == wanted.st_ino && found.st_dev == wanted.st_dev) match = fd;
    }
    closedir(listing);
    return match;
}

/* Milliseconds between then and now, either way: a file's time may run a tick ahead or behind of the clock, and after
 * a clock that was set back nothing should be held for hours. */
static long long distance_ms(const struct timespec *then) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long long distance = (now.tv_sec - then->tv_sec) * 1000LL + (now.tv_nsec - then->tv_nsec) / 1000000;
    return distance < 0 ? -distance : distance;
}

/* Does memory without an owner still count? Notes the first look and removes what has returned. */
static int still_held(int folder, const char *name, int fd, long release_ms, int never) {
    char gone[300];
    struct stat mark, file;
    snprintf(gone, sizeof gone, "%s.gone", name);
    int known = fstatat(folder, gone, &mark, 0) == 0;
    if (!known) {
        int made = openat(folder, gone, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (made < 0 && errno != EEXIST) return never;
        if (made >= 0) close(made);
        if (fstat(fd, &file) == 0 && file.st_nlink == 0) { /* another reader has just removed it */
            unlinkat(folder, gone, 0);
            return 0;
        }
        return never || release_ms > 0;
    }
    if (never) return 1;
    if (distance_ms(&mark.st_mtim) < release_ms) return 1;
    if (unlinkat(folder, name, 0) == 0 || errno == ENOENT) unlinkat(folder, gone, 0);
    return 0;
}

static void add_allocations(const Device *device, Usage *usage) {
    char path[PATH_SIZE];
    long release_ms = fault_number(device, "release_ms", RELEASE_MS);
    int never = fault_set(device, "never_release");
    snprintf(path, sizeof path, "%s/memory/%d", state_folder, device->index);
    DIR *listing = opendir(path);
    if (!listing) return;
    int folder = dirfd(listing);
    for (struct dirent *entry; (entry = readdir(listing));) {
        const char *name = entry->d_name;
        size_t length = strlen(name);
        if (name[0] == '.' || length > 250 || (length > 5 && !strcmp(name + length - 5, ".gone"))) continue;
        int own = atol(name) == getpid() ? own_descriptor(folder, name) : -1;
        int fd = own >= 0 ? own : openat(folder, name, O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        char text[64] = "", kind[16] = "";
        unsigned long long mib = 0;
        struct flock question = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (pread(fd, text, sizeof text - 1, 0) > 0) sscanf(text, "%llu %15s", &mib, kind);
        if (own >= 0) {
            usage->used_mib += mib;
            add_process(usage, (unsigned)getpid(), mib, !strcmp(kind, "graphics"));
            continue;
        }
        if (fcntl(fd, F_GETLK, &question) == 0) {
            int owned = question.l_type != F_UNLCK;
            if (owned || still_held(folder, name, fd, release_ms, never)) usage->used_mib += mib;
            /* pid 0: the owner lives in a PID namespace that the caller can't see; NVML lists no process then. */
            if (owned && question.l_pid > 0) add_process(usage, (unsigned)question.l_pid, mib, !strcmp(kind, "graphics"));
        }
        close(fd);
    }
    closedir(listing);
}

static void add_listed(const Device *device, const char *fault, Usage *usage) {
    char text[TEXT_SIZE], *rest = NULL;
    if (fault_text(device, fault, text, sizeof text) <= 0) return;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        unsigned pid;
        unsigned long long mib;
        if (sscanf(line, "%u %llu", &pid, &mib) != 2) continue;
        usage->used_mib += mib;
        add_process(usage, pid, mib, 0);
    }
}

static void measure(const Device *device, Usage *usage) {
    memset(usage, 0, sizeof *usage);
    add_allocations(device, usage);
    add_listed(device, "foreign_pid", usage);
    add_listed(device, "dead_pid", usage);
    usage->used_mib += (unsigned long long)fault_number(device, "unowned", 0);
}

static unsigned utilization(const Device *device) {
    return fault_set(device, "ghost_latch") ? 100 : (unsigned)fault_number(device, "utilization", 0);
}

/* An idle card draws about 30 W, one that spins on nothing about 130 W, a busy one up to its limit. */
static unsigned power_milliwatts(const Device *device) {
    return fault_set(device, "ghost_latch") ? 131000 : 30000 + utilization(device) * 5000;
}

/* --- library ---------------------------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t result = SUCCESS;
    lock();
    if (!users) {
        const char *folder = getenv("GPU_SIMULATOR_STATE");
        snprintf(state_folder, sizeof state_folder, "%s", folder && *folder ? folder : "/run/simulated-gpu");
    }
    unlock();
    block_while_hung(NULL, "nvmlInit");
    block_while_hung(NULL, "nvmlInitWithFlags");
    if (fault_set(NULL, "no_driver")) return DRIVER_NOT_LOADED;
    if (fault_set(NULL, "version_mismatch")) return LIB_RM_VERSION_MISMATCH;
    lock();
    if (!users && load_devices() != 0) result = DRIVER_NOT_LOADED;
    else __atomic_add_fetch(&users, 1, __ATOMIC_RELEASE);
    unlock();
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t result = gate(NULL, "nvmlShutdown");
    if (result == SUCCESS) __atomic_sub_fetch(&users, 1, __ATOMIC_RELEASE);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    static const char *const words[] = {
        [0] = "Success",
        [1] = "Uninitialized",
        [2] = "Invalid Argument",
        [3] = "Not Supported",
        [4] = "Insufficient Permissions",
        [5] = "Already Initialized",
        [6] = "Not Found",
        [7] = "Insufficient Size",
        [8] = "Insufficient External Power",
        [9] = "Driver Not Loaded",
        [10] = "Timeout",
        [11] = "Interrupt Request Issue",
        [12] = "NVML Shared Library Not Found",
        [13] = "Function Not Found",
        [14] = "Corrupted infoROM",
        [15] = "GPU is lost",
        [16] = "GPU requires reset",
        [17] = "GPU access blocked by the operating system",
        [18] = "Driver/library version mismatch",
        [19] = "In use by another client",
        [20] = "Insufficient Memory",
        [21] = "No data",
        [23] = "Insufficient Resources",
        [25] = "Argument version mismatch",
        [26] = "Deprecated",
        [27] = "Not Ready",
        [28] = "No GPUs were found",
        [29] = "Invalid State",
    };
    if (result >= 0 && result < (int)(sizeof words / sizeof *words) && words[result]) return words[result];
    return "Unknown Error";
}

/* Copies a string into a caller's buffer as NVML does. */
static nvmlReturn_t give(const char *text, char *buffer, unsigned length) {
    if (!buffer) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

/* Line 0 of `driver` is the driver's version, line 1 NVML's. */
static nvmlReturn_t give_version(int line, char *buffer, unsigned length) {
    char text[256] = "";
    read_text("driver", text, sizeof text);
    char *start = text;
    for (int i = 0; i < line && start; i++) start = (start = strchr(start, '\n')) ? start + 1 : NULL;
    if (!start) start = text;
    start[strcspn(start, "\n")] = 0;
    return give(start, buffer, length);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t result = gate(NULL, "nvmlSystemGetDriverVersion");
    return result ? result : give_version(0, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    nvmlReturn_t result = gate(NULL, "nvmlSystemGetNVMLVersion");
    return result ? result : give_version(1, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t result = gate(NULL, "nvmlSystemGetCudaDriverVersion");
    if (result) return result;
    if (!version) return INVALID_ARGUMENT;
    *version = 13000;
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    char path[64], text[1024];
    nvmlReturn_t result = gate(NULL, "nvmlSystemGetProcessName");
    if (result) return result;
    if (!name || !length) return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NOT_FOUND;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got < 0 ? 0 : got] = 0;
    snprintf(name, length, "%s", text); /* the first argument, which is the whole title after setproctitle */
    return SUCCESS;
}

/* --- devices ---------------------------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t result = gate(NULL, "nvmlDeviceGetCount");
    if (result) return result;
    if (!count) return INVALID_ARGUMENT;
    *count = (unsigned)device_count;
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static nvmlReturn_t give_handle(Device *found, const char *function, nvmlDevice_t *device) {
    char text[16];
    if (!device) return INVALID_ARGUMENT;
    if (!found) return NOT_FOUND;
    nvmlReturn_t result = gate(found, function);
    if (result == GPU_IS_LOST && fault_text(found, "lost", text, sizeof text) > 0 && !strncmp(text, "late", 4))
        result = SUCCESS;
    if (result == SUCCESS) *device = found;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t result = gate(NULL, "nvmlDeviceGetHandleByIndex");
    if (result) return result;
    if (index >= (unsigned)device_count) return INVALID_ARGUMENT;
    return give_handle(&devices[index], "nvmlDeviceGetHandleByIndex", device);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = gate(NULL, "nvmlDeviceGetHandleByUUID");
    if (result) return result;
    if (!uuid) return INVALID_ARGUMENT;
    Device *found = NULL;
    for (int i = 0; i < device_count; i++) if (!strcmp(devices[i].uuid, uuid)) found = &devices[i];
    return give_handle(found, "nvmlDeviceGetHandleByUUID", device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    nvmlReturn_t result = gate(NULL, "nvmlDeviceGetHandleByPciBusId");
    if (result) return result;
    unsigned domain = 0, number = 0, slot = 0;
    if (!bus) return INVALID_ARGUMENT;
    if (sscanf(bus, "%x:%x:%x", &domain, &number, &slot) != 3) {
        domain = 0;
        if (sscanf(bus, "%x:%x", &number, &slot) != 2) return INVALID_ARGUMENT;
    }
    Device *found = NULL;
    for (int i = 0; i < device_count; i++)
        if (devices[i].domain == domain && devices[i].bus_number == number && devices[i].device_number == slot)
            found = &devices[i];
    return give_handle(found, "nvmlDeviceGetHandleByPciBusId", device);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    GATE(device, "nvmlDeviceGetName");
    return give(device->name, name, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    GATE(device, "nvmlDeviceGetUUID");
    return give(device->uuid, uuid, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    char text[32];
    GATE(device, "nvmlDeviceGetSerial");
    snprintf(text, sizeof text, "17940240%05d", device->index);
    return give(text, serial, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    GATE(device, "nvmlDeviceGetPciInfo");
    if (!info) return INVALID_ARGUMENT;
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", device->domain, device->bus_number & 0xff,
             device->device_number & 0xff);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", device->domain & 0xffff,
             device->bus_number & 0xff, device->device_number & 0xff);
    info->domain = device->domain;
    info->bus = device->bus_number;
    info->device = device->device_number;
    info->pci_device_id = 0x2BB510DE; /* RTX PRO 6000 Blackwell Server Edition */
    info->pci_subsystem_id = 0x204E10DE;
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *info) {
    return nvmlDeviceGetPciInfo_v3(device, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    Usage usage;
    GATE(device, "nvmlDeviceGetMemoryInfo");
    if (!memory) return INVALID_ARGUMENT;
    measure(device, &usage);
    memory->total = device->total_mib * MIB;
    memory->used = (device->reserved_mib + usage.used_mib) * MIB;
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    Usage usage;
    GATE(device, "nvmlDeviceGetMemoryInfo");
    if (!memory) return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    measure(device, &usage);
    memory->total = device->total_mib * MIB;
    memory->reserved = device->reserved_mib * MIB;
    memory->used = usage.used_mib * MIB;
    unsigned long long taken = memory->reserved + memory->used;
    memory->free = memory->total > taken ? memory->total - taken : 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    GATE(device, "nvmlDeviceGetBAR1MemoryInfo");
    if (!memory) return INVALID_ARGUMENT;
    memory->total = 131072 * MIB;
    memory->used = 1 * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* kind: 0 compute, 1 graphics, 2 MPS (of which a simulated host has none). */
static nvmlReturn_t list_processes(nvmlDevice_t device, int kind, unsigned *count, nvmlProcessInfo_t *infos,
                                   nvmlProcessInfo_v1_t *first_infos) {
    Usage usage;
    unsigned found = 0, room;
    if (!count) return INVALID_ARGUMENT;
    room = infos || first_infos ? *count : 0;
    measure(device, &usage);
    for (int i = 0; i < usage.count; i++) {
        if (usage.processes[i].graphics != kind) continue;
        if (found < room && infos)
            infos[found] = (nvmlProcessInfo_t){usage.processes[i].pid, usage.processes[i].mib * MIB, NO_INSTANCE, NO_INSTANCE};
        if (found < room && first_infos)
            first_infos[found] = (nvmlProcessInfo_v1_t){usage.processes[i].pid, usage.processes[i].mib * MIB};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESS_LISTS(function, kind)                                                                                 \
    EXPORT nvmlReturn_t function##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {               \
        GATE(device, #function);                                                                                      \
        return list_processes(device, kind, count, infos, NULL);                                                      \
    }                                                                                                                 \
    EXPORT nvmlReturn_t function##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {               \
        return function##_v3(device, count, infos);                                                                   \
    }                                                                                                                 \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos) {                 \
        GATE(device, #function);                                                                                      \
        return list_processes(device, kind, count, NULL, infos);                                                      \
    }
PROCESS_LISTS(nvmlDeviceGetComputeRunningProcesses, 0)
PROCESS_LISTS(nvmlDeviceGetGraphicsRunningProcesses, 1)
PROCESS_LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 2)

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    GATE(device, "nvmlDeviceGetUtilizationRates");
    if (!rates) return INVALID_ARGUMENT;
    if (fault_set(device, "mig")) return NOT_SUPPORTED;
    rates->gpu = utilization(device);
    rates->memory = rates->gpu / 3;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    GATE(device, "nvmlDeviceGetCudaComputeCapability");
    if (!major || !minor) return INVALID_ARGUMENT;
    *major = device->major_capability;
    *minor = device->minor_capability;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    GATE(device, "nvmlDeviceGetMigMode");
    if (!current || !pending) return INVALID_ARGUMENT;
    *current = *pending = (unsigned)fault_set(device, "mig");
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig) {
    (void)index, (void)mig;
    GATE(device, "nvmlDeviceGetMigDeviceHandleByIndex");
    return fault_set(device, "mig") ? NOT_FOUND : NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *reading) {
    GATE(device, "nvmlDeviceGetTemperature");
    if (!reading || reading->sensor != 0) return INVALID_ARGUMENT;
    if (reading->version != (sizeof *reading | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    reading->temperature = (int)(30 + utilization(device) / 2);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius) {
    GATE(device, "nvmlDeviceGetTemperature");
    if (!celsius || sensor != 0) return INVALID_ARGUMENT;
    *celsius = 30 + utilization(device) / 2;
    return SUCCESS;
}

/* Queries with one unsigned answer. */
#define UNSIGNED_QUERY(function, value)                                                                               \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *answer) {                                             \
        GATE(device, #function);                                                                                      \
        if (!answer) return INVALID_ARGUMENT;                                                                         \
        *answer = (unsigned)(value);                                                                                  \
        return SUCCESS;                                                                                               \
    }
UNSIGNED_QUERY(nvmlDeviceGetIndex, device->index)
UNSIGNED_QUERY(nvmlDeviceGetMinorNumber, device->minor)
UNSIGNED_QUERY(nvmlDeviceGetPowerUsage, power_milliwatts(device))
UNSIGNED_QUERY(nvmlDeviceGetEnforcedPowerLimit, 600000)
UNSIGNED_QUERY(nvmlDeviceGetPowerManagementLimit, 600000)
UNSIGNED_QUERY(nvmlDeviceGetPowerManagementDefaultLimit, 600000)
UNSIGNED_QUERY(nvmlDeviceGetFanSpeed, 30)
UNSIGNED_QUERY(nvmlDeviceGetPersistenceMode, 1)
UNSIGNED_QUERY(nvmlDeviceGetPerformanceState, utilization(device) ? 1 : 8)
UNSIGNED_QUERY(nvmlDeviceGetComputeMode, 0)
UNSIGNED_QUERY(nvmlDeviceGetDisplayActive, 0)
UNSIGNED_QUERY(nvmlDeviceGetDisplayMode, 0)
UNSIGNED_QUERY(nvmlDeviceGetMaxMigDeviceCount, 4)
UNSIGNED_QUERY(nvmlDeviceIsMigDeviceHandle, 0)

#define PAIR_QUERY(function)                                                                                          \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *rate, unsigned *period_us) {                          \
        GATE(device, #function);                                                                                      \
        if (!rate || !period_us) return INVALID_ARGUMENT;                                                             \
        *rate = 0;                                                                                                    \
        *period_us = 167000;                                                                                          \
        return SUCCESS;                                                                                               \
    }
PAIR_QUERY(nvmlDeviceGetEncoderUtilization)
PAIR_QUERY(nvmlDeviceGetDecoderUtilization)

/* Clock domains: 0 graphics, 1 SM, 2 memory, 3 video. MHz. */
EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned domain, unsigned *megahertz) {
    GATE(device, "nvmlDeviceGetClockInfo");
    if (!megahertz || domain > 3) return INVALID_ARGUMENT;
    int busy = utilization(device) > 0;
    *megahertz = domain == 2 ? (busy ? 12481 : 405) : (busy ? 2325 : 180);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned domain, unsigned *megahertz) {
    GATE(device, "nvmlDeviceGetMaxClockInfo");
    if (!megahertz || domain > 3) return INVALID_ARGUMENT;
    *megahertz = domain == 2 ? 12481 : 2430;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kilobytes) {
    GATE(device, "nvmlDeviceGetPcieThroughput");
    if (!kilobytes || counter > 1) return INVALID_ARGUMENT;
    *kilobytes = 0;
    return SUCCESS;
}

/* Samples of SM use by process: none were taken. */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, void *samples, unsigned *count,
                                                    unsigned long long since) {
    (void)samples, (void)since;
    GATE(device, "nvmlDeviceGetProcessUtilization");
    if (!count) return INVALID_ARGUMENT;
    *count = 0;
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                                unsigned long long *errors) {
    (void)type, (void)counter;
    GATE(device, "nvmlDeviceGetTotalEccErrors");
    if (!errors) return INVALID_ARGUMENT;
    *errors = 0;
    return SUCCESS;
}

/* Only the power fields are known (185 average, 186 instant); all others say so one by one, as NVML does. */
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    GATE(device, "nvmlDeviceGetFieldValues");
    if (!values || count < 1) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        values[i].timestamp = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        values[i].latency = 0;
        values[i].value_type = 1; /* unsigned int */
        values[i].value.ull = 0;
        values[i].result = NOT_SUPPORTED;
        if (values[i].field != 185 && values[i].field != 186) continue;
        values[i].result = gate(device, "nvmlDeviceGetPowerUsage");
        if (values[i].result == SUCCESS) values[i].value.u = power_milliwatts(device);
    }
    return SUCCESS;
}

/* Known to NVML, not to this card. */
#define UNSUPPORTED(function)                                                                                         \
    EXPORT nvmlReturn_t function(nvmlDevice_t device) {                                                               \
        GATE(device, #function);                                                                                      \
        return NOT_SUPPORTED;                                                                                         \
    }
UNSUPPORTED(nvmlDeviceGetDriverModel)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetGpuInstanceId)
UNSUPPORTED(nvmlDeviceGetComputeInstanceId)
UNSUPPORTED(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
UNSUPPORTED(nvmlDeviceGetNvLinkState)
UNSUPPORTED(nvmlDeviceGetAccountingMode)
