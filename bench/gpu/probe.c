/* A CUDA program on the driver API: allocates, launches and faults as it is asked, and prints one JSON object a line.
 *
 *   gpu-probe [--dlsym] ACTION...
 *
 *   facts                            the device, and the driver's version
 *   work-for:MICROSECONDS            the rounds with which one launch of kernel `work` takes so long
 *   memory:KIND:MOST_MIB             allocates until it is refused, or has so much; freed by the next such action
 *   launch:KIND:SECONDS:ROUNDS:GRID  launches kernels of fixed work; KIND is plain, ex, cooperative or graph
 *   duty:BUSY_MS:PERIOD_MS:SECONDS   keeps the GPU busy for a part of each period
 *   latency:RUNS                     of launches and allocations, microseconds
 *   mix:SECONDS:ROUNDS:GRID          a fixed mix of computing, copying and setting memory, counted
 *   events:KIND:SECONDS:ROUNDS:GRID  what two events say of a launch between them, KIND alone, or streams: four at once
 *   trace:SECONDS:ROUNDS:GRID        launches that nobody waits for: by the GPU's timer when they had the GPU, and by events
 *   bias:RUNS:ROUNDS:GRID            what events and queries cost, and what they say of each other: idle, in a full queue, in two streams
 *   busy:IDLE_S:BUSY_S               idle, busy and idle again, and when it was busy, microseconds since the epoch
 *   reserved:MIB                     takes so much from a pool, the GPU's own pool and a graph, gives it back, and what is reserved
 *   fault                            writes to an address that is not mapped
 *   wait                             prints {"action": "wait"} and reads a line: for programs that start or are measured together
 *
 * It asks for the driver's functions as the CUDA runtime does, by cuGetProcAddress_v2; where the library before it has none,
 * or with --dlsym, by dlsym. Nothing is linked but libc and libdl. Built by bench/gpu/pack.py with NVIDIA's cuda.h, for the
 * types alone. The kernels are kernels.ptx, in the program's own data. Exit code 0 where every action ran, whatever it found.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define BLOCK 256
#define GRAPH_LAUNCHES 10
#define MOST_PIECES 65536
#define MOST_RUNS 5000
#define WINDOW_S 0.5
#define MOST_WINDOWS 400
#define ASKED_VERSION 12080
#define NOT_FOUND ((CUresult)-1000)

#define FUNCTIONS                                                                                                             \
    F(cuInit) F(cuDriverGetVersion) F(cuDeviceGet) F(cuDeviceGetName) F(cuDeviceGetAttribute) F(cuDeviceTotalMem)            \
    F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxRelease) F(cuCtxSetCurrent) F(cuCtxSynchronize) F(cuGetErrorName)        \
    F(cuModuleLoadData) F(cuModuleGetFunction) F(cuStreamCreate) F(cuStreamSynchronize)                                      \
    F(cuMemGetInfo) F(cuMemAlloc) F(cuMemFree) F(cuMemAllocPitch) F(cuMemAllocManaged) F(cuMemAllocAsync) F(cuMemFreeAsync)  \
    F(cuMemPoolCreate) F(cuMemPoolDestroy) F(cuMemAllocFromPoolAsync) F(cuMemCreate) F(cuMemRelease) F(cuMemsetD32Async)     \
    F(cuArrayCreate) F(cuArray3DCreate) F(cuArrayDestroy) F(cuMipmappedArrayCreate) F(cuMipmappedArrayDestroy)               \
    F(cuLaunchKernel) F(cuLaunchKernelEx) F(cuLaunchCooperativeKernel)                                                       \
    F(cuStreamBeginCapture) F(cuStreamEndCapture) F(cuGraphInstantiateWithFlags) F(cuGraphLaunch)                            \
    F(cuEventCreate) F(cuEventRecord) F(cuEventElapsedTime) F(cuEventQuery) F(cuEventSynchronize) F(cuMemcpyDtoH)             \
    F(cuMemPoolGetAttribute) F(cuDeviceGetDefaultMemPool)            \
    F(cuMemPoolSetAttribute) F(cuDeviceGetGraphMemAttribute) F(cuGraphCreate) F(cuGraphAddMemAllocNode)                      \
    F(cuGraphAddMemFreeNode)

#define F(name) static __typeof__(&name) p_##name;
FUNCTIONS
#undef F

/* Calls a function that an old driver, or a library before it, may lack. */
#define CALL(name, ...) (p_##name ? p_##name(__VA_ARGS__) : NOT_FOUND)
#define VERSIONED(name) AS_TEXT(name)
#define AS_TEXT(name) #name

__asm__(".section .rodata\n.balign 8\nkernels_ptx:\n.incbin \"kernels.ptx\"\n.byte 0\n.text\n");
extern const char kernels_ptx[] __attribute__((visibility("hidden")));

static CUdevice device;
static CUcontext context;
static CUmodule module;
static CUstream stream;
static CUmemoryPool pool;
static CUdeviceptr scratch;
static int driver_version;
static const char *found_by = "cuGetProcAddress_v2";

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static const char *error_name(CUresult code) {
    static char number[40];
    const char *name = NULL;
    if (code == NOT_FOUND) return "the function was not found";
    if (p_cuGetErrorName && p_cuGetErrorName(code, &name) == CUDA_SUCCESS && name) return name;
    snprintf(number, sizeof number, "CUDA error %d", (int)code);
    return number;
}

static void fail(const char *action, const char *what, CUresult code) {
    printf("{\"action\": \"%s\", \"failed\": \"%s\", \"code\": %d, \"error\": \"%s\"}\n", action, what, (int)code, error_name(code));
}

/* --- the driver --- */

static int find_functions(int by_dlsym) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        printf("{\"action\": \"start\", \"failed\": \"dlopen\", \"error\": \"%.200s\"}\n", dlerror());
        return 1;
    }
    __typeof__(&cuGetProcAddress) address_of = by_dlsym ? NULL : (__typeof__(&cuGetProcAddress))dlsym(library, "cuGetProcAddress_v2");
    int version = ASKED_VERSION;
    __typeof__(&cuDriverGetVersion) get_version = (__typeof__(&cuDriverGetVersion))dlsym(library, "cuDriverGetVersion");
    if (get_version && get_version(&driver_version) == CUDA_SUCCESS && driver_version < version) version = driver_version;
    if (!address_of) found_by = "dlsym";
#define F(name)                                                                                                               \
    if (!address_of || address_of(#name, (void **)&p_##name, version, 0, NULL) != CUDA_SUCCESS || !p_##name)                 \
        p_##name = (__typeof__(&name))dlsym(library, VERSIONED(name));
    FUNCTIONS
#undef F
    return 0;
}

static int start(int by_dlsym) {
    double begin_s = now_s();
    if (find_functions(by_dlsym)) return 1;
    CUresult code;
    const char *step;
    if ((step = "cuInit", code = CALL(cuInit, 0)) || (step = "cuDeviceGet", code = CALL(cuDeviceGet, &device, 0)) ||
        (step = "cuDevicePrimaryCtxRetain", code = CALL(cuDevicePrimaryCtxRetain, &context, device)) ||
        (step = "cuCtxSetCurrent", code = CALL(cuCtxSetCurrent, context)) ||
        (step = "cuModuleLoadData", code = CALL(cuModuleLoadData, &module, kernels_ptx)) ||
        (step = "cuStreamCreate", code = CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING)) ||
        (step = "cuMemAlloc", code = CALL(cuMemAlloc, &scratch, MIB))) {
        fail("start", step, code);
        return 1;
    }
    printf("{\"action\": \"start\", \"pid\": %d, \"found_by\": \"%s\", \"seconds\": %.4f}\n", (int)getpid(), found_by, now_s() - begin_s);
    return 0;
}

static CUfunction kernel(const char *name) {
    CUfunction function = NULL;
    CUresult code = CALL(cuModuleGetFunction, &function, module, name);
    if (code) fail("kernel", name, code);
    return function;
}

static int attribute(CUdevice_attribute which) {
    int value = 0;
    CALL(cuDeviceGetAttribute, &value, which, device);
    return value;
}

static CUresult launch(CUfunction function, unsigned grid, unsigned block, void **arguments) {
    return CALL(cuLaunchKernel, function, grid, 1, 1, block, 1, 1, 0, stream, arguments, NULL);
}

static void facts(void) {
    char name[100] = "";
    size_t total = 0, free_bytes = 0, shown = 0;
    CALL(cuDeviceGetName, name, sizeof name, device);
    CALL(cuDeviceTotalMem, &total, device);
    CALL(cuMemGetInfo, &free_bytes, &shown);
    printf("{\"action\": \"facts\", \"name\": \"%s\", \"capability\": \"%d.%d\", \"multiprocessors\": %d, \"driver\": %d, "
           "\"total_mib\": %zu, \"info_total_mib\": %zu, \"info_free_mib\": %zu, \"cooperative\": %d}\n",
           name, attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
           attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), driver_version, total / MIB, shown / MIB, free_bytes / MIB,
           attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH));
}

/* --- memory --- */

typedef CUresult (*allocate_fn)(uint64_t *handle, size_t bytes);
typedef CUresult (*release_fn)(uint64_t handle);

static CUresult allocate_plain(uint64_t *handle, size_t bytes) { return CALL(cuMemAlloc, (CUdeviceptr *)handle, bytes); }
static CUresult release_plain(uint64_t handle) { return CALL(cuMemFree, (CUdeviceptr)handle); }

static CUresult allocate_pitch(uint64_t *handle, size_t bytes) {
    size_t pitch;
    return CALL(cuMemAllocPitch, (CUdeviceptr *)handle, &pitch, 4096, bytes / 4096, 16);
}

static CUresult allocate_managed(uint64_t *handle, size_t bytes) {
    CUresult code = CALL(cuMemAllocManaged, (CUdeviceptr *)handle, bytes, CU_MEM_ATTACH_GLOBAL);
    if (!code) code = CALL(cuMemsetD32Async, (CUdeviceptr)*handle, 1, bytes / 4, stream); /* now it is on the GPU */
    return code ? code : CALL(cuStreamSynchronize, stream);
}

static CUresult allocate_async(uint64_t *handle, size_t bytes) {
    CUresult code = CALL(cuMemAllocAsync, (CUdeviceptr *)handle, bytes, stream);
    return code ? code : CALL(cuStreamSynchronize, stream);
}
static CUresult release_async(uint64_t handle) {
    CUresult code = CALL(cuMemFreeAsync, (CUdeviceptr)handle, stream);
    return code ? code : CALL(cuStreamSynchronize, stream);
}

static CUresult allocate_pool(uint64_t *handle, size_t bytes) {
    if (!pool) {
        CUmemPoolProps properties;
        memset(&properties, 0, sizeof properties);
        properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = device;
        CUresult code = CALL(cuMemPoolCreate, &pool, &properties);
        if (code) return code;
    }
    CUresult code = CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *)handle, bytes, pool, stream);
    return code ? code : CALL(cuStreamSynchronize, stream);
}

static CUresult allocate_vmm(uint64_t *handle, size_t bytes) {
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return CALL(cuMemCreate, (CUmemGenericAllocationHandle *)handle, bytes, &properties, 0);
}
static CUresult release_vmm(uint64_t handle) { return CALL(cuMemRelease, (CUmemGenericAllocationHandle)handle); }

static CUresult allocate_array(uint64_t *handle, size_t bytes) {
    CUDA_ARRAY_DESCRIPTOR descriptor = {.Width = 1024, .Height = bytes / (1024 * 16), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    return CALL(cuArrayCreate, (CUarray *)handle, &descriptor);
}
static CUresult allocate_array3d(uint64_t *handle, size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR descriptor = {
        .Width = 256, .Height = 256, .Depth = bytes / (256 * 256 * 16), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    return CALL(cuArray3DCreate, (CUarray *)handle, &descriptor);
}
static CUresult release_array(uint64_t handle) { return CALL(cuArrayDestroy, (CUarray)(uintptr_t)handle); }

static CUresult allocate_mipmap(uint64_t *handle, size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR descriptor = {
        .Width = 1024, .Height = bytes / (1024 * 16), .Depth = 0, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    return CALL(cuMipmappedArrayCreate, (CUmipmappedArray *)handle, &descriptor, 1);
}
static CUresult release_mipmap(uint64_t handle) { return CALL(cuMipmappedArrayDestroy, (CUmipmappedArray)(uintptr_t)handle); }

static const struct {
    const char *name;
    allocate_fn allocate;
    release_fn release;
} KINDS[] = {
    {"plain", allocate_plain, release_plain},       {"pitch", allocate_pitch, release_plain},
    {"managed", allocate_managed, release_plain},   {"async", allocate_async, release_async},
    {"pool", allocate_pool, release_async},         {"vmm", allocate_vmm, release_vmm},
    {"array", allocate_array, release_array},       {"array3d", allocate_array3d, release_array},
    {"mipmap", allocate_mipmap, release_mipmap},
};

static uint64_t pieces[MOST_PIECES];
static int piece_count, piece_kind;

static void free_pieces(void) {
    for (int i = 0; i < piece_count; i++) KINDS[piece_kind].release(pieces[i]);
    piece_count = 0;
    if (pool) CALL(cuMemPoolDestroy, pool);
    pool = NULL;
}

/* Pieces of 64 MiB, then smaller ones down to 2 MiB, so that what was refused is known to 2 MiB. */
static void memory(const char *kind_name, size_t most_mib) {
    size_t got = 0, free_before = 0, free_after = 0, shown = 0;
    CUresult first = CUDA_SUCCESS, code = CUDA_SUCCESS;
    free_pieces();
    piece_kind = -1;
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (!strcmp(KINDS[i].name, kind_name)) piece_kind = (int)i;
    if (piece_kind < 0) {
        fail("memory", kind_name, NOT_FOUND);
        return;
    }
    CALL(cuMemGetInfo, &free_before, &shown);
    for (size_t bytes = 64 * MIB; bytes >= 2 * MIB; bytes /= 2) {
        while (piece_count < MOST_PIECES && got + bytes <= most_mib * MIB) {
            uint64_t handle = 0;
            code = KINDS[piece_kind].allocate(&handle, bytes);
            if (code) break;
            pieces[piece_count++] = handle;
            got += bytes;
        }
        if (code && !first) first = code;
    }
    CALL(cuMemGetInfo, &free_after, &shown);
    printf("{\"action\": \"memory\", \"kind\": \"%s\", \"got_mib\": %zu, \"most_mib\": %zu, \"code\": %d, \"error\": \"%s\", "
           "\"info_total_mib\": %zu, \"info_free_before_mib\": %zu, \"info_free_after_mib\": %zu}\n",
           kind_name, got / MIB, most_mib, (int)first, first ? error_name(first) : "", shown / MIB, free_before / MIB, free_after / MIB);
}

/* --- compute --- */

/* What is counted in each half second. */
static struct {
    long of[MOST_WINDOWS];
    int count;
    double begin_s;
} windows;

static double begin_windows(void) {
    memset(&windows, 0, sizeof windows);
    return windows.begin_s = now_s();
}

static void count_in_window(long more) {
    int at = (int)((now_s() - windows.begin_s) / WINDOW_S);
    if (at >= MOST_WINDOWS) return;
    windows.of[at] += more;
    windows.count = at; /* those before are whole */
}

static void print_windows(void) {
    printf("\"windows\": [");
    for (int i = 0; i < windows.count; i++) printf("%s%ld", i ? ", " : "", windows.of[i]);
    printf("]");
}

typedef struct {
    const char *kind;
    CUfunction function;
    void **arguments;
    unsigned grid;
    CUgraphExec graph;
    CUdeviceptr counter;
} launcher;

static CUresult launch_once(launcher *own) {
    if (!strcmp(own->kind, "plain")) return launch(own->function, own->grid, BLOCK, own->arguments);
    if (!strcmp(own->kind, "graph")) return CALL(cuGraphLaunch, own->graph, stream);
    if (!strcmp(own->kind, "ex")) {
        CUlaunchConfig config;
        memset(&config, 0, sizeof config);
        config.gridDimX = own->grid, config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = BLOCK, config.blockDimY = config.blockDimZ = 1;
        config.hStream = stream;
        return CALL(cuLaunchKernelEx, &config, own->function, own->arguments, NULL);
    }
    CUresult code = CALL(cuMemsetD32Async, own->counter, 0, 1, stream);
    return code ? code : CALL(cuLaunchCooperativeKernel, own->function, own->grid, 1, 1, BLOCK, 1, 1, 0, stream, own->arguments);
}

static CUresult make_graph(launcher *own) {
    CUgraph graph = NULL;
    CUresult code = CALL(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (int i = 0; i < GRAPH_LAUNCHES && !code; i++) code = launch(own->function, own->grid, BLOCK, own->arguments);
    CUresult ended = CALL(cuStreamEndCapture, stream, &graph);
    if (!code) code = ended;
    return code ? code : CALL(cuGraphInstantiateWithFlags, &own->graph, graph, 0);
}

/* Counts launches, each waited for, in windows of half a second; `work` is launches × blocks × rounds, in millions. */
static void launches(const char *kind, double seconds, unsigned rounds, unsigned grid) {
    unsigned meetings = 32, own_rounds = rounds;
    CUdeviceptr out = scratch;
    void *plain[] = {&out, &own_rounds}, *meeting[] = {&out, &meetings, &own_rounds};
    int is_cooperative = !strcmp(kind, "cooperative"), per_launch = strcmp(kind, "graph") ? 1 : GRAPH_LAUNCHES;
    launcher own = {.kind = kind, .arguments = is_cooperative ? meeting : plain, .grid = grid, .counter = scratch};
    if (is_cooperative) { /* one block on each multiprocessor is sure to fit */
        own.grid = (unsigned)attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        per_launch = (int)meetings;
    }
    if (!(own.function = kernel(is_cooperative ? "meet" : "work"))) return;
    CUresult code = strcmp(kind, "graph") ? CUDA_SUCCESS : make_graph(&own);
    long count = 0;
    double begin_s = begin_windows();
    while (!code && now_s() - begin_s < seconds) {
        if ((code = launch_once(&own)) || (code = CALL(cuStreamSynchronize, stream))) break;
        count += per_launch;
        count_in_window(per_launch);
    }
    double lasted_s = now_s() - begin_s;
    printf("{\"action\": \"launch\", \"kind\": \"%s\", \"launches\": %ld, \"seconds\": %.4f, \"work\": %.3f, \"grid\": %u, "
           "\"rounds\": %u, \"code\": %d, \"error\": \"%s\", ",
           kind, count, lasted_s, 1e-6 * (double)count * own.grid * rounds, own.grid, rounds, (int)code, code ? error_name(code) : "");
    print_windows();
    printf("}\n");
}

static double seconds_of(CUfunction function, unsigned grid, void **arguments) {
    double begin_s = now_s();
    if (launch(function, grid, BLOCK, arguments) || CALL(cuStreamSynchronize, stream)) return 0;
    return now_s() - begin_s;
}

/* 64 blocks for each multiprocessor, eight times as many as it can hold: as the grids of usual programs, and a library that
 * counts blocks has soon used up what it grants at the start. The best of five: the clocks rise while it works. */
static void work_for(double microseconds) {
    CUfunction function = kernel("work");
    unsigned grid = 64 * (unsigned)attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), rounds = 20000;
    void *arguments[] = {&scratch, &rounds};
    double best_s = 1e9;
    if (!function) return;
    for (double begin_s = now_s(); now_s() - begin_s < 0.5;) seconds_of(function, grid, arguments);
    for (int i = 0; i < 5; i++) {
        double lasted_s = seconds_of(function, grid, arguments);
        if (lasted_s > 0 && lasted_s < best_s) best_s = lasted_s;
    }
    double wanted = microseconds * 1e-6 / best_s * rounds;
    printf("{\"action\": \"work-for\", \"microseconds\": %.1f, \"rounds\": %u, \"grid\": %u}\n", microseconds,
           wanted < 1 ? 1u : wanted > 4e9 ? 4000000000u : (unsigned)wanted, grid);
}

static void duty(double busy_ms, double period_ms, double seconds) {
    CUfunction function = kernel("spin");
    uint64_t nanoseconds = (uint64_t)(busy_ms * 1e6);
    void *arguments[] = {&nanoseconds};
    CUresult code = function ? CUDA_SUCCESS : NOT_FOUND;
    double begin_s = now_s(), busy_s = 0;
    for (double next_s = begin_s; !code && now_s() - begin_s < seconds;) {
        double launched_s = now_s();
        if ((code = launch(function, 1, 32, arguments)) || (code = CALL(cuStreamSynchronize, stream))) break;
        busy_s += now_s() - launched_s;
        next_s += period_ms * 1e-3;
        double left_s = next_s - now_s();
        if (left_s > 0) usleep((useconds_t)(left_s * 1e6));
    }
    double lasted_s = now_s() - begin_s;
    printf("{\"action\": \"duty\", \"seconds\": %.3f, \"busy_ratio\": %.4f, \"code\": %d, \"error\": \"%s\"}\n", lasted_s,
           lasted_s > 0 ? busy_s / lasted_s : 0, (int)code, code ? error_name(code) : "");
}

/* --- what calls cost --- */

static int ascending(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

static double samples[MOST_RUNS];

static void print_quantiles(const char *name, int runs, const char *end) {
    qsort(samples, (size_t)runs, sizeof *samples, ascending);
    printf("\"%s\": {\"runs\": %d, \"p10\": %.3f, \"median\": %.3f, \"p90\": %.3f, \"p99\": %.3f}%s", name, runs,
           1e6 * samples[runs / 10], 1e6 * samples[runs / 2], 1e6 * samples[runs * 9 / 10], 1e6 * samples[runs * 99 / 100], end);
}

typedef CUresult (*timed_fn)(CUfunction function);

static CUresult time_launch(CUfunction function) { return launch(function, 1, 32, NULL); }
static CUresult time_round_trip(CUfunction function) {
    CUresult code = launch(function, 1, 32, NULL);
    return code ? code : CALL(cuStreamSynchronize, stream);
}
static CUresult time_alloc(CUfunction function) {
    uint64_t handle = 0;
    (void)function;
    CUresult code = allocate_plain(&handle, 2 * MIB);
    return code ? code : release_plain(handle);
}
static CUresult time_alloc_async(CUfunction function) {
    CUdeviceptr pointer = 0;
    (void)function;
    CUresult code = CALL(cuMemAllocAsync, &pointer, 2 * MIB, stream);
    return code ? code : CALL(cuMemFreeAsync, pointer, stream);
}
static CUresult time_info(CUfunction function) {
    size_t free_bytes, total;
    (void)function;
    return CALL(cuMemGetInfo, &free_bytes, &total);
}

static void latency(int runs) {
    static const struct {
        const char *name;
        timed_fn run;
        int divisor;
    } TIMED[] = {{"launch", time_launch, 1},
                 {"launch_and_wait", time_round_trip, 1},
                 {"alloc_and_free", time_alloc, 4},
                 {"alloc_async_and_free", time_alloc_async, 4},
                 {"mem_get_info", time_info, 4}};
    CUfunction function = kernel("empty");
    if (!function) return;
    if (runs > MOST_RUNS) runs = MOST_RUNS;
    printf("{\"action\": \"latency\", ");
    for (size_t which = 0; which < sizeof TIMED / sizeof *TIMED; which++) {
        int count = runs / TIMED[which].divisor, done = 0;
        CUresult code = CUDA_SUCCESS;
        for (int i = 0; i < 20 && !code; i++) code = TIMED[which].run(function);
        CALL(cuStreamSynchronize, stream);
        for (; done < count && !code; done++) {
            double begin_s = now_s();
            code = TIMED[which].run(function);
            samples[done] = now_s() - begin_s;
            if (done % 500 == 499) CALL(cuStreamSynchronize, stream); /* the queue of launches is finite */
        }
        CALL(cuStreamSynchronize, stream);
        if (code) printf("\"%s\": {\"error\": \"%s\"}, ", TIMED[which].name, error_name(code));
        else if (done) print_quantiles(TIMED[which].name, done, ", ");
    }
    printf("\"unit\": \"microseconds\"}\n");
}

/* One of the mix: ten launches of `work`, a copy of 32 MiB on the GPU and setting as much, then waiting for all. */
static void mix(double seconds, unsigned rounds, unsigned grid) {
    CUfunction work = kernel("work"), copy = kernel("copy");
    CUdeviceptr to = 0, from = 0;
    uint64_t words = 32 * MIB / 16;
    void *working[] = {&scratch, &rounds}, *copying[] = {&to, &from, &words};
    CUresult code = !work || !copy ? NOT_FOUND : CALL(cuMemAlloc, &to, 32 * MIB);
    if (!code) code = CALL(cuMemAlloc, &from, 32 * MIB);
    int done = 0;
    double begin_s = begin_windows();
    while (!code && done < MOST_RUNS && now_s() - begin_s < seconds) {
        double one_s = now_s();
        for (int i = 0; i < 10 && !code; i++) code = launch(work, grid, BLOCK, working);
        if (!code) code = launch(copy, grid, BLOCK, copying);
        if (!code) code = CALL(cuMemsetD32Async, from, (unsigned)done, 32 * MIB / 4, stream);
        if (!code) code = CALL(cuStreamSynchronize, stream);
        samples[done++] = now_s() - one_s;
        count_in_window(1);
    }
    double lasted_s = now_s() - begin_s;
    CALL(cuMemFree, to);
    CALL(cuMemFree, from);
    printf("{\"action\": \"mix\", \"count\": %d, \"seconds\": %.4f, \"code\": %d, \"error\": \"%s\", ", done, lasted_s, (int)code,
           code ? error_name(code) : "");
    if (done) print_quantiles("each", done, ", ");
    print_windows();
    printf("}\n");
}

/* --- events --- */

enum { MOST_STREAMS = 4 };

static CUresult make_events(CUevent *made, int count) {
    CUresult code = CUDA_SUCCESS;
    for (int i = 0; i < count && !code; i++) code = CALL(cuEventCreate, &made[i], CU_EVENT_DEFAULT);
    return code;
}

static double seconds_between(CUevent one, CUevent other) {
    float ms = 0;
    CALL(cuEventElapsedTime, &ms, one, other);
    return ms / 1e3;
}

static CUresult timed_launch(CUfunction function, unsigned grid, void **arguments, CUstream on, CUevent before, CUevent after) {
    CUresult code = CALL(cuEventRecord, before, on);
    if (!code) code = CALL(cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, on, arguments, NULL);
    return code ? code : CALL(cuEventRecord, after, on);
}

/* `each` is by events; `wall_us` how long a launch took of the program's time, all streams being waited for together. */
static void events(const char *kind, double seconds, unsigned rounds, unsigned grid) {
    int count = strcmp(kind, "streams") ? 1 : MOST_STREAMS, done = 0;
    CUfunction function = kernel("work");
    CUstream streams[MOST_STREAMS];
    CUevent before[MOST_STREAMS], after[MOST_STREAMS];
    void *arguments[] = {&scratch, &rounds};
    CUresult code = function ? CUDA_SUCCESS : NOT_FOUND;
    if (!code && !(code = make_events(before, count))) code = make_events(after, count);
    for (int i = 0; i < count && !code; i++) code = CALL(cuStreamCreate, &streams[i], CU_STREAM_NON_BLOCKING);
    double begin_s = now_s();
    while (!code && now_s() - begin_s < seconds && done + count <= MOST_RUNS) {
        for (int i = 0; i < count && !code; i++) code = timed_launch(function, grid, arguments, streams[i], before[i], after[i]);
        if (!code) code = CALL(cuCtxSynchronize);
        for (int i = 0; i < count && !code; i++) samples[done++] = seconds_between(before[i], after[i]);
    }
    double lasted_s = now_s() - begin_s;
    printf("{\"action\": \"events\", \"kind\": \"%s\", \"streams\": %d, \"code\": %d, \"error\": \"%s\", \"wall_us\": %.3f, ", kind, count,
           (int)code, code ? error_name(code) : "", done ? 1e6 * lasted_s / done : 0);
    if (done) print_quantiles("each", done, ", ");
    printf("\"unit\": \"microseconds\"}\n");
}

/* Each launch writes when its first thread computed (kernels.ptx). What lies closer together than APART_NS is one turn: between two
 * kernels of a queue are some microseconds. */
enum { MOST_QUEUED = 32, MOST_PAIRS = 16384, MOST_TURNS = 1000, APART_NS = 30000 };

static void print_turns(const uint64_t *pairs, uint64_t count) {
    uint64_t begin = 0, end = 0;
    int printed = 0;
    printf("\"pairs\": %llu, \"turns\": [", (unsigned long long)count);
    for (uint64_t i = 0; i <= count && printed < MOST_TURNS; i++) {
        if (i < count && i && pairs[2 * i] < end + APART_NS) {
            end = pairs[2 * i + 1];
            continue;
        }
        if (i) printf("%s[%llu, %llu]", printed++ ? ", " : "", (unsigned long long)begin, (unsigned long long)end);
        if (i < count) begin = pairs[2 * i], end = pairs[2 * i + 1];
    }
    printf("], ");
}

static void trace(double seconds, unsigned rounds, unsigned grid) {
    static uint64_t traced[1 + 2 * MOST_PAIRS];
    CUfunction function = kernel("trace");
    CUevent before[MOST_QUEUED], after[MOST_QUEUED];
    unsigned most = MOST_PAIRS;
    void *arguments[] = {&scratch, &most, &rounds};
    CUresult code = function ? CALL(cuMemsetD32Async, scratch, 0, 2, stream) : NOT_FOUND;
    if (!code && !(code = make_events(before, MOST_QUEUED))) code = make_events(after, MOST_QUEUED);
    int launched = 0, done = 0;
    double begin_s = now_s();
    while (!code && done < MOST_RUNS && (done < launched || now_s() - begin_s < seconds)) {
        int at = launched % MOST_QUEUED, is_over = now_s() - begin_s >= seconds || launched == MOST_RUNS;
        if (!is_over && launched - done < MOST_QUEUED) {
            code = timed_launch(function, grid, arguments, stream, before[at], after[at]);
            launched++;
            continue;
        }
        at = done % MOST_QUEUED;
        if (!(code = CALL(cuEventSynchronize, after[at]))) samples[done++] = seconds_between(before[at], after[at]);
    }
    double lasted_s = now_s() - begin_s;
    if (!code) code = CALL(cuMemcpyDtoH, traced, scratch, sizeof traced);
    printf("{\"action\": \"trace\", \"launches\": %d, \"seconds\": %.4f, \"code\": %d, \"error\": \"%s\", ", launched, lasted_s, (int)code,
           code ? error_name(code) : "");
    print_turns(traced + 1, traced[0] < MOST_PAIRS ? traced[0] : MOST_PAIRS);
    if (done) print_quantiles("each", done, ", ");
    printf("\"unit\": \"microseconds\"}\n");
}

/* --- what events and queries cost, and what they say of each other --- */

enum { BIAS_LOADED_RUNS = 40, BIAS_QUEUE = 4 };
static CUfunction bias_work, bias_empty;
static unsigned bias_grid;
static void **bias_arguments;
static CUevent marks[4];
static CUstream others;

/* Each of these is one run, and says seconds. */
static double first_event_is_done(void) {
    double begin_s = now_s();
    CALL(cuEventRecord, marks[0], stream);
    while (CALL(cuEventQuery, marks[0]) == CUDA_ERROR_NOT_READY && now_s() - begin_s < 0.01)
        ;
    return now_s() - begin_s;
}
static double call_of_a_launch(void) {
    double begin_s = now_s();
    launch(bias_empty, 1, 32, NULL);
    return now_s() - begin_s;
}
/* As libgpushare measures one: three events and, later, a query. */
static double call_of_a_measured_launch(void) {
    double begin_s = now_s();
    timed_launch(bias_empty, 1, NULL, stream, marks[0], marks[1]);
    CALL(cuEventRecord, marks[2], stream);
    return now_s() - begin_s;
}
static double call_of_a_query(void) {
    double begin_s = now_s();
    CALL(cuEventQuery, marks[0]);
    return now_s() - begin_s;
}
static double measured_between(int one, int is_queued) {
    for (int i = 0; i < BIAS_QUEUE && is_queued; i++) launch(bias_work, bias_grid, BLOCK, bias_arguments);
    call_of_a_measured_launch();
    CALL(cuStreamSynchronize, stream);
    return seconds_between(marks[one], marks[one + 1]);
}
static double empty_kernel_idle(void) { return measured_between(0, 0); }
static double two_events_idle(void) { return measured_between(1, 0); }
static double empty_kernel_queued(void) { return measured_between(0, 1); }
static double two_events_queued(void) { return measured_between(1, 1); }
/* Two streams with a kernel each: the time from the first event to the last one, at once and by way of the third. */
static void in_two_streams(void) {
    timed_launch(bias_work, bias_grid, bias_arguments, stream, marks[0], marks[1]);
    timed_launch(bias_work, bias_grid, bias_arguments, others, marks[2], marks[3]);
    CALL(cuCtxSynchronize);
}
static double across_streams_off(void) {
    in_two_streams();
    double off_s = seconds_between(marks[0], marks[3]) - (seconds_between(marks[0], marks[2]) + seconds_between(marks[2], marks[3]));
    return off_s < 0 ? -off_s : off_s;
}
static double union_less_wall(void) {
    double begin_s = now_s();
    in_two_streams();
    double wall_s = now_s() - begin_s, one_s = seconds_between(marks[0], marks[1]), other_s = seconds_between(marks[0], marks[3]);
    return (one_s > other_s ? one_s : other_s) - wall_s;
}

static void bias(int runs, unsigned rounds, unsigned grid) {
    static const struct {
        const char *name;
        double (*run)(void);
        int is_loaded;
    } MEASURED[] = {{"first_event_is_done", first_event_is_done, 0}, {"call_of_a_launch", call_of_a_launch, 0},
                    {"call_of_a_measured_launch", call_of_a_measured_launch, 0}, {"call_of_a_query", call_of_a_query, 0},
                    {"empty_kernel_idle", empty_kernel_idle, 0}, {"two_events_idle", two_events_idle, 0},
                    {"empty_kernel_queued", empty_kernel_queued, 1}, {"two_events_queued", two_events_queued, 1},
                    {"across_streams_off", across_streams_off, 1}, {"union_less_wall", union_less_wall, 1}};
    void *arguments[] = {&scratch, &rounds};
    int within = 0, before_return = 0;
    bias_arguments = arguments, bias_grid = grid;
    if (runs > MOST_RUNS) runs = MOST_RUNS;
    if (!(bias_work = kernel("work")) || !(bias_empty = kernel("empty"))) return;
    CUresult code = make_events(marks, 4);
    if (!code) code = CALL(cuStreamCreate, &others, CU_STREAM_NON_BLOCKING);
    printf("{\"action\": \"bias\", \"code\": %d, \"error\": \"%s\", ", (int)code, code ? error_name(code) : "");
    for (size_t which = 0; which < sizeof MEASURED / sizeof *MEASURED && !code; which++) {
        int count = MEASURED[which].is_loaded && runs > BIAS_LOADED_RUNS ? BIAS_LOADED_RUNS : runs;
        for (int i = 0; i < count; i++) {
            code = CALL(cuCtxSynchronize);
            samples[i] = MEASURED[which].run();
            within += !which && samples[i] <= 4e-6;
        }
        print_quantiles(MEASURED[which].name, count, ", ");
    }
    for (int i = 0; i < runs && !code; i++) { /* what libgpushare takes for an idle GPU */
        code = CALL(cuCtxSynchronize);
        timed_launch(bias_empty, 1, NULL, stream, marks[0], marks[1]);
        before_return += CALL(cuEventQuery, marks[0]) == CUDA_SUCCESS;
    }
    CALL(cuCtxSynchronize);
    printf("\"runs\": %d, \"within_4_us\": %d, \"done_behind_the_launch\": %d}\n", runs, within, before_return);
}

static long long epoch_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

static void busy(double idle_s, double busy_s) {
    CUfunction function = kernel("spin");
    uint64_t nanoseconds = 5000000;
    void *arguments[] = {&nanoseconds};
    CUresult code = function ? CUDA_SUCCESS : NOT_FOUND;
    usleep((useconds_t)(idle_s * 1e6));
    long long began_us = epoch_us(), ended_us = began_us;
    while (!code && (ended_us = epoch_us()) - began_us < (long long)(busy_s * 1e6)) {
        if (!(code = launch(function, 1, 32, arguments))) code = launch(function, 1, 32, arguments); /* the next one is there already */
        if (!code) code = CALL(cuStreamSynchronize, stream);
    }
    usleep((useconds_t)(idle_s * 1e6));
    printf("{\"action\": \"busy\", \"began_us\": %lld, \"ended_us\": %lld, \"code\": %d, \"error\": \"%s\"}\n", began_us, ended_us, (int)code,
           code ? error_name(code) : "");
}

/* --- what the driver keeps for a program that has given it back --- */

static uint64_t reserved_in(CUmemoryPool of) {
    cuuint64_t bytes = 0;
    CALL(cuMemPoolGetAttribute, of, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes);
    return bytes;
}

static CUresult launch_graph_with(size_t bytes) {
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    CUgraph graph = NULL;
    CUgraphExec made = NULL;
    CUgraphNode allocated, freed;
    memset(&parameters, 0, sizeof parameters);
    parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    parameters.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    parameters.poolProps.location.id = device;
    parameters.bytesize = bytes;
    CUresult code = CALL(cuGraphCreate, &graph, 0);
    if (!code) code = CALL(cuGraphAddMemAllocNode, &allocated, graph, NULL, 0, &parameters);
    if (!code) code = CALL(cuGraphAddMemFreeNode, &freed, graph, &allocated, 1, parameters.dptr);
    if (code == CUDA_ERROR_NOT_SUPPORTED) code = CUDA_SUCCESS; /* without the free it stays allocated */
    if (!code) code = CALL(cuGraphInstantiateWithFlags, &made, graph, 0);
    if (!code) code = CALL(cuGraphLaunch, made, stream);
    return code ? code : CALL(cuStreamSynchronize, stream);
}

static void reserved(size_t mib) {
    CUmemoryPool own = NULL;
    uint64_t handle = 0, other = 0, in_graphs = 0;
    cuuint64_t all = UINT64_MAX;
    CUresult pool_code = allocate_pool(&handle, mib * MIB), own_code = CALL(cuDeviceGetDefaultMemPool, &own, device);
    if (!pool_code) pool_code = CALL(cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all);
    if (!pool_code) pool_code = release_async(handle);
    if (!own_code) own_code = CALL(cuMemPoolSetAttribute, own, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all);
    if (!own_code) own_code = allocate_async(&other, mib * MIB);
    if (!own_code) own_code = release_async(other);
    CUresult graph_code = launch_graph_with(mib * MIB);
    if (!graph_code) graph_code = CALL(cuDeviceGetGraphMemAttribute, device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &in_graphs);
    printf("{\"action\": \"reserved\", \"asked_mib\": %zu, \"pool_mib\": %llu, \"own_pool_mib\": %llu, \"graph_mib\": %llu, "
           "\"codes\": [%d, %d, %d]}\n",
           mib, (unsigned long long)(pool ? reserved_in(pool) / MIB : 0), (unsigned long long)(own ? reserved_in(own) / MIB : 0),
           (unsigned long long)(in_graphs / MIB), (int)pool_code, (int)own_code, (int)graph_code);
}

static void fault(void) {
    CUfunction function = kernel("fault");
    uint64_t address = 16;
    void *arguments[] = {&address};
    if (!function) return;
    CUresult launched = launch(function, 1, 1, arguments), waited = CALL(cuStreamSynchronize, stream);
    printf("{\"action\": \"fault\", \"launch_code\": %d, \"code\": %d, \"error\": \"%s\"}\n", (int)launched, (int)waited,
           waited ? error_name(waited) : "");
}

static void wait_for_line(void) {
    char line[64];
    printf("{\"action\": \"wait\"}\n");
    if (!fgets(line, sizeof line, stdin)) exit(0);
}

int main(int count, char **words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int first = count > 1 && !strcmp(words[1], "--dlsym") ? 2 : 1;
    if (first >= count) {
        fprintf(stderr, "usage: gpu-probe [--dlsym] ACTION...; the actions stand at the head of probe.c\n");
        return 2;
    }
    if (start(first == 2)) return 1;
    for (int i = first; i < count; i++) {
        char kind[32];
        double one, two, three;
        unsigned rounds, grid, most_mib;
        if (!strcmp(words[i], "facts")) facts();
        else if (!strcmp(words[i], "wait")) wait_for_line();
        else if (!strcmp(words[i], "fault")) fault();
        else if (sscanf(words[i], "work-for:%lf", &one) == 1) work_for(one);
        else if (sscanf(words[i], "memory:%31[a-z0-9]:%u", kind, &most_mib) == 2) memory(kind, most_mib);
        else if (sscanf(words[i], "launch:%31[a-z]:%lf:%u:%u", kind, &one, &rounds, &grid) == 4) launches(kind, one, rounds, grid);
        else if (sscanf(words[i], "events:%31[a-z]:%lf:%u:%u", kind, &one, &rounds, &grid) == 4) events(kind, one, rounds, grid);
        else if (sscanf(words[i], "trace:%lf:%u:%u", &one, &rounds, &grid) == 3) trace(one, rounds, grid);
        else if (sscanf(words[i], "bias:%u:%u:%u", &most_mib, &rounds, &grid) == 3) bias((int)most_mib, rounds, grid);
        else if (sscanf(words[i], "busy:%lf:%lf", &one, &two) == 2) busy(one, two);
        else if (sscanf(words[i], "reserved:%u", &most_mib) == 1) reserved(most_mib);
        else if (sscanf(words[i], "duty:%lf:%lf:%lf", &one, &two, &three) == 3) duty(one, two, three);
        else if (sscanf(words[i], "latency:%u", &rounds) == 1) latency((int)rounds);
        else if (sscanf(words[i], "mix:%lf:%u:%u", &one, &rounds, &grid) == 3) mix(one, rounds, grid);
        else {
            fprintf(stderr, "gpu-probe: unknown action %s\n", words[i]);
            return 2;
        }
        fflush(stdout);
    }
    free_pieces();
    return 0;
}
