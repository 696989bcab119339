/* slices.c's state, in machine.c's file. */
#ifndef FAKE_SLICES_H
#define FAKE_SLICES_H

#include <stdint.h>

enum { CONTEXTS = 16, LANES = 9, LANE_ITEMS = 1024, EVENTS = 2048, METER_SLOTS = 1200, SAMPLES = 16 };
#define METER_NS 50000000ull /* a minute in all */
#define NOT_BEGUN UINT64_MAX

typedef struct {
    uint64_t left;
    uint64_t ends;  /* 0: when `left` is computed; else at that time, whoever has had the GPU meanwhile, or NOT_BEGUN */
    uint32_t width; /* thousandths of the GPU; 0: an event */
    uint32_t event, record;
} sim_item;
typedef struct {
    uint32_t head, tail;
    uint64_t left;
    uint64_t ready_at; /* when the first item came to be the first */
    sim_item items[LANE_ITEMS];
} sim_lane;
typedef struct {
    uint32_t record; /* counts cuEventRecord */
    uint64_t done_at; /* 0: not yet */
} sim_event;
typedef struct {
    int is_used, process, pid; /* process -1: it has ended */
    int waits;
    uint64_t began;
    uint32_t next_event;
    sim_lane lanes[LANES];
    sim_event events[EVENTS];
    uint64_t net[METER_SLOTS], gross[METER_SLOTS]; /* what it computed; with what it lost at the beginning of its turns */
} sim_context;
/* What NVML shows with the setting rows `whole`. */
typedef struct {
    uint64_t at, busy; /* of all time */
    int process;       /* -1: none has computed, or it has ended */
} sim_sample;
typedef struct {
    uint64_t began, now, switch_left, turn_left;
    int current, last;
    double duty;
    uint64_t busy;
    uint64_t samples_taken; /* the number of the next one; its time is sim_sample_time of it */
    sim_sample samples[SAMPLES];
    sim_context contexts[CONTEXTS];
} sim_gpu;

typedef void note_fn(int process, uint64_t from, uint64_t until);

void sim_advance(sim_gpu *gpu, uint64_t now, note_fn *note_use);
sim_context *sim_context_of(sim_gpu *gpu, int process, int pid, uint64_t now);
void sim_forget(sim_gpu *gpu, int process);
int sim_push(sim_gpu *gpu, sim_lane *lane, sim_item item); /* 0: the lane is full */
uint64_t sim_sample_time(uint64_t number);

#endif
