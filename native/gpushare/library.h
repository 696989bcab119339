/* What the files of libgpushare say to each other.
 *
 * The library is preloaded into every process of a container. It defines functions of the CUDA driver under their own names, its
 * hooks, and sees to it that a program which asks for one of them gets the hook (resolve.c). A hook counts (memory.c, graph.c), or
 * waits (limit.c), or answers in the driver's place (view.c), and calls the driver. Limits come from the agent's file, use is counted
 * in a file that all processes of the container share (region.c). Nothing happens before a program's first call of the driver.
 */
#ifndef GPUSHARE_LIBRARY_H
#define GPUSHARE_LIBRARY_H

#define __CUDA_API_VERSION_INTERNAL /* every function under its own name: cuMemAlloc is the one of CUDA 2, with 32 bits */
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Names that the header has under another spelling alone. */
extern __typeof__(cuGetProcAddress_v2) cuGetProcAddress_v2_ptsz;

#include "format.h"
#include "table.h" /* made by generate.py: SLOT_cuInit, … */

/* ---- resolve.c: the driver's own functions ---- */

enum { OPENS = -1, FINDS = -2 };
struct table_entry {
    const char *name, *base; /* cuMemAlloc_v2; cuMemAlloc, as cuGetProcAddress calls it */
    int since;               /* 3020: CUDA 3.2; or what a function of the loader does, which has no base and is not in `table` */
    bool is_per_thread;      /* …_ptsz */
    void *hook;              /* NULL: only called */
};
extern const struct table_entry table[SLOTS]; /* sorted by name */
extern void *real_functions[SLOTS];

/* The driver's function of that name. One that this driver lacks answers CUDA_ERROR_NOT_SUPPORTED. */
#define REAL(name) ((__typeof__(name) *)real_functions[SLOT_##name])
bool has_real(unsigned slot);

/* Whether the calling thread is not within a hook already: what the driver calls of itself, and what we call, passes. `frame` is in the
   hook's own, as leave_hook answers. */
bool enter_hook(uintptr_t *frame);
uintptr_t *leave_hook(void);
bool enter_nvml_hook(uintptr_t *frame);
bool is_in_hook(void);
int compare(const char *one, const char *other); /* strcmp, but none of a program's */
void *find_in_libc(const char *name, _Atomic(void *) *known);
const struct table_entry *hooked_entry(const char *name); /* NULL: we have none of that name, or are within a hook */
void *loaded_function(const struct table_entry *entry);

#if defined(__has_attribute)
#if __has_attribute(musttail)
#define TAIL_CALL __attribute__((musttail)) return
#endif
#endif
#ifndef TAIL_CALL
#define TAIL_CALL return /* gcc makes a tail call of it from -O2 on */
#endif

#define EXPORTED __attribute__((visibility("default")))
#define UNPACK(...) __VA_ARGS__
/* HOOK(cuMemFree_v2, (CUdeviceptr address), (address)) { … } defines the hook of that name. In its body `real` is the driver's
   function. HOOK_ALSO gives the same body to another name, such as the …_ptsz of one. */
#define HOOK_EXPORT(name, body, enter, result_type, parameters, arguments)                      \
    static_assert(IS_HOOK_##name >= 0, "hooks.in has it as a hook");                            \
    EXPORTED result_type name parameters                                                        \
    {                                                                                           \
        uintptr_t frame;                                                                        \
        if (!enter(&frame))                                                                     \
            return REAL(name) arguments;                                                        \
        result_type result = body(REAL(name), UNPACK arguments);                                \
        leave_hook();                                                                           \
        return result;                                                                          \
    }                                                                                           \
    extern __typeof__(name) gpushare_##name __attribute__((alias(#name), visibility("hidden")))
#define HOOK(name, parameters, arguments)                                        \
    static CUresult body_##name(__typeof__(name) *real, UNPACK parameters);      \
    HOOK_EXPORT(name, body_##name, enter_hook, CUresult, parameters, arguments); \
    static CUresult body_##name(__typeof__(name) *real, UNPACK parameters)
#define HOOK_ALSO(other, name, parameters, arguments) HOOK_EXPORT(other, body_##name, enter_hook, CUresult, parameters, arguments)

bool is_behind_driver(void); /* which the program's LD_PRELOAD has put before this library */

/* ---- deepbind.c ---- */

const struct table_entry *loader_named(const char *name);
void *loader_function(const struct table_entry *entry); /* libc's own */

/* ---- region.c: limits and use ---- */

/* Locks are held without cancellation: a thread that ended there would leave them locked for ever. So is what waits in a call of ours. */
void hold(pthread_mutex_t *guard);
void release(pthread_mutex_t *guard);
void forbid_cancel(void);
void allow_cancel(void);

/* A GPU's limits as they are now. */
struct limits {
    bool limits_memory, limits_cores, has_ceiling, is_instance;
    uint64_t memory, context; /* what a context takes; 0: not known */
    double cores, ceiling, between_ns;
    struct config_gpu seen;
};

/* Opens both files, once in a process. Where one is missing or of another layout all memory is refused; false then. */
bool open_region(void);
int gpu_named(const char *uuid); /* without GPU- or MIG- before it: its index in both files, or -1 */
int only_instance(void); /* the one MIG instance of the container; -1: it has none, or several */
void read_limits(int gpu, struct limits *limits);
struct usage_gpu *usage_of(int gpu);
struct usage_slot *own_slot(void); /* NULL: none is free, or no region */

/* Takes memory for this process if the container has it left. give_bytes gives it back. */
bool take_bytes(int gpu, enum kind kind, uint64_t bytes);
void give_bytes(int gpu, enum kind kind, uint64_t bytes);
/* Memory of a context that was taken, once the driver has made it, for which it needs longer than an observation is waited for: until
   then it counts as asked for, so nobody concludes from what is observed that it is not there. */
void hold_context(int gpu, uint64_t bytes);
/* What the driver reported afterwards, so it is not refused. */
void charge_bytes(int gpu, enum kind kind, uint64_t bytes);
uint64_t held_bytes(int gpu, const struct limits *limits); /* by all processes, with what is attributed to none */
void reclaim_dead(void);
uint64_t now_ns(void);

/* ---- start.c ---- */

CUdevice current_device(void); /* of the current context; -1: there is none */
bool has_several_devices(void);
/* Each context has its own of these; a program cannot make one. */
static inline bool is_of_context(CUstream stream)
{ return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }
CUdevice device_of_stream(CUstream stream); /* whichever context is current; -1: there is none for it */
int gpu_of_device(CUdevice device); /* its index in both files; -1: the agent does not know it */
void say_once(int *said, const char *format, ...) __attribute__((format(printf, 2, 3)));
void watch_forks(void);
void notice_fork(void); /* in a child: forgets what was the parent's */
void register_process(void); /* with the node's agent, once it has a slot */

/* ---- memory.c ---- */

/* What the driver has given to this process. Values of different classes may be the same number. */
enum class { ADDRESS, HANDLE, MAPPING, OBJECT, EXECUTABLE, NODES, BOUND, USE, LIMIT };
struct allocation {
    uint64_t value;
    enum class class;
    enum kind kind;
    int gpu; /* of a graph: -1 until it is launched */
    unsigned references;
    uint64_t bytes;
    uint64_t handle; /* of a mapping and of what is bound; of a limit: how high it was at first */
    uint64_t devices; /* of a graph: a bit for each of whose memory its nodes take */
    CUcontext context; /* whose end is that of the memory, or NULL */
    struct allocation *next;
};
bool remember(const struct allocation *allocation);
bool look_up(enum class class, uint64_t value, struct allocation *found);
bool take_out(enum class class, uint64_t value, struct allocation *found);
void put_back(struct allocation taken_out); /* the driver has not freed it */
void amend(const struct allocation *changed); /* the one of its class and value, if that is known still */

/* What dead processes had, and what pools and graphs keep unused. It costs system calls and the driver's locks, and changes what
   pools and graphs have: so only where there is too little, and what they lack is then to be asked again. */
bool free_unused(int gpu, CUdevice device);
bool reserve_bytes(int gpu, CUdevice device, enum kind kind, uint64_t bytes); /* as take_bytes, and once more after free_unused */
/* The GPU that memory of this location is taken from; -1: the host's. */
CUdevice device_at(CUmemLocationType type, int id);
bool is_capturing(CUstream stream, bool is_per_thread);
/* While a stream is captured, a call that waits or allocates would spoil the capture, unless the thread says that it means it. */
CUstreamCaptureMode relax_capture(void);
void restore_capture(CUstreamCaptureMode mode);
enum { EVERY_GPU = -2 };
/* What pools have now: they give back when the driver likes. Without pools it costs nothing. */
void read_pools(int gpu, bool trims);
void read_freed(void); /* of every GPU: after the program has waited, which is when pools give back */
extern pthread_mutex_t reserves_guard; /* of what pools and graphs have reserved */
void forget_memory(void);

/* ---- graph.c ---- */

void read_graph_memory(CUdevice device, bool trims);
void forget_graphs(void);

/* ---- limit.c ---- */

/* What is launched. A kind is the same function with about as many blocks and as many threads. */
struct launch {
    const void *what;
    uint64_t blocks, threads;
    CUstream stream;
    bool is_per_thread, is_unmeasured;
};
struct measurement {
    struct cost *cost;
    struct span *span; /* NULL: what it takes is not measured */
    int gpu;
    uint64_t paid, now;
    bool is_contended, has_companions, is_late;
};
/* Before it: pays what its kind took, and waits until the container's share of the GPU allows it. After it: counts it in a span, and
   closes that where it is due. */
void begin_launch(const struct launch *launch, struct measurement *measurement);
void end_launch(const struct measurement *measurement, bool is_launched);
/* Before the program waits for what it has launched in that stream, and after it. */
void begin_wait(CUstream stream, bool is_per_thread);
void end_wait(uint64_t ns);
void forget_launches(void);
void forget_launches_of(CUcontext context); /* which has ended */

#endif
