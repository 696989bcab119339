/* The GPUs of one machine, as every process that loads the fake driver shares them.
 *
 * State: one file, mapped by all processes: $FAKE_GPU_STATE, else /var/lib/fake-gpu/state. A container needs its directory mounted
 * writable at the same path: it is to the fake what the kernel module is to a real driver.
 *
 * Settings: lines "NAME VALUE" in the file `config` next to the state, read by each process when it first asks; an environment
 * variable FAKE_GPU_<NAME in capitals> goes before.
 *
 *   gpus            8             how many the machine has
 *   memory_mib      24576         of each
 *   numa_node       1             the host's NUMA node that the memory of the first GPU is, and the next ones of the others', as with
 *                                 GH200 in NUMA mode; 0: none, as with a GPU on PCIe
 *   unified         0             1: the GPU has the host's memory, and NVML says nothing of it, as of GB10
 *   context_mib     300           what a context takes
 *   context_unseen_kib  0         what one takes of the GPU besides, which is in no process's count: 2867 on an H200
 *   module_mib      2             what a module takes
 *   kernel_us       1000          how long a kernel keeps its GPU busy, whatever its grid
 *   block_us        0             not 0: how long one of its blocks keeps its place; a kernel takes as many waves as its grid needs
 *   slice_us        0             not 0: contexts of a GPU take turns of so long (slices.c); else all launches run one after the
 *                                 other. With it alone:
 *   switch_us       130             what a context that waited for its turn loses
 *   launch_us       3.5             what a launch takes on the host
 *   wake_us         2               what who waits for the GPU takes to go on, after it has finished
 *   event_us        1               what an event takes in its stream
 *   boost_percent   0               how much faster kernels are while the GPU is idle for three tenths of the time
 *   rows            each            `whole`: a sample has the process that computed last, and the percents of the whole GPU, as an
 *                                   H200's driver has it (580.159.04, measured); `each`: every process's own
 *   sm_count        132           multiprocessors of each, with places for 8 blocks
 *   event_percent   100           what two events say of the time between them: concurrent streams make them wrong
 *   sample_ms       1000          what utilisation is measured over: up to a second, by NVML's reference
 *   sample_every_ms 0             not 0: a sample comes once in so long, and none of a process that was idle; else one of each
 *                                 process every tenth of a second
 *   utilization                   `none`: the driver has no samples of processes; `denied`: the caller may not see them
 *   lag_ms          0             how old what utilisation shows is
 *   driver_version  580.95.05
 *   cuda_version    13000         the newest CUDA of the driver
 *   name            NVIDIA H100 80GB HBM3
 *   uuid_prefix     GPU-00000000-0000-4000-8000-    followed by the minor number in 12 hexadecimal digits
 *   pids            host          what NVML says of processes, machine.c, pid_seen_by_caller
 *   instances                     MiB of memory of each MIG instance into which GPU 0 is divided, by commas; empty: it is not. Each
 *                                 instance has time and memory of its own, and NVML shows no utilisation of it, nor of GPU 0
 *   devices                       minor numbers that this process sees, by commas, or `all`; without it those of which /dev
 *                                 has a nvidia<minor>, and where there is none, all. 0:1 is instance 1 of GPU 0 alone. As long as
 *                                 a process sees an instance, CUDA shows it that one device, unless it names a GPU by UUID
 *   log             0             1: every call of the driver on standard error
 *   dies_in                       the name of a call in which the process is killed, as the kernel's OOM killer may
 *   lacks                         the name of a function that cuGetProcAddress does not find
 *   stops_in                      the name of a call in which the process stops, the first time, until it gets SIGCONT
 *
 * A process that dies leaves nothing: it holds a lock on one byte of the state file for its entry, which the kernel releases,
 * and who next looks at the entry clears it. This works between PID namespaces, and the kernel also translates the holder's PID
 * for who asks. What a container's process cannot know is its PID and cgroup on the host; a real kernel module knows them. It asks
 * host_view.py through the socket `host-view` next to the state; without it, its own view of itself is taken.
 */
#ifndef FAKE_MACHINE_H
#define FAKE_MACHINE_H

#include <stdint.h>

/* What is said of a minor number below holds for an instance, too: that of GPU 0 with number n is FIRST_INSTANCE + n. */
enum { FIRST_INSTANCE = 8, MAX_INSTANCES = 7 };
enum { MAX_GPUS = 16, MAX_PROCESSES = 1024, MAX_LIMITS = 256, MAX_EXPORTED = 64, TEXT = 256 };

typedef enum { PIDS_HOST, PIDS_OPEN, PIDS_OPEN570 } pid_kind;

typedef struct {
    unsigned gpus, instances;
    uint64_t instance_memory[MAX_INSTANCES];
    uint64_t memory, context, context_unseen, module, kernel_ns, block_ns, sm_count, sample_ns, sample_every_ns, lag_ns, event_percent;
    uint64_t slice_ns, switch_ns, launch_ns, wake_ns, event_ns, boost_percent;
    int shows_whole;
    char driver_version[TEXT], name[TEXT], uuid_prefix[TEXT], devices[TEXT], dies_in[TEXT], lacks[TEXT], stops_in[TEXT], utilization[TEXT];
    int cuda_version, logs, numa_node, is_unified;
    pid_kind pids;
} machine_config;

/* One process on one GPU, as NVML shows it to the caller. PID 0: not to be shown in that list. */
typedef struct {
    int list_pid, sample_pid;
    uint64_t memory;
    unsigned percent; /* of the sampling period */
} process_view;

const machine_config *config(void);
void log_call(const char *name);

unsigned visible_gpus(unsigned minors[MAX_GPUS]); /* their minor numbers, ascending */
unsigned visible_instances(unsigned minors[MAX_GPUS]);
int is_instance(unsigned minor);
int has_mig(unsigned minor); /* an instance, or a GPU that is divided */
unsigned parent_of(unsigned minor); /* its own, or the one that contains the instance */
uint64_t memory_at(unsigned minor);
void gpu_uuid(unsigned minor, char text[96]);
void gpu_bus_id(unsigned minor, char text[32]); /* 00000000:10:00.0 */

/* All of these take the GPU's minor number. Memory is taken for the calling process; 0 where there is none left for it. */
int take_memory(unsigned minor, uint64_t bytes, int is_managed);
void give_memory(unsigned minor, uint64_t bytes, int is_managed);
int export_memory(unsigned minor, uint64_t bytes); /* a number for other processes, or -1 */
int import_memory(int id);                         /* this process keeps it when its owner has ended; 0: there is none */
int open_context(unsigned minor);
void close_context(unsigned minor);
void memory_of_caller(unsigned minor, uint64_t *total, uint64_t *used); /* as the caller's cgroup may see it */
void memory_of_gpu(unsigned minor, uint64_t *total, uint64_t *used);

/* Keeps the GPU busy for `duration_ns` behind all that was given to it before; the time (now_ns) at which it will be done. */
uint64_t run_on_gpu(unsigned minor, uint64_t duration_ns);
uint64_t now_ns(void);
void sleep_until(uint64_t time_ns);

/* With slice_us, in place of run_on_gpu: a launch returns once its stream has room for it. Width is in thousandths of the GPU; a kernel
   that is timed ends so long after its begin, though it has not had the GPU all the while. */
typedef struct { uint32_t index, record; uint64_t done_at; int ordinal; const void *in; unsigned generation; } gpu_event;
void push_kernel(unsigned minor, unsigned lane, uint64_t duration_ns, unsigned width, int is_timed);
void push_event(unsigned minor, unsigned lane, gpu_event *event);
int is_event_done(unsigned minor, gpu_event *event); /* then it has its time */
enum { ALL_LANES = -1 };
void wait_for_lane(unsigned minor, int lane);

/* Samples that show the whole GPU, up to `most`, the newest first; `at` as now_ns has it, the PID as the caller is to see it. */
typedef struct { uint64_t at; int pid; unsigned percent; } whole_row;
unsigned list_whole_rows(unsigned minor, whole_row *rows, unsigned most);

/* Limits of the memory that the processes of a cgroup and of those below it have together, from driver 615 on. A cgroup is named by
   its directory, wherever the caller has its hierarchy mounted: a process is in it where the directory's path ends like the
   process's own cgroup, or like one above that. One that is removed takes its limit with it. Managed memory does not count, as
   NVIDIA's guide says. */
enum { FIRST_DRIVER_WITH_LIMITS = 615 };
typedef struct { uint64_t soft, hard, used; } memory_limit;
int set_memory_limit(unsigned minor, const char *directory, uint64_t soft, uint64_t hard); /* 0: too many, or too long a name */
int get_memory_limit(unsigned minor, const char *directory, memory_limit *limit);          /* 0: it has none */

unsigned list_processes(unsigned minor, process_view views[MAX_PROCESSES]);

#endif
