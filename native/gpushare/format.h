/* The two files that the agent and the library share: what lies where. Written by this machine for this machine, so in its byte
 * order; every number is aligned, so that each is read and written whole.
 *
 * gpushare.config: the agent writes, the library reads. `usage`: every process of the container writes, the agent reads and believes
 * nothing of it. gpushare_agent/agent/isolation/gpushare/format.py has the same offsets, and a test compares them.
 */
#ifndef GPUSHARE_FORMAT_H
#define GPUSHARE_FORMAT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

/* ---- gpushare.config ---- */

#define CONFIG_MAGIC "GPSH"
enum { CONFIG_LAYOUT = 1, CONFIG_BYTES = 4096, MOST_GPUS = 16 };
enum config_flags { LIMITS_MEMORY = 1, LIMITS_CORES = 2, HAS_CEILING = 4 };

/* Read under its sequence: odd while the agent writes, another one behind it than before. */
struct config_gpu {
    uint32_t sequence, flags;
    char uuid[48]; /* GPU-… or MIG-…, NUL padded */
    uint64_t memory; /* bytes */
    uint32_t cores;   /* hundredths of a percent of the GPU's time */
    uint32_t ceiling; /* the same, of HAS_CEILING: while nobody else computes */
    /* What the agent last saw in the driver of this container's processes. Times are of CLOCK_MONOTONIC, all in ns. */
    uint64_t observed_at; /* 0: nothing yet */
    uint64_t observed_bytes;
    /* Counted on from one time to another, so whoever reads seldom loses nothing. The count begins again where the agent does not know
       what was between; `busy_until` is 0 where the driver does not say how busy who keeps the GPU. */
    uint64_t busy_since, busy_until;
    uint64_t busy_ns;   /* in samples that name a process of this container */
    uint64_t others_ns; /* in those that name another one: together the whole GPU's, whichever process a sample names */
    /* What the agent sees in the others' `usage`: of none is more believed than its share, or its ceiling. */
    uint32_t published_at; /* milliseconds, of CLOCK_MONOTONIC, wrapping; 0: nothing yet */
    uint16_t companions;   /* others that launched something in the last second, or still pay for it */
    uint16_t full;         /* hundredths of a percent: how much of the loss at the beginning of its turns this container pays */
};

struct config {
    char magic[4];
    uint32_t layout, size, gpus;
    char boot_id[36]; /* of the kernel, when the file was made: for the agent */
    uint8_t reserved[76];
    char pod_uid[48];
    char container[64];
    uint16_t between_us[MOST_GPUS]; /* of each GPU, under its sequence: how long the companions compute between two turns */
    uint32_t context_kib[MOST_GPUS]; /* of each GPU, under its sequence: what a context takes there; 0: not known */
    uint8_t reserved_too[176];
    struct config_gpu gpu[MOST_GPUS];
    uint8_t rest[CONFIG_BYTES - 512 - MOST_GPUS * 128];
};

static_assert(sizeof(struct config_gpu) == 128, "a GPU's entry");
static_assert(offsetof(struct config_gpu, observed_at) == 72, "aligned");
static_assert(offsetof(struct config, pod_uid) == 128 && offsetof(struct config, context_kib) == 272 &&
                  offsetof(struct config, gpu) == 512,
              "the fixed part of gpushare.config ends before the GPUs");
static_assert(sizeof(struct config) == CONFIG_BYTES, "one page");

/* ---- turns of contexts, as the library and the agent take them ---- */

enum {
    TURN_NS = 2000000,  /* of a context, where another one has work: NVIDIA's default time slice */
    CHANGE_NS = 130000, /* what a context loses at the beginning of its turn (H200, measured) */
};

/* ---- usage ---- */

#define USAGE_MAGIC "GPSU"
enum { USAGE_LAYOUT = 1, USAGE_BYTES = 131072, MOST_SLOTS = 256 };
/* Process i of the container holds a write lock (F_OFD_SETLK) on this byte of the file, behind its end: the kernel releases it with
   the process, however that ends, and it shows between PID namespaces. */
enum { FIRST_LOCKED_BYTE = 1 << 20 };
enum { WINDOW_BITS = 16, WINDOW_UNIT_BITS = 12, UNSEEN_BYTES = 1 << 16 };

enum kind { LINEAR, MANAGED, VIRTUAL, ARRAY, POOL, GRAPH, CONTEXT, KINDS };

struct usage_gpu {
    /* Memory */
    uint64_t changed_at;  /* when a process last took or gave memory */
    int64_t unattributed; /* what the driver has of the container's processes and no slot: modules, fragments; may be negative */
    uint64_t refused;     /* allocations */
    /* Compute: nanoseconds of GPU: what launches were expected to take, put right when events say what they took */
    int64_t tokens;  /* what may still be launched; negative: a debt, of launches that wait, too */
    uint64_t earned; /* all that was ever refilled: by it a launch knows when its turn has come */
    uint64_t refilled_at;
    uint64_t launched; /* what all have paid so far; less, too, where it was too much */
    uint64_t launches;
    uint64_t throttled; /* nanoseconds that launches have waited */
    /* Feedback, written by who takes the sample: sampled_at goes from one busy_until to another by compare-and-swap */
    uint64_t sampled_at, busy_at_sample, others_at_sample, launched_at_sample;
    uint64_t alone_since;               /* 0: others compute */
    double cost_sum, late_sum, delayed; /* nanoseconds paid while alone, forgetting; the same LATEST_S later; what is between */
    double busy_sum;                    /* nanoseconds the GPU was busy meanwhile */
    double scale;                       /* paid nanoseconds for each real one; 0: not known */
    /* Memory again (region.c, "what the agent observes"). The lower WINDOW_BITS of the first two are the window's number. */
    uint64_t window;     /* the most that was held since it began, in units of 1 << WINDOW_UNIT_BITS bytes */
    uint64_t window_at;  /* when it had begun; of another number than `window`: it has not */
    uint64_t ended_at;   /* when memory of a process that had ended was last taken back */
    uint64_t has_unseen; /* 1: a slot's `unseen` is or was not 0 */
    uint8_t reserved[8];
    uint64_t launched_long; /* of `launched`, what was for launches of several turns */
    uint64_t turns;         /* that all launches have had */
    uint64_t present_long;  /* how long those of several turns were on the GPU, with the others' turns */
    uint8_t rest[40];
};

struct usage_slot {
    int32_t pid; /* in the process's PID namespace; 0: free */
    uint32_t raises; /* of `started_at` the lower half: its library raises `window`, as older ones do not */
    uint64_t started_at; /* CLOCK_MONOTONIC, ns */
    uint64_t held[MOST_GPUS];    /* bytes */
    uint64_t pending[MOST_GPUS]; /* asked for, not yet taken */
    uint64_t of_kind[KINDS];     /* of all GPUs, for display */
    uint64_t unhooked;           /* functions that the program asked for by a pointer that the library does not know */
    uint32_t unseen[MOST_GPUS]; /* of `held`, in UNSEEN_BYTES: managed memory, which NVML counts for no process (H200, measured) */
    uint8_t rest[48];
};

struct usage {
    char magic[4];
    uint32_t layout, size, slots;
    uint32_t used_slots; /* so many of them, from the first one on, have ever been used */
    uint8_t reserved[492];
    struct usage_gpu gpu[MOST_GPUS];
    struct usage_slot slot[MOST_SLOTS];
};

static_assert(sizeof(struct usage_gpu) == 256 && sizeof(struct usage_slot) == 448, "whole cache lines");
static_assert(offsetof(struct usage, gpu) == 512 && sizeof(struct usage) <= USAGE_BYTES, "it fits");

#endif
