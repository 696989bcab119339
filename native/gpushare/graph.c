/* Graphs: a launch of one is many launches of kernels, and its nodes may allocate.
 *
 * Memory of a graph's nodes is mapped at its launch or upload, and stays with the GPU, for other graphs too, until it is trimmed; the
 * next launch maps it again (CUDA Programming Guide, "Graph Memory Nodes"). What is reserved and what is mapped the driver says for
 * the GPU as a whole; of one graph only what its nodes ask for is known: of which GPU, each node says, wherever the graph is launched.
 */
#define _GNU_SOURCE
#include "library.h"

#include <stdlib.h>

enum { MOST_GPU_ORDINALS = 64 };
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
    hold(&reserves_guard);
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
    release(&reserves_guard);
}

/* Another thread's launch may count on what is reserved. */
HOOK(cuDeviceGraphMemTrim, (CUdevice device), (device))
{
    hold(&reserves_guard);
    CUresult result = real(device);
    read_graph_memory(device, false);
    release(&reserves_guard);
    return result;
}

/* ---- what a graph's nodes ask for ---- */

struct range {
    CUdeviceptr begin, end;
    unsigned device;
};
/* Nodes of a graph and behind them those of its children: a call for each level would need as much stack as there are levels. */
struct found {
    CUgraphNode *nodes;
    struct range *all;
    size_t nodes_count, count;
    uint64_t devices; /* a bit for each */
};

/* false: the program has no memory for them. */
static bool add_nodes(struct found *to, CUgraph graph)
{
    size_t more = 0;
    if (REAL(cuGraphGetNodes)(graph, NULL, &more) != CUDA_SUCCESS || !more)
        return true;
    CUgraphNode *nodes = realloc(to->nodes, (to->nodes_count + more) * sizeof *nodes);
    if (!nodes)
        return false;
    to->nodes = nodes;
    if (REAL(cuGraphGetNodes)(graph, nodes + to->nodes_count, &more) == CUDA_SUCCESS)
        to->nodes_count += more;
    return true;
}

static bool add_node(struct found *to, CUgraphNode node)
{
    CUgraphNodeType type;
    CUDA_MEM_ALLOC_NODE_PARAMS memory;
    CUgraph child;
    CUdevice device;
    if (REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return true;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        return add_nodes(to, child);
    if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || REAL(cuGraphMemAllocNodeGetParams)(node, &memory) != CUDA_SUCCESS ||
        (device = device_at(memory.poolProps.location.type, memory.poolProps.location.id)) < 0)
        return true;
    struct range *all = realloc(to->all, (to->count + 1) * sizeof *all);
    if (!all)
        return false;
    device = device < MOST_GPU_ORDINALS ? device : MOST_GPU_ORDINALS - 1;
    to->all = all;
    to->all[to->count++] = (struct range){memory.dptr, memory.dptr + memory.bytesize, (unsigned)device};
    to->devices |= (uint64_t)1 << device;
    return true;
}

static int by_begin(const void *one, const void *other)
{
    CUdeviceptr a = ((const struct range *)one)->begin, b = ((const struct range *)other)->begin;
    return (a > b) - (a < b);
}

/* Allocations that follow each other may have the same addresses, and so the same memory: each address counts once. */
static uint64_t bytes_on(unsigned device, const struct found *sorted)
{
    uint64_t bytes = 0;
    CUdeviceptr end = 0;
    for (const struct range *one = sorted->all; one < sorted->all + sorted->count; one++)
        if (one->device == device && one->end > end) {
            bytes += one->end - (one->begin > end ? one->begin : end);
            end = one->end;
        }
    return bytes;
}

#define FOR_EACH_DEVICE(device, bits)                               \
    for (unsigned device = 0; device < MOST_GPU_ORDINALS; device++) \
        if ((bits) >> device & 1)

/* What a graph's nodes take of one GPU. An address has fewer bits than a number here. */
static uint64_t number_of_nodes(uint64_t executable, unsigned device) { return executable * MOST_GPU_ORDINALS + device; }
static uint64_t bytes_of_nodes(uint64_t executable, unsigned device)
{
    struct allocation nodes;
    return look_up(NODES, number_of_nodes(executable, device), &nodes) ? nodes.bytes : 0;
}

enum { NOT_LAUNCHED = -1 };
/* One whose memory the program has no room to note is not made: else nobody would count it. */
static CUresult remember_graph(CUresult result, CUgraphExec *made, CUgraph from)
{
    struct found found = {0};
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t executable = (uintptr_t)*made;
    bool is_noted = add_nodes(&found, from);
    for (size_t i = 0; is_noted && i < found.nodes_count; i++)
        is_noted = add_node(&found, found.nodes[i]);
    if (found.count)
        qsort(found.all, found.count, sizeof *found.all, by_begin);
    FOR_EACH_DEVICE(device, found.devices)
    {
        struct allocation of_gpu = {.value = number_of_nodes(executable, device), .class = NODES, .references = 1};
        of_gpu.bytes = bytes_on(device, &found);
        is_noted = is_noted && remember(&of_gpu);
    }
    struct allocation graph = {.value = executable, .class = EXECUTABLE, .gpu = NOT_LAUNCHED, .references = 1};
    graph.devices = found.devices;
    is_noted = is_noted && remember(&graph);
    free(found.nodes);
    free(found.all);
    if (is_noted)
        return result;
    FOR_EACH_DEVICE(device, found.devices)
    take_out(NODES, number_of_nodes(executable, device), &(struct allocation){0});
    REAL(cuGraphExecDestroy)(*made);
    *made = NULL;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

HOOK(cuGraphInstantiate, (CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *log, size_t size),
     (made, from, failed, log, size))
{ return remember_graph(real(made, from, failed, log, size), made, from); }
HOOK_ALSO(cuGraphInstantiate_v2, cuGraphInstantiate, (CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *log, size_t size),
          (made, from, failed, log, size));
HOOK(cuGraphInstantiateWithFlags, (CUgraphExec *made, CUgraph from, unsigned long long flags), (made, from, flags))
{ return remember_graph(real(made, from, flags), made, from); }

/* Another graph of the same shape: its kernels may take another time. Allocations are not changed by it. */
static CUresult forget_graph(CUresult result, CUgraphExec executable)
{
    struct allocation changed;
    if (result == CUDA_SUCCESS && look_up(EXECUTABLE, (uintptr_t)executable, &changed)) {
        changed.handle++; /* the graph's revision: its cost is looked up by it */
        amend(&changed);
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
    bool is_known = take_out(EXECUTABLE, (uintptr_t)executable, &old);
    CUresult result = real(executable);
    if (is_known && result != CUDA_SUCCESS) {
        put_back(old);
    } else if (is_known) {
        FOR_EACH_DEVICE(device, old.devices)
        take_out(NODES, number_of_nodes(old.value, device), &(struct allocation){0});
    }
    return result;
}

/* ---- launches ---- */

static uint64_t lacking_for(uint64_t bytes, CUdevice device)
{
    uint64_t wanted = ask_graphs(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) + bytes;
    return wanted > reserved[device] ? wanted - reserved[device] : 0;
}

static bool take_lacking(uint64_t bytes, CUdevice device)
{
    int gpu = gpu_of_device(device);
    read_graph_memory(device, false);
    uint64_t lacking = lacking_for(bytes, device);
    bool is_taken = lacking == 0 || take_bytes(gpu, GRAPH, lacking);
    if (!is_taken && free_unused(gpu, device)) { /* trimmed, it may lack more than before */
        lacking = lacking_for(bytes, device);
        is_taken = lacking == 0 || take_bytes(gpu, GRAPH, lacking);
    }
    if (is_taken)
        reserved[device] += lacking; /* counted now; read_graph_memory corrects it by what the driver says */
    return is_taken;
}

/* The guard is held over the launch, as over an allocation of a pool. */
static CUresult launch_with_more_memory(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec executable, CUstream stream,
                                        const struct allocation *graph)
{
    bool is_taken = true;
    hold(&reserves_guard);
    FOR_EACH_DEVICE(device, graph->devices)
    is_taken = is_taken && take_lacking(bytes_of_nodes(graph->value, device), (CUdevice)device);
    CUresult result = is_taken ? real(executable, stream) : CUDA_ERROR_OUT_OF_MEMORY;
    FOR_EACH_DEVICE(device, graph->devices)
    read_graph_memory((CUdevice)device, false);
    release(&reserves_guard);
    return result;
}

static CUresult launch_with_memory(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec executable, CUstream stream,
                                   const struct allocation *graph)
{
    bool is_first = graph->gpu == NOT_LAUNCHED, is_mapped = !is_first;
    CUresult result;
    if (!graph->devices)
        return real(executable, stream);
    /* A later launch takes nothing while as much as it needs is mapped: that is its own, or of graphs which do not run at the same
       time and share it, as the driver lets them. It may wait for a full queue, so it holds no guard. What it has got all the same,
       in another stream than before or after a trim by another thread meanwhile, is counted behind it. */
    FOR_EACH_DEVICE(device, graph->devices)
    is_mapped =
        is_mapped && ask_graphs((CUdevice)device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) >= bytes_of_nodes(graph->value, device);
    if (is_mapped) {
        result = real(executable, stream);
        FOR_EACH_DEVICE(device, graph->devices)
        read_graph_memory((CUdevice)device, false);
        return result;
    }
    result = launch_with_more_memory(real, executable, stream, graph);
    if (is_first && result == CUDA_SUCCESS) {
        struct allocation launched = *graph;
        launched.gpu = 0;
        amend(&launched);
    }
    return result;
}

static CUresult launch_graph(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec executable, CUstream stream, bool is_per_thread,
                             bool computes)
{
    struct allocation graph = {.value = (uintptr_t)executable};
    struct measurement measurement;
    /* One that is not known, of a function that is not hooked, has no memory of its own here; its time is measured as any other's. */
    look_up(EXECUTABLE, (uintptr_t)executable, &graph);
    struct launch launch = {.what = executable, .threads = graph.handle, .stream = stream, .is_per_thread = is_per_thread};
    if (is_capturing(stream, is_per_thread)) /* it becomes a part of another graph */
        return real(executable, stream);
    if (computes)
        begin_launch(&launch, &measurement);
    CUresult result = launch_with_memory(real, executable, stream, &graph);
    if (computes)
        end_launch(&measurement, result == CUDA_SUCCESS);
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

/* Its upload is made here, as a call of it would be. One that gets no memory is not made. */
static CUresult instantiate_and_upload(CUresult (*real)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *), CUgraphExec *made,
                                       CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters, bool is_per_thread)
{
    cuuint64_t flags = parameters ? parameters->flags : 0;
    if (!(flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
        return remember_graph(real(made, from, parameters), made, from);
    parameters->flags = flags & ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    CUresult result = remember_graph(real(made, from, parameters), made, from);
    parameters->flags = flags;
    if (result != CUDA_SUCCESS)
        return result;
    result = is_per_thread ? launch_graph(REAL(cuGraphUpload_ptsz), *made, parameters->hUploadStream, true, false)
                           : launch_graph(REAL(cuGraphUpload), *made, parameters->hUploadStream, false, false);
    if (result != CUDA_SUCCESS) {
        body_cuGraphExecDestroy(REAL(cuGraphExecDestroy), *made);
        *made = NULL;
        parameters->result_out = CUDA_GRAPH_INSTANTIATE_ERROR; /* the function's result says which */
    }
    return result;
}

HOOK(cuGraphInstantiateWithParams, (CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters),
     (made, from, parameters))
{ return instantiate_and_upload(real, made, from, parameters, false); }
HOOK(cuGraphInstantiateWithParams_ptsz, (CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters),
     (made, from, parameters))
{ return instantiate_and_upload(real, made, from, parameters, true); }

void forget_graphs(void)
{
    for (unsigned i = 0; i < MOST_GPU_ORDINALS; i++)
        reserved[i] = 0;
}
