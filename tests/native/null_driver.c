/* libcuda.so.1 of a driver that does nothing: what a call of it takes under a library is what the library takes. Of the functions
 * only those without which gpu_program's `speed` does not go on. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <string.h>

static int a_context;
static CUdeviceptr next = 1ull << 40;

CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }

/* GPU-00000000-0000-4000-8000-000000000000, the fake driver's first. */
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[6] = 0x40;
    uuid->bytes[8] = (char)0x80;
    return (void)device, CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{ return (void)device, *context = (CUcontext)(void *)&a_context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)(void *)&a_context, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) { return *address = next += bytes, CUDA_SUCCESS; }
CUresult cuMemFree_v2(CUdeviceptr address) { return (void)address, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return (void)image, *module = (CUmodule)(void *)&next, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{ return (void)module, (void)name, *function = (CUfunction)(void *)&next, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{ return (void)stream, *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) { return (void)mode, CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent *event, unsigned flags) { return (void)flags, *event = (CUevent)(void *)&next, CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) { return (void)event, (void)stream, CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent event) { return (void)event, CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent until) { return (void)from, (void)until, *ms = 1e-6f, CUDA_SUCCESS; }
CUresult cuEventDestroy_v2(CUevent event) { return (void)event, CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned u, unsigned v, unsigned w, unsigned shared,
                        CUstream stream, void **parameters, void **extra)
{
    (void)function, (void)x, (void)y, (void)z, (void)u, (void)v, (void)w, (void)shared, (void)stream, (void)parameters, (void)extra;
    return CUDA_SUCCESS;
}
