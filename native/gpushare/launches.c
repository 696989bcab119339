/* What a program launches: kernels, fills and copies within the GPU, each of which is limited (limit.c); and how it waits for them.
 */
#include "library.h"

#define LAUNCH(function, all_blocks, all_threads, on_stream, per_thread, call)                                             \
    struct launch launch = {                                                                                               \
        .what = function, .blocks = all_blocks, .threads = all_threads, .stream = on_stream, .is_per_thread = per_thread}; \
    struct measurement measurement;                                                                                        \
    begin_launch(&launch, &measurement);                                                                                   \
    CUresult result = call;                                                                                                \
    end_launch(&measurement, result == CUDA_SUCCESS);                                                                      \
    return result

static uint64_t product(unsigned x, unsigned y, unsigned z) { return (uint64_t)x * y * z; }

#define KERNEL_PARAMETERS                                                                                                \
    CUfunction function, unsigned int x, unsigned int y, unsigned int z, unsigned int u, unsigned int v, unsigned int w, \
        unsigned int shared, CUstream stream, void **parameters

HOOK(cuLaunchKernel, (KERNEL_PARAMETERS, void **extra), (function, x, y, z, u, v, w, shared, stream, parameters, extra))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, false,
           real(function, x, y, z, u, v, w, shared, stream, parameters, extra));
}
HOOK(cuLaunchKernel_ptsz, (KERNEL_PARAMETERS, void **extra), (function, x, y, z, u, v, w, shared, stream, parameters, extra))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, true,
           real(function, x, y, z, u, v, w, shared, stream, parameters, extra));
}
HOOK(cuLaunchCooperativeKernel, (KERNEL_PARAMETERS), (function, x, y, z, u, v, w, shared, stream, parameters))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, false,
           real(function, x, y, z, u, v, w, shared, stream, parameters));
}
HOOK(cuLaunchCooperativeKernel_ptsz, (KERNEL_PARAMETERS), (function, x, y, z, u, v, w, shared, stream, parameters))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, true,
           real(function, x, y, z, u, v, w, shared, stream, parameters));
}

static uint64_t blocks_of(const CUlaunchConfig *how) { return product(how->gridDimX, how->gridDimY, how->gridDimZ); }
static uint64_t threads_of(const CUlaunchConfig *how) { return product(how->blockDimX, how->blockDimY, how->blockDimZ); }

HOOK(cuLaunchKernelEx, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     (how, function, parameters, extra))
{
    if (!how)
        return real(how, function, parameters, extra);
    LAUNCH(function, blocks_of(how), threads_of(how), how->hStream, false, real(how, function, parameters, extra));
}
HOOK(cuLaunchKernelEx_ptsz, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     (how, function, parameters, extra))
{
    if (!how)
        return real(how, function, parameters, extra);
    LAUNCH(function, blocks_of(how), threads_of(how), how->hStream, true, real(how, function, parameters, extra));
}

/* On several GPUs at once: each is paid on its own account. A thread measures one launch at a time, so they take turns in that. */
HOOK(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS *all, unsigned int count, unsigned int flags), (all, count, flags))
{
    static _Atomic unsigned turns;
    struct measurement each[MOST_GPUS];
    unsigned known = !all ? 0 : count < MOST_GPUS ? count : MOST_GPUS, measured = known ? turns++ % known : 0;
    for (unsigned i = 0; i < known; i++) {
        const CUDA_LAUNCH_PARAMS *one = &all[i];
        struct launch launch = {.what = one->function,
                                .blocks = product(one->gridDimX, one->gridDimY, one->gridDimZ),
                                .threads = product(one->blockDimX, one->blockDimY, one->blockDimZ),
                                .stream = one->hStream,
                                .is_unmeasured = i != measured};
        begin_launch(&launch, &each[i]);
    }
    CUresult result = real(all, count, flags);
    for (unsigned i = 0; i < known; i++)
        end_launch(&each[i], result == CUDA_SUCCESS);
    return result;
}

/* Of CUDA 3: the block's size was set before. */
HOOK(cuLaunch, (CUfunction function), (function)) { LAUNCH(function, 1, 0, NULL, false, real(function)); }
HOOK(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height))
{ LAUNCH(function, product((unsigned)width, (unsigned)height, 1), 0, NULL, false, real(function, width, height)); }
HOOK(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream))
{ LAUNCH(function, product((unsigned)width, (unsigned)height, 1), 0, stream, false, real(function, width, height, stream)); }

/* Fills and copies within the GPU are launches, too. A copy from or to the host goes over the bus, while others compute. */
#define FILL(name, parameters, arguments, bytes, on_stream, per_thread)                                                   \
    HOOK(name, parameters, arguments)                                                                                     \
    { LAUNCH((const void *)(uintptr_t)(SLOT_##name + 1), (bytes) / 4096 + 1, 0, on_stream, per_thread, real arguments); }
#define FILLS(name, parameters, arguments, bytes)                                                                 \
    FILL(name##_v2, (UNPACK parameters), (UNPACK arguments), bytes, NULL, false)                                  \
    FILL(name##_v2_ptds, (UNPACK parameters), (UNPACK arguments), bytes, NULL, true)                              \
    FILL(name##Async, (UNPACK parameters, CUstream stream), (UNPACK arguments, stream), bytes, stream, false)     \
    FILL(name##Async_ptsz, (UNPACK parameters, CUstream stream), (UNPACK arguments, stream), bytes, stream, true)
FILLS(cuMemsetD8, (CUdeviceptr to, unsigned char value, size_t count), (to, value, count), count)
FILLS(cuMemsetD16, (CUdeviceptr to, unsigned short value, size_t count), (to, value, count), 2 * count)
FILLS(cuMemsetD32, (CUdeviceptr to, unsigned int value, size_t count), (to, value, count), 4 * count)
FILLS(cuMemsetD2D8, (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height),
      (to, pitch, value, width, height), width *height)
FILLS(cuMemsetD2D16, (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height),
      (to, pitch, value, width, height), 2 * width * height)
FILLS(cuMemsetD2D32, (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height),
      (to, pitch, value, width, height), 4 * width * height)
FILL(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), bytes, NULL, false)
FILL(cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), bytes, NULL, true)
FILL(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream), bytes,
     stream, false)
FILL(cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream), bytes,
     stream, true)

/* ---- waiting for the GPU ---- */

#define WAIT(closes, call)         \
    closes;                        \
    uint64_t begun_at = now_ns();  \
    CUresult result = call;        \
    end_wait(now_ns() - begun_at); \
    read_freed()

HOOK(cuStreamSynchronize, (CUstream stream), (stream))
{
    WAIT(begin_wait(stream, false), real(stream));
    return result;
}
HOOK(cuStreamSynchronize_ptsz, (CUstream stream), (stream))
{
    WAIT(begin_wait(stream, true), real(stream));
    return result;
}
HOOK(cuCtxSynchronize_v2, (CUcontext context), (context))
{
    WAIT((begin_wait(NULL, false), begin_wait(NULL, true)), real(context));
    return result;
}
HOOK(cuEventSynchronize, (CUevent event), (event))
{
    WAIT((void)0, real(event)); /* nobody knows of which stream */
    return result;
}
EXPORTED CUresult cuCtxSynchronize(void) /* HOOK has no list without parameters */
{
    uintptr_t frame;
    if (!enter_hook(&frame))
        return REAL(cuCtxSynchronize)();
    WAIT((begin_wait(NULL, false), begin_wait(NULL, true)), REAL(cuCtxSynchronize)());
    leave_hook();
    return result;
}
extern __typeof__(cuCtxSynchronize) gpushare_cuCtxSynchronize __attribute__((alias("cuCtxSynchronize"), visibility("hidden")));
