/* Graphs: a launch of one is many launches of kernels, and its nodes may allocate.
 *
 * Memory of a graph's nodes is the driver's from its first launch or upload on, and stays with the GPU, for other graphs too, until it
 * is trimmed. What is reserved the driver says for the GPU as a whole; before the first launch it is what the nodes ask for.
 */
#define _GNU_SOURCE
#include "library.h"

#include <stdlib.h>

enum { MOST_GPU_ORDINALS = 64, MOST_NODES = 1 << 20, DEEPEST = 8 };
static uint64_t reserved[MOST_GPU_ORDINALS];

static uint64_t ask_graphs(CUdevice device, CUgraphMem_attribute attribute)
{
    cuuint64_t bytes = 0;
    return REAL(cuDeviceGetGraphMemAttribute)(device, attribute, &bytes) == CUDA_SUCCESS ? bytes : 0;
}

void read_graph_memory(CUdevice device, bool trims)
{
    if (device < 0 || device >= MOST_GPU_ORDINALS)
        return;
    pthread_mutex_lock(&reserves_guard);
    if (reserved[device] || !trims) {
        CUstreamCaptureMode mode = relax_capture();
        if (trims)
            REAL(cuDeviceGraphMemTrim)(device);
        uint64_t found = ask_graphs(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
        restore_capture(mode);
        if (found > reserved[device])
            charge_bytes(gpu_of_device(device), GRAPH, found - reserved[device]);
        else if (found < reserved[device])
            give_bytes(gpu_of_device(device), GRAPH, reserved[device] - found);
        reserved[device] = found;
    }
    pthread_mutex_unlock(&reserves_guard);
}

HOOK(cuDeviceGraphMemTrim, (CUdevice device), (device))
{
    CUresult result = real(device);
    read_graph_memory(device, false);
    return result;
}

/* ---- what a graph's nodes ask for ---- */

static uint64_t bytes_of_graph(CUgraph graph, unsigned depth);

static uint64_t bytes_of_node(CUgraphNode node, unsigned depth)
{
    CUgraphNodeType type;
    CUDA_MEM_ALLOC_NODE_PARAMS memory;
    CUgraph child;
    if (REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return 0;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && REAL(cuGraphMemAllocNodeGetParams)(node, &memory) == CUDA_SUCCESS)
        return memory.poolProps.location.type == CU_MEM_LOCATION_TYPE_HOST ? 0 : memory.bytesize;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        return bytes_of_graph(child, depth + 1);
    return 0;
}

static uint64_t bytes_of_graph(CUgraph graph, unsigned depth)
{
    size_t count = 0;
    uint64_t bytes = 0;
    if (depth > DEEPEST || REAL(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || !count || count > MOST_NODES)
        return 0;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (nodes && REAL(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS)
        for (size_t i = 0; i < count; i++)
            bytes += bytes_of_node(nodes[i], depth);
    free(nodes);
    return bytes;
}

static CUresult remember_graph(CUresult result, const CUgraphExec *made, CUgraph from)
{
    if (result == CUDA_SUCCESS)
        remember(&(struct allocation){
            .value = (uintptr_t)*made, .class = EXECUTABLE, .references = 1, .bytes = bytes_of_graph(from, 0)});
    return result;
}

HOOK(cuGraphInstantiate, (CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *log, size_t size),
     (made, from, failed, log, size))
{ return remember_graph(real(made, from, failed, log, size), made, from); }
HOOK_ALSO(cuGraphInstantiate_v2, cuGraphInstantiate, (CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *log, size_t size),
          (made, from, failed, log, size));
HOOK(cuGraphInstantiateWithFlags, (CUgraphExec *made, CUgraph from, unsigned long long flags), (made, from, flags))
{ return remember_graph(real(made, from, flags), made, from); }
HOOK(cuGraphInstantiateWithParams, (CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters),
     (made, from, parameters))
{ return remember_graph(real(made, from, parameters), made, from); }
HOOK_ALSO(cuGraphInstantiateWithParams_ptsz, cuGraphInstantiateWithParams,
          (CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), (made, from, parameters));

/* Another graph of the same shape: its kernels may take another time. Allocations are not changed by it. */
static CUresult forget_graph(CUresult result, CUgraphExec executable)
{
    struct allocation old;
    if (result == CUDA_SUCCESS && take_out(EXECUTABLE, (uintptr_t)executable, &old)) {
        old.handle++; /* the graph's revision: its cost is looked up by it */
        old.references = 1;
        remember(&old);
    }
    return result;
}

HOOK(cuGraphExecUpdate, (CUgraphExec executable, CUgraph graph, CUgraphNode *failed, CUgraphExecUpdateResult *why),
     (executable, graph, failed, why))
{ return forget_graph(real(executable, graph, failed, why), executable); }
HOOK(cuGraphExecUpdate_v2, (CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo *why), (executable, graph, why))
{ return forget_graph(real(executable, graph, why), executable); }

HOOK(cuGraphExecDestroy, (CUgraphExec executable), (executable))
{
    struct allocation old;
    CUresult result = real(executable);
    if (result == CUDA_SUCCESS)
        take_out(EXECUTABLE, (uintptr_t)executable, &old);
    return result;
}

/* ---- launches ---- */

/* Counts what the graph will take at its first launch; afterwards its memory is its own. false: there is too little. Of a graph that
   allocates it holds the guard until end_memory. */
static bool begin_memory(const struct allocation *graph, CUdevice device)
{
    if (!graph->bytes || device < 0 || device >= MOST_GPU_ORDINALS)
        return true;
    pthread_mutex_lock(&reserves_guard);
    read_graph_memory(device, false);
    uint64_t wanted = ask_graphs(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) + graph->bytes;
    uint64_t lacking = wanted > reserved[device] ? wanted - reserved[device] : 0;
    if (lacking && !reserve_bytes(gpu_of_device(device), device, GRAPH, lacking)) {
        pthread_mutex_unlock(&reserves_guard);
        return false;
    }
    reserved[device] += lacking;
    return true;
}

static void end_memory(const struct allocation *graph, CUdevice device, bool is_done)
{
    struct allocation old;
    if (!graph->bytes || device < 0 || device >= MOST_GPU_ORDINALS)
        return;
    read_graph_memory(device, false);
    if (is_done && take_out(EXECUTABLE, graph->value, &old)) {
        old.bytes = 0;
        old.references = 1;
        remember(&old);
    }
    pthread_mutex_unlock(&reserves_guard);
}

static CUresult launch_graph(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec executable, CUstream stream, bool is_per_thread,
                             bool computes)
{
    struct allocation graph = {.value = (uintptr_t)executable};
    struct measurement measurement;
    CUdevice device = current_device();
    /* One that is not known, of a function that is not hooked, has no memory of its own here; its time is measured as any other's. */
    look_up(EXECUTABLE, (uintptr_t)executable, &graph);
    struct launch launch = {.what = executable, .threads = graph.handle, .stream = stream, .is_per_thread = is_per_thread};
    if (is_capturing(stream, is_per_thread)) /* it becomes a part of another graph */
        return real(executable, stream);
    if (computes)
        begin_launch(&launch, &measurement);
    if (!begin_memory(&graph, device)) {
        if (computes)
            end_launch(&launch, &measurement, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = real(executable, stream);
    end_memory(&graph, device, result == CUDA_SUCCESS);
    if (computes)
        end_launch(&launch, &measurement, result == CUDA_SUCCESS);
    return result;
}

HOOK(cuGraphLaunch, (CUgraphExec executable, CUstream stream), (executable, stream))
{ return launch_graph(real, executable, stream, false, true); }
HOOK(cuGraphLaunch_ptsz, (CUgraphExec executable, CUstream stream), (executable, stream))
{ return launch_graph(real, executable, stream, true, true); }
HOOK(cuGraphUpload, (CUgraphExec executable, CUstream stream), (executable, stream))
{ return launch_graph(real, executable, stream, false, false); }
HOOK(cuGraphUpload_ptsz, (CUgraphExec executable, CUstream stream), (executable, stream))
{ return launch_graph(real, executable, stream, true, false); }

void forget_graphs(void)
{
    for (unsigned i = 0; i < MOST_GPU_ORDINALS; i++)
        reserved[i] = 0;
}
